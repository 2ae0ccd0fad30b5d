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

constexpr TileShape tile_shape(int arch, int head_dim) {
  if (head_dim <= 64) { return {128, 64, 4, 1, false}; }
  if (head_dim <= 128) { return {128, 64, 4, 1, false}; }
  // With the wide tile, head dims over 192 do not fit the smaller shared memory.
  if (head_dim > 192 && smem_limit(arch) < 112 * 1024) { return {64, 64, 4, 1, false}; }
  return {128, 64, 8, 1, false};
}

// The kernels that exist. Any multiple of 8 runs on the smallest kernel that holds it.
constexpr int kHeadDims[] = {32, 64, 96, 128, 160, 192, 224, 256};

}  // namespace flashattn
