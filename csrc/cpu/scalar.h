// The element types one value at a time, for work that is not worth a kernel of its own.
#pragma once

#include <cstdint>

#include "cpu/half.h"
#include "flashattn/params.h"

namespace flashattn::cpu {

struct ScalarFloat32 {
  using Storage = float;
  static float load(Storage x) { return x; }
  static Storage round(float x) { return x; }
};

struct ScalarFloat16 {
  using Storage = uint16_t;
  static float load(Storage x) { return float16_to_float(x); }
  static Storage round(float x) { return float_to_float16(x); }
};

struct ScalarBFloat16 {
  using Storage = uint16_t;
  static float load(Storage x) { return bfloat16_to_float(x); }
  static Storage round(float x) { return float_to_bfloat16(x); }
};

// Calls `body` with the scalar type of `dtype`.
template <class Body>
void with_scalar(DType dtype, Body const& body) {
  switch (dtype) {
    case DType::kFloat16: return body(ScalarFloat16{});
    case DType::kBFloat16: return body(ScalarBFloat16{});
    default: return body(ScalarFloat32{});
  }
}

}  // namespace flashattn::cpu
