// From parameters to the backend that serves them: the CPU, or the kernel of a head dim, an
// element type and an architecture.
#include <algorithm>
#include <array>
#include <initializer_list>
#include <mutex>
#include <string>
#include <utility>

#include "cpu/cpu.h"
#include "flashattn/flashattn.h"
#include "validate.h"

#if defined(FLASHATTN_ARCHS)
#include <cuda_runtime_api.h>

#include "kernels/kernels.h"
#include "sm80/launch.h"
#endif

namespace flashattn {
namespace {

#if defined(FLASHATTN_ARCHS)

using Archs = std::integer_sequence<int, FLASHATTN_ARCHS>;         // ascending
using HeadDims = std::integer_sequence<int, FLASHATTN_HEAD_DIMS>;  // ascending

// The entry points of one instantiation of forward.cu and decode.cu.
struct Kernels {
  using Splitkv = void (*)(FlashSplitkvParams const&, SplitkvPlan const&, cudaStream_t);
  void (*flash_fwd)(FlashFwdParams const&, cudaStream_t) = nullptr;
  Splitkv chunk = nullptr;
  Splitkv short_chunk = nullptr;  // for head dims that have one
  Splitkv decode = nullptr;
  Splitkv wide_decode = nullptr;
};

template <int... kNumbers>
std::string to_list(std::integer_sequence<int, kNumbers...>, std::string const& prefix) {
  std::string list;
  ((list += (list.empty() ? "" : ", ") + prefix + std::to_string(kNumbers)), ...);
  return list;
}

void check_cuda(cudaError_t status, char const* what) {
  if (status == cudaSuccess) { return; }
  cudaGetLastError();  // or the next launch would report it again
  throw CudaError(std::string(what) + ": " + cudaGetErrorString(status));
}

// What a call asks of a GPU.
struct Gpu {
  int capability = 0;  // 90 for compute capability 9.0
  int multiprocessors = 0;
  int shared_memory = 0;  // bytes that a thread block can have
};

Gpu ask_gpu(int device) {
  auto const attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  };
  return {.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                        attribute(cudaDevAttrComputeCapabilityMinor),
          .multiprocessors = attribute(cudaDevAttrMultiProcessorCount),
          .shared_memory = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
}

// Asked once for each GPU: the answers never change, and every call needs them.
Gpu current_gpu() {
  static std::array<std::once_flag, 64> asked;
  static std::array<Gpu, asked.size()> answers;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  size_t const index = device;
  if (index >= asked.size()) { return ask_gpu(device); }
  std::call_once(asked[index], [&] { answers[index] = ask_gpu(device); });
  return answers[index];
}

std::string rebuild_for(int capability) {
  return "Rebuild with TORCH_CUDA_ARCH_LIST=" + std::to_string(capability / 10) + "." +
         std::to_string(capability % 10) +
         " (CMake: FLASHATTN_ARCHS=" + std::to_string(capability) + ")";
}

void check_merged_rows(char const* function, int64_t rows) {
  if (rows > INT32_MAX) {
    throw Unsupported(std::string(function) + ": " + std::to_string(rows) +
                      " rows (batch x seqlen x heads) to merge; a GPU counts up to 2147483647");
  }
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
                      " (and PTX of " + std::to_string(FLASHATTN_PTX_ARCH) + "). " +
                      rebuild_for(capability));
  }
  return best;
}

template <DType kDType, int kArch, int kHeadDim>
constexpr Kernels kernels_of() {
  Kernels kernels{.flash_fwd = &sm80::launch_flash_fwd<kDType, kHeadDim, kArch>,
                  .chunk = &sm80::launch_splitkv<kDType, kHeadDim, kArch, Role::kChunk>,
                  .decode = &sm80::launch_splitkv<kDType, kHeadDim, kArch, Role::kDecode>,
                  .wide_decode = &sm80::launch_splitkv<kDType, kHeadDim, kArch, Role::kWideDecode>};
  if constexpr (has_short_chunk(kArch, kHeadDim)) {
    kernels.short_chunk = &sm80::launch_splitkv<kDType, kHeadDim, kArch, Role::kShortChunk>;
  }
  return kernels;
}

