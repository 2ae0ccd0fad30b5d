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

// The parts of row `row` of cut tile `entry`.
struct PartsInSlots {
  static constexpr int kWidth = kMergeColumns;

  CutTiles const& cuts;
  int entry;
  int row;
  int head_dim;
  int column;

  __device__ int64_t index(int part) const { return cuts.slot(entry, part) * cuts.rows + row; }
  __device__ float lse(int part) const { return cuts.lse[index(part)]; }
  __device__ void load(int part, float (&values)[kWidth]) const {
    float4 const at_once = *reinterpret_cast<float4 const*>(cuts.out + index(part) * head_dim + column);
    values[0] = at_once.x, values[1] = at_once.y, values[2] = at_once.z, values[3] = at_once.w;
  }
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

// Row `first_row` of a cut tile, and every places / slices-th behind it.
__device__ void merge_tile(FlashFwdParams const& p, RoleMerge const& work, int entry, int count, int first_row,
                           int column) {
  int const lane = threadIdx.x % kLanes;
  bool const column_exists = column < p.shape.head_dim;
  PartsInSlots parts{work.cuts, entry, first_row, p.shape.head_dim, column};
  float own_lse = lane < count ? parts.lse(lane) : -kInfinity;
  QueryTile const tile = load_at_once(&work.cuts.tiles[entry]);
  while (tile.has_row(parts.row)) {
    MergedRow<kMergeColumns> const merged = merge_row(parts, count, own_lse, lane, column_exists);
    if (column == 0 && p.lse != nullptr) { p.lse[tile.lse_index(p.shape, p.lengths, parts.row)] = merged.lse; }
    if (column_exists) { store(p.out.data, p.dtype, tile.offset(p.out, parts.row) + column, merged.out); }
    parts.row += work.slices.quotient(work.places.divisor());
    own_lse = tile.has_row(parts.row) && lane < count ? parts.lse(lane) : -kInfinity;
  }
}

__global__ void __launch_bounds__(kMergeWarps * kLanes)
    flash_fwd_splitkv_combine_cuts_kernel(__grid_constant__ FlashFwdParams const p,
                                          __grid_constant__ RoleMerge const decode,
                                          __grid_constant__ RoleMerge const chunk) {
  let_next_kernel_start();
  bool const is_chunk = blockIdx.x >= decode.blocks;
  RoleMerge const& work = is_chunk ? chunk : decode;
  int const warp = (blockIdx.x - (is_chunk ? decode.blocks : 0)) * kMergeWarps + threadIdx.x / kLanes;
  int const group = work.places.quotient(warp), place = warp - group * work.places.divisor();
  int const row = work.slices.quotient(place), slice = place - row * work.slices.divisor();
  int const lane = threadIdx.x % kLanes, column = slice * kMergeSlice + lane * kMergeColumns;
  if (group >= work.groups) { return; }

  wait_for_previous_kernel();
  for (int first = group; first < work.cuts.entries; first += kLanes * work.groups) {  // a lane looks at one entry
    int const own = first + lane * work.groups;
    int const own_count = own < work.cuts.entries ? work.cuts.tiles[own].parts : 0;
    for (unsigned cut = __ballot_sync(0xffffffff, own_count > 0); cut != 0; cut &= cut - 1) {
      int const found = __ffs(cut) - 1;
      merge_tile(p, work, first + found * work.groups, __shfl_sync(0xffffffff, own_count, found), row, column);
    }
  }
}

}  // namespace

void launch_combine_cuts(FlashFwdParams const& params, SplitkvPlan const& plan, cudaStream_t stream, bool overlap) {
  int const multiprocessors = plan.multiprocessors;
  RoleMerge const decode(plan.decode_cuts,
                         plan_merge(plan.decode_cuts, plan.decode, params.shape, multiprocessors));
  RoleMerge const chunk(plan.chunk_cuts, plan_merge(plan.chunk_cuts, plan.chunk, params.shape, multiprocessors));
  launch("flash_fwd_splitkv", flash_fwd_splitkv_combine_cuts_kernel, dim3(decode.blocks + chunk.blocks),
         kMergeWarps * kLanes, 0, stream, overlap, params, decode, chunk);
}

}  // namespace flashattn
