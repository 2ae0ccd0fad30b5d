// core/rotary.h against the definition, and core/combine_weight.h.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/combine_weight.h"
#include "core/rotary.h"
#include "rotary_reference.h"

namespace {

using flashattn::Append;
using flashattn::kRotaryChunk;

struct Head {
  std::vector<float> x, cosines, sines;
};

Head random_head(int head_dim, int rotary_dim, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.f, 1.f);
  std::uniform_real_distribution<float> angle(-3.f, 3.f);
  Head head;
  for (int d = 0; d < head_dim; ++d) { head.x.push_back(normal(random)); }
  for (int t = 0; t < rotary_dim / 2; ++t) {
    float const a = angle(random);
    head.cosines.push_back(std::cos(a));
    head.sines.push_back(std::sin(a));
  }
  return head;
}

// All chunks of a head. at() because an index outside of the head or the table must be seen.
std::vector<float> rotate(Append const& append, Head const& head) {
  std::vector<float> y;
  for (int first = 0; first < static_cast<int>(head.x.size()); first += kRotaryChunk) {
    float chunk[kRotaryChunk];
    flashattn::rotate_chunk(
        append, first, [&](int column) { return head.x.at(column); },
        [&](int pair) { return head.cosines.at(pair); },
        [&](int pair) { return head.sines.at(pair); }, chunk);
    y.insert(y.end(), chunk, chunk + kRotaryChunk);
  }
  return y;
}

TEST(Rotary, EqualsTheDefinition) {
  for (int head_dim : {16, 40, 64, 128, 256}) {
    for (int rotary_dim = 0; rotary_dim <= head_dim; rotary_dim += 16) {
      for (bool interleaved : {false, true}) {
        SCOPED_TRACE("head dim " + std::to_string(head_dim) + ", rotary dim " +
                     std::to_string(rotary_dim));
        Append append;
        append.rotary_dim = rotary_dim;
        append.rotary_interleaved = interleaved;
        Head const head = random_head(head_dim, rotary_dim, head_dim + rotary_dim);
        std::vector<float> const y = rotate(append, head);
        std::vector<double> const exact =
            oracle::rotated(head.x, head.cosines, head.sines, interleaved);
        for (int d = 0; d < head_dim; ++d) {
          EXPECT_NEAR(y[d], exact[d], 1e-6);
          if (d >= rotary_dim) { EXPECT_EQ(y[d], head.x[d]); }
        }
      }
    }
  }
}

TEST(Rotary, PositionsStayInsideTheTables) {
  Append append;
  append.max_position = 10;
  for (auto [position, expected] : {std::pair{-1, 0}, {0, 0}, {9, 9}, {10, 9}, {2000000000, 9}}) {
    EXPECT_EQ(flashattn::rotary_position(append, position), expected);
  }
}

TEST(Rotary, QueriesStandInOrderWhenTheMaskKnowsOrder) {
  EXPECT_EQ(flashattn::query_position({-1, -1}, 50, 3), 50);
  EXPECT_EQ(flashattn::query_position({-1, 0}, 50, 3), 53);
  EXPECT_EQ(flashattn::query_position({8, -1}, 50, 3), 53);
  EXPECT_EQ(flashattn::query_position({8, 2}, 50, 0), 50);
}

TEST(CombineWeight, EmptyPartsOfEitherSignWeighNothing) {
  float const infinity = flashattn::kInfinity;
  for (float maximum : {0.f, -90.f, 90.f}) {
    EXPECT_EQ(flashattn::part_weight(-infinity, maximum), 0.f);
    EXPECT_EQ(flashattn::part_weight(infinity, maximum), 0.f);
    EXPECT_EQ(flashattn::part_weight(maximum, maximum), 1.f);
    EXPECT_NEAR(flashattn::part_weight(maximum - 3.f, maximum), std::exp(-3.), 1e-6);
  }
  EXPECT_FALSE(flashattn::is_empty_part(-3e38f));
  EXPECT_TRUE(std::isnan(flashattn::part_weight(std::nanf(""), 0.f)));
}

}  // namespace
