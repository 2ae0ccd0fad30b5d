// The CUDA kernels over a cache through the C++ API: append, what the bits depend on, graphs, and
// memory safety.
#include <climits>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "splitkv_problem.h"

namespace {

using flashattn::DType;
using gpu::CacheCase;
using gpu::CacheProblem;

CacheCase append_case(int rotary_dim, bool interleaved) {
  CacheCase c;
  c.len_q = {3, 3};
  c.cached = {60, 13};
  c.capacity = 80;
  c.window = {-1, 0};
  c.append = 3;
  c.rotary_dim = rotary_dim;
  c.interleaved = interleaved;
  return c;
}

TEST(SplitkvAppend, BothRotaryLayouts) {
  SKIP_WITHOUT_GPU();
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (int rotary_dim : {0, 16, 32, 48, 64}) {
      for (bool interleaved : {false, true}) {
        for (int right : {0, -1}) {  // without a window all queries have one position
          SCOPED_TRACE("rotary dim " + std::to_string(rotary_dim));
          CacheCase c = append_case(rotary_dim, interleaved);
          c.dtype = dtype;
          c.window.right = right;
          c.page_size = rotary_dim % 32 == 0 ? 0 : 16;
          c.num_splits = 1 + rotary_dim / 16 % 2;
          gpu::expect_right(c);
        }
      }
    }
  }
}

TEST(SplitkvAppend, EveryKindOfCache) {
  SKIP_WITHOUT_GPU();
  for (int page_size : {0, 1, 3, 16, 48}) {
    for (int append : {1, 5, 20}) {
      SCOPED_TRACE("page size " + std::to_string(page_size) + ", " + std::to_string(append) +
                   " tokens");
      CacheCase c = append_case(16, false);
      c.head_dim = 40;
      c.page_size = page_size;
      c.append = append;
      c.order_k = gpu::Order::kHeadsFirst;
      gpu::expect_right(c);
      c.leftpad = {5, 33};  // the second one reaches into the new tokens, or past them
      gpu::expect_right(c);
      c.leftpad = {};
      if (page_size == 0) { c.batch_idx = {2, 0}; }
      c.packed_q = true;
      c.len_q = {1, 30};
      gpu::expect_right(c);
    }
  }
}

// What no longer fits is not written anywhere: the rest of the cache keeps its bits.
TEST(SplitkvAppend, FullCaches) {
  SKIP_WITHOUT_GPU();
  for (int page_size : {0, 16}) {
    for (std::vector<int> const& cached :
         {std::vector<int>{80, 78}, {79, 77}, {81, -1}, {INT_MAX, INT_MIN}, {0, 80}}) {
      CacheCase c = append_case(32, true);
      c.page_size = page_size;
      c.cached = cached;
      c.spare_columns = 2;
      gpu::expect_right(c);
    }
  }
}

TEST(SplitkvAppend, PlacesThatDoNotExist) {
  SKIP_WITHOUT_GPU();
  CacheCase pages = append_case(16, false);
  pages.page_size = 16;
  pages.cached = {30, 13};  // the new tokens lie on two pages each
  pages.holes = {{0, 1}, {1, 1}};
  gpu::expect_right(pages);
  CacheCase rows = append_case(16, false);
  rows.batch_idx = {-1, 4};
  gpu::expect_right(rows);
  rows.batch_idx = {INT_MAX, 3};
  gpu::expect_right(rows);
}

TEST(SplitkvAppend, PositionsStayInsideTheTables) {
  SKIP_WITHOUT_GPU();
  CacheCase c = append_case(32, false);
  c.max_position = 15;
  gpu::expect_right(c);
}

TEST(SplitkvAppend, NewTokensAreWrittenWithoutQueries) {
  SKIP_WITHOUT_GPU();
  for (int rotary_dim : {0, 16}) {
    CacheCase c = append_case(rotary_dim, false);
    c.page_size = rotary_dim;
    c.len_q = {0, 0};
    gpu::expect_right(c);
  }
}

TEST(SplitkvAppend, QueriesAreRotatedWithoutNewTokens) {
  SKIP_WITHOUT_GPU();
  CacheCase c = append_case(64, true);
  c.append = 0;
  gpu::expect_right(c);
  c.packed_q = true;
  c.len_q = {0, 4};
  c.slack = 3;
  gpu::expect_right(c);
}

