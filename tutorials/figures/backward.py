"""What lesson 05 draws: the backward graph, who sums what, scratch memory and times over N."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flash_ladder.simulator.tables import format_bytes

from . import COLOURS, arrow, blank, box, canvas

STAGES = {"naive": COLOURS["grey"], "recompute": COLOURS["Q"], "deterministic": COLOURS["K"],
          "fp32_tuned": COLOURS["O"], "mma": COLOURS["Q"], "cp_async": COLOURS["O"]}
PEERS = {"PyTorch efficient (3xTF32)": "#444444", "PyTorch math": COLOURS["HBM"], "PyTorch flash": "#444444"}


def graph() -> Figure:
    """Forward from left to right, backward from right to left; where each of the five products stands."""
    figure, (axes,) = canvas(11, 4.5)
    blank(axes, 22, 8.9)
    forward = {"Q": (1, 0.4), "K": (1, 2.2), "S": (6, 1.3), "P": (11, 1.3), "V": (11, 3.0), "O": (17, 1.3)}
    backward = {"dQ": (1, 5.0), "dK": (1, 6.8), "dS": (6, 5.9), "dP": (11, 5.9), "dV": (11, 7.5),
                "dO": (17, 5.9)}
    for name, (x, y) in (forward | backward).items():
        box(axes, x, y, 1.8, 1.1, name, COLOURS[name.removeprefix("d")], size=11,
            alpha=0.9 if name in forward else 0.5)
    axes.text(20.6, 1.85, "forward", ha="center", va="center", fontsize=11, weight="bold")
    axes.text(20.6, 6.45, "backward", ha="center", va="center", fontsize=11, weight="bold")

    def step(start: tuple, end: tuple, text: str = "", at: tuple | None = None) -> None:
        arrow(axes, start, end)
        if text:
            axes.text(*at, text, fontsize=9, ha="center", va="center",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})

    step((2.8, 0.95), (6, 1.7), "(5)  S = scale · Q Kᵀ", (4.5, 0.55))
    step((2.8, 2.75), (6, 2.0))
    step((7.8, 1.85), (11, 1.85), "softmax", (9.4, 1.45))
    step((12.8, 1.85), (17, 1.85), "O = P V", (14.9, 1.45))
    step((12.8, 3.55), (17, 2.2))
    step((17, 6.45), (12.8, 6.45), "(2)  dP = dO Vᵀ", (14.9, 6.05))
    step((17, 6.8), (12.8, 8.05), "(1)  dV = Pᵀ dO", (15.6, 7.75))
    step((11, 6.45), (7.8, 6.45), "P · (dP − D)", (9.4, 6.05))
    step((6, 6.3), (2.8, 5.55), "(3)  dQ = scale · dS K", (4.9, 5.3))
    step((6, 6.6), (2.8, 7.35), "(4)  dK = scale · dSᵀ Q", (5.0, 7.6))
    axes.text(11, 4.75, "The backward pass needs Q, K, V and P again, and dO.   (5) makes S once more.",
              fontsize=9, ha="center", va="center", style="italic")
    return figure


def loops(tiles: int = 5) -> Figure:
    """Which block visits which tile of S, and what it sums there."""
    figure, panels = canvas(11, 4.0, columns=3)
    titles = ("recompute: a column of tiles is a block", "deterministic, dKV_kernel: the same, no dQ",
              "deterministic, dQ_kernel: a row is a block")
    for number, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        blank(axes, tiles + 3.4, tiles + 3.0, title)
        by_row = number == 2
        for i in range(tiles):
            for j in range(tiles):
                mine = i == 2 if by_row else j == 1
                others = number == 0 and i == 2
                colour = COLOURS["S"] if mine else COLOURS["O"] if others else "#ffffff"
                box(axes, 2.2 + j, 1.2 + i, 1, 1, "", colour, alpha=0.55 if mine else 0.25)
        axes.text(2.2 + tiles / 2, 0.7, "tiles of K and V:  j", ha="center", va="center", fontsize=9)
        axes.text(1.75, 1.2 + tiles / 2, "tiles of Q and dO:  i", ha="center", va="center", fontsize=9,
                  rotation=90)
        if by_row:
            _arrow(axes, (2.3, 3.7), (2.1 + tiles, 3.7), "#222222")
            axes.text(2.3 + tiles, 3.7, "$dQ_i$", fontsize=10, va="center")
        else:
            _arrow(axes, (3.7, 1.3), (3.7, 1.1 + tiles), "#222222")
            axes.text(3.7, 1.7 + tiles, "$dK_j$, $dV_j$", ha="center", va="center", fontsize=10)
        axes.text(2.2 + tiles / 2, 2.4 + tiles, "sums of a block, in registers" if number else
                  "black: sums of a block, in registers", ha="center", va="center", fontsize=9)
        if number == 0:
            for j in range(tiles):
                _arrow(axes, (2.7 + j, 3.7), (2.3 + tiles, 3.7), COLOURS["O"])
            axes.text(2.4 + tiles, 3.7, "$dQ_i$", fontsize=10, va="center", color=COLOURS["O"])
            axes.text(2.2 + tiles / 2, 2.9 + tiles, "red: atomicAdd to HBM by all blocks", ha="center",
                      va="center", fontsize=9, color=COLOURS["O"])
    return figure


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.6})


def over_N(rows: list[dict], names: list[str], title: str) -> Figure:
    """Time and scratch memory of these over N, from a bench's results."""
    figure, (times, memory) = canvas(10.5, 3.6, columns=2)
    for name in names:
        mine = sorted((r["N"], r["median_ms"], r["scratch_bytes"]) for r in rows if r["label"] == name)
        colour = (STAGES | PEERS)[name]
        style = {"color": colour, "marker": "o", "markersize": 4, "ls": "-" if name in STAGES else "--"}
        times.plot([n for n, _, _ in mine], [t for _, t, _ in mine], label=name, **style)
        memory.plot([n for n, _, _ in mine], [b for _, _, b in mine], label=name, **style)
    lengths = sorted({r["N"] for r in rows})
    for axes, what in ((times, "time (ms)"), (memory, "scratch memory")):
        axes.set(xscale="log", yscale="log", title=what, xlabel="N")
        axes.set_xticks(lengths, lengths)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    ticks = [2 ** n for n in range(18, 35, 4)]
    memory.set_yticks(ticks)
    memory.yaxis.set_major_formatter(FuncFormatter(lambda x, _: format_bytes(x)))
    times.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    figure.suptitle(title, fontsize=10)
    handles, labels = times.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names), fontsize=9, frameon=False)
    return figure
