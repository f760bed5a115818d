"""Shows what bench.py --rungs measured: a staircase for each pass and type, and tables.

`data` is a result as rungs.py makes it, and as rungs.json holds it: all is drawn from that alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from rich import box
from rich.console import Console
from rich.table import Table

from .report import PASSES, number, size

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#1f77b4", "#d1640f", "#2a8a2a", "#b3282d", "#8c564b", "#c0519f")   # of branches to a default
SIDE_COLOURS = ("#7a5ea8", "#8a8a1f", "#137f8c", "#7f7f7f")                   # of the others
PEER_COLOUR = "#404040"
GAP = 0.6                       # between two branches; a rung is 1 wide
LEGIBLE = (withStroke(linewidth=2.5, foreground="white"),)
PEERS = {"PyTorch flash": "FlashAttention-2"}
QUANTITIES = {"hbm_bytes": "HBM traffic, read and written",
              "shared_wavefronts": "wavefronts of shared memory"}


# ---------------------------------------------------------------------------------------- rungs and branches
def figures(data: dict) -> list[tuple[str, str]]:
    """The passes and types that have rungs, in the order in which they were measured."""
    return list(dict.fromkeys((row["pass"], row["dtype"]) for row in data["rows"] if row["kind"] == "stage"))


def rungs(data: dict, direction: str) -> dict[str, dict]:
    """A row of each stage of a pass, by its name."""
    found: dict[str, dict] = {}
    for row in data["rows"]:
        if row["pass"] == direction and row["kind"] == "stage":
            found.setdefault(row["name"], row)
    return found


def branches(found: dict[str, dict]) -> list[list[str]]:
    """The names of rungs, cut into chains of `after`. Where the ladder forks, a chain goes on with the first
    child that leads to a default, else with the one that most follow; the others begin their own chains."""
    children = defaultdict(list)
    for name, row in found.items():
        children[row["after"] if row["after"] in found else ""].append(name)

    def rank(name: str) -> tuple[bool, int]:
        below = [rank(child) for child in children[name]]
        default = bool(found[name]["default"]) or any(leads for leads, _ in below)
        return default, 0 if default else 1 + max((length for _, length in below), default=0)

    chains, waiting = [], list(children[""])
    while waiting:
        chain = [waiting.pop(0)]
        while following := list(children[chain[-1]]):
            chain.append(max(following, key=rank))
            following.remove(chain[-1])
            waiting += following
        chains.append(chain)
    return sorted(chains, key=lambda chain: list(found).index(chain[0]))


def colours(found: dict[str, dict]) -> dict[str, str]:
    """By name: one colour a branch."""
    main, side = itertools.cycle(COLOURS), itertools.cycle(SIDE_COLOURS)
    chosen: dict[str, str] = {}
    for chain in branches(found):
        chosen |= dict.fromkeys(chain, next(main if found[chain[-1]]["default"] else side))
    return chosen


def places(found: dict[str, dict], names: set[str]) -> dict[str, float]:
    """Where these rungs stand on the x axis: a branch after the other."""
    x = 0.0
    placed: dict[str, float] = {}
    for chain in branches(found):
        here = [name for name in chain if name in names]
        placed |= {name: x + i for i, name in enumerate(here)}
        x += (len(here) + GAP) * bool(here)
    return placed


# ---------------------------------------------------------------------------------------- shapes and gains
def shapes(data: dict, direction: str, dtype: str) -> list[dict]:
    """B, H, N, d and causal of what was measured for a pass and a type, each once."""
    keys = ("B", "H", "N", "d", "causal")
    found = dict.fromkeys(tuple(row[key] for key in keys) for row in data["rows"]
                          if (row["pass"], row["dtype"]) == (direction, dtype))
    return [dict(zip(keys, values, strict=True)) for values in found]


def of_shape(data: dict, direction: str, dtype: str, shape: dict) -> list[dict]:
    """The rows of a shape."""
    return [row for row in data["rows"] if (row["pass"], row["dtype"]) == (direction, dtype)
            and all(row[key] == value for key, value in shape.items())]


def value(row: dict, what: str) -> float | None:
    """Such as its TFLOP/s; None if it is not ok."""
    return row[what] if row["status"] == "ok" else None


def gain(row: dict, others: list[dict], what: str = "tflops") -> float | None:
    """The TFLOP/s of a stage over its parent's of the same run, or else of a row among others; of what is
    counted, how many times less. None without one of the two."""
    before = row.get(f"parent_{what}") or next(
        (value(other, what) for other in others if other["name"] == row.get("after")), None)
    here = value(row, what)
    if not before or not here:
        return None
    return here / before if what == "tflops" else before / here


def times(factor: float | None) -> str:
    """Such as 1.42×."""
    if factor is None:
        return ""
    return f"{factor:.2f}×" if factor < 9.95 else f"{factor:.1f}×" if factor < 99.5 else f"{factor:,.0f}×"


def mask(shape: dict) -> str:
    return "causal" if shape["causal"] else "full"


# ---------------------------------------------------------------------------------------- on the terminal
def show(data: dict, files: list[Path]) -> None:
    """A table for each pass and type on the terminal, what was not ok, and the files."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 110
    console.print(data["device"])
    if data["note"]:
        console.print(data["note"], style="yellow")
    for direction, dtype in figures(data):
        header, *rows = table(data, direction, dtype)
        unit = "counted, and how many times less than the parent" if data["simulated"] else (
            "TFLOP/s, and over the parent's")
        shown = Table(title=f"{PASSES[direction].capitalize()}, {dtype}: {unit}", box=box.HORIZONTALS,
                      padding=(0, 1, 0, 0))
        for i, column in enumerate(header):
            shown.add_column(column if data["simulated"] else column.replace(" ", "\n"),
                             justify="right" if i else "left", no_wrap=i > 0)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    for row in data["rows"]:
        if row["status"] != "ok":
            text = f"{row['status']}: {row['message']}".removesuffix(": ")
            console.print(f"{row['name']}, {row['pass']} {row['dtype']} d={row['d']} {mask(row)} "
                          f"N={row['N']}: {text}", style="red" * (row["status"] in ("wrong", "failed")),
                          soft_wrap=True)
    for what, reason in data["not_run"].items():
        console.print(f"Not run: {what}: {reason}", soft_wrap=True)
    console.print(f"{data['seconds']} s", *files, sep="\n", soft_wrap=True)


