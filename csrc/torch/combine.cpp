// The operators `combine` and `combine_out`.
#include <optional>
#include <tuple>
#include <vector>

#include "flashattn/flashattn.h"
#include "torch/op_support.h"
#include "torch/ops.h"

namespace flashattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::detail::from;
using torch::stable::detail::to;

// Of one result, without the dim of the parts.
Sizes out_shape(View const& out_partial) {
  return {out_partial.sizes.data() + 1, out_partial.sizes.size() - 1};
}

void check_parts(View const& out_partial, View const& lse_partial) {
  int64_t const rank = out_partial.dim();
  if (rank != 4 && rank != 5) {
    refuse("out_partial", "expected 4 or 5 dims, got shape ", to_string(out_partial.sizes));
  }
  check_last_stride(out_partial, "out_partial");
  if (lse_partial.dtype != aoti_torch_dtype_float32()) {
    refuse("lse_partial", "expected dtype float32");
  }
  std::vector<int64_t> expected = lse_shape(out_shape(out_partial));
  expected.insert(expected.begin(), out_partial.size(0));
  check_shape(lse_partial, "lse_partial", expected);
  check_device(lse_partial, "lse_partial", out_partial);
}

// Everything but out and lse.
FlashCombineParams input_params(View const& out_partial, View const& lse_partial) {
  check_parts(out_partial, lse_partial);
  int64_t const row = out_partial.dim() - 3;
  bool const packed = row == 1;
  FlashCombineParams params;
  params.device = device_of(out_partial);
  params.splits = narrow("out_partial", out_partial.size(0));
  params.batch = packed ? 1 : narrow("out_partial", out_partial.size(1));
  params.seqlen = narrow("out_partial", out_partial.size(row));
  params.heads = narrow("out_partial", out_partial.size(row + 1));
  params.head_dim = narrow("out_partial", out_partial.size(row + 2));
  params.partial_dtype = dtype_of(out_partial, "out_partial");
  params.out_partial = strided(out_partial, out_partial.data(), 1);
  params.out_split_stride = stride_or_zero(out_partial, 0);
  params.lse_partial = static_cast<float const*>(lse_partial.data());
  params.lse_split_stride = stride_or_zero(lse_partial, 0);
  params.lse_batch_stride = packed ? 0 : stride_or_zero(lse_partial, 1);
  params.lse_head_stride = stride_or_zero(lse_partial, row);
  params.lse_row_stride = stride_or_zero(lse_partial, row + 1);
  return params;
}

void run(FlashCombineParams& params, View const& out, float* lse) {
  params.out_dtype = dtype_of(out, "out");
  params.out = strided(out, out.tensor.mutable_data_ptr());
  params.lse = lse;
  on_device_of(out, [&](cudaStream_t stream) { run_flash_combine(params, stream); });
}

std::tuple<Tensor, Tensor> combine(Tensor const& out_partial, Tensor const& lse_partial,
                                   std::optional<ScalarType> out_dtype) {
  View const parts = out_partial;
  FlashCombineParams params = input_params(parts, lse_partial);
  int32_t const dtype = out_dtype ? to<int32_t>(from(*out_dtype)) : parts.dtype;
  Tensor out = empty(out_shape(parts), dtype, parts);
  Tensor lse = empty(lse_shape(out_shape(parts)), aoti_torch_dtype_float32(), parts);
  run(params, out, lse_data(lse));
  return {out, lse};
}

void combine_out(Tensor const& out_partial, Tensor const& lse_partial, Tensor const& out,
                 OptionalTensor const& lse) {
  View const parts = out_partial, result = out;
  FlashCombineParams params = input_params(parts, lse_partial);
  check_shape(result, "out", out_shape(parts));
  check_last_stride(result, "out");
  check_device(result, "out", parts);
  run(params, result, checked_lse_data(lse, parts, lse_shape(out_shape(parts))));
}

}  // namespace

void define_combine(Library& m) {
  m.def(
      "combine(Tensor out_partial, Tensor lse_partial, ScalarType? out_dtype) -> "
      "(Tensor out, Tensor lse)");
  m.def(
      "combine_out(Tensor out_partial, Tensor lse_partial, Tensor(a!) out, Tensor(b!)? lse) -> ()");
}

void implement_combine(Library& m) {
  m.impl("combine", TORCH_BOX(&combine));
  m.impl("combine_out", TORCH_BOX(&combine_out));
}

}  // namespace flashattn
