"""What lesson 06 draws: register tiles, banks, the lanes of a warp, occupancy, and throughput over N."""

from __future__ import annotations

import math

from matplotlib import colormaps
from matplotlib.figure import Figure

from . import COLOURS, blank, box, canvas

BANKS = colormaps["tab10"]


def register_tiles(points: list[tuple[str, int, int, int]]) -> Figure:
    """One step of the sum over k as an outer product; and load instructions for a multiplication.

    points: (name, rows, columns, numbers in a load).
    """
    figure, (left, right) = canvas(9.5, 3.4, columns=2, width_ratios=[1, 1.35])
    blank(left, 11, 10.6, "one k: R + C numbers for R · C multiply-adds")
    for x in range(8):
        box(left, 2.5 + x, 0.9, 1, 1, "", COLOURS["K"], alpha=0.8)
        box(left, 0.7, 2.4 + x, 1, 1, "", COLOURS["Q"], alpha=0.8)
        for y in range(8):
            box(left, 2.5 + x, 2.4 + y, 1, 1, "", COLOURS["S"], alpha=0.35)
    for start in (0, 4):  # what one load brings
        box(left, 2.5 + start, 0.9, 4, 1, "float4", "none", size=8)
        box(left, 0.7, 2.4 + start, 1, 4, "", "none")
        left.text(1.2, 4.4 + start, "float4", rotation=90, ha="center", va="center", fontsize=8)
    left.text(6.5, 0.45, "a row of Kᵀ: 8 keys at the same k", ha="center", va="center", fontsize=9)
    left.text(0.25, 6.4, "a column of Q: 8 rows", rotation=90, ha="center", va="center", fontsize=9)
    left.text(6.5, 6.4, "8 x 8 sums in registers", ha="center", va="center", fontsize=10)

    sizes = range(1, 17)
    for numbers, style in ((1, "-"), (4, "--")):
        right.plot(sizes, [2 * n / numbers / n**2 for n in sizes], style, color="#444444", lw=1.2,
                   label=f"square tiles, {numbers} number{'s' * (numbers > 1)} a load")
    for name, rows, columns, numbers in points:
        x, y = math.sqrt(rows * columns), (rows + columns) / numbers / (rows * columns)
        right.plot(x, y, "o", color=COLOURS["O"] if numbers == 4 else COLOURS["Q"], markersize=8)
        right.annotate(f"{name}: {rows} x {columns}", (x, y), xytext=(7, 6), fontsize=9,
                       textcoords="offset points")
    right.set(yscale="log", xlabel="side of the tile, √(R · C)", ylabel="load instructions a multiply-add",
              xlim=(0.5, 16.5))
    ticks = [2, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    right.set_yticks(ticks, [f"{t:g}" for t in ticks])
    right.minorticks_off()
    right.grid(alpha=0.3)
    right.legend(fontsize=9, frameon=False)
    right.spines[["top", "right"]].set_visible(False)
    return figure


def banks_by_hand(size: int = 8) -> Figure:
    """A tile of 8 x 8 in a shared memory of 8 banks: rows 8 apart, 9 apart, and with columns swapped."""
    figure, panels = canvas(11, 3.9, columns=3)
    layouts = {"rows 8 apart: column 2 is all in one bank": lambda r, c: 8 * r + c,
               "rows 9 apart: column 2 is in all banks": lambda r, c: 9 * r + c,
               "rows 8 apart, column c at c ^ r: the same": lambda r, c: 8 * r + (c ^ r)}
    for axes, (title, address) in zip(panels, layouts.items(), strict=True):
        pitch = 9 if "9" in title else 8
        blank(axes, 9.4, 9.3, title)
        element = {address(r, c): (r, c) for r in range(size) for c in range(size)}
        for at in range(pitch * size):
            y, x = divmod(at, pitch)
            bank = at % size
            known = element.get(at)
            chosen = known is not None and known[1] == 2
            text = f"{known[0]},{known[1]}" if known else ""
            box(axes, 0.2 + x, 0.4 + y, 1, 1, text, BANKS(bank) if chosen else "#ffffff", size=8,
                alpha=0.9 if chosen else 1, edge="#999999")
        banks = sorted(address(r, 2) % size for r in range(size))
        most = max(banks.count(b) for b in banks)
        text = f"a read of column 2: {most} wavefront{'s' * (most > 1)}"
        axes.text(4.7, 8.9, text, ha="center", va="center", fontsize=9)
    return figure


def lanes() -> Figure:
    """Two ways to lay the 32 lanes of a warp out as 4 x 8."""
    figure, panels = canvas(11, 3.4, columns=2)
    ways = {"lane / 8 and lane % 8": lambda lane: (lane // 8, lane % 8),
            "lane_row4() and lane_col8()":
                lambda lane: (lane >> 1 & 1 | lane >> 3 & 2, lane & 1 | lane >> 1 & 6)}
    for axes, (title, place) in zip(panels, ways.items(), strict=True):
        blank(axes, 10.2, 5.6, title)
        for lane in range(32):
            y, x = place(lane)
            group = lane // 8
            box(axes, 1.6 + x, 1.0 + y, 1, 1, str(lane), BANKS(group), alpha=0.55)
        for x in range(8):
            axes.text(2.1 + x, 0.6, f"{x}", ha="center", va="center", fontsize=8)
        for y in range(4):
            axes.text(1.3, 1.5 + y, f"{y}", ha="center", va="center", fontsize=8)
        axes.text(5.6, 0.15, "column: which float4 of K", ha="center", va="center", fontsize=9)
        axes.text(0.6, 3.0, "row: which\nfloat4 of Q", ha="center", va="center", fontsize=9, rotation=90)
        axes.text(5.6, 5.3, "one colour: lanes that share a wavefront, if the read takes four", ha="center",
                  va="center", fontsize=9)
    return figure


def transposed() -> Figure:
    """What a float4 holds of Q, as it lies in HBM and transposed."""
    figure, panels = canvas(8.5, 2.6, columns=2)
    for axes, title, tall in zip(panels, ("Q as in HBM: a float4 is 4 numbers of one row",
                                          "Q transposed: a float4 is 4 rows at the same k"), (False, True),
                                 strict=True):
        blank(axes, 11, 6.8, title)
        for y in range(4):
            for x in range(8):
                row, k = (x, y) if tall else (y, x)
                chosen = x < 4 and y == 0
                box(axes, 2 + x, 1.6 + y, 1, 1, f"{row},{k}", COLOURS["Q"] if chosen else "#ffffff", size=8,
                    alpha=0.7 if chosen else 1)
        axes.text(6, 1.1, "row of Q" if tall else "k", ha="center", va="center", fontsize=9)
        axes.text(1.4, 3.6, "k" if tall else "row of Q", ha="center", va="center", fontsize=9, rotation=90)
        text = "one step of the sum for 4 rows" if tall else "four steps of the sum for 1 row"
        axes.text(6, 6.2, text, ha="center", va="center", fontsize=9)
    return figure


def occupancy(kernels: list[dict]) -> Figure:
    """Registers against resident warps, and resident warps against busy multipliers.

    kernels: name, registers (of a thread), warps and fma (percent).
    """
    figure, (left, right) = canvas(9.5, 3.0, columns=2)
    registers = range(24, 256)
    fits = [min(64, 65536 // (32 * 8 * math.ceil(r / 8))) / 64 * 100 for r in registers]
    left.plot(registers, fits, color="#444444", lw=1.2)
    left.text(52, 66, "65,536 registers allow this", fontsize=9)
    rungs = dict.fromkeys(("register_tiles", "vectorized", "conflict_free", "prefetch"), COLOURS["K"])
    colours = {"flash2": COLOURS["Q"], **rungs, "fp32_tuned": COLOURS["O"]}
    texts = {"register_tiles": "register_tiles to prefetch"}, {"conflict_free": "conflict_free, prefetch"}
    near = {"flash2": (6, 6), "fp32_tuned": (6, 6), "naive, scores": (6, 6), "register_tiles": (4, -12)}, {
        "flash2": (6, 6), "fp32_tuned": (7, -8), "naive, scores": (6, 6), "register_tiles": (8, -16),
        "vectorized": (7, -3), "conflict_free": (6, 6)}              # where a text is, in points
    for kernel in kernels:
        name, colour = kernel["name"], colours.get(kernel["name"], COLOURS["grey"])
        for panel, (axes, x, y) in enumerate(((left, "registers", "warps"), (right, "warps", "fma"))):
            axes.plot(kernel[x], kernel[y], "o", color=colour, markersize=7)
            if name in near[panel]:
                at_the_right = kernel[x] > (200 if axes is left else 90)
                axes.annotate(texts[panel].get(name, name), (kernel[x], kernel[y]), xytext=near[panel][name],
                              fontsize=9, textcoords="offset points", ha="right" if at_the_right else "left")
    left.set(xlabel="registers a thread", ylabel="resident warps, % of 64", ylim=(0, 108))
    right.set(xlabel="resident warps, % of 64", ylabel="multipliers busy, %", xlim=(0, 105), ylim=(0, 75))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
