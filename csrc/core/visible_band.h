// Which keys a query row sees. The only code that knows what causal and windowed attention mean.
#pragma once

#include "core/macros.h"
#include "flashattn/params.h"

namespace flashattn {

// Row i of the sequence sees keys [begin(i), end(i)); none when end(i) <= begin(i).
// Both bounds grow with i, which is what lets block_range.h reason about whole tiles.
struct VisibleBand {
  int len_k;
  int begin_shift;  // the first visible key of row 0, before it is clamped to a real key
  int end_shift;    // one past the last visible key of row 0

  FA_HD int begin(int row) const { return row + begin_shift > 0 ? row + begin_shift : 0; }
  FA_HD int end(int row) const { return row + end_shift < len_k ? row + end_shift : len_k; }
};

// The diagonal is aligned to the bottom right: the last row sits on the last key. Clamping a side
// of the window to the sequence keeps the sums in 32 bit and cannot change what is visible: row i
// is at least 0 and at most len_q - 1, so a right side of len_q - 1 reaches the last key from every
// row, and a left side of len_k reaches key 0.
FA_HD VisibleBand visible_band(int len_q, int len_k, Window window) {
  int const diagonal = len_k - len_q;
  VisibleBand band{len_k, -len_q, len_k};
  if (window.left >= 0) { band.begin_shift = diagonal - (window.left < len_k ? window.left : len_k); }
  if (window.right >= 0) { band.end_shift = diagonal + (window.right < len_q ? window.right + 1 : len_q); }
  return band;
}

}  // namespace flashattn
