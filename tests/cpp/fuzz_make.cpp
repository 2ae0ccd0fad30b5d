// From bytes to parameters.
#include <algorithm>

#include "fuzz_calls.h"

namespace fuzz {
namespace {

using namespace flashattn;

void* nowhere(Bytes& bytes) {
  if (!bytes.one_in(64)) { return reinterpret_cast<void*>(uintptr_t(1) << 20); }
  return reinterpret_cast<void*>(bytes.raw(1) % 32);
}

template <class T>
T* optional(Bytes& bytes) {
  return bytes.raw(1) % 3 == 1 ? static_cast<T*>(nowhere(bytes)) : nullptr;
}

// Wraps, as the factors may come from the edges of their types.
int64_t times(int64_t a, int64_t b) { return static_cast<int64_t>(uint64_t(a) * uint64_t(b)); }

// (batch, row, head, dim) or (batch, head, row, dim), with or without gaps.
template <class Pointer>
void make_operand(Bytes& bytes, Strided<Pointer>& t, int64_t rows, int64_t heads, int64_t dim) {
  int64_t const inner = dim + 8 * bytes.between(0, 1);
  bool const rows_first = bytes.raw(1) % 4 != 1;
  t.data = nowhere(bytes);
  t.row_stride = bytes.stride(rows_first ? times(inner, heads) : inner);
  t.head_stride = bytes.stride(rows_first ? inner : times(inner, rows));
  t.batch_stride = bytes.stride(times(times(inner, heads), rows));
}

Shape make_shape(Bytes& bytes) {
  int const heads_kv = bytes.between(1, 3);
  int const group = bytes.one_in(8) ? bytes.between(1, 70) : bytes.between(1, 4);
  Shape shape;
  shape.batch = bytes.number(bytes.between(0, 4));
  shape.heads = bytes.number(heads_kv * group);
  shape.heads_kv = bytes.number(heads_kv);
  shape.head_dim = bytes.number(8 * (bytes.one_in(8) ? bytes.between(1, 32) : bytes.between(1, 8)));
  shape.seqlen_q = bytes.number(bytes.one_in(8) ? bytes.between(0, 90) : bytes.between(0, 6));
  shape.seqlen_k = bytes.number(bytes.one_in(8) ? bytes.between(0, 600) : bytes.between(0, 40));
  return shape;
}

int side(Bytes& bytes) { return bytes.number(bytes.raw(1) % 2 == 0 ? -1 : bytes.between(0, 20)); }

Score make_score(Bytes& bytes, int heads) {
  Score score;
  score.scale = bytes.real(0.25f);
  score.softcap = bytes.real(bytes.raw(1) % 4 == 1 ? 5.f : 0.f);
  score.alibi_slopes = optional<float>(bytes);
  score.alibi_batch_stride = bytes.stride(bytes.raw(1) % 2 == 0 ? 0 : heads);
  score.sinks = optional<void>(bytes);
  score.sinks_dtype = bytes.choice<DType>(3);
  return score;
}

}  // namespace

void make(Bytes& bytes, FlashFwdParams& p) {
  p.device = bytes.one_in(4) ? bytes.choice<Device>(2) : Device::kCpu;
  p.dtype = bytes.choice<DType>(3);
  Shape const shape = p.shape = make_shape(bytes);
  int64_t const rows_q = shape.seqlen_q, rows_k = shape.seqlen_k;
  make_operand(bytes, p.q, rows_q, shape.heads, shape.head_dim);
  make_operand(bytes, p.k, rows_k, shape.heads_kv, shape.head_dim);
  make_operand(bytes, p.v, rows_k, shape.heads_kv, shape.head_dim);
  make_operand(bytes, p.out, rows_q, shape.heads, shape.head_dim);
  p.lse = optional<float>(bytes);
  if ((p.lengths.cu_seqlens_q = optional<int>(bytes)) != nullptr) {
    p.lengths.total_q = bytes.number(bytes.between(0, 100));
  }
  if ((p.lengths.cu_seqlens_k = optional<int>(bytes)) != nullptr) {
    p.lengths.total_k = bytes.number(bytes.between(0, 200));
  }
  p.lengths.seqused_k = optional<int>(bytes);
  p.window = {side(bytes), side(bytes)};
  p.score = make_score(bytes, shape.heads);
}

void make(Bytes& bytes, FlashSplitkvParams& p) {
  make(bytes, p.fwd);
  if (!bytes.one_in(64)) {
    p.fwd.lengths.cu_seqlens_k = p.fwd.lengths.seqused_k = nullptr;
    p.fwd.lengths.total_k = 0;
  }
  int const capacity = p.fwd.shape.seqlen_k;
  Cache& cache = p.cache;
  cache.seqlens = optional<int>(bytes);
  cache.seqlen = bytes.number(bytes.between(0, std::clamp(capacity, 0, 600)));
  cache.leftpad = optional<int>(bytes);
  if (bytes.raw(1) % 2 == 0) {
    cache.rows = bytes.number(p.fwd.shape.batch);
    cache.batch_idx = optional<int>(bytes);
  } else {
    cache.page_size = bytes.number(bytes.between(1, 20));
    int64_t const pages =
        cache.page_size > 0 ? (int64_t(capacity) + cache.page_size - 1) / cache.page_size : 1;
    cache.table_columns = bytes.number(static_cast<int>(pages));
    cache.block_table = static_cast<int*>(nowhere(bytes));
    cache.block_table_stride = bytes.stride(cache.table_columns);
    cache.num_pages = bytes.number(bytes.between(0, 12));
    make_operand(bytes, p.fwd.k, cache.page_size, p.fwd.shape.heads_kv, p.fwd.shape.head_dim);
    make_operand(bytes, p.fwd.v, cache.page_size, p.fwd.shape.heads_kv, p.fwd.shape.head_dim);
  }
  Append& append = p.append;
  append.seqlen = bytes.number(bytes.raw(1) % 2 == 0 ? 0 : bytes.between(0, 5));
  make_operand(bytes, append.k, append.seqlen, p.fwd.shape.heads_kv, p.fwd.shape.head_dim);
  make_operand(bytes, append.v, append.seqlen, p.fwd.shape.heads_kv, p.fwd.shape.head_dim);
  if (bytes.raw(1) % 3 == 1) {
    append.rotary_dim = bytes.number(16 * bytes.between(1, 4));
    append.rotary_cos = nowhere(bytes);
    append.rotary_sin = nowhere(bytes);
    append.max_position = bytes.number(bytes.between(1, 100));
    append.rotary_interleaved = bytes.raw(1) % 2 == 0;
  }
  switch (bytes.raw(1) % 3) {
    case 1: p.split.num_splits = bytes.number(bytes.between(0, 9)); break;
    case 2: p.split.split_size = bytes.number(64 * bytes.between(0, 3)); break;
    default: break;
  }
}

void make(Bytes& bytes, FlashCombineParams& p) {
  p.device = bytes.one_in(8) ? Device::kCuda : Device::kCpu;
  p.splits = bytes.number(bytes.between(0, 5));
  p.batch = bytes.number(bytes.between(0, 3));
  p.heads = bytes.number(bytes.between(0, 4));
  p.seqlen = bytes.number(bytes.between(0, 20));
  p.head_dim = bytes.number(bytes.between(1, 70));
  p.partial_dtype = bytes.choice<DType>(3);
  make_operand(bytes, p.out_partial, p.seqlen, p.heads, p.head_dim);
  p.out_split_stride = bytes.stride(times(p.batch, p.out_partial.batch_stride));
  p.lse_partial = static_cast<float*>(nowhere(bytes));
  p.lse_row_stride = bytes.stride(1);
  p.lse_head_stride = bytes.stride(p.seqlen);
  p.lse_batch_stride = bytes.stride(times(p.heads, p.seqlen));
  p.lse_split_stride = bytes.stride(times(times(p.heads, p.seqlen), p.batch));
  p.out_dtype = bytes.choice<DType>(3);
  make_operand(bytes, p.out, p.seqlen, p.heads, p.head_dim);
  p.lse = optional<float>(bytes);
  p.sequences = optional<int>(bytes);
}

}  // namespace fuzz
