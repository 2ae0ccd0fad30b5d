// One call of the CPU backend with everything around the operands poisoned, and its check with
// every instruction set of this machine.
//
// Inputs are NaN wherever no row of q, k or v lies: gaps between heads, unused keys, packed rows
// past the last sequence. Outputs start as a NaN pattern, and every element outside of the result
// must keep it. Allocations end with their last element, so that a sanitizer sees a read past it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "error_meter.h"

namespace cpu_test {

enum class Sinks { kNone, kFloat32, kLikeQ };

struct Case {
  DType dtype = DType::kBFloat16;
  int heads = 4;
  int heads_kv = 2;
  int head_dim = 64;
  std::vector<int> len_q = {70, 70};  // of each sequence; all equal when dense
  std::vector<int> len_k = {100, 100};
  bool packed = false;
  bool seqused = false;  // len_k is what seqused_k says; `slack` more rows are allocated
  int slack = 0;         // rows past the last sequence (packed) or the used keys (seqused)
  flashattn::Window window = {};
  float scale = 0.125f;
  float softcap = 0.f;
  int alibi_dims = 0;  // 0: none, 1: (heads), 2: (batch, heads)
  Sinks sinks = Sinks::kNone;
  bool heads_first = false;  // (batch, head, row, dim) instead of (batch, row, head, dim)
  int gap = 8;               // NaN elements behind each head
  bool want_lse = true;
  bool shared_keys = false;  // stride 0 between the heads of k and v
};

// A (batches, rows, heads, dim) operand in memory that is NaN elsewhere.
class Operand {
 public:
  Operand(Case const& c, int batches, int rows, int heads) : dtype_(c.dtype), dim_(c.head_dim) {
    int64_t const inner = c.head_dim + c.gap;
    row_stride = c.heads_first ? inner : inner * heads;
    head_stride = c.heads_first ? inner * rows : inner;
    batch_stride = inner * heads * rows;
    bool const empty = int64_t(batches) * rows * heads == 0;
    int64_t const size = empty ? 0 : batch_stride * batches - c.gap;
    bytes.assign(size * size_of(dtype_), 0xff);  // all ones is a NaN in every type
  }
  unsigned char* at(int batch, int row, int head, int d = 0) {
    int64_t const i = batch * batch_stride + row * row_stride + head * head_stride + d;
    return bytes.data() + i * size_of(dtype_);
  }
  std::vector<float> row(int batch, int row, int head) {
    std::vector<float> values(dim_);
    for (int d = 0; d < dim_; ++d) { values[d] = get(dtype_, at(batch, row, head, d)); }
    return values;
  }
  template <class Strided>
  void describe(Strided& s) {
    s = {bytes.data(), batch_stride, row_stride, head_stride};
  }

  std::vector<unsigned char> bytes;
  int64_t batch_stride, row_stride, head_stride;

 private:
  DType dtype_;
  int dim_;
};

inline std::vector<int> prefix_sums(std::vector<int> const& lengths) {
  std::vector<int> sums = {0};
  for (int n : lengths) { sums.push_back(sums.back() + n); }
  return sums;
}

class Problem {
 public:
  explicit Problem(Case const& c, unsigned seed = 1);

  // Runs with fresh outputs.
  void run(flashattn::cpu::Variant const& variant) {
    std::fill(out.bytes.begin(), out.bytes.end(), 0xff);
    std::fill(lse.begin(), lse.end(), kUntouched);
    flashattn::cpu::flash_fwd(params, variant);
  }

  // Runs all variants and compares with the reference; nothing else may have been written.
  void check();

  static constexpr float kUntouched = -12345.f;
  Case c;
  std::vector<int> cu_q, cu_k, seqused;
  int rows_q, rows_k;  // of the allocation, in each batch when dense
  Operand q, k, v, out;
  std::vector<float> lse, slopes, sinks;
  std::vector<unsigned char> sinks_like_q;
  flashattn::FlashFwdParams params;

 private:
  int batch() const { return static_cast<int>(c.len_q.size()); }
  void fill(Operand& operand, int heads, std::vector<int> const& lengths,
            std::vector<int> const& cu);
  oracle::RowProblem row_problem(int b, int head, std::vector<std::vector<float>>& keys,
                                 std::vector<std::vector<float>>& values);
  void check_head(int b, int head, char const* variant);
  void check_untouched();

