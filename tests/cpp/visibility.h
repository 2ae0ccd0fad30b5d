// Which keys a query row sees, written out again from the definition: the oracle of the C++ tests,
// on purpose without csrc/core.
#pragma once

#include <cstdint>

namespace oracle {

struct Window {
  int64_t left;
  int64_t right;
};

inline bool sees(int64_t row, int64_t key, int64_t len_q, int64_t len_k, Window window) {
  int64_t const diagonal = row + len_k - len_q;
  bool const after_left = window.left == -1 || diagonal - window.left <= key;
  bool const before_right = window.right == -1 || key <= diagonal + window.right;
  return key >= 0 && key < len_k && after_left && before_right;
}

}  // namespace oracle
