// From parameters to the backend that serves them: the CPU, or the kernel of a head dim, an
// element type and an architecture.
#include <string>
#include <utility>

#include "cpu/cpu.h"
#include "flashattn/flashattn.h"
#include "validate.h"

#if defined(FLASHATTN_ARCHS)
#include <cuda_runtime_api.h>

#include "sm80/launch.h"
#endif

namespace flashattn {
namespace {

#if defined(FLASHATTN_ARCHS)

using Archs = std::integer_sequence<int, FLASHATTN_ARCHS>;        // ascending
using HeadDims = std::integer_sequence<int, FLASHATTN_HEAD_DIMS>;  // ascending
using Launch = void (*)(FlashFwdParams const&, cudaStream_t);

template <int... kNumbers>
std::string to_list(std::integer_sequence<int, kNumbers...>, std::string const& prefix) {
  std::string list;
  ((list += (list.empty() ? "" : ", ") + prefix + std::to_string(kNumbers)), ...);
  return list;
}

void check_cuda(cudaError_t status, char const* what) {
  if (status != cudaSuccess) { throw CudaError(std::string(what) + ": " + cudaGetErrorString(status)); }
}

// 90 for compute capability 9.0.
int capability_of_current_device() {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "cudaDeviceGetAttribute");
  return 10 * major + minor;
}

// Machine code runs on its own major version from its minor version on; PTX on anything newer.
template <int... kArchs>
int best_arch(std::integer_sequence<int, kArchs...> archs, int capability) {
  int best = 0;
  ((best = kArchs / 10 == capability / 10 && kArchs <= capability ? kArchs : best), ...);
  if (best == 0 && FLASHATTN_PTX_ARCH <= capability) { best = FLASHATTN_PTX_ARCH; }
  if (best == 0) {
    throw Unsupported("this GPU is sm_" + std::to_string(capability) +
                      ", but the CUDA kernels were built for " + to_list(archs, "sm_") +
                      " (and PTX of " + std::to_string(FLASHATTN_PTX_ARCH) +
                      "). Rebuild with TORCH_CUDA_ARCH_LIST=" + std::to_string(capability / 10) + "." +
                      std::to_string(capability % 10));
  }
  return best;
}

template <DType kDType, int kArch, int... kHeadDims>
Launch kernel_for_head_dim(std::integer_sequence<int, kHeadDims...> head_dims, int head_dim) {
  Launch launch = nullptr;
  (void)((head_dim <= kHeadDims && (launch = &sm80::launch_flash_fwd<kDType, kHeadDims, kArch>)) || ...);
  if (launch == nullptr) {
    throw Unsupported("head_dim " + std::to_string(head_dim) +
                      " needs a larger kernel than this build has (" + to_list(head_dims, "") +
                      "). Rebuild with FLASHATTN_EXT_HEAD_DIMS unset");
  }
  return launch;
}

template <DType kDType, int... kArchs>
Launch kernel_for_arch(std::integer_sequence<int, kArchs...>, int arch, int head_dim) {
  Launch launch = nullptr;
  (void)((arch == kArchs && (launch = kernel_for_head_dim<kDType, kArchs>(HeadDims{}, head_dim))) || ...);
  return launch;
}

void cuda_flash_fwd(FlashFwdParams const& params, cudaStream_t stream) {
  int const arch = best_arch(Archs{}, capability_of_current_device());
  int const head_dim = params.shape.head_dim;
  Launch const launch = params.dtype == DType::kFloat16
                            ? kernel_for_arch<DType::kFloat16>(Archs{}, arch, head_dim)
                            : kernel_for_arch<DType::kBFloat16>(Archs{}, arch, head_dim);
  launch(params, stream);
}

#else

[[noreturn]] void cuda_flash_fwd(FlashFwdParams const&, cudaStream_t) {
  throw Unsupported(
      "flashattn_ext was built without CUDA kernels: " FLASHATTN_CUDA_OFF_REASON
      ". Install the CUDA toolkit, set CUDA_HOME to it and build again: FLASHATTN_EXT_CUDA=on "
      "pip install --no-cache-dir --force-reinstall --no-deps .");
}

#endif

}  // namespace

void run_flash_fwd(FlashFwdParams const& params, cudaStream_t stream) {
  validate(params);
  if (!has_work(params)) { return; }
  if (params.device == Device::kCpu) {
    cpu::flash_fwd(params);
  } else {
    cuda_flash_fwd(params, stream);
  }
}

}  // namespace flashattn
