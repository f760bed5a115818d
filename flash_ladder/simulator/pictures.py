"""What a Report draws: HBM traffic by array, and which lane of a warp touches which bank or sector."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MultipleLocator

from .records import Access, Traffic
from .tables import format_bytes

if TYPE_CHECKING:
    from .report import Report

READ, WRITTEN = "#3b75af", "#d1783b"
LANES = colormaps["viridis"]
MOST_PANELS = 4


def traffic(report: Report) -> Figure:
    """Bars: bytes read and written, by array; the unique part is dark, what is moved again light."""
    rows = [(name, t) for name, t in report.traffic().items() if t.total]
    figure = Figure(figsize=(8, 1.6 + 0.6 * max(len(rows), 1)), layout="constrained")
    axes = figure.subplots()
    for y, (_, t) in enumerate(rows):
        _bar(axes, y - 0.2, t.read, t.unique_read, READ)
        _bar(axes, y + 0.2, t.written, t.unique_written, WRITTEN)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    most = max((max(t.read, t.written) for _, t in rows), default=1)
    axes.xaxis.set_major_locator(MultipleLocator(2 ** max(0, math.ceil(math.log2(most / 6)))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_bytes(x)))
    axes.set_xlim(0, 1.15 * most)
    axes.set_xlabel("bytes that warps ask of HBM, with no cache")
    axes.spines[["top", "right"]].set_visible(False)
    total: Traffic = report.hbm
    kernels = ", ".join(kernel.name for kernel in report.kernels)
    axes.set_title(f"HBM traffic of {kernels}: {format_bytes(total.total)}", fontsize=11)
    names = ("read, for the first time", "read again", "written, for the first time", "written again")
    patches = [Rectangle((0, 0), 1, 1, color=colour, alpha=alpha)
               for colour in (READ, WRITTEN) for alpha in (1, 0.4)]
    figure.legend(patches, names, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def _bar(axes: Axes, y: float, total: int, unique: int, colour: str) -> None:
    axes.barh(y, unique, height=0.36, color=colour)
    axes.barh(y, total - unique, left=unique, height=0.36, color=colour, alpha=0.4)
    if total:
        axes.text(total, y, f" {format_bytes(total)}", va="center", fontsize=9)


def mask_figure(kinds: torch.Tensor, seen: torch.Tensor, Br: int, Bc: int) -> Figure:
    """The scores of one head that count, dark, and its tiles: skipped, cut or whole. kinds: (Tr, Tc), of
    tiles.py; seen: (N_q, N_k)."""
    N_q, N_k = seen.shape
    figure = Figure(figsize=(6, 1.2 + 5 * min(2.0, max(0.3, N_q / N_k))), layout="constrained")
    axes = figure.subplots()
    colours = torch.tensor([[0.95, 0.95, 0.95], [0.98, 0.84, 0.72], [0.76, 0.84, 0.93]])     # by kind
    picture = colours[kinds.long()].repeat_interleave(Br, 0).repeat_interleave(Bc, 1)[:N_q, :N_k]
    picture = torch.where(seen[..., None], picture * 0.55, picture)
    axes.imshow(picture.numpy(), interpolation="nearest", extent=(0, N_k, N_q, 0))
    axes.set_xticks(range(0, N_k + 1, Bc), minor=True)
    axes.set_yticks(range(0, N_q + 1, Br), minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    patches = [Rectangle((0, 0), 1, 1, color=colour.tolist()) for colour in (*colours, colours[2] * 0.55)]
    figure.legend(patches, ("skipped", "cut", "whole", "dark: counts"), loc="outside lower center", ncols=4,
                  fontsize=9, frameon=False)
    return figure


def requests(accesses: list[Access]) -> Figure:
    """For each access, its worst request: which lane touches which bank, or which sector."""
    accesses = sorted(accesses, key=lambda a: -a.units)[:MOST_PANELS]
    drawings = [_banks(a) if a.memory == "shared" else _sectors(a) for a in accesses]
    heights = [1.5 + 0.24 * len(rows) for rows, _ in drawings]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    panels = figure.subplots(len(accesses), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, access, (rows, labels) in zip(panels, accesses, drawings, strict=True):
        _grid(axes, access, rows, labels)
    return figure


Rows = list[dict[int, list[int]]]  # by row and column: lanes


def _banks(a: Access) -> tuple[Rows, list[str]]:
    """A row for each wavefront, a column for each bank: a bank gives one word of 4 bytes at a time."""
    rows: Rows = []
    labels = []
    for lanes in _groups(a):
        words: dict[int, list[int]] = {}
        for lane in lanes:
            for word in range(a.example[lane] // 4, (a.example[lane] + a.access_bytes - 1) // 4 + 1):
                words.setdefault(word, []).append(lane)
        wavefronts: Rows = []
        for word, who in words.items():
            row = next((row for row in wavefronts if word % 32 not in row), None)
            if row is None:
                wavefronts.append(row := {})
            row[word % 32] = who
        labels += [str(len(rows) + i + 1) for i in range(len(wavefronts))]
        rows += wavefronts
    return rows, labels


def _groups(a: Access) -> list[list[int]]:
    """The lanes that are served together: counters.cpp has the same."""
    lanes = sorted(a.example)
    together = {4: 32, 8: 16, 16: 8}[max(a.access_bytes, 4)]
    in_pairs = any(all(a.example.get(lane ^ distance, a.example[lane]) == a.example[lane] for lane in lanes)
                   for distance in (1, 2))
    if together < 32 and a.kind == "read" and in_pairs:
        together *= 2
    groups = [[lane for lane in lanes if lane // together == g] for g in range(32 // together)]
    return [group for group in groups if group]


def _sectors(a: Access) -> tuple[Rows, list[str]]:
    """A row for each sector of 32 bytes, a column for each of its words of 4 bytes."""
    words: dict[int, list[int]] = {}
    for lane, address in sorted(a.example.items()):
        for word in range(address // 4, (address + a.access_bytes - 1) // 4 + 1):
            words.setdefault(word, []).append(lane)
    sectors = sorted({word // 8 for word in words})
    rows = [{word % 8: words[word] for word in range(8 * s, 8 * s + 8) if word in words} for s in sectors]
    first = [min(min(row[column] for column in row)) for row in rows]
    return rows, [a.example_elements.get(lane, "") for lane in first]


def _grid(axes: Axes, a: Access, rows: Rows, labels: list[str]) -> None:
    columns = 32 if a.memory == "shared" else 8
    for y, row in enumerate(rows):
        for x in range(columns):
            lanes = row.get(x, [])
            colour = LANES(0.15 + 0.85 * min(lanes) / 31) if lanes else "#eeeeee"
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
            if lanes:
                dark = sum(colour[:3]) < 1.4  # type: ignore[arg-type]
                axes.text(x + 0.5, y + 0.5, _ranges(lanes), ha="center", va="center",
                          color="white" if dark else "black", fontsize=8 if len(lanes) == 1 else 7)
    axes.set(xlim=(0, columns), ylim=(len(rows), 0))
    axes.set_xticks([x + 0.5 for x in range(columns)], range(columns), fontsize=8)  # type: ignore[arg-type]
    axes.set_yticks([y + 0.5 for y in range(len(rows))], labels, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    shared = a.memory == "shared"
    axes.set_xlabel("bank" if shared else "word of 4 bytes in the sector")
    axes.set_ylabel("wavefront" if shared else "sector, by its first element")
    unit = "wavefront" if shared else "sector"
    vain = "" if shared else ", grey words are moved in vain"
    units = f"{a.worst} {unit}{'s' * (a.worst > 1)}"
    what = f"{a.kind} {a.array}, {a.access_bytes} bytes a lane: {units} for a request"
    axes.set_title(f"{a.place}   {_shortened(a.place.text)}\n{what}; the numbers are lanes{vain}",
                   fontsize=10, loc="left")


def _ranges(lanes: list[int]) -> str:
    """[0, 1, 2, 7] as 0-2,7; of more than two stretches the first and how many lanes there are."""
    stretches: list[list[int]] = []
    for lane in lanes:
        if stretches and stretches[-1][1] == lane - 1:
            stretches[-1][1] = lane
        else:
            stretches.append([lane, lane])
    if len(stretches) > 2:
        return f"{lanes[0]}..\n({len(lanes)})"
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in stretches)


def _shortened(text: str, most: int = 90) -> str:
    return text if len(text) <= most else text[:most - 1] + "…"
