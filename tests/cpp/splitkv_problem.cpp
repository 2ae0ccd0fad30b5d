#include "splitkv_problem.h"

#include <climits>
#include <cmath>

#include "rotary_reference.h"

namespace gpu {
namespace {

enum Kind { kQuery, kKey, kValue, kNewKey, kNewValue };

constexpr int kTableGap = 3;  // between the rows of the table

int bounded(int x, int low, int high) { return std::min(std::max(x, low), high); }

// An id that no page has, a different one each time.
int no_page(int i, int pages) {
  int const ids[] = {-1, pages, INT_MAX, INT_MIN, pages + 1000000};
  return ids[i % 5];
}

// A number of variance 1 that depends on nothing but the key.
float uniform_noise(uint64_t key) {
  key += 0x9e3779b97f4a7c15;
  key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9;
  key = (key ^ key >> 27) * 0x94d049bb133111eb;
  return (static_cast<float>((key ^ key >> 31) >> 40) * 0x1p-23f - 1.f) * 1.7320508f;
}

}  // namespace

CacheProblem::CacheProblem(CacheCase const& c)
    : case_(c),
      random_(1),
      q_layout_(c.packed_q ? 1 : batch(), c.packed_q ? sum(c.len_q) + c.slack : c.len_q[0], c.heads,
                c.head_dim, c.gap, Order::kRowsFirst),
      k_layout_(cache_layout(c.gap, c.order_k)),
      v_layout_(cache_layout(c.gap + 8, c.order_v)),
      new_layout_(batch(), c.append, c.heads_kv, c.head_dim, c.gap, Order::kHeadsFirst),
      results_(c.dtype, q_layout_, c.packed_q, c.len_q, c.want_lse),
      score_(c, random_) {
  make_table();
  if (c.rotary_dim > 0) { make_rotary_tables(); }
  fill_cache();
  expect_append();
  std::vector<int> const new_rows(batch(), c.append);
  q_ = rows_of(q_layout_, c.packed_q, c.len_q, kQuery);
  new_k_ = rows_of(new_layout_, false, new_rows, kNewKey);
  new_v_ = rows_of(new_layout_, false, new_rows, kNewValue);
  cu_q_ = DeviceVector<int>(prefix_sums(c.len_q));
  cached_ = DeviceVector<int>(c.cached);
  leftpad_ = DeviceVector<int>(c.leftpad);
  batch_idx_ = DeviceVector<int>(c.batch_idx);
  fill_params();
  allocate_workspace();
}

int CacheProblem::columns() const {
  if (case_.page_size == 0) { return 0; }
  return (case_.capacity + case_.page_size - 1) / case_.page_size + case_.spare_columns;
}

int CacheProblem::rows() const {
  return case_.page_size > 0 ? batch() * columns() + 3 : batch() + 2;
}

Layout CacheProblem::cache_layout(int gap, Order order) const {
  int const slots = case_.page_size > 0 ? case_.page_size : case_.capacity;
  return {rows(), slots, case_.heads_kv, case_.head_dim, gap, order};
}

int CacheProblem::cached(int b) const {
  return bounded(case_.cached[case_.same_length ? 0 : b], 0, case_.capacity);
}

int CacheProblem::tokens(int b) const { return std::min(cached(b) + case_.append, case_.capacity); }

int CacheProblem::leftpad(int b) const {
  return case_.leftpad.empty() ? 0 : bounded(case_.leftpad[b], 0, tokens(b));
}

CacheProblem::Slot CacheProblem::slot_of(int b, int token) const {
  if (case_.page_size == 0) {
    int const row = case_.batch_idx.empty() ? b : case_.batch_idx[b];
    return {row, token, row >= 0 && row < rows()};
  }
  int const page = table_host_[b * (columns() + kTableGap) + token / case_.page_size];
  return {page, token % case_.page_size, page >= 0 && page < rows()};
}

// Each sequence has its own pages, in random order, in the columns that hold its tokens.
void CacheProblem::make_table() {
  if (case_.page_size == 0) { return; }
  std::vector<int> pages(rows());
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random_);
  int const stride = columns() + kTableGap;
  for (int i = 0; i < batch() * stride - kTableGap; ++i) {
    int const b = i / stride, first_token = i % stride * case_.page_size;
    bool const used = first_token < tokens(b) && first_token + case_.page_size > leftpad(b);
    table_host_.push_back(used ? pages[b * columns() + i % stride] : no_page(i, rows()));
  }
  if (case_.share_first_page) {
    for (int b = 1; b < batch(); ++b) { table_host_[b * stride] = table_host_[0]; }
  }
  for (auto [b, column] : case_.holes) {
    table_host_[b * stride + column] = no_page(b + column, rows());
  }
  table_ = DeviceVector<int>(table_host_);
}

