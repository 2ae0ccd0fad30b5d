"""Very many sequences, and very long ones, through every way in."""

import pytest
import torch
from caches import dense_cache
from reference import Rule, Sequence, assert_close_to_reference
from test_far_strides import draw

from flashattn_ext import flash_fwd, flash_fwd_splitkv


@pytest.mark.parametrize("count", [65_536, 80_000])
def test_very_many_sequences(count, device):
    """Each has one key, whose value is the result: dense, packed, in a cache."""
    q, k, v = (draw(count, 1, 2, 16, seed=n).to(device) for n in range(3))
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1, "max_seqlen_k": 1}
    assert torch.equal(flash_fwd(q, k, v), v)
    assert torch.equal(flash_fwd(q[:, 0], k[:, 0], v[:, 0], **packed), v[:, 0])
    for splits in (0, 1, 3):
        assert torch.equal(flash_fwd_splitkv(q, k, v, cache_seqlens=1, num_splits=splits), v)


def test_a_million_rows(device):
    """s = 1,048,576 at d = 64: sampled rows, which see 101 keys."""
    rows, d = 2**20, 64
    q, k, v = (draw(1, rows, 1, d, seed=n).to(device) for n in range(3))
    out, lse = flash_fwd(q, k, v, window_size=(100, 0), return_lse=True)
    for start in (0, 2**19 - 3, rows - 5):
        part, keys = slice(start, start + 5), slice(max(0, start - 100), start + 5)
        seq = Sequence(q[0, part], k[0, keys], v[0, keys])
        assert_close_to_reference(out[0, part], lse[0, :, part], seq, Rule(d**-0.5, (100, 0)))


def test_256_splits_of_half_a_million_tokens(device):
    d = 16 if device == "cpu" else 128
    dense_cache(1, 2**19, heads=(2, 1), d=d, splits=256, room=0).check(device)
    dense_cache(1, 2**19 - 5, heads=(1, 1), d=d, splits=256, page=256, room=5).check(device)


def test_a_million_tokens(device):
    d = 8 if device == "cpu" else 64
    for splits in (0, 1, 256):
        dense_cache(1, 2**20, heads=(1, 1), d=d, splits=splits, room=0).check(device)
