// Compiled once per element type, head dim and architecture (see CMakeLists.txt).
#include "sm80/forward_kernel.h"

namespace flashattn::sm80 {

template void launch_flash_fwd<DType::FLASHATTN_DTYPE, FLASHATTN_HEAD_DIM, FLASHATTN_ARCH>(
    FlashFwdParams const&, cudaStream_t);

}  // namespace flashattn::sm80
