// What the parts of flashattn_ext._host share: a call without tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "flashattn/params.h"

namespace flashattn {

// The sizes of a call, and the lengths that would lie on the device.
struct PlannedCall {
  FlashSplitkvParams params;
  std::vector<int> cu_seqlens_q;   // empty: dense
  std::vector<int> cache_seqlens;  // empty: no cache
  std::vector<int> seqused_k;      // empty: all keys of all sequences; only without a cache

  PlannedCall() = default;
  PlannedCall(PlannedCall const&) = delete;  // params points into the vectors
};

void bind_tile_parts(pybind11::module_& m);

}  // namespace flashattn
