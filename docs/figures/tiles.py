"""A thread block at a block of keys: which matrices there are, how large, and where they lie."""

from style import BLUE, GREEN, ORANGE, PALE, YELLOW, box, canvas, legend

from flashattn_ext import _host

HEAD_DIM = 128
TILE = _host.tile_shape(90, _host.Role.prefill, HEAD_DIM)
THREADS = 32 * TILE.warps


def draw():
    figure, (ax,) = canvas(9, 4.2)
    m, n, d = TILE.m, TILE.n, HEAD_DIM
    kib = {"q": 2 * m * d // 1024, "kv": 2 * n * d // 1024}
    scores, accumulator = m * n // THREADS, m * d // THREADS

    box(ax, 0, 0, d, m, BLUE, f"Q tile\n{m} × {d}\n{kib['q']} KiB")
    box(ax, 190, m + 30, n, d, BLUE, f"Kᵀ\n{d} × {n}\n{kib['kv']} KiB")
    box(ax, 190 + n + 4, m + 30, n, d, PALE, "next\nblock", color="#888888")
    box(ax, 190, 0, n, m, ORANGE, f"S, then P\n{m} × {n}\n{scores} a thread")
    box(ax, 440, m + 30 + d - n, d, n, BLUE, f"V  {n} × {d}\n{kib['kv']} KiB")
    box(ax, 440, m + 30, d, n - 8, PALE, "next block", color="#888888")
    box(ax, 440, 0, d, m, ORANGE, f"accumulator\n{m} × {d}\n{accumulator} a thread")
    box(ax, 578, 0, 62, m, ORANGE, "maximum\nand sum\nof a row")

    arrow = {"arrowstyle": "->", "color": "#222222"}
    ax.annotate("", (186, m / 2), (d + 4, m / 2), arrowprops=arrow)
    ax.text(159, m / 2 + 6, "Q·Kᵀ", ha="center", fontsize=8)
    ax.annotate("", (436, m / 2), (190 + n + 4, m / 2), arrowprops=arrow)
    ax.text(347, m / 2 + 6, "softmax step, then P·V", ha="center", fontsize=8)
    box(ax, 690, 0, 75, m, YELLOW, "out\nlse", fontsize=8)
    ax.annotate("", (688, m / 2), (644, m / 2), arrowprops=arrow)
    ax.text(666, m / 2 + 6, "once", ha="center", fontsize=8)
    box(ax, 0, m + 30 + d - 34, 120, 34, GREEN, "Q, K, V of the call")
    ax.annotate("", (184, m + 30 + d - 17), (124, m + 30 + d - 17), arrowprops=arrow)
    ax.text(0, m + 30 + d - 46, "cp.async, block after block,\nthe newest keys first", va="top")

    legend(
        ax,
        [
            (GREEN, "global memory, read"),
            (BLUE, "shared memory"),
            (ORANGE, "registers, fp32"),
            (YELLOW, "global memory, written"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
        ncols=4,
    )
    ax.set_xlim(-5, 775)
    ax.set_ylim(-8, m + d + 40)
    ax.set_aspect("equal")
    return figure
