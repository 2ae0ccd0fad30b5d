// The state of a softmax that is computed block by block, and how it ends. After
// Milakov & Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), as used by
// FlashAttention (arXiv:2205.14135).
#pragma once

#include <cmath>

#include "core/fast_math.h"
#include "core/macros.h"

namespace flashattn {

// A row starts at maximum -inf and sum 0. While no key has been visible the maximum stays -inf;
// subtracting 0 in its place keeps (-inf) - (-inf) from making a NaN.
FA_HD float subtrahend(float maximum) { return maximum == -kInfinity ? 0.f : maximum; }

// The maximum to go on with after a block whose own maximum is `block_maximum`. Any number near the
// true maximum serves as well, since it cancels in the end; so a row keeps the one it has until
// its exponentials could exceed 2^8, and its accumulator then needs no rescaling. That is safe even
// where probabilities are rounded to fp16 (largest number 65504). After FlashAttention-4's
// conditional rescaling.
constexpr float kKeepMaximumLog2 = 8.f;

FA_HD float next_maximum(float old_maximum, float block_maximum, float exponent_scale_log2) {
  bool const keep = (block_maximum - old_maximum) * exponent_scale_log2 <= kKeepMaximumLog2;
  return keep ? old_maximum : block_maximum;
}

// What old accumulators are multiplied with when the maximum grows. `exponent_scale_log2` turns a
// score into an exponent of 2.
FA_HD float rescale_factor(float old_maximum, float new_maximum, float exponent_scale_log2) {
  return exp2_fast((old_maximum - subtrahend(new_maximum)) * exponent_scale_log2);
}

struct SoftmaxResult {
  float factor;  // out = accumulator * factor
  float lse;     // natural logarithm of the sum of exponentials
};

// `maximum` and `sum` of a finished row; `sink` is one more logit without a value, -inf for none.
// A row without keys has out = 0 and lse = sink.
FA_HD SoftmaxResult finish_softmax(float maximum, float sum, float exponent_scale, float sink) {
  if (sum == 0.f) { return {0.f, sink}; }
  float const top = maximum * exponent_scale;
  if (sink == -kInfinity) { return {reciprocal_fast(sum), top + ::logf(sum)}; }
  float const shared = top > sink ? top : sink;
  float const keys = exp2_fast((top - shared) * kLog2e);
  float const total = sum * keys + exp2_fast((sink - shared) * kLog2e);
  return {keys * reciprocal_fast(total), shared + ::logf(total)};
}

}  // namespace flashattn
