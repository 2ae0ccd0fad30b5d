"""The checked mode of an append: the places that new tokens go to are nobody else's, neither as
pages nor as memory. Without it, nothing is looked at."""

import pytest
import torch
from caches import dense_cache, packed_cache
from cases import ints
from strided import as_bits
from test_splitkv_errors import CacheArguments

REFUSED = {  # tokens before 3 new ones, pages of 16, table, the two entries, the page
    "both_append": ([20, 9], [[7, 3], [3, -1]], (1, 0), (0, 1), 3),
    "appended_and_read_before": ([20, 9], [[7, 3], [7, -1]], (1, 0), (0, 0), 7),
    "appended_and_read_behind": ([9, 20], [[7, -1], [7, 3]], (0, 0), (1, 0), 7),
    "second_page_of_the_tokens": ([20, 14], [[7, 3], [1, 7]], (1, 1), (0, 0), 7),
    "first_token_fills_a_page": ([15, 20], [[7, 4], [7, 3]], (0, 0), (1, 0), 7),
    "its_own_page_twice": ([20, 9], [[3, 3], [1, -1]], (0, 1), (0, 0), 3),
}


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")


def as_pattern(text):
    return text.replace("[", r"\[").replace("]", r"\]")


def refuse(arguments, message):
    """The call raises before anything is written."""
    out = torch.full_like(arguments.q, 5.0, memory_format=torch.contiguous_format)
    for tensor in (arguments.k, arguments.v):
        tensor.copy_(torch.randn(tensor.shape))
    arguments.set(out=out)
    before = [tensor.clone() for tensor in (arguments.k, arguments.v)]
    with pytest.raises(ValueError, match=message):
        arguments.call()
    for tensor, copy in zip((arguments.k, arguments.v), before, strict=True):
        assert torch.equal(as_bits(tensor), as_bits(copy)), "a refused call wrote to the cache"
    assert (out == 5).all()


def run_unchecked(arguments, monkeypatch):
    monkeypatch.delenv("FLASHATTN_EXT_CHECK")
    arguments.set(out=None)
    assert arguments.call().isfinite().all()


@pytest.mark.parametrize("kind", ["paged append", "paged packed append"])
@pytest.mark.parametrize("name", REFUSED)
def test_append_to_a_page_in_use(name, kind, device, checked, monkeypatch):
    lengths, table, entry, other, page = REFUSED[name]
    arguments = CacheArguments(device, kind)
    arguments.set(cache_seqlens=arguments.ints(lengths), block_table=arguments.ints(table))
    message = (
        f"block_table[{entry[0]}, {entry[1]}]: .*sequence {entry[0]}, got page {page}, which "
        f"sequence {other[0]} uses too .block_table[{other[0]}, {other[1]}]"
    )
    refuse(arguments, as_pattern(message))
    run_unchecked(arguments, monkeypatch)


def test_append_to_a_page_in_use_by_one_length_for_all(device, checked):
    arguments = CacheArguments(device, "paged append")
    arguments.set(cache_seqlens=20, block_table=arguments.ints([[7, 3], [2, 3]]))
    refuse(arguments, r"block_table\[1, 1\]: .*page 3, which sequence 0 uses")


def test_append_to_a_cache_row_in_use(device, checked, monkeypatch):
    arguments = CacheArguments(device, "dense append")
    arguments.set(cache_batch_idx=arguments.ints([1, 1]))
    message = "cache_batch_idx[1]: .*sequence 1, got cache row 1, which sequence 0 uses too"
    refuse(arguments, as_pattern(message) + r" \(cache_batch_idx\[0\]\)")
    run_unchecked(arguments, monkeypatch)


def test_a_row_or_page_that_is_only_read_may_be_shared(device, checked):
    for case in (dense_cache(1, 40, 40, batch_idx=True), dense_cache(1, 40, 40, page=16)):
        call = case.build(device)
        name = "block_table" if case.page else "cache_batch_idx"
        call.options[name][1] = call.options[name][0]
        call.cache.table[1] = call.cache.table[0]
        call.reread()
        call.compare(*call.run())


