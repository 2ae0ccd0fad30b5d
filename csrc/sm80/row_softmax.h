// The online softmax of the rows that a thread holds, in registers. A row is spread over the four
// neighbouring threads of a quad.
#pragma once

#include <cute/tensor.hpp>

#include "core/online_softmax.h"

namespace flashattn::sm80 {

CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Of the columns that the threads of a quad hold.
template <class Scores>
CUTE_DEVICE float row_maximum(Scores const& scores, int row) {
  float result = scores(row, 0);
  CUTE_UNROLL
  for (int col = 1; col < cute::size<1>(scores); ++col) { result = fmaxf(result, scores(row, col)); }
  return quad_max(result);
}

template <int kRows>
class RowSoftmax {
 public:
  CUTE_DEVICE explicit RowSoftmax(float exponent_scale)
      : exponent_scale_(exponent_scale), scale_log2_(exponent_scale * kLog2e) {
    reset();
  }

  CUTE_DEVICE void reset() {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      maximum_[row] = -kInfinity;
      sum_[row] = 0.f;
    }
  }

  // Turns a block of scores into probabilities relative to the running maximum, and rescales what
  // the older blocks left in `acc` to it. Both are (row, column) views; block_maximum(row) is that of all scores of a
  // row in the block.
  template <class Scores, class Acc, class Maximum>
  CUTE_DEVICE void update(Scores& scores, Acc& acc, Maximum const& block_maximum) {
    static_assert(decltype(cute::size<0>(scores))::value == kRows);
    float factors[kRows];
    bool rescale = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const old_maximum = maximum_[row];
      maximum_[row] = next_maximum(old_maximum, block_maximum(row), scale_log2_);
      factors[row] = rescale_factor(old_maximum, maximum_[row], scale_log2_);
      rescale |= maximum_[row] != old_maximum;
    }
    if (__any_sync(0xffffffff, rescale)) { rescale_rows(acc, factors); }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) { sum_[row] += exponentiate(scores, row); }
  }

  // Once, after the last block: the state of each row, for whoever finishes it. `slots` (row) lie in shared
  // memory; `coords` are the coordinates of the accumulator.
  template <class Slots, class Coords>
  CUTE_DEVICE void publish(Slots& slots, Coords const& coords) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const sum = quad_sum(sum_[i]);
      if (threadIdx.x % 4 == 0) { slots[cute::get<0>(coords(i, 0))].state = {maximum_[i], sum}; }
    }
  }

  CUTE_DEVICE float exponent_scale() const { return exponent_scale_; }

 private:
  template <class Scores>
  CUTE_DEVICE float exponentiate(Scores& scores, int row) const {
    float const shift = subtrahend(maximum_[row]) * scale_log2_;
    float sum = 0.f;
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      scores(row, col) = exp2_fast(fmaf(scores(row, col), scale_log2_, -shift));
      sum += scores(row, col);
    }
    return sum;
  }

  template <class Acc>
  CUTE_DEVICE void rescale_rows(Acc& acc, float const (&factors)[kRows]) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      sum_[row] *= factors[row];
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(acc); ++col) { acc(row, col) *= factors[row]; }
    }
  }

  float const exponent_scale_;
  float const scale_log2_;
  float maximum_[kRows];
  float sum_[kRows];  // of this thread's columns
};

}  // namespace flashattn::sm80
