"""The space of attention calls: every option of every entry point, and which go together."""

import random

from caches import PAGE_SIZES, CacheCase
from cases import HEAD_DIMS, SHORT_NAMES, TILE_EDGES, Case
from spaces import Rule, Space
from strided import EXPANDED, POOLS, READ_ONLY_POOLS, SHARED, VARIANTS

FORWARD = ("flash_fwd", "flash_attn_func")  # packed: flash_attn_varlen_func
CACHED = ("flash_fwd_splitkv", "flash_attn_with_kvcache")
FLASH_ATTN = ("flash_attn_func", "flash_attn_with_kvcache")
ODD_HEAD_DIMS = (1, 3, 36, 59, 100, 111, 250)
DTYPES = {name: dtype for dtype, name in SHORT_NAMES.items()}

ENTRY = {"entry": (*FORWARD, *CACHED), "layout": ("dense", "packed")}
SIZES = {
    "batch": (1, 0, 2, 3, 6),
    "sq": ("few", "0", "1", "edge", "ragged"),  # edge: around the edge of a tile
    "sk": ("edge", "0", "1", "ragged", "huge"),
    "heads": ((1, 1), (2, 2), (4, 2), (3, 1), (6, 3), (8, 1), (7, 1), (12, 2)),
    "d": (*HEAD_DIMS, *ODD_HEAD_DIMS),
    "dtype": tuple(DTYPES),
}
SCORES = {
    "causal": (False, True),
    "window": ((-1, -1), (40, -1), (-1, 9), (16, 5), (0, 0), (2**31, 3), (3, 2**40)),
    "softcap": (0.0, 1.0, 30.0),
    "alibi": ("", "h", "bh"),
    "sinks": ("", "fp32", "same"),
    "scale": (None, 0.03, 0.0, -0.1),
}
PLACES = {
    "used": (False, True),
    "strides": VARIANTS,
    "metadata": ("plain", "shifted"),
    "slack": (0, 100),
    "tail": (3, 0),
}
CACHE = {
    "splits": (0, 1, 2, 3, 7, 64, 256, "64 tokens", "192 tokens"),
    "page": (0, *PAGE_SIZES, 3),
    "table": ("shuffled", "shared", "random"),
    "unused": (-1, 0, 2**31 - 1),
    "pool": (*POOLS, *READ_ONLY_POOLS),
    "leftpad": (False, True),
    "batch_idx": (False, True),
    "one_length": (False, True),
    "new": (0, 1, 5, 70),
    "room": (70, 0, 1000, -3),  # -3: not all of the new tokens fit
    "rotary": (0.0, 0.5, 1.0),
    "interleaved": (True, False),
    "new_strides": ("plain", "padded", "bhsd"),
}
OF_NEW = ("rotary", "interleaved", "new_strides")
WAYS = {
    "out": ("new", "given", "strided"),
    "lse": (True, False),
    "poison": ("nan", "inf", "-inf", "30000"),
    "stream": ("current", "side"),  # on the CPU, side is another thread
    "checked": (False, True),
}


def _needs(axis, other, useless):
    """A value of `axis` beside the first one, where `other` has a value that makes it useless."""
    first = AXES[axis][0]
    return Rule((axis, other), lambda value, there: value != first and useless(there))


def _without(axis, entries):
    return _needs(axis, "entry", lambda entry: entry in entries)


def _both(a, b):
    """Two options, each beside its first value."""
    return _needs(a, b, lambda value: value != AXES[b][0])


def _absent(axis, other):
    """An option that says how another one is meant, which is not used."""
    return _needs(axis, other, lambda value: value == AXES[other][0])


def _uneven(sq, sk):
    return sq != sk or sq not in ("0", "1", "edge", "ragged")


