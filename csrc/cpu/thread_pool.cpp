#include "cpu/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "cpu/cpu.h"
#include "flashattn/error.h"

namespace flashattn::cpu {
namespace {

// One parallel_for in progress. It lives on the caller's stack: the caller leaves only when no
// helper works on it any more.
struct Loop {
  int64_t count;
  std::function<void(int64_t)> const& body;
  std::atomic<int64_t> next{0};
  std::exception_ptr error = nullptr;  // these three are guarded by the pool's mutex
  int helpers_wanted;
  int helpers_inside = 0;
};

class ThreadPool {
 public:
  void run(Loop& loop) {
    {
      std::lock_guard lock(mutex_);
      start_helpers(loop.helpers_wanted);
      loops_.push_back(&loop);
    }
    work_available_.notify_all();
    work_on(loop);

    std::unique_lock lock(mutex_);
    std::erase(loops_, &loop);
    helper_left_.wait(lock, [&] { return loop.helpers_inside == 0; });
    if (loop.error) { std::rethrow_exception(loop.error); }
  }

 private:
  void start_helpers(int wanted) {
    try {
      for (; helpers_ < wanted; ++helpers_) {
        std::thread([this] { help_forever(); }).detach();
      }
    } catch (std::system_error const&) {
      // The system gives no more threads: the caller does the work with those that exist.
    }
  }

  void work_on(Loop& loop) {
    try {
      for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.count;) {
        loop.body(i);
      }
    } catch (...) {
      loop.next.store(loop.count, std::memory_order_relaxed);
      std::lock_guard lock(mutex_);
      if (!loop.error) { loop.error = std::current_exception(); }
    }
  }

  Loop* oldest_loop_that_wants_help() {
    auto const found = std::find_if(loops_.begin(), loops_.end(), [](Loop* loop) {
      return loop->helpers_wanted > 0 && loop->next.load(std::memory_order_relaxed) < loop->count;
    });
    return found == loops_.end() ? nullptr : *found;
  }

  void help_forever() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Loop* loop = nullptr;
      work_available_.wait(lock, [&] { return (loop = oldest_loop_that_wants_help()) != nullptr; });
      --loop->helpers_wanted;
      ++loop->helpers_inside;
      lock.unlock();
      work_on(*loop);
      lock.lock();
      if (--loop->helpers_inside == 0) { helper_left_.notify_all(); }
    }
  }

  std::mutex mutex_;
  std::condition_variable work_available_;
  std::condition_variable helper_left_;
  std::deque<Loop*> loops_;
  int helpers_ = 0;
};

// Never destroyed, since helpers use it until the process ends. A forked child has none of the
// parent's helpers, and the parent's mutex may be locked for ever there: it gets a new pool.
std::atomic<ThreadPool*> current_pool{nullptr};

ThreadPool& pool() {
  static bool const created = [] {
    current_pool = new ThreadPool;
    pthread_atfork(nullptr, nullptr, [] { current_pool = new ThreadPool; });
    return true;
  }();
  (void)created;
  return *current_pool;
}

constexpr int kMostThreads = 4096;

// The variable of this library: 0 when it is not set or empty.
int own_number_of_threads() {
  char const* const text = std::getenv("FLASHATTN_EXT_NUM_THREADS");
  if (text == nullptr || *text == '\0') { return 0; }
  int count = 0;
  char const* const end = text + std::strlen(text);
  auto const [past, error] = std::from_chars(text, end, count);
  if (error != std::errc() || past != end || count < 1 || count > kMostThreads) {
    throw InvalidArgument(
        "FLASHATTN_EXT_NUM_THREADS: expected a number of threads from 1 to 4096, got " +
        std::string(text));
  }
  return count;
}

// The variable of OpenMP, which says how many it takes: "8,2" reads as 8.
int openmp_number_of_threads() {
  char const* const text = std::getenv("OMP_NUM_THREADS");
  return text == nullptr ? 0 : std::clamp(std::atoi(text), 0, kMostThreads);
}

int default_num_threads() {
  static int const count = [] {
    if (int const n = own_number_of_threads()) { return n; }
    if (int const n = openmp_number_of_threads()) { return n; }
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }();
  return count;
}

std::atomic<int> chosen_num_threads{0};

}  // namespace

int num_threads() {
  int const chosen = chosen_num_threads.load(std::memory_order_relaxed);
  return chosen > 0 ? chosen : default_num_threads();
}

void set_num_threads(int count) {
  chosen_num_threads.store(std::max(count, 0), std::memory_order_relaxed);
}

void parallel_for(int64_t count, int threads, std::function<void(int64_t)> const& body) {
  int const useful = static_cast<int>(std::min<int64_t>(threads, count));
  if (useful <= 1) {
    for (int64_t i = 0; i < count; ++i) { body(i); }
    return;
  }
  Loop loop{.count = count, .body = body, .helpers_wanted = useful - 1};
  pool().run(loop);
}

}  // namespace flashattn::cpu
