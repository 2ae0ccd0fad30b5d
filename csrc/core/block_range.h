// Which key blocks a tile of query rows needs, and which of them need no mask.
#pragma once

#include "core/macros.h"
#include "core/visible_band.h"

namespace flashattn {

FA_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Blocks [begin, end) hold at least one visible key of some row. In the clean blocks
// [clean_begin, clean_end) every row sees every key.
struct BlockRange {
  int begin;
  int end;
  int clean_begin;
  int clean_end;

  FA_HD int count() const { return end - begin; }
  FA_HD bool is_clean(int block) const { return block >= clean_begin && block < clean_end; }
};

// Keys [begin, end) that at least one row of a tile sees. What lies outside is not loaded.
struct KeyRange {
  int begin;
  int end;

  FA_HD bool has(int key) const { return unsigned(key - begin) < unsigned(end - begin); }
};

FA_HD KeyRange visible_keys(VisibleBand const& band, int first_row, int last_row) {
  int const begin = band.begin(first_row), end = band.end(last_row);
  return {begin, end > begin ? end : begin};
}

// For query rows first_row ... last_row, both inclusive.
FA_HD BlockRange visible_blocks(VisibleBand const& band, int first_row, int last_row, int block_n) {
  int const any_begin = band.begin(first_row), any_end = band.end(last_row);
  if (last_row < first_row || any_end <= any_begin) { return {0, 0, 0, 0}; }
  int const all_begin = band.begin(last_row), all_end = band.end(first_row);

  BlockRange r{any_begin / block_n, ceil_div(any_end, block_n), 0, 0};
  r.clean_end = all_end > 0 ? all_end / block_n : 0;
  r.clean_end = r.clean_end < r.begin ? r.begin : r.clean_end;
  r.clean_begin = ceil_div(all_begin, block_n);
  r.clean_begin = r.clean_begin > r.clean_end ? r.clean_end : r.clean_begin;
  return r;
}

}  // namespace flashattn
