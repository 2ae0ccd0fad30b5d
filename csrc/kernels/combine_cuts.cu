// Merges the tiles that an attention kernel shared out among thread blocks (core/cut_tile.h).
#include <cstring>

#include "core/merge_plan.h"
#include "kernels/kernels.h"
#include "kernels/launch_kernel.h"
#include "kernels/merge_row.h"

namespace flashattn {
namespace {

// The cut tiles of one role, and how the lanes of a warp share a row.
struct RoleMerge {
  CutTiles cuts;
  int lanes;
  FastDivisor slices;

  RoleMerge(CutTiles const& tiles, MergePlan const& plan) : cuts(tiles), lanes(plan.lanes), slices(plan.slices) {}
};

// 16 bytes if they are wanted, otherwise zeros. Without a branch, so that the instructions have been fetched before
// there is work.
__device__ float4 load_if(bool wanted, char const* from) {
  float4 x;
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.s32 wanted, %5, 0;\n"
      "  mov.f32 %0, 0f00000000;\n"
      "  mov.f32 %1, 0f00000000;\n"
      "  mov.f32 %2, 0f00000000;\n"
      "  mov.f32 %3, 0f00000000;\n"
      "  @wanted ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&f"(x.x), "=&f"(x.y), "=&f"(x.z), "=&f"(x.w)
      : "l"(from), "r"(int(wanted)));
  return x;
}

// The parts of one row. They have all been written, also those without keys.
class RowParts {
 public:
  __device__ RowParts(CutTiles const& cuts, int entry, int row, int head_dim) {
    int64_t const first = cuts.slot(entry, 0), second = cuts.slot(entry, 1), third = cuts.slot(entry, 2);
    first_ = first * cuts.rows + row;
    // From part 1 on they lie at equal distances.
    stride_ = (third - second) * cuts.rows;
    origin_ = second * cuts.rows + row - stride_;
    lse_ = cuts.lse;
    out_ = cuts.out;
    head_dim_ = head_dim;
  }

  // -inf where there are not so many.
  __device__ float lse(int part, int parts) const { return part < parts ? lse_[place(part)] : -kInfinity; }

  // Four columns of the kCount parts `first`, first + step, ..., as far as there are so many.
  template <int kCount>
  __device__ void load(float4 (&values)[kCount], int first, int step, int parts, int column) const {
    auto const address = [&](int64_t place) {
      return reinterpret_cast<char const*>(out_ + place * head_dim_ + column);
    };
    char const* at = address(origin_ + first * stride_);
    int64_t const bytes = step * stride_ * head_dim_ * int64_t(sizeof(float));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int const part = first + i * step;
      values[i] = load_if(part < parts, i == 0 && part == 0 ? address(first_) : at);
      at += bytes;
    }
  }

 private:
  __device__ int64_t place(int part) const { return part == 0 ? first_ : origin_ + part * stride_; }

  int64_t first_, origin_, stride_;  // rows of head_dim
  float const* lse_;
  float const* out_;
  int head_dim_;
};

// All of it in one trip to memory: fields that are loaded where they are needed take one each.
__device__ QueryTile load_at_once(QueryTile const* source) {
  static_assert(sizeof(QueryTile) % sizeof(int4) == 0);
  int4 pieces[sizeof(QueryTile) / sizeof(int4)];
#pragma unroll
  for (int i = 0; i < sizeof(QueryTile) / sizeof(int4); ++i) {
    int4& to = pieces[i];
    asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(reinterpret_cast<int4 const*>(source) + i));
  }
  QueryTile tile;
  memcpy(&tile, pieces, sizeof(tile));
  return tile;
}

// A row of a cut tile.
struct Place {
  int entry = 0;
  int parts = 0;
  int row = 0;
};

// All rows of the cut tiles of a role, one after the other. A lane has every 32nd entry.
class CutRows {
 public:
  // Without `exists` as if no tile had been cut.
  __device__ CutRows(CutTiles const& cuts, bool exists) : sizes_(cuts.sizes) {
    int const entries = exists ? cuts.entries : 0;
    int first = threadIdx.x % kLanes;
    do {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int const entry = first + i * kLanes;
        end_ += entry < entries ? sizes_[entry].rows : 0;
      }
      first += kAtOnce * kLanes;
    } while (first < entries);
    begin_ = -end_;
    for (int distance = 1; distance < kLanes; distance *= 2) {
      int const other = __shfl_up_sync(0xffffffff, end_, distance);
      end_ += threadIdx.x % kLanes >= distance ? other : 0;
    }
    begin_ += end_;
  }

  __device__ int count() const { return __shfl_sync(0xffffffff, end_, kLanes - 1); }

  // For the whole warp. Of no parts, if there are not so many.
  __device__ Place find(int index) const {
    int const lane = threadIdx.x % kLanes;
    int const holder = __popc(__ballot_sync(0xffffffff, end_ <= index));
    Place place;
    if (lane == holder) {
      place.row = index - begin_;
      for (place.entry = lane;; place.entry += kLanes) {
        CutTiles::Size const size = sizes_[place.entry];
        place.parts = size.parts;
        if (place.row < size.rows) { break; }
        place.row -= size.rows;
      }
    }
    int const from = holder < kLanes ? holder : 0;
    return {__shfl_sync(0xffffffff, place.entry, from), __shfl_sync(0xffffffff, place.parts, from),
            __shfl_sync(0xffffffff, place.row, from)};
  }

 private:
  static constexpr int kAtOnce = 12;  // entries of a lane: all of them on GPUs of up to 192 multiprocessors

  CutTiles::Size const* sizes_;
  int begin_ = 0;  // this lane's rows
  int end_ = 0;
};