void CacheProblem::make_rotary_tables() {
  std::vector<uint16_t> cosines, sines;
  auto const add = [this](double x, std::vector<uint16_t>& bits, std::vector<float>& host) {
    bits.push_back(to_bits(case_.dtype, static_cast<float>(x)));
    host.push_back(from_bits(case_.dtype, bits.back()));
  };
  for (int position = 0; position < case_.max_position; ++position) {
    for (int t = 0; t < case_.rotary_dim / 2; ++t) {
      double const angle = position * std::pow(100., -2. * t / case_.rotary_dim);
      add(std::cos(angle), cosines, cosines_host_);
      add(std::sin(angle), sines, sines_host_);
    }
  }
  cosines_ = DeviceVector<uint16_t>(cosines);
  sines_ = DeviceVector<uint16_t>(sines);
}

std::vector<float> CacheProblem::noise(int kind, int b, int row, int head) const {
  uint64_t const content = case_.content.empty() ? b : case_.content[b];
  std::vector<float> values(case_.head_dim);
  for (int d = 0; d < case_.head_dim; ++d) {
    uint64_t const key = (((content * 8 + kind) * 65536 + row) * 256 + head) * 256 + d;
    float const x = case_.magnitude * uniform_noise(key);
    values[d] = from_bits(case_.dtype, to_bits(case_.dtype, x));
  }
  return values;
}

void CacheProblem::put(std::vector<uint16_t>& bits, Layout const& layout, int b, int row, int head,
                       std::vector<float> const& values) const {
  int64_t const at = layout.at(b, row, head, 0);
  for (int d = 0; d < layout.dim; ++d) { bits[at + d] = to_bits(case_.dtype, values[d]); }
}

DeviceVector<uint16_t> CacheProblem::rows_of(Layout const& layout, bool packed,
                                             std::vector<int> const& lengths, int kind) const {
  std::vector<uint16_t> bits(layout.size(), kNanPattern);
  std::vector<int> const begins = prefix_sums(lengths);
  for (int b = 0; b < batch(); ++b) {
    for (int i = 0; i < lengths[b] * layout.heads; ++i) {
      int const row = i / layout.heads, head = i % layout.heads;
      put(bits, layout, packed ? 0 : b, packed ? begins[b] + row : row, head,
          noise(kind, b, row, head));
    }
  }
  return DeviceVector<uint16_t>(bits);
}

void CacheProblem::fill_cache() {
  k_expected_.assign(k_layout_.size(), kNanPattern);
  v_expected_.assign(v_layout_.size(), kNanPattern);
  for (int b = 0; b < batch(); ++b) {
    for (int token = leftpad(b); token < cached(b); ++token) {
      Slot const at = slot_of(b, token);
      for (int head = 0; at.exists && head < case_.heads_kv; ++head) {
        put(k_expected_, k_layout_, at.row, at.slot, head, noise(kKey, b, token, head));
        put(v_expected_, v_layout_, at.row, at.slot, head, noise(kValue, b, token, head));
      }
    }
  }
  k_ = DeviceVector<uint16_t>(k_expected_);
  v_ = DeviceVector<uint16_t>(v_expected_);
}

std::vector<double> CacheProblem::rotate(std::vector<float> const& head, int position) const {
  if (case_.rotary_dim == 0) { return {head.begin(), head.end()}; }
  int const pairs = case_.rotary_dim / 2;
  int const first = bounded(position, 0, case_.max_position - 1) * pairs;
  auto const row = [&](std::vector<float> const& table) {
    return std::vector<float>(table.begin() + first, table.begin() + first + pairs);
  };
  return oracle::rotated(head, row(cosines_host_), row(sines_host_), case_.interleaved);
}

