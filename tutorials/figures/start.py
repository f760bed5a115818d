"""Lesson 00: attention's shapes, the machine, its memories, the ladder; and what a kernel prints."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile

import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from tutorials.figures import COLOURS, arrow, blank, box, canvas

# The colours of tutorials.figures with white mixed in, for what has text on it
LIGHT = {name: tuple(1 - 0.6 * (1 - part) for part in to_rgb(colour)) for name, colour in COLOURS.items()}


def printed(call, *arguments) -> list[str]:
    """The lines that kernels print by printf while call(*arguments) runs.

    C's output goes around Python's, and so around a notebook: here it is caught in a file.
    """
    c = ctypes.CDLL(None)
    sys.stdout.flush()
    c.fflush(None)
    with tempfile.TemporaryFile() as file:
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            call(*arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a GPU's printf appears now
            c.fflush(None)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        return file.read().decode().splitlines()


def shapes(N: int, d: int, P: torch.Tensor) -> Figure:
    """Attention of one head as matrices, to scale; P (N, N) in its true shades."""
    figure, (axes,) = canvas(10, 3)
    blank(axes, 61, 17.5)
    top, n, k = 4.5, 10, 3.2  # where the matrices start; N and d in squares of the drawing

    def matrix(x, width, height, name, colour, below=""):
        box(axes, x, top, width, height, name, LIGHT[colour], 11)
        axes.text(x + width / 2, top + height + 0.5, below, ha="center", va="top", fontsize=8)

    matrix(1, k, n, "Q", "Q", f"N x d\n{N} x {d}")
    matrix(6.2, n, k, "$K^T$", "K", f"d x N, {d} x {N}")
    axes.text(5.2, top + 1.6, "·", ha="center", va="center", fontsize=16)
    matrix(20, n, n, "S", "S", f"N x N\n{N} x {N}")
    axes.imshow(1 - P.numpy(), cmap="gray", extent=(34, 34 + n, top + n, top), vmin=0, vmax=1, aspect="equal")
    matrix(34, n, n, "", "grey", f"P, N x N\nN = {N}: dark is near 1")
    axes.patches[-1].set_facecolor("none")
    matrix(46.5, k, n, "V", "V", f"N x d\n{N} x {d}")
    matrix(55.5, k, n, "O", "O", f"N x d\n{N} x {d}")
    for x0, x1, text in ((16.6, 19.6, "scale ·"), (30.4, 33.6, "softmax"), (50.2, 55, "=")):
        arrow(axes, (x0, top + n / 2), (x1, top + n / 2))
        axes.text((x0 + x1) / 2, top + n / 2 - 0.7, text, ha="center", fontsize=8)
    axes.text(45.3, top + n / 2, "·", ha="center", va="center", fontsize=16)
    for x, text in ((9, "1. scores: every query\nwith every key"),
                    (32, "2. each row becomes weights:\npositive, sum 1"),
                    (51.5, "3. weighted mean\nof the values")):
        axes.text(x, 1.6, text, ha="center", va="center", fontsize=9)
    return figure


def machine() -> Figure:
    """A launch of <<<6, 128>>> as programs see it, and where its parts run."""
    figure, (axes,) = canvas(10.5, 4.1)
    blank(axes, 66, 25)
    axes.text(6, 1.3, "the grid: 6 blocks", ha="center", fontsize=10)
    for block in range(6):
        x, y = 1 + block % 2 * 5.3, 3 + block // 2 * 5.3
        box(axes, x, y, 4.7, 4.7, f"block\n{block}", LIGHT["Q"] if block == 3 else "#ffffff", 8)
    axes.text(28.5, 1.3, "a block: 128 threads, in 4 warps of 32 lanes", ha="center", fontsize=10)
    for warp in range(4):
        y = 4 + 3.6 * warp
        axes.text(15.4, y + 1, f"warp {warp}", fontsize=8, va="center")
        for lane in range(32):
            box(axes, 19.2 + 0.73 * lane, y, 0.73, 2, "", LIGHT["Q"])
        axes.text(19.2, y + 2.7, f"thread {32 * warp}", fontsize=7, va="center")
        axes.text(19.2 + 0.73 * 32, y + 2.7, f"thread {32 * warp + 31}", fontsize=7, va="center", ha="right")
    for y_from, y_to in ((8.3, 4), (13, 17)):
        axes.plot((11.2, 15), (y_from, y_to), color="#888888", lw=0.8, ls="--")
    axes.text(55.5, 1.3, "the GPU: multiprocessors (SMs)", ha="center", fontsize=10)
    for sm in range(4):
        x, y = 46 + sm % 2 * 10, 3 + sm // 2 * 8.2
        box(axes, x, y, 9.4, 7.6, "", "#f7f7f7")
        axes.text(x + 0.4, y + 1, f"SM {sm}", fontsize=8, va="center")
        here = [block for block in range(6) if block % 4 == sm]
        for place, block in enumerate(here):
            box(axes, x + 0.5 + place * 4.3, y + 2, 4, 2.4, f"block {block}",
                LIGHT["Q"] if block == 3 else "#ffffff", 7)
        box(axes, x + 0.5, y + 4.8, 8.4, 1.1, "registers", LIGHT["registers"], 7)
        box(axes, x + 0.5, y + 6.1, 8.4, 1.1, "shared memory and L1", LIGHT["shared"], 7)
    box(axes, 46, 19.6, 19.4, 1.8, "L2 cache, of all SMs", LIGHT["grey"], 8)
    box(axes, 46, 21.9, 19.4, 1.8, "HBM: the tensors", LIGHT["HBM"], 8)
    axes.text(22, 20.6, "A block runs on one SM from start to end. Several fit on an SM.\n"
              "The lanes of a warp execute one instruction together.\n"
              "Which block runs where, and when, is not known.", ha="center", va="center", fontsize=9)
    return figure


def memory(places: list[dict]) -> Figure:
    """Sizes and bandwidths on logarithmic scales. places: name, colour, MB, TB_per_s or None."""
    figure, panels = canvas(10, 2.6, 2, sharey=True)
    names = [place["name"] for place in places]
    for axes, key, unit in zip(panels, ("MB", "TB_per_s"), ("MB", "TB/s"), strict=True):
        for y, place in enumerate(places):
            value = place[key]
            if value is None:
                axes.text(2, y, "not in the data sheet", va="center", fontsize=8, color="#666666")
                continue
            axes.barh(y, value, color=COLOURS[place["colour"]], height=0.6)
            axes.text(value * 1.15, y, f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}",
                      va="center", fontsize=9)
        axes.set_xscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    panels[0].set(xlim=(10, 4e6))
    panels[1].set(xlim=(1, 4000))
    panels[0].set_yticks(range(len(names)), names, fontsize=9)
    panels[0].invert_yaxis()
    panels[0].set_title("size, on the whole GPU", fontsize=10)
    panels[1].set_title("bandwidth, of the whole GPU", fontsize=10)
    return figure


def ladder(groups: list[tuple[str, list[tuple[str, float]], float]]) -> Figure:
    """TFLOP/s of stages. groups: a title, (stage, TFLOP/s) each, and the ceiling, a matrix product's."""
    widths = [len(rows) for _, rows, _ in groups]
    figure, panels = canvas(10, 3.2, len(groups), width_ratios=widths)
    colours = COLOURS["Q"], COLOURS["K"]
    for axes, (title, rows, ceiling), colour in zip(panels, groups, colours, strict=False):
        axes.bar(range(len(rows)), [speed for _, speed in rows], color=colour, width=0.65)
        for x, (_, speed) in enumerate(rows):
            axes.text(x, speed, f"{speed:.3g}", ha="center", va="bottom", fontsize=9)
        axes.axhline(ceiling, color="#666666", ls="--", lw=1)
        axes.text(-0.4, ceiling, f"matrix product: {ceiling:.3g}", va="bottom", fontsize=8, color="#444444")
        axes.set_xticks(range(len(rows)), [name for name, _ in rows], fontsize=8, rotation=30, ha="right",
                        rotation_mode="anchor")
        axes.set_yscale("log")
        axes.set_ylim(min(speed for _, speed in rows) / 2, ceiling * 3)
        axes.set_ylabel("TFLOP/s, logarithmic", fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
