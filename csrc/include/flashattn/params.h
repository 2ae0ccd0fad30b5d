// The arguments of the C++ API: plain structs of pointers, sizes and strides.
//
// Strides count elements and are 64 bit. The last dimension (head dim) always has stride 1.
// A null pointer means that the feature is absent. Addresses and strides of q, k, v and out are
// multiples of 16 bytes, those of flash_combine of an element. A sequence has at most 2^30 rows, a
// call 65535 heads and 2^36 rows times heads; where parts of given splits are merged on a GPU, and
// in flash_combine, less than 2^31.
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
  int seqlen_k = 0;  // the same for k and v
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
  // Contiguous, dense (batch, heads, seqlen_q) or packed (heads, total_q); may be null.
  float* lse = nullptr;
  Lengths lengths;
  Window window;
  Score score;
};

// Where the keys and values of the sequences live. Contiguous (page_size 0): k and v of
// FlashFwdParams are (cache rows, capacity, heads_kv, head_dim). Pages: they are a pool (num_pages,
// page_size, heads_kv, head_dim), batch_stride is the distance of two pages, and token j of
// sequence n is slot j % page_size of page block_table[n][j / page_size].
struct Cache {
  int const* seqlens = nullptr;      // (batch): valid tokens, before anything is appended
  int seqlen = 0;                    // of every sequence, when seqlens is null
  int const* leftpad = nullptr;      // (batch): tokens [0, leftpad) do not exist
  int const* batch_idx = nullptr;    // (batch): contiguous only: the cache row of a sequence
  int rows = 0;                      // contiguous only: rows of the cache
  int const* block_table = nullptr;  // (batch, table_columns)
  int64_t block_table_stride = 0;    // between the rows of two sequences
  int table_columns = 0;
  int page_size = 0;
  int num_pages = 0;

  // clang-format off
#if defined(__CUDACC__)
  __host__ __device__
#endif
  bool paged() const { return page_size > 0; }
  // clang-format on
};

// New tokens, written behind the valid ones before they are attended to. With rotary tables, keys
// and queries are rotated: key t by the angles of position seqlen + t; query i by those of seqlen +
// i when the window has a right or left side, otherwise of seqlen.
struct Append {
  Input k;  // (batch, seqlen, heads_kv, head_dim)
  Input v;
  int seqlen = 0;                    // new tokens of every sequence; 0: nothing is appended
  void const* rotary_cos = nullptr;  // (max_position, rotary_dim / 2), contiguous, of the type of q
  void const* rotary_sin = nullptr;
  int rotary_dim = 0;  // a multiple of 16, at most head_dim
  int max_position = 0;
  bool rotary_interleaved = false;  // pairs (2t, 2t + 1); otherwise (t, t + rotary_dim / 2)
};

// How the keys of a sequence are shared out.
struct Split {
  int num_splits = 0;  // 0: as suits the call; 1: not split; at most 256
  int split_size = 0;  // > 0: split s is tokens [s * split_size, (s + 1) * split_size), a multiple
                       // of 64; num_splits is then 0

  bool automatic() const { return num_splits == 0 && split_size == 0; }
};

struct FlashSplitkvParams {
  FlashFwdParams fwd;  // shape.seqlen_k is the capacity: what a sequence can hold at the most;
                       // of lengths, only cu_seqlens_q and total_q are used
  Cache cache;
  Append append;
  Split split;
  void* workspace = nullptr;  // splitkv_workspace_size(params) bytes, aligned to 128; null when 0
};

// Partial results over disjoint keys, merged by their log-sum-exp.
struct FlashCombineParams {
  Device device = Device::kCuda;
  int splits = 0;
  int batch = 0;  // 1 when packed
  int heads = 0;
  int seqlen = 0;  // packed: total rows
  int head_dim = 0;
  DType partial_dtype = DType::kFloat32;
  Input out_partial;  // (splits, batch, seqlen, heads, head_dim)
  int64_t out_split_stride = 0;
  float const* lse_partial = nullptr;  // (splits, batch, heads, seqlen); -inf, +inf: an empty part
  int64_t lse_split_stride = 0;
  int64_t lse_batch_stride = 0;
  int64_t lse_head_stride = 0;
  int64_t lse_row_stride = 1;
  DType out_dtype = DType::kBFloat16;
  Output out;
  float* lse = nullptr;            // (batch, heads, seqlen), contiguous; may be null
  int const* sequences = nullptr;  // packed: points to the number of rows that exist; null: all do
};

}  // namespace flashattn
