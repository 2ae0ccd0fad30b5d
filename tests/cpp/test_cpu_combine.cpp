// Merging partial results on the CPU, against double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/cpu.h"
#include "cpu_problem.h"

namespace cpu_test {
namespace {

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
constexpr float kInf = INFINITY;

struct CombineCase {
  int splits = 3;
  int batch = 2;
  int heads = 3;
  int seqlen = 5;
  int head_dim = 64;
  DType partial = DType::kFloat32;
  DType out = DType::kBFloat16;
  int gap = 0;  // elements between rows
};

// Parts lie as (split, batch, row, head, dim), or with a gap as (row, split, head, batch, dim).
class CombineProblem {
 public:
  explicit CombineProblem(CombineCase const& c) : c(c), random_(7) {
    int64_t const inner = c.head_dim + c.gap, rows = int64_t(c.batch) * c.heads * c.seqlen;
    parts_.assign(c.splits * rows * inner * size_of(c.partial), 0xff);
    out_.assign(rows * inner * size_of(c.out), 0xff);
    lse_parts.resize(c.splits * rows);
    lse.assign(rows, Problem::kUntouched);
    params.device = flashattn::Device::kCpu;
    params.splits = c.splits;
    params.batch = c.batch;
    params.heads = c.heads;
    params.seqlen = c.seqlen;
    params.head_dim = c.head_dim;
    params.partial_dtype = c.partial;
    params.out_dtype = c.out;
    params.out_partial = {parts_.data(), c.seqlen * c.heads * inner, c.heads * inner, inner};
    params.out_split_stride = rows * inner;
    if (c.gap > 0) {
      int64_t const split = c.heads * c.batch * inner;
      params.out_partial = {parts_.data(), inner, c.splits * split, c.batch * inner};
      params.out_split_stride = split;
    }
    params.out = {out_.data(), c.seqlen * c.heads * inner, c.heads * inner, inner};
    params.lse_partial = lse_parts.data();
    params.lse_split_stride = rows;
    params.lse_batch_stride = c.heads * c.seqlen;
    params.lse_head_stride = c.seqlen;
    params.lse = lse.data();
    std::normal_distribution<float> normal(0.f, 3.f);
    for (float& x : lse_parts) { x = normal(random_); }
    for_each_row([&](int b, int h, int i) {
      for (int s = 0; s < c.splits; ++s) {
        for (int d = 0; d < c.head_dim; ++d) {
          put(c.partial, part(s, b, h, i, d), normal(random_));
        }
      }
    });
  }

  unsigned char* part(int s, int b, int h, int i, int d) {
    flashattn::Input const& t = params.out_partial;
    int64_t const at =
        s * params.out_split_stride + b * t.batch_stride + i * t.row_stride + h * t.head_stride + d;
    return parts_.data() + at * size_of(c.partial);
  }
  float out(int b, int h, int i, int d) const {
    flashattn::Output const& t = params.out;
    int64_t const at = b * t.batch_stride + i * t.row_stride + h * t.head_stride + d;
    return get(c.out, out_.data() + at * size_of(c.out));
  }
  float& lse_part(int s, int b, int h, int i) {
    return lse_parts[((s * c.batch + b) * c.heads + h) * c.seqlen + i];
  }
  float lse_of(int b, int h, int i) const { return lse[(b * c.heads + h) * c.seqlen + i]; }

  // An empty part, and what it holds is poison.
  void make_empty(int s, int b, int h, int i, float empty) {
    lse_part(s, b, h, i) = empty;
    std::memset(part(s, b, h, i, 0), 0xff, c.head_dim * size_of(c.partial));
  }

  template <class Body>
  void for_each_row(Body const& body) {
    for (int n = 0; n < c.batch * c.heads * c.seqlen; ++n) {
      body(n / c.seqlen / c.heads, n / c.seqlen % c.heads, n % c.seqlen);
    }
  }

  void check() {
    flashattn::cpu::flash_combine(params);
    for_each_row([&](int b, int h, int i) { check_row(b, h, i); });
  }

  CombineCase c;
  std::vector<float> lse_parts, lse;
  flashattn::FlashCombineParams params;

 private:
  void check_row(int b, int h, int i) {
    double sum = 0.;
    std::vector<double> expected(c.head_dim, 0.);
    for (int s = 0; s < c.splits; ++s) {
      float const l = lse_part(s, b, h, i);
      if (std::isinf(l)) { continue; }
      sum += std::exp(double(l));
      for (int d = 0; d < c.head_dim; ++d) {
        expected[d] += std::exp(double(l)) * get(c.partial, part(s, b, h, i, d));
      }
    }
    double const relative = c.out == DType::kFloat32   ? 0x1p-19
                            : c.out == DType::kFloat16 ? 0x1p-10
                                                       : 0x1p-7;
    for (int d = 0; d < c.head_dim; ++d) {
      double const x = sum == 0. ? 0. : expected[d] / sum;
      EXPECT_NEAR(out(b, h, i, d), x, relative * std::abs(x) + (sum == 0. ? 0. : 1e-5));
    }
    if (sum == 0.) {
      EXPECT_EQ(lse_of(b, h, i), -kInf);
    } else {
      EXPECT_NEAR(lse_of(b, h, i), std::log(sum), 1e-5);
    }
  }

