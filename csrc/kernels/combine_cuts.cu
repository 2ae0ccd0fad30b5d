// Merges the tiles that an attention kernel shared out among thread blocks (core/cut_tile.h).
#include <algorithm>
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/launch_kernel.h"
#include "kernels/merge_row.h"

namespace flashattn {
namespace {

constexpr int kWarps = 4;         // of a thread block; each takes a row at a time
constexpr int kRowsPerBlock = 8;  // of a tile

struct Merge {
  CutTiles decode;
  CutTiles chunk;
  FastDivisor decode_blocks;  // thread blocks per entry
  FastDivisor chunk_blocks;
  int first_chunk_block;      // behind those of the decode tiles
};

// The parts of row `row` of cut tile `entry`.
struct PartsInSlots {
  CutTiles const& cuts;
  int entry;
  int row;
  int head_dim;
  int column;

  __device__ int64_t index(int part) const { return cuts.slot(entry, part) * cuts.rows + row; }
  __device__ float lse(int part) const { return cuts.lse[index(part)]; }
  __device__ float const* out(int part) const { return cuts.out + index(part) * head_dim + column; }
};

// All of it in one trip to memory: fields that are loaded where they are needed take one each.
__device__ CutTile load_at_once(CutTile const* source) {
  constexpr int kPieces = sizeof(CutTile) / sizeof(int4);
  int4 pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    int4& to = pieces[i];
    asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(reinterpret_cast<int4 const*>(source) + i));
  }
  CutTile copy;
  memcpy(&copy, pieces, sizeof(copy));
  return copy;
}

__global__ void __launch_bounds__(kWarps * kLanes)
    flash_fwd_splitkv_combine_cuts_kernel(__grid_constant__ FlashFwdParams const p,
                                          __grid_constant__ Merge const merge) {
  int const block = blockIdx.x;
  bool const is_chunk = block >= merge.first_chunk_block;
  CutTiles const& cuts = is_chunk ? merge.chunk : merge.decode;
  FastDivisor const blocks = is_chunk ? merge.chunk_blocks : merge.decode_blocks;
  int const index = block - (is_chunk ? merge.first_chunk_block : 0), entry = blocks.quotient(index);
  int const first_row = (index - entry * blocks.divisor()) * kWarps + threadIdx.x / kLanes;
  int const lane = threadIdx.x % kLanes, column = blockIdx.y * kLanes + lane;
  bool const column_exists = column < p.shape.head_dim;
  auto const lse_of_lane = [&](int row) {
    PartsInSlots const parts{cuts, entry, row, p.shape.head_dim, column};
    return row < cuts.rows && cuts.has_slot(entry, lane) ? parts.lse(lane) : -kInfinity;
  };
  wait_for_previous_kernel();
  float own_lse = lse_of_lane(first_row);
  CutTile const cut = load_at_once(&cuts.tiles[entry]);
  if (cut.parts == 0) { return; }

  QueryTile const& tile = cut.tile;
  int const step = blocks.divisor() * kWarps;
  for (int row = first_row; tile.has_row(row); row += step, own_lse = lse_of_lane(row)) {
    PartsInSlots const parts{cuts, entry, row, p.shape.head_dim, column};
    MergedRow const merged = merge_row(parts, cut.parts, own_lse, lane, column_exists);
    if (column == 0 && p.lse != nullptr) { p.lse[tile.lse_index(p.shape, p.lengths, row)] = merged.lse; }
    if (column_exists) { store(p.out.data, p.dtype, tile.offset(p.out, row) + column, merged.out); }
  }
}

// Enough for the rows that the caller's seqlen_q allows; should there be more, each takes several.
int blocks_per_entry(CutTiles const& cuts, ForwardPlan const& plan, int seqlen_q) {
  int const rows = plan.row_map.rows(std::min(plan.tile_tokens, std::max(seqlen_q, 1)));
  return std::max(1, (std::min(rows, cuts.rows) + kRowsPerBlock - 1) / kRowsPerBlock);
}

}  // namespace

void launch_combine_cuts(FlashFwdParams const& params, SplitkvPlan const& plan, cudaStream_t stream, bool overlap) {
  Merge merge{plan.decode_cuts, plan.chunk_cuts, FastDivisor(), FastDivisor(), 0};
  merge.decode_blocks = FastDivisor(blocks_per_entry(plan.decode_cuts, plan.decode, params.shape.seqlen_q));
  merge.chunk_blocks = FastDivisor(blocks_per_entry(plan.chunk_cuts, plan.chunk, params.shape.seqlen_q));
  merge.first_chunk_block = plan.decode_cuts.entries * merge.decode_blocks.divisor();
  int const blocks = merge.first_chunk_block + plan.chunk_cuts.entries * merge.chunk_blocks.divisor();
  dim3 const grid(blocks, (params.shape.head_dim + kLanes - 1) / kLanes);
  launch("flash_fwd_splitkv", flash_fwd_splitkv_combine_cuts_kernel, grid, kWarps * kLanes, 0, stream, overlap,
         params, merge);
}

}  // namespace flashattn
