// The tile shapes of the kernels: the only place where they exist. Host code that plans a launch
// and the kernels themselves both read them here.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace flashattn {

struct TileShape {
  int m;       // query rows of a thread block
  int n;       // keys of a block
  int warps;   // each takes m * row_sharing() / warps query rows
  int stages;  // key and value blocks that are held in shared memory at once
  bool q_in_registers;
  int key_warps = 1;      // warps that share the same rows and take n / key_warps keys each, in both products
  int column_warps = 1;   // the same, but of P·V each takes head_dim / column_warps columns
  int query_buffers = 1;  // query tiles in shared memory
  int blocks = 1;         // thread blocks on a multiprocessor that registers are to suffice for
  int portions = 0;       // with one stage and 32 rows a warp, of the loads beside a product; 0: half of its slices

  constexpr int row_sharing() const { return key_warps * column_warps; }
};

// What a kernel is for. kPrefill is flash_fwd; flash_fwd_splitkv serves the sequences of a batch that
// have few query rows with kDecode, or kWideDecode, and the others with kChunk, or kShortChunk.
enum class Role { kPrefill, kChunk, kShortChunk, kDecode, kWideDecode };

constexpr bool is_chunk(Role role) { return role == Role::kChunk || role == Role::kShortChunk; }

// Which decode kernel serves a call whose sequences have at most `rows` query rows for one key/value head, `group`
// of them for each token.
constexpr Role decode_role(int group, int64_t rows) {
  return group > 16 || (rows > 16 && rows <= 32) ? Role::kWideDecode : Role::kDecode;
}

// Shared memory that one thread block may use, in bytes (CUDA C++ Programming Guide, table
// "Technical Specifications per Compute Capability").
constexpr int smem_limit(int arch) {
  if (arch >= 120 || arch == 86 || arch == 89) { return 99 * 1024; }
  return arch >= 90 ? 227 * 1024 : 163 * 1024;
}

constexpr int smem_of_multiprocessor(int arch) {
  if (arch >= 120 || arch == 86 || arch == 89) { return 100 * 1024; }
  return arch >= 90 ? 228 * 1024 : 164 * 1024;
}

// Query tiles, then the stages of K and V, 2 bytes an element; 8 bytes for every row in each of the warps that share
// it, and where several do, 8 more; the parts that the block is at; and where the keys of two blocks of a cache lie,
// which have up to 64 keys. The output reuses the rest. Column warps have their probabilities and maxima there too.
constexpr int smem_bytes(TileShape tile, int head_dim) {
  int const rows = 8 * (tile.row_sharing() + (tile.key_warps > 1)) * tile.m;
  int const parts = 152 * tile.stages;
  int const keys = tile.n <= 64 ? 32 * tile.n : 0;
  int const shared = tile.column_warps > 1 ? (2 * tile.n + 4 * tile.column_warps) * tile.m : 0;
  return 2 * head_dim * (tile.query_buffers * tile.m + 2 * tile.stages * tile.n) + rows + parts + keys + shared + 256;
}

// Measured on an H200 (2026-11-29 and 30, docs/tuning.md). 32 query rows per warp halve the traffic of keys
// and values from shared memory to registers, as long as accumulator and scores fit a thread's 255
// registers. From head dim 192 on a warp has 32 rows of half the columns, where there is shared memory for what two
// such warps exchange, and otherwise 16 rows. One stage, because two thread blocks on a
// multiprocessor hide each other's loads.
constexpr TileShape prefill_tile(int arch, int head_dim) {
  if (head_dim <= 32) { return {.m = 128, .n = 64, .warps = 4, .stages = 1, .q_in_registers = true, .blocks = 3}; }
  if (head_dim <= 64) { return {.m = 128, .n = 128, .warps = 4, .stages = 1, .q_in_registers = false, .portions = 3}; }
  if (head_dim <= 128) { return {.m = 128, .n = 64, .warps = 4, .stages = 1, .q_in_registers = false, .portions = 3}; }
  if (head_dim <= 160) { return {.m = 128, .n = 32, .warps = 4, .stages = 1, .q_in_registers = false, .portions = 3}; }
  int const column_warps = arch >= 90 && smem_limit(arch) > 113 * 1024 ? 2 : 1;
  TileShape tile{.m = 64, .n = 64, .warps = 4, .stages = 1, .q_in_registers = false, .column_warps = column_warps};
  if (head_dim <= 192) { tile.n = 96; }
  if (column_warps > 1 && head_dim <= 224) { tile.portions = 3; }
  return tile;
}

