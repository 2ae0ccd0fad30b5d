// The C++ API. It knows neither torch nor CuTe; tensors are pointers and strides (params.h).
//
// Every function throws InvalidArgument for arguments that break its contract, Unsupported for
// what this build or device cannot do, and CudaError when a launch fails (error.h). Nothing is
// launched and nothing is written before the checks have passed. Threads may call at the same time;
// calls that share a workspace have to follow each other on one stream. The first launch of a
// kernel loads it, so a call of the same kind has to come before the capture of a CUDA graph.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "flashattn/error.h"
#include "flashattn/params.h"

// The CUDA runtime's own typedef, so that its headers are not needed.
typedef struct CUstream_st* cudaStream_t;

namespace flashattn {

// Attention of every query row over the keys that it sees: out and, if wanted, lse.
// CUDA: queued on `stream` of the current device; the lengths are never read on the host.
// CPU: done on return; `stream` is ignored.
void run_flash_fwd(FlashFwdParams const& params, cudaStream_t stream = nullptr);

// Attention over a cache of keys and values: decode, chunks of a prompt, and batches of both. First
// appends new tokens, if there are any. Lengths, page ids and indices are read on the device only
// and clamped there: a token past the capacity or in a page that does not exist is no key, and is
// never written. With more than one split, parts are computed first and then merged.
void run_flash_splitkv_fwd(FlashSplitkvParams const& params, cudaStream_t stream = nullptr);

// The same for a caller that gets the workspace when its size is known, in one pass: `allocate` is
// called at most once, before anything is launched, unless the parameters have a workspace. Null is
// refused.
using AllocateWorkspace = std::function<void*(size_t bytes)>;
void run_flash_splitkv_fwd(FlashSplitkvParams const& params, AllocateWorkspace const& allocate,
                           cudaStream_t stream = nullptr);

// Bytes of workspace that run_flash_splitkv_fwd needs. Follows from sizes alone, so it is the same
// for every call with these shapes (and may be asked for before a CUDA graph is captured). Needs
// the current device, for its number of multiprocessors.
size_t splitkv_workspace_size(FlashSplitkvParams const& params);

// out = sum over s of e^(lse_s - lse) out_s, lse = log of the sum of e^lse_s. Where all parts are
// empty, out is 0 and lse -inf.
void run_flash_combine(FlashCombineParams const& params, cudaStream_t stream = nullptr);

// Threads that one call of the CPU backend may use, the caller included. At first
// FLASHATTN_EXT_NUM_THREADS, else OMP_NUM_THREADS, else the cores of this process; 0 returns to
// that.
void set_num_threads(int count);

// What was compiled into this library.
struct BuildInfo {
  std::vector<int> cuda_archs;  // 80 for sm_80; empty in a CPU-only build
  int ptx_arch = 0;             // newer GPUs run this one's PTX; 0 when none is embedded
  std::vector<int> head_dims;   // kernels; other head dims use the next larger one
  std::string cpu_simd;         // the instruction set that the CPU backend picked on this machine
};
BuildInfo build_info();

}  // namespace flashattn
