// The CUDA kernels through the C++ API, on the GPU, against a reference in double.
// Small on purpose: the whole file also runs under compute-sanitizer.
#include <climits>
#include <cmath>

#include "gpu_problem.h"

namespace {

using flashattn::DType;
using gpu::Case;
using gpu::Order;
using gpu::Sinks;

std::vector<int> const kHeadDims = {8,   32,  40,  64,  72,  96,  104, 128,
                                    136, 160, 184, 192, 200, 224, 248, 256};

void sweep_head_dims(DType dtype) {
  for (int head_dim : gpu::built_head_dims(kHeadDims)) {
    for (bool causal : {false, true}) {
      SCOPED_TRACE("head dim " + std::to_string(head_dim) + (causal ? ", causal" : ""));
      Case c{.dtype = dtype, .head_dim = head_dim, .len_q = {150}, .len_k = {131}};
      c.scale = 1.f / std::sqrt(static_cast<float>(head_dim));
      c.window.right = causal ? 0 : -1;
      gpu::expect_right(c);
    }
  }
}

TEST(FlashFwd, HeadDimsInBFloat16) {
  SKIP_WITHOUT_GPU();
  sweep_head_dims(DType::kBFloat16);
}

TEST(FlashFwd, HeadDimsInFloat16) {
  SKIP_WITHOUT_GPU();
  sweep_head_dims(DType::kFloat16);
}

TEST(FlashFwd, LengthsAroundTheTile) {
  SKIP_WITHOUT_GPU();
  for (int len_q : {1, 15, 16, 17, 63, 64, 65, 127, 128, 129}) {
    for (int len_k : {1, 7, 63, 64, 65, 128, 129, 200}) {
      SCOPED_TRACE(std::to_string(len_q) + " x " + std::to_string(len_k));
      Case c{.heads = 2, .heads_kv = 2, .head_dim = 32, .len_q = {len_q}, .len_k = {len_k}};
      c.window.right = len_q % 2 == 0 ? -1 : 0;
      gpu::expect_right(c);
    }
  }
}

TEST(FlashFwd, Windows) {
  SKIP_WITHOUT_GPU();
  for (auto [len_q, len_k] : {std::pair{200, 130}, {130, 200}, {1, 256}}) {
    for (int left : {-1, 0, 3, 64, 199, INT_MAX}) {
      for (int right : {-1, 0, 5, 64, INT_MAX}) {
        SCOPED_TRACE(std::to_string(len_q) + " x " + std::to_string(len_k) + ", window " +
                     std::to_string(left) + ", " + std::to_string(right));
        gpu::expect_right({.heads = 2,
                           .heads_kv = 1,
                           .head_dim = 32,
                           .len_q = {len_q},
                           .len_k = {len_k},
                           .window = {left, right}});
      }
    }
  }
}

TEST(FlashFwd, OptionsAloneAndInPairs) {
  SKIP_WITHOUT_GPU();
  for (int first = 0; first <= gpu::kOptions; ++first) {
    for (int second = first; second <= gpu::kOptions; ++second) {
      SCOPED_TRACE("options " + std::to_string(first) + " and " + std::to_string(second));
      Case const base{.dtype = first % 2 == 0 ? DType::kBFloat16 : DType::kFloat16,
                      .len_q = {90, 90},
                      .len_k = {77, 77}};
      gpu::expect_right(gpu::with_option(gpu::with_option(base, first), second));
    }
  }
}

TEST(FlashFwd, SoftcapSaturates) {
  SKIP_WITHOUT_GPU();
  for (float magnitude : {25.f, 100.f}) {  // scores of about ±5,000 and ±80,000
    Case c{.len_q = {65}, .len_k = {80}, .softcap = 50.f, .magnitude = magnitude};
    c.scale = 1.f;
    gpu::expect_right(c);
  }
}

TEST(FlashFwd, GroupedHeads) {
  SKIP_WITHOUT_GPU();
  for (auto [heads, heads_kv] : {std::pair{4, 4}, {6, 3}, {9, 3}, {8, 1}, {14, 2}}) {
    for (int len_q : {1, 3, 64, 65}) {
      for (int alibi_dims : {0, 2}) {
        SCOPED_TRACE(std::to_string(heads) + "/" + std::to_string(heads_kv) + " heads, " +
                     std::to_string(len_q) + " rows");
        Case c{.heads = heads,
               .heads_kv = heads_kv,
               .head_dim = 32,
               .len_q = {len_q, len_q},
               .len_k = {90, 90},
               .window = {-1, 0},
               .alibi_dims = alibi_dims};
        c.sinks = alibi_dims == 0 ? Sinks::kNone : Sinks::kFloat32;
        gpu::expect_right(c);
      }
    }
  }
}

TEST(FlashFwd, PackedRaggedAndEmptySequences) {
  SKIP_WITHOUT_GPU();
  std::vector<std::pair<std::vector<int>, std::vector<int>>> const lengths = {
      {{5, 64, 1, 130}, {0, 64, 0, 130}},
      {{150, 0, 150}, {100, 100, 100}},
      {{1, 1, 1}, {70, 1, 200}},
      {{0, 0}, {10, 20}},
      {{129, 3}, {0, 0}},
      {{128, 128, 7}, {128, 256, 3}}};
  for (auto const& [len_q, len_k] : lengths) {
    for (int right : {-1, 0}) {
      for (int slack : {0, 3}) {
        Case c{.len_q = len_q, .len_k = len_k, .packed_q = true, .packed_k = true, .slack = slack};
        c.window.right = right;
        c.sinks = slack == 0 ? Sinks::kNone : Sinks::kLikeQ;
        gpu::expect_right(c);
      }
    }
  }
}

TEST(FlashFwd, UpperBoundsPlayNoPart) {
  SKIP_WITHOUT_GPU();
  for (int bound : {1, 33, 64, 65, 1000, 1 << 30}) {
    SCOPED_TRACE("max_seqlen_q " + std::to_string(bound));
    gpu::expect_right({.len_q = {33, 100},
                       .len_k = {40, 90},
                       .packed_q = true,
                       .packed_k = true,
                       .window = {-1, 0},
                       .max_seqlen_q = bound});
  }
}

TEST(FlashFwd, PackedQueriesOverDenseKeysAndBack) {
  SKIP_WITHOUT_GPU();
  gpu::expect_right({.len_q = {3, 70}, .len_k = {90, 90}, .packed_q = true});
  gpu::expect_right({.len_q = {70, 70}, .len_k = {0, 90}, .packed_k = true, .slack = 2});
}

TEST(FlashFwd, PartlyUsedKeys) {
  SKIP_WITHOUT_GPU();
  for (int len_q : {1, 66}) {
    std::vector<int> const rows(4, len_q);
    gpu::expect_right(
        {.len_q = rows, .len_k = {1, 64, 0, 129}, .seqused = true, .slack = 70, .window = {-1, 0}});
  }
}

TEST(FlashFwd, Strides) {
  SKIP_WITHOUT_GPU();
  for (Order k : {Order::kRowsFirst, Order::kHeadsFirst}) {
    for (Order v : {Order::kRowsFirst, Order::kHeadsFirst}) {
      for (int gap : {0, 8, 64}) {
        gpu::expect_right({.head_dim = 40,
                           .len_q = {67, 67},
                           .len_k = {130, 130},
                           .order_k = k,
                           .order_v = v,
                           .gap = gap});
      }
    }
  }
}

TEST(FlashFwd, NoKeysAtAll) {
  SKIP_WITHOUT_GPU();
  for (Sinks sinks : {Sinks::kNone, Sinks::kFloat32}) {
    Case c{.len_q = {70, 70}, .len_k = {0, 0}};
    c.sinks = sinks;
    gpu::expect_right(c);
  }
}

}  // namespace
