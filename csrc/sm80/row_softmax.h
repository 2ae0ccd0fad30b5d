// The online softmax of the rows that a thread holds, in registers. A row is spread over the four
// neighbouring threads of a quad.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

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
      own_factor_[row] = 1.f;
    }
  }

  // Turns a block of scores into probabilities relative to the running maximum, and rescales what
  // the older blocks left in `acc` to it. Both are (row, column) views.
  template <class Scores, class Acc>
  CUTE_DEVICE void update(Scores& scores, Acc& acc) {
    static_assert(decltype(cute::size<0>(scores))::value == kRows);
    float factors[kRows];
    bool rescale = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const old_maximum = maximum_[row];
      maximum_[row] = next_maximum(old_maximum, quad_max(row_max(scores, row)), scale_log2_);
      factors[row] = rescale_factor(old_maximum, maximum_[row], scale_log2_);
      rescale |= maximum_[row] != old_maximum;
    }
    if (__any_sync(0xffffffff, rescale)) { rescale_rows(acc, factors); }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) { sum_[row] += exponentiate(scores, row); }
  }

  // Once, after the last block. `sink` as in finish_softmax. After join_warps, `factor` takes a
  // warp's own accumulator to its part of out.
  CUTE_DEVICE SoftmaxResult finish(int row, float sink) const {
    SoftmaxResult result = finish_softmax(maximum_[row], quad_sum(sum_[row]), exponent_scale_, sink);
    result.factor *= own_factor_[row];
    return result;
  }

  // For warps that hold the same rows and different keys: gives each the state of all keys.
  // `coords` are the coordinates of the accumulator, states (key warp, row) lie in shared memory.
  template <class States, class Coords>
  CUTE_DEVICE void join_warps(States& states, Coords const& coords, int key_warp) {
    constexpr int kWarps = std::extent_v<States, 0>;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const sum = quad_sum(sum_[i]);
      if (threadIdx.x % 4 == 0) { states[key_warp][cute::get<0>(coords(i, 0))] = {maximum_[i], sum}; }
    }
    __syncthreads();
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const row = cute::get<0>(coords(i, 0));
      float const own_maximum = maximum_[i];
      CUTE_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) { maximum_[i] = fmaxf(maximum_[i], states[warp][row].maximum); }
      float sum = 0.f;
      CUTE_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) {
        sum += states[warp][row].sum * rescale_factor(states[warp][row].maximum, maximum_[i], scale_log2_);
      }
      sum_[i] = threadIdx.x % 4 == 0 ? sum : 0.f;  // finish() adds up the quad
      own_factor_[i] = rescale_factor(own_maximum, maximum_[i], scale_log2_);
    }
  }

 private:
  template <class Acc>
  CUTE_DEVICE void rescale_rows(Acc& acc, float const (&factors)[kRows]) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      sum_[row] *= factors[row];
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(acc); ++col) { acc(row, col) *= factors[row]; }
    }
  }

  template <class Scores>
  CUTE_DEVICE static float row_max(Scores const& scores, int row) {
    float result = scores(row, 0);
    CUTE_UNROLL
    for (int col = 1; col < cute::size<1>(scores); ++col) { result = fmaxf(result, scores(row, col)); }
    return result;
  }

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

  float const exponent_scale_;
  float const scale_log2_;
  float maximum_[kRows];
  float sum_[kRows];         // of this thread's columns
  float own_factor_[kRows];  // from this warp's maximum to that of all warps of the row
};

}  // namespace flashattn::sm80
