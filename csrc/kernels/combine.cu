// Merges partial results, any number of parts.
#include "kernels/kernels.h"
#include "kernels/launch_kernel.h"
#include "kernels/merge_row.h"

namespace flashattn {
namespace {

constexpr int kWarps = 4;  // of a thread block

// Parts of a row at equal distances.
template <class Partial>
struct StridedParts {
  float const* lse_;
  int64_t lse_stride;
  Partial const* out_;
  int64_t out_stride;

  __device__ float lse(int part) const { return lse_[part * lse_stride]; }
  __device__ float load(int part) const { return to_float(out_[part * out_stride]); }
};

template <class Partial>
__global__ void __launch_bounds__(kWarps* kLanes)
    flash_fwd_splitkv_combine_kernel(__grid_constant__ FlashCombineParams const p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  int const lane = threadIdx.x % kLanes;
  int const slices = (p.head_dim + kLanes - 1) / kLanes;
  int64_t const warp = int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  int64_t const index = warp / slices;  // (batch, head, row)
  if (index >= int64_t(p.batch) * p.heads * p.seqlen) { return; }
  int const slice = static_cast<int>(warp % slices), column = slice * kLanes + lane;
  int64_t const row = index % p.seqlen, head = index / p.seqlen % p.heads, batch = index / p.seqlen / p.heads;
  if (p.sequences != nullptr && row >= *p.sequences) { return; }

  StridedParts<Partial> const parts{
      p.lse_partial + batch * p.lse_batch_stride + head * p.lse_head_stride + row * p.lse_row_stride,
      p.lse_split_stride,
      static_cast<Partial const*>(p.out_partial.data) + batch * p.out_partial.batch_stride +
          row * p.out_partial.row_stride + head * p.out_partial.head_stride + column,
      p.out_split_stride};
  MergedRow const merged = merge_row(parts, p.splits, lane, column < p.head_dim);
  if (slice == 0 && lane == 0 && p.lse != nullptr) { p.lse[index] = merged.lse; }
  if (column < p.head_dim) {
    int64_t const out = batch * p.out.batch_stride + row * p.out.row_stride + head * p.out.head_stride;
    float const columns[1] = {merged.out};  // rows may begin anywhere
    store(p.out.data, p.out_dtype, out + column, columns);
  }
}

template <class Partial>
void launch_combine_of(FlashCombineParams const& params, cudaStream_t stream, bool overlap) {
  int64_t const slices = (params.head_dim + kLanes - 1) / kLanes;
  int64_t const warps = int64_t(params.batch) * params.heads * params.seqlen * slices;
  int64_t const blocks = (warps + kWarps - 1) / kWarps;
  check_grid("flash_combine", blocks);
  launch("flash_combine", flash_fwd_splitkv_combine_kernel<Partial>, dim3(static_cast<unsigned>(blocks)),
         kWarps * kLanes, 0, stream, overlap, params);
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
