// core/splitkv_plan.h and core/merge_plan.h: every sequence has a role, the workspace is bounded
// and its parts do not overlap, and the merge has warps for all rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/merge_plan.h"
#include "core/splitkv_plan.h"
#include "packed_lengths.h"
#include "splitkv_call.h"

namespace {

using flashattn::FlashSplitkvParams;
using flashattn::MergePlan;
using flashattn::Role;
using flashattn::SplitkvPlan;

// C43: thousands of sequences of one row must not ask for gigabytes. What automatic splits need
// depends on the GPU and the kernel alone.
TEST(SplitkvPlan, WorkspaceOfThousandsOfOneRowSequences) {
  std::set<size_t> sizes;
  for (int batch : {1, 64, 4096, 80000}) {
    std::vector<int> const cu = packed::prefix_sums(std::vector<int>(batch, 1));
    for (int capacity : {4096, 131072, 1 << 20}) {
      FlashSplitkvParams params = call(batch, 64, 8, 128, 1, capacity);
      params.fwd.lengths = packed::packed_q(cu, batch);
      sizes.insert(flashattn::plan_splitkv(params, 90, 128, 132).workspace_bytes);
    }
  }
  EXPECT_EQ(sizes.size(), 1u);
  EXPECT_LE(*sizes.begin(), size_t(5) << 20);
}

// The bound in flash_fwd_splitkv's documentation.
TEST(SplitkvPlan, AutomaticWorkspaceIsBounded) {
  for (int multiprocessors : {16, 108, 132}) {
    for (int seqlen_q : {1, 5, 8, 129, 2048, 100000}) {
      for (int head_dim : {64, 128, 256}) {
        for (int batch : {1, 7, 300}) {
          std::vector<int> const cu = packed::prefix_sums(std::vector<int>(batch, seqlen_q));
          FlashSplitkvParams params = call(batch, 32, 8, head_dim, seqlen_q, 131072);
          params.fwd.lengths = packed::packed_q(cu, cu.back());
          SplitkvPlan const plan = flashattn::plan_splitkv(params, 90, head_dim, multiprocessors);
          int64_t const row = 4 * (head_dim + 1);
          int64_t const decode = int64_t(3) * multiprocessors * 2 * 32 * row;
          int64_t const rows = head_dim > 160 ? 64 : 128;
          int64_t const chunk = int64_t(8) * multiprocessors * rows * row / 3;
          int64_t const tiles = plan.decode_cuts.entries + plan.chunk_cuts.entries;
          EXPECT_LE(static_cast<int64_t>(plan.workspace_bytes), decode + chunk + 100 * tiles);
        }
      }
    }
  }
}

// New tokens without queries: nothing but the append runs, and it needs no workspace.
TEST(SplitkvPlan, NoQueriesNeedNothing) {
  for (int heads : {0, 8}) {
    FlashSplitkvParams const params = call(2, heads, 2, 128, heads == 0 ? 1 : 0, 4096);
    SplitkvPlan const plan = flashattn::plan_splitkv(params, 90, 128, 132);
    EXPECT_EQ(plan.workspace_bytes, 0u);
    EXPECT_FALSE(plan.may_decode || plan.may_chunk || plan.merges());
  }
}

// Nothing can be cut where a tile has one key block, and then there is nothing to merge.
TEST(SplitkvPlan, OneBlockNeedsNoMerge) {
  for (int capacity : {0, 1, 64}) {
    SplitkvPlan const plan = flashattn::plan_splitkv(call(3, 8, 2, 128, 1, capacity), 90, 128, 132);
    EXPECT_TRUE(plan.automatic());
    EXPECT_FALSE(plan.merges());
    EXPECT_EQ(plan.workspace_bytes, 0u);
  }
  EXPECT_TRUE(flashattn::plan_splitkv(call(3, 8, 2, 128, 1, 65), 90, 128, 132).merges());
}

// No splits, or splits of a given size: the kernel of a sequence must not depend on how long others
// of the batch are.
TEST(SplitkvPlan, FixedSplitsKeepTheRole) {
  for (int seqlen_q : {1, 5, 8, 100}) {
    for (flashattn::Split split :
         {flashattn::Split{.split_size = 256}, flashattn::Split{.num_splits = 1}}) {
      FlashSplitkvParams params = call(3, 8, 2, 128, seqlen_q, 4096);
      params.split = split;
      EXPECT_EQ(flashattn::plan_splitkv(params, 90, 128, 132).decode_role, Role::kDecode);
    }
  }
  FlashSplitkvParams const params = call(3, 8, 2, 128, 8, 4096);
  EXPECT_EQ(flashattn::plan_splitkv(params, 90, 128, 132).decode_role, Role::kWideDecode);
}

TEST(DecodePack, TheLargestDivisorOfTheGroupThatFits) {
  flashattn::Shape no_queries;  // only new tokens for the cache
  no_queries.heads_kv = 2;
  EXPECT_EQ(flashattn::decode_pack(no_queries, 16), 1);
  for (int heads_kv : {1, 3}) {
    for (int group = 1; group <= 300; ++group) {
      flashattn::Shape shape;
      shape.heads = group * heads_kv;
      shape.heads_kv = heads_kv;
      for (int rows : {16, 64}) {
        int expected = 0;
        for (int pack = 1; pack <= rows; ++pack) { expected = group % pack == 0 ? pack : expected; }
        EXPECT_EQ(flashattn::decode_pack(shape, rows), expected) << group;
      }
    }
  }
}

template <class Visit>
void for_every_plan(Visit const& visit) {
  for (auto [heads, heads_kv] : {std::pair{4, 4}, {8, 2}, {5, 1}, {48, 2}, {17, 1}}) {
    for (int head_dim : {40, 128, 256}) {
      for (int seqlen_q : {1, 3, 16, 17, 200}) {
        for (bool packed_q : {false, true}) {
          std::vector<int> const cu = packed::prefix_sums({1, seqlen_q, 0});
          FlashSplitkvParams params = call(3, heads, heads_kv, head_dim, seqlen_q, 1000);
          if (packed_q) { params.fwd.lengths = packed::packed_q(cu, cu.back()); }
          SCOPED_TRACE(std::to_string(heads) + "/" + std::to_string(heads_kv) +
                       " heads, head dim " + std::to_string(head_dim) + ", " +
                       std::to_string(seqlen_q) + " rows" + (packed_q ? ", packed" : ""));
          visit(params, head_dim == 40 ? 64 : head_dim);
        }
      }
    }
  }
}

// Sequences of up to seqlen_q rows: each finds the launch of its role.
TEST(SplitkvPlan, EverySequenceHasARole) {
  for_every_plan([](FlashSplitkvParams const& params, int kernel_head_dim) {
    SplitkvPlan const plan = flashattn::plan_splitkv(params, 90, kernel_head_dim, 132);
    flashattn::Shape const& shape = params.fwd.shape;
    int const rows = flashattn::tile_shape(90, plan.decode_role, kernel_head_dim).m;
    EXPECT_GE(plan.decode.tile_tokens, 1);
    EXPECT_LE(plan.decode.row_map.rows(plan.decode.tile_tokens), rows);
    bool const packed_q = params.fwd.lengths.cu_seqlens_q != nullptr;
    // Without a kernel for chunks, decode tiles hold as many of a sequence as it takes.
    bool const several_tiles = !plan.may_chunk && shape.seqlen_q > plan.decode.tile_tokens;
    if (several_tiles) {
      EXPECT_LE(shape.seqlen_q * shape.heads / shape.heads_kv, flashattn::kFewRows);
      EXPECT_EQ(plan.decode_role, Role::kWideDecode);
    }
    for (int len_q = packed_q ? 1 : shape.seqlen_q; len_q <= shape.seqlen_q; ++len_q) {
      bool const is_decoded = several_tiles || len_q <= plan.decode.tile_tokens;
      EXPECT_TRUE(is_decoded ? plan.may_decode : plan.may_chunk) << len_q;
    }
    EXPECT_EQ(plan.rows, flashattn::query_rows(params.fwd) * shape.heads);
  });
}

// Given splits: the decode kernel has a tile for each sequence and pack of heads.
TEST(SplitkvPlan, DecodeTilesHoldTheSequences) {
  for_every_plan([](FlashSplitkvParams params, int kernel_head_dim) {
    params.split.num_splits = 2;
    SplitkvPlan const plan = flashattn::plan_splitkv(params, 90, kernel_head_dim, 132);
    flashattn::Shape const& shape = params.fwd.shape;
    std::set<std::pair<int, int>> visited;
    for (int64_t index = 0; index < plan.decode.tiles; ++index) {
      flashattn::WorkTile const tile = flashattn::decode_tile_of(shape, index);
      EXPECT_EQ(tile.m_block, 0);
      EXPECT_TRUE(tile.batch >= 0 && tile.batch < shape.batch && tile.head >= 0);
      EXPECT_LE((tile.head + 1) * plan.decode.row_map.pack(), shape.heads);
      visited.insert({tile.batch, tile.head});
    }
    EXPECT_EQ(static_cast<int64_t>(visited.size()), plan.decode.tiles);
    EXPECT_EQ(plan.decode.tiles * plan.decode.row_map.pack(), int64_t(shape.batch) * shape.heads);
  });
}

// Up to 128 rows a sequence, where their tiles would leave multiprocessors idle; never with given
// splits.
TEST(SplitkvPlan, FewChunksAreDecoded) {
  auto const has_chunks = [](int batch, int heads, int heads_kv, int seqlen_q, int num_splits,
                             int split_size) {
    FlashSplitkvParams params = call(batch, heads, heads_kv, 128, seqlen_q, 4096);
    params.split = {.num_splits = num_splits, .split_size = split_size};
    return flashattn::plan_splitkv(params, 90, 128, 132).may_chunk;
  };
  EXPECT_FALSE(has_chunks(8, 32, 8, 32, 0, 0));
  EXPECT_TRUE(has_chunks(8, 32, 8, 33, 0, 0));   // 132 rows
  EXPECT_TRUE(has_chunks(64, 32, 8, 32, 0, 0));  // 512 tiles for 264 places
  EXPECT_TRUE(has_chunks(8, 32, 8, 32, 1, 0));
  EXPECT_TRUE(has_chunks(8, 32, 8, 32, 3, 0));
  EXPECT_TRUE(has_chunks(8, 32, 8, 32, 0, 512));
  EXPECT_FALSE(has_chunks(2, 40, 1, 2, 0, 0));  // a tile has 20 of 40 heads, so one token
  EXPECT_TRUE(has_chunks(2, 40, 1, 4, 0, 0));   // 160 rows
}

// Tiles of half as many rows, where chunks would leave half of a tile empty or tiles would not fill
// the GPU; never where bits must not depend on the batch.
TEST(SplitkvPlan, ShortChunksHaveShortTiles) {
  auto const role = [](int batch, int seqlen_q, flashattn::Split split = {}, int head_dim = 128) {
    FlashSplitkvParams params = call(batch, 32, 8, head_dim, seqlen_q, 4096);
    params.split = split;
    return flashattn::plan_splitkv(params, 90, head_dim, 132).chunk_role;
  };
  EXPECT_EQ(role(64, 16), Role::kShortChunk);  // 64 rows
  EXPECT_EQ(role(64, 17), Role::kChunk);       // 68
  EXPECT_EQ(role(1, 512), Role::kShortChunk);  // 128 tiles for 132 multiprocessors
  EXPECT_EQ(role(1, 513), Role::kChunk);       // 136
  EXPECT_EQ(role(1, 100, {.num_splits = 2}), Role::kShortChunk);
  EXPECT_EQ(role(1, 100, {.num_splits = 1}), Role::kChunk);
  EXPECT_EQ(role(1, 100, {.split_size = 512}), Role::kChunk);
  EXPECT_EQ(role(1, 100, {}, 192), Role::kChunk);  // whose tiles have 64 rows anyway
  // Where a tile of 64 rows would hold one head instead of all that share keys, it would read them
  // once for each.
  for (int heads : {96, 128}) {
    FlashSplitkvParams const params = call(1, heads, 1, 128, 2, 8192);
    SplitkvPlan const plan = flashattn::plan_splitkv(params, 90, 128, 132);
    EXPECT_EQ(plan.chunk_role, Role::kChunk);
    EXPECT_EQ(plan.chunk.row_map.pack(), heads);
  }
  // Packed: as many tiles as sequences of about the greatest length have.
  FlashSplitkvParams params = call(17, 32, 8, 128, 100, 4096);
  int const offsets = 0;
  params.fwd.lengths.cu_seqlens_q = &offsets;
  params.fwd.lengths.total_q = 116;
  SplitkvPlan const plan = flashattn::plan_splitkv(params, 90, 128, 132);
  EXPECT_EQ(plan.chunk_role, Role::kShortChunk);
  EXPECT_EQ(flashattn::expected_tiles(params.fwd, plan.chunk), 8 * 7);
  EXPECT_EQ(plan.chunk.tiles, 8 * (7 + 17));
  // 7 would fill the GPU, but need room for 7 parts of 192 tiles
  EXPECT_EQ(plan.chunk_split.splits, 2);
}

// The lanes of a warp that have columns cover a row in as few slices as they can; the other lanes
// have other parts of it. The fewer the rows, the more warps share one.
TEST(MergePlan, LanesFollowRowsAndParts) {
  for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
    for (int64_t rows : {1, 32, 2048, 100000}) {
      for (int64_t parts : {1, 4, 5, 33, 300}) {
        MergePlan const plan = flashattn::plan_merge(head_dim, rows, parts, 2112);
        EXPECT_EQ(32 % plan.lanes(), 0);
        EXPECT_LE(32 / plan.lanes() * flashattn::kMergeParts, 32);  // weights that a warp knows
        int const columns = plan.lanes() * flashattn::kMergeColumns;
        EXPECT_GE(plan.slices * columns, head_dim);
        EXPECT_LT((plan.slices - 1) * columns, head_dim);
        if (parts <= flashattn::kMergeParts && head_dim > 64) { EXPECT_EQ(plan.lanes(), 32); }
        if (rows >= 2112 && plan.lanes() > flashattn::kMinMergeLanes) {
          EXPECT_LT((plan.lanes() / 2) * flashattn::kMergeColumns, head_dim > 128 ? 128 : head_dim);
        }
      }
    }
  }
  EXPECT_EQ(flashattn::plan_merge(128, 32, 33, 2112).lanes(),
            flashattn::kMinMergeLanes);                             // batch 1: 32 parts at once
  EXPECT_EQ(flashattn::plan_merge(128, 512, 17, 2112).lanes(), 8);  // 2048 warps
  EXPECT_EQ(flashattn::plan_merge(128, 2048, 2, 2112).lanes(), 32);
}

