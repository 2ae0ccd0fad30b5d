// Attention on the host for the tests of the kernels and of the CPU backend: in double, and once
// more with the roundings that plain PyTorch makes in 16 bit, whose error is the yardstick.
// Independent of csrc/core.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "visibility.h"

namespace oracle {

// One query row over the keys of its sequence.
struct RowProblem {
  std::vector<float> q;                      // (head_dim)
  std::vector<std::vector<float>> const* k;  // (len_k)(head_dim); an empty row is no key
  std::vector<std::vector<float>> const* v;
  int row = 0;
  int len_q = 0;
  Window window{-1, -1};
  float scale = 1.f;
  float softcap = 0.f;
  float slope = 0.f;
  bool has_sink = false;
  float sink = 0.f;
};

struct RowResult {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity();
};

struct NoRounding {
  double operator()(double x) const { return x; }
};

// `round` is applied where PyTorch stores a 16-bit tensor: scores, probabilities, output.
template <class Round>
RowResult attend(RowProblem const& p, Round const& round) {
  double const lowest = -std::numeric_limits<double>::infinity();
  int const len_k = static_cast<int>(p.k->size()), head_dim = static_cast<int>(p.q.size());
  std::vector<double> scores(len_k, lowest);
  double top = p.has_sink ? p.sink : lowest;
  for (int key = 0; key < len_k; ++key) {
    if ((*p.k)[key].empty() || !sees(p.row, key, p.len_q, len_k, p.window)) { continue; }
    double dot = 0.;
    for (int d = 0; d < head_dim; ++d) { dot += static_cast<double>(p.q[d]) * (*p.k)[key][d]; }
    double score = round(dot * p.scale);
    if (p.softcap > 0.f) { score = round(p.softcap * std::tanh(score / p.softcap)); }
    scores[key] = score - static_cast<double>(p.slope) * std::abs(p.row + len_k - p.len_q - key);
    top = std::max(top, scores[key]);
  }
  RowResult result{std::vector<double>(head_dim, 0.)};
  if (top == lowest) { return result; }
  double sum = p.has_sink ? std::exp(p.sink - top) : 0.;
  for (double score : scores) { sum += std::exp(score - top); }
  for (int key = 0; key < len_k; ++key) {
    double const probability = round(std::exp(scores[key] - top) / sum);
    if (probability == 0.) { continue; }
    for (int d = 0; d < head_dim; ++d) { result.out[d] += probability * (*p.v)[key][d]; }
  }
  for (double& x : result.out) { x = round(x); }
  result.lse = top + std::log(sum);
  return result;
}

}  // namespace oracle