// The same with blocks that divide kSplitGranule.
constexpr TileShape chunk_tile(int arch, int head_dim) {
  TileShape tile = prefill_tile(arch, head_dim);
  tile.n = tile.n < 64 ? tile.n : 64;
  tile.portions = 0;
  return tile;
}

// Half as many rows: for chunks that would leave much of a tile empty, or multiprocessors idle.
constexpr TileShape short_chunk_tile(int arch, int head_dim) {
  TileShape tile = chunk_tile(arch, head_dim);
  if (tile.m > 64) { tile.m = 64, tile.blocks = head_dim <= 128 ? 3 : 2; }
  return tile;
}

constexpr bool has_short_chunk(int arch, int head_dim) {
  return short_chunk_tile(arch, head_dim).m < chunk_tile(arch, head_dim).m;
}

// Decoding is bound by memory: what counts is bytes in flight, so the rows are few (one MMA, or two) and
// the stages as many as leave room for two thread blocks on a multiprocessor. From sm_90 on, head dims over
// 192 take the room of both. Machine code of sm_80 also runs on sm_86 and sm_89 and has to fit there.
constexpr int decode_room(int arch, int head_dim) {
  if (arch < 90) { return 81 * 1024; }
  return head_dim <= 192 && smem_limit(arch) > 113 * 1024 ? 113 * 1024 : smem_limit(arch);
}

constexpr TileShape with_stages(TileShape tile, int head_dim, int room) {
  while (tile.stages < 4) {
    ++tile.stages;
    if (smem_bytes(tile, head_dim) > room) {
      --tile.stages;
      break;
    }
  }
  // Loads run ahead across tiles: each stage may hold keys of another one, whose queries come with them.
  TileShape with_queries = tile;
  with_queries.query_buffers = tile.stages;
  return smem_bytes(with_queries, head_dim) <= room ? with_queries : tile;
}

// Loads run ahead only from two stages on, so where there is little room blocks are smaller. Up to head dim 192
// the queries fit into registers beside the accumulator.
constexpr TileShape decode_tile(int arch, int head_dim) {
  int const room = decode_room(arch, head_dim);
  bool const q_in_registers = head_dim <= 192;
  TileShape const tile = with_stages({16, 64, 4, 1, q_in_registers, 4}, head_dim, room);
  return tile.stages > 1 ? tile : with_stages({16, 32, 2, 1, q_in_registers, 2}, head_dim, room);
}

// As many key warps as let their accumulators fit into one stage when they are added up.
constexpr TileShape wide_decode_tile(int arch, int head_dim) {
  int const room = decode_room(arch, head_dim);
  bool const q_in_registers = head_dim <= 192;
  TileShape const tile = with_stages({32, 64, 4, 1, q_in_registers, 2}, head_dim, room);
  return tile.stages > 1 ? tile : with_stages({32, 32, 2, 1, q_in_registers, 1}, head_dim, smem_limit(86));
}

constexpr TileShape tile_shape(int arch, Role role, int head_dim) {
  switch (role) {
    case Role::kPrefill: return prefill_tile(arch, head_dim);
    case Role::kChunk: return chunk_tile(arch, head_dim);
    case Role::kShortChunk: return short_chunk_tile(arch, head_dim);
    case Role::kDecode: return decode_tile(arch, head_dim);
    default: return wide_decode_tile(arch, head_dim);
  }
}

// Thread blocks of a decode kernel on a multiprocessor. Each costs another KB of shared memory, and the registers
// of 128 threads suffice for three.
constexpr int decode_blocks(int arch, TileShape tile, int head_dim) {
  int const fit = smem_of_multiprocessor(arch) / (smem_bytes(tile, head_dim) + 1024);
  return fit < 1 ? 1 : (fit > 3 ? 3 : fit);
}

// The kernels that exist. Any multiple of 8 runs on the smallest kernel that holds it.
constexpr int kHeadDims[] = {32, 64, 96, 128, 160, 192, 224, 256};

}  // namespace flashattn
