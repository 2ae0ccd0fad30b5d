// The main loop: one query tile against its blocks of keys and values. Every feature goes through it.
#pragma once

#include <cute/tensor.hpp>

#include "core/block_range.h"
#include "sm80/fragments.h"
#include "sm80/kv_source.h"
#include "sm80/row_softmax.h"
#include "sm80/score_editor.h"
#include "sm80/traits.h"

namespace flashattn::sm80 {

template <class Traits>
class Mainloop {
 public:
  using Element = typename Traits::Element;
  using TiledMmaQk = typename Traits::TiledMmaQk;
  using TiledMmaPv = typename Traits::TiledMmaPv;
  using Accumulator = decltype(cute::partition_fragment_C(
      TiledMmaPv{}, cute::Shape<typename Traits::BlockM, typename Traits::HeadDim>{}));
  using QueryFragment = decltype(TiledMmaQk{}.get_thread_slice(0).partition_fragment_A(
      cute::make_tensor(cute::make_smem_ptr(static_cast<Element*>(nullptr)),
                        typename Traits::SmemLayoutQ{})));  // (MMA, MMA_M, MMA_K)
  static constexpr int kRows = 2 * decltype(cute::size<1>(Accumulator{}))::value;  // of a thread

  CUTE_DEVICE Mainloop(typename Traits::SharedStorage& smem, ScoreEditor const& editor)
      : smem_(smem), editor_(editor), softmax_(editor.exponent_scale()) {
    cute::clear(acc_);
  }

  // The newest block comes first. Shared memory holds kStages blocks of keys and as many of values;
  // they are loaded in the order K₀ V₀ K₁ V₁ ..., one cp.async group each. So at every wait the
  // same number of younger groups may still be in flight. The caller has issued the copies of Q.
  template <KvSource<Element> Source>
  CUTE_DEVICE void run(Source& source, BlockRange const& blocks) {
    int const count = blocks.count();
    auto const load_k = [&](int i) {
      if (i < count) { source.load_k(blocks.end - 1 - i, smem_.k[i % Traits::kStages]); }
      cute::cp_async_fence();
    };
    auto const load_v = [&](int i) {
      if (i < count) { source.load_v(blocks.end - 1 - i, smem_.v[i % Traits::kStages]); }
      cute::cp_async_fence();
    };
    auto const wait_for_oldest = [] {
      cute::cp_async_wait<2 * (Traits::kStages - 1)>();
      __syncthreads();
    };

    CUTE_UNROLL
    for (int i = 0; i < Traits::kStages; ++i) {
      load_k(i);
      if (i + 1 < Traits::kStages) { load_v(i); }
    }
    if constexpr (Traits::kTile.q_in_registers) {
      wait_for_oldest();
      CUTE_UNROLL
      for (int slice = 0; slice < cute::size<2>(q_); ++slice) { fetch_q(slice); }
    }
    for (int i = 0; i < count; ++i) {
      int const block = blocks.end - 1 - i, stage = i % Traits::kStages;
      wait_for_oldest();  // K of this block is here, and nobody reads V of the previous one
      load_v(i + Traits::kStages - 1);
      auto scores = multiply_qk(smem_.k[stage]);
      if (!blocks.is_clean(block) || source.has_holes()) { edit(source, scores, block * Traits::kBlockN); }
      wait_for_oldest();  // V of this block is here, and nobody reads K any more
      load_k(i + Traits::kStages);
      accumulate_pv(scores, smem_.v[stage]);
    }
    cute::cp_async_wait<0>();
    __syncthreads();
  }

  CUTE_DEVICE Accumulator& acc() { return acc_; }
  CUTE_DEVICE RowSoftmax<kRows>& softmax() { return softmax_; }

