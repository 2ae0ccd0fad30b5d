// Merges partial results over disjoint keys.
#include <algorithm>

#include "core/combine_weight.h"
#include "cpu/cpu.h"
#include "cpu/scalar.h"
#include "cpu/thread_pool.h"
#include "cpu/tiling.h"

namespace flashattn::cpu {
namespace {

constexpr int kColumns = 64;     // summed at a time
constexpr int kRowsOfTask = 16;  // neighbours in lse

struct Merged {
  float maximum;
  float total;  // of the weights
};

// std::max passes over NaN, but the sum of weights does not, so a NaN in lse reaches out and lse.
Merged merge_lse(float const* lse, int64_t stride, int splits) {
  Merged merged{-kInfinity, 0.f};
  for (int s = 0; s < splits; ++s) {
    float const part = lse[s * stride];
    if (!is_empty_part(part)) { merged.maximum = std::max(merged.maximum, part); }
  }
  for (int s = 0; s < splits; ++s) {
    merged.total += part_weight(lse[s * stride], subtrahend(merged.maximum));
  }
  return merged;
}

// One (batch, head, row).
template <class Partial, class Out>
class Row {
 public:
  Row(FlashCombineParams const& p, int batch, int head, int row)
      : p_(p),
        out_(static_cast<typename Out::Storage*>(p.out.data) + offset(p.out, batch, head, row)) {
    if (p.splits == 0) { return; }  // the pointers may be null
    lse_ = p.lse_partial + batch * p.lse_batch_stride + head * p.lse_head_stride +
           row * p.lse_row_stride;
    merged_ = merge_lse(lse_, p.lse_split_stride, p.splits);
    parts_ = static_cast<typename Partial::Storage const*>(p.out_partial.data) +
             offset(p.out_partial, batch, head, row);
  }

  float lse() const {
    return merged_.total == 0.f ? -kInfinity : merged_.maximum + logf(merged_.total);
  }

  void store_out() const {
    float const inverse = merged_.total == 0.f ? 0.f : 1.f / merged_.total;
    for (int first = 0; first < p_.head_dim; first += kColumns) {
      int const columns = std::min(kColumns, p_.head_dim - first);
      float sums[kColumns] = {};
      for (int s = 0; s < p_.splits; ++s) { add_part(s, first, columns, sums); }
      for (int i = 0; i < columns; ++i) { out_[first + i] = Out::round(sums[i] * inverse); }
    }
  }

 private:
  template <class Strided>
  static int64_t offset(Strided const& t, int batch, int head, int row) {
    return batch * t.batch_stride + head * t.head_stride + row * t.row_stride;
  }

  void add_part(int split, int first, int columns, float* sums) const {
    float const lse = lse_[split * p_.lse_split_stride];
    if (is_empty_part(lse)) { return; }  // what it holds does not matter
    // Also where it has become 0: what is not finite reaches out, as it does without splits.
    float const weight = part_weight(lse, subtrahend(merged_.maximum));
    auto const* const part = parts_ + split * p_.out_split_stride + first;
    for (int i = 0; i < columns; ++i) { sums[i] += weight * Partial::load(part[i]); }
  }

  FlashCombineParams const& p_;
  float const* lse_ = nullptr;
  Merged merged_ = {-kInfinity, 0.f};
  typename Partial::Storage const* parts_ = nullptr;
  typename Out::Storage* out_;
};

template <class Partial, class Out>
void combine_rows(FlashCombineParams const& p, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    int const row = static_cast<int>(index % p.seqlen);
    if (p.sequences != nullptr && row >= *p.sequences) { continue; }
    int64_t const head = index / p.seqlen;
    Row<Partial, Out> const merged(p, static_cast<int>(head / p.heads),
                                   static_cast<int>(head % p.heads), row);
    merged.store_out();
    if (p.lse != nullptr) { p.lse[index] = merged.lse(); }
  }
}

}  // namespace

void flash_combine(FlashCombineParams const& params) {
  int64_t const rows = int64_t(params.batch) * params.heads * params.seqlen;
  int const threads = useful_threads(double(rows) * params.splits * params.head_dim);
  with_scalar(params.partial_dtype, [&](auto partial) {
    with_scalar(params.out_dtype, [&](auto out) {
      parallel_for((rows + kRowsOfTask - 1) / kRowsOfTask, threads, [&](int64_t task) {
        int64_t const begin = task * kRowsOfTask;
        combine_rows<decltype(partial), decltype(out)>(params, begin,
                                                       std::min(begin + kRowsOfTask, rows));
      });
    });
  });
}

}  // namespace flashattn::cpu
