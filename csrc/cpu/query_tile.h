// A tile of query rows, from loading Q to storing the output: the body of a task.
#pragma once

#include <numeric>

#include "core/cache_info.h"
#include "core/row_map.h"
#include "core/score_mod.h"
#include "core/sequence_info.h"
#include "core/split_plan.h"
#include "core/visible_band.h"
#include "core/work_tile.h"
#include "cpu/kernels.h"
#include "cpu/workspace.h"
#include "flashattn/params.h"

namespace flashattn::cpu {

// Where tiles write instead of to out and lse when keys are split. Rows lie in the order of lse.
struct Parts {
  float* out = nullptr;  // (splits, rows, head_dim); null: the keys are not split
  float* lse = nullptr;  // (splits, rows)
  int64_t rows = 0;
  void (*store_row)(float const* acc, float factor, int head_dim, void* out) = nullptr;
};

// What all tiles of a call share.
struct Call {
  FlashFwdParams const& params;
  Kernels const& kernels;
  ScoreMod mod;
  RowMap row_map;
  int tile_tokens;
  int item_size;                                   // bytes of an element
  FlashSplitkvParams const* over_cache = nullptr;  // null: k and v are those of `params`
  SplitPlan split = {1, 0};
  Parts parts = {};

  // Blocks divide splits of a fixed size, which are multiples of kSplitGranule.
  int block_n() const { return std::gcd(split.split_size, block_keys(params.shape.head_dim)); }
  int words() const { return params.shape.head_dim / kernels.pair; }
  int padded_dim() const { return ceil_div(params.shape.head_dim, kernels.panel) * kernels.panel; }
};

struct OutputRow {
  void* out;
  float* lse;  // may be null
};

// The rows of K and V of one block. Null: no key that exists and that a row of the tile sees.
struct BlockRows {
  int first_key;
  int count;
  bool holes;  // some keys do not exist
  void const* k[kMaxBlockKeys];
  void const* v[kMaxBlockKeys];
};

class QueryTile {
 public:
  QueryTile(Call const& call, WorkTile const& tile, int split = 0);

  // Writes the tile's rows of out and lse; nothing when the tile lies outside of its sequence.
  void run();

 private:
  void allocate();
  void load_queries();
  void attend_to_all_keys();
  BlockRows find_rows(int first_key) const;
  KeyBlock pack_block(BlockRows const& rows);
  void attend_between_holes(KeyBlock const& block, BlockRows const& rows);
  void attend_to_keys(KeyBlock const& block, int first_key, int end_key);
  void show_keys(int first_key, int end_key);
  RowGroup row_group(int first_row) const;
  void store_output() const;
  OutputRow output_row(int row) const;
  float sink(int head) const;

  int token(int row) const { return first_token_ + call_.row_map.token(row); }
  int head(int row) const { return first_head_ + call_.row_map.head(row); }

  Call const& call_;
  SequenceInfo seq_;
  VisibleBand band_;
  int first_head_;
  int head_kv_;
  int split_;
  FastDivisor page_size_;
  int first_token_ = 0;
  int rows_ = 0;         // 0: nothing to do
  int padded_rows_ = 0;  // a multiple of Kernels::group_rows

  Word* q_ = nullptr;
  Word* k_ = nullptr;
  Word* v_ = nullptr;
  RowState* state_ = nullptr;
  float* sums_ = nullptr;
  float* acc_ = nullptr;
};

}  // namespace flashattn::cpu
