// The operators `fwd`, `fwd_lse` and `fwd_out`.
#include <tuple>

#include "flashattn/flashattn.h"
#include "torch/op_support.h"
#include "torch/ops.h"
#include "torch/overlap.h"

namespace flashattn {
namespace {

struct Arguments {
  View q;
  View k;
  View v;
  std::optional<double> softmax_scale;
  int64_t window_left;
  int64_t window_right;
  OptionalTensor const& cu_seqlens_q;
  OptionalTensor const& cu_seqlens_k;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  OptionalTensor const& seqused_k;
  double softcap;
  OptionalTensor const& alibi_slopes;
  OptionalTensor const& sinks;

  bool packed() const { return cu_seqlens_q.has_value(); }
};

void check_operands(Arguments const& a) {
  if (a.cu_seqlens_q.has_value() != a.cu_seqlens_k.has_value()) {
    refuse("cu_seqlens_q, cu_seqlens_k", "expected both or none");
  }
  int64_t const rank = a.packed() ? 3 : 4;
  if (a.q.dim() != rank) {
    refuse("q", "expected ", rank, " dims, got shape ", to_string(a.q.sizes));
  }
  check_layout(a.q, "q");
  if (a.k.dim() != rank || a.k.size(rank - 1) != a.q.size(rank - 1) ||
      (!a.packed() && a.k.size(0) != a.q.size(0))) {
    refuse("k", "expected q's head dim", a.packed() ? "" : " and batch", ", got shape ",
           to_string(a.k.sizes), " for q ", to_string(a.q.sizes));
  }
  check_operand(a.k, "k", a.k, a.q);
  check_operand(a.v, "v", a.k, a.q);
  check_layout(a.k, "k");
  check_layout(a.v, "v");
  check_key_heads(a.k, "k", a.q);
}

Shape shape_of(Arguments const& a) {
  int64_t const row = a.packed() ? 0 : 1;
  Shape shape;
  shape.batch = narrow("batch", a.packed() ? a.cu_seqlens_q->numel() - 1 : a.q.size(0));
  shape.heads = narrow("q", a.q.size(row + 1));
  shape.heads_kv = narrow("k", a.k.size(row + 1));
  shape.head_dim = narrow("q", a.q.size(row + 2));
  shape.seqlen_q = bounded("q", a.q.size(row), a.packed() ? a.max_seqlen_q : -1);
  shape.seqlen_k = bounded("k", a.k.size(row), a.packed() ? a.max_seqlen_k : -1);
  if (shape.batch < 0) { refuse("cu_seqlens_q", "expected batch + 1 entries, got none"); }
  return shape;
}

Lengths lengths_of(Arguments const& a, Shape const& shape) {
  Lengths result;
  int64_t const batch = shape.batch;
  result.cu_seqlens_q = lengths(a.cu_seqlens_q, "cu_seqlens_q", batch + 1, a.q);
  result.cu_seqlens_k = lengths(a.cu_seqlens_k, "cu_seqlens_k", batch + 1, a.q);
  result.seqused_k = lengths(a.seqused_k, "seqused_k", batch, a.q);
  if (a.packed()) {
    result.total_q = narrow("q", a.q.size(0));
    result.total_k = narrow("k", a.k.size(0));
  }
  return result;
}

// Everything but out and lse.
FlashFwdParams input_params(Arguments const& a) {
  check_operands(a);
  FlashFwdParams params;
  params.device = device_of(a.q);
  params.dtype = dtype_of(a.q, "q");
  params.shape = shape_of(a);
  params.q = strided(a.q, a.q.data());
  params.k = strided(a.k, a.k.data());
  params.v = strided(a.v, a.v.data());
  params.lengths = lengths_of(a, params.shape);
  params.window = window_of(a.window_left, a.window_right);
  params.score = score_of(a.q, params.shape, a.softmax_scale, a.softcap, a.alibi_slopes, a.sinks);
  return params;
}

void run(FlashFwdParams& params, View const& q, Output const& out, float* lse) {
  params.out = out;
  params.lse = lse;
  on_device_of(q, [&](cudaStream_t stream) { run_flash_fwd(params, stream); });
}

Tensor fwd(Arguments const& a) {
  FlashFwdParams params = input_params(a);
  Tensor out = empty_out(a.q);
  run(params, a.q, strided_out(a.q, out), nullptr);
  return out;
}

std::tuple<Tensor, Tensor> fwd_lse(Arguments const& a) {
  FlashFwdParams params = input_params(a);
  Tensor out = empty_out(a.q), lse = empty_lse(a.q);
  run(params, a.q, strided_out(a.q, out), lse_data(lse));
  return {out, lse};
}

void fwd_out(Arguments const& a, Tensor const& out, OptionalTensor const& lse) {
  FlashFwdParams params = input_params(a);
  check_operand(out, "out", a.q, a.q);
  check_layout(out, "out");
  check_written(out, "out",
                {named("q", a.q.tensor), named("k", a.k.tensor), named("v", a.v.tensor),
                 named("cu_seqlens_q", a.cu_seqlens_q), named("cu_seqlens_k", a.cu_seqlens_k),
                 named("seqused_k", a.seqused_k), named("alibi_slopes", a.alibi_slopes),
                 named("sinks", a.sinks)});
  run(params, a.q, strided(out, out.mutable_data_ptr()),
      checked_lse_data(lse, a.q, lse_shape(a.q.sizes)));
}

// What is seldom given comes last: a call that leaves it out is cheaper. Causal: window_right=0.
#define FLASHATTN_INPUTS                                                                  \
  "Tensor q, Tensor k, Tensor v, int window_right=-1, float? softmax_scale=None, "        \
  "int window_left=-1, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "            \
  "int max_seqlen_q=-1, int max_seqlen_k=-1, Tensor? seqused_k=None, float softcap=0.0, " \
  "Tensor? alibi_slopes=None, Tensor? sinks=None"

// An operator from a function of Arguments and of what the schema has before them.
template <auto kFunction, class... First>
auto op(First const&... first, Tensor const& q, Tensor const& k, Tensor const& v,
        int64_t window_right, std::optional<double> const& softmax_scale, int64_t window_left,
        OptionalTensor const& cu_seqlens_q, OptionalTensor const& cu_seqlens_k,
        int64_t max_seqlen_q, int64_t max_seqlen_k, OptionalTensor const& seqused_k, double softcap,
        OptionalTensor const& alibi_slopes, OptionalTensor const& sinks) {
  return kFunction({q, k, v, softmax_scale, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
                    max_seqlen_q, max_seqlen_k, seqused_k, softcap, alibi_slopes, sinks},
                   first...);
}

}  // namespace

void define_fwd(Library& m) {
  m.def("fwd(" FLASHATTN_INPUTS ") -> Tensor");
  m.def("fwd_lse(" FLASHATTN_INPUTS ") -> (Tensor out, Tensor lse)");
  m.def("fwd_out(Tensor(a!) out, Tensor(b!)? lse, " FLASHATTN_INPUTS ") -> ()");
}

void implement_fwd(Library& m) {
  m.impl("fwd", TORCH_BOX((&op<fwd>)));
  m.impl("fwd_lse", TORCH_BOX((&op<fwd_lse>)));
  m.impl("fwd_out", TORCH_BOX((&op<fwd_out, Tensor, OptionalTensor>)));
}

}  // namespace flashattn
