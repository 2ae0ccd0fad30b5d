// The operators of `torch.ops.flashattn_ext`, on torch's stable ABI: no Python and no ATen, so that
// one binary loads with every torch from 2.10 on, with or without CUDA.
//
// The files behind ops.h check what needs a tensor; validate() checks the rest. The Python layer,
// which most callers come through, explains a wrong argument in more words.
#include <torch/csrc/stable/library.h>

#include "torch/ops.h"

namespace {

void implement_all(flashattn::Library& m) {
  flashattn::implement_fwd(m);
  flashattn::implement_splitkv(m);
  flashattn::implement_combine(m);
}

}  // namespace

STABLE_TORCH_LIBRARY(flashattn_ext, m) {
  flashattn::define_fwd(m);
  flashattn::define_splitkv(m);
  flashattn::define_combine(m);
}

STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CPU, m) { implement_all(m); }
STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CUDA, m) { implement_all(m); }
