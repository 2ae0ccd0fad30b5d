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

// The part of a range of panels that lies in panels [begin, end).
BlockRange intersection(BlockRange const& range, int begin, int end) {
  int const first = std::max(range.begin, begin);
  int const last = std::max(first, std::min(range.end, end));
  return {first, last, std::clamp(range.clean_begin, first, last),
          std::clamp(range.clean_end, first, last)};
}

}  // namespace

QueryTile::QueryTile(Call const& call, WorkTile const& tile)
    : call_(call),
      seq_(sequence_info(call.params.shape, call.params.lengths, tile.batch)),
      band_(visible_band(seq_.len_q, seq_.len_k, call.params.window)),
      first_head_(tile.head * call.row_map.pack()),
      head_kv_(first_head_ / (call.params.shape.heads / call.params.shape.heads_kv)) {
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
  int const block_n = block_keys(call_.params.shape.head_dim);
  BlockRange const blocks = visible_blocks(band_, token(0), token(rows_ - 1), block_n);
  for (int block = blocks.begin; block < blocks.end; ++block) {
    attend_to_block(pack_block(block));
  }
}

// Rows of K and V past the sequence's last key are not read; their packed words are 0.
KeyBlock QueryTile::pack_block(int block) {
  FlashFwdParams const& p = call_.params;
  int const dim = p.shape.head_dim, first_key = block * block_keys(dim);
  int const keys = std::min(block_keys(dim), seq_.len_k - first_key);
  int64_t const k = key_offset(p.k, seq_, head_kv_) + first_key * p.k.row_stride;
  int64_t const v = key_offset(p.v, seq_, head_kv_) + first_key * p.v.row_stride;
  call_.kernels.pack_keys(advance(p.k.data, k, call_.item_size), p.k.row_stride, keys, dim, k_);
  call_.kernels.pack_values(advance(p.v.data, v, call_.item_size), p.v.row_stride, keys, dim, v_);
  return {first_key, k_, v_};
}

// Within the block, each group of rows takes only the panels that one of its rows can see.
void QueryTile::attend_to_block(KeyBlock const& block) {
  int const panel = call_.kernels.panel, dim = call_.params.shape.head_dim;
  int const first_panel = block.first_key / panel;
  int const end_panel = first_panel + block_keys(dim) / panel;
  for (int row = 0; row < rows_; row += call_.kernels.group_rows) {
    RowGroup const group = row_group(row);
    int const first = token(row), last = token(row + group.rows - 1);
    BlockRange const panels =
        intersection(visible_blocks(band_, first, last, panel), first_panel, end_panel);
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
  FlashFwdParams const& p = call_.params;
  for (int row = 0; row < rows_; ++row) {
    float const sum = call_.kernels.lane_sum(sums_ + int64_t(row) * call_.kernels.lanes);
    SoftmaxResult const result =
        finish_softmax(state_[row].maximum, sum, call_.mod.exponent_scale, sink(head(row)));
    int64_t const offset = query_offset(p.out, seq_, head(row)) + token(row) * p.out.row_stride;
    void* const out = advance(p.out.data, offset, call_.item_size);
    if (sum == 0.f) {
      // A row without keys. By selection: in `acc`, 0 may have met a neighbour's value of NaN.
      std::memset(out, 0, int64_t(p.shape.head_dim) * call_.item_size);
    } else {
      float const* const acc = acc_ + int64_t(row) * call_.padded_dim();
      call_.kernels.store_row(acc, result.factor, p.shape.head_dim, out);
    }
    if (p.lse != nullptr) {
      p.lse[lse_offset(p.shape, p.lengths, seq_, head(row)) + token(row)] = result.lse;
    }
  }
}

float QueryTile::sink(int head) const {
  Score const& score = call_.params.score;
  if (score.sinks == nullptr) { return -kInfinity; }
  auto const* const halves = static_cast<uint16_t const*>(score.sinks);
  switch (score.sinks_dtype) {
    case DType::kFloat16: return float16_to_float(halves[head]);
    case DType::kBFloat16: return bfloat16_to_float(halves[head]);
    default: return static_cast<float const*>(score.sinks)[head];
  }
}

}  // namespace flashattn::cpu
