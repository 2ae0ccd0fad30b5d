// The arguments of the C++ API: plain structs of pointers, sizes and strides.
//
// Strides count elements and are 64 bit. The last dimension (head dim) always has stride 1.
// A null pointer means that the feature is absent.
#pragma once

#include <cstdint>

namespace flashattn {

enum class DType { kFloat16, kBFloat16, kFloat32 };

// Where every pointer of a call lives. kFloat32 operands exist on the CPU only.
enum class Device { kCpu, kCuda };

// A (batch, row, head, dim) operand; packed operands are (row, head, dim) and ignore batch_stride.
template <class Pointer>
struct Strided {
  Pointer data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

using Input = Strided<void const*>;
using Output = Strided<void*>;

struct Shape {
  int batch = 0;
  int heads = 0;     // of q and out
  int heads_kv = 0;  // of k and v; divides heads
  int head_dim = 0;  // a multiple of 8, at most 256
  int seqlen_q = 0;  // dense: rows of a sequence. Packed: an upper bound
  int seqlen_k = 0;
};

// Lengths that live beside the data (on the device for Device::kCuda) and are read there only.
// The kernels clamp them: they count as untrusted.
struct Lengths {
  int const* cu_seqlens_q = nullptr;  // (batch + 1): q and out are packed
  int const* cu_seqlens_k = nullptr;  // (batch + 1): k and v are packed
  int const* seqused_k = nullptr;     // (batch): keys of each sequence in use
  int total_q = 0;                    // rows of the packed q; 0 when dense
  int total_k = 0;                    // rows of the packed k and v; 0 when dense
};

// Query row i of a sequence sees keys i + len_k - len_q - left ... i + len_k - len_q + right,
// both inclusive; -1 leaves a side unbounded. Causal attention is {-1, 0}.
struct Window {
  int left = -1;
  int right = -1;
};

struct Score {
  float scale = 1.f;                    // multiplies q·k
  float softcap = 0.f;                  // > 0: score = softcap * tanh(score / softcap)
  float const* alibi_slopes = nullptr;  // (heads) or (batch, heads)
  int64_t alibi_batch_stride = 0;       // 0 when all batches share the slopes
  void const* sinks = nullptr;          // (heads): one more logit in the denominator
  DType sinks_dtype = DType::kFloat32;
};

struct FlashFwdParams {
  Device device = Device::kCuda;
  DType dtype = DType::kBFloat16;  // of q, k, v and out
  Shape shape;
  Input q;
  Input k;
  Input v;
  Output out;
  float* lse = nullptr;  // dense (batch, heads, seqlen_q), packed (heads, total_q), contiguous; may be null
  Lengths lengths;
  Window window;
  Score score;
};

}  // namespace flashattn
