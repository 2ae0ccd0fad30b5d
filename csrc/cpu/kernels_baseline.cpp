// Any machine that the compiler targets: vectors of 4 floats are SSE2 on x86-64, NEON on aarch64.
#include <cmath>
#include <cstdint>
#include <utility>

#define FA_ISA baseline
#define FA_LANES 4
#if defined(__aarch64__)
#define FA_GROUP_ROWS 12  // 32 registers
#else
#define FA_GROUP_ROWS 6  // 16
#endif
#define FA_BF16_PAIRS 0
#include "cpu/simd/variant.h"