def table(data: dict, direction: str, dtype: str) -> list[list[str]]:
    """The header, then for each rung, and each peer, its name and a text for each shape."""
    all_shapes = shapes(data, direction, dtype)
    quantities = list(QUANTITIES) if data["simulated"] else ["tflops"]
    columns = [(shape, what) for shape in all_shapes for what in quantities]
    several = len({shape["N"] for shape in all_shapes}) > 1
    header = ["stage", *(
        f"d={shape['d']} {mask(shape)}" + f" N={shape['N']}" * several if what == "tflops"
        else QUANTITIES[what].split(",")[0] for shape, what in columns)]
    found = [of_shape(data, direction, dtype, shape) for shape, _ in columns]
    lines = [header]
    for name in dict.fromkeys(row["name"] for rows in found for row in rows):
        line = [name]
        for rows, (_, what) in zip(found, columns, strict=True):
            row = next((row for row in rows if row["name"] == name), None)
            line.append(cell(row, rows, what) if row else "-")
        lines.append(line)
    return lines


def cell(row: dict, rows: list[dict], what: str) -> str:
    """A value and the gain over the parent, such as 34.4 1.42×."""
    if value(row, what) is None:
        return row["status"]
    if not row[what]:
        return "none"
    text = size(row[what]) if what == "hbm_bytes" else number(row[what])
    return f"{text} {times(gain(row, rows, what))}".rstrip()


