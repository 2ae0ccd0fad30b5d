// core/work_list.h and core/cut_tile.h: shares of the decode work hold every key block once, and
// the parts of a cut tile lie where the merge looks for them.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/work_list.h"
#include "packed_lengths.h"

namespace {

using flashattn::CutTiles;
using flashattn::FlashSplitkvParams;
using flashattn::ListTile;
using flashattn::SharePart;
using flashattn::Shares;
using flashattn::SplitkvPlan;
using flashattn::WorkList;

constexpr int kBlock = 64;

struct Problem {
  std::vector<int> len_q;
  std::vector<int> len_k;
  int heads = 8;
  int heads_kv = 2;
  flashattn::Window window = {-1, 0};
  int seqlen_q = 0;  // what the caller says; 0: the truth

  std::vector<int> cu = packed::prefix_sums(len_q);

  FlashSplitkvParams params() const {
    FlashSplitkvParams p;
    int const bound = seqlen_q > 0 ? seqlen_q : *std::max_element(len_q.begin(), len_q.end());
    p.fwd.shape = {.batch = static_cast<int>(len_q.size()),
                   .heads = heads,
                   .heads_kv = heads_kv,
                   .head_dim = 128,
                   .seqlen_q = bound,
                   .seqlen_k = 1 << 20};
    p.fwd.lengths = packed::packed_q(cu, cu.back());
    p.fwd.window = window;
    p.cache.seqlens = len_k.data();
    p.cache.rows = static_cast<int>(len_k.size());
    return p;
  }
};

using TileKey = std::tuple<int, int, int>;  // sequence, head, query tile

// Entries of every tile of the decode role: its key blocks, a tile without keys counting as one, up
// to a multiple of the smallest share.
std::map<TileKey, int> expected_blocks(FlashSplitkvParams const& p, SplitkvPlan const& plan) {
  std::map<TileKey, int> expected;
  for (int b = 0; b < p.fwd.shape.batch; ++b) {
    flashattn::SequenceInfo const seq = flashattn::cache_sequence_info(p, b);
    if (plan.may_chunk && seq.len_q > plan.decode.tile_tokens) { continue; }
    for (int first = 0; first < seq.len_q; first += plan.decode.tile_tokens) {
      int const last = std::min(first + plan.decode.tile_tokens, seq.len_q) - 1;
      flashattn::VisibleBand const band =
          flashattn::visible_band(seq.len_q, seq.len_k, p.fwd.window);
      int const count = flashattn::visible_blocks(band, first, last, kBlock).count();
      for (int head = 0; head < p.fwd.shape.heads / plan.decode.row_map.pack(); ++head) {
        int const least = plan.share.least;
        expected[{b, head, first / plan.decode.tile_tokens}] =
            (std::max(count, 1) + least - 1) / least * least;
      }
    }
  }
  return expected;
}

ListTile find(WorkList const& list, int batch, int64_t position) {
  int64_t begin = 0;
  for (int b = 0; b < batch; ++b) {
    int64_t const end = begin + list.length(b);
    if (position < end) { return list.tile_at(b, begin, position); }
    begin = end;
  }
  ADD_FAILURE() << "no tile at " << position;
  return {};
}

// Walks the shares as the thread blocks do.
void expect_shares_cover(Problem const& problem, int most) {
  FlashSplitkvParams const p = problem.params();
  SplitkvPlan plan = flashattn::plan_splitkv(p, 90, 128, 132);
  flashattn::share_decode_work(plan, p.fwd.shape, most);
  int const team = plan.team.divisor();
  auto const list = [&](int member) { return WorkList(p, plan, kBlock, member); };
  int64_t total = 0;
  for (int b = 0; b < p.fwd.shape.batch; ++b) { total += list(team - 1).length(b); }
  Shares const shares = flashattn::team_shares(plan, total);
  CutTiles cuts;
  cuts.slots = 2, cuts.team = team;

  std::map<TileKey, int> seen;
  std::map<TileKey, std::pair<int, int>> cut;  // entry and number of parts, as recorded
  std::map<TileKey, std::vector<int64_t>> slots;
  int64_t covered = 0, largest = 0;
  for (int thread_block = 0; thread_block < most; ++thread_block) {
    int const share = thread_block / team, member = thread_block % team;
    int64_t const end = shares.end(share);
    largest = std::max(largest, end - shares.begin(share));
    for (int64_t at = shares.begin(share); at < end;) {
      ListTile const tile = find(list(member), p.fwd.shape.batch, at);
      ASSERT_TRUE(tile.begin <= at && at < tile.end());
      SharePart const part(tile, at, end);
      TileKey const key{tile.work.batch, tile.work.head, tile.work.m_block};
      EXPECT_EQ(at - tile.begin, seen[key]);  // in order
      seen[key] += static_cast<int>(part.end - part.begin);
      if (!part.is_whole()) { slots[key].push_back(part.slot(thread_block)); }
      if (part.begins_tile && !part.ends_tile) {
        EXPECT_EQ(part.end, end);
        cut[key] = {thread_block, shares.holders(share, tile.end())};
      }
      covered += part.end - part.begin;
      at = part.end;
    }
  }
  EXPECT_EQ(covered, total * team);
  EXPECT_TRUE(seen == expected_blocks(p, plan));
  int64_t const shares_of_list = most / team;
  int64_t most_of_one = (total + shares_of_list - 1) / shares_of_list;  // of an equal share
  if (plan.share.whole_tiles > 0) {
    most_of_one += plan.share.cut_cost;
  } else {
    int64_t const least = plan.share.least, tiles = plan.share.tiles.divisor();
    bool const are_short = most_of_one > least && total <= 2 * least * tiles;
    most_of_one = std::max(most_of_one, are_short ? 2 * least : least);
  }
  EXPECT_LE(largest, most_of_one);

  std::set<int64_t> used;
  EXPECT_EQ(cut.size(), slots.size());
  for (auto const& [key, parts] : slots) {
    auto const [entry, count] = cut[key];
    EXPECT_EQ(static_cast<size_t>(count), parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(parts[i], cuts.slot(entry, static_cast<int>(i)));
      EXPECT_LT(parts[i], 2 * int64_t(most));
      EXPECT_TRUE(used.insert(parts[i]).second) << "slot " << parts[i];
    }
  }
}

TEST(WorkList, SharesHoldEveryBlockOnce) {
  std::vector<Problem> const problems = {
      {.len_q = {1}, .len_k = {8192}},
      {.len_q = {1}, .len_k = {0}},
      {.len_q = {1, 1, 1}, .len_k = {1, 64, 65}},
      {.len_q = {1, 0, 4, 2}, .len_k = {100, 5000, 3, 777}},
      {.len_q = {1, 200, 1}, .len_k = {4096, 4096, 100000}},  // the second one is a chunk
      {.len_q = {3, 3}, .len_k = {1000, 10}, .heads = 7, .heads_kv = 7},
      {.len_q = {1, 1}, .len_k = {3000, 200}, .heads = 48, .heads_kv = 2},
      {.len_q = {1, 1}, .len_k = {3000, 200}, .heads = 64, .heads_kv = 1},
      {.len_q = {1, 2, 1}, .len_k = {9999, 300, 5000}, .window = {255, 0}},
      {.len_q = {9, 1, 30}, .len_k = {500, 5000, 7}, .seqlen_q = 1},  // longer than the caller says
  };
  for (size_t i = 0; i < problems.size(); ++i) {
    for (int most : {1, 2, 3, 7, 132, 264, 1000}) {
      SCOPED_TRACE("problem " + std::to_string(i) + ", " + std::to_string(most) + " shares");
      expect_shares_cover(problems[i], most);
    }
  }
}

TEST(WorkList, RandomBatches) {
  std::mt19937 random(3);
  auto const pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 60; ++round) {
    Problem problem;
    int const batch = pick(1, 40);
    problem.len_q.clear();
    for (int b = 0; b < batch; ++b) {
      problem.len_q.push_back(pick(0, 3) == 0 ? pick(0, 40) : 1);
      problem.len_k.push_back(pick(0, 5) == 0 ? pick(0, 60000) : pick(0, 700));
    }
    problem.cu = packed::prefix_sums(problem.len_q);
    problem.heads_kv = pick(1, 4);
    problem.heads = problem.heads_kv * pick(1, 40);
    if (pick(0, 2) == 0) { problem.window.left = pick(0, 3000); }
    if (pick(0, 4) == 0) { problem.seqlen_q = 1; }
    SCOPED_TRACE("round " + std::to_string(round));
    expect_shares_cover(problem, pick(1, 300));
  }
}

