"""Exact attention in tiles for GPUs and CPUs: dense and packed sequences, and key/value caches.

Importing this package never fails and never touches a device. A problem of the installation
(no torch, a library that was not built or does not load) is raised by the first call, in one
sentence with the remedy; ``python -m flashattn_ext.info`` reports it too.
"""

from os import environ
from typing import TYPE_CHECKING, Any

from ._build import BUILD

if TYPE_CHECKING:
    from .integrations.sdpa import activate_sdpa, restore_sdpa

try:
    import torch  # noqa: F401  before the ops library, which needs torch's libraries loaded

    from .combine import flash_combine, merge_attention_states
    from .interface import flash_fwd, supports
    from .planning import plan
    from .splitkv import flash_fwd_splitkv
except Exception as error:  # a broken or an old torch raises all sorts of things
    _torch_error = f"{type(error).__name__}: {error}"

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise ImportError(
                "flashattn_ext needs PyTorch 2.10 or newer, which does not import here "
                f"({_torch_error}): install torch, then try again."
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
else:
    if environ.get("FLASHATTN_EXT_NVTX") == "1":
        from . import _ops, profiling

        if not _ops.load_error:
            profiling.enable()

    def __getattr__(name: str) -> Any:
        # Adapters load when they are asked for.
        if name in ("activate_sdpa", "restore_sdpa"):
            from .integrations import sdpa

            return getattr(sdpa, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "activate_sdpa",
    "flash_combine",
    "flash_fwd",
    "flash_fwd_splitkv",
    "merge_attention_states",
    "plan",
    "restore_sdpa",
    "supports",
]
__version__ = BUILD.get("version", "0+unbuilt")
