// Where the rows of a query tile lie in memory, and what ALiBi knows of them. Where rows are many, one thread a row
// works it out, so that those which move pieces of it need no 64-bit products of their own.
#pragma once

#include "core/query_tile.h"
#include "sm80/part.h"
#include "sm80/tile_copy.h"

namespace flashattn::sm80 {

// The offset of a row that the tile does not have.
constexpr int64_t kNoRow = INT64_MIN;

// What ALiBi knows of a row: its slope, and the key that its query is level with.
struct RowBias {
  float slope;
  int diagonal;
};

CUTE_DEVICE RowBias row_bias(Score const& score, QueryTile const& tile, int row) {
  if (!tile.has_row(row)) { return {0.f, 0}; }
  float const* const slopes = score.alibi_slopes + tile.seq.batch * score.alibi_batch_stride;
  return {slopes[tile.head(row)], tile.token(row) + tile.seq.len_k - tile.seq.len_q};
}

// The row at `offset`, or none.
template <class Element>
CUTE_DEVICE Row<Element> row_at(Element* data, int64_t offset) {
  bool const exists = offset != kNoRow;
  return {data + (exists ? offset : 0), exists};
}

// Elements before the row in q.
CUTE_DEVICE int64_t query_row(FlashFwdParams const& params, Part const& part, int row) {
  return part.tile.has_row(row) ? part.tile.offset(params.q, row) : kNoRow;
}

// The row's place in lse.
CUTE_DEVICE int64_t lse_row(FlashFwdParams const& params, Part const& part, int row) {
  return part.output.tile_order ? row : part.tile.lse_index(params.shape, params.lengths, row);
}

// Elements before the row in out, or in the part's fp32 output.
CUTE_DEVICE int64_t out_row(FlashFwdParams const& params, Part const& part, int row) {
  if (!part.tile.has_row(row)) { return kNoRow; }
  bool const is_final = part.output.out == nullptr;
  return is_final ? part.tile.offset(params.out, row) : lse_row(params, part, row) * params.shape.head_dim;
}

}  // namespace flashattn::sm80
