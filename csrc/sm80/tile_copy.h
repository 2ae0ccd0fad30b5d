// Moves a tile of rows between global and shared memory, 16 bytes per thread and step.
#pragma once

#include <cute/tensor.hpp>

namespace flashattn::sm80 {

// A row in global memory. Where it does not exist, `data` may point anywhere.
template <class Element>
struct Row {
  Element* data;
  bool exists;
};

// Starts copying 16 bytes to shared memory. Without a source they become zeros, and nothing is read.
template <class Element>
CUTE_DEVICE void copy_async(Element* smem, Element const* source, bool exists) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(reinterpret_cast<cute::uint128_t const&>(*source),
                                                               reinterpret_cast<cute::uint128_t&>(*smem), exists);
}

// What of a tile is moved at one of `count` moments.
struct Portion {
  int index = 0;
  int count = 1;

  CUTE_DEVICE constexpr bool is_first() const { return index == 0; }
  CUTE_DEVICE constexpr bool is_last() const { return index == count - 1; }
  CUTE_DEVICE constexpr bool has(int piece, int pieces) const { return piece * count / pieces == index; }
};

// Which 16-byte pieces of a tile this thread moves. Neighbouring threads take neighbouring pieces of
// a row, so that a row is read in whole lines.
template <class Traits, int kRows>
struct TileCopy {
  using Element = typename Traits::Element;
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kThreadsPerRow = Traits::kColBlock / kVector;
  static constexpr int kRowsPerStep = Traits::kThreads / kThreadsPerRow;
  static constexpr int kSteps = (kRows + kRowsPerStep - 1) / kRowsPerStep;
  static constexpr int kColBlocks = Traits::kHeadDim / Traits::kColBlock;
  static_assert(kRowsPerStep % 8 == 0, "the swizzle must not depend on the step");
  static_assert(kRows % 8 == 0);

  int const row = threadIdx.x / kThreadsPerRow;
  int const col = threadIdx.x % kThreadsPerRow * kVector;
  int const smem_offset = typename Traits::SmemAtom{}(row % 8, col) + row / 8 * 8 * Traits::kColBlock;

  // Calls fn(row, column, offset in shared memory) for each piece of a portion, with what row_of(row) says.
  template <class RowOf, class Fn>
  CUTE_DEVICE void for_each_piece(Portion portion, RowOf&& row_of, Fn&& fn) const {
    CUTE_UNROLL
    for (int piece = 0; piece < kSteps * kColBlocks; ++piece) {
      int const first = piece / kColBlocks * kRowsPerStep, block = piece % kColBlocks;
      if (!portion.has(piece, kSteps * kColBlocks)) { continue; }
      if (kRows % kRowsPerStep != 0 && first + row >= kRows) { continue; }
      fn(row_of(first + row), col + block * Traits::kColBlock,
         smem_offset + first * Traits::kColBlock + block * kRows * Traits::kColBlock);
    }
  }

  // Starts copying rows to shared memory; row_of(row) is a Row. Pieces of rows that do not exist or past head_dim
  // become zeros, and nothing is read for them.
  template <class RowOf>
  CUTE_DEVICE void load_async(Element* smem, int head_dim, Portion portion, RowOf row_of) const {
    for_each_piece(portion, row_of, [&](Row<Element const> source, int c, int offset) {
      copy_async(smem + offset, source.data + c, source.exists && c < head_dim);
    });
  }

  // The same at once, through registers.
  template <class RowOf>
  CUTE_DEVICE void load(Element* smem, int head_dim, RowOf row_of) const {
    for_each_piece(Portion{}, row_of, [&](Row<Element const> source, int c, int offset) {
      cute::uint128_t piece{};
      if (source.exists && c < head_dim) { piece = *reinterpret_cast<cute::uint128_t const*>(source.data + c); }
      *reinterpret_cast<cute::uint128_t*>(&smem[offset]) = piece;
    });
  }

  // Writes rows from shared memory.
  template <class RowOf>
  CUTE_DEVICE void store(Element const* smem, int head_dim, RowOf row_of) const {
    for_each_piece(Portion{}, row_of, [&](Row<Element> target, int c, int offset) {
      if (target.exists && c < head_dim) {
        *reinterpret_cast<cute::uint128_t*>(target.data + c) = *reinterpret_cast<cute::uint128_t const*>(&smem[offset]);
      }
    });
  }
};

template <class Traits>
using QueryCopy = TileCopy<Traits, Traits::kBlockM>;

template <class Traits>
using KvCopy = TileCopy<Traits, Traits::kBlockN>;

}  // namespace flashattn::sm80
