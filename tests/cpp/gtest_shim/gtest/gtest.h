// A stand-in for the part of GoogleTest that these tests use, for machines that have none. The
// same macros, command line (--gtest_filter, --gtest_list_tests) and output marks, so that
// gtest_discover_tests and its handling of skipped tests work unchanged.
#pragma once

#include <cmath>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace testing {

class Message {
 public:
  template <class T>
  Message& operator<<(T const& value) {
    stream_ << value;
    return *this;
  }
  Message& operator<<(Message const& other) { return *this << other.text(); }
  std::string text() const { return stream_.str(); }
  Message() = default;
  Message(Message const& other) { stream_ << other.text(); }

 private:
  std::ostringstream stream_;
};

class Test {
 public:
  virtual ~Test() = default;
  virtual void SetUp() {}
  virtual void TearDown() {}
  virtual void TestBody() = 0;
};

namespace internal {

enum class Outcome { kFailure, kSkip };

// Defined in main.cpp.
void record(Outcome outcome, char const* file, int line, std::string const& text);
bool register_test(char const* suite, char const* name, std::function<void()> body);
std::vector<std::string>& traces();

// Takes the streamed text of one macro; the assignment makes `return Recorder(...) = Message()` a
// statement of a void function.
class Recorder {
 public:
  Recorder(Outcome outcome, char const* file, int line, std::string text)
      : outcome_(outcome), file_(file), line_(line), text_(std::move(text)) {}
  void operator=(Message const& message) const {
    std::string const more = message.text();
    record(outcome_, file_, line_, more.empty() ? text_ : text_ + "\n" + more);
  }

 private:
  Outcome outcome_;
  char const* file_;
  int line_;
  std::string text_;
};

class Trace {
 public:
  Trace(char const* file, int line, Message const& message) {
    traces().push_back(std::string(file) + ":" + std::to_string(line) + ": " + message.text());
  }
  ~Trace() { traces().pop_back(); }
  Trace(Trace const&) = delete;
};

template <class T>
std::string show(T const& value) {
  std::ostringstream out;
  if constexpr (std::is_floating_point_v<T>) { out.precision(17); }
  if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else {
    out << "<" << sizeof(T) << " bytes>";
  }
  return out.str();
}

// Empty when the check holds, otherwise what to print.
template <class Compare, class A, class B>
std::string compare(char const* a_text, char const* b_text, char const* sign, A const& a,
                    B const& b, Compare holds) {
  if (holds(a, b)) { return ""; }
  return std::string("expected: ") + a_text + " " + sign + " " + b_text + ", got " + show(a) +
         " and " + show(b);
}

inline std::string near(char const* a_text, char const* b_text, double a, double b, double bound) {
  if (std::abs(a - b) <= bound) { return ""; }
  return std::string("expected: ") + a_text + " within " + show(bound) + " of " + b_text +
         ", got " + show(a) + " and " + show(b);
}

inline std::string is(char const* text, bool value, bool wanted) {
  return value == wanted ? "" : std::string(text) + " is " + (value ? "true" : "false");
}

template <class Exception, class Statement>
std::string throws(char const* text, char const* type, Statement const& statement) {
  std::string what = "threw nothing";
  try {
    statement();
  } catch (Exception const&) { return ""; } catch (std::exception const& error) {
    what = std::string("threw: ") + error.what();
  } catch (...) { what = "threw something else"; }
  return std::string("expected ") + text + " to throw " + type + ", it " + what;
}

template <class Statement>
std::string throws_nothing(char const* text, Statement const& statement) {
  try {
    statement();
  } catch (std::exception const& error) {
    return std::string(text) + " threw: " + error.what();
  } catch (...) { return std::string(text) + " threw"; }
  return "";
}

template <class Fixture>
void run_fixture() {
  Fixture fixture;
  Test& test = fixture;  // a fixture may keep SetUp and TearDown to itself
  test.SetUp();
  test.TestBody();
  test.TearDown();
}

}  // namespace internal
}  // namespace testing

#define FA_TEST_JOIN_(a, b) a##b
#define FA_TEST_JOIN(a, b) FA_TEST_JOIN_(a, b)
#define FA_TEST_CLASS(suite, name) suite##_##name##_Test

