// A small correct fp32 call on the CPU; each test of the C++ API changes one thing.
#pragma once

#include <algorithm>
#include <iterator>

#include "flashattn/flashattn.h"

namespace api {

using flashattn::Device;
using flashattn::DType;

constexpr int kBatch = 2, kRows = 3, kHeads = 4, kHeadsKv = 2, kHeadDim = 16;
constexpr float kUntouched = 123.25f;

struct Call {
  static constexpr int kQuerySize = kBatch * kRows * kHeads * kHeadDim;
  alignas(64) float q[kQuerySize + 16], k[kQuerySize + 16], v[kQuerySize + 16],
      out[kQuerySize + 16];
  float lse[kBatch * kHeads * kRows];
  float sinks[kHeads] = {-90.f, -90.f, -90.f, -90.f};
  int cu_seqlens[kBatch + 1] = {0, kRows, 2 * kRows};
  flashattn::FlashFwdParams params;

  Call() {
    for (float* operand : {q, k, v}) { std::fill_n(operand, kQuerySize + 16, 0.5f); }
    std::fill(std::begin(out), std::end(out), kUntouched);
    std::fill(std::begin(lse), std::end(lse), kUntouched);
    params.device = Device::kCpu;
    params.dtype = DType::kFloat32;
    params.shape = {.batch = kBatch,
                    .heads = kHeads,
                    .heads_kv = kHeadsKv,
                    .head_dim = kHeadDim,
                    .seqlen_q = kRows,
                    .seqlen_k = kRows};
    params.q = {q, kRows * kHeads * kHeadDim, kHeads * kHeadDim, kHeadDim};
    params.k = {k, kRows * kHeadsKv * kHeadDim, kHeadsKv * kHeadDim, kHeadDim};
    params.v = {v, kRows * kHeadsKv * kHeadDim, kHeadsKv * kHeadDim, kHeadDim};
    params.out = {out, kRows * kHeads * kHeadDim, kHeads * kHeadDim, kHeadDim};
    params.lse = lse;
    params.score.scale = 0.25f;
  }
  void use(Device device) {
    params.device = device;
    params.dtype = device == Device::kCpu ? DType::kFloat32 : DType::kBFloat16;
  }
  void run() { flashattn::run_flash_fwd(params); }
  void pack() {
    params.lengths.cu_seqlens_q = params.lengths.cu_seqlens_k = cu_seqlens;
    params.lengths.total_q = params.lengths.total_k = 2 * kRows;
  }
  bool untouched() const {
    auto const is_untouched = [](float x) { return x == kUntouched; };
    return std::all_of(std::begin(out), std::end(out), is_untouched) &&
           std::all_of(std::begin(lse), std::end(lse), is_untouched);
  }
};

// The same over a cache: 3 rows of queries, a capacity of 3, 2 tokens in use and 1 new one.
struct SplitkvCall : Call {
  alignas(64) float k_new[kQuerySize + 16] = {}, v_new[kQuerySize + 16] = {}, angles[64] = {};
  int seqlens[kBatch] = {2, 2};
  int block_table[2 * kBatch] = {0, 1, 1, 0};
  flashattn::FlashSplitkvParams splitkv;

  SplitkvCall() {
    splitkv.fwd = params;
    splitkv.cache.seqlens = seqlens;
    splitkv.cache.rows = kBatch;
    std::fill(std::begin(k_new), std::end(k_new), 0.5f);
    std::fill(std::begin(v_new), std::end(v_new), 0.5f);
    splitkv.append.k = {k_new, kHeadsKv * kHeadDim, kHeadsKv * kHeadDim, kHeadDim};
    splitkv.append.v = {v_new, kHeadsKv * kHeadDim, kHeadsKv * kHeadDim, kHeadDim};
    splitkv.append.seqlen = 1;
  }
  void use(Device device) {
    Call::use(device);
    splitkv.fwd.device = params.device;
    splitkv.fwd.dtype = params.dtype;
  }
  void run() { flashattn::run_flash_splitkv_fwd(splitkv); }
  // The operands as a pool of two pages of three tokens.
  void use_pages() {
    splitkv.cache.rows = 0;
    splitkv.cache.block_table = block_table;
    splitkv.cache.block_table_stride = splitkv.cache.table_columns = 2;
    splitkv.cache.page_size = kRows;
    splitkv.cache.num_pages = 2;
    splitkv.fwd.shape.seqlen_k = 2 * kRows;
  }
  void rotate() {
    splitkv.append.rotary_cos = splitkv.append.rotary_sin = angles;
    splitkv.append.rotary_dim = 16;
    splitkv.append.max_position = 8;
  }
};

// Two parts, both 0.5.
struct CombineCall : Call {
  float lse_partial[2 * kBatch * kHeads * kRows] = {};
  float parts[2 * kQuerySize];
  flashattn::FlashCombineParams combine;

  CombineCall() {
    std::fill(std::begin(parts), std::end(parts), 0.5f);
    combine.device = Device::kCpu;
    combine.splits = 2;
    combine.batch = kBatch;
    combine.heads = kHeads;
    combine.seqlen = kRows;
    combine.head_dim = kHeadDim;
    combine.out_partial = {parts, kRows * kHeads * kHeadDim, kHeads * kHeadDim, kHeadDim};
    combine.out_split_stride = kQuerySize;
    combine.lse_partial = lse_partial;
    combine.lse_split_stride = kBatch * kHeads * kRows;
    combine.lse_batch_stride = kHeads * kRows;
    combine.lse_head_stride = kRows;
    combine.out_dtype = DType::kFloat32;
    combine.out = params.out;
    combine.lse = lse;
  }
  void use(Device device) { combine.device = device; }
  void run() { flashattn::run_flash_combine(combine); }
};

}  // namespace api
