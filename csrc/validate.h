// The contract of the C++ API, as far as the host can check it without reading device memory.
#pragma once

#include "flashattn/params.h"

namespace flashattn {

// False when out has no element: then nothing is launched and no pointer is looked at.
bool has_work(FlashFwdParams const& params);

// True when new tokens have to be written, also where no query attends to them.
bool appends(FlashSplitkvParams const& params);

// Throws InvalidArgument with the argument's name, what it got and what is allowed.
void validate(FlashFwdParams const& params);
void validate(FlashSplitkvParams const& params);
void validate(FlashCombineParams const& params);

}  // namespace flashattn
