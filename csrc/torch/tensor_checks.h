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
#include <vector>

#include "flashattn/error.h"
#include "flashattn/params.h"

namespace flashattn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

inline std::string to_string(Sizes sizes) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < sizes.size(); ++i) { text << (i == 0 ? "" : ", ") << sizes[i]; }
  text << ")";
  return text.str();
}

template <class... Parts>
[[noreturn]] void refuse(char const* name, Parts const&... parts) {
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

inline DType dtype_of(Tensor const& tensor, char const* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float: return DType::kFloat32;
    default: refuse(name, "expected dtype float16, bfloat16 or float32, got another one");
  }
}

inline void check_device(Tensor const& tensor, char const* name, Tensor const& q) {
  if (tensor.is_cuda() != q.is_cuda() || tensor.get_device_index() != q.get_device_index()) {
    refuse(name, "expected the device of q, got another one");
  }
}

inline void check_shape(Tensor const& tensor, char const* name,
                        std::vector<int64_t> const& expected) {
  Sizes const got = tensor.sizes();
  if (!std::equal(got.begin(), got.end(), expected.begin(), expected.end())) {
    refuse(name, "expected shape ", to_string({expected.data(), expected.size()}), ", got ",
           to_string(got));
  }
}

inline void check_last_stride(Tensor const& tensor, char const* name) {
  int64_t const last = tensor.dim() - 1;
  if (tensor.stride(last) != 1 && tensor.size(last) > 1) {
    refuse(name, "expected stride 1 in the last dim, got strides ", to_string(tensor.strides()));
  }
}

inline int64_t item_bytes(Tensor const& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
}

// Stride 1 in the last dim; the data and the strides of the other dims multiples of 16 bytes. Asked
// of empty tensors too, which validate() lets pass.
inline void check_layout(Tensor const& tensor, char const* name) {
  check_last_stride(tensor, name);
  Sizes const sizes = tensor.sizes(), strides = tensor.strides();
  int64_t const item = item_bytes(tensor);
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides[i] * item % 16 != 0) {
      refuse(name, "expected strides that are multiples of 16 bytes (", 16 / item,
             " elements), got strides ", to_string(strides));
    }
  }
  auto const past = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16;
  if (past != 0) {
    refuse(name, "expected data that starts at a multiple of 16 bytes, got one ", past,
           " bytes past it (a view at an odd offset)");
  }
}

// At least one, also where there are no query heads.
inline void check_key_heads(Tensor const& k, char const* name, Tensor const& q) {
  if (k.size(k.dim() - 2) == 0) {
    refuse(name, "expected a number of key/value heads that divides q's ", q.size(q.dim() - 2),
           " heads, got 0 in shape ", to_string(k.sizes()));
  }
}

// An operand of the shape of `like`, with q's dtype and device.
inline void check_operand(Tensor const& tensor, char const* name, Tensor const& like,
                          Tensor const& q) {
  if (tensor.scalar_type() != q.scalar_type()) { refuse(name, "expected the dtype of q"); }
  check_device(tensor, name, q);
  Sizes const sizes = like.sizes();
  check_shape(tensor, name, {sizes.begin(), sizes.end()});
  check_last_stride(tensor, name);
}

// Null when absent, otherwise `count` int32 lengths.
inline int const* lengths(OptionalTensor const& tensor, char const* name, int64_t count,
                          Tensor const& q) {
  if (!tensor) { return nullptr; }
  if (tensor->scalar_type() != ScalarType::Int) { refuse(name, "expected dtype int32"); }
  check_shape(*tensor, name, {count});
  check_last_stride(*tensor, name);
  check_device(*tensor, name, q);
  return static_cast<int const*>(tensor->const_data_ptr());
}

// A dim of size 1 may have any stride; nothing is ever multiplied with it.
inline int64_t stride_or_zero(Tensor const& tensor, int64_t dim) {
  return tensor.size(dim) > 1 ? tensor.stride(dim) : 0;
}

// `batch_dim` is where a dense operand has its batch; in a packed one the rows are there.
template <class Pointer>
Strided<Pointer> strided(Tensor const& tensor, Pointer data, int64_t batch_dim = 0) {
  int64_t const row = tensor.dim() - 3;
  return {.data = data,
          .batch_stride = row == batch_dim ? 0 : stride_or_zero(tensor, batch_dim),
          .row_stride = stride_or_zero(tensor, row),
          .head_stride = stride_or_zero(tensor, row + 1)};
}

}  // namespace flashattn
