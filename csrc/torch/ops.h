// The operators by file: `define_x` adds their schemas to the library, `implement_x` their
// functions, which serve the CPU and CUDA alike.
#pragma once

#include <torch/csrc/stable/library.h>

namespace flashattn {

using Library = torch::stable::detail::StableLibrary;

void define_fwd(Library& m);
void implement_fwd(Library& m);

void define_splitkv(Library& m);
void implement_splitkv(Library& m);

void define_combine(Library& m);
void implement_combine(Library& m);

}  // namespace flashattn
