"""torch's attention functions on our kernels, beside torch's own and float64."""

import inspect
import subprocess
import sys

import pytest
import torch
from conftest import NO_GPU
from flashattn_ext.integrations import _sdpa_kernels as kernels
from flashattn_ext.integrations import sdpa as adapter
from reference import Rule, Sequence, attend
from torch._subclasses import FakeTensorMode
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashattn_ext

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

CPU_OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
TYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ("cpu",) if NO_GPU else ("cpu", "cuda")
needs_registry = pytest.mark.skipif(not adapter._HAS_REGISTRY, reason="torch 2.10 cannot restore")


@pytest.fixture(autouse=True)
def torchs_own_kernels():
    flashattn_ext.restore_sdpa()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        yield
    flashattn_ext.restore_sdpa()


@pytest.fixture
def served(monkeypatch):
    """The names of our functions that gave a result."""
    names = []

    def watch(name, function):
        def spy(*arguments, **options):
            result = function(*arguments, **options)
            names.append(name)
            return result

        monkeypatch.setattr(kernels, name, spy)

    watch("flash_fwd", kernels.flash_fwd)
    watch("flash_fwd_splitkv", kernels.flash_fwd_splitkv)
    return names


def make(device, dtype, sq=33, sk=33, heads=(4, 4), d=64, batch=2):
    torch.manual_seed(0)
    shapes = (batch, heads[0], sq, d), (batch, heads[1], sk, d), (batch, heads[1], sk, d)
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def exact(q, k, v, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)


