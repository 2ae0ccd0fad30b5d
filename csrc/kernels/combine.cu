// Merges partial results, any number of parts.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/combine_weight.h"
#include "kernels/kernels.h"
#include "kernels/launch_kernel.h"

namespace flashattn {
namespace {

constexpr int kWarps = 4;  // of a thread block
constexpr int kLanes = 32;

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

struct Merged {
  float maximum;
  float total;  // of the weights
};

// The log-sum-exp of a row's parts. A lane keeps those of its first part, usually its only one.
class PartsOfRow {
 public:
  __device__ PartsOfRow(float const* lse, int64_t stride, int splits, int lane)
      : lse_(lse), stride_(stride), splits_(splits), lane_(lane), first_(load(lane)) {}

  // fmaxf passes over NaN, but the sum of weights does not, so a NaN in lse reaches out and lse.
  __device__ Merged merge() const {
    float maximum = -kInfinity;
    for (int s = lane_; s < splits_; s += kLanes) {
      float const part = at(s);
      if (!is_empty_part(part)) { maximum = fmaxf(maximum, part); }
    }
    maximum = warp_max(maximum);
    float total = 0.f;
    for (int s = lane_; s < splits_; s += kLanes) { total += part_weight(at(s), subtrahend(maximum)); }
    return {maximum, warp_sum(total)};
  }

  // -inf past the last part.
  __device__ float at(int split) const { return split < kLanes ? first_ : load(split); }

 private:
  __device__ float load(int split) const { return split < splits_ ? lse_[split * stride_] : -kInfinity; }

  float const* const lse_;
  int64_t const stride_;
  int const splits_;
  int const lane_;
  float const first_;
};

// A warp merges one row, 32 columns of it: a row of one warp would load its parts four columns a lane
// and a quarter as far ahead.
template <class Partial>
__global__ void __launch_bounds__(kWarps * kLanes)
    flash_fwd_splitkv_combine_kernel(__grid_constant__ FlashCombineParams const p) {
  wait_for_previous_kernel();
  int const lane = threadIdx.x % kLanes;
  int const slices = (p.head_dim + kLanes - 1) / kLanes;
  int64_t const warp = int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  int64_t const index = warp / slices;  // (batch, head, row)
  if (index >= int64_t(p.batch) * p.heads * p.seqlen) { return; }
  int const slice = static_cast<int>(warp % slices), column = slice * kLanes + lane;
  int64_t const row = index % p.seqlen, head = index / p.seqlen % p.heads, batch = index / p.seqlen / p.heads;
  if (p.sequences != nullptr && row >= *p.sequences) { return; }

  float const* const lse =
      p.lse_partial + batch * p.lse_batch_stride + head * p.lse_head_stride + row * p.lse_row_stride;
  PartsOfRow const parts(lse, p.lse_split_stride, p.splits, lane);
  Merged const merged = parts.merge();
  if (slice == 0 && lane == 0 && p.lse != nullptr) {
    p.lse[index] = merged.total == 0.f ? -kInfinity : merged.maximum + logf(merged.total);
  }

  bool const exists = column < p.head_dim;
  Partial const* const part = static_cast<Partial const*>(p.out_partial.data) +
                              batch * p.out_partial.batch_stride + row * p.out_partial.row_stride +
                              head * p.out_partial.head_stride + (exists ? column : 0);
  float sum = 0.f;
  for (int base = 0; base < p.splits; base += kLanes) {  // a lane knows the weight of one part
    float const own_weight = part_weight(parts.at(base + lane), subtrahend(merged.maximum));
    int const count = p.splits - base < kLanes ? p.splits - base : kLanes;
#pragma unroll 8
    for (int s = 0; s < count; ++s) {
      float const weight = __shfl_sync(0xffffffff, own_weight, s);
      // What an empty part holds does not matter and is not read.
      sum += weight != 0.f ? weight * to_float(part[(base + s) * p.out_split_stride]) : 0.f;
    }
  }
  if (exists) {
    float const inverse = merged.total == 0.f ? 0.f : 1.f / merged.total;
    int64_t const out = batch * p.out.batch_stride + row * p.out.row_stride + head * p.out.head_stride;
    store(p.out.data, p.out_dtype, out + column, sum * inverse);
  }
}

template <class Partial>
void launch_combine_of(FlashCombineParams const& params, cudaStream_t stream, bool overlap) {
  int64_t const slices = (params.head_dim + kLanes - 1) / kLanes;
  int64_t const warps = int64_t(params.batch) * params.heads * params.seqlen * slices;
  int64_t const blocks = (warps + kWarps - 1) / kWarps;
  check_grid("flash_combine", blocks);
  dim3 const grid(static_cast<unsigned>(blocks));
  auto* const kernel = flash_fwd_splitkv_combine_kernel<Partial>;
  if (overlap) {
    launch_overlapping("flash_combine", kernel, grid, kWarps * kLanes, stream, params);
  } else {
    launch("flash_combine", kernel, grid, kWarps * kLanes, 0, stream, params);
  }
}

}  // namespace

void launch_combine(FlashCombineParams const& params, cudaStream_t stream, bool overlap) {
  switch (params.partial_dtype) {
    case DType::kFloat16: return launch_combine_of<__half>(params, stream, overlap);
    case DType::kBFloat16: return launch_combine_of<__nv_bfloat16>(params, stream, overlap);
    default: return launch_combine_of<float>(params, stream, overlap);
  }
}

}  // namespace flashattn
