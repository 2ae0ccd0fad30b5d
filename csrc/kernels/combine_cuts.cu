// Merges the tiles that an attention kernel shared out among thread blocks (core/cut_tile.h).
#include <cstring>

#include "core/merge_plan.h"
#include "kernels/kernels.h"
#include "kernels/launch_kernel.h"
#include "kernels/merge_row.h"

namespace flashattn {
namespace {

// The cut tiles of one role, and how the lanes of a warp share a row.
struct RoleMerge {
  CutTiles cuts;
  int log2_lanes;
  FastDivisor slices;

  RoleMerge(CutTiles const& tiles, MergePlan const& plan)
      : cuts(tiles), log2_lanes(plan.log2_lanes), slices(plan.slices) {}
};

// 16 bytes if they are wanted, otherwise zeros. Without a branch, so that the instructions have been fetched before
// there is work.
__device__ float4 load_if(bool wanted, char const* from) {
  float4 x;
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.s32 wanted, %5, 0;\n"
      "  mov.f32 %0, 0f00000000;\n"
      "  mov.f32 %1, 0f00000000;\n"
      "  mov.f32 %2, 0f00000000;\n"
      "  mov.f32 %3, 0f00000000;\n"
      "  @wanted ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&f"(x.x), "=&f"(x.y), "=&f"(x.z), "=&f"(x.w)
      : "l"(from), "r"(int(wanted)));
  return x;
}

// The parts of one row. They have all been written, also those without keys.
class RowParts {
 public:
  __device__ RowParts(CutTiles const& cuts, int entry, int row, int head_dim) {
    int64_t const first = cuts.slot(entry, 0), second = cuts.slot(entry, 1), third = cuts.slot(entry, 2);
    first_ = first * cuts.rows + row;
    // From part 1 on they lie at equal distances.
    stride_ = (third - second) * cuts.rows;
    origin_ = second * cuts.rows + row - stride_;
    lse_ = cuts.lse;
    out_ = cuts.out;
    head_dim_ = head_dim;
  }

  // -inf where there are not so many.
  __device__ float lse(int part, int parts) const { return part < parts ? lse_[place(part)] : -kInfinity; }

  // Four columns of the kCount parts `first`, first + step, ..., as far as there are so many.
  template <int kCount>
  __device__ void load(float4 (&values)[kCount], int first, int step, int parts, int column) const {
    auto const address = [&](int64_t place) {
      return reinterpret_cast<char const*>(out_ + place * head_dim_ + column);
    };
    char const* at = address(origin_ + first * stride_);
    int64_t const bytes = step * stride_ * head_dim_ * int64_t(sizeof(float));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int const part = first + i * step;
      values[i] = load_if(part < parts, i == 0 && part == 0 ? address(first_) : at);
      at += bytes;
    }
  }

 private:
  __device__ int64_t place(int part) const { return part == 0 ? first_ : origin_ + part * stride_; }

  int64_t first_, origin_, stride_;  // rows of head_dim
  float const* lse_;
  float const* out_;
  int head_dim_;
};

// All of it in one trip to memory: fields that are loaded where they are needed take one each.
__device__ QueryTile load_at_once(QueryTile const* source) {
  static_assert(sizeof(QueryTile) % sizeof(int4) == 0);
  int4 pieces[sizeof(QueryTile) / sizeof(int4)];
#pragma unroll
  for (int i = 0; i < sizeof(QueryTile) / sizeof(int4); ++i) {
    int4& to = pieces[i];
    asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(reinterpret_cast<int4 const*>(source) + i));
  }
  QueryTile tile;
  memcpy(&tile, pieces, sizeof(tile));
  return tile;
}

// A row of a cut tile.
struct Place {
  int entry = 0;
  int parts = 0;
  int row = 0;
};

// All rows of the cut tiles of a role, one after the other. A lane has every 32nd entry.
class CutRows {
  static constexpr int kFirst = 12;  // entries of a lane: all up to 384 thread blocks or chunk tiles

 public:
  // The rows of this lane's first entries; those of both roles are asked for before any are added up.
  struct First {
    int rows[kFirst];

    // Without `exists` as if no tile had been cut.
    __device__ First(CutTiles const& cuts, bool exists) {
#pragma unroll
      for (int i = 0; i < kFirst; ++i) {
        int const entry = threadIdx.x % kLanes + i * kLanes;
        rows[i] = exists && entry < cuts.entries ? cuts.sizes[entry].rows : 0;
      }
    }
  };

  __device__ CutRows(CutTiles const& cuts, bool exists, First const& first) : sizes_(cuts.sizes) {
#pragma unroll
    for (int i = 0; i < kFirst; ++i) { end_ += first.rows[i]; }
    if (exists) {
      for (int entry = threadIdx.x % kLanes + kFirst * kLanes; entry < cuts.entries; entry += kLanes) {
        end_ += sizes_[entry].rows;
      }
    }
    begin_ = -end_;
    for (int distance = 1; distance < kLanes; distance *= 2) {
      int const other = __shfl_up_sync(0xffffffff, end_, distance);
      end_ += threadIdx.x % kLanes >= distance ? other : 0;
    }
    begin_ += end_;
  }

