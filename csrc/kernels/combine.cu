// Merges partial results, any number of parts.
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/launch_kernel.h"
#include "kernels/merge_row.h"

namespace flashattn {
namespace {

// How a warp finds its row and its columns, and whether neighbouring columns are read and written in one piece.
struct RowGrid {
  FastDivisor blocks;  // of a slice
  FastDivisor seqlen;
  FastDivisor heads;
  int log2_lanes;
  bool wide_parts;
  bool wide_out;
};

// A row, and the first of this lane's columns.
struct Columns {
  int64_t batch;
  int64_t head;
  int64_t row;
  int column;

  template <class Pointer>
  __device__ int64_t offset(Strided<Pointer> const& t) const {
    return batch * t.batch_stride + row * t.row_stride + head * t.head_stride + column;
  }
};

// Parts of a row at equal distances, and this lane's columns of them.
template <class Partial>
class StridedParts {
 public:
  // Not yet numbers, or whoever asked for it would wait for it to unpack it.
  struct alignas(kMergeColumns * sizeof(Partial)) Piece {
    uint32_t words[kMergeColumns * sizeof(Partial) / sizeof(uint32_t)];
  };

  __device__ StridedParts(FlashCombineParams const& p, Columns const& at, bool wide)
      : lse_(p.lse_partial + at.batch * p.lse_batch_stride + at.head * p.lse_head_stride + at.row * p.lse_row_stride),
        lse_stride_(p.lse_split_stride),
        out_(static_cast<Partial const*>(p.out_partial.data) + at.offset(p.out_partial)),
        out_stride_(p.out_split_stride),
        columns_(p.head_dim - at.column),
        wide_(wide) {}

  // -inf where there are not so many.
  __device__ float lse(int part, int count) const { return part < count ? lse_[part * lse_stride_] : -kInfinity; }

  __device__ Piece piece(int part) const {
    Partial const* const from = out_ + part * out_stride_;
    return wide_ ? *reinterpret_cast<Piece const*>(from) : gather(from);
  }

  __device__ static float4 numbers(Piece const& piece) {
    Partial columns[kMergeColumns];
    memcpy(columns, &piece, sizeof(piece));
    return {to_float(columns[0]), to_float(columns[1]), to_float(columns[2]), to_float(columns[3])};
  }

 private:
  __device__ Piece gather(Partial const* from) const {
    Partial columns[kMergeColumns] = {};
#pragma unroll
    for (int i = 0; i < kMergeColumns; ++i) {
      if (i < columns_) { columns[i] = from[i]; }
    }
    Piece piece;
    memcpy(&piece, columns, sizeof(piece));
    return piece;
  }

  float const* lse_;
  int64_t lse_stride_;
  Partial const* out_;
  int64_t out_stride_;
  int columns_;  // from this lane's first one on
  bool wide_;
};

struct MergedRow {
  float4 columns;  // of this lane
  float lse;
};

// Every group of lanes adds up every count-th part, one after the other, kAtOnce of them on their way at a time, the
// first ones before anybody knows what they count. `exists`: whether this lane has columns.
template <int kAtOnce, class Parts>
__device__ MergedRow merge_row(Parts const& parts, int count, LaneGroups const& groups, bool exists) {
  float const own_lse = parts.lse(threadIdx.x % kLanes, count);
  typename Parts::Piece pieces[kAtOnce];
  auto const ask = [&](int base, auto const& wanted) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const index = groups.group + i * groups.count;
      pieces[i] = exists && wanted(index) ? parts.piece(base + index) : typename Parts::Piece{};
    }
  };
  ask(0, [&](int index) { return index < count; });
  Weights<Parts> weights(parts, count, own_lse);
  float own_weight = 0.f;
  unsigned counted = 0;
  float4 sum{};
  for (int base = 0; base < count; base += kAtOnce * groups.count) {
    int const first = base % kLanes;
    if (first == 0) { own_weight = weights.take(base), counted = weights.not_empty(); }
    // What an empty part holds is not used. Another counts even if its weight has become 0: what is not finite in it
    // reaches out, as it does without splits.
    auto const counts = [&](int index) { return (counted >> (first + index) & 1) != 0; };
    if (base > 0) { ask(base, counts); }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const index = groups.group + i * groups.count;
      float const weight = __shfl_sync(0xffffffff, own_weight, first + index);
      if (!counts(index)) { continue; }
      float4 const values = Parts::numbers(pieces[i]);
      sum.x += weight * values.x, sum.y += weight * values.y;
      sum.z += weight * values.z, sum.w += weight * values.w;
    }
  }
  sum = groups.add_up(sum);
  float const total = weights.total(), factor = total == 0.f ? 0.f : reciprocal_fast(total);
  return {{sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor}, weights.lse(total)};
}

