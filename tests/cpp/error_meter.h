// Elements of any type, and how far a result may be off: for the tests of the CPU backend.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attention_reference.h"
#include "cpu/half.h"
#include "flashattn/params.h"

namespace cpu_test {

using flashattn::DType;

inline int size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

inline void put(DType type, void* to, float x) {
  if (type == DType::kFloat32) {
    std::memcpy(to, &x, 4);
    return;
  }
  uint16_t const bits = type == DType::kFloat16 ? flashattn::cpu::float_to_float16(x)
                                                : flashattn::cpu::float_to_bfloat16(x);
  std::memcpy(to, &bits, 2);
}

inline float get(DType type, void const* from) {
  float x;
  uint16_t bits;
  if (type == DType::kFloat32) {
    std::memcpy(&x, from, 4);
    return x;
  }
  std::memcpy(&bits, from, 2);
  return type == DType::kFloat16 ? flashattn::cpu::float16_to_float(bits)
                                 : flashattn::cpu::bfloat16_to_float(bits);
}

inline float round_to(DType type, double x) {
  unsigned char bytes[4];
  put(type, bytes, static_cast<float>(x));
  return get(type, bytes);
}

// Rows of one head against double: the error may be at most twice (softcap: three times) that of
// the same maths in the dtype.
class ErrorMeter {
 public:
  ErrorMeter(DType dtype, bool softcap) : dtype_(dtype), factor_(softcap ? 3. : 2.) {}

  // `lse` may be null.
  void add(oracle::RowProblem const& p, std::vector<float> const& got, float const* lse) {
    auto const rounded = [this](double x) { return double(round_to(dtype_, x)); };
    oracle::RowResult const exact = oracle::attend(p, oracle::NoRounding());
    oracle::RowResult const low = oracle::attend(p, rounded);
    for (std::size_t d = 0; d < got.size(); ++d) {
      double const e = std::abs(got[d] - exact.out[d]);
      error_ = e > error_ || std::isnan(e) ? e : error_;
      yardstick_ = std::max(yardstick_, std::abs(low.out[d] - exact.out[d]));
      largest_ = std::max(largest_, std::abs(exact.out[d]));
    }
    if (!std::isinf(exact.lse)) { top_ = std::max(top_, std::abs(exact.lse)); }
    if (std::isinf(exact.lse) || exact.out == std::vector<double>(got.size(), 0.)) {
      EXPECT_EQ(got, std::vector<float>(got.size(), 0.f)) << "row " << p.row;
    }
    if (lse == nullptr) { return; }
    if (std::isinf(exact.lse)) { EXPECT_EQ(*lse, -INFINITY) << "row " << p.row; }
    double const e = std::isinf(exact.lse) ? 0. : std::abs(*lse - exact.lse);
    lse_error_ = e > lse_error_ || std::isnan(e) ? e : lse_error_;
  }

  // fp32: the yardstick's dot products are exact, ours are not; what a score of size `top` is off
  // by, its exponential is off by in proportion.
  void check(std::string const& where) const {
    double const noise = largest_ * (dtype_ == DType::kFloat32   ? 0x1p-21 * (1. + top_)
                                     : dtype_ == DType::kFloat16 ? 0x1p-11
                                                                 : 0x1p-8);
    EXPECT_LE(error_, factor_ * yardstick_ + noise) << where;
    EXPECT_LE(lse_error_, 1e-4) << where;
  }

 private:
  DType dtype_;
  double factor_;
  double error_ = 0., yardstick_ = 0., largest_ = 0., lse_error_ = 0., top_ = 0.;
};

}  // namespace cpu_test
