"""`plan`: what it says about a call, against numbers worked out by hand. No GPU is needed."""

import contextlib
import dataclasses
import io
import re
from math import ceil
from pathlib import Path

import plan_calls
import pytest
import torch
from plan_calls import DECODE, MIXED, PREFILL, planned

import flashattn_ext
from flashattn_ext.planning import Launch, Shares

_host = pytest.importorskip("flashattn_ext._host")
default_build = plan_calls.default_build
TREE = Path(__file__).parents[2]


def attention(made):
    return [launch for launch in made.launches if launch.tile is not None]


def aligned(*pieces):
    return sum(ceil(piece / 128) * 128 for piece in pieces)


def test_decode_by_hand():
    made = planned()
    # 3 stages of 64 keys fit twice into the 228 KiB of a multiprocessor: 2 * 132 shares of
    # 64 sequences * 8 heads * 128 blocks of 64 keys. In teams of 8: each member has a list of
    # 64 * 128 blocks in 33 shares, whose 32 borders cut a tile each.
    smem = 2 * 128 * (3 * 16 + 2 * 3 * 64) + 8 * 5 * 16 + 152 * 3 + 32 * 64 + 256
    assert made.launches == (
        Launch(
            "flash_fwd_splitkv_kernel", "decode", (264, 1, 1), 4, (16, 64), 4, 3, smem, None,
            Shares(tiles=512, entries=65536, size=249, busy=264, cut=8 * 32, team=8),
        ),
        # A row of 2048 for each warp: 512 thread blocks of 4 warps.
        Launch("flash_fwd_splitkv_combine_cuts_kernel", "merge", (512, 1, 1), 4),
    )  # fmt: skip
    assert [launch.threads for launch in made.launches] == [128, 128]
    slots = 264 * 2 * 16
    records = (264 * _host.cut_size_bytes, 264 * _host.query_tile_bytes)
    assert made.workspace_bytes == aligned(*records, slots * 128 * 4, slots * 4)
    q = 64 * 32 * 128 * 2
    assert made.bytes_read == q + 2 * 64 * 8192 * 8 * 128 * 2
    assert made.bytes_written == q
    assert made.flops == 4 * 64 * 32 * 8192 * 128
    assert made.memory_seconds == (made.bytes_read + q) / 4.8e12 == made.roof_seconds
    assert made.arithmetic_seconds == made.flops / 989e12
    assert (made.function, made.arch, made.kernel_head_dim) == ("flash_fwd_splitkv", 90, 128)


def test_prefill_by_hand():
    made = planned(PREFILL, causal=True)
    assert [(x.kernel, x.role, x.grid, x.tile) for x in made.launches] == [
        ("flash_fwd_kernel", "prefill", (1, 1, 1), (128, 128))
    ]
    assert made.launches[0].packed_heads == 2 and made.launches[0].splits == 1
    # queries 0, 1, 2 see 3, 4, 5 of the 5 keys
    assert made.flops == 4 * 64 * 2 * (3 + 4 + 5)
    assert made.bytes_read == 2 * 64 * (3 * 2 + 2 * 5)
    assert made.bytes_written == 2 * 64 * 3 * 2
    assert made.workspace_bytes == 0 and made.function == "flash_fwd"


def test_keys_outside_of_the_window_are_not_read():
    made = planned(PREFILL, window_size=(0, 0))
    assert made.flops == 4 * 64 * 2 * 3
    assert made.bytes_read == 2 * 64 * (3 * 2 + 2 * 3)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (2, 1), (5, -1), (0, 40)])
def test_flops_are_those_of_the_visible_pairs(window):
    lengths_q, lengths_k = [0, 1, 7, 20, 3], [5, 9, 0, 11, 30]
    made = planned(
        PREFILL, batch=5, seqlen_q=lengths_q, seqlen_k=lengths_k, window_size=window
    )  # fmt: skip
    pairs, seen = 0, 0
    for sq, sk in zip(lengths_q, lengths_k, strict=True):
        keys = set()
        for i in range(sq):
            low = i + sk - sq - window[0] if window[0] >= 0 else 0
            high = i + sk - sq + window[1] if window[1] >= 0 else sk
            visible = [j for j in range(sk) if low <= j <= high]
            pairs += len(visible)
            keys.update(visible)
        seen += len(keys)
    assert made.flops == 4 * 64 * 2 * pairs
    assert made.bytes_read == 2 * 64 * (31 * 2 + 2 * seen)


