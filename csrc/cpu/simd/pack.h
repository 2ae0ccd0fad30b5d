// Packing: operands are copied once into the order in which multiply.h reads them.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd/elements.h"
#include "cpu/simd/multiply.h"

namespace flashattn::cpu::FA_ISA {

template <class Element>
void pack_query_row(void const* row, int head_dim, Word* q) {
  auto const* const from = static_cast<typename Element::Storage const*>(row);
  int const count = words<Element>(head_dim);
  for (int w = 0; w < count; w += kLanes) {
    int const here = count - w < kLanes ? count - w : kLanes;
    Floats const v = load_words<Element>(from + w * (head_dim / count), here);
    for (int i = 0; i < here; ++i) { store(q + (w + i) * kGroupRows, v[i]); }
  }
}

// Keys [first, first + kLanes) of a block, `keys` of which exist, into one half of a panel.
template <class Element>
FA_INLINE void pack_key_lanes(typename Element::Storage const* k, int64_t row_stride, int keys,
                              int head_dim, Word* packed) {
  int const count = words<Element>(head_dim);
  for (int w = 0; w < count; w += kLanes) {
    int const here = count - w < kLanes ? count - w : kLanes;
    Floats square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      square[i] = Floats{};
      if (i < keys) {
        square[i] = load_words<Element>(k + i * row_stride + w * (head_dim / count), here);
      }
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i < here) { store(packed + (w + i) * kPanel, square[i]); }
    }
  }
}

template <class Element>
void pack_keys(void const* k, int64_t row_stride, int keys, int head_dim, Word* packed) {
  auto const* const from = static_cast<typename Element::Storage const*>(k);
  int const panel_words = words<Element>(head_dim) * kPanel;
  for (int first = 0; first < ceil_div(keys, kPanel) * kPanel; first += kLanes) {
    Word* const to = packed + int64_t(first / kPanel) * panel_words + first % kPanel;
    pack_key_lanes<Element>(from + first * row_stride, row_stride, keys - first, head_dim, to);
  }
}

// Word `w` of column dim ... dim + kLanes - 1: the values of one key, or of two.
template <class Element>
FA_INLINE Floats value_words(typename Element::Storage const* v, int64_t row_stride, int keys,
                             int word, int columns) {
  using Storage = typename Element::Storage;
  constexpr int kPerWord = Element::kPairs ? 2 : 1;
  Storage rows[kPerWord][kLanes] = {};
  for (int i = 0; i < kPerWord; ++i) {
    int const key = word * kPerWord + i;
    if (key >= keys) { break; }
    if (columns >= kLanes) {
      __builtin_memcpy(rows[i], v + key * row_stride, sizeof rows[i]);
    } else {
      for (int c = 0; c < columns; ++c) { rows[i][c] = v[key * row_stride + c]; }
    }
  }
  if constexpr (Element::kPairs) {
    return as_floats(widen(load<Shorts>(rows[0])) | widen(load<Shorts>(rows[1])) << 16);
  } else {
    return Element::load(rows[0]);
  }
}

template <class Element>
void pack_values(void const* v, int64_t row_stride, int keys, int head_dim, Word* packed) {
  auto const* const from = static_cast<typename Element::Storage const*>(v);
  int const block_words = words<Element>(block_keys(head_dim));
  int const used_words = words<Element>(ceil_div(keys, kPanel) * kPanel);
  for (int dim = 0; dim < ceil_div(head_dim, kPanel) * kPanel; dim += kLanes) {
    Word* const to = packed + int64_t(dim / kPanel) * block_words * kPanel + dim % kPanel;
    for (int w = 0; w < used_words; ++w) {
      store(to + w * kPanel, value_words<Element>(from + dim, row_stride, keys, w, head_dim - dim));
    }
  }
}

}  // namespace flashattn::cpu::FA_ISA
