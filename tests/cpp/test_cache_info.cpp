// core/cache_info.h: where the keys of a sequence lie, whatever the metadata on the device
// says, and the division that finds them.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <random>
#include <string>
#include <vector>

#include "core/cache_info.h"

namespace {

using flashattn::CacheSlot;
using flashattn::FastDivisor;
using flashattn::FlashSplitkvParams;
using flashattn::SequenceInfo;

constexpr int kBatch = 5, kCapacity = 100;

FlashSplitkvParams contiguous(std::vector<int> const& seqlens) {
  FlashSplitkvParams params;
  params.fwd.shape = {.batch = kBatch,
                      .heads = 4,
                      .heads_kv = 2,
                      .head_dim = 64,
                      .seqlen_q = 3,
                      .seqlen_k = kCapacity};
  params.cache.seqlens = seqlens.data();
  params.cache.rows = kBatch + 1;
  return params;
}

TEST(CacheInfo, LengthsAreClampedToTheCapacity) {
  std::vector<int> const told = {0, 37, 100, INT_MAX, INT_MIN}, expected = {0, 37, 100, 100, 0};
  FlashSplitkvParams const params = contiguous(told);
  for (int b = 0; b < kBatch; ++b) {
    SequenceInfo const seq = flashattn::cache_sequence_info(params, b);
    EXPECT_EQ(seq.len_k, expected[b]);
    EXPECT_EQ(seq.k_begin, 0);
    EXPECT_EQ(seq.k_batch, b);
    EXPECT_EQ(seq.len_q, 3);
    EXPECT_EQ(flashattn::cached_tokens(params.cache, kCapacity, b), expected[b]);
  }
}

TEST(CacheInfo, OneLengthForAll) {
  FlashSplitkvParams params = contiguous({});
  params.cache.seqlens = nullptr;
  params.cache.seqlen = 42;
  for (int b = 0; b < kBatch; ++b) {
    EXPECT_EQ(flashattn::cache_sequence_info(params, b).len_k, 42);
  }
}

TEST(CacheInfo, NewTokensCountAsFarAsTheyFit) {
  std::vector<int> const told = {0, 97, 98, 100, INT_MAX};
  for (auto [append, expected] : {std::pair{3, std::vector<int>{3, 100, 100, 100, 100}},
                                  {0, {0, 97, 98, 100, 100}},
                                  {1 << 30, {100, 100, 100, 100, 100}}}) {
    FlashSplitkvParams params = contiguous(told);
    params.append.seqlen = append;
    for (int b = 0; b < kBatch; ++b) {
      EXPECT_EQ(flashattn::cache_sequence_info(params, b).len_k, expected[b]);
      EXPECT_EQ(flashattn::cached_tokens(params.cache, kCapacity, b), std::min(told[b], kCapacity));
    }
  }
}

TEST(CacheInfo, LeftPaddingShiftsTheFirstKey) {
  std::vector<int> const told = {50, 50, 50, 50, 50}, leftpad = {0, 7, 50, 51, -3};
  FlashSplitkvParams params = contiguous(told);
  params.cache.leftpad = leftpad.data();
  params.append.seqlen = 2;
  std::vector<int> const begin = {0, 7, 50, 51, 0};
  for (int b = 0; b < kBatch; ++b) {
    SequenceInfo const seq = flashattn::cache_sequence_info(params, b);
    EXPECT_EQ(seq.k_begin, begin[b]);
    EXPECT_EQ(seq.len_k, 52 - begin[b]);
  }
}

TEST(CacheInfo, ACacheRowThatDoesNotExistHoldsNoKeys) {
  std::vector<int> const told(kBatch, 50), rows = {5, 0, 6, -1, INT_MIN};
  FlashSplitkvParams params = contiguous(told);
  params.cache.batch_idx = rows.data();
  std::vector<int> const expected = {50, 50, 0, 0, 0};
  for (int b = 0; b < kBatch; ++b) {
    SequenceInfo const seq = flashattn::cache_sequence_info(params, b);
    EXPECT_EQ(seq.len_k, expected[b]);
    if (expected[b] > 0) { EXPECT_EQ(seq.k_batch, rows[b]); }
  }
}

TEST(CacheInfo, UntrustedMetadataStaysInsideTheCapacity) {
  std::mt19937 random(6);
  std::uniform_int_distribution<int> any(INT_MIN, INT_MAX), near(-10, 110), coin(0, 1);
  auto const hostile = [&] { return coin(random) == 0 ? any(random) : near(random); };
  for (int i = 0; i < 5000; ++i) {
    std::vector<int> told(kBatch), leftpad(kBatch), rows(kBatch);
    for (std::vector<int>* values : {&told, &leftpad, &rows}) {
      std::generate(values->begin(), values->end(), hostile);
    }
    FlashSplitkvParams params = contiguous(told);
    params.cache.leftpad = leftpad.data();
    params.cache.batch_idx = rows.data();
    params.append.seqlen = coin(random) * std::max(0, near(random));
    for (int b = 0; b < kBatch; ++b) {
      SequenceInfo const seq = flashattn::cache_sequence_info(params, b);
      int64_t const cached = std::clamp<int64_t>(told[b], 0, kCapacity);
      int64_t const tokens = std::min<int64_t>(kCapacity, cached + params.append.seqlen);
      int64_t const first = std::clamp<int64_t>(leftpad[b], 0, tokens);
      bool const exists = rows[b] >= 0 && rows[b] < params.cache.rows;
      ASSERT_EQ(int64_t(seq.len_k), exists ? tokens - first : 0) << "round " << i;
      if (exists) { ASSERT_EQ(int64_t(seq.k_begin), first) << "round " << i; }
    }
  }
}

TEST(CacheInfo, PackedQueriesKeepTheirRows) {
  std::vector<int> const told(kBatch, 50), cu = {0, 1, 1, 8, 9, 20};
  FlashSplitkvParams params = contiguous(told);
  params.fwd.lengths.cu_seqlens_q = cu.data();
  params.fwd.lengths.total_q = 20;
  SequenceInfo const seq = flashattn::cache_sequence_info(params, 2);
  EXPECT_EQ(seq.q_batch, 0);
  EXPECT_EQ(seq.q_begin, 1);
  EXPECT_EQ(seq.len_q, 7);
  EXPECT_EQ(seq.k_batch, 2);
}

TEST(CacheSlot, ContiguousIsTheToken) {
  FlashSplitkvParams const params = contiguous({});
  SequenceInfo seq{};
  seq.k_batch = 3;
  CacheSlot const at = flashattn::cache_slot(params.cache, FastDivisor(1), seq, 99);
  EXPECT_EQ(at.index, 3);
  EXPECT_EQ(at.slot, 99);
}

TEST(CacheSlot, EveryTokenOfEveryPageSize) {
  constexpr int kColumns = 4, kStride = 6, kPages = 40;
  for (int page_size : {1, 2, 3, 16, 48, 64, 257}) {
    std::vector<int> table(kBatch * kStride - 2, -1);  // ends with the last column
    for (int i = 0; i < static_cast<int>(table.size()); ++i) { table[i] = (i * 7 + 3) % kPages; }
    flashattn::Cache cache;
    cache.block_table = table.data();
    cache.block_table_stride = kStride;
    cache.table_columns = kColumns;
    cache.page_size = page_size;
    cache.num_pages = kPages;
    FastDivisor const divisor(page_size);
    for (int b = 0; b < kBatch; ++b) {
      SequenceInfo seq{};
      seq.batch = b;
      for (int token = 0; token < kColumns * page_size; ++token) {
        CacheSlot const at = flashattn::cache_slot(cache, divisor, seq, token);
        ASSERT_EQ(at.index, table[b * kStride + token / page_size]) << "page size " << page_size;
        ASSERT_EQ(at.slot, token % page_size) << "page size " << page_size;
      }
    }
  }
}

TEST(CacheSlot, APageThatDoesNotExistIsNone) {
  std::vector<int> const table = {0, 9, 10, -1, INT_MAX, INT_MIN, 1 << 20};
  flashattn::Cache cache;
  cache.block_table = table.data();
  cache.page_size = 16;
  cache.num_pages = 10;
  for (int column = 0; column < static_cast<int>(table.size()); ++column) {
    CacheSlot const at =
        flashattn::cache_slot(cache, FastDivisor(16), SequenceInfo{}, column * 16 + 5);
    EXPECT_EQ(at.index, column < 2 ? table[column] : -1);
  }
}

TEST(FastDivisor, ExactForEverySmallQuotient) {
  for (int divisor = 1; divisor <= 600; ++divisor) {
    FastDivisor const fast(divisor);
    EXPECT_EQ(fast.divisor(), divisor);
    int wrong = 0;
    for (int dividend = 0; dividend < 5000; ++dividend) {
      wrong += fast.quotient(dividend) != dividend / divisor;
    }
    EXPECT_EQ(wrong, 0) << divisor;
  }
}

// Where a quotient steps up is where a multiplier that is a little off goes wrong first.
TEST(FastDivisor, ExactAtTheStepsOfLargeDividends) {
  std::vector<int64_t> divisors = {1, 2, 3, 7, 48, 641, 1000003, INT_MAX, INT_MAX - 1, INT_MAX / 2};
  for (int bit = 1; bit < 31; ++bit) {
    for (int off : {-1, 0, 1}) {
      divisors.push_back(std::max(int64_t(1), (int64_t(1) << bit) + off));
    }
  }
  std::mt19937 random(4);
  std::uniform_int_distribution<int> any(1, INT_MAX);
  for (int i = 0; i < 2000; ++i) { divisors.push_back(any(random) >> any(random) % 31 | 1); }
  for (int64_t divisor : divisors) {
    FastDivisor const fast(static_cast<int>(divisor));
    int64_t const last = INT_MAX / divisor * divisor;
    std::vector<int64_t> dividends = {0,           1,        divisor - 1, divisor,
                                      divisor + 1, last - 1, last,        INT_MAX};
    for (int i = 0; i < 50; ++i) {
      int64_t const step = any(random) / divisor * divisor;
      dividends.insert(dividends.end(), {step - 1, step, step + 1, any(random)});
    }
    for (int64_t dividend : dividends) {
      if (dividend < 0 || dividend > INT_MAX) { continue; }
      EXPECT_EQ(fast.quotient(static_cast<int>(dividend)), static_cast<int>(dividend / divisor))
          << dividend << " / " << divisor;
    }
  }
}

}  // namespace
