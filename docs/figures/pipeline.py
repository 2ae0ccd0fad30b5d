"""The two orders of the main loop in time: one stage in turn, three stages running ahead."""

from style import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, box, canvas

TILES = (3, 4)  # key blocks of two tiles, in the order in which they are loaded
BLOCKS = [(tile, block) for tile, count in enumerate(TILES) for block in reversed(range(count))]
STAGES = 3


def draw_in_turn(ax, blocks=3):
    """A step is one product; its load was started with the step before."""
    for lane, name in enumerate(("copies", "products")):
        ax.text(-0.1, 1.5 * lane + 0.5, name, ha="right", va="center")
    box(ax, 0, 0, 1, 1, GREEN, f"K {blocks - 1}, Q")
    for step in range(blocks):
        block, at = blocks - 1 - step, 1 + 2 * step
        box(ax, at, 0, 1, 1, BLUE, f"V {block}")
        box(ax, at, 1.5, 1, 1, ORANGE, "Q·Kᵀ, edit")
        if block > 0:
            box(ax, at + 1, 0, 1, 1, GREEN, f"K {block - 1}")
        box(ax, at + 1, 1.5, 1, 1, PURPLE, "softmax, P·V")
    box(ax, 1 + 2 * blocks, 1.5, 1, 1, PALE, "finish")
    for at in range(1, 1 + 2 * blocks):
        ax.plot([at, at], [-0.15, 2.65], color=INK, lw=2, zorder=0)
    ax.text(
        0,
        -0.5,
        "one stage (prefill, chunk): run_in_turn; thick lines: wait and barrier",
        color=GREY,
    )


def draw_ahead(ax, top):
    """Step i fills a stage with block i and computes block i - 2."""
    ax.text(
        0,
        top - 0.5,
        "three stages (decode): run_ahead; thick lines: the wait and barrier before a block",
        color=GREY,
    )
    for stage in range(STAGES):
        ax.text(-0.1, top + 1.2 * stage + 0.5, f"stage {stage}", ha="right", va="center")
    for i, (tile, block) in enumerate(BLOCKS):
        lane, name = top + 1.2 * (i % STAGES), f"{'AB'[tile]}{block}"
        box(ax, i, lane, STAGES - 1, 1, GREEN, f"K, V of {name} on their way")
        box(ax, i + STAGES - 1, lane, 1, 1, ORANGE, f"compute {name}")
    for i in range(STAGES - 1, len(BLOCKS) + STAGES - 1):
        ax.plot([i, i], [top - 0.15, top + 3.55], color=INK, lw=2, zorder=0)
    border = STAGES - 1 + TILES[0]
    ax.annotate(
        f"tile A is finished here;\nB{TILES[1] - 1} and B{TILES[1] - 2} are already on their way",
        (border, top + 3.5),
        (border, top + 4.1),
        ha="center",
        va="top",
        arrowprops={"arrowstyle": "->"},
    )


def draw():
    figure, (ax,) = canvas(10, 4.6)
    draw_in_turn(ax)
    draw_ahead(ax, 4.2)
    ax.set_xlim(-1, len(BLOCKS) + STAGES - 0.9)
    ax.set_ylim(9.6, -1)
    return figure
