// Operands of the GPU tests: device memory, 16-bit numbers, strides, and the patterns that lie
// around them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "flashattn/flashattn.h"

namespace gpu {

using flashattn::DType;

constexpr uint16_t kNanPattern = 0x7ff1;  // a NaN in both 16-bit types
constexpr int kGuard = 512;               // elements behind the outputs that nobody may write

inline void check(cudaError_t status, char const* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

template <class T>
class DeviceVector {
 public:
  DeviceVector() = default;
  explicit DeviceVector(std::vector<T> const& host) : size_(host.size()) {
    if (size_ == 0) { return; }
    check(cudaMalloc(&data_, size_ * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceVector(DeviceVector const&) = delete;
  DeviceVector(DeviceVector&& other) noexcept { *this = std::move(other); }
  DeviceVector& operator=(DeviceVector&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceVector() { cudaFree(data_); }
  T* data() const { return data_; }
  void assign(std::vector<T> const& host) {  // other contents at the same place
    if (host.size() != size_) { throw std::invalid_argument("assign: another size"); }
    check(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<T> host() const {
    std::vector<T> copy(size_);
    if (size_ > 0) {
      check(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
    }
    return copy;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

inline uint16_t to_bits(DType dtype, float x) {
  if (dtype == DType::kFloat16) { return __half_as_ushort(__float2half_rn(x)); }
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

inline float from_bits(DType dtype, uint16_t bits) {
  if (dtype == DType::kFloat16) { return __half2float(__ushort_as_half(bits)); }
  return __bfloat162float(__ushort_as_bfloat16(bits));
}

inline std::vector<int> prefix_sums(std::vector<int> const& lengths) {
  std::vector<int> sums{0};
  for (int length : lengths) { sums.push_back(sums.back() + length); }
  return sums;
}

inline int sum(std::vector<int> const& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), 0);
}

inline int longest(std::vector<int> const& lengths) {
  return *std::max_element(lengths.begin(), lengths.end());
}

enum class Order {
  kRowsFirst,
  kHeadsFirst
};  // (batch, row, head, dim), or a transposed view of it

// Positions of the elements of a (batches, rows, heads, dim) operand.
struct Layout {
  int batches, rows, heads, dim;
  int64_t batch_stride, row_stride, head_stride;

  Layout(int batches_, int rows_, int heads_, int dim_, int gap, Order order)
      : batches(batches_), rows(rows_), heads(heads_), dim(dim_) {
    int64_t const inner = dim + gap;
    bool const rows_first = order == Order::kRowsFirst;
    row_stride = rows_first ? inner * heads : inner;
    head_stride = rows_first ? inner : inner * rows;
    batch_stride = inner * heads * rows;
  }
  int64_t at(int batch, int row, int head, int d) const {
    return batch * batch_stride + row * row_stride + head * head_stride + d;
  }
  int64_t size() const {  // ends with the last element, not with its gap
    return batches * rows * heads == 0 ? 0 : at(batches - 1, rows - 1, heads - 1, dim - 1) + 1;
  }
};

inline flashattn::Input input(Layout const& layout, DeviceVector<uint16_t> const& device) {
  return {device.data(), layout.batch_stride, layout.row_stride, layout.head_stride};
}

}  // namespace gpu
