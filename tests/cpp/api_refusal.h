// Calls that must be refused: with which words, and without writing anything.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "api_call.h"

namespace api {

template <class AnyCall>
struct Refusal {
  std::string name;                // of the argument: the message starts with it
  std::vector<std::string> facts;  // what the message must also say: got, allowed
  std::function<void(AnyCall&)> damage;
};

template <class AnyCall>
void expect_refused(Refusal<AnyCall> const& refusal, Device device) {
  SCOPED_TRACE(refusal.name + (device == Device::kCpu ? " on the CPU, got " : " on CUDA, got ") +
               refusal.facts[0]);
  AnyCall call;
  call.use(device);
  refusal.damage(call);
  std::string message;
  try {
    call.run();
  } catch (flashattn::InvalidArgument const& error) {
    message = error.what();
  } catch (std::exception const& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return;
  }
  bool const names_it = message.rfind(refusal.name + ":", 0) == 0 ||
                        message.rfind(refusal.name + " in bytes:", 0) == 0;
  EXPECT_TRUE(names_it) << "message: '" << message << "'";
  for (std::string const& fact : refusal.facts) {
    EXPECT_NE(message.find(fact), std::string::npos)
        << "message: '" << message << "' lacks '" << fact << "'";
  }
  EXPECT_TRUE(call.untouched());
}

// Before any device is asked, so that both devices refuse alike, whatever was built.
template <class AnyCall>
void expect_refused(std::vector<Refusal<AnyCall>> const& refusals) {
  for (Refusal<AnyCall> const& refusal : refusals) {
    expect_refused(refusal, Device::kCpu);
    expect_refused(refusal, Device::kCuda);
  }
}

}  // namespace api
