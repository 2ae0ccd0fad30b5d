// core/fast_math.h, core/score_mod.h and core/online_softmax.h against the same in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/online_softmax.h"
#include "core/score_mod.h"

namespace {

using flashattn::kInfinity;
using flashattn::Score;
using flashattn::ScoreMod;
using flashattn::SoftmaxResult;

float const kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Tanh, AbsoluteAndRelativeError) {
  for (int i = -200000; i <= 200000; ++i) {
    float const x = static_cast<float>(i) * 1e-4f;
    double const exact = std::tanh(static_cast<double>(x));
    float const got = flashattn::tanh_saturating(x);
    if (std::abs(got - exact) > 2e-7 || std::abs(got) > 1.f) {
      ADD_FAILURE() << "tanh(" << x << ") = " << got;
    }
    if (std::abs(got - exact) > 6e-6 * std::abs(exact)) {
      ADD_FAILURE() << "relative: tanh(" << x << ") = " << got;
    }
  }
}

TEST(Tanh, SaturatesAndIsNeverNanForANumber) {
  for (float x : {20.f, 100.f, 1e4f / 50.f, 1e4f, 1e30f, FLT_MAX, kInfinity}) {
    EXPECT_EQ(flashattn::tanh_saturating(x), 1.f) << x;
    EXPECT_EQ(flashattn::tanh_saturating(-x), -1.f) << x;
  }
  for (float x : {0.f, FLT_MIN, 1e-40f, 1e-20f}) {
    EXPECT_NEAR(flashattn::tanh_saturating(x), x, 1e-6 * x);
  }
  EXPECT_TRUE(std::isnan(flashattn::tanh_saturating(kNan)));
}

TEST(Exp2, EndsOfTheRange) {
  EXPECT_EQ(flashattn::exp2_fast(0.f), 1.f);
  EXPECT_EQ(flashattn::exp2_fast(-kInfinity), 0.f);
  EXPECT_EQ(flashattn::exp2_fast(kInfinity), kInfinity);
  EXPECT_EQ(flashattn::exp2_fast(10.f), 1024.f);
}

float apply(Score const& score, float raw) {
  ScoreMod const mod = flashattn::score_mod(score);
  return mod.active ? mod.scaled_and_capped(raw) : raw * mod.exponent_scale;
}

float apply_quotient(Score const& score, float raw) {
  ScoreMod const mod = flashattn::score_mod(score);
  return mod.capped_quotient(raw * mod.cap_exponent());
}

TEST(ScoreMod, InactiveFoldsTheScaleIntoTheExponent) {
  ScoreMod const mod = flashattn::score_mod({.scale = 0.125f});
  EXPECT_FALSE(mod.active);
  EXPECT_EQ(mod.exponent_scale, 0.125f);
}

TEST(ScoreMod, AnythingThatActsOnTheScaledScoreIsActive) {
  float const slope = 0.5f;
  Score const scores[] = {{.scale = 0.125f, .softcap = 5.f},
                          {.scale = 0.125f, .alibi_slopes = &slope},
                          {.scale = 0.f},
                          {.scale = -0.125f},
                          {.scale = kNan}};
  for (Score const& score : scores) {
    EXPECT_TRUE(flashattn::score_mod(score).active) << score.scale;
    EXPECT_EQ(flashattn::score_mod(score).exponent_scale, 1.f) << score.scale;
  }
}

TEST(ScoreMod, ScaleThenCap) {
  for (float scale : {0.125f, 1.f, -0.5f, 0.f}) {
    for (float cap : {0.f, 5.f, 50.f}) {
      Score const score{.scale = scale, .softcap = cap};
      for (float raw : {-300.f, -7.f, 0.f, 0.5f, 40.f, 1000.f}) {
        double expected = static_cast<double>(raw) * scale;
        if (cap > 0.f) { expected = cap * std::tanh(expected / cap); }
        double const tolerance = 1e-5 + 1e-6 * std::abs(expected);
        EXPECT_NEAR(apply(score, raw), expected, tolerance);
        if (cap > 0.f) { EXPECT_NEAR(apply_quotient(score, raw), expected, tolerance); }
      }
    }
  }
}

TEST(ScoreMod, SoftcapSaturates) {
  Score const score{.scale = 1.f, .softcap = 50.f};
  for (auto const capped : {apply, apply_quotient}) {
    for (float raw : {5000.f, 10000.f, 1e30f, kInfinity}) {
      EXPECT_EQ(capped(score, raw), 50.f) << raw;
      EXPECT_EQ(capped(score, -raw), -50.f) << raw;
    }
    EXPECT_EQ(capped(score, 0.f), 0.f);
    EXPECT_TRUE(std::isnan(capped(score, kNan)));
  }
}

// The largest difference from cap * tanh of the same exponent, in double.
double worst_of_quotient(float cap) {
  ScoreMod const mod = flashattn::score_mod({.scale = 1.f, .softcap = cap});
  double worst = 0.;
  for (int i = -30000; i <= 30000; ++i) {
    float const exponent = static_cast<float>(i) * 1e-3f;
    double const exact = cap * std::tanh(exponent * std::log(2.) / 2.);
    worst = std::max(worst, std::abs(mod.capped_quotient(exponent) - exact));
  }
  return worst;
}

