// The door to the sm80 kernels: what dispatch.cpp may call. No CuTe here.
#pragma once

#include "core/splitkv_plan.h"
#include "flashattn/params.h"

typedef struct CUstream_st* cudaStream_t;

namespace flashattn::sm80 {

// One kernel per element type, head dim and architecture; forward.cu instantiates them.
template <DType kDType, int kHeadDim, int kArch>
void launch_flash_fwd(FlashFwdParams const& params, cudaStream_t stream);

template <DType kDType, int kHeadDim, int kArch>
void launch_flash_fwd_splitkv(FlashSplitkvParams const& params, SplitkvPlan const& plan, cudaStream_t stream);

}  // namespace flashattn::sm80