  __device__ int count() const { return __shfl_sync(0xffffffff, end_, kLanes - 1); }

  // For the whole warp. Of no parts, if there are not so many.
  __device__ Place find(int index) const {
    int const lane = threadIdx.x % kLanes;
    int const holder = __popc(__ballot_sync(0xffffffff, end_ <= index));
    Place place;
    if (lane == holder) {
      place.row = index - begin_;
      for (place.entry = lane;; place.entry += kLanes) {
        CutTiles::Size const size = sizes_[place.entry];
        place.parts = size.parts;
        if (place.row < size.rows) { break; }
        place.row -= size.rows;
      }
    }
    int const from = holder < kLanes ? holder : 0;
    return {__shfl_sync(0xffffffff, place.entry, from), __shfl_sync(0xffffffff, place.parts, from),
            __shfl_sync(0xffffffff, place.row, from)};
  }

 private:
  CutTiles::Size const* sizes_;
  int begin_ = 0;  // this lane's rows
  int end_ = 0;
};

// A slice of a row; of no parts, nothing.
__device__ void merge(FlashFwdParams const& p, RoleMerge const& role, Place const& place, int slice) {
  constexpr int kAtOnce = kMergeParts;
  LaneGroups const groups(role.log2_lanes);
  int const column = slice * groups.lanes * kMergeColumns + groups.column;
  bool const exists = place.parts > 0 && column < p.shape.head_dim;
  // All are on their way before anybody knows what they count.
  RowParts const row(role.cuts, place.entry, place.row, p.shape.head_dim);
  float const own_lse = row.lse(threadIdx.x % kLanes, place.parts);
  float4 values[kAtOnce];
  row.load(values, groups.group, groups.count, exists ? place.parts : 0, column);
  QueryTile tile;
  if (place.parts > 0) { tile = load_at_once(&role.cuts.tiles[place.entry]); }
  Weights<RowParts> weights(row, place.parts, own_lse);
  float4 sum{};
  float own_weight = weights.take(0);
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float const weight = __shfl_sync(0xffffffff, own_weight, first % kLanes + i * groups.count + groups.group);
      sum.x += weight * values[i].x, sum.y += weight * values[i].y;
      sum.z += weight * values[i].z, sum.w += weight * values[i].w;
    }
    first += kAtOnce * groups.count;
    if (first >= place.parts) { break; }
    row.load(values, first + groups.group, groups.count, exists ? place.parts : 0, column);
    if (first % kLanes == 0) { own_weight = weights.take(first); }
  }
  sum = groups.add_up(sum);
  float const total = weights.total(), factor = total == 0.f ? 0.f : reciprocal_fast(total);
  if (exists && groups.group == 0) {
    float const out[kMergeColumns] = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
    store(p.out.data, p.dtype, tile.offset(p.out, place.row) + column, out);
    if (column == 0 && p.lse != nullptr) { p.lse[tile.lse_index(p.shape, p.lengths, place.row)] = weights.lse(total); }
  }
}

__global__ void __launch_bounds__(kMergeWarps* kLanes, kMergeBlocks + 1)
    flash_fwd_splitkv_combine_cuts_kernel(__grid_constant__ FlashFwdParams const p,
                                          __grid_constant__ RoleMerge const decode,
                                          __grid_constant__ RoleMerge const chunk) {
  let_next_kernel_start();
  int const warps = gridDim.x * kMergeWarps, warp = blockIdx.x * kMergeWarps + threadIdx.x / kLanes;
  // First without work, while there is none: fetching the instructions takes as long as merging does (H200,
  // 2026-11-30, docs/tuning.md).
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    bool const exists = pass > 0;
    if (exists) { wait_for_previous_kernel(); }
    CutRows::First const decode_first(decode.cuts, exists), chunk_first(chunk.cuts, exists);
    CutRows const decode_rows(decode.cuts, exists, decode_first), chunk_rows(chunk.cuts, exists, chunk_first);
    int const decode_end = decode_rows.count() * decode.slices.divisor();
    int const end = decode_end + chunk_rows.count() * chunk.slices.divisor();
    int index = warp;  // of a slice
    if (exists && index >= end) { return; }
    do {
      bool const is_chunk = index >= decode_end;
      RoleMerge const& role = is_chunk ? chunk : decode;
      int const at = index - (is_chunk ? decode_end : 0), row = role.slices.quotient(at);
      CutRows rows = decode_rows;
      if (is_chunk) { rows = chunk_rows; }
      merge(p, role, rows.find(row), at - row * role.slices.divisor());
      index += warps;
    } while (index < end);
  }
}

}  // namespace

void launch_combine_cuts(FlashFwdParams const& params, SplitkvPlan const& plan, cudaStream_t stream, bool overlap) {
  MergePlans const merges = plan_merges(plan, params.shape);
  RoleMerge const decode(plan.decode_cuts, merges.decode), chunk(plan.chunk_cuts, merges.chunk);
  launch("flash_fwd_splitkv", flash_fwd_splitkv_combine_cuts_kernel, dim3(merges.blocks), kMergeWarps * kLanes, 0,
         stream, overlap, params, decode, chunk);
}

}  // namespace flashattn
