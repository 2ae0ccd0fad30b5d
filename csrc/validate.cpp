#include "validate.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "checks.h"
#include "core/split_plan.h"

namespace flashattn {
namespace {

constexpr int kMaxLength = 1 << 30;  // leaves room in 32 bit for a sum of two lengths
constexpr int kMaxHeads = 65535;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxFixedSplits = 65535;  // what one dimension of a grid holds
constexpr int kAlignment = 16;          // bytes: what one cp.async or vector load moves
// Rows of all heads of a result, so that sizes of partial results fit 64 bit: 65535 splits of 257
// floats a row. With the smallest head dim, out would have 1 TiB.
constexpr int64_t kMaxRows = int64_t(1) << 36;

bool packed_q(FlashFwdParams const& p) { return p.lengths.cu_seqlens_q != nullptr; }
bool packed_k(FlashFwdParams const& p) { return p.lengths.cu_seqlens_k != nullptr; }

void check_rows(int64_t rows, int heads) {
  if (heads > 0) { check_range("query rows of all sequences", rows, 0, kMaxRows / heads); }
}

int64_t key_rows(FlashFwdParams const& p) {
  return packed_k(p) ? p.lengths.total_k : int64_t(p.shape.batch) * p.shape.seqlen_k;
}

void check_shape(Shape const& shape) {
  check_range("batch", shape.batch, 0, INT32_MAX);
  check_range("seqlen_q", shape.seqlen_q, 0, kMaxLength);
  check_range("seqlen_k", shape.seqlen_k, 0, kMaxLength);
  check_range("heads", shape.heads, 0, kMaxHeads);
  check_range("heads_kv", shape.heads_kv, shape.heads > 0 ? 1 : 0, kMaxHeads);
  check_range("head_dim", shape.head_dim, 8, kMaxHeadDim);
  if (shape.head_dim % 8 != 0) { reject("head_dim", shape.head_dim, "a multiple of 8"); }
  if (shape.heads_kv > 0 && shape.heads % shape.heads_kv != 0) {
    reject("heads_kv", shape.heads_kv, "a divisor of heads = " + std::to_string(shape.heads));
  }
}

void check_lengths(Lengths const& lengths) {
  check_numbers("cu_seqlens_q", lengths.cu_seqlens_q);
  check_numbers("cu_seqlens_k", lengths.cu_seqlens_k);
  check_numbers("seqused_k", lengths.seqused_k);
  check_range("total_q", lengths.total_q, 0, lengths.cu_seqlens_q != nullptr ? kMaxLength : 0);
  check_range("total_k", lengths.total_k, 0, lengths.cu_seqlens_k != nullptr ? kMaxLength : 0);
}

void check_types(FlashFwdParams const& p) {
  check_enumerator("device", p.device);
  check_enumerator("dtype", p.dtype);
  if (p.dtype == DType::kFloat32 && p.device == Device::kCuda) {
    throw InvalidArgument("dtype: expected float16 or bfloat16 on CUDA, got float32");
  }
  if (p.score.sinks == nullptr) { return; }
  DType const sinks = p.score.sinks_dtype;
  check_enumerator("sinks_dtype", sinks);
  if (sinks != DType::kFloat32 && sinks != p.dtype) {
    throw InvalidArgument(
        "sinks_dtype: expected float32 or the dtype of q, got the other 16-bit type");
  }
  check_pointer("sinks", p.score.sinks, element_size(sinks));
}

void check_score(Score const& score, Window window, Shape const& shape) {
  check_range("window.left", window.left, -1, INT32_MAX);
  check_range("window.right", window.right, -1, INT32_MAX);
  if (!std::isfinite(score.scale)) { reject("scale", score.scale, "a finite number"); }
  bool const subnormal = score.softcap != 0.f && score.softcap < std::numeric_limits<float>::min();
  if (!std::isfinite(score.softcap) || score.softcap < 0.f || subnormal) {
    reject("softcap", score.softcap, "a finite, normal number > 0, or 0 (off)");
  }
  if (score.alibi_batch_stride < 0) {
    reject("alibi_batch_stride", score.alibi_batch_stride, "a number >= 0");
  }
  if (score.alibi_slopes != nullptr) {
    check_stride("alibi_batch_stride", score.alibi_batch_stride, shape.batch);
    check_numbers("alibi_slopes", score.alibi_slopes);
  }
}

void check_operand(char const* name, auto const& t, FlashFwdParams const& p, Extent extent) {
  check_operand(name, t, p.dtype, extent, kAlignment);
}

void check_query_operands(FlashFwdParams const& p) {
  Extent const extent = {packed_q(p) ? 1 : p.shape.batch,
                         packed_q(p) ? p.lengths.total_q : p.shape.seqlen_q, p.shape.heads};
  check_operand("q", p.q, p, extent);
  check_operand("out", p.out, p, extent);
  check_numbers("lse", p.lse);
}

void check_operands(FlashFwdParams const& p) {
  check_query_operands(p);
  if (key_rows(p) == 0) { return; }
  Extent const extent = {packed_k(p) ? 1 : p.shape.batch,
                         packed_k(p) ? p.lengths.total_k : p.shape.seqlen_k, p.shape.heads_kv};
  check_operand("k", p.k, p, extent);
  check_operand("v", p.v, p, extent);
}

void check_cache(FlashSplitkvParams const& p) {
  Cache const& cache = p.cache;
  Lengths const& lengths = p.fwd.lengths;
  if (lengths.cu_seqlens_k != nullptr || lengths.seqused_k != nullptr) {
    throw InvalidArgument("cu_seqlens_k, seqused_k: expected null, a cache has its own lengths");
  }
  int const capacity = p.fwd.shape.seqlen_k;
  check_range("cache.seqlen", cache.seqlen, 0, capacity);
  check_numbers("cache.seqlens", cache.seqlens);
  check_numbers("cache.leftpad", cache.leftpad);
  check_numbers("cache.batch_idx", cache.batch_idx);
  check_numbers("cache.block_table", cache.block_table);
  if (!cache.paged()) {
    if (cache.block_table != nullptr) {
      reject("cache.page_size", cache.page_size, "a number >= 1 with a block table");
    }
    check_range("cache.rows", cache.rows, cache.batch_idx != nullptr ? 0 : p.fwd.shape.batch,
                INT32_MAX);
    return;
  }
  if (cache.batch_idx != nullptr) {
    throw InvalidArgument("cache.batch_idx: expected null with a block table");
  }
  check_range("cache.page_size", cache.page_size, 1, kMaxLength);
  if (cache.block_table == nullptr && cache.table_columns > 0 && p.fwd.shape.batch > 0) {
    throw InvalidArgument("cache.block_table: expected a pointer, got null");
  }
  check_range("cache.num_pages", cache.num_pages, 0, INT32_MAX);
  check_range("cache.table_columns", cache.table_columns, 0, kMaxLength);
  check_range("seqlen_k", capacity, 0, int64_t(cache.table_columns) * cache.page_size);
  check_stride("cache.block_table_stride", cache.block_table_stride, p.fwd.shape.batch);
}

void check_append(FlashSplitkvParams const& p) {
  Append const& append = p.append;
  check_range("append.seqlen", append.seqlen, 0, kMaxLength);
  // The lengths of no sequences may be a null pointer too.
  bool const length_is_known = p.cache.seqlens == nullptr && p.fwd.shape.batch > 0;
  if (append.seqlen > 0 && length_is_known) {
    check_range("cache.seqlen + append.seqlen", int64_t(p.cache.seqlen) + append.seqlen, 0,
                p.fwd.shape.seqlen_k);
  }
  if (append.rotary_dim == 0) { return; }
  check_range("append.rotary_dim", append.rotary_dim, 16, p.fwd.shape.head_dim);
  if (append.rotary_dim % 16 != 0) {
    reject("append.rotary_dim", append.rotary_dim, "a multiple of 16");
  }
  check_range("append.max_position", append.max_position, 1, kMaxLength);
  if (length_is_known) {
    bool const one_after_the_other = p.fwd.window.left >= 0 || p.fwd.window.right >= 0;
    // How many queries a packed sequence has is known on the device only.
    bool const packed = p.fwd.lengths.cu_seqlens_q != nullptr;
    int const bound = packed ? 0 : p.fwd.shape.seqlen_q;
    int const queries = one_after_the_other ? bound : (bound > 0 ? 1 : 0);
    int64_t const tokens = append.seqlen > queries ? append.seqlen : queries;
    check_range("cache.seqlen + the larger of new tokens and queries", p.cache.seqlen + tokens, 0,
                append.max_position);
  }
  if (append.rotary_cos == nullptr || append.rotary_sin == nullptr) {
    throw InvalidArgument("append.rotary_cos, append.rotary_sin: expected two pointers, got null");
  }
  check_pointer("append.rotary_cos", append.rotary_cos, element_size(p.fwd.dtype));
  check_pointer("append.rotary_sin", append.rotary_sin, element_size(p.fwd.dtype));
}

void check_split(Split const& split, int capacity) {
  check_range("split.num_splits", split.num_splits, 0, kMaxSplits);
  check_range("split.split_size", split.split_size, 0, kMaxLength);
  if (split.split_size % kSplitGranule != 0) {
    reject("split.split_size", split.split_size, "a multiple of " + std::to_string(kSplitGranule));
  }
  if (split.split_size > 0) {
    int64_t const splits = (int64_t(capacity) + split.split_size - 1) / split.split_size;
    check_range("splits of split_size that cover the capacity", splits, 0, kMaxFixedSplits);
  }
  if (split.split_size > 0 && split.num_splits > 0) {
    reject("split.num_splits", split.num_splits, "0 when split_size is given");
  }
}

}  // namespace

bool has_work(FlashFwdParams const& params) {
  return params.shape.batch > 0 && params.shape.heads > 0 && query_rows(params) > 0;
}

bool appends(FlashSplitkvParams const& params) {
  Shape const& shape = params.fwd.shape;
  return params.append.seqlen > 0 && shape.batch > 0 && shape.heads_kv > 0;
}

void validate(FlashFwdParams const& params) {
  check_types(params);
  check_shape(params.shape);
  check_lengths(params.lengths);
  check_rows(query_rows(params), params.shape.heads);
  check_score(params.score, params.window, params.shape);
  if (has_work(params)) { check_operands(params); }
}

void validate(FlashSplitkvParams const& params) {
  FlashFwdParams const& fwd = params.fwd;
  check_types(fwd);
  check_shape(fwd.shape);
  check_lengths(fwd.lengths);
  check_rows(query_rows(fwd), fwd.shape.heads);
  check_score(fwd.score, fwd.window, fwd.shape);
  check_cache(params);
  check_append(params);
  check_split(params.split, fwd.shape.seqlen_k);
  if (has_work(fwd)) { check_query_operands(fwd); }
  if (!has_work(fwd) && !appends(params)) { return; }
  bool const pages = params.cache.paged();
  int64_t const rows = pages ? params.cache.page_size : fwd.shape.seqlen_k;
  int64_t const batches = pages ? params.cache.num_pages : params.cache.rows;
  if (rows > 0 && batches > 0) {
    check_operand("k", fwd.k, fwd, {batches, rows, fwd.shape.heads_kv});
    check_operand("v", fwd.v, fwd, {batches, rows, fwd.shape.heads_kv});
  }
  if (appends(params)) {
    Extent const extent = {fwd.shape.batch, params.append.seqlen, fwd.shape.heads_kv};
    check_operand("append.k", params.append.k, fwd, extent);
    check_operand("append.v", params.append.v, fwd, extent);
  }
}

void validate(FlashCombineParams const& params) {
  check_enumerator("device", params.device);
  check_enumerator("partial_dtype", params.partial_dtype);
  check_enumerator("out_dtype", params.out_dtype);
  check_range("splits", params.splits, 0, INT32_MAX);
  check_range("batch", params.batch, 0, INT32_MAX);
  check_range("heads", params.heads, 0, kMaxHeads);
  check_range("seqlen", params.seqlen, 0, kMaxLength);
  check_range("head_dim", params.head_dim, 1, INT32_MAX);
  check_rows(int64_t(params.batch) * params.seqlen, params.heads);
  if (int64_t(params.batch) * params.heads * params.seqlen == 0) { return; }
  Extent const extent = {params.batch, params.seqlen, params.heads};
  check_operand("out", params.out, params.out_dtype, extent, element_size(params.out_dtype));
  check_numbers("lse", params.lse);
  check_numbers("sequences", params.sequences);
  check_numbers("lse_partial", params.lse_partial);
  check_stride("out_split_stride", params.out_split_stride, params.splits);
  check_stride("lse_split_stride", params.lse_split_stride, params.splits);
  check_stride("lse_batch_stride", params.lse_batch_stride, params.batch);
  check_stride("lse_head_stride", params.lse_head_stride, params.heads);
  check_stride("lse_row_stride", params.lse_row_stride, params.seqlen);
  if (params.splits == 0) { return; }
  if (params.out_partial.data == nullptr || params.lse_partial == nullptr) {
    throw InvalidArgument("out_partial, lse_partial: expected two pointers, got null");
  }
  check_operand("out_partial", params.out_partial, params.partial_dtype, extent,
                element_size(params.partial_dtype));
}

}  // namespace flashattn
