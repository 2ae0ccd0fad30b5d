// The kernel and its launch.
#pragma once

#include "core/forward_plan.h"
#include "kernels/launch_kernel.h"
#include "sm80/attend.h"
#include "sm80/launch.h"

namespace flashattn::sm80 {

// The tile of thread block blockIdx.x, with all its keys.
template <class Traits>
class WholeTile {
 public:
  static constexpr bool kMany = false;

  CUTE_DEVICE WholeTile(FlashFwdParams const& params, ForwardPlan const& plan) : params_(params), plan_(plan) {}

  CUTE_DEVICE static void opened(Part const&) {}
  CUTE_DEVICE static void settle(Part&) {}
  CUTE_DEVICE bool next(Part& slot) const {
    WorkTile const work = plan_.work_tile(params_.shape, params_.lengths, blockIdx.x);
    QueryTile const tile(sequence_info(params_.shape, params_.lengths, work.batch), plan_, work);
    VisibleBand const band = visible_band(tile.seq.len_q, tile.seq.len_k, params_.window);
    if (threadIdx.x == 0) {
      slot = part_of(params_, plan_, tile, band, tile.visible_blocks(band, Traits::kBlockN), {}, /*first=*/true);
    }
    return !tile.empty();
  }

 private:
  FlashFwdParams const& params_;
  ForwardPlan const& plan_;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks)
    flash_fwd_kernel(__grid_constant__ FlashFwdParams const params, __grid_constant__ ForwardPlan const plan) {
  extern __shared__ __align__(128) char smem_bytes_of_block[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes_of_block);
  attend<Traits>(params, ContiguousKv<Traits>(params), WholeTile<Traits>(params, plan), smem);
}

template <DType kDType, int kHeadDim, int kArch>
void launch_flash_fwd(FlashFwdParams const& params, cudaStream_t stream) {
  using Traits = ForwardTraits<kDType, kHeadDim, kArch, Role::kPrefill>;
  constexpr int kSmem = sizeof(typename Traits::SharedStorage);
  ForwardPlan const plan = plan_forward(params.shape, params.lengths, Traits::kTile);
  check_grid("flash_fwd", plan.tiles);
  launch("flash_fwd", flash_fwd_kernel<Traits>, dim3(static_cast<unsigned>(plan.tiles)), Traits::kThreads, kSmem,
         stream, /*overlap=*/false, params, plan);
}

}  // namespace flashattn::sm80
