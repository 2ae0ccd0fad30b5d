// The operators of `torch.ops.flashattn_ext`, on torch's stable ABI: no Python and no ATen, so that
// one binary loads with every torch from 2.10 on, with or without CUDA.
//
// Here is what needs a tensor; validate() checks the rest. The Python layer, which most callers come
// through, explains a wrong argument in more words.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "flashattn/flashattn.h"
#include "torch/tensor_checks.h"

// Declared by torch only for code that is built for CUDA. Weak, because a CPU-only torch lacks it.
extern "C" AOTI_TORCH_EXPORT AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream) __attribute__((weak));

namespace flashattn {
namespace {

struct Arguments {
  Tensor const& q;
  Tensor const& k;
  Tensor const& v;
  OptionalTensor const& cu_seqlens_q;
  OptionalTensor const& cu_seqlens_k;
  OptionalTensor const& seqused_k;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  double softmax_scale;
  int64_t window_left;
  int64_t window_right;
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
    refuse("q", "expected ", rank, " dims, got shape ", to_string(a.q.sizes()));
  }
  check_last_stride(a.q, "q");
  if (a.k.dim() != rank || a.k.size(rank - 1) != a.q.size(rank - 1) ||
      (!a.packed() && a.k.size(0) != a.q.size(0))) {
    refuse("k", "expected q's head dim", a.packed() ? "" : " and batch", ", got shape ",
           to_string(a.k.sizes()), " for q ", to_string(a.q.sizes()));
  }
  check_operand(a.k, "k", a.k, a.q);
  check_operand(a.v, "v", a.k, a.q);
}

Shape shape_of(Arguments const& a) {
  int64_t const row = a.packed() ? 0 : 1;
  Shape shape;
  shape.batch = narrow("batch", a.packed() ? a.cu_seqlens_q->numel() - 1 : a.q.size(0));
  shape.heads = narrow("q", a.q.size(row + 1));
  shape.heads_kv = narrow("k", a.k.size(row + 1));
  shape.head_dim = narrow("q", a.q.size(row + 2));
  shape.seqlen_q = narrow("q", a.q.size(row));
  shape.seqlen_k = narrow("k", a.k.size(row));
  if (shape.batch < 0) { refuse("cu_seqlens_q", "expected batch + 1 entries, got none"); }
  if (a.packed()) {  // no sequence is longer than its tensor
    if (a.max_seqlen_q >= 0 && a.max_seqlen_q < shape.seqlen_q) {
      shape.seqlen_q = static_cast<int>(a.max_seqlen_q);
    }
    if (a.max_seqlen_k >= 0 && a.max_seqlen_k < shape.seqlen_k) {
      shape.seqlen_k = static_cast<int>(a.max_seqlen_k);
    }
  }
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

Score score_of(Arguments const& a, Shape const& shape) {
  Score score;
  score.scale = static_cast<float>(a.softmax_scale);
  score.softcap = static_cast<float>(a.softcap);
  if (a.alibi_slopes) {
    Tensor const& slopes = *a.alibi_slopes;
    if (slopes.scalar_type() != ScalarType::Float) {
      refuse("alibi_slopes", "expected dtype float32");
    }
    if (slopes.dim() == 2) {
      check_shape(slopes, "alibi_slopes", {shape.batch, shape.heads});
      score.alibi_batch_stride = stride_or_zero(slopes, 0);
    } else {
      check_shape(slopes, "alibi_slopes", {shape.heads});
    }
    check_last_stride(slopes, "alibi_slopes");
    check_device(slopes, "alibi_slopes", a.q);
    score.alibi_slopes = static_cast<float const*>(slopes.const_data_ptr());
  }
  if (a.sinks) {
    Tensor const& sinks = *a.sinks;
    score.sinks_dtype = dtype_of(sinks, "sinks");
    if (sinks.scalar_type() != ScalarType::Float && sinks.scalar_type() != a.q.scalar_type()) {
      refuse("sinks", "expected dtype float32 or that of q");
    }
    check_shape(sinks, "sinks", {shape.heads});
    check_last_stride(sinks, "sinks");
    check_device(sinks, "sinks", a.q);
    score.sinks = sinks.const_data_ptr();
  }
  return score;
}

// Everything but out and lse.
FlashFwdParams input_params(Arguments const& a) {
  check_operands(a);
  FlashFwdParams params;
  params.device = a.q.is_cuda() ? Device::kCuda : Device::kCpu;
  params.dtype = dtype_of(a.q, "q");
  params.shape = shape_of(a);
  params.q = strided(a.q, a.q.const_data_ptr());
  params.k = strided(a.k, a.k.const_data_ptr());
  params.v = strided(a.v, a.v.const_data_ptr());
  params.lengths = lengths_of(a, params.shape);
  params.window = {.left = narrow("window_left", a.window_left),
                   .right = narrow("window_right", a.window_right)};
  params.score = score_of(a, params.shape);
  return params;
}

std::vector<int64_t> lse_shape(Arguments const& a) {
  if (a.packed()) { return {a.q.size(1), a.q.size(0)}; }
  return {a.q.size(0), a.q.size(2), a.q.size(1)};
}

Tensor empty(std::vector<int64_t> const& shape, ScalarType dtype, Tensor const& q) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i) {
    strides[i - 1] = strides[i] * std::max<int64_t>(shape[i], 1);
  }
  int32_t const type = q.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), type,
      q.get_device_index(), &handle));
  return Tensor(handle);
}

