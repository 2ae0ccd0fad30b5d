// What the two merges have in common: a warp merges the parts of a row, or of a slice of its columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/combine_weight.h"
#include "core/merge_plan.h"
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

// The lanes of a warp in groups. The lanes of a group have kMergeColumns columns each, and every group other parts.
struct LaneGroups {
  int lanes;   // of a group
  int count;   // groups
  int group;   // of this lane
  int column;  // the first of this lane, in the slice that the groups have

  __device__ explicit LaneGroups(int log2_lanes) : lanes(1 << log2_lanes), count(kLanes >> log2_lanes) {
    int const lane = threadIdx.x % kLanes;
    group = lane >> log2_lanes;
    column = (lane - group * lanes) * kMergeColumns;
  }

  // Over the groups; each of them has it then.
  __device__ float4 add_up(float4 x) const {
    for (int distance = kLanes / 2; distance >= lanes; distance /= 2) {
      x.x += __shfl_xor_sync(0xffffffff, x.x, distance), x.y += __shfl_xor_sync(0xffffffff, x.y, distance);
      x.z += __shfl_xor_sync(0xffffffff, x.z, distance), x.w += __shfl_xor_sync(0xffffffff, x.w, distance);
    }
    return x;
  }
};

// The log-sum-exp of the parts of a row, and how much each counts.
template <class Parts>
class Weights {
 public:
  // `own_lse` is that of the part with this lane's number.
  __device__ Weights(Parts const& row, int parts, float own_lse)
      : row_(row),
        parts_(parts),
        lane_(threadIdx.x % kLanes),
        first_lse_(own_lse),
        lse_(own_lse),
        maximum_(-kInfinity) {
    // fmaxf passes over NaN, but the sum of weights does not, so a NaN in lse reaches out and lse.
    for (int part = lane_; part < parts; part += kLanes) {
      float const lse = part < kLanes ? own_lse : row_.lse(part, parts);
      if (!is_empty_part(lse)) { maximum_ = fmaxf(maximum_, lse); }
    }
    maximum_ = warp_max(maximum_);
  }

  // Of the part `base` plus this lane's number. Each part is asked for once.
  __device__ float take(int base) {
    lse_ = base == 0 ? first_lse_ : row_.lse(base + lane_, parts_);
    float const weight = part_weight(lse_, subtrahend(maximum_));
    own_total_ += weight;
    return weight;
  }
  // Of those that were taken last, a bit each: which are not empty.
  __device__ unsigned not_empty() const { return __ballot_sync(0xffffffff, !is_empty_part(lse_)); }

  // When all have been taken.
  __device__ float total() const { return warp_sum(own_total_); }
  __device__ float lse(float total) const { return total == 0.f ? -kInfinity : maximum_ + logf(total); }

 private:
  Parts const& row_;
  int const parts_;
  int const lane_;
  float const first_lse_;
  float lse_;
  float maximum_;
  float own_total_ = 0.f;
};

}  // namespace flashattn
