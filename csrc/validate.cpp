#include "validate.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "core/split_plan.h"
#include "flashattn/error.h"

namespace flashattn {
namespace {

constexpr int kMaxLength = 1 << 30;  // leaves room in 32 bit for a sum of two lengths
constexpr int kMaxHeads = 65535;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxFixedSplits = 65535;  // what one dimension of a grid holds
constexpr int kAlignment = 16;  // bytes: what one cp.async or vector load moves

template <class Got>
[[noreturn]] void reject(std::string_view name, Got got, std::string_view allowed) {
  throw InvalidArgument(std::string(name) + ": expected " + std::string(allowed) + ", got " +
                        std::to_string(got));
}

void check_range(std::string_view name, int64_t got, int64_t low, int64_t high) {
  if (got < low || got > high) {
    reject(name, got, std::to_string(low) + " ... " + std::to_string(high));
  }
}

int element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

bool packed_q(FlashFwdParams const& p) { return p.lengths.cu_seqlens_q != nullptr; }
bool packed_k(FlashFwdParams const& p) { return p.lengths.cu_seqlens_k != nullptr; }

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
  check_range("total_q", lengths.total_q, 0, lengths.cu_seqlens_q != nullptr ? kMaxLength : 0);
  check_range("total_k", lengths.total_k, 0, lengths.cu_seqlens_k != nullptr ? kMaxLength : 0);
}

void check_dtype(FlashFwdParams const& p) {
  if (p.dtype == DType::kFloat32 && p.device == Device::kCuda) {
    throw InvalidArgument("dtype: expected float16 or bfloat16 on CUDA, got float32");
  }
  DType const sinks = p.score.sinks_dtype;
  if (p.score.sinks != nullptr && sinks != DType::kFloat32 && sinks != p.dtype) {
    throw InvalidArgument("sinks_dtype: expected float32 or the dtype of q, got the other 16-bit type");
  }
}

void check_score(Score const& score, Window window) {
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
}

void check_aligned(std::string const& name, int64_t bytes) {
  if (bytes % kAlignment != 0) { reject(name + " in bytes", bytes, "a multiple of 16"); }
}

// A stride counts only where its dimension is walked.
template <class Pointer>
void check_operand(std::string const& name, Strided<Pointer> const& t, FlashFwdParams const& p,
                   int64_t rows, int64_t batches, int heads) {
  if (t.data == nullptr) { throw InvalidArgument(name + ": expected a pointer, got null"); }
  check_aligned(name, int64_t(reinterpret_cast<intptr_t>(t.data)));
  int const size = element_size(p.dtype);
  if (batches > 1) { check_aligned(name + ".batch_stride", t.batch_stride * size); }
  if (rows > 1) { check_aligned(name + ".row_stride", t.row_stride * size); }
  if (heads > 1) { check_aligned(name + ".head_stride", t.head_stride * size); }
}

void check_query_operands(FlashFwdParams const& p) {
  int64_t const q_batches = packed_q(p) ? 1 : p.shape.batch;
  int64_t const q_rows = packed_q(p) ? p.lengths.total_q : p.shape.seqlen_q;
  check_operand("q", p.q, p, q_rows, q_batches, p.shape.heads);
  check_operand("out", p.out, p, q_rows, q_batches, p.shape.heads);
}

void check_operands(FlashFwdParams const& p) {
  check_query_operands(p);
  if (key_rows(p) == 0) { return; }
  int64_t const k_batches = packed_k(p) ? 1 : p.shape.batch;
  int64_t const k_rows = packed_k(p) ? p.lengths.total_k : p.shape.seqlen_k;
  check_operand("k", p.k, p, k_rows, k_batches, p.shape.heads_kv);
  check_operand("v", p.v, p, k_rows, k_batches, p.shape.heads_kv);
}

void check_cache(FlashSplitkvParams const& p) {
  Cache const& cache = p.cache;
  Lengths const& lengths = p.fwd.lengths;
  if (lengths.cu_seqlens_k != nullptr || lengths.seqused_k != nullptr) {
    throw InvalidArgument("cu_seqlens_k, seqused_k: expected null, a cache has its own lengths");
  }
  int const capacity = p.fwd.shape.seqlen_k;
  check_range("cache.seqlen", cache.seqlen, 0, capacity);
  if (!cache.paged()) {
    if (cache.block_table != nullptr) { reject("cache.page_size", cache.page_size, "a number >= 1 with a block table"); }
    check_range("cache.rows", cache.rows, cache.batch_idx != nullptr ? 0 : p.fwd.shape.batch, INT32_MAX);
    return;
  }
  if (cache.batch_idx != nullptr) { throw InvalidArgument("cache.batch_idx: expected null with a block table"); }
  check_range("cache.page_size", cache.page_size, 1, kMaxLength);
  if (cache.block_table == nullptr && cache.table_columns > 0 && p.fwd.shape.batch > 0) {
    throw InvalidArgument("cache.block_table: expected a pointer, got null");
  }
  check_range("cache.num_pages", cache.num_pages, 0, INT32_MAX);
  check_range("cache.table_columns", cache.table_columns, 0, kMaxLength);
  check_range("seqlen_k", capacity, 0, int64_t(cache.table_columns) * cache.page_size);
}

void check_append(FlashSplitkvParams const& p) {
  Append const& append = p.append;
  check_range("append.seqlen", append.seqlen, 0, kMaxLength);
  // The lengths of no sequences may be a null pointer too.
  bool const length_is_known = p.cache.seqlens == nullptr && p.fwd.shape.batch > 0;
  if (append.seqlen > 0 && length_is_known) {
    check_range("cache.seqlen + append.seqlen", int64_t(p.cache.seqlen) + append.seqlen, 0, p.fwd.shape.seqlen_k);
  }
  if (append.rotary_dim == 0) { return; }
  check_range("append.rotary_dim", append.rotary_dim, 16, p.fwd.shape.head_dim);
  if (append.rotary_dim % 16 != 0) { reject("append.rotary_dim", append.rotary_dim, "a multiple of 16"); }
  check_range("append.max_position", append.max_position, 1, INT32_MAX);
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
  check_shape(params.shape);
  check_lengths(params.lengths);
  check_dtype(params);
  check_score(params.score, params.window);
  if (has_work(params)) { check_operands(params); }
}

void validate(FlashSplitkvParams const& params) {
  FlashFwdParams const& fwd = params.fwd;
  check_shape(fwd.shape);
  check_lengths(fwd.lengths);
  check_dtype(fwd);
  check_score(fwd.score, fwd.window);
  check_cache(params);
  check_append(params);
  check_split(params.split, fwd.shape.seqlen_k);
  if (has_work(fwd)) { check_query_operands(fwd); }
  if (!has_work(fwd) && !appends(params)) { return; }
  bool const pages = params.cache.paged();
  int64_t const rows = pages ? params.cache.page_size : fwd.shape.seqlen_k;
  int64_t const batches = pages ? params.cache.num_pages : params.cache.rows;
  if (rows > 0 && batches > 0) {
    check_operand("k", fwd.k, fwd, rows, batches, fwd.shape.heads_kv);
    check_operand("v", fwd.v, fwd, rows, batches, fwd.shape.heads_kv);
  }
  if (appends(params)) {
    check_operand("append.k", params.append.k, fwd, params.append.seqlen, fwd.shape.batch, fwd.shape.heads_kv);
    check_operand("append.v", params.append.v, fwd, params.append.seqlen, fwd.shape.batch, fwd.shape.heads_kv);
  }
}

void validate(FlashCombineParams const& params) {
  check_range("splits", params.splits, 0, INT32_MAX);
  check_range("batch", params.batch, 0, INT32_MAX);
  check_range("heads", params.heads, 0, kMaxHeads);
  check_range("seqlen", params.seqlen, 0, kMaxLength);
  check_range("head_dim", params.head_dim, 1, INT32_MAX);
  if (int64_t(params.batch) * params.heads * params.seqlen == 0) { return; }
  if (params.out.data == nullptr) { throw InvalidArgument("out: expected a pointer, got null"); }
  if (params.splits > 0 && (params.out_partial.data == nullptr || params.lse_partial == nullptr)) {
    throw InvalidArgument("out_partial, lse_partial: expected two pointers, got null");
  }
}

}  // namespace flashattn
