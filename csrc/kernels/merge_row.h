// How a warp merges the parts of one row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/combine_weight.h"
#include "flashattn/params.h"

namespace flashattn {

constexpr int kLanes = 32;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Neighbouring columns, in one piece if there are several: these lie at a multiple of their size.
template <class Element, int kWidth>
__device__ inline void store_columns(Element* out, float const (&columns)[kWidth]) {
  struct alignas(kWidth * sizeof(Element)) Piece {
    Element elements[kWidth];
  } piece;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) { piece.elements[i] = static_cast<Element>(columns[i]); }
  *reinterpret_cast<Piece*>(out) = piece;
}

template <int kWidth>
__device__ inline void store(void* out, DType dtype, int64_t index, float const (&columns)[kWidth]) {
  switch (dtype) {
    case DType::kFloat16: return store_columns(static_cast<__half*>(out) + index, columns);
    case DType::kBFloat16: return store_columns(static_cast<__nv_bfloat16*>(out) + index, columns);
    default: return store_columns(static_cast<float*>(out) + index, columns);
  }
}

__device__ inline float warp_max(float x) {
  for (int lane = kLanes / 2; lane > 0; lane /= 2) { x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lane)); }
  return x;
}

__device__ inline float warp_sum(float x) {
  for (int lane = kLanes / 2; lane > 0; lane /= 2) { x += __shfl_xor_sync(0xffffffff, x, lane); }
  return x;
}

struct MergedRow {
  float out;  // of this lane's column
  float lse;
};

// `parts` tells where part s of the row lies: parts.lse(s) is its log-sum-exp, parts.load(s) this lane's column of it.
// An empty part is not read.
template <class Parts>
__device__ MergedRow merge_row(Parts const& parts, int count, int lane, bool column_exists) {
  constexpr int kAtOnce = 16;  // parts that are on their way before the first is needed
  float const own_lse = lane < count ? parts.lse(lane) : -kInfinity;
  auto const lse_of = [&](int s) { return s < kLanes ? own_lse : (s < count ? parts.lse(s) : -kInfinity); };

  // fmaxf passes over NaN, but the sum of weights does not, so a NaN in lse reaches out and lse.
  float maximum = -kInfinity;
  for (int s = lane; s < count; s += kLanes) {
    if (!is_empty_part(lse_of(s))) { maximum = fmaxf(maximum, lse_of(s)); }
  }
  maximum = warp_max(maximum);

  float sum = 0.f, own_total = 0.f;
  for (int base = 0; base < count; base += kLanes) {  // a lane knows the weight of one part
    float const own_weight = part_weight(lse_of(base + lane), subtrahend(maximum));
    // Also a part whose weight has become 0: what is not finite in it reaches out, as it does without splits.
    unsigned const counted = __ballot_sync(0xffffffff, !is_empty_part(lse_of(base + lane)));
    own_total += own_weight;
    for (int first = 0; first < kLanes && counted >> first != 0; first += kAtOnce) {
      float values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        bool const is_read = column_exists && (counted >> (first + i) & 1);
        values[i] = is_read ? parts.load(base + first + i) : 0.f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) { sum += __shfl_sync(0xffffffff, own_weight, first + i) * values[i]; }
    }
  }
  float const total = warp_sum(own_total);
  float const factor = total == 0.f ? 0.f : reciprocal_fast(total);
  return {sum * factor, total == 0.f ? -kInfinity : maximum + logf(total)};
}

}  // namespace flashattn
