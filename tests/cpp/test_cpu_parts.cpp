// The parts of the CPU backend that have nothing to do with attention: threads and 16-bit numbers.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "cpu/half.h"
#include "cpu/thread_pool.h"

namespace {

TEST(ThreadPool, RunsEveryIterationOnce) {
  for (int threads : {1, 2, 5}) {
    std::vector<std::atomic<int>> seen(1000);
    flashattn::cpu::parallel_for(1000, threads, [&](int64_t i) { ++seen[i]; });
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](auto const& n) { return n == 1; }));
  }
  flashattn::cpu::parallel_for(0, 4, [](int64_t) { throw std::logic_error("no iteration"); });
}

TEST(ThreadPool, ThrowsInTheCaller) {
  for (int threads : {1, 4}) {
    auto const body = [](int64_t i) {
      if (i == 37) { throw std::runtime_error("iteration 37"); }
    };
    EXPECT_THROW(flashattn::cpu::parallel_for(1000, threads, body), std::runtime_error);
  }
}

TEST(ThreadPool, WorksAfterFork) {
  auto const sum_up = [] {
    std::atomic<int64_t> sum{0};
    flashattn::cpu::parallel_for(100, 4, [&](int64_t i) { sum += i; });
    return sum.load();
  };
  EXPECT_EQ(sum_up(), 4950);
  pid_t const child = fork();
  if (child == 0) {
    alarm(20);
    _exit(sum_up() == 4950 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// Against the definition of the format, for all bit patterns; then back, from both neighbours too.
TEST(Half, Float16) {
  using flashattn::cpu::float16_to_float, flashattn::cpu::float_to_float16;
  for (int bits = 0; bits < 0x7c00; ++bits) {
    int const exponent = bits >> 10, mantissa = bits & 0x3ff;
    float const value = exponent == 0 ? std::ldexp(float(mantissa), -24)
                                      : std::ldexp(float(1024 + mantissa), exponent - 25);
    EXPECT_EQ(float16_to_float(bits), value);
    EXPECT_EQ(float_to_float16(value), bits);
    EXPECT_EQ(float_to_float16(-value), bits | 0x8000);
    float const next = bits == 0x7bff ? 65536.f : float16_to_float(bits + 1);
    float const middle = value + (next - value) / 2;  // a tie: the even neighbour
    EXPECT_EQ(float_to_float16(middle), bits + (bits & 1));
    EXPECT_EQ(float_to_float16(std::nextafter(middle, 0.f)), bits);
    EXPECT_EQ(float_to_float16(std::nextafter(middle, 1e9f)), bits + 1);
  }
  EXPECT_EQ(float16_to_float(0xfc00), -INFINITY);
  EXPECT_TRUE(std::isnan(float16_to_float(0x7e01)));
  EXPECT_TRUE(std::isnan(float16_to_float(float_to_float16(NAN))));
}

TEST(Half, BFloat16) {
  using flashattn::cpu::bfloat16_to_float, flashattn::cpu::float_to_bfloat16;
  EXPECT_EQ(float_to_bfloat16(1.f), 0x3f80);
  EXPECT_EQ(float_to_bfloat16(0x1.01p0f), 0x3f80);      // ties to even, down
  EXPECT_EQ(float_to_bfloat16(0x1.03p0f), 0x3f82);      // and up
  EXPECT_EQ(float_to_bfloat16(0x1.010002p0f), 0x3f81);  // more than half
  EXPECT_EQ(float_to_bfloat16(3.4e38f), 0x7f80);
  EXPECT_TRUE(std::isnan(bfloat16_to_float(float_to_bfloat16(NAN))));
  for (int bits = 0; bits < 0x7f81; ++bits) {
    EXPECT_EQ(float_to_bfloat16(bfloat16_to_float(bits)), bits);
  }
}

}  // namespace
