// Causal attention with grouped heads through the C++ library: on the GPU where the library and the
// machine have one, otherwise on the CPU. Checks the result against a plain loop.
#include <flashattn/flashattn.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#if defined(WITH_CUDA)
#include <cuda_runtime.h>
#endif

constexpr int kRows = 200, kHeads = 8, kHeadsKv = 2, kHeadDim = 64;
constexpr float kScale = 0.125f;  // 1 / sqrt(kHeadDim)

using BFloat16 = uint16_t;
BFloat16 to_bf16(float x) {
  return static_cast<BFloat16>((std::bit_cast<uint32_t>(x) + 0x8000u) >> 16);
}
float to_float(BFloat16 x) { return std::bit_cast<float>(uint32_t{x} << 16); }

std::vector<BFloat16> random_rows(int heads) {
  static std::mt19937 random(0);
  std::normal_distribution<float> normal;
  std::vector<BFloat16> values(kRows * heads * kHeadDim);
  for (BFloat16& x : values) { x = to_bf16(normal(random)); }
  return values;
}

bool has_gpu() {
#if defined(WITH_CUDA)
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
#else
  return false;
#endif
}

// The vector itself, or a copy in GPU memory. (A real program also checks errors and frees.)
void* place(std::vector<BFloat16>& host) {
  void* data = host.data();
#if defined(WITH_CUDA)
  if (has_gpu()) {
    cudaMalloc(&data, host.size() * sizeof(BFloat16));
    cudaMemcpy(data, host.data(), host.size() * sizeof(BFloat16), cudaMemcpyHostToDevice);
  }
#endif
  return data;
}

void fetch(std::vector<BFloat16>& host, void const* data) {
#if defined(WITH_CUDA)
  if (has_gpu()) {
    cudaMemcpy(host.data(), data, host.size() * sizeof(BFloat16), cudaMemcpyDeviceToHost);
  }
#else
  (void)host, (void)data;
#endif
}

// Element `dim` of the output row of `head`, which sees keys 0 ... row.
double expected(std::vector<BFloat16> const& q, std::vector<BFloat16> const& k,
                std::vector<BFloat16> const& v, int row, int head, int dim) {
  int const head_kv = head / (kHeads / kHeadsKv);
  double sum = 0., weighted = 0.;
  for (int key = 0; key <= row; ++key) {
    double dot = 0.;
    for (int d = 0; d < kHeadDim; ++d) {
      dot += to_float(q[(row * kHeads + head) * kHeadDim + d]) *
             to_float(k[(key * kHeadsKv + head_kv) * kHeadDim + d]);
    }
    double const p = std::exp(kScale * dot);
    sum += p;
    weighted += p * to_float(v[(key * kHeadsKv + head_kv) * kHeadDim + dim]);
  }
  return weighted / sum;
}

int main() try {
  std::vector<BFloat16> q = random_rows(kHeads), k = random_rows(kHeadsKv),
                        v = random_rows(kHeadsKv);
  std::vector<BFloat16> out(q.size());

  flashattn::FlashFwdParams params;
  params.device = has_gpu() ? flashattn::Device::kCuda : flashattn::Device::kCpu;
  params.dtype = flashattn::DType::kBFloat16;
  params.shape = {.batch = 1,
                  .heads = kHeads,
                  .heads_kv = kHeadsKv,
                  .head_dim = kHeadDim,
                  .seqlen_q = kRows,
                  .seqlen_k = kRows};
  params.q = {.data = place(q), .row_stride = kHeads * kHeadDim, .head_stride = kHeadDim};
  params.k = {.data = place(k), .row_stride = kHeadsKv * kHeadDim, .head_stride = kHeadDim};
  params.v = {.data = place(v), .row_stride = kHeadsKv * kHeadDim, .head_stride = kHeadDim};
  params.out = {.data = place(out), .row_stride = kHeads * kHeadDim, .head_stride = kHeadDim};
  params.window.right = 0;  // causal
  params.score.scale = kScale;
  flashattn::run_flash_fwd(params);
  fetch(out, params.out.data);

  double error = 0.;
  for (int row = 0; row < kRows; row += 7) {
    for (int head = 0; head < kHeads; ++head) {
      error = std::fmax(error,
                        std::abs(to_float(out[(row * kHeads + head) * kHeadDim + row % kHeadDim]) -
                                 expected(q, k, v, row, head, row % kHeadDim)));
    }
  }
  std::printf("causal attention of %d rows on the %s: largest error %.1e\n", kRows,
              has_gpu() ? "GPU" : "CPU", error);
  return error < 0.02 ? 0 : 1;
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
