// What the operators have in common: arguments that become parameters, results, device and stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "flashattn/flashattn.h"
#include "torch/tensor_checks.h"

namespace flashattn {

inline Device device_of(View const& q) { return q.is_cuda() ? Device::kCuda : Device::kCpu; }

// Rows of the longest sequence: no sequence is longer than its tensor. A negative bound is none.
inline int bounded(char const* name, int64_t rows, int64_t bound) {
  return narrow(name, bound >= 0 && bound < rows ? bound : rows);
}

inline Window window_of(int64_t left, int64_t right) {
  return {.left = narrow("window_left", left), .right = narrow("window_right", right)};
}

// Without a scale, that of Vaswani et al. 2017 (arXiv:1706.03762, equation 1).
Score score_of(View const& q, Shape const& shape, std::optional<double> softmax_scale,
               double softcap, OptionalTensor const& alibi_slopes, OptionalTensor const& sinks);

// (batch, heads, rows) of a dense q or out, (heads, rows) of a packed one.
std::vector<int64_t> lse_shape(Sizes q);

inline float* lse_data(Tensor const& lse) { return static_cast<float*>(lse.mutable_data_ptr()); }

// Of an lse that the caller gives; null when absent. It is checked against `like`'s device.
float* checked_lse_data(OptionalTensor const& lse, View const& like, Sizes shape);

// Contiguous, not initialised, on the device of `like`.
Tensor empty(Sizes shape, int32_t dtype, View const& like);

// The result of empty_out: what `strided` would have to ask torch for.
inline Output strided_out(View const& q, Tensor const& out) {
  int64_t const row = q.dim() - 3, head_dim = q.size(row + 2), width = q.size(row + 1) * head_dim;
  return {.data = out.mutable_data_ptr(),
          .batch_stride = row == 0 ? 0 : q.size(row) * width,
          .row_stride = width,
          .head_stride = head_dim};
}

// For the results of q.
inline Tensor empty_out(View const& q) { return empty(q.sizes, q.dtype, q); }
inline Tensor empty_lse(View const& q) {
  return empty(lse_shape(q.sizes), aoti_torch_dtype_float32(), q);
}

// torch.set_num_threads counts for the CPU backend too, unless its own variable is set.
void follow_torch_threads();

void* current_stream(int32_t device);

// Calls `launch(stream)` with q's device current and its current stream.
template <class Launch>
void on_device_of(View const& q, Launch const& launch) {
  if (!q.is_cuda()) {
    follow_torch_threads();
    launch(cudaStream_t(nullptr));
    return;
  }
  std::optional<torch::stable::accelerator::DeviceGuard> guard;  // 0.3 us, mostly for nothing
  if (torch::stable::accelerator::getCurrentDeviceIndex() != q.device_index) {
    guard.emplace(q.device_index);
  }
  launch(static_cast<cudaStream_t>(current_stream(q.device_index)));
}

}  // namespace flashattn
