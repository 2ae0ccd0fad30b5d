// Chooses the instruction set, once per process.
#include "cpu/kernels.h"

#include <cstdlib>
#include <string>

#include "cpu/cpu.h"
#include "flashattn/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace flashattn::cpu {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports does not know the name in every clang.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

std::vector<Variant> runnable() {
  std::vector<Variant> result;
#if defined(__x86_64__)
  bool const avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2") && has_f16c();
  bool const avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) {
    result.push_back({"avx512bf16", avx512bf16::kernels});
  }
  if (avx512) { result.push_back({"avx512", avx512::kernels}); }
  if (avx2) { result.push_back({"avx2", avx2::kernels}); }
#endif
  result.push_back({"baseline", baseline::kernels});
  return result;
}

Variant choose() {
  char const* const wanted = std::getenv("FLASHATTN_EXT_CPU_SIMD");
  if (wanted == nullptr || *wanted == '\0') { return variants().front(); }
  std::string names;
  for (Variant const& variant : variants()) {
    if (variant.name == std::string(wanted)) { return variant; }
    names += std::string(names.empty() ? "" : ", ") + variant.name;
  }
  throw Unsupported(std::string("FLASHATTN_EXT_CPU_SIMD: got ") + wanted + ", this machine has " +
                    names);
}

}  // namespace

std::vector<Variant> const& variants() {
  static std::vector<Variant> const all = runnable();
  return all;
}

Variant const& chosen_variant() {
  static Variant const chosen = choose();
  return chosen;
}

std::string simd_name() { return chosen_variant().name; }

}  // namespace flashattn::cpu
