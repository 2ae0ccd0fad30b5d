"""torch's own attention functions on our kernels::

    import flashattn_ext
    flashattn_ext.activate_sdpa()  # from here on; or: with flashattn_ext.activate_sdpa(): ...
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    flashattn_ext.restore_sdpa()

`activate_sdpa` puts our forward in the place of these operators of torch, on the CPU and, in a
build with CUDA kernels, on GPUs:

* ``aten::_scaled_dot_product_flash_attention`` and ``..._for_cpu``, behind
  ``scaled_dot_product_attention`` where torch chooses its flash kernel. That choice stays torch's:
  on GPUs where it prefers cuDNN, ask for ``sdpa_kernel(SDPBackend.FLASH_ATTENTION)``;
* ``aten::_flash_attention_forward`` for packed sequences, and where torch has it
  ``..._no_dropout_inplace``, behind ``torch.nn.attention.varlen``. On the CPU torch has no such
  kernel: there `varlen_attn` works while this is active, and only then.

Whatever our forward does not serve exactly goes to the kernel of torch that was there before: calls
that need gradients, dropout, an ``attn_mask``, ``is_causal`` with more or fewer keys than
queries (torch aligns that mask to the first key), other dtypes, head dims and layouts. A graph that
`torch.compile` traced for training calls forward and backward one by one: there our forward is
followed by torch's backward, which starts from our log-sum-exp (tests compare the gradients).

Compiled graphs call the operators by name, so that both functions act on them too, without
recompiling. A packed query without a visible key has log-sum-exp -inf here, +inf in torch's kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import attention

from .. import _ops
from .._build import BUILD
from . import _sdpa_kernels as kernels

NAME = "flashattn_ext"

_OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": (kernels.dense_cpu, ("CPU",)),
    "_scaled_dot_product_flash_attention": (kernels.dense_cuda, ("CUDA",)),
    "_flash_attention_forward": (kernels.packed, ("CPU", "CUDA")),
    "_flash_attention_forward_no_dropout_inplace": (kernels.packed_out, ("CPU", "CUDA")),
}
# torch 2.10 activates but does not restore, so that there we go without its registry.
_HAS_REGISTRY = hasattr(attention, "restore_flash_attention_impl")


def activate_sdpa(devices: Sequence[str] | None = None) -> Activation:
    """Puts our forward behind torch's attention functions, see the module. Twice is once.

    In torch's registry it is the implementation "flashattn_ext" and takes the place of another one.

    Args:
        devices: where, of ``"cpu"`` and ``"cuda"``; None is wherever this build and this torch can.
            A second call does not change it.

    Returns:
        A context manager that undoes what this call did; to ignore it is fine.

    Raises:
        ValueError: another device.
        RuntimeError: the compiled library is missing or does not load, or ``"cuda"`` is asked for
            and it has no CUDA kernels that this torch can call.
    """
    global _replaced
    if _ops.load_error:
        raise RuntimeError(_ops.load_error)
    keys = _dispatch_keys(devices)
    if _is_active():
        return Activation(False)
    if _HAS_REGISTRY:
        replaced = attention.current_flash_attention_impl()
        attention.register_flash_attention_impl(NAME, register_fn=partial(_override, keys))
        attention.activate_flash_attention_impl(NAME)
        _replaced = replaced
    else:
        _override(keys)
    return Activation(True)


def _dispatch_keys(devices: Sequence[str] | None) -> list[str]:
    with_cuda = bool(BUILD.get("cuda_archs") and torch.version.cuda)
    if devices is None:
        return ["CPU", "CUDA"] if with_cuda else ["CPU"]
    if isinstance(devices, str) or not set(devices) <= {"cpu", "cuda"}:
        raise ValueError(f'devices: expected some of "cpu" and "cuda", got {devices!r}')
    if "cuda" in devices and not with_cuda:
        raise RuntimeError('devices: "cuda" needs CUDA kernels in this build and a torch with CUDA')
    return [device.upper() for device in devices]


def restore_sdpa() -> None:
    """Undoes `activate_sdpa`: the kernels and the implementation that were there before it.

    Without effect where it is not active. The name stays in torch's list of implementations.
    """
    if not _is_active():
        return
    if not _HAS_REGISTRY:
        _overrides.remove()
        return
    attention.restore_flash_attention_impl()
    if _replaced is not None:
        attention.activate_flash_attention_impl(_replaced)


class Activation:
    """What `activate_sdpa` returns. Leaving the ``with`` block undoes that call, no earlier one."""

    def __init__(self, changed: bool):
        self._changed = changed

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_error: object) -> None:
        if self._changed:
            restore_sdpa()


class _Overrides:
    """Kernels in torch's dispatcher, for as long as the libraries that hold them live."""

    def __init__(self, libraries: list[torch.library.Library]):
        self.libraries = libraries

    def remove(self) -> None:
        self.libraries = []


_overrides = _Overrides([])
_replaced: str | None = None  # the implementation of torch's registry to go back to


def _is_active() -> bool:
    return bool(_overrides.libraries)


def _override(keys: list[str]) -> _Overrides:
    """Called by torch's registry, which calls `remove` of the result to restore."""
    global _overrides, _replaced
    libraries = {key: torch.library.Library("aten", "IMPL", key) for key in keys}
    for name, (make_kernel, served) in _OPERATORS.items():
        if not hasattr(torch.ops.aten, name):
            continue
        for device in served:
            if device in libraries:
                _put(libraries[device], name, device, make_kernel(_kernel_of_torch(name, device)))
    _overrides, _replaced = _Overrides(list(libraries.values())), None
    return _overrides


def _put(library: torch.library.Library, name: str, device: str, kernel: kernels.Kernel) -> None:
    with warnings.catch_warnings():
        # torch before 2.14 warns in spite of allow_override.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(name, kernel, device, with_keyset=True, allow_override=True)


def _kernel_of_torch(name: str, device: str) -> kernels.Kernel:
    """What ran so far, as a function of the key set and the operator's arguments."""
    operator = f"aten::{name}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, device):
        return kernels.nothing_else(device)
    return torch.library.get_kernel(operator, device).call_boxed
