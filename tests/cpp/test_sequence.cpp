// core/sequence_info.h, core/row_map.h, core/work_tile.h and core/forward_plan.h.
#include <gtest/gtest.h>

#include <climits>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "core/forward_plan.h"
#include "core/row_map.h"
#include "core/sequence_info.h"
#include "core/work_tile.h"

namespace {

using flashattn::Lengths;
using flashattn::RowMap;
using flashattn::SequenceInfo;
using flashattn::Shape;
using flashattn::WorkTile;

std::vector<int> prefix_sums(std::vector<int> const& lengths) {
  std::vector<int> sums{0};
  for (int length : lengths) { sums.push_back(sums.back() + length); }
  return sums;
}

Lengths packed_q(std::vector<int> const& cu_seqlens, int total) {
  Lengths lengths;
  lengths.cu_seqlens_q = cu_seqlens.data();
  lengths.total_q = total;
  return lengths;
}

// Contents of cu_seqlens that no correct caller passes.
std::vector<std::vector<int>> hostile_cu_seqlens() {
  std::vector<std::vector<int>> all = {
      {0, -1, 5, 9},         {9, 6, 3, 0},           {-7, -3, 100, 4},          {0, INT_MAX, 3, INT_MIN},
      {INT_MIN, 0, 4, 8},    {INT_MAX, INT_MAX, 0, 1}, {5, 5, 5, 5},              {1000, 2000, 3000, 4000},
      {INT_MIN, INT_MAX, INT_MIN, INT_MAX}, {0, 0, 0, INT_MIN},
  };
  std::mt19937 random(2);
  std::uniform_int_distribution<int> any(INT_MIN, INT_MAX), near(-40, 80);
  for (int i = 0; i < 200; ++i) { all.push_back({any(random), any(random), any(random), any(random)}); }
  for (int i = 0; i < 200; ++i) { all.push_back({near(random), near(random), near(random), near(random)}); }
  return all;
}

TEST(SequenceInfo, DenseTakesTheShape) {
  Shape const shape{.batch = 3, .heads = 4, .heads_kv = 2, .head_dim = 64, .seqlen_q = 5, .seqlen_k = 7};
  SequenceInfo const seq = flashattn::sequence_info(shape, {}, 2);
  EXPECT_EQ(seq.batch, 2);
  EXPECT_EQ(seq.q_batch, 2);
  EXPECT_EQ(seq.k_batch, 2);
  EXPECT_EQ(seq.q_begin, 0);
  EXPECT_EQ(seq.k_begin, 0);
  EXPECT_EQ(seq.len_q, 5);
  EXPECT_EQ(seq.len_k, 7);
}

TEST(SequenceInfo, PackedIgnoresTheUpperBounds) {
  std::vector<int> const cu_q = prefix_sums({5, 0, 130}), cu_k = prefix_sums({0, 64, 3});
  Lengths lengths = packed_q(cu_q, 140);
  lengths.cu_seqlens_k = cu_k.data();
  lengths.total_k = 67;
  for (int bound : {1, 130, 1 << 20}) {
    Shape const shape{.batch = 3, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = bound, .seqlen_k = bound};
    SequenceInfo const last = flashattn::sequence_info(shape, lengths, 2);
    EXPECT_EQ(last.q_batch, 0);
    EXPECT_EQ(last.k_batch, 0);
    EXPECT_EQ(last.q_begin, 5);
    EXPECT_EQ(last.len_q, 130);
    EXPECT_EQ(last.k_begin, 64);
    EXPECT_EQ(last.len_k, 3);
    SequenceInfo const empty = flashattn::sequence_info(shape, lengths, 1);
    EXPECT_EQ(empty.len_q, 0);
    EXPECT_EQ(empty.len_k, 64);
  }
}

TEST(SequenceInfo, PackedQueriesOverDenseKeys) {
  std::vector<int> const cu_q = prefix_sums({2, 3});
  Shape const shape{.batch = 2, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = 3, .seqlen_k = 9};
  SequenceInfo const seq = flashattn::sequence_info(shape, packed_q(cu_q, 5), 1);
  EXPECT_EQ(seq.q_batch, 0);
  EXPECT_EQ(seq.k_batch, 1);
  EXPECT_EQ(seq.len_k, 9);
}

TEST(SequenceInfo, SeqUsedIsClampedIntoTheSequence) {
  Shape const shape{.batch = 6, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = 1, .seqlen_k = 10};
  std::vector<int> const used = {0, 4, 10, 11, -3, INT_MAX};
  std::vector<int> const expected = {0, 4, 10, 10, 0, 10};
  Lengths lengths;
  lengths.seqused_k = used.data();
  for (int b = 0; b < 6; ++b) { EXPECT_EQ(flashattn::sequence_info(shape, lengths, b).len_k, expected[b]) << b; }

  std::vector<int> const cu_k = prefix_sums({3, 3, 3, 3, 3, 3});
  lengths.cu_seqlens_k = cu_k.data();
  lengths.total_k = 18;
  std::vector<int> const packed_expected = {0, 3, 3, 3, 0, 3};
  for (int b = 0; b < 6; ++b) {
    SequenceInfo const seq = flashattn::sequence_info(shape, lengths, b);
    EXPECT_EQ(seq.len_k, packed_expected[b]) << b;
    EXPECT_EQ(seq.k_begin, 3 * b);
  }
}

TEST(SequenceInfo, UntrustedLengthsStayInsideTheTensor) {
  int const total_q = 37, total_k = 21;
  Shape const shape{.batch = 3, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = 9, .seqlen_k = 9};
  for (std::vector<int> const& cu : hostile_cu_seqlens()) {
    Lengths lengths = packed_q(cu, total_q);
    lengths.cu_seqlens_k = cu.data();
    lengths.total_k = total_k;
    lengths.seqused_k = cu.data();
    for (int b = 0; b < 3; ++b) {
      SequenceInfo const seq = flashattn::sequence_info(shape, lengths, b);
      bool const q_inside = seq.q_begin >= 0 && seq.len_q >= 0 && seq.q_begin + seq.len_q <= total_q;
      bool const k_inside = seq.k_begin >= 0 && seq.len_k >= 0 && seq.k_begin + seq.len_k <= total_k;
      EXPECT_TRUE(q_inside && k_inside) << cu[0] << " " << cu[1] << " " << cu[2] << " " << cu[3] << ", batch " << b;
    }
  }
}

TEST(Offsets, AreSixtyFourBit) {
  flashattn::Input const t{.data = nullptr, .batch_stride = int64_t(1) << 33, .row_stride = 1 << 20, .head_stride = 128};
  SequenceInfo seq{};
  seq.q_batch = 3;
  seq.k_batch = 5;
  seq.q_begin = 1 << 20;
  seq.k_begin = 1 << 21;
  EXPECT_EQ(flashattn::query_offset(t, seq, 7), (int64_t(3) << 33) + (int64_t(1) << 40) + 7 * 128);
  EXPECT_EQ(flashattn::key_offset(t, seq, 1), (int64_t(5) << 33) + (int64_t(1) << 41) + 128);
}

TEST(LseOffset, DenseIsBatchHeadRow) {
  Shape const shape{.batch = 3, .heads = 4, .heads_kv = 2, .head_dim = 64, .seqlen_q = 5, .seqlen_k = 7};
  std::set<int64_t> used;
  for (int b = 0; b < 3; ++b) {
    SequenceInfo const seq = flashattn::sequence_info(shape, {}, b);
    for (int h = 0; h < 4; ++h) {
      for (int row = 0; row < 5; ++row) { used.insert(flashattn::lse_offset(shape, {}, seq, h) + row); }
    }
  }
  EXPECT_EQ(used.size(), size_t{3 * 4 * 5});
  EXPECT_EQ(*used.begin(), 0);
  EXPECT_EQ(*used.rbegin(), 3 * 4 * 5 - 1);
  SequenceInfo const seq = flashattn::sequence_info(shape, {}, 1);
  EXPECT_EQ(flashattn::lse_offset(shape, {}, seq, 2), (1 * 4 + 2) * 5);
}

TEST(LseOffset, PackedIsHeadRow) {
  std::vector<int> const cu = prefix_sums({5, 0, 3});
  Shape const shape{.batch = 3, .heads = 4, .heads_kv = 2, .head_dim = 64, .seqlen_q = 99, .seqlen_k = 7};
  Lengths const lengths = packed_q(cu, 10);  // two rows more than the sequences use
  SequenceInfo const seq = flashattn::sequence_info(shape, lengths, 2);
  EXPECT_EQ(flashattn::lse_offset(shape, lengths, seq, 0), 5);
  EXPECT_EQ(flashattn::lse_offset(shape, lengths, seq, 3), 3 * 10 + 5);
  Shape const large{.batch = 1, .heads = 65535, .heads_kv = 1, .head_dim = 64, .seqlen_q = 1, .seqlen_k = 1};
  Lengths const many = packed_q(cu, 1 << 30);
  EXPECT_EQ(flashattn::lse_offset(large, many, SequenceInfo{}, 65534), int64_t(65534) << 30);
}

TEST(RowMap, IsABijectionThatGrowsWithTheToken) {
  for (int pack = 1; pack <= 16; ++pack) {
    RowMap const map{pack};
    for (int tokens : {0, 1, 2, 9}) {
      std::set<std::pair<int, int>> seen;
      int previous = 0;
      for (int row = 0; row < map.rows(tokens); ++row) {
        int const token = map.token(row), head = map.head(row);
        EXPECT_TRUE(token >= previous && token < tokens && head >= 0 && head < pack);
        EXPECT_EQ(token * pack + head, row);
        seen.insert({token, head});
        previous = token;
      }
      EXPECT_EQ(static_cast<int>(seen.size()), tokens * pack);
    }
  }
}

using TileKey = std::tuple<int, int, int>;  // batch, head, m_block

// How often each tile that has rows comes up; tiles without rows are left out.
std::map<TileKey, int> visited_tiles(Shape const& shape, Lengths const& lengths, int heads, int tile_tokens) {
  std::map<TileKey, int> visited;
  int64_t const tiles = flashattn::tiles_per_head(shape, lengths, tile_tokens) * heads;
  for (int64_t index = 0; index < tiles; ++index) {
    WorkTile const tile = flashattn::work_tile(shape, lengths, tile_tokens, index);
    EXPECT_TRUE(tile.batch >= 0 && tile.batch < shape.batch && tile.head >= 0 && tile.head < heads);
    int const len_q = flashattn::sequence_info(shape, lengths, tile.batch).len_q;
    if (tile.m_block >= 0 && tile.m_block * tile_tokens < len_q) { ++visited[{tile.batch, tile.head, tile.m_block}]; }
  }
  return visited;
}

std::map<TileKey, int> expected_tiles(std::vector<int> const& len_q, int heads, int tile_tokens) {
  std::map<TileKey, int> expected;
  for (int b = 0; b < static_cast<int>(len_q.size()); ++b) {
    for (int head = 0; head < heads; ++head) {
      for (int row = 0; row < len_q[b]; row += tile_tokens) { expected[{b, head, row / tile_tokens}] = 1; }
    }
  }
  return expected;
}

TEST(WorkTile, DenseVisitsEveryTileOnce) {
  for (int batch : {1, 2, 5}) {
    for (int seqlen_q = 0; seqlen_q <= 20; ++seqlen_q) {
      for (int tile : {1, 3, 4, 16, 64}) {
        Shape const shape{.batch = batch, .heads = 3, .heads_kv = 1, .head_dim = 8, .seqlen_q = seqlen_q, .seqlen_k = 1};
        bool const same = visited_tiles(shape, {}, 3, tile) == expected_tiles(std::vector<int>(batch, seqlen_q), 3, tile);
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
    Shape const shape{.batch = static_cast<int>(len_q.size()), .heads = 2, .heads_kv = 1, .head_dim = 8,
                      .seqlen_q = 1 + up_to(100), .seqlen_k = 1};  // any bound must do
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
  Shape const shape{.batch = 4096, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = 1, .seqlen_k = 1};
  EXPECT_TRUE(visited_tiles(shape, packed_q(cu, 4096), 1, 64) == expected_tiles(len_q, 1, 64));
}

TEST(WorkTile, LastTileOfASequenceComesFirst) {
  std::vector<int> const cu = prefix_sums({10, 25});
  Shape const shape{.batch = 2, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = 25, .seqlen_k = 1};
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
      Shape const shape{.batch = 3, .heads = 2, .heads_kv = 1, .head_dim = 8, .seqlen_q = 9, .seqlen_k = 9};
      Lengths const lengths = packed_q(cu, total);
      int64_t const tiles = flashattn::tiles_per_head(shape, lengths, 16) * 2;
      int64_t const step = tiles > 200 ? tiles / 100 : 1;
      for (int64_t index = 0; index < tiles; index += step) {
        WorkTile const tile = flashattn::work_tile(shape, lengths, 16, index);
        bool const inside = tile.batch >= 0 && tile.batch < 3 && tile.head >= 0 && tile.head < 2;
        int64_t const row = int64_t(tile.m_block) * 16;  // the kernels multiply in 32 bit
        EXPECT_TRUE(inside && row > INT_MIN && row < INT_MAX - 16) << "total " << total << ", index " << index;
      }
    }
  }
}

TEST(ForwardPlan, PacksHeadsOnlyWhenTheyFitAndRowsAreFew) {
  flashattn::TileShape const tile{.m = 128, .n = 64, .warps = 4, .stages = 1, .q_in_registers = false};
  for (int heads_kv : {1, 2, 3, 8}) {
    for (int group : {1, 2, 3, 7, 8, 71, 128, 200}) {
      for (int seqlen_q : {0, 1, 3, 17, 64, 65, 1000}) {
        Shape const shape{.batch = 2, .heads = heads_kv * group, .heads_kv = heads_kv, .head_dim = 64,
                          .seqlen_q = seqlen_q, .seqlen_k = 9};
        flashattn::ForwardPlan const plan = flashattn::plan_forward(shape, {}, tile);
        int const pack = plan.row_map.pack();
        EXPECT_TRUE(pack == 1 || pack == group) << pack;
        EXPECT_GE(plan.tile_tokens, 1);
        EXPECT_LE(plan.row_map.rows(plan.tile_tokens), tile.m);
        int const work_heads = shape.heads / pack;
        std::map<TileKey, int> const visited = visited_tiles(shape, {}, work_heads, plan.tile_tokens);
        EXPECT_TRUE(visited == expected_tiles({seqlen_q, seqlen_q}, work_heads, plan.tile_tokens));
        EXPECT_EQ(plan.tiles, static_cast<int64_t>(visited.size()));
      }
    }
  }
}

}  // namespace
