"""What all pictures share: colours, a canvas, boxes with a label, and settings."""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

INK, GREY, PALE = "#222222", "#888888", "#eeeeee"
BLUE, ORANGE, GREEN, PURPLE, YELLOW = "#56a0d3", "#f0a04b", "#5fb88a", "#b48ac8", "#f3dc7a"

# Text stays text, which keeps the files small; ids come from their content, not from chance.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "flashattn_ext", "font.size": 9}


def canvas(width, height, columns=1):
    """A figure of `columns` axes without frames, sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.axis("off")
    return figure, axes


def box(ax, x, y, width, height, fill=PALE, label="", **text):
    """A rectangle with its corner at (x, y), and a label in its middle."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=INK, linewidth=0.6))
    if label:
        place = {"ha": "center", "va": "center", "fontsize": 8, "color": INK} | text
        ax.text(x + width / 2, y + height / 2, label, **place)


def legend(ax, entries, **place):
    """`entries`: pairs of a colour and what it stands for."""
    patches = [Rectangle((0, 0), 1, 1, facecolor=color, edgecolor=INK) for color, _ in entries]
    ax.legend(patches, [name for _, name in entries], frameon=False, fontsize=8, **place)