 private:
  CUTE_DEVICE void fetch_q(int slice) {
    using namespace cute;
    Tensor const sQ = make_tensor(make_smem_ptr(smem_.q), typename Traits::SmemLayoutQ{});
    auto const copy_q = make_tiled_copy_A(typename Traits::LoadMatrix{}, TiledMmaQk{});
    auto const thread_copy_q = copy_q.get_thread_slice(threadIdx.x);
    Tensor const tSsQ = thread_copy_q.partition_S(sQ);
    Tensor to_q = thread_copy_q.retile_D(q_);
    copy(copy_q, tSsQ(_, _, slice), to_q(_, _, slice));
  }

  CUTE_DEVICE auto multiply_qk(Element const* k) {
    using namespace cute;
    TiledMmaQk const mma;
    auto const thread_mma = mma.get_thread_slice(threadIdx.x);
    Tensor const sK = make_tensor(make_smem_ptr(k), typename Traits::SmemLayoutKv{});
    Tensor tSrK = thread_mma.partition_fragment_B(sK);  // (MMA, MMA_N, MMA_K)
    auto const copy_k = make_tiled_copy_B(typename Traits::LoadMatrix{}, mma);
    auto const thread_copy_k = copy_k.get_thread_slice(threadIdx.x);
    Tensor const tSsK = thread_copy_k.partition_S(sK);
    Tensor to_k = thread_copy_k.retile_D(tSrK);

    Tensor scores = partition_fragment_C(mma, cute::Shape<typename Traits::BlockM, typename Traits::BlockN>{});
    clear(scores);
    multiply(mma, scores, q_, tSrK, [&](int slice) {
      if constexpr (!Traits::kTile.q_in_registers) { fetch_q(slice); }
      copy(copy_k, tSsK(_, _, slice), to_k(_, _, slice));
    });
    return scores;
  }

  template <class Source, class Scores>
  CUTE_DEVICE void edit(Source const& source, Scores& scores, int first_key) const {
    using namespace cute;
    Tensor const tile = make_identity_tensor(cute::Shape<typename Traits::BlockM, typename Traits::BlockN>{});
    Tensor const coords = TiledMmaQk{}.get_thread_slice(threadIdx.x).partition_C(tile);
    Tensor view = row_column_view(scores);
    Tensor const coords_view = row_column_view(coords);
    editor_.edit(view, coords_view, first_key);
    if (source.has_holes()) {
      editor_.mask_keys(view, coords_view, [&](int key) { return source.is_key(first_key + key); });
    }
  }

  template <class Scores>
  CUTE_DEVICE void accumulate_pv(Scores& scores, Element const* v) {
    using namespace cute;
    Tensor scores_view = row_column_view(scores);
    Tensor acc_view = row_column_view(acc_);
    softmax_.update(scores_view, acc_view);

    TiledMmaPv const mma;
    auto const thread_mma = mma.get_thread_slice(threadIdx.x);
    Tensor const probabilities = convert<Element>(scores);
    Tensor const tOrP = make_tensor(probabilities.data(), a_operand_layout(probabilities.layout()));
    Tensor const sVt = make_tensor(make_smem_ptr(v), typename Traits::SmemLayoutVt{});
    Tensor tOrV = thread_mma.partition_fragment_B(sVt);  // (MMA, MMA_N, MMA_K)

    auto const copy_v = make_tiled_copy_B(typename Traits::LoadMatrixTransposed{}, mma);
    auto const thread_copy_v = copy_v.get_thread_slice(threadIdx.x);
    Tensor const tOsV = thread_copy_v.partition_S(sVt);
    Tensor to_v = thread_copy_v.retile_D(tOrV);
    multiply(mma, acc_, tOrP, tOrV,
             [&](int slice) { copy(copy_v, tOsV(_, _, slice), to_v(_, _, slice)); });
  }

  typename Traits::SharedStorage& smem_;
  ScoreEditor const& editor_;
  RowSoftmax<kRows> softmax_;
  Accumulator acc_;
  QueryFragment q_;  // filled once, or slice by slice at each use
};

}  // namespace flashattn::sm80
