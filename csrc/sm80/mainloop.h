// The main loop: query tiles against their blocks of keys and values. Every feature goes through it.
#pragma once

#include <cute/tensor.hpp>

#include "core/block_range.h"
#include "sm80/column_exchange.h"
#include "sm80/fragments.h"
#include "sm80/kv_feed.h"
#include "sm80/query_rows.h"
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
  using QueryFragment = decltype(TiledMmaQk{}.get_thread_slice(0).partition_fragment_A(cute::make_tensor(
      cute::make_smem_ptr(static_cast<Element*>(nullptr)), typename Traits::SmemLayoutQ{})));  // (MMA, MMA_M, MMA_K)
  static constexpr int kRows = 2 * decltype(cute::size<1>(Accumulator{}))::value;              // of a thread

  CUTE_DEVICE Mainloop(FlashFwdParams const& params, typename Traits::SharedStorage& smem)
      : params_(params), smem_(smem), softmax_(score_mod(params.score).exponent_scale) {}

  // Attends to all parts of `feed` and gives the result of each to finish(part, acc, softmax, stage), where
  // `stage` held the last block.
  template <class Feed, class Finish>
  CUTE_DEVICE void run(Feed& feed, Finish const& finish) {
    if constexpr (Traits::kStages == 1) {
      run_in_turn(feed, finish);
    } else {
      run_ahead(feed, finish);
    }
    cute::cp_async_wait<0>();
  }

 private:
  using Exchange = ColumnExchange<Traits>;

  // One stage and one part: values are loaded during Q·Kᵀ, and the next keys during P·V, a portion at each of their
  // slices. Another thread block on the multiprocessor hides the rest.
  template <class Feed, class Finish>
  CUTE_DEVICE void run_in_turn(Feed& feed, Finish const& finish) {
    Part const* const part = feed.next_part();
    if (part == nullptr) { return; }
    auto& stage = smem_.stages[0];
    feed.load_k(stage.k, Portion{});
    feed.look_ahead(0);
    load_queries(*part);
    if constexpr (Traits::kTile.q_in_registers) { wait_for_block<0>(); }
    start(*part);
    for (int block = part->end - 1; block >= part->begin; --block) {
      wait_for_block<0>();
      auto scores = multiply_qk(stage.k, [&](Portion portion) { feed.load_v(stage.v, portion); });
      edit(feed.source(), *part, scores, block, 0);
      if constexpr (Traits::kColumnWarps > 1) { Exchange::tell_maxima(smem_, scores); }
      wait_for_block<0>();
      accumulate_pv(scores, stage.v, [&](Portion portion) { feed.load_k(stage.k, portion); });
      feed.look_ahead(0);
    }
    finish(*part, acc_, softmax_, stage);
  }

  // Several stages: while one block is computed, all others are being filled, if need be with blocks of parts
  // to come. A block is one cp.async group, and the first of a part has the queries in it.
  template <class Feed, class Finish>
  CUTE_DEVICE void run_ahead(Feed& feed, Finish const& finish) {
    constexpr int kAhead = Traits::kStages - 1;  // blocks
    auto const after = [](int stage) { return stage + 1 == Traits::kStages ? 0 : stage + 1; };
    Part const* part = nullptr;
    int block = 0;
    for (int filled = 0, fresh = Traits::kStages;; filled = after(filled)) {  // fresh: stages that nobody has used
      if (fresh > 0) {
        __syncthreads();
      } else {
        wait_for_block<kAhead - 1>();  // the one to compute; and nobody reads the stage to be filled
      }
      load_block(feed, filled);
      if (fresh > 1) {
        --fresh;
        continue;
      }
      if (part == nullptr) {
        part = feed.next_part();
        if (part == nullptr) { break; }
        block = part->end - 1;
        if (fresh > 0) {
          wait_for_block<kAhead>();
          fresh = 0;
        }
        if constexpr (Traits::kQueryBuffers > 1) {
          query_buffer_ = feed.slot_of(*part);
        } else if (!part->has_queries) {
          load_queries_at_once(*part);
        }
        start(*part);
      }
      int const current = after(filled);
      auto& stage = smem_.stages[current];
      auto scores = multiply_qk(stage.k, [](Portion) {});
      edit(feed.source(), *part, scores, block, current);
      accumulate_pv(scores, stage.v, [](Portion) {});
      if (block-- == part->begin) {
        finish(*part, acc_, softmax_, stage);
        __syncthreads();  // of the stage and the slots of rows, which out passed through
        part = nullptr;
      }
    }
  }

  // Until all but the kInFlight youngest groups have come, for all threads.
  template <int kInFlight>
  CUTE_DEVICE static void wait_for_block() {
    cute::cp_async_wait<kInFlight>();
    __syncthreads();
  }

  template <class Feed>
  CUTE_DEVICE void load_block(Feed& feed, int stage) {
    feed.load_block(smem_.stages[stage].k, smem_.stages[stage].v, stage,
                    [&](Part& part) { load_queries_ahead(feed, part); });
    cute::cp_async_fence();
  }

  // Before the first keys of the part: behind what is in flight already, queries that are asked for when they are
  // needed would come last, and memory would have nothing to do in the meantime.
  template <class Feed>
  CUTE_DEVICE void load_queries_ahead(Feed& feed, Part& part) {
    if constexpr (Traits::kQueryBuffers == 1) {
      // The queries of the part that is computed are in registers, and its output does not pass through their memory.
      constexpr bool kReuse = Traits::kTile.q_in_registers && Traits::kKeyWarps > 1;
      if (!feed.opened_first() && !(kReuse && feed.opened_next())) { return; }
    }
    Element* const buffer = smem_.q[Traits::kQueryBuffers > 1 ? feed.slot_of(part) : 0];
    QueryCopy<Traits>{}.load_async(buffer, params_.shape.head_dim, Portion{}, found_row(part));
    if (threadIdx.x == 0) { part.has_queries = true; }
  }

  CUTE_DEVICE void load_queries_at_once(Part const& part) {
    QueryCopy<Traits>{}.load(smem_.q[0], params_.shape.head_dim, found_row(part));
    __syncthreads();
  }

  // Of few rows each thread finds those that it copies pieces of.
  CUTE_DEVICE auto found_row(Part const& part) const {
    return [&](int row) { return row_at(queries(), query_row(params_, part, row)); };
  }

  // Many rows are found by a thread each.
  CUTE_DEVICE void load_queries(Part const& part) {
    int const row = threadIdx.x;
    if (row < Traits::kBlockM) { smem_.rows[0][row].offset = query_row(params_, part, row); }
    __syncthreads();
    QueryCopy<Traits>{}.load_async(smem_.q[0], params_.shape.head_dim, Portion{},
                                   [&](int row) { return row_at(queries(), smem_.rows[0][row].offset); });
  }

  CUTE_DEVICE Element const* queries() const { return static_cast<Element const*>(params_.q.data); }

  CUTE_DEVICE void start(Part const& part) {
    if (params_.score.alibi_slopes != nullptr) { share_biases(part, threadIdx.x); }
    cute::clear(acc_);
    softmax_.reset();
    if constexpr (Traits::kTile.q_in_registers) {
      CUTE_UNROLL
      for (int slice = 0; slice < cute::size<2>(q_); ++slice) { fetch_q(slice); }
    }
  }

  // Every warp reads a slot of its own, so that it may replace it without asking the others.
  CUTE_DEVICE void share_biases(Part const& part, int row) {
    __syncthreads();  // queries have been asked for from where the slots said
    if (row < Traits::kBlockM) {
      RowBias const bias = row_bias(params_.score, part.tile, row);
      CUTE_UNROLL
      for (int warp = 0; warp < Traits::kRowSharing; ++warp) { smem_.rows[warp][row].bias = bias; }
    }
    __syncthreads();
  }

  // What is loaded beside slice `slice` of a product. Where a slice has many MMAs, the loads are spread over the first
  // of the slices, but not over all, or what they load would come too late; where a warp has 16 rows, that would keep
  // the tensor cores waiting for data (measured on an H200, docs/tuning.md, 2026-11-30).
  CUTE_DEVICE static constexpr Portion portion_at(int slice, int slices) {
    constexpr bool kSpread = Traits::kBlockM > 16 * Traits::kRowWarps;
    constexpr int kPortions = Traits::kTile.portions;
    int const half = (slices + 1) / 2, most = slices > 1 ? slices - 1 : 1;
    int const several = kPortions < most ? kPortions : most;
    return Portion{slice, !kSpread ? 1 : (kPortions > 0 ? several : half)};
  }

  CUTE_DEVICE void fetch_q(int slice) {
    using namespace cute;
    Tensor const sQ = make_tensor(make_smem_ptr(smem_.q[query_buffer_]), typename Traits::SmemLayoutQ{});
    auto const copy_q = make_tiled_copy_A(typename Traits::LoadMatrix{}, TiledMmaQk{});
    auto const thread_copy_q = copy_q.get_thread_slice(threadIdx.x);
    Tensor const tSsQ = thread_copy_q.partition_S(sQ);
    Tensor to_q = thread_copy_q.retile_D(q_);
    copy(copy_q, tSsQ(_, _, slice), to_q(_, _, slice));
  }

  // At each slice of the product alongside(portion) does a portion of something else.
  template <class Alongside>
  CUTE_DEVICE auto multiply_qk(Element const* k, Alongside const& alongside) {
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
    multiply(mma, scores, q_, tSrK, [&](int slice, int slices) {
      if constexpr (!Traits::kTile.q_in_registers) { fetch_q(slice); }
      copy(copy_k, tSsK(_, _, slice), to_k(_, _, slice));
      alongside(portion_at(slice, slices));
    });
    return scores;
  }

  template <class Source, class Scores>
  CUTE_DEVICE void edit(Source const& source, Part const& part, Scores& scores, int block, int stage) const {
    bool const has_holes = source.has_holes(stage), is_clean = part.is_clean(block);
    ScoreMod const mod = score_mod(params_.score);
    if (is_clean && !has_holes && !mod.active) { return; }
    using namespace cute;
    int const first_key = block * Traits::kBlockN;
    Tensor const coords = row_column_coordinates<TiledMmaQk, typename Traits::BlockM, typename Traits::BlockN>();
    Tensor view = row_column_view(scores);
    if (mod.active) {
      modify_scores(mod, view, coords, first_key, [&](int row) { return smem_.rows[Traits::warp_of_row()][row].bias; });
    }
    if (!is_clean) { mask_scores(part.tile, params_.window, view, coords, first_key); }
    if (has_holes) {
      mask_keys(view, coords, [&](int key) { return source.is_key(part, first_key + key); });
    }
  }

  template <class Scores, class Alongside>
  CUTE_DEVICE void accumulate_pv(Scores& scores, Element const* v, Alongside const& alongside) {
    using namespace cute;
    Tensor scores_view = row_column_view(scores);
    Tensor acc_view = row_column_view(acc_);
    if constexpr (Traits::kColumnWarps > 1) {
      softmax_.update(scores_view, acc_view, [&](int row) { return Exchange::maximum(smem_, row); });
      Exchange::tell_probabilities(smem_, scores);
      auto probabilities = Exchange::probabilities(smem_);
      multiply_pv(probabilities.fragment, v, probabilities, alongside);
    } else {
      softmax_.update(scores_view, acc_view, [&](int row) { return row_maximum(scores_view, row); });
      Tensor const probabilities = convert<Element>(scores);
      Tensor const tOrP = make_tensor(probabilities.data(), a_operand_layout(probabilities.layout()));
      multiply_pv(tOrP, v, [](int) {}, alongside);
    }
  }

  // fetch_p(slice) is called before a slice of the probabilities is used.
  template <class Probabilities, class Fetch, class Alongside>
  CUTE_DEVICE void multiply_pv(Probabilities const& tOrP, Element const* v, Fetch&& fetch_p,
                               Alongside const& alongside) {
    using namespace cute;
    TiledMmaPv const mma;
    auto const thread_mma = mma.get_thread_slice(threadIdx.x);
    Tensor const sVt = make_tensor(make_smem_ptr(v), typename Traits::SmemLayoutVt{});
    Tensor tOrV = thread_mma.partition_fragment_B(sVt);  // (MMA, MMA_N, MMA_K)

    auto const copy_v = make_tiled_copy_B(typename Traits::LoadMatrixTransposed{}, mma);
    auto const thread_copy_v = copy_v.get_thread_slice(threadIdx.x);
    Tensor const tOsV = thread_copy_v.partition_S(sVt);
    Tensor to_v = thread_copy_v.retile_D(tOrV);
    multiply(mma, acc_, tOrP, tOrV, [&](int slice, int slices) {
      fetch_p(slice);
      copy(copy_v, tOsV(_, _, slice), to_v(_, _, slice));
      alongside(portion_at(slice, slices));
    });
  }

  FlashFwdParams const& params_;
  typename Traits::SharedStorage& smem_;
  RowSoftmax<kRows> softmax_;
  Accumulator acc_;
  QueryFragment q_;  // filled once, or slice by slice at each use
  int query_buffer_ = 0;
};

}  // namespace flashattn::sm80