template <DType kDType, int kArch, int... kHeadDims>
Kernels kernels_for_head_dim(std::integer_sequence<int, kHeadDims...> head_dims, int head_dim) {
  Kernels kernels;
  if (!((head_dim <= kHeadDims && (kernels = kernels_of<kDType, kArch, kHeadDims>(), true)) ||
        ...)) {
    throw Unsupported("head_dim " + std::to_string(head_dim) +
                      " needs a larger kernel than this build has (" + to_list(head_dims, "") +
                      "). Rebuild with FLASHATTN_EXT_HEAD_DIMS unset (CMake: FLASHATTN_HEAD_DIMS)");
  }
  return kernels;
}

template <DType kDType, int... kArchs>
Kernels kernels_for_arch(std::integer_sequence<int, kArchs...>, int arch, int head_dim) {
  Kernels kernels;
  (void)((arch == kArchs &&
          (kernels = kernels_for_head_dim<kDType, kArchs>(HeadDims{}, head_dim), true)) ||
         ...);
  return kernels;
}

int arch_of(Gpu const& gpu) { return best_arch(Archs{}, gpu.capability); }

Kernels find_kernels(FlashFwdParams const& params, int arch) {
  return params.dtype == DType::kFloat16
             ? kernels_for_arch<DType::kFloat16>(Archs{}, arch, params.shape.head_dim)
             : kernels_for_arch<DType::kBFloat16>(Archs{}, arch, params.shape.head_dim);
}

// The tile table is asked for the head dim of the kernel, not for that of the caller.
int kernel_head_dim(int head_dim) {
  int result = 0;
  [&]<int... kDims>(std::integer_sequence<int, kDims...>) {
    (void)((head_dim <= kDims && (result = kDims, true)) || ...);
  }(HeadDims{});
  return result;
}

SplitkvPlan cuda_plan_splitkv(FlashSplitkvParams const& params, Gpu const& gpu) {
  return plan_splitkv(params, arch_of(gpu), kernel_head_dim(params.fwd.shape.head_dim),
                      gpu.multiprocessors);
}

// PTX of one architecture may meet a GPU with less shared memory than its tiles were made for.
void check_shared_memory(char const* function, Gpu const& gpu, int arch, int head_dim,
                         std::initializer_list<Role> roles) {
  int const kernel = kernel_head_dim(head_dim);
  int needed = 0;
  for (Role const role : roles) {
    needed = std::max(needed, smem_bytes(tile_shape(arch, role, kernel), kernel));
  }
  if (needed > gpu.shared_memory) {
    throw Unsupported(std::string(function) + ": the kernel of sm_" + std::to_string(arch) +
                      " needs " + std::to_string(needed) +
                      " bytes of shared memory, this GPU has " + std::to_string(gpu.shared_memory) +
                      ". " + rebuild_for(gpu.capability));
  }
}

void cuda_flash_fwd(FlashFwdParams const& params, cudaStream_t stream) {
  Gpu const gpu = current_gpu();
  int const arch = arch_of(gpu);
  check_shared_memory("flash_fwd", gpu, arch, params.shape.head_dim, {Role::kPrefill});
  find_kernels(params, arch).flash_fwd(params, stream);
}

void* allocated(AllocateWorkspace const& allocate, size_t bytes) {
  void* const workspace = allocate ? allocate(bytes) : nullptr;
  if (workspace == nullptr) {
    throw InvalidArgument("workspace: expected " + std::to_string(bytes) +
                          " bytes (splitkv_workspace_size), got null");
  }
  return workspace;
}

