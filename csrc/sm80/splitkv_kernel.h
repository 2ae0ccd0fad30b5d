// The kernel over a cache, and its launch: the same tile, main loop and epilogue as flash_fwd_kernel,
// with another source of keys and a share of them.
#pragma once

#include "core/cache_info.h"
#include "core/split_plan.h"
#include "kernels/launch_kernel.h"
#include "sm80/epilogue.h"
#include "sm80/launch.h"
#include "sm80/mainloop.h"

namespace flashattn::sm80 {

// Sequences whose query rows fit one decode tile are decoded, the others are chunks. This depends on
// the sequence alone, so its bits do not depend on the batch that it is in.
FA_HD bool is_decoded(SequenceInfo const& seq, ForwardPlan const& decode) {
  return seq.len_q <= decode.tile_tokens;
}

template <class Traits>
CUTE_DEVICE void attend_split(FlashSplitkvParams const& params, SplitkvPlan const& plan, QueryTile const& tile,
                              int split, typename Traits::SharedStorage& smem) {
  FlashFwdParams const& fwd = params.fwd;
  PartialOutput partial;
  if (plan.split.splits > 1) {
    partial.out = plan.out_partial + split * plan.rows * fwd.shape.head_dim;
    partial.lse = plan.lse_partial + split * plan.rows;
  }
  Epilogue<Traits> const epilogue(fwd, tile, partial, /*sink=*/split == 0);
  ScoreEditor const editor(fwd, tile);
  BlockRange const blocks = take_split(editor.blocks(Traits::kBlockN), plan.split, split, Traits::kBlockN);
  if (split > 0 && blocks.count() == 0) {
    epilogue.store_empty_part();
    return;
  }

  if (threadIdx.x == 0) { smem.holes = 0; }
  __syncthreads();
  load_queries<Traits>(fwd, tile, smem.q);
  int const head_kv = tile.first_head / (fwd.shape.heads / fwd.shape.heads_kv);
  CacheKv<Traits> source(params, plan.page_size, tile.seq, head_kv, editor.keys(), &smem.holes);
  Mainloop<Traits> mainloop(smem, editor);
  mainloop.run(source, blocks);
  epilogue.store(mainloop.acc(), mainloop.softmax(), smem);
}

template <class Traits, Role kRole>
__global__ void __launch_bounds__(Traits::kThreads)
    flash_fwd_splitkv_kernel(__grid_constant__ FlashSplitkvParams const params,
                             __grid_constant__ SplitkvPlan const plan) {
  extern __shared__ __align__(128) char smem_bytes_of_block[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes_of_block);
  Shape const& shape = params.fwd.shape;
  if (plan.split.splits > 1) { let_next_kernel_start(); }  // the merge

  if constexpr (kRole == Role::kDecode) {
    WorkTile work = decode_tile_of(shape, blockIdx.x);
    SequenceInfo const seq = cache_sequence_info(params, work.batch);
    if (plan.may_chunk && !is_decoded(seq, plan.decode)) { return; }
    // One tile, unless a sequence is longer than the caller's max_seqlen_q said.
    int const blocks = ceil_div(seq.len_q, plan.decode.tile_tokens);
    for (work.m_block = 0; work.m_block < blocks; ++work.m_block) {
      attend_split<Traits>(params, plan, QueryTile(seq, plan.decode, work), blockIdx.y, smem);
    }
  } else {
    WorkTile const work = work_tile(shape, params.fwd.lengths, plan.chunk.tile_tokens, blockIdx.x);
    SequenceInfo const seq = cache_sequence_info(params, work.batch);
    QueryTile const tile(seq, plan.chunk, work);
    if (tile.empty() || is_decoded(seq, plan.decode)) { return; }
    attend_split<Traits>(params, plan, tile, blockIdx.y, smem);
  }
}

template <DType kDType, int kHeadDim, int kArch, Role kRole>
void launch_role(FlashSplitkvParams const& params, SplitkvPlan const& plan, cudaStream_t stream) {
  using Traits = ForwardTraits<kDType, kHeadDim, kArch, kRole>;
  int64_t const tiles = (kRole == Role::kDecode ? plan.decode : plan.chunk).tiles;
  check_grid("flash_fwd_splitkv", tiles);
  launch("flash_fwd_splitkv", flash_fwd_splitkv_kernel<Traits, kRole>,
         dim3(static_cast<unsigned>(tiles), plan.split.splits), Traits::kThreads,
         sizeof(typename Traits::SharedStorage), stream, params, plan);
}

template <DType kDType, int kHeadDim, int kArch>
void launch_flash_fwd_splitkv(FlashSplitkvParams const& params, SplitkvPlan const& plan, cudaStream_t stream) {
  if (plan.may_decode) { launch_role<kDType, kHeadDim, kArch, Role::kDecode>(params, plan, stream); }
  if (plan.may_chunk) { launch_role<kDType, kHeadDim, kArch, Role::kChunk>(params, plan, stream); }
}

}  // namespace flashattn::sm80
