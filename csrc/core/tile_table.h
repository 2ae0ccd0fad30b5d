// The tile shapes of the kernels: the only place where they exist. Host code that plans a launch
// and the kernels themselves both read them here.
#pragma once

#include "core/macros.h"

namespace flashattn {

struct TileShape {
  int m;       // query rows of a thread block
  int n;       // keys of a block
  int warps;   // each takes m * key_warps / warps query rows
  int stages;  // key and value blocks that are held in shared memory at once
  bool q_in_registers;
  int key_warps = 1;  // warps that share the same rows and take n / key_warps keys each
};

// What a kernel is for. kPrefill is flash_fwd; flash_fwd_splitkv serves the sequences of a batch that
// have few query rows with kDecode and the others with kChunk.
enum class Role { kPrefill, kChunk, kDecode };

// Shared memory that one thread block may use, in bytes (CUDA C++ Programming Guide, table
// "Technical Specifications per Compute Capability").
constexpr int smem_limit(int arch) {
  if (arch >= 120 || arch == 86 || arch == 89) { return 99 * 1024; }
  return arch >= 90 ? 227 * 1024 : 163 * 1024;
}

// Q, then the stages of K and V, 2 bytes an element, and up to 1 KB of softmax states and flags. The
// output reuses the rest.
constexpr int smem_bytes(TileShape tile, int head_dim) {
  return 2 * head_dim * (tile.m + 2 * tile.stages * tile.n) + 1024;
}

// Measured on an H200 (2026-11-29, docs/tuning.md). 32 query rows per warp halve the traffic of keys
// and values from shared memory to registers, as long as accumulator and scores fit a thread's 255
// registers; larger head dims take 16 rows. One stage, because two thread blocks on a
// multiprocessor hide each other's loads.
constexpr TileShape prefill_tile(int head_dim) {
  if (head_dim <= 32) { return {128, 128, 4, 1, true}; }
  if (head_dim <= 64) { return {128, 128, 4, 1, false}; }
  if (head_dim <= 128) { return {128, 64, 4, 1, false}; }
  if (head_dim <= 160) { return {128, 32, 4, 1, false}; }
  if (head_dim <= 192) { return {64, 96, 4, 1, false}; }
  return {64, 64, 4, 1, false};
}

// The same with blocks that divide kSplitGranule.
constexpr TileShape chunk_tile(int head_dim) {
  TileShape tile = prefill_tile(head_dim);
  tile.n = tile.n < 64 ? tile.n : 64;
  return tile;
}

// Decoding is bound by memory: what counts is bytes in flight, so the rows are few (one MMA) and the
// stages as many as leave room for two thread blocks on a multiprocessor. From sm_90 on, head dims over
// 192 take the room of both. Machine code of sm_80 also runs on sm_86 and sm_89 and has to fit there.
constexpr int decode_room(int arch, int head_dim) {
  if (arch < 90) { return 80 * 1024; }
  return head_dim <= 192 && smem_limit(arch) > 112 * 1024 ? 112 * 1024 : smem_limit(arch);
}

constexpr TileShape decode_tile(int arch, int head_dim) {
  TileShape tile{16, 64, 4, 1, false, 4};
  int const room = decode_room(arch, head_dim);
  while (tile.stages < 4) {
    ++tile.stages;
    if (smem_bytes(tile, head_dim) > room) { return {16, 64, 4, tile.stages - 1, false, 4}; }
  }
  return tile;
}

constexpr TileShape tile_shape(int arch, Role role, int head_dim) {
  if (role == Role::kDecode) { return decode_tile(arch, head_dim); }
  return role == Role::kChunk ? chunk_tile(head_dim) : prefill_tile(head_dim);
}

// The kernels that exist. Any multiple of 8 runs on the smallest kernel that holds it.
constexpr int kHeadDims[] = {32, 64, 96, 128, 160, 192, 224, 256};

}  // namespace flashattn
