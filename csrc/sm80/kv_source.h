// Where blocks of keys and values come from. The only code that knows how they are laid out.
#pragma once

#include "core/cache_info.h"
#include "core/sequence_info.h"
#include "sm80/part.h"
#include "sm80/tile_copy.h"

namespace flashattn::sm80 {

// What a source of keys and values does: after open(part), start copying a block to shared memory, portion by
// portion, first its keys, then its values; look_ahead(block), after the keys of the block and before the next barrier,
// prepares for the block behind it. Rows outside of part.keys, which no row of the tile sees, become zeros:
// a masked key has probability 0, but 0 · NaN would still be NaN. Without `exists` all rows do. Where has_holes(stage)
// is true of the block that is in a stage, is_key(part, j) tells which keys below len_k do not exist.
template <class Source, class Element>
concept KvSource = requires(Source& source, Part const& part, int block, bool exists, Element* smem, int stage,
                            Portion portion, int key) {
  source.open(part);
  source.load_k(block, exists, smem, portion);
  source.load_v(block, exists, smem, portion);
  source.look_ahead(block, stage);
  source.has_holes(stage);
  source.is_key(part, key);
};

// Keys and values of a sequence one row stride apart.
template <class Traits>
class ContiguousKv {
 public:
  using Element = typename Traits::Element;

  // Whether a thread keeps where its pieces of the next block lie, instead of working it out for each block: where
  // registers suffice, that is 4 % faster; where they do not, 2 to 10 % slower (H200, 2026-11-30, docs/tuning.md).
  static constexpr bool kWalks = Traits::kColumnWarps > 1;

  CUTE_DEVICE explicit ContiguousKv(FlashFwdParams const& params) : params_(params) {}

  CUTE_DEVICE void open(Part const& part) {
    k_ = static_cast<Element const*>(params_.k.data) + key_offset(params_.k, part.tile.seq, part.head_kv);
    v_ = static_cast<Element const*>(params_.v.data) + key_offset(params_.v, part.tile.seq, part.head_kv);
    if constexpr (kWalks) {
      int const first = (part.end - 1) * Traits::kBlockN + copy_.row;
      k_ += first * params_.k.row_stride + copy_.col;
      v_ += first * params_.v.row_stride + copy_.col;
    }
    keys_ = part.keys;
  }
  // Blocks come in descending order.
  CUTE_DEVICE void load_k(int block, bool exists, Element* smem, Portion portion) {
    load(k_, params_.k.row_stride, block, exists, smem, portion);
  }
  CUTE_DEVICE void load_v(int block, bool exists, Element* smem, Portion portion) {
    load(v_, params_.v.row_stride, block, exists, smem, portion);
  }
  CUTE_DEVICE static void look_ahead(int, int) {}
  CUTE_DEVICE static constexpr bool has_holes(int) { return false; }
  CUTE_DEVICE static constexpr bool is_key(Part const&, int) { return true; }

 private:
  CUTE_DEVICE void load(Element const*& at, int64_t row_stride, int block, bool exists, Element* smem,
                        Portion portion) {
    int const first_key = block * Traits::kBlockN;
    Element const* const rows = kWalks ? at - copy_.col : at + first_key * row_stride;
    int const first_row = kWalks ? copy_.row : 0;
    KeyRange const keys = exists ? keys_ : KeyRange{0, 0};
    copy_.load_async(smem, params_.shape.head_dim, portion, [&](int row) {
      return Row<Element const>{rows + (row - first_row) * row_stride, keys.has(first_key + row)};
    });
    if (kWalks && portion.is_last()) { at -= Traits::kBlockN * row_stride; }
  }

  FlashFwdParams const& params_;
  KvCopy<Traits> const copy_;
  Element const* k_ = nullptr;  // of the sequence; or of the thread's first piece of the next block
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
  using Copy = KvCopy<Traits>;
  static_assert(Traits::kBlockN % Copy::kRowsPerStep == 0);
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
  CUTE_DEVICE void load_k(int block, bool exists, Element* smem, Portion portion) {
    if (portion.is_first()) { read_rows(block, &Rows::k); }
    load(exists, smem, portion);
  }
  CUTE_DEVICE void load_v(int block, bool exists, Element* smem, Portion portion) {
    if (portion.is_first()) { read_rows(block, &Rows::v); }
    load(exists, smem, portion);
  }
  // Both at once: half as many looks at the table. Looks ahead too.
  CUTE_DEVICE void load_block(int block, Element* smem_k, Element* smem_v, int stage) {
    int const head_dim = params_.fwd.shape.head_dim;
    Copy const copy;
    Rows found[Copy::kSteps];
    CUTE_UNROLL
    for (int step = 0; step < Copy::kSteps; ++step) {
      found[step] = storage_.rows[block & 1][copy.row + step * Copy::kRowsPerStep];
    }
    copy.for_each_piece(
        Portion{}, [&](int row) { return found[(row - copy.row) / Copy::kRowsPerStep]; },
        [&](Rows const& rows, int column, int offset) {
          copy_async(smem_k + offset, rows.k + column, rows.k != nullptr && column < head_dim);
          copy_async(smem_v + offset, rows.v + column, rows.k != nullptr && column < head_dim);
        });
    look_ahead(block, stage);
  }
  CUTE_DEVICE void look_ahead(int block, int stage) {
    if (threadIdx.x < Traits::kBlockN && threadIdx.x % 32 == 0) { storage_.holes[stage][threadIdx.x / 32] = met_hole_; }
    find_rows(block - 1);
    page_ = find_page(block - 2);
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

  // All rows that this thread copies pieces of, so that no copy waits for the table.
  CUTE_DEVICE void read_rows(int block, Element const* Rows::* which) {
    Copy const copy;
    CUTE_UNROLL
    for (int step = 0; step < Copy::kSteps; ++step) {
      rows_[step] = storage_.rows[block & 1][copy.row + step * Copy::kRowsPerStep].*which;
    }
  }

  CUTE_DEVICE void load(bool exists, Element* smem, Portion portion) const {
    Copy const copy;
    copy.load_async(smem, params_.fwd.shape.head_dim, portion, [&](int row) {
      Element const* const pointer = rows_[(row - copy.row) / Copy::kRowsPerStep];
      return Row<Element const>{pointer, exists && pointer != nullptr};
    });
  }

  FlashSplitkvParams const& params_;
  FastDivisor const page_size_;
  Storage& storage_;
  Part const* part_ = nullptr;         // in shared memory
  Element const* rows_[Copy::kSteps];  // of the block whose keys, or values, are being copied
  int page_ = -1;
  bool met_hole_ = false;  // the warp, in the block whose rows were found last
};

}  // namespace flashattn::sm80
