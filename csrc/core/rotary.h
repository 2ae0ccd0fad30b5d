// Rotary position embedding (Su et al. 2021, arXiv:2104.09864), on 8 neighbouring elements of a head.
#pragma once

#include "core/macros.h"
#include "core/sequence_info.h"
#include "flashattn/params.h"

namespace flashattn {

constexpr int kRotaryChunk = 8;

// Position of a token, kept inside the tables.
FA_HD int rotary_position(Append const& append, int position) { return clamp(position, 0, append.max_position - 1); }

// Queries of a causal or windowed call stand behind the cached tokens one after the other.
FA_HD int query_position(Window window, int cached, int token) {
  return window.left >= 0 || window.right >= 0 ? cached + token : cached;
}

// Rotates the chunk of columns [first, first + 8). `load(column)` gives an element of the head,
// `cosine(i)` and `sine(i)` entries of the table's row. Columns past rotary_dim stay as they are.
template <class Load, class Cosine, class Sine>
FA_HD void rotate_chunk(Append const& append, int first, Load load, Cosine cosine, Sine sine,
                        float (&out)[kRotaryChunk]) {
  int const half = append.rotary_dim / 2;
  for (int i = 0; i < kRotaryChunk; ++i) {
    int const column = first + i;
    if (column >= append.rotary_dim) {
      out[i] = load(column);
      continue;
    }
    bool const interleaved = append.rotary_interleaved;
    bool const second = interleaved ? column % 2 != 0 : column >= half;
    int const pair = interleaved ? column / 2 : (second ? column - half : column);
    int const other = interleaved ? (second ? column - 1 : column + 1) : (second ? column - half : column + half);
    float const turned = load(other) * sine(pair);
    out[i] = load(column) * cosine(pair) + (second ? turned : -turned);
  }
}

}  // namespace flashattn
