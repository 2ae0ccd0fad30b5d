// What flash_fwd.cpp asks of the arithmetic, and the data they share. Each instruction set fills
// one Kernels table per element type (simd/variant.h).
//
// Matrices are packed into words of 4 bytes. A word is one float; or, where the machine multiplies
// pairs of bf16, two neighbours along the dimension that is summed over.
#pragma once

#include <cstdint>
#include <vector>

#include "core/block_range.h"
#include "core/score_mod.h"
#include "flashattn/params.h"

namespace flashattn::cpu {

using Word = float;  // its bits may be two bf16 numbers

constexpr int kMaxGroupRows = 12;  // over all instruction sets
constexpr int kMaxLanes = 16;
constexpr int kMaxBlockKeys = 256;

// Keys of one block. Short enough that the packed keys and values of a block (at most 512 KiB)
// and the rows of a tile stay in the L2 cache; a function of the head dim alone, because the order
// of the sums, and so the bits of a result, follow from it.
constexpr int block_keys(int head_dim) {
  return head_dim <= 128 ? kMaxBlockKeys : kMaxBlockKeys / 2;
}

// What one query row sees, and its softmax so far.
struct RowState {
  int key_begin;
  int key_end;
  int diagonal;   // ALiBi measures the distance from this key
  float slope;    // of ALiBi
  float maximum;  // of the scores
};

// Consecutive rows of a query tile, as many as the registers hold sums for. Its arrays have
// Kernels::group_rows rows, whatever `rows` is; what is computed for the rest is never stored.
struct RowGroup {
  int rows;
  Word const* q;    // [word of the head dim][group_rows]
  RowState* state;  // [group_rows]
  float* sums;      // [group_rows][lanes]: sums of exponentials, one per lane
  float* acc;       // [group_rows][padded head dim]: P·V before it is divided by the sum
};

// Packed keys and values of one block, in panels of Kernels::panel columns.
struct KeyBlock {
  int first_key;
  Word const* k;  // [panel of keys][word of the head dim][panel]
  Word const* v;  // [panel of the head dim][word of the block's keys][panel]
};

struct Kernels {
  int group_rows;
  int panel;  // columns whose sums are held in registers at once
  int lanes;
  int pair;  // elements of a word

  // One row of Q into its column of RowGroup::q.
  void (*pack_query_row)(void const* row, int head_dim, Word* q);
  // The rows of `keys` keys. Null rows become 0; so do keys past `keys`, up to a whole panel, and
  // columns of V past head_dim.
  void (*pack_keys)(void const* const* rows, int keys, int head_dim, Word* packed);
  void (*pack_values)(void const* const* rows, int keys, int head_dim, Word* packed);

  // Adds the keys of panels [begin, end) of the block to a row group. Panels are counted from the
  // start of the sequence; the clean ones need no mask.
  void (*attend)(RowGroup const& group, KeyBlock const& block, BlockRange panels, int head_dim,
                 ScoreMod const& mod);

  float (*lane_sum)(float const* sums);
  void (*store_row)(float const* acc, float factor, int head_dim, void* out);
};

// An instruction set that this machine has.
struct Variant {
  char const* name;
  Kernels const& (*kernels)(DType);
};

// Best first; the last one is always "baseline".
std::vector<Variant> const& variants();

// The one in use.
Variant const& chosen_variant();

// Those of cpu.h with an instruction set of the caller's choice: the tests run all of them.
void flash_fwd(FlashFwdParams const& params, Variant const& variant);
void flash_splitkv_fwd(FlashSplitkvParams const& params, Variant const& variant);

namespace avx512bf16 { Kernels const& kernels(DType dtype); }
namespace avx512 { Kernels const& kernels(DType dtype); }
namespace avx2 { Kernels const& kernels(DType dtype); }
namespace baseline { Kernels const& kernels(DType dtype); }

}  // namespace flashattn::cpu
