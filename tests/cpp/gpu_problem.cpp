#include "gpu_problem.h"

#include <cmath>
#include <cstring>
#include <numeric>

namespace gpu {
namespace {

constexpr uint16_t kOutPattern = 0x7ff1;  // a NaN in both 16-bit types
constexpr uint32_t kLsePattern = 0x7fc0beef;
constexpr int kGuard = 512;  // elements behind the outputs that nobody may write

std::vector<int> prefix_sums(std::vector<int> const& lengths) {
  std::vector<int> sums{0};
  for (int length : lengths) { sums.push_back(sums.back() + length); }
  return sums;
}

int sum(std::vector<int> const& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), 0);
}
int longest(std::vector<int> const& lengths) {
  return *std::max_element(lengths.begin(), lengths.end());
}

int batches_of(Case const& c, bool packed) { return packed ? 1 : static_cast<int>(c.len_q.size()); }

int rows_of_q(Case const& c) { return c.packed_q ? sum(c.len_q) + c.slack : c.len_q[0]; }

int rows_of_k(Case const& c) {
  if (c.packed_k) { return sum(c.len_k) + c.slack; }
  return longest(c.len_k) + (c.seqused ? c.slack : 0);
}

Layout layout_q(Case const& c) {
  return {batches_of(c, c.packed_q), rows_of_q(c), c.heads, c.head_dim, c.gap, Order::kRowsFirst};
}
Layout layout_kv(Case const& c, Order order) {
  return {batches_of(c, c.packed_k), rows_of_k(c), c.heads_kv, c.head_dim, c.gap, order};
}

float lse_pattern() {
  float pattern;
  std::memcpy(&pattern, &kLsePattern, sizeof pattern);
  return pattern;
}

bool is_lse_pattern(float x) { return std::memcmp(&x, &kLsePattern, sizeof x) == 0; }

// Noise of storing a number of this size, so that an exact yardstick does not mean a bound of 0.
double rounding_noise(DType dtype, double magnitude) {
  return 1e-5 + magnitude * (dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8);
}

flashattn::Input input(Layout const& layout, DeviceVector<uint16_t> const& device) {
  return {device.data(), layout.batch_stride, layout.row_stride, layout.head_stride};
}

}  // namespace

Problem::Problem(Case const& c, unsigned seed)
    : case_(c),
      random_(seed),
      q_(make_operand(layout_q(c), c.packed_q, c.len_q)),
      k_(make_operand(layout_kv(c, c.order_k), c.packed_k, c.len_k)),
      v_(make_operand(layout_kv(c, c.order_v), c.packed_k, c.len_k)),
      out_layout_(layout_q(c)),
      out_(std::vector<uint16_t>(out_layout_.size() + kGuard, kOutPattern)),
      lse_(std::vector<float>(int64_t(out_layout_.batches) * c.heads * out_layout_.rows + kGuard,
                              lse_pattern())) {
  std::uniform_real_distribution<float> uniform(0.f, 1.f);
  int const slopes = c.alibi_dims == 0 ? 0 : c.alibi_dims == 1 ? c.heads : c.heads * batch();
  for (int i = 0; i < slopes; ++i) { slopes_host_.push_back(0.5f * uniform(random_)); }
  for (int i = 0; i < (c.sinks == Sinks::kNone ? 0 : c.heads); ++i) {
    sinks_host_.push_back(from_bits(c.dtype, to_bits(c.dtype, 4.f * uniform(random_) - 2.f)));
  }
  slopes_ = DeviceVector<float>(slopes_host_);
  sinks_ = DeviceVector<float>(sinks_host_);
  std::vector<uint16_t> sink_bits;
  for (float sink : sinks_host_) { sink_bits.push_back(to_bits(c.dtype, sink)); }
  sinks_like_q_ = DeviceVector<uint16_t>(sink_bits);
  cu_q_ = DeviceVector<int>(prefix_sums(c.len_q));
  cu_k_ = DeviceVector<int>(prefix_sums(c.len_k));
  seqused_ = DeviceVector<int>(c.len_k);
  fill_params();
}

