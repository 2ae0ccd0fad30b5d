// The kernels with small query tiles. A file of its own beside forward.cu, because a compiler with all of them needs
// 5 GiB of memory.
#include "sm80/splitkv_kernel.h"

namespace flashattn::sm80 {

template void launch_splitkv<DType::FLASHATTN_DTYPE, FLASHATTN_HEAD_DIM, FLASHATTN_ARCH, Role::kDecode>(
    FlashSplitkvParams const&, SplitkvPlan const&, cudaStream_t);

template void launch_splitkv<DType::FLASHATTN_DTYPE, FLASHATTN_HEAD_DIM, FLASHATTN_ARCH, Role::kWideDecode>(
    FlashSplitkvParams const&, SplitkvPlan const&, cudaStream_t);

static_assert(has_short_chunk(FLASHATTN_ARCH, FLASHATTN_HEAD_DIM) == (FLASHATTN_HEAD_DIM <= 160));
#if FLASHATTN_HEAD_DIM <= 160
template void launch_splitkv<DType::FLASHATTN_DTYPE, FLASHATTN_HEAD_DIM, FLASHATTN_ARCH, Role::kShortChunk>(
    FlashSplitkvParams const&, SplitkvPlan const&, cudaStream_t);
#endif

}  // namespace flashattn::sm80
