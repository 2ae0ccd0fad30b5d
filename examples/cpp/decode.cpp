// One step of an engine over a cache in pages: two sequences of different length, a new token each.
// The call writes the keys and values of the new tokens into their pages, then lets their queries
// attend to all that the sequences hold. On the GPU where the library and the machine have one,
// otherwise or with the argument cpu on the CPU.
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
  bool const on_gpu = has_gpu() && !(argc > 1 && std::strcmp(argv[1], "cpu") == 0);
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

  // The same by a plain loop over the tokens of each sequence.
  double error = 0.;
  bool good = true;  // false for NaN, which no maximum shows
  for (int sequence = 0; sequence < kSequences; ++sequence) {
    for (int head = 0; head < kHeads; ++head) {
      int const at = sequence * kRow + head * kHeadDim, head_kv = head / (kHeads / kHeadsKv);
      double total = 0., sum[kHeadDim] = {};
      for (int token = 0; token <= cached[sequence]; ++token) {
        bool const is_new = token == cached[sequence];
        int const page = table[sequence * kColumns + token / kPageSize], slot = token % kPageSize;
        int const row = is_new ? sequence * kToken : page * kPage + slot * kToken;
        BFloat16 const* const key = &(is_new ? new_k : k)[row + head_kv * kHeadDim];
        BFloat16 const* const value = &(is_new ? new_v : v)[row + head_kv * kHeadDim];
        double score = 0.;
        for (int i = 0; i < kHeadDim; ++i) { score += to_double(q[at + i]) * to_double(key[i]); }
        double const weight = std::exp(kScale * score);
        total += weight;
        for (int i = 0; i < kHeadDim; ++i) { sum[i] += weight * to_double(value[i]); }
      }
      for (int i = 0; i < kHeadDim; ++i) {
        double const difference = std::abs(to_double(out[at + i]) - sum[i] / total);
        error = std::fmax(error, difference), good = good && difference < 0.01;
      }
    }
  }
  std::printf("%d and %d tokens on the %s: differ from a plain loop by at most %.1e\n",
              cached[0] + 1, cached[1] + 1, on_gpu ? "GPU" : "CPU", error);
  return good ? 0 : 1;
}