@pytest.mark.parametrize("new", [1, 2, 40])
def test_shared_prefix_under_an_append(new, device, checked):
    """Full pages that all sequences read; each appends to pages of its own."""
    for page in (1, 16):
        options = {"page": page, "table": "shared", "new": new, "causal": True, "rotary": 1.0}
        call = dense_cache(2, 40, 35, 32, **options).build(device)
        table = call.options["block_table"]
        assert (table[:, : 32 // page] == table[0, : 32 // page]).all()
        call.compare(*call.run())
        packed_cache((1, 40), (5, 33), (0, 32), **options).check(device)


def test_page_shared_beyond_the_tail(device, checked):
    """An entry that the call does not use may name a page that another sequence appends to."""
    call = dense_cache(1, 40, 9, page=16, new=2).build(device)
    table = call.options["block_table"]
    table[1, 1:] = table[0, 2]
    table[0, 3:] = table[1, 0]
    call.compare(*call.run())


def test_page_shared_before_the_left_padding(device, checked):
    call = dense_cache(1, 40, 40, page=16, leftpad=(0, 17), new=2).build(device)
    table = call.options["block_table"]
    own, table[1, 0] = table[1, 0].item(), table[0, 2]
    call.compare(*call.run())
    call.options["cache_leftpad"].copy_(ints([0, 15], device))
    with pytest.raises(ValueError, match=r"block_table\[0, 2\]: .*sequence 1 uses"):
        call.run()
    table[1, 0] = own
    call.run()


def test_no_new_tokens_may_share_all_pages(device, checked):
    arguments = CacheArguments(device, "paged append")
    arguments.set(
        block_table=arguments.ints([[7, 3], [7, 3]]), k_new=arguments.empty(2, 0, 2, 64),
        v_new=arguments.empty(2, 0, 2, 64),
    )  # fmt: skip
    assert arguments.call().isfinite().all()


def view_of(cache, shape, page, slot):
    """`shape` in the memory of a cache, from a slot on; not more than its rows."""
    start = page * cache.stride(0) + slot * cache.stride(1)
    strides = torch.empty(shape, device="meta").stride()
    return cache.as_strided(shape, strides, cache.storage_offset() + start)


SHAPES = {"q": (2, 4, 4, 64), "k_new": (2, 3, 2, 64), "v_new": (2, 3, 2, 64)}
# Where sequence 0 appends: (page or row, first of 3 slots). Page 3 of a table [[7, 3], [1, -1]].
TAILS = {"dense append": (0, 20), "paged append": (3, 4)}


@pytest.mark.parametrize("kind", TAILS)
@pytest.mark.parametrize("cache", ["k", "v"])
@pytest.mark.parametrize("name", SHAPES)
def test_input_in_the_memory_that_is_written(name, cache, kind, device, checked, monkeypatch):
    page, slot = TAILS[kind]
    for first, at, token in ((slot, 0, 0), (slot - 1, 1, 0), (slot + 2, 0, 2)):
        arguments = CacheArguments(device, kind)
        view = view_of(getattr(arguments, cache), SHAPES[name], page, first)
        # q has 4 heads to the 2 of a cache, so a query lies over two slots.
        index = at if name != "q" else at // 2
        message = f"{name}[0, {index}]: .*{cache}_cache[{page}, {slot + token}], where new token"
        arguments.set(**{name: view})
        refuse(arguments, as_pattern(f"{message} {token} of sequence 0 goes"))
        run_unchecked(arguments, monkeypatch)
        monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")


@pytest.mark.parametrize("name", ["k_new", "v_new"])
def test_input_that_reaches_into_a_written_vector(name, device, checked):
    """By 16 bytes at either end of what is appended, slots 20 to 22 of row 0 and 9 to 11 of row 1.
    Beside it is allowed."""
    slot, part = 2 * 64, 8
    for begin, message in (
        (17 * slot, None),
        (17 * slot + part, f"{name}[0, 2]: .*k_cache[0, 20], where new token 0"),
        (23 * slot - part, f"{name}[0, 0]: .*k_cache[0, 22], where new token 2"),
        (23 * slot, None),
        (44 * slot - part, f"{name}[0, 0]: .*k_cache[1, 11], where new token 2 of sequence 1"),
    ):
        arguments = CacheArguments(device, "dense append")
        view = arguments.k.flatten()[begin : begin + 3 * slot].view(1, 3, 2, 64)
        arguments.set(**{name: view.expand(2, -1, -1, -1)})
        if message is None:
            assert arguments.call().isfinite().all()
        else:
            refuse(arguments, as_pattern(message))


def test_input_in_the_memory_of_another_sequence(device, checked):
    """The last new token of sequence 1, in a cache of heads first and as the second of k_new."""
    arguments = CacheArguments(device, "dense append")
    arguments.set(k=arguments.empty(2, 2, 32, 64).transpose(1, 2))
    k_new = arguments.k[:, 10:13]
    arguments.set(k_new=k_new)
    message = "k_new[1, 0]: .*k_cache[1, 10], where new token 1 of sequence 1 goes"
    refuse(arguments, as_pattern(message))


@pytest.mark.parametrize("page", [0, 16])
def test_inputs_in_other_memory_of_the_cache(page, device, checked):
    """What is read beside the places that are written is what it was: between the strides of a
    pool and in slots without new tokens."""
    case = dense_cache(1, 33, 20, page=page, new=2, room=40, causal=True)
    for pool in ("plain", "padded", "interleaved"):
        call = case.but(pool=pool).build(device)
        row, slot = (0, 2) if page else (0, call.k.shape[1] - 4)
        if page:  # of no sequence
            row = next(p for p in range(len(call.k)) if p not in call.options["block_table"])
        view = call.k[row, slot : slot + 4].unflatten(0, (2, 2))
        view.copy_(call.options["k_new"])
        buffer = call.expected[0]
        twin = buffer.as_strided(call.k.shape, call.k.stride(), call.k.storage_offset())
        twin[row, slot : slot + 4] = call.k[row, slot : slot + 4]
        call.compare(*call.run(k_new=view))


def test_inputs_in_the_gaps_of_a_pool(device, checked):
    """Vectors that lie between those which are written."""
    case = dense_cache(1, 33, 20, new=2, heads=(4, 2), causal=True)
    call = case.build(device)
    pool = torch.full_like(call.k.repeat(1, 1, 2, 1), torch.nan)
    cache, gaps = pool[:, :, ::2], pool[:, :, 1::2]
    cache.copy_(call.k)
    k_new = gaps[:, 33:35]
    k_new.copy_(call.options["k_new"])
    expected = call.run()
    call.k = cache
    got = call.run(k_new=k_new)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"k_new\[0, 0\].*k_cache\[0, 33\]"):
        call.run(k_new=cache[:, 33:35])