void Problem::fill_params() {
  Case const& c = case_;
  params_.device = flashattn::Device::kCuda;
  params_.dtype = c.dtype;
  params_.shape = {.batch = batch(),
                   .heads = c.heads,
                   .heads_kv = c.heads_kv,
                   .head_dim = c.head_dim,
                   .seqlen_q = c.max_seqlen_q > 0 ? c.max_seqlen_q : longest(c.len_q),
                   .seqlen_k = c.packed_k ? longest(c.len_k) : rows_of_k(c)};
  params_.q = input(q_.layout, q_.device);
  params_.k = input(k_.layout, k_.device);
  params_.v = input(v_.layout, v_.device);
  params_.out = {out_.data(), out_layout_.batch_stride, out_layout_.row_stride,
                 out_layout_.head_stride};
  params_.lse = c.want_lse ? lse_.data() : nullptr;
  if (c.packed_q) {
    params_.lengths.cu_seqlens_q = cu_q_.data();
    params_.lengths.total_q = q_.layout.rows;
  }
  if (c.packed_k) {
    params_.lengths.cu_seqlens_k = cu_k_.data();
    params_.lengths.total_k = k_.layout.rows;
  }
  if (c.seqused) { params_.lengths.seqused_k = seqused_.data(); }
  params_.window = c.window;
  params_.score.scale = c.scale;
  params_.score.softcap = c.softcap;
  params_.score.alibi_slopes = slopes_.data();
  params_.score.alibi_batch_stride = c.alibi_dims == 2 ? c.heads : 0;
  if (c.sinks == Sinks::kFloat32) { params_.score.sinks = sinks_.data(); }
  if (c.sinks == Sinks::kLikeQ) { params_.score.sinks = sinks_like_q_.data(); }
  params_.score.sinks_dtype = c.sinks == Sinks::kLikeQ ? c.dtype : DType::kFloat32;
}

Problem::Operand Problem::make_operand(Layout const& layout, bool packed,
                                       std::vector<int> const& lengths) {
  std::normal_distribution<float> normal(0.f, case_.magnitude);
  std::vector<uint16_t> bits(layout.size(), kOutPattern);  // NaN where no row lies
  std::vector<int> const begins = prefix_sums(lengths);
  for (int b = 0; b < static_cast<int>(lengths.size()); ++b) {
    for (int row = 0; row < lengths[b]; ++row) {
      for (int head = 0; head < layout.heads; ++head) {
        int64_t const at =
            packed ? layout.at(0, begins[b] + row, head, 0) : layout.at(b, row, head, 0);
        for (int d = 0; d < layout.dim; ++d) {
          bits[at + d] = to_bits(case_.dtype, normal(random_));
        }
      }
    }
  }
  return {layout, bits, DeviceVector<uint16_t>(bits)};
}

std::vector<std::vector<float>> Problem::rows_of(Operand const& operand, bool packed,
                                                 std::vector<int> const& lengths, int batch,
                                                 int head) const {
  int const begin = packed ? prefix_sums(lengths)[batch] : 0;
  std::vector<std::vector<float>> rows(lengths[batch], std::vector<float>(operand.layout.dim));
  for (int row = 0; row < lengths[batch]; ++row) {
    for (int d = 0; d < operand.layout.dim; ++d) {
      int64_t const at = operand.layout.at(packed ? 0 : batch, begin + row, head, d);
      rows[row][d] = from_bits(case_.dtype, operand.bits[at]);
    }
  }
  return rows;
}

oracle::RowProblem Problem::row_problem(int batch, int head) const {
  oracle::RowProblem row;
  row.len_q = case_.len_q[batch];
  row.window = {case_.window.left, case_.window.right};
  row.scale = case_.scale;
  row.softcap = case_.softcap;
  if (case_.alibi_dims > 0) {
    row.slope = slopes_host_[case_.alibi_dims == 2 ? batch * case_.heads + head : head];
  }
  row.has_sink = case_.sinks != Sinks::kNone;
  if (row.has_sink) { row.sink = sinks_host_[head]; }
  return row;
}

int64_t Problem::lse_index(int batch, int head, int row) const {
  if (case_.packed_q) {
    return int64_t(head) * out_layout_.rows + prefix_sums(case_.len_q)[batch] + row;
  }
  return (int64_t(batch) * case_.heads + head) * case_.len_q[0] + row;
}

