"""Drawings of lesson 13: a descriptor, what a product takes, and when two warpgroups multiply."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import COLOURS, arrow, blank, box, canvas

Span = tuple[str, int, float, float]       # what, of which step, from when, to when
CHUNK = 8                                  # elements: 16 bytes
SPAN_COLOURS = {"S": COLOURS["Q"], "softmax": COLOURS["S"], "PV": COLOURS["V"]}
STEP_COLOURS = [COLOURS["Q"], COLOURS["K"], COLOURS["V"], COLOURS["O"]]


def descriptor(fields: dict[str, tuple[int, int, str]]) -> Figure:
    """64 bits, from the highest on: (first bit, last bit, value) of each field by name."""
    figure, (axes,) = canvas(11, 1.3)
    blank(axes, 64, 6.2)
    axes.add_patch(Rectangle((0, 1.6), 64, 2.4, facecolor="#e8e4e1", edgecolor="#444444", linewidth=0.8))
    for (name, (first, last, value)), colour in zip(fields.items(), STEP_COLOURS * 2):
        left, width = 63 - last, last - first + 1
        box(axes, left, 1.6, width, 2.4, name if width > 3 else "", colour, alpha=0.75)
        text = value if width > 3 else f"{name} = {value}"
        axes.text(left + width / 2, 5, text, va="center", fontsize=9, ha="left" if last == 63 else "center")
        for bit in {first, last}:
            axes.text(63 - bit + 0.5, 0.9, str(bit), ha="center", va="center", fontsize=7.5)
    return figure


def taken(products: dict[str, torch.Tensor]) -> Figure:
    """A tile's panels, one above the other as they lie in shared memory, for each product: which chunks it
    takes, a boolean matrix (rows, columns / 8) of the whole tile."""
    figure, panels = canvas(11, 3.6, len(products))
    for axes, (title, chunks) in zip(panels, products.items(), strict=True):
        rows, columns = chunks.shape
        blank(axes, 10.6, 2 * (rows / 2 + 1.6), title)
        for panel in range(columns // CHUNK):
            top = 0.6 + panel * (rows / 2 + 1.6)
            axes.text(0.9, top + rows / 4, f"panel {panel}", ha="right", va="center", fontsize=8, rotation=90)
            for row in range(rows):
                for c in range(CHUNK):
                    found = bool(chunks[row, panel * CHUNK + c])
                    colour = COLOURS["O"] if found else "#f4f4f4"
                    axes.add_patch(Rectangle((1.4 + c, top + row / 2), 1, 0.5, linewidth=0.4,
                                             edgecolor="#999999", facecolor=colour))
                if row % 8 == 0:
                    axes.text(9.6, top + row / 2 + 0.25, str(row), fontsize=7, va="center")
                    axes.plot((1.4, 9.4), (top + row / 2,) * 2, color="#222222", linewidth=1)
    return figure


def offsets(tile_rows: int) -> Figure:
    """Where LBO and SBO lead: a K-major tile and an MN-major one, of two panels."""
    figure, panels = canvas(11, 3.9, 2)
    for axes, (title, down, far) in zip(panels, (
            ("K-major: K in Q K^T. k runs along a row", "n: keys", "not by LBO:\nanother descriptor"),
            ("MN-major: V in P V. k runs down", "k: keys", f"LBO\n= {128 * tile_rows}")), strict=True):
        blank(axes, 22, 17.4, title)
        for panel in range(2):
            top = 1.2 + panel * 8.2
            for group in range(tile_rows // 8):
                box(axes, 4, top + 1.7 * group, 8, 1.7, "" if panel else "8 rows of 128 bytes: a pattern",
                    COLOURS["K" if down[0] == "n" else "V"], alpha=0.35 + 0.25 * (group % 2), size=7.5)
            axes.text(3.6, top + 0.85 * tile_rows / 8, f"panel {panel}", ha="right", va="center", fontsize=8)
        arrow(axes, (12.3, 1.4), (12.3, 1.4 + 1.7))
        axes.text(12.7, 2.2, "SBO = 1024", va="center", fontsize=8.5)
        arrow(axes, (17.2, 1.4), (17.2, 1.2 + 8.2), colour="#444444" if "LBO\n" in far else "#bbbbbb")
        axes.text(17.6, 5.4, far, va="center", fontsize=8.5)
        horizontal = "k: columns of d" if down[0] == "n" else "n: columns of d"
        axes.text(8, 0.5, f"{horizontal} \u2192", ha="center", fontsize=8)
        axes.text(0.4, 4.6, f"{down} \u2192", ha="center", va="center", fontsize=8, rotation=-90)
    return figure


def timelines(schedules: dict[str, list[list[Span]]]) -> Figure:
    """A panel for each schedule: the products and, under them, the softmax of each warpgroup."""
    figure, _ = canvas(11, 1.9 * len(schedules))
    figure.clear()
    panels = figure.subplots(len(schedules), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (title, warpgroups) in zip(panels, schedules.items(), strict=True):
        for y, spans in enumerate(warpgroups):
            for span in spans:
                _span(axes, 2.2 * y, *span)
        axes.set(xlim=(0, 16), ylim=(2.2 * len(warpgroups) - 0.1, -0.15))
        names = [f"{what} {y}" for y in range(len(warpgroups)) for what in ("products", "softmax")]
        axes.set_yticks([2.2 * (n // 2) + n % 2 + 0.42 for n in range(len(names))], names, fontsize=8)
        axes.set_title(title, fontsize=10, loc="left", pad=4)
        axes.tick_params(length=0, labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("time", fontsize=9)
    return figure


def _span(axes: Axes, top: float, what: str, step: int, start: float, end: float) -> None:
    y = top + (what == "softmax")
    axes.add_patch(Rectangle((start, y), end - start, 0.84, facecolor=SPAN_COLOURS[what], edgecolor="white",
                             alpha=0.95))
    name = {"S": f"S{step}", "PV": f"P V{step}", "softmax": f"softmax {step}"}[what]
    if start < 15.6:
        axes.text((start + end) / 2, y + 0.42, name, ha="center", va="center", fontsize=7.5, clip_on=True)
