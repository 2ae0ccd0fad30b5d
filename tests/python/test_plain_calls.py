"""Plain calls, whose tensors are checked by the operator alone (flashattn_ext/_plain.py): what they
cost the host in calls of Python, and that the operator refuses what the checks in Python refuse,
also where nothing would be read."""

import sys
from functools import partial

import pytest
import torch
from test_op_refusals import B, CAPACITY, HK, Call, D, S, bf16

import flashattn_ext
from flashattn_ext import _checks, _ops, _plain, _splitkv_checks
from flashattn_ext._plain import is_plain


def dense(device):
    k = bf16(device, B, CAPACITY, HK, D)
    return flashattn_ext.flash_fwd, (bf16(device, B, S, 4, D), k, k.clone()), {"causal": True}


def pages(device):
    k = bf16(device, 4, CAPACITY, HK, D)
    options = {
        "cache_seqlens": torch.tensor([4, 5], dtype=torch.int32, device=device),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device),
    }
    return flashattn_ext.flash_fwd_splitkv, (bf16(device, B, S, 4, D), k, k.clone()), options


def with_out(device):
    function, operands, options = pages(device)
    return function, operands, {**options, "out": torch.empty_like(operands[0])}


def with_new_tokens(device):
    function, operands, options = pages(device)
    new = {name: bf16(device, B, 1, HK, D) for name in ("k_new", "v_new")}
    tables = {name: bf16(device, 32, 16) for name in ("rotary_cos", "rotary_sin")}
    return function, operands, {**options, **new, **tables}


def packed_pages(device):
    function, (q, k, v), options = pages(device)
    ends = torch.tensor([0, S, 2 * S], dtype=torch.int32, device=device)
    options = {**options, "cu_seqlens_q": ends, "max_seqlen_q": S}
    return function, (q.flatten(0, 1), k, v), options


def pages_and_softcap(device):
    function, operands, options = pages(device)
    return function, operands, {**options, "softcap": 3.0}


CALLS = [dense, pages, packed_pages, pages_and_softcap, with_out, with_new_tokens]


def counted(call):
    """How many calls of Python functions and of C functions, by name, a call makes."""
    python, c = [], []

    def note(frame, event, argument):
        if event == "call":
            python.append(frame.f_code.co_name)
        elif event == "c_call":
            c.append(argument.__name__)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return python, [name for name in c if name != "setprofile"]


@pytest.mark.parametrize("make", CALLS)
def test_host_cost_of_a_plain_call(make, device):
    """A check of tensors that comes back into the way of every call shows here."""
    function, operands, options = make(device)
    with torch.inference_mode():
        function(*operands, **options)
        python, c = counted(lambda: function(*operands, **options))
    numbers = "softcap" in options  # a number that is given is looked at in Python
    assert len(python) <= (15 if numbers else 12), python
    assert len(c) <= (8 if numbers else 7), c


@pytest.mark.parametrize("make", [pages, packed_pages])
def test_host_cost_of_serving(make, device):
    """The operator itself, and a few questions of the kind of call that it is."""
    function, operands, options = make(device)
    with torch.inference_mode():
        function(*operands, **options)
        python, c = counted(lambda: function(*operands, **options))
    assert len(python) <= 9, python
    assert len(c) <= 2, c


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_the_operator_of_serving_computes_the_same(contiguous, is_packed, device):
    _, operands, options = (packed_pages if is_packed else pages)(device)
    table = None if contiguous else options["block_table"]
    arguments = (*(torch.randn_like(t) for t in operands), options["cache_seqlens"], table)
    last = (options["cu_seqlens_q"], options["max_seqlen_q"]) if is_packed else ()
    for right in (-1, 0):
        expected = _ops.fwd_splitkv(*arguments, right, None, -1, *last)
        assert torch.equal(_ops.fwd_splitkv_basic(*arguments, right, *last), expected)
        basic = torch.ops.flashattn_ext.fwd_splitkv_basic.default
        torch.library.opcheck(basic, (*arguments, right, *last))


