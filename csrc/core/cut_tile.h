// Tiles whose keys were shared out among several thread blocks, and where their parts wait to be merged.
#pragma once

#include <cstdint>

#include "core/query_tile.h"

namespace flashattn {

// A slot holds one part: out (rows, head_dim) and lse (rows), fp32, rows in the order of the tile. There are
// two ways to number the slots. Chunks: entry e is chunk tile e and has `slots` of its own. Shares of a work
// list: entry e is the tile that thread block e begins and does not end; a thread block meets two cut tiles at the
// most, and has slot 2 e for the one it does not begin and slot 2 e + 1 for the one it does not end. The next part of a
// tile lies with the thread block `team` further on.
struct CutTiles {
  // Apart from the tiles, because the merge looks at all of them.
  struct alignas(8) Size {
    int parts;  // at least 2, or 0: no tile was cut here, and tiles[entry] is not set
    int rows;   // of the tile that exist
  };

  Size* sizes = nullptr;       // (entries)
  QueryTile* tiles = nullptr;  // (entries)
  float* out = nullptr;        // (entries, slots, rows, head_dim)
  float* lse = nullptr;        // (entries, slots, rows)
  int entries = 0;             // 0: nothing can be cut
  int slots = 0;               // of an entry
  int rows = 0;                // of a tile
  int team = 0;                // of shares; 0: chunks

  FA_HD int64_t slot(int entry, int part) const {
    int64_t const first = int64_t(entry) * slots;
    int const step = team > 0 ? 2 * team * part + (part == 0) : part;
    return first + step;
  }

  // By the thread block that has the first of the parts, be they one or none.
  FA_HD void record(int entry, QueryTile const& tile, int parts) const {
    bool const is_cut = parts > 1;
    sizes[entry] = {is_cut ? parts : 0, is_cut ? tile.row_map.rows(tile.tokens) : 0};
    if (is_cut) { tiles[entry] = tile; }
  }
};

}  // namespace flashattn
