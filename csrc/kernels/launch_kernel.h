// The one way in which kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "flashattn/error.h"

namespace flashattn {

inline void check_cuda(char const* function, cudaError_t status, char const* what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // or the next launch would report it again
    throw CudaError(std::string(function) + ": " + what + ": " + cudaGetErrorString(status));
  }
}

inline void check_grid(char const* function, int64_t blocks) {
  if (blocks > INT32_MAX) {
    throw Unsupported(std::string(function) + ": " + std::to_string(blocks) +
                      " query tiles (sequences x heads x blocks of queries); the grid holds 2147483647");
  }
}

// Programmatic dependent launch (CUDA C++ Programming Guide, 4.5; compute capability 9.0): a kernel that
// is launched with `overlap` may start as soon as all thread blocks of the kernel before it have called
// let_next_kernel_start(), and then waits in wait_for_previous_kernel() until that one is complete.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows a kernel more than the 48 KB of shared memory that it has anyway; once for each kernel and GPU, as
// otherwise every launch would pay for it.
inline void reserve_shared_memory(char const* function, void const* kernel, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<void const*, int>, int> reserved;
  int device = 0;
  check_cuda(function, cudaGetDevice(&device), "cannot reserve shared memory");
  std::lock_guard const lock(mutex);
  int& most = reserved[{kernel, device}];
  if (bytes <= most) { return; }
  check_cuda(function, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "cannot reserve shared memory");
  most = bytes;
}

template <class... Parameters, class... Arguments>
void launch(char const* function, void (*kernel)(Parameters...), dim3 grid, int threads, int smem_bytes,
            cudaStream_t stream, bool overlap, Arguments const&... arguments) {
  if (smem_bytes > 48 * 1024) { reserve_shared_memory(function, reinterpret_cast<void const*>(kernel), smem_bytes); }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  check_cuda(function, cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "cannot launch the kernel");
}

}  // namespace flashattn
