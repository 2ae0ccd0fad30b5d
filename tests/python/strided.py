"""q, k and v in every memory layout that a caller may hand over; NaN wherever nothing counts."""

import torch

# name -> (layout of q, of k, of v). Buffers are made per layout by make_buffer.
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
    "q_one_head": ("one_head", "bshd", "bshd"),
}
SHARED = ("packed_qkv", "interleaved_kv")
EXPANDED = ("expanded_heads", "expanded_batch")
VARIANTS = (*MIXED, *SHARED, *EXPANDED)


def make_buffer(layout, b, s, h, d, dtype, device):
    def full(*shape):
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    if layout == "bhsd":
        return full(b, h, s, d).transpose(1, 2)
    if layout == "sbhd":
        return full(s, b, h, d).transpose(0, 1)
    if layout == "padded":
        return full(b, s + 2, h + 1, d + 8)[:, :s, :h, :d]
    if layout == "one_head":
        return full(b, s, 1, d).expand(b, s, h, d)
    return full(b, s, h, d)


def once(tensor):
    """Each element once, of a tensor whose heads may all be the same one: for writing."""
    return tensor[..., :1, :] if tensor.stride(-2) == 0 else tensor


def _buffers(variant, shape, heads, d, dtype, device):
    (b, sq, sk), (h, hk) = shape, heads
    if variant == "packed_qkv":
        assert sq == sk, "one buffer for q, k and v needs as many queries as keys"
        return make_buffer("bshd", b, sq, h + 2 * hk, d, dtype, device).split([h, hk, hk], dim=2)
    q_layout, k_layout, v_layout = MIXED.get(variant, MIXED["plain"])
    q = make_buffer(q_layout, b, sq, h, d, dtype, device)
    if variant == "interleaved_kv":
        return q, *make_buffer("bshd", b, sk, 2 * hk, d, dtype, device).chunk(2, dim=2)
    kv_batch = 1 if variant == "expanded_batch" else b
    kv_heads = 1 if variant == "expanded_heads" else hk
    k = make_buffer(k_layout, kv_batch, sk, kv_heads, d, dtype, device)
    v = make_buffer(v_layout, kv_batch, sk, kv_heads, d, dtype, device)
    return q, k, v


def query_buffer(variant, b, s, h, d, dtype, device):
    """A q of NaN, (b, s, h, d)."""
    return make_buffer(MIXED[variant][0], b, s, h, d, dtype, device)


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
READ_ONLY_POOLS = ("one_head",)


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
    for layout in POOLS.get(variant, (variant, variant)):
        if layout == "padded":
            buffers.append(full(pages + 2, page + 2, hk + 1, d + 8))
            views.append(buffers[-1][1:-1, :page, :hk, :d])
        elif layout == "heads_first":
            buffers.append(full(pages + 2, hk, page, d))
            views.append(buffers[-1][1:-1].transpose(1, 2))
        elif layout == "one_head":
            buffers.append(full(pages + 2, page, 1, d))
            views.append(buffers[-1][1:-1].expand(pages, page, hk, d))
        else:
            buffers.append(full(pages + 2, page, hk, d))
            views.append(buffers[-1][1:-1])
    return *views, tuple(buffers)


def make_qkv(variant, shape, heads, d, dtype, device, regions, draw, q_gain):
    """shape: (b, sq, sk) of the buffers. regions: (batch, first query, queries, first key, keys) of
    each sequence, the only places that get numbers. Returns q, k, v as (b, s, heads, d)."""
    q, k, v = _buffers(variant, shape, heads, d, dtype, device)
    for place, begin_q, sq, begin_k, sk in regions:
        of_q = once(q)
        of_q[place, begin_q : begin_q + sq] = (draw(sq, of_q.shape[2], d) * q_gain).to(dtype)
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
