// Where blocks of keys and values come from. The only code that knows how they are laid out.
#pragma once

#include "core/cache_info.h"
#include "core/sequence_info.h"
#include "sm80/part.h"
#include "sm80/tile_copy.h"

namespace flashattn::sm80 {

// What a source of keys and values does: after open(part), start copying a block to shared memory, first its
// keys, then its values. Rows outside of part.keys, which no row of the tile sees, become zeros: a masked key
// has probability 0, but 0 · NaN would still be NaN. Where has_holes(stage) is true of the block that is in a
// stage, is_key(part, j) tells which keys below len_k do not exist.
template <class Source, class Element>
concept KvSource = requires(Source& source, Part const& part, int block, Element* smem, int stage, int key) {
  source.open(part);
  source.load_k(block, smem, stage);
  source.load_v(block, smem);
  source.has_holes(stage);
  source.is_key(part, key);
};

// Keys and values of a sequence one row stride apart.
template <class Traits>
class ContiguousKv {
 public:
  using Element = typename Traits::Element;

  CUTE_DEVICE explicit ContiguousKv(FlashFwdParams const& params) : params_(params) {}

  CUTE_DEVICE void open(Part const& part) {
    k_ = static_cast<Element const*>(params_.k.data) + key_offset(params_.k, part.tile.seq, part.head_kv);
    v_ = static_cast<Element const*>(params_.v.data) + key_offset(params_.v, part.tile.seq, part.head_kv);
    keys_ = part.keys;
  }
  CUTE_DEVICE void load_k(int block, Element* smem, int) const { load(k_, params_.k.row_stride, block, smem); }
  CUTE_DEVICE void load_v(int block, Element* smem) const { load(v_, params_.v.row_stride, block, smem); }
  CUTE_DEVICE static constexpr bool has_holes(int) { return false; }
  CUTE_DEVICE static constexpr bool is_key(Part const&, int) { return true; }

 private:
  CUTE_DEVICE void load(Element const* base, int64_t row_stride, int block, Element* smem) const {
    int const first_key = block * Traits::kBlockN;
    Element const* rows = base + first_key * row_stride;
    copy_.load_async(smem, params_.shape.head_dim, [&](int row) {
      return Row<Element const>{rows + row * row_stride, keys_.has(first_key + row)};
    });
  }

  FlashFwdParams const& params_;
  KvCopy<Traits> const copy_;
  Element const* k_ = nullptr;
  Element const* v_ = nullptr;
  KeyRange keys_ = {0, 0};
};

// Keys and values of a cache, contiguous or in pages. Which row of memory a key lies in is worked out once for
// all threads that copy a piece of it, in shared memory and a block ahead of the copies; the page ids are read
// another block ahead, so that nobody waits for the table.
template <class Traits>
class CacheKv {
 public:
  using Element = typename Traits::Element;

  // Elements before the row in k and in v, or kNoRow.
  static constexpr int64_t kNoRow = INT64_MIN;
  struct RowOffsets {
    int64_t k;
    int64_t v;
  };

  static constexpr int kWarps = Traits::kBlockN / 32;  // that look up the rows of a block
  static_assert(Traits::kBlockN % 32 == 0 && Traits::kBlockN <= Traits::kThreads);

  struct Storage {
    RowOffsets rows[2][Traits::kBlockN];  // of the blocks with even and with odd numbers
    int holes[Traits::kStages][kWarps];   // whether a warp met a page that does not exist
  };

  CUTE_DEVICE CacheKv(FlashSplitkvParams const& params, FastDivisor page_size, Storage& storage)
      : params_(params), page_size_(page_size), storage_(storage) {}

  CUTE_DEVICE void open(Part const& part) {
    part_ = &part;
    int const block = part.end - 1;
    page_ = find_page(block);
    find_rows(block);
    page_ = find_page(block - 1);
    __syncthreads();
  }

  // Blocks come in descending order.
  CUTE_DEVICE void load_k(int block, Element* smem, int stage) {
    load(params_.fwd.k, smem, [&](int row) { return storage_.rows[block & 1][row].k; });
    if (threadIdx.x < Traits::kBlockN && threadIdx.x % 32 == 0) {
      storage_.holes[stage][threadIdx.x / 32] = met_hole_;
    }
    find_rows(block - 1);
    page_ = find_page(block - 2);
  }
  CUTE_DEVICE void load_v(int block, Element* smem) const {
    load(params_.fwd.v, smem, [&](int row) { return storage_.rows[block & 1][row].v; });
  }
  CUTE_DEVICE bool has_holes(int stage) const {
    int holes = 0;
    CUTE_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) { holes |= storage_.holes[stage][warp]; }
    return holes != 0;
  }
  CUTE_DEVICE bool is_key(Part const& part, int key) const {
    SequenceInfo const& seq = part.tile.seq;
    return !part.keys.has(key) || cache_slot(params_.cache, page_size_, seq, seq.k_begin + key).index >= 0;
  }

 private:
  // Of the key that is this thread's to look up.
  CUTE_DEVICE int find_page(int block) const {
    int const key = block * Traits::kBlockN + threadIdx.x;
    if (threadIdx.x >= Traits::kBlockN || !part_->keys.has(key)) { return -1; }
    SequenceInfo const& seq = part_->tile.seq;
    return page_of(params_.cache, page_size_, seq, seq.k_begin + key);
  }

  CUTE_DEVICE void find_rows(int block) {
    if (threadIdx.x >= Traits::kBlockN) { return; }
    int const key = block * Traits::kBlockN + threadIdx.x;
    bool const is_seen = part_->keys.has(key);
    RowOffsets offsets{kNoRow, kNoRow};
    if (is_seen) {
      CacheSlot const at = slot_in_page(params_.cache, page_size_, page_, part_->tile.seq.k_begin + key);
      if (at.index >= 0) { offsets = {offset(params_.fwd.k, at), offset(params_.fwd.v, at)}; }
    }
    met_hole_ = __any_sync(0xffffffff, is_seen && offsets.k == kNoRow);
    storage_.rows[block & 1][threadIdx.x] = offsets;
  }

  CUTE_DEVICE int64_t offset(Input const& t, CacheSlot at) const {
    return at.index * t.batch_stride + at.slot * t.row_stride + part_->head_kv * t.head_stride;
  }

  template <class Offset>
  CUTE_DEVICE void load(Input const& t, Element* smem, Offset offset_of) const {
    auto const* const base = static_cast<Element const*>(t.data);
    KvCopy<Traits>{}.load_async(smem, params_.fwd.shape.head_dim, [&](int row) {
      int64_t const offset = offset_of(row);
      return Row<Element const>{base + offset, offset != kNoRow};
    });
  }

  FlashSplitkvParams const& params_;
  FastDivisor const page_size_;
  Storage& storage_;
  Part const* part_ = nullptr;  // in shared memory
  int page_ = -1;
  bool met_hole_ = false;  // the warp, in the block whose rows were found last
};

}  // namespace flashattn::sm80
