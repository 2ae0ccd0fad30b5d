// core/work_tile.h and core/forward_plan.h: every row of every head belongs to one tile.
#include <gtest/gtest.h>

#include <climits>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "core/forward_plan.h"
#include "core/sequence_info.h"
#include "core/work_tile.h"
#include "packed_lengths.h"

namespace {

using flashattn::Lengths;
using flashattn::Shape;
using flashattn::WorkTile;
using packed::hostile_cu_seqlens;
using packed::packed_q;
using packed::prefix_sums;

using TileKey = std::tuple<int, int, int>;  // batch, head, m_block

// How often each tile that has rows comes up; tiles without rows are left out.
std::map<TileKey, int> visited_tiles(Shape const& shape, Lengths const& lengths, int heads,
                                     int tile_tokens) {
  std::map<TileKey, int> visited;
  int64_t const tiles = flashattn::tiles_per_head(shape, lengths, tile_tokens) * heads;
  for (int64_t index = 0; index < tiles; ++index) {
    WorkTile const tile = flashattn::work_tile(shape, lengths, tile_tokens, index);
    EXPECT_TRUE(tile.batch >= 0 && tile.batch < shape.batch && tile.head >= 0 && tile.head < heads);
    int const len_q = flashattn::sequence_info(shape, lengths, tile.batch).len_q;
    if (tile.m_block >= 0 && tile.m_block * tile_tokens < len_q) {
      ++visited[{tile.batch, tile.head, tile.m_block}];
    }
  }
  return visited;
}

std::map<TileKey, int> expected_tiles(std::vector<int> const& len_q, int heads, int tile_tokens) {
  std::map<TileKey, int> expected;
  for (int b = 0; b < static_cast<int>(len_q.size()); ++b) {
    for (int head = 0; head < heads; ++head) {
      for (int row = 0; row < len_q[b]; row += tile_tokens) {
        expected[{b, head, row / tile_tokens}] = 1;
      }
    }
  }
  return expected;
}

TEST(WorkTile, DenseVisitsEveryTileOnce) {
  for (int batch : {1, 2, 5}) {
    for (int seqlen_q = 0; seqlen_q <= 20; ++seqlen_q) {
      for (int tile : {1, 3, 4, 16, 64}) {
        Shape const shape{.batch = batch,
                          .heads = 3,
                          .heads_kv = 1,
                          .head_dim = 8,
                          .seqlen_q = seqlen_q,
                          .seqlen_k = 1};
        bool const same = visited_tiles(shape, {}, 3, tile) ==
                          expected_tiles(std::vector<int>(batch, seqlen_q), 3, tile);
        EXPECT_TRUE(same) << "batch " << batch << ", seqlen_q " << seqlen_q << ", tile " << tile;
      }
    }
  }
}

TEST(WorkTile, PackedVisitsEveryTileOnce) {
  std::mt19937 random(3);
  auto up_to = [&](int bound) { return std::uniform_int_distribution<int>(0, bound)(random); };
  for (int i = 0; i < 3000; ++i) {
    std::vector<int> len_q(1 + up_to(6));
    for (int& length : len_q) { length = up_to(3) == 0 ? 0 : up_to(40); }
    std::vector<int> const cu = prefix_sums(len_q);
    Shape const shape{.batch = static_cast<int>(len_q.size()),
                      .heads = 2,
                      .heads_kv = 1,
                      .head_dim = 8,
                      .seqlen_q = 1 + up_to(100),
                      .seqlen_k = 1};  // any bound must do
    Lengths const lengths = packed_q(cu, cu.back() + (up_to(1) == 0 ? 0 : up_to(70)));
    for (int tile : {1, 5, 16, 64}) {
      bool const same = visited_tiles(shape, lengths, 2, tile) == expected_tiles(len_q, 2, tile);
      EXPECT_TRUE(same) << "seed " << i << ", tile " << tile;
    }
  }
}

TEST(WorkTile, ThousandsOfOneRowSequences) {
  std::vector<int> const len_q(4096, 1);
  std::vector<int> const cu = prefix_sums(len_q);
  Shape const shape{
      .batch = 4096, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = 1, .seqlen_k = 1};
  EXPECT_TRUE(visited_tiles(shape, packed_q(cu, 4096), 1, 64) == expected_tiles(len_q, 1, 64));
}

TEST(WorkTile, LastTileOfASequenceComesFirst) {
  std::vector<int> const cu = prefix_sums({10, 25});
  Shape const shape{
      .batch = 2, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = 25, .seqlen_k = 1};
  for (Lengths const& lengths : {Lengths{}, packed_q(cu, 35)}) {
    int previous_batch = 0, previous_block = INT_MAX;
    for (int64_t index = 0; index < flashattn::tiles_per_head(shape, lengths, 4); ++index) {
      WorkTile const tile = flashattn::work_tile(shape, lengths, 4, index);
      EXPECT_TRUE(tile.batch > previous_batch || tile.m_block < previous_block);
      previous_batch = tile.batch;
      previous_block = tile.m_block;
    }
  }
}

TEST(WorkTile, UntrustedLengthsNeverLeadOutside) {
  for (std::vector<int> const& cu : hostile_cu_seqlens()) {
    for (int total : {0, 1, 37, 1 << 20}) {
      Shape const shape{
          .batch = 3, .heads = 2, .heads_kv = 1, .head_dim = 8, .seqlen_q = 9, .seqlen_k = 9};
      Lengths const lengths = packed_q(cu, total);
      int64_t const tiles = flashattn::tiles_per_head(shape, lengths, 16) * 2;
      int64_t const step = tiles > 200 ? tiles / 100 : 1;
      for (int64_t index = 0; index < tiles; index += step) {
        WorkTile const tile = flashattn::work_tile(shape, lengths, 16, index);
        bool const inside = tile.batch >= 0 && tile.batch < 3 && tile.head >= 0 && tile.head < 2;
        int64_t const row = int64_t(tile.m_block) * 16;  // the kernels multiply in 32 bit
        EXPECT_TRUE(inside && row > INT_MIN && row < INT_MAX - 16)
            << "total " << total << ", index " << index;
      }
    }
  }
}

// More tiles than a grid holds are counted all the same; check_grid then refuses them.
TEST(ForwardPlan, MoreTilesThanAnIntHolds) {
  flashattn::TileShape const tile{
      .m = 128, .n = 64, .warps = 4, .stages = 1, .q_in_registers = false};
  Shape const shape{.batch = 65536,
                    .heads = 8,
                    .heads_kv = 8,
                    .head_dim = 64,
                    .seqlen_q = 1 << 23,
                    .seqlen_k = 9};
  EXPECT_EQ(flashattn::plan_forward(shape, {}, tile).tiles, (int64_t(1) << 32) * 8);
}

TEST(ForwardPlan, PacksHeadsWhereTheyFit) {
  flashattn::TileShape const tile{
      .m = 128, .n = 64, .warps = 4, .stages = 1, .q_in_registers = false};
  for (int heads_kv : {1, 2, 3, 8}) {
    for (int group : {1, 2, 3, 7, 8, 71, 128, 200}) {
      for (int seqlen_q : {0, 1, 3, 17, 64, 65, 1000}) {
        Shape const shape{.batch = 2,
                          .heads = heads_kv * group,
                          .heads_kv = heads_kv,
                          .head_dim = 64,
                          .seqlen_q = seqlen_q,
                          .seqlen_k = 9};
        flashattn::ForwardPlan const plan = flashattn::plan_forward(shape, {}, tile);
        int const pack = plan.row_map.pack();
        bool const no_row_is_lost = group <= 128 && 128 % group == 0;
        bool const few_rows = group <= 128 && seqlen_q <= 64;
        EXPECT_EQ(pack, no_row_is_lost || few_rows ? group : 1);
        EXPECT_EQ(plan.group.divisor(), group);
        EXPECT_GE(plan.tile_tokens, 1);
        EXPECT_LE(plan.row_map.rows(plan.tile_tokens), tile.m);
        int const work_heads = shape.heads / pack;
        std::map<TileKey, int> const visited =
            visited_tiles(shape, {}, work_heads, plan.tile_tokens);
        EXPECT_TRUE(visited == expected_tiles({seqlen_q, seqlen_q}, work_heads, plan.tile_tokens));
        EXPECT_EQ(plan.tiles, static_cast<int64_t>(visited.size()));
        // Divisors made for the kernel agree.
        for (int64_t index = 0; index < plan.tiles; ++index) {
          WorkTile const tile = plan.work_tile(shape, {}, static_cast<int>(index));
          WorkTile const expected = flashattn::work_tile(shape, {}, plan.tile_tokens, index);
          EXPECT_TRUE(tile.batch == expected.batch && tile.head == expected.head &&
                      tile.m_block == expected.m_block);
        }
      }
    }
  }
}

}  // namespace
