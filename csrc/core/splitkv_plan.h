// How a call over a cache is cut into work: roles, tiles, splits, workspace. Follows from sizes that
// the host knows; lengths stay on the device.
#pragma once

#include <algorithm>
#include <numeric>

#include "core/cache_info.h"
#include "core/cut_tile.h"
#include "core/forward_plan.h"
#include "core/split_plan.h"
#include "core/tile_table.h"

namespace flashattn {

// Key blocks of a decode tile that a thread block takes at least. Beside chunks, which find less room on
// multiprocessors that decode, more (H200, 2026-11-30, docs/tuning.md). Powers of two.
constexpr int kMinShare = 2;
constexpr int kMinShareBesideChunks = 4;
// What cutting a tile costs, in key blocks: some, and one for so many rows (H200, 2026-11-30, docs/tuning.md).
constexpr int kCutCost = 1;
constexpr int kCutRows = 4;
constexpr int kFewRows = 128;   // query rows of a sequence up to which it may be decoded in several tiles
constexpr int kShortRows = 64;  // and up to which it leaves at least half of a chunk tile empty

// How the list of work of one member of each team (core/work_list.h) is shared out. It has at least one tile.
struct SharePlan {
  FastDivisor tiles;
  FastDivisor most;     // shares
  int least = 1;        // entries of a share
  int whole_tiles = 0;  // of a share, if none were cut; 0: they are few, and are cut
  int cut_cost = 0;     // key blocks that are attended to in the time that cutting a tile costs, about
};

struct SplitkvPlan {
  ForwardPlan decode;  // one tile per sequence and group of heads; several where chunks are few (are_few)
  ForwardPlan chunk;
  Role decode_role;
  Role chunk_role;
  bool may_decode;  // whether a sequence can have that role
  bool may_chunk;
  SplitPlan split;        // as the caller asked; {1} when splits are automatic
  SplitPlan chunk_split;  // of the chunks; the most, when splits are automatic
  int multiprocessors;
  int shares = 0;      // automatic: thread blocks that take equal shares of the decode work (core/work_list.h)
  FastDivisor team;    // thread blocks of one
  int team_heads = 0;  // decode tiles of a token for each member of a team
  SharePlan share;
  int64_t rows;  // query rows times heads
  FastDivisor page_size;
  float* out_partial = nullptr;  // given splits: (splits, rows, head_dim), in the workspace
  float* lse_partial = nullptr;  // (splits, rows)
  CutTiles decode_cuts;          // automatic
  CutTiles chunk_cuts;
  void* rotated_q = nullptr;  // (query rows, heads, head_dim), of the type of q
  size_t workspace_bytes = 0;

  FA_HD bool automatic() const { return shares > 0; }
  FA_HD bool merges() const { return split.splits > 1 || decode_cuts.entries > 0 || chunk_cuts.entries > 0; }
};

// The most query heads of a key/value head that fit a decode tile together and divide the group.
inline int decode_pack(Shape const& shape, int tile_rows) {
  int const group = shape.heads / shape.heads_kv;
  int pack = group < tile_rows ? group : tile_rows;
  while (pack > 1 && group % pack != 0) { --pack; }
  return pack > 0 ? pack : 1;  // no query heads: there may still be new tokens to append
}

// Given splits: a decode tile holds all rows of its sequence.
FA_HD WorkTile decode_tile_of(Shape const& shape, int64_t index) {
  return {static_cast<int>(index % shape.batch), static_cast<int>(index / shape.batch), 0};
}

// Sequences whose query rows fit one decode tile are decoded, the others are chunks. Where the call's decode role
// does not follow the longest sequence (see plan_roles), this depends on the sequence alone.
FA_HD bool is_decoded(SequenceInfo const& seq, ForwardPlan const& decode) { return seq.len_q <= decode.tile_tokens; }

// Takes pieces of the workspace one after the other. Without a workspace it only adds up their sizes.
class WorkspacePieces {
 public:
  explicit WorkspacePieces(void* workspace) : base_(static_cast<char*>(workspace)) {}

