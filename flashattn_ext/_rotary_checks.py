"""The checks of rotary embedding's tables: what they are, and that they reach far enough."""

from torch import Tensor

from ._score_checks import MAX_ROWS, check_flag
from ._tensor_checks import check_tensor, require_tensor


def check_rotary(
    q: Tensor, k_new: Tensor | None, rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    rotary_interleaved: bool,
) -> int:  # fmt: skip
    """Returns the number of positions in the tables."""
    if rotary_cos is None and rotary_sin is None:
        raise ValueError(
            "rotary_interleaved: only with rotary_cos and rotary_sin, got "
            f"{rotary_interleaved!r} without them"
        )
    if k_new is None:
        name = "rotary_cos" if rotary_cos is not None else "rotary_sin"
        raise ValueError(f"{name}: only with new tokens (k_new, v_new), got none")
    check_flag("rotary_interleaved", rotary_interleaved)
    cos = require_tensor("rotary_cos", rotary_cos)
    sin = require_tensor("rotary_sin", rotary_sin)
    shape, head_dim = cos.shape, q.shape[-1]
    rotary_dim = 2 * shape[-1] if len(shape) == 2 else 0
    if not 0 < rotary_dim <= head_dim or rotary_dim % 16 or not 0 < shape[0] <= MAX_ROWS:
        raise ValueError(
            "rotary_cos: expected shape (positions, rotary_dim / 2), 1 to 2**30 positions and a "
            f"rotary_dim that is a multiple of 16 and at most {head_dim}, got {tuple(shape)}"
        )
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.dtype is not q.dtype or table.shape != shape or table.device != q.device:
            check_tensor(name, table, q, (q.dtype,), (tuple(shape),))
        if not table.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor, got strides {tuple(table.stride())}"
            )
    return shape[0]


def rotated_queries(queries: int, left: int, right: int) -> int:
    """How many positions the queries of a sequence take: they share one unless the order counts."""
    return queries if left >= 0 or right >= 0 else min(queries, 1)


def check_positions(name: str, cached: int, new_tokens: int, queries: int, positions: int) -> None:
    """That new tokens and queries, which both start at position ``cached``, are in the tables."""
    if cached + max(new_tokens, queries) > positions:
        what = f"{new_tokens} new tokens" if new_tokens >= queries else f"{queries} queries"
        raise ValueError(
            f"{name}: {cached} + {what} are more than the {positions} positions of rotary_cos"
        )
