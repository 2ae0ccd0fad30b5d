// The kernels with large query tiles. Compiled once per element type, head dim and architecture (see CMakeLists.txt).
#include "sm80/forward_kernel.h"
#include "sm80/splitkv_kernel.h"

namespace flashattn::sm80 {

template void launch_flash_fwd<DType::FLASHATTN_DTYPE, FLASHATTN_HEAD_DIM, FLASHATTN_ARCH>(FlashFwdParams const&,
                                                                                           cudaStream_t);

template void launch_splitkv<DType::FLASHATTN_DTYPE, FLASHATTN_HEAD_DIM, FLASHATTN_ARCH, Role::kChunk>(
    FlashSplitkvParams const&, SplitkvPlan const&, cudaStream_t);

}  // namespace flashattn::sm80
