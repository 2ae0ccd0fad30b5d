// The forward pass: cuts a call into query tiles and shares them out to threads.
#include <algorithm>

#include "core/split_plan.h"
#include "core/work_tile.h"
#include "cpu/cpu.h"
#include "cpu/query_tile.h"
#include "cpu/thread_pool.h"
#include "cpu/tiling.h"

namespace flashattn::cpu {
namespace {

double multiply_adds(FlashFwdParams const& p) {
  Shape const& shape = p.shape;
  bool const packed = p.lengths.cu_seqlens_k != nullptr;
  double const keys = packed ? p.lengths.total_k / shape.batch : shape.seqlen_k;
  double const packing = double(shape.batch) * shape.heads_kv * kPackingRows;
  return (double(query_rows(p)) * shape.heads + packing) * keys * shape.head_dim;
}

// The query heads of a key/value head share a tile, and with it the packed keys and values.
RowMap row_map(Shape const& shape) {
  int const heads_per_kv = shape.heads / shape.heads_kv;
  return RowMap{heads_per_kv <= kTileRows ? heads_per_kv : 1};
}

// The size of a tile is free to follow the number of threads: it has no influence on a row's bits.
int tile_tokens(FlashFwdParams const& p, int pack, int threads) {
  int64_t const tiles =
      tiles_per_head(p.shape, p.lengths, kTileRows / pack) * (p.shape.heads / pack);
  return std::max(1, (tiles < 4 * threads ? kSmallTileRows : kTileRows) / pack);
}

}  // namespace

void flash_fwd(FlashFwdParams const& params) { flash_fwd(params, chosen_variant()); }

void flash_fwd(FlashFwdParams const& params, Variant const& variant) {
  Shape const& shape = params.shape;
  if (shape.batch == 0 || shape.heads == 0 || shape.heads_kv == 0) { return; }
  int const threads = useful_threads(multiply_adds(params));
  RowMap const rows = row_map(shape);
  Call const call{
      .params = params,
      .kernels = variant.kernels(params.dtype),
      .mod = score_mod(params.score),
      .row_map = rows,
      .tile_tokens = tile_tokens(params, rows.pack(), threads),
      .item_size = params.dtype == DType::kFloat32 ? 4 : 2,
  };
  int64_t const tiles =
      tiles_per_head(shape, params.lengths, call.tile_tokens) * (shape.heads / rows.pack());
  parallel_for(tiles, threads, [&call](int64_t index) {
    FlashFwdParams const& p = call.params;
    QueryTile(call, work_tile(p.shape, p.lengths, call.tile_tokens, index)).run();
  });
}

}  // namespace flashattn::cpu
