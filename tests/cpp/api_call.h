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

}  // namespace api
