// core/tile_table.h: every kernel fits every architecture, and the shapes keep the kernels' rules.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "core/tile_table.h"

namespace {

using flashattn::Role;
using flashattn::TileShape;

// Shared memory of a thread block in KiB, from the CUDA C++ Programming Guide: 1 less than what a
// multiprocessor has.
constexpr std::pair<int, int> kSharedKiB[] = {{80, 163}, {86, 99},   {87, 163},  {89, 99},
                                              {90, 227}, {100, 227}, {103, 227}, {110, 227},
                                              {120, 99}, {121, 99}};

template <class Visit>
void for_every_kernel(Visit const& visit) {
  for (auto const& [arch, kib] : kSharedKiB) {
    for (int head_dim : flashattn::kHeadDims) {
      for (Role role :
           {Role::kPrefill, Role::kChunk, Role::kShortChunk, Role::kDecode, Role::kWideDecode}) {
        SCOPED_TRACE("sm_" + std::to_string(arch) + ", head dim " + std::to_string(head_dim) +
                     ", role " + std::to_string(static_cast<int>(role)));
        visit(arch, head_dim, flashattn::tile_shape(arch, role, head_dim));
      }
    }
  }
}

TEST(TileTable, LimitsOfTheArchitectures) {
  for (auto const& [arch, kib] : kSharedKiB) {
    EXPECT_EQ(flashattn::smem_limit(arch), kib * 1024) << "sm_" << arch;
  }
}

TEST(TileTable, SharedMemoryFitsEverywhere) {
  for_every_kernel([](int arch, int head_dim, TileShape tile) {
    EXPECT_LE(flashattn::smem_bytes(tile, head_dim), flashattn::smem_limit(arch));
    int const q = tile.query_buffers * tile.m * head_dim, kv = 2 * tile.stages * tile.n * head_dim;
    EXPECT_GE(flashattn::smem_bytes(tile, head_dim), 2 * (q + kv));
  });
}

// Machine code of sm_80 is what sm_86 and sm_89 run when they were not built for.
TEST(TileTable, Sm80FitsItsWholeGeneration) {
  for_every_kernel([](int arch, int head_dim, TileShape tile) {
    if (arch < 90) { EXPECT_LE(flashattn::smem_bytes(tile, head_dim), flashattn::smem_limit(86)); }
  });
}

TEST(TileTable, ShapesSuitTheMatrixInstruction) {
  for_every_kernel([](int, int, TileShape tile) {
    EXPECT_GE(tile.warps, 1);
    EXPECT_LE(tile.warps, 32);
    EXPECT_EQ(tile.warps % tile.row_sharing(), 0);
    EXPECT_TRUE(tile.key_warps == 1 || tile.column_warps == 1);
    // An m16n8k16 takes 16 rows of a warp, and keys are the depth of P·V.
    EXPECT_EQ(tile.m * tile.row_sharing() % (16 * tile.warps), 0);
    EXPECT_EQ(tile.n % (16 * tile.row_sharing()), 0);
    EXPECT_GT(tile.m, 0);
    EXPECT_GT(tile.n, 0);
    EXPECT_GE(tile.stages, 1);
  });
}

// The accumulator of out takes m / (16 warps) · head_dim / 8 · 4 registers of a thread.
TEST(TileTable, AccumulatorLeavesRegistersForTheRest) {
  for_every_kernel([](int, int head_dim, TileShape tile) {
    int const row_tiles = tile.m * tile.row_sharing() / (16 * tile.warps);
    int const accumulator = row_tiles * head_dim / tile.column_warps / 2;
    int const scores = row_tiles * tile.n / tile.row_sharing() / 2;
    int const per_thread = std::min(255, 65536 / (32 * tile.warps));
    EXPECT_LT(accumulator + scores, per_thread);
  });
}

// They exchange maxima and probabilities, and two thread blocks fit on a multiprocessor all the
// same.
TEST(TileTable, ColumnWarpsWhereTwoThreadBlocksHaveRoom) {
  for_every_kernel([](int arch, int head_dim, TileShape tile) {
    if (tile.column_warps == 1) { return; }
    EXPECT_GT(head_dim, 160);
    EXPECT_EQ(tile.stages, 1);
    TileShape without = tile;
    without.column_warps = 1;
    int const rows = 8 * tile.m * (tile.column_warps - 1);
    EXPECT_EQ(flashattn::smem_bytes(tile, head_dim) - flashattn::smem_bytes(without, head_dim),
              rows + (2 * tile.n + 4 * tile.column_warps) * tile.m);
    EXPECT_LE(2 * (flashattn::smem_bytes(tile, head_dim) + 1024),
              flashattn::smem_of_multiprocessor(arch));
  });
  EXPECT_EQ(flashattn::tile_shape(90, Role::kPrefill, 256).column_warps, 2);
  EXPECT_EQ(flashattn::tile_shape(86, Role::kPrefill, 256).column_warps, 1);
  EXPECT_EQ(flashattn::tile_shape(80, Role::kPrefill, 256).column_warps, 1);
}

// The main loop's loads run ahead of it in the decode kernels, for which they need a second stage;
// the other kernels have one (sm80/mainloop.h).
TEST(TileTable, StagesOfTheRoles) {
  for (auto const& [arch, kib] : kSharedKiB) {
    for (int head_dim : flashattn::kHeadDims) {
      for (Role role : {Role::kDecode, Role::kWideDecode}) {
        TileShape const tile = flashattn::tile_shape(arch, role, head_dim);
        EXPECT_GT(tile.stages, 1) << "sm_" << arch << ", head dim " << head_dim;
        // Accumulators of the warps that share rows are added up where a stage was.
        bool const adds_up = tile.key_warps == 1 || 4 * tile.key_warps * tile.m <= 4 * tile.n;
        EXPECT_TRUE(adds_up) << "sm_" << arch << ", head dim " << head_dim;
        int const blocks = flashattn::decode_blocks(arch, tile, head_dim);
        EXPECT_GE(blocks, 1);
        EXPECT_LE(blocks * (flashattn::smem_bytes(tile, head_dim) + 1024), (kib + 1) * 1024);
      }
      EXPECT_EQ(flashattn::tile_shape(arch, Role::kPrefill, head_dim).stages, 1);
      EXPECT_EQ(flashattn::tile_shape(arch, Role::kChunk, head_dim).stages, 1);
      EXPECT_EQ(flashattn::tile_shape(arch, Role::kShortChunk, head_dim).stages, 1);
    }
  }
}

// The kernels that load ahead may have a query tile for each stage; the others have one.
TEST(TileTable, QueryTilesInSharedMemory) {
  for_every_kernel([](int, int head_dim, TileShape tile) {
    EXPECT_TRUE(tile.query_buffers == 1 || tile.query_buffers == tile.stages);
    TileShape more = tile;
    ++more.query_buffers;
    int const used = flashattn::smem_bytes(tile, head_dim);
    EXPECT_EQ(flashattn::smem_bytes(more, head_dim) - used, 2 * tile.m * head_dim);
  });
  for (int head_dim : flashattn::kHeadDims) {
    TileShape const tile = flashattn::tile_shape(90, Role::kDecode, head_dim);
    EXPECT_EQ(tile.query_buffers, tile.stages) << "head dim " << head_dim;
  }
}

// Splits are multiples of kSplitGranule = 64 keys.
TEST(TileTable, BlocksOfACacheDivideTheSplitGranule) {
  for (auto const& [arch, kib] : kSharedKiB) {
    for (int head_dim : flashattn::kHeadDims) {
      for (Role role : {Role::kChunk, Role::kShortChunk, Role::kDecode, Role::kWideDecode}) {
        EXPECT_EQ(64 % flashattn::tile_shape(arch, role, head_dim).n, 0);
      }
    }
  }
}

// A kernel of its own where that halves the rows (sm80/decode.cu has the same bound).
TEST(TileTable, ShortChunksHave64Rows) {
  for (auto const& [arch, kib] : kSharedKiB) {
    for (int head_dim : flashattn::kHeadDims) {
      int const rows = flashattn::tile_shape(arch, Role::kChunk, head_dim).m;
      EXPECT_EQ(rows, head_dim <= 160 ? 128 : 64);
      EXPECT_EQ(flashattn::tile_shape(arch, Role::kShortChunk, head_dim).m, 64);
      EXPECT_EQ(flashattn::has_short_chunk(arch, head_dim), head_dim <= 160);
    }
  }
}

TEST(TileTable, WideDecodingForManyRowsOfAKeyValueHead) {
  EXPECT_EQ(flashattn::decode_role(4, 4), Role::kDecode);
  EXPECT_EQ(flashattn::decode_role(4, 16), Role::kDecode);
  EXPECT_EQ(flashattn::decode_role(4, 20), Role::kWideDecode);  // five tokens of four heads
  EXPECT_EQ(flashattn::decode_role(4, 32), Role::kWideDecode);
  EXPECT_EQ(flashattn::decode_role(4, 36), Role::kDecode);  // the long ones are chunks
  EXPECT_EQ(flashattn::decode_role(16, 16), Role::kDecode);
  EXPECT_EQ(flashattn::decode_role(32, 32), Role::kWideDecode);
  EXPECT_EQ(flashattn::decode_role(32, 0), Role::kWideDecode);
}

TEST(TileTable, AKernelHoldsEveryHeadDim) {
  EXPECT_TRUE(std::is_sorted(std::begin(flashattn::kHeadDims), std::end(flashattn::kHeadDims)));
  EXPECT_EQ(*std::rbegin(flashattn::kHeadDims), 256);
  for (int head_dim : flashattn::kHeadDims) { EXPECT_EQ(head_dim % 32, 0); }
}

}  // namespace
