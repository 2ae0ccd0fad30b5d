// Where the rows of a query tile lie in memory. Worked out by one thread a row, so that those which move pieces of it
// need no 64-bit products of their own.
#pragma once

#include "core/query_tile.h"
#include "sm80/part.h"

namespace flashattn::sm80 {

// The offset of a row that the tile does not have.
constexpr int64_t kNoRow = INT64_MIN;

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
