// Merges partial results: a warp per row, any number of parts.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/combine_weight.h"
#include "kernels/kernels.h"
#include "kernels/launch_kernel.h"

namespace flashattn {
namespace {

constexpr int kWarps = 4;        // rows of a thread block
constexpr int kLanes = 32;
constexpr int kColumns = 4;      // of a lane at a time

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ void store(void* out, DType dtype, int64_t index, float x) {
  switch (dtype) {
    case DType::kFloat16: static_cast<__half*>(out)[index] = __float2half(x); break;
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(out)[index] = __float2bfloat16(x); break;
    default: static_cast<float*>(out)[index] = x;
  }
}

__device__ float warp_max(float x) {
  for (int lane = kLanes / 2; lane > 0; lane /= 2) { x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lane)); }
  return x;
}

__device__ float warp_sum(float x) {
  for (int lane = kLanes / 2; lane > 0; lane /= 2) { x += __shfl_xor_sync(0xffffffff, x, lane); }
  return x;
}

struct Row {
  int batch, head, row;
};

struct Merged {
  float maximum;
  float total;  // of the weights
};

// fmaxf passes over NaN, but the sum of weights does not, so a NaN in lse reaches out and lse.
__device__ Merged merge_lse(float const* lse, int64_t stride, int splits, int lane) {
  float maximum = -kInfinity;
  for (int s = lane; s < splits; s += kLanes) {
    float const part = lse[s * stride];
    if (!is_empty_part(part)) { maximum = fmaxf(maximum, part); }
  }
  maximum = warp_max(maximum);
  float total = 0.f;
  for (int s = lane; s < splits; s += kLanes) { total += part_weight(lse[s * stride], subtrahend(maximum)); }
  return {maximum, warp_sum(total)};
}

template <class Partial>
__global__ void __launch_bounds__(kWarps * kLanes)
    flash_fwd_splitkv_combine_kernel(__grid_constant__ FlashCombineParams const p) {
  int const lane = threadIdx.x % kLanes;
  int64_t const index = int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes;  // (batch, head, row)
  if (index >= int64_t(p.batch) * p.heads * p.seqlen) { return; }
  Row const at{static_cast<int>(index / p.seqlen / p.heads), static_cast<int>(index / p.seqlen % p.heads),
               static_cast<int>(index % p.seqlen)};
  if (p.sequences != nullptr && at.row >= *p.sequences) { return; }
  float const* const lse = p.lse_partial + at.batch * p.lse_batch_stride + at.head * p.lse_head_stride +
                           at.row * p.lse_row_stride;
  Merged const merged = merge_lse(lse, p.lse_split_stride, p.splits, lane);
  float const inverse = merged.total == 0.f ? 0.f : 1.f / merged.total;
  if (lane == 0 && p.lse != nullptr) {
    p.lse[index] = merged.total == 0.f ? -kInfinity : merged.maximum + logf(merged.total);
  }

  Partial const* const part = static_cast<Partial const*>(p.out_partial.data) +
                              at.batch * p.out_partial.batch_stride + at.row * p.out_partial.row_stride +
                              at.head * p.out_partial.head_stride;
  int64_t const out = at.batch * p.out.batch_stride + at.row * p.out.row_stride + at.head * p.out.head_stride;
  // All lanes take part in every round, also those without a column: the others ask them for weights.
  for (int first = lane; first - lane < p.head_dim; first += kLanes * kColumns) {
    float sum[kColumns] = {};
    for (int base = 0; base < p.splits; base += kLanes) {  // a lane knows the weight of one part
      int const own = base + lane;
      float const own_weight =
          own < p.splits ? part_weight(lse[own * p.lse_split_stride], subtrahend(merged.maximum)) : 0.f;
      int const count = p.splits - base < kLanes ? p.splits - base : kLanes;
#pragma unroll 8
      for (int s = 0; s < count; ++s) {
        float const weight = __shfl_sync(0xffffffff, own_weight, s);
        for (int i = 0; i < kColumns; ++i) {
          int const column = first + i * kLanes;
          // What an empty part holds does not matter and is not read.
          bool const read = weight != 0.f && column < p.head_dim;
          sum[i] += read ? weight * to_float(part[(base + s) * p.out_split_stride + column]) : 0.f;
        }
      }
    }
    for (int i = 0; i < kColumns; ++i) {
      int const column = first + i * kLanes;
      if (column < p.head_dim) { store(p.out.data, p.out_dtype, out + column, sum[i] * inverse); }
    }
  }
}

template <class Partial>
void launch_combine_of(FlashCombineParams const& params, cudaStream_t stream) {
  int64_t const rows = int64_t(params.batch) * params.heads * params.seqlen;
  int64_t const blocks = (rows + kWarps - 1) / kWarps;
  check_grid("flash_combine", blocks);
  launch("flash_combine", flash_fwd_splitkv_combine_kernel<Partial>, dim3(static_cast<unsigned>(blocks)),
         kWarps * kLanes, 0, stream, params);
}

}  // namespace

void launch_combine(FlashCombineParams const& params, cudaStream_t stream) {
  switch (params.partial_dtype) {
    case DType::kFloat16: return launch_combine_of<__half>(params, stream);
    case DType::kBFloat16: return launch_combine_of<__nv_bfloat16>(params, stream);
    default: return launch_combine_of<float>(params, stream);
  }
}

}  // namespace flashattn