def assert_as_good(ours, torchs, reference):
    """No more than twice torch's error, and the rounding of sums in float32 and of the result."""
    rounding = 16 * torch.finfo(torch.float32).eps
    if ours.dtype != torch.float32:
        rounding += torch.finfo(ours.dtype).eps / 2 * reference.abs().max()
    allowed = 2 * (torchs - reference).abs().max() + rounding
    assert (ours - reference).abs().max() <= allowed


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("d", [64, 36, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("sizes", [(33, 33), (7, 40), (130, 130)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_as_good_as_torch(causal, sizes, heads, d, dtype, device, served):
    q, k, v = make(device, dtype, *sizes, heads, d)
    options = {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}
    torchs = scaled_dot_product_attention(q, k, v, **options)
    assert served == []
    with flashattn_ext.activate_sdpa(DEVICES):
        ours = scaled_dot_product_attention(q, k, v, **options)
    # torch's causal mask is not ours where the lengths differ: that one stays torch's.
    assert served == ([] if causal and sizes[0] != sizes[1] else ["flash_fwd"])
    assert_as_good(ours, torchs, exact(q, k, v, **options))


def test_scale(device, served):
    q, k, v = make(device, torch.bfloat16)
    torchs = scaled_dot_product_attention(q, k, v, scale=0.5)
    with flashattn_ext.activate_sdpa(DEVICES):
        ours = scaled_dot_product_attention(q, k, v, scale=0.5)
    assert served == ["flash_fwd"]
    assert_as_good(ours, torchs, exact(q, k, v, scale=0.5))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_attn_mask_stays_with_torch(kind, device, served):
    q, k, v = make(device, torch.bfloat16)
    mask = torch.ones(33, 33, dtype=torch.bool, device=device).tril(-1)
    mask[0, 0] = True
    if kind == "float":
        mask = torch.zeros(33, 33, dtype=q.dtype, device=device).masked_fill(~mask, -1e4)
    torchs = scaled_dot_product_attention(q, k, v, mask)
    with flashattn_ext.activate_sdpa(DEVICES):
        assert torch.equal(scaled_dot_product_attention(q, k, v, mask), torchs)
    assert served == []


def test_dropout_stays_with_torch(device, served):
    q, k, v = make(device, torch.bfloat16)
    torch.manual_seed(1)
    torchs = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    with flashattn_ext.activate_sdpa(DEVICES):
        torch.manual_seed(1)
        assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5), torchs)
    assert served == []


def test_float64_stays_with_torch(served):
    q, k, v = make("cpu", torch.float64)
    torchs = scaled_dot_product_attention(q, k, v)
    with flashattn_ext.activate_sdpa(DEVICES):
        assert torch.equal(scaled_dot_product_attention(q, k, v), torchs)
    assert served == []


def gradients(function, tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
    out.backward(weights.view(out.shape))
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("leaf", [0, 1, 2], ids="qkv")
def test_one_gradient_is_enough_to_stay_with_torch(leaf, device, served):
    tensors = make(device, torch.bfloat16)
    tensors[leaf].requires_grad_()
    with flashattn_ext.activate_sdpa(DEVICES):
        assert scaled_dot_product_attention(*tensors).requires_grad
        assert served == []
        with torch.no_grad():
            scaled_dot_product_attention(*tensors)
        assert served == ["flash_fwd"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_eager_gradients_are_torchs(causal, dtype, device, served):
    tensors = make(device, dtype)

    def function(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    torchs = gradients(function, tensors)
    with flashattn_ext.activate_sdpa(DEVICES):
        ours = gradients(function, tensors)
    assert served == []
    for mine, theirs in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_compiled_gradients(causal, heads, dtype, device, served):
    """Our forward in the graph, torch's backward from our log-sum-exp."""
    tensors = make(device, dtype, 70, 70, heads)
    gqa = heads[0] != heads[1]
    torch._dynamo.reset()

    def function(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

    reference = gradients(function, [t.double() for t in tensors])
    torchs = gradients(function, tensors)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with flashattn_ext.activate_sdpa(DEVICES):
        ours = gradients(compiled, tensors)
    assert served == ["flash_fwd"]
    for mine, theirs, best in zip(ours, torchs, reference, strict=True):
        assert_as_good(mine, theirs, best)


def test_compiled_graphs_follow_without_recompiling(device, served):
    q, k, v = make(device, torch.bfloat16)

    def function(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torchs = compiled(q, k, v)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with flashattn_ext.activate_sdpa(DEVICES):
            ours = compiled(q, k, v)
            assert served == ["flash_fwd"]
            assert torch.equal(ours, function(q, k, v))
        assert torch.equal(compiled(q, k, v), torchs)
    assert served == ["flash_fwd"] * 2


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "expanded", "padded"])
def test_strides_are_those_that_graphs_count_on(layout, served):
    q, k, v = make("cpu", torch.bfloat16)
    if layout == "bshd":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "expanded":
        q = q[:, :1].expand(-1, 4, -1, -1)
    elif layout == "padded":
        q = torch.nn.functional.pad(q, (0, 8))[..., :64]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        promised = CPU_OPERATOR(*map(mode.from_tensor, (q, k, v)))
    with flashattn_ext.activate_sdpa(DEVICES):
        results = CPU_OPERATOR(q, k, v)
    assert served == ["flash_fwd"]
    for result, promise in zip(results, promised, strict=True):
        assert result.stride() == promise.stride() and result.dtype == promise.dtype


def test_log_sum_exp_is_torchs(served):
    q, k, v = make("cpu", torch.float32)
    torchs = CPU_OPERATOR(q, k, v, 0.0, True)
    with flashattn_ext.activate_sdpa(DEVICES):
        ours = CPU_OPERATOR(q, k, v, 0.0, True)
    assert served == ["flash_fwd"]
    torch.testing.assert_close(ours[1], torchs[1])


def test_results_of_the_cuda_operator():
    """Its nine results, of a kernel that here gets tensors of the CPU."""
    q, k, v = make("cpu", torch.bfloat16, 7, 40, heads=(4, 2))
    results = kernels.dense_cuda(None)(None, q, k, v)
    out, lse, starts_q, starts_k, max_q, max_k, state, offset, mask = results
    expected = flashattn_ext.flash_fwd(*(t.transpose(1, 2) for t in (q, k, v)), return_lse=True)
    assert torch.equal(out, expected[0].transpose(1, 2)) and out.stride() == q.stride()
    assert torch.equal(lse, expected[1]) and lse.is_contiguous()
    assert (starts_q, starts_k, max_q, max_k) == (None, None, 7, 40)
    assert (state.shape, offset.shape, mask.shape) == ((2,), (), (0,))
    assert state.dtype == offset.dtype == torch.uint64


def test_the_cuda_kernel_leaves_debug_masks_to_torch():
    q, k, v = make("cpu", torch.bfloat16)
    calls = []
    kernel = kernels.dense_cuda(lambda *arguments, **options: calls.append((arguments, options)))
    assert kernel("keys", q, k, v, 0.0, True, True, scale=0.5) is None
    assert calls == [(("keys", q, k, v, 0.0, True, True), {"scale": 0.5})]


def dispatch_tables():
    return [
        torch._C._dispatch_dump(f"aten::{name}")
        for name in adapter._OPERATORS
        if hasattr(torch.ops.aten, name)
    ]


def test_restore_brings_back_the_tables(served):
    q, k, v = make("cpu", torch.bfloat16)
    before, torchs = dispatch_tables(), scaled_dot_product_attention(q, k, v)
    for _ in range(3):
        flashattn_ext.activate_sdpa(DEVICES)
        flashattn_ext.activate_sdpa(DEVICES)
        assert dispatch_tables()[0] != before[0]
        flashattn_ext.restore_sdpa()
        assert dispatch_tables() == before
    flashattn_ext.restore_sdpa()
    assert dispatch_tables() == before
    assert torch.equal(scaled_dot_product_attention(q, k, v), torchs) and served == []


def test_without_torchs_registry(monkeypatch, served):
    """As on torch 2.10, whose registry cannot restore."""
    monkeypatch.setattr(adapter, "_HAS_REGISTRY", False)
    q, k, v = make("cpu", torch.bfloat16)
    before = dispatch_tables()
    with flashattn_ext.activate_sdpa(DEVICES):
        flashattn_ext.activate_sdpa(DEVICES)
        scaled_dot_product_attention(q, k, v)
    assert served == ["flash_fwd"]
    assert dispatch_tables() == before


def test_inner_block_leaves_the_outer_activation():
    before = dispatch_tables()
    with flashattn_ext.activate_sdpa(DEVICES):
        with flashattn_ext.activate_sdpa(DEVICES):
            pass
        assert dispatch_tables() != before
    assert dispatch_tables() == before


def test_a_block_restores_after_an_error():
    before = dispatch_tables()
    with pytest.raises(KeyError), flashattn_ext.activate_sdpa(DEVICES):
        raise KeyError
    assert dispatch_tables() == before


@needs_registry
def test_torchs_registry_knows():
    before = dispatch_tables()
    flashattn_ext.activate_sdpa(DEVICES)
    assert attention.current_flash_attention_impl() == adapter.NAME
    attention.restore_flash_attention_impl()
    assert dispatch_tables() == before
    attention.activate_flash_attention_impl(adapter.NAME)
    assert dispatch_tables() != before
    flashattn_ext.restore_sdpa()
    assert dispatch_tables() == before
    assert attention.current_flash_attention_impl() is None


@needs_registry
def test_another_implementation_comes_back():
    class Handle:
        def remove(self):
            events.append("removed")

    def start():
        events.append("started")
        return Handle()

    events = []
    attention.register_flash_attention_impl("another", register_fn=start)
    attention.activate_flash_attention_impl("another")
    try:
        with flashattn_ext.activate_sdpa(DEVICES):
            assert events == ["started", "removed"]
        assert events == ["started", "removed", "started"]
        assert attention.current_flash_attention_impl() == "another"
    finally:
        attention.restore_flash_attention_impl()


def test_a_missing_library_is_said_at_once(monkeypatch):
    monkeypatch.setattr(adapter._ops, "load_error", "not built")
    before = dispatch_tables()
    with pytest.raises(RuntimeError, match="not built"):
        flashattn_ext.activate_sdpa(DEVICES)
    assert dispatch_tables() == before


def test_import_loads_no_adapter_and_warns_of_nothing():
    program = (
        "import sys, flashattn_ext\n"
        "assert not any(name.startswith('flashattn_ext.integrations') for name in sys.modules)\n"
        "flashattn_ext.activate_sdpa()"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], check=True)


# varlen_attn


def varlen_options(window=(-1, -1), **options):
    """As this torch spells them; skips what it does not have."""
    if varlen_attn is None:
        pytest.skip("this torch has no varlen_attn")
    names = inspect.signature(varlen_attn).parameters
    if window == (-1, 0) and "window_size" not in names:
        options["is_causal"] = True
    elif window != (-1, -1):
        options["window_size"] = window
    missing = [name for name in options if name not in names]
    if missing:
        pytest.skip(f"varlen_attn of this torch has no {missing[0]}")
    return options


LENGTHS = (17, 1, 40)


def make_packed(device, dtype, heads=(4, 4), d=64):
    torch.manual_seed(0)
    starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    total = sum(LENGTHS)
    q, k, v = (
        torch.randn(total, h, d, dtype=dtype, device=device) for h in (heads[0], heads[1], heads[1])
    )
    return q, k, v, starts


def assert_each_sequence(out, q, k, v, starts, used=LENGTHS, window=(-1, -1)):
    for start, length, keys in zip(starts.tolist(), LENGTHS, used, strict=False):
        rows, key_rows = slice(start, start + length), slice(start, start + keys)
        sequence = Sequence(q[rows], k[key_rows], v[key_rows])
        rule = Rule(q.shape[-1] ** -0.5, window)
        best, rounded = attend(sequence, rule)[0], attend(sequence, rule, q.dtype)[0]
        assert_as_good(out[rows], rounded, best)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (5, 2)], ids=str)
def test_varlen(window, heads, dtype, device, served):
    gqa = {"enable_gqa": True} if heads[0] != heads[1] else {}
    options = varlen_options(window, **gqa)
    q, k, v, starts = make_packed(device, dtype, heads)
    with flashattn_ext.activate_sdpa(DEVICES):
        out = varlen_attn(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), **options)
    assert served == ["flash_fwd"]
    assert_each_sequence(out, q, k, v, starts, window=window)


@pytest.mark.parametrize("num_splits", [None, 1])
def test_varlen_with_used_keys(num_splits, device, served):
    used = (9, 1, 40)
    lengths = torch.tensor(used, dtype=torch.int32, device=device)
    options = varlen_options(seqused_k=lengths, **({"num_splits": 1} if num_splits else {}))
    q, k, v, starts = make_packed(device, torch.bfloat16)
    with flashattn_ext.activate_sdpa(DEVICES):
        out = varlen_attn(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), **options)
    assert served == ["flash_fwd"]
    assert_each_sequence(out, q, k, v, starts, used)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_varlen_over_pages(num_splits, device, served):
    page, columns = 256, 2  # torch's own kernel takes pages of multiples of 256 only
    q, k, v, starts = make_packed(device, torch.bfloat16)
    table = torch.tensor([[4, 0], [1, 5], [3, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    options = varlen_options(block_table=table, seqused_k=lengths, num_splits=num_splits)
    pools = [torch.full((6, page, 4, 64), torch.nan, dtype=q.dtype, device=device) for _ in "kv"]
    for pool, source in zip(pools, (k, v), strict=True):
        for n, length in enumerate(LENGTHS):
            pool[table[n, 0], :length] = source[starts[n] : starts[n] + length]
    with flashattn_ext.activate_sdpa(DEVICES):
        out = varlen_attn(q, *pools, starts, None, max(LENGTHS), page * columns, **options)
    assert served == ["flash_fwd_splitkv"]
    assert_each_sequence(out, q, k, v, starts)


def test_varlen_into_a_given_tensor(device, served):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    q, k, v, starts = make_packed(device, torch.bfloat16)
    out = torch.full_like(q, torch.nan)
    with flashattn_ext.activate_sdpa(DEVICES):
        varlen.varlen_attn_out(out, q, k, v, starts, starts, max(LENGTHS), max(LENGTHS))
    assert served == ["flash_fwd"]
    assert_each_sequence(out, q, k, v, starts)


def test_varlen_gradients_stay_with_torch(device, served):
    varlen_options()
    q, k, v, starts = make_packed(device, torch.bfloat16)
    arguments = (q.requires_grad_(), k, v, starts, starts, max(LENGTHS), max(LENGTHS))
    with flashattn_ext.activate_sdpa(DEVICES):
        if device == "cpu":  # where torch has nothing
            with pytest.raises(NotImplementedError, match="gradients"):
                varlen_attn(*arguments)
        else:
            varlen_attn(*arguments).float().sum().backward()
            assert q.grad.isfinite().all()
    assert served == []


def test_varlen_on_the_cpu_ends_with_restore():
    varlen_options()
    q, k, v, starts = make_packed("cpu", torch.bfloat16)
    arguments = (q, k, v, starts, starts, max(LENGTHS), max(LENGTHS))
    with flashattn_ext.activate_sdpa(DEVICES):
        varlen_attn(*arguments)
    with pytest.raises(NotImplementedError):
        varlen_attn(*arguments)


@pytest.mark.parametrize("devices", ["cpu", ("xpu",), ("cpu", "cuda:0")], ids=str)
def test_other_devices_are_refused(devices):
    with pytest.raises(ValueError, match='^devices: expected some of "cpu" and "cuda"'):
        flashattn_ext.activate_sdpa(devices)


def test_gpus_have_to_be_asked_for():
    keys = [adapter._dispatch_keys(devices) for devices in ((), ("cpu",))]
    assert keys == [[], ["CPU"]]
    assert inspect.signature(flashattn_ext.activate_sdpa).parameters["devices"].default == ("cpu",)
    if not adapter.BUILD.get("cuda_archs") or not torch.version.cuda:
        with pytest.raises(RuntimeError, match='^devices: "cuda" needs'):
            flashattn_ext.activate_sdpa(("cuda",))
