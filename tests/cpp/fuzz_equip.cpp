// From parameters to memory for them.
#include "core/split_plan.h"
#include "fuzz_calls.h"

namespace fuzz {
namespace {

using namespace flashattn;

constexpr double kMostWork = 1 << 20;          // multiply-adds
constexpr double kMostPartElements = 1 << 18;  // that the CPU backend allocates for splits

template <class Pointer>
void equip(Memory& memory, Strided<Pointer>& t, int64_t batches, int64_t rows, int64_t heads,
           int64_t dim, DType dtype) {
  t.data =
      memory.elements({{batches, t.batch_stride}, {rows, t.row_stride}, {heads, t.head_stride}},
                      size_of(dtype), static_cast<int>(dim));
}

void equip_score(Memory& memory, Score& score, Shape const& shape) {
  if (score.alibi_slopes != nullptr) {
    score.alibi_slopes = static_cast<float*>(memory.elements(
        {{shape.batch, score.alibi_batch_stride}, {shape.heads, 1}}, sizeof(float), 1));
  }
  if (score.sinks != nullptr) {
    score.sinks = memory.elements({{shape.heads, 1}}, size_of(score.sinks_dtype), 1);
  }
}

// q, out, lse, cu_seqlens_q and what changes a score. Out comes last, for its neighbours.
void equip_queries(Memory& memory, FlashFwdParams& p) {
  Shape const& shape = p.shape;
  bool const packed = p.lengths.cu_seqlens_q != nullptr;
  int64_t const batches = packed ? 1 : shape.batch;
  int64_t const rows = packed ? p.lengths.total_q : shape.seqlen_q;
  if (packed) { p.lengths.cu_seqlens_q = memory.ints(int64_t(shape.batch) + 1, p.lengths.total_q); }
  if (p.lse != nullptr) {
    p.lse =
        static_cast<float*>(memory.elements({{batches * rows * shape.heads, 1}}, sizeof(float), 1));
  }
  equip_score(memory, p.score, shape);
  equip(memory, p.q, batches, rows, shape.heads, shape.head_dim, p.dtype);
  equip(memory, p.out, batches, rows, shape.heads, shape.head_dim, p.dtype);
}

double work_of(FlashFwdParams const& p) {
  double const tiles = double(p.shape.batch) * p.shape.heads;
  return (double(query_rows(p)) * p.shape.heads + tiles) * (p.shape.seqlen_k + 1.0) *
         p.shape.head_dim;
}

int splits_of(FlashSplitkvParams const& p) {
  return p.split.split_size > 0 ? p.fwd.shape.seqlen_k / p.split.split_size + 1 : kMaxSplits;
}

}  // namespace

bool equip(Memory& memory, FlashFwdParams& p) {
  Shape const& shape = p.shape;
  bool const packed = p.lengths.cu_seqlens_k != nullptr;
  if (work_of(p) + double(packed ? p.lengths.total_k : 0) * query_rows(p) > kMostWork) {
    return false;
  }
  int64_t const batches = packed ? 1 : shape.batch;
  int64_t const rows = packed ? p.lengths.total_k : shape.seqlen_k;
  if (packed) { p.lengths.cu_seqlens_k = memory.ints(int64_t(shape.batch) + 1, p.lengths.total_k); }
  if (p.lengths.seqused_k != nullptr) {
    p.lengths.seqused_k = memory.ints(shape.batch, shape.seqlen_k);
  }
  equip(memory, p.k, batches, rows, shape.heads_kv, shape.head_dim, p.dtype);
  equip(memory, p.v, batches, rows, shape.heads_kv, shape.head_dim, p.dtype);
  equip_queries(memory, p);
  return memory.ok();
}

bool equip(Memory& memory, FlashSplitkvParams& p) {
  Shape const& shape = p.fwd.shape;
  Cache& cache = p.cache;
  double const parts = double(splits_of(p)) * query_rows(p.fwd) * shape.heads * shape.head_dim;
  if (work_of(p.fwd) > kMostWork || parts > kMostPartElements) { return false; }
  int const capacity = shape.seqlen_k, batch = shape.batch;
  if (cache.seqlens != nullptr) { cache.seqlens = memory.ints(batch, capacity); }
  if (cache.leftpad != nullptr) { cache.leftpad = memory.ints(batch, capacity); }
  if (cache.batch_idx != nullptr) { cache.batch_idx = memory.ints(batch, cache.rows); }
  if (cache.paged()) {
    cache.block_table = static_cast<int const*>(memory.elements(
        {{batch, cache.block_table_stride}, {cache.table_columns, 1}}, sizeof(int), 1));
  }
  int64_t const rows = cache.paged() ? cache.page_size : capacity;
  int64_t const batches = cache.paged() ? cache.num_pages : cache.rows;
  equip(memory, p.fwd.k, batches, rows, shape.heads_kv, shape.head_dim, p.fwd.dtype);
  equip(memory, p.fwd.v, batches, rows, shape.heads_kv, shape.head_dim, p.fwd.dtype);
  equip(memory, p.append.k, batch, p.append.seqlen, shape.heads_kv, shape.head_dim, p.fwd.dtype);
  equip(memory, p.append.v, batch, p.append.seqlen, shape.heads_kv, shape.head_dim, p.fwd.dtype);
  if (p.append.rotary_dim > 0) {
    std::vector<Walk> const table = {{p.append.max_position, p.append.rotary_dim / 2},
                                     {p.append.rotary_dim / 2, 1}};
    p.append.rotary_cos = memory.elements(table, size_of(p.fwd.dtype), 1);
    p.append.rotary_sin = memory.elements(table, size_of(p.fwd.dtype), 1);
  }
  equip_queries(memory, p.fwd);
  return memory.ok();
}

bool equip(Memory& memory, FlashCombineParams& p) {
  double const rows = double(p.batch) * p.heads * p.seqlen;
  if (rows * (p.splits + 1.0) * p.head_dim > kMostWork) { return false; }
  p.out_partial.data = memory.elements({{p.splits, p.out_split_stride},
                                        {p.batch, p.out_partial.batch_stride},
                                        {p.seqlen, p.out_partial.row_stride},
                                        {p.heads, p.out_partial.head_stride}},
                                       size_of(p.partial_dtype), p.head_dim);
  p.lse_partial = static_cast<float*>(memory.elements({{p.splits, p.lse_split_stride},
                                                       {p.batch, p.lse_batch_stride},
                                                       {p.heads, p.lse_head_stride},
                                                       {p.seqlen, p.lse_row_stride}},
                                                      sizeof(float), 1));
  if (p.lse != nullptr) {
    p.lse = static_cast<float*>(
        memory.elements({{int64_t(p.batch) * p.heads * p.seqlen, 1}}, sizeof(float), 1));
  }
  if (p.sequences != nullptr) { p.sequences = memory.ints(1, p.seqlen); }
  equip(memory, p.out, p.batch, p.seqlen, p.heads, p.head_dim, p.out_dtype);
  return memory.ok();
}

}  // namespace fuzz