// The limit is where a score, and lse with it, is still right to 2e-5. Far above it is not.
TEST(ScoreMod, QuotientIsRightForSmallCaps) {
  for (float cap = 1.f; cap <= ScoreMod::kSmallCap; ++cap) {
    EXPECT_LE(worst_of_quotient(cap), 3e-7 * cap) << "cap " << cap;
  }
  EXPECT_LE(worst_of_quotient(ScoreMod::kSmallCap), 2e-5);
  EXPECT_GT(worst_of_quotient(16.f * ScoreMod::kSmallCap), 2e-5);
}

TEST(ScoreMod, QuotientOfAnyExponent) {
  for (float cap : {1.f, 30.f, ScoreMod::kSmallCap}) {
    ScoreMod const mod = flashattn::score_mod({.scale = 1.f, .softcap = cap});
    for (float exponent : {128.f, 200.f, 1e30f, FLT_MAX, kInfinity}) {
      EXPECT_EQ(mod.capped_quotient(exponent), cap) << exponent;
      EXPECT_EQ(mod.capped_quotient(-exponent), -cap) << exponent;
    }
    for (float exponent : {0.f, FLT_MIN, -1e-40f}) {
      EXPECT_EQ(mod.capped_quotient(exponent), 0.f) << exponent;
    }
    EXPECT_TRUE(std::isnan(mod.capped_quotient(kNan)));
  }
  // A product of 0 has the score 0, however large a scale and small a cap.
  for (float scale : {16.f, -16.f, FLT_MAX}) {
    ScoreMod const mod = flashattn::score_mod({.scale = scale, .softcap = 1e-37f});
    EXPECT_EQ(mod.capped_quotient(0.f * mod.cap_exponent()), 0.f) << scale;
  }
}

// A cap far above the scores changes nothing, so it must not add an error of its own either.
TEST(ScoreMod, ALargeCapKeepsTheScore) {
  for (float cap : {1e3f, 1e4f, 1e6f, 1e30f}) {
    for (float raw : {-20.f, -1.f, 1e-3f, 0.3f, 8.f}) {
      double const exact = cap * std::tanh(static_cast<double>(raw) / cap);
      EXPECT_NEAR(apply({.scale = 1.f, .softcap = cap}, raw), exact, 2e-5) << "cap " << cap;
    }
  }
}

// The state of a row, updated block by block with the functions of online_softmax.h: with the true
// maximum, as the CPU backend does, or with a kept one, as the kernels do.
struct RowState {
  bool keep_maximum = false;
  float maximum = -kInfinity;
  float sum = 0.f;
  float value = 0.f;  // one output column

  void update(std::vector<float> const& scores, std::vector<float> const& values, size_t begin,
              size_t end, float exponent_scale) {
    float const old = maximum;
    float const scale_log2 = exponent_scale * flashattn::kLog2e;
    float block_maximum = -kInfinity;
    for (size_t i = begin; i < end; ++i) { block_maximum = std::max(block_maximum, scores[i]); }
    maximum = keep_maximum ? flashattn::next_maximum(old, block_maximum, scale_log2)
                           : std::max(old, block_maximum);
    float const factor = flashattn::rescale_factor(old, maximum, scale_log2);
    sum *= factor;
    value *= factor;
    for (size_t i = begin; i < end; ++i) {
      float const p =
          flashattn::exp2_fast((scores[i] - flashattn::subtrahend(maximum)) * scale_log2);
      if (p > 256.f) { ADD_FAILURE() << "an exponential of " << p; }
      sum += p;
      value += p * values[i];
    }
  }
};

struct Exact {
  double out = 0.;
  double lse = -std::numeric_limits<double>::infinity();
};

Exact direct(std::vector<float> const& scores, std::vector<float> const& values,
             float exponent_scale, float sink) {
  double top = sink;
  for (float s : scores) { top = std::max(top, static_cast<double>(s) * exponent_scale); }
  if (top == -std::numeric_limits<double>::infinity()) { return {}; }
  double sum = std::exp(sink - top), weighted = 0.;
  for (size_t i = 0; i < scores.size(); ++i) {
    double const p = std::exp(static_cast<double>(scores[i]) * exponent_scale - top);
    sum += p;
    weighted += p * values[i];
  }
  return {weighted / sum, top + std::log(sum)};
}

void expect_softmax(std::vector<float> const& scores, std::vector<float> const& values,
                    std::vector<size_t> const& cuts, float exponent_scale, float sink,
                    bool keep_maximum) {
  RowState row{keep_maximum};
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    row.update(scores, values, cuts[i], cuts[i + 1], exponent_scale);
  }
  SoftmaxResult const end = flashattn::finish_softmax(row.maximum, row.sum, exponent_scale, sink);
  Exact const exact = direct(scores, values, exponent_scale, sink);
  EXPECT_NEAR(row.value * end.factor, exact.out, 1e-5);
  if (std::isinf(exact.lse)) {
    EXPECT_EQ(end.lse, -kInfinity);
    EXPECT_EQ(row.value * end.factor, 0.f);
  } else {
    EXPECT_NEAR(end.lse, exact.lse, 2e-5 + 1e-6 * std::abs(exact.lse));
  }
}

