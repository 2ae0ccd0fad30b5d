// Memory for a call whose parameters are accepted: every array is an allocation of its own and ends
// with its last element, so that a sanitizer sees each access beyond it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "flashattn/params.h"

namespace fuzz {

// The largest array that a fuzzed call gets.
constexpr double kMostBytes = 1 << 18;

inline int size_of(flashattn::DType dtype) { return dtype == flashattn::DType::kFloat32 ? 4 : 2; }

// One dimension of an array.
struct Walk {
  int64_t count;
  int64_t stride;
};

struct Block {
  char* begin;
  size_t bytes;
};

class Memory {
 public:
  explicit Memory(uint32_t seed) : random_(seed) {}

  // Elements of `size` bytes, random bits; null where they would be too many, and then `ok` fails.
  // Empty dimensions make an allocation without bytes.
  void* elements(std::vector<Walk> const& walks, int size, int innermost) {
    double first = 0, last = innermost;
    for (Walk const& walk : walks) {
      if (walk.count <= 0) {
        first = last = 0;
        break;
      }
      double const reach = double(walk.count - 1) * double(walk.stride);
      (reach < 0 ? first : last) += reach;
    }
    if ((last - first) * size > kMostBytes) {
      too_large_ = true;
      return nullptr;
    }
    size_t const bytes = static_cast<size_t>(last - first) * size;
    return allocate(bytes) + static_cast<int64_t>(-first) * size;
  }

  // `count` lengths, ids or indices, of which most are small.
  int const* ints(int64_t count, int largest) {
    void* const data = elements({{count, 1}}, sizeof(int), 1);
    if (data == nullptr) { return nullptr; }
    int* const values = static_cast<int*>(data);
    for (int64_t i = 0; i < count; ++i) {
      bool const odd = random_() % 16 == 0;
      values[i] =
          odd ? static_cast<int>(random_()) : static_cast<int>(random_() % (largest + 2u)) - 1;
    }
    return values;
  }

  bool ok() const { return !too_large_; }

  // The array that was made last.
  Block last() const { return last_; }

 private:
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };

  char* allocate(size_t bytes) {
    void* data = nullptr;
    if (posix_memalign(&data, 64, bytes) != 0) { std::abort(); }
    owned_.emplace_back(static_cast<char*>(data));
    last_ = {owned_.back().get(), bytes};
    for (size_t i = 0; i < bytes; ++i) { last_.begin[i] = static_cast<char>(random_()); }
    return last_.begin;
  }

  std::minstd_rand random_;
  std::vector<std::unique_ptr<char, Free>> owned_;
  Block last_ = {};
  bool too_large_ = false;
};

}  // namespace fuzz