@pytest.mark.parametrize(
    "heads, heads_kv, seqlen_q, role",
    [
        (8, 8, 1, "decode"),
        (8, 8, 16, "decode"),
        (8, 8, 17, "wide decode"),
        (8, 8, 32, "wide decode"),
        (8, 8, 33, "short chunk"),
        (8, 8, 65, "chunk"),
        (4, 1, 4, "decode"),  # 16 rows of a key/value head
        (4, 1, 5, "wide decode"),
        (4, 1, 9, "wide decode"),  # of 64 such chunks each is shared out
        (4, 1, 17, "wide decode"),
        (4, 1, 33, "short chunk"),  # 128 tiles of 128 rows
        (4, 1, 65, "chunk"),
        (16, 1, 1, "decode"),
        (32, 1, 1, "wide decode"),
    ],
)
def test_roles_by_rows_and_group(heads, heads_kv, seqlen_q, role):
    made = planned(heads=heads, heads_kv=heads_kv, seqlen_q=seqlen_q)
    assert [launch.role for launch in attention(made)] == [role]
    rows = {"decode": 16, "wide decode": 32, "short chunk": 64, "chunk": 128}[role]
    assert attention(made)[0].tile == (rows, 64)


def test_splits_of_a_fixed_size_have_one_decode_role():
    """Or a sequence's bits would depend on the longest sequence of its batch."""
    for seqlen_q, role in ((16, "decode"), (17, "chunk")):
        made = planned(heads=8, heads_kv=8, seqlen_q=seqlen_q, split_size=512)
        assert [launch.role for launch in attention(made)] == [role]
        assert attention(made)[0].splits == 8192 // 512 == attention(made)[0].grid[1]


