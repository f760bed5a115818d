"""What the lessons draw: a module for each lesson, and here the style that they share."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# One colour for each thing, in all lessons
COLOURS = {"Q": "#4c78a8", "K": "#f58518", "V": "#54a24b", "S": "#b279a2", "P": "#b279a2", "O": "#e45756",
           "HBM": "#9d755d", "shared": "#eeca3b", "registers": "#72b7b2", "grey": "#bab0ac"}
DPI = 80


def canvas(width: float = 9, height: float = 3.5, columns: int = 1, **options) -> tuple[Figure, list[Axes]]:
    """A figure of so many inches and its panels, side by side."""
    figure, axes = plt.subplots(1, columns, figsize=(width, height), dpi=DPI, layout="constrained",
                                squeeze=False, **options)
    return figure, list(axes[0])


def blank(axes: Axes, width: float, height: float, title: str = "") -> Axes:
    """A drawing board from (0, 0), top left, to (width, height), with squares that are square."""
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    axes.set_title(title, fontsize=10)
    return axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str = "", colour: str = "#ffffff",
        size: float = 9, alpha: float = 1.0, edge: str = "#444444") -> None:
    """A rectangle with a text in its middle."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, alpha=alpha,
                             linewidth=0.8))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "",
          colour: str = "#444444") -> None:
    """From start to end, with a text beside its middle."""
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.4})
    if text:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        axes.text(*middle, f" {text} ", fontsize=8, color=colour, ha="left", va="bottom")
