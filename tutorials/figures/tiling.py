"""Lesson 02: a tile of S and what it needs, who holds what in a tile, banks, and where traffic comes from."""

from __future__ import annotations

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tutorials.figures import COLOURS, arrow, blank, box, canvas
from tutorials.figures.start import LIGHT

WARPS = colormaps["tab10"]


def tile() -> Figure:
    """A block's tile S_ij: it needs Q_i and K_j, which it takes to shared memory once."""
    figure, (axes,) = canvas(10.5, 4.1)
    blank(axes, 62, 24)
    axes.text(14, 1, "S of one head: Tr x Tc tiles, a block for each", ha="center", fontsize=9)
    left, top, size = 8, 6.5, 16
    box(axes, left, top, size, size, "", "#ffffff")
    for i in range(1, 4):
        axes.plot((left, left + size), (top + 4 * i,) * 2, color="#cccccc", lw=0.8)
        axes.plot((left + 4 * i,) * 2, (top, top + size), color="#cccccc", lw=0.8)
    box(axes, 3.5, top, 2.5, size, "", "#ffffff")
    box(axes, 3.5, top + 4, 2.5, 4, "$Q_i$", LIGHT["Q"], 10)
    axes.text(4.7, top - 0.9, "Q", ha="center", fontsize=9)
    box(axes, left, 2.2, size, 2.5, "", "#ffffff")
    box(axes, left + 8, 2.2, 4, 2.5, "$K_j^T$", LIGHT["K"], 10)
    axes.text(left + size + 0.5, 3.8, "$K^T$", fontsize=9)
    box(axes, left + 8, top + 4, 4, 4, "$S_{ij}$", LIGHT["S"], 10)
    axes.text(2.9, top + 6, "Br", fontsize=9, ha="right", va="center")
    axes.text(left + 10, top - 0.8, "Bc", fontsize=9, ha="center")
    arrow(axes, (left + size + 2, 12), (31, 12))
    axes.text((left + size + 33) / 2, 10.6, "the block\nof $S_{ij}$", ha="center", fontsize=8)
    box(axes, 32, 2, 29, 20.8, "", "#fbfbfb")
    axes.text(46.5, 3.3, "on one multiprocessor", ha="center", fontsize=9)
    box(axes, 33.5, 4.6, 26, 7, "", LIGHT["shared"])
    axes.text(34.2, 5.8, "shared memory", fontsize=8, va="center")
    box(axes, 37, 6.8, 7, 4, "$Q_i$\nBr x d", "#ffffff", 9)
    box(axes, 48.5, 6.8, 7, 4, "$K_j$\nBc x d", "#ffffff", 9)
    for warp in range(8):
        x = 34 + 3.2 * warp
        box(axes, x, 17, 2.8, 3, f"warp\n{warp}", LIGHT["registers"], 7)
        for place in (40.5, 52):
            axes.plot((place, x + 1.4), (11.8, 16.9), color="#aaaaaa", lw=0.6)
    axes.text(46.5, 21.3, "$S_{ij}$ in registers: each number of a tile is read by many threads",
              ha="center", fontsize=8)
    axes.text(46.5, 13.9, "read from shared memory, again and again", ha="center", va="center", fontsize=8,
              bbox={"facecolor": "#fbfbfb", "edgecolor": "none", "pad": 1})
    return figure


def owners(Br: int = 16, Bc: int = 64) -> Figure:
    """Which warp and lane has which number of a tile of S."""
    figure, (axes,) = canvas(10.5, 3.2)
    blank(axes, Bc + 8, Br + 5)
    per_warp = Br // 8
    for row in range(Br):
        for col in range(Bc):
            shade = WARPS(row // per_warp)
            mine = col % 32 == 3 and row // per_warp == 2
            axes.add_patch(Rectangle((col + 4, row + 2), 1, 1, facecolor=shade, alpha=1 if mine else 0.25,
                                     edgecolor="black" if mine else "white", linewidth=1.2 if mine else 0.5,
                                     zorder=2 if mine else 1))
    for warp in range(8):
        axes.text(3.6, 2 + per_warp * (warp + 0.5), f"warp {warp}", ha="right", va="center", fontsize=8)
    for col in (0, 3, 32, 35, 63):
        axes.text(col + 4.5, 1.6, f"t{col % 32}", ha="center", fontsize=8)
    axes.text(4 + Bc / 2, Br + 3.4,
              f"columns of $S_{{ij}}$, Bc = {Bc}; rows, here Br = {Br}: {per_warp} a warp. "
              f"Framed: the numbers of lane 3 of warp 2, rows x cols = {per_warp} x {Bc // 32}",
              ha="center", va="center", fontsize=9)
    return figure


def banks(pitches: tuple[int, ...], k: int = 0) -> Figure:
    """In which bank each lane's number lies, if lane t reads element k of row t."""
    figure, panels = canvas(10.5, 4.4, len(pitches))
    for axes, pitch in zip(panels, pitches, strict=True):
        hits = [(lane * pitch + k) % 32 for lane in range(32)]
        for bank in range(32):
            axes.axvspan(bank - 0.5, bank + 0.5, color="#f4f4f4" if bank % 2 else "#ffffff", zorder=0)
        most = max(hits.count(bank) for bank in hits)
        axes.scatter(hits, range(32), s=26, marker="s", color=COLOURS["O"] if most > 1 else COLOURS["V"])
        axes.set(xlim=(-0.5, 31.5), ylim=(31.5, -0.5), aspect="equal")
        axes.set_xticks(range(0, 32, 4))
        axes.set_yticks(range(0, 32, 4))
        axes.set_xlabel("bank", fontsize=9)
        axes.set_ylabel("lane", fontsize=9)
        axes.tick_params(labelsize=8)
        turns = f"{most} wavefront{'s' * (most > 1)}"
        axes.set_title(f"rows {pitch} floats apart: {turns}", fontsize=9)
    return figure


def parts(rows: list[tuple[str, float, float]], title: str) -> Figure:
    """HBM traffic with other tiles. rows: label, MiB of Q, K, V and O, MiB of S and P."""
    figure, (axes,) = canvas(9, 0.9 + 0.36 * len(rows))
    for y, (_, tensors, scores) in enumerate(rows):
        axes.barh(y, scores, color=COLOURS["S"], height=0.65, label="S and P" if y == 0 else None)
        axes.barh(y, tensors, left=scores, color=COLOURS["K"], height=0.65,
                  label="Q, K, V, O and L" if y == 0 else None)
        axes.text(scores + tensors, y, f" {scores + tensors:.2f} MiB", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * max(tensors + scores for _, tensors, scores in rows))
    axes.set_title(title, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def kernels(times: dict[str, dict[str, float]], title: str) -> Figure:
    """Where the time goes. times: by stage and kernel, in ms."""
    figure, panels = canvas(9.5, 2.7, len(times))
    colours = {"scores_kernel": COLOURS["K"], "softmax_kernel": COLOURS["S"], "output_kernel": COLOURS["V"]}
    for axes, (stage, found) in zip(panels, times.items(), strict=True):
        for y, (name, ms) in enumerate(found.items()):
            axes.barh(y, ms, color=colours[name], height=0.6)
            axes.text(ms, y, f" {ms:.3g} ms", va="center", fontsize=9)
        axes.set_yticks(range(len(found)), [name.removesuffix("_kernel") for name in found], fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(found.values()))
        axes.set_title(f"{stage}: {sum(found.values()):.3g} ms", fontsize=10)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    return figure
