// Edits the scores of a tile: softcap and ALiBi where a call has them, the mask where the tile is not clean.
//
// `scores` and `coords`, its (row, key) coordinates in the tile, are (row, column) views.
#pragma once

#include <cute/tensor.hpp>

#include "core/query_tile.h"
#include "core/score_mod.h"
#include "core/visible_band.h"
#include "sm80/query_rows.h"

namespace flashattn::sm80 {

// `biases(row)` is the RowBias of a row of the tile; read only where the call has ALiBi.
template <class Scores, class Coords, class Biases>
CUTE_DEVICE void modify_scores(ScoreMod const& mod, Scores& scores, Coords const& coords, int first_key,
                               Biases const& biases) {
  if (mod.softcap > 0.f && mod.softcap <= ScoreMod::kSmallCap) {
    float const exponent = mod.cap_exponent();
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) { scores(i) = mod.capped_quotient(scores(i) * exponent); }
  } else if (mod.softcap > 0.f) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) { scores(i) = mod.scaled_and_capped(scores(i)); }
  } else {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) { scores(i) *= mod.scale; }
  }
  if (!mod.alibi) { return; }
  CUTE_UNROLL
  for (int row = 0; row < cute::size<0>(scores); ++row) {
    RowBias const bias = biases(cute::get<0>(coords(row, 0)));
    int const first_column = cute::get<1>(coords(row, 0));
    // One conversion a row: from its first column on, distances are apart by numbers known to the compiler.
    float const distance = static_cast<float>(bias.diagonal - first_key - first_column);
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      float const step = static_cast<float>(cute::get<1>(coords(row, col)) - first_column);
      scores(row, col) -= bias.slope * fabsf(distance - step);
    }
  }
}

// Hides the keys that a row does not see.
template <class Scores, class Coords>
CUTE_DEVICE void mask_scores(QueryTile const& tile, Window const& window, Scores& scores, Coords const& coords,
                             int first_key) {
  VisibleBand const band = visible_band(tile.seq.len_q, tile.seq.len_k, window);
  CUTE_UNROLL
  for (int row = 0; row < cute::size<0>(scores); ++row) {
    int const token = tile.token(cute::get<0>(coords(row, 0)));
    int const begin = band.begin(token) - first_key, end = band.end(token) - first_key;
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      int const key = cute::get<1>(coords(row, col));
      if (key < begin || key >= end) { scores(row, col) = -kInfinity; }
    }
  }
}

// Hides the keys of the tile for which is_key(column) is false.
template <class Scores, class Coords, class IsKey>
CUTE_DEVICE void mask_keys(Scores& scores, Coords const& coords, IsKey is_key) {
  CUTE_UNROLL
  for (int col = 0; col < cute::size<1>(scores); ++col) {
    if (is_key(cute::get<1>(coords(0, col)))) { continue; }
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(scores); ++row) { scores(row, col) = -kInfinity; }
  }
}

}  // namespace flashattn::sm80
