// The one way in which kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "flashattn/error.h"

namespace flashattn {

inline void check_cuda(char const* function, cudaError_t status, char const* what) {
  if (status != cudaSuccess) {
    throw CudaError(std::string(function) + ": " + what + ": " + cudaGetErrorString(status));
  }
}

inline void check_grid(char const* function, int64_t blocks) {
  if (blocks > INT32_MAX) {
    throw Unsupported(std::string(function) + ": " + std::to_string(blocks) +
                      " query tiles (sequences x heads x blocks of queries); the grid holds 2147483647");
  }
}

template <class... Parameters, class... Arguments>
void launch(char const* function, void (*kernel)(Parameters...), dim3 grid, int threads, int smem_bytes,
            cudaStream_t stream, Arguments const&... arguments) {
  if (smem_bytes > 48 * 1024) {
    check_cuda(function, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes),
               "cannot reserve shared memory");
  }
  kernel<<<grid, threads, smem_bytes, stream>>>(arguments...);
  check_cuda(function, cudaGetLastError(), "cannot launch the kernel");
}

}  // namespace flashattn