# ---------------------------------------------------------------------------------------- the staircase
def draw_all(data: dict, folder: Path) -> list[Path]:
    """A picture for each pass and type, drawn unless it is there already. Returns their files."""
    files = []
    for direction, dtype in figures(data):
        files.append(file := folder / f"rungs_{direction}_{dtype}.png")
        if drawn_from(file) != digest(data, direction, dtype):
            draw(data, direction, dtype, file)
    return files


def digest(data: dict, direction: str, dtype: str) -> str:
    """Of all that a picture shows."""
    rows = [row for row in data["rows"] if row["pass"] == direction]
    return hashlib.sha256(json.dumps([data["device"], data["date"], dtype, rows]).encode()).hexdigest()


def drawn_from(file: Path) -> str:
    """The digest of what a picture shows; empty if there is none."""
    from PIL import Image

    if not file.exists():
        return ""
    with Image.open(file) as image:
        return image.text.get("Description", "")


def draw(data: dict, direction: str, dtype: str, file: Path) -> None:
    """The rungs of a pass and a type: TFLOP/s at each shape; or if it is simulated, what was counted."""
    all_shapes = shapes(data, direction, dtype)
    if data["simulated"]:
        panels = [(all_shapes[0], what) for what in QUANTITIES]
    else:
        panels = [(shape, "tflops") for shape in all_shapes]
    found = rungs(data, direction)
    rows = [of_shape(data, direction, dtype, shape) for shape, _ in panels]
    names = {row["name"] for some in rows for row in some if row["kind"] == "stage"}
    at = places(found, names)
    across = 1 if data["simulated"] or len(panels) == 1 else 2
    down = -(-len(panels) // across)
    a_rung = 0.7 if data["simulated"] else 0.42  # bytes have a unit
    width = max(5.2, 1.3 + a_rung * (max(at.values()) + 1)) * across
    figure, grid = plt.subplots(down, across, figsize=(width, 0.9 + 2.5 * down), layout="constrained",
                                squeeze=False)
    for axes in grid.flat[len(panels):]:
        axes.set_visible(False)
    for i, (axes, (shape, what), some) in enumerate(zip(grid.flat, panels, rows)):
        panel(axes, some, what, at, branches(found), colours(found))
        if i + across < len(panels):  # the one below has them
            axes.set_xticklabels([])
        axes.set_title(f"d={shape['d']} {mask(shape)}, N={shape['N']}, B={shape['B']} H={shape['H']}",
                       fontsize=9)
        axes.set_ylabel(textwrap.fill(QUANTITIES.get(what, "TFLOP/s"), 22), fontsize=9)
    figure.suptitle(textwrap.fill(heading(data, direction, dtype), int(12 * width)), fontsize=10)
    figure.savefig(file, dpi=120, metadata={"Description": digest(data, direction, dtype)})
    plt.close(figure)


def dates(data: dict, rows: list[dict]) -> str:
    """When they were measured: rows that a later run has not measured again have a date of their own."""
    return " and ".join(sorted({row.get("date", data["date"])[:10] for row in rows}))


def heading(data: dict, direction: str, dtype: str) -> str:
    """What a picture shows, and whence."""
    if data["simulated"]:
        what = "counted in the simulator, on a log scale; ×: how many times less than the parent"
    else:
        of_type = [row for row in data["rows"] if (row["pass"], row["dtype"]) == (direction, dtype)]
        what = f"{data['device'].split(',')[0]}, {dates(data, of_type)}; ×: TFLOP/s over the parent's"
    return f"{PASSES[direction].capitalize()}, {dtype}, rung by rung: {what}"


def panel(axes: Axes, rows: list[dict], what: str, at: dict[str, float], chains: list[list[str]],
          colour: dict[str, str]) -> None:
    """A step for each rung, with its value and, below it, the gain over its parent; peers as lines."""
    stages = {row["name"]: row for row in rows if row["kind"] == "stage"}
    heights: dict[str, Any] = {name: value(row, what) for name, row in stages.items()}
    peers = {row["name"]: height for row in rows
             if row["kind"] == "peer" and (height := value(row, what))}
    shown = [height for height in (*heights.values(), *peers.values()) if height]
    if not shown:
        return
    bottom, top = (0, 1.16 * max(shown)) if what == "tflops" else (min(shown) / 3, 3 * max(shown))
    axes.set_ylim(bottom, top)
    axes.tick_params(axis="y", labelsize=8)
    if what != "tflops":
        axes.set_yscale("log")
        axes.tick_params(axis="y", which="both", left=False, labelleft=False)
    axes.set_xlim(-0.6, max(at.values()) + 0.6)
    for chain in chains:
        if here := [name for name in chain if name in at]:
            steps(axes, [heights.get(name) for name in here], at[here[0]], bottom, colour[here[0]])
            parent = stages.get(here[0], {}).get("after")
            if parent and heights.get(parent):
                axes.plot([at[parent] + 0.5, at[here[0]] - 0.5], [heights[parent]] * 2, ":",
                          color=colour[here[0]], linewidth=1.2)
    for name, row in stages.items():
        if not heights[name]:
            status = "none" if heights[name] == 0 else row["status"]
            axes.annotate(status, (at[name], bottom), (0, 3), textcoords="offset points",
                          rotation=90, ha="center", va="bottom", fontsize=7, color="dimgrey")
            continue
        text = size(heights[name]) if what == "hbm_bytes" else number(heights[name])
        below = times(gain(row, rows, what))
        low = axes.transAxes.inverted().transform(axes.transData.transform((0, heights[name])))[1] < 0.12
        label(axes, at[name], heights[name], text, 2, weight="bold")
        label(axes, at[name], heights[name], below, 10 if low else -2.5, fontsize=6.5, color="#303030")
    lines(axes, peers, top)
    axes.set_xticks(list(at.values()), list(at), rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    for tick, name in zip(axes.get_xticklabels(), at, strict=True):
        tick.set_color(colour[name])
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def steps(axes: Axes, heights: list[float | None], first: float, bottom: float, colour: str) -> None:
    """The outline and the area of a branch, with a gap where there is no value."""
    values = [height or math.nan for height in heights]
    edges = [first - 0.5 + i for i in range(len(values) + 1)]
    axes.stairs(values, edges, baseline=bottom, fill=True, alpha=0.18, color=colour)
    axes.stairs(values, edges, baseline=None, color=colour, linewidth=2)


def label(axes: Axes, x: float, y: float, text: str, above: float, **style) -> None:
    """A text above a place, by so many points, or below it."""
    axes.annotate(text, (x, y), (0, above), textcoords="offset points", ha="center", linespacing=0.95,
                  va="bottom" if above > 0 else "top", path_effects=LEGIBLE, **{"fontsize": 7.5} | style)


def lines(axes: Axes, peers: dict[str, float], top: float) -> None:
    """A dashed line for each peer, with its name at the right end: not on another's."""
    names = sorted(peers, key=lambda name: peers[name])
    at = [peers[name] for name in names]
    for _, (low, high) in itertools.product(range(20), itertools.pairwise(range(len(at)))):
        push = max(0.085 * top - (at[high] - at[low]), 0) / 2
        at[low], at[high] = at[low] - push, at[high] + push
    for name, y in zip(names, at, strict=True):
        axes.axhline(peers[name], linestyle="--", linewidth=1, color=PEER_COLOUR, alpha=0.8, zorder=0.5)
        text = f"{PEERS.get(name, name.removeprefix('PyTorch '))} {number(peers[name])}"
        axes.annotate(text, (1, y), (3, 0), xycoords=axes.get_yaxis_transform(), fontsize=7.5, va="center",
                      textcoords="offset points", color=PEER_COLOUR, annotation_clip=False)