def test_a_mixed_batch_runs_two_kernels_side_by_side():
    made = planned(MIXED)
    decode, chunk, merge = made.launches
    assert (decode.role, chunk.role, merge.role) == ("decode", "short chunk", "merge")
    assert decode.grid == (132, 1, 1)  # chunks want the rest of the multiprocessors
    # sequences 0 and 2: 15 blocks of 64 keys and 1, in two key/value heads; of each place for a
    # multiple of 4, as few tiles are shared out in pieces of 4 beside chunks
    assert decode.shares.tiles == 4 and decode.shares.entries == 2 * (16 + 4)
    assert decode.shares.size == 4 and decode.shares.busy == 10
    tokens = 64 // 4
    assert chunk.grid == (2 * (203 // tokens + 3), min(ceil(912 / 128), chunk.splits), 1)


def test_few_chunks_of_few_rows_are_decoded_in_several_tiles():
    def role(**lengths):
        return [x.role for x in planned(heads=32, heads_kv=8, seqlen_k=4096, **lengths).launches]

    assert role(batch=8, seqlen_q=32) == ["wide decode", "merge"]  # 4 tiles of 8 tokens
    assert role(batch=8, seqlen_q=33)[0] == "short chunk"
    assert role(batch=64, seqlen_q=32)[0] == "chunk"  # they fill the GPU
    assert role(batch=8, seqlen_q=32, num_splits=2)[0] == "short chunk"
    assert role(batch=8, seqlen_q=32, split_size=512)[0] == "chunk"
    ones = dict(batch=33, seqlen_q=[1] * 32 + [32])
    assert role(**ones) == ["wide decode", "merge"]
    made = planned(heads=32, heads_kv=8, seqlen_k=4096, batch=8, seqlen_q=32)
    (shares,) = (launch.shares for launch in made.launches if launch.shares)
    assert shares.tiles == 8 * 8 * 4 and shares.team == 8


def test_max_seqlen_q_is_a_bound_that_counts():
    lengths = dict(batch=2, seqlen_q=[1, 1], seqlen_k=500)
    assert [launch.role for launch in attention(planned(MIXED, **lengths))] == ["decode"]
    loose = planned(MIXED, **lengths, max_seqlen_q=1000)  # but there are two rows in all
    assert [launch.role for launch in attention(loose)] == ["decode"]
    many = dict(batch=40, seqlen_q=[1] * 40, seqlen_k=500)
    loose = planned(MIXED, **many, max_seqlen_q=1000)
    assert [launch.role for launch in attention(loose)] == ["decode", "short chunk"]


def test_new_tokens_are_appended_first():
    made = planned(new_tokens=2, rotary_dim=64)
    assert made.launches[0] == Launch(
        "append_kv_kernel", "append", (ceil((64 * 2 * 8 + 64 * 32) * 16 / 256), 1, 1), 8
    )
    plain = planned()
    new = 2 * 64 * 2 * 8 * 128 * 2
    assert made.bytes_read - plain.bytes_read == new == made.bytes_written - plain.bytes_written
    assert made.workspace_bytes - plain.workspace_bytes == 64 * 32 * 128 * 2  # rotated queries
    only_new = planned(seqlen_q=0, new_tokens=1)
    assert [launch.role for launch in only_new.launches] == ["append"]
    assert only_new.workspace_bytes == 0


@pytest.mark.parametrize("num_splits", [1, 2, 7, 256])
def test_given_splits(num_splits):
    made = planned(num_splits=num_splits)
    rows = 64 * 32
    assert made.launches[0].grid == (64 * 8, num_splits, 1)
    assert made.launches[0].splits == num_splits and made.launches[0].shares is None
    if num_splits == 1:
        assert len(made.launches) == 1 and made.workspace_bytes == 0
        return
    assert made.workspace_bytes == aligned(num_splits * rows * 128 * 4, num_splits * rows * 4)
    merge = Launch("flash_fwd_splitkv_combine_kernel", "merge", (rows // 4, 1, 1), 4)
    assert made.launches[1] == merge


def test_workspace_of_automatic_splits_depends_on_the_gpu_alone():
    """Two slots of a decode tile for each thread block."""
    expected = planned().workspace_bytes
    for batch in (1, 7, 4096):
        for tokens in (65, 1000, 2**20):
            made = planned(batch=batch, seqlen_k=tokens, cache="contiguous")
            assert made.workspace_bytes == expected
    # A tile of one key block cannot be cut.
    short = planned(seqlen_k=64, cache="contiguous")
    assert short.workspace_bytes == 0 and len(short.launches) == 1
    assert planned(seqlen_k=64, cache="contiguous", capacity=65).workspace_bytes == expected


@pytest.mark.parametrize("base", [PREFILL, DECODE])
@pytest.mark.parametrize("nothing", [{"batch": 0}, {"seqlen_q": 0}, {"heads": 0, "heads_kv": 1}])
def test_nothing_to_do(base, nothing):
    made = planned(base, **nothing)
    assert made.launches == () and made.workspace_bytes == made.flops == made.bytes_written == 0
    assert "none: there is nothing to do" in str(made)


@pytest.mark.parametrize(
    "base, changes, message",
    [
        (PREFILL, {"batch": 2**20 + 1}, "batch: expected an int from 0 to 1048576"),
        (PREFILL, {"batch": True}, "batch: expected an int from 0"),
        (PREFILL, {"heads_kv": 3}, "k: expected a number of key/value heads that divides"),
        (PREFILL, {"head_dim": 0}, "q: expected a head dim from 1 to 256, got 0"),
        (PREFILL, {"seqlen_q": "9"}, "seqlen_q: expected an int or a list of ints, got '9'"),
        (PREFILL, {"seqlen_q": [1, 2]}, r"seqlen_q: expected 1 lengths \(batch\), got 2"),
        (PREFILL, {"seqlen_k": [-1]}, "seqlen_k: expected an int from 0"),
        (PREFILL, {"seqlen_q": 2**30 + 1}, r"q: expected at most 2\*\*30 rows"),
        (PREFILL, {"head_dim": 2**31 - 1, "heads": 2**31 - 1}, "no tensor can be that large"),
        (DECODE, {"batch": 2**20, "heads": 64}, "batch, heads: expected at most 16777216 in all"),
        (PREFILL, {"window_size": (-2, 0)}, "window_size: expected two ints"),
        (PREFILL, {"causal": 1}, "causal: expected True or False, got 1"),
        (PREFILL, {"dtype": "bfloat16"}, "dtype: expected torch.float16 or torch.bfloat16"),
        (PREFILL, {"max_seqlen_q": 3}, "max_seqlen_q: only for packed queries"),
        (PREFILL, {"seqlen_q": [3], "max_seqlen_q": 2}, "max_seqlen_q: expected at least 3"),
        (PREFILL, {"capacity": 9}, "capacity: only with a cache"),
        (PREFILL, {"new_tokens": 1}, "new_tokens: only with a cache"),
        (PREFILL, {"rotary_dim": 16}, "rotary_dim: only with a cache"),
        (PREFILL, {"num_splits": 2}, "num_splits: only with a cache"),
        (PREFILL, {"split_size": 64}, "split_size: only with a cache"),
        (PREFILL, {"gpu": "H300"}, "gpu: expected None, .*'H200', .*got 'H300'"),
        (DECODE, {"cache": "pages"}, "cache: expected None, \"contiguous\" or .*got 'pages'"),
        (DECODE, {"cache": 0}, "cache: expected None.*got 0"),
        (DECODE, {"capacity": 8191}, "capacity: expected .* from 8192 on.*got 8191"),
        (DECODE, {"capacity": 8200}, "capacity: expected a number that is a multiple of the page"),
        (DECODE, {"new_tokens": 8193}, "seqlen_k: expected at least 8193 new tokens, got 8192"),
        (DECODE, {"rotary_dim": 24}, "rotary_dim: expected a multiple of 16 from 0 to 128"),
        (DECODE, {"num_splits": 257}, "num_splits: expected 0 .automatic. to 256"),
        (DECODE, {"num_splits": 2, "split_size": 64}, "split_size: expected None with num_splits"),
        (DECODE, {"split_size": 100}, "split_size: expected None or a positive multiple of 64"),
    ],
)
def test_errors(base, changes, message):
    with pytest.raises(ValueError, match=message):
        planned(base, **changes)


@pytest.mark.parametrize(
    "base, changes, message",
    [
        (PREFILL, {"head_dim": 264}, "q: expected a head dim from 1 to 256, got 264"),
        (PREFILL, {"dtype": torch.float32}, "dtype: .* float32, which runs on the CPU only"),
        (PREFILL, {"dtype": torch.int8}, "dtype: expected float16 or bfloat16, got int8"),
        (DECODE, {"head_dim": 100}, "q: expected a head dim that is a multiple of 8"),
        (
            PREFILL,
            {"batch": 2**18, "heads": 2**15, "heads_kv": 2**15, "head_dim": 8},
            "flash_fwd_kernel: 8589934592 thread blocks",
        ),
    ],
)
def test_what_is_not_supported(base, changes, message):
    with pytest.raises(NotImplementedError, match=message):
        planned(base, **changes)


def test_refuses_with_the_reason_of_supports():
    q = torch.empty(1, 3, 2, 300, dtype=torch.float16, device="meta")
    reason = flashattn_ext.supports(q, q, q)[1]
    with pytest.raises(NotImplementedError) as refused:
        planned(PREFILL, heads_kv=2, seqlen_k=3, head_dim=300)
    assert str(refused.value) == reason


def test_every_argument_shows():
    """Each changes the plan, or at least what it says of the call."""
    base = planned(MIXED)
    for change in (
        {"batch": 2, "seqlen_q": [1, 200], "seqlen_k": 900}, {"heads": 16}, {"heads_kv": 4},
        {"head_dim": 128}, {"seqlen_q": [1, 201, 2]}, {"seqlen_k": 900}, {"dtype": torch.float16},
        {"causal": False}, {"window_size": (100, 0)}, {"max_seqlen_q": 201}, {"cache": 32},
        {"capacity": 1600}, {"new_tokens": 1}, {"rotary_dim": 16}, {"num_splits": 3},
        {"split_size": 64}, {"gpu": "L4"},
    ):  # fmt: skip
        changed = planned(MIXED, **change)
        assert str(changed) != str(base), change
        assert max(map(len, str(changed).splitlines())) <= 100


def test_plans_are_values():
    assert planned() == planned() != planned(seqlen_k=8191)
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned().flops = 0


def test_readme():
    """The example prints what it says that it prints."""
    text = (TREE / "README.md").read_text()
    example = r"```python\n([^`]*flashattn_ext\.plan\([^`]*)```\s*```text\n(.*?)```"
    code, expected = re.search(example, text, re.S).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"flashattn_ext": flashattn_ext})
    assert printed.getvalue() == expected
