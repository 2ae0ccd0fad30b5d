// One call of run_flash_splitkv_fwd on the GPU over a cache in which everything but the tokens is
// poisoned, and its check. Like gpu_problem.h: slots without a token, left padding, unused pages
// and the rows of no sequence are NaN; table entries that nobody needs are no page.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "gpu_problem.h"

namespace gpu {

// Of Case, len_k, packed_k and seqused have no meaning here.
struct CacheCase : Case {
  std::vector<int> cached = {100, 37};  // valid tokens as the call is told: any number
  bool same_length = false;             // cached[0], passed as a number
  int capacity = 144;
  int page_size = 0;      // 0: contiguous
  int spare_columns = 0;  // of the table, past the capacity
  bool share_first_page = false;
  std::vector<std::pair<int, int>> holes;  // (sequence, column): no page is there
  std::vector<int> leftpad;                // as told; empty: none
  std::vector<int> batch_idx;              // contiguous; empty: none
  std::vector<int> content;  // which random numbers a sequence has; empty: 0, 1, 2 ...
  int append = 0;
  int rotary_dim = 0;
  bool interleaved = false;
  int max_position = 200;
  int num_splits = 1;
  int split_size = 0;
};

constexpr int kWorkspaceGuard = 256;
constexpr uint8_t kWorkspacePattern = 0xff;  // NaN in every type

class CacheProblem {
 public:
  explicit CacheProblem(CacheCase const& c);

  void run(cudaStream_t stream = nullptr) { flashattn::run_flash_splitkv_fwd(params_, stream); }
  void check_result();    // the cache after the call, out, lse, and that nothing else was written
  void check_canaries();  // what holds whatever the lengths on the device say
  std::vector<uint16_t> out_bits() const { return results_.out_bits(); }
  std::vector<float> lse() const { return results_.lse(); }
  // out and lse of a sequence.
  std::vector<uint32_t> bits_of(int sequence) const {
    return results_.bits_of(sequence, case_.len_q[sequence]);
  }
  flashattn::FlashSplitkvParams& params() { return params_; }
  // What the device says about lengths; the reference keeps to those of the case.
  void overwrite_cached(std::vector<int> const& cached) { cached_.assign(cached); }
  void overwrite_cu_seqlens(std::vector<int> const& cu) { cu_q_.assign(cu); }

 private:
  struct Slot {
    int row, slot;
    bool exists;
  };

  int batch() const { return static_cast<int>(case_.len_q.size()); }
  int columns() const;
  int rows() const;  // of the cache: pages or cache rows
  Layout cache_layout(int gap, Order order) const;
  int cached(int b) const;  // as the call must understand it
  int tokens(int b) const;  // after the append
  int leftpad(int b) const;
  Slot slot_of(int b, int token) const;
  std::vector<float> noise(int kind, int b, int row, int head) const;
  std::vector<double> rotate(std::vector<float> const& head, int position) const;

  void make_table();
  void make_rotary_tables();
  void fill_cache();
  void expect_append();
  void put(std::vector<uint16_t>& bits, Layout const& layout, int b, int row, int head,
           std::vector<float> const& values) const;
  DeviceVector<uint16_t> rows_of(Layout const& layout, bool packed, std::vector<int> const& lengths,
                                 int kind) const;
  void fill_params();
  void allocate_workspace();
  void check_cache(std::vector<uint16_t> const& k, std::vector<uint16_t> const& v) const;
  void check_workspace() const;
  std::vector<std::vector<float>> keys(std::vector<uint16_t> const& bits, Layout const& layout,
                                       int b, int head_kv) const;
  std::vector<std::vector<float>> queries(int b, int head) const;

  CacheCase case_;
  std::mt19937 random_;
  Layout q_layout_, k_layout_, v_layout_, new_layout_;
  std::vector<int> table_host_;
  std::vector<float> cosines_host_, sines_host_;
  std::vector<uint16_t> k_expected_, v_expected_;  // at first what the cache holds before the call
  std::map<int64_t, double> rotated_keys_;         // elements of k that are rounded
  DeviceVector<uint16_t> q_, k_, v_, new_k_, new_v_, cosines_, sines_;
  DeviceVector<int> cu_q_, cached_, leftpad_, batch_idx_, table_;
  DeviceVector<uint8_t> workspace_;
  Results results_;
  ScoreOperands score_;
  flashattn::FlashSplitkvParams params_;
};

void expect_right(CacheCase const& c);

}  // namespace gpu
