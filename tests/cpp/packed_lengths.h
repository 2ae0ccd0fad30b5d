// Right and wrong lengths of packed sequences.
#pragma once

#include <climits>
#include <random>
#include <vector>

#include "flashattn/params.h"

namespace packed {

inline std::vector<int> prefix_sums(std::vector<int> const& lengths) {
  std::vector<int> sums{0};
  for (int length : lengths) { sums.push_back(sums.back() + length); }
  return sums;
}

inline flashattn::Lengths packed_q(std::vector<int> const& cu_seqlens, int total) {
  flashattn::Lengths lengths;
  lengths.cu_seqlens_q = cu_seqlens.data();
  lengths.total_q = total;
  return lengths;
}

// Contents of cu_seqlens that no correct caller passes.
inline std::vector<std::vector<int>> hostile_cu_seqlens() {
  std::vector<std::vector<int>> all = {
      {0, -1, 5, 9},
      {9, 6, 3, 0},
      {-7, -3, 100, 4},
      {0, INT_MAX, 3, INT_MIN},
      {INT_MIN, 0, 4, 8},
      {INT_MAX, INT_MAX, 0, 1},
      {5, 5, 5, 5},
      {1000, 2000, 3000, 4000},
      {INT_MIN, INT_MAX, INT_MIN, INT_MAX},
      {0, 0, 0, INT_MIN},
  };
  std::mt19937 random(2);
  std::uniform_int_distribution<int> any(INT_MIN, INT_MAX), near(-40, 80);
  for (int i = 0; i < 200; ++i) {
    all.push_back({any(random), any(random), any(random), any(random)});
  }
  for (int i = 0; i < 200; ++i) {
    all.push_back({near(random), near(random), near(random), near(random)});
  }
  return all;
}

}  // namespace packed
