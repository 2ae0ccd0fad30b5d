// How the threads of a block find their way in the list of decode work.
#pragma once

#include <cute/config.hpp>

#include "core/work_list.h"

namespace flashattn::sm80 {

// Each thread adds up the work of a few neighbouring sequences; a scan over the threads tells where they
// begin.
template <int kThreads>
class WorkSearch {
  static constexpr int kWarps = kThreads / 32;

 public:
  struct Storage {
    int64_t warp_sums[kWarps];
  };

  CUTE_DEVICE WorkSearch(WorkList const& list, int batch, Storage& storage) : list_(list) {
    int const per_thread = ceil_div(batch, kThreads);
    first_ = min(int(threadIdx.x) * per_thread, batch);
    last_ = min(first_ + per_thread, batch);
    int64_t own = 0;
    for (int b = first_; b < last_; ++b) { own += list.length(b); }

    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t sum = own;  // of the threads of the warp up to this one
    CUTE_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      int64_t const other = __shfl_up_sync(0xffffffff, sum, distance);
      sum += lane >= distance ? other : 0;
    }
    if (lane == 31) { storage.warp_sums[warp] = sum; }
    __syncthreads();
    total_ = 0;
    begin_ = sum - own;
    CUTE_UNROLL
    for (int w = 0; w < kWarps; ++w) {
      begin_ += w < warp ? storage.warp_sums[w] : 0;
      total_ += storage.warp_sums[w];
    }
    end_ = begin_ + own;
  }

  CUTE_DEVICE int64_t total() const { return total_; }

  // The thread that `position` belongs to calls fn(tile at position).
  template <class Fn>
  CUTE_DEVICE void find(int64_t position, Fn const& fn) const {
    if (position < begin_ || position >= end_) { return; }
    int batch = first_;
    int64_t begin = begin_;
    for (; batch + 1 < last_; ++batch) {
      int64_t const end = begin + list_.length(batch);
      if (position < end) { break; }
      begin = end;
    }
    fn(list_.tile_at(batch, begin, position));
  }

 private:
  WorkList const list_;
  int first_;  // sequences [first_, last_) of this thread are positions [begin_, end_)
  int last_;
  int64_t begin_;
  int64_t end_;
  int64_t total_;
};

}  // namespace flashattn::sm80