// The log-sum-exp of the parts of a row, and how much each counts.
class Weights {
 public:
  // `own_lse` is that of the part with this lane's number.
  __device__ Weights(RowParts const& row, int parts, float own_lse)
      : row_(row), parts_(parts), lane_(threadIdx.x % kLanes), own_lse_(own_lse), maximum_(-kInfinity) {
    // fmaxf passes over NaN, but the sum of weights does not, so a NaN in lse reaches out and lse.
    for (int part = lane_; part < parts; part += kLanes) {
      float const lse = part < kLanes ? own_lse_ : lse_of(part);
      if (!is_empty_part(lse)) { maximum_ = fmaxf(maximum_, lse); }
    }
    maximum_ = warp_max(maximum_);
  }

  // Of the part `base` plus this lane's number. Each part is asked for once.
  __device__ float take(int base) {
    float const lse = base == 0 ? own_lse_ : lse_of(base + lane_);
    float const weight = part_weight(lse, subtrahend(maximum_));
    own_total_ += weight;
    return weight;
  }

  // When all have been taken.
  __device__ float total() const { return warp_sum(own_total_); }
  __device__ float lse(float total) const { return total == 0.f ? -kInfinity : maximum_ + logf(total); }

 private:
  __device__ float lse_of(int part) const { return row_.lse(part, parts_); }

  RowParts const& row_;
  int const parts_;
  int const lane_;
  float const own_lse_;
  float maximum_;
  float own_total_ = 0.f;
};

// A slice of a row; of no parts, nothing.
__device__ void merge(FlashFwdParams const& p, RoleMerge const& role, Place const& place, int slice) {
  constexpr int kAtOnce = kMergeParts;
  int const lane = threadIdx.x % kLanes, groups = kLanes / role.lanes, group = lane / role.lanes;
  int const column = (slice * role.lanes + lane - group * role.lanes) * kMergeColumns;
  bool const exists = place.parts > 0 && column < p.shape.head_dim;
  // All are on their way before anybody knows what they count.
  RowParts const row(role.cuts, place.entry, place.row, p.shape.head_dim);
  float const own_lse = row.lse(lane, place.parts);
  float4 values[kAtOnce];
  row.load(values, group, groups, exists ? place.parts : 0, column);
  QueryTile tile;
  if (place.parts > 0) { tile = load_at_once(&role.cuts.tiles[place.entry]); }
  Weights weights(row, place.parts, own_lse);
  float4 sum{};
  float own_weight = weights.take(0);
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float const weight = __shfl_sync(0xffffffff, own_weight, first % kLanes + i * groups + group);
      sum.x += weight * values[i].x, sum.y += weight * values[i].y;
      sum.z += weight * values[i].z, sum.w += weight * values[i].w;
    }
    first += kAtOnce * groups;
    if (first >= place.parts) { break; }
    row.load(values, first + group, groups, exists ? place.parts : 0, column);
    if (first % kLanes == 0) { own_weight = weights.take(first); }
  }
  for (int distance = kLanes / 2; distance >= role.lanes; distance /= 2) {
    sum.x += __shfl_xor_sync(0xffffffff, sum.x, distance), sum.y += __shfl_xor_sync(0xffffffff, sum.y, distance);
    sum.z += __shfl_xor_sync(0xffffffff, sum.z, distance), sum.w += __shfl_xor_sync(0xffffffff, sum.w, distance);
  }
  float const total = weights.total(), factor = total == 0.f ? 0.f : reciprocal_fast(total);
  if (exists && group == 0) {
    float const out[kMergeColumns] = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
    store(p.out.data, p.dtype, tile.offset(p.out, place.row) + column, out);
    if (column == 0 && p.lse != nullptr) { p.lse[tile.lse_index(p.shape, p.lengths, place.row)] = weights.lse(total); }
  }
}

__global__ void __launch_bounds__(kMergeWarps* kLanes, kMergeBlocks + 1)
    flash_fwd_splitkv_combine_cuts_kernel(__grid_constant__ FlashFwdParams const p,
                                          __grid_constant__ RoleMerge const decode,
                                          __grid_constant__ RoleMerge const chunk) {
  let_next_kernel_start();
  int const warps = gridDim.x * kMergeWarps, warp = blockIdx.x * kMergeWarps + threadIdx.x / kLanes;
  // First without work, while there is none: fetching the instructions takes as long as merging does (H200,
  // 2026-11-30, docs/tuning.md).
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    bool const exists = pass > 0;
    if (exists) { wait_for_previous_kernel(); }
    CutRows const decode_rows(decode.cuts, exists), chunk_rows(chunk.cuts, exists);
    int const decode_end = decode_rows.count() * decode.slices.divisor();
    int const end = decode_end + chunk_rows.count() * chunk.slices.divisor();
    int index = warp;  // of a slice
    do {
      bool const is_chunk = index >= decode_end;
      RoleMerge const& role = is_chunk ? chunk : decode;
      int const at = index - (is_chunk ? decode_end : 0), row = role.slices.quotient(at);
      CutRows rows = decode_rows;
      if (is_chunk) { rows = chunk_rows; }
      merge(p, role, rows.find(row), at - row * role.slices.divisor());
      index += warps;
    } while (index < end);
  }
}

}  // namespace

void launch_combine_cuts(FlashFwdParams const& params, SplitkvPlan const& plan, cudaStream_t stream, bool overlap) {
  MergePlans const merges = plan_merges(plan, params.shape);
  RoleMerge const decode(plan.decode_cuts, merges.decode), chunk(plan.chunk_cuts, merges.chunk);
  launch("flash_fwd_splitkv", flash_fwd_splitkv_combine_cuts_kernel, dim3(merges.blocks), kMergeWarps * kLanes, 0,
         stream, overlap, params, decode, chunk);
}

}  // namespace flashattn
