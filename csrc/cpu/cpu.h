// The CPU backend: the contract of the CUDA kernels on host pointers, in fp16, bf16 and fp32.
//
// How to read it: flash_fwd.cpp is the algorithm (tiles, sequences, key blocks) and calls the same
// csrc/core functions as the GPU kernels. simd/ is the arithmetic of one step, compiled once for
// each instruction set (kernels_*.cpp) and chosen once at run time (kernels.cpp).
//
// Build: plain C++20 sources without per-file flags (each variant sets its instruction set with a
// target pragma) and the system's thread library.
#pragma once

#include <string>

#include "flashattn/params.h"

namespace flashattn::cpu {

// Expects parameters that passed validate(). Blocks until `out` and `lse` are written. May be
// called from any number of threads at once. The result's bits do not depend on the number of
// threads, nor on which other sequences share the batch.
void flash_fwd(FlashFwdParams const& params);

// The same over a cache, after appending new tokens to it. Scratch memory is allocated inside; the
// workspace of the parameters is not used. Rows whose work is not split, or split in parts of a
// fixed size, have bits that do not depend on the batch, the capacity or the layout of the pages.
void flash_splitkv_fwd(FlashSplitkvParams const& params);

// Merges partial results in ascending order.
void flash_combine(FlashCombineParams const& params);

// The first step of flash_splitkv_fwd: writes the new keys and values into the cache, and the
// rotated queries to `rotated_q` (query rows, heads, head_dim) unless that is null.
void append_kv(FlashSplitkvParams const& params, void* rotated_q);

// The instruction set in use: "avx512bf16", "avx512", "avx2" or "baseline". The best that the
// machine has, unless FLASHATTN_EXT_CPU_SIMD in the environment names another one; Unsupported when
// the machine lacks that.
std::string simd_name();

// Threads that one call may use, the caller included. At first FLASHATTN_EXT_NUM_THREADS, else
// OMP_NUM_THREADS, else the cores this process may run on. Setting it to 0 returns to that.
int num_threads();
void set_num_threads(int count);

}  // namespace flashattn::cpu
