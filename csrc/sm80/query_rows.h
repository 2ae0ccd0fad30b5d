// Where the rows of a query tile lie in memory.
#pragma once

#include "core/query_tile.h"
#include "sm80/part.h"

namespace flashattn::sm80 {

// Elements before the row in q, and in out or in the part's fp32 output; kNoRow where the tile has no such row.
struct QueryRow {
  static constexpr int64_t kNoRow = INT64_MIN;
  int64_t q;
  int64_t out;

  CUTE_DEVICE bool exists() const { return q != kNoRow; }
};

// The row's place in lse.
CUTE_DEVICE int64_t row_index(FlashFwdParams const& params, Part const& part, int row) {
  return part.output.tile_order ? row : part.tile.lse_index(params.shape, params.lengths, row);
}

// By one thread a row: the threads that move pieces of it need no 64-bit products of their own.
template <int kRows>
CUTE_DEVICE void find_query_rows(FlashFwdParams const& params, Part const& part, QueryRow (&rows)[kRows]) {
  int const row = threadIdx.x;
  if (row >= kRows) { return; }
  QueryTile const& tile = part.tile;
  QueryRow found{QueryRow::kNoRow, QueryRow::kNoRow};
  if (tile.has_row(row)) {
    found.q = tile.offset(params.q, row);
    bool const is_final = part.output.out == nullptr;
    found.out = is_final ? tile.offset(params.out, row) : row_index(params, part, row) * params.shape.head_dim;
  }
  rows[row] = found;
}

}  // namespace flashattn::sm80
