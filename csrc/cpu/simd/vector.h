// Vectors of FA_LANES floats: the compiler's vector types, and a few instructions by name.
//
// The headers of this folder are compiled once per instruction set, each time into a namespace of
// its own (FA_ISA), below a target pragma. They must not instantiate templates of the standard
// library or call inline functions of others that were not seen before the pragma: the linker
// keeps one copy of an inline function, which must run on every machine.
#pragma once

#include <cstdint>
#include <utility>

#include "core/fast_math.h"

#define FA_INLINE [[gnu::always_inline]] inline

namespace flashattn::cpu::FA_ISA {

constexpr int kLanes = FA_LANES;

typedef float Floats __attribute__((vector_size(4 * FA_LANES), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * FA_LANES), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(2 * FA_LANES), may_alias));

template <class V>
FA_INLINE V load(void const* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
FA_INLINE void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

FA_INLINE Floats splat(float x) { return x - Floats{}; }
FA_INLINE Ints splat_int(int x) { return x - Ints{}; }
FA_INLINE Floats as_floats(Ints v) { return reinterpret_cast<Floats>(v); }
FA_INLINE Ints as_ints(Floats v) { return reinterpret_cast<Ints>(v); }
FA_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// a where a > b, else b: a NaN in `a` is dropped, a NaN in `b` is kept.
FA_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// a * b + c, rounded once where the machine can.
FA_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if FA_LANES == 16
  return _mm512_fmadd_ps(a, b, c);
#elif FA_LANES == 8
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

FA_INLINE Ints lane_index() {
  Ints v;
  for (int i = 0; i < kLanes; ++i) { v[i] = i; }
  return v;
}

using AllLanes = std::make_integer_sequence<int, kLanes>;

template <int kStep, int... kLane>
FA_INLINE Floats swap_halves(Floats v, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(v, v, (kLane ^ kStep)...);
}

// The reductions pair lanes that are 1, 2, 4 ... apart, so every lane ends with the result.
template <int kStep = 1>
FA_INLINE float largest_lane(Floats v) {
  if constexpr (kStep == kLanes) {
    return v[0];
  } else {
    return largest_lane<2 * kStep>(larger(v, swap_halves<kStep>(v, AllLanes{})));
  }
}

template <int kStep = 1>
FA_INLINE float sum_of_lanes(Floats v) {
  if constexpr (kStep == kLanes) {
    return v[0];
  } else {
    return sum_of_lanes<2 * kStep>(v + swap_halves<kStep>(v, AllLanes{}));
  }
}

// Transposes a square of words: each step exchanges the off-diagonal quarters of all squares of
// twice its size.
template <int kStep, int... kLane>
FA_INLINE void exchange_quarters(Floats& a, Floats& b, std::integer_sequence<int, kLane...>) {
  Floats const upper =
      __builtin_shufflevector(a, b, (kLane & kStep ? kLane - kStep + kLanes : kLane)...);
  b = __builtin_shufflevector(a, b, (kLane & kStep ? kLane + kLanes : kLane + kStep)...);
  a = upper;
}

template <int kStep = 1>
FA_INLINE void transpose(Floats (&rows)[kLanes]) {
  if constexpr (kStep < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kStep) == 0) { exchange_quarters<kStep>(rows[i], rows[i + kStep], AllLanes{}); }
    }
    transpose<2 * kStep>(rows);
  }
}

// 2^(x * scale), for x * scale <= 127, to 1.7e-7 relative; 0 below 2^-126, NaN for NaN. `lowest`
// is -126 / scale. x * scale is split into an integer, which becomes the exponent, and a rest in
// [-1/2, 1/2], whose power is a polynomial (minimax in the relative error, 1 at 0).
FA_INLINE Floats exp2_scaled(Floats x, Floats scale, Floats lowest) {
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits; 127 is the exponent's bias.
  Floats const shift = splat(0x1.8p23f + 127.f);
  Floats const shifted = multiply_add(x, scale, shift);
  Floats const rest = multiply_add(x, scale, shift - shifted);
  Floats power = multiply_add(splat(0x1.5bba14p-10f), rest, splat(0x1.3cea88p-7f));
  power = multiply_add(power, rest, splat(0x1.c6b752p-5f));
  power = multiply_add(power, rest, splat(0x1.ebf9bcp-3f));
  power = multiply_add(power, rest, splat(0x1.62e42ap-1f));
  power = multiply_add(power, rest, splat(1.f));
  Floats const result = power * as_floats(as_ints(shifted) << 23);
  return x <= lowest ? splat(0.f) : result;
}

// As core's tanh_saturating, and right to some 2e-7 of its value, for results in fp32: the quotient
// would lose digits near 0, so up to 5/8 there is a polynomial (minimax in the relative error,
// 4e-9).
FA_INLINE Floats tanh_saturating(Floats x) {
  Floats const limit = splat(40.f);  // far past the point where tanh is 1 in fp32
  Floats const clamped = x > limit ? limit : (x < -limit ? -limit : x);
  Floats const e = exp2_scaled(clamped, splat(2.f * kLog2e), splat(-126.f / (2.f * kLog2e)));
  Floats const quotient = 1.f - 2.f / (1.f + e);
  Floats const square = clamped * clamped;
  Floats rest = multiply_add(splat(-0x1.75e1cp-8f), square, splat(0x1.522698p-6f));
  rest = multiply_add(rest, square, splat(-0x1.b83c5ap-5f));
  rest = multiply_add(rest, square, splat(0x1.110726p-3f));
  rest = multiply_add(rest, square, splat(-0x1.555532p-2f));
  Floats const polynomial = multiply_add(x, square * rest, x);
  Ints const small = (x < 0.625f) & (x > -0.625f);
  return small ? polynomial : quotient;
}

}  // namespace flashattn::cpu::FA_ISA
