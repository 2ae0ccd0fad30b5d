// What each thread block of a planned call has: the tile maps of `plan`, by the functions that the
// kernels call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/query_tile.h"
#include "core/split_plan.h"
#include "core/work_list.h"
#include "flashattn/error.h"
#include "host_call.h"

namespace py = pybind11;
using namespace py::literals;

namespace flashattn {
namespace {

constexpr size_t kMostParts = size_t(1) << 20;

// Key blocks of a query tile that one thread block attends to.
struct TilePart {
  int64_t block_x;  // of the grid
  int block_y;
  int sequence;
  int first_head;  // query heads [first_head, first_head + heads)
  int heads;
  int first_query;
  int queries;
  int keys;  // of the sequence
  BlockRange blocks;
};

// The parts of the chosen sequences and query heads.
class Parts {
 public:
  Parts(Shape const& shape, std::vector<int> const& sequences, std::vector<int> const& heads)
      : sequences_(chosen(shape.batch, sequences)), heads_(chosen(shape.heads, heads)) {}

  bool wants(int sequence) const { return sequences_[sequence]; }
  bool wants_heads(int first, int count) const {
    for (int head = first; head < first + count; ++head) {
      if (heads_[head]) { return true; }
    }
    return false;
  }

  void add(int64_t x, int y, QueryTile const& tile, BlockRange const& blocks) {
    int const pack = tile.row_map.pack();
    if (!wants(tile.seq.batch) || !wants_heads(tile.first_head, pack)) { return; }
    if (list_.size() == kMostParts) {
      throw InvalidArgument("sequences, heads: more than " + std::to_string(kMostParts) +
                            " parts of tiles, choose fewer");
    }
    list_.push_back({x, y, tile.seq.batch, tile.first_head, pack, tile.first_token, tile.tokens,
                     tile.seq.len_k, blocks});
  }

  std::vector<TilePart> take() { return std::move(list_); }

 private:
  static std::vector<bool> chosen(int count, std::vector<int> const& indices) {
    std::vector<bool> wanted(count);
    for (int const index : indices) { wanted.at(index) = true; }
    return wanted;
  }

