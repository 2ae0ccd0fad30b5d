// One call of run_flash_fwd on the GPU, with everything around the operands poisoned, and its
// check.
//
// Inputs are NaN wherever no row of q, k or v lies: gaps between heads, unused keys, packed rows
// past the last sequence. Outputs start as a NaN pattern, and every word outside of the result must
// keep it. Input allocations end with their last element, so that memcheck sees a read past it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "gpu_reference.h"

namespace gpu {

using flashattn::DType;

inline void check(cudaError_t status, char const* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

template <class T>
class DeviceVector {
 public:
  DeviceVector() = default;
  explicit DeviceVector(std::vector<T> const& host) : size_(host.size()) {
    if (size_ == 0) { return; }
    check(cudaMalloc(&data_, size_ * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceVector(DeviceVector const&) = delete;
  DeviceVector(DeviceVector&& other) noexcept { *this = std::move(other); }
  DeviceVector& operator=(DeviceVector&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceVector() { cudaFree(data_); }
  T* data() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> copy(size_);
    if (size_ > 0) {
      check(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
    }
    return copy;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

inline uint16_t to_bits(DType dtype, float x) {
  if (dtype == DType::kFloat16) { return __half_as_ushort(__float2half_rn(x)); }
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

inline float from_bits(DType dtype, uint16_t bits) {
  if (dtype == DType::kFloat16) { return __half2float(__ushort_as_half(bits)); }
  return __bfloat162float(__ushort_as_bfloat16(bits));
}

enum class Sinks { kNone, kFloat32, kLikeQ };
enum class Order {
  kRowsFirst,
  kHeadsFirst
};  // (batch, row, head, dim), or a transposed view of it

struct Case {
  DType dtype = DType::kBFloat16;
  int heads = 4;
  int heads_kv = 2;
  int head_dim = 64;
  std::vector<int> len_q = {70, 70};  // of each sequence; all equal when dense
  std::vector<int> len_k = {100, 100};
  bool packed_q = false;
  bool packed_k = false;
  bool seqused = false;  // len_k is what seqused_k says; the allocation holds `slack` more
  int slack = 0;         // rows past the last sequence (packed) or the used keys (seqused)
  flashattn::Window window = {};
  float scale = 0.125f;
  float softcap = 0.f;
  int alibi_dims = 0;  // 0: none, 1: (heads), 2: (batch, heads)
  Sinks sinks = Sinks::kNone;
  Order order_k = Order::kRowsFirst;
  Order order_v = Order::kRowsFirst;
  int gap = 8;  // NaN elements behind each head
  bool want_lse = true;
  int max_seqlen_q = 0;  // packed: the bound to pass, 0 for the true maximum
  float magnitude = 1.f;
};

// Positions of the elements of a (batches, rows, heads, dim) operand.
struct Layout {
  int batches, rows, heads, dim;
  int64_t batch_stride, row_stride, head_stride;

  Layout(int batches_, int rows_, int heads_, int dim_, int gap, Order order)
      : batches(batches_), rows(rows_), heads(heads_), dim(dim_) {
    int64_t const inner = dim + gap;
    bool const rows_first = order == Order::kRowsFirst;
    row_stride = rows_first ? inner * heads : inner;
    head_stride = rows_first ? inner : inner * rows;
    batch_stride = inner * heads * rows;
  }
  int64_t at(int batch, int row, int head, int d) const {
    return batch * batch_stride + row * row_stride + head * head_stride + d;
  }
  int64_t size() const {  // ends with the last element, not with its gap
    return batches * rows * heads == 0 ? 0 : at(batches - 1, rows - 1, heads - 1, dim - 1) + 1;
  }
};

class Problem {
 public:
  explicit Problem(Case const& c, unsigned seed = 1);

  void run(cudaStream_t stream = nullptr) { flashattn::run_flash_fwd(params_, stream); }
  void check_result() const;  // against the reference, and the canaries
  void check_canaries() const;
  std::vector<uint16_t> out_bits() const { return out_.host(); }
  std::vector<float> lse() const { return lse_.host(); }
  flashattn::FlashFwdParams& params() { return params_; }

  // Other contents for the packed prefix sums; the reference does not know the rows they describe.
  void overwrite_cu_seqlens(std::vector<int> const& q, std::vector<int> const& k);

 private:
  struct Operand {
    Layout layout;
    std::vector<uint16_t> bits;
    DeviceVector<uint16_t> device;
  };

  Operand make_operand(Layout const& layout, bool packed, std::vector<int> const& lengths);
  std::vector<std::vector<float>> rows_of(Operand const& operand, bool packed,
                                          std::vector<int> const& lengths, int batch,
                                          int head) const;
  oracle::RowProblem row_problem(int batch, int head) const;
  void check_rows(int batch, int head, std::vector<uint16_t> const& out,
                  std::vector<float> const& lse, std::vector<char>& out_written,
                  std::vector<char>& lse_written) const;
  void fill_params();
  int batch() const { return static_cast<int>(case_.len_q.size()); }
  int64_t lse_index(int batch, int head, int row) const;

  Case case_;
  std::mt19937 random_;
  Operand q_, k_, v_;
  Layout out_layout_;
  DeviceVector<uint16_t> out_;
  DeviceVector<float> lse_;
  DeviceVector<int> cu_q_, cu_k_, seqused_;
  std::vector<float> slopes_host_, sinks_host_;
  DeviceVector<float> slopes_, sinks_;
  DeviceVector<uint16_t> sinks_like_q_;
  flashattn::FlashFwdParams params_;
};

// Builds, runs and checks one case.
void expect_right(Case const& c);

// Empty when run_flash_fwd can serve this machine, otherwise why the tests have to be skipped.
std::string no_gpu_reason();
// The head dims among `wanted` that this build has a kernel for.
std::vector<int> built_head_dims(std::vector<int> const& wanted);

}  // namespace gpu

// In a TEST, where GTEST_SKIP can return.
#define SKIP_WITHOUT_GPU() \
  if (!gpu::no_gpu_reason().empty()) { GTEST_SKIP() << gpu::no_gpu_reason(); }
