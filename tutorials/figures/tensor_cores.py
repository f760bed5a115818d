"""Lesson 07: which lane holds which element of mma.sync's matrices, what ldmatrix reads, the types' bits.

`place` is a function (lane, register, half) -> (row, column) of the lesson: what is drawn is what it says.
"""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import COLOURS, arrow, blank, box, canvas

Place = Callable[[int, int, int], tuple[int, int]]
BLOCK, GAP = 8, 0.9        # cells of a block of 8 x 8, and the room between two


def lane_colour(lane: int) -> tuple[float, float, float]:
    """A hue for the lane's group, a shade for its place in the quad."""
    red, green, blue, _ = plt.get_cmap("hsv")(lane // 4 / 8.0)
    white = 0.35 + 0.14 * (lane % 4)
    return tuple(white + (1 - white) * x for x in (red, green, blue))


def _at(cell: int) -> float:
    return cell + cell // BLOCK * GAP


def _cell(axes: Axes, x: float, y: float, text: str, colour, size: float = 7.5, bold: bool = False) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="black" if bold else "white",
                             linewidth=1.6 if bold else 0.5, zorder=3 if bold else 1))
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=size, zorder=4,
              fontweight="bold" if bold else "normal")


def _matrix(axes: Axes, x: float, y: float, place: Place, registers: int, halves: int, name: str,
            only: int | None = None) -> None:
    """The elements with their lanes. only: of this lane alone the registers, the others pale."""
    titles: dict[tuple[int, int], set[int]] = {}
    for lane in range(32):
        for register in range(registers):
            for half in range(halves):
                row, column = place(lane, register, half)
                text, colour = str(lane), lane_colour(lane)
                if only is not None:
                    text = f"{register}" if lane == only else ""
                    colour = lane_colour(lane) if lane == only else "#eeeeee"
                _cell(axes, x + _at(column), y + _at(row), text, colour, 8.5 if only is not None else 7.5,
                      lane == only)
                titles.setdefault((row // BLOCK, column // BLOCK), set()).add(register)
    for (row, column), found in titles.items():
        text = ", ".join(f"{name}[{register}]" for register in sorted(found))
        axes.text(x + column * (BLOCK + GAP) + BLOCK / 2, y + row * (BLOCK + GAP) - 0.1, text,
                  ha="center", va="bottom", fontsize=8)


def fragments(A: Place, B: Place, D: Place) -> Figure:
    """The three matrices of one mma.m16n8k16, each element with its lane."""
    figure, (axes,) = canvas(11, 5.6)
    blank(axes, 39.5, 19.8)
    for name, x, place, registers, halves, shape in (
            ("A", 0.5, A, 4, 2, "16 x 16: two in a register"),
            ("B", 20.0, B, 2, 2, "16 x 8: two in a register"),
            ("D", 30.5, D, 4, 1, "16 x 8: floats")):
        _matrix(axes, x, 2.6, place, registers, halves, name.lower())
        axes.text(x, 0.6, f"{name}, {shape}", fontsize=10, va="center")
    return figure


def stays(D: Place, A: Place, lane: int) -> Figure:
    """Where the registers of one lane are in two neighbouring tiles of S, and in the A that P must be."""
    figure, (axes,) = canvas(10, 4.9)
    blank(axes, 46, 20.5)
    _matrix(axes, 0.5, 3, D, 4, 1, "left", lane)
    _matrix(axes, 0.5 + BLOCK + GAP, 3, D, 4, 1, "right", lane)
    axes.text(0.5, 0.4, f"two tiles of S, each an accumulator D: lane {lane}'s floats", fontsize=10,
              va="center")
    arrow(axes, (18.7, 11), (25.6, 11))
    axes.text(22.1, 10.4, "round,\npack by two", fontsize=9, ha="center", va="bottom")
    _matrix(axes, 27, 3, A, 4, 2, "a", lane)
    axes.text(27, 0.4, f"P as A: the elements that lane {lane} must have", fontsize=10, va="center")
    return figure


def rows_of_ldmatrix() -> Figure:
    """Which lane points to which row of 8 elements, for Q and V, and for K; and who gets what."""
    figure, (axes,) = canvas(11, 4.4)
    blank(axes, 47, 19.8)
    pointers = {
        "Q and V: lane % 16, lane / 16 * 8": lambda lane: (lane % 16, lane // 16 * 8),
        "K: lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8":
            lambda lane: (lane // 16 * 8 + lane % 8, lane // 8 % 2 * 8)}
    colours = [COLOURS[name] for name in ("Q", "K", "V", "S")]
    for x, (title, place) in zip((0.5, 16.5), pointers.items(), strict=True):
        axes.text(x + 6, 0.4, title, fontsize=8.5, ha="center", va="center")
        for lane in range(32):
            row, column = place(lane)
            box(axes, x + column / 8 * 6.2, 1.5 + _at(row), 5.8, 1, f"lane {lane}", colours[lane // 8], 7.5,
                0.75, "white")
    for i, colour in enumerate(colours):
        axes.text(4.2 + 7.4 * i, 19.3, f"matrix {i}: register {i}", fontsize=8, color=colour, ha="center",
                  va="center", fontweight="bold")
    for y, trans in ((1.5, False), (10.4, True)):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                if trans:
                    row, column = column, row
                _cell(axes, 38 + column, y + row, str(lane), lane_colour(lane))
        axes.text(37.6, y + 4, "who gets it,\nwith .trans" if trans else "who gets an\nelement of\nthe 8 x 8",
                  fontsize=8.5, ha="right", va="center")
    return figure


def formats() -> Figure:
    """The bits of the three types."""
    figure, (axes,) = canvas(9, 1.9)
    axes.set(xlim=(-4.6, 32.2), ylim=(4.4, -0.2))
    axes.axis("off")
    for y, (name, exponent, fraction) in enumerate((("float", 8, 23), ("bf16", 8, 7), ("fp16", 5, 10))):
        axes.text(-0.4, 1.45 * y + 0.5, name, ha="right", va="center", fontsize=10)
        parts = ((0, 1, "", "grey"), (1, exponent, f"exponent {exponent}", "K"),
                 (1 + exponent, fraction, f"fraction {fraction}", "Q"))
        for x, bits, text, colour in parts:
            for bit in range(bits):
                box(axes, x + bit, 1.45 * y, 1, 1, "", COLOURS[colour], edge="white")
            axes.text(x + bits / 2, 1.45 * y + 0.5, text, ha="center", va="center", fontsize=8.5,
                      color="white", fontweight="bold")
    return figure


def speeds(data: dict, names: dict[str, str], ceiling: bool = False) -> Figure:
    """TFLOP/s over N of a result of bench.py. names: what to draw, with a colour each."""
    figure, (axes,) = canvas(7.5, 3.4)
    for name, colour in names.items():
        rows = [row for row in data["results"] if row["name"] == name and row["status"] == "ok"]
        axes.plot([row["N"] for row in rows], [row["tflops"] for row in rows], "o-", color=colour,
                  label=rows[0]["label"])
    if ceiling:
        axes.axhline(data["ceiling"]["tflops"], color="black", linestyle="--", linewidth=1,
                     label="ceiling: a product of large matrices")
    lengths = sorted({row["N"] for row in data["results"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.set(xlabel="N", ylabel="TFLOP/s", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
