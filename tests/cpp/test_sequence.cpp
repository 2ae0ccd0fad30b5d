// core/sequence_info.h and core/row_map.h.
#include <gtest/gtest.h>

#include <climits>
#include <set>
#include <utility>
#include <vector>

#include "core/row_map.h"
#include "core/sequence_info.h"
#include "packed_lengths.h"

namespace {

using flashattn::Lengths;
using flashattn::RowMap;
using flashattn::SequenceInfo;
using flashattn::Shape;
using packed::hostile_cu_seqlens;
using packed::packed_q;
using packed::prefix_sums;

TEST(SequenceInfo, DenseTakesTheShape) {
  Shape const shape{
      .batch = 3, .heads = 4, .heads_kv = 2, .head_dim = 64, .seqlen_q = 5, .seqlen_k = 7};
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
    Shape const shape{
        .batch = 3, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = bound, .seqlen_k = bound};
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
  Shape const shape{
      .batch = 2, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = 3, .seqlen_k = 9};
  SequenceInfo const seq = flashattn::sequence_info(shape, packed_q(cu_q, 5), 1);
  EXPECT_EQ(seq.q_batch, 0);
  EXPECT_EQ(seq.k_batch, 1);
  EXPECT_EQ(seq.len_k, 9);
}

TEST(SequenceInfo, SeqUsedIsClampedIntoTheSequence) {
  Shape const shape{
      .batch = 6, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = 1, .seqlen_k = 10};
  std::vector<int> const used = {0, 4, 10, 11, -3, INT_MAX};
  std::vector<int> const expected = {0, 4, 10, 10, 0, 10};
  Lengths lengths;
  lengths.seqused_k = used.data();
  for (int b = 0; b < 6; ++b) {
    EXPECT_EQ(flashattn::sequence_info(shape, lengths, b).len_k, expected[b]) << b;
  }

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
  Shape const shape{
      .batch = 3, .heads = 1, .heads_kv = 1, .head_dim = 8, .seqlen_q = 9, .seqlen_k = 9};
  for (std::vector<int> const& cu : hostile_cu_seqlens()) {
    Lengths lengths = packed_q(cu, total_q);
    lengths.cu_seqlens_k = cu.data();
    lengths.total_k = total_k;
    lengths.seqused_k = cu.data();
    for (int b = 0; b < 3; ++b) {
      SequenceInfo const seq = flashattn::sequence_info(shape, lengths, b);
      bool const q_inside =
          seq.q_begin >= 0 && seq.len_q >= 0 && seq.q_begin + seq.len_q <= total_q;
      bool const k_inside =
          seq.k_begin >= 0 && seq.len_k >= 0 && seq.k_begin + seq.len_k <= total_k;
      EXPECT_TRUE(q_inside && k_inside)
          << cu[0] << " " << cu[1] << " " << cu[2] << " " << cu[3] << ", batch " << b;
    }
  }
}

TEST(Offsets, AreSixtyFourBit) {
  flashattn::Input const t{
      .data = nullptr, .batch_stride = int64_t(1) << 33, .row_stride = 1 << 20, .head_stride = 128};
  SequenceInfo seq{};
  seq.q_batch = 3;
  seq.k_batch = 5;
  seq.q_begin = 1 << 20;
  seq.k_begin = 1 << 21;
  EXPECT_EQ(flashattn::query_offset(t, seq, 7), (int64_t(3) << 33) + (int64_t(1) << 40) + 7 * 128);
  EXPECT_EQ(flashattn::key_offset(t, seq, 1), (int64_t(5) << 33) + (int64_t(1) << 41) + 128);
}

TEST(LseOffset, DenseIsBatchHeadRow) {
  Shape const shape{
      .batch = 3, .heads = 4, .heads_kv = 2, .head_dim = 64, .seqlen_q = 5, .seqlen_k = 7};
  std::set<int64_t> used;
  for (int b = 0; b < 3; ++b) {
    SequenceInfo const seq = flashattn::sequence_info(shape, {}, b);
    for (int h = 0; h < 4; ++h) {
      for (int row = 0; row < 5; ++row) {
        used.insert(flashattn::lse_offset(shape, {}, seq, h) + row);
      }
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
  Shape const shape{
      .batch = 3, .heads = 4, .heads_kv = 2, .head_dim = 64, .seqlen_q = 99, .seqlen_k = 7};
  Lengths const lengths = packed_q(cu, 10);  // two rows more than the sequences use
  SequenceInfo const seq = flashattn::sequence_info(shape, lengths, 2);
  EXPECT_EQ(flashattn::lse_offset(shape, lengths, seq, 0), 5);
  EXPECT_EQ(flashattn::lse_offset(shape, lengths, seq, 3), 3 * 10 + 5);
  Shape const large{
      .batch = 1, .heads = 65535, .heads_kv = 1, .head_dim = 64, .seqlen_q = 1, .seqlen_k = 1};
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

}  // namespace