  template <class T>
  T* take(int64_t count) {
    size_t const begin = bytes_;
    bytes_ = (begin + size_t(count) * sizeof(T) + 127) / 128 * 128;
    return base_ != nullptr ? reinterpret_cast<T*>(base_ + begin) : nullptr;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* const base_;
  size_t bytes_ = 0;
};

inline CutTiles cut_tiles(WorkspacePieces& pieces, int entries, int slots, int rows, int head_dim, int team) {
  CutTiles cuts;
  cuts.entries = entries, cuts.slots = slots, cuts.rows = rows, cuts.team = team;
  int64_t const part_rows = int64_t(entries) * slots * rows;
  cuts.sizes = pieces.take<CutTiles::Size>(entries);
  cuts.tiles = pieces.take<QueryTile>(entries);
  cuts.out = pieces.take<float>(part_rows * head_dim);
  cuts.lse = pieces.take<float>(part_rows);
  return cuts;
}

// Whether chunks of `longest` rows are so few that their tiles would leave multiprocessors idle: as decode tiles they
// are shared out over all of them (H200, 2026-11-30, docs/tuning.md). A chunk has more tokens than a tile of `decode`.
inline bool are_few(FlashFwdParams const& fwd, int64_t longest, ForwardPlan const& decode, ForwardPlan const& chunk,
                    int multiprocessors) {
  int64_t const chunks = std::min<int64_t>(fwd.shape.batch, query_rows(fwd) / (decode.tile_tokens + 1));
  int64_t const tiles = query_rows(fwd) / chunk.tile_tokens + chunks;  // of a head
  return longest <= kFewRows && tiles * (fwd.shape.heads / chunk.row_map.pack()) <= kWaves * multiprocessors;
}

// How many tiles a call has, if its sequences are about as long as the longest: each leaves half a tile empty.
inline int64_t expected_tiles(FlashFwdParams const& fwd, ForwardPlan const& plan) {
  if (fwd.lengths.cu_seqlens_q == nullptr) { return plan.tiles; }
  int64_t const tokens = fwd.lengths.total_q, longest = std::max(fwd.shape.seqlen_q, 1);
  int64_t const of_head = tokens / plan.tile_tokens + tokens / (2 * longest);
  return std::max<int64_t>(of_head, 1) * (fwd.shape.heads / plan.row_map.pack());
}

// Whether chunks suit tiles of half as many rows, `shorter`, which hold as many heads of a token: they are short, or
// there is at most one tile for each multiprocessor.
inline bool are_short(FlashFwdParams const& fwd, SplitkvPlan const& plan, ForwardPlan const& shorter) {
  int const pack = plan.chunk.row_map.pack();
  bool const half_empty = int64_t(fwd.shape.seqlen_q) * pack <= kShortRows;
  bool const suits = half_empty || expected_tiles(fwd, plan.chunk) <= plan.multiprocessors;
  return suits && shorter.row_map.pack() == pack;
}

inline ForwardPlan plan_decode(FlashFwdParams const& fwd, TileShape tile) {
  return ForwardPlan(fwd.shape, fwd.lengths, tile.m, decode_pack(fwd.shape, tile.m));
}

// Which kernels a call has, and the tiles of each.
inline void plan_roles(SplitkvPlan& plan, FlashSplitkvParams const& params, int arch, int kernel_head_dim) {
  FlashFwdParams const& fwd = params.fwd;
  Shape const& shape = fwd.shape;
  auto const tile = [&](Role role) { return tile_shape(arch, role, kernel_head_dim); };
  int const group = shape.heads_kv > 0 ? shape.heads / shape.heads_kv : 1;
  int64_t const longest = int64_t(shape.seqlen_q) * group;  // rows
  // Without splits, or with splits of a given size, bits must not depend on the longest sequence of the batch.
  bool const any_role = params.split.split_size == 0 && params.split.num_splits != 1;
  plan.decode_role = decode_role(group, any_role ? longest : 0);
  plan.decode = plan_decode(fwd, tile(plan.decode_role));
  plan.chunk_role = Role::kChunk;
  plan.chunk = plan_forward(shape, fwd.lengths, tile(Role::kChunk));
  ForwardPlan const shorter = plan_forward(shape, fwd.lengths, tile(Role::kShortChunk));
  if (any_role && has_short_chunk(arch, kernel_head_dim) && are_short(fwd, plan, shorter)) {
    plan.chunk_role = Role::kShortChunk;
    plan.chunk = shorter;
  }
  bool are_chunks = shape.seqlen_q > plan.decode.tile_tokens;
  if (are_chunks && params.split.automatic() && are_few(fwd, longest, plan.decode, plan.chunk, plan.multiprocessors)) {
    are_chunks = false;
    plan.decode_role = Role::kWideDecode;
    plan.decode = plan_decode(fwd, tile(plan.decode_role));
  } else {
    plan.decode.tiles = int64_t(shape.batch) * (shape.heads / plan.decode.row_map.pack());
  }
  plan.rows = query_rows(fwd) * shape.heads;
  plan.may_chunk = plan.rows > 0 && are_chunks;
  plan.may_decode = plan.rows > 0 && (fwd.lengths.cu_seqlens_q != nullptr || !plan.may_chunk);
}

// Of a list with so many tiles, of up to `rows` query rows, for at most `most` thread blocks.
inline SharePlan plan_shares(int64_t tiles, int rows, int most, bool beside_chunks) {
  int const count = static_cast<int>(std::clamp<int64_t>(tiles, 1, INT32_MAX));
  SharePlan plan;
  plan.tiles = FastDivisor(count);
  plan.most = FastDivisor(most);
  if (count < most) {
    plan.least = beside_chunks ? kMinShareBesideChunks : kMinShare;
  } else {
    plan.whole_tiles = 1 + (count - 1) / most;  // rounded up
  }
  plan.cut_cost = kCutCost + rows / kCutRows;
  return plan;
}

// As many thread blocks, in teams that divide their number and that of a token's decode tiles.
inline void share_decode_work(SplitkvPlan& plan, Shape const& shape, int thread_blocks) {
  int const heads = shape.heads / plan.decode.row_map.pack(), team = heads > 0 ? std::gcd(heads, thread_blocks) : 1;
  plan.shares = thread_blocks;
  plan.team = FastDivisor(team);
  plan.team_heads = heads / team;
  int const rows = std::min(shape.seqlen_q, plan.decode.tile_tokens) * plan.decode.row_map.pack();
  plan.share = plan_shares(plan.decode.tiles / team, rows, thread_blocks / team, plan.may_chunk);
}

// Shares of the decode work, splits of the chunks, and room for the parts of what they cut.
inline void plan_automatic_splits(SplitkvPlan& plan, FlashFwdParams const& fwd, int arch, int kernel_head_dim,
                                  WorkspacePieces& pieces) {
  Shape const& shape = fwd.shape;
  TileShape const decode = tile_shape(arch, plan.decode_role, kernel_head_dim);
  TileShape const chunk = tile_shape(arch, plan.chunk_role, kernel_head_dim);
  plan.split = {1, 0};
  // What a multiprocessor holds, or one where chunks want the rest.
  int const of_multiprocessor = plan.may_chunk ? 1 : decode_blocks(arch, decode, kernel_head_dim);
  share_decode_work(plan, shape, of_multiprocessor * plan.multiprocessors);
  if (shape.seqlen_k <= decode.n) {
    plan.share.least = 1;  // a tile has one entry, which cannot be cut
  } else if (plan.may_decode) {
    plan.decode_cuts = cut_tiles(pieces, plan.shares, 2, decode.m, shape.head_dim, plan.team.divisor());
  }
  int const of_chunks = plan.chunk_role == Role::kShortChunk ? std::max(chunk.blocks, kWaves) : kWaves;
  plan.chunk_split = plan_chunk_splits(shape.seqlen_k, plan.chunk.tiles, expected_tiles(fwd, plan.chunk),
                                       int64_t(of_chunks) * plan.multiprocessors);
  if (plan.may_chunk && plan.chunk_split.splits > 1) {
    plan.chunk_cuts = cut_tiles(pieces, static_cast<int>(plan.chunk.tiles), plan.chunk_split.splits, chunk.m,
                                shape.head_dim, /*team=*/0);
  }
}

// `kernel_head_dim` is that of the kernel which serves the caller's head dim.
inline SplitkvPlan plan_splitkv(FlashSplitkvParams const& params, int arch, int kernel_head_dim, int multiprocessors) {
  Shape const& shape = params.fwd.shape;
  SplitkvPlan plan;
  plan.multiprocessors = multiprocessors;
  plan_roles(plan, params, arch, kernel_head_dim);
  plan.page_size = FastDivisor(params.cache.page_size > 0 ? params.cache.page_size : 1);

  WorkspacePieces pieces(params.workspace);
  if (params.split.automatic()) {
    plan_automatic_splits(plan, params.fwd, arch, kernel_head_dim, pieces);
  } else {
    plan.split = plan.chunk_split = plan_splits(params, multiprocessors, 0);
    if (plan.split.splits > 1) {
      plan.out_partial = pieces.take<float>(plan.split.splits * plan.rows * shape.head_dim);
      plan.lse_partial = pieces.take<float>(plan.split.splits * plan.rows);
    }
  }
  if (params.append.rotary_dim > 0) { plan.rotated_q = pieces.take<uint16_t>(plan.rows * shape.head_dim); }
  plan.workspace_bytes = pieces.bytes();
  return plan;
}

// The merge of the parts of a split call: their rows lie in the order of lse.
inline FlashCombineParams combine_params(FlashFwdParams const& fwd, int splits, int64_t rows, float const* out_partial,
                                         float const* lse_partial) {
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
