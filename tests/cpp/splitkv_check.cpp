// How a CacheProblem is compared with the reference.
#include <cmath>

#include "splitkv_problem.h"

namespace gpu {

void CacheProblem::check_workspace() const {
  std::vector<uint8_t> const bytes = workspace_.host();
  if (bytes.empty()) { return; }
  bool const intact = std::all_of(bytes.end() - kWorkspaceGuard, bytes.end(),
                                  [](uint8_t x) { return x == kWorkspacePattern; });
  EXPECT_TRUE(intact) << "bytes behind the workspace were written";
}

// Bit for bit, but for the rounding of rotated keys.
void CacheProblem::check_cache(std::vector<uint16_t> const& k,
                               std::vector<uint16_t> const& v) const {
  int64_t wrong_k = 0, wrong_v = 0;
  double const ulp = case_.dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
  for (size_t i = 0; i < k.size(); ++i) {
    auto const rotated = rotated_keys_.find(static_cast<int64_t>(i));
    if (rotated == rotated_keys_.end()) {
      wrong_k += k[i] != k_expected_[i];
      continue;
    }
    double const off = std::abs(from_bits(case_.dtype, k[i]) - rotated->second);
    wrong_k += !(off <= 0.51 * ulp * std::abs(rotated->second) + 1e-6);
  }
  for (size_t i = 0; i < v.size(); ++i) { wrong_v += v[i] != v_expected_[i]; }
  EXPECT_EQ(wrong_k, 0) << "elements of the key cache after the call";
  EXPECT_EQ(wrong_v, 0) << "elements of the value cache after the call";
}

// Keys or values of a sequence; an empty row where there is none.
std::vector<std::vector<float>> CacheProblem::keys(std::vector<uint16_t> const& bits,
                                                   Layout const& layout, int b, int head_kv) const {
  std::vector<std::vector<float>> rows;
  if (case_.page_size == 0 && !slot_of(b, 0).exists) { return rows; }
  for (int token = leftpad(b); token < tokens(b); ++token) {
    std::vector<float> row;
    Slot const at = slot_of(b, token);
    for (int d = 0; at.exists && d < case_.head_dim; ++d) {
      row.push_back(from_bits(case_.dtype, bits[layout.at(at.row, at.slot, head_kv, d)]));
    }
    rows.push_back(row);
  }
  return rows;
}

void CacheProblem::check_result() {
  std::vector<uint16_t> const k_bits = k_.host(), v_bits = v_.host();
  check_cache(k_bits, v_bits);
  check_workspace();
  results_.fetch();
  // A rotated query that rounds the other way in the kernel moves a score by one unit of rounding.
  double const lse_bound = case_.rotary_dim > 0 ? 2e-3 : 1e-4;
  for (int b = 0; b < batch(); ++b) {
    for (int head = 0; head < case_.heads; ++head) {
      int const head_kv = head / (case_.heads / case_.heads_kv);
      auto const k = keys(k_bits, k_layout_, b, head_kv), v = keys(v_bits, v_layout_, b, head_kv);
      oracle::RowProblem problem = score_.row_problem(b, head);
      problem.k = &k;
      problem.v = &v;
      results_.check_head(problem, queries(b, head), b, head, lse_bound);
    }
  }
  results_.check_rest();
}

void CacheProblem::check_canaries() {
  EXPECT_TRUE(k_.host() == k_expected_ && v_.host() == v_expected_) << "the cache was written";
  check_workspace();
  results_.check_outside();
}

void expect_right(CacheCase const& c) {
  CacheProblem problem(c);
  problem.run();
  check(cudaDeviceSynchronize(), "flash_fwd_splitkv");
  problem.check_result();
}

}  // namespace gpu
