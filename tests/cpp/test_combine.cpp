// run_flash_combine on the GPU against double: types, strides, empty parts, infinite ones.
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "gpu_problem.h"

namespace {

using flashattn::DType;
using gpu::DeviceVector;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint8_t kPoison = 0xff;  // a NaN in every type

int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

void put(std::vector<uint8_t>& bytes, DType dtype, int64_t index, float x) {
  if (dtype == DType::kFloat32) {
    std::memcpy(&bytes[index * 4], &x, 4);
  } else {
    uint16_t const bits = gpu::to_bits(dtype, x);
    std::memcpy(&bytes[index * 2], &bits, 2);
  }
}

float get(std::vector<uint8_t> const& bytes, DType dtype, int64_t index) {
  float x;
  uint16_t bits;
  if (dtype == DType::kFloat32) {
    std::memcpy(&x, &bytes[index * 4], 4);
    return x;
  }
  std::memcpy(&bits, &bytes[index * 2], 2);
  return gpu::from_bits(dtype, bits);
}

struct CombineCase {
  int splits = 3;
  int batch = 2;
  int heads = 3;
  int seqlen = 5;
  int head_dim = 64;
  DType partial_dtype = DType::kFloat32;
  DType out_dtype = DType::kBFloat16;
  int pad = 0;             // elements between the dimensions of everything that has strides
  int empty_every = 0;     // every so many-th part is empty, of either sign
  bool all_empty = false;  // of the first row
  int faint = -1;          // a part that is not finite, but whose weight is 0 in fp32
  int rows = -1;           // packed: rows that exist
  bool want_lse = true;
};

class CombineProblem {
 public:
  explicit CombineProblem(CombineCase const& c) : c_(c) {
    int64_t const row = c.head_dim + c.pad, head = row * c.seqlen + c.pad;
    part_ = {nullptr, head * c.heads + c.pad, row, head};
    part_split_ = part_.batch_stride * c.batch + c.pad;
    lse_row_ = 1 + (c.pad > 0);
    lse_head_ = lse_row_ * c.seqlen + c.pad;
    lse_batch_ = lse_head_ * c.heads + c.pad;
    lse_split_ = lse_batch_ * c.batch + c.pad;
    fill();
  }

  void run() {
    flashattn::FlashCombineParams p;
    p.device = flashattn::Device::kCuda;
    p.splits = c_.splits;
    p.batch = c_.batch;
    p.heads = c_.heads;
    p.seqlen = c_.seqlen;
    p.head_dim = c_.head_dim;
    p.partial_dtype = c_.partial_dtype;
    p.out_partial = part_;
    p.out_partial.data = parts_.data();
    p.out_split_stride = part_split_;
    p.lse_partial = lse_parts_.data();
    p.lse_split_stride = lse_split_;
    p.lse_batch_stride = lse_batch_;
    p.lse_head_stride = lse_head_;
    p.lse_row_stride = lse_row_;
    p.out_dtype = c_.out_dtype;
    p.out = {out_.data(), part_.batch_stride, part_.row_stride, part_.head_stride};
    p.lse = c_.want_lse ? lse_.data() : nullptr;
    p.sequences = c_.rows >= 0 ? rows_.data() : nullptr;
    flashattn::run_flash_combine(p);
    gpu::check(cudaDeviceSynchronize(), "flash_combine");
  }

