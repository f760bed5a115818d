"""For every lesson: how fast the rungs are, up to those of the lesson."""

from matplotlib.figure import Figure

from . import COLOURS, canvas

HEAD_DIMS = {64: COLOURS["Q"], 128: COLOURS["K"]}
N = 4096


def staircase(data: dict, names: list[str], direction: str) -> Figure:
    """TFLOP/s of these rungs, one after the other, causal at N = 4096, from rungs.json (bench.py --rungs)."""
    width = 0.8 / len(HEAD_DIMS)
    figure, (axes,) = canvas(max(5.0, 1.6 + 0.75 * len(names)), 3.2)
    rows = [row for row in data["rows"] if row["name"] in names and row["kind"] == "stage" and
            row["status"] == "ok" and (row["pass"], row["N"], row["causal"]) == (direction, N, True)]
    for n, (d, colour) in enumerate(HEAD_DIMS.items()):
        found = {row["name"]: row["tflops"] for row in rows if row["d"] == d}
        at = [x for x, name in enumerate(names) if name in found]
        bars = axes.bar([x + (n - 0.5) * width for x in at], [found[names[x]] for x in at], width,
                        color=colour, label=f"d = {d}")
        axes.bar_label(bars, [f"{found[names[x]]:.3g}" for x in at], fontsize=7)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("TFLOP/s")
    axes.margins(y=0.15)
    types = " and ".join(dict.fromkeys(row["dtype"] for row in rows))
    axes.set_title(f"{'Forward' if direction == 'fwd' else 'Backward'}, {types}, causal, N = {N}\n"
                   f"{data['device']}", fontsize=9)
    axes.legend(fontsize=8, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
