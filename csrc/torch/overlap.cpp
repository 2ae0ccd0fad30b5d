#include "torch/overlap.h"

#include <algorithm>
#include <array>
#include <utility>

namespace flashattn {
namespace {

// The memory of a tensor, in bytes.
struct Memory {
  uintptr_t begin;
  int64_t extent;  // from the first byte to one behind the last
  int64_t item;
  std::array<std::pair<int64_t, int64_t>, kMaxDims>
      dims;  // walked ones: (stride, size), descending
  size_t walked = 0;
  bool empty = false;
  bool contiguous;

  Memory(View const& view, char const* name)
      : begin(reinterpret_cast<uintptr_t>(view.data())),
        item(view.item_bytes()),
        contiguous(view.tensor.is_contiguous()) {
    extent = item;
    Sizes const sizes = view.sizes, strides = view.strides;
    if (sizes.size() > kMaxDims) { refuse(name, "expected at most ", kMaxDims, " dims"); }
    for (size_t i = 0; i < sizes.size(); ++i) {
      empty |= sizes[i] == 0;
      if (sizes[i] <= 1 || strides[i] == 0) { continue; }
      std::pair const dim(strides[i] * item, sizes[i]);
      size_t place = walked++;
      for (; place > 0 && dims[place - 1] < dim; --place) { dims[place] = dims[place - 1]; }
      dims[place] = dim;
      extent += strides[i] * item * (sizes[i] - 1);
    }
  }
};

// Whether bytes [begin, begin + size), counted from the first one of `memory`, hold some of it.
bool reaches(Memory const& memory, int64_t begin, int64_t size) {
  if (begin < 0) { return begin + size > 0; }
  int64_t extent = memory.extent;
  for (size_t i = 0; i < memory.walked && begin < extent; ++i) {
    auto const [stride, count] = memory.dims[i];
    extent -= stride * (count - 1);  // of one block of this dim
    int64_t const block = std::min(begin / stride, count - 1);
    begin -= block * stride;
    if (begin >= extent) {  // in the gap behind the block
      return block + 1 < count && begin + size > stride;
    }
  }
  return begin < extent;
}

bool overlap(Memory const& a, Memory const& b) {
  if (a.empty || b.empty) { return false; }
  if (a.begin == b.begin) { return true; }
  int64_t const distance = static_cast<int64_t>(a.begin - b.begin);
  if (distance >= b.extent || -distance >= a.extent) { return false; }
  if (a.contiguous) { return reaches(b, distance, a.extent); }
  return b.contiguous && reaches(a, -distance, b.extent);
}

}  // namespace

void check_written(View const& tensor, char const* name, std::initializer_list<Named> others) {
  Memory const memory(tensor, name);
  if (memory.empty) { return; }
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.stride(i) == 0 && tensor.size(i) > 1) {
      refuse(name, "expected no expanded dim, got strides ", to_string(tensor.strides));
    }
  }
  for (Named const& other : others) {
    if (other.tensor != nullptr && overlap(memory, Memory(*other.tensor, other.name))) {
      refuse(name, "expected memory of its own, got memory that overlaps ", other.name);
    }
  }
}

}  // namespace flashattn
