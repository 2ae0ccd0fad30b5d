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

// sum += weight · value of the 32 parts from `base` on; the lanes have a weight each. What an empty part holds does
// not matter and is not read.
template <class Parts>
__device__ void add_parts(Parts const& parts, int base, float own_weight, bool column_exists,
                          float (&sum)[Parts::kWidth]) {
  constexpr int kBatch = Parts::kWidth == 1 ? 16 : 8;  // parts that are on their way before the first is needed
  unsigned const counted = __ballot_sync(0xffffffff, own_weight != 0.f);
  for (int first = 0; first < kLanes && counted >> first != 0; first += kBatch) {
    float values[kBatch][Parts::kWidth];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (float& value : values[i]) { value = 0.f; }
      if ((counted >> (first + i) & 1) && column_exists) { parts.load(base + first + i, values[i]); }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float const weight = __shfl_sync(0xffffffff, own_weight, first + i);
#pragma unroll
      for (int column = 0; column < Parts::kWidth; ++column) { sum[column] += weight * values[i][column]; }
    }
  }
}

// `parts` tells where part s of the row lies: parts.lse(s) is its log-sum-exp, parts.load(s, values) reads this
// lane's Parts::kWidth columns of it, which exist all or not at all. `own_lse` is that of part `lane`, if there is
// one: the caller asks for it while it still learns where the row lies.
template <class Parts>
__device__ MergedRow<Parts::kWidth> merge_row(Parts const& parts, int count, float own_lse, int lane,
                                              bool column_exists) {
  auto const lse_of = [&](int s) { return s < kLanes ? own_lse : parts.lse(s); };

  // fmaxf passes over NaN, but the sum of weights does not, so a NaN in lse reaches out and lse.
  float maximum = -kInfinity;
  for (int s = lane; s < count; s += kLanes) {
    if (!is_empty_part(lse_of(s))) { maximum = fmaxf(maximum, lse_of(s)); }
  }
  maximum = warp_max(maximum);

  MergedRow<Parts::kWidth> merged{};
  float own_total = 0.f;
  for (int base = 0; base < count; base += kLanes) {  // a lane knows the weight of one part
    float const own_weight =
        base + lane < count ? part_weight(lse_of(base + lane), subtrahend(maximum)) : 0.f;
    own_total += own_weight;
    add_parts(parts, base, own_weight, column_exists, merged.out);
  }
  float const total = warp_sum(own_total);
#pragma unroll
  for (float& out : merged.out) { out = total == 0.f ? 0.f : out / total; }
  merged.lse = total == 0.f ? -kInfinity : maximum + logf(total);
  return merged;
}

}  // namespace flashattn
