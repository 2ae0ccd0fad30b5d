// Division without dividing.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace flashattn {

// A quotient by a number that is fixed for a launch, as a multiplication (Granlund & Montgomery 1994,
// figure 4.1 with the 64-bit product): exact for every dividend in [0, 2^31).
class FastDivisor {
 public:
  FA_HD explicit FastDivisor(int divisor = 1) : divisor_(divisor), shift_(0) {
    while (shift_ < 31 && (uint32_t(1) << shift_) < uint32_t(divisor)) { ++shift_; }
    multiplier_ = static_cast<uint32_t>(((uint64_t(1) << (31 + shift_)) + divisor - 1) / divisor);
  }
  FA_HD int quotient(int64_t dividend) const {
    return static_cast<int>(uint64_t(uint32_t(dividend)) * multiplier_ >> (31 + shift_));
  }
  FA_HD int divisor() const { return divisor_; }

 private:
  int divisor_;
  int shift_;
  uint32_t multiplier_;
};

// The same interface for numbers of any size.
class PlainDivisor {
 public:
  FA_HD explicit PlainDivisor(int64_t divisor) : divisor_(divisor) {}
  FA_HD int64_t quotient(int64_t dividend) const { return dividend / divisor_; }
  FA_HD int64_t divisor() const { return divisor_; }

 private:
  int64_t divisor_;
};

}  // namespace flashattn
