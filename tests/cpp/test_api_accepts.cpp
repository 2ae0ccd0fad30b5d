// What the C++ API accepts at the edges of its rules, and what it says about the build.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "api_call.h"

namespace {

using api::Call;
using api::kHeadDim;
using api::kUntouched;
using flashattn::Device;
using flashattn::DType;

float const kInfinity = std::numeric_limits<float>::infinity();

// What is allowed, next to what is refused above.
TEST(ApiAccepts, EdgesOfTheRules) {
  std::vector<std::function<void(Call&)>> const edits = {
      [](Call&) {},
      [](Call& c) { c.pack(); },
      [](Call& c) { c.params.lse = nullptr; },
      [](Call& c) { c.params.window = {INT_MAX, INT_MAX}; },
      [](Call& c) { c.params.window = {0, 0}; },
      [](Call& c) { c.params.score.scale = -0.f; },
      [](Call& c) { c.params.score.softcap = 1e-3f; },
      [](Call& c) { c.params.score.sinks = c.sinks; },
      [](Call& c) { c.params.shape.heads_kv = 1; },
      [](Call& c) {
        c.params.k.batch_stride = c.params.k.row_stride = c.params.v.head_stride = 0;
      },  // expanded
      [](Call& c) { c.params.shape.head_dim = 8; },
      [](Call& c) {
        c.pack();
        c.params.shape.seqlen_q = c.params.shape.seqlen_k = 0;
      },  // bounds play no part
  };
  for (size_t i = 0; i < edits.size(); ++i) {
    SCOPED_TRACE("edit " + std::to_string(i));
    Call call;
    edits[i](call);
    EXPECT_NO_THROW(flashattn::run_flash_fwd(call.params));
    EXPECT_NEAR(call.out[0], 0.5f, 1e-6);  // all values are 0.5, and so is any average of them
  }
}

TEST(ApiAccepts, StridesOfDimensionsThatAreNotWalked) {
  Call call;
  call.params.shape = {
      .batch = 1, .heads = 1, .heads_kv = 1, .head_dim = kHeadDim, .seqlen_q = 1, .seqlen_k = 1};
  for (auto* t : {&call.params.q, &call.params.k, &call.params.v}) {
    t->batch_stride = t->row_stride = t->head_stride = 1;
  }
  call.params.out.batch_stride = call.params.out.row_stride = call.params.out.head_stride = 1;
  EXPECT_NO_THROW(flashattn::run_flash_fwd(call.params));
  EXPECT_NEAR(call.out[kHeadDim - 1], 0.5f, 1e-6);
  EXPECT_EQ(call.out[kHeadDim], kUntouched);
}

TEST(ApiAccepts, NothingToDo) {
  std::vector<std::function<void(Call&)>> const edits = {
      [](Call& c) { c.params.shape.batch = 0; },
      [](Call& c) { c.params.shape.seqlen_q = 0; },
      [](Call& c) { c.params.shape.heads = c.params.shape.heads_kv = 0; },
      [](Call& c) {
        c.pack();
        c.params.lengths.total_q = 0;
      },
  };
  for (Device device : {Device::kCpu, Device::kCuda}) {
    for (auto const& edit : edits) {
      Call call;
      call.params.device = device;
      call.params.dtype = DType::kBFloat16;
      edit(call);
      call.params.q.data = call.params.k.data = call.params.v.data = nullptr;
      call.params.out.data = nullptr;
      EXPECT_NO_THROW(flashattn::run_flash_fwd(call.params));
      EXPECT_TRUE(call.untouched());
    }
  }
}

TEST(ApiAccepts, NoKeys) {
  Call call;
  call.params.shape.seqlen_k = 0;
  call.params.k.data = call.params.v.data = nullptr;
  EXPECT_NO_THROW(flashattn::run_flash_fwd(call.params));
  for (int i = 0; i < Call::kQuerySize; ++i) { ASSERT_EQ(call.out[i], 0.f) << i; }
  for (float lse : call.lse) { EXPECT_EQ(lse, -kInfinity); }
}

TEST(ApiBuild, CudaWithoutKernelsIsUnsupportedAndSaysWhatToDo) {
  if (!flashattn::build_info().cuda_archs.empty()) {
    GTEST_SKIP() << "this build has CUDA kernels";
  }
  Call call;
  call.params.device = Device::kCuda;
  call.params.dtype = DType::kBFloat16;
  try {
    flashattn::run_flash_fwd(call.params);
    FAIL() << "no exception";
  } catch (flashattn::Unsupported const& error) {
    std::string const message = error.what();
    EXPECT_NE(message.find("without CUDA"), std::string::npos) << message;
    EXPECT_NE(message.find("CUDA toolkit"), std::string::npos) << message;
  }
  EXPECT_TRUE(call.untouched());
}

TEST(ApiBuild, InfoDescribesTheBuild) {
  flashattn::BuildInfo const info = flashattn::build_info();
  EXPECT_FALSE(info.cpu_simd.empty());
  EXPECT_TRUE(std::is_sorted(info.cuda_archs.begin(), info.cuda_archs.end()));
  EXPECT_TRUE(std::is_sorted(info.head_dims.begin(), info.head_dims.end()));
  EXPECT_EQ(info.cuda_archs.empty(), info.ptx_arch == 0);
  if (!info.cuda_archs.empty()) {
    EXPECT_FALSE(info.head_dims.empty());
    EXPECT_GE(info.cuda_archs.front(), 80);
  }
}

}  // namespace
