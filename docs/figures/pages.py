"""A cache in pages: the table of two sequences, the pool, and where one token lies."""

from style import BLUE, GREY, INK, ORANGE, PALE, box, canvas

PAGE, PAGES = 4, 6
TABLE = ((5, 2, 0), (3, 1, -1))
LENGTHS = (10, 7)
COLORS = (BLUE, ORANGE)
TOKEN = 6  # of sequence 0


def page_place(page):
    return 9 + 5.2 * (page % 3), 3.4 * (page // 3)


def draw_pool(ax):
    owner = {p: (s, i) for s, row in enumerate(TABLE) for i, p in enumerate(row) if p >= 0}
    for page in range(PAGES):
        x, y = page_place(page)
        ax.text(x, y - 0.2, f"page {page}", fontsize=8, color=GREY)
        for slot in range(PAGE):
            sequence, index = owner.get(page, (None, 0))
            token = index * PAGE + slot
            used = sequence is not None and token < LENGTHS[sequence]
            box(ax, x + 1.15 * slot, y, 1.15, 1, COLORS[sequence] if used else PALE,
                str(token) if used else "")  # fmt: skip


def draw():
    figure, (ax,) = canvas(9.5, 3.2)
    for sequence, row in enumerate(TABLE):
        y = 3.4 * sequence
        ax.text(0, y - 0.2, f"block_table[{sequence}], {LENGTHS[sequence]} tokens", fontsize=8)
        for index, page in enumerate(row):
            box(ax, 1.6 * index, y, 1.6, 1, COLORS[sequence] if page >= 0 else PALE, str(page))
    draw_pool(ax)
    index, slot = divmod(TOKEN, PAGE)
    x, y = page_place(TABLE[0][index])
    ax.annotate(
        "", (x + 1.15 * slot + 0.55, y + 1.05), (1.6 * index + 0.8, 1.05),
        arrowprops={"arrowstyle": "->", "color": INK, "connectionstyle": "arc3,rad=0.12"},
    )  # fmt: skip
    ax.text(
        0, 5.9, f"token {TOKEN} of sequence 0: {TOKEN} = {index} · {PAGE} + {slot}, so entry "
        f"{index} of its row of the table, page {TABLE[0][index]}, slot {slot}",
        color=GREY, va="top",
    )  # fmt: skip
    ax.set_xlim(-0.3, 25)
    ax.set_ylim(6.6, -1)
    return figure
