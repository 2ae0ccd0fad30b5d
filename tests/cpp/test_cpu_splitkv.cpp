// The CPU backend over a cache, against double, with every instruction set of this machine.
#include <gtest/gtest.h>

#include "cache_problem.h"

namespace cpu_test {
namespace {

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

void expect_right(CacheCase const& c) {
  SCOPED_TRACE(::testing::Message()
               << "type " << static_cast<int>(c.dtype) << " page " << c.page_size << " leftpad "
               << c.leftpad << " append " << c.append << " rotary " << c.rotary_dim << " splits "
               << c.num_splits << " of " << c.split_size << " window " << c.window.left << ","
               << c.window.right << " packed " << c.packed << " bad " << c.bad_every);
  CacheProblem(c).check();
}

CacheCase small() {
  CacheCase c;
  c.head_dim = 32;
  c.len_q = {3, 3};
  return c;
}

TEST(CpuSplitkv, PagesLeftpadAndRows) {
  for (int i = 0; i < 5 * 2 * 3; ++i) {
    CacheCase c = small();
    c.dtype = kTypes[i % 3];
    c.page_size = (int[]){0, 1, 3, 16, 48}[i / 3 % 5];
    c.leftpad = i / 15 == 1;
    c.batch_idx = c.page_size == 0 && i % 2 == 0;
    c.page_columns = i % 2;
    c.heads_first = i % 4 == 3;
    c.window = i % 2 == 1 ? flashattn::Window{-1, 0} : flashattn::Window{};
    expect_right(c);
  }
}

TEST(CpuSplitkv, AppendAndRotary) {
  for (int i = 0; i < 2 * 3 * 3 * 2; ++i) {
    CacheCase c = small();
    c.dtype = kTypes[i % 3];
    c.page_size = (int[]){0, 3, 16}[i / 3 % 3];
    c.interleaved = i / 9 % 2 == 1;
    c.rotary_dim = i % 4 == 0 ? 0 : (i % 4 == 3 ? 32 : 16);
    c.append = 1 + i % 5;
    c.leftpad = i % 2 == 1;
    c.batch_idx = c.page_size == 0;
    c.cached = {30, 142};  // the second has no room for all
    c.window = (flashattn::Window[]){{-1, -1}, {-1, 0}, {20, -1}, {4, 3}}[i / 2 % 4];
    c.packed = i / 18 == 1;
    if (c.packed) { c.len_q = {5, 1}; }
    expect_right(c);
  }
}

TEST(CpuSplitkv, RotaryWithoutNewTokensTurnsQueriesOnly) {
  CacheCase c = small();
  c.rotary_dim = 16;
  c.window = {-1, 0};
  expect_right(c);
}

TEST(CpuSplitkv, Splits) {
  for (int splits : {0, 1, 2, 3, 7, 256, -64, -128, -192}) {
    for (int page_size : {0, 16}) {
      CacheCase c = small();
      (splits < 0 ? c.split_size : c.num_splits) = std::abs(splits);
      c.heads = 2;
      c.heads_kv = 1;
      c.head_dim = page_size == 0 ? 160 : 32;
      c.page_size = page_size;
      c.capacity = 1100;
      c.cached = {1100, 300, 0, 65};
      c.len_q = {2, 2, 2, 2};
      c.window = {-1, 0};
      c.sinks = Sinks::kFloat32;
      expect_right(c);
      c.window = {400, 0};
      c.sinks = Sinks::kNone;
      c.packed = true;
      c.len_q = {100, 0, 1, 40};
      c.slack = 4;
      expect_right(c);
    }
  }
}

TEST(CpuSplitkv, Options) {
  for (int i = 0; i < 2 * 3 * 2 * 2; ++i) {
    CacheCase c = small();
    c.dtype = kTypes[i % 3];
    c.softcap = i % 2 == 1 ? 2.f : 0.f;
    c.alibi_dims = i / 2 % 3;
    c.sinks = i / 6 % 2 == 1 ? Sinks::kFloat32 : Sinks::kNone;
    c.window = i / 12 == 0 ? flashattn::Window{-1, 0} : flashattn::Window{6, 2};
    c.num_splits = (int[]){1, 2, 5}[i % 3];
    c.page_size = i % 4 == 0 ? 0 : 16;
    c.len_q = {50, 50};
    c.cached = {600, 44};  // rows 0 ... 5 of the second see nothing but the sink
    c.capacity = 640;
    c.want_lse = i % 5 != 0;
    c.leftpad = i % 2 == 0;
    expect_right(c);
  }
}

TEST(CpuSplitkv, GroupedHeads) {
  int const groups[][2] = {{1, 1}, {9, 3}, {13, 1}, {300, 1}, {508, 2}};
  for (auto const& group : groups) {
    CacheCase c = small();
    c.heads = group[0];
    c.heads_kv = group[1];
    c.head_dim = 16;
    c.page_size = 16;
    c.num_splits = 2;
    c.alibi_dims = 1;
    expect_right(c);
  }
}

TEST(CpuSplitkv, BadPagesAndRowsAreNoKeys) {
  for (int page_size : {0, 1, 3, 16}) {
    for (int bad_every : {2, 3, 7}) {
      CacheCase c = small();
      c.page_size = page_size;
      c.bad_every = bad_every;
      c.batch_idx = page_size == 0;
      c.append = 2;
      c.num_splits = bad_every == 2 ? 2 : 1;
      c.sinks = bad_every == 7 ? Sinks::kFloat32 : Sinks::kNone;
      c.window = bad_every == 3 ? flashattn::Window{-1, 0} : flashattn::Window{};
      c.capacity = 300;
      c.cached = {290, 70, 20};
      c.len_q = {4, 4, 4};
      expect_right(c);
    }
  }
}

TEST(CpuSplitkv, UntrustedLengths) {
  for (int page_size : {0, 16}) {
    CacheCase c = small();
    c.page_size = page_size;
    c.cached = {INT_MAX, -5, INT_MIN, 145, 1};
    c.len_q = {2, 2, 2, 2, 2};
    c.append = 3;
    c.leftpad = true;  // more than there is in some
    expect_right(c);
    c.append = 0;
    c.same_length = true;
    c.cached = {77};
    expect_right(c);
  }
}

unsigned char* query_row(CacheProblem& p, Operand& t, int sequence, int row, int head) {
  return p.c.packed ? t.at(0, p.cu_q[sequence] + row, head) : t.at(sequence, row, head);
}

// Where a token of `operand` is in `memory`, a copy of its bytes.
unsigned char* token_row(CacheProblem& p, Operand& operand, std::vector<unsigned char>& memory,
                         int sequence, int token, int head) {
  int const page = p.c.page_size, columns = p.params.cache.table_columns;
  int const row = p.rows_of[page > 0 ? sequence * columns + token / page : sequence];
  int const slot = page > 0 ? token % page : token;
  return memory.data() + (operand.at(row, slot, head) - operand.bytes.data());
}

// The rows of sequence `from` in `a` have the bits of those of sequence `to` in `b`.
void expect_same_bits(CacheProblem& a, int from, CacheProblem& b, int to) {
  int const bytes = a.c.head_dim * size_of(a.c.dtype);
  for (int i = 0; i < a.c.len_q[from] * a.c.heads; ++i) {
    int const row = i / a.c.heads, head = i % a.c.heads;
    EXPECT_EQ(std::memcmp(query_row(a, a.out, from, row, head), query_row(b, b.out, to, row, head),
                          bytes),
              0)
        << "row " << row << " head " << head;
  }
}

// Gives sequence `to` of `b` the queries, keys and values of sequence `from` of `a`.
void copy_sequence(CacheProblem& a, int from, CacheProblem& b, int to) {
  int const bytes = a.c.head_dim * size_of(a.c.dtype);
  for (int i = 0; i < a.c.len_q[from] * a.c.heads; ++i) {
    int const row = i / a.c.heads, head = i % a.c.heads;
    std::memcpy(query_row(b, b.q, to, row, head), query_row(a, a.q, from, row, head), bytes);
  }
  for (int i = 0; i < a.c.cached[from] * a.c.heads_kv; ++i) {
    int const token = i / a.c.heads_kv, head = i % a.c.heads_kv;
    std::memcpy(token_row(b, b.k, b.k_before, to, token, head),
                token_row(a, a.k, a.k_before, from, token, head), bytes);
    std::memcpy(token_row(b, b.v, b.v_before, to, token, head),
                token_row(a, a.v, a.v_before, from, token, head), bytes);
  }
}

TEST(CpuSplitkv, BitsDoNotDependOnBatchCapacityPagesAndThreads) {
  for (int split_size : {0, 64, 192}) {
    CacheCase c = small();
    c.window = {-1, 0};
    c.sinks = Sinks::kFloat32;
    c.split_size = split_size;
    c.num_splits = split_size == 0 ? 1 : 0;
    c.len_q = {140};
    c.cached = {500};
    c.capacity = 500;
    CacheProblem alone(c);
    c.packed = true;
    c.len_q = {1, 140, 300, 0};
    c.cached = {2000, 500, 30, 7};
    c.capacity = 2048;
    c.page_size = 3;
    CacheProblem together(c, 2);
    together.sinks = alone.sinks;
    copy_sequence(alone, 0, together, 1);
    for (flashattn::cpu::Variant const& variant : flashattn::cpu::variants()) {
      flashattn::cpu::set_num_threads(1);
      alone.run(variant);
      flashattn::cpu::set_num_threads(7);
      together.run(variant);
      flashattn::cpu::set_num_threads(0);
      expect_same_bits(alone, 0, together, 1);
    }
  }
}

TEST(CpuSplitkv, BitsDoNotDependOnThreads) {
  for (int num_splits : {0, 3}) {
    CacheCase c = small();
    c.len_q = {400};
    c.cached = {3000};
    c.capacity = 3000;
    c.window = {900, 0};
    c.num_splits = num_splits;
    CacheProblem problem(c);
    flashattn::cpu::Variant const& variant = flashattn::cpu::chosen_variant();
    flashattn::cpu::set_num_threads(1);
    problem.run(variant);
    std::vector<unsigned char> const once = problem.out.bytes;
    flashattn::cpu::set_num_threads(13);
    problem.run(variant);
    flashattn::cpu::set_num_threads(0);
    EXPECT_EQ(problem.out.bytes, once);
  }
}

}  // namespace
}  // namespace cpu_test