// A row alone, in a batch, in a larger cache, in pages of any size: the same bits.
TEST(SplitkvCalls, BitsDependOnTheSequenceAlone) {
  SKIP_WITHOUT_GPU();
  for (int split_size : {0, 64, 128}) {
    for (int len_q : {1, 40}) {
      CacheCase alone;
      alone.len_q = {len_q};
      alone.cached = {200};
      alone.content = {7};
      alone.capacity = 200;
      alone.window = {150, 0};
      alone.num_splits = split_size == 0 ? 1 : 0;
      alone.split_size = split_size;
      CacheProblem reference(alone);
      reference.run();
      std::vector<uint32_t> const expected = reference.bits_of(0);
      for (int page_size : {0, 1, 16, 48, 256}) {
        for (int capacity : {256, 1000}) {
          SCOPED_TRACE("split size " + std::to_string(split_size) + ", page size " +
                       std::to_string(page_size) + ", capacity " + std::to_string(capacity));
          CacheCase c = alone;
          c.page_size = page_size;
          c.capacity = capacity;
          c.packed_q = true;
          c.max_seqlen_q = capacity;  // with a large bound heads are not packed
          c.len_q = {3, len_q, 50};
          c.cached = {capacity, 200, 1};
          c.content = {1, 7, 2};
          CacheProblem problem(c);
          problem.run();
          EXPECT_TRUE(problem.bits_of(1) == expected);
        }
      }
    }
  }
}

TEST(SplitkvCalls, TwentyRunsAreBitEqual) {
  SKIP_WITHOUT_GPU();
  for (int num_splits : {1, 3}) {
    CacheCase c = append_case(16, false);
    c.page_size = 16;
    c.num_splits = num_splits;
    CacheProblem problem(c);
    problem.run();
    std::vector<uint16_t> const out = problem.out_bits();
    std::vector<float> const lse = problem.lse();
    for (int i = 0; i < 20; ++i) {
      problem.run();
      ASSERT_TRUE(problem.out_bits() == out) << "run " << i;
      ASSERT_EQ(std::memcmp(problem.lse().data(), lse.data(), lse.size() * sizeof(float)), 0);
    }
  }
}

// Captured with other lengths: nothing about them may be baked in.
TEST(SplitkvCalls, AGraphFollowsTheLengths) {
  SKIP_WITHOUT_GPU();
  cudaStream_t stream;
  gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (int num_splits : {0, 1, 3}) {
    CacheCase c;
    c.packed_q = true;
    c.len_q = {1, 40};
    c.max_seqlen_q = 41;
    c.cached = {130, 75};
    c.window = {-1, 0};
    c.page_size = 16;
    c.num_splits = num_splits;
    gpu::expect_right(c);  // loads the kernels, which a capture does not allow
    CacheProblem problem(c);
    problem.overwrite_cached({1, 0});
    problem.overwrite_cu_seqlens({0, 30, 31});
    cudaGraph_t graph;
    cudaGraphExec_t graph_exec;
    gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal),
               "cudaStreamBeginCapture");
    problem.run(stream);
    gpu::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    gpu::check(cudaGraphInstantiate(&graph_exec, graph, 0), "cudaGraphInstantiate");
    problem.overwrite_cached(c.cached);
    problem.overwrite_cu_seqlens({0, 1, 41});
    gpu::check(cudaGraphLaunch(graph_exec, stream), "cudaGraphLaunch");
    gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    problem.check_result();
    cudaGraphExecDestroy(graph_exec);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

TEST(SplitkvCalls, HostileLengthsStayInsideTheTensors) {
  SKIP_WITHOUT_GPU();
  for (std::vector<int> const& cu : {std::vector<int>{0, -1, 500},
                                     {41, 20, 0},
                                     {INT_MIN, INT_MAX, INT_MIN},
                                     {INT_MAX, INT_MAX, 0},
                                     {-70, 30, 1 << 30},
                                     {0, INT_MAX, INT_MIN}}) {
    for (int num_splits : {1, 3}) {
      CacheCase c;
      c.packed_q = true;
      c.len_q = {1, 40};
      c.page_size = num_splits == 1 ? 0 : 16;
      c.num_splits = num_splits;
      c.rotary_dim = 16;
      CacheProblem problem(c);
      problem.overwrite_cu_seqlens(cu);
      problem.overwrite_cached(num_splits == 1 ? std::vector<int>{INT_MAX, INT_MIN}
                                               : std::vector<int>{-5, 1000});
      problem.run();
      gpu::check(cudaDeviceSynchronize(), "flash_fwd_splitkv");
      problem.check_canaries();
    }
  }
}