  std::vector<bool> const sequences_;
  std::vector<bool> const heads_;
  std::vector<TilePart> list_;
};

BlockRange blocks_of(FlashFwdParams const& params, QueryTile const& tile, int block_n) {
  return tile.visible_blocks(visible_band(tile.seq.len_q, tile.seq.len_k, params.window), block_n);
}

// Calls fn(thread block, its tile) for the tiles of the wanted heads that lie in their sequence.
template <class SequenceOf, class Fn>
void for_each_tile(FlashFwdParams const& params, ForwardPlan const& plan, Parts const& parts,
                   SequenceOf const& sequence_of, Fn const& fn) {
  int64_t const per_head = plan.divisors.head.divisor();
  int const pack = plan.row_map.pack();
  for (int64_t first = 0; first < plan.tiles; first += per_head) {
    if (!parts.wants_heads(static_cast<int>(first / per_head) * pack, pack)) { continue; }
    for (int64_t x = first; x < first + per_head; ++x) {
      WorkTile const work = plan.work_tile(params.shape, params.lengths, static_cast<int>(x));
      if (!parts.wants(work.batch)) { continue; }
      QueryTile const tile(sequence_of(work.batch), plan, work);
      if (!tile.empty()) { fn(x, tile); }
    }
  }
}

void add_given_splits(Parts& parts, int64_t x, QueryTile const& tile, BlockRange const& blocks,
                      SplitPlan split, int block_n) {
  for (int y = 0; y < split.splits; ++y) {
    BlockRange const range = take_split(blocks, split, y, block_n);
    if (y == 0 || range.count() > 0) {
      parts.add(x, y, tile, range);
    }  // split 0 also writes rows without keys
  }
}

void add_forward(Parts& parts, PlannedCall const& call, int arch, int kernel_head_dim) {
  FlashFwdParams const& fwd = call.params.fwd;
  TileShape const shape = tile_shape(arch, Role::kPrefill, kernel_head_dim);
  auto const sequence_of = [&](int batch) { return sequence_info(fwd.shape, fwd.lengths, batch); };
  for_each_tile(fwd, plan_forward(fwd.shape, fwd.lengths, shape), parts, sequence_of,
                [&](int64_t x, QueryTile const& tile) {
                  parts.add(x, 0, tile, blocks_of(fwd, tile, shape.n));
                });
}

void add_chunks(Parts& parts, PlannedCall const& call, SplitkvPlan const& plan, int block_n) {
  FlashFwdParams const& fwd = call.params.fwd;
  auto const sequence_of = [&](int batch) { return cache_sequence_info(call.params, batch); };
  for_each_tile(fwd, plan.chunk, parts, sequence_of, [&](int64_t x, QueryTile const& tile) {
    if (is_decoded(tile.seq, plan.decode)) { return; }
    BlockRange const blocks = blocks_of(fwd, tile, block_n);
    if (!plan.automatic()) { return add_given_splits(parts, x, tile, blocks, plan.split, block_n); }
    int const used = used_splits(blocks.count(), plan.chunk_split, block_n);
    for (int y = 0; y < used; ++y) {
      parts.add(x, y, tile, take_split(blocks, plan.chunk_split, y, block_n));
    }
  });
}

void add_decode_splits(Parts& parts, PlannedCall const& call, SplitkvPlan const& plan,
                       int block_n) {
  for (int64_t x = 0; x < plan.decode.tiles; ++x) {
    WorkTile work = decode_tile_of(call.params.fwd.shape, x);
    if (!parts.wants(work.batch)) { continue; }
    SequenceInfo const seq = cache_sequence_info(call.params, work.batch);
    if (plan.may_chunk && !is_decoded(seq, plan.decode)) { continue; }
    for (; int64_t(work.m_block) * plan.decode.tile_tokens < seq.len_q; ++work.m_block) {
      QueryTile const tile(seq, plan.decode, work);
      add_given_splits(parts, x, tile, blocks_of(call.params.fwd, tile, block_n), plan.split,
                       block_n);
    }
  }
}

// Of one tile in the list of a member of the teams.
void add_shares_of_tile(Parts& parts, PlannedCall const& call, SplitkvPlan const& plan, int block_n,
                        Shares const& shares, int member, ListTile const& found) {
  QueryTile const tile(found.seq, plan.decode, found.work);
  BlockRange const blocks = blocks_of(call.params.fwd, tile, block_n);
  for (int64_t at = found.begin; at < found.end();) {
    int64_t const share = at / shares.size;
    SharePart const part(found, at, shares.end(static_cast<int>(share)));
    parts.add(share * plan.team.divisor() + member, 0, tile,
              clip(blocks, blocks.begin + static_cast<int>(part.begin - found.begin),
                   blocks.begin + static_cast<int>(part.end - found.begin)));
    at = part.end;
  }
}

void add_decode_shares(Parts& parts, PlannedCall const& call, SplitkvPlan const& plan,
                       int block_n) {
  auto const list = [&](int member) { return WorkList(call.params, plan, block_n, member); };
  int const batch = call.params.fwd.shape.batch;
  int64_t total = 0;
  for (int b = 0; b < batch; ++b) { total += list(0).length(b); }
  Shares const shares = team_shares(plan, total);
  int64_t begin = 0;
  for (int b = 0; b < batch; begin += list(0).length(b), ++b) {
    int64_t const end = begin + (parts.wants(b) ? list(0).length(b) : 0);
    for (int64_t at = begin; at < end; at = list(0).tile_at(b, begin, at).end()) {
      for (int member = 0; member < plan.team.divisor(); ++member) {
        add_shares_of_tile(parts, call, plan, block_n, shares, member,
                           list(member).tile_at(b, begin, at));
      }
    }
  }
}

}  // namespace

void bind_tile_parts(py::module_& m) {
  py::class_<TilePart>(m, "TilePart")
      .def_readonly("block_x", &TilePart::block_x)
      .def_readonly("block_y", &TilePart::block_y)
      .def_readonly("sequence", &TilePart::sequence)
      .def_readonly("first_head", &TilePart::first_head)
      .def_readonly("heads", &TilePart::heads)
      .def_readonly("first_query", &TilePart::first_query)
      .def_readonly("queries", &TilePart::queries)
      .def_readonly("keys", &TilePart::keys)
      .def_readonly("blocks", &TilePart::blocks);

  // The parts of a tile come one after the other.
  m.def(
      "forward_parts",
      [](PlannedCall const& call, int arch, int kernel_head_dim, std::vector<int> const& sequences,
         std::vector<int> const& heads) {
        Parts parts(call.params.fwd.shape, sequences, heads);
        add_forward(parts, call, arch, kernel_head_dim);
        return parts.take();
      },
      "call"_a, "arch"_a, "kernel_head_dim"_a, "sequences"_a, "heads"_a);
  m.def(
      "splitkv_parts",
      [](PlannedCall const& call, SplitkvPlan const& plan, bool chunks, int block_n,
         std::vector<int> const& sequences, std::vector<int> const& heads) {
        Parts parts(call.params.fwd.shape, sequences, heads);
        auto const add =
            chunks ? add_chunks : (plan.automatic() ? add_decode_shares : add_decode_splits);
        add(parts, call, plan, block_n);
        return parts.take();
      },
      "call"_a, "plan"_a, "chunks"_a, "block_n"_a, "sequences"_a, "heads"_a);
}

}  // namespace flashattn
