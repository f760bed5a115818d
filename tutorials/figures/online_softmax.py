"""Drawings of lesson 03: the online softmax, the loops of FlashAttention-1, its traffic and time."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullLocator

import flash
from flash_ladder.bench import report
from tutorials.figures import COLOURS, arrow, blank, box, canvas

WHITE, UNSEEN = "#ffffff", "#eeeeee"
STAGES = {"naive": "#bab0ac", "tiled": "#f58518", "online_softmax": "#4c78a8", "flash2": "#e45756"}


def states(S: torch.Tensor, tile: int, history: list[tuple]) -> Figure:
    """What is known of each row after each tile of keys.

    Args:
        S: scores, N x N.
        tile: keys in a tile.
        history: (m (N), l (N), O (N, d)) after 0, 1, 2, ... tiles.
    """
    N, d = S.shape[0], history[0][2].shape[1]
    figure, panels = canvas(11, 2.7, len(history))
    for seen, (axes, (m, l, O)) in enumerate(zip(panels, history, strict=True)):
        title = f"after tile {seen - 1}" if seen else "at the start"
        blank(axes, N + d + 3.6, N + 1.1, title)
        for row in range(N):
            for col in range(N):
                at = col // tile
                colour = COLOURS["S"] if at == seen - 1 else WHITE if at < seen else UNSEEN
                past = at < seen - 1
                box(axes, col, row + 1, 1, 1, "" if past or at >= seen else f"{S[row, col]:g}", colour,
                    alpha=0.9)
                if past:
                    axes.text(col + 0.5, row + 1.5, "gone", ha="center", va="center", fontsize=7,
                              color="#999999")
            known = [(m, N + 0.4, COLOURS["shared"]), (l, N + 1.8, COLOURS["registers"])]
            for x, left, colour in known:
                box(axes, left, row + 1, 1.2, 1, _number(x[row]), colour, size=8, alpha=0.85)
            for k in range(d):
                box(axes, N + 3.2 + k, row + 1, 1, 1, f"{O[row, k]:.2f}", COLOURS["O"], size=8, alpha=0.7)
        for x, name in ((N / 2, "S"), (N + 1, "m"), (N + 2.4, "l"), (N + 3.2 + d / 2, "O")):
            axes.text(x, 0.6, name, ha="center", fontsize=10, style="italic")
        axes.plot([tile, tile], [1, N + 1], color="black", linewidth=2)
        axes.set_xlim(-0.1, N + d + 3.3)
    return figure


def _number(x: torch.Tensor) -> str:
    return "−∞" if x == -torch.inf else f"{x:.2f}" if x % 1 else f"{x:g}"


def loops(Tr: int = 4, Tc: int = 4) -> Figure:
    """The order in which FlashAttention-1 visits the tiles of S, and what crosses HBM for one of them."""
    figure, (left, right) = canvas(11, 4.0, 2, width_ratios=(1, 1.5))
    blank(left, Tc + 1.6, Tr + 1.5, "one block walks through all tiles of S")
    column_major(left, Tr, Tc, COLOURS["S"])

    blank(right, 12, 6.6, "what one visit, of tile (i, j), moves")
    box(right, 0, 0.9, 3.2, 5.4, "", "#f3ece8")
    box(right, 7.6, 0.9, 4.2, 5.4, "", "#fbf5dd")
    right.text(1.6, 0.6, "HBM", ha="center", fontsize=10, color=COLOURS["HBM"])
    right.text(9.7, 0.6, "the chip", ha="center", fontsize=10, color="#a48c14")
    for y, name, size, on_chip in ((1.2, "K, V", "K", "K_j, V_j  in shared memory"),
                                   (2.6, "Q", "Q", "Q_i  in shared memory"),
                                   (4.2, "O, m, l", "O", "O_i, m_i, l_i  in registers")):
        box(right, 0.4, y, 2.4, 0.9, name, COLOURS[size], alpha=0.75)
        box(right, 7.9, y, 3.6, 0.9, on_chip, COLOURS[size], size=8, alpha=0.45)
    box(right, 7.9, 5.25, 3.6, 0.9, "S_ij, P_ij  live and die here", COLOURS["S"], size=8, alpha=0.6)
    for y, text, colour in ((1.65, "line 6: only when j changes", "#999999"),
                            (3.05, "line 8: every visit", "black"),
                            (4.45, "line 8: every visit", "black")):
        arrow(right, (2.9, y), (7.8, y), colour=colour)
        right.text(5.35, y - 0.12, text, ha="center", va="bottom", fontsize=8, color=colour)
    arrow(right, (7.8, 4.9), (2.9, 4.9), colour=COLOURS["O"])
    right.text(5.35, 5.0, "lines 12, 13: every visit", ha="center", va="top", fontsize=8, color=COLOURS["O"])
    return figure


def column_major(axes: Axes, Tr: int, Tc: int, colour: str) -> None:
    """Tiles of S, numbered as FlashAttention-1 visits them."""
    for j in range(Tc):
        axes.text(1.2 + j + 0.5, 0.75, f"j={j}", ha="center", fontsize=9, color=COLOURS["K"])
        for i in range(Tr):
            box(axes, 1.2 + j, 1 + i, 1, 1, str(j * Tr + i + 1), colour, size=10, alpha=0.35 + 0.15 * (j % 2))
    for i in range(Tr):
        axes.text(1.05, 1.5 + i, f"i={i}", ha="right", va="center", fontsize=9, color=COLOURS["Q"])


def traffic(data: dict, names: tuple[str, ...]) -> Figure:
    """Counted HBM bytes of stages against N, beside the papers' formulas (Theorem 2 of FlashAttention-1)."""
    shape, Ns = data["shape"], report.lengths(data)
    M = on_chip_numbers(data)
    figure, (axes,) = canvas(8.5, 4.2)
    for name in names:
        rows = [row for row in data["results"] if row["name"] == name]
        axes.plot([row["N"] for row in rows], [report.traffic(row) for row in rows], "o-", label=name,
                  color=STAGES[name])
    for label, style, room in (("standard: N d + N²", "--", None), ("FlashAttention: N² d² / M", ":", M)):
        axes.plot(Ns, [report.paper_bytes(shape, N, room) for N in Ns], style, color="black",
                  label=label)
    _log_axes(axes, Ns)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: report.size(y)))
    axes.yaxis.set_major_locator(LogLocator(4))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("HBM bytes, read and written", fontsize=9)
    axes.set_title(f"counted in the simulator, no cache:\n{report.title(data)}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure


def on_chip_numbers(data: dict) -> int:
    """M: the numbers of shared memory that a block of online_softmax has."""
    row = next(row for row in data["results"] if row["name"] == "online_softmax")
    return row["shared_bytes"] // flash.DTYPES[data["shape"]["dtype"]].itemsize


def bytes_and_time(kernels: list[dict], data: dict, names: tuple[str, ...]) -> Figure:
    """Left: what the profiler saw cross HBM, by stage. Right: times against N."""
    figure, (left, right) = canvas(11, 3.6, 2)
    for y, name in enumerate(names):
        total = sum(kernel["dram__bytes.sum"]["value"] for kernel in kernels if kernel["stage"] == name)
        left.barh(y, total, color=STAGES[name], height=0.6)
        left.text(total, y, " " + report.size(total), va="center", fontsize=9)
        left.set_xlim(0, max(left.get_xlim()[1], 1.25 * total))
    left.set_yticks(range(len(names)), names, fontsize=9)
    left.invert_yaxis()
    left.xaxis.set_major_locator(MultipleLocator(200 * 2**20))
    left.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 2**20:.0f} MiB"))
    left.tick_params(axis="x", labelsize=8)
    left.spines[["top", "right"]].set_visible(False)
    left.set_title("bytes that crossed HBM, N=1024", fontsize=10)
    times(right, data, names)
    return figure


def times(axes: Axes, data: dict, names: tuple[str, ...], value: str = "median_ms",
          label: str = "time (ms)") -> None:
    """Lines of stages against N."""
    for name in names:
        rows = [row for row in data["results"] if row["name"] == name and row["status"] == "ok"]
        axes.plot([row["N"] for row in rows], [row[value] for row in rows], "o-", label=name,
                  color=STAGES[name])
    _log_axes(axes, report.lengths(data))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_ylabel(label, fontsize=9)
    axes.set_title(f"{label} against N", fontsize=10)
    axes.legend(fontsize=9, frameon=False)


def _log_axes(axes: Axes, Ns: list[int]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(Ns, map(str, Ns))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=9)
    axes.set_xlabel("N", fontsize=9)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
