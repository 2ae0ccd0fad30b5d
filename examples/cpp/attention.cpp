// Causal attention with grouped heads through the C++ library, on the GPU where the library and the
// machine have one, otherwise on the CPU. Checks the last row against a plain loop.
#include <flashattn/flashattn.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <vector>

#if defined(WITH_CUDA)
#include <cuda_runtime.h>
#endif

constexpr int kRows = 500, kHeads = 8, kHeadsKv = 2, kHeadDim = 64;
constexpr float kScale = 0.125f;  // 1 / sqrt(kHeadDim)

using BFloat16 = uint16_t;
BFloat16 to_bf16(float x) { return (std::bit_cast<uint32_t>(x) + 0x8000u) >> 16; }
float to_float(BFloat16 x) { return std::bit_cast<float>(uint32_t{x} << 16); }

// (kRows, heads, kHeadDim) numbers that no formula of attention would produce by chance.
std::vector<BFloat16> waves(int heads, double frequency) {
  std::vector<BFloat16> values(kRows * heads * kHeadDim);
  for (size_t i = 0; i < values.size(); ++i) { values[i] = to_bf16(std::sin(frequency * i)); }
  return values;
}

// Where the library will find the numbers: on the CPU they stay where they are.
void* place(std::vector<BFloat16>& host, bool on_gpu) {
  void* data = host.data();
#if defined(WITH_CUDA)
  if (on_gpu) {
    cudaMalloc(&data, host.size() * sizeof(BFloat16));
    cudaMemcpy(data, host.data(), host.size() * sizeof(BFloat16), cudaMemcpyHostToDevice);
  }
#endif
  return data;
}

double expected_in_last_row(std::vector<BFloat16> const& q, std::vector<BFloat16> const& k,
                            std::vector<BFloat16> const& v, int head, int dim) {
  auto const at = [](int row, int heads, int h, int d) { return (row * heads + h) * kHeadDim + d; };
  int const head_kv = head / (kHeads / kHeadsKv);
  double sum = 0., weighted = 0.;
  for (int key = 0; key < kRows; ++key) {
    double dot = 0.;
    for (int d = 0; d < kHeadDim; ++d) {
      dot +=
          to_float(q[at(kRows - 1, kHeads, head, d)]) * to_float(k[at(key, kHeadsKv, head_kv, d)]);
    }
    sum += std::exp(kScale * dot);
    weighted += std::exp(kScale * dot) * to_float(v[at(key, kHeadsKv, head_kv, dim)]);
  }
  return weighted / sum;
}

int main() {
  bool on_gpu = false;
#if defined(WITH_CUDA)
  int devices = 0;
  on_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
#endif
  std::vector<BFloat16> q = waves(kHeads, 0.71), k = waves(kHeadsKv, 0.37),
                        v = waves(kHeadsKv, 1.3);
  std::vector<BFloat16> out(q.size());

  flashattn::FlashFwdParams params;
  params.device = on_gpu ? flashattn::Device::kCuda : flashattn::Device::kCpu;
  params.dtype = flashattn::DType::kBFloat16;
  params.shape = {1, kHeads, kHeadsKv, kHeadDim, kRows, kRows};
  params.q = {place(q, on_gpu), 0, kHeads * kHeadDim, kHeadDim};  // strides of batch, row, head
  params.k = {place(k, on_gpu), 0, kHeadsKv * kHeadDim, kHeadDim};
  params.v = {place(v, on_gpu), 0, kHeadsKv * kHeadDim, kHeadDim};
  params.out = {place(out, on_gpu), 0, kHeads * kHeadDim, kHeadDim};
  params.window.right = 0;  // causal
  params.score.scale = kScale;
  flashattn::run_flash_fwd(params);  // throws what flashattn/error.h lists
#if defined(WITH_CUDA)
  if (on_gpu) {
    cudaMemcpy(out.data(), params.out.data, out.size() * sizeof(BFloat16), cudaMemcpyDeviceToHost);
  }
#endif

  double error = 0.;
  for (int i = 0; i < kHeads * kHeadDim; ++i) {
    double const expected = expected_in_last_row(q, k, v, i / kHeadDim, i % kHeadDim);
    error =
        std::fmax(error, std::abs(to_float(out[(kRows - 1) * kHeads * kHeadDim + i]) - expected));
  }
  std::printf("%d rows on the %s: last row differs from a plain loop by at most %.1e\n", kRows,
              on_gpu ? "GPU" : "CPU", error);
  return error < 0.01 ? 0 : 1;
}
