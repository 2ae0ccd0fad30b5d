// Merges the tiles that an attention kernel shared out among thread blocks (core/cut_tile.h).
#include <cstring>

#include "core/merge_plan.h"
#include "kernels/kernels.h"
#include "kernels/launch_kernel.h"
#include "kernels/merge_row.h"

namespace flashattn {
namespace {

// The cut tiles of one role, and how they are shared out.
struct RoleMerge {
  CutTiles cuts;
  FastDivisor places;
  FastDivisor slices;
  int groups;
  int blocks;

  RoleMerge(CutTiles const& tiles, MergePlan const& plan)
      : cuts(tiles), places(plan.places), slices(plan.slices), groups(plan.groups), blocks(plan.blocks) {}
};

// The parts of row `row` of cut tile `entry`, from this lane's columns on.
struct PartsInSlots {
  static constexpr int kWidth = kMergeColumns;
  static constexpr bool kAllWritten = true;

  __device__ PartsInSlots(CutTiles const& cuts, int entry, int row, int head_dim, int column) {
    int64_t const first = cuts.slot(entry, 0) * cuts.rows + row, second = cuts.slot(entry, 1) * cuts.rows + row;
    lse_first_ = cuts.lse + first;
    lse_second_ = cuts.lse + second;
    out_first_ = cuts.out + first * head_dim + column;
    out_second_ = cuts.out + second * head_dim + column;
    stride_ = static_cast<int>(cuts.slot(entry, 2) - cuts.slot(entry, 1)) * cuts.rows;
    out_stride_ = stride_ * head_dim;
  }

  __device__ float lse(int part) const { return part == 0 ? *lse_first_ : lse_second_[(part - 1) * stride_]; }
  __device__ void load(int part, float (&values)[kWidth]) const {
    float const* const from = part == 0 ? out_first_ : out_second_ + (part - 1) * out_stride_;
    float2 const at_once = *reinterpret_cast<float2 const*>(from);
    values[0] = at_once.x, values[1] = at_once.y;
  }

 private:
  float const *lse_first_, *lse_second_;  // from part 1 on they lie at equal distances
  float const *out_first_, *out_second_;
  int stride_, out_stride_;
};

// All of it in one trip to memory: fields that are loaded where they are needed take one each.
__device__ QueryTile load_at_once(CutTile const* source) {
  int4 pieces[sizeof(CutTile) / sizeof(int4)];
#pragma unroll
  for (int i = 0; i < sizeof(CutTile) / sizeof(int4); ++i) {
    int4& to = pieces[i];
    asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(reinterpret_cast<int4 const*>(source) + i));
  }
  CutTile copy;
  memcpy(&copy, pieces, sizeof(copy));
  return copy.tile;
}

// Row `row` of a cut tile, and every step-th behind it.
__device__ void merge_tile(FlashFwdParams const& p, CutTiles const& cuts, int entry, int parts, int rows, int row,
                           int step, int column) {
  int const lane = threadIdx.x % kLanes;
  bool const column_exists = column < p.shape.head_dim;
  QueryTile tile;
  if (rows > 0) { tile = load_at_once(&cuts.tiles[entry]); }
  do {
    bool const exists = row < rows;
    PartsInSlots const slots{cuts, entry, row, p.shape.head_dim, column};
    MergedRow<kMergeColumns> const merged = merge_row(slots, exists ? parts : 0, lane, column_exists);
    if (exists && column_exists) {
      store(p.out.data, p.dtype, tile.offset(p.out, row) + column, merged.out);
      if (column == 0 && p.lse != nullptr) { p.lse[tile.lse_index(p.shape, p.lengths, row)] = merged.lse; }
    }
    row += step;
  } while (row < rows);
}

// Entries group, group + groups, ...: a lane looks at one of 32. Without `exists` as if there were a tile of no rows.
__device__ void merge_group(FlashFwdParams const& p, RoleMerge const& work, int group, int row, int column,
                            bool exists) {
  int const lane = threadIdx.x % kLanes, step = work.slices.quotient(work.places.divisor());
  int first = group;
  do {
    int const own = first + lane * work.groups;
    CutTile::Size size{0, 0};
    if (exists && own < work.cuts.entries) { size = work.cuts.tiles[own].size; }
    for (unsigned cut = exists ? __ballot_sync(0xffffffff, size.parts > 0) : 1; cut != 0; cut &= cut - 1) {
      int const found = __ffs(cut) - 1;
      merge_tile(p, work.cuts, first + found * work.groups, __shfl_sync(0xffffffff, size.parts, found),
                 __shfl_sync(0xffffffff, size.rows, found), row, step, column);
    }
    first += kLanes * work.groups;
  } while (exists && first < work.cuts.entries);
}

__global__ void __launch_bounds__(kMergeWarps* kLanes)
    flash_fwd_splitkv_combine_cuts_kernel(__grid_constant__ FlashFwdParams const p,
                                          __grid_constant__ RoleMerge const decode,
                                          __grid_constant__ RoleMerge const chunk) {
  let_next_kernel_start();
  // Chunks first: they have more to merge, and where both roles do not fit on the GPU at once, the others come late.
  bool const is_chunk = blockIdx.x < chunk.blocks;
  RoleMerge const& work = is_chunk ? chunk : decode;
  int const warp = (blockIdx.x - (is_chunk ? 0 : chunk.blocks)) * kMergeWarps + threadIdx.x / kLanes;
  int const group = work.places.quotient(warp), place = warp - group * work.places.divisor();
  int const row = work.slices.quotient(place), slice = place - row * work.slices.divisor();
  int const column = slice * kMergeSlice + threadIdx.x % kLanes * kMergeColumns;
  if (group >= work.groups) { return; }
  // First without work, while there is none: fetching the instructions takes three times as long as merging does
  // (H200, 2026-11-30, docs/tuning.md).
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    bool const exists = pass > 0;
    if (exists) { wait_for_previous_kernel(); }
    merge_group(p, work, group, row, column, exists);
  }
}

}  // namespace

void launch_combine_cuts(FlashFwdParams const& params, SplitkvPlan const& plan, cudaStream_t stream, bool overlap) {
  MergePlans const merges = plan_merges(plan, params.shape);
  RoleMerge const decode(plan.decode_cuts, merges.decode), chunk(plan.chunk_cuts, merges.chunk);
  launch("flash_fwd_splitkv", flash_fwd_splitkv_combine_cuts_kernel, dim3(decode.blocks + chunk.blocks),
         kMergeWarps * kLanes, 0, stream, overlap, params, decode, chunk);
}

}  // namespace flashattn
