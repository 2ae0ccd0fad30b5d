// Writes new keys and values into the cache and rotates queries. Its own kernel, so that the main loop
// knows nothing of it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/cache_info.h"
#include "core/rotary.h"
#include "kernels/kernels.h"
#include "kernels/launch_kernel.h"

namespace flashattn {
namespace {

constexpr int kThreads = 256;

__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void round_to(__half& y, float x) { y = __float2half(x); }
__device__ void round_to(__nv_bfloat16& y, float x) { y = __float2bfloat16(x); }

template <class Element>
__device__ void rotate(Append const& append, Element const* head, int first, int position, Element* target) {
  int64_t const row = int64_t(rotary_position(append, position)) * (append.rotary_dim / 2);
  auto const* const cosines = static_cast<Element const*>(append.rotary_cos) + row;
  auto const* const sines = static_cast<Element const*>(append.rotary_sin) + row;
  float rotated[kRotaryChunk];
  rotate_chunk(
      append, first, [&](int column) { return to_float(head[column]); },
      [&](int pair) { return to_float(cosines[pair]); }, [&](int pair) { return to_float(sines[pair]); }, rotated);
  __align__(16) Element rounded[kRotaryChunk];
  for (int i = 0; i < kRotaryChunk; ++i) { round_to(rounded[i], rotated[i]); }
  *reinterpret_cast<uint4*>(target + first) = *reinterpret_cast<uint4 const*>(rounded);
}

// New token `token` of a sequence: one chunk of a key head and the same of the value head.
template <class Element>
__device__ void append_chunk(FlashSplitkvParams const& p, FastDivisor page_size, int batch, int token, int head,
                             int first) {
  SequenceInfo const seq = cache_sequence_info(p, batch);
  int const cached = cached_tokens(p.cache, p.fwd.shape.seqlen_k, batch);
  int const position = cached + token;
  if (position >= p.fwd.shape.seqlen_k) { return; }  // the cache is full
  CacheSlot const at = cache_slot(p.cache, page_size, seq, position);
  bool const exists =
      p.cache.paged() ? at.index >= 0 : static_cast<unsigned>(at.index) < static_cast<unsigned>(p.cache.rows);
  if (!exists) { return; }

  auto const source = [&](Input const& t) {
    return static_cast<Element const*>(t.data) + batch * t.batch_stride + token * t.row_stride + head * t.head_stride;
  };
  auto const target = [&](Input const& t) {
    return static_cast<Element*>(const_cast<void*>(t.data)) + at.index * t.batch_stride + at.slot * t.row_stride +
           head * t.head_stride;
  };
  Element const* const key = source(p.append.k);
  if (p.append.rotary_dim > 0) {
    rotate(p.append, key, first, position, target(p.fwd.k));
  } else {
    *reinterpret_cast<uint4*>(target(p.fwd.k) + first) = *reinterpret_cast<uint4 const*>(key + first);
  }
  *reinterpret_cast<uint4*>(target(p.fwd.v) + first) = *reinterpret_cast<uint4 const*>(source(p.append.v) + first);
}

// One chunk of a query head. Packed rows find their sequence by a binary search.
template <class Element>
__device__ void rotate_query_chunk(FlashSplitkvParams const& p, Element* rotated, int64_t row, int head, int first) {
  FlashFwdParams const& fwd = p.fwd;
  int const* const starts = fwd.lengths.cu_seqlens_q;
  int batch = 0, token = 0;
  if (starts == nullptr) {
    batch = static_cast<int>(row / fwd.shape.seqlen_q);
    token = static_cast<int>(row % fwd.shape.seqlen_q);
  } else {
    int high = fwd.shape.batch;
    while (high - batch > 1) {
      int const middle = batch + (high - batch) / 2;
      if (starts[middle] <= row) {
        batch = middle;
      } else {
        high = middle;
      }
    }
    token = static_cast<int>(row) - starts[batch];
  }
  int64_t const offset =
      starts == nullptr ? batch * fwd.q.batch_stride + token * fwd.q.row_stride : row * fwd.q.row_stride;
  Element const* const query = static_cast<Element const*>(fwd.q.data) + offset + head * fwd.q.head_stride;
  int const cached = cached_tokens(p.cache, fwd.shape.seqlen_k, batch);
  rotate(p.append, query, first, query_position(fwd.window, cached, token),
         rotated + (row * fwd.shape.heads + head) * fwd.shape.head_dim);
}

template <class Element>
__global__ void __launch_bounds__(kThreads) append_kv_kernel(__grid_constant__ FlashSplitkvParams const p,
                                                             FastDivisor const page_size, Element* const rotated) {
  Shape const& shape = p.fwd.shape;
  int const chunks = shape.head_dim / kRotaryChunk;
  int64_t const index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  int const first = static_cast<int>(index % chunks) * kRotaryChunk;
  int64_t const head_row = index / chunks;
  int64_t const new_rows = int64_t(shape.batch) * p.append.seqlen;
  if (head_row < new_rows * shape.heads_kv) {
    int64_t const row = head_row / shape.heads_kv;
    append_chunk<Element>(p, page_size, static_cast<int>(row / p.append.seqlen),
                          static_cast<int>(row % p.append.seqlen), static_cast<int>(head_row % shape.heads_kv), first);
    return;
  }
  int64_t const query_row = head_row - new_rows * shape.heads_kv;
  if (rotated != nullptr && query_row < query_rows(p.fwd) * shape.heads) {
    rotate_query_chunk(p, rotated, query_row / shape.heads, static_cast<int>(query_row % shape.heads), first);
  }
}

template <class Element>
void launch_append_of(FlashSplitkvParams const& params, FastDivisor page_size, void* rotated_q, cudaStream_t stream) {
  Shape const& shape = params.fwd.shape;
  int64_t const head_rows = int64_t(shape.batch) * params.append.seqlen * shape.heads_kv +
                            (rotated_q != nullptr ? query_rows(params.fwd) * shape.heads : 0);
  int64_t const blocks = (head_rows * (shape.head_dim / kRotaryChunk) + kThreads - 1) / kThreads;
  if (blocks == 0) { return; }
  check_grid("append_kv", blocks);
  launch("append_kv", append_kv_kernel<Element>, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream,
         /*overlap=*/false, params, page_size, static_cast<Element*>(rotated_q));
}

}  // namespace

void launch_append_kv(FlashSplitkvParams const& params, FastDivisor page_size, void* rotated_q, cudaStream_t stream) {
  if (params.fwd.dtype == DType::kFloat16) {
    launch_append_of<__half>(params, page_size, rotated_q, stream);
  } else {
    launch_append_of<__nv_bfloat16>(params, page_size, rotated_q, stream);
  }
}

}  // namespace flashattn
