// The types that a kernel is made of, derived from its element type, head dim and architecture.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include "core/tile_table.h"
#include "flashattn/params.h"
#include "sm80/query_rows.h"

namespace flashattn::sm80 {

template <DType kDType>
struct ElementTypes;

template <>
struct ElementTypes<DType::kFloat16> {
  using Element = cutlass::half_t;
  using MmaAtom = cute::MMA_Atom<cute::SM80_16x8x16_F32F16F16F32_TN>;
};

template <>
struct ElementTypes<DType::kBFloat16> {
  using Element = cutlass::bfloat16_t;
  using MmaAtom = cute::MMA_Atom<cute::SM80_16x8x16_F32BF16BF16F32_TN>;
};

template <DType kDType, int kHeadDim_, int kArch, Role kRole>
struct ForwardTraits {
  using Element = typename ElementTypes<kDType>::Element;

  static constexpr TileShape kTile = tile_shape(kArch, kRole, kHeadDim_);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kTile.m;
  static constexpr int kBlockN = kTile.n;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kStages = kTile.stages;

  using HeadDim = cute::Int<kHeadDim>;
  using BlockM = cute::Int<kBlockM>;
  using BlockN = cute::Int<kBlockN>;

  // Warps split the rows of both products. Warps that share rows split the keys, which are columns of Q·Kᵀ. Key warps
  // keep them in P·V, as its depth, so each ends with a part of out; column warps exchange probabilities, and each ends
  // with some columns of out. A warp takes 16 neighbouring keys at a time, two n8 tiles, which makes its accumulator of
  // Q·Kᵀ the A operand of its P·V, unless there are column warps.
  static constexpr int kKeyWarps = kTile.key_warps;
  static constexpr int kColumnWarps = kTile.column_warps;
  static constexpr int kRowSharing = kTile.row_sharing();  // warps that share a row
  static constexpr int kRowWarps = kTile.warps / kRowSharing;
  static_assert(kKeyWarps == 1 || kColumnWarps == 1);
  using MmaAtom = typename ElementTypes<kDType>::MmaAtom;
  using RowsOfWarps = cute::Int<16 * kRowWarps>;
  using KeysOfWarps = cute::Int<16 * kKeyWarps>;
  template <int kWarps>
  using SixteenEach =
      cute::Layout<cute::Shape<cute::_8, cute::Int<kWarps>, cute::_2>, cute::Stride<cute::_1, cute::_16, cute::_8>>;
  using TiledMmaQk =
      cute::TiledMMA<MmaAtom, cute::Layout<cute::Shape<cute::Int<kRowWarps>, cute::Int<kRowSharing>, cute::_1>>,
                     cute::Tile<RowsOfWarps, SixteenEach<kRowSharing>, cute::_16>>;
  using TiledMmaPv =
      cute::TiledMMA<MmaAtom,
                     cute::Layout<cute::Shape<cute::Int<kRowWarps>, cute::Int<kColumnWarps>, cute::Int<kKeyWarps>>>,
                     cute::Tile<RowsOfWarps, SixteenEach<kColumnWarps>, KeysOfWarps>>;
  CUTE_DEVICE static int row_warp() { return threadIdx.x / 32 % kRowWarps; }
  // Of this thread: which of the warps that share its rows.
  CUTE_DEVICE static int warp_of_row() { return kRowSharing == 1 ? 0 : threadIdx.x / 32 / kRowWarps; }
  static_assert(kBlockM <= kThreads, "some work on rows is done by a thread a row");
  static_assert(kBlockM % (16 * kRowWarps) == 0 && kBlockN % (16 * kRowSharing) == 0);
  static_assert(kHeadDim % (16 * kColumnWarps) == 0);

  // A tile lies in shared memory as column blocks of one or half a 128-byte line. The swizzle
  // spreads the 8 rows that one ldmatrix phase reads over all 32 banks.
  template <int kColumns>
  using SmemAtomOf = decltype(cute::composition(
      cute::Swizzle<kColumns == 64 ? 3 : 2, 3, 3>{},
      cute::Layout<cute::Shape<cute::_8, cute::Int<kColumns>>, cute::Stride<cute::Int<kColumns>, cute::_1>>{}));
  static constexpr int kColBlock = kHeadDim % 64 == 0 ? 64 : 32;
  using SmemAtom = SmemAtomOf<kColBlock>;
  using SmemLayoutQ = decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<BlockM, HeadDim>{}));
  using SmemLayoutKv = decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<BlockN, HeadDim>{}));
  using SmemLayoutVt = decltype(cute::composition(
      SmemLayoutKv{}, cute::make_layout(cute::Shape<HeadDim, BlockN>{}, cute::GenRowMajor{})));

  using SmemLayoutP =
      decltype(cute::tile_to_shape(SmemAtomOf<kBlockN % 64 == 0 ? 64 : 32>{}, cute::Shape<BlockM, BlockN>{}));

  using LoadMatrix = cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>;
  using LoadMatrixTransposed = cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>;

  // The state of a row's softmax in each of the warps that share it; in the end, what the warp's accumulator is
  // multiplied with takes the place of the sum.
  struct RowState {
    float maximum;
    float sum;

    CUTE_DEVICE float factor() const { return sum; }
    // No key, as far as out is concerned. Scores that are all NaN leave no maximum either, but a factor of NaN.
    CUTE_DEVICE bool saw_nothing() const { return maximum == -kInfinity && sum == 0.f; }
    CUTE_DEVICE void set_factor(float factor) { sum = factor; }
  };

  // What is known of a row in each of the warps that share it, one after the other: in prefill where its queries lie
  // (query_rows.h); its bias, if the call has ALiBi; its state; without key warps, the place of its output.
  union RowSlot {
    int64_t offset;
    RowBias bias;
    RowState state;
  };

  // The block that is computed and those that are being loaded may each belong to a part of its own.
  static constexpr int kParts = kStages;
  static constexpr int kQueryBuffers = kTile.query_buffers;
  static_assert(kQueryBuffers == 1 || kQueryBuffers == kParts);

  struct Stage {
    alignas(128) Element k[kBlockN * kHeadDim];
    alignas(128) Element v[kBlockN * kHeadDim];

    // Accumulators (key warp, row, column) of the warps that share rows, once k and v have been used.
    CUTE_DEVICE float* warp_parts() {
      static_assert(kKeyWarps == 1 || sizeof(float) * kKeyWarps * kBlockM * kHeadDim <= sizeof(Stage));
      return reinterpret_cast<float*>(k);
    }
  };

  struct SharedStorage {
    alignas(128) Element q[kQueryBuffers][kBlockM * kHeadDim];  // or the output
    Stage stages[kStages];
    RowSlot rows[kRowSharing][kBlockM];             // of the part that is attended to
    int64_t out_rows[kKeyWarps > 1 ? kBlockM : 1];  // where they go, while the slots hold factors
    Part parts[kParts];                             // in shared memory, because the main loop needs the registers
    // What column warps tell each other of a block: the maxima of their keys, and the probabilities.
    float maxima[kColumnWarps > 1 ? kColumnWarps : 1][kColumnWarps > 1 ? kBlockM : 1];
    alignas(16) Element probabilities[kColumnWarps > 1 ? kBlockM * kBlockN : 1];
  };
  static_assert(sizeof(SharedStorage) <= smem_bytes(kTile, kHeadDim));
  static_assert(sizeof(SharedStorage) <= smem_limit(kArch));
};

}  // namespace flashattn::sm80
