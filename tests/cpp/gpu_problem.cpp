#include "gpu_problem.h"

namespace gpu {
namespace {

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

}  // namespace

ScoreOperands::ScoreOperands(Case const& c, std::mt19937& random) : case_(c) {
  std::uniform_real_distribution<float> uniform(0.f, 1.f);
  int const sets = c.alibi_dims == 2 ? static_cast<int>(c.len_q.size()) : c.alibi_dims;
  for (int i = 0; i < sets * c.heads; ++i) { slopes_host_.push_back(0.5f * uniform(random)); }
  for (int i = 0; i < (c.sinks == Sinks::kNone ? 0 : c.heads); ++i) {
    sinks_host_.push_back(from_bits(c.dtype, to_bits(c.dtype, 4.f * uniform(random) - 2.f)));
  }
  slopes_ = DeviceVector<float>(slopes_host_);
  sinks_ = DeviceVector<float>(sinks_host_);
  std::vector<uint16_t> sink_bits;
  for (float sink : sinks_host_) { sink_bits.push_back(to_bits(c.dtype, sink)); }
  sinks_like_q_ = DeviceVector<uint16_t>(sink_bits);
}

void ScoreOperands::describe(flashattn::Score& score) const {
  score.scale = case_.scale;
  score.softcap = case_.softcap;
  score.alibi_slopes = slopes_.data();
  score.alibi_batch_stride = case_.alibi_dims == 2 ? case_.heads : 0;
  if (case_.sinks == Sinks::kFloat32) { score.sinks = sinks_.data(); }
  if (case_.sinks == Sinks::kLikeQ) { score.sinks = sinks_like_q_.data(); }
  score.sinks_dtype = case_.sinks == Sinks::kLikeQ ? case_.dtype : DType::kFloat32;
}

oracle::RowProblem ScoreOperands::row_problem(int batch, int head) const {
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

Problem::Problem(Case const& c, unsigned seed)
    : case_(c),
      random_(seed),
      q_(make_operand(layout_q(c), c.packed_q, c.len_q)),
      k_(make_operand(layout_kv(c, c.order_k), c.packed_k, c.len_k)),
      v_(make_operand(layout_kv(c, c.order_v), c.packed_k, c.len_k)),
      results_(c.dtype, layout_q(c), c.packed_q, c.len_q, c.want_lse),
      score_(c, random_) {
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
  results_.describe(params_);
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
  score_.describe(params_.score);
}

Problem::Operand Problem::make_operand(Layout const& layout, bool packed,
                                       std::vector<int> const& lengths) {
  std::normal_distribution<float> normal(0.f, case_.magnitude);
  std::vector<uint16_t> bits(layout.size(), kNanPattern);  // NaN where no row lies
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

void Problem::check_result() {
  results_.fetch();
  for (int b = 0; b < batch(); ++b) {
    for (int head = 0; head < case_.heads; ++head) {
      int const head_kv = head / (case_.heads / case_.heads_kv);
      auto const k = rows_of(k_, case_.packed_k, case_.len_k, b, head_kv);
      auto const v = rows_of(v_, case_.packed_k, case_.len_k, b, head_kv);
      oracle::RowProblem problem = score_.row_problem(b, head);
      problem.k = &k;
      problem.v = &v;
      results_.check_head(problem, rows_of(q_, case_.packed_q, case_.len_q, b, head), b, head);
    }
  }
  results_.check_rest();
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
