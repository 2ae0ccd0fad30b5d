// What the library throws. Every message names the argument, what it got and what is allowed.
#pragma once

#include <stdexcept>
#include <string>

namespace flashattn {

// The caller's arguments break the contract of the function.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The arguments are meaningful, but this build or this device cannot serve them.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The CUDA runtime reported an error.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace flashattn
