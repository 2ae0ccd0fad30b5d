// How the merge shares out the rows of cut tiles among its warps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/splitkv_plan.h"

namespace flashattn {

constexpr int kMergeWarps = 4;    // of a thread block
constexpr int kMergeBlocks = 4;   // on a multiprocessor; one of them fits beside the attention kernel and waits
constexpr int kMergeColumns = 2;  // of a lane
constexpr int kMergeSlice = 32 * kMergeColumns;

// Of the cut tiles of one role. A warp has one place, a row and a slice of its columns, in the tiles of entries
// group, group + groups, ...
struct MergePlan {
  int slices = 1;
  int places = 1;  // rows of a tile that a call can have, times slices
  int groups = 0;
  int blocks = 0;  // thread blocks
};

// As many groups as there are entries, or as the warps suffice for. Should a tile have more rows than seqlen_q
// allows, a warp takes several.
inline MergePlan plan_merge(CutTiles const& cuts, ForwardPlan const& role, Shape const& shape, int multiprocessors) {
  if (cuts.entries == 0) { return {}; }
  MergePlan plan;
  int const rows = role.row_map.rows(std::min(role.tile_tokens, std::max(shape.seqlen_q, 1)));
  plan.slices = ceil_div(shape.head_dim, kMergeSlice);
  plan.places = std::min(rows, cuts.rows) * plan.slices;
  int const warps = kMergeBlocks * kMergeWarps * multiprocessors;
  plan.groups = std::min(cuts.entries, std::max(1, warps / plan.places));
  plan.blocks = ceil_div(plan.groups * plan.places, kMergeWarps);
  return plan;
}

struct MergePlans {
  MergePlan decode;
  MergePlan chunk;
};

inline MergePlans plan_merges(SplitkvPlan const& plan, Shape const& shape) {
  return {plan_merge(plan.decode_cuts, plan.decode, shape, plan.multiprocessors),
          plan_merge(plan.chunk_cuts, plan.chunk, shape, plan.multiprocessors)};
}

}  // namespace flashattn
