// Which query tile a thread block (or, on the CPU, a task) computes.
#pragma once

#include <cstdint>

#include "core/block_range.h"
#include "core/fast_divisor.h"
#include "core/macros.h"
#include "core/sequence_info.h"
#include "flashattn/params.h"

namespace flashattn {

struct WorkTile {
  int batch;
  int head;     // with packed heads: the key/value head
  int m_block;  // may lie outside of its sequence: then there is nothing to do
};

// Tiles of one head. Dense: every sequence has the same number. Packed: sequence b starts at slot
// cu_seqlens_q[b] / tile + b; rounding down costs it at most one slot, which the "+ b" provides.
// So the grid follows from sizes that the host knows, whatever lengths the device holds, and an
// upper bound like max_seqlen_q plays no part in it.
FA_HD int64_t tiles_per_head(Shape const& shape, Lengths const& lengths, int tile_tokens) {
  if (lengths.cu_seqlens_q == nullptr) { return int64_t(shape.batch) * ceil_div(shape.seqlen_q, tile_tokens); }
  return int64_t(lengths.total_q) / tile_tokens + shape.batch;
}

// What work_tile divides by. A kernel gets them ready made.
template <class Divisor>
struct TileDivisors {
  Divisor tokens;    // of a tile
  Divisor head;      // tiles of one head
  Divisor sequence;  // dense: tiles of one sequence

  FA_HD TileDivisors() : tokens(1), head(1), sequence(1) {}
  FA_HD TileDivisors(Shape const& shape, Lengths const& lengths, int tile_tokens)
      : tokens(tile_tokens),
        head(divisor_of(tiles_per_head(shape, lengths, tile_tokens))),
        sequence(divisor_of(ceil_div(shape.seqlen_q, tile_tokens))) {}

 private:
  // A grid of more tiles than an int holds is refused (check_grid), after it was planned.
  FA_HD static int divisor_of(int64_t count) {
    return count < 1 ? 1 : (count < INT32_MAX ? static_cast<int>(count) : INT32_MAX);
  }
};

// Clamped like the rows themselves, so that no content of cu_seqlens_q makes m_block overflow.
template <class Divisor>
FA_HD int packed_slot(Lengths const& lengths, int batch, Divisor const& tile_tokens) {
  return static_cast<int>(tile_tokens.quotient(clamp(lengths.cu_seqlens_q[batch], 0, lengths.total_q))) + batch;
}

// Tiles with the same head are neighbours, so that they share keys and values in the L2 cache. In
// a sequence the last tile comes first: under a causal mask it is the longest.
template <class Divisor>
FA_HD WorkTile work_tile(Shape const& shape, Lengths const& lengths, TileDivisors<Divisor> const& divisors,
                         int64_t index) {
  int const per_head = static_cast<int>(divisors.head.divisor());
  WorkTile tile{0, static_cast<int>(divisors.head.quotient(index)), 0};
  int const slot = static_cast<int>(index - int64_t(tile.head) * per_head);
  if (lengths.cu_seqlens_q == nullptr) {
    int const blocks = static_cast<int>(divisors.sequence.divisor());
    tile.batch = static_cast<int>(divisors.sequence.quotient(slot));
    tile.m_block = blocks - 1 - (slot - tile.batch * blocks);
    return tile;
  }
  int low = 0, high = shape.batch;  // the sequence is the last one whose first slot is <= slot
  while (high - low > 1) {
    int const middle = low + (high - low) / 2;
    if (packed_slot(lengths, middle, divisors.tokens) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  int const next = packed_slot(lengths, low + 1, divisors.tokens);
  tile.batch = low;
  tile.m_block = next - 1 - slot;
  return tile;
}

FA_HD WorkTile work_tile(Shape const& shape, Lengths const& lengths, int tile_tokens, int64_t index) {
  return work_tile(shape, lengths, TileDivisors<PlainDivisor>(shape, lengths, tile_tokens), index);
}

}  // namespace flashattn
