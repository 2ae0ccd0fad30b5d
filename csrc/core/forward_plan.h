// How a forward call is cut into query tiles.
#pragma once

#include <cstdint>

#include "core/row_map.h"
#include "core/tile_table.h"
#include "core/work_tile.h"
#include "flashattn/params.h"

namespace flashattn {

struct ForwardPlan {
  RowMap row_map;
  int tile_tokens;  // query tokens of a tile; with packed heads, tile.m / heads per token
  int64_t tiles;    // over all sequences and heads
};

// Packs the query heads that share a key/value head into one tile when a sequence's own rows would
// fill no more than half of it: then keys and values are read once instead of once per head.
// Which rows share a tile has no influence on the result of a row, so seqlen_q may be any bound.
FA_HD ForwardPlan plan_forward(Shape const& shape, Lengths const& lengths, TileShape tile) {
  int const group = shape.heads / shape.heads_kv;
  bool const pack = group > 1 && group <= tile.m && shape.seqlen_q <= tile.m / 2;
  ForwardPlan plan{RowMap{pack ? group : 1}, 0, 0};
  plan.tile_tokens = tile.m / plan.row_map.pack();
  plan.tiles =
      tiles_per_head(shape, lengths, plan.tile_tokens) * (shape.heads / plan.row_map.pack());
  return plan;
}

}  // namespace flashattn
