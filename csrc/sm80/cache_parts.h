// Which parts of which tiles a thread block of flash_fwd_splitkv attends to.
#pragma once

#include "core/cache_info.h"
#include "core/split_plan.h"
#include "core/work_list.h"
#include "sm80/part.h"
#include "sm80/work_search.h"

namespace flashattn::sm80 {

CUTE_DEVICE PartialOutput slot_output(CutTiles const& cuts, int64_t slot, int head_dim) {
  int64_t const row = slot * cuts.rows;
  return {cuts.out + row * head_dim, cuts.lse + row, /*tile_order=*/true};
}

// Each entry is written by one thread.
CUTE_DEVICE void record_cut(CutTiles const& cuts, int entry, QueryTile const& tile, int parts) {
  if (cuts.entries > 0) { cuts.record(entry, tile, parts); }
}

CUTE_DEVICE VisibleBand band_of(FlashSplitkvParams const& params, SequenceInfo const& seq) {
  return visible_band(seq.len_q, seq.len_k, params.fwd.window);
}

// Split `split` of the number, or of the size, that the caller asked for; its rows lie in the order of lse.
// False when it has no keys, and then its lse says so to the merge.
template <class Traits>
CUTE_DEVICE bool take_given_split(FlashSplitkvParams const& params, SplitkvPlan const& plan, QueryTile const& tile,
                                  ForwardPlan const& role, int split, Part& slot) {
  VisibleBand const band = band_of(params, tile.seq);
  BlockRange const range = take_split(tile.visible_blocks(band, Traits::kBlockN), plan.split, split, Traits::kBlockN);
  PartialOutput output;
  if (plan.split.splits > 1) {
    output.out = plan.out_partial + split * plan.rows * params.fwd.shape.head_dim;
    output.lse = plan.lse_partial + split * plan.rows;
  }
  if (threadIdx.x == 0) { slot = part_of(params.fwd, role, tile, band, range, output, /*first=*/split == 0); }
  if (split == 0 || range.count() > 0) { return true; }
  for (int row = threadIdx.x; row < Traits::kBlockM; row += Traits::kThreads) {
    if (tile.has_row(row)) { output.lse[tile.lse_index(params.fwd.shape, params.fwd.lengths, row)] = -kInfinity; }
  }
  return false;
}

// The part of chunk tile blockIdx.x that this thread block attends to, if there is one.
template <class Traits>
class ChunkPart {
 public:
  static constexpr bool kMany = false;

  CUTE_DEVICE ChunkPart(FlashSplitkvParams const& params, SplitkvPlan const& plan) : params_(params), plan_(plan) {}

  CUTE_DEVICE static void opened(Part const&) {}
  CUTE_DEVICE static void settle(Part&) {}

  CUTE_DEVICE bool next(Part& slot) const {
    WorkTile const work = plan_.chunk.work_tile(params_.fwd.shape, params_.fwd.lengths, blockIdx.x);
    QueryTile const tile(cache_sequence_info(params_, work.batch), plan_.chunk, work);
    bool const exists = !tile.empty() && !is_decoded(tile.seq, plan_.decode);
    if (plan_.automatic()) { return take_equal_part(tile, exists, slot); }
    return exists && take_given_split<Traits>(params_, plan_, tile, plan_.chunk, blockIdx.y, slot);
  }

 private:
  CUTE_DEVICE bool take_equal_part(QueryTile const& tile, bool exists, Part& slot) const {
    int const entry = blockIdx.x, index = blockIdx.y;
    CutTiles const& cuts = plan_.chunk_cuts;
    VisibleBand const band = band_of(params_, tile.seq);
    BlockRange const blocks = tile.visible_blocks(band, Traits::kBlockN);
    int const parts = exists ? used_splits(blocks.count(), plan_.chunk_split, Traits::kBlockN) : 0;
    if (threadIdx.x == 0 && index == 0) { record_cut(cuts, entry, tile, parts); }
    if (threadIdx.x == 0 && index < parts) {
      PartialOutput output;
      if (parts > 1) { output = slot_output(cuts, cuts.slot(entry, index), params_.fwd.shape.head_dim); }
      BlockRange const range = take_share(blocks, parts, index);
      slot = part_of(params_.fwd, plan_.chunk, tile, band, range, output, /*first=*/index == 0);
    }
    return index < parts;
  }

