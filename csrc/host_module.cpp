// flashattn_ext._host: what `plan`, `info` and pytest ask the C++ side on the host. No torch, no
// kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "core/block_range.h"
#include "core/merge_plan.h"
#include "core/splitkv_plan.h"
#include "core/tile_table.h"
#include "core/visible_band.h"
#include "core/work_list.h"
#include "flashattn/flashattn.h"
#include "host_call.h"

namespace py = pybind11;
using namespace py::literals;

namespace flashattn {
namespace {

std::unique_ptr<PlannedCall> planned_call(int batch, int heads, int heads_kv, int head_dim,
                                          int seqlen_q, int seqlen_k, std::vector<int> cu_seqlens_q,
                                          std::vector<int> cache_seqlens, int left, int right,
                                          int new_tokens, int rotary_dim, int num_splits,
                                          int split_size, std::vector<int> seqused_k) {
  auto call = std::make_unique<PlannedCall>();
  call->cu_seqlens_q = std::move(cu_seqlens_q);
  call->cache_seqlens = std::move(cache_seqlens);
  call->seqused_k = std::move(seqused_k);
  FlashSplitkvParams& params = call->params;
  params.fwd.shape = {batch, heads, heads_kv, head_dim, seqlen_q, seqlen_k};
  params.fwd.window = {left, right};
  if (!call->cu_seqlens_q.empty()) {
    params.fwd.lengths.cu_seqlens_q = call->cu_seqlens_q.data();
    params.fwd.lengths.total_q = call->cu_seqlens_q.back();
  }
  if (!call->seqused_k.empty()) { params.fwd.lengths.seqused_k = call->seqused_k.data(); }
  if (!call->cache_seqlens.empty()) { params.cache.seqlens = call->cache_seqlens.data(); }
  params.cache.rows = batch;
  params.append.seqlen = new_tokens;
  params.append.rotary_dim = rotary_dim;
  params.split = {num_splits, split_size};
  return call;
}

// What the thread blocks of the decode kernel find when splits are automatic.
struct DecodeWork {
  int64_t tiles = 0;
  int64_t entries = 0;  // of the list: key blocks, and more where tiles are few
  int64_t share = 0;    // entries of a thread block
  int64_t busy = 0;     // thread blocks with a share
  int64_t cut = 0;      // tiles that several of them have parts of
  int team = 1;         // of them have the same keys of different heads
};

DecodeWork decode_work(PlannedCall const& call, SplitkvPlan const& plan, int block_n) {
  WorkList const list(call.params, plan, block_n, /*member=*/0);  // those of the others are like it
  int const batch = call.params.fwd.shape.batch;
  DecodeWork work;
  for (int b = 0; b < batch; ++b) { work.entries += list.length(b); }
  Shares const shares = team_shares(plan, work.entries);
  work.share = shares.size;
  work.busy = (work.entries + shares.size - 1) / shares.size;
  int64_t at = 0;
  for (int b = 0; b < batch; ++b) {
    int64_t const begin = at, end = at + list.length(b);
    while (at < end) {
      ListTile const tile = list.tile_at(b, begin, at);
      ++work.tiles;
      work.cut += tile.begin / shares.size != (tile.end() - 1) / shares.size;
      at = tile.end();
    }
  }
  work.team = plan.team.divisor();
  work.tiles *= work.team, work.entries *= work.team;
  work.busy *= work.team, work.cut *= work.team;
  return work;
}

// What a sequence asks for: pairs of a query and a key that it sees, and keys that some query sees.
struct Visible {
  int64_t pairs = 0;
  int keys = 0;
};

Visible visible(int len_q, int len_k, int left, int right) {
  Visible sum;
  if (len_q == 0) { return sum; }
  VisibleBand const band = visible_band(len_q, len_k, {left, right});
  for (int row = 0; row < len_q; ++row) {
    int const count = band.end(row) - band.begin(row);
    sum.pairs += count > 0 ? count : 0;
  }
  KeyRange const keys = visible_keys(band, 0, len_q - 1);
  sum.keys = keys.end - keys.begin;
  return sum;
}

void bind_plan(py::module_& m) {
  py::class_<PlannedCall>(m, "PlannedCall")
      .def(py::init(&planned_call), py::kw_only(), "batch"_a, "heads"_a, "heads_kv"_a, "head_dim"_a,
           "seqlen_q"_a, "seqlen_k"_a, "cu_seqlens_q"_a, "cache_seqlens"_a, "left"_a, "right"_a,
           "new_tokens"_a, "rotary_dim"_a, "num_splits"_a, "split_size"_a,
           "seqused_k"_a = std::vector<int>());

  py::class_<ForwardPlan>(m, "ForwardPlan")
      .def_property_readonly("pack", [](ForwardPlan const& plan) { return plan.row_map.pack(); })
      .def_readonly("tile_tokens", &ForwardPlan::tile_tokens)
      .def_readonly("tiles", &ForwardPlan::tiles);

  py::class_<CutTiles>(m, "CutTiles")
      .def_readonly("entries", &CutTiles::entries)
      .def_readonly("slots", &CutTiles::slots)
      .def_readonly("rows", &CutTiles::rows);
  m.attr("cut_size_bytes") = sizeof(CutTiles::Size);
  m.attr("query_tile_bytes") = sizeof(QueryTile);

  py::class_<SplitkvPlan>(m, "SplitkvPlan")
      .def_readonly("decode", &SplitkvPlan::decode)
      .def_readonly("chunk", &SplitkvPlan::chunk)
      .def_readonly("decode_role", &SplitkvPlan::decode_role)
      .def_readonly("chunk_role", &SplitkvPlan::chunk_role)
      .def_readonly("may_decode", &SplitkvPlan::may_decode)
      .def_readonly("may_chunk", &SplitkvPlan::may_chunk)
      .def_property_readonly("splits", [](SplitkvPlan const& plan) { return plan.split.splits; })
      .def_property_readonly("chunk_splits",
                             [](SplitkvPlan const& plan) { return plan.chunk_split.splits; })
      .def_readonly("shares", &SplitkvPlan::shares)
      .def_readonly("rows", &SplitkvPlan::rows)
      .def_readonly("decode_cuts", &SplitkvPlan::decode_cuts)
      .def_readonly("chunk_cuts", &SplitkvPlan::chunk_cuts)
      .def_property_readonly("merges", &SplitkvPlan::merges)
      .def_readonly("workspace_bytes", &SplitkvPlan::workspace_bytes);

  m.attr("merge_warps") = kMergeWarps;
  m.def(
      "merge_blocks",
      [](PlannedCall const& call, SplitkvPlan const& plan) {
        return plan_merges(plan, call.params.fwd.shape).blocks;
      },
      "call"_a, "plan"_a);
  m.def(
      "combine_grid",
      [](int64_t rows, int head_dim) {
        return combine_blocks(rows) * plan_combine(head_dim).slices;
      },
      "rows"_a, "head_dim"_a);

  py::class_<DecodeWork>(m, "DecodeWork")
      .def_readonly("tiles", &DecodeWork::tiles)
      .def_readonly("entries", &DecodeWork::entries)
      .def_readonly("share", &DecodeWork::share)
      .def_readonly("busy", &DecodeWork::busy)
      .def_readonly("cut", &DecodeWork::cut)
      .def_readonly("team", &DecodeWork::team);

  py::class_<Visible>(m, "Visible")
      .def_readonly("pairs", &Visible::pairs)
      .def_readonly("keys", &Visible::keys);

  m.def(
      "plan_forward",
      [](PlannedCall const& call, int arch, int kernel_head_dim) {
        FlashFwdParams const& fwd = call.params.fwd;
        return plan_forward(fwd.shape, fwd.lengths,
                            tile_shape(arch, Role::kPrefill, kernel_head_dim));
      },
      "call"_a, "arch"_a, "kernel_head_dim"_a);
  m.def(
      "plan_splitkv",
      [](PlannedCall const& call, int arch, int kernel_head_dim, int multiprocessors) {
        return plan_splitkv(call.params, arch, kernel_head_dim, multiprocessors);
      },
      "call"_a, "arch"_a, "kernel_head_dim"_a, "multiprocessors"_a);
  m.def("decode_work", &decode_work, "call"_a, "plan"_a, "block_n"_a);
  m.def("visible", &visible, "len_q"_a, "len_k"_a, "left"_a, "right"_a);
}

}  // namespace
}  // namespace flashattn