// One head of one sequence. Marks what it expects to be written.
void Problem::check_rows(int batch, int head, std::vector<uint16_t> const& out,
                         std::vector<float> const& lse, std::vector<char>& out_written,
                         std::vector<char>& lse_written) const {
  auto const q = rows_of(q_, case_.packed_q, case_.len_q, batch, head);
  int const head_kv = head / (case_.heads / case_.heads_kv);
  auto const k = rows_of(k_, case_.packed_k, case_.len_k, batch, head_kv);
  auto const v = rows_of(v_, case_.packed_k, case_.len_k, batch, head_kv);
  auto const round = [this](double x) {
    return from_bits(case_.dtype, to_bits(case_.dtype, static_cast<float>(x)));
  };
  oracle::RowProblem problem = row_problem(batch, head);
  problem.k = &k;
  problem.v = &v;

  double error = 0., yardstick = 0., magnitude = 0., lse_error = 0.;
  for (int row = 0; row < problem.len_q; ++row) {
    problem.q = q[row];
    problem.row = row;
    oracle::RowResult const exact = oracle::attend(problem, oracle::NoRounding{});
    oracle::RowResult const rounded = oracle::attend(problem, round);
    int const begin = case_.packed_q ? prefix_sums(case_.len_q)[batch] : 0;
    for (int d = 0; d < case_.head_dim; ++d) {
      int64_t const at = out_layout_.at(case_.packed_q ? 0 : batch, begin + row, head, d);
      out_written[at] = 1;
      double const got = from_bits(case_.dtype, out[at]);
      double const off = std::abs(got - exact.out[d]);
      error = std::isnan(off) ? INFINITY : std::max(error, off);
      yardstick = std::max(yardstick, std::abs(rounded.out[d] - exact.out[d]));
      magnitude = std::max(magnitude, std::abs(exact.out[d]));
      if (std::isinf(exact.lse) && got != 0.) {
        ADD_FAILURE() << "empty row " << row << " has out " << got;
      }
    }
    if (!case_.want_lse) { continue; }
    int64_t const at = lse_index(batch, head, row);
    lse_written[at] = 1;
    bool const same = static_cast<double>(lse[at]) == exact.lse;  // -inf - -inf would be NaN
    double const off = same ? 0. : std::abs(lse[at] - exact.lse);
    lse_error = std::isnan(off) ? INFINITY : std::max(lse_error, off);
  }
  double const factor = case_.softcap > 0.f ? 3. : 2.;
  EXPECT_LE(error, factor * yardstick + rounding_noise(case_.dtype, magnitude))
      << "batch " << batch << ", head " << head;
  EXPECT_LE(lse_error, 1e-4) << "batch " << batch << ", head " << head;
}

void Problem::check_result() const {
  std::vector<uint16_t> const out = out_.host();
  std::vector<float> const lse = lse_.host();
  std::vector<char> out_written(out.size(), 0), lse_written(lse.size(), 0);
  for (int b = 0; b < batch(); ++b) {
    for (int head = 0; head < case_.heads; ++head) {
      check_rows(b, head, out, lse, out_written, lse_written);
    }
  }
  int64_t spoilt = 0;
  for (size_t i = 0; i < out.size(); ++i) { spoilt += !out_written[i] && out[i] != kOutPattern; }
  for (size_t i = 0; i < lse.size(); ++i) { spoilt += !lse_written[i] && !is_lse_pattern(lse[i]); }
  EXPECT_EQ(spoilt, 0) << "words outside of the result were written";
}

// What holds whatever the lengths on the device say.
void Problem::check_canaries() const {
  std::vector<uint16_t> const out = out_.host();
  std::vector<float> const lse = lse_.host();
  std::vector<char> out_inside(out.size(), 0);
  for (int row = 0; row < out_layout_.rows; ++row) {
    for (int head = 0; head < case_.heads; ++head) {
      for (int d = 0; d < case_.head_dim; ++d) { out_inside[out_layout_.at(0, row, head, d)] = 1; }
    }
  }
  int64_t spoilt = 0;
  for (size_t i = 0; i < out.size(); ++i) { spoilt += !out_inside[i] && out[i] != kOutPattern; }
  for (size_t i = lse.size() - kGuard; i < lse.size(); ++i) { spoilt += !is_lse_pattern(lse[i]); }
  EXPECT_EQ(spoilt, 0) << "words outside of the result were written";
}

void Problem::overwrite_cu_seqlens(std::vector<int> const& q, std::vector<int> const& k) {
  cu_q_ = DeviceVector<int>(q);
  cu_k_ = DeviceVector<int>(k);
  fill_params();
}

void expect_right(Case const& c) {
  Problem problem(c);
  problem.run();
  check(cudaDeviceSynchronize(), "flash_fwd");
  problem.check_result();
}

std::string no_gpu_reason() {
  static std::string const reason = [] {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      return std::string("no CUDA device");
    }
    Case tiny;
    tiny.head_dim = 8;
    tiny.len_q = tiny.len_k = {1};
    try {
      Problem(tiny).run();
    } catch (flashattn::Unsupported const& error) { return std::string(error.what()); }
    return std::string();
  }();
  return reason;
}

std::vector<int> built_head_dims(std::vector<int> const& wanted) {
  std::vector<int> served;
  for (int head_dim : wanted) {
    if (head_dim <= flashattn::build_info().head_dims.back()) { served.push_back(head_dim); }
  }
  return served;
}

}  // namespace gpu