#define FA_TEST_DEFINE(suite, name, base)                                                       \
  class FA_TEST_CLASS(suite, name) : public base {                                              \
    void TestBody() override;                                                                   \
    static inline bool const registered_ = ::testing::internal::register_test(                  \
        #suite, #name, [] { ::testing::internal::run_fixture<FA_TEST_CLASS(suite, name)>(); }); \
  };                                                                                            \
  void FA_TEST_CLASS(suite, name)::TestBody()

#define TEST(suite, name) FA_TEST_DEFINE(suite, name, ::testing::Test)
#define TEST_F(fixture, name) FA_TEST_DEFINE(fixture, name, fixture)

#define FA_TEST_RECORD(outcome, text)                                                              \
  ::testing::internal::Recorder(::testing::internal::Outcome::outcome, __FILE__, __LINE__, text) = \
      ::testing::Message()

// The switch keeps an `else` behind the macro from binding to its `if`.
#define FA_TEST_CHECK(failure_text, on_failure)                        \
  switch (0)                                                           \
  case 0:                                                              \
  default:                                                             \
    if (std::string const fa_text = (failure_text); fa_text.empty()) { \
    } else on_failure FA_TEST_RECORD(kFailure, fa_text)

#define FA_TEST_COMPARE(a, b, sign, on_failure)                                                  \
  FA_TEST_CHECK(::testing::internal::compare(                                                    \
                    #a, #b, #sign, a, b, [](auto const& x, auto const& y) { return x sign y; }), \
                on_failure)
#define FA_TEST_NEAR(a, b, bound, on_failure) \
  FA_TEST_CHECK(::testing::internal::near(#a, #b, a, b, bound), on_failure)
#define FA_TEST_IS(value, wanted, on_failure) \
  FA_TEST_CHECK(::testing::internal::is(#value, static_cast<bool>(value), wanted), on_failure)
#define FA_TEST_THROW(statement, type, on_failure)                                        \
  FA_TEST_CHECK(::testing::internal::throws<type>(#statement, #type, [&] { statement; }), \
                on_failure)
#define FA_TEST_NO_THROW(statement, on_failure) \
  FA_TEST_CHECK(::testing::internal::throws_nothing(#statement, [&] { statement; }), on_failure)

#define EXPECT_EQ(a, b) FA_TEST_COMPARE(a, b, ==, )
#define EXPECT_NE(a, b) FA_TEST_COMPARE(a, b, !=, )
#define EXPECT_LT(a, b) FA_TEST_COMPARE(a, b, <, )
#define EXPECT_LE(a, b) FA_TEST_COMPARE(a, b, <=, )
#define EXPECT_GT(a, b) FA_TEST_COMPARE(a, b, >, )
#define EXPECT_GE(a, b) FA_TEST_COMPARE(a, b, >=, )
#define EXPECT_NEAR(a, b, bound) FA_TEST_NEAR(a, b, bound, )
#define EXPECT_TRUE(value) FA_TEST_IS(value, true, )
#define EXPECT_FALSE(value) FA_TEST_IS(value, false, )
#define EXPECT_THROW(statement, type) FA_TEST_THROW(statement, type, )
#define EXPECT_NO_THROW(statement) FA_TEST_NO_THROW(statement, )

#define ASSERT_EQ(a, b) FA_TEST_COMPARE(a, b, ==, return)
#define ASSERT_NE(a, b) FA_TEST_COMPARE(a, b, !=, return)
#define ASSERT_LT(a, b) FA_TEST_COMPARE(a, b, <, return)
#define ASSERT_LE(a, b) FA_TEST_COMPARE(a, b, <=, return)
#define ASSERT_GT(a, b) FA_TEST_COMPARE(a, b, >, return)
#define ASSERT_GE(a, b) FA_TEST_COMPARE(a, b, >=, return)
#define ASSERT_NEAR(a, b, bound) FA_TEST_NEAR(a, b, bound, return)
#define ASSERT_TRUE(value) FA_TEST_IS(value, true, return)
#define ASSERT_FALSE(value) FA_TEST_IS(value, false, return)
#define ASSERT_THROW(statement, type) FA_TEST_THROW(statement, type, return)
#define ASSERT_NO_THROW(statement) FA_TEST_NO_THROW(statement, return)

#define ADD_FAILURE() FA_TEST_RECORD(kFailure, "failed")
#define FAIL() return FA_TEST_RECORD(kFailure, "failed")
#define SUCCEED() static_cast<void>(::testing::Message())
#define GTEST_SKIP() return FA_TEST_RECORD(kSkip, "skipped")
#define SCOPED_TRACE(message)                                         \
  ::testing::internal::Trace const FA_TEST_JOIN(fa_trace_, __LINE__)( \
      __FILE__, __LINE__, ::testing::Message() << (message))
