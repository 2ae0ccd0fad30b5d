// What the C++ API refuses, with which words, and that a refused call writes nothing.
#include <gtest/gtest.h>

#include <climits>
#include <limits>
#include <string>
#include <vector>

#include "api_refusal.h"

namespace {

using api::Call;
using flashattn::Device;
using flashattn::DType;

float const kNan = std::numeric_limits<float>::quiet_NaN();
float const kInfinity = std::numeric_limits<float>::infinity();

using Refusal = api::Refusal<Call>;

void expect_refused(std::vector<Refusal> const& refusals) { api::expect_refused(refusals); }

constexpr int kTooLong = (1 << 30) + 1;

TEST(ApiErrors, Shape) {
  expect_refused({
      {"batch", {"-1", "0"}, [](Call& c) { c.params.shape.batch = -1; }},
      {"seqlen_q", {"-1", "0"}, [](Call& c) { c.params.shape.seqlen_q = -1; }},
      {"seqlen_q",
       {"1073741825", "1073741824"},
       [](Call& c) { c.params.shape.seqlen_q = kTooLong; }},
      {"seqlen_k", {"-5", "0"}, [](Call& c) { c.params.shape.seqlen_k = -5; }},
      {"seqlen_k",
       {"1073741825", "1073741824"},
       [](Call& c) { c.params.shape.seqlen_k = kTooLong; }},
      {"heads", {"-1", "0"}, [](Call& c) { c.params.shape.heads = -1; }},
      {"heads",
       {"65536", "65535"},
       [](Call& c) { c.params.shape.heads = c.params.shape.heads_kv = 65536; }},
      {"heads_kv", {"got 0", "1"}, [](Call& c) { c.params.shape.heads_kv = 0; }},
      {"heads_kv", {"-2"}, [](Call& c) { c.params.shape.heads_kv = -2; }},
  });
}

TEST(ApiErrors, HeadsMustBeAMultipleOfHeadsKv) {
  for (auto [heads, heads_kv] : {std::pair{3, 2}, {33, 2}, {2, 4}, {4, 3}}) {
    expect_refused({{"heads_kv",
                     {"got " + std::to_string(heads_kv), "heads = " + std::to_string(heads)},
                     [heads = heads, heads_kv = heads_kv](Call& c) {
                       c.params.shape.heads = heads;
                       c.params.shape.heads_kv = heads_kv;
                     }}});
  }
}

TEST(ApiErrors, HeadDim) {
  for (int head_dim : {-8, 0, 4, 7, 12, 36, 59, 100, 111, 255, 257, 264, 512}) {
    bool const in_range = head_dim >= 8 && head_dim <= 256;
    expect_refused({{"head_dim",
                     {"got " + std::to_string(head_dim), in_range ? "multiple of 8" : "256"},
                     [head_dim](Call& c) { c.params.shape.head_dim = head_dim; }}});
  }
}

TEST(ApiErrors, Totals) {
  expect_refused({
      {"total_q",
       {"6", "0"},
       [](Call& c) { c.params.lengths.total_q = 6; }},  // without cu_seqlens_q
      {"total_k", {"6", "0"}, [](Call& c) { c.params.lengths.total_k = 6; }},
      {"total_q",
       {"-1"},
       [](Call& c) {
         c.pack();
         c.params.lengths.total_q = -1;
       }},
      {"total_k",
       {"-1"},
       [](Call& c) {
         c.pack();
         c.params.lengths.total_k = -1;
       }},
      {"total_q",
       {"1073741825"},
       [](Call& c) {
         c.pack();
         c.params.lengths.total_q = kTooLong;
       }},
      {"total_k",
       {"1073741825"},
       [](Call& c) {
         c.pack();
         c.params.lengths.total_k = kTooLong;
       }},
  });
}

TEST(ApiErrors, Window) {
  for (int side : {-2, -3, INT_MIN}) {
    expect_refused({
        {"window.left",
         {"got " + std::to_string(side), "-1"},
         [side](Call& c) { c.params.window.left = side; }},
        {"window.right",
         {"got " + std::to_string(side), "-1"},
         [side](Call& c) { c.params.window.right = side; }},
    });
  }
}

TEST(ApiErrors, Score) {
  expect_refused({
      {"scale", {"inf", "finite"}, [](Call& c) { c.params.score.scale = kInfinity; }},
      {"scale", {"nan", "finite"}, [](Call& c) { c.params.score.scale = kNan; }},
      {"scale", {"-inf", "finite"}, [](Call& c) { c.params.score.scale = -kInfinity; }},
      {"softcap", {"normal"}, [](Call& c) { c.params.score.softcap = 1e-39f; }},
      {"softcap", {"-1", "0"}, [](Call& c) { c.params.score.softcap = -1.f; }},
      {"softcap", {"inf", "finite"}, [](Call& c) { c.params.score.softcap = kInfinity; }},
      {"softcap", {"nan", "finite"}, [](Call& c) { c.params.score.softcap = kNan; }},
      {"alibi_batch_stride", {"-4", "0"}, [](Call& c) { c.params.score.alibi_batch_stride = -4; }},
  });
}

TEST(ApiErrors, TypesAndDevices) {
  expect_refused({
      {"sinks_dtype",
       {"float32"},
       [](Call& c) {
         c.params.score.sinks = c.sinks;
         c.params.score.sinks_dtype = DType::kFloat16;
       }},
      {"sinks_dtype",
       {"got 3", "kBFloat16"},
       [](Call& c) {
         c.params.score.sinks = c.sinks;
         c.params.score.sinks_dtype = static_cast<DType>(3);
       }},
      {"dtype", {"got -1", "kFloat32"}, [](Call& c) { c.params.dtype = static_cast<DType>(-1); }},
      {"device", {"got 2", "kCuda"}, [](Call& c) { c.params.device = static_cast<Device>(2); }},
  });
  api::expect_refused<Call>(
      {"dtype", {"float32", "bfloat16"}, [](Call& c) { c.params.dtype = DType::kFloat32; }},
      Device::kCuda);
}

TEST(ApiErrors, MoreRowsThanSizesCanCount) {
  expect_refused({{"query rows of all sequences", {"got 1152921504606846976"}, [](Call& c) {
                     c.params.shape.batch = c.params.shape.seqlen_q = 1 << 30;
                   }}});
}

}  // namespace
