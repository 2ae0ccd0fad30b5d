// out and lse of a call on the GPU, and their comparison with the reference.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "attention_reference.h"
#include "gpu_operand.h"

namespace gpu {

// Both start as a NaN pattern. check_head notes what it expects to be written; check_rest then
// expects the pattern everywhere else.
class Results {
 public:
  Results(DType dtype, Layout const& layout, bool packed, std::vector<int> const& len_q,
          bool want_lse);

  void describe(flashattn::FlashFwdParams& params) const;
  std::vector<uint16_t> out_bits() const { return out_.host(); }
  std::vector<float> lse() const { return lse_.host(); }
  // out and lse of the first rows of a sequence.
  std::vector<uint32_t> bits_of(int batch, int rows) const;

  void fetch();  // before the checks
  // `problem` has everything but the query row, q the rows of this head of the sequence.
  void check_head(oracle::RowProblem problem, std::vector<std::vector<float>> const& q, int batch,
                  int head, double lse_bound = 1e-4);
  void check_rest() const;
  void check_outside();  // the same with whatever rows the lengths on the device describe

 private:
  int64_t out_index(int batch, int head, int row) const;
  int64_t lse_index(int batch, int head, int row) const;

  DType dtype_;
  Layout layout_;
  bool packed_, want_lse_;
  std::vector<int> first_row_;  // of each sequence, in its batch of the layout
  DeviceVector<uint16_t> out_;
  DeviceVector<float> lse_;
  std::vector<uint16_t> out_host_;
  std::vector<float> lse_host_;
  std::vector<char> out_written_, lse_written_;
};

}  // namespace gpu
