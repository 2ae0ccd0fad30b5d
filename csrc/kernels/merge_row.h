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

template <int kWidth>
struct MergedRow {
  float out[kWidth];  // of this lane's columns
  float lse;
};

// This lane's columns of some parts.
template <class Parts>
struct Values {
  static constexpr int kParts = 16;
  float of[kParts][Parts::kWidth];

  // Of the parts from `base` on that `wanted` has the bits of. All are on their way before the first is needed.
  __device__ void load(Parts const& parts, int base, unsigned wanted) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (float& value : of[i]) { value = 0.f; }
      if (wanted >> i & 1) { parts.load(base + i, of[i]); }
    }
  }

  // sum += weight · value; the weight of part i is that of lane first + i.
  __device__ void add_to(float (&sum)[Parts::kWidth], float own_weight, int first) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float const weight = __shfl_sync(0xffffffff, own_weight, first + i);
#pragma unroll
      for (int column = 0; column < Parts::kWidth; ++column) { sum[column] += weight * of[i][column]; }
    }
  }
};

// `parts` tells where part s of the row lies: parts.lse(s) is its log-sum-exp, parts.load(s, values) reads this
// lane's Parts::kWidth columns of it, which exist all or not at all. An empty part is not read; but where Parts says
// that all have been written, the first ones are, before anybody knows which are empty: these have to be finite.
template <class Parts>
__device__ MergedRow<Parts::kWidth> merge_row(Parts const& parts, int count, int lane, bool column_exists) {
  float const own_lse = lane < count ? parts.lse(lane) : -kInfinity;
  auto const lse_of = [&](int s) { return s < kLanes ? own_lse : (s < count ? parts.lse(s) : -kInfinity); };
  Values<Parts> values;
  if constexpr (Parts::kAllWritten) {
    values.load(parts, 0, column_exists ? (count < kLanes ? (1u << count) - 1 : ~0u) : 0);
  }

  // fmaxf passes over NaN, but the sum of weights does not, so a NaN in lse reaches out and lse.
  float maximum = -kInfinity;
  for (int s = lane; s < count; s += kLanes) {
    if (!is_empty_part(lse_of(s))) { maximum = fmaxf(maximum, lse_of(s)); }
  }
  maximum = warp_max(maximum);

  MergedRow<Parts::kWidth> merged{};
  float own_total = 0.f;
  int base = 0;
  do {  // a lane knows the weight of one part
    float const own_weight = part_weight(lse_of(base + lane), subtrahend(maximum));
    // Also a part whose weight has become 0: what is not finite in it reaches out, as it does without splits.
    unsigned const counted = __ballot_sync(0xffffffff, !is_empty_part(lse_of(base + lane)));
    own_total += own_weight;
    int first = 0;
    do {
      bool const loaded = Parts::kAllWritten && base + first == 0;
      if (!loaded) { values.load(parts, base + first, column_exists ? counted >> first : 0); }
      values.add_to(merged.out, own_weight, first);
      first += Values<Parts>::kParts;
    } while (first < kLanes && counted >> first != 0);
    base += kLanes;
  } while (base < count);
  float const total = warp_sum(own_total);
  float const factor = total == 0.f ? 0.f : reciprocal_fast(total);
#pragma unroll
  for (float& out : merged.out) { out *= factor; }
  merged.lse = total == 0.f ? -kInfinity : maximum + logf(total);
  return merged;
}

}  // namespace flashattn
