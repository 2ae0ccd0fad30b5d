// Where one sequence of the batch lives and how long it is. The only code that knows how dense,
// packed and partly used (seqused_k) inputs differ.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "flashattn/params.h"

namespace flashattn {

FA_HD int clamp(int value, int low, int high) { return value < low ? low : (value > high ? high : value); }

struct SequenceInfo {
  int batch;    // index of the sequence
  int q_batch;  // index to multiply batch_stride of q and out with: 0 when packed
  int k_batch;
  int q_begin;  // first row of the sequence in q and out: 0 when dense
  int k_begin;
  int len_q;
  int len_k;
};

// Rows [begin, begin + length) of a packed tensor, clamped into its `total` rows.
struct PackedRows {
  int begin;
  int length;
};

FA_HD PackedRows packed_rows(int const* cu_seqlens, int batch, int total) {
  int const begin = clamp(cu_seqlens[batch], 0, total);
  int const end = clamp(cu_seqlens[batch + 1], begin, total);
  return {begin, end - begin};
}

FA_HD SequenceInfo sequence_info(Shape const& shape, Lengths const& lengths, int batch) {
  SequenceInfo seq{batch, batch, batch, 0, 0, shape.seqlen_q, shape.seqlen_k};
  if (lengths.cu_seqlens_q != nullptr) {
    PackedRows const rows = packed_rows(lengths.cu_seqlens_q, batch, lengths.total_q);
    seq.q_batch = 0;
    seq.q_begin = rows.begin;
    seq.len_q = rows.length;
  }
  if (lengths.cu_seqlens_k != nullptr) {
    PackedRows const rows = packed_rows(lengths.cu_seqlens_k, batch, lengths.total_k);
    seq.k_batch = 0;
    seq.k_begin = rows.begin;
    seq.len_k = rows.length;
  }
  if (lengths.seqused_k != nullptr) { seq.len_k = clamp(lengths.seqused_k[batch], 0, seq.len_k); }
  return seq;
}

// Element offsets of row 0 of the sequence. Everything is widened before it is multiplied.
template <class Pointer>
FA_HD int64_t query_offset(Strided<Pointer> const& t, SequenceInfo const& seq, int head) {
  return int64_t(seq.q_batch) * t.batch_stride + int64_t(seq.q_begin) * t.row_stride + int64_t(head) * t.head_stride;
}

template <class Pointer>
FA_HD int64_t key_offset(Strided<Pointer> const& t, SequenceInfo const& seq, int head_kv) {
  return int64_t(seq.k_batch) * t.batch_stride + int64_t(seq.k_begin) * t.row_stride + int64_t(head_kv) * t.head_stride;
}

// Index of row 0 of a head in lse: dense (batch, heads, seqlen_q), packed (heads, total_q).
FA_HD int64_t lse_offset(Shape const& shape, Lengths const& lengths, SequenceInfo const& seq, int head) {
  if (lengths.cu_seqlens_q != nullptr) { return int64_t(head) * lengths.total_q + seq.q_begin; }
  return (int64_t(seq.batch) * shape.heads + head) * shape.seqlen_q;
}

}  // namespace flashattn
