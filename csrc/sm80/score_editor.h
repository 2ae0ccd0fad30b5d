// Edits the scores of a tile that is not clean: softcap and ALiBi, then the mask.
#pragma once

#include <cute/tensor.hpp>

#include "core/score_mod.h"
#include "core/visible_band.h"
#include "core/query_tile.h"

namespace flashattn::sm80 {

class ScoreEditor {
 public:
  CUTE_DEVICE ScoreEditor(FlashFwdParams const& params, QueryTile const& tile)
      : tile_(tile),
        band_(visible_band(tile.seq.len_q, tile.seq.len_k, params.window)),
        mod_(score_mod(params.score)),
        slopes_(params.score.alibi_slopes + tile.seq.batch * params.score.alibi_batch_stride) {}

  // `scores` and `coords`, its (row, key) coordinates in the tile, are (row, column) views.
  template <class Scores, class Coords>
  CUTE_DEVICE void edit(Scores& scores, Coords const& coords, int first_key) const {
    if (mod_.active) { modify(scores, coords, first_key); }
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(scores); ++row) {
      int const token = tile_.token(cute::get<0>(coords(row, 0)));
      int const begin = band_.begin(token) - first_key, end = band_.end(token) - first_key;
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(scores); ++col) {
        int const key = cute::get<1>(coords(row, col));
        if (key < begin || key >= end) { scores(row, col) = -kInfinity; }
      }
    }
  }

  // Hides the keys of the tile for which is_key(column) is false.
  template <class Scores, class Coords, class IsKey>
  CUTE_DEVICE void mask_keys(Scores& scores, Coords const& coords, IsKey is_key) const {
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      if (is_key(cute::get<1>(coords(0, col)))) { continue; }
      CUTE_UNROLL
      for (int row = 0; row < cute::size<0>(scores); ++row) { scores(row, col) = -kInfinity; }
    }
  }

 private:
  template <class Scores, class Coords>
  CUTE_DEVICE void modify(Scores& scores, Coords const& coords, int first_key) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) { scores(i) = mod_.scaled_and_capped(scores(i)); }
    if (!mod_.alibi) { return; }
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(scores); ++row) {
      int const tile_row = cute::get<0>(coords(row, 0));
      if (!tile_.has_row(tile_row)) { continue; }
      float const slope = slopes_[tile_.head(tile_row)];
      int const diagonal = tile_.token(tile_row) + tile_.seq.len_k - tile_.seq.len_q - first_key;
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(scores); ++col) {
        scores(row, col) += ScoreMod::alibi_bias(slope, diagonal - cute::get<1>(coords(row, col)));
      }
    }
  }

  QueryTile const& tile_;
  VisibleBand const band_;
  ScoreMod const mod_;
  float const* const slopes_;
};

}  // namespace flashattn::sm80
