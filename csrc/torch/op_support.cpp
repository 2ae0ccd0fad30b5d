#include "torch/op_support.h"

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstdlib>

// Declared by torch only for code that is built for CUDA. Weak, because a CPU-only torch lacks it.
extern "C" AOTI_TORCH_EXPORT AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                               void** stream)
    __attribute__((weak));

namespace flashattn {

void follow_torch_threads() {
  static bool const own_setting = std::getenv("FLASHATTN_EXT_NUM_THREADS") != nullptr;
  uint32_t threads = 0;
  if (!own_setting && torch_get_num_threads(&threads) == 0) {
    set_num_threads(static_cast<int>(threads));
  }
}

Score score_of(Tensor const& q, Shape const& shape, double softmax_scale, double softcap,
               OptionalTensor const& alibi_slopes, OptionalTensor const& sinks) {
  Score score;
  score.scale = static_cast<float>(softmax_scale);
  score.softcap = static_cast<float>(softcap);
  if (alibi_slopes) {
    Tensor const& slopes = *alibi_slopes;
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
    check_device(slopes, "alibi_slopes", q);
    score.alibi_slopes = static_cast<float const*>(slopes.const_data_ptr());
  }
  if (sinks) {
    score.sinks_dtype = dtype_of(*sinks, "sinks");
    if (sinks->scalar_type() != ScalarType::Float && sinks->scalar_type() != q.scalar_type()) {
      refuse("sinks", "expected dtype float32 or that of q");
    }
    check_shape(*sinks, "sinks", {shape.heads});
    check_last_stride(*sinks, "sinks");
    check_device(*sinks, "sinks", q);
    score.sinks = sinks->const_data_ptr();
  }
  return score;
}

std::vector<int64_t> lse_shape(Tensor const& q) {
  if (q.dim() == 3) { return {q.size(1), q.size(0)}; }
  return {q.size(0), q.size(2), q.size(1)};
}

float* checked_lse_data(OptionalTensor const& lse, Tensor const& like,
                        std::vector<int64_t> const& shape) {
  if (!lse) { return nullptr; }
  if (lse->scalar_type() != ScalarType::Float) { refuse("lse", "expected dtype float32"); }
  check_device(*lse, "lse", like);
  check_shape(*lse, "lse", shape);
  if (!lse->is_contiguous()) { refuse("lse", "expected a contiguous tensor"); }
  return lse_data(*lse);
}

Tensor empty(std::vector<int64_t> const& shape, ScalarType dtype, Tensor const& like) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i) {
    strides[i - 1] = strides[i] * std::max<int64_t>(shape[i], 1);
  }
  int32_t const type =
      like.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), type,
      like.get_device_index(), &handle));
  return Tensor(handle);
}

std::tuple<Tensor, Tensor> empty_results(Tensor const& q) {
  Sizes const sizes = q.sizes();
  return {empty({sizes.begin(), sizes.end()}, q.scalar_type(), q),
          empty(lse_shape(q), ScalarType::Float, q)};
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
