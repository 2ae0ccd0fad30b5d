// Views of MMA fragments, and the matrix product of one thread block.
//
// CuTe's names: a tensor t<x><s|r|g><Y> is the part of Y in shared memory, registers or global
// memory that the thread holds when the work is partitioned as for x.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

namespace flashattn::sm80 {

// An accumulator ((2, 2), MMA_M, MMA_N) of m16n8 tiles as a matrix (row, column): a thread holds 2
// rows of a tile, 8 apart, and in each 2 neighbouring columns.
template <class Layout>
CUTE_DEVICE constexpr auto row_column_layout(Layout const& acc) {
  using namespace cute;
  static_assert(decltype(size<0, 0>(acc))::value == 2 && decltype(size<0, 1>(acc))::value == 2);
  return make_layout(make_layout(get<0, 1>(acc), get<1>(acc)), make_layout(get<0, 0>(acc), get<2>(acc)));
}

template <class Tensor>
CUTE_DEVICE auto row_column_view(Tensor&& acc) {
  return cute::make_tensor(acc.data(), row_column_layout(acc.layout()));
}

// (row, column) in a tile of Rows x Columns of each element of the thread's accumulator.
template <class TiledMma, class Rows, class Columns>
CUTE_DEVICE auto row_column_coordinates() {
  auto const tile = cute::make_identity_tensor(cute::Shape<Rows, Columns>{});
  return row_column_view(TiledMma{}.get_thread_slice(threadIdx.x).partition_C(tile));
}

// The same registers as the A operand ((2, 2, 2), MMA_M, MMA_K) of m16n8k16: two neighbouring
// m16n8 accumulators are one m16k16 operand.
template <class Layout>
CUTE_DEVICE constexpr auto a_operand_layout(Layout const& acc) {
  using namespace cute;
  auto const pairs = logical_divide(acc, cute::Shape<X, X, _2>{});  // ((2, 2), MMA_M, (2, MMA_N / 2))
  return make_layout(make_layout(get<0, 0>(pairs), get<0, 1>(pairs), get<2, 0>(pairs)), get<1>(pairs),
                     get<2, 1>(pairs));
}

template <class To, class Engine, class Layout>
CUTE_DEVICE auto convert(cute::Tensor<Engine, Layout> const& from) {
  using From = typename Engine::value_type;
  constexpr int kSize = decltype(cute::size(from))::value;
  cutlass::NumericArrayConverter<To, From, kSize> const converter;
  auto const packed = converter(*reinterpret_cast<cutlass::Array<From, kSize> const*>(from.data()));
  auto to = cute::make_tensor<To>(from.layout());
  cute::copy(cute::make_tensor(cute::make_rmem_ptr<To>(&packed), from.layout()), to);
  return to;
}

// acc += A · B, one k-slice after the other. fetch(k, slices) loads the slices k of whatever lies in
// shared memory; it is called one slice ahead of the MMAs that hide its latency.
template <class TiledMma, class Acc, class A, class B, class Fetch>
CUTE_DEVICE void multiply(TiledMma const& mma, Acc& acc, A const& a, B const& b, Fetch fetch) {
  using namespace cute;
  constexpr int kSlices = decltype(size<2>(a))::value;
  fetch(0, kSlices);
  CUTE_UNROLL
  for (int k = 0; k < kSlices; ++k) {
    if (k + 1 < kSlices) { fetch(k + 1, kSlices); }
    gemm(mma, a(_, _, k), b(_, _, k), acc);
  }
}

}  // namespace flashattn::sm80
