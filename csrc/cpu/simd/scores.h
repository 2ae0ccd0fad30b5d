// From raw dot products to exponentials: the vector forms of core's score_mod.h and
// online_softmax.h, one row at a time.
#pragma once

#include "core/block_range.h"
#include "core/online_softmax.h"
#include "core/score_mod.h"
#include "cpu/kernels.h"
#include "cpu/simd/elements.h"

namespace flashattn::cpu::FA_ISA {

// Scale, softcap, ALiBi, in this order. Asked once per row, never per element.
FA_INLINE void modify_scores(float* s, int keys, int first_key, RowState const& row,
                             ScoreMod const& mod) {
  for (int j = 0; j < keys; j += kLanes) {
    Floats score = load<Floats>(s + j) * mod.scale;
    if (mod.softcap > 0.f) { score = mod.softcap * tanh_saturating(score * mod.inverse_softcap); }
    if (mod.alibi) {
      Ints const distance = row.diagonal - (first_key + j + lane_index());
      score = score - row.slope * to_floats(distance < 0 ? -distance : distance);
    }
    store(s + j, score);
  }
}

// Keys [first_key, first_key + keys) that the row does not see become -inf, whatever was there.
FA_INLINE void mask_keys(float* s, int keys, int first_key, RowState const& row) {
  for (int j = 0; j < keys; j += kLanes) {
    Ints const key = first_key + j + lane_index();
    Ints const visible = (key >= row.key_begin) & (key < row.key_end);
    store(s + j, visible ? load<Floats>(s + j) : splat(-kInfinity));
  }
}

// `s` starts at panel panels.begin. The clean panels in the middle are left alone.
FA_INLINE void mask_scores(float* s, BlockRange panels, RowState const& row) {
  constexpr int kPanelKeys = 2 * kLanes;
  int const first = panels.begin * kPanelKeys, clean = panels.clean_begin * kPanelKeys;
  int const clean_end = panels.clean_end * kPanelKeys, end = panels.end * kPanelKeys;
  mask_keys(s, clean - first, first, row);
  mask_keys(s + (clean_end - first), end - clean_end, clean_end, row);
}

// Exponentials of one row, rounded to V's type, as the words of P: floats, or pairs of bf16.
template <class Element>
FA_INLINE void store_exponentials(Word* p, int j, Floats even, Floats odd) {
#if FA_BF16_PAIRS
  if constexpr (Element::kPairs) { return store(p + j / 2, _mm512_cvtne2ps_pbh(odd, even)); }
#endif
  store(p + j, Element::round(even));
  store(p + j + kLanes, Element::round(odd));
}

// Updates maximum and sums with `keys` more scores (whole panels) and writes their exponentials to
// `p`, which may be `s`. Returns what the accumulators have to be multiplied with.
template <class Element>
FA_INLINE float update_softmax(float const* s, int keys, RowState& row, float* sums,
                               float exponent_scale, Word* p) {
  // A NaN score does not become the maximum, but its exponential is NaN.
  Floats top_a = splat(row.maximum), top_b = top_a;
  for (int j = 0; j < keys; j += 2 * kLanes) {
    top_a = larger(load<Floats>(s + j), top_a);
    top_b = larger(load<Floats>(s + j + kLanes), top_b);
  }
  float const old_maximum = row.maximum;
  float const scale = exponent_scale * kLog2e;
  row.maximum = next_maximum(old_maximum, largest_lane(larger(top_a, top_b)), scale);
  float const factor = rescale_factor(old_maximum, row.maximum, scale);

  Floats const base = splat(subtrahend(row.maximum));
  Floats const scales = splat(scale), lowest = splat(-126.f / scale);
  Floats sum_a = load<Floats>(sums) * factor, sum_b = Floats{};
  for (int j = 0; j < keys; j += 2 * kLanes) {
    Floats const a = exp2_scaled(load<Floats>(s + j) - base, scales, lowest);
    Floats const b = exp2_scaled(load<Floats>(s + j + kLanes) - base, scales, lowest);
    sum_a += a;
    sum_b += b;
    store_exponentials<Element>(p, j, a, b);
  }
  store(sums, sum_a + sum_b);
  return factor;
}

}  // namespace flashattn::cpu::FA_ISA
