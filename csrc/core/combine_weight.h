// How much a partial result counts.
#pragma once

#include "core/online_softmax.h"

namespace flashattn {

// An empty part has lse -inf; other libraries write +inf.
FA_HD bool is_empty_part(float lse) { return lse == -kInfinity || lse == kInfinity; }

// e^(lse - maximum), 0 for an empty part. `maximum` is that of the parts that are not empty.
FA_HD float part_weight(float lse, float maximum) {
  return is_empty_part(lse) ? 0.f : exp2_fast((lse - maximum) * kLog2e);
}

}  // namespace flashattn
