// How a warp merges the parts of one row, 32 columns of it: a row of one warp would load its parts four
// columns a lane and a quarter as far ahead.
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

// `parts` tells where part s of the row lies: parts.lse(s) is its log-sum-exp, *parts.out(s) its value in
// this lane's column, which is not read where the column does not exist.
template <class Parts>
__device__ MergedRow merge_row(Parts const& parts, int count, int lane, bool column_exists) {
  float const first = lane < count ? parts.lse(lane) : -kInfinity;  // usually the lane's only part
  auto const lse_of = [&](int s) { return s < kLanes ? first : (s < count ? parts.lse(s) : -kInfinity); };

  // fmaxf passes over NaN, but the sum of weights does not, so a NaN in lse reaches out and lse.
  float maximum = -kInfinity;
  for (int s = lane; s < count; s += kLanes) {
    if (!is_empty_part(lse_of(s))) { maximum = fmaxf(maximum, lse_of(s)); }
  }
  maximum = warp_max(maximum);
  float total = 0.f;
  for (int s = lane; s < count; s += kLanes) { total += part_weight(lse_of(s), subtrahend(maximum)); }
  total = warp_sum(total);

  constexpr int kBatch = 16;  // loads that are on their way together
  float sum = 0.f;
  for (int base = 0; base < count; base += kLanes) {  // a lane knows the weight of one part
    float const own_weight = part_weight(lse_of(base + lane), subtrahend(maximum));
    for (int s = 0; s < kLanes && base + s < count; s += kBatch) {
      float weights[kBatch], values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        weights[i] = __shfl_sync(0xffffffff, own_weight, s + i);  // 0 behind the last part
        values[i] = 0.f;
        // What an empty part holds does not matter and is not read.
        if (weights[i] != 0.f && column_exists) { values[i] = to_float(*parts.out(base + s + i)); }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) { sum += weights[i] * values[i]; }
    }
  }
  if (total == 0.f) { return {0.f, -kInfinity}; }
  return {sum / total, maximum + logf(total)};
}

}  // namespace flashattn
