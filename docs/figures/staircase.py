"""The blocks of keys that each query tile needs, and which need no mask, as the kernels decide."""

from style import BLUE, GREY, INK, ORANGE, PALE, box, canvas, legend

from flashattn_ext import _host

TILE = _host.tile_shape(90, _host.Role.prefill, 128)  # 128 rows x 64 keys


def draw_call(ax, len_q, len_k, left, right, title):
    """One call: rows go down, keys to the right."""
    for first in range(0, len_q, TILE.m):
        last = min(first + TILE.m, len_q) - 1
        blocks = _host.visible_blocks(len_q, len_k, left, right, first, last, TILE.n)
        for block in range(len_k // TILE.n):
            color = PALE
            if blocks.begin <= block < blocks.end:
                clean = blocks.clean_begin <= block < blocks.clean_end
                color = BLUE if clean else ORANGE
            box(ax, block * TILE.n, first, TILE.n, TILE.m, color)
    draw_band(ax, len_q, len_k, left, right)
    ax.set_xlim(-130, 778)
    ax.set_ylim(len_q + 70 if len_q > 300 else 580, -60)
    ax.set_aspect("equal")
    ax.set_title(title, fontsize=9)
    ax.text(len_k / 2, -20, "keys →", ha="center", fontsize=8)
    ax.text(-20, len_q / 2, "query tiles ↓", ha="right", va="center", fontsize=8, rotation=90)


def draw_band(ax, len_q, len_k, left, right):
    """The borders of what the rows see: the last row sits on the last key."""
    diagonal = len_k - len_q
    for reach, side in ((right, 1), (-left, 0)):
        if (left if side == 0 else right) >= 0:
            start = diagonal + reach + side
            ax.plot([max(start, 0), start + len_q], [max(-start, 0), len_q], color=INK, lw=1.5)


def draw():
    figure, axes = canvas(10, 3.9, columns=3)
    draw_call(axes[0], 768, 768, -1, 0, "causal, 768 queries, 768 keys")
    draw_call(axes[1], 256, 768, -1, 0, "causal, the last 256 of 768 tokens")
    draw_call(axes[2], 768, 768, 300, 0, "window (300, 0)")
    legend(
        axes[1],
        [(BLUE, "clean: every row sees every key"), (ORANGE, "masked"), (PALE, "not loaded")],
        loc="lower center",
    )
    axes[1].text(384, 300, "bottom right: last query on last key", ha="center", color=GREY)
    return figure
