// How a call over a cache is cut into work: roles, tiles, splits, workspace. Follows from sizes that
// the host knows; lengths stay on the device.
#pragma once

#include "core/cache_info.h"
#include "core/forward_plan.h"
#include "core/split_plan.h"
#include "core/tile_table.h"

namespace flashattn {

struct SplitkvPlan {
  ForwardPlan decode;  // one tile per sequence and group of heads
  ForwardPlan chunk;
  bool may_decode;  // whether a sequence can have that role
  bool may_chunk;
  SplitPlan split;
  int64_t rows;       // query rows times heads
  FastDivisor page_size;
  float* out_partial = nullptr;  // (splits, rows, head_dim), in the workspace
  float* lse_partial = nullptr;  // (splits, rows)
  void* rotated_q = nullptr;     // (query rows, heads, head_dim), of the type of q
  size_t workspace_bytes = 0;
};

// The most query heads of a key/value head that fit a decode tile together and divide the group.
inline int decode_pack(Shape const& shape, int tile_rows) {
  int const group = shape.heads / shape.heads_kv;
  int pack = group < tile_rows ? group : tile_rows;
  while (pack > 1 && group % pack != 0) { --pack; }
  return pack > 0 ? pack : 1;  // no query heads: there may still be new tokens to append
}

// A decode tile holds all rows of its sequence.
FA_HD WorkTile decode_tile_of(Shape const& shape, int64_t index) {
  return {static_cast<int>(index % shape.batch), static_cast<int>(index / shape.batch), 0};
}

// `kernel_head_dim` is that of the kernel which serves the caller's head dim.
inline SplitkvPlan plan_splitkv(FlashSplitkvParams const& params, int arch, int kernel_head_dim,
                                int multiprocessors) {
  FlashFwdParams const& fwd = params.fwd;
  Shape const& shape = fwd.shape;
  TileShape const decode = tile_shape(arch, Role::kDecode, kernel_head_dim);
  SplitkvPlan plan;
  int const pack = decode_pack(shape, decode.m);
  plan.decode = {RowMap(pack), decode.m / pack, int64_t(shape.batch) * (shape.heads / pack)};
  plan.chunk = plan_forward(shape, fwd.lengths, tile_shape(arch, Role::kChunk, kernel_head_dim));
  bool const packed = fwd.lengths.cu_seqlens_q != nullptr;
  plan.may_chunk = shape.seqlen_q > plan.decode.tile_tokens;
  plan.may_decode = packed || !plan.may_chunk;
  plan.split = plan_splits(params, multiprocessors, plan.may_decode ? plan.decode.tiles : plan.chunk.tiles);
  plan.rows = query_rows(fwd) * shape.heads;
  plan.page_size = FastDivisor(params.cache.page_size > 0 ? params.cache.page_size : 1);

  auto const take = [&](size_t bytes) {
    size_t const begin = plan.workspace_bytes;
    plan.workspace_bytes = (begin + bytes + 127) / 128 * 128;
    return params.workspace != nullptr ? static_cast<char*>(params.workspace) + begin : nullptr;
  };
  if (plan.split.splits > 1) {
    size_t const rows = size_t(plan.split.splits) * plan.rows;
    plan.out_partial = reinterpret_cast<float*>(take(rows * shape.head_dim * sizeof(float)));
    plan.lse_partial = reinterpret_cast<float*>(take(rows * sizeof(float)));
  }
  if (params.append.rotary_dim > 0) { plan.rotated_q = take(size_t(plan.rows) * shape.head_dim * 2); }
  return plan;
}

// The merge of the parts of a split call: their rows lie in the order of lse.
inline FlashCombineParams combine_params(FlashFwdParams const& fwd, int splits, int64_t rows,
                                         float const* out_partial, float const* lse_partial) {
  bool const packed = fwd.lengths.cu_seqlens_q != nullptr;
  FlashCombineParams c;
  c.device = fwd.device;
  c.splits = splits;
  c.batch = packed ? 1 : fwd.shape.batch;
  c.heads = fwd.shape.heads;
  c.seqlen = packed ? fwd.lengths.total_q : fwd.shape.seqlen_q;
  c.head_dim = fwd.shape.head_dim;
  int64_t const head = int64_t(c.seqlen) * c.head_dim;
  c.out_partial = {out_partial, c.heads * head, c.head_dim, head};
  c.out_split_stride = rows * c.head_dim;
  c.lse_partial = lse_partial;
  c.lse_split_stride = rows;
  c.lse_batch_stride = int64_t(c.heads) * c.seqlen;
  c.lse_head_stride = c.seqlen;
  c.out_dtype = fwd.dtype;
  c.out = fwd.out;
  c.lse = fwd.lse;
  c.sequences = packed ? fwd.lengths.cu_seqlens_q + fwd.shape.batch : nullptr;
  return c;
}

}  // namespace flashattn
