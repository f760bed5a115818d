"""Drawings of lesson 04: the loops swapped, causal tiles, heads that share keys, speed."""

from __future__ import annotations

from matplotlib.figure import Figure

from tutorials.figures import COLOURS, arrow, blank, box, canvas
from tutorials.figures.online_softmax import column_major, times

BLOCKS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d"]
WHOLE, MASKED, SKIPPED = COLOURS["S"], COLOURS["shared"], "#f4f4f4"


def two_orders(Tr: int = 4, Tc: int = 4) -> Figure:
    """The tiles of S of one head: FlashAttention-1, one block for all; FlashAttention-2, one for a row."""
    figure, (left, right) = canvas(11, 4.2, 2)
    figure.get_layout_engine().set(h_pad=0.15)   # room for the titles
    blank(left, Tc + 4.2, Tr + 2.2, "FlashAttention-1: one block, K/V outside, Q inside")
    column_major(left, Tr, Tc, COLOURS["S"])
    blank(right, Tc + 4.2, Tr + 2.2, f"FlashAttention-2: {Tr} blocks, Q outside, K/V inside")
    for i in range(Tr):
        right.text(1.05, 1.5 + i, f"i={i}", ha="right", va="center", fontsize=9, color=COLOURS["Q"])
        right.text(1.4 + Tc, 1.5 + i, f"block {i}:  O, m, l stay", ha="left", va="center", fontsize=9,
                   color=BLOCKS[i])
        left.text(1.4 + Tc, 1.5 + i, "O, m, l to HBM and back", ha="left", va="center", fontsize=9,
                  color="#777777")
        for j in range(Tc):
            box(right, 1.2 + j, 1 + i, 1, 1, str(j + 1), BLOCKS[i], size=10, alpha=0.6)
    for j in range(Tc):
        right.text(1.2 + j + 0.5, 0.75, f"j={j}", ha="center", fontsize=9, color=COLOURS["K"])
    middle = 1.2 + Tc / 2
    left.text(middle, Tr + 1.7, f"the numbers are time: {Tr * Tc} steps", ha="center", fontsize=9)
    right.text(middle, Tr + 1.7, f"{Tc} steps, if all blocks run at once", ha="center", fontsize=9)
    for axes in (left, right):
        axes.set_xlim(0, Tc + 4.6)
    return figure


def kind_of_tile(i: int, j: int, N_q: int, N_k: int, Br: int, Bc: int) -> str:
    """Of a causal call: "whole", "masked" (a part of it) or "skipped"."""
    diagonal = N_k - N_q
    if j * Bc >= min(N_k, (i + 1) * Br + diagonal):   # the stage's loop ends before
        return "skipped"
    return "masked" if (j + 1) * Bc - 1 > i * Br + diagonal else "whole"


def causal_tiles(cases: list[tuple[int, int, int, int]]) -> Figure:
    """Which tiles a causal call computes. cases: (N_q, N_k, Br, Bc)."""
    figure, panels = canvas(11, 3.6, len(cases))
    for axes, (N_q, N_k, Br, Bc) in zip(panels, cases, strict=True):
        colours = {"whole": WHOLE, "masked": MASKED, "skipped": SKIPPED}
        tiles = [(i, j, kind_of_tile(i, j, N_q, N_k, Br, Bc))
                 for i in range(-(-N_q // Br)) for j in range(-(-N_k // Bc))]
        done = sum(kind != "skipped" for *_, kind in tiles)
        blank(axes, N_k, N_q, f"N_q={N_q} N_k={N_k},\nBr={Br} Bc={Bc}: {done} of {len(tiles)} tiles")
        for i, j, kind in tiles:
            box(axes, j * Bc, i * Br, Bc, Br, "", colours[kind], alpha=0.7)
        diagonal = N_k - N_q
        first = max(0, -diagonal)   # the first row that sees a key
        axes.plot([first + diagonal + 0.5, N_k], [first + 0.5, N_q], color="black", linewidth=1.2)
    handles = [panels[0].add_patch(_patch(colour)) for colour in (WHOLE, MASKED, SKIPPED)]
    figure.legend(handles, ["computed: all keys seen", "computed: partly masked", "skipped: never loaded"],
                  loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _patch(colour: str):
    from matplotlib.patches import Rectangle
    return Rectangle((0, 0), 0, 0, facecolor=colour, edgecolor="#444444", alpha=0.7)


def heads(cases: list[tuple[int, int]]) -> Figure:
    """Which query head reads which head of K and V. cases: (H, H_kv)."""
    figure, panels = canvas(11, 2.4, len(cases))
    for axes, (H, H_kv) in zip(panels, cases, strict=True):
        kind = "multi-head" if H == H_kv else "multi-query" if H_kv == 1 else "grouped-query"
        blank(axes, 1.25 * H, 4.2, f"{kind}: H={H}, H_kv={H_kv}")
        width = 1.25 * H / H_kv
        for h in range(H):
            h_kv = h // (H // H_kv)
            box(axes, 1.25 * h + 0.1, 0.2, 1.05, 0.9, f"Q {h}", BLOCKS[h_kv], alpha=0.5, size=8)
            arrow(axes, (1.25 * h + 0.62, 1.15), (width * (h_kv + 0.5), 2.85), colour=BLOCKS[h_kv])
        for h_kv in range(H_kv):
            box(axes, width * (h_kv + 0.5) - 0.53, 2.9, 1.06, 0.9, f"K,V {h_kv}", BLOCKS[h_kv], size=7,
                alpha=0.8)
    return figure


def speed(data: dict, names: tuple[str, ...]) -> Figure:
    """Times and TFLOP/s of stages against N."""
    figure, (left, right) = canvas(11, 3.6, 2)
    times(left, data, names)
    times(right, data, names, "tflops", "TFLOP/s")
    right.get_legend().remove()
    return figure
