// Which (query token, query head) a row of a tile is. The only code that knows that the query
// heads of one key/value head may be packed into one tile.
#pragma once

#include "core/macros.h"

namespace flashattn {

// Rows are ordered by token, then by head: the `pack` rows of a token are neighbours, so a tile
// covers a contiguous range of tokens and the key bounds still grow with the row.
class RowMap {
 public:
  static constexpr int kMaxRows = 256;  // of a tile, and so the largest pack

  // The quotient row / pack is row * ceil(2^16 / pack) >> 16: the multiplier is off by less than
  // pack / 2^16 · 1/pack, which over 256 rows adds up to less than the 1/pack that would show.
  FA_HD RowMap() : RowMap(1) {}
  FA_HD explicit RowMap(int pack) : pack_(pack), reciprocal_((65536 + pack - 1) / pack) {}

  FA_HD int pack() const { return pack_; }
  FA_HD int token(int row) const { return row * reciprocal_ >> 16; }
  FA_HD int head(int row) const { return row - token(row) * pack_; }
  FA_HD int rows(int tokens) const { return tokens * pack_; }

 private:
  int pack_;
  int reciprocal_;
};

}  // namespace flashattn
