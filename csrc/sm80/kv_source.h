// Where blocks of keys and values come from. The only code that knows how they are laid out.
#pragma once

#include "core/cache_info.h"
#include "core/sequence_info.h"
#include "sm80/tile_copy.h"

namespace flashattn::sm80 {

// What the main loop asks of a source: start copying a block to shared memory, first its keys, then
// its values. Rows outside of `keys`, which no row of the tile sees, become zeros: a masked key has
// probability 0, but 0 · NaN would still be NaN. has_holes() is the same for all threads; then is_key(j) tells which keys below len_k
// do not exist.
template <class Source, class Element>
concept KvSource = requires(Source& source, int block, Element* smem, int key) {
  source.load_k(block, smem);
  source.load_v(block, smem);
  source.has_holes();
  source.is_key(key);
};

// Keys and values of a sequence one row stride apart.
template <class Traits>
class ContiguousKv {
 public:
  using Element = typename Traits::Element;

  CUTE_DEVICE ContiguousKv(FlashFwdParams const& params, SequenceInfo const& seq, int head_kv, KeyRange keys)
      : k_(static_cast<Element const*>(params.k.data) + key_offset(params.k, seq, head_kv)),
        v_(static_cast<Element const*>(params.v.data) + key_offset(params.v, seq, head_kv)),
        k_row_stride_(params.k.row_stride),
        v_row_stride_(params.v.row_stride),
        keys_(keys),
        head_dim_(params.shape.head_dim) {}

  CUTE_DEVICE void load_k(int block, Element* smem) const { load(k_, k_row_stride_, block, smem); }
  CUTE_DEVICE void load_v(int block, Element* smem) const { load(v_, v_row_stride_, block, smem); }
  CUTE_DEVICE static constexpr bool has_holes() { return false; }
  CUTE_DEVICE static constexpr bool is_key(int) { return true; }

 private:
  CUTE_DEVICE void load(Element const* base, int64_t row_stride, int block, Element* smem) const {
    int const first_key = block * Traits::kBlockN;
    Element const* rows = base + first_key * row_stride;
    copy_.load_async(
        smem, head_dim_, [&](int row) { return rows + row * row_stride; },
        [&](int row) { return keys_.has(first_key + row); });
  }

  TileCopy<Traits, Traits::kBlockN> const copy_;
  Element const* const k_;
  Element const* const v_;
  int64_t const k_row_stride_;
  int64_t const v_row_stride_;
  KeyRange const keys_;
  int const head_dim_;
};

// Keys and values of a cache, contiguous or in pages. Each thread looks up the pages of the rows that
// it copies. `holes` is in shared memory and set by whoever meets a page that does not exist.
template <class Traits>
class CacheKv {
 public:
  using Element = typename Traits::Element;
  using Copy = TileCopy<Traits, Traits::kBlockN>;

  CUTE_DEVICE CacheKv(FlashSplitkvParams const& params, FastDivisor page_size, SequenceInfo const& seq,
                      int head_kv, KeyRange keys, int* holes)
      : params_(params),
        seq_(seq),
        page_size_(page_size),
        k_(static_cast<Element const*>(params.fwd.k.data) + head_kv * params.fwd.k.head_stride),
        v_(static_cast<Element const*>(params.fwd.v.data) + head_kv * params.fwd.v.head_stride),
        keys_(keys),
        holes_(holes) {}

  CUTE_DEVICE void load_k(int block, Element* smem) {
    look_up(block * Traits::kBlockN);
    load(k_, params_.fwd.k, smem);
  }
  CUTE_DEVICE void load_v(int, Element* smem) const { load(v_, params_.fwd.v, smem); }
  CUTE_DEVICE bool has_holes() const { return *holes_ != 0; }
  CUTE_DEVICE bool is_key(int key) const {
    return !keys_.has(key) || cache_slot(params_.cache, page_size_, seq_, seq_.k_begin + key).index >= 0;
  }

 private:
  CUTE_DEVICE static int step_of(int row, int first) { return (row - first) / Copy::kRowsPerStep; }

  CUTE_DEVICE void look_up(int first_key) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      int const row = copy_.row + step * Copy::kRowsPerStep, key = first_key + row;
      slots_[step] = {-1, 0};
      if (row >= Traits::kBlockN || !keys_.has(key)) { continue; }
      slots_[step] = cache_slot(params_.cache, page_size_, seq_, seq_.k_begin + key);
      if (slots_[step].index < 0) { *holes_ = 1; }
    }
  }

  CUTE_DEVICE void load(Element const* base, Input const& t, Element* smem) const {
    copy_.load_async(
        smem, params_.fwd.shape.head_dim,
        [&](int row) {
          CacheSlot const at = slots_[step_of(row, copy_.row)];
          return base + at.index * t.batch_stride + at.slot * t.row_stride;
        },
        [&](int row) { return slots_[step_of(row, copy_.row)].index >= 0; });
  }

  static constexpr int kSteps = (Traits::kBlockN + Copy::kRowsPerStep - 1) / Copy::kRowsPerStep;
  Copy const copy_;
  FlashSplitkvParams const& params_;
  SequenceInfo const& seq_;
  FastDivisor const page_size_;
  Element const* const k_;
  Element const* const v_;
  KeyRange const keys_;
  int* const holes_;
  CacheSlot slots_[kSteps];  // of the block whose keys were loaded last
};

}  // namespace flashattn::sm80
