// A part of the attention of a tile, and where its result goes.
#pragma once

#include <cute/config.hpp>

#include "core/query_tile.h"
#include "core/work_list.h"

namespace flashattn::sm80 {

// out (rows, head dim) and lse (rows), rows in the order of lse or in that of the tile. Null when the result
// is final.
struct PartialOutput {
  float* out = nullptr;
  float* lse = nullptr;
  bool tile_order = false;
};

struct Part {
  QueryTile tile;
  int head_kv;
  KeyRange keys;  // that some row of the tile sees
  int begin;      // key blocks [begin, end)
  int end;
  int clean_begin;  // those that need no mask
  int clean_end;
  PartialOutput output;
  bool first;        // of the parts of the tile: it counts the sink
  bool has_queries;  // they were asked for before its first keys
  SharePart share;   // decode: where it lies in the list of work
  int64_t tile_end;  // and where its tile ends there

  CUTE_DEVICE bool is_clean(int block) const { return block >= clean_begin && block < clean_end; }
};

// The blocks of `range` of a tile. Where there are none, the one before block 0 stands for them: it has no keys,
// so all its scores are masked.
CUTE_DEVICE Part part_of(FlashFwdParams const& params, ForwardPlan const& plan, QueryTile const& tile,
                         VisibleBand const& band, BlockRange const& range, PartialOutput const& output, bool first) {
  Part part;
  part.tile = tile;
  part.head_kv = plan.group.quotient(tile.first_head);
  part.keys = tile.visible_keys(band);
  part.begin = range.count() > 0 ? range.begin : -1;
  part.end = range.count() > 0 ? range.end : 0;
  part.clean_begin = range.clean_begin;
  part.clean_end = range.clean_end;
  part.output = output;
  part.first = first;
  part.share = SharePart{};
  part.tile_end = 0;
  part.has_queries = false;
  return part;
}

}  // namespace flashattn::sm80
