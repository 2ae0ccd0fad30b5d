// Ends a query tile: normalises the accumulator and writes out and lse, or, for one of several splits,
// their fp32 parts.
#pragma once

#include <cute/tensor.hpp>

#include "core/online_softmax.h"
#include "sm80/fragments.h"
#include "sm80/part.h"
#include "sm80/query_rows.h"
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
class Epilogue {
 public:
  using Element = typename Traits::Element;
  using TiledMma = typename Traits::TiledMmaPv;

  CUTE_DEVICE Epilogue(FlashFwdParams const& params, Part const& part) : params_(params), part_(part) {}

  // `stage` held the last block; when all threads are here, nobody needs it any more.
  template <class Acc, class Softmax>
  CUTE_DEVICE void store(Acc& acc, Softmax& softmax, typename Traits::SharedStorage& smem,
                         typename Traits::Stage& stage) const {
    auto const coords = row_column_coordinates<TiledMma, typename Traits::BlockM, typename Traits::HeadDim>();
    softmax.publish(smem.rows[Traits::warp_of_row()], coords);
    __syncthreads();
    float const exponent_scale = softmax.exponent_scale();
    if constexpr (Traits::kKeyWarps > 1) {
      store_sum_of_warps(acc, coords, smem, stage.warp_parts(), exponent_scale);
    } else {
      normalise(acc, coords, smem, exponent_scale);
      if (part_.output.out != nullptr) {
        store_partial(acc, coords, smem.rows[0]);
      } else {
        store_rounded(acc, smem.rows[0], smem.q[Traits::kQueryBuffers > 1 ? &part_ - smem.parts : 0]);
      }
    }
  }

 private:
  using Rows = typename Traits::RowSlot[Traits::kBlockM];

  // One thread a row: its logarithm, its sink and its place in memory are code that need not be there for each of the
  // rows that a thread holds.
  template <class Acc, class Coords>
  CUTE_DEVICE void normalise(Acc& acc, Coords const& coords, typename Traits::SharedStorage& smem,
                             float exponent_scale) const {
    int const row = threadIdx.x;
    if (row < Traits::kBlockM) { finish_row(smem.rows, row, exponent_scale); }
    __syncthreads();
    scale_rows(acc, smem.rows[0], coords);
    __syncthreads();
    if (row < Traits::kBlockM) { smem.rows[0][row].offset = out_row(params_, part_, row); }
  }

