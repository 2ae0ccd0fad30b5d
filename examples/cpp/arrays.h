// What the examples share: bfloat16 in a vector, and the same on the GPU.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#if defined(WITH_CUDA)
#include <cuda_runtime.h>

#include <stdexcept>

inline void check(cudaError_t status) {
  if (status != cudaSuccess) { throw std::runtime_error(cudaGetErrorString(status)); }
}
#endif

using BFloat16 = uint16_t;
inline BFloat16 to_bf16(double x) { return (std::bit_cast<uint32_t>(float(x)) + 0x8000u) >> 16; }
inline double to_double(BFloat16 x) { return std::bit_cast<float>(uint32_t{x} << 16); }

inline bool has_gpu() {
#if defined(WITH_CUDA)
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
#else
  return false;
#endif
}

// Where the library will find the numbers: on the CPU they stay where they are; what is taken of a
// GPU's memory is kept until the program ends.
template <class T>
T* place(std::vector<T>& host, [[maybe_unused]] bool on_gpu) {
  T* data = host.data();
#if defined(WITH_CUDA)
  if (on_gpu) {
    check(cudaMalloc(&data, host.size() * sizeof(T)));
    check(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
#endif
  return data;
}

// Waits for the GPU, and brings back what place() put there.
template <class T>
void fetch(std::vector<T>& host, void const* data) {
#if defined(WITH_CUDA)
  if (data != host.data()) {
    check(cudaMemcpy(host.data(), data, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }
#else
  (void)host, (void)data;
#endif
}
