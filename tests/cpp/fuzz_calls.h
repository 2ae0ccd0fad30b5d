// Calls of the C++ API out of a fuzzer's bytes.
//
// `make` sets parameters whose pointers are null, misaligned, or an address that nobody may touch.
// `equip` exchanges those addresses for memory that holds exactly what the parameters describe; it
// returns false where that is more than a fuzzer should compute.
#pragma once

#include "flashattn/flashattn.h"
#include "fuzz_input.h"
#include "fuzz_memory.h"

namespace fuzz {

void make(Bytes& bytes, flashattn::FlashFwdParams& params);
void make(Bytes& bytes, flashattn::FlashSplitkvParams& params);
void make(Bytes& bytes, flashattn::FlashCombineParams& params);

bool equip(Memory& memory, flashattn::FlashFwdParams& params);
bool equip(Memory& memory, flashattn::FlashSplitkvParams& params);
bool equip(Memory& memory, flashattn::FlashCombineParams& params);

}  // namespace fuzz
