// The CPU backend against a double-precision reference, with every instruction set of this machine.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "cpu/cpu.h"
#include "cpu_problem.h"

namespace cpu_test {
namespace {

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
constexpr flashattn::Window kWindows[] = {{-1, -1}, {-1, 0},  {5, 0},  {0, 0},      {-1, 3},
                                          {7, -1},  {20, 40}, {0, 90}, {1000, 1000}};

void expect_right(Case const& c) {
  SCOPED_TRACE(::testing::Message()
               << "type " << static_cast<int>(c.dtype) << " heads " << c.heads << "/" << c.heads_kv
               << " dim " << c.head_dim << " q " << c.len_q[0] << " k " << c.len_k[0] << " window "
               << c.window.left << "," << c.window.right);
  Problem(c).check();
}

Case single(int len_q, int len_k) {
  Case c;
  c.heads = c.heads_kv = 1;
  c.head_dim = 32;
  c.len_q = {len_q};
  c.len_k = {len_k};
  return c;
}

TEST(CpuBackend, TypesAndWindows) {
  for (DType dtype : kTypes) {
    for (flashattn::Window window : kWindows) {
      Case c;
      c.dtype = dtype;
      c.window = window;
      expect_right(c);
      std::swap(c.len_q, c.len_k);  // more queries than keys: rows without keys
      expect_right(c);
    }
  }
}

TEST(CpuBackend, EveryHeadDim) {
  for (DType dtype : kTypes) {
    for (int dim = 8; dim <= 256; dim += 8) {
      Case c = single(17, 45);
      c.dtype = dtype;
      c.head_dim = dim;
      c.window = {-1, 0};
      expect_right(c);
    }
  }
}

TEST(CpuBackend, LengthsAroundTheTiles) {
  int const lengths[] = {1, 3, 6, 7, 12, 13, 31, 32, 33, 97, 128, 129, 255, 257, 513};
  for (int len_q : lengths) {
    for (int len_k : lengths) {
      Case c = single(len_q, len_k);
      c.dtype = kTypes[(len_q + len_k) % 3];
      c.window = kWindows[(len_q + 2 * len_k) % 9];
      expect_right(c);
    }
  }
}

TEST(CpuBackend, PackedWithEmptySequences) {
  for (DType dtype : kTypes) {
    for (flashattn::Window window : {flashattn::Window{-1, -1}, {-1, 0}, {9, 4}}) {
      Case c;
      c.dtype = dtype;
      c.window = window;
      c.packed = true;
      c.len_q = {0, 1, 130, 5, 0, 0, 260, 40, 0};
      c.len_k = {3, 1, 64, 0, 0, 7, 300, 20, 0};
      c.slack = 5;
      expect_right(c);
    }
  }
}

TEST(CpuBackend, Options) {
  for (int options = 0; options < 2 * 3 * 3 * 2; ++options) {
    Case c;
    c.softcap = options % 2 == 1 ? 2.f : 0.f;
    c.alibi_dims = options / 2 % 3;
    c.sinks = static_cast<Sinks>(options / 6 % 3);
    c.dtype = kTypes[options % 3];
    c.window = options / 18 == 0 ? flashattn::Window{-1, 0} : flashattn::Window{6, 2};
    c.len_q = {50, 50};
    c.len_k = {43, 43};  // with a causal mask, rows 0 ... 6 see nothing but the sink
    c.want_lse = options % 5 != 0;
    expect_right(c);
  }
}

TEST(CpuBackend, GroupedHeads) {
  int const groups[][2] = {{1, 1}, {9, 3}, {12, 1}, {13, 1}, {64, 2}, {300, 1}, {5, 5}};
  for (auto const& group : groups) {
    for (int len_q : {1, 10}) {
      Case c = single(len_q, 40);
      c.heads = group[0];
      c.heads_kv = group[1];
      c.head_dim = 16;
      c.window = {-1, 0};
      c.alibi_dims = 1;
      c.sinks = Sinks::kFloat32;
      expect_right(c);
    }
  }
}

TEST(CpuBackend, Strides) {
  for (DType dtype : kTypes) {
    Case c;
    c.dtype = dtype;
    c.heads_first = true;
    expect_right(c);
    c.shared_keys = true;
    expect_right(c);
    c.packed = true;
    c.gap = 0;
    expect_right(c);
  }
}

TEST(CpuBackend, UsedKeysAndPoisonBehindThem) {
  for (DType dtype : kTypes) {
    Case c;
    c.dtype = dtype;
    c.len_q = {33, 33, 33, 33};
    c.len_k = {0, 1, 77, 300};
    c.seqused = true;
    c.slack = 50;
    expect_right(c);
    c.window = {-1, 0};
    expect_right(c);
  }
}

TEST(CpuBackend, UnusualScales) {
  for (float scale : {0.f, -0.3f, 1e-6f, 5.f}) {
    for (DType dtype : kTypes) {
      Case c;
      c.dtype = dtype;
      c.scale = scale;
      expect_right(c);
    }
  }
  Case saturated;  // every score is ±1 after the cap
  saturated.softcap = 1.f;
  saturated.scale = 1e6f;
  expect_right(saturated);
}

// Lengths are untrusted: whatever they hold, nothing outside of the operands is touched (the
// sanitizers watch the reads) and clamped ones mean what the clamped value means.
TEST(CpuBackend, HostileLengths) {
  Case c;
  c.packed = true;
  c.slack = 3;
  for (std::vector<int> const& cu :
       {std::vector<int>{0, 1 << 30, -5}, {-7, 2147483647, 90}, {140, 70, 0}, {-1, -1, -1}}) {
    Problem p(c);
    p.cu_q = p.cu_k = cu;
    for (auto const& variant : flashattn::cpu::variants()) { p.run(variant); }
    EXPECT_EQ(p.params.lengths.cu_seqlens_q[0], cu[0]);
  }
  c = Case();
  c.seqused = true;
  for (int used : {-3, 1 << 30}) {
    Problem p(c);
    p.seqused = {used, used};
    p.run(flashattn::cpu::variants()[0]);
    EXPECT_EQ(p.lse[0] == -INFINITY, used < 0);
  }
}

// A NaN in a key that is visible reaches exactly the rows that see it.
TEST(CpuBackend, NanInAVisibleKey) {
  for (DType dtype : kTypes) {
    Case c = single(40, 40);
    c.dtype = dtype;
    c.window = {-1, 0};
    Problem p(c);
    put(dtype, p.k.at(0, 30, 0, 3), NAN);
    for (auto const& variant : flashattn::cpu::variants()) {
      p.run(variant);
      for (int row = 0; row < 40; ++row) {
        EXPECT_EQ(std::isnan(p.out.row(0, row, 0)[5]), row >= 30) << variant.name << " row " << row;
        EXPECT_EQ(std::isnan(p.lse[row]), row >= 30) << variant.name << " row " << row;
      }
    }
  }
}

// Two keys of equal weight whose values are neighbours: the mean is a tie, and goes to the even
// one.
TEST(CpuBackend, OutputRoundsToNearestEven) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    float const ulp = dtype == DType::kFloat16 ? 0x1p-10f : 0x1p-7f;
    Case c = single(1, 2);
    c.dtype = dtype;
    c.scale = 0.f;
    Problem p(c);
    for (int d = 0; d < c.head_dim; ++d) {
      put(dtype, p.v.at(0, 0, 0, d), 1.f + ulp);
      put(dtype, p.v.at(0, 1, 0, d), d % 2 == 0 ? 1.f : 1.f + 2 * ulp);
    }
    for (auto const& variant : flashattn::cpu::variants()) {
      p.run(variant);
      EXPECT_EQ(p.out.row(0, 0, 0)[0], 1.f) << variant.name;
      EXPECT_EQ(p.out.row(0, 0, 0)[1], 1.f + 2 * ulp) << variant.name;
    }
  }
}

