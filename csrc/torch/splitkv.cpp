// The operators `fwd_splitkv` and `fwd_splitkv_append`, those that return the lse too, and those
// that write into a given out.
#include <tuple>

#include "flashattn/flashattn.h"
#include "torch/op_support.h"
#include "torch/ops.h"
#include "torch/overlap.h"

namespace flashattn {
namespace {

struct Arguments {
  View q;
  View k_cache;
  View v_cache;
  OptionalTensor const& cache_seqlens;
  OptionalTensor const& block_table;
  std::optional<double> softmax_scale;
  int64_t window_left;
  int64_t window_right;
  OptionalTensor const& cu_seqlens_q;
  int64_t max_seqlen_q;
  int64_t cache_seqlen;  // of every sequence, without cache_seqlens
  OptionalTensor const& cache_batch_idx;
  OptionalTensor const& cache_leftpad;
  int64_t num_splits;
  int64_t split_size;
  double softcap;
  OptionalTensor const& alibi_slopes;
  OptionalTensor const& sinks;

  bool packed() const { return cu_seqlens_q.has_value(); }
};

struct NewTokens {
  View k;
  View v;
  OptionalTensor const& rotary_cos;
  OptionalTensor const& rotary_sin;
  bool rotary_interleaved;
};

void check_operands(Arguments const& a) {
  int64_t const rank = a.packed() ? 3 : 4;
  if (a.q.dim() != rank) {
    refuse("q", "expected ", rank, " dims, got shape ", to_string(a.q.sizes));
  }
  check_layout(a.q, "q");
  if (a.k_cache.dim() != 4 || a.k_cache.size(3) != a.q.size(rank - 1)) {
    refuse("k_cache", "expected 4 dims with q's head dim, got shape ", to_string(a.k_cache.sizes),
           " for q ", to_string(a.q.sizes));
  }
  check_operand(a.k_cache, "k_cache", a.k_cache, a.q);
  check_operand(a.v_cache, "v_cache", a.k_cache, a.q);
  check_layout(a.k_cache, "k_cache");
  check_layout(a.v_cache, "v_cache");
  check_key_heads(a.k_cache, "k_cache", a.q);
}

Shape shape_of(Arguments const& a) {
  int64_t const row = a.packed() ? 0 : 1;
  Shape shape;
  shape.batch = narrow("batch", a.packed() ? a.cu_seqlens_q->numel() - 1 : a.q.size(0));
  if (shape.batch < 0) { refuse("cu_seqlens_q", "expected batch + 1 entries, got none"); }
  shape.heads = narrow("q", a.q.size(row + 1));
  shape.heads_kv = narrow("k_cache", a.k_cache.size(2));
  shape.head_dim = narrow("q", a.q.size(row + 2));
  shape.seqlen_q = bounded("q", a.q.size(row), a.packed() ? a.max_seqlen_q : -1);
  return shape;
}

void set_pages(Cache& cache, Arguments const& a, int batch) {
  View const table = *a.block_table;
  if (a.cache_batch_idx) { refuse("cache_batch_idx", "only without block_table, got both"); }
  if (table.dtype != aoti_torch_dtype_int32()) { refuse("block_table", "expected dtype int32"); }
  if (table.dim() != 2) {
    refuse("block_table", "expected 2 dims, got shape ", to_string(table.sizes));
  }
  check_shape(table, "block_table", {batch, table.size(1)});
  check_last_stride(table, "block_table");
  check_device(table, "block_table", a.q);
  cache.block_table = static_cast<int const*>(table.data());
  cache.block_table_stride = stride_or_zero(table, 0);
  cache.table_columns = narrow("block_table", table.size(1));
  cache.page_size = narrow("k_cache", a.k_cache.size(1));
  if (cache.page_size < 1) { refuse("k_cache", "expected pages of at least 1 token, got 0"); }
  cache.num_pages = narrow("k_cache", a.k_cache.size(0));
}

Cache cache_of(Arguments const& a, int batch) {
  Cache cache;
  cache.seqlens = lengths(a.cache_seqlens, "cache_seqlens", batch, a.q);
  cache.seqlen = narrow("cache_seqlen", a.cache_seqlen);
  cache.leftpad = lengths(a.cache_leftpad, "cache_leftpad", batch, a.q);
  if (a.block_table) {
    set_pages(cache, a, batch);
    return cache;
  }
  cache.batch_idx = lengths(a.cache_batch_idx, "cache_batch_idx", batch, a.q);
  cache.rows = narrow("k_cache", a.k_cache.size(0));
  if (!a.cache_batch_idx && cache.rows < batch) {
    refuse("k_cache", "expected a row for each of ", batch, " sequences, got ", cache.rows);
  }
  return cache;
}

// Everything but out, lse and the new tokens.
FlashSplitkvParams input_params(Arguments const& a) {
  check_operands(a);
  FlashSplitkvParams params;
  FlashFwdParams& fwd = params.fwd;
  fwd.device = device_of(a.q);
  fwd.dtype = dtype_of(a.q, "q");
  fwd.shape = shape_of(a);
  fwd.q = strided(a.q, a.q.data());
  fwd.k = strided(a.k_cache, a.k_cache.data());
  fwd.v = strided(a.v_cache, a.v_cache.data());
  int const batch = fwd.shape.batch;
  fwd.lengths.cu_seqlens_q = lengths(a.cu_seqlens_q, "cu_seqlens_q", int64_t(batch) + 1, a.q);
  fwd.lengths.total_q = a.packed() ? narrow("q", a.q.size(0)) : 0;
  fwd.window = window_of(a.window_left, a.window_right);
  fwd.score = score_of(a.q, fwd.shape, a.softmax_scale, a.softcap, a.alibi_slopes, a.sinks);
  params.cache = cache_of(a, batch);
  int64_t const columns = a.block_table ? params.cache.table_columns : 1;
  fwd.shape.seqlen_k = narrow("capacity", columns * a.k_cache.size(1));
  params.split = {.num_splits = narrow("num_splits", a.num_splits),
                  .split_size = narrow("split_size", a.split_size)};
  return params;
}

void const* rotary_data(View const& table, char const* name, View const& cos, View const& q) {
  if (table.dim() != 2) { refuse(name, "expected 2 dims, got shape ", to_string(table.sizes)); }
  check_operand(table, name, cos, q);
  if (!table.tensor.is_contiguous()) { refuse(name, "expected a contiguous tensor"); }
  return table.data();
}

void set_new_tokens(FlashSplitkvParams& params, Arguments const& a, NewTokens const& tokens) {
  if (tokens.k.dim() != 4) {
    refuse("k_new", "expected 4 dims, got shape ", to_string(tokens.k.sizes));
  }
  check_shape(tokens.k, "k_new",
              {params.fwd.shape.batch, tokens.k.size(1), a.k_cache.size(2), a.k_cache.size(3)});
  check_operand(tokens.k, "k_new", tokens.k, a.q);
  check_operand(tokens.v, "v_new", tokens.k, a.q);
  check_layout(tokens.k, "k_new");
  check_layout(tokens.v, "v_new");
  check_written(a.k_cache, "k_cache", {named("v_cache", a.v_cache.tensor)});
  check_written(a.v_cache, "v_cache", {});
  params.fwd.k.data = a.k_cache.tensor.mutable_data_ptr();
  params.fwd.v.data = a.v_cache.tensor.mutable_data_ptr();
  Append& append = params.append;
  append.k = strided(tokens.k, tokens.k.data());
  append.v = strided(tokens.v, tokens.v.data());
  append.seqlen = narrow("k_new", tokens.k.size(1));
  if (tokens.rotary_cos.has_value() != tokens.rotary_sin.has_value()) {
    refuse("rotary_cos, rotary_sin", "expected both or none");
  }
  if (!tokens.rotary_cos) { return; }
  View const cos = *tokens.rotary_cos;
  append.rotary_cos = rotary_data(cos, "rotary_cos", cos, a.q);
  append.rotary_sin = rotary_data(*tokens.rotary_sin, "rotary_sin", cos, a.q);
  if (cos.size(1) == 0) { refuse("rotary_cos", "expected columns, got none"); }
  append.rotary_dim = narrow("rotary_cos", 2 * cos.size(1));
  append.max_position = narrow("rotary_cos", cos.size(0));
  append.rotary_interleaved = tokens.rotary_interleaved;
}

// The workspace is torch's: its caching allocator keeps it alive in the order of the stream.
void run(FlashSplitkvParams& params, View const& q, Output const& out, float* lse) {
  params.fwd.out = out;
  params.fwd.lse = lse;
  on_device_of(q, [&](cudaStream_t stream) {
    OptionalTensor workspace;
    run_flash_splitkv_fwd(
        params,
        [&](size_t bytes) {
          workspace = empty({static_cast<int64_t>(bytes)}, aoti_torch_dtype_uint8(), q);
          return workspace->mutable_data_ptr();
        },
        stream);
  });
}

Tensor run_new(FlashSplitkvParams params, View const& q) {
  Tensor out = empty_out(q);
  run(params, q, strided_out(q, out), nullptr);
  return out;
}

std::tuple<Tensor, Tensor> run_new_lse(FlashSplitkvParams params, View const& q) {
  Tensor out = empty_out(q), lse = empty_lse(q);
  run(params, q, strided_out(q, out), lse_data(lse));
  return {out, lse};
}

void run_out(FlashSplitkvParams params, Arguments const& a, Tensor const& out,
             OptionalTensor const& lse) {
  check_operand(out, "out", a.q, a.q);
  check_layout(out, "out");
  check_written(
      out, "out",
      {named("q", a.q.tensor), named("k_cache", a.k_cache.tensor),
       named("v_cache", a.v_cache.tensor), named("cache_seqlens", a.cache_seqlens),
       named("block_table", a.block_table), named("cu_seqlens_q", a.cu_seqlens_q),
       named("cache_batch_idx", a.cache_batch_idx), named("cache_leftpad", a.cache_leftpad),
       named("alibi_slopes", a.alibi_slopes), named("sinks", a.sinks)});
  run(params, a.q, strided(out, out.mutable_data_ptr()),
      checked_lse_data(lse, a.q, lse_shape(a.q.sizes)));
}

FlashSplitkvParams append_params(Arguments const& a, NewTokens const& tokens) {
  FlashSplitkvParams params = input_params(a);
  set_new_tokens(params, a, tokens);
  return params;
}

Tensor fwd_splitkv(Arguments const& a) { return run_new(input_params(a), a.q); }

std::tuple<Tensor, Tensor> fwd_splitkv_lse(Arguments const& a) {
  return run_new_lse(input_params(a), a.q);
}

void fwd_splitkv_out(Arguments const& a, Tensor const& out, OptionalTensor const& lse) {
  run_out(input_params(a), a, out, lse);
}

// With the arguments of NewTokens.
constexpr auto fwd_splitkv_append = [](Arguments const& a, auto const&... tokens) {
  return run_new(append_params(a, {tokens...}), a.q);
};
constexpr auto fwd_splitkv_append_lse = [](Arguments const& a, auto const&... tokens) {
  return run_new_lse(append_params(a, {tokens...}), a.q);
};

void fwd_splitkv_append_out(Arguments const& a, Tensor const& out, OptionalTensor const& lse,
                            Tensor const& k_new, Tensor const& v_new, OptionalTensor const& cos,
                            OptionalTensor const& sin, bool interleaved) {
  FlashSplitkvParams const params = append_params(a, {k_new, v_new, cos, sin, interleaved});
  check_written(out, "out",
                {named("k_new", k_new), named("v_new", v_new), named("rotary_cos", cos),
                 named("rotary_sin", sin)});
  run_out(params, a, out, lse);
}

#define FLASHATTN_RESULTS "Tensor(a!) out, Tensor(b!)? lse, "
#define FLASHATTN_NEW_TOKENS                                             \
  "Tensor k_new, Tensor v_new, Tensor? rotary_cos, Tensor? rotary_sin, " \
  "bool rotary_interleaved, "
#define FLASHATTN_CACHES "Tensor q, Tensor k_cache, Tensor v_cache, "
#define FLASHATTN_WRITTEN_CACHES "Tensor q, Tensor(c!) k_cache, Tensor(d!) v_cache, "
// What is seldom given comes last: a call that leaves it out is cheaper. Causal: window_right=0.
#define FLASHATTN_OPTIONS                                                                        \
  "Tensor? cache_seqlens, Tensor? block_table, int window_right=-1, float? softmax_scale=None, " \
  "int window_left=-1, Tensor? cu_seqlens_q=None, int max_seqlen_q=-1, int cache_seqlen=0, "     \
  "Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, int num_splits=0, "                 \
  "int split_size=0, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None"

#define FLASHATTN_BASIC_OPTIONS                                       \
  "Tensor? cache_seqlens, Tensor? block_table, int window_right=-1, " \
  "Tensor? cu_seqlens_q=None, int max_seqlen_q=-1"

// An operator from a function of Arguments and of what the schema has before them.
template <auto kFunction, class... First>
auto op(First const&... first, Tensor const& q, Tensor const& k_cache, Tensor const& v_cache,
        OptionalTensor const& cache_seqlens, OptionalTensor const& block_table,
        int64_t window_right, std::optional<double> const& softmax_scale, int64_t window_left,
        OptionalTensor const& cu_seqlens_q, int64_t max_seqlen_q, int64_t cache_seqlen,
        OptionalTensor const& cache_batch_idx, OptionalTensor const& cache_leftpad,
        int64_t num_splits, int64_t split_size, double softcap, OptionalTensor const& alibi_slopes,
        OptionalTensor const& sinks) {
  return kFunction({q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, window_left,
                    window_right, cu_seqlens_q, max_seqlen_q, cache_seqlen, cache_batch_idx,
                    cache_leftpad, num_splits, split_size, softcap, alibi_slopes, sinks},
                   first...);
}

// fwd_splitkv with those arguments that serving needs most often. Also an argument that a call
// leaves out has its cost: twelve of them 1.2 us (H200's host, 2026-11-30, docs/tuning.md).
Tensor fwd_splitkv_basic(Tensor const& q, Tensor const& k_cache, Tensor const& v_cache,
                         OptionalTensor const& cache_seqlens, OptionalTensor const& block_table,
                         int64_t window_right, OptionalTensor const& cu_seqlens_q,
                         int64_t max_seqlen_q) {
  OptionalTensor const none;
  return fwd_splitkv({.q = q,
                      .k_cache = k_cache,
                      .v_cache = v_cache,
                      .cache_seqlens = cache_seqlens,
                      .block_table = block_table,
                      .softmax_scale = std::nullopt,
                      .window_left = -1,
                      .window_right = window_right,
                      .cu_seqlens_q = cu_seqlens_q,
                      .max_seqlen_q = max_seqlen_q,
                      .cache_seqlen = 0,
                      .cache_batch_idx = none,
                      .cache_leftpad = none,
                      .num_splits = 0,
                      .split_size = 0,
                      .softcap = 0,
                      .alibi_slopes = none,
                      .sinks = none});
}

}  // namespace

void define_splitkv(Library& m) {
  m.def("fwd_splitkv_basic(" FLASHATTN_CACHES FLASHATTN_BASIC_OPTIONS ") -> Tensor");
  m.def("fwd_splitkv(" FLASHATTN_CACHES FLASHATTN_OPTIONS ") -> Tensor");
  m.def("fwd_splitkv_lse(" FLASHATTN_CACHES FLASHATTN_OPTIONS ") -> (Tensor out, Tensor lse)");
  m.def("fwd_splitkv_out(" FLASHATTN_RESULTS FLASHATTN_CACHES FLASHATTN_OPTIONS ") -> ()");
  m.def("fwd_splitkv_append(" FLASHATTN_NEW_TOKENS FLASHATTN_WRITTEN_CACHES FLASHATTN_OPTIONS
        ") -> Tensor");
  m.def("fwd_splitkv_append_lse(" FLASHATTN_NEW_TOKENS FLASHATTN_WRITTEN_CACHES FLASHATTN_OPTIONS
        ") -> (Tensor out, Tensor lse)");
  m.def("fwd_splitkv_append_out(" FLASHATTN_RESULTS FLASHATTN_NEW_TOKENS
            FLASHATTN_WRITTEN_CACHES FLASHATTN_OPTIONS ") -> ()");
}

void implement_splitkv(Library& m) {
  m.impl("fwd_splitkv_basic", TORCH_BOX(&fwd_splitkv_basic));
  m.impl("fwd_splitkv", TORCH_BOX((&op<fwd_splitkv>)));
  m.impl("fwd_splitkv_lse", TORCH_BOX((&op<fwd_splitkv_lse>)));
  m.impl("fwd_splitkv_out", TORCH_BOX((&op<fwd_splitkv_out, Tensor, OptionalTensor>)));
  m.impl(
      "fwd_splitkv_append",
      TORCH_BOX((&op<fwd_splitkv_append, Tensor, Tensor, OptionalTensor, OptionalTensor, bool>)));
  m.impl("fwd_splitkv_append_lse",
         TORCH_BOX(
             (&op<fwd_splitkv_append_lse, Tensor, Tensor, OptionalTensor, OptionalTensor, bool>)));
  m.impl("fwd_splitkv_append_out",
         TORCH_BOX((&op<fwd_splitkv_append_out, Tensor, OptionalTensor, Tensor, Tensor,
                        OptionalTensor, OptionalTensor, bool>)));
}

}  // namespace flashattn