  FlashSplitkvParams const& params_;
  SplitkvPlan const& plan_;
};

// The parts of a thread block of the decode kernel, one after the other. Automatic splits: an equal share of
// all decode work, which is the end of one tile, then whole tiles, then the beginning of one. Given splits: one
// of them, of one tile, unless a sequence is longer than the caller's max_seqlen_q said.
template <class Traits>
class DecodeParts {
 public:
  static constexpr bool kMany = true;
  using Search = WorkSearch<Traits::kThreads>;

  CUTE_DEVICE DecodeParts(FlashSplitkvParams const& params, SplitkvPlan const& plan, typename Search::Storage& storage)
      : params_(params),
        plan_(plan),
        share_(plan.team.quotient(blockIdx.x)),
        search_(WorkList(params, plan, Traits::kBlockN, blockIdx.x - share_ * plan.team.divisor()),
                plan.automatic() ? params.fwd.shape.batch : 0, storage),
        shares_(team_shares(plan, search_.total())),
        at_(shares_.begin(share_)),
        end_(shares_.end(share_)) {
    bool const idle = at_ == end_;
    if (plan.automatic() && idle && threadIdx.x == 0) { record_cut(plan.decode_cuts, blockIdx.x, QueryTile{}, 0); }
  }

  CUTE_DEVICE bool next(Part& slot) { return plan_.automatic() ? next_of_share(slot) : next_given(slot); }

  // `part` is what next() has filled, and all threads can see it.
  CUTE_DEVICE void opened(Part const& part) { at_ = part.share.end; }

  // What nobody needs before the first keys of a part have been asked for: where its result goes, and, of the last part
  // of the share, whether its tile was cut there. By one thread.
  CUTE_DEVICE void settle(Part& part) const {
    if (!plan_.automatic() || threadIdx.x != 0) { return; }
    SharePart const& share = part.share;
    int const index = blockIdx.x;
    CutTiles const& cuts = plan_.decode_cuts;
    if (share.end == end_) {
      bool const cuts_here = share.begins_tile && !share.ends_tile;
      record_cut(cuts, index, part.tile, cuts_here ? shares_.holders(share_, part.tile_end) : 0);
    }
    if (!share.is_whole()) { part.output = slot_output(cuts, share.slot(index), params_.fwd.shape.head_dim); }
  }

 private:
  CUTE_DEVICE bool next_of_share(Part& slot) {
    if (at_ >= end_) { return false; }
    search_.find(at_, [&](ListTile const& found) { fill(slot, found); });
    return true;
  }

  CUTE_DEVICE void fill(Part& slot, ListTile const& found) const {
    SharePart const share(found, at_, end_);
    QueryTile const tile(found.seq, plan_.decode, found.work);
    VisibleBand const band = band_of(params_, found.seq);
    BlockRange const blocks = tile.visible_blocks(band, Traits::kBlockN);
    BlockRange const range = clip(blocks, blocks.begin + static_cast<int>(share.begin - found.begin),
                                  blocks.begin + static_cast<int>(share.end - found.begin));
    slot = part_of(params_.fwd, plan_.decode, tile, band, range, {}, share.begins_tile);
    slot.share = share;
    slot.tile_end = found.end();
  }

  CUTE_DEVICE bool next_given(Part& slot) {
    WorkTile work = decode_tile_of(params_.fwd.shape, blockIdx.x);
    SequenceInfo const seq = cache_sequence_info(params_, work.batch);
    if (plan_.may_chunk && !is_decoded(seq, plan_.decode)) { return false; }
    while (int64_t(next_given_) * plan_.decode.tile_tokens < seq.len_q) {
      work.m_block = next_given_++;
      QueryTile const tile(seq, plan_.decode, work);
      if (take_given_split<Traits>(params_, plan_, tile, plan_.decode, blockIdx.y, slot)) { return true; }
    }
    return false;
  }

  FlashSplitkvParams const& params_;
  SplitkvPlan const& plan_;
  int const share_;
  Search const search_;
  Shares const shares_;
  int64_t at_;  // in the list of work
  int64_t const end_;
  int next_given_ = 0;  // tile
};

}  // namespace flashattn::sm80