template <class Partial, int kAtOnce>
__global__ void __launch_bounds__(kMergeWarps* kLanes)
    flash_fwd_splitkv_combine_kernel(__grid_constant__ FlashCombineParams const p,
                                     __grid_constant__ RowGrid const grid) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  int const slice = grid.blocks.quotient(blockIdx.x), block = blockIdx.x - slice * grid.blocks.divisor();
  int64_t const index = int64_t(block) * kMergeWarps + threadIdx.x / kLanes;  // (batch, head, row)
  if (index >= int64_t(p.batch) * p.heads * p.seqlen) { return; }
  int const head_of_all = grid.seqlen.quotient(index), row = static_cast<int>(index) - head_of_all * p.seqlen;
  if (p.sequences != nullptr && row >= *p.sequences) { return; }
  int const batch = grid.heads.quotient(head_of_all), head = head_of_all - batch * p.heads;

  LaneGroups const groups(grid.log2_lanes);
  int const column = slice * groups.lanes * kMergeColumns + groups.column;
  bool const exists = column < p.head_dim;
  Columns const at{batch, head, row, column};
  MergedRow const merged = merge_row<kAtOnce>(StridedParts<Partial>(p, at, grid.wide_parts), p.splits, groups, exists);
  if (!exists || groups.group > 0) { return; }
  if (column == 0 && p.lse != nullptr) { p.lse[index] = merged.lse; }
  float const columns[kMergeColumns] = {merged.columns.x, merged.columns.y, merged.columns.z, merged.columns.w};
  if (grid.wide_out) { return store(p.out.data, p.out_dtype, at.offset(p.out), columns); }
  for (int i = 0; i < kMergeColumns && column + i < p.head_dim; ++i) {
    float const one[1] = {columns[i]};
    store(p.out.data, p.out_dtype, at.offset(p.out) + i, one);
  }
}

// Whether kMergeColumns neighbouring columns always lie at a multiple of their size.
template <class Pointer>
bool is_wide(Strided<Pointer> const& t, int64_t part_stride, int head_dim, DType dtype) {
  int64_t const steps = t.batch_stride | t.row_stride | t.head_stride | part_stride | head_dim;
  int const bytes = kMergeColumns * (dtype == DType::kFloat32 ? 4 : 2);
  return steps % kMergeColumns == 0 && reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
}

// Few parts: less code and fewer registers. The order in which a row is added up is the same.
template <class Partial>
void launch_combine_of(FlashCombineParams const& params, cudaStream_t stream, bool overlap) {
  MergePlan const plan = plan_combine(params.head_dim);
  int64_t const blocks = combine_blocks(int64_t(params.batch) * params.heads * params.seqlen);  // of a slice
  check_grid("flash_combine", blocks * plan.slices);
  RowGrid const grid{FastDivisor(static_cast<int>(blocks)),
                     FastDivisor(params.seqlen),
                     FastDivisor(params.heads),
                     plan.log2_lanes,
                     is_wide(params.out_partial, params.out_split_stride, params.head_dim, params.partial_dtype),
                     is_wide(params.out, 0, params.head_dim, params.out_dtype)};
  constexpr int kFew = 4, kMany = kLanes / kMostCombineGroups;
  launch("flash_combine",
         params.splits <= kFew ? flash_fwd_splitkv_combine_kernel<Partial, kFew>
                               : flash_fwd_splitkv_combine_kernel<Partial, kMany>,
         dim3(static_cast<unsigned>(blocks * plan.slices)), kMergeWarps * kLanes, 0, stream, overlap, params, grid);
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
