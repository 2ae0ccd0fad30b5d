// What column warps tell each other of a block, through shared memory. They share rows, have some of the keys each in
// Q·Kᵀ, and some of the columns each in P·V; so every one needs the maxima over all keys, and all probabilities. A
// warp's fragments of K and V then serve twice as many rows as if it had all columns of half the rows.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/tensor.hpp>

#include "sm80/fragments.h"
#include "sm80/row_softmax.h"

namespace flashattn::sm80 {

template <class Traits>
class ColumnExchange {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  using TiledMmaQk = typename Traits::TiledMmaQk;
  using TiledMmaPv = typename Traits::TiledMmaPv;

 public:
  // The others may read them behind the next barrier of all threads.
  template <class Scores>
  CUTE_DEVICE static void tell_maxima(Storage& smem, Scores const& scores) {
    auto const view = row_column_view(scores);
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(view); ++row) {
      float const maximum = row_maximum(view, row);
      if (threadIdx.x % 4 == 0) { smem.maxima[Traits::warp_of_row()][row_of_tile(row)] = maximum; }
    }
  }

  // Over all keys of the block, of a row of this thread.
  CUTE_DEVICE static float maximum(Storage const& smem, int row) {
    float result = smem.maxima[0][row_of_tile(row)];
    CUTE_UNROLL
    for (int warp = 1; warp < Traits::kColumnWarps; ++warp) {
      result = fmaxf(result, smem.maxima[warp][row_of_tile(row)]);
    }
    return result;
  }

  // Returns when those of all warps that share the rows are there.
  template <class Scores>
  CUTE_DEVICE static void tell_probabilities(Storage& smem, Scores const& scores) {
    using namespace cute;
    Tensor const sP = make_tensor(make_smem_ptr(smem.probabilities), typename Traits::SmemLayoutP{});
    auto const copy_p =
        make_tiled_copy_C(Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<128>, Element>{}, TiledMmaQk{});
    auto const thread_copy_p = copy_p.get_thread_slice(threadIdx.x);
    Tensor const probabilities = convert<Element>(scores);
    copy(copy_p, thread_copy_p.retile_S(probabilities), thread_copy_p.partition_D(sP));
    cutlass::arch::NamedBarrier::sync(32 * Traits::kColumnWarps, Traits::row_warp());
  }

  // All of the block, for P·V: the A operand, and how to fetch a slice of it.
  CUTE_DEVICE static auto probabilities(Storage& smem) {
    using namespace cute;
    Tensor const sP = make_tensor(make_smem_ptr(smem.probabilities), typename Traits::SmemLayoutP{});
    Tensor tOrP = TiledMmaPv{}.get_thread_slice(threadIdx.x).partition_fragment_A(sP);
    auto const copy_p = make_tiled_copy_A(typename Traits::LoadMatrix{}, TiledMmaPv{});
    Tensor const tOsP = copy_p.get_thread_slice(threadIdx.x).partition_S(sP);
    return Probabilities<decltype(tOrP), decltype(tOsP)>{tOrP, tOsP};
  }

 private:
  template <class Fragment, class Source>
  struct Probabilities {
    Fragment fragment;  // (MMA, MMA_M, MMA_K)
    Source source;

    CUTE_DEVICE void operator()(int slice) {
      using namespace cute;
      auto const copy_p = make_tiled_copy_A(typename Traits::LoadMatrix{}, TiledMmaPv{});
      Tensor to_p = copy_p.get_thread_slice(threadIdx.x).retile_D(fragment);
      copy(copy_p, source(_, _, slice), to_p(_, _, slice));
    }
  };

  CUTE_DEVICE static int row_of_tile(int row) {
    auto const coords = row_column_coordinates<TiledMmaQk, typename Traits::BlockM, typename Traits::BlockN>();
    return cute::get<0>(coords(row, 0));
  }
};

}  // namespace flashattn::sm80
