"""What flash_fwd_splitkv refuses by values or addresses: rotary positions, shared memory."""

import pytest
from test_splitkv_errors import CacheArguments


def test_checked_mode_looks_up_the_positions_of_queries(device, monkeypatch):
    for kind, cached in (("dense append", [20, 9]), ("paged packed append", [9, 20])):
        arguments = CacheArguments(device, kind)
        arguments.set(cache_seqlens=arguments.ints(cached), causal=True)
        if "paged" in kind:  # 3 and 5 queries
            arguments.set(block_table=arguments.ints([[7, 3], [1, 2]]))
        rows = 20 + (5 if "packed" in kind else 4)
        for positions, good in ((rows, True), (rows - 1, False)):
            for name in ("rotary_cos", "rotary_sin"):
                arguments.set(**{name: arguments.empty(positions, 16)})
            monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")
            if good:
                arguments.call()
                continue
            message = r"cache_seqlens\[.\]: 20 \+ . queries.*rotary_cos"
            with pytest.raises(ValueError, match=message):
                arguments.call()
            arguments.set(causal=False)  # then all queries are at one position
            arguments.call()


@pytest.mark.parametrize("name", ["k_cache", "k_new"])
def test_out_in_the_middle_of_an_input(name, device):
    arguments = CacheArguments(device, "dense append")
    pool = arguments.empty(3, 2, 32, 2, 64)
    if name == "k_cache":
        arguments.set(k=pool[0], v=pool[1])
        shared = pool[0, 1, :16]
    else:
        arguments.set(k_new=pool[2, :, 4:7])  # not contiguous
        shared = pool[2, 1, 4:20]
    assert shared.is_contiguous() and shared.numel() == arguments.q.numel()
    arguments.set(out=shared.view(2, 4, 4, 64)[:])
    with pytest.raises(ValueError, match=f"out.*{name}"):
        arguments.call()


def test_out_in_a_gap_of_an_input(device):
    arguments = CacheArguments(device, "dense append")
    pool = arguments.empty(2, 2, 32, 2, 64)
    arguments.set(k=pool[:, 0], v=arguments.v, out=pool[0, 1, :16].view(2, 4, 4, 64))
    arguments.call()
