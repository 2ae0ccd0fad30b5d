#include "torch/op_support.h"

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

// Declared by torch only for code that is built for CUDA. Weak, because a CPU-only torch lacks it.
extern "C" AOTI_TORCH_EXPORT AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                               void** stream)
    __attribute__((weak));

namespace flashattn {

void follow_torch_threads() {
  static bool const own_setting = [] {
    char const* const text = std::getenv("FLASHATTN_EXT_NUM_THREADS");
    return text != nullptr && *text != '\0';
  }();
  uint32_t threads = 0;
  if (!own_setting && torch_get_num_threads(&threads) == 0) {
    set_num_threads(static_cast<int>(threads));
  }
}

Score score_of(View const& q, Shape const& shape, std::optional<double> softmax_scale,
               double softcap, OptionalTensor const& alibi_slopes, OptionalTensor const& sinks) {
  Score score;
  score.scale = static_cast<float>(softmax_scale ? *softmax_scale : 1 / std::sqrt(shape.head_dim));
  score.softcap = static_cast<float>(softcap);
  if (alibi_slopes) {
    View const slopes = *alibi_slopes;
    if (slopes.dtype != aoti_torch_dtype_float32()) {
      refuse("alibi_slopes", "expected dtype float32");
    }
    if (slopes.dim() == 2) {
      check_shape(slopes, "alibi_slopes", {shape.batch, shape.heads});
      score.alibi_batch_stride = stride_or_zero(slopes, 0);
    } else {
      check_shape(slopes, "alibi_slopes", {shape.heads});
    }
    check_last_stride(slopes, "alibi_slopes");
    check_device(slopes, "alibi_slopes", q);
    score.alibi_slopes = static_cast<float const*>(slopes.data());
  }
  if (sinks) {
    View const logits = *sinks;
    score.sinks_dtype = dtype_of(logits, "sinks");
    if (logits.dtype != aoti_torch_dtype_float32() && logits.dtype != q.dtype) {
      refuse("sinks", "expected dtype float32 or that of q");
    }
    check_shape(logits, "sinks", {shape.heads});
    check_last_stride(logits, "sinks");
    check_device(logits, "sinks", q);
    score.sinks = logits.data();
  }
  return score;
}

std::vector<int64_t> lse_shape(Sizes q) {
  if (q.size() == 3) { return {q[1], q[0]}; }
  return {q[0], q[2], q[1]};
}

float* checked_lse_data(OptionalTensor const& lse, View const& like, Sizes shape) {
  if (!lse) { return nullptr; }
  View const tensor = *lse;
  if (tensor.dtype != aoti_torch_dtype_float32()) { refuse("lse", "expected dtype float32"); }
  check_device(tensor, "lse", like);
  check_shape(tensor, "lse", shape);
  if (!lse->is_contiguous()) { refuse("lse", "expected a contiguous tensor"); }
  return lse_data(*lse);
}

Tensor empty(Sizes shape, int32_t dtype, View const& like) {
  std::array<int64_t, kMaxDims> strides;
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(shape[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                  strides.data(), dtype, like.device_type,
                                                  like.device_index, &handle));
  return Tensor(handle);
}

void* current_stream(int32_t device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr ||
      aoti_torch_get_current_cuda_stream(device, &stream) != 0) {
    throw Unsupported("q: is on a CUDA device, but this torch cannot tell its current stream");
  }
  return stream;
}

}  // namespace flashattn
