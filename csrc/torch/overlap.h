// Whether a tensor that gets written has a place of its own for every element.
#pragma once

#include <initializer_list>

#include "torch/tensor_checks.h"

namespace flashattn {

struct Named {
  char const* name;
  Tensor const* tensor;  // null when absent
};

inline Named named(char const* name, Tensor const& tensor) { return {name, &tensor}; }

inline Named named(char const* name, OptionalTensor const& tensor) {
  return {name, tensor ? &*tensor : nullptr};
}

// Unless it is empty: no dim is expanded, and no memory is surely that of one of `others` too.
// Interleaved views of one buffer do not count: exact where one of two tensors is contiguous, of
// two others only the first element is compared.
void check_written(View const& tensor, char const* name, std::initializer_list<Named> others);

}  // namespace flashattn
