// Apart from dispatch.cpp, so that the host module can link this without the kernels.
#include "cpu/cpu.h"
#include "flashattn/flashattn.h"

namespace flashattn {

BuildInfo build_info() {
  BuildInfo info;
#if defined(FLASHATTN_ARCHS)
  info.cuda_archs = {FLASHATTN_ARCHS};
  info.ptx_arch = FLASHATTN_PTX_ARCH;
  info.head_dims = {FLASHATTN_HEAD_DIMS};
#endif
  info.cpu_simd = cpu::simd_name();
  return info;
}

}  // namespace flashattn