void cuda_flash_fwd_splitkv(FlashSplitkvParams params, AllocateWorkspace const& allocate,
                            cudaStream_t stream) {
  Gpu const gpu = current_gpu();
  int const arch = arch_of(gpu);
  check_shared_memory("flash_fwd_splitkv", gpu, arch, params.fwd.shape.head_dim,
                      {Role::kChunk, Role::kDecode, Role::kWideDecode});
  Kernels const kernels = find_kernels(params.fwd, arch);
  SplitkvPlan plan = cuda_plan_splitkv(params, gpu);
  if (plan.workspace_bytes > 0 && params.workspace == nullptr) {
    params.workspace = allocated(allocate, plan.workspace_bytes);
    plan = cuda_plan_splitkv(params, gpu);  // the same, with pointers into the workspace
  }
  if (plan.split.splits > 1) { check_merged_rows("flash_fwd_splitkv", plan.rows); }
  if (reinterpret_cast<uintptr_t>(params.workspace) % 128 != 0) {
    throw InvalidArgument(
        "workspace: expected a pointer aligned to 128 bytes, got one that is not");
  }
  if (params.append.seqlen > 0 || params.append.rotary_dim > 0) {
    launch_append_kv(params, plan.page_size, plan.rotated_q, stream);
    if (plan.rotated_q != nullptr) {
      int64_t const row = int64_t(params.fwd.shape.heads) * params.fwd.shape.head_dim;
      params.fwd.q = {plan.rotated_q, params.fwd.shape.seqlen_q * row, row,
                      params.fwd.shape.head_dim};
    }
  }
  if (!has_work(params.fwd)) { return; }
  if (plan.may_decode) {
    auto const decode = plan.decode_role == Role::kDecode ? kernels.decode : kernels.wide_decode;
    decode(params, plan, stream);
  }
  if (plan.may_chunk) {
    (plan.chunk_role == Role::kChunk ? kernels.chunk : kernels.short_chunk)(params, plan, stream);
  }
  bool const overlap = arch >= 90;
  if (plan.split.splits > 1) {
    launch_combine(combine_params(params.fwd, plan.split.splits, plan.rows, plan.out_partial,
                                  plan.lse_partial),
                   stream, overlap);
  } else if (plan.merges()) {
    launch_combine_cuts(params.fwd, plan, stream, overlap);
  }
}

size_t cuda_workspace_size(FlashSplitkvParams const& params) {
  return cuda_plan_splitkv(params, current_gpu()).workspace_bytes;
}

#else

[[noreturn]] void refuse_cuda() {
  throw Unsupported(
      "flashattn_ext was built without CUDA kernels: " FLASHATTN_CUDA_OFF_REASON
      ". Install the CUDA toolkit, set CUDA_HOME to it and build again: FLASHATTN_EXT_CUDA=on "
      "pip install --no-cache-dir --force-reinstall --no-deps .");
}

void cuda_flash_fwd(FlashFwdParams const&, cudaStream_t) { refuse_cuda(); }
void cuda_flash_fwd_splitkv(FlashSplitkvParams const&, AllocateWorkspace const&, cudaStream_t) {
  refuse_cuda();
}
size_t cuda_workspace_size(FlashSplitkvParams const&) { refuse_cuda(); }
void check_merged_rows(char const*, int64_t) {}
void launch_combine(FlashCombineParams const&, cudaStream_t, bool = false) { refuse_cuda(); }

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

void set_num_threads(int count) { cpu::set_num_threads(count); }

size_t splitkv_workspace_size(FlashSplitkvParams const& params) {
  validate(params);
  if (!has_work(params.fwd) || params.fwd.device == Device::kCpu) { return 0; }
  return cuda_workspace_size(params);
}

void run_flash_splitkv_fwd(FlashSplitkvParams const& params, AllocateWorkspace const& allocate,
                           cudaStream_t stream) {
  validate(params);
  if (!has_work(params.fwd) && !appends(params)) { return; }
  if (params.fwd.device == Device::kCpu) {
    cpu::flash_splitkv_fwd(params);
  } else {
    cuda_flash_fwd_splitkv(params, allocate, stream);
  }
}

void run_flash_splitkv_fwd(FlashSplitkvParams const& params, cudaStream_t stream) {
  run_flash_splitkv_fwd(params, AllocateWorkspace(), stream);
}

void run_flash_combine(FlashCombineParams const& params, cudaStream_t stream) {
  validate(params);
  int64_t const rows = int64_t(params.batch) * params.heads * params.seqlen;
  if (rows == 0) { return; }
  if (params.device == Device::kCpu) {
    cpu::flash_combine(params);
  } else {
    check_merged_rows("flash_combine", rows);
    launch_combine(params, stream);
  }
}

}  // namespace flashattn
