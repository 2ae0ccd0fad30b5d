// Chooses the instruction set, once per process.
#include "cpu/kernels.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu/cpu.h"

namespace flashattn::cpu {
namespace {

struct Variant {
  char const* name;
  bool present;
  Kernels const& (*kernels)(DType);
};

bool at_most(char const* asked_for, int& skipped, char const* name) {
  if (asked_for == nullptr || skipped > 0) { return true; }
  skipped += std::strcmp(asked_for, name) == 0;
  return skipped > 0;
}

// Best first. A name in FLASHATTN_EXT_CPU_SIMD skips what is better than it; an unknown name
// skips all but the baseline.
Variant choose() {
#if defined(__x86_64__)
  bool const avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  bool const avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  Variant const better[] = {
      {"avx512bf16", avx512 && __builtin_cpu_supports("avx512bf16"), avx512bf16::kernels},
      {"avx512", avx512, avx512::kernels},
      {"avx2", avx2, avx2::kernels},
  };
  int reached = 0;
  for (Variant const& variant : better) {
    bool const wanted = at_most(std::getenv("FLASHATTN_EXT_CPU_SIMD"), reached, variant.name);
    if (wanted && variant.present) { return variant; }
  }
#endif
  return {"baseline", true, baseline::kernels};
}

Variant const& chosen() {
  static Variant const variant = choose();
  return variant;
}

}  // namespace

Kernels const& kernels(DType dtype) { return chosen().kernels(dtype); }

std::string simd_name() { return chosen().name; }

}  // namespace flashattn::cpu
