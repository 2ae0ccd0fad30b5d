// How the keys of a call are cut into splits. A pure function of sizes that the host knows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/block_range.h"
#include "core/macros.h"
#include "flashattn/params.h"

namespace flashattn {

constexpr int kMaxSplits = 256;
constexpr int kSplitGranule = 64;                         // keys: split boundaries are multiples of it
constexpr int64_t kMaxPartialBytes = int64_t(256) << 20;  // of partial results, when splits are automatic, on the CPU

struct SplitPlan {
  int splits;
  int split_size;    // tokens; 0: equal shares of what is really there
  int min_keys = 1;  // of a split: a sequence too short for it uses fewer splits
};

FA_HD int64_t query_rows(FlashFwdParams const& p) {
  return p.lengths.cu_seqlens_q != nullptr ? p.lengths.total_q : int64_t(p.shape.batch) * p.shape.seqlen_q;
}

// Bytes of one split's partial results: out and lse of every row, fp32.
inline int64_t partial_bytes(FlashFwdParams const& p) {
  return query_rows(p) * p.shape.heads * (p.shape.head_dim + 1) * int64_t(sizeof(float));
}

constexpr int kWaves = 2;                    // thread blocks that a multiprocessor holds, of most kernels
constexpr int kMinKeys = 4 * kSplitGranule;  // of an automatic split

// Chunks have many tiles; where those that are `expected` do not fill the GPU, as many splits as there is room for at
// once: thread blocks that have to wait for others would double the time. `tiles` counts also those that sequences
// could have if they ended differently. They too have room in the workspace, of which the parts may take a third more
// than those that are at work at once: what is documented of its size rests on that.
inline SplitPlan plan_chunk_splits(int capacity, int64_t tiles, int64_t expected, int64_t places) {
  constexpr int kMinChunkKeys = 2 * kSplitGranule;
  int64_t const filling = places / (expected > 0 ? expected : 1);
  int64_t const affordable = places * 4 / 3 / (tiles > 0 ? tiles : 1);
  int64_t const useful = ceil_div(capacity, kMinChunkKeys);
  int64_t splits = filling < affordable ? filling : affordable;
  splits = splits < useful ? splits : useful;
  return {splits > 1 ? static_cast<int>(splits < kMaxSplits ? splits : kMaxSplits) : 1, 0, kMinChunkKeys};
}

// What the caller asks for. Automatic splits, which the CPU backend takes from here (a GPU shares a list of work out,
// core/work_list.h): as many as give every multiprocessor kWaves thread blocks, and in any case so many
// that no thread block has more than kMaxKeys keys, or one long sequence would outlast the batch.
// A short sequence uses only as many of them as have kMinKeys keys. Bounded by kMaxPartialBytes.
inline SplitPlan plan_splits(FlashSplitkvParams const& params, int multiprocessors, int64_t tiles) {
  constexpr int kMaxKeys = 64 * kSplitGranule;
  int const capacity = params.fwd.shape.seqlen_k;
  Split const& split = params.split;
  if (split.split_size > 0) {
    int const splits = ceil_div(capacity, split.split_size);
    return {splits > 0 ? splits : 1, split.split_size};
  }
  if (split.num_splits > 0) { return {split.num_splits, 0}; }
  int64_t const filling = tiles > 0 ? int64_t(kWaves) * multiprocessors / tiles : 1;
  int64_t const bounding = ceil_div(capacity, kMaxKeys);
  int64_t const useful = ceil_div(capacity, kMinKeys);
  int64_t const bytes = partial_bytes(params.fwd);
  int64_t const affordable = bytes > 0 ? kMaxPartialBytes / bytes : 1;
  int64_t splits = filling > bounding ? filling : bounding;
  splits = splits < useful ? splits : useful;
  splits = splits < affordable ? splits : affordable;
  splits = splits < kMaxSplits ? splits : kMaxSplits;
  return {splits > 1 ? static_cast<int>(splits) : 1, 0, kMinKeys};
}

// The blocks of `r` in [begin, end), as clean as before.
FA_HD BlockRange clip(BlockRange r, int begin, int end) {
  r.begin = r.begin > begin ? r.begin : begin;
  r.end = r.end < end ? r.end : end;
  if (r.end < r.begin) { r.end = r.begin; }
  r.clean_begin = r.clean_begin < r.begin ? r.begin : (r.clean_begin > r.end ? r.end : r.clean_begin);
  r.clean_end = r.clean_end < r.clean_begin ? r.clean_begin : (r.clean_end > r.end ? r.end : r.clean_end);
  return r;
}

// How many equal shares of `count` blocks are not empty; 1 when there is no block.
FA_HD int used_splits(int count, SplitPlan plan, int block_n) {
  int const min_blocks = plan.min_keys > block_n ? plan.min_keys / block_n : 1;
  int const useful = ceil_div(count, min_blocks);
  int const used = useful < plan.splits ? useful : plan.splits;
  return used > 0 ? used : 1;
}

// Share `index` of `shares` of the blocks of `r`, which differ by at most one block.
FA_HD BlockRange take_share(BlockRange r, int shares, int index) {
  int const size = r.count() / shares, larger = r.count() - size * shares;
  int const begin = r.begin + size * index + (index < larger ? index : larger);
  return clip(r, begin, begin + size + (index < larger));
}

// Split `index` of `plan`'s splits, out of the blocks [r.begin, r.end) of block_n keys. Of equal shares the last ones
// may be empty. A split of fixed size covers blocks by their position in the sequence.
FA_HD BlockRange take_split(BlockRange r, SplitPlan plan, int index, int block_n) {
  if (plan.split_size > 0) {
    int const blocks = plan.split_size / block_n;
    return clip(r, index * blocks, (index + 1) * blocks);
  }
  int const used = used_splits(r.count(), plan, block_n);
  return index < used ? take_share(r, used, index) : clip(r, r.end, r.end);
}

}  // namespace flashattn
