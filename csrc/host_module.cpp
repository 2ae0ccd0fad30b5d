// flashattn_ext._host: what pytest and `info` ask the C++ side on the host. No torch, no kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <vector>

#include "core/block_range.h"
#include "core/tile_table.h"
#include "core/visible_band.h"
#include "flashattn/flashattn.h"

namespace py = pybind11;
using namespace py::literals;

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
      .value("decode", flashattn::Role::kDecode);

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
}
