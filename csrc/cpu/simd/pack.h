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

// kLanes keys of a block, `keys` of which exist, into one half of a panel.
template <class Element>
FA_INLINE void pack_key_lanes(void const* const* rows, int keys, int head_dim, Word* packed) {
  int const count = words<Element>(head_dim);
  for (int w = 0; w < count; w += kLanes) {
    int const here = count - w < kLanes ? count - w : kLanes;
    Floats square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      square[i] = Floats{};
      if (i < keys && rows[i] != nullptr) {
        auto const* const row = static_cast<typename Element::Storage const*>(rows[i]);
        square[i] = load_words<Element>(row + w * (head_dim / count), here);
      }
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i < here) { store(packed + (w + i) * kPanel, square[i]); }
    }
  }
}

// Starts loading rows [begin, end) of `rows`. Those of one head lie apart in memory, so the machine
// does not foresee which one comes next.
template <class Element>
FA_INLINE void prefetch_rows(void const* const* rows, int begin, int end, int head_dim) {
  constexpr int kLine = 64;
  int const bytes = head_dim * static_cast<int>(sizeof(typename Element::Storage));
  for (int i = begin; i < end; ++i) {
    if (rows[i] == nullptr) { continue; }
    for (int at = 0; at < bytes; at += kLine) {
      __builtin_prefetch(static_cast<char const*>(rows[i]) + at);
    }
  }
}

template <class Element>
void pack_keys(void const* const* rows, int keys, int head_dim, Word* packed) {
  int const panel_words = words<Element>(head_dim) * kPanel;
  for (int first = 0; first < ceil_div(keys, kPanel) * kPanel; first += kLanes) {
    Word* const to = packed + int64_t(first / kPanel) * panel_words + first % kPanel;
    int const next = first + kLanes;
    prefetch_rows<Element>(rows, next, next + kLanes < keys ? next + kLanes : keys, head_dim);
    pack_key_lanes<Element>(rows + first, keys - first, head_dim, to);
  }
}

// Word `word` of columns dim ... dim + kLanes - 1, `columns` of which exist: the values of one key,
// or of two.
template <class Element>
FA_INLINE Floats value_words(void const* const* v, int keys, int word, int dim, int columns) {
  using Storage = typename Element::Storage;
  constexpr int kPerWord = Element::kPairs ? 2 : 1;
  Storage rows[kPerWord][kLanes] = {};
  for (int i = 0; i < kPerWord; ++i) {
    int const key = word * kPerWord + i;
    if (key >= keys) { break; }
    if (v[key] == nullptr) { continue; }
    auto const* const from = static_cast<Storage const*>(v[key]) + dim;
    if (columns >= kLanes) {
      __builtin_memcpy(rows[i], from, sizeof rows[i]);
    } else {
      for (int c = 0; c < columns; ++c) { rows[i][c] = from[c]; }
    }
  }
  if constexpr (Element::kPairs) {
    return as_floats(widen(load<Shorts>(rows[0])) | widen(load<Shorts>(rows[1])) << 16);
  } else {
    return Element::load(rows[0]);
  }
}

template <class Element>
void pack_values(void const* const* rows, int keys, int head_dim, Word* packed) {
  int const block_words = words<Element>(block_keys(head_dim));
  int const used_words = words<Element>(ceil_div(keys, kPanel) * kPanel);
  constexpr int kAhead = 16;  // rows
  constexpr int kPerWord = Element::kPairs ? 2 : 1;
  for (int w = 0; w < used_words; ++w) {
    int const next = w * kPerWord + kAhead;
    prefetch_rows<Element>(rows, next, next + kPerWord < keys ? next + kPerWord : keys, head_dim);
    for (int dim = 0; dim < ceil_div(head_dim, kPanel) * kPanel; dim += kLanes) {
      Word* const to = packed + int64_t(dim / kPanel) * block_words * kPanel + dim % kPanel;
      store(to + w * kPanel, value_words<Element>(rows, keys, w, dim, head_dim - dim));
    }
  }
}

}  // namespace flashattn::cpu::FA_ISA
