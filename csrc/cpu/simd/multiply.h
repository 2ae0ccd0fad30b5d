// The micro-kernel: all arithmetic of both matrix products happens here.
//
// A small matrix of sums, kRows x kPanel, stays in registers while the words of the summed
// dimension stream by: each word of A is broadcast and multiplied with two vectors of B, so one
// step does 2 * kRows multiply-adds for 2 vector loads.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd/elements.h"

namespace flashattn::cpu::FA_ISA {

constexpr int kGroupRows = FA_GROUP_ROWS;  // 2 * kGroupRows sums + 3 operands fill the registers
constexpr int kPanel = 2 * kLanes;
static_assert(kGroupRows <= kMaxGroupRows && kLanes <= kMaxLanes);

// Where A's words are: a[row * kRowStride + word * kWordStride]. Constants, so that all addresses
// of a step are one register plus a displacement.
template <int kRow, int kWord>
struct Layout {
  static constexpr int kRowStride = kRow;
  static constexpr int kWordStride = kWord;
};

template <int kRows>
struct Sums {
  Floats left[kRows];
  Floats right[kRows];
};

// sum + a * b for floats; for pairs of bf16, sum + a.first * b.first + a.second * b.second with
// exact products.
template <class Element>
FA_INLINE Floats multiply_words(Floats a, Floats b, Floats sum) {
#if FA_BF16_PAIRS
  if constexpr (Element::kPairs) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
#endif
  return multiply_add(a, b, sum);
}

// sums += A · B, with B a packed panel: [word][kPanel].
template <class Element, class ALayout, int kRows>
FA_INLINE void multiply(Word const* a, Word const* b, int word_count, Sums<kRows>& sums) {
  for (int w = 0; w < word_count; ++w) {
    Floats const b_left = load<Floats>(b), b_right = load<Floats>(b + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      Floats const a_word = as_floats(splat_int(load<int32_t>(a + r * ALayout::kRowStride)));
      sums.left[r] = multiply_words<Element>(a_word, b_left, sums.left[r]);
      sums.right[r] = multiply_words<Element>(a_word, b_right, sums.right[r]);
    }
    a += ALayout::kWordStride;
    b += kPanel;
  }
}

}  // namespace flashattn::cpu::FA_ISA
