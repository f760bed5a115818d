"""Drawings of lesson 14: what a thread holds in registers, and which products run under what."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import COLOURS, canvas

HELD = {"dK": COLOURS["K"], "dV": COLOURS["V"], "S": COLOURS["S"], "dP": COLOURS["O"],
        "P, 16 bits": COLOURS["registers"], "dS, 16 bits": COLOURS["shared"]}
PRODUCTS = {"S": COLOURS["S"], "dP": COLOURS["O"], "dV": COLOURS["V"], "dK": COLOURS["K"], "dQ": COLOURS["Q"]}
Span = tuple[str, float, float]            # what, from when, to when


def registers(rows: dict[str, dict[str, int]], limit: int) -> Figure:
    """By row's name, the registers of a thread by what they hold; and a line where there are no more."""
    figure, (axes,) = canvas(11, 0.6 * len(rows) + 1.2)
    for y, held in enumerate(rows.values()):
        left = 0
        for name, count in held.items():
            axes.barh(y, count, 0.7, left, color=HELD[name], edgecolor="white")
            axes.text(left + count / 2, y, f"{name.split(',')[0]}\n{count}", ha="center", va="center",
                      fontsize=7.5)
            left += count
    axes.axvline(limit, color="#222222", linewidth=1.2)
    axes.text(limit, -0.62, f"setmaxnreg: {limit}", ha="center", va="bottom", fontsize=8.5)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.set(ylim=(len(rows) - 0.5, -0.6), xlabel="registers of a thread")
    axes.tick_params(length=0, labelsize=8.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def steps(schedules: dict[str, tuple[list[Span], list[Span]]]) -> Figure:
    """A panel for each schedule: the tensor cores' spans, and below them what the warps do themselves."""
    figure, _ = canvas(11, 1.45 * len(schedules) + 0.4)
    figure.clear()
    panels = figure.subplots(len(schedules), 1, squeeze=False, sharex=True)[:, 0]
    end = max(span[2] for both in schedules.values() for spans in both for span in spans)
    for axes, (title, both) in zip(panels, schedules.items(), strict=True):
        for y, spans in enumerate(both):
            for name, start, stop in spans:
                axes.add_patch(Rectangle((start, y), stop - start, 0.84, edgecolor="white",
                                         facecolor=PRODUCTS.get(name, COLOURS["grey"])))
                axes.text((start + stop) / 2, y + 0.42, name, ha="center", va="center", fontsize=8)
        axes.set(xlim=(0, end), ylim=(1.95, -0.1))
        axes.set_yticks([0.42, 1.42], ["products", "warps"], fontsize=8)
        axes.set_title(title, fontsize=10, loc="left", pad=4)
        axes.tick_params(length=0, labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("time", fontsize=9)
    return figure
