// The C++ API. It knows neither torch nor CuTe; tensors are pointers and strides (params.h).
//
// Every function throws InvalidArgument for arguments that break its contract, Unsupported for
// what this build or device cannot do, and CudaError when a launch fails (error.h). Nothing is
// launched and nothing is written before the checks have passed.
#pragma once

#include <string>
#include <vector>

#include "flashattn/error.h"
#include "flashattn/params.h"

typedef struct CUstream_st* cudaStream_t;  // the CUDA runtime's own typedef, so that its headers are not needed

namespace flashattn {

// Attention of every query row over the keys that it sees: out and, if wanted, lse.
// CUDA: queued on `stream` of the current device; the lengths are never read on the host.
// CPU: done on return; `stream` is ignored.
void run_flash_fwd(FlashFwdParams const& params, cudaStream_t stream = nullptr);

// What was compiled into this library.
struct BuildInfo {
  std::vector<int> cuda_archs;  // 80 for sm_80; empty in a CPU-only build
  int ptx_arch = 0;             // newer GPUs run this one's PTX; 0 when none is embedded
  std::vector<int> head_dims;   // kernels; other head dims use the next larger one
  std::string cpu_simd;         // the instruction set that the CPU backend picked on this machine
};
BuildInfo build_info();

}  // namespace flashattn