TEST(MergePlan, ThreadBlocksForAllRowsOrAllThatFit) {
  auto const blocks = [](int batch, int heads, int heads_kv, int seqlen_q) {
    FlashSplitkvParams const params = call(batch, heads, heads_kv, 128, seqlen_q, 8192);
    SplitkvPlan const plan = flashattn::plan_splitkv(params, 90, 128, 132);
    EXPECT_TRUE(plan.merges());
    return flashattn::plan_merges(plan, params.fwd.shape).blocks;
  };
  EXPECT_EQ(blocks(1, 32, 8, 1), 64);  // 32 rows in slices of 16 columns, 4 warps a thread block
  EXPECT_EQ(blocks(64, 64, 8, 1), 528);
  EXPECT_EQ(blocks(1, 32, 8, 129), 528);
}

TEST(SplitkvPlan, PartsOfTheWorkspaceDoNotOverlap) {
  for_every_plan([](FlashSplitkvParams params, int kernel_head_dim) {
    for (int num_splits : {0, 1, 5}) {
      for (int rotary_dim : {0, 16}) {
        params.split.num_splits = num_splits;
        params.append.rotary_dim = rotary_dim;
        params.workspace = nullptr;
        SplitkvPlan const asked = flashattn::plan_splitkv(params, 90, kernel_head_dim, 132);
        EXPECT_TRUE(!asked.out_partial && !asked.lse_partial && !asked.rotated_q);
        params.workspace = reinterpret_cast<void*>(uintptr_t(1) << 40);
        SplitkvPlan const plan = flashattn::plan_splitkv(params, 90, kernel_head_dim, 132);
        EXPECT_EQ(plan.workspace_bytes, asked.workspace_bytes);

        int64_t const rows = plan.rows, head_dim = params.fwd.shape.head_dim,
                      splits = plan.split.splits;
        std::vector<std::pair<void*, int64_t>> parts;
        for (flashattn::CutTiles const* cuts : {&plan.decode_cuts, &plan.chunk_cuts}) {
          if (cuts->entries == 0) { continue; }
          int64_t const part_rows = int64_t(cuts->entries) * cuts->slots * cuts->rows;
          parts.push_back(
              {cuts->sizes, cuts->entries * int64_t(sizeof(flashattn::CutTiles::Size))});
          parts.push_back({cuts->tiles, cuts->entries * int64_t(sizeof(flashattn::QueryTile))});
          parts.push_back({cuts->out, part_rows * head_dim * 4});
          parts.push_back({cuts->lse, part_rows * 4});
        }
        if (splits > 1) {
          parts.push_back({plan.out_partial, splits * rows * head_dim * 4});
          parts.push_back({plan.lse_partial, splits * rows * 4});
        }
        if (rotary_dim > 0) { parts.push_back({plan.rotated_q, rows * head_dim * 2}); }
        int64_t end = 0;
        for (auto [pointer, bytes] : parts) {
          int64_t const begin = static_cast<char*>(pointer) - static_cast<char*>(params.workspace);
          EXPECT_GE(begin, end);
          EXPECT_EQ(begin % 128, 0);
          end = begin + bytes;
        }
        EXPECT_LE(end, static_cast<int64_t>(plan.workspace_bytes));
        EXPECT_EQ(plan.workspace_bytes == 0, parts.empty());
      }
    }
  });
}

}  // namespace