void expect_softmax(std::vector<float> const& scores, std::vector<float> const& values,
                    std::vector<size_t> const& cuts, float exponent_scale, float sink) {
  for (bool keep_maximum : {false, true}) {
    expect_softmax(scores, values, cuts, exponent_scale, sink, keep_maximum);
  }
}

TEST(OnlineSoftmax, AnyCutIntoBlocksEqualsTheDirectSum) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal(0.f, 8.f);
  std::uniform_int_distribution<size_t> any(0, 40);
  for (int i = 0; i < 2000; ++i) {
    std::vector<float> scores(any(random)), values(scores.size());
    for (size_t j = 0; j < scores.size(); ++j) {
      scores[j] = any(random) < 10 ? -kInfinity : normal(random);  // a masked key
      values[j] = normal(random) / 8.f;
    }
    std::vector<size_t> cuts{0, scores.size()};
    for (size_t j = 0; j < any(random) / 8; ++j) {
      cuts.push_back(std::min(any(random), scores.size()));
    }
    std::sort(cuts.begin(), cuts.end());
    for (float sink : {-kInfinity, -30.f, 0.f, 30.f}) {
      SCOPED_TRACE("seed " + std::to_string(i) + ", sink " + std::to_string(sink));
      expect_softmax(scores, values, cuts, 1.f, sink);
      expect_softmax(scores, values, cuts, 0.125f, sink);
    }
  }
}

TEST(OnlineSoftmax, MaskedBlocksBeforeAndAfterTheVisibleOnes) {
  std::vector<float> const scores = {-kInfinity, -kInfinity, 3.f, -1000.f, -kInfinity, -kInfinity};
  std::vector<float> const values = {7.f, 7.f, 2.f, 5.f, 7.f, 7.f};
  expect_softmax(scores, values, {0, 2, 4, 6}, 1.f, -kInfinity);
  expect_softmax(scores, values, {0, 1, 2, 3, 4, 5, 6}, 1.f, -kInfinity);
}

TEST(OnlineSoftmax, AMaximumIsKeptUntilExponentialsWouldExceedTheLimit) {
  EXPECT_EQ(flashattn::next_maximum(3.f, 11.f, 1.f), 3.f);
  EXPECT_EQ(flashattn::next_maximum(3.f, 11.5f, 1.f), 11.5f);
  EXPECT_EQ(flashattn::next_maximum(3.f, 35.f, 0.25f), 3.f);
  EXPECT_EQ(flashattn::next_maximum(3.f, -kInfinity, 1.f), 3.f);
  EXPECT_EQ(flashattn::next_maximum(-kInfinity, -1e30f, 1.f), -1e30f);
  EXPECT_EQ(flashattn::next_maximum(-kInfinity, -kInfinity, 1.f), -kInfinity);
  EXPECT_EQ(flashattn::next_maximum(-FLT_MAX, FLT_MAX, 1.f), FLT_MAX);
}

TEST(OnlineSoftmax, LargeScoresOfEitherSign) {
  for (float base : {-1e30f, -1e5f, 1e5f, 1e30f}) {
    std::vector<float> const scores = {base, base, base};
    RowState row{.keep_maximum = base > 0.f};
    for (size_t i = 0; i < 3; ++i) { row.update(scores, {1.f, 2.f, 3.f}, i, i + 1, 1.f); }
    SoftmaxResult const end = flashattn::finish_softmax(row.maximum, row.sum, 1.f, -kInfinity);
    EXPECT_NEAR(row.value * end.factor, 2.f, 1e-6) << base;
    EXPECT_NEAR(end.lse / base, 1.f, 1e-4) << base;
  }
}

TEST(OnlineSoftmax, ARowWithoutKeysIsZeroAndItsLseIsTheSink) {
  SoftmaxResult const empty = flashattn::finish_softmax(-kInfinity, 0.f, 0.125f, -kInfinity);
  EXPECT_EQ(empty.factor, 0.f);
  EXPECT_EQ(empty.lse, -kInfinity);
  SoftmaxResult const sink = flashattn::finish_softmax(-kInfinity, 0.f, 0.125f, 1.5f);
  EXPECT_EQ(sink.factor, 0.f);
  EXPECT_EQ(sink.lse, 1.5f);
}

TEST(OnlineSoftmax, ASinkFarAboveOrBelowTheKeys) {
  SoftmaxResult const drowned = flashattn::finish_softmax(-1000.f, 3.f, 1.f, 1000.f);
  EXPECT_EQ(drowned.factor, 0.f);
  EXPECT_EQ(drowned.lse, 1000.f);
  SoftmaxResult const ignored = flashattn::finish_softmax(1000.f, 4.f, 1.f, -1000.f);
  EXPECT_EQ(ignored.factor, 0.25f);
  EXPECT_NEAR(ignored.lse, 1000.f + std::log(4.f), 1e-4);
}

}  // namespace
