"""DTensors on two processes: what is sharded right stays where it is, the rest is redistributed or
refused. The calls are those of sharded_calls.py."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torch.distributed.tensor")

import sharded_calls
from pages import Page
from torch.distributed.tensor import Replicate, Shard

from flashattn_ext.integrations import dtensor


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A function of the device: what each process says of each call."""
    found = {}

    def of(device):
        if device not in found:
            folder = tmp_path_factory.mktemp(f"processes_{device}")
            processes = sharded_calls.PROCESSES
            torch.multiprocessing.spawn(sharded_calls.run, (str(folder), device), nprocs=processes)
            found[device] = [
                json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)
            ]
        return found[device]

    return of


ON_A_GPU = [name for name in sharded_calls.CALLS if name not in sharded_calls.REDISTRIBUTES]


@pytest.mark.parametrize(
    "device, name",
    [
        *(("cpu", name) for name in sharded_calls.CALLS),
        *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ON_A_GPU),
    ],
)
def test_two_processes(device, name, results):
    for rank, result in enumerate(results(device)):
        assert not result[name], f"process {rank}: {result[name]}"


def spec(mesh, *placements, shape):
    """What a rule reads of a DTensor's spec."""
    sizes = SimpleNamespace(ndim=len(mesh), size=lambda dim: mesh[dim])
    return SimpleNamespace(mesh=sizes, placements=placements, shape=shape, ndim=len(shape))


def ways(mesh, *placements, heads=(8, 4), batch=6):
    """The shardings that DTensor may combine: what becomes of q and k."""
    names = ["q", "k", "v", "max_seqlen_q"]
    q, k = (spec(mesh, *placements, shape=(batch, 5, h, 64)) for h in heads)
    acceptable = dtensor._acceptable(["out", "lse"], names, q, k, k, -1)
    return [(*results, *inputs[:2]) for results, inputs in acceptable]


REPLICATED = (Replicate(),) * 4
BATCH = (Shard(0),) * 4
HEADS = (Shard(2), Shard(1), Shard(2), Shard(2))


def test_what_lies_right_is_not_offered_anything_else():
    for mesh in ((2,), (4,)):
        assert ways(mesh, Shard(2)) == [HEADS]
        assert ways(mesh, Shard(0)) == [BATCH]
        assert ways(mesh, Replicate()) == [REPLICATED]
    assert ways((3, 2), Shard(0), Shard(2)) == [BATCH, HEADS]
    assert ways((2, 2), Shard(2), Shard(2)) == [HEADS]


def test_what_does_not_is_offered_all_that_no_mesh_dim_makes_wrong():
    everything = [REPLICATED, BATCH, HEADS]
    assert ways((2,), Shard(1)) == everything
    assert ways((2, 2), Shard(1), Shard(1)) == everything
    assert ways((8,), Shard(1)) == everything  # 8 shards of 4 heads: DTensor itself knows
    # 3 of 4 key/value heads; 2 * 2 of 6
    assert ways((3,), Shard(2)) == ways((3, 2), Shard(1), Shard(2)) == [REPLICATED, BATCH]
    assert ways((2, 2), Shard(2), Shard(2), heads=(24, 6)) == [REPLICATED, BATCH]
    assert ways((8,), Shard(0)) == everything  # 8 shards of 6 sequences


def test_page(tmp_path):
    """The example of docs/distributed.md, as the page starts it."""
    (block,) = Page("docs/distributed.md").python
    (tmp_path / "example.py").write_text(block.code)
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

    def start():
        return subprocess.run(
            [*program, "--nproc-per-node", "2", tmp_path / "example.py"],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    done = start()
    for _ in range(5):
        # torch 2.14's own threads now and then abort a process with gloo at its very end, also one
        # that does nothing but an all-gather.
        if "terminate called without an active exception" not in done.stderr:
            break
        done = start()
    assert done.returncode == 0, done.stderr
