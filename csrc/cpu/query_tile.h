// A tile of query rows, from loading Q to storing the output: the body of a task.
#pragma once

#include "core/row_map.h"
#include "core/score_mod.h"
#include "core/sequence_info.h"
#include "core/visible_band.h"
#include "core/work_tile.h"
#include "cpu/kernels.h"
#include "cpu/workspace.h"
#include "flashattn/params.h"

namespace flashattn::cpu {

// What all tiles of a call share.
struct Call {
  FlashFwdParams const& params;
  Kernels const& kernels;
  ScoreMod mod;
  RowMap row_map;
  int tile_tokens;
  int item_size;    // bytes of an element

  int words() const { return params.shape.head_dim / kernels.pair; }
  int padded_dim() const {
    return ceil_div(params.shape.head_dim, kernels.panel) * kernels.panel;
  }
};

class QueryTile {
 public:
  QueryTile(Call const& call, WorkTile const& tile);

  // Writes the tile's rows of out and lse; nothing when the tile lies outside of its sequence.
  void run();

 private:
  void allocate();
  void load_queries();
  void attend_to_all_keys();
  KeyBlock pack_block(int block);
  void attend_to_block(KeyBlock const& block);
  RowGroup row_group(int first_row) const;
  void store_output() const;
  float sink(int head) const;

  int token(int row) const { return first_token_ + call_.row_map.token(row); }
  int head(int row) const { return first_head_ + call_.row_map.head(row); }

  Call const& call_;
  SequenceInfo seq_;
  VisibleBand band_;
  int first_head_;
  int head_kv_;
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
