// The kernel over a cache, and its launch: the same tile, main loop and epilogue as flash_fwd_kernel,
// with another source of keys and a share of them.
#pragma once

#include "kernels/launch_kernel.h"
#include "sm80/attend.h"
#include "sm80/cache_parts.h"
#include "sm80/launch.h"

namespace flashattn::sm80 {

template <class Traits>
struct SplitkvStorage {
  typename Traits::SharedStorage tiles;
  typename CacheKv<Traits>::Storage source;
  typename WorkSearch<Traits::kThreads>::Storage search;
};

// The first kernel of a call is there before the one in front of it has ended, and waits for that. Only then does it
// let the next kernel start, so that a chunk kernel behind a decode kernel finds everything before the call complete
// without waiting itself. The two run side by side, and the merge waits for both: it waits for the chunk kernel, one
// thread block of which waits for the decode kernel. In front of many chunks the decode kernel comes late: while
// another kernel ends, it would find room on some multiprocessors only, but each should have one of its thread blocks
// (1 %, H200, 2026-11-30).
template <class Traits, Role kRole>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks)
    flash_fwd_splitkv_kernel(__grid_constant__ FlashSplitkvParams const params,
                             __grid_constant__ SplitkvPlan const plan) {
  extern __shared__ __align__(128) char smem_bytes_of_block[];
  auto& smem = *reinterpret_cast<SplitkvStorage<Traits>*>(smem_bytes_of_block);
  if (!is_chunk(kRole) || !plan.may_decode) { wait_for_previous_kernel(); }
  let_next_kernel_start();
  CacheKv<Traits> const source(params, plan.page_size, smem.source);
  if constexpr (is_chunk(kRole)) {
    attend<Traits>(params.fwd, source, ChunkPart<Traits>(params, plan), smem.tiles);
    if (blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1) { wait_for_previous_kernel(); }
  } else {
    attend<Traits>(params.fwd, source, DecodeParts<Traits>(params, plan, smem.search), smem.tiles);
  }
}

template <DType kDType, int kHeadDim, int kArch, Role kRole>
void launch_splitkv(FlashSplitkvParams const& params, SplitkvPlan const& plan, cudaStream_t stream) {
  using Traits = ForwardTraits<kDType, kHeadDim, kArch, kRole>;
  static_assert(sizeof(SplitkvStorage<Traits>) <= smem_bytes(Traits::kTile, kHeadDim));
  static_assert(sizeof(SplitkvStorage<Traits>) <= smem_limit(kArch));
  dim3 grid(plan.shares);
  if (is_chunk(kRole) || !plan.automatic()) {
    int64_t const tiles = is_chunk(kRole) ? plan.chunk.tiles : plan.decode.tiles;
    check_grid("flash_fwd_splitkv", tiles);
    grid = dim3(static_cast<unsigned>(tiles), is_chunk(kRole) ? plan.chunk_split.splits : plan.split.splits);
  }
  bool const many_chunks = plan.may_chunk && plan.chunk_role == Role::kChunk;
  bool const overlap = kArch >= 90 && (is_chunk(kRole) || !many_chunks);
  launch("flash_fwd_splitkv", flash_fwd_splitkv_kernel<Traits, kRole>, grid, Traits::kThreads,
         sizeof(SplitkvStorage<Traits>), stream, overlap, params, plan);
}

}  // namespace flashattn::sm80