  std::mt19937 random_;
};

inline Problem::Problem(Case const& c_, unsigned seed)
    : c(c_),
      cu_q(prefix_sums(c.len_q)),
      cu_k(prefix_sums(c.len_k)),
      seqused(c.len_k),
      rows_q(c.packed ? cu_q.back() + c.slack : c.len_q[0]),
      rows_k(c.packed ? cu_k.back() + c.slack
                      : *std::max_element(c.len_k.begin(), c.len_k.end()) + c.slack),
      q(c, c.packed ? 1 : batch(), rows_q, c.heads),
      k(c, c.packed ? 1 : batch(), rows_k, c.shared_keys ? 1 : c.heads_kv),
      v(c, c.packed ? 1 : batch(), rows_k, c.shared_keys ? 1 : c.heads_kv),
      out(c, c.packed ? 1 : batch(), rows_q, c.heads),
      lse(int64_t(c.packed ? 1 : batch()) * c.heads * rows_q),
      random_(seed) {
  fill(q, c.heads, c.len_q, cu_q);
  fill(k, c.shared_keys ? 1 : c.heads_kv, c.len_k, cu_k);
  fill(v, c.shared_keys ? 1 : c.heads_kv, c.len_k, cu_k);
  std::uniform_real_distribution<float> uniform(0.f, 1.f);
  for (int i = 0; i < batch() * c.heads; ++i) { slopes.push_back(uniform(random_)); }
  sinks_like_q.resize(c.heads * size_of(c.dtype));
  for (int i = 0; i < c.heads; ++i) {
    sinks.push_back(round_to(c.dtype, 4.f * uniform(random_) - 2.f));
    put(c.dtype, sinks_like_q.data() + i * size_of(c.dtype), sinks.back());
  }
  params.device = flashattn::Device::kCpu;
  params.dtype = c.dtype;
  params.shape = {batch(),
                  c.heads,
                  c.heads_kv,
                  c.head_dim,
                  *std::max_element(c.len_q.begin(), c.len_q.end()),
                  c.packed ? 1 : rows_k};
  q.describe(params.q);
  k.describe(params.k);
  v.describe(params.v);
  out.describe(params.out);
  if (c.shared_keys) { params.k.head_stride = params.v.head_stride = 0; }
  params.lse = c.want_lse ? lse.data() : nullptr;
  if (c.packed) { params.lengths = {cu_q.data(), cu_k.data(), nullptr, rows_q, rows_k}; }
  if (c.seqused) { params.lengths.seqused_k = seqused.data(); }
  params.window = c.window;
  params.score = {.scale = c.scale, .softcap = c.softcap};
  if (c.alibi_dims > 0) { params.score.alibi_slopes = slopes.data(); }
  if (c.alibi_dims == 2) { params.score.alibi_batch_stride = c.heads; }
  if (c.sinks == Sinks::kFloat32) { params.score.sinks = sinks.data(); }
  if (c.sinks == Sinks::kLikeQ) {
    params.score.sinks = sinks_like_q.data();
    params.score.sinks_dtype = c.dtype;
  }
}

inline void Problem::fill(Operand& operand, int heads, std::vector<int> const& lengths,
                          std::vector<int> const& cu) {
  std::normal_distribution<float> normal(0.f, 1.f);
  for (int b = 0; b < batch(); ++b) {
    for (int i = 0; i < lengths[b] * heads * c.head_dim; ++i) {
      int const row = i / (heads * c.head_dim), head = i / c.head_dim % heads;
      put(c.dtype, operand.at(c.packed ? 0 : b, row + (c.packed ? cu[b] : 0), head, i % c.head_dim),
          normal(random_));
    }
  }
}

inline oracle::RowProblem Problem::row_problem(int b, int head,
                                               std::vector<std::vector<float>>& keys,
                                               std::vector<std::vector<float>>& values) {
  int const head_kv = c.shared_keys ? 0 : head / (c.heads / c.heads_kv);
  for (int j = 0; j < c.len_k[b]; ++j) {
    int const row = j + (c.packed ? cu_k[b] : 0);
    keys.push_back(k.row(c.packed ? 0 : b, row, head_kv));
    values.push_back(v.row(c.packed ? 0 : b, row, head_kv));
  }
  oracle::RowProblem p;
  p.k = &keys;
  p.v = &values;
  p.len_q = c.len_q[b];
  p.window = {c.window.left, c.window.right};
  p.scale = c.scale;
  p.softcap = c.softcap;
  if (c.alibi_dims > 0) { p.slope = slopes[(c.alibi_dims == 2 ? b * c.heads : 0) + head]; }
  p.has_sink = c.sinks != Sinks::kNone;
  p.sink = sinks[head];
  return p;
}

inline void Problem::check_head(int b, int head, char const* variant) {
  std::vector<std::vector<float>> keys, values;
  oracle::RowProblem p = row_problem(b, head, keys, values);
  ErrorMeter meter(c.dtype, c.softcap > 0.f);
  for (p.row = 0; p.row < p.len_q; ++p.row) {
    int const row = p.row + (c.packed ? cu_q[b] : 0), batch_index = c.packed ? 0 : b;
    p.q = q.row(batch_index, row, head);
    float& l = lse[(int64_t(batch_index) * c.heads + head) * rows_q + row];
    meter.add(p, out.row(batch_index, row, head), c.want_lse ? &l : nullptr);
    std::memset(out.at(batch_index, row, head), 0xff, c.head_dim * size_of(c.dtype));
    if (c.want_lse) { l = kUntouched; }
  }
  meter.check(std::string(variant) + " sequence " + std::to_string(b) + " head " +
              std::to_string(head));
}

// check_head has put back what it found right.
inline void Problem::check_untouched() {
  EXPECT_TRUE(std::all_of(out.bytes.begin(), out.bytes.end(), [](int x) { return x == 0xff; }));
  EXPECT_TRUE(std::all_of(lse.begin(), lse.end(), [](float x) { return x == kUntouched; }));
}

inline void Problem::check() {
  for (flashattn::cpu::Variant const& variant : flashattn::cpu::variants()) {
    run(variant);
    for (int i = 0; i < batch() * c.heads; ++i) {
      check_head(i / c.heads, i % c.heads, variant.name);
    }
    check_untouched();
  }
}

}  // namespace cpu_test
