// How a warp merges the parts of one row, 32 columns of it: a warp with four columns a lane would have four times
// as much to load, a quarter as far ahead.
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

__device__ inline void store(void* out, DType dtype, int64_t index, float x) {
  switch (dtype) {
    case DType::kFloat16: static_cast<__half*>(out)[index] = __float2half(x); break;
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(out)[index] = __float2bfloat16(x); break;
    default: static_cast<float*>(out)[index] = x;
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

// sum += weight · value of the 32 parts from `base` on; the lanes have a weight each. All loads are on their way
// before the first value is needed. What an empty part holds does not matter and is not read.
template <class Parts>
__device__ void add_parts(Parts const& parts, int base, float own_weight, bool column_exists, float& sum) {
  constexpr int kGroup = 8;
  unsigned const counted = __ballot_sync(0xffffffff, own_weight != 0.f);
  float values[kLanes];
#pragma unroll
  for (int group = 0; group < kLanes; group += kGroup) {
    if (counted >> group == 0) { break; }
#pragma unroll
    for (int i = group; i < group + kGroup; ++i) {
      values[i] = 0.f;
      if ((counted >> i & 1) && column_exists) { values[i] = to_float(*parts.out(base + i)); }
    }
  }
#pragma unroll
  for (int group = 0; group < kLanes; group += kGroup) {
    if (counted >> group == 0) { break; }
#pragma unroll
    for (int i = group; i < group + kGroup; ++i) { sum += __shfl_sync(0xffffffff, own_weight, i) * values[i]; }
  }
}

// `parts` tells where part s of the row lies: parts.lse(s) is its log-sum-exp, *parts.out(s) its value in
// this lane's column, which is not read where the column does not exist. `own_lse` is that of part `lane`, if
// there is one: the caller loads it while it still learns how many there are.
template <class Parts>
__device__ MergedRow merge_row(Parts const& parts, int count, float own_lse, int lane, bool column_exists) {
  auto const lse_of = [&](int s) { return s < kLanes ? own_lse : parts.lse(s); };

  // fmaxf passes over NaN, but the sum of weights does not, so a NaN in lse reaches out and lse.
  float maximum = -kInfinity;
  for (int s = lane; s < count; s += kLanes) {
    if (!is_empty_part(lse_of(s))) { maximum = fmaxf(maximum, lse_of(s)); }
  }
  maximum = warp_max(maximum);

  float sum = 0.f, own_total = 0.f;
  for (int base = 0; base < count; base += kLanes) {  // a lane knows the weight of one part
    float const own_weight =
        base + lane < count ? part_weight(lse_of(base + lane), subtrahend(maximum)) : 0.f;
    own_total += own_weight;
    add_parts(parts, base, own_weight, column_exists, sum);
  }
  float const total = warp_sum(own_total);
  if (total == 0.f) { return {0.f, -kInfinity}; }
  return {sum / total, maximum + logf(total)};
}

}  // namespace flashattn