void run(FlashFwdParams& params, Tensor const& q, Tensor const& out, float* lse) {
  params.out = strided(out, out.mutable_data_ptr());
  params.lse = lse;
  if (params.device == Device::kCpu) {
    run_flash_fwd(params);
    return;
  }
  int32_t const device = q.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(device);
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr ||
      aoti_torch_get_current_cuda_stream(device, &stream) != 0) {
    throw Unsupported("q: is on a CUDA device, but this torch cannot tell its current stream");
  }
  run_flash_fwd(params, static_cast<cudaStream_t>(stream));
}

// The first line of both schemas and of both functions.
#define FLASHATTN_FWD_SCHEMA                                                                      \
  "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, " \
  "int max_seqlen_q, int max_seqlen_k, float softmax_scale, int window_left, int window_right, "  \
  "float softcap, Tensor? alibi_slopes, Tensor? sinks"

std::tuple<Tensor, Tensor> fwd(Tensor const& q, Tensor const& k, Tensor const& v,
                               OptionalTensor const& cu_seqlens_q,
                               OptionalTensor const& cu_seqlens_k, OptionalTensor const& seqused_k,
                               int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale,
                               int64_t window_left, int64_t window_right, double softcap,
                               OptionalTensor const& alibi_slopes, OptionalTensor const& sinks) {
  Arguments const a{q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k,
                    softmax_scale, window_left, window_right, softcap, alibi_slopes, sinks};
  FlashFwdParams params = input_params(a);
  Sizes const sizes = q.sizes();
  Tensor const out = empty({sizes.begin(), sizes.end()}, q.scalar_type(), q);
  Tensor const lse = empty(lse_shape(a), ScalarType::Float, q);
  run(params, q, out, static_cast<float*>(lse.mutable_data_ptr()));
  return {out, lse};
}

void fwd_out(Tensor const& q, Tensor const& k, Tensor const& v, OptionalTensor const& cu_seqlens_q,
             OptionalTensor const& cu_seqlens_k, OptionalTensor const& seqused_k,
             int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale, int64_t window_left,
             int64_t window_right, double softcap, OptionalTensor const& alibi_slopes,
             OptionalTensor const& sinks, Tensor const& out, OptionalTensor const& lse) {
  Arguments const a{q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k,
                    softmax_scale, window_left, window_right, softcap, alibi_slopes, sinks};
  FlashFwdParams params = input_params(a);
  check_operand(out, "out", q, q);
  float* lse_data = nullptr;
  if (lse) {
    if (lse->scalar_type() != ScalarType::Float) { refuse("lse", "expected dtype float32"); }
    check_device(*lse, "lse", q);
    check_shape(*lse, "lse", lse_shape(a));
    if (!lse->is_contiguous()) { refuse("lse", "expected a contiguous tensor"); }
    lse_data = static_cast<float*>(lse->mutable_data_ptr());
  }
  run(params, q, out, lse_data);
}

}  // namespace
}  // namespace flashattn

STABLE_TORCH_LIBRARY(flashattn_ext, m) {
  m.def("fwd(" FLASHATTN_FWD_SCHEMA ") -> (Tensor out, Tensor lse)");
  m.def("fwd_out(" FLASHATTN_FWD_SCHEMA ", Tensor(a!) out, Tensor(b!)? lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CPU, m) {
  m.impl("fwd", TORCH_BOX(&flashattn::fwd));
  m.impl("fwd_out", TORCH_BOX(&flashattn::fwd_out));
}

STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CUDA, m) {
  m.impl("fwd", TORCH_BOX(&flashattn::fwd));
  m.impl("fwd_out", TORCH_BOX(&flashattn::fwd_out));
}