  void check() {
    std::vector<uint8_t> out = out_.host();
    std::vector<float> lse = lse_.host();
    int const rows = c_.rows >= 0 ? c_.rows : c_.seqlen;
    for (int b = 0; b < c_.batch; ++b) {
      for (int h = 0; h < c_.heads; ++h) {
        for (int row = 0; row < rows; ++row) {
          float& got_lse = lse[(b * c_.heads + h) * c_.seqlen + row];
          check_row(b, h, row, out, c_.want_lse ? std::optional(got_lse) : std::nullopt);
          if (c_.want_lse) { got_lse = kNan; }
        }
      }
    }
    bool const untouched =
        std::all_of(out.begin(), out.end(), [](uint8_t x) { return x == kPoison; });
    EXPECT_TRUE(untouched) << "out was written elsewhere";
    for (float x : lse) { ASSERT_TRUE(std::isnan(x)) << "lse was written elsewhere"; }
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  int64_t at(int b, int h, int row) const {
    return b * part_.batch_stride + h * part_.head_stride + row * part_.row_stride;
  }
  int64_t lse_at(int s, int b, int h, int row) const {
    return s * lse_split_ + b * lse_batch_ + h * lse_head_ + row * lse_row_;
  }

  // Empty parts keep their NaN: nobody may look at them.
  void fill() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal(0.f, 1.f);
    int64_t const end = at(c_.batch - 1, c_.heads - 1, c_.seqlen - 1) + c_.head_dim;
    int64_t const size = c_.splits == 0 ? 0 : (c_.splits - 1) * part_split_ + end;
    parts_host_.assign(size * size_of(c_.partial_dtype), kPoison);
    lse_host_.assign(c_.splits * lse_split_, kNan);
    for (int i = 0; i < c_.splits * c_.batch * c_.heads * c_.seqlen; ++i) {
      int const row = i % c_.seqlen, h = i / c_.seqlen % c_.heads;
      int const b = i / c_.seqlen / c_.heads % c_.batch, s = i / c_.seqlen / c_.heads / c_.batch;
      bool const first_row = row == 0 && h == 0 && b == 0, faint = s == c_.faint;
      bool const empty = !faint && ((c_.empty_every > 0 && (i + s) % c_.empty_every == 0) ||
                                    (c_.all_empty && first_row));
      lse_host_[lse_at(s, b, h, row)] =
          empty ? (i % 2 == 0 ? kInfinity : -kInfinity) : 30.f * normal(random) - 1000.f * faint;
      for (int d = 0; !empty && d < c_.head_dim; ++d) {
        float const x = !faint ? normal(random) : d % 3 == 0 ? kNan : (d % 3 - 1.5f) * kInfinity;
        put(parts_host_, c_.partial_dtype, s * part_split_ + at(b, h, row) + d, x);
      }
    }
    parts_ = DeviceVector<uint8_t>(parts_host_);
    lse_parts_ = DeviceVector<float>(lse_host_);
    rows_ = DeviceVector<int>(std::vector<int>{c_.rows});
    out_ = DeviceVector<uint8_t>(std::vector<uint8_t>((end + 32) * size_of(c_.out_dtype), kPoison));
    lse_ = DeviceVector<float>(std::vector<float>(c_.batch * c_.heads * c_.seqlen + 32, kNan));
  }

  // Puts the poison back where it finds what it expects.
  void check_row(int b, int h, int row, std::vector<uint8_t>& out, std::optional<float> got_lse) {
    double top = -INFINITY, total = 0.;
    for (int s = 0; s < c_.splits; ++s) {
      double const lse = lse_host_[lse_at(s, b, h, row)];
      if (!std::isinf(lse)) { top = std::max(top, lse); }
    }
    std::vector<double> expected(c_.head_dim, 0.);
    for (int s = 0; s < c_.splits; ++s) {
      double const lse = lse_host_[lse_at(s, b, h, row)];
      if (std::isinf(lse)) { continue; }
      total += std::exp(lse - top);
      for (int d = 0; d < c_.head_dim; ++d) {
        float const part = get(parts_host_, c_.partial_dtype, s * part_split_ + at(b, h, row) + d);
        expected[d] += std::exp(lse - top) * part;
      }
    }
    double const ulp = c_.out_dtype == DType::kFloat32   ? 0x1p-20
                       : c_.out_dtype == DType::kFloat16 ? 0x1p-11
                                                         : 0x1p-8;
    for (int d = 0; d < c_.head_dim; ++d) {
      double const exact = total > 0. ? expected[d] / total : 0.;
      int64_t const index = at(b, h, row) + d;
      double const off = std::abs(get(out, c_.out_dtype, index) - exact);
      bool const right = std::isnan(exact)
                             ? std::isnan(off)
                             : off <= ulp * std::abs(exact) + (total > 0. ? 1e-5 : 0.);
      ASSERT_TRUE(right) << "batch " << b << ", head " << h << ", row " << row << ", column " << d
                         << ": off by " << off;
      std::fill_n(out.begin() + index * size_of(c_.out_dtype), size_of(c_.out_dtype), kPoison);
    }
    if (!got_lse) { return; }
    if (total == 0.) {
      EXPECT_EQ(*got_lse, -kInfinity);
    } else {
      EXPECT_LE(std::abs(*got_lse - (top + std::log(total))), 1e-5 * std::max(1., std::abs(top)));
    }
  }

