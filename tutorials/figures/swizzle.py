"""Lesson 08: where the pieces of a tile lie in shared memory, and what the conflicts cost.

`address` is a function (row, piece) -> number of the place of 16 bytes: what is drawn is what it says.
"""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import COLOURS, blank, box, canvas

Address = Callable[[int, int], int]
PALE = [plt.get_cmap("Set2")(c) for c in range(8)]


def _memory(axes: Axes, address: Address, title: str, wanted: int, rows: int, per_row: int,
            most: int) -> None:
    """Shared memory in rows of 32 banks, with the pieces of `rows` rows. The wanted piece of each is red,
    a place that two of them have black."""
    blank(axes, 8.6, most + 1.5, title)
    for place in range(8):
        axes.text(0.5 + place + 0.5, 0.75, f"{4 * place}-\n{4 * place + 3}", fontsize=7, ha="center",
                  va="center")
    found: dict[int, list[tuple[int, int]]] = {}
    for row in range(rows):
        for piece in range(per_row):
            found.setdefault(address(row, piece), []).append((row, piece))
    for place, here in found.items():
        y, x = divmod(place, 8)
        dark = len(here) == 1 and here[0][1] == wanted
        colour = "#222222" if len(here) > 1 else COLOURS["O"] if dark else PALE[here[0][1]]
        light = dark or len(here) > 1
        box(axes, 0.5 + x, 1.4 + y, 1, 1, "", colour, alpha=1.0 if light else 0.45, edge="white")
        axes.text(1 + x, 1.9 + y, "\n".join(f"{row}:{piece}" for row, piece in here),
                  fontsize=8 if len(here) == 1 else 7, ha="center", va="center", linespacing=0.9,
                  color="white" if light else "black", fontweight="bold" if light else "normal")


def pieces(layouts: dict[str, Address], wanted: int = 0, rows: int = 8, per_row: int = 8) -> Figure:
    """Each layout of so many rows of so many pieces, where the piece `wanted` of all rows is what is read."""
    most = max(address(row, piece) // 8 + 1 for address in layouts.values() for row in range(rows)
               for piece in range(per_row))
    figure, panels = canvas(3.6 * len(layouts), 0.8 + 0.4 * most, len(layouts))
    for axes, (title, address) in zip(panels, layouts.items(), strict=True):
        _memory(axes, address, title, wanted, rows, per_row, most)
    return figure


def cost(rows: list[dict]) -> Figure:
    """A panel for each column of the table but the first, a bar for each row."""
    stages = [row["stage"] for row in rows]
    columns = [name for name in rows[0] if name != "stage"]
    figure, panels = canvas(10, 2.3, len(columns))
    for axes, column in zip(panels, columns, strict=True):
        values = [row[column] for row in rows]
        bars = axes.barh(stages, values, color=[COLOURS["O"], COLOURS["V"]], height=0.6)
        axes.bar_label(bars, [f" {value:.3g}" for value in values], fontsize=9)
        axes.set_title(column, fontsize=9)
        axes.set_xlim(0, 1.3 * max(values))
        axes.set_xticks([])
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(length=0, labelsize=9)
    return figure
