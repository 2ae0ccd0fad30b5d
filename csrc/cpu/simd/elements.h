// The element types: how they are stored, and as which operand they are multiplied.
#pragma once

#include "cpu/half.h"
#include "cpu/simd/vector.h"

namespace flashattn::cpu::FA_ISA {

FA_INLINE Ints widen(Shorts v) { return __builtin_convertvector(v, Ints); }
FA_INLINE Shorts narrow(Ints v) { return __builtin_convertvector(v, Shorts); }

struct Float32 {
  using Storage = float;
  static constexpr bool kPairs = false;

  FA_INLINE static Floats load(Storage const* from) { return FA_ISA::load<Floats>(from); }
  FA_INLINE static void store(Storage* to, Floats v) { FA_ISA::store(to, v); }
  FA_INLINE static Floats round(Floats v) { return v; }
};

struct BFloat16 {
  using Storage = uint16_t;
  static constexpr bool kPairs = FA_BF16_PAIRS;

  FA_INLINE static Ints rounded_bits(Floats v) {
    Ints const bits = as_ints(v);
    Ints const rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return v == v ? rounded : (bits | 0x400000);  // rounding up could turn a NaN into a number
  }

  FA_INLINE static Floats load(Storage const* from) {
    return as_floats(widen(FA_ISA::load<Shorts>(from)) << 16);
  }
  FA_INLINE static void store(Storage* to, Floats v) {
    FA_ISA::store(to, narrow(rounded_bits(v) >> 16));
  }
  FA_INLINE static Floats round(Floats v) { return as_floats(rounded_bits(v) & ~0xffff); }
};

struct Float16 {
  using Storage = uint16_t;
  static constexpr bool kPairs = false;

#if FA_LANES == 16
  // The plain forms of these two make GCC 12 warn of uninitialised values inside its own header.
  FA_INLINE static Floats from_half(__m256i v) { return _mm512_maskz_cvtph_ps(0xffff, v); }
  FA_INLINE static __m256i to_half(Floats v) {
    return _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT);
  }
  FA_INLINE static Floats load(Storage const* from) {
    return from_half(FA_ISA::load<__m256i>(from));
  }
  FA_INLINE static void store(Storage* to, Floats v) { FA_ISA::store(to, to_half(v)); }
  FA_INLINE static Floats round(Floats v) { return from_half(to_half(v)); }
#elif FA_LANES == 8
  FA_INLINE static Floats load(Storage const* from) {
    return _mm256_cvtph_ps(FA_ISA::load<__m128i>(from));
  }
  FA_INLINE static void store(Storage* to, Floats v) {
    FA_ISA::store(to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  FA_INLINE static Floats round(Floats v) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  FA_INLINE static Floats load(Storage const* from) {
    Floats v;
    for (int i = 0; i < kLanes; ++i) { v[i] = float16_to_float(from[i]); }
    return v;
  }
  FA_INLINE static void store(Storage* to, Floats v) {
    for (int i = 0; i < kLanes; ++i) { to[i] = float_to_float16(v[i]); }
  }
  FA_INLINE static Floats round(Floats v) {
    for (int i = 0; i < kLanes; ++i) { v[i] = float16_to_float(float_to_float16(v[i])); }
    return v;
  }
#endif
};

// Words of a packed row of `elements` elements.
template <class Element>
constexpr int words(int elements) {
  return Element::kPairs ? elements / 2 : elements;
}

// The kLanes words, or the first `count` and zeros, that start at element `from` of a row.
template <class Element>
FA_INLINE Floats load_words(typename Element::Storage const* from, int count) {
  using Storage = typename Element::Storage;
  constexpr int kPerWord = Element::kPairs ? 2 : 1;
  Storage padded[kLanes * kPerWord] = {};
  if (count < kLanes) {
    for (int i = 0; i < count * kPerWord; ++i) { padded[i] = from[i]; }
    from = padded;
  }
  if constexpr (Element::kPairs) {
    return FA_ISA::load<Floats>(from);
  } else {
    return Element::load(from);
  }
}

}  // namespace flashattn::cpu::FA_ISA
