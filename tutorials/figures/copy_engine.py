"""Drawings of lesson 12: a tile as boxes of a tensor, the phases of an mbarrier, and who waits for whom."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import COLOURS, arrow, blank, box, canvas

PANEL = 64                                 # columns of a box
PANEL_COLOURS = (COLOURS["Q"], COLOURS["K"], COLOURS["V"])
ANSWERS = {True: "#54a24b", False: "#e8e4e1"}
BUFFERS = ("#eeca3b", "#d39b4a", "#9d755d", "#bab0ac")


def boxes(N: int, d: int, first_row: int, rows: int) -> Figure:
    """A head of N x d, the boxes of the tile from first_row on, and the tile in shared memory: its panels."""
    panels, unit = -(-d // PANEL), 1 / 16
    side, height = PANEL * unit, rows * unit
    left, top, far = 2.4, 0.9, 2.4 + panels * side + 3
    figure, (axes,) = canvas(9, 2.8)
    blank(axes, far + side + 5, top + max((first_row + rows) * unit, panels * height) + 0.8)
    box(axes, left, top, d * unit, N * unit, colour="#f4f4f4")
    axes.text(left + d * unit / 2, top - 0.3, f"one head in HBM: N = {N}, d = {d}", ha="center", fontsize=9)
    axes.text(left - 0.2, top + first_row * unit, f"row {first_row}", ha="right", va="center", fontsize=8)
    axes.text(far + side / 2, top - 0.3, "shared memory", ha="center", fontsize=9)
    for n in range(panels):
        columns, inside = min(PANEL, d - n * PANEL) * unit, min(rows, N - first_row) * unit
        for what, x, y in (("box", left + n * side, top + first_row * unit),
                           ("panel", far, top + n * height)):
            axes.add_patch(Rectangle((x, y), side, height, facecolor="white", hatch="///",
                                     edgecolor="#999999", linewidth=0))
            axes.add_patch(Rectangle((x, y), columns, inside, linewidth=0,
                                     facecolor=PANEL_COLOURS[n % len(PANEL_COLOURS)]))
            axes.add_patch(Rectangle((x, y), side, height, fill=False, edgecolor="#222222"))
            at = (x + side / 2, y + height + 0.35) if what == "box" else (x + side + 0.2, y + height / 2)
            axes.text(*at, f"{what} {n}", ha="center" if what == "box" else "left", va="center", fontsize=9)
    middle = top + (first_row + rows / 2) * unit
    arrow(axes, (left + panels * side + 0.3, middle), (far - 0.3, middle))
    axes.text(far + side + 2, top + height, "hatched: past the end,\nzeros", va="center", fontsize=8.5)
    return figure


def answers(events: list[str], complete: list[tuple[bool, bool]]) -> Figure:
    """After each event: whether an mbarrier says that its phase of parity 0, and of parity 1, is complete."""
    figure, (axes,) = canvas(9, 2.6)
    for x, found in enumerate(complete):
        for parity, yes in enumerate(found):
            axes.add_patch(Rectangle((x, parity), 0.96, 0.9, facecolor=ANSWERS[yes]))
            axes.text(x + 0.48, parity + 0.45, "goes on" if yes else "waits", ha="center", va="center",
                      fontsize=9, color="white" if yes else "black")
    axes.set(xlim=(0, len(events)), ylim=(2, -0.1))
    axes.set_xticks([x + 0.48 for x in range(len(events))], events, fontsize=8)
    axes.set_yticks([0.45, 1.45], ["a wait for parity 0", "a wait for parity 1"], fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def rounds(schedules: dict[str, list[list[tuple[float, float]]]], buffers: list[int]) -> Figure:
    """A panel for each schedule: when each warp is at each tile (from, to), coloured by the tile's buffer."""
    figure, _ = canvas(11, 1.9 * len(schedules))
    figure.clear()
    panels = figure.subplots(len(schedules), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (title, warps), count in zip(panels, schedules.items(), buffers, strict=True):
        for y, tiles in enumerate(warps):
            for t, (start, end) in enumerate(tiles):
                axes.add_patch(Rectangle((start, y), end - start, 0.84, facecolor=BUFFERS[t % count],
                                         edgecolor="white"))
                axes.text((start + end) / 2, y + 0.42, str(t), ha="center", va="center", fontsize=8)
        axes.set(xlim=(0, max(tiles[-1][1] for warps in schedules.values() for tiles in warps) + 0.2),
                 ylim=(len(warps), -0.1))
        axes.set_yticks([y + 0.42 for y in range(len(warps))], [f"warp {y}" for y in range(len(warps))],
                        fontsize=8)
        axes.set_title(title, fontsize=10, loc="left", pad=4)
        axes.tick_params(length=0, labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("time", fontsize=9)
    return figure
