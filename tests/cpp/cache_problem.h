// One call of the CPU backend over a cache in which everything but the keys is poisoned, and its
// check against double. Like cpu_problem.h, whose operands it uses.
#pragma once

#include <climits>
#include <numeric>

#include "cpu/cpu.h"
#include "cpu_problem.h"

namespace cpu_test {

struct CacheCase : Case {
  std::vector<int> cached = {100, 37};  // as the call is told: any number
  int capacity = 144;
  int page_size = 0;     // 0: contiguous
  int page_columns = 0;  // more columns than the capacity needs
  bool leftpad = false;  // 0, 5, 10, ... of the sequences
  bool batch_idx = false;
  bool same_length = false;  // cached[0], passed as a number
  int bad_every = 0;         // every so many-th page id or cache row is bad
  int append = 0;
  int rotary_dim = 0;
  bool interleaved = false;
  int num_splits = 0;
  int split_size = 0;
};

class CacheProblem {
 public:
  explicit CacheProblem(CacheCase const& c, unsigned seed = 1);

  void run(flashattn::cpu::Variant const& variant) {
    k.bytes = k_before;
    v.bytes = v_before;
    std::fill(out.bytes.begin(), out.bytes.end(), 0xff);
    std::fill(lse.begin(), lse.end(), Problem::kUntouched);
    flashattn::cpu::flash_splitkv_fwd(params, variant);
  }

  // Runs all variants: the cache, out and lse are right, and nothing else was written.
  void check();

  CacheCase c;
  std::vector<int> cu_q, rows_of, leftpad;
  int rows_q;
  Operand q, out, k, v, new_k, new_v;
  std::vector<unsigned char> k_before, v_before, cosines, sines;
  std::vector<float> lse, slopes, sinks;
  flashattn::FlashSplitkvParams params;

 private:
  struct Slot {
    int row, slot;
    bool exists;
  };
  static constexpr int kPositions = 40;  // fewer than tokens: positions are clamped
  static constexpr int kBadIds[] = {-1, INT_MAX, INT_MIN, 1 << 20};

  int batch() const { return static_cast<int>(c.len_q.size()); }
  bool paged() const { return c.page_size > 0; }
  int columns() const { return (c.capacity + c.page_size - 1) / c.page_size + c.page_columns; }
  int rows() const { return paged() ? batch() * columns() + 3 : batch() + 2 * c.batch_idx; }
  int given(int b) const { return c.cached[c.same_length ? 0 : b]; }
  int cached(int b) const { return std::clamp(given(b), 0, c.capacity); }
  int tokens(int b) const { return std::min(cached(b) + c.append, c.capacity); }
  int first_token(int b) const { return c.leftpad ? std::clamp(leftpad[b], 0, tokens(b)) : 0; }
  Slot slot_of(int b, int token) const;
  void place();
  void describe();
  void fill_row(Operand& operand, int b, int row, int heads);
  std::vector<float> rotated(std::vector<float> const& x, int position) const;
  void check_cache();
  void check_head(int b, int head, char const* variant);

