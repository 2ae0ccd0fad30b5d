// x86 with AVX-512 and its bf16 dot product (Cooper Lake, Sapphire Rapids, Zen 4 and later).
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
#pragma clang attribute push(                                                               \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,bmi2"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,bmi2")
#endif
#define FA_ISA avx512bf16
#define FA_LANES 16
#define FA_GROUP_ROWS 12
#define FA_BF16_PAIRS 1
#include "cpu/simd/variant.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
