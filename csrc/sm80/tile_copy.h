// Moves a tile of rows between global and shared memory, 16 bytes per thread and step.
#pragma once

#include <cute/tensor.hpp>

#include "sm80/query_tile.h"

namespace flashattn::sm80 {

// Which 16-byte pieces of a tile this thread moves. Neighbouring threads take neighbouring pieces of
// a row, so that a row is read in whole lines.
template <class Traits, int kRows>
struct TileCopy {
  using Element = typename Traits::Element;
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kThreadsPerRow = Traits::kColBlock / kVector;
  static constexpr int kRowsPerStep = Traits::kThreads / kThreadsPerRow;
  static constexpr int kColBlocks = Traits::kHeadDim / Traits::kColBlock;
  static_assert(kRowsPerStep % 8 == 0, "the swizzle must not depend on the step");
  static_assert(kRows % 8 == 0);

  int const row = threadIdx.x / kThreadsPerRow;
  int const col = threadIdx.x % kThreadsPerRow * kVector;
  int const smem_offset = typename Traits::SmemAtom{}(row % 8, col) + row / 8 * 8 * Traits::kColBlock;

  // Calls fn(row, column, offset in shared memory) for each piece.
  template <class Fn>
  CUTE_DEVICE void for_each_piece(Fn&& fn) const {
    CUTE_UNROLL
    for (int first = 0; first < kRows; first += kRowsPerStep) {
      if (kRows % kRowsPerStep != 0 && first + row >= kRows) { break; }
      CUTE_UNROLL
      for (int block = 0; block < kColBlocks; ++block) {
        fn(first + row, col + block * Traits::kColBlock,
           smem_offset + first * Traits::kColBlock + block * kRows * Traits::kColBlock);
      }
    }
  }

  // Starts copying rows to shared memory; row_pointer(row) is the first element of a row. Pieces for
  // which valid(row) is false or that lie past head_dim become zeros, and nothing is read for them.
  template <class RowPointer, class Valid>
  CUTE_DEVICE void load_async(Element* smem, int head_dim, RowPointer row_pointer, Valid valid) const {
    for_each_piece([&](int r, int c, int offset) {
      using Copy = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
      Element const* source = row_pointer(r) + c;
      Copy::copy(reinterpret_cast<cute::uint128_t const&>(*source),
                 reinterpret_cast<cute::uint128_t&>(smem[offset]), valid(r) && c < head_dim);
    });
  }

  // Writes rows from shared memory; pieces that are not valid are left alone.
  template <class RowPointer, class Valid>
  CUTE_DEVICE void store(Element const* smem, int head_dim, RowPointer row_pointer, Valid valid) const {
    for_each_piece([&](int r, int c, int offset) {
      if (valid(r) && c < head_dim) {
        *reinterpret_cast<cute::uint128_t*>(row_pointer(r) + c) =
            *reinterpret_cast<cute::uint128_t const*>(&smem[offset]);
      }
    });
  }
};

template <class Traits>
CUTE_DEVICE void load_queries(FlashFwdParams const& params, QueryTile const& tile,
                              typename Traits::Element* smem) {
  auto const* const q = static_cast<typename Traits::Element const*>(params.q.data);
  TileCopy<Traits, Traits::kBlockM>{}.load_async(
      smem, params.shape.head_dim, [&](int row) { return q + tile.offset(params.q, row); },
      [&](int row) { return tile.has_row(row); });
}

}  // namespace flashattn::sm80
