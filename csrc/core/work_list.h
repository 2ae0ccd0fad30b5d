// The work of the decode role as one list: the key blocks of its tiles, one after the other. Thread blocks take equal
// shares of the list, so that no one waits for the longest sequence. Few tiles have entries up to a multiple of the
// smallest share: who has that many key blocks has them of one tile. Neighbouring thread blocks are a team: each has a
// list of its own, of every team-th head, and as these lists are alike, a team walks through the same pages at the same
// time, where thread blocks at different places would come back to them later (H200, 2026-11-30, docs/tuning.md).
#pragma once

#include "core/query_tile.h"
#include "core/splitkv_plan.h"

namespace flashattn {

// Short numbers divide faster.
FA_HD int64_t divide(int64_t a, int64_t b) {
  bool const is_short = a <= INT32_MAX && b <= INT32_MAX;
  return is_short ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}
FA_HD int64_t divide(int64_t a, FastDivisor const& b) { return a <= INT32_MAX ? b.quotient(a) : a / b.divisor(); }

// A tile, and the position of its first entry in the list.
struct ListTile {
  SequenceInfo seq;
  WorkTile work;
  int blocks;  // key blocks, and entries without one at the end
  int64_t begin;

  FA_HD int64_t end() const { return begin + blocks; }
};

// That of one member of each team. Order: sequence, query tile, head, key block. The host does not know the lengths, so
// nothing is stored: whoever needs a part of the list works it out.
class WorkList {
 public:
  FA_HD WorkList(FlashSplitkvParams const& params, SplitkvPlan const& plan, int block_n, int member)
      : params_(params), plan_(plan), block_n_(block_n), member_(member) {}

  // Entries of one sequence over all heads of the list.
  FA_HD int64_t length(int batch) const {
    SequenceInfo const seq = cache_sequence_info(params_, batch);
    if (plan_.may_chunk && !is_decoded(seq, plan_.decode)) { return 0; }
    // One tile, unless no kernel for chunks runs: they are few, or longer than the caller's max_seqlen_q said.
    int64_t sum = 0;
    for (int m_block = 0; int64_t(m_block) * plan_.decode.tile_tokens < seq.len_q; ++m_block) {
      sum += blocks(seq, m_block);
    }
    return sum * heads();
  }

  // The tile at `position`, which lies in sequence `batch`; this begins at `begin`.
  FA_HD ListTile tile_at(int batch, int64_t begin, int64_t position) const {
    SequenceInfo const seq = cache_sequence_info(params_, batch);
    for (int m_block = 0;; ++m_block) {
      int const count = blocks(seq, m_block);
      int64_t const end = begin + int64_t(heads()) * count;
      if (position < end) {
        int const index = static_cast<int>(divide(position - begin, count));
        int const head = index * plan_.team.divisor() + member_;
        return {seq, {batch, head, m_block}, count, begin + int64_t(index) * count};
      }
      begin = end;
    }
  }

 private:
  FA_HD int heads() const { return plan_.team_heads; }

  // A tile without keys counts too: somebody has to write its rows.
  FA_HD int blocks(SequenceInfo const& seq, int m_block) const {
    VisibleBand const band = visible_band(seq.len_q, seq.len_k, params_.fwd.window);
    int const count = QueryTile(seq, plan_.decode, {seq.batch, 0, m_block}).visible_blocks(band, block_n_).count();
    int const least = plan_.share.least;
    return ((count > 0 ? count : 1) + least - 1) & -least;
  }

  FlashSplitkvParams const& params_;
  SplitkvPlan const& plan_;
  int const block_n_;
  int const member_;
};

// What a share has of one tile: positions [begin, end) of the list.
struct SharePart {
  int64_t begin;
  int64_t end;
  bool begins_tile;
  bool ends_tile;

  SharePart() = default;
  FA_HD SharePart(ListTile const& tile, int64_t at, int64_t share_end)
      : begin(at),
        end(tile.end() < share_end ? tile.end() : share_end),
        begins_tile(begin == tile.begin),
        ends_tile(end == tile.end()) {}

  FA_HD bool is_whole() const { return begins_tile && ends_tile; }
  // Of CutTiles, for a part of a cut tile.
  FA_HD int64_t slot(int thread_block) const { return 2 * int64_t(thread_block) + begins_tile; }
};

// A list of `total` entries in equal shares, of which the last may be smaller: as many as `plan` has at most, or fewer
// where that leaves too few entries for each, or saves cutting tiles.
struct Shares {
  int64_t total;
  int64_t size;

  FA_HD Shares(int64_t total_, SharePlan const& plan) : total(total_) {
    size = divide(total + plan.most.divisor() - 1, plan.most);
    size = size > plan.least ? size : plan.least;
    if (plan.whole_tiles == 0) {
      // Tiles that are two of the smallest shares, on average: whole ones.
      int64_t const two = 2 * plan.least;
      if (size > plan.least && size < two && total <= two * plan.tiles.divisor()) { size = two; }
    } else {
      // Tiles of one length, as far as their number and sum tell, of which a share has nearly a whole number: a whole
      // number, and none is cut.
      int64_t const tile = divide(total, plan.tiles), whole = tile * plan.whole_tiles;
      if (tile * plan.tiles.divisor() == total && whole - size <= plan.cut_cost) { size = whole > 1 ? whole : 1; }
    }
  }

  FA_HD int64_t begin(int share) const { return share * size < total ? share * size : total; }
  FA_HD int64_t end(int share) const { return begin(share + 1); }

  // How many shares hold a part of [begin, end), which begins in share `share`.
  FA_HD int holders(int share, int64_t end_position) const {
    return 1 + static_cast<int>(divide(end_position - end(share) + size - 1, size));
  }
};

// Of a list of `total` entries, for one member of each team.
FA_HD Shares team_shares(SplitkvPlan const& plan, int64_t total) { return Shares(total, plan.share); }

}  // namespace flashattn
