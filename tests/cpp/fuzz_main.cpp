// Stands in for libFuzzer where the compiler has none: random bytes, the same in every run.
//
//   fuzz_api        for FLASHATTN_FUZZ_SECONDS (20)
//   fuzz_api SEED   that one input: what a failure prints
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "fuzz_api.h"

namespace {

void run(unsigned seed) {
  std::minstd_rand random(seed);
  std::vector<uint8_t> bytes(200);
  for (uint8_t& byte : bytes) { byte = static_cast<uint8_t>(random() >> 8); }
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

// Notes each seed before it is run, for the parent process.
int run_many(unsigned volatile* seed) {
  char const* const text = std::getenv("FLASHATTN_FUZZ_SECONDS");
  auto const end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(text == nullptr ? 20 : std::atoi(text));
  do {
    *seed = *seed + 1;
    run(*seed);
  } while (std::chrono::steady_clock::now() < end);
  fuzz::Counts const& counts = fuzz::counts;
  std::printf("%u inputs: %ld refused, %ld computed on the CPU, %ld plans for a GPU\n", *seed,
              counts.refused, counts.computed, counts.planned);
  return counts.refused > 0 && counts.computed > 0 && counts.planned > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    run(static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10)));
    return 0;
  }
  // Whatever ends the child, the seed survives.
  void* const page =
      mmap(nullptr, sizeof(unsigned), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) { return 1; }
  auto* const seed = static_cast<unsigned volatile*>(page);
  if (pid_t const child = fork(); child == 0) {
    return run_many(seed);
  } else {
    int status = 1;
    waitpid(child, &status, 0);
    if (status != 0) { std::fprintf(stderr, "fuzz: to repeat it: fuzz_api %u\n", *seed); }
    return status == 0 ? 0 : 1;
  }
}