PYBIND11_MODULE(_host, m) {
  py::class_<flashattn::TileShape>(m, "TileShape")
      .def_readonly("m", &flashattn::TileShape::m)
      .def_readonly("n", &flashattn::TileShape::n)
      .def_readonly("warps", &flashattn::TileShape::warps)
      .def_readonly("stages", &flashattn::TileShape::stages)
      .def_readonly("q_in_registers", &flashattn::TileShape::q_in_registers)
      .def_readonly("key_warps", &flashattn::TileShape::key_warps);

  py::enum_<flashattn::Role>(m, "Role")
      .value("prefill", flashattn::Role::kPrefill)
      .value("chunk", flashattn::Role::kChunk)
      .value("short_chunk", flashattn::Role::kShortChunk)
      .value("decode", flashattn::Role::kDecode)
      .value("wide_decode", flashattn::Role::kWideDecode);

  py::class_<flashattn::BlockRange>(m, "BlockRange")
      .def_readonly("begin", &flashattn::BlockRange::begin)
      .def_readonly("end", &flashattn::BlockRange::end)
      .def_readonly("clean_begin", &flashattn::BlockRange::clean_begin)
      .def_readonly("clean_end", &flashattn::BlockRange::clean_end);

  py::class_<flashattn::BuildInfo>(m, "BuildInfo")
      .def_readonly("cuda_archs", &flashattn::BuildInfo::cuda_archs)
      .def_readonly("ptx_arch", &flashattn::BuildInfo::ptx_arch)
      .def_readonly("head_dims", &flashattn::BuildInfo::head_dims)
      .def_readonly("cpu_simd", &flashattn::BuildInfo::cpu_simd);

  m.attr("head_dims") =
      std::vector<int>(std::begin(flashattn::kHeadDims), std::end(flashattn::kHeadDims));
  m.def("build_info", &flashattn::build_info);
  m.def("tile_shape", &flashattn::tile_shape, "arch"_a, "role"_a, "head_dim"_a);
  m.def("smem_limit", &flashattn::smem_limit, "arch"_a);
  m.def(
      "smem_bytes",
      [](int arch, flashattn::Role role, int head_dim) {
        return flashattn::smem_bytes(flashattn::tile_shape(arch, role, head_dim), head_dim);
      },
      "arch"_a, "role"_a, "head_dim"_a);
  m.def(
      "visible_blocks",
      [](int len_q, int len_k, int left, int right, int first_row, int last_row, int block_n) {
        flashattn::VisibleBand const band = flashattn::visible_band(len_q, len_k, {left, right});
        return flashattn::visible_blocks(band, first_row, last_row, block_n);
      },
      "len_q"_a, "len_k"_a, "left"_a, "right"_a, "first_row"_a, "last_row"_a, "block_n"_a);

  flashattn::bind_plan(m);
  flashattn::bind_tile_parts(m);
}
