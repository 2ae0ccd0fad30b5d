// The functions of attention that are not one operation, the same on host and device up to rounding.
#pragma once

#include <cmath>

#include "core/macros.h"

namespace flashattn {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_huge_valf();

// 2^x. On the GPU one MUFU instruction; results below 2^-126 become 0.
FA_HD float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return ::exp2f(x);
#endif
}

// 1 / x for a normal x, to one unit in the last place. On the GPU one MUFU instruction instead of a subroutine.
FA_HD float reciprocal_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / x;
#endif
}

// tanh, exactly ±1 for large |x|, never NaN for a number. The hardware's tanh.approx (2^-11) would
// move a score capped at 50 by 0.02, and lse with it. The quotient is right to about 1e-7 absolute;
// near 0 that would be a large relative error, which a large cap multiplies into the score, so
// there the series takes over: its next term is 2/15 x^4, at most 1.3e-7 of the value.
FA_HD float tanh_saturating(float x) {
  float const e = exp2_fast(2.f * kLog2e * x);
#if defined(__CUDA_ARCH__)
  float const quotient = 1.f - __fdividef(2.f, 1.f + e);
#else
  float const quotient = 1.f - 2.f / (1.f + e);
#endif
  float const series = x - x * x * x * (1.f / 3.f);
  return (x < 0.f ? -x : x) < 1.f / 32.f ? series : quotient;
}

}  // namespace flashattn
