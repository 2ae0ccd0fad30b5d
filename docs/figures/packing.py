"""The rows of a decode tile: four tokens of four query heads that share a key/value head."""

from style import BLUE, GREEN, GREY, ORANGE, PALE, PURPLE, box, canvas

PACK, TOKENS = 4, 4
COLORS = (BLUE, ORANGE, GREEN, PURPLE)


def draw():
    figure, (ax,) = canvas(8.5, 4)
    for token in range(TOKENS):
        ax.text(-0.3, 2.5 + 2 * token + 0.5, f"token {token}", ha="right", va="center")
        for head in range(PACK):
            box(ax, 1.7 * head, 2.5 + 2 * token, 1.5, 1, COLORS[head], f"q[{token}, {head}]")
    for head in range(PACK):
        ax.text(1.7 * head + 0.75, 1.9, f"head {head}", ha="center")
    ax.text(3.3, 0.6, "q of the call: (tokens, heads, head dim)", ha="center", color=GREY)

    for row in range(PACK * TOKENS):
        token, head = divmod(row, PACK)
        box(ax, 11, row, 4, 1, COLORS[head], f"row {row}: token {token}, head {head}")
    ax.text(13, -0.5, "the tile, 16 rows", ha="center", color=GREY)
    ax.annotate("", (10.7, 8), (7.2, 6), arrowprops={"arrowstyle": "->"})

    box(ax, 17.5, 4, 3.2, 8, PALE, "K, V\nof key/value\nhead 0,\nread once")
    ax.annotate("", (15.2, 8), (17.3, 8), arrowprops={"arrowstyle": "->"})
    ax.set_xlim(-2, 21)
    ax.set_ylim(16.3, -1.4)
    return figure