@pytest.mark.parametrize(
    "bad",
    [
        {"num_splits": 0.0}, {"num_splits": False}, {"softcap": 0}, {"causal": 1}, {"causal": None},
        {"block_table": 3}, {"rotary_interleaved": False}, {"return_lse": 0},
        {"softcap": float("nan")}, {"cache_seqlens": None}, {"max_seqlen_q": 3},
        {"cu_seqlens_q": 3}, {"cu_seqlens_q": 3, "max_seqlen_q": 4},
        {"cu_seqlens_q": 3, "max_seqlen_q": -1},
        {"cu_seqlens_q": torch.tensor([0, 3, 6]), "max_seqlen_q": 4},
        {"cu_seqlens_q": 3, "max_seqlen_q": 1 << 40}, {"cu_seqlens_q": 3, "max_seqlen_q": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_nearly_a_call_of_serving(bad, device):
    """Is refused, or is right: what the checks in Python say of it."""
    function, operands, options = pages(device)
    given = {**options, **bad}
    try:
        expected = with_checks(function, operands, given)
    except Exception as refusal:
        with pytest.raises(type(refusal)) as caught:
            function(*operands, **given)
        assert str(caught.value) == str(refusal)
    else:
        assert torch.equal(function(*operands, **given), expected)


def with_checks(function, operands, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plain, "is_plain", lambda *_tensors: False)
        return function(*operands, **options)


WITHOUT_ROWS = {
    "stride": lambda: torch.zeros(0, 4, 4, 65, dtype=torch.bfloat16)[..., :64],
    "last stride": lambda: torch.zeros(0, 4, 4, 64, 2, dtype=torch.bfloat16)[..., 0],
}


@pytest.mark.parametrize("spoil", WITHOUT_ROWS)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_empty_operands_have_a_layout_too(name, spoil, device):
    good = torch.zeros(0, 4, 4, 64, dtype=torch.bfloat16, device=device)
    given = dict.fromkeys("qkv", good) | {"out": good.clone()}
    flashattn_ext.flash_fwd(**given)
    given[name] = WITHOUT_ROWS[spoil]().to(device)
    with pytest.raises(ValueError, match=rf"^{name}: expected stride"):
        flashattn_ext.flash_fwd(**given)
    given["cache_seqlens"] = 3
    given |= {f"{name}_cache": given.pop(name) for name in "kv"}
    with pytest.raises(ValueError, match=rf"^{name}(_cache)?: expected stride"):
        flashattn_ext.flash_fwd_splitkv(**given)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_queries_of_few_dims(rank, device):
    q, k = torch.ones((8,) * rank, device=device), bf16(device, 2, 3, 4, 64)
    for call in (
        flashattn_ext.flash_fwd,
        partial(flashattn_ext.flash_fwd_splitkv, cache_seqlens=1),
    ):
        for out in (None, q.clone()):
            with pytest.raises(ValueError, match="^q: expected "):
                call(q, k, k, out=out, return_lse=True)


def test_no_heads(device):
    q, k = bf16(device, 2, 3, 0, 64), bf16(device, 2, 3, 0, 64)
    for call in (
        lambda: flashattn_ext.flash_fwd(q, k, k),
        lambda: flashattn_ext.flash_fwd_splitkv(q, k, k, cache_seqlens=1),
    ):
        with pytest.raises(ValueError, match="number of key/value heads"):
            call()


def test_pages_without_tokens(device):
    q, k = bf16(device, 2, 3, 4, 64), bf16(device, 2, 0, 4, 64)
    table = torch.zeros(2, 0, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="^k_cache: expected pages of at least 1 token"):
        flashattn_ext.flash_fwd_splitkv(q, k, k, cache_seqlens=0, block_table=table)


def in_the_memory_of(tensor, shape, offset):
    """A bfloat16 tensor that begins `offset` bytes behind the first byte of another."""
    count = 1
    for size in shape:
        count *= size
    memory = torch.zeros(
        tensor.nbytes + 2 * count + offset, dtype=torch.uint8, device=tensor.device
    )
    moved = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return moved, memory[offset : offset + 2 * count].view(torch.bfloat16).view(shape)


@pytest.mark.parametrize("kind", ["fwd", "packed", "splitkv", "paged", "append"])
def test_operators_refuse_an_out_in_use(kind, device):
    tensors = [name for name, t in Call(kind, device).arguments.items() if torch.is_tensor(t)]
    for name in tensors:
        if name in ("out", "lse"):
            continue
        call = Call(kind, device)
        offset = call.arguments[name].nbytes // 32 * 16
        moved, out = in_the_memory_of(call.arguments[name], call.out.shape, offset)
        call.arguments |= {name: moved, "out": out}
        before = out.clone()
        with pytest.raises(ValueError, match=f"^out: expected memory of its own.* {name}$"):
            call.run()
        assert torch.equal(out, before), name


def test_operators_refuse_an_expanded_out(device):
    call = Call("fwd", device)
    call.arguments["out"] = call.out[:1].expand(call.out.shape)
    with pytest.raises(ValueError, match="^out: expected no expanded dim"):
        call.run()
    assert not call.written()


def test_an_expanded_out_without_elements(device):
    _, (q, k, v), _ = dense(device)
    out = torch.empty(1, 0, *q.shape[2:], device=device, dtype=q.dtype).expand(3, -1, -1, -1)
    k, v = (t[:1].expand(3, -1, -1, -1) for t in (k, v))
    result = flashattn_ext.flash_fwd(q[:1, :0].expand(3, -1, -1, -1), k, v, out=out)
    assert result is out


def test_what_neither_operator_nor_checks_can_look_into(device):
    """Then the operator's own words reach the caller, not those of a check that failed. It refuses
    where torch would call it in a loop."""
    _, (q, k, v), _ = dense(device)
    sinks = torch.zeros(3, q.shape[2], device=device)

    for out in (None, q.clone()):
        with pytest.raises(NotImplementedError, match="not served inside torch.vmap"):
            torch.vmap(lambda row, out=out: flashattn_ext.flash_fwd(q, k, v, sinks=row, out=out))(
                sinks
            )


def test_operators_refuse_caches_in_one_place(device):
    call = Call("append", device)
    call.arguments["v_cache"] = call.arguments["k_cache"]
    with pytest.raises(ValueError, match="^k_cache: expected memory of its own.* v_cache$"):
        call.run()
    assert not call.written()


def test_interleaved_views_share_nothing(device):
    """q, k, v and out as views of one buffer, none of which is contiguous."""
    buffer = torch.randn(2, 5, 4, 4, 64, device=device).bfloat16()
    q, k, v, out = buffer.unbind(2)
    expected = flashattn_ext.flash_fwd(*(t.contiguous() for t in (q, k, v)))
    flashattn_ext.flash_fwd(q, k, v, out=out)
    assert torch.equal(out, expected)


def test_what_is_not_plain(device, monkeypatch):
    _, (q, k, v), _ = dense(device)
    flashattn_ext.flash_fwd(q, k, v)
    assert is_plain(q, k, v) and is_plain(q, k, v, None, q)
    asks = q.clone().requires_grad_()
    assert not is_plain(asks, k, v) and not is_plain(q, k, v, asks)
    assert not is_plain(torch.nn.Parameter(q, requires_grad=False), k, v)
    with torch.autograd.forward_ad.dual_level():
        assert not is_plain(q, k, v)
    with torch.no_grad():
        assert is_plain(asks, k, v)
    monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")
    assert not is_plain(q, k, v)


def test_checks_run_only_for_what_was_refused(device, monkeypatch):
    def never(*_arguments):
        raise AssertionError

    monkeypatch.setattr(_checks, "check_call", never)
    monkeypatch.setattr(_splitkv_checks, "check_call", never)
    for make in CALLS:
        function, operands, options = make("cpu")
        function(*operands, **options)
        with pytest.raises(AssertionError):
            function(*operands, **{**options, "softcap": -1.0})
