// core/split_plan.h: every key block belongs to one split, and plans stay within their bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <vector>

#include "core/split_plan.h"
#include "splitkv_call.h"

namespace {

using flashattn::BlockRange;
using flashattn::FlashSplitkvParams;
using flashattn::SplitPlan;

// Every block of `r` is in one split, in order and as clean as before. Returns the sizes.
std::vector<int> expect_partition(BlockRange r, SplitPlan plan, int block_n) {
  std::vector<int> sizes;
  int next = r.begin;
  for (int index = 0; index < plan.splits; ++index) {
    BlockRange const part = flashattn::take_split(r, plan, index, block_n);
    bool const ordered = part.begin <= part.clean_begin && part.clean_begin <= part.clean_end &&
                         part.clean_end <= part.end;
    EXPECT_TRUE(ordered) << "split " << index;
    sizes.push_back(part.count());
    if (part.count() == 0) { continue; }
    EXPECT_EQ(part.begin, next) << "split " << index;
    next = part.end;
    for (int block = part.begin; block < part.end; ++block) {
      EXPECT_EQ(part.is_clean(block), r.is_clean(block)) << "block " << block;
    }
  }
  EXPECT_EQ(next, r.end);
  return sizes;
}

// The same for all ranges, and all clean ranges in them, of up to `blocks` blocks.
template <class Visit>
void for_every_range(int blocks, Visit const& visit) {
  for (int begin = 0; begin <= blocks; ++begin) {
    for (int end = begin; end <= blocks; ++end) {
      for (int clean_begin = begin; clean_begin <= end; ++clean_begin) {
        for (int clean_end = clean_begin; clean_end <= end; ++clean_end) {
          visit(BlockRange{begin, end, clean_begin, clean_end});
        }
      }
    }
  }
}

TEST(TakeSplit, EqualSharesHoldEveryBlockOnce) {
  for_every_range(9, [](BlockRange r) {
    for (int splits : {1, 2, 3, 7, 9, 10, 256}) {
      for (int min_share : {1, 4}) {
        std::vector<int> const sizes = expect_partition(r, {splits, 0, min_share * 64}, 64);
        int const used = std::max<int>(
            1, std::count_if(sizes.begin(), sizes.end(), [](int n) { return n > 0; }));
        EXPECT_TRUE(std::all_of(sizes.begin() + used, sizes.end(), [](int n) { return n == 0; }));
        auto const [least, most] = std::minmax_element(sizes.begin(), sizes.begin() + used);
        EXPECT_LE(*most - *least, 1);
        if (used > 1) { EXPECT_LE((used - 1) * min_share, r.count()); }
      }
    }
  });
}

TEST(TakeSplit, SharesOfLongSequencesDoNotOverflow) {
  int const blocks = (1 << 30) / 32;
  for (int splits : {2, 255, 256}) {
    std::vector<int> sizes;
    int next = 5;
    for (int index = 0; index < splits; ++index) {
      BlockRange const part = flashattn::take_split({5, blocks, 5, blocks}, {splits, 0}, index, 32);
      EXPECT_EQ(part.begin, next);
      next = part.end;
    }
    EXPECT_EQ(next, blocks);
  }
}

// Whatever the capacity, and so the number of splits, a key lies in the split of its position.
TEST(TakeSplit, FixedSizesCutByPosition) {
  for (int block_n : {32, 64}) {
    for (int split_size : {64, 128, 320}) {
      for_every_range(12, [&](BlockRange r) {
        int const blocks = split_size / block_n;
        for (int splits : {flashattn::ceil_div(r.end, blocks), 40}) {
          if (splits == 0) { continue; }
          SplitPlan const plan{splits, split_size};
          expect_partition(r, plan, block_n);
          for (int block = r.begin; block < r.end; ++block) {
            BlockRange const part = flashattn::take_split(r, plan, block / blocks, block_n);
            EXPECT_TRUE(block >= part.begin && block < part.end) << "block " << block;
          }
        }
      });
    }
  }
}

int64_t bytes_of_parts(FlashSplitkvParams const& params, int splits) {
  return splits > 1 ? splits * flashattn::partial_bytes(params.fwd) : 0;
}

TEST(PlanSplits, AutomaticStaysWithinItsBounds) {
  for (int multiprocessors : {1, 16, 76, 108, 132, 1000}) {
    for (int batch : {1, 8, 4096}) {
      for (int capacity : {0, 1, 64, 255, 257, 4096, 131072, 1 << 30}) {
        for (int64_t tiles : {int64_t(1), int64_t(batch), int64_t(1) << 40}) {
          FlashSplitkvParams const params = call(batch, 64, 8, 256, 1, capacity);
          SplitPlan const plan = flashattn::plan_splits(params, multiprocessors, tiles);
          EXPECT_GE(plan.splits, 1);
          EXPECT_LE(plan.splits, flashattn::kMaxSplits);
          EXPECT_LE(plan.splits,
                    std::max(1, flashattn::ceil_div(capacity, flashattn::kSplitGranule)));
          EXPECT_LE(bytes_of_parts(params, plan.splits), flashattn::kMaxPartialBytes);
          EXPECT_EQ(plan.split_size, 0);
        }
      }
    }
  }
}

// C45: an empty GPU is filled, a full one is left alone, and no split is without work.
TEST(PlanSplits, FillsTheMultiprocessors) {
  for (int multiprocessors : {16, 76, 108, 132}) {
    for (int sequences : {1, 8, 4096}) {
      for (int blocks : {1, 2, 9}) {  // of 256 keys
        for (int head_dim : {128, 256}) {
          SCOPED_TRACE(std::to_string(multiprocessors) + " multiprocessors, " +
                       std::to_string(sequences) + " sequences, " + std::to_string(blocks) +
                       " blocks");
          FlashSplitkvParams const params = call(sequences, 1, 1, head_dim, 1, blocks * 256);
          int const splits = flashattn::plan_splits(params, multiprocessors, sequences).splits;
          EXPECT_LE(splits, blocks);
          if (sequences <= multiprocessors && blocks > 1) { EXPECT_GT(splits, 1); }
          if (sequences > 2 * multiprocessors) { EXPECT_EQ(splits, 1); }
        }
      }
    }
  }
}

TEST(PlanSplits, GivenNumbersAreKept) {
  for (int capacity : {0, 1, 64, 1000, 131072}) {
    FlashSplitkvParams params = call(4, 8, 2, 64, 1, capacity);
    for (int num_splits : {1, 2, 7, 256}) {
      params.split = {.num_splits = num_splits};
      SplitPlan const plan = flashattn::plan_splits(params, 132, 8);
      EXPECT_EQ(plan.splits, num_splits);
      EXPECT_EQ(plan.min_keys, 1);  // more splits than blocks are legal, and then some are empty
    }
    for (int split_size : {64, 192, 4096}) {
      params.split = {.split_size = split_size};
      SplitPlan const plan = flashattn::plan_splits(params, 132, 8);
      EXPECT_EQ(plan.split_size, split_size);
      EXPECT_GE(int64_t(plan.splits) * split_size, capacity);
      EXPECT_LT(int64_t(plan.splits - 1) * split_size, std::max(capacity, 1));
    }
  }
}

}  // namespace
