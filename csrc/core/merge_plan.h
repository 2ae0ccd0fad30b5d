// How the merges share out rows among their warps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/splitkv_plan.h"

namespace flashattn {

constexpr int kMergeWarps = 4;   // of a thread block
constexpr int kMergeBlocks = 4;  // on a multiprocessor, with registers for one more: one fits beside decoding and waits
constexpr int kMergeColumns = 4;  // of a lane
constexpr int kMergeParts = 4;    // that a lane asks for at once
constexpr int kMinMergeLanes =
    kMergeParts;  // of a slice: the warp asks for 32 parts then, one for each weight it knows

// Of the cut tiles of one role. A warp takes a slice of the columns of one row at a time; where that needs only some of
// its lanes, the others take other parts of the row.
struct MergePlan {
  int log2_lanes = 5;  // of a slice
  int slices = 1;      // of a row

  constexpr int lanes() const { return 1 << log2_lanes; }
};

inline int merge_slices(int head_dim, int lanes) { return 1 + (head_dim - 1) / (lanes * kMergeColumns); }  // rounded up

// For rows of about `parts` parts each. The fewer the rows, the more warps share one, until they ask for all of its
// parts at once.
inline MergePlan plan_merge(int head_dim, int64_t rows, int64_t parts, int64_t warps) {
  MergePlan plan;
  while (plan.lanes() > kMinMergeLanes) {
    int const fewer = plan.lanes() / 2;
    bool const idle = fewer * kMergeColumns >= head_dim;
    bool const at_once = 32 / plan.lanes() * kMergeParts >= parts;
    if (!idle && (at_once || rows * merge_slices(head_dim, fewer) > warps)) { break; }
    --plan.log2_lanes;
  }
  plan.slices = merge_slices(head_dim, plan.lanes());
  return plan;
}

// Of flash_combine, and of splits that the caller gave. It depends on nothing but the head dim, because a row's parts
// are added up in the order that it gives them, and the bits of such a row must not depend on the batch.
constexpr int kMostCombineGroups = 2;  // of lanes
inline MergePlan plan_combine(int head_dim) {
  MergePlan plan;
  plan.log2_lanes = head_dim > 32 / kMostCombineGroups * kMergeColumns ? 5 : 4;
  plan.slices = merge_slices(head_dim, plan.lanes());
  return plan;
}
inline int64_t combine_blocks(int64_t rows) { return (rows + kMergeWarps - 1) / kMergeWarps; }  // of a slice

struct MergePlans {
  MergePlan decode;
  MergePlan chunk;
  int blocks = 0;  // thread blocks: enough for all rows of the call, or kMergeBlocks a multiprocessor
};

inline MergePlans plan_merges(SplitkvPlan const& plan, Shape const& shape) {
  int64_t const most_blocks = int64_t(kMergeBlocks) * plan.multiprocessors, most_warps = most_blocks * kMergeWarps;
  auto const plan_role = [&](CutTiles const& cuts, int64_t parts) {
    int64_t const rows = std::min(plan.rows, int64_t(cuts.entries) * cuts.rows);
    return plan_merge(shape.head_dim, rows, parts, most_warps);
  };
  int64_t const decode_tiles = std::max<int64_t>(plan.decode.tiles, 1);
  MergePlans merges{plan_role(plan.decode_cuts, plan.shares / decode_tiles + 1),
                    plan_role(plan.chunk_cuts, plan.chunk_split.splits)};
  int64_t const warps = plan.rows * std::max(merges.chunk.slices, merges.decode.slices);
  merges.blocks = static_cast<int>(std::min(most_blocks, (warps + kMergeWarps - 1) / kMergeWarps));
  return merges;
}

}  // namespace flashattn