  template <class Acc, class Coords>
  CUTE_DEVICE static void scale_rows(Acc& acc, Rows const& rows, Coords const& coords) {
    using namespace cute;
    Tensor out = row_column_view(acc);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(out); ++i) {
      auto const state = rows[get<0>(coords(i, 0))].state;
      // A row without keys is 0 even where V, which others of the tile see, is not finite.
      if (state.saw_nothing()) { fill(out(i, _), 0.f); }
      CUTE_UNROLL
      for (int col = 0; col < size<1>(out); ++col) { out(i, col) *= state.factor(); }
    }
  }

  // Writes the lse of a row, and leaves in its states what takes each warp's accumulator to its part of out.
  CUTE_DEVICE void finish_row(Rows (&rows)[Traits::kRowSharing], int row, float exponent_scale) const {
    float const scale_log2 = exponent_scale * kLog2e;
    float maximum = rows[0][row].state.maximum, sum = 0.f;
    CUTE_UNROLL
    for (int warp = 1; warp < Traits::kRowSharing; ++warp) { maximum = fmaxf(maximum, rows[warp][row].state.maximum); }
    float own_factors[Traits::kRowSharing];
    CUTE_UNROLL
    for (int warp = 0; warp < Traits::kRowSharing; ++warp) {
      own_factors[warp] =
          Traits::kKeyWarps == 1 ? 1.f : rescale_factor(rows[warp][row].state.maximum, maximum, scale_log2);
      sum += rows[warp][row].state.sum * own_factors[warp];
    }
    bool const exists = part_.tile.has_row(row);
    // Of several parts only the first one has the sink.
    float const sink = part_.first && exists ? load_sink(params_.score, part_.tile.head(row)) : -kInfinity;
    SoftmaxResult const result = finish_softmax(maximum, sum, exponent_scale, sink);
    if (exists) { store_lse(row, result.lse); }
    CUTE_UNROLL
    for (int warp = 0; warp < Traits::kRowSharing; ++warp) {
      rows[warp][row].state.set_factor(result.factor * own_factors[warp]);
    }
  }

  CUTE_DEVICE void store_lse(int row, float lse) const {
    float* const target = part_.output.lse != nullptr ? part_.output.lse : params_.lse;
    if (target != nullptr) { target[lse_row(params_, part_, row)] = lse; }
  }

  // Through the memory of the part's queries, so that global memory is written in whole lines.
  template <class Acc>
  CUTE_DEVICE void store_rounded(Acc const& acc, Rows const& rows, Element* smem) const {
    using namespace cute;
    Tensor const rounded = convert<Element>(acc);
    Tensor const sO = make_tensor(make_smem_ptr(smem), typename Traits::SmemLayoutQ{});
    auto const copy_o =
        make_tiled_copy_C(Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<128>, Element>{}, TiledMma{});
    auto const thread_copy_o = copy_o.get_thread_slice(threadIdx.x);
    copy(copy_o, thread_copy_o.retile_S(rounded), thread_copy_o.partition_D(sO));
    __syncthreads();

    Element* const base = static_cast<Element*>(params_.out.data);
    QueryCopy<Traits>{}.store(smem, params_.shape.head_dim, [&](int row) { return row_at(base, rows[row].offset); });
  }

  // A thread's two neighbouring columns; the four threads of a row fill a 32-byte sector.
  template <class Acc, class Coords>
  CUTE_DEVICE void store_partial(Acc const& acc, Coords const& coords, Rows const& rows) const {
    using namespace cute;
    Tensor const out = row_column_view(acc);
    __syncthreads();
    CUTE_UNROLL
    for (int i = 0; i < size<0>(out); ++i) {
      int64_t const offset = rows[get<0>(coords(i, 0))].offset;
      if (offset == kNoRow) { continue; }
      float* const target = part_.output.out + offset;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(out); col += 2) {
        int const column = get<1>(coords(i, col));
        if (column < params_.shape.head_dim) {
          *reinterpret_cast<float2*>(target + column) = make_float2(out(i, col), out(i, col + 1));
        }
      }
    }
  }

  // Where a warp's part has an element: groups of eight columns change places from row to row, or else the eight rows
  // that a warp writes at once would lie in the same banks.
  template <class Coord>
  CUTE_DEVICE static constexpr int part_at(Coord const& at) {
    constexpr int kGroups = Traits::kHeadDim % 64 == 0 ? 8 : 4;
    static_assert(Traits::kHeadDim % (8 * kGroups) == 0);
    int const row = cute::get<0>(at), column = cute::get<1>(at);
    return row * Traits::kHeadDim + (column ^ row % kGroups * 8);
  }

  // Of key warps, which share rows and have some of the keys each. In their order, so that the same call gives the same
  // bits.
  template <class Acc, class Coords>
  CUTE_DEVICE void store_sum_of_warps(Acc const& acc, Coords const& coords, typename Traits::SharedStorage& smem,
                                      float* parts, float exponent_scale) const {
    using namespace cute;
    constexpr int kHeadDim = Traits::kHeadDim, kTile = Traits::kBlockM * kHeadDim;
    Tensor const out = row_column_view(acc);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(out); ++i) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(out); col += 2) {
        *reinterpret_cast<float2*>(parts + Traits::warp_of_row() * kTile + part_at(coords(i, col))) =
            make_float2(out(i, col), out(i, col + 1));
      }
    }
    if (int const row = threadIdx.x; row < Traits::kBlockM) {
      finish_row(smem.rows, row, exponent_scale);
      smem.out_rows[row] = out_row(params_, part_, row);
    }
    __syncthreads();
    Element* const base = static_cast<Element*>(params_.out.data);
    for (int at = threadIdx.x * 4; at < kTile; at += Traits::kThreads * 4) {
      int const row = at / kHeadDim, column = at % kHeadDim;
      int64_t const offset = smem.out_rows[row];
      if (offset == kNoRow || column >= params_.shape.head_dim) { continue; }
      cutlass::Array<float, 4> sum;
      sum.clear();
      CUTE_UNROLL
      for (int warp = 0; warp < Traits::kKeyWarps; ++warp) {
        float4 const part = *reinterpret_cast<float4 const*>(parts + warp * kTile + part_at(make_coord(row, column)));
        auto const state = smem.rows[warp][row].state;
        // A warp without keys of the row adds nothing even where V, which others of the tile see, is not finite.
        if (state.saw_nothing()) { continue; }
        float const factor = state.factor();
        sum[0] += part.x * factor, sum[1] += part.y * factor;
        sum[2] += part.z * factor, sum[3] += part.w * factor;
      }
      if (part_.output.out != nullptr) {
        *reinterpret_cast<float4*>(part_.output.out + offset + column) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      } else {
        auto const rounded = cutlass::NumericArrayConverter<Element, float, 4>{}(sum);
        *reinterpret_cast<uint2*>(base + offset + column) = reinterpret_cast<uint2 const&>(rounded);
      }
    }
  }

  FlashFwdParams const& params_;
  Part const& part_;
};

}  // namespace flashattn::sm80
