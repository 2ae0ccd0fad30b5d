// The forward pass over a cache: appends, cuts the call into query tiles and shares of their keys,
// gives those to threads, and merges the shares.
#include <algorithm>
#include <memory>

#include "core/splitkv_plan.h"
#include "core/work_tile.h"
#include "cpu/cpu.h"
#include "cpu/query_tile.h"
#include "cpu/thread_pool.h"
#include "cpu/tiling.h"

namespace flashattn::cpu {
namespace {

// Automatic splits make tasks for twice as many threads, whatever the machine has and the call may
// use: so a result's bits do not depend on that. A split that nobody was free to take is cheap.
constexpr int kNominalThreads = 32;

struct Work {
  int longest = 0;  // keys of a sequence
  double multiply_adds = 0;
};

Work measure(FlashSplitkvParams const& params) {
  Shape const& shape = params.fwd.shape;
  Work work;
  for (int batch = 0; batch < shape.batch; ++batch) {
    SequenceInfo const seq = cache_sequence_info(params, batch);
    double const rows = double(seq.len_q) * shape.heads + shape.heads_kv * kPackingRows;
    work.longest = std::max(work.longest, seq.len_k);
    work.multiply_adds += rows * seq.len_k * shape.head_dim;
  }
  return work;
}

int64_t count_tiles(FlashFwdParams const& p, RowMap rows, int tile_tokens) {
  return tiles_per_head(p.shape, p.lengths, tile_tokens) * (p.shape.heads / rows.pack());
}

// Lengths can be read here, so splits follow the longest sequence instead of the capacity.
SplitPlan plan_splits_of(FlashSplitkvParams params, Work const& work, RowMap rows) {
  params.fwd.shape.seqlen_k = work.longest;
  int64_t const tiles = count_tiles(params.fwd, rows, std::max(1, kTileRows / rows.pack()));
  return plan_splits(params, kNominalThreads, tiles);
}

// Where nothing is split, the size of a tile has no influence on a row's bits. Equal shares are
// taken from the keys that a tile sees, so with them it must not follow the number of threads.
int tile_tokens(FlashFwdParams const& p, RowMap rows, SplitPlan split, int threads) {
  int const large = std::max(1, kTileRows / rows.pack());
  bool const small = split.splits > 1 || count_tiles(p, rows, large) < 4 * threads;
  return small ? std::max(1, kSmallTileRows / rows.pack()) : large;
}

// Parts of all splits. An own allocation, since tiles use the workspace of the thread.
class PartBuffer {
 public:
  PartBuffer(FlashFwdParams const& p, int splits)
      : rows_(query_rows(p) * p.shape.heads),
        out_(std::make_unique_for_overwrite<float[]>(splits * rows_ * p.shape.head_dim)),
        lse_(std::make_unique_for_overwrite<float[]>(splits * rows_)) {
    // Packed rows may belong to no sequence; then no tile writes their parts.
    if (p.lengths.cu_seqlens_q != nullptr) { std::fill_n(lse_.get(), splits * rows_, -kInfinity); }
  }

  Parts parts(Variant const& variant) const {
    return {out_.get(), lse_.get(), rows_, variant.kernels(DType::kFloat32).store_row};
  }

 private:
  int64_t rows_;
  std::unique_ptr<float[]> out_;
  std::unique_ptr<float[]> lse_;
};

// The heads of a share of keys come one after the other: their rows lie in the same pages of
// memory, and walking all keys once per head would miss the TLB at every page.
void run_tiles(Call const& call, int threads) {
  FlashFwdParams const& p = call.params;
  int const heads = p.shape.heads / call.row_map.pack(), splits = call.split.splits;
  int64_t const slots = tiles_per_head(p.shape, p.lengths, call.tile_tokens);
  parallel_for(slots * splits * heads, threads, [&call, heads, splits, slots](int64_t index) {
    int64_t const head = index % heads, slot = index / heads / splits;
    int const split = static_cast<int>(index / heads % splits);
    FlashFwdParams const& p = call.params;
    QueryTile(call, work_tile(p.shape, p.lengths, call.tile_tokens, head * slots + slot), split)
        .run();
  });
}

void attend(FlashSplitkvParams const& params, Variant const& variant) {
  FlashFwdParams const& fwd = params.fwd;
  RowMap const rows(decode_pack(fwd.shape, kTileRows));
  Work const work = measure(params);
  int const threads = useful_threads(work.multiply_adds);
  SplitPlan const split = plan_splits_of(params, work, rows);
  Call call{
      .params = fwd,
      .kernels = variant.kernels(fwd.dtype),
      .mod = score_mod(fwd.score),
      .row_map = rows,
      .tile_tokens = tile_tokens(fwd, rows, split, threads),
      .item_size = fwd.dtype == DType::kFloat32 ? 4 : 2,
      .over_cache = &params,
      .split = split,
  };
  if (split.splits == 1) { return run_tiles(call, threads); }
  PartBuffer const buffer(fwd, split.splits);
  call.parts = buffer.parts(variant);
  run_tiles(call, threads);
  flash_combine(combine_params(fwd, split.splits, call.parts.rows, call.parts.out, call.parts.lse));
}

}  // namespace

void flash_splitkv_fwd(FlashSplitkvParams const& params) {
  flash_splitkv_fwd(params, chosen_variant());
}

void flash_splitkv_fwd(FlashSplitkvParams const& params, Variant const& variant) {
  Shape const& shape = params.fwd.shape;
  if (shape.batch == 0 || shape.heads_kv == 0) { return; }
  if (shape.heads == 0) { return append_kv(params, nullptr); }
  if (params.append.rotary_dim == 0) {
    append_kv(params, nullptr);
    return attend(params, variant);
  }
  int64_t const row = int64_t(shape.heads) * shape.head_dim;
  int const item_size = params.fwd.dtype == DType::kFloat32 ? 4 : 2;
  auto const rotated =
      std::make_unique_for_overwrite<std::byte[]>(query_rows(params.fwd) * row * item_size);
  append_kv(params, rotated.get());
  FlashSplitkvParams with_rotated = params;
  with_rotated.fwd.q = {rotated.get(), shape.seqlen_q * row, row, shape.head_dim};
  attend(with_rotated, variant);
}

}  // namespace flashattn::cpu
