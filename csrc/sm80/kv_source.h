// Where blocks of keys and values come from. The only code that knows how they are laid out.
#pragma once

#include "core/cache_info.h"
#include "core/sequence_info.h"
#include "sm80/part.h"
#include "sm80/tile_copy.h"

namespace flashattn::sm80 {

// What a source of keys and values does: after open(part), start copying a block to shared memory, portion by
// portion, first its keys, then its values. Rows outside of part.keys, which no row of the tile sees, become zeros:
// a masked key has probability 0, but 0 · NaN would still be NaN. Without `exists` all rows do. Where has_holes(stage)
// is true of the block that is in a stage, is_key(part, j) tells which keys below len_k do not exist.
template <class Source, class Element>
concept KvSource = requires(Source& source, Part const& part, int block, bool exists, Element* smem, int stage,
                            Portion portion, int key) {
  source.open(part);
  source.load_k(block, exists, smem, stage, portion);
  source.load_v(block, exists, smem, portion);
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
  CUTE_DEVICE void load_k(int block, bool exists, Element* smem, int, Portion portion) const {
    load(k_, params_.k.row_stride, block, exists, smem, portion);
  }
  CUTE_DEVICE void load_v(int block, bool exists, Element* smem, Portion portion) const {
    load(v_, params_.v.row_stride, block, exists, smem, portion);
  }
  CUTE_DEVICE static constexpr bool has_holes(int) { return false; }
  CUTE_DEVICE static constexpr bool is_key(Part const&, int) { return true; }

 private:
  CUTE_DEVICE void load(Element const* base, int64_t row_stride, int block, bool exists, Element* smem,
                        Portion portion) const {
    int const first_key = block * Traits::kBlockN;
    Element const* rows = base + first_key * row_stride;
    KeyRange const keys = exists ? keys_ : KeyRange{0, 0};
    copy_.load_async(smem, params_.shape.head_dim, portion,
                     [&](int row) { return Row<Element const>{rows + row * row_stride, keys.has(first_key + row)}; });
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

  // Null where there is no row.
  struct alignas(16) Rows {
    Element const* k;
    Element const* v;
  };

  static constexpr int kWarps = Traits::kBlockN / 32;  // that look up the rows of a block
  static_assert(Traits::kBlockN % 32 == 0 && Traits::kBlockN <= Traits::kThreads);

  struct Storage {
    Rows rows[2][Traits::kBlockN];       // of the blocks with even and with odd numbers
    int holes[Traits::kStages][kWarps];  // whether a warp met a page that does not exist
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
  CUTE_DEVICE void load_k(int block, bool exists, Element* smem, int stage, Portion portion) {
    load(exists, smem, portion, [&](int row) { return storage_.rows[block & 1][row].k; });
    if (exists && portion.is_last()) { look_ahead(block, stage); }
  }
  CUTE_DEVICE void load_v(int block, bool exists, Element* smem, Portion portion) const {
    load(exists, smem, portion, [&](int row) { return storage_.rows[block & 1][row].v; });
  }
  // Both at once: half as many looks at the table.
  CUTE_DEVICE void load_block(int block, Element* smem_k, Element* smem_v, int stage) {
    int const head_dim = params_.fwd.shape.head_dim;
    KvCopy<Traits>{}.for_each_piece(
        Portion{}, [&](int row) { return storage_.rows[block & 1][row]; },
        [&](Rows const& rows, int column, int offset) {
          copy_async(smem_k + offset, rows.k + column, rows.k != nullptr && column < head_dim);
          copy_async(smem_v + offset, rows.v + column, rows.k != nullptr && column < head_dim);
        });
    look_ahead(block, stage);
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
  // After the copies of a block have begun.
  CUTE_DEVICE void look_ahead(int block, int stage) {
    if (threadIdx.x < Traits::kBlockN && threadIdx.x % 32 == 0) { storage_.holes[stage][threadIdx.x / 32] = met_hole_; }
    find_rows(block - 1);
    page_ = find_page(block - 2);
  }

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
    Rows rows{nullptr, nullptr};
    if (is_seen) {
      CacheSlot const at = slot_in_page(params_.cache, page_size_, page_, part_->tile.seq.k_begin + key);
      if (at.index >= 0) { rows = {row_of(params_.fwd.k, at), row_of(params_.fwd.v, at)}; }
    }
    met_hole_ = __any_sync(0xffffffff, is_seen && rows.k == nullptr);
    storage_.rows[block & 1][threadIdx.x] = rows;
  }

  CUTE_DEVICE Element const* row_of(Input const& t, CacheSlot at) const {
    return static_cast<Element const*>(t.data) + at.index * t.batch_stride + at.slot * t.row_stride +
           part_->head_kv * t.head_stride;
  }

  template <class RowOf>
  CUTE_DEVICE void load(bool exists, Element* smem, Portion portion, RowOf pointer_to) const {
    KvCopy<Traits>{}.load_async(smem, params_.fwd.shape.head_dim, portion, [&](int row) {
      Element const* const pointer = pointer_to(row);
      return Row<Element const>{pointer, exists && pointer != nullptr};
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