TEST(CpuBackend, EmptyRowsStayZeroBesideANanValue) {
  Case c = single(40, 20);
  c.window = {-1, 0};
  Problem p(c);
  put(c.dtype, p.v.at(0, 0, 0, 3), NAN);
  for (auto const& variant : flashattn::cpu::variants()) {
    p.run(variant);
    EXPECT_EQ(p.out.row(0, 19, 0), std::vector<float>(32, 0.f)) << variant.name;
    EXPECT_EQ(p.lse[19], -INFINITY) << variant.name;
    EXPECT_TRUE(std::isnan(p.out.row(0, 20, 0)[3])) << variant.name;
  }
}

TEST(CpuBackend, BitsDoNotDependOnThreadsOrBatch) {
  Case c;
  c.packed = true;
  c.len_q = {3, 700, 40};
  c.len_k = {9, 900, 40};
  c.window = {-1, 0};
  Problem batch(c);
  std::vector<unsigned char> expected;
  for (int threads : {1, 2, 3, 8}) {
    flashattn::cpu::set_num_threads(threads);
    EXPECT_EQ(flashattn::cpu::num_threads(), threads);
    batch.run(flashattn::cpu::variants()[0]);
    if (expected.empty()) { expected = batch.out.bytes; }
    EXPECT_TRUE(batch.out.bytes == expected) << threads << " threads";
  }
  flashattn::cpu::set_num_threads(0);

  // The middle sequence on its own, as a dense batch of one.
  batch.params.lengths = {};
  batch.params.shape.batch = 1;
  batch.params.shape.seqlen_q = 700;
  batch.params.shape.seqlen_k = 900;
  batch.params.q.data = batch.q.at(0, 3, 0);
  batch.params.k.data = batch.k.at(0, 9, 0);
  batch.params.v.data = batch.v.at(0, 9, 0);
  batch.params.out.data = batch.out.at(0, 3, 0);
  batch.params.lse = nullptr;
  batch.run(flashattn::cpu::variants()[0]);
  std::size_t const row = batch.out.row_stride * 2, begin = 3 * row, end = 703 * row;
  EXPECT_TRUE(std::equal(batch.out.bytes.begin() + begin, batch.out.bytes.begin() + end,
                         expected.begin() + begin));
}

TEST(CpuBackend, ManyCallersAtOnce) {
  Case c;
  c.len_q = c.len_k = {300, 300};
  Problem reference(c);
  reference.run(flashattn::cpu::variants()[0]);
  std::atomic<int> equal{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([&] {
      Problem mine(c);
      for (int repeat = 0; repeat < 5; ++repeat) {
        mine.run(flashattn::cpu::variants()[0]);
        equal += mine.out.bytes == reference.out.bytes;
      }
    });
  }
  for (std::thread& caller : callers) { caller.join(); }
  EXPECT_EQ(equal.load(), 30);
}

}  // namespace
}  // namespace cpu_test
