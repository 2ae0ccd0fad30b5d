// What the operators ask of a tensor before they hand its memory on. Memory safety rests on it when
// an operator is called directly, without the Python layer.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "flashattn/error.h"
#include "flashattn/params.h"

namespace flashattn {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

constexpr size_t kMaxDims = 4;  // of what is written

// What the checks ask of a tensor, asked once: every question is a call into torch.
struct View {
  Tensor const& tensor;
  Sizes sizes;
  Sizes strides;
  int32_t dtype = 0;  // in torch's numbers: aoti_torch_dtype_...()
  int32_t device_type = 0;
  int32_t device_index;
  void const* memory;

  // Not explicit: a tensor is as good as its view.
  View(Tensor const& t)
      : tensor(t),
        sizes(t.sizes()),
        device_index(t.get_device_index()),
        memory(t.const_data_ptr()) {
    int64_t* data = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t.get(), &data));
    strides = {data, sizes.size()};
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device_type));
  }

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t size(int64_t dim) const { return sizes[dim]; }
  int64_t stride(int64_t dim) const { return strides[dim]; }
  int64_t item_bytes() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)); }
  bool is_cuda() const { return device_type == aoti_torch_device_type_cuda(); }
  void const* data() const { return memory; }
};

inline std::string to_string(Sizes sizes) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < sizes.size(); ++i) { text << (i == 0 ? "" : ", ") << sizes[i]; }
  text << ")";
  return text.str();
}

template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void refuse(char const* name, Parts const&... parts) {
  std::ostringstream text;
  text << name << ": ";
  (text << ... << parts);
  throw InvalidArgument(text.str());
}

inline int narrow(char const* name, int64_t value) {
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
    refuse(name, "expected a number of 32 bits, got ", value);
  }
  return static_cast<int>(value);
}

inline DType dtype_of(View const& tensor, char const* name) {
  if (tensor.dtype == aoti_torch_dtype_bfloat16()) { return DType::kBFloat16; }
  if (tensor.dtype == aoti_torch_dtype_float16()) { return DType::kFloat16; }
  if (tensor.dtype == aoti_torch_dtype_float32()) { return DType::kFloat32; }
  refuse(name, "expected dtype float16, bfloat16 or float32, got another one");
}

inline void check_device(View const& tensor, char const* name, View const& q) {
  if (tensor.device_type != q.device_type || tensor.device_index != q.device_index) {
    refuse(name, "expected the device of q, got another one");
  }
}

inline void check_shape(View const& tensor, char const* name, Sizes expected) {
  Sizes const got = tensor.sizes;
  if (!std::equal(got.begin(), got.end(), expected.begin(), expected.end())) {
    refuse(name, "expected shape ", to_string(expected), ", got ", to_string(got));
  }
}

inline void check_last_stride(View const& tensor, char const* name) {
  int64_t const last = tensor.dim() - 1;
  if (tensor.stride(last) != 1 && tensor.size(last) > 1) {
    refuse(name, "expected stride 1 in the last dim, got strides ", to_string(tensor.strides));
  }
}

// Stride 1 in the last dim; the data and the strides of the other dims multiples of 16 bytes. Asked
// of empty tensors too, which validate() lets pass.
inline void check_layout(View const& tensor, char const* name) {
  check_last_stride(tensor, name);
  int64_t const item = tensor.item_bytes();
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) * item % 16 != 0) {
      refuse(name, "expected strides that are multiples of 16 bytes (", 16 / item,
             " elements), got strides ", to_string(tensor.strides));
    }
  }
  auto const past = reinterpret_cast<uintptr_t>(tensor.data()) % 16;
  if (past != 0) {
    refuse(name, "expected data that starts at a multiple of 16 bytes, got one ", past,
           " bytes past it (a view at an odd offset)");
  }
}

// At least one, also where there are no query heads.
inline void check_key_heads(View const& k, char const* name, View const& q) {
  if (k.size(k.dim() - 2) == 0) {
    refuse(name, "expected a number of key/value heads that divides q's ", q.size(q.dim() - 2),
           " heads, got 0 in shape ", to_string(k.sizes));
  }
}

// An operand of the shape of `like`, with q's dtype and device.
inline void check_operand(View const& tensor, char const* name, View const& like, View const& q) {
  if (tensor.dtype != q.dtype) { refuse(name, "expected the dtype of q"); }
  check_device(tensor, name, q);
  check_shape(tensor, name, like.sizes);
  check_last_stride(tensor, name);
}

// Null when absent, otherwise `count` int32 lengths.
inline int const* lengths(OptionalTensor const& lengths, char const* name, int64_t count,
                          View const& q) {
  if (!lengths) { return nullptr; }
  View const tensor = *lengths;
  if (tensor.dtype != aoti_torch_dtype_int32()) { refuse(name, "expected dtype int32"); }
  check_shape(tensor, name, {count});
  check_last_stride(tensor, name);
  check_device(tensor, name, q);
  return static_cast<int const*>(tensor.data());
}

// A dim of size 1 may have any stride; nothing is ever multiplied with it.
inline int64_t stride_or_zero(View const& tensor, int64_t dim) {
  return tensor.size(dim) > 1 ? tensor.stride(dim) : 0;
}

// `batch_dim` is where a dense operand has its batch; in a packed one the rows are there.
template <class Pointer>
Strided<Pointer> strided(View const& tensor, Pointer data, int64_t batch_dim = 0) {
  int64_t const row = tensor.dim() - 3;
  return {.data = data,
          .batch_stride = row == batch_dim ? 0 : stride_or_zero(tensor, batch_dim),
          .row_stride = stride_or_zero(tensor, row),
          .head_stride = stride_or_zero(tensor, row + 1)};
}

}  // namespace flashattn
