"""Calls of torch's attention, and how close ours must come to torch's own.

Test files take the fixtures by name: ``torchs_own_kernels`` is for every test, ``served`` holds the
names of our functions that gave a result.
"""

import pytest
import torch
from flashattn_ext.integrations import _sdpa_kernels as kernels
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashattn_ext

CPU_OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
TYPES = [torch.float32, torch.float16, torch.bfloat16]


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