  std::mt19937 random_;
};

inline CacheProblem::CacheProblem(CacheCase const& c_, unsigned seed)
    : c(c_),
      cu_q(prefix_sums(c.len_q)),
      rows_q(c.packed ? cu_q.back() + c.slack : c.len_q[0]),
      q(c, c.packed ? 1 : batch(), rows_q, c.heads),
      out(c, c.packed ? 1 : batch(), rows_q, c.heads),
      k(c, rows(), paged() ? c.page_size : c.capacity, c.heads_kv),
      v(c, rows(), paged() ? c.page_size : c.capacity, c.heads_kv),
      new_k(c, batch(), c.append, c.heads_kv),
      new_v(c, batch(), c.append, c.heads_kv),
      lse(int64_t(c.packed ? 1 : batch()) * c.heads * rows_q),
      random_(seed) {
  place();
  for (int b = 0; b < batch(); ++b) {
    for (int i = 0; i < c.len_q[b]; ++i) {
      fill_row(q, c.packed ? 0 : b, i + (c.packed ? cu_q[b] : 0), c.heads);
    }
    for (int t = 0; t < c.append; ++t) {
      fill_row(new_k, b, t, c.heads_kv);
      fill_row(new_v, b, t, c.heads_kv);
    }
    for (int t = first_token(b); t < cached(b); ++t) {
      Slot const at = slot_of(b, t);
      if (!at.exists) { continue; }
      fill_row(k, at.row, at.slot, c.heads_kv);
      fill_row(v, at.row, at.slot, c.heads_kv);
    }
  }
  k_before = k.bytes;
  v_before = v.bytes;
  std::uniform_real_distribution<float> uniform(-1.f, 1.f);
  for (int i = 0; i < batch() * c.heads; ++i) { slopes.push_back(std::abs(uniform(random_))); }
  for (int i = 0; i < c.heads; ++i) { sinks.push_back(2.f * uniform(random_)); }
  int const angles = kPositions * c.rotary_dim / 2, size = size_of(c.dtype);
  cosines.resize(angles * size);
  sines.resize(angles * size);
  for (int i = 0; i < angles; ++i) {
    float const angle = 3.f * uniform(random_);
    put(c.dtype, cosines.data() + i * size, std::cos(angle));
    put(c.dtype, sines.data() + i * size, std::sin(angle));
  }
  describe();
}

inline void CacheProblem::fill_row(Operand& operand, int b, int row, int heads) {
  std::normal_distribution<float> normal(0.f, 1.f);
  for (int i = 0; i < heads * c.head_dim; ++i) {
    put(c.dtype, operand.at(b, row, i / c.head_dim, i % c.head_dim), normal(random_));
  }
}

// Pages and cache rows are shuffled; table entries behind the last token are bad.
inline void CacheProblem::place() {
  for (int b = 0; b < batch(); ++b) { leftpad.push_back(5 * b); }
  rows_of.resize(rows());
  std::iota(rows_of.begin(), rows_of.end(), 0);
  if (paged() || c.batch_idx) { std::shuffle(rows_of.begin(), rows_of.end(), random_); }
  rows_of.resize(paged() ? batch() * columns() : batch());
  for (int i = 0; i < static_cast<int>(rows_of.size()); ++i) {
    int const b = paged() ? i / columns() : i;
    bool const unused = paged() && i % columns() * c.page_size >= tokens(b);
    if (unused || (c.bad_every > 0 && i % c.bad_every == 1)) { rows_of[i] = kBadIds[i % 4]; }
  }
}

inline void CacheProblem::describe() {
  flashattn::FlashFwdParams& fwd = params.fwd;
  fwd.device = flashattn::Device::kCpu;
  fwd.dtype = c.dtype;
  fwd.shape = {
      batch(),   c.heads, c.heads_kv, c.head_dim, *std::max_element(c.len_q.begin(), c.len_q.end()),
      c.capacity};
  q.describe(fwd.q);
  k.describe(fwd.k);
  v.describe(fwd.v);
  out.describe(fwd.out);
  fwd.lse = c.want_lse ? lse.data() : nullptr;
  if (c.packed) { fwd.lengths = {cu_q.data(), nullptr, nullptr, rows_q, 0}; }
  fwd.window = c.window;
  fwd.score = {.scale = c.scale, .softcap = c.softcap};
  if (c.alibi_dims > 0) { fwd.score.alibi_slopes = slopes.data(); }
  if (c.alibi_dims == 2) { fwd.score.alibi_batch_stride = c.heads; }
  if (c.sinks != Sinks::kNone) { fwd.score.sinks = sinks.data(); }
  flashattn::Cache& cache = params.cache;
  if (c.same_length) {
    cache.seqlen = c.cached[0];
  } else {
    cache.seqlens = c.cached.data();
  }
  if (c.leftpad) { cache.leftpad = leftpad.data(); }
  if (paged()) {
    cache.block_table = rows_of.data();
    cache.block_table_stride = cache.table_columns = columns();
    cache.page_size = c.page_size;
    cache.num_pages = rows();
  } else {
    cache.rows = rows();
    if (c.batch_idx) { cache.batch_idx = rows_of.data(); }
  }
  params.split = {c.num_splits, c.split_size};
  flashattn::Append& append = params.append;
  append.seqlen = c.append;
  new_k.describe(append.k);
  new_v.describe(append.v);
  append.rotary_dim = c.rotary_dim;
  append.rotary_cos = c.rotary_dim > 0 ? cosines.data() : nullptr;
  append.rotary_sin = c.rotary_dim > 0 ? sines.data() : nullptr;
  append.max_position = kPositions;
  append.rotary_interleaved = c.interleaved;
}

inline CacheProblem::Slot CacheProblem::slot_of(int b, int token) const {
  int const row = paged() ? rows_of[b * columns() + token / c.page_size] : rows_of[b];
  return {row, paged() ? token % c.page_size : token, row >= 0 && row < rows()};
}

// In double, from the definition: a pair is turned by its angle.
inline std::vector<float> CacheProblem::rotated(std::vector<float> const& x, int position) const {
  std::vector<float> y = x;
  int const half = c.rotary_dim / 2, row = std::min(position, kPositions - 1) * half;
  for (int t = 0; t < half; ++t) {
    int const a = c.interleaved ? 2 * t : t, b = c.interleaved ? 2 * t + 1 : t + half;
    double const cosine = get(c.dtype, cosines.data() + (row + t) * size_of(c.dtype));
    double const sine = get(c.dtype, sines.data() + (row + t) * size_of(c.dtype));
    y[a] = round_to(c.dtype, x[a] * cosine - x[b] * sine);
    y[b] = round_to(c.dtype, x[a] * sine + x[b] * cosine);
  }
  return y;
}

// New tokens are where they belong (rotated keys up to one rounding) and nothing else has changed.
inline void CacheProblem::check_cache() {
  std::vector<unsigned char> const k_got = k.bytes, v_got = v.bytes;
  k.bytes = k_before;  // from here on `k` and `v` hold what is expected
  v.bytes = v_before;
  for (int b = 0; b < batch(); ++b) {
    for (int t = cached(b); t < tokens(b); ++t) {
      Slot const at = slot_of(b, t);
      if (!at.exists) { continue; }
      for (int head = 0; head < c.heads_kv; ++head) {
        std::vector<float> const key = rotated(new_k.row(b, t - cached(b), head), t);
        int64_t const bytes = c.head_dim * size_of(c.dtype);
        int64_t const offset = k.at(at.row, at.slot, head) - k.bytes.data();
        for (int d = 0; d < c.head_dim; ++d) {
          float const got = get(c.dtype, k_got.data() + offset + d * size_of(c.dtype));
          double const ulp = c.dtype == DType::kFloat32 ? 0. : 0x1p-7 * std::abs(key[d]);
          EXPECT_NEAR(got, key[d], c.rotary_dim > 0 ? ulp + 0x1p-21 : 0.);
        }
        std::memcpy(k.bytes.data() + offset, k_got.data() + offset, bytes);
        std::memcpy(v.at(at.row, at.slot, head), new_v.at(b, t - cached(b), head), bytes);
      }
    }
  }
  EXPECT_TRUE(k.bytes == k_got);
  EXPECT_TRUE(v.bytes == v_got);
}

inline void CacheProblem::check() {
  for (flashattn::cpu::Variant const& variant : flashattn::cpu::variants()) {
    run(variant);
    check_cache();
    for (int i = 0; i < batch() * c.heads; ++i) {
      check_head(i / c.heads, i % c.heads, variant.name);
    }
    EXPECT_TRUE(std::all_of(out.bytes.begin(), out.bytes.end(), [](int x) { return x == 0xff; }));
    EXPECT_EQ(lse, std::vector<float>(lse.size(), Problem::kUntouched));
  }
}

// Puts back what it finds right, like Problem::check_head.
inline void CacheProblem::check_head(int b, int head, char const* variant) {
  std::vector<std::vector<float>> keys, values;
  bool const no_keys = !paged() && !slot_of(b, 0).exists;
  for (int t = first_token(b); t < (no_keys ? 0 : tokens(b)); ++t) {
    Slot const at = slot_of(b, t);
    int const head_kv = head / (c.heads / c.heads_kv);
    keys.push_back(at.exists ? k.row(at.row, at.slot, head_kv) : std::vector<float>());
    values.push_back(at.exists ? v.row(at.row, at.slot, head_kv) : std::vector<float>());
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
  bool const in_order = c.window.left >= 0 || c.window.right >= 0;
  ErrorMeter meter(c.dtype, c.softcap > 0.f);
  for (p.row = 0; p.row < p.len_q; ++p.row) {
    int const row = p.row + (c.packed ? cu_q[b] : 0), batch_index = c.packed ? 0 : b;
    p.q = rotated(q.row(batch_index, row, head), cached(b) + (in_order ? p.row : 0));
    float* const l =
        c.want_lse ? &lse[(int64_t(batch_index) * c.heads + head) * rows_q + row] : nullptr;
    meter.add(p, out.row(batch_index, row, head), l);
    std::memset(out.at(batch_index, row, head), 0xff, c.head_dim * size_of(c.dtype));
    if (l != nullptr) { *l = Problem::kUntouched; }
  }
  meter.check(std::string(variant) + " sequence " + std::to_string(b) + " head " +
              std::to_string(head));
}

}  // namespace cpu_test
