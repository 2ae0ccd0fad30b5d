// How large a tile of query rows is, and how many threads a call is worth.
#pragma once

#include <algorithm>

#include "core/row_map.h"
#include "cpu/cpu.h"

namespace flashattn::cpu {

// Rows of a tile. Packing a block of keys costs about as much as 4 rows' arithmetic, so more rows
// gain little, and the rows' queries and sums should stay in the L2 cache.
constexpr int kTileRows = 252;
constexpr int kSmallTileRows = 96;  // when there would be too few tiles to share out evenly
constexpr int kPackingRows = 4;
static_assert(kTileRows <= RowMap::kMaxRows);

// Below this many multiply-adds a thread costs more to wake than it saves (about 20 us).
constexpr double kWorkPerThread = 1 << 21;

// Counted as a double: the largest calls have more multiply-adds than 64 bits hold.
inline int useful_threads(double multiply_adds) {
  return static_cast<int>(std::clamp<double>(multiply_adds / kWorkPerThread, 1, num_threads()));
}

}  // namespace flashattn::cpu
