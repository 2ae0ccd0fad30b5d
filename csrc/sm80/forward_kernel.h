// The kernel and its launch.
#pragma once

#include "core/forward_plan.h"
#include "kernels/launch_kernel.h"
#include "sm80/epilogue.h"
#include "sm80/launch.h"
#include "sm80/mainloop.h"

namespace flashattn::sm80 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    flash_fwd_kernel(__grid_constant__ FlashFwdParams const params, __grid_constant__ ForwardPlan const plan) {
  extern __shared__ __align__(128) char smem_bytes_of_block[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes_of_block);

  WorkTile const work = work_tile(params.shape, params.lengths, plan.tile_tokens, blockIdx.x);
  QueryTile const tile(sequence_info(params.shape, params.lengths, work.batch), plan, work);
  if (tile.empty()) { return; }

  load_queries<Traits>(params, tile, smem.q);
  int const head_kv = tile.first_head / (params.shape.heads / params.shape.heads_kv);
  ScoreEditor const editor(params, tile);
  ContiguousKv<Traits> const source(params, tile.seq, head_kv, editor.keys());
  Mainloop<Traits> mainloop(smem, editor);
  mainloop.run(source, editor.blocks(Traits::kBlockN));

  Epilogue<Traits>(params, tile, PartialOutput{}, /*sink=*/true)
      .store(mainloop.acc(), mainloop.softmax(), smem);
}

template <DType kDType, int kHeadDim, int kArch>
void launch_flash_fwd(FlashFwdParams const& params, cudaStream_t stream) {
  using Traits = ForwardTraits<kDType, kHeadDim, kArch, Role::kPrefill>;
  constexpr int kSmem = sizeof(typename Traits::SharedStorage);
  ForwardPlan const plan = plan_forward(params.shape, params.lengths, Traits::kTile);
  check_grid("flash_fwd", plan.tiles);
  launch("flash_fwd", flash_fwd_kernel<Traits>, dim3(static_cast<unsigned>(plan.tiles)), Traits::kThreads, kSmem,
         stream, params, plan);
}

}  // namespace flashattn::sm80
