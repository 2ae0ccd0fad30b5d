// Fuzzing of the C++ API. Whatever the parameters are,
// * a call is refused with InvalidArgument and a message that names the argument, or it is valid;
// * a valid call on the CPU reads and writes the arrays that its parameters describe and no others,
//   whatever lengths, page ids and numbers they hold, and of `out` its rows only;
// * the plan of a valid call on a GPU, for any GPU, adds up: its pieces fill the workspace.
// A sanitizer sees the rest.
#include "fuzz_api.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/splitkv_plan.h"
#include "fuzz_calls.h"
#include "validate.h"

namespace fuzz {

Counts counts;

namespace {

using namespace flashattn;

void require(bool good, char const* what) {
  if (good) { return; }
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

void run(FlashFwdParams const& p) { run_flash_fwd(p); }
void run(FlashSplitkvParams const& p) { run_flash_splitkv_fwd(p); }
void run(FlashCombineParams const& p) { run_flash_combine(p); }

template <class Params>
bool accepted(Params const& params) {
  std::string message;
  try {
    validate(params);
    return true;
  } catch (InvalidArgument const& error) { message = error.what(); }
  require(message.find(": expected ") != std::string::npos, "a refusal without a name");
  try {
    run(params);
  } catch (InvalidArgument const& error) {
    return require(message == error.what(), "another refusal"), false;
  }
  require(false, "a call that should have been refused");
  return false;
}

// The rows of out, by their bytes.
std::vector<char> bytes_of_rows(Output const& out, int64_t batches, int64_t rows, int64_t heads,
                                int64_t row_bytes, int size, Block block) {
  std::vector<char> inside(block.bytes);
  char const* const data = static_cast<char const*>(out.data);
  for (int64_t b = 0; b < batches; ++b) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        int64_t const at = b * out.batch_stride + r * out.row_stride + h * out.head_stride;
        std::fill_n(inside.begin() + (data + at * size - block.begin), row_bytes, 1);
      }
    }
  }
  return inside;
}

std::vector<char> written(FlashFwdParams const& p, Block block) {
  bool const packed = p.lengths.cu_seqlens_q != nullptr;
  int const size = size_of(p.dtype);
  return bytes_of_rows(p.out, packed ? 1 : p.shape.batch,
                       packed ? p.lengths.total_q : p.shape.seqlen_q, p.shape.heads,
                       p.shape.head_dim * size, size, block);
}
std::vector<char> written(FlashSplitkvParams const& p, Block block) {
  return written(p.fwd, block);
}
std::vector<char> written(FlashCombineParams const& p, Block block) {
  int const size = size_of(p.out_dtype);
  return bytes_of_rows(p.out, p.batch, p.seqlen, p.heads, int64_t(p.head_dim) * size, size, block);
}

template <class Params>
void run_on_cpu(Params params, uint32_t seed) {
  Memory memory(seed);
  if (!equip(memory, params)) { return; }
  Block const out = memory.last();
  std::vector<char> const before(out.begin, out.begin + out.bytes);
  run(params);
  std::vector<char> const inside = written(params, out);
  for (size_t i = 0; i < out.bytes; ++i) {
    require(inside[i] || before[i] == out.begin[i], "out changed between its rows");
  }
  ++counts.computed;
}

void refused_without_kernels(auto const& params) {
  if (!build_info().cuda_archs.empty()) { return; }
  try {
    run(params);
  } catch (Unsupported const&) { return; }
  require(false, "a build without kernels served CUDA");
}

void check_pieces(SplitkvPlan const& plan, FlashSplitkvParams const& params) {
  double const rows = double(query_rows(params.fwd)) * params.fwd.shape.heads;
  double const row_bytes = 4.0 * (params.fwd.shape.head_dim + 1);
  double least = plan.split.splits > 1 ? plan.split.splits * rows * row_bytes : 0;
  for (CutTiles const& cuts : {plan.decode_cuts, plan.chunk_cuts}) {
    least += double(cuts.entries) * cuts.slots * cuts.rows * row_bytes +
             double(cuts.entries) * (sizeof(CutTiles::Size) + sizeof(QueryTile));
  }
  if (params.append.rotary_dim > 0) { least += 2 * rows * params.fwd.shape.head_dim; }
  double const bytes = static_cast<double>(plan.workspace_bytes);
  require(bytes >= least * 0.999 && bytes <= least * 1.001 + 11 * 128,
          "workspace of another size than its pieces");
}

void plan_for(FlashSplitkvParams params, int arch, int multiprocessors) {
  for (int const kernel : kHeadDims) {
    if (kernel < params.fwd.shape.head_dim) { continue; }
    SplitkvPlan const plan = plan_splitkv(params, arch, kernel, multiprocessors);
    check_pieces(plan, params);
    require(plan.decode.tiles >= 0 && plan.chunk.tiles >= 0, "a negative number of tiles");
    require(plan.split.splits >= 1 && plan.chunk_split.splits >= 1, "no split at all");
    require(plan.may_chunk || plan.may_decode || plan.rows == 0, "rows that nobody computes");
    require(params.fwd.shape.heads % plan.decode.row_map.pack() == 0, "a pack that cuts a group");
    ++counts.planned;
  }
}

template <class Params>
void check(Bytes& bytes) {
  Params params;
  make(bytes, params);
  if (!accepted(params)) {
    ++counts.refused;
    return;
  }
  Device device;
  if constexpr (requires { params.fwd; }) {
    device = params.fwd.device;
  } else {
    device = params.device;
  }
  if (device == Device::kCpu) {
    return run_on_cpu(params, static_cast<uint32_t>(bytes.raw(4)) + 1);
  }
  if constexpr (requires { params.fwd; }) {
    if (!has_work(params.fwd)) { return; }
    constexpr int kArchs[] = {80, 86, 87, 89, 90, 100, 120};
    plan_for(params, kArchs[bytes.raw(1) % std::size(kArchs)], bytes.between(1, 300));
  }
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size) {
  fuzz::Bytes bytes(data, size);
  flashattn::set_num_threads(bytes.between(1, 3));
  switch (bytes.raw(1) % 3) {
    case 0: fuzz::check<flashattn::FlashFwdParams>(bytes); break;
    case 1: fuzz::check<flashattn::FlashSplitkvParams>(bytes); break;
    default: fuzz::check<flashattn::FlashCombineParams>(bytes); break;
  }
  return 0;
}
