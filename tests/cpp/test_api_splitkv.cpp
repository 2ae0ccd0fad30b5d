// What the C++ API of caches and of combine refuses, with which words, and what it accepts.
#include <gtest/gtest.h>

#include <climits>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "api_refusal.h"

namespace {

using api::CombineCall;
using api::kUntouched;
using api::SplitkvCall;
using flashattn::Device;
using flashattn::DType;

constexpr int kTooLong = (1 << 30) + 1;

void expect_refused(std::vector<api::Refusal<SplitkvCall>> const& refusals) {
  api::expect_refused(refusals);
}

// The rules of flash_fwd hold here too.
TEST(ApiSplitkvErrors, RulesOfFlashFwd) {
  expect_refused({
      {"batch", {"-1", "0"}, [](SplitkvCall& c) { c.splitkv.fwd.shape.batch = -1; }},
      {"heads_kv",
       {"got 3", "heads = 4"},
       [](SplitkvCall& c) { c.splitkv.fwd.shape.heads_kv = 3; }},
      {"head_dim",
       {"got 12", "multiple of 8"},
       [](SplitkvCall& c) { c.splitkv.fwd.shape.head_dim = 12; }},
      {"seqlen_k", {"-1", "0"}, [](SplitkvCall& c) { c.splitkv.fwd.shape.seqlen_k = -1; }},
      {"total_q", {"6", "0"}, [](SplitkvCall& c) { c.splitkv.fwd.lengths.total_q = 6; }},
      {"window.left", {"got -2", "-1"}, [](SplitkvCall& c) { c.splitkv.fwd.window.left = -2; }},
      {"softcap", {"-1", "0"}, [](SplitkvCall& c) { c.splitkv.fwd.score.softcap = -1.f; }},
      {"sinks_dtype",
       {"float32"},
       [](SplitkvCall& c) {
         c.splitkv.fwd.score.sinks = c.sinks;
         c.splitkv.fwd.score.sinks_dtype = DType::kFloat16;
       }},
  });
  api::expect_refused<SplitkvCall>({"dtype",
                                    {"float32", "bfloat16"},
                                    [](SplitkvCall& c) { c.splitkv.fwd.dtype = DType::kFloat32; }},
                                   Device::kCuda);
}

TEST(ApiSplitkvErrors, ContiguousCache) {
  expect_refused({
      {"cu_seqlens_k, seqused_k",
       {"null"},
       [](SplitkvCall& c) { c.splitkv.fwd.lengths.cu_seqlens_k = c.cu_seqlens; }},
      {"cu_seqlens_k, seqused_k",
       {"null"},
       [](SplitkvCall& c) { c.splitkv.fwd.lengths.seqused_k = c.seqlens; }},
      {"cache.seqlen", {"got 4", "0 ... 3"}, [](SplitkvCall& c) { c.splitkv.cache.seqlen = 4; }},
      {"cache.seqlen", {"got -1", "0 ... 3"}, [](SplitkvCall& c) { c.splitkv.cache.seqlen = -1; }},
      {"cache.rows", {"got 1", "2 ..."}, [](SplitkvCall& c) { c.splitkv.cache.rows = 1; }},
      {"cache.rows",
       {"got -1", "0 ..."},
       [](SplitkvCall& c) {
         c.splitkv.cache.batch_idx = c.seqlens;
         c.splitkv.cache.rows = -1;
       }},
  });
}

TEST(ApiSplitkvErrors, Pages) {
  auto const with_pages = [](std::function<void(SplitkvCall&)> const& damage) {
    return [damage](SplitkvCall& c) {
      c.use_pages();
      damage(c);
    };
  };
  expect_refused({
      {"cache.batch_idx", {"null", "block table"}, with_pages([](SplitkvCall& c) {
         c.splitkv.cache.batch_idx = c.seqlens;
       })},
      {"cache.page_size", {"got 0", ">= 1"}, with_pages([](SplitkvCall& c) {
         c.splitkv.cache.page_size = 0;
       })},
      {"cache.page_size", {"got -3"}, with_pages([](SplitkvCall& c) {
         c.splitkv.cache.page_size = -3;
       })},
      {"cache.page_size", {"1073741825", "1073741824"}, with_pages([](SplitkvCall& c) {
         c.splitkv.cache.page_size = kTooLong;
       })},
      {"cache.block_table", {"null"}, with_pages([](SplitkvCall& c) {
         c.splitkv.cache.block_table = nullptr;
       })},
      {"cache.num_pages", {"got -1", "0 ..."}, with_pages([](SplitkvCall& c) {
         c.splitkv.cache.num_pages = -1;
       })},
      {"cache.table_columns", {"got -1", "0 ..."}, with_pages([](SplitkvCall& c) {
         c.splitkv.cache.table_columns = -1;
       })},
      {"seqlen_k", {"got 7", "0 ... 6"}, with_pages([](SplitkvCall& c) {
         c.splitkv.fwd.shape.seqlen_k = 7;
       })},
      {"k.batch_stride", {"multiple of 16"}, with_pages([](SplitkvCall& c) {
         c.splitkv.fwd.k.batch_stride += 1;
       })},
  });
}

TEST(ApiSplitkvErrors, Append) {
  expect_refused({
      {"append.seqlen", {"got -1", "0 ..."}, [](SplitkvCall& c) { c.splitkv.append.seqlen = -1; }},
      {"append.seqlen", {"1073741825"}, [](SplitkvCall& c) { c.splitkv.append.seqlen = kTooLong; }},
      {"cache.seqlen + append.seqlen",
       {"got 4", "0 ... 3"},
       [](SplitkvCall& c) {
         c.splitkv.cache.seqlens = nullptr;
         c.splitkv.cache.seqlen = 3;
       }},
  });
}

TEST(ApiSplitkvErrors, Rotary) {
  for (int rotary_dim : {-16, 1, 8, 24, 32, 256}) {
    expect_refused(
        {{"append.rotary_dim", {"got " + std::to_string(rotary_dim)}, [rotary_dim](SplitkvCall& c) {
            c.rotate();
            if (rotary_dim == 24) { c.splitkv.fwd.shape.head_dim = 32; }
            c.splitkv.append.rotary_dim = rotary_dim;
          }}});
  }
  // Two tokens are cached, three queries and one new token follow.
  for (int right : {-1, 0}) {
    expect_refused({{"cache.seqlen + the larger of new tokens and queries",
                     {right < 0 ? "got 3" : "got 5", "0 ... 2"},
                     [right](SplitkvCall& c) {
                       c.rotate();
                       c.splitkv.cache.seqlens = nullptr;
                       c.splitkv.cache.seqlen = 2;
                       c.splitkv.fwd.window.right = right;
                       c.splitkv.append.max_position = 2;
                     }}});
  }
  expect_refused({
      {"append.max_position",
       {"got 0", "1 ..."},
       [](SplitkvCall& c) {
         c.rotate();
         c.splitkv.append.max_position = 0;
       }},
      {"append.rotary_cos, append.rotary_sin",
       {"null"},
       [](SplitkvCall& c) {
         c.rotate();
         c.splitkv.append.rotary_cos = nullptr;
       }},
      {"append.rotary_cos, append.rotary_sin",
       {"null"},
       [](SplitkvCall& c) {
         c.rotate();
         c.splitkv.append.rotary_sin = nullptr;
       }},
  });
}

TEST(ApiSplitkvErrors, Splits) {
  expect_refused({
      {"split.num_splits",
       {"got -1", "0 ... 256"},
       [](SplitkvCall& c) { c.splitkv.split.num_splits = -1; }},
      {"split.num_splits",
       {"got 257", "0 ... 256"},
       [](SplitkvCall& c) { c.splitkv.split.num_splits = 257; }},
      {"split.split_size",
       {"got -64", "0 ..."},
       [](SplitkvCall& c) { c.splitkv.split.split_size = -64; }},
      {"split.split_size",
       {"got 32", "multiple of 64"},
       [](SplitkvCall& c) { c.splitkv.split.split_size = 32; }},
      {"splits of split_size that cover the capacity",
       {"got 65536", "65535"},
       [](SplitkvCall& c) {
         c.splitkv.fwd.shape.seqlen_k = 65535 * 64 + 1;
         c.splitkv.split.split_size = 64;
       }},
      {"split.num_splits",
       {"got 2", "split_size"},
       [](SplitkvCall& c) { c.splitkv.split = {.num_splits = 2, .split_size = 64}; }},
  });
}

TEST(ApiSplitkvErrors, TheWorkspaceQueryRefusesAlike) {
  SplitkvCall call;
  call.splitkv.split.num_splits = 257;
  EXPECT_THROW(flashattn::splitkv_workspace_size(call.splitkv), flashattn::InvalidArgument);
}

TEST(ApiSplitkvAccepts, EdgesOfTheRules) {
  std::vector<std::function<void(SplitkvCall&)>> const edits = {
      [](SplitkvCall&) {},
      [](SplitkvCall& c) { c.splitkv.append = {}; },
      [](SplitkvCall& c) { c.use_pages(); },
      [](SplitkvCall& c) { c.splitkv.split.num_splits = 256; },
      [](SplitkvCall& c) { c.splitkv.split.split_size = 1 << 30; },
      [](SplitkvCall& c) {
        c.splitkv.cache.seqlens = nullptr;
        c.splitkv.cache.seqlen = 2;
      },
      [](SplitkvCall& c) { c.splitkv.fwd.window = {INT_MAX, INT_MAX}; },
      [](SplitkvCall& c) { c.splitkv.fwd.lse = nullptr; },
      [](SplitkvCall& c) { c.rotate(); },
      [](SplitkvCall& c) {
        c.splitkv.append.k.row_stride = 1;  // of one row: not walked
        c.splitkv.append.v.row_stride = 1;
      },
  };
  for (size_t i = 0; i < edits.size(); ++i) {
    SCOPED_TRACE("edit " + std::to_string(i));
    SplitkvCall call;
    edits[i](call);
    EXPECT_NO_THROW(call.run());
    EXPECT_NEAR(call.out[0], 0.5f, 1e-6);  // all values are 0.5, and so is any average of them
    EXPECT_EQ(flashattn::splitkv_workspace_size(call.splitkv), size_t{0});  // on the CPU
  }
}

TEST(ApiSplitkvAccepts, NoWorkspaceIsAskedForOnTheCpu) {
  SplitkvCall call;
  call.splitkv.split.num_splits = 2;
  flashattn::run_flash_splitkv_fwd(call.splitkv, [](size_t bytes) -> void* {
    ADD_FAILURE() << "asked for " << bytes << " bytes";
    return nullptr;
  });
  EXPECT_NEAR(call.out[0], 0.5f, 1e-6);
}

TEST(ApiSplitkvAccepts, NothingToDo) {
  for (Device device : {Device::kCpu, Device::kCuda}) {
    SplitkvCall call;
    call.use(device);
    call.splitkv.fwd.shape.batch = 0;
    EXPECT_NO_THROW(call.run());
    EXPECT_EQ(flashattn::splitkv_workspace_size(call.splitkv), size_t{0});
    EXPECT_TRUE(call.untouched());
  }
}

TEST(ApiSplitkvAccepts, NewTokensWithoutQueries) {
  SplitkvCall call;
  call.splitkv.fwd.shape.seqlen_q = 0;
  call.splitkv.fwd.q.data = call.splitkv.fwd.out.data = nullptr;
  call.k_new[0] = 7.f;
  EXPECT_NO_THROW(call.run());
  EXPECT_EQ(call.k[2 * api::kHeadsKv * api::kHeadDim], 7.f);  // token 2 of the first sequence
  EXPECT_TRUE(call.untouched());
}

TEST(ApiSplitkvAccepts, CudaWithoutKernelsIsUnsupported) {
  if (!flashattn::build_info().cuda_archs.empty()) {
    GTEST_SKIP() << "this build has CUDA kernels";
  }
  SplitkvCall call;
  call.use(Device::kCuda);
  EXPECT_THROW(call.run(), flashattn::Unsupported);
  EXPECT_THROW(flashattn::splitkv_workspace_size(call.splitkv), flashattn::Unsupported);
  CombineCall combine;
  combine.use(Device::kCuda);
  EXPECT_THROW(combine.run(), flashattn::Unsupported);
  EXPECT_TRUE(call.untouched() && combine.untouched());
}

TEST(ApiCombine, Refuses) {
  api::expect_refused<CombineCall>({
      {"splits", {"got -1", "0 ..."}, [](CombineCall& c) { c.combine.splits = -1; }},
      {"batch", {"got -1", "0 ..."}, [](CombineCall& c) { c.combine.batch = -1; }},
      {"heads", {"got -1", "0 ..."}, [](CombineCall& c) { c.combine.heads = -1; }},
      {"heads", {"got 65536", "65535"}, [](CombineCall& c) { c.combine.heads = 65536; }},
      {"seqlen", {"got -1", "0 ..."}, [](CombineCall& c) { c.combine.seqlen = -1; }},
      {"seqlen", {"1073741825", "1073741824"}, [](CombineCall& c) { c.combine.seqlen = kTooLong; }},
      {"head_dim", {"got 0", "1 ..."}, [](CombineCall& c) { c.combine.head_dim = 0; }},
      {"query rows of all sequences",
       {"got 1152921504606846976"},
       [](CombineCall& c) { c.combine.batch = c.combine.seqlen = 1 << 30; }},
      {"device", {"got 7"}, [](CombineCall& c) { c.combine.device = static_cast<Device>(7); }},
      {"partial_dtype",
       {"got 3"},
       [](CombineCall& c) { c.combine.partial_dtype = static_cast<DType>(3); }},
      {"out_dtype",
       {"got -1"},
       [](CombineCall& c) { c.combine.out_dtype = static_cast<DType>(-1); }},
      {"out_partial, lse_partial",
       {"null"},
       [](CombineCall& c) { c.combine.lse_partial = nullptr; }},
  });
}

TEST(ApiCombine, Accepts) {
  CombineCall call;
  EXPECT_NO_THROW(call.run());
  EXPECT_NEAR(call.out[0], 0.5f, 1e-6);
  EXPECT_NEAR(call.lse[0], 0.693147f, 1e-6);  // two parts of weight e^0

  CombineCall nothing;
  nothing.combine.seqlen = 0;
  nothing.combine.out.data = nullptr;
  EXPECT_NO_THROW(nothing.run());
  EXPECT_TRUE(nothing.untouched());

  CombineCall empty;
  empty.combine.splits = 0;
  empty.combine.out_partial.data = empty.combine.lse_partial = nullptr;
  EXPECT_NO_THROW(empty.run());
  EXPECT_EQ(empty.out[0], 0.f);
  EXPECT_EQ(empty.lse[0], -std::numeric_limits<float>::infinity());
}

}  // namespace
