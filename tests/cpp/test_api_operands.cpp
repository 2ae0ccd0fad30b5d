// Every pointer and every stride of the C++ API: what is null, misaligned or out of range is
// refused by name before anything is written.
#include <gtest/gtest.h>

#include <climits>
#include <string>
#include <vector>

#include "api_refusal.h"

namespace {

using api::Call;
using api::CombineCall;
using api::Refusal;
using api::SplitkvCall;
using flashattn::DType;

template <class Pointer>
Pointer shifted(Pointer pointer, int bytes) {
  return reinterpret_cast<Pointer>(reinterpret_cast<uintptr_t>(pointer) + bytes);
}

template <class Operand>
int64_t& stride(Operand& operand, int dim) {
  return dim == 0 ? operand.batch_stride : dim == 1 ? operand.row_stride : operand.head_stride;
}

// `get` gives the operand of a call. Strides are checked where they must be multiples of something.
template <class AnyCall, class Get>
void expect_operand_refused(std::string const& name, int alignment, Get get) {
  std::string const multiple = "multiple of " + std::to_string(alignment);
  std::vector<Refusal<AnyCall>> refusals;
  for (int bytes = 1; bytes < alignment; bytes *= 2) {
    refusals.push_back(
        {name, {multiple}, [=](AnyCall& c) { get(c).data = shifted(get(c).data, bytes); }});
  }
  char const* const dims[] = {".batch_stride", ".row_stride", ".head_stride"};
  for (int dim = 0; dim < 3; ++dim) {
    for (int64_t far : {INT64_MAX - 15, INT64_MIN, (int64_t(1) << 58) + 16}) {
      refusals.push_back({name + dims[dim],
                          {"got " + std::to_string(far), " ... "},
                          [=](AnyCall& c) { stride(get(c), dim) = far; }});
    }
    for (int off : {1, 2, -1}) {
      if (alignment < 16) { continue; }
      refusals.push_back(
          {name + dims[dim], {multiple}, [=](AnyCall& c) { stride(get(c), dim) += off; }});
    }
  }
  api::expect_refused(refusals);
}

template <class AnyCall, class Get>
void expect_null_refused(std::string const& name, Get get) {
  api::expect_refused<AnyCall>({{name, {"null"}, [=](AnyCall& c) { get(c).data = nullptr; }}});
}

// Each operand of flash_fwd: its name, and a function that gives it.
template <class Expect>
void for_each_operand(Expect expect) {
  expect("q", [](Call& c) -> auto& { return c.params.q; });
  expect("k", [](Call& c) -> auto& { return c.params.k; });
  expect("v", [](Call& c) -> auto& { return c.params.v; });
  expect("out", [](Call& c) -> auto& { return c.params.out; });
}

TEST(ApiOperands, OfFlashFwd) {
  for_each_operand([](char const* name, auto get) {
    expect_null_refused<Call>(name, get);
    expect_operand_refused<Call>(name, 16, get);
  });
}

TEST(ApiOperands, OfAPackedCall) {
  for_each_operand([](char const* name, auto get) {
    expect_null_refused<Call>(name, [get](Call& c) -> auto& {
      c.pack();
      return get(c);
    });
  });
}

TEST(ApiOperands, OfFlashSplitkvFwd) {
  auto const expect = [](char const* name, auto get) {
    auto const walked = [get](SplitkvCall& c) -> auto& {
      c.splitkv.append.seqlen = 2;
      return get(c);
    };
    expect_null_refused<SplitkvCall>(name, walked);
    expect_operand_refused<SplitkvCall>(name, 16, walked);
  };
  expect("q", [](SplitkvCall& c) -> auto& { return c.splitkv.fwd.q; });
  expect("k", [](SplitkvCall& c) -> auto& { return c.splitkv.fwd.k; });
  expect("v", [](SplitkvCall& c) -> auto& { return c.splitkv.fwd.v; });
  expect("out", [](SplitkvCall& c) -> auto& { return c.splitkv.fwd.out; });
  expect("append.k", [](SplitkvCall& c) -> auto& { return c.splitkv.append.k; });
  expect("append.v", [](SplitkvCall& c) -> auto& { return c.splitkv.append.v; });
}

TEST(ApiOperands, OfFlashCombine) {
  auto const out = [](CombineCall& c) -> auto& { return c.combine.out; };
  auto const parts = [](CombineCall& c) -> auto& { return c.combine.out_partial; };
  expect_null_refused<CombineCall>("out", out);
  expect_null_refused<CombineCall>("out_partial, lse_partial", parts);
  expect_operand_refused<CombineCall>("out", 4, out);
  expect_operand_refused<CombineCall>("out_partial", 4, parts);
  api::expect_refused<CombineCall>({{"out_partial", {"multiple of 2"}, [parts](CombineCall& c) {
                                       c.combine.partial_dtype = DType::kFloat16;
                                       parts(c).data = shifted(parts(c).data, 1);
                                     }}});
}

// Numbers of 4 bytes at an address that is not a multiple of 4. `get` gives the pointer.
template <class AnyCall, class Get>
void expect_numbers_refused(std::string const& name, Get get) {
  for (int bytes : {1, 2, 3}) {
    api::expect_refused<AnyCall>(
        {{name, {"multiple of 4"}, [=](AnyCall& c) { get(c) = shifted(get(c), bytes); }}});
  }
}

TEST(ApiNumbers, OfFlashFwd) {
  auto const expect = [](char const* name, auto get) { expect_numbers_refused<Call>(name, get); };
  expect("lse", [](Call& c) -> auto& { return c.params.lse; });
  expect("alibi_slopes", [](Call& c) -> auto& {
    c.params.score.alibi_slopes = c.sinks;
    return c.params.score.alibi_slopes;
  });
  expect("sinks", [](Call& c) -> auto& {
    c.params.score.sinks = c.sinks;
    return c.params.score.sinks;
  });
  expect("seqused_k", [](Call& c) -> auto& {
    c.params.lengths.seqused_k = c.cu_seqlens;
    return c.params.lengths.seqused_k;
  });
  expect("cu_seqlens_q", [](Call& c) -> auto& {
    c.pack();
    return c.params.lengths.cu_seqlens_q;
  });
  expect("cu_seqlens_k", [](Call& c) -> auto& {
    c.pack();
    return c.params.lengths.cu_seqlens_k;
  });
}

TEST(ApiNumbers, OfFlashSplitkvFwd) {
  auto const expect = [](char const* name, auto get) {
    expect_numbers_refused<SplitkvCall>(name, get);
  };
  expect("cache.seqlens", [](SplitkvCall& c) -> auto& { return c.splitkv.cache.seqlens; });
  expect("cache.leftpad", [](SplitkvCall& c) -> auto& {
    c.splitkv.cache.leftpad = c.seqlens;
    return c.splitkv.cache.leftpad;
  });
  expect("cache.batch_idx", [](SplitkvCall& c) -> auto& {
    c.splitkv.cache.batch_idx = c.seqlens;
    return c.splitkv.cache.batch_idx;
  });
  expect("cache.block_table", [](SplitkvCall& c) -> auto& {
    c.use_pages();
    return c.splitkv.cache.block_table;
  });
  for (auto const table : {&flashattn::Append::rotary_cos, &flashattn::Append::rotary_sin}) {
    bool const cos = table == &flashattn::Append::rotary_cos;
    api::expect_refused<SplitkvCall>({{cos ? "append.rotary_cos" : "append.rotary_sin",
                                       {"multiple of"},
                                       [table](SplitkvCall& c) {
                                         c.rotate();
                                         c.splitkv.append.*table =
                                             shifted(c.splitkv.append.*table, 1);
                                       }}});
  }
}

TEST(ApiNumbers, OfFlashCombine) {
  auto const expect = [](char const* name, auto get) {
    expect_numbers_refused<CombineCall>(name, get);
  };
  expect("lse", [](CombineCall& c) -> auto& { return c.combine.lse; });
  expect("lse_partial", [](CombineCall& c) -> auto& { return c.combine.lse_partial; });
  expect("sequences", [](CombineCall& c) -> auto& {
    c.combine.sequences = c.cu_seqlens;
    return c.combine.sequences;
  });
}

// Strides that are no operand's. Some dimensions have to be walked for them to count.
TEST(ApiStrides, OutOfRange) {
  for (int64_t far : {INT64_MAX, INT64_MIN, (int64_t(1) << 58) + 1}) {
    std::string const got = "got " + std::to_string(far);
    if (far > 0) {
      api::expect_refused<Call>({{"alibi_batch_stride", {got}, [=](Call& c) {
                                    c.params.score.alibi_slopes = c.sinks;
                                    c.params.score.alibi_batch_stride = far;
                                  }}});
    }
    api::expect_refused<SplitkvCall>({{"cache.block_table_stride", {got}, [=](SplitkvCall& c) {
                                         c.use_pages();
                                         c.splitkv.cache.block_table_stride = far;
                                       }}});
    api::expect_refused<CombineCall>({
        {"out_split_stride", {got}, [=](CombineCall& c) { c.combine.out_split_stride = far; }},
        {"lse_split_stride", {got}, [=](CombineCall& c) { c.combine.lse_split_stride = far; }},
        {"lse_batch_stride", {got}, [=](CombineCall& c) { c.combine.lse_batch_stride = far; }},
        {"lse_head_stride", {got}, [=](CombineCall& c) { c.combine.lse_head_stride = far; }},
        {"lse_row_stride", {got}, [=](CombineCall& c) { c.combine.lse_row_stride = far; }},
    });
  }
}

}  // namespace
