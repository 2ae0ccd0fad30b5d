// Arguments out of a fuzzer's bytes. Most are sensible, so that calls get past the checks; now and
// then one comes from the edges of its type. Past the end of the bytes everything is sensible.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace fuzz {

class Bytes {
 public:
  Bytes(uint8_t const* data, size_t size) : data_(data), end_(data + size) {}

  uint64_t raw(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes && data_ != end_; ++i) { value = value << 8 | *data_++; }
    return value;
  }

  // True for one byte in `count`, at most 256.
  bool one_in(int count) { return static_cast<int>(raw(1)) >= 256 - 256 / count; }

  int between(int low, int high) { return low + static_cast<int>(raw(2) % (high - low + 1)); }

  int number(int sensible) {
    if (!one_in(kRare)) { return sensible; }
    constexpr int kEdges[] = {INT_MIN, -1,    0,     1,       7,       255,           256,
                              257,     65535, 65536, 1 << 20, 1 << 30, 1 + (1 << 30), INT_MAX};
    uint64_t const choice = raw(1) % (2 * std::size(kEdges));
    return choice < std::size(kEdges) ? kEdges[choice] : static_cast<int>(raw(4));
  }

  int64_t stride(int64_t sensible) {
    if (!one_in(kRare)) { return sensible; }
    switch (raw(1) % 5) {
      case 0: return 0;
      case 1: return INT64_MAX;
      case 2: return INT64_MIN;
      case 3: return -sensible;
      default: return static_cast<int64_t>(raw(8));
    }
  }

  float real(float sensible) {
    if (!one_in(kRare)) { return sensible; }
    uint32_t const bits = static_cast<uint32_t>(raw(4));
    float value;
    static_assert(sizeof(value) == sizeof(bits));
    __builtin_memcpy(&value, &bits, sizeof(bits));
    return value;
  }

  template <class Enum>
  Enum choice(int count) {
    return static_cast<Enum>(one_in(kRare) ? static_cast<int>(raw(4)) : between(0, count - 1));
  }

 private:
  static constexpr int kRare = 85;

  uint8_t const* data_;
  uint8_t const* end_;
};

}  // namespace fuzz
