// Scratch memory of one thread, kept between calls: fresh pages from the system would cost more
// than a small attention call.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace flashattn::cpu {

class Workspace {
 public:
  static constexpr std::size_t kAlignment = 64;

  static Workspace& of_this_thread() {
    thread_local Workspace workspace;
    return workspace;
  }

  // Forgets everything that was taken, and makes room for `bytes` (kAlignment more per array).
  void reset(std::size_t bytes) {
    if (bytes > capacity_) {
      memory_.reset();
      memory_.reset(new (std::align_val_t(kAlignment)) std::byte[bytes]);
      capacity_ = bytes;
    }
    used_ = 0;
  }

  // The next `count` objects, uninitialised.
  template <class T>
  T* take(std::size_t count) {
    T* const array = reinterpret_cast<T*>(memory_.get() + used_);
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(kAlignment)); }
  };
  std::unique_ptr<std::byte[], Free> memory_;
  std::size_t capacity_ = 0;
  std::size_t used_ = 0;
};

}  // namespace flashattn::cpu