TEST(SplitkvCalls, C39AMissingWorkspaceIsRefused) {
  SKIP_WITHOUT_GPU();
  for (bool rotary : {false, true}) {
    CacheCase c = append_case(rotary ? 16 : 0, false);
    c.append = 0;
    c.num_splits = rotary ? 1 : 4;
    CacheProblem problem(c);
    size_t const bytes = flashattn::splitkv_workspace_size(problem.params());
    ASSERT_GT(bytes, size_t{0});
    void* const workspace = problem.params().workspace;
    problem.params().workspace = nullptr;
    try {
      problem.run();
      ADD_FAILURE() << "no exception";
    } catch (flashattn::InvalidArgument const& error) {
      std::string const message = error.what();
      EXPECT_EQ(message.rfind("workspace:", 0), size_t{0}) << message;
      EXPECT_NE(message.find(std::to_string(bytes)), std::string::npos) << message;
    }
    problem.params().workspace = workspace;
    problem.run();  // the device is still usable, and nothing was written before
    gpu::check(cudaDeviceSynchronize(), "flash_fwd_splitkv");
    problem.check_result();
  }
}

TEST(SplitkvCalls, AWorkspaceIsAskedForWhenItsSizeIsKnown) {
  SKIP_WITHOUT_GPU();
  for (int splits : {4, 1}) {
    CacheCase c;
    c.num_splits = splits;
    CacheProblem problem(c);
    void* const workspace = std::exchange(problem.params().workspace, nullptr);
    std::vector<size_t> asked;
    flashattn::run_flash_splitkv_fwd(problem.params(), [&](size_t bytes) {
      asked.push_back(bytes);
      return workspace;
    });
    gpu::check(cudaDeviceSynchronize(), "flash_fwd_splitkv");
    problem.check_result();
    size_t const bytes = flashattn::splitkv_workspace_size(problem.params());
    EXPECT_EQ(asked, bytes > 0 ? std::vector<size_t>{bytes} : std::vector<size_t>{});
    EXPECT_EQ(bytes > 0, splits > 1);
  }
}

TEST(SplitkvCalls, AWorkspaceThatIsThereIsTaken) {
  SKIP_WITHOUT_GPU();
  CacheCase c;
  c.num_splits = 4;
  CacheProblem problem(c);
  ASSERT_NE(problem.params().workspace, nullptr);
  flashattn::run_flash_splitkv_fwd(problem.params(), [](size_t) -> void* {
    ADD_FAILURE() << "asked for another workspace";
    return nullptr;
  });
  gpu::check(cudaDeviceSynchronize(), "flash_fwd_splitkv");
  problem.check_result();
}

TEST(SplitkvCalls, AWorkspaceThatCannotBeUsedIsRefused) {
  SKIP_WITHOUT_GPU();
  CacheCase c;
  c.num_splits = 4;
  CacheProblem problem(c);
  char* const workspace = static_cast<char*>(std::exchange(problem.params().workspace, nullptr));
  auto const run = [&](flashattn::AllocateWorkspace const& allocate) {
    flashattn::run_flash_splitkv_fwd(problem.params(), allocate);
  };
  EXPECT_THROW(run(nullptr), flashattn::InvalidArgument);
  EXPECT_THROW(run([](size_t) { return nullptr; }), flashattn::InvalidArgument);
  EXPECT_THROW(run([&](size_t) { return workspace + 64; }), flashattn::InvalidArgument);
}

TEST(SplitkvCalls, TheWorkspaceFollowsFromSizesAlone) {
  SKIP_WITHOUT_GPU();
  CacheCase c;
  c.num_splits = 5;
  size_t const bytes = flashattn::splitkv_workspace_size(CacheProblem(c).params());
  EXPECT_GE(bytes, size_t{5} * 2 * 4 * (64 + 1) * sizeof(float));
  c.cached = {0, 1};
  EXPECT_EQ(flashattn::splitkv_workspace_size(CacheProblem(c).params()), bytes);
  c.num_splits = 1;
  EXPECT_EQ(flashattn::splitkv_workspace_size(CacheProblem(c).params()), size_t{0});
}

}  // namespace