  CombineCase c_;
  flashattn::Input part_;  // strides of out_partial, and of out
  int64_t part_split_, lse_row_, lse_head_, lse_batch_, lse_split_;
  std::vector<uint8_t> parts_host_;
  std::vector<float> lse_host_;
  DeviceVector<uint8_t> parts_, out_;
  DeviceVector<float> lse_parts_, lse_;
  DeviceVector<int> rows_;
};

void expect_right(CombineCase const& c) {
  SCOPED_TRACE(std::to_string(c.splits) + " splits, head dim " + std::to_string(c.head_dim) +
               ", types " + std::to_string(static_cast<int>(c.partial_dtype)) + " to " +
               std::to_string(static_cast<int>(c.out_dtype)));
  CombineProblem problem(c);
  problem.run();
  problem.check();
}

// Head dims around the 32 lanes of a warp and their 4 columns, splits around the 32 lanes.
TEST(Combine, HeadDimsAndSplits) {
  SKIP_WITHOUT_GPU();
  for (int head_dim : {1, 8, 31, 40, 64, 127, 128, 129, 136, 256, 512}) {
    for (int splits : {1, 2, 31, 33, 133}) {
      expect_right({.splits = splits, .seqlen = 2, .head_dim = head_dim});
    }
  }
}

TEST(Combine, EveryTypeWithPaddedStrides) {
  SKIP_WITHOUT_GPU();
  for (DType partial : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (DType out : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      for (int pad : {0, 1, 8}) {
        expect_right({.head_dim = 40, .partial_dtype = partial, .out_dtype = out, .pad = pad});
      }
    }
  }
}

TEST(Combine, EmptyPartsOfEitherSign) {
  SKIP_WITHOUT_GPU();
  for (int splits : {1, 2, 3, 40}) {
    for (int empty_every : {1, 2, 3}) {
      expect_right({.splits = splits,
                    .out_dtype = DType::kFloat32,
                    .empty_every = empty_every,
                    .all_empty = true});
    }
  }
}

// As in a call without splits, where such keys are multiplied by 0. Empty parts, which are poison,
// still do nothing.
TEST(Combine, WhatIsNotFiniteReachesOutWithoutAnyWeight) {
  SKIP_WITHOUT_GPU();
  for (int faint = 0; faint <= 40; ++faint) {
    for (int empty_every : {0, 3}) {
      expect_right(
          {.splits = 41, .out_dtype = DType::kFloat32, .empty_every = empty_every, .faint = faint});
    }
  }
}

TEST(Combine, NoPartsAtAll) {
  SKIP_WITHOUT_GPU();
  expect_right({.splits = 0});
}

TEST(Combine, RowsThatDoNotExistStayUntouched) {
  SKIP_WITHOUT_GPU();
  for (int rows : {0, 1, 4, 5}) { expect_right({.batch = 1, .rows = rows}); }
  expect_right({.pad = 3, .want_lse = false});
}

}  // namespace
