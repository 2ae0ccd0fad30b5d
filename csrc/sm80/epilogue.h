// Ends a query tile: normalises the accumulator and writes out and lse.
#pragma once

#include <cute/tensor.hpp>

#include "core/online_softmax.h"
#include "sm80/fragments.h"
#include "sm80/query_tile.h"
#include "sm80/tile_copy.h"
#include "sm80/traits.h"

namespace flashattn::sm80 {

CUTE_DEVICE float load_sink(Score const& score, int head) {
  if (score.sinks == nullptr) { return -kInfinity; }
  switch (score.sinks_dtype) {
    case DType::kFloat16: return static_cast<cutlass::half_t const*>(score.sinks)[head];
    case DType::kBFloat16: return static_cast<cutlass::bfloat16_t const*>(score.sinks)[head];
    default: return static_cast<float const*>(score.sinks)[head];
  }
}

template <class Traits>
struct Epilogue {
  using Element = typename Traits::Element;
  FlashFwdParams const& params;
  QueryTile const& tile;

  template <class Acc, class Softmax>
  CUTE_DEVICE void finish(Acc& acc, Softmax const& softmax) const {
    using namespace cute;
    Tensor const identity = make_identity_tensor(cute::Shape<typename Traits::BlockM, typename Traits::HeadDim>{});
    Tensor const coords =
        row_column_view(typename Traits::TiledMma{}.get_thread_slice(threadIdx.x).partition_C(identity));
    Tensor out = row_column_view(acc);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(out); ++i) {
      int const row = get<0>(coords(i, 0));
      float const sink = tile.has_row(row) ? load_sink(params.score, tile.head(row)) : -kInfinity;
      SoftmaxResult const result = softmax.finish(i, sink);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(out); ++col) { out(i, col) *= result.factor; }
      // The four threads of a quad hold the same row; the one with column 0 writes.
      if (get<1>(coords(i, 0)) == 0 && tile.has_row(row)) { store_lse(row, result.lse); }
    }
  }

  // Through shared memory, where Q was, so that global memory is written in whole lines.
  template <class Acc>
  CUTE_DEVICE void store_out(Acc const& acc, Element* smem) const {
    using namespace cute;
    typename Traits::TiledMma const mma;
    Tensor const rounded = convert<Element>(acc);
    Tensor const sO = make_tensor(make_smem_ptr(smem), typename Traits::SmemLayoutQ{});
    auto const copy_o =
        make_tiled_copy_C(Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<128>, Element>{}, mma);
    auto const thread_copy_o = copy_o.get_thread_slice(threadIdx.x);
    copy(copy_o, thread_copy_o.retile_S(rounded), thread_copy_o.partition_D(sO));
    __syncthreads();

    Element* const base = static_cast<Element*>(params.out.data);
    TileCopy<Traits, Traits::kBlockM>{}.store(
        smem, params.shape.head_dim, [&](int row) { return base + tile.offset(params.out, row); },
        [&](int row) { return tile.has_row(row); });
  }

 private:
  CUTE_DEVICE void store_lse(int row, float lse) const {
    if (params.lse == nullptr) { return; }
    params.lse[lse_offset(params.shape, params.lengths, tile.seq, tile.head(row)) + tile.token(row)] = lse;
  }
};

}  // namespace flashattn::sm80