// Thread blocks that work on the heads of a sequence at the same time are neighbours.
TEST(WorkList, MembersOfATeamTakeTheSameKeysOfDifferentHeads) {
  Problem const problem{.len_q = {1, 1}, .len_k = {8192, 5000}, .heads = 32, .heads_kv = 8};
  FlashSplitkvParams const p = problem.params();
  SplitkvPlan const plan = flashattn::plan_splitkv(p, 90, 128, 132);
  ASSERT_EQ(plan.shares, 264);
  ASSERT_EQ(plan.team.divisor(), 8);
  for (int64_t position : {0, 5, 127, 128, 200}) {
    for (int member = 0; member < 8; ++member) {
      ListTile const tile = find(WorkList(p, plan, kBlock, member), 2, position);
      EXPECT_EQ(tile.work.head, member);
      EXPECT_EQ(tile.work.batch, position < 128 ? 0 : 1);
      EXPECT_EQ(tile.begin, position < 128 ? 0 : 128);
    }
  }
}

// A number of heads without a divisor in common with the thread blocks: teams of one.
TEST(WorkList, AnyNumberOfHeadsHasTeams) {
  for (auto const& [heads, team] : std::map<int, int>{{1, 1}, {2, 2}, {3, 3}, {5, 1}, {32, 8}}) {
    Problem const problem{.len_q = {1}, .len_k = {9000}, .heads = heads, .heads_kv = heads};
    SplitkvPlan const plan = flashattn::plan_splitkv(problem.params(), 90, 128, 132);
    EXPECT_EQ(plan.team.divisor(), team);
    EXPECT_EQ(plan.team_heads * team, heads);
  }
}

