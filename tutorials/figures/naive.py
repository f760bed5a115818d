"""Lesson 01: three kernels through HBM, which lane loads what, the roofline, growth with N."""

from __future__ import annotations

from matplotlib.figure import Figure

from tutorials.figures import COLOURS, arrow, blank, box, canvas
from tutorials.figures.start import LIGHT


def three_kernels() -> Figure:
    """What each kernel reads from HBM and writes to it."""
    figure, (axes,) = canvas(10, 3.5)
    blank(axes, 60, 20)
    box(axes, 0.5, 1, 59, 7.6, "", "#f6efe9")
    axes.text(1.2, 2.2, "HBM", fontsize=10, color=COLOURS["HBM"], weight="bold")
    places = {"Q": (4, 2), "K": (10, 2), "S": (21, 6), "P": (34, 6), "V": (44, 2), "O": (54, 2)}
    for name, (x, width) in places.items():
        height = 6 if name in "SP" else 5
        box(axes, x, 8.2 - height, width, height, name, LIGHT[name], 11)
    for name, what in (("S", "N x N"), ("P", "N x N, over S")):
        axes.text(places[name][0] + 3, 1.7, what, ha="center", fontsize=8)
    kernels = {"scores_kernel\n$S = scale \\cdot QK^T$": (7, "#ffffff"),
               "softmax_kernel\n$P = softmax(S)$": (25, "#ffffff"),
               "output_kernel\n$O = PV$": (43.5, "#ffffff")}
    for text, (x, colour) in kernels.items():
        box(axes, x, 14.5, 11, 4, text, colour, 9)
    for start, end, text in (((5, 8.4), (9.5, 14.3), "read"), ((11, 8.4), (12, 14.3), "read"),
                             ((16.5, 14.3), (22.5, 8.4), "write once"),
                             ((25.5, 8.4), (28.5, 14.3), "read 3 times"),
                             ((34, 14.3), (36, 8.4), "write once"), ((39, 8.4), (46, 14.3), "read"),
                             ((45, 8.4), (49, 14.3), "read"), ((53, 14.3), (55, 8.4), "write once")):
        arrow(axes, start, end)
        x, y = (start[0] + end[0]) / 2, 11.6
        axes.text(x, y, text, fontsize=8, ha="center", va="center",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    return figure


def roofline(points: list[tuple[str, float, float, float, float]], peak: float, bandwidth: float, title: str,
             ideal: dict[str, float]) -> Figure:
    """The most that a GPU can do at a FLOP/byte, and what stages do.

    Args:
        points: name; FLOP per byte that HBM moved, per byte that warps used, and per byte that they asked
            for, in whole sectors; TFLOP/s.
        peak, bandwidth: TFLOP/s and TB/s.
        ideal: FLOP per byte of algorithms, drawn as lines from the axis to the roof.
    """
    figure, (axes,) = canvas(9.5, 4.8)
    ridge, least, most = peak / bandwidth, 0.03, 2000
    axes.plot((least, ridge, most), (least * bandwidth, peak, peak), color="#333333", lw=2)
    axes.text(0.14, 0.14 * bandwidth * 1.7, f"{bandwidth} TB/s of HBM", rotation=34, fontsize=9, va="bottom")
    axes.text(most * 0.9, peak * 1.12, f"{peak:.1f} TFLOP/s: a matrix product", ha="right", fontsize=9)
    for name, x in ideal.items():
        axes.plot((x, x), (0.1, min(peak, x * bandwidth)), color="#999999", ls=":", lw=1.2)
        axes.text(x * 1.05, 0.125, name, rotation=90, fontsize=8, color="#666666", va="bottom")
    colours = ("#e45756", "#f58518", "#b279a2", "#4c78a8", "#54a24b")
    for (name, moved, used, asked, speed), colour in zip(points, colours, strict=False):
        axes.plot((asked, used, moved), (speed,) * 3, color=colour, lw=1)
        axes.plot(asked, speed, "s", mfc="white", mec=colour, ms=9)
        axes.plot(used, speed, "o", mfc="white", mec=colour, ms=5)
        axes.plot(moved, speed, "o", color=colour, ms=8, label=name)
    axes.plot([], [], "o", mfc="white", mec="#555555", ms=5, label="bytes used, no cache")
    axes.plot([], [], "s", mfc="white", mec="#555555", ms=9, label="in whole sectors, no cache")
    axes.set(xscale="log", yscale="log", xlim=(least, most), ylim=(0.1, 120))
    axes.set_xlabel("FLOP per byte of HBM traffic", fontsize=9)
    axes.set_ylabel("TFLOP/s", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.set_title(title, fontsize=9)
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    axes.grid(alpha=0.25)
    return figure


def lanes_and_sectors(patterns: dict[str, list[int]]) -> Figure:
    """Which of the first 8 sectors of 32 bytes lanes touch. patterns: by title, the byte of each lane."""
    figure, panels = canvas(10.5, 2.3, len(patterns))
    for axes, (title, addresses) in zip(panels, patterns.items(), strict=True):
        blank(axes, 64, 10.5)
        axes.set_aspect("auto")
        sectors = {address // 32 for address in addresses}
        axes.set_title(f"{title}: {len(sectors)} sector{'s' * (len(sectors) > 1)}", fontsize=9)
        for sector in range(8):
            box(axes, sector * 8, 6.5, 8, 2, "", "#eeeeee" if sector in sectors else "#ffffff")
            axes.text(sector * 8 + 4, 9.5, f"sector {sector}", ha="center", va="center", fontsize=7,
                      color="#222222" if sector in sectors else "#aaaaaa")
        for lane, address in enumerate(addresses):
            x, word = 4 + 8 * lane, address // 4
            box(axes, word, 6.5, 1, 2, "", COLOURS["K"])
            box(axes, x - 2.4, 0.8, 4.8, 2, f"lane {lane}", LIGHT["Q"], 7)
            arrow(axes, (x, 2.9), (word + 0.5, 6.4))
    return figure


def growth(rows: list[dict], names: dict[str, str], title: str, memory_GB: float, pairs: int) -> Figure:
    """Scratch memory and time of stages against N.

    Args:
        rows: of a bench's JSON.
        names: stages to draw, and their colours.
        memory_GB: of the GPU.
        pairs: B * H.
    """
    figure, (left, right) = canvas(10, 3.6, 2)
    for name, colour in names.items():
        shown = [row for row in rows if row["name"] == name and row["status"] == "ok"]
        N = [row["N"] for row in shown]
        right.plot(N, [row["median_ms"] for row in shown], "o-", color=colour, label=name)
        if any(row["scratch_bytes"] for row in shown):
            left.plot(N, [row["scratch_bytes"] / 1e9 for row in shown], "o-", color=colour, label=name)
    ends = [N[0], 65536]
    left.plot(ends, [4 * pairs * n * n / 1e9 for n in ends], color="#888888", ls=":",
              label="4 bytes · B · H · N²")
    left.axhline(memory_GB, color="#333333", lw=1)
    left.text(ends[0], memory_GB * 1.15, f"this GPU's memory: {memory_GB} GB", fontsize=8)
    left.set_ylim(1e-4, 3000)
    for axes, label in ((left, "scratch memory (GB)"), (right, "time (ms)")):
        axes.set(xscale="log", yscale="log")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("N", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8, frameon=False, loc="lower right" if axes is left else "best")
        axes.grid(alpha=0.25)
    figure.suptitle(title, fontsize=9)
    return figure
