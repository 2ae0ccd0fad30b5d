// Writes new keys and values into the cache and rotates queries, before the attention.
#include <algorithm>
#include <cstring>

#include "core/cache_info.h"
#include "core/rotary.h"
#include "core/split_plan.h"
#include "cpu/cpu.h"
#include "cpu/scalar.h"
#include "cpu/thread_pool.h"
#include "cpu/tiling.h"

namespace flashattn::cpu {
namespace {

template <class Element>
class Appender {
  using Storage = typename Element::Storage;

 public:
  explicit Appender(FlashSplitkvParams const& params)
      : p_(params), page_size_(std::max(params.cache.page_size, 1)) {}

  // All heads of one new token of a sequence.
  void append_token(int batch, int token) const {
    int const capacity = p_.fwd.shape.seqlen_k;
    int64_t const position = int64_t(cached_tokens(p_.cache, capacity, batch)) + token;
    if (position >= capacity) { return; }  // the cache is full
    SequenceInfo const seq = cache_sequence_info(p_, batch);
    CacheSlot const at = cache_slot(p_.cache, page_size_, seq, static_cast<int>(position));
    if (at.index < 0 || (!p_.cache.paged() && at.index >= p_.cache.rows)) { return; }
    for (int head = 0; head < p_.fwd.shape.heads_kv; ++head) {
      Storage const* const key = source(p_.append.k, batch, token, head);
      copy_or_rotate(key, static_cast<int>(position), target(p_.fwd.k, at, head));
      std::memcpy(target(p_.fwd.v, at, head), source(p_.append.v, batch, token, head), row_bytes());
    }
  }

  // All heads of one query of a sequence, into (query rows, heads, head_dim).
  void rotate_query(int batch, int token, Storage* rotated) const {
    FlashFwdParams const& fwd = p_.fwd;
    SequenceInfo const seq = sequence_info(fwd.shape, fwd.lengths, batch);
    int const cached = cached_tokens(p_.cache, fwd.shape.seqlen_k, batch);
    int const position = query_position(fwd.window, cached, token);
    int64_t const row = int64_t(seq.q_batch) * fwd.shape.seqlen_q + seq.q_begin + token;
    for (int head = 0; head < fwd.shape.heads; ++head) {
      Storage const* const query = static_cast<Storage const*>(fwd.q.data) +
                                   query_offset(fwd.q, seq, head) + token * fwd.q.row_stride;
      copy_or_rotate(query, position,
                     rotated + (row * fwd.shape.heads + head) * fwd.shape.head_dim);
    }
  }

 private:
  std::size_t row_bytes() const { return p_.fwd.shape.head_dim * sizeof(Storage); }

  static Storage const* source(Input const& t, int batch, int token, int head) {
    return static_cast<Storage const*>(t.data) + batch * t.batch_stride + token * t.row_stride +
           head * t.head_stride;
  }

  static Storage* target(Input const& t, CacheSlot at, int head) {
    return static_cast<Storage*>(const_cast<void*>(t.data)) + at.index * t.batch_stride +
           at.slot * t.row_stride + head * t.head_stride;
  }

  void copy_or_rotate(Storage const* from, int position, Storage* to) const {
    Append const& append = p_.append;
    std::memcpy(to, from, row_bytes());
    if (append.rotary_dim == 0) { return; }
    int64_t const angle = int64_t(rotary_position(append, position)) * (append.rotary_dim / 2);
    auto const* const cosines = static_cast<Storage const*>(append.rotary_cos) + angle;
    auto const* const sines = static_cast<Storage const*>(append.rotary_sin) + angle;
    for (int first = 0; first < append.rotary_dim; first += kRotaryChunk) {
      float rotated[kRotaryChunk];
      rotate_chunk(
          append, first, [&](int column) { return Element::load(from[column]); },
          [&](int pair) { return Element::load(cosines[pair]); },
          [&](int pair) { return Element::load(sines[pair]); }, rotated);
      for (int i = 0; i < kRotaryChunk; ++i) { to[first + i] = Element::round(rotated[i]); }
    }
  }

  FlashSplitkvParams const& p_;
  FastDivisor page_size_;
};

// Rotating an element costs as much as some multiply-adds of attention.
constexpr int kRotationCost = 16;

}  // namespace

void append_kv(FlashSplitkvParams const& params, void* rotated_q) {
  Shape const& shape = params.fwd.shape;
  int64_t const row = int64_t(shape.head_dim) * kRotationCost;
  int64_t const new_tokens = int64_t(shape.batch) * params.append.seqlen;
  with_scalar(params.fwd.dtype, [&]<class Element>(Element) {
    Appender<Element> const appender(params);
    parallel_for(new_tokens, useful_threads(new_tokens * shape.heads_kv * row), [&](int64_t index) {
      appender.append_token(static_cast<int>(index / params.append.seqlen),
                            static_cast<int>(index % params.append.seqlen));
    });
    if (rotated_q == nullptr) { return; }
    int64_t const work = query_rows(params.fwd) * shape.heads * row;
    parallel_for(shape.batch, useful_threads(work), [&](int64_t index) {
      int const batch = static_cast<int>(index);
      int const len_q = sequence_info(shape, params.fwd.lengths, batch).len_q;
      for (int token = 0; token < len_q; ++token) {
        appender.rotate_query(batch, token, static_cast<typename Element::Storage*>(rotated_q));
      }
    });
  });
}

}  // namespace flashattn::cpu
