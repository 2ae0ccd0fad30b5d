"""`plan` of other GPUs and builds, and what a GPU then runs."""

import json
import re
from pathlib import Path

import plan_calls
import pytest
import torch
from plan_calls import planned

import flashattn_ext
from flashattn_ext import _plan_gpus, _plan_launches
from flashattn_ext.planning import Gpu, plan

_host = pytest.importorskip("flashattn_ext._host")
default_build = plan_calls.default_build
TREE = Path(__file__).parents[2]


@pytest.mark.parametrize("multiprocessors", [16, 76, 108, 132])
@pytest.mark.parametrize("sequences", [1, 8, 4096])
@pytest.mark.parametrize("blocks", [1, 2, 513])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_c45_shares_fill_the_gpu_and_are_no_more_than_the_work(
    multiprocessors, sequences, blocks, head_dim
):
    gpu = Gpu("some", 90, multiprocessors)
    one = dict(batch=sequences, heads=1, heads_kv=1, head_dim=head_dim, seqlen_k=256 * blocks)
    (decode, *_) = planned(**one, gpu=gpu).launches
    shares = decode.shares
    key_blocks = sequences * blocks * (256 // decode.tile[1])
    assert shares.entries == key_blocks and shares.tiles == sequences
    assert shares.busy <= min(decode.grid[0], key_blocks)
    assert (shares.busy - 1) * shares.size < key_blocks <= shares.busy * shares.size
    if blocks > 1:
        assert shares.busy > 1
    if key_blocks >= 2 * decode.grid[0]:  # 2: what a thread block takes at least
        # equal shares in whole key blocks: what is lost is the rounding of a share, or two key
        # blocks of each where whole tiles are nearly equal shares
        lost = 1 if shares.cut else 2
        assert shares.busy >= decode.grid[0] * (1 - lost / shares.size) - 1
    assert decode.grid[0] % multiprocessors == 0 and decode.grid[0] >= multiprocessors


@pytest.mark.parametrize("multiprocessors", [16, 76, 108, 132])
@pytest.mark.parametrize("batch", [1, 8, 4096])
@pytest.mark.parametrize("blocks", [1, 2, 513])
def test_c45_chunks(multiprocessors, batch, blocks):
    gpu = Gpu("some", 90, multiprocessors)
    one = dict(batch=batch, heads=1, heads_kv=1, seqlen_q=200, seqlen_k=128 * blocks)
    chunk = planned(**one, gpu=gpu).launches[0]
    short = 2 * batch <= multiprocessors  # tiles of 128 rows
    assert chunk.role == ("short chunk" if short else "chunk")
    assert 1 <= chunk.splits <= min(blocks, 256)
    tiles, places = (4 * batch, 3) if short else (2 * batch, 2)
    if blocks > 1 and 2 * tiles <= places * multiprocessors:
        assert chunk.splits > 1
    if batch >= 2 * multiprocessors:
        assert chunk.splits == 1


@pytest.mark.parametrize("gpu, arch", [("H100", 90), ("A100", 80), ("L4", 80), ("RTX 3090", 80)])
def test_kernels_that_a_gpu_runs(gpu, arch):
    made = planned(gpu=gpu)
    assert made.arch == arch
    limit = _host.smem_limit(made.gpu.capability)
    assert all(launch.smem_bytes <= limit for launch in made.launches)


def test_kernels_that_a_build_has(monkeypatch):
    build = {"cuda_archs": [80, 90], "ptx_arch": 90, "head_dims": [64, 160]}
    monkeypatch.setattr(_plan_gpus, "BUILD", build)
    assert planned().kernel_head_dim == 160
    assert planned(gpu=Gpu("B200", 100, 148)).arch == 90  # through PTX
    with pytest.raises(NotImplementedError, match="head_dim: expected at most 160.* got 192"):
        planned(head_dim=192)
    with pytest.raises(NotImplementedError, match="some is sm_75.*older than sm_80"):
        planned(gpu=Gpu("some", 75, 40))
    build["head_dims"] = [128]
    with pytest.raises(NotImplementedError, match="some.*sm_120.*has 101376: it wants a build"):
        planned(gpu=Gpu("some", 120, 100))
    build.update(cuda_archs=[90], ptx_arch=0)
    with pytest.raises(NotImplementedError, match="A100 is sm_80 and this build covers sm_90"):
        planned(gpu="A100")


def test_the_gpu_that_is_meant_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = planned(gpu=None)
    assert made == planned(gpu="H200") and "\ngpu        H200, sm_90" in str(made)


def test_a_gpu_with_unknown_peaks_has_no_roof():
    made = planned(gpu=Gpu("mine", 90, 100))
    assert made.roof_seconds is None is made.memory_seconds
    assert "roof       unknown: pass gpu=Gpu(...) with the peaks of mine" in str(made)
    known = planned(gpu=Gpu("mine", 90, 100, 1e12, 1e12))
    assert known.roof_seconds == max(known.flops, known.bytes_read + known.bytes_written) / 1e12


@pytest.mark.parametrize(
    "field, value",
    [
        ("multiprocessors", 0), ("capability", 9.0), ("bytes_per_second", -1),
        ("bytes_per_second", 10**400), ("flops_per_second", float("nan")),
    ],
)  # fmt: skip
def test_impossible_gpus(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected"):
        Gpu(**{"name": "some", "capability": 90, "multiprocessors": 100, field: value})


def test_small_kernels_are_described_as_they_are():
    """What `plan` says of kernels whose geometry is in their own files."""
    numbers = {
        "append_kv.cu": {"kThreads": _plan_launches.APPEND_THREADS},
        "merge_row.h": {"kLanes": _plan_launches.LANES},
        "../core/rotary.h": {"kRotaryChunk": _plan_launches.APPEND_ELEMENTS},
    }
    for file, constants in numbers.items():
        source = (TREE / "csrc/kernels" / file).read_text()
        for name, number in constants.items():
            assert re.search(rf"constexpr int {name} = (\d+);", source)[1] == str(number), file


def profiled(run, tmp_path):
    """(name, grid, threads) of every kernel of this library that `run` starts, in their order."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    kernels.sort(key=lambda event: event["ts"])
    return [
        (name[0], tuple(event["args"]["grid"]), event["args"]["block"][0])
        for event in kernels
        if (name := re.search(r"\b(?:flash_fwd|append_kv)\w*_kernel\b", event["name"]))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "seqlen_q, options",
    [(1, {}), (1, {"num_splits": 5}), (5, {}), (1, {"new_tokens": 1}), (100, {})],
)
def test_a_gpu_runs_what_was_planned(seqlen_q, options, tmp_path, monkeypatch):
    monkeypatch.undo()  # the plan of this build
    made = plan(
        batch=4, heads=8, heads_kv=2, head_dim=128, seqlen_q=seqlen_q, seqlen_k=2048,
        cache="contiguous", capacity=4096, **options,
    )  # fmt: skip
    half = dict(dtype=torch.bfloat16, device="cuda")
    q, k, v = (torch.randn(4, rows, heads, 128, **half) for rows, heads in
               ((seqlen_q, 8), (4096, 2), (4096, 2)))  # fmt: skip
    keywords = dict(options)
    new_tokens = keywords.pop("new_tokens", 0)
    if new_tokens:
        keywords["k_new"] = keywords["v_new"] = torch.randn(4, new_tokens, 2, 128, **half)
    lengths = torch.full((4,), 2048 - new_tokens, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)

    def run():
        flashattn_ext.flash_fwd_splitkv(q, k, v, cache_seqlens=lengths, out=out, **keywords)

    expected = [(launch.kernel, launch.grid, launch.threads) for launch in made.launches]
    assert profiled(run, tmp_path) == expected
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert peak - before == made.workspace_bytes


@pytest.mark.parametrize("cache", [None, 16])
def test_more_tiles_than_a_grid_holds(cache):
    with pytest.raises(NotImplementedError, match="thread blocks, the grid holds"):
        plan(batch=2**20, heads=8, heads_kv=2, head_dim=128, seqlen_q=2**20, seqlen_k=100,
             dtype=torch.bfloat16, cache=cache, gpu="H200")  # fmt: skip
