// core/visible_band.h and core/block_range.h against the plain rule, for every small problem.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <random>
#include <sstream>
#include <vector>

#include "core/block_range.h"
#include "core/visible_band.h"
#include "visibility.h"

namespace {

using flashattn::BlockRange;
using flashattn::VisibleBand;

constexpr int kMaxLength = 11;
constexpr int kBlockSizes[] = {1, 2, 3, 4, 7, 8, 16};

std::vector<int> window_sides() { return {-1, 0, 1, 2, 3, 5, 10, 11, 12, 40, INT_MAX}; }

struct Problem {
  int len_q;
  int len_k;
  flashattn::Window window;

  bool sees(int row, int key) const {
    return oracle::sees(row, key, len_q, len_k, {window.left, window.right});
  }
  VisibleBand band() const { return flashattn::visible_band(len_q, len_k, window); }
  std::string text() const {
    std::ostringstream out;
    out << "len_q " << len_q << ", len_k " << len_k << ", window (" << window.left << ", "
        << window.right << ")";
    return out.str();
  }
};

template <class Visit>
void for_every_problem(Visit const& visit) {
  for (int len_q = 0; len_q <= kMaxLength; ++len_q) {
    for (int len_k = 0; len_k <= kMaxLength; ++len_k) {
      for (int left : window_sides()) {
        for (int right : window_sides()) { visit(Problem{len_q, len_k, {left, right}}); }
      }
    }
  }
}

// What a tile's rows see of each key, all of them and any of them, for growing tiles.
struct KeyVisibility {
  std::vector<char> any, all;
  explicit KeyVisibility(int len_k) : any(len_k, 0), all(len_k, 1) {}
  void add_row(Problem const& problem, int row) {
    for (int key = 0; key < problem.len_k; ++key) {
      bool const seen = problem.sees(row, key);
      any[key] |= seen;
      all[key] &= seen;
    }
  }
};

// A block is clean when it lies wholly inside the sequence and every row sees all of it.
bool block_is_clean(KeyVisibility const& keys, int begin, int end) {
  if (end > static_cast<int>(keys.all.size())) { return false; }
  return std::all_of(keys.all.begin() + begin, keys.all.begin() + end,
                     [](char seen) { return seen != 0; });
}

bool block_is_needed(KeyVisibility const& keys, int begin, int end) {
  int const last = std::min<int>(end, keys.any.size());
  return std::any_of(keys.any.begin() + begin, keys.any.begin() + last,
                     [](char seen) { return seen != 0; });
}

// Empty when the range is exactly right: the needed blocks and no other, and among them exactly
// the clean ones.
std::string check_range(KeyVisibility const& keys, BlockRange const& range, int block_n) {
  std::ostringstream fault;
  int const len_k = static_cast<int>(keys.any.size());
  int const blocks = (len_k + block_n - 1) / block_n;
  bool const ordered = 0 <= range.begin && range.begin <= range.clean_begin &&
                       range.clean_begin <= range.clean_end && range.clean_end <= range.end &&
                       range.end <= blocks;
  if (!ordered) { fault << "not ordered; "; }
  for (int block = 0; block < blocks; ++block) {
    int const begin = block * block_n;
    bool const needed = block_is_needed(keys, begin, begin + block_n);
    bool const in_range = block >= range.begin && block < range.end;
    if (needed != in_range) {
      fault << "block " << block << (needed ? " is missing; " : " is not needed; ");
    }
    bool const clean = needed && block_is_clean(keys, begin, begin + block_n);
    if (clean != range.is_clean(block)) {
      fault << "block " << block << " clean: " << clean << "; ";
    }
  }
  return fault.str();
}

TEST(VisibleBand, EqualsThePlainRuleForEverySmallProblem) {
  int problems = 0;
  for_every_problem([&](Problem const& problem) {
    VisibleBand const band = problem.band();
    ++problems;
    for (int row = 0; row < problem.len_q; ++row) {
      for (int key = 0; key < problem.len_k; ++key) {
        bool const inside = key >= band.begin(row) && key < band.end(row);
        if (inside != problem.sees(row, key)) {
          ADD_FAILURE() << problem.text() << ", row " << row << ", key " << key << ": band says "
                        << inside;
        }
      }
    }
  });
  EXPECT_EQ(problems, 12 * 12 * 11 * 11);
}

TEST(VisibleBand, BothBoundsGrowWithTheRow) {
  for_every_problem([](Problem const& problem) {
    VisibleBand const band = problem.band();
    for (int row = 1; row < problem.len_q; ++row) {
      bool const grows =
          band.begin(row - 1) <= band.begin(row) && band.end(row - 1) <= band.end(row);
      if (!grows) { ADD_FAILURE() << problem.text() << ", row " << row; }
    }
  });
}

TEST(VisibleBand, CountsOfKnownMasks) {
  VisibleBand const causal = flashattn::visible_band(3, 5, {-1, 0});
  EXPECT_EQ(causal.begin(0), 0);
  EXPECT_EQ(causal.end(0), 3);  // the first of 3 rows sits on the third of 5 keys
  EXPECT_EQ(causal.end(2), 5);
  VisibleBand const sliding = flashattn::visible_band(10, 10, {4, 0});
  EXPECT_EQ(sliding.end(9) - sliding.begin(9), 5);  // inclusive: left + 1 keys
}

// The longest sequences that the API takes, where a sum of two lengths is close to 2^31.
TEST(VisibleBand, DoesNotOverflowAtTheLongestSequences) {
  int const longest = 1 << 30;
  for (int len_q : {1, longest - 1, longest}) {
    for (int len_k : {0, 1, longest - 1, longest}) {
      for (int left : {-1, 0, longest, INT_MAX}) {
        for (int right : {-1, 0, longest - 1, longest, INT_MAX}) {
          Problem const problem{len_q, len_k, {left, right}};
          VisibleBand const band = problem.band();
          for (int row : {0, len_q / 2, len_q - 1}) {
            for (int key : {0, 1, len_k / 2, len_k - 1}) {
              bool const inside = key >= band.begin(row) && key < band.end(row);
              bool const real_key = key >= 0 && key < len_k;
              if (real_key && inside != problem.sees(row, key)) {
                ADD_FAILURE() << problem.text() << ", row " << row << ", key " << key;
              }
            }
          }
        }
      }
    }
  }
}

TEST(VisibleBlocks, ExactForEveryTileOfEverySmallProblem) {
  int64_t tiles = 0;
  for_every_problem([&](Problem const& problem) {
    VisibleBand const band = problem.band();
    for (int first = 0; first < problem.len_q; ++first) {
      KeyVisibility keys(problem.len_k);
      for (int last = first; last < problem.len_q; ++last) {
        keys.add_row(problem, last);
        for (int block_n : kBlockSizes) {
          BlockRange const range = flashattn::visible_blocks(band, first, last, block_n);
          std::string const fault = check_range(keys, range, block_n);
          ++tiles;
          if (!fault.empty()) {
            ADD_FAILURE() << problem.text() << ", rows " << first << " to " << last
                          << ", blocks of " << block_n << ": " << fault;
          }
        }
      }
    }
  });
  EXPECT_EQ(tiles, 286 * 12 * 11 * 11 *
                       7);  // 286 tiles in all len_q, 12 len_k, 121 windows, 7 block sizes
}

TEST(VisibleBlocks, ExactForRandomLargeTiles) {
  std::mt19937 random(1);
  auto up_to = [&](int bound) { return std::uniform_int_distribution<int>(0, bound)(random); };
  for (int i = 0; i < 2000; ++i) {
    int const len_q = 1 + up_to(700), len_k = up_to(700);
    Problem const problem{
        len_q, len_k, {up_to(2) == 0 ? -1 : up_to(800), up_to(2) == 0 ? -1 : up_to(800)}};
    int const first = up_to(len_q - 1), last = std::min(len_q - 1, first + up_to(127));
    KeyVisibility keys(len_k);
    for (int row = first; row <= last; ++row) { keys.add_row(problem, row); }
    for (int block_n : {32, 64, 80, 128}) {
      BlockRange const range = flashattn::visible_blocks(problem.band(), first, last, block_n);
      std::string const fault = check_range(keys, range, block_n);
      EXPECT_TRUE(fault.empty()) << problem.text() << ", rows " << first << " to " << last
                                 << ", blocks of " << block_n << ": " << fault;
    }
  }
}

TEST(VisibleBlocks, AnEmptyTileNeedsNothing) {
  BlockRange const range =
      flashattn::visible_blocks(flashattn::visible_band(4, 100, {-1, -1}), 3, 2, 16);
  EXPECT_EQ(range.count(), 0);
  EXPECT_FALSE(range.is_clean(0));
}

TEST(VisibleBlocks, RowsBeforeTheFirstKeyNeedNothing) {
  BlockRange const range =
      flashattn::visible_blocks(flashattn::visible_band(2048, 1024, {-1, 0}), 0, 127, 64);
  EXPECT_EQ(range.count(), 0);  // causal and longer q: rows 0 to 1023 see no key
}

TEST(CeilDiv, RoundsUp) {
  EXPECT_EQ(flashattn::ceil_div(0, 64), 0);
  EXPECT_EQ(flashattn::ceil_div(1, 64), 1);
  EXPECT_EQ(flashattn::ceil_div(64, 64), 1);
  EXPECT_EQ(flashattn::ceil_div(65, 64), 2);
  EXPECT_EQ(flashattn::ceil_div(1 << 30, 64), 1 << 24);
}

}  // namespace
