// Runs what the TEST macros have registered: gtest_main for the stand-in.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>

#include "gtest/gtest.h"

namespace testing::internal {
namespace {

struct TestCase {
  std::string suite;
  std::string name;
  std::function<void()> body;
  std::string full_name() const { return suite + "." + name; }
};

struct State {
  std::vector<TestCase> tests;
  std::vector<std::string> traces;
  bool failed = false;
  bool skipped = false;
};

State& state() {
  static State instance;
  return instance;
}

bool matches(char const* pattern, char const* text) {
  if (*pattern == '\0') { return *text == '\0'; }
  if (*pattern == '*') {
    return matches(pattern + 1, text) || (*text != '\0' && matches(pattern, text + 1));
  }
  return *text != '\0' && (*pattern == '?' || *pattern == *text) && matches(pattern + 1, text + 1);
}

bool any_matches(std::string const& patterns, std::string const& name) {
  std::istringstream list(patterns);
  for (std::string pattern; std::getline(list, pattern, ':');) {
    if (matches(pattern.c_str(), name.c_str())) { return true; }
  }
  return false;
}

// "a*:b*-c*": matched by a* or b*, and not by c*.
bool selected(std::string const& filter, std::string const& name) {
  size_t const dash = filter.find('-');
  std::string const wanted = filter.substr(0, dash);
  std::string const unwanted = dash == std::string::npos ? "" : filter.substr(dash + 1);
  return any_matches(wanted.empty() ? "*" : wanted, name) && !any_matches(unwanted, name);
}

void list_tests(std::string const& filter) {
  std::string suite;
  for (TestCase const& test : state().tests) {
    if (!selected(filter, test.full_name())) { continue; }
    if (test.suite != suite) { std::cout << test.suite << ".\n"; }
    suite = test.suite;
    std::cout << "  " << test.name << "\n";
  }
}

void run(TestCase const& test) {
  std::cout << "[ RUN      ] " << test.full_name() << std::endl;
  state().failed = state().skipped = false;
  auto const start = std::chrono::steady_clock::now();
  try {
    test.body();
  } catch (std::exception const& error) {
    record(Outcome::kFailure, test.full_name().c_str(), 0,
           std::string("uncaught: ") + error.what());
  } catch (...) { record(Outcome::kFailure, test.full_name().c_str(), 0, "uncaught exception"); }
  auto const elapsed = std::chrono::steady_clock::now() - start;
  char const* mark = state().failed    ? "[  FAILED  ] "
                     : state().skipped ? "[  SKIPPED ] "
                                       : "[       OK ] ";
  std::cout << mark << test.full_name() << " ("
            << std::chrono::duration_cast<std::chrono::milliseconds>(elapsed).count() << " ms)"
            << std::endl;
}

int run_all(std::string const& filter) {
  std::vector<std::string> failed;
  int passed = 0, skipped = 0;
  for (TestCase const& test : state().tests) {
    if (!selected(filter, test.full_name())) { continue; }
    run(test);
    if (state().failed) {
      failed.push_back(test.full_name());
    } else if (state().skipped) {
      ++skipped;
    } else {
      ++passed;
    }
  }
  std::cout << "[  PASSED  ] " << passed << " tests\n";
  if (skipped > 0) { std::cout << "[  SKIPPED ] " << skipped << " tests\n"; }
  for (std::string const& name : failed) { std::cout << "[  FAILED  ] " << name << "\n"; }
  return failed.empty() ? 0 : 1;
}

}  // namespace

void record(Outcome outcome, char const* file, int line, std::string const& text) {
  (outcome == Outcome::kFailure ? state().failed : state().skipped) = true;
  std::cout << file << ":" << line << ": " << (outcome == Outcome::kFailure ? "Failure" : "Skipped")
            << "\n"
            << text << "\n";
  for (std::string const& trace : traces()) { std::cout << "  at " << trace << "\n"; }
  std::cout << std::flush;
}

bool register_test(char const* suite, char const* name, std::function<void()> body) {
  state().tests.push_back({suite, name, std::move(body)});
  return true;
}

std::vector<std::string>& traces() { return state().traces; }

}  // namespace testing::internal

int main(int argc, char** argv) {
  std::string filter = "*";
  bool list = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--gtest_filter=", 15) == 0) { filter = argv[i] + 15; }
    list |= std::strcmp(argv[i], "--gtest_list_tests") == 0;
  }
  if (list) {
    testing::internal::list_tests(filter);
    return 0;
  }
  return testing::internal::run_all(filter);
}
