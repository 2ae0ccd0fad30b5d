// A loop whose iterations are shared out to threads.
//
// Why not OpenMP: torch brings its own copy of an OpenMP runtime, and a second one in the process
// means two pools that fight for the cores. The pool below is about 100 lines.
//
// * The caller works too; helpers are started on first use and sleep between loops.
// * Any number of threads may call at once; a helper takes iterations of the oldest loop that
//   still wants help.
// * An exception in an iteration stops the loop and is thrown again in the caller.
// * After fork() the child starts its own helpers. Helpers are never joined: at exit they sleep.
#pragma once

#include <cstdint>
#include <functional>

namespace flashattn::cpu {

// Runs body(0) ... body(count - 1) in any order on at most `threads` threads.
void parallel_for(int64_t count, int threads, std::function<void(int64_t)> const& body);

}  // namespace flashattn::cpu