  std::vector<unsigned char> parts_, out_;
  std::mt19937 random_;
};

TEST(CpuCombine, TypesSplitsAndHeadDims) {
  for (int i = 0; i < 9 * 6; ++i) {
    CombineCase c;
    c.partial = kTypes[i % 3];
    c.out = kTypes[i / 3 % 3];
    c.splits = (int[]){1, 2, 5, 33, 133, 256}[i / 9];
    c.head_dim = (int[]){64, 8, 72, 512, 96, 1}[i % 6];
    c.gap = i % 2 == 1 ? 8 : 0;
    SCOPED_TRACE(i);
    CombineProblem(c).check();
  }
}

TEST(CpuCombine, EmptyPartsOfEitherSign) {
  for (float empty : {-kInf, kInf}) {
    for (unsigned pattern = 0; pattern < 8; ++pattern) {
      CombineProblem problem({.out = DType::kFloat32});
      problem.for_each_row([&](int b, int h, int i) {
        for (int s = 0; s < 3; ++s) {
          if (pattern >> s & 1) { problem.make_empty(s, b, h, i, i % 2 == 0 ? empty : -empty); }
        }
      });
      SCOPED_TRACE(pattern);
      problem.check();
    }
  }
}

TEST(CpuCombine, OnePartThatIsNotEmptyIsTheResult) {
  CombineProblem problem({.out = DType::kFloat32});
  problem.for_each_row([&](int b, int h, int i) {
    problem.make_empty(0, b, h, i, -kInf);
    problem.make_empty(1, b, h, i, kInf);
  });
  problem.check();
  problem.for_each_row([&](int b, int h, int i) {
    EXPECT_EQ(problem.lse_of(b, h, i), problem.lse_part(2, b, h, i));
    EXPECT_EQ(problem.out(b, h, i, 3), get(DType::kFloat32, problem.part(2, b, h, i, 3)));
  });
}

TEST(CpuCombine, NanReachesItsRowOnly) {
  CombineProblem problem({.out = DType::kFloat32});
  problem.lse_part(1, 0, 2, 3) = NAN;
  flashattn::cpu::flash_combine(problem.params);
  problem.for_each_row([&](int b, int h, int i) {
    bool const nan = b == 0 && h == 2 && i == 3;
    EXPECT_EQ(std::isnan(problem.lse_of(b, h, i)), nan);
    EXPECT_EQ(std::isnan(problem.out(b, h, i, 0)), nan);
  });
}

// As in a call without splits. What the empty part behind it holds still does nothing.
TEST(CpuCombine, WhatIsNotFiniteReachesOutWithoutAnyWeight) {
  for (int faint = 0; faint <= 40; ++faint) {
    CombineProblem problem({.splits = 41, .out = DType::kFloat32});
    problem.for_each_row([&](int b, int h, int i) {
      problem.make_empty((faint + 1) % 41, b, h, i, -kInf);
      problem.lse_part(faint, b, h, i) = -1000.f;
      put(DType::kFloat32, problem.part(faint, b, h, i, 0), kInf);
      put(DType::kFloat32, problem.part(faint, b, h, i, 1), NAN);
    });
    flashattn::cpu::flash_combine(problem.params);
    problem.for_each_row([&](int b, int h, int i) {
      EXPECT_TRUE(std::isnan(problem.out(b, h, i, 0)));
      EXPECT_TRUE(std::isnan(problem.out(b, h, i, 1)));
      EXPECT_TRUE(std::isfinite(problem.out(b, h, i, 2)));
      EXPECT_TRUE(std::isfinite(problem.lse_of(b, h, i)));
    });
  }
}

TEST(CpuCombine, LargeLse) {
  CombineProblem problem({.out = DType::kFloat32});
  problem.check();
  std::vector<float> const small = problem.lse;
  for (float& x : problem.lse_parts) { x += 1024.f; }
  flashattn::cpu::flash_combine(problem.params);
  for (std::size_t i = 0; i < small.size(); ++i) {
    EXPECT_NEAR(problem.lse[i] - 1024.f, small[i], 2e-4);
  }
}

TEST(CpuCombine, RowsPastTheSequencesAreLeftAlone) {
  CombineProblem problem({.batch = 1, .out = DType::kFloat32});
  int const total = 2;
  problem.params.sequences = &total;
  flashattn::cpu::flash_combine(problem.params);
  problem.for_each_row([&](int b, int h, int i) {
    EXPECT_EQ(problem.lse_of(b, h, i) == Problem::kUntouched, i >= total);
    EXPECT_EQ(std::isnan(problem.out(b, h, i, 0)), i >= total);
  });
}

TEST(CpuCombine, NoPartsAtAll) {
  CombineCase c;
  c.splits = 0;
  CombineProblem(c).check();
}

}  // namespace
}  // namespace cpu_test
