"""The list of decode work: key blocks of all tiles, cut into equal shares."""

from style import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, YELLOW, box, canvas

from flashattn_ext import _host

LENGTHS = (1280, 1280, 320, 320, 704, 704)  # tokens in the cache
HEADS_KV, GROUP, HEAD_DIM, MULTIPROCESSORS = 1, 4, 128, 3
COLORS = (BLUE, GREEN, ORANGE, PURPLE, YELLOW, PALE)


def decode_work():
    """The shares as the library cuts them: a GPU of three multiprocessors of sm_90."""
    call = _host.PlannedCall(
        batch=len(LENGTHS), heads=GROUP * HEADS_KV, heads_kv=HEADS_KV, head_dim=HEAD_DIM,
        seqlen_q=1, seqlen_k=max(LENGTHS), cu_seqlens_q=[], cache_seqlens=list(LENGTHS),
        left=-1, right=0, new_tokens=0, rotary_dim=0, num_splits=0, split_size=0,
    )  # fmt: skip
    plan = _host.plan_splitkv(call, 90, HEAD_DIM, MULTIPROCESSORS)
    block = _host.tile_shape(90, plan.decode_role, HEAD_DIM).n
    return _host.decode_work(call, plan, block), block


def draw():
    work, block = decode_work()
    figure, (ax,) = canvas(10, 2.6)
    at = 0
    for sequence, tokens in enumerate(LENGTHS):
        count = -(-tokens // block)
        for entry in range(at, at + count):
            box(ax, entry, 0, 1, 1, COLORS[sequence])
        ax.text(at + count / 2, -0.25, f"seq {sequence}", ha="center", fontsize=7)
        at += count
    assert at == work.entries and work.team == 1
    for share in range(work.busy):
        begin, end = share * work.share, min((share + 1) * work.share, at)
        ax.plot([begin, begin], [-0.2, 2.2], color=INK, lw=2)
        box(ax, begin + 0.1, 1.25, end - begin - 0.2, 0.8, "white", f"thread block {share}")
    ax.plot([at, at], [-0.2, 2.2], color=INK, lw=2)
    ax.text(
        0, 2.7, f"{at} key blocks of {work.tiles} tiles in {work.busy} shares of {work.share}; "
        f"{work.cut} tiles are cut and merged afterwards", color=GREY, va="top",
    )  # fmt: skip
    ax.set_xlim(-0.5, at + 0.5)
    ax.set_ylim(3.3, -1.2)
    return figure
