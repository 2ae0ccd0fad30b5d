// Causal attention with grouped heads through the C++ library, on the GPU where the library and the
// machine have one, otherwise or with the argument cpu on the CPU. The queries are 0, so that all
// visible keys weigh the same: row i of the result is the mean of v's rows 0 ... i, which is easy
// to check.
#include <flashattn/flashattn.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "arrays.h"

constexpr int kRows = 500, kHeads = 8, kHeadsKv = 2, kHeadDim = 64;

int main(int argc, char** argv) {
  bool const on_gpu = has_gpu() && !(argc > 1 && std::strcmp(argv[1], "cpu") == 0);
  int const q_row = kHeads * kHeadDim, kv_row = kHeadsKv * kHeadDim;
  std::vector<BFloat16> q(kRows * q_row), k(kRows * kv_row), v(kRows * kv_row), out(kRows * q_row);
  for (size_t i = 0; i < v.size(); ++i) {
    k[i] = to_bf16(std::cos(i)), v[i] = to_bf16(std::sin(1.3 * i));
  }

  flashattn::FlashFwdParams params;
  params.device = on_gpu ? flashattn::Device::kCuda : flashattn::Device::kCpu;
  params.dtype = flashattn::DType::kBFloat16;
  params.shape = {1, kHeads, kHeadsKv, kHeadDim, kRows, kRows};
  params.q = {place(q, on_gpu), 0, q_row, kHeadDim};  // strides of batch, row, head
  params.k = {place(k, on_gpu), 0, kv_row, kHeadDim};
  params.v = {place(v, on_gpu), 0, kv_row, kHeadDim};
  params.out = {place(out, on_gpu), 0, q_row, kHeadDim};
  params.window.right = 0;  // causal
  params.score.scale = 0.125f;
  flashattn::run_flash_fwd(params);  // throws what flashattn/error.h lists
  fetch(out, params.out.data);

  double error = 0.;
  bool good = true;                 // false for NaN, which no maximum shows
  std::vector<double> sum(kv_row);  // of v's rows so far
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kv_row; ++i) { sum[i] += to_double(v[row * kv_row + i]); }
    for (int i = 0; i < q_row; ++i) {
      int const head_kv = i / kHeadDim / (kHeads / kHeadsKv), dim = i % kHeadDim;
      double const mean = sum[head_kv * kHeadDim + dim] / (row + 1);
      double const difference = std::abs(to_double(out[row * q_row + i]) - mean);
      error = std::fmax(error, difference), good = good && difference < 0.01;
    }
  }
  std::printf("%d rows on the %s: differ from the mean of the visible values by at most %.1e\n",
              kRows, on_gpu ? "GPU" : "CPU", error);
  return good ? 0 : 1;
}
