"""Lesson 09: when copies and products take place, and which tiles a causal mask cuts."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import COLOURS, blank, box, canvas

Step = tuple[str, int, float, float]       # what, of which tile, from when, to when
ROWS = {"copy": 0, "S": 1, "softmax": 1, "PV": 1}
STEP_COLOURS = {"S": COLOURS["Q"], "softmax": COLOURS["S"], "PV": COLOURS["V"]}
BUFFERS = ("#eeca3b", "#d39b4a")


def timelines(schedules: dict[str, list[Step]], buffers: list[int]) -> Figure:
    """A panel for each schedule: the copies above, the work of one block below."""
    end = max(step[3] for steps in schedules.values() for step in steps)
    figure, _ = canvas(11, 1.75 * len(schedules))
    figure.clear()
    panels = figure.subplots(len(schedules), 1, squeeze=False)[:, 0]
    for panel, (title, steps), count in zip(panels, schedules.items(), buffers, strict=True):
        _timeline(panel, title, steps, count, end)
    panels[-1].set_xlabel("time", fontsize=9)
    return figure


def _timeline(axes: Axes, title: str, steps: list[Step], buffers: int, end: float) -> None:
    for what, tile, start, stop in steps:
        y = ROWS[what]
        colour = BUFFERS[tile % buffers] if what == "copy" else STEP_COLOURS[what]
        names = {"copy": f"copy K{tile}, V{tile}", "S": f"S{tile}", "softmax": "softmax", "PV": f"P V{tile}"}
        axes.add_patch(Rectangle((start, y), stop - start, 0.8, facecolor=colour, edgecolor="white"))
        axes.text((start + stop) / 2, y + 0.4, names[what], ha="center", va="center", fontsize=8)
        if what == "S":                    # what stands before it: the wait and the barrier
            axes.axvline(start, color="black", linewidth=1.3, linestyle=":")
    axes.set(xlim=(0, end + 0.3), ylim=(1.95, -0.15))
    axes.set_yticks([0.4, 1.4], ["copies", "a block's\nwarps"], fontsize=8.5)
    axes.set_xticks(range(0, int(end) + 1, 2))
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(title, fontsize=10, loc="left", pad=4)
    axes.spines[["top", "right", "left"]].set_visible(False)


def masked_tiles(tiles: dict[tuple[int, int], str], Br: int, Bc: int) -> Figure:
    """The tiles of a causal S: "whole", "masked" or "never visited"."""
    colours = {"whole": COLOURS["V"], "masked": COLOURS["K"], "never visited": "#f4f4f4"}
    Tr, Tc = (1 + max(key[axis] for key in tiles) for axis in range(2))
    figure, (axes,) = canvas(6.4, 1.9)
    blank(axes, 2 * Tc + 8.5, 1.2 * Tr + 1.2)
    for (i, j), what in tiles.items():
        box(axes, 1.6 + 2 * j, 1.1 + 1.2 * i, 2, 1.2, "", colours[what], alpha=0.85)
    for j in range(Tc):
        axes.text(2.6 + 2 * j, 0.6, f"K{j}", ha="center", va="center", fontsize=9)
    for i in range(Tr):
        axes.text(1.3, 1.7 + 1.2 * i, f"Q{i}", ha="right", va="center", fontsize=9)
    for y, (what, colour) in enumerate(colours.items()):
        count = sum(found == what for found in tiles.values())
        box(axes, 2.4 + 2 * Tc, 1.5 + 1.6 * y, 1, 1, "", colour, alpha=0.85)
        axes.text(3.8 + 2 * Tc, 2 + 1.6 * y, f"{what}: {count}", va="center", fontsize=9)
    axes.text(2.4 + 2 * Tc, 1.5 + 1.6 * 3.4, f"Br={Br}, Bc={Bc}", va="center", fontsize=9)
    return figure
