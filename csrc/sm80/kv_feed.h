// Feeds the main loop: the parts of a thread block one after the other, and their keys and values in blocks.
#pragma once

#include "sm80/kv_source.h"
#include "sm80/part.h"

namespace flashattn::sm80 {

// Loads run ahead of the parts that are attended to, across their borders, so that memory does not wait
// while a part is finished. `Parts` has next(slot), in which one of the threads fills the slot and which is false
// when there are no more parts; opened(part), when all threads can see it; settle(part), for what is needed last, when
// its first loads are on their way; and it says whether there can be several. All threads of the block call each
// function.
template <class Traits, class Source, class Parts>
class KvFeed {
 public:
  using Element = typename Traits::Element;
  static_assert(KvSource<Source, Element>);
  static_assert(Parts::kMany == (Traits::kStages > 1), "see Mainloop::run");

  CUTE_DEVICE KvFeed(Source const& source, Parts const& parts, Part (&ring)[Traits::kParts])
      : source_(source), parts_(parts), ring_(ring) {
    if constexpr (!Parts::kMany) { open_part(); }
  }

  // Starts copying a portion of the keys of the next block; the newest block of a part comes first. Between matrix
  // products no branch asks whether there is one: copies without a source take its place.
  CUTE_DEVICE void load_k(Element* smem, Portion portion) {
    if (portion.is_first()) { has_block_ = block_ >= begin_; }
    source_.load_k(block_, has_block_, smem, portion);
    if (portion.is_last()) { --block_; }
  }

  // Behind the last portion of the keys that go to `stage`. Apart from them, because what it does has branches, which
  // between matrix products would keep their instructions from being mixed.
  CUTE_DEVICE void look_ahead(int stage) {
    if (has_block_) { source_.look_ahead(block_ + 1, stage); }
  }

  // The values of the block whose keys were loaded last.
  CUTE_DEVICE void load_v(Element* smem, Portion portion) { source_.load_v(block_ + 1, has_block_, smem, portion); }

  // Keys and values of the next block, if there is one, be it of the next part, of which opened(part) is told first.
  template <class Opened>
  CUTE_DEVICE void load_block(Element* smem_k, Element* smem_v, int stage, Opened const& opened) {
    if (block_ < begin_) {
      if (!open_part()) { return; }
      opened(ring_[(opened_ - 1) % Traits::kParts]);
    }
    source_.load_block(block_, smem_k, smem_v, stage);
    --block_;
  }

  // The next part to attend to, or null. Its first keys have been asked for.
  CUTE_DEVICE Part const* next_part() {
    if (attended_ == opened_) { return nullptr; }
    Part& part = ring_[attended_++ % Traits::kParts];
    parts_.settle(part);
    return &part;
  }

  CUTE_DEVICE int slot_of(Part const& part) const { return static_cast<int>(&part - ring_); }
  CUTE_DEVICE bool opened_first() const { return opened_ == 1; }
  // Whether no part waits between the newest one and those that next_part() gave.
  CUTE_DEVICE bool opened_next() const { return opened_ == attended_ + 1; }

  CUTE_DEVICE Source const& source() const { return source_; }

 private:
  CUTE_DEVICE bool open_part() {
    Part& part = ring_[opened_ % Traits::kParts];
    if (!parts_.next(part)) { return false; }
    ++opened_;
    __syncthreads();
    parts_.opened(part);
    source_.open(part);
    begin_ = part.begin;
    block_ = part.end - 1;
    return true;
  }

  Source source_;
  Parts parts_;
  Part (&ring_)[Traits::kParts];
  int opened_ = 0;
  int attended_ = 0;
  int begin_ = 0;           // of the part that is being loaded
  int block_ = -1;          // the next block to load
  bool has_block_ = false;  // the last one that was asked for
};

}  // namespace flashattn::sm80
