"""q, k and v in every memory layout that a caller may hand over; NaN wherever nothing counts."""

import torch

# name -> (layout of q, of k, of v). Buffers are made per layout by _buffer.
MIXED = {
    "plain": ("bshd", "bshd", "bshd"),
    "bhsd": ("bhsd", "bhsd", "bhsd"),
    "padded": ("padded", "padded", "padded"),
    "q_transposed": ("bhsd", "bshd", "bshd"),
    "k_transposed": ("bshd", "bhsd", "bshd"),
    "v_transposed": ("bshd", "bshd", "bhsd"),
    "k_padded": ("bshd", "padded", "bshd"),
    "v_padded": ("padded", "bhsd", "padded"),
    "s_first": ("sbhd", "sbhd", "bshd"),
}
SHARED = ("packed_qkv", "interleaved_kv")
EXPANDED = ("expanded_heads", "expanded_batch")
VARIANTS = (*MIXED, *SHARED, *EXPANDED)


def _buffer(layout, b, s, h, d, dtype, device):
    def full(*shape):
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    if layout == "bhsd":
        return full(b, h, s, d).transpose(1, 2)
    if layout == "sbhd":
        return full(s, b, h, d).transpose(0, 1)
    if layout == "padded":
        return full(b, s + 2, h + 1, d + 8)[:, :s, :h, :d]
    return full(b, s, h, d)


def _buffers(variant, shape, heads, d, dtype, device):
    (b, sq, sk), (h, hk) = shape, heads
    if variant == "packed_qkv":
        assert sq == sk, "one buffer for q, k and v needs as many queries as keys"
        return _buffer("bshd", b, sq, h + 2 * hk, d, dtype, device).split([h, hk, hk], dim=2)
    q_layout, k_layout, v_layout = MIXED.get(variant, MIXED["plain"])
    q = _buffer(q_layout, b, sq, h, d, dtype, device)
    if variant == "interleaved_kv":
        return q, *_buffer("bshd", b, sk, 2 * hk, d, dtype, device).chunk(2, dim=2)
    kv_batch = 1 if variant == "expanded_batch" else b
    kv_heads = 1 if variant == "expanded_heads" else hk
    k = _buffer(k_layout, kv_batch, sk, kv_heads, d, dtype, device)
    v = _buffer(v_layout, kv_batch, sk, kv_heads, d, dtype, device)
    return q, k, v


def query_buffer(variant, b, s, h, d, dtype, device):
    """A q of NaN, (b, s, h, d)."""
    return _buffer(MIXED[variant][0], b, s, h, d, dtype, device)


# name -> (layout of k, of v); "interleaved": both in one buffer.
POOLS = {
    "plain": ("plain", "plain"),
    "interleaved": ("interleaved", "interleaved"),
    "padded": ("padded", "padded"),
    "heads_first": ("heads_first", "heads_first"),
    "k_padded": ("padded", "plain"),
    "v_heads_first": ("plain", "heads_first"),
    "k_heads_first": ("heads_first", "padded"),
}


def make_pool(variant, pages, page, hk, d, dtype, device):
    """Caches of NaN, (pages, page, hk, d), with a page before and one after that nothing may touch.
    Returns k, v and the buffers that they lie in."""

    def full(*shape):
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    if variant == "interleaved":
        buffer = full(pages + 2, 2, page, hk, d)
        return buffer[1:-1, 0], buffer[1:-1, 1], (buffer, buffer)
    buffers = []
    views = []
    for layout in POOLS[variant]:
        if layout == "padded":
            buffers.append(full(pages + 2, page + 2, hk + 1, d + 8))
            views.append(buffers[-1][1:-1, :page, :hk, :d])
        elif layout == "heads_first":
            buffers.append(full(pages + 2, hk, page, d))
            views.append(buffers[-1][1:-1].transpose(1, 2))
        else:
            buffers.append(full(pages + 2, page, hk, d))
            views.append(buffers[-1][1:-1])
    return *views, tuple(buffers)


def make_qkv(variant, shape, heads, d, dtype, device, regions, draw, q_gain):
    """shape: (b, sq, sk) of the buffers. regions: (batch, first query, queries, first key, keys) of
    each sequence, the only places that get numbers. Returns q, k, v as (b, s, heads, d)."""
    q, k, v = _buffers(variant, shape, heads, d, dtype, device)
    for place, begin_q, sq, begin_k, sk in regions:
        q[place, begin_q : begin_q + sq] = (draw(sq, heads[0], d) * q_gain).to(dtype)
        if place >= k.shape[0]:
            continue  # expanded batch: all sequences share the keys of the first
        for t in (k, v):
            t[place, begin_k : begin_k + sk] = draw(sk, t.shape[2], d).to(dtype)
    if variant in EXPANDED:
        k, v = (t.expand(shape[0], -1, heads[1], -1) for t in (k, v))
    return q, k, v


def as_bits(tensor):
    """Integers of the same size, so that NaN equals NaN."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