// A few short tiles: each has a thread block to itself, whatever its length.
TEST(WorkList, ShortTilesAreNotQueuedBehindEachOther) {
  Problem const problem{
      .len_q = {1, 1, 1, 1}, .len_k = {1, 64, 65, 128}, .heads = 1, .heads_kv = 1};
  FlashSplitkvParams const p = problem.params();
  SplitkvPlan const plan = flashattn::plan_splitkv(p, 90, 128, 132);
  WorkList const list(p, plan, kBlock, /*member=*/0);
  int64_t total = 0;
  for (int b = 0; b < 4; ++b) { total += list.length(b); }
  Shares const shares = flashattn::team_shares(plan, total);
  for (int b = 0; b < 4; ++b) {
    ListTile const tile = find(list, 4, shares.begin(b));
    EXPECT_EQ(tile.work.batch, b);
    EXPECT_EQ(tile.begin, shares.begin(b));
    EXPECT_EQ(tile.end(), shares.end(b));
  }
  EXPECT_EQ(shares.begin(4), total);
}

// Tiles of one length, of which each share has nearly two: exactly two, and none is cut; but not
// where the share would grow by more than a cut costs.
TEST(WorkList, NearlyWholeTilesAreNotCut) {
  auto const size = [](int blocks, int tiles, int rows, int most = 33) {
    return Shares(int64_t(blocks) * tiles, flashattn::plan_shares(tiles, rows, most, false)).size;
  };
  EXPECT_EQ(size(32, 64, /*rows=*/4), 64);    // instead of 63
  EXPECT_EQ(size(64, 64, /*rows=*/4), 125);   // 128 would be 3 more than an equal share
  EXPECT_EQ(size(64, 64, /*rows=*/16), 128);  // but more rows cost more to merge
  EXPECT_EQ(size(128, 64, /*rows=*/16), 249);
  EXPECT_EQ(size(7, 6, /*rows=*/16), 2);  // fewer tiles than shares: thread blocks would be idle
  EXPECT_EQ(Shares(2049, flashattn::plan_shares(64, 4, 33, false)).size,
            63);  // not all of one length
}

