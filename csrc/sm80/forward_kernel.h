// The kernel and its launch.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "core/forward_plan.h"
#include "flashattn/error.h"
#include "sm80/epilogue.h"
#include "sm80/launch.h"
#include "sm80/mainloop.h"

namespace flashattn::sm80 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    flash_fwd_kernel(__grid_constant__ FlashFwdParams const params, __grid_constant__ ForwardPlan const plan) {
  using Element = typename Traits::Element;
  extern __shared__ __align__(128) char smem_bytes_of_block[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes_of_block);

  WorkTile const work = work_tile(params.shape, params.lengths, plan.tile_tokens, blockIdx.x);
  QueryTile const tile(params, plan, work);
  if (tile.empty()) { return; }

  Element const* const q = static_cast<Element const*>(params.q.data);
  TileCopy<Traits, Traits::kBlockM>{}.load_async(
      smem.q, params.shape.head_dim, [&](int row) { return q + tile.offset(params.q, row); },
      [&](int row) { return tile.has_row(row); });

  int const head_kv = tile.first_head / (params.shape.heads / params.shape.heads_kv);
  ContiguousKv<Traits> const source(params, tile.seq, head_kv);
  ScoreEditor const editor(params, tile);
  Mainloop<Traits> mainloop(smem, editor);
  mainloop.run(source, editor.blocks(Traits::kBlockN));

  Epilogue<Traits> const epilogue{params, tile};
  epilogue.finish(mainloop.acc(), mainloop.softmax());
  epilogue.store_out(mainloop.acc(), smem.q);
}

inline void check(cudaError_t status, char const* what) {
  if (status != cudaSuccess) {
    throw CudaError(std::string("flash_fwd: ") + what + ": " + cudaGetErrorString(status));
  }
}

template <DType kDType, int kHeadDim, int kArch>
void launch_flash_fwd(FlashFwdParams const& params, cudaStream_t stream) {
  using Traits = ForwardTraits<kDType, kHeadDim, kArch>;
  constexpr int kSmem = sizeof(typename Traits::SharedStorage);
  ForwardPlan const plan = plan_forward(params.shape, params.lengths, Traits::kTile);
  if (plan.tiles > INT32_MAX) {
    throw Unsupported("flash_fwd: " + std::to_string(plan.tiles) +
                      " query tiles (sequences x heads x blocks of queries); the grid holds 2147483647");
  }
  auto* const kernel = flash_fwd_kernel<Traits>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem),
        "cannot reserve shared memory");
  kernel<<<static_cast<unsigned>(plan.tiles), Traits::kThreads, kSmem, stream>>>(params, plan);
  check(cudaGetLastError(), "cannot launch the kernel");
}

}  // namespace flashattn::sm80
