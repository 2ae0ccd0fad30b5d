"""Which devices this build serves."""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._build import BUILD, LIBRARY

_REINSTALL = (
    "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps . "
    "(in the source tree)"
)


def _why_no_cuda() -> str:
    if not LIBRARY.exists():
        return ""  # the call itself says so
    if not BUILD.get("cuda_archs"):
        reason = BUILD.get("cuda_off_reason") or "reason not recorded"
        return (
            f"flashattn_ext was built without CUDA kernels ({reason}). Set CUDA_HOME to a CUDA "
            f"toolkit and reinstall with FLASHATTN_EXT_CUDA=on: {_REINSTALL}"
        )
    if torch.version.cuda is None:
        return f"flashattn_ext has kernels for CUDA only and torch {torch.__version__} has no CUDA"
    return ""


_NO_CUDA = _why_no_cuda()
_MAX_HEAD_DIM = max(BUILD.get("head_dims") or (256,))

# Index of a GPU asked about before -> why this build cannot serve it, or "".
_verdicts: dict[int, str] = {}


def check(q: Tensor, head_dim: int) -> None:
    """Raises NotImplementedError where this build has nothing for q's device and head dim."""
    if not q.is_cuda:
        if q.is_meta:
            return
        raise NotImplementedError(f"q: expected a tensor on cpu or cuda, got one on {q.device}")
    reason = _NO_CUDA
    # Fake tensors have no GPU to ask.
    if not reason and type(q) is Tensor and not is_dynamo_compiling():
        index = q.get_device()
        known = _verdicts.get(index)
        if known is None:
            known = _verdicts[index] = _why_not_this_gpu(index)
        reason = known
    if not reason and head_dim > _MAX_HEAD_DIM:
        reason = (
            f"this build has CUDA kernels for head dims up to {_MAX_HEAD_DIM}, got {head_dim}. "
            f"Reinstall without FLASHATTN_EXT_HEAD_DIMS: {_REINSTALL}"
        )
    if reason:
        raise NotImplementedError(f"q: on {q.device}, but {reason}")


def _why_not_this_gpu(index: int) -> str:
    if not LIBRARY.exists():
        return ""
    major, minor = torch.cuda.get_device_capability(index)
    arch = 10 * major + minor
    archs, ptx = BUILD["cuda_archs"], BUILD.get("ptx_arch") or 0
    if any(built // 10 == major and built <= arch for built in archs) or 0 < ptx <= arch:
        return ""
    built = ", ".join(f"sm_{built}" for built in archs)
    this = f"{torch.cuda.get_device_name(index)} is sm_{arch} and this build covers {built}"
    if major < 8:
        return f"{this}: GPUs older than sm_80 are not supported"
    return f'{this}. Reinstall with TORCH_CUDA_ARCH_LIST="{major}.{minor}": {_REINSTALL}'
