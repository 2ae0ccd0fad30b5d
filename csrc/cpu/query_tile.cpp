#include "cpu/query_tile.h"

#include <algorithm>
#include <cstring>

#include "core/online_softmax.h"
#include "cpu/half.h"

namespace flashattn::cpu {
namespace {

template <class Pointer>
Pointer advance(Pointer data, int64_t elements, int item_size) {
  using Byte = std::conditional_t<std::is_same_v<Pointer, void*>, char*, char const*>;
  return static_cast<Byte>(data) + elements * item_size;
}

// The part of a range of panels that holds keys [first_key, end_key).
BlockRange panels_of_keys(BlockRange const& range, int first_key, int end_key, int panel) {
  int const first = std::max(range.begin, first_key / panel);
  int const last = std::max(first, std::min(range.end, ceil_div(end_key, panel)));
  int const all = std::max(range.clean_begin, ceil_div(first_key, panel));
  int const clean = std::clamp(all, first, last);
  int const clean_end = std::clamp(std::min(range.clean_end, end_key / panel), clean, last);
  return {first, last, clean, clean_end};
}

SequenceInfo sequence_of(Call const& call, int batch) {
  return call.over_cache != nullptr ? cache_sequence_info(*call.over_cache, batch)
                                    : sequence_info(call.params.shape, call.params.lengths, batch);
}

}  // namespace

QueryTile::QueryTile(Call const& call, WorkTile const& tile, int split)
    : call_(call),
      seq_(sequence_of(call, tile.batch)),
      band_(visible_band(seq_.len_q, seq_.len_k, call.params.window)),
      first_head_(tile.head * call.row_map.pack()),
      head_kv_(first_head_ / (call.params.shape.heads / call.params.shape.heads_kv)),
      split_(split),
      page_size_(call.over_cache != nullptr ? std::max(call.over_cache->cache.page_size, 1) : 1) {
  int64_t const first = int64_t(tile.m_block) * call.tile_tokens;
  if (first < 0 || first >= seq_.len_q) { return; }
  first_token_ = static_cast<int>(first);
  int const tokens = std::min(call.tile_tokens, seq_.len_q - first_token_);
  rows_ = call.row_map.rows(tokens);
  padded_rows_ = ceil_div(rows_, call.kernels.group_rows) * call.kernels.group_rows;
}

void QueryTile::run() {
  if (rows_ == 0) { return; }
  allocate();
  load_queries();
  attend_to_all_keys();
  store_output();
}

void QueryTile::allocate() {
  std::size_t const rows = padded_rows_, dim = call_.padded_dim();
  std::size_t const block = block_keys(call_.params.shape.head_dim);
  std::size_t const q = rows * call_.words(), k = block * call_.words();
  std::size_t const v = block / call_.kernels.pair * dim;
  std::size_t const acc = rows * dim, sums = rows * call_.kernels.lanes;

  Workspace& workspace = Workspace::of_this_thread();
  workspace.reset((q + k + v + acc + sums) * sizeof(float) + rows * sizeof(RowState) +
                  6 * Workspace::kAlignment);
  q_ = workspace.take<Word>(q);
  k_ = workspace.take<Word>(k);
  v_ = workspace.take<Word>(v);
  acc_ = workspace.take<float>(acc);
  sums_ = workspace.take<float>(sums);
  state_ = workspace.take<RowState>(rows);
  std::fill_n(acc_, acc, 0.f);
  std::fill_n(sums_, sums, 0.f);
}

void QueryTile::load_queries() {
  FlashFwdParams const& p = call_.params;
  int const group = call_.kernels.group_rows, words = call_.words();
  int const last_group = padded_rows_ - group;
  std::fill_n(q_ + int64_t(last_group) * words, group * words, 0.f);
  for (int row = 0; row < padded_rows_; ++row) {
    // Padding rows repeat the bounds of the last row.
    int const real = std::min(row, rows_ - 1), i = token(real);
    float const* const slopes = p.score.alibi_slopes;
    state_[row] = {
        .key_begin = band_.begin(i),
        .key_end = band_.end(i),
        .diagonal = i + seq_.len_k - seq_.len_q,
        .slope = slopes ? slopes[seq_.batch * p.score.alibi_batch_stride + head(real)] : 0.f,
        .maximum = -kInfinity,
    };
    if (row >= rows_) { continue; }
    int64_t const offset = query_offset(p.q, seq_, head(row)) + i * p.q.row_stride;
    Word* const to = q_ + int64_t(row - row % group) * words + row % group;
    call_.kernels.pack_query_row(advance(p.q.data, offset, call_.item_size), p.shape.head_dim, to);
  }
}

void QueryTile::attend_to_all_keys() {
  int const block_n = call_.block_n();
  BlockRange const blocks = take_split(visible_blocks(band_, token(0), token(rows_ - 1), block_n),
                                       call_.split, split_, block_n);
  for (int block = blocks.begin; block < blocks.end; ++block) {
    BlockRows const rows = find_rows(block * block_n);
    KeyBlock const keys = pack_block(rows);
    if (rows.holes) {
      attend_between_holes(keys, rows);
    } else {
      attend_to_keys(keys, rows.first_key, rows.first_key + block_n);
    }
  }
}

// Rows outside of the band of visible keys are left out: nothing there is read.
BlockRows QueryTile::find_rows(int first_key) const {
  FlashFwdParams const& p = call_.params;
  Cache const cache = call_.over_cache != nullptr ? call_.over_cache->cache : Cache{};
  int const begin = band_.begin(token(0)), end = band_.end(token(rows_ - 1));
  BlockRows rows;
  rows.first_key = first_key;
  rows.count = std::min(call_.block_n(), seq_.len_k - first_key);
  rows.holes = false;
  for (int i = 0; i < rows.count; ++i) {
    int const key = first_key + i;
    rows.k[i] = rows.v[i] = nullptr;
    if (key < begin || key >= end) { continue; }
    CacheSlot const at = cache_slot(cache, page_size_, seq_, seq_.k_begin + key);
    if (at.index < 0) {
      rows.holes = true;
      continue;
    }
    auto const row_of = [&](Input const& t) {
      int64_t const offset =
          at.index * t.batch_stride + at.slot * t.row_stride + head_kv_ * t.head_stride;
      return advance(t.data, offset, call_.item_size);
    };
    rows.k[i] = row_of(p.k);
    rows.v[i] = row_of(p.v);
  }
  return rows;
}

KeyBlock QueryTile::pack_block(BlockRows const& rows) {
  int const dim = call_.params.shape.head_dim;
  call_.kernels.pack_keys(rows.k, rows.count, dim, k_);
  call_.kernels.pack_values(rows.v, rows.count, dim, v_);
  return {rows.first_key, k_, v_};
}

// Each run of keys that exist is attended to as if nothing else were visible.
void QueryTile::attend_between_holes(KeyBlock const& block, BlockRows const& rows) {
  for (int begin = 0, end = 0; begin < rows.count; begin = end + 1) {
    for (end = begin; end < rows.count && rows.k[end] != nullptr; ++end) {}
    if (end == begin) { continue; }
    show_keys(rows.first_key + begin, rows.first_key + end);
    attend_to_keys(block, rows.first_key + begin, rows.first_key + end);
  }
  show_keys(0, seq_.len_k);
}

// Makes rows see nothing outside of [first_key, end_key).
void QueryTile::show_keys(int first_key, int end_key) {
  for (int row = 0; row < padded_rows_; ++row) {
    int const i = token(std::min(row, rows_ - 1));
    state_[row].key_begin = std::max(band_.begin(i), first_key);
    state_[row].key_end = std::min(band_.end(i), end_key);
  }
}

// Within the block, each group of rows takes only the panels that one of its rows can see.
void QueryTile::attend_to_keys(KeyBlock const& block, int first_key, int end_key) {
  int const panel = call_.kernels.panel, dim = call_.params.shape.head_dim;
  for (int row = 0; row < rows_; row += call_.kernels.group_rows) {
    RowGroup const group = row_group(row);
    int const first = token(row), last = token(row + group.rows - 1);
    BlockRange const panels =
        panels_of_keys(visible_blocks(band_, first, last, panel), first_key, end_key, panel);
    if (panels.count() > 0) { call_.kernels.attend(group, block, panels, dim, call_.mod); }
  }
}

RowGroup QueryTile::row_group(int first_row) const {
  return {
      .rows = std::min(call_.kernels.group_rows, rows_ - first_row),
      .q = q_ + int64_t(first_row) * call_.words(),
      .state = state_ + first_row,
      .sums = sums_ + int64_t(first_row) * call_.kernels.lanes,
      .acc = acc_ + int64_t(first_row) * call_.padded_dim(),
  };
}

void QueryTile::store_output() const {
  int const dim = call_.params.shape.head_dim;
  bool const part = call_.parts.out != nullptr;
  auto const store_row = part ? call_.parts.store_row : call_.kernels.store_row;
  for (int row = 0; row < rows_; ++row) {
    float const sum = call_.kernels.lane_sum(sums_ + int64_t(row) * call_.kernels.lanes);
    SoftmaxResult const result =
        finish_softmax(state_[row].maximum, sum, call_.mod.exponent_scale, sink(head(row)));
    OutputRow const to = output_row(row);
    if (sum == 0.f) {
      // A row without keys. By selection: in `acc`, 0 may have met a neighbour's value of NaN.
      std::memset(to.out, 0, dim * (part ? sizeof(float) : std::size_t(call_.item_size)));
    } else {
      store_row(acc_ + int64_t(row) * call_.padded_dim(), result.factor, dim, to.out);
    }
    if (to.lse != nullptr) { *to.lse = result.lse; }
  }
}

OutputRow QueryTile::output_row(int row) const {
  FlashFwdParams const& p = call_.params;
  int64_t const lse = lse_offset(p.shape, p.lengths, seq_, head(row)) + token(row);
  if (call_.parts.out != nullptr) {
    int64_t const part_row = split_ * call_.parts.rows + lse;
    return {call_.parts.out + part_row * p.shape.head_dim, call_.parts.lse + part_row};
  }
  int64_t const offset = query_offset(p.out, seq_, head(row)) + token(row) * p.out.row_stride;
  return {advance(p.out.data, offset, call_.item_size), p.lse != nullptr ? p.lse + lse : nullptr};
}

// Of the splits, only the first one counts the sink.
float QueryTile::sink(int head) const {
  Score const& score = call_.params.score;
  if (score.sinks == nullptr || split_ > 0) { return -kInfinity; }
  auto const* const halves = static_cast<uint16_t const*>(score.sinks);
  switch (score.sinks_dtype) {
    case DType::kFloat16: return float16_to_float(halves[head]);
    case DType::kBFloat16: return bfloat16_to_float(halves[head]);
    default: return static_cast<float const*>(score.sinks)[head];
  }
}

}  // namespace flashattn::cpu
