#include "gpu_results.h"

#include <bit>
#include <cmath>

namespace gpu {
namespace {

constexpr uint32_t kLsePattern = 0x7fc0beef;

bool is_lse_pattern(float x) { return std::bit_cast<uint32_t>(x) == kLsePattern; }

// Noise of storing a number of this size, so that an exact yardstick does not mean a bound of 0.
double rounding_noise(DType dtype, double magnitude) {
  return 1e-5 + magnitude * (dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8);
}

// The larger one; a NaN is the largest.
double worse(double error, double off) { return std::isnan(off) ? INFINITY : std::max(error, off); }

}  // namespace

Results::Results(DType dtype, Layout const& layout, bool packed, std::vector<int> const& len_q,
                 bool want_lse)
    : dtype_(dtype),
      layout_(layout),
      packed_(packed),
      want_lse_(want_lse),
      first_row_(packed ? prefix_sums(len_q) : std::vector<int>(len_q.size() + 1, 0)),
      out_(std::vector<uint16_t>(layout.size() + kGuard, kNanPattern)),
      lse_(std::vector<float>(int64_t(layout.batches) * layout.heads * layout.rows + kGuard,
                              std::bit_cast<float>(kLsePattern))) {}

void Results::describe(flashattn::FlashFwdParams& params) const {
  params.out = {out_.data(), layout_.batch_stride, layout_.row_stride, layout_.head_stride};
  params.lse = want_lse_ ? lse_.data() : nullptr;
}

void Results::fetch() {
  out_host_ = out_.host();
  lse_host_ = lse_.host();
  out_written_.assign(out_host_.size(), 0);
  lse_written_.assign(lse_host_.size(), 0);
}

int64_t Results::out_index(int batch, int head, int row) const {
  return layout_.at(packed_ ? 0 : batch, first_row_[batch] + row, head, 0);
}

int64_t Results::lse_index(int batch, int head, int row) const {
  int64_t const head_row = packed_ ? head : int64_t(batch) * layout_.heads + head;
  return head_row * layout_.rows + first_row_[batch] + row;
}

std::vector<uint32_t> Results::bits_of(int batch, int rows) const {
  std::vector<uint16_t> const out = out_.host();
  std::vector<float> const lse = lse_.host();
  std::vector<uint32_t> bits;
  for (int i = 0; i < rows * layout_.heads; ++i) {
    int const row = i / layout_.heads, head = i % layout_.heads;
    int64_t const first = out_index(batch, head, row);
    bits.insert(bits.end(), out.begin() + first, out.begin() + first + layout_.dim);
    bits.push_back(std::bit_cast<uint32_t>(lse[lse_index(batch, head, row)]));
  }
  return bits;
}

void Results::check_head(oracle::RowProblem problem, std::vector<std::vector<float>> const& q,
                         int batch, int head, double lse_bound) {
  auto const round = [this](double x) {
    return from_bits(dtype_, to_bits(dtype_, static_cast<float>(x)));
  };
  double error = 0., yardstick = 0., magnitude = 0., lse_error = 0.;
  for (int row = 0; row < problem.len_q; ++row) {
    problem.q = q[row];
    problem.row = row;
    oracle::RowResult const exact = oracle::attend(problem, oracle::NoRounding{});
    oracle::RowResult const rounded = oracle::attend(problem, round);
    int64_t const first = out_index(batch, head, row);
    for (int d = 0; d < layout_.dim; ++d) {
      out_written_[first + d] = 1;
      double const got = from_bits(dtype_, out_host_[first + d]);
      error = worse(error, std::abs(got - exact.out[d]));
      yardstick = std::max(yardstick, std::abs(rounded.out[d] - exact.out[d]));
      magnitude = std::max(magnitude, std::abs(exact.out[d]));
      if (std::isinf(exact.lse) && got != 0.) {
        ADD_FAILURE() << "empty row " << row << " has out " << got;
      }
    }
    if (!want_lse_) { continue; }
    int64_t const at = lse_index(batch, head, row);
    lse_written_[at] = 1;
    bool const same = static_cast<double>(lse_host_[at]) == exact.lse;  // -inf - -inf would be NaN
    lse_error = worse(lse_error, same ? 0. : std::abs(lse_host_[at] - exact.lse));
  }
  double const factor = problem.softcap > 0.f ? 3. : 2.;
  EXPECT_LE(error, factor * yardstick + rounding_noise(dtype_, magnitude))
      << "batch " << batch << ", head " << head;
  EXPECT_LE(lse_error, lse_bound) << "batch " << batch << ", head " << head;
}

void Results::check_rest() const {
  int64_t spoilt = 0;
  for (size_t i = 0; i < out_host_.size(); ++i) {
    spoilt += !out_written_[i] && out_host_[i] != kNanPattern;
  }
  for (size_t i = 0; i < lse_host_.size(); ++i) {
    spoilt += !lse_written_[i] && !is_lse_pattern(lse_host_[i]);
  }
  EXPECT_EQ(spoilt, 0) << "words outside of the result were written";
}

void Results::check_outside() {
  fetch();
  for (int batch = 0; batch < layout_.batches; ++batch) {
    for (int row = 0; row < layout_.rows; ++row) {
      for (int head = 0; head < layout_.heads; ++head) {
        for (int d = 0; d < layout_.dim; ++d) { out_written_[layout_.at(batch, row, head, d)] = 1; }
      }
    }
  }
  std::fill(lse_written_.begin(), lse_written_.end() - kGuard, 1);
  check_rest();
}

}  // namespace gpu
