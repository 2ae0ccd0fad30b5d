// The query rows of a tile: which token and head each is, and where it lies in memory.
#pragma once

#include "core/block_range.h"
#include "core/forward_plan.h"
#include "core/sequence_info.h"
#include "core/visible_band.h"
#include "flashattn/params.h"

namespace flashattn {

struct QueryTile {
  SequenceInfo seq;
  RowMap row_map;
  int first_token;
  int tokens;      // of the tile that exist
  int first_head;  // query head of row 0

  FA_HD QueryTile() : seq(), first_token(0), tokens(0), first_head(0) {}

  FA_HD QueryTile(SequenceInfo const& sequence, ForwardPlan const& plan, WorkTile const& work)
      : seq(sequence), row_map(plan.row_map), first_head(work.head * plan.row_map.pack()) {
    // The tile may lie outside of its sequence (work_tile.h).
    int64_t const first = int64_t(work.m_block) * plan.tile_tokens;
    bool const inside = first >= 0 && first < seq.len_q;
    first_token = inside ? static_cast<int>(first) : 0;
    tokens = inside ? clamp(seq.len_q - first_token, 0, plan.tile_tokens) : 0;
  }

  FA_HD bool empty() const { return tokens == 0; }
  FA_HD bool has_row(int row) const { return row < row_map.rows(tokens); }
  FA_HD int token(int row) const { return first_token + row_map.token(row); }
  FA_HD int head(int row) const { return first_head + row_map.head(row); }

  // Elements between the start of the tensor and a row of the tile.
  template <class Pointer>
  FA_HD int64_t offset(Strided<Pointer> const& t, int row) const {
    return query_offset(t, seq, head(row)) + token(row) * t.row_stride;
  }

  // The row's place in lse.
  FA_HD int64_t lse_index(Shape const& shape, Lengths const& lengths, int row) const {
    return lse_offset(shape, lengths, seq, head(row)) + token(row);
  }

  FA_HD KeyRange visible_keys(VisibleBand const& band) const {
    return flashattn::visible_keys(band, first_token, first_token + tokens - 1);
  }

  FA_HD BlockRange visible_blocks(VisibleBand const& band, int block_n) const {
    return flashattn::visible_blocks(band, first_token, first_token + tokens - 1, block_n);
  }
};

}  // namespace flashattn
