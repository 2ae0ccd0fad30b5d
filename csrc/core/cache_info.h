// Where one sequence of a key/value cache lives and how long it is, and where a token of it lies.
#pragma once

#include "core/fast_divisor.h"
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

// The row (page or cache row, slot) of token `token`; `index` is -1 where there is none. Page ids are
// compared as unsigned numbers: one comparison covers negative ones too.
struct CacheSlot {
  int index;
  int slot;
};

// The page id of a token as the table has it, or the cache row.
FA_HD int page_of(Cache const& cache, FastDivisor page_size, SequenceInfo const& seq, int token) {
  if (!cache.paged()) { return seq.k_batch; }
  return cache.block_table[int64_t(seq.batch) * cache.block_table_stride + page_size.quotient(token)];
}

FA_HD CacheSlot slot_in_page(Cache const& cache, FastDivisor page_size, int page, int token) {
  if (!cache.paged()) { return {page, token}; }
  int const slot = token - page_size.quotient(token) * page_size.divisor();
  return {static_cast<unsigned>(page) < static_cast<unsigned>(cache.num_pages) ? page : -1, slot};
}

FA_HD CacheSlot cache_slot(Cache const& cache, FastDivisor page_size, SequenceInfo const& seq, int token) {
  return slot_in_page(cache, page_size, page_of(cache, page_size, seq, token), token);
}

}  // namespace flashattn