AXES = {**ENTRY, **SIZES, **SCORES, **PLACES, **CACHE, **WAYS}
RULES = (
    *(_without(axis, FORWARD) for axis in CACHE),
    _without("used", CACHED),
    *(_without(axis, FLASH_ATTN) for axis in ("sinks", "used", "out")),
    Rule(("entry", "splits"), lambda e, n: e in FLASH_ATTN and isinstance(n, str)),
    Rule(("entry", "strides"), lambda e, s: e in CACHED and s in SHARED + EXPANDED),
    Rule(("entry", "d"), lambda entry, d: entry in CACHED and d % 8),
    # Lengths of their own need packed queries, or a cache.
    Rule(("layout", "sq"), lambda layout, sq: layout == "dense" and sq == "ragged"),
    Rule(
        ("layout", "entry", "sk"),
        lambda layout, entry, sk: layout == "dense" and entry in FORWARD and sk == "ragged",
    ),
    *(_needs(axis, "layout", lambda layout: layout == "dense") for axis in ("slack", "tail")),
    # One buffer for q, k and v.
    Rule(("strides", "sq"), lambda s, sq: s == "packed_qkv" and sq == "few"),
    Rule(("strides", "sk"), lambda s, sk: s == "packed_qkv" and sk == "huge"),
    Rule(("strides", "sq", "sk"), lambda s, sq, sk: s == "packed_qkv" and _uneven(sq, sk)),
    Rule(("strides", "used"), lambda s, used: s == "expanded_batch" and used),
    Rule(("strides", "batch"), lambda s, b: s in ("packed_qkv", "expanded_batch") and b == 0),
    # A cache: contiguous or in pages.
    *(_both(axis, "batch_idx") for axis in ("page", "table", "unused")),
    *(_absent(axis, "page") for axis in ("table", "unused")),
    Rule(("table", "unused"), lambda table, unused: table == "random" and unused != -1),
    Rule(("one_length", "sk"), lambda one, sk: one and sk == "ragged"),
    Rule(("one_length", "batch"), lambda one, batch: one and batch == 0),
    # New tokens: in memory of their own, and room that the host cannot know of.
    *(_absent(axis, "new") for axis in OF_NEW),
    *(_needs(axis, "table", lambda table: table == "random") for axis in ("new", *OF_NEW)),
    *(_needs(axis, "pool", lambda pool: pool in READ_ONLY_POOLS) for axis in ("new", *OF_NEW)),
    Rule(("room", "new"), lambda room, new: room < 0 and new < 5),
    Rule(("room", "table"), lambda room, table: room < 0 and table == "random"),
    Rule(("room", "pool"), lambda room, pool: room < 0 and pool in READ_ONLY_POOLS),
    Rule(("room", "checked"), lambda room, checked: room < 0 and checked),
    Rule(("room", "one_length"), lambda room, one: room < 0 and one),
    _absent("interleaved", "rotary"),
    Rule(("rotary", "d"), lambda part, d: part and part * d < 16),
    Rule(("interleaved", "d"), lambda interleaved, d: not interleaved and d < 16),
)
SPACE = Space(AXES, RULES, always_drawn=tuple({**ENTRY, **SIZES}))


def gpu_space(largest_head_dim):
    """The same for a GPU."""
    axes = {**AXES, "dtype": ("bf16", "fp16")}
    axes["d"] = tuple(d for d in AXES["d"] if d <= largest_head_dim)
    return Space(axes, RULES, SPACE.always_drawn)


# A call has about so many scores at most; what is more takes the oracle too long.
MOST_SCORES = 150_000


def case_of(point, n):
    """The point as a case: lengths and other numbers are drawn by `n`."""
    source = random.Random(n)
    lengths = point.get("lengths") or _lengths(point, source)
    fields = {
        "lengths": lengths,
        "packed": point["layout"] == "packed",
        "dtype": DTYPES[point["dtype"]],
        "seed": n,
    }
    same = ("heads", "d", "causal", "window", "softcap", "alibi", "sinks", "scale")
    fields |= {name: point[name] for name in (*same, "strides", "slack", "tail")}
    if point["entry"] in FORWARD:
        if point["used"]:
            fields["used"] = tuple(source.randint(0, sk) for _, sk in lengths)
        return Case(**fields)
    same = ("page", "pool", "table", "room", "batch_idx", "one_length", "new", "rotary", "unused")
    fields |= {name: point[name] for name in (*same, "interleaved")}
    if point["leftpad"]:
        fields["leftpad"] = tuple(source.randint(0, cached) for _, cached in lengths)
    if isinstance(point["splits"], str):
        fields["split_size"] = int(point["splits"].split()[0])
    else:
        fields["splits"] = point["splits"]
    return CacheCase(**fields)


def _lengths(point, source):
    batch, own_q = point["batch"], point["layout"] == "packed"
    own_k = (own_q or point["entry"] in CACHED) and not point["one_length"]
    keys = _of_each(batch, own_k, lambda: _one_length(point["sk"], source))
    if point["sk"] == "huge" and own_k:
        keys[1:] = [source.randint(0, 70) for _ in keys[1:]]
        source.shuffle(keys)
    if point["strides"] == "packed_qkv":
        return tuple((sk, sk) for sk in keys)
    most = MOST_SCORES / (point["heads"][0] * max(1, sum(keys)))
    queries = _of_each(batch, own_q, lambda: _one_length(point["sq"], source, most))
    return tuple(zip(queries, keys, strict=True))


def _of_each(batch, own, draw):
    return [draw() for _ in range(batch)] if own else [draw()] * batch


def _one_length(kind, source, most=300):
    if kind == "edge":
        fitting = [n for n in TILE_EDGES if 31 <= n <= most]
        return source.choice(fitting or [31])
    ranges = {"0": (0, 0), "1": (1, 1), "few": (2, 17), "huge": (1050, 2100)}
    return source.randint(*ranges.get(kind, (0, max(31, int(min(most, 300))))))


def shorter(point, n):
    """Points with fewer or shorter sequences, as their own axis `lengths`."""
    lengths = case_of(point, n).lengths
    both = point["strides"] == "packed_qkv"  # which has as many queries as keys
    for less in (lambda length: length // 2, lambda length: max(0, length - 1)):
        yield from (
            {**point, "lengths": candidate}
            for candidate in (
                lengths[: len(lengths) // 2],
                lengths[1:],
                tuple((less(sq), less(sk) if both else sk) for sq, sk in lengths),
                tuple((less(sq) if both else sq, less(sk)) for sq, sk in lengths),
            )
            if candidate != lengths
        )
