// One step of an engine over a cache in pages: two sequences of different length, a new token each.
// The call writes the keys and values of the new tokens into their pages, then lets their queries
// attend to all that the sequences hold. `decode` runs on the CPU, `decode gpu` on the GPU.
#include <flashattn/flashattn.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "arrays.h"

constexpr int kSequences = 2, kHeads = 8, kHeadsKv = 2, kHeadDim = 64;
constexpr int kPageSize = 16, kPages = 8, kColumns = 5;  // a sequence has at most 5 of the 8 pages
constexpr int kRow = kHeads * kHeadDim, kToken = kHeadsKv * kHeadDim;  // of queries, of keys
constexpr int kPage = kPageSize * kToken;
constexpr float kScale = 0.125f;  // 1 / sqrt(kHeadDim)

std::vector<BFloat16> random_numbers(int count) {
  static std::mt19937 generator;
  std::vector<BFloat16> x(count);
  for (BFloat16& number : x) { number = to_bf16(std::normal_distribution()(generator)); }
  return x;
}

int main(int argc, char** argv) {
  bool const on_gpu = argc > 1 && std::strcmp(argv[1], "gpu") == 0;
  auto q = random_numbers(kSequences * kRow), out = q;
  auto k = random_numbers(kPages * kPage), v = random_numbers(kPages * kPage);  // all pages
  auto new_k = random_numbers(kSequences * kToken), new_v = random_numbers(kSequences * kToken);
  // The pages of each sequence, and the tokens in them before this step. The second sequence has
  // filled its first page: its new token goes to another one, which the engine has added.
  std::vector<int> table = {5, 2, 7,  1,  6,  //
                            0, 3, -1, -1, -1};
  std::vector<int> cached = {70, 16};

  flashattn::FlashSplitkvParams params;
  flashattn::FlashFwdParams& fwd = params.fwd;
  fwd.device = on_gpu ? flashattn::Device::kCuda : flashattn::Device::kCpu;
  fwd.dtype = flashattn::DType::kBFloat16;
  int const capacity = kColumns * kPageSize;  // of a sequence
  fwd.shape = {kSequences, kHeads, kHeadsKv, kHeadDim, /*seqlen_q=*/1, capacity};
  fwd.q = {place(q, on_gpu), kRow, kRow, kHeadDim};  // strides of sequence, token, head
  fwd.out = {place(out, on_gpu), kRow, kRow, kHeadDim};
  fwd.k = {place(k, on_gpu), kPage, kToken, kHeadDim};  // of page, slot, head
  fwd.v = {place(v, on_gpu), kPage, kToken, kHeadDim};
  fwd.window.right = 0;  // causal, for sequences with more than one query
  fwd.score.scale = kScale;
  params.cache.seqlens = place(cached, on_gpu);
  params.cache.block_table = place(table, on_gpu);
  params.cache.block_table_stride = params.cache.table_columns = kColumns;
  params.cache.page_size = kPageSize;
  params.cache.num_pages = kPages;
  params.append.k = {place(new_k, on_gpu), kToken, kToken, kHeadDim};
  params.append.v = {place(new_v, on_gpu), kToken, kToken, kHeadDim};
  params.append.seqlen = 1;  // new token of each sequence
  // Called at most once, for a GPU only. The next call on the same stream may have the same memory.
  std::vector<char> workspace;
  auto const allocate = [&](size_t bytes) {
    workspace.resize(bytes);
    return place(workspace, on_gpu);
  };
  flashattn::run_flash_splitkv_fwd(params, allocate);  // throws what flashattn/error.h lists
  fetch(out, fwd.out.data);

  // The last head of the second sequence, by a plain loop over its tokens.
  BFloat16 const* const query = &q[kRow + (kHeads - 1) * kHeadDim];
  BFloat16 const* const result = &out[kRow + (kHeads - 1) * kHeadDim];
  double total = 0., sum[kHeadDim] = {}, error = 0.;
  for (int token = 0; token <= cached[1]; ++token) {
    bool const is_new = token == cached[1];
    int const page = table[kColumns + token / kPageSize], slot = token % kPageSize;
    int const row = is_new ? kToken : page * kPage + slot * kToken;
    BFloat16 const* const key = &(is_new ? new_k : k)[row + (kHeadsKv - 1) * kHeadDim];
    BFloat16 const* const value = &(is_new ? new_v : v)[row + (kHeadsKv - 1) * kHeadDim];
    double score = 0.;
    for (int i = 0; i < kHeadDim; ++i) { score += to_double(query[i]) * to_double(key[i]); }
    double const weight = std::exp(kScale * score);
    total += weight;
    for (int i = 0; i < kHeadDim; ++i) { sum[i] += weight * to_double(value[i]); }
  }
  for (int i = 0; i < kHeadDim; ++i) {
    std::printf("%7.4f%s", to_double(result[i]), i % 8 < 7 ? " " : "\n");
    error = std::fmax(error, std::abs(to_double(result[i]) - sum[i] / total));
  }
  std::printf("on the %s: differs from a plain loop over %d tokens by at most %.1e\n",
              on_gpu ? "GPU" : "CPU", cached[1] + 1, error);
  return error < 0.01 ? 0 : 1;
}
