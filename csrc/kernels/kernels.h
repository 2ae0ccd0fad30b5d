// The small kernels that need no matrix instructions and so exist once for all architectures.
#pragma once

#include "core/splitkv_plan.h"
#include "flashattn/params.h"

typedef struct CUstream_st* cudaStream_t;

namespace flashattn {

// Merges partial results (FlashCombineParams). `overlap`: the kernel before it on the stream is one of
// ours that computes the parts, and this GPU can start the merge while that one ends (launch_kernel.h).
void launch_combine(FlashCombineParams const& params, cudaStream_t stream, bool overlap = false);

// Merges the tiles that the kernels of an automatic plan cut.
void launch_combine_cuts(FlashFwdParams const& params, SplitkvPlan const& plan, cudaStream_t stream, bool overlap);

// Writes the new tokens into the cache, rotated if there are rotary tables, and rotated queries to
// rotated_q (query rows, heads, head_dim).
void launch_append_kv(FlashSplitkvParams const& params, FastDivisor page_size, void* rotated_q, cudaStream_t stream);

}  // namespace flashattn
