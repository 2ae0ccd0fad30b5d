// x86 with AVX2, FMA and F16C (x86-64-v3).
#include <cmath>
#include <cstdint>
#include <utility>

#include "core/online_softmax.h"
#include "core/score_mod.h"
#include "cpu/half.h"
#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif
#define FA_ISA avx2
#define FA_LANES 8
#define FA_GROUP_ROWS 6
#define FA_BF16_PAIRS 0
#include "cpu/simd/variant.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
