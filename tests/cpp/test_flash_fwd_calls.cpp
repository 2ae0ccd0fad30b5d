// The CUDA kernels through the C++ API: memory safety, repeatability, streams, and which GPUs are
// served.
#include <climits>
#include <cstring>

#include "gpu_problem.h"

namespace {

using gpu::Case;
using gpu::Problem;

TEST(FlashFwdCalls, HostileLengthsStayInsideTheTensors) {
  SKIP_WITHOUT_GPU();
  for (std::vector<int> const& cu : {std::vector<int>{0, -1, 500},
                                     {90, 40, 0},
                                     {INT_MIN, INT_MAX, INT_MIN},
                                     {INT_MAX, INT_MAX, 0},
                                     {-70, 30, 1 << 30},
                                     {0, INT_MAX, INT_MIN}}) {
    Problem problem({.len_q = {50, 40}, .len_k = {30, 60}, .packed_q = true, .packed_k = true});
    problem.overwrite_cu_seqlens(cu, cu);
    problem.run();
    gpu::check(cudaDeviceSynchronize(), "flash_fwd");
    problem.check_canaries();
  }
}

TEST(FlashFwdCalls, TwentyRunsAreBitEqual) {
  SKIP_WITHOUT_GPU();
  Problem problem({.head_dim = 64, .len_q = {257, 257}, .len_k = {257, 257}, .window = {-1, 0}});
  problem.run();
  std::vector<uint16_t> const out = problem.out_bits();
  std::vector<float> const lse = problem.lse();
  for (int i = 0; i < 20; ++i) {
    problem.run();
    ASSERT_TRUE(problem.out_bits() == out) << "run " << i;
    ASSERT_EQ(std::memcmp(problem.lse().data(), lse.data(), lse.size() * sizeof(float)), 0)
        << "run " << i;
  }
}

// Shared memory keeps what the kernel before it left there.
TEST(FlashFwdCalls, LeftOverSharedMemoryHasNoInfluence) {
  SKIP_WITHOUT_GPU();
  for (int len_k : {1, 65, 129}) {
    Case const clean{.len_q = {64}, .len_k = {len_k}};
    Problem first(clean);
    first.run();
    std::vector<uint16_t> const expected = first.out_bits();
    Case poison = clean;
    poison.len_k = {1};  // of 256 keys, 255 are NaN
    poison.seqused = true;
    poison.slack = 255;
    Problem nan(poison);
    nan.params().lengths.seqused_k = nullptr;  // now they are read
    for (int i = 0; i < 20; ++i) {
      Problem again(clean);
      nan.run();
      again.run();
      ASSERT_TRUE(again.out_bits() == expected) << "len_k " << len_k << ", run " << i;
    }
  }
}

TEST(FlashFwdCalls, RunsOnTheGivenStream) {
  SKIP_WITHOUT_GPU();
  cudaStream_t stream;
  gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  Problem(Case{}).run();  // loads the kernel, which a capture does not allow
  Problem problem(Case{});
  cudaGraph_t graph;
  cudaGraphExec_t graph_exec;
  gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  problem.run(stream);  // fails the capture if it touches another stream, synchronises or allocates
  gpu::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  gpu::check(cudaGraphInstantiate(&graph_exec, graph, 0), "cudaGraphInstantiate");
  gpu::check(cudaGraphLaunch(graph_exec, stream), "cudaGraphLaunch");
  gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  problem.check_result();
  cudaGraphExecDestroy(graph_exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(FlashFwdCalls, ARefusedCallLeavesTheDeviceUsable) {
  SKIP_WITHOUT_GPU();
  Problem problem(Case{});
  problem.params().window.left = -2;
  EXPECT_THROW(problem.run(), flashattn::InvalidArgument);
  problem.params().window.left = -1;
  problem.run();
  gpu::check(cudaDeviceSynchronize(), "flash_fwd");
  problem.check_result();
}

TEST(FlashFwdCalls, AHeadDimThatWasNotBuiltIsUnsupported) {
  SKIP_WITHOUT_GPU();
  int const largest = flashattn::build_info().head_dims.back();
  if (largest == 256) { GTEST_SKIP() << "this build has every head dim"; }
  Problem problem({.head_dim = largest + 8});
  EXPECT_THROW(problem.run(), flashattn::Unsupported);
}

// Machine code runs within its major version, PTX on anything newer; otherwise the call says so.
TEST(FlashFwdCalls, ServesExactlyTheGpusItWasBuiltFor) {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) { GTEST_SKIP() << "no CUDA device"; }
  gpu::check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  gpu::check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "cudaDeviceGetAttribute");
  int const capability = 10 * major + minor;
  flashattn::BuildInfo const info = flashattn::build_info();
  bool served = info.ptx_arch <= capability;
  for (int arch : info.cuda_archs) { served |= arch / 10 == major && arch <= capability; }
  EXPECT_EQ(gpu::no_gpu_reason().empty(), served) << gpu::no_gpu_reason();
  if (!served) {
    EXPECT_NE(gpu::no_gpu_reason().find("sm_" + std::to_string(capability)), std::string::npos);
  }
}

// On a machine without a GPU the call must say so, and not crash.
TEST(FlashFwdCalls, WithoutADeviceThrows) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) {
    GTEST_SKIP() << "there is a device";
  }
  alignas(16) static uint16_t operand[64] = {};
  flashattn::FlashFwdParams params;
  params.shape = {
      .batch = 1, .heads = 1, .heads_kv = 1, .head_dim = 64, .seqlen_q = 1, .seqlen_k = 1};
  params.q.data = params.k.data = params.v.data = operand;
  params.out.data = operand;
  EXPECT_THROW(flashattn::run_flash_fwd(params), std::runtime_error);
}

}  // namespace
