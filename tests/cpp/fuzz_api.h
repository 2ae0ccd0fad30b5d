// What fuzz_main.cpp and libFuzzer call, and how often it got how far.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fuzz {

struct Counts {
  long refused = 0;
  long computed = 0;  // on the CPU
  long planned = 0;   // for a GPU
};
extern Counts counts;

}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size);
