// The Kernels tables of one instruction set. Included once by each kernels_*.cpp, which defines
//   FA_ISA          the namespace of the variant
//   FA_LANES        floats of a vector
//   FA_GROUP_ROWS   rows whose sums fit into the registers
//   FA_BF16_PAIRS   1 where the machine multiplies pairs of bf16
#pragma once

#include "cpu/simd/attend.h"
#include "cpu/simd/pack.h"

namespace flashattn::cpu::FA_ISA {

inline float lane_sum(float const* sums) { return sum_of_lanes(load<Floats>(sums)); }

// Rows are stored a vector at a time; the last one, where it is short, by way of a buffer.
template <class Element>
void store_row(float const* acc, float factor, int head_dim, void* out) {
  auto* const to = static_cast<typename Element::Storage*>(out);
  for (int d = 0; d < head_dim; d += kLanes) {
    Floats const v = load<Floats>(acc + d) * factor;
    if (head_dim - d >= kLanes) {
      Element::store(to + d, v);
    } else {
      typename Element::Storage last[kLanes];
      Element::store(last, v);
      for (int i = 0; i < head_dim - d; ++i) { to[d + i] = last[i]; }
    }
  }
}

template <class Element>
constexpr Kernels table() {
  return {
      .group_rows = kGroupRows,
      .panel = kPanel,
      .lanes = kLanes,
      .pair = Element::kPairs ? 2 : 1,
      .pack_query_row = pack_query_row<Element>,
      .pack_keys = pack_keys<Element>,
      .pack_values = pack_values<Element>,
      .attend = attend<Element>,
      .lane_sum = lane_sum,
      .store_row = store_row<Element>,
  };
}

Kernels const& kernels(DType dtype) {
  static constexpr Kernels float16 = table<Float16>();
  static constexpr Kernels bfloat16 = table<BFloat16>();
  static constexpr Kernels float32 = table<Float32>();
  switch (dtype) {
    case DType::kFloat16: return float16;
    case DType::kBFloat16: return bfloat16;
    default: return float32;
  }
}

}  // namespace flashattn::cpu::FA_ISA