// Few tiles are cut into pieces of two key blocks, of four beside chunks.
TEST(WorkList, SmallSharesAreLargerBesideChunks) {
  for (bool const beside_chunks : {false, true}) {
    Shares const shares(40, flashattn::plan_shares(/*tiles=*/1, /*rows=*/4, 33, beside_chunks));
    EXPECT_EQ(shares.size, beside_chunks ? 4 : 2);
  }
}

// Tiles that need two of the smallest shares are not cut in three.
TEST(WorkList, ShortTilesAreNotCut) {
  for (int entries : {7, 20, 30, 33}) {  // of tiles of 8 entries
    Shares const shares(8 * entries,
                        flashattn::plan_shares(entries, 4, 34, /*beside_chunks=*/true));
    EXPECT_EQ(shares.size, entries > 17 ? 8 : 4);
  }
  Shares const longer(9 * 20, flashattn::plan_shares(20, 4, 34, /*beside_chunks=*/true));
  EXPECT_EQ(longer.size, 6);
}

// Where a sequence has no more than one key block nothing can be cut, and there is no room for it,
// also when sequences are longer than the caller said, so that there are more tiles than planned.
TEST(WorkList, SingleKeyBlocksAreNotCut) {
  Problem problem{.len_q = {136}, .len_k = {64}, .heads = 32, .heads_kv = 8, .seqlen_q = 1};
  FlashSplitkvParams p = problem.params();
  p.fwd.shape.seqlen_k = kBlock;
  SplitkvPlan const plan = flashattn::plan_splitkv(p, 90, 128, 132);
  EXPECT_EQ(plan.decode_cuts.entries, 0);
  EXPECT_FALSE(plan.merges());
  WorkList const list(p, plan, kBlock, /*member=*/0);
  int64_t const total = list.length(0);
  EXPECT_EQ(total, 34 * plan.team_heads);
  Shares const shares = flashattn::team_shares(plan, total);
  for (int64_t at = 0; at < total; ++at) {
    ListTile const tile = list.tile_at(0, 0, at);
    EXPECT_TRUE(SharePart(tile, at, shares.end(static_cast<int>(at / shares.size))).is_whole());
  }
}

TEST(WorkList, LongListsDoNotOverflow) {
  int64_t const total = (int64_t(1) << 31) * 65536;
  Shares const shares(total, flashattn::plan_shares(1 << 20, /*rows=*/4, 264, false));
  EXPECT_EQ(shares.begin(0), 0);
  EXPECT_EQ(shares.end(263), total);
  EXPECT_LE(shares.size, total / 264 + 1);
  EXPECT_EQ(shares.holders(0, total), 264);
}

TEST(Divide, ShortAndLong) {
  for (int64_t a : {int64_t(0), int64_t(1), int64_t(63), int64_t(INT32_MAX), int64_t(INT32_MAX) + 1,
                    int64_t(1) << 50}) {
    for (int64_t b : {int64_t(1), int64_t(7), int64_t(64), int64_t(INT32_MAX), int64_t(1) << 33}) {
      EXPECT_EQ(flashattn::divide(a, b), a / b);
      if (b <= INT32_MAX) {
        EXPECT_EQ(flashattn::divide(a, flashattn::FastDivisor(static_cast<int>(b))), a / b);
      }
    }
  }
}

// A chunk tile has slots of its own.
TEST(CutTiles, SlotsOfChunksDoNotOverlap) {
  CutTiles cuts;
  cuts.slots = 5;
  std::set<int64_t> used;
  for (int entry = 0; entry < 7; ++entry) {
    for (int part = 0; part < 5; ++part) {
      EXPECT_TRUE(used.insert(cuts.slot(entry, part)).second);
    }
  }
  EXPECT_EQ(*used.rbegin(), 34);
}

}  // namespace
