// The two 16-bit types as bit patterns, one value at a time. simd/elements.h does the same for
// vectors; this is for machines without such instructions, for single values, and for tests.
#pragma once

#include <bit>
#include <cstdint>

namespace flashattn::cpu {

inline float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

// Rounds to nearest, ties to even.
inline uint16_t float_to_bfloat16(float value) {
  uint32_t const bits = std::bit_cast<uint32_t>(value);
  if (value != value) { return static_cast<uint16_t>((bits >> 16) | 0x40); }  // stays a NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// fp16: sign, 5 bits of exponent (bias 15), 10 of mantissa. Moving exponent and mantissa into
// place gives a float that is 2^112 too small (bias 127), subnormals included.
inline float float16_to_float(uint16_t bits) {
  uint32_t const sign = uint32_t(bits & 0x8000) << 16;
  uint32_t const magnitude = uint32_t(bits & 0x7fff) << 13;
  if (magnitude >= 0x0f800000) { return std::bit_cast<float>(sign | magnitude | 0x7f800000); }
  float const value = std::bit_cast<float>(magnitude) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

// Rounds to nearest, ties to even.
inline uint16_t float_to_float16(float value) {
  uint32_t const bits = std::bit_cast<uint32_t>(value);
  uint32_t const sign = (bits >> 16) & 0x8000;
  uint32_t const magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) { return static_cast<uint16_t>(sign | 0x7e00); }
  if (magnitude >= 0x477ff000) { return static_cast<uint16_t>(sign | 0x7c00); }  // rounds to 2^16
  if (magnitude < 0x38800000) {
    // Subnormal in fp16. Next to 0.5, the spacing of floats is 2^-24, which is that of fp16
    // subnormals: the addition rounds.
    float const shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
  }
  uint32_t const rebiased = magnitude - (112u << 23);
  return static_cast<uint16_t>(sign | ((rebiased + 0xfff + ((rebiased >> 13) & 1)) >> 13));
}

}  // namespace flashattn::cpu
