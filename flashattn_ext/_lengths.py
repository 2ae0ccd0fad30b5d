"""The checked mode: reads lengths on the host and refuses bad values by row and value.

Waits for the device. Without it the kernels clamp such values, which is safe but silent.
"""


def check(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k):
    """Raises ValueError for lengths that break the contract of `flash_fwd`."""
    lengths_k = None
    if cu_seqlens_q is not None:
        _check_starts("cu_seqlens_q", cu_seqlens_q, "q", q.shape[0], "max_seqlen_q", max_seqlen_q)
        lengths_k = _check_starts(
            "cu_seqlens_k", cu_seqlens_k, "k", k.shape[0], "max_seqlen_k", max_seqlen_k
        )
    if seqused_k is None:
        return
    for row, used in enumerate(seqused_k.tolist()):
        length = k.shape[1] if lengths_k is None else lengths_k[row]
        if not 0 <= used <= length:
            raise ValueError(f"seqused_k[{row}]: expected 0 to {length} (its keys), got {used}")


def _check_starts(name, cu_seqlens, tensor_name, rows, bound_name, bound):
    starts = cu_seqlens.tolist()
    if starts[0] != 0:
        raise ValueError(f"{name}[0]: expected 0, got {starts[0]}")
    lengths = []
    for row in range(1, len(starts)):
        length = starts[row] - starts[row - 1]
        if length < 0:
            raise ValueError(
                f"{name}[{row}]: expected at least {name}[{row - 1}] = {starts[row - 1]}, "
                f"got {starts[row]}"
            )
        if starts[row] > rows:
            raise ValueError(
                f"{name}[{row}]: expected at most {rows}, the rows of {tensor_name}, "
                f"got {starts[row]}"
            )
        if length > bound:
            raise ValueError(
                f"{name}: sequence {row - 1} has {length} rows, more than {bound_name} = {bound}"
            )
        lengths.append(length)
    return lengths
