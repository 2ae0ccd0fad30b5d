// Where one sequence of a key/value cache lives and how long it is, and where a token of it lies.
#pragma once

#include "core/sequence_info.h"

namespace flashattn {

// Tokens that a sequence holds before the append, at most its capacity.
FA_HD int cached_tokens(Cache const& cache, int capacity, int batch) {
  return clamp(cache.seqlens != nullptr ? cache.seqlens[batch] : cache.seqlen, 0, capacity);
}

// Like sequence_info. Key j of the sequence is token k_begin + j of the cache: the tokens before
// k_begin are the left padding. A cache row that does not exist holds no keys.
FA_HD SequenceInfo cache_sequence_info(FlashSplitkvParams const& params, int batch) {
  Shape const& shape = params.fwd.shape;
  SequenceInfo seq = sequence_info(shape, params.fwd.lengths, batch);
  Cache const& cache = params.cache;
  int const cached = cached_tokens(cache, shape.seqlen_k, batch);
  int const room = shape.seqlen_k - cached;
  int const tokens = cached + (params.append.seqlen < room ? params.append.seqlen : room);
  seq.k_begin = cache.leftpad != nullptr ? clamp(cache.leftpad[batch], 0, tokens) : 0;
  seq.len_k = tokens - seq.k_begin;
  if (!cache.paged()) {
    seq.k_batch = cache.batch_idx != nullptr ? cache.batch_idx[batch] : batch;
    if (static_cast<unsigned>(seq.k_batch) >= static_cast<unsigned>(cache.rows)) { seq.len_k = 0; }
  }
  return seq;
}

// A quotient by a number that is fixed for a launch, as a multiplication (Granlund & Montgomery 1994,
// figure 4.1 with the 64-bit product): exact for every dividend in [0, 2^31).
class FastDivisor {
 public:
  FA_HD explicit FastDivisor(int divisor = 1) : divisor_(divisor), shift_(0) {
    while (shift_ < 31 && (uint32_t(1) << shift_) < uint32_t(divisor)) { ++shift_; }
    multiplier_ = static_cast<uint32_t>(((uint64_t(1) << (31 + shift_)) + divisor - 1) / divisor);
  }
  FA_HD int quotient(int dividend) const {
    return static_cast<int>(uint64_t(uint32_t(dividend)) * multiplier_ >> (31 + shift_));
  }
  FA_HD int divisor() const { return divisor_; }

 private:
  int divisor_;
  int shift_;
  uint32_t multiplier_;
};

// The row (page or cache row, slot) of token `token`; `index` is -1 where there is none. Page ids are
// compared as unsigned numbers: one comparison covers negative ones too.
struct CacheSlot {
  int index;
  int slot;
};

FA_HD CacheSlot cache_slot(Cache const& cache, FastDivisor page_size, SequenceInfo const& seq, int token) {
  if (!cache.paged()) { return {seq.k_batch, token}; }
  int const column = page_size.quotient(token);
  int const slot = token - column * page_size.divisor();
  int const page = cache.block_table[int64_t(seq.batch) * cache.block_table_stride + column];
  return {static_cast<unsigned>(page) < static_cast<unsigned>(cache.num_pages) ? page : -1, slot};
}

}  // namespace flashattn
