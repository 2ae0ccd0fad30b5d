// Which (query token, query head) a row of a tile is. The only code that knows that the query
// heads of one key/value head may be packed into one tile.
#pragma once

#include "core/macros.h"

namespace flashattn {

// Rows are ordered by token, then by head: the `pack` rows of a token are neighbours, so a tile
// covers a contiguous range of tokens and the key bounds still grow with the row.
struct RowMap {
  int pack = 1;  // query heads per tile row group: 1, or heads / heads_kv

  FA_HD int token(int row) const { return pack == 1 ? row : row / pack; }
  FA_HD int head(int row) const { return pack == 1 ? 0 : row % pack; }
  FA_HD int rows(int tokens) const { return tokens * pack; }
};

}  // namespace flashattn
