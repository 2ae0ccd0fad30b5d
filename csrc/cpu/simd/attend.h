// One step of FlashAttention: a group of query rows meets the keys of one block.
#pragma once

#include "core/online_softmax.h"
#include "cpu/simd/multiply.h"
#include "cpu/simd/scores.h"

namespace flashattn::cpu::FA_ISA {

// Rows of scores are a little longer than a block, so that they do not all start in the same few
// sets of the L1 cache.
constexpr int kScoreStride = kMaxBlockKeys + 16;

template <int kRows>
struct Scores {
  alignas(64) float s[kRows * kScoreStride];  // then exponentials, where words are floats
  alignas(64) Word pairs[FA_BF16_PAIRS ? kRows * kScoreStride / 2 : 1];
};

// S = Q·Kᵀ.
template <class Element, int kRows>
FA_INLINE void multiply_qk(RowGroup const& group, Word const* k, int panels, int head_dim,
                           float* s) {
  int const depth = words<Element>(head_dim);
  for (int p = 0; p < panels; ++p) {
    Sums<kRows> sums = {};
    multiply<Element, Layout<1, kGroupRows>>(group.q, k + int64_t(p) * depth * kPanel, depth, sums);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      store(s + r * kScoreStride + p * kPanel, sums.left[r]);
      store(s + r * kScoreStride + p * kPanel + kLanes, sums.right[r]);
    }
  }
}

// O = O * factor + P·V. Each block is summed up on its own: one sum over all keys of a long
// sequence would collect their roundings.
template <class Element, int kRows>
FA_INLINE void multiply_pv(Word const* p, Word const* v, int keys, int head_dim,
                           float const* factors, float* acc) {
  using ALayout = Layout<Element::kPairs ? kScoreStride / 2 : kScoreStride, 1>;
  int const dim_panels = ceil_div(head_dim, kPanel);
  int const panel_words = words<Element>(block_keys(head_dim)) * kPanel;
  for (int d = 0; d < dim_panels; ++d) {
    Sums<kRows> sums = {};
    multiply<Element, ALayout>(p, v + int64_t(d) * panel_words, words<Element>(keys), sums);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* const row = acc + (r * dim_panels + d) * kPanel;
      Floats const factor = splat(factors[r]);
      store(row, multiply_add(load<Floats>(row), factor, sums.left[r]));
      store(row + kLanes, multiply_add(load<Floats>(row + kLanes), factor, sums.right[r]));
    }
  }
}

template <class Element, int kRows>
void attend_rows(RowGroup const& group, KeyBlock const& block, BlockRange panels, int head_dim,
                 ScoreMod const& mod) {
  int const first_panel = panels.begin - block.first_key / kPanel;  // within the block
  int const first_key = panels.begin * kPanel;
  int const keys = panels.count() * kPanel;
  Word const* const k = block.k + int64_t(first_panel) * words<Element>(head_dim) * kPanel;
  Word const* const v = block.v + int64_t(first_panel) * words<Element>(kPanel) * kPanel;

  Scores<kRows> scores;
  float factors[kRows];
  multiply_qk<Element, kRows>(group, k, panels.count(), head_dim, scores.s);
  for (int r = 0; r < kRows; ++r) {
    float* const s = scores.s + r * kScoreStride;
    RowState& row = group.state[r];
    if (mod.active) { modify_scores(s, keys, first_key, row, mod); }
    mask_scores(s, panels, row);
    Word* const p = Element::kPairs ? scores.pairs + r * kScoreStride / 2 : s;
    float* const sums = group.sums + r * kLanes;
    factors[r] = update_softmax<Element>(s, keys, row, sums, mod.exponent_scale, p);
  }
  multiply_pv<Element, kRows>(Element::kPairs ? scores.pairs : scores.s, v, keys, head_dim, factors,
                              group.acc);
}

// The row counts that exist: a smaller group takes the next one up, and its last rows are padding.
template <class Element>
void attend(RowGroup const& group, KeyBlock const& block, BlockRange panels, int head_dim,
            ScoreMod const& mod) {
  if (group.rows == 1) { return attend_rows<Element, 1>(group, block, panels, head_dim, mod); }
  if (group.rows <= 3) { return attend_rows<Element, 3>(group, block, panels, head_dim, mod); }
  if (kGroupRows > 6 && group.rows <= 6) {
    return attend_rows<Element, 6>(group, block, panels, head_dim, mod);
  }
  attend_rows<Element, kGroupRows>(group, block, panels, head_dim, mod);
}

}  // namespace flashattn::cpu::FA_ISA
