// The CUDA kernels over a cache through the C++ API, on the GPU, against a reference in double.
// Small on purpose: the whole file also runs under compute-sanitizer.
#include <climits>
#include <cmath>
#include <string>

#include "splitkv_problem.h"

namespace {

using flashattn::DType;
using gpu::CacheCase;
using gpu::Sinks;

// A batch in which one sequence is decoded and the other is a chunk of a prompt.
CacheCase mixed() {
  CacheCase c;
  c.packed_q = true;
  c.len_q = {1, 40};
  c.cached = {100, 75};
  c.window = {-1, 0};
  return c;
}

void sweep_head_dims(DType dtype) {
  for (int head_dim :
       gpu::built_head_dims({8, 32, 40, 64, 72, 96, 128, 136, 160, 192, 224, 248, 256})) {
    for (int num_splits : {1, 2}) {
      SCOPED_TRACE("head dim " + std::to_string(head_dim) + ", splits " +
                   std::to_string(num_splits));
      CacheCase c = mixed();
      c.dtype = dtype;
      c.heads = 2;
      c.heads_kv = 1;
      c.len_q = {1, 20};
      c.head_dim = head_dim;
      c.page_size = num_splits == 1 ? 0 : 16;
      c.num_splits = num_splits;
      c.scale = 1.f / std::sqrt(static_cast<float>(head_dim));
      gpu::expect_right(c);
    }
  }
}

TEST(Splitkv, HeadDimsInBFloat16) {
  SKIP_WITHOUT_GPU();
  sweep_head_dims(DType::kBFloat16);
}

TEST(Splitkv, HeadDimsInFloat16) {
  SKIP_WITHOUT_GPU();
  sweep_head_dims(DType::kFloat16);
}

// Around the 16 rows of a decode tile and the 128 of a chunk, with all counts of packed heads.
TEST(Splitkv, RowsAndHeadsOfARole) {
  SKIP_WITHOUT_GPU();
  for (auto [heads, heads_kv] : {std::pair{2, 2}, {4, 1}, {6, 2}, {5, 1}, {17, 1}, {32, 1}}) {
    for (int len_q : {1, 2, 4, 5, 16, 17, 130}) {
      if (len_q * heads > 260) { continue; }
      SCOPED_TRACE(std::to_string(heads) + "/" + std::to_string(heads_kv) + " heads, " +
                   std::to_string(len_q) + " rows");
      CacheCase c;
      c.heads = heads;
      c.heads_kv = heads_kv;
      c.head_dim = 32;
      c.len_q = {len_q, len_q};
      c.cached = {90, 7};
      c.window = {-1, 0};
      c.num_splits = 1 + len_q % 2;
      gpu::expect_right(c);
    }
  }
}

TEST(Splitkv, MixedPackedBatches) {
  SKIP_WITHOUT_GPU();
  std::vector<std::pair<std::vector<int>, std::vector<int>>> const lengths = {
      {{1, 5, 0, 33}, {130, 64, 10, 40}},
      {{40, 1, 1}, {100, 0, 1}},
      {{0, 0}, {3, 4}},
      {{3, 1}, {2, 65}}};
  for (auto const& [len_q, cached] : lengths) {
    for (int num_splits : {0, 1, 3}) {
      for (int slack : {0, 2}) {
        CacheCase c = mixed();
        c.head_dim = 32;
        c.len_q = len_q;
        c.cached = cached;
        c.slack = slack;
        c.num_splits = num_splits;
        c.max_seqlen_q = slack == 0 ? 0 : 1000;
        c.sinks = slack == 0 ? Sinks::kNone : Sinks::kLikeQ;
        gpu::expect_right(c);
      }
    }
  }
}

TEST(Splitkv, AnyNumberOfSplits) {
  SKIP_WITHOUT_GPU();
  for (int page_size : {0, 16}) {
    for (int num_splits : {0, 1, 2, 3, 7, 33, 256}) {
      SCOPED_TRACE(std::to_string(num_splits) + " splits, page size " + std::to_string(page_size));
      CacheCase c = mixed();
      c.head_dim = 40;
      c.capacity = 400;
      c.cached = {390, 129};
      c.page_size = page_size;
      c.num_splits = num_splits;
      c.sinks = Sinks::kFloat32;  // of one split only
      gpu::expect_right(c);
    }
    for (int split_size : {64, 128, 448}) {
      SCOPED_TRACE("split size " + std::to_string(split_size));
      CacheCase c = mixed();
      c.capacity = 400;
      c.cached = {390, 129};
      c.page_size = page_size;
      c.split_size = split_size;
      c.num_splits = 0;
      c.sinks = Sinks::kFloat32;
      gpu::expect_right(c);
    }
  }
}

TEST(Splitkv, AutomaticSplitsOfALongCapacity) {
  SKIP_WITHOUT_GPU();
  for (int cached : {0, 1, 64, 300, 4096}) {
    CacheCase c;
    c.heads = c.heads_kv = 1;
    c.head_dim = 32;
    c.len_q = {1};
    c.cached = {cached};
    c.same_length = cached % 2 == 0;
    c.capacity = 4096;
    c.num_splits = 0;
    gpu::expect_right(c);
  }
}

TEST(Splitkv, PageSizes) {
  SKIP_WITHOUT_GPU();
  for (int page_size : {1, 3, 16, 48, 64, 256}) {
    for (int num_splits : {1, 3}) {
      for (bool shared : {false, true}) {
        SCOPED_TRACE("page size " + std::to_string(page_size));
        CacheCase c = mixed();
        c.head_dim = page_size == 48 ? 40 : 32;
        c.page_size = page_size;
        c.num_splits = num_splits;
        c.share_first_page = shared;
        c.spare_columns = shared ? 2 : 0;
        c.order_v = shared ? gpu::Order::kHeadsFirst : gpu::Order::kRowsFirst;
        if (page_size == 256) { c.capacity = 500; }
        gpu::expect_right(c);
      }
    }
  }
}

// −1, too large, INT_MIN ...: no key, nor any read of foreign memory.
TEST(Splitkv, PagesThatDoNotExist) {
  SKIP_WITHOUT_GPU();
  for (int page_size : {1, 16, 48}) {
    for (int num_splits : {1, 2, 7}) {
      SCOPED_TRACE("page size " + std::to_string(page_size));
      CacheCase c = mixed();
      c.page_size = page_size;
      c.num_splits = num_splits;
      c.holes = {{0, 0}, {0, 1}, {1, 1}};
      if (page_size == 48) {
        c.holes = {{0, 0}, {0, 1}, {0, 2}, {1, 0}};
      }  // no key at all, half of them
      gpu::expect_right(c);
      c.softcap = 5.f;
      c.window = {-1, -1};
      c.sinks = Sinks::kFloat32;
      gpu::expect_right(c);
    }
  }
}

TEST(Splitkv, LeftPadding) {
  SKIP_WITHOUT_GPU();
  for (int page_size : {0, 16}) {
    for (std::vector<int> const& leftpad :
         {std::vector<int>{5, 0}, {64, 70}, {100, 75}, {-3, INT_MAX}}) {
      for (int option : {0, 2, 6}) {
        CacheCase c = gpu::with_option(mixed(), option);
        c.page_size = page_size;
        c.leftpad = leftpad;
        c.num_splits = 1 + option;
        gpu::expect_right(c);
      }
    }
  }
}

TEST(Splitkv, CacheRows) {
  SKIP_WITHOUT_GPU();
  for (std::vector<int> const& rows :
       {std::vector<int>{3, 0}, {1, 1}, {-1, 2}, {4, INT_MAX}, {INT_MIN, 0}}) {
    CacheCase c = mixed();
    c.batch_idx = rows;
    c.cached = {75, 75};
    gpu::expect_right(c);
  }
}

TEST(Splitkv, LengthsAreClampedToTheCapacity) {
  SKIP_WITHOUT_GPU();
  for (int page_size : {0, 16}) {
    for (std::vector<int> const& cached :
         {std::vector<int>{145, -1}, {INT_MAX, INT_MIN}, {144, 0}}) {
      CacheCase c = mixed();
      c.cached = cached;
      c.page_size = page_size;
      c.num_splits = 2;
      gpu::expect_right(c);
    }
  }
}

TEST(Splitkv, OptionsAloneAndInPairs) {
  SKIP_WITHOUT_GPU();
  for (int first = 0; first <= gpu::kOptions; ++first) {
    for (int second = first; second <= gpu::kOptions; ++second) {
      SCOPED_TRACE("options " + std::to_string(first) + " and " + std::to_string(second));
      CacheCase c = mixed();
      c.dtype = first % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
      c.head_dim = 32;
      c.num_splits = 1 + (first + second) % 3;
      c.page_size = second % 2 == 0 ? 16 : 0;
      gpu::expect_right(gpu::with_option(gpu::with_option(c, first), second));
    }
  }
}

TEST(Splitkv, RowsThatSeeNoKey) {
  SKIP_WITHOUT_GPU();
  for (Sinks sinks : {Sinks::kNone, Sinks::kFloat32}) {
    for (int num_splits : {1, 3}) {
      CacheCase c = mixed();
      c.cached = {0, 11};  // the first 29 rows of the chunk come before all keys
      c.sinks = sinks;
      c.num_splits = num_splits;
      gpu::expect_right(c);
      c.capacity = 0;
      gpu::expect_right(c);
    }
  }
}

}  // namespace
