"""Draws a time line: what the warps of a block do side by side.

`data` is a result as timeline.py makes it, and as its JSON files hold it: all is drawn from that alone.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .marks import Span
from .report import direction, title

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"product": ("#1b7837", "#7fbf7b", "#4d9221", "#a6dba0", "#00441b"),
           "copy": ("#2166ac", "#67a9cf", "#b3d3e8", "#35978f"),
           "softmax": ("#e08214",), "maximum": ("#fdb863",), "exponential": ("#e08214",),
           "store": ("#8c510a",), "wait": ("#d0d0d0",), "empty": ("#d0d0d0",), "finish": ("#a8a8a8",),
           "turn": ("#9970ab",), "barrier": ("#bdbdbd",), "P and dS": ("#e08214",), "P": ("#e08214",),
           "dS": ("#fdb863",), "shared": ("#f2d35e",), "sums": ("#c51b7d",), "bulk_add": ("#c51b7d",),
           "gradients": ("#8c510a",), "elements": ("#f6e8c3",), "meeting": ("#bdbdbd",),
           "bulk_wait": ("#e6c3d9",)}
WHAT = {"product": "products", "copy": "copies", "softmax": "softmax", "maximum": "softmax",
        "exponential": "softmax", "store": "stores of O", "wait": "waits for a tile",
        "empty": "waits for a buffer", "finish": "waits for products", "turn": "waits for its turn",
        "barrier": "waits for the block", "P and dS": "P and dS", "P": "P", "dS": "dS",
        "shared": "to shared memory", "sums": "dQ added to HBM by the warp",
        "bulk_add": "dQ added to HBM by the copy engine", "gradients": "stores of dK and dV",
        "elements": "other work", "meeting": "waits for other warpgroups",
        "bulk_wait": "waits for the copy engine"}
PRODUCTS = ("S", "dP", "dV", "dK", "dQ")    # of the backward pass, in the order of their colours
# As much of the time as is legible; a tile of the backward pass has more bars
SHOWN = {"fwd": {"steps": 2000, "ns": 30_000}, "bwd": {"steps": 1300, "ns": 20_000}}
PALE = "#a6dba0"     # a bar with black letters
BAR = 0.78           # of a row's height
LEGEND = 66          # characters of a line
NARROW = 30          # steps: no number in a bar below it


def draw(data: dict, file: Path) -> None:
    """One row for what a warp does itself, one for what goes on beside it; as much time as is legible. Of a
    GPU's, below it, the model's."""
    panels = [data, *([data["model"]] if "model" in data else [])]
    all_spans = [[span for span in (Span(*each) for each in panel["spans"])
                  if span.start < shown(panel)] for panel in panels]
    all_rows = [list(dict.fromkeys((span.lane, span.row) for span in sorted(spans, key=_order)))
                for spans in all_spans]
    heights = [1.2 + 0.44 * len(rows) for rows in all_rows]
    colours = _colours([span for spans in all_spans for span in spans])
    figure, axes = plt.subplots(len(panels), figsize=(15, 1 + sum(heights)), layout="constrained",
                                height_ratios=heights, squeeze=False)
    for panel, spans, rows, on in zip(panels, all_spans, all_rows, axes[:, 0], strict=True):
        _draw(panel, spans, rows, colours, on)
    _legend(figure, colours)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _draw(data: dict, spans: list[Span], rows: list[tuple[str, str]], colours: dict, axes: Axes) -> None:
    unit = data["unit"]
    for span, track, tracks in _tracks(spans):
        height = BAR / tracks
        y = rows.index((span.lane, span.row)) + (track + 0.5) * height - BAR / 2
        axes.barh(y, span.end - span.start, left=span.start, height=height, color=colours[_key(span)],
                  edgecolor="white", linewidth=0.6)
        end = min(span.end, shown(data))
        if span.row == "tensor cores" and end - span.start >= NARROW:
            product, warpgroup = span.label.rsplit(" ", 1)
            text = span.label if product in PRODUCTS else warpgroup
            axes.text((span.start + end) / 2, y, text, ha="center", va="center", fontsize=7,
                      color="black" if colours[_key(span)] == PALE else "white")
    _name_rows(axes, rows)
    axes.set_xlim(0, min(max(span.end for span in spans), shown(data)))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("steps of the model: one is a product of 64 x 16 x 16 on the tensor cores"
                    if unit == "steps" else "time (ns)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    where = ("in the simulator" if unit == "steps" else
             f"multiprocessor {data['multiprocessor']} of {data['device']}")
    heading = (f"{data['stage']}: {title(data)}, N={data['shape']['N']}; block {data['block']}, {where}",
               data["note"])
    axes.set_title("\n".join(textwrap.fill(line, 150) for line in heading), fontsize=10, loc="left")


def shown(data: dict) -> float:
    """How much of a result's time is drawn."""
    return SHOWN[direction(data)][data["unit"]]


def _tracks(spans: list[Span]) -> list[tuple[Span, int, int]]:
    """Each span with its track of so many: in a row, what overlaps is drawn one below the other."""
    by_row: dict[tuple[str, str], list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        by_row.setdefault((span.lane, span.row), []).append(span)
    found = []
    for in_row in by_row.values():
        ends: list[float] = []
        placed = []
        for span in in_row:
            track = next((n for n, end in enumerate(ends) if end <= span.start), len(ends))
            ends[track:track + 1] = [span.end]
            placed.append((span, track))
        found += [(span, track, len(ends)) for span, track in placed]
    return found


def _order(span: Span) -> tuple:
    """Of rows from top to bottom: the tensor cores, the warpgroups, the producer."""
    lane = span.lane
    return (lane != "tensor cores", lane.startswith("producer"), len(lane), lane,
            ("products", "work", "copies").index(span.row) if lane != "tensor cores" else 0)


def _key(span: Span) -> tuple[str, str]:
    """What has one colour: on the tensor cores without the warpgroup's number."""
    return span.kind, span.label.rsplit(" ", 1)[0] if span.row == "tensor cores" else span.label


def _colours(spans: list[Span]) -> dict[tuple[str, str], str]:
    def order(key: tuple[str, str]) -> tuple:     # S before O
        place = PRODUCTS.index(key[1]) if key[1] in PRODUCTS else 0
        return key[0], place, re.search("_O|P ?V", key[1]) is not None, key
    keys = sorted({_key(span) for span in spans}, key=order)
    found, used = {}, dict.fromkeys(COLOURS, 0)
    for kind, label in keys:
        found[kind, label] = COLOURS[kind][used[kind] % len(COLOURS[kind])]
        used[kind] += 1
    return found


def _name_rows(axes: Axes, rows: list[tuple[str, str]]) -> None:
    names = {"products": "products under way", "copies": "copies under way"}
    labels = ["tensor cores, for warpgroup n" if row == "tensor cores" else f"{lane}: {names.get(row, row)}"
              for lane, row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    for y in range(1, len(rows)):
        if rows[y][0] != rows[y - 1][0]:
            axes.axhline(y - 0.5, color="#888888", linewidth=0.6)


def _legend(figure: Figure, colours: dict[tuple[str, str], str]) -> None:
    """By colour: what it is, and in the stage's own words."""
    words: dict[tuple[str, str], list[str]] = {}
    for (kind, label), colour in colours.items():
        words.setdefault((WHAT[kind], colour), []).append(label)
    handles = [Patch(color=colour, label=textwrap.fill(
                   what if labels == [what] else f"{what}: {', '.join(labels)}", LEGEND))
               for (what, colour), labels in words.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
