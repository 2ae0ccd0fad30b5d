// The tile shapes of the kernels: the only place where they exist. Host code that plans a launch
// and the kernels themselves both read them here.
#pragma once

#include "core/macros.h"

namespace flashattn {

struct TileShape {
  int m;       // query rows of a thread block
  int n;       // keys of a block
  int warps;   // each takes m / warps query rows
  int stages;  // key and value blocks that are held in shared memory at once
  bool q_in_registers;
};

// Shared memory that one thread block may use, in bytes (CUDA C++ Programming Guide, table
// "Technical Specifications per Compute Capability").
constexpr int smem_limit(int arch) {
  if (arch >= 120 || arch == 86 || arch == 89) { return 99 * 1024; }
  return arch >= 90 ? 227 * 1024 : 163 * 1024;
}

// Q, then the stages of K and V, 2 bytes an element. The output reuses Q's part.
constexpr int smem_bytes(TileShape tile, int head_dim) {
  return 2 * head_dim * (tile.m + 2 * tile.stages * tile.n);
}

// Measured on an H200 (2026-11-29, docs/tuning.md). 32 query rows per warp halve the traffic of keys
// and values from shared memory to registers, as long as accumulator and scores fit a thread's 255
// registers; larger head dims take 16 rows. One stage, because two thread blocks on a
// multiprocessor hide each other's loads.
constexpr TileShape tile_shape(int /*arch*/, int head_dim) {
  if (head_dim <= 32) { return {128, 128, 4, 1, true}; }
  if (head_dim <= 64) { return {128, 128, 4, 1, false}; }
  if (head_dim <= 128) { return {128, 64, 4, 1, false}; }
  if (head_dim <= 160) { return {128, 32, 4, 1, false}; }
  if (head_dim <= 192) { return {64, 96, 4, 1, false}; }
  return {64, 64, 4, 1, false};
}

// The kernels that exist. Any multiple of 8 runs on the smallest kernel that holds it.
constexpr int kHeadDims[] = {32, 64, 96, 128, 160, 192, 224, 256};

}  // namespace flashattn
