// Checks of one argument of the C++ API. What fails throws InvalidArgument with the argument's
// name, what it got and what is allowed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "flashattn/error.h"
#include "flashattn/params.h"

namespace flashattn {

// What is only run for a bad argument stays out of the way of every call.
template <class Got>
[[noreturn, gnu::noinline, gnu::cold]] void reject(std::string_view name, Got got,
                                                   std::string_view allowed) {
  throw InvalidArgument(std::string(name) + ": expected " + std::string(allowed) + ", got " +
                        std::to_string(got));
}

[[noreturn, gnu::noinline, gnu::cold]] inline void reject_range(std::string_view name, int64_t got,
                                                                int64_t low, int64_t high) {
  reject(name, got, std::to_string(low) + " ... " + std::to_string(high));
}

inline void check_range(std::string_view name, int64_t got, int64_t low, int64_t high) {
  if (got < low || got > high) { reject_range(name, got, low, high); }
}

inline int element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline void check_enumerator(std::string_view name, Device got) {
  if (got != Device::kCpu && got != Device::kCuda) { reject(name, int(got), "kCpu or kCuda"); }
}

inline void check_enumerator(std::string_view name, DType got) {
  if (got != DType::kFloat16 && got != DType::kBFloat16 && got != DType::kFloat32) {
    reject(name, int(got), "kFloat16, kBFloat16 or kFloat32");
  }
}

inline void check_pointer(char const* name, void const* pointer, int alignment) {
  auto const address = reinterpret_cast<uintptr_t>(pointer);
  if (address % alignment != 0) {
    reject(std::string(name) + " in bytes", address, "a multiple of " + std::to_string(alignment));
  }
}

// Of a pointer that may be absent.
template <class Number>
void check_numbers(char const* name, Number const* pointer) {
  check_pointer(name, pointer, alignof(Number));
}

// A stride counts only where its dimension is walked. The offset of the last of `count` elements
// stays far from the limits of 64 bit, so that those of a few dimensions can be added. `name` and
// `which` together name it: they are joined for a message only, as every call comes by here.
inline void check_stride(std::string_view name, int64_t stride, int64_t count,
                         std::string_view which = "") {
  constexpr int64_t kMaxOffset = int64_t(1) << 58;
  int64_t offset = 0;
  if (count <= 1) { return; }
  if (__builtin_mul_overflow(stride, count - 1, &offset) || offset > kMaxOffset ||
      offset < -kMaxOffset) {
    int64_t const most = kMaxOffset / (count - 1);
    check_range(std::string(name) + std::string(which), stride, -most, most);
  }
}

struct Extent {
  int64_t batches;
  int64_t rows;
  int64_t heads;
};

// An operand whose pointer and walked strides are multiples of `alignment` bytes.
template <class Pointer>
void check_operand(char const* name, Strided<Pointer> const& t, DType dtype, Extent extent,
                   int alignment) {
  if (t.data == nullptr) {
    throw InvalidArgument(std::string(name) + ": expected a pointer, got null");
  }
  check_pointer(name, t.data, alignment);
  int const size = element_size(dtype);
  auto const check = [&](char const* which, int64_t stride, int64_t count) {
    if (count <= 1) { return; }
    if (stride % (alignment / size) != 0) {
      reject(std::string(name) + which, stride,
             "a multiple of " + std::to_string(alignment) + " bytes (" +
                 std::to_string(alignment / size) + " elements)");
    }
    check_stride(name, stride, count, which);
  };
  check(".batch_stride", t.batch_stride, extent.batches);
  check(".row_stride", t.row_stride, extent.rows);
  check(".head_stride", t.head_stride, extent.heads);
}

}  // namespace flashattn
