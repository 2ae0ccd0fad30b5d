// Where blocks of keys and values come from. The only code that knows how a cache is laid out.
#pragma once

#include "core/sequence_info.h"
#include "sm80/tile_copy.h"

namespace flashattn::sm80 {

// What the main loop asks of a source: start copying a block to shared memory. Rows past the last
// key become zeros: a masked key has probability 0, but 0 · NaN would still be NaN.
template <class Source, class Element>
concept KvSource = requires(Source const& source, int block, Element* smem) {
  source.load_k(block, smem);
  source.load_v(block, smem);
};

// Keys and values of a sequence one row stride apart.
template <class Traits>
class ContiguousKv {
 public:
  using Element = typename Traits::Element;

  CUTE_DEVICE ContiguousKv(FlashFwdParams const& params, SequenceInfo const& seq, int head_kv)
      : k_(static_cast<Element const*>(params.k.data) + key_offset(params.k, seq, head_kv)),
        v_(static_cast<Element const*>(params.v.data) + key_offset(params.v, seq, head_kv)),
        k_row_stride_(params.k.row_stride),
        v_row_stride_(params.v.row_stride),
        len_k_(seq.len_k),
        head_dim_(params.shape.head_dim) {}

  CUTE_DEVICE void load_k(int block, Element* smem) const { load(k_, k_row_stride_, block, smem); }
  CUTE_DEVICE void load_v(int block, Element* smem) const { load(v_, v_row_stride_, block, smem); }

 private:
  CUTE_DEVICE void load(Element const* base, int64_t row_stride, int block, Element* smem) const {
    int const first_key = block * Traits::kBlockN;
    Element const* rows = base + first_key * row_stride;
    copy_.load_async(
        smem, head_dim_, [&](int row) { return rows + row * row_stride; },
        [&](int row) { return first_key + row < len_k_; });
  }

  TileCopy<Traits, Traits::kBlockN> const copy_;
  Element const* const k_;
  Element const* const v_;
  int64_t const k_row_stride_;
  int64_t const v_row_stride_;
  int const len_k_;
  int const head_dim_;
};

}  // namespace flashattn::sm80