std::vector<std::vector<float>> CacheProblem::queries(int b, int head) const {
  bool const in_order = case_.window.left >= 0 || case_.window.right >= 0;
  std::vector<std::vector<float>> rows;
  for (int i = 0; i < case_.len_q[b]; ++i) {
    std::vector<float> row;
    for (double x : rotate(noise(kQuery, b, i, head), cached(b) + (in_order ? i : 0))) {
      row.push_back(from_bits(case_.dtype, to_bits(case_.dtype, static_cast<float>(x))));
    }
    rows.push_back(row);
  }
  return rows;
}

void CacheProblem::expect_append() {
  for (int b = 0; b < batch(); ++b) {
    for (int i = 0; i < (tokens(b) - cached(b)) * case_.heads_kv; ++i) {
      int const t = i / case_.heads_kv, head = i % case_.heads_kv, position = cached(b) + t;
      Slot const at = slot_of(b, position);
      if (!at.exists) { continue; }
      put(v_expected_, v_layout_, at.row, at.slot, head, noise(kNewValue, b, t, head));
      std::vector<double> const key = rotate(noise(kNewKey, b, t, head), position);
      int64_t const first = k_layout_.at(at.row, at.slot, head, 0);
      for (int d = 0; d < case_.head_dim; ++d) {
        k_expected_[first + d] = to_bits(case_.dtype, static_cast<float>(key[d]));
        if (d < case_.rotary_dim) { rotated_keys_[first + d] = key[d]; }
      }
    }
  }
}

void CacheProblem::fill_params() {
  CacheCase const& c = case_;
  flashattn::FlashFwdParams& fwd = params_.fwd;
  fwd.device = flashattn::Device::kCuda;
  fwd.dtype = c.dtype;
  fwd.shape = {.batch = batch(),
               .heads = c.heads,
               .heads_kv = c.heads_kv,
               .head_dim = c.head_dim,
               .seqlen_q = c.max_seqlen_q > 0 ? c.max_seqlen_q : longest(c.len_q),
               .seqlen_k = c.capacity};
  fwd.q = input(q_layout_, q_);
  fwd.k = input(k_layout_, k_);
  fwd.v = input(v_layout_, v_);
  results_.describe(fwd);
  if (c.packed_q) {
    fwd.lengths.cu_seqlens_q = cu_q_.data();
    fwd.lengths.total_q = q_layout_.rows;
  }
  fwd.window = c.window;
  score_.describe(fwd.score);
  flashattn::Cache& cache = params_.cache;
  if (c.same_length) {
    cache.seqlen = c.cached[0];
  } else {
    cache.seqlens = cached_.data();
  }
  cache.leftpad = leftpad_.data();
  cache.batch_idx = batch_idx_.data();
  if (c.page_size > 0) {
    cache.block_table = table_.data();
    cache.block_table_stride = columns() + kTableGap;
    cache.table_columns = columns();
    cache.page_size = c.page_size;
    cache.num_pages = rows();
  } else {
    cache.rows = rows();
  }
  params_.append = {.k = input(new_layout_, new_k_),
                    .v = input(new_layout_, new_v_),
                    .seqlen = c.append,
                    .rotary_cos = cosines_.data(),
                    .rotary_sin = sines_.data(),
                    .rotary_dim = c.rotary_dim,
                    .max_position = c.rotary_dim > 0 ? c.max_position : 0,
                    .rotary_interleaved = c.interleaved};
  params_.split = {.num_splits = c.num_splits, .split_size = c.split_size};
}

void CacheProblem::allocate_workspace() {
  size_t const bytes = flashattn::splitkv_workspace_size(params_);
  if (bytes == 0) { return; }
  workspace_ =
      DeviceVector<uint8_t>(std::vector<uint8_t>(bytes + kWorkspaceGuard, kWorkspacePattern));
  params_.workspace = workspace_.data();
}

}  // namespace gpu
