// How a forward call is cut into query tiles.
#pragma once

#include <cstdint>

#include "core/fast_divisor.h"
#include "core/row_map.h"
#include "core/tile_table.h"
#include "core/work_tile.h"
#include "flashattn/params.h"

namespace flashattn {

struct ForwardPlan {
  RowMap row_map;
  int tile_tokens;    // query tokens of a tile; with packed heads, tile.m / heads per token
  int64_t tiles;      // over all sequences and heads
  FastDivisor group;  // query heads of a key/value head
  TileDivisors<FastDivisor> divisors;

  FA_HD ForwardPlan() : tile_tokens(0), tiles(0) {}
  FA_HD ForwardPlan(Shape const& shape, Lengths const& lengths, int tile_rows, int pack)
      : row_map(pack),
        tile_tokens(tile_rows / pack),
        tiles(tiles_per_head(shape, lengths, tile_tokens) * (shape.heads / pack)),
        group(shape.heads > shape.heads_kv ? shape.heads / shape.heads_kv : 1),
        divisors(shape, lengths, tile_tokens) {}

  FA_HD WorkTile work_tile(Shape const& shape, Lengths const& lengths, int index) const {
    return flashattn::work_tile(shape, lengths, divisors, index);
  }
};

// Packs the query heads that share a key/value head into one tile, which reads keys and values once instead of
// once per head and is narrower under a causal mask: when no row of the tile is lost by it, or when a sequence's
// own rows would fill no more than half of a tile. Which rows share a tile has no influence on the result of a
// row, so seqlen_q may be any bound.
FA_HD ForwardPlan plan_forward(Shape const& shape, Lengths const& lengths, TileShape tile) {
  int const group = shape.heads / shape.heads_kv;
  bool const fits = group > 1 && group <= tile.m;
  bool const pack = fits && (tile.m % group == 0 || shape.seqlen_q <= tile.m / 2);
  return ForwardPlan(shape, lengths, tile.m, pack ? group : 1);
}

}  // namespace flashattn
