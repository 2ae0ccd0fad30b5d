// What the operators have in common: arguments that become parameters, results, device and stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "flashattn/flashattn.h"
#include "torch/tensor_checks.h"

namespace flashattn {

inline Device device_of(Tensor const& q) { return q.is_cuda() ? Device::kCuda : Device::kCpu; }

// Rows of the longest sequence: no sequence is longer than its tensor. A negative bound is none.
inline int bounded(char const* name, int64_t rows, int64_t bound) {
  return narrow(name, bound >= 0 && bound < rows ? bound : rows);
}

inline Window window_of(int64_t left, int64_t right) {
  return {.left = narrow("window_left", left), .right = narrow("window_right", right)};
}

Score score_of(Tensor const& q, Shape const& shape, double softmax_scale, double softcap,
               OptionalTensor const& alibi_slopes, OptionalTensor const& sinks);

// (batch, heads, rows) of a dense q or out, (heads, rows) of a packed one.
std::vector<int64_t> lse_shape(Tensor const& q);

inline float* lse_data(Tensor const& lse) { return static_cast<float*>(lse.mutable_data_ptr()); }

// Of an lse that the caller gives; null when absent. It is checked against `like`'s device.
float* checked_lse_data(OptionalTensor const& lse, Tensor const& like,
                        std::vector<int64_t> const& shape);

// Contiguous, not initialised, on the device of `like`.
Tensor empty(std::vector<int64_t> const& shape, ScalarType dtype, Tensor const& like);

// Out and lse for q.
std::tuple<Tensor, Tensor> empty_results(Tensor const& q);

// torch.set_num_threads counts for the CPU backend too, unless its own variable is set.
void follow_torch_threads();

void* current_stream(int32_t device);

// Calls `launch(stream)` with q's device current and its current stream.
template <class Launch>
void on_device_of(Tensor const& q, Launch const& launch) {
  if (!q.is_cuda()) {
    follow_torch_threads();
    launch(cudaStream_t(nullptr));
    return;
  }
  int32_t const device = q.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(device);
  launch(static_cast<cudaStream_t>(current_stream(device)));
}

}  // namespace flashattn
