// One call of run_flash_fwd on the GPU, with everything around the operands poisoned, and its
// check.
//
// Inputs are NaN wherever no row of q, k or v lies: gaps between heads, unused keys, packed rows
// past the last sequence. Outputs start as a NaN pattern, and every word outside of the result must
// keep it. Input allocations end with their last element, so that memcheck sees a read past it.
#pragma once

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gpu_results.h"

namespace gpu {

enum class Sinks { kNone, kFloat32, kLikeQ };

struct Case {
  DType dtype = DType::kBFloat16;
  int heads = 4;
  int heads_kv = 2;
  int head_dim = 64;
  std::vector<int> len_q = {70, 70};  // of each sequence; all equal when dense
  std::vector<int> len_k = {100, 100};
  bool packed_q = false;
  bool packed_k = false;
  bool seqused = false;  // len_k is what seqused_k says; the allocation holds `slack` more
  int slack = 0;         // rows past the last sequence (packed) or the used keys (seqused)
  flashattn::Window window = {};
  float scale = 0.125f;
  float softcap = 0.f;
  int alibi_dims = 0;  // 0: none, 1: (heads), 2: (batch, heads)
  Sinks sinks = Sinks::kNone;
  Order order_k = Order::kRowsFirst;
  Order order_v = Order::kRowsFirst;
  int gap = 8;  // NaN elements behind each head
  bool want_lse = true;
  int max_seqlen_q = 0;  // packed: the bound to pass, 0 for the true maximum
  float magnitude = 1.f;
};

// Slopes and sinks.
class ScoreOperands {
 public:
  ScoreOperands(Case const& c, std::mt19937& random);
  void describe(flashattn::Score& score) const;
  // All that the reference must know of a head but its rows, keys and values.
  oracle::RowProblem row_problem(int batch, int head) const;

 private:
  Case case_;
  std::vector<float> slopes_host_, sinks_host_;
  DeviceVector<float> slopes_, sinks_;
  DeviceVector<uint16_t> sinks_like_q_;
};

class Problem {
 public:
  explicit Problem(Case const& c, unsigned seed = 1);

  void run(cudaStream_t stream = nullptr) { flashattn::run_flash_fwd(params_, stream); }
  void check_result();  // against the reference, and the canaries
  void check_canaries() { results_.check_outside(); }
  std::vector<uint16_t> out_bits() const { return results_.out_bits(); }
  std::vector<float> lse() const { return results_.lse(); }
  flashattn::FlashFwdParams& params() { return params_; }

  // Other contents for the packed prefix sums; the reference does not know the rows they describe.
  void overwrite_cu_seqlens(std::vector<int> const& q, std::vector<int> const& k);

 private:
  struct Operand {
    Layout layout;
    std::vector<uint16_t> bits;
    DeviceVector<uint16_t> device;
  };

  Operand make_operand(Layout const& layout, bool packed, std::vector<int> const& lengths);
  std::vector<std::vector<float>> rows_of(Operand const& operand, bool packed,
                                          std::vector<int> const& lengths, int batch,
                                          int head) const;
  void fill_params();
  int batch() const { return static_cast<int>(case_.len_q.size()); }

  Case case_;
  std::mt19937 random_;
  Operand q_, k_, v_;
  Results results_;
  DeviceVector<int> cu_q_, cu_k_, seqused_;
  ScoreOperands score_;
  flashattn::FlashFwdParams params_;
};

// `c` with one of kOptions options; 0 leaves it as it is.
constexpr int kOptions = 8;

template <class AnyCase>
AnyCase with_option(AnyCase c, int option) {
  switch (option) {
    case 1: c.softcap = 2.f; break;
    case 2: c.alibi_dims = 1; break;
    case 3: c.alibi_dims = 2; break;
    case 4: c.sinks = Sinks::kFloat32; break;
    case 5: c.sinks = Sinks::kLikeQ; break;
    case 6: c.window = {40, 0}; break;
    case 7: c.scale = -0.2f; break;
    case 8: c.want_lse = false; break;
    default: break;
  }
  return c;
}

// Builds, runs and checks one case.
void expect_right(Case const& c);

// Empty when run_flash_fwd can serve this machine, otherwise why the tests have to be skipped.
std::string no_gpu_reason();
// The head dims among `wanted` that this build has a kernel for.
std::vector<int> built_head_dims(std::vector<int> const& wanted);

}  // namespace gpu

// In a TEST, where GTEST_SKIP can return.
#define SKIP_WITHOUT_GPU() \
  if (!gpu::no_gpu_reason().empty()) { GTEST_SKIP() << gpu::no_gpu_reason(); }
