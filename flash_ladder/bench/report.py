"""Shows what bench.py measured: tables, on the terminal and in Markdown, plots and JSON.

`data` is a result as bench.py makes it, and as its JSON files hold it.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator
from rich import box
from rich.console import Console
from rich.table import Table

import flash

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
THEOREMS = {"fwd": "Theorem 2", "bwd": "Theorem 5", "fwd+bwd": "Theorems 2 and 5"}  # FlashAttention-1's
FLOPS = {"fwd": 4, "bwd": 10, "fwd+bwd": 14}  # times B H N N d: 2 for each of two products, five backward
COUNTED = ("HBM traffic: what the warps ask for, counted with no cache. A GPU's caches catch part of it, and "
           "nvcc may merge accesses into vectors or keep a value in a register.")
MASKED = ("The mask's tensors, a peer's dense mask and flex_attention's block mask are made before, and not "
          "timed. Scratch memory includes them. The stages make their lists of tiles in each call.")
CHECKPOINTED = "Checkpointed: the forward pass runs again in the backward pass, and is counted once in FLOPs."
GRADIENTS = ("Max error: of dQ, dK and dV, the one nearest to what is allowed. Scratch memory: the peak "
             "without Q, K, V, O, dO, dQ, dK and dV; it includes L, D and what autograd saves. Peak "
             "memory: with them.")


# ---------------------------------------------------------------------------------------- in words
def number(x: float | None) -> str:
    """Three digits of it."""
    return "-" if x is None else f"{x:,.0f}" if x >= 1000 else f"{x:#.3g}".rstrip(".")


def size(n: float | None) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if n is None:
            return "-"
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{number(n)} {unit}"
        n /= 1024
    return f"{number(n)} GiB"


def title(data: dict) -> str:
    """Such as: Attention forward, B=4 H=12 d=64 fp32 causal."""
    shape = data["shape"]
    heads = f"H={shape['H']}" + f" H_kv={shape['H_kv']}" * (shape["H_kv"] != shape["H"])
    mask = shape.get("mask") or ("causal" if shape["causal"] else "not causal")
    again = ", checkpointed" * checkpointed(data)
    return (f"Attention {PASSES[direction(data)]}{again}, B={shape['B']} {heads} d={shape['d']} "
            f"{shape['dtype']} {mask}")


def checkpointed(data: dict) -> bool:
    """Whether the forward pass kept nothing for the backward pass, and ran again in it."""
    return data["arguments"].get("checkpoint", False)


def direction(data: dict) -> str:
    """Of PASSES."""
    return data["arguments"]["pass"]


def lengths(data: dict) -> list[int]:
    """Every N of the results, once."""
    return list(dict.fromkeys(result["N"] for result in data["results"]))


def traffic(result: dict) -> int | None:
    """Bytes read from and written to HBM; None if they were not counted."""
    counted = result.get("hbm_read_bytes") is not None  # older results have no such key
    return result["hbm_read_bytes"] + result["hbm_written_bytes"] if counted else None


def columns(data: dict) -> list[str]:
    """Those of a table of the results."""
    counted = any(traffic(result) is not None for result in data["results"])
    naive = any(result["name"] == "naive" for result in data["results"])  # it is fp32 alone
    return ["stage", "time (ms)", "TFLOP/s", "% of ceiling", *["x naive"] * naive, "scratch memory",
            *["peak memory"] * (direction(data) != "fwd"), "max error",
            *["HBM traffic"] * counted, *["x less than naive"] * (counted and naive)]


def table_rows(data: dict, N: int) -> list[tuple[dict, list[str], bool]]:
    """For each result at N: the result, its texts for columns(data), and whether it is the fastest stage."""
    results = [result for result in data["results"] if result["N"] == N]
    naive = next((result for result in results if result["name"] == "naive"), None)
    naive_ms, naive_bytes = naive and naive["median_ms"], naive and traffic(naive)
    fastest = min((r["median_ms"] for r in results if r["kind"] == "stage" and r["median_ms"]), default=None)
    rows = []
    for result in results:
        ms, tflops, status = result["median_ms"], result["tflops"], result["status"].replace("wrong", "WRONG")
        error, bytes_ = "not finite" if status == "WRONG" else "-", traffic(result)
        cells = {
            "stage": result["label"],
            "time (ms)": number(ms) if status == "ok" else status,
            "TFLOP/s": number(tflops),
            "% of ceiling": number(tflops and 100 * tflops / data["ceiling"]["tflops"]),
            "x naive": number(naive_ms and ms and naive_ms / ms),
            "scratch memory": size(result["scratch_bytes"]),
            "peak memory": size(result["peak_bytes"]),
            "max error": error if result["error"] is None else f"{result['error']:.1e}",
            "HBM traffic": size(bytes_),
            "x less than naive": number(naive_bytes and bytes_ and naive_bytes / bytes_)}
        rows.append((result, [cells[column] for column in columns(data)],
                     result["kind"] == "stage" and ms is not None and ms == fastest))
    return rows


def results_table(data: dict, N: int | None = None) -> str:
    """A result in Markdown for an N, else the largest: a table, the fastest stage in bold; its origin."""
    N = max(lengths(data)) if N is None else N
    header = columns(data)
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    for _, cells, fastest in table_rows(data, N):
        lines.append("| " + " | ".join(f"**{cell}**" if fastest else cell for cell in cells) + " |")
    notes = " ".join(filter(None, (data["note"], *notes_on(data))))
    lines += ["", f"{title(data)}, N={N}; {data['device']}; ceiling: {data['ceiling']['what']}, "
                  f"{number(data['ceiling']['tflops'])} TFLOP/s. {notes}".strip()]
    return "\n".join(lines)


def flops_in_words(data: dict) -> str:
    """What the FLOPs of a TFLOP/s are."""
    shape, flops = data["shape"], FLOPS[direction(data)]
    if "mask" not in shape:
        return f"{flops} B H N N d" + "; causal: half of that" * shape["causal"]
    shares = {row["N"]: row["pairs"] / (shape["B"] * shape["H"] * row["N"]**2) for row in data["results"]
              if "pairs" in row}
    return f"{flops} d for each pair of a query and a key that counts: " + ", ".join(
        f"{number(100 * share)} % of all at N={N}" for N, share in shares.items())


def notes_on(data: dict) -> list[str]:
    """What a reader must know of the columns."""
    notes = [COUNTED] * ("HBM traffic" in columns(data))
    if checkpointed(data):
        notes.insert(0, CHECKPOINTED)
    if "mask" in data["shape"]:
        notes.insert(0, f"FLOPs: {flops_in_words(data)}. {MASKED}")
    if direction(data) != "fwd":
        notes.insert(0, GRADIENTS)
    if direction(data) == "bwd":
        forward = data["arguments"]["forward"][0]
        notes.insert(0, f"Timed: dQ, dK and dV alone; O and L are made before, by {forward}.")
    return notes


def show(data: dict, files: list[Path]) -> None:
    """The results on the terminal, with what a reader must know of them."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 100
    between = 1 + (direction(data) == "fwd")  # in 100 columns, the other tables have no room for 2
    table = Table(title=title(data), box=box.HORIZONTALS, padding=(0, between - 1, 0, 0))
    for column in ("N", *columns(data)):
        name = column == "stage"  # two lines, if they are two names
        table.add_column(textwrap.fill(column, 7), justify="left" if name else "right", no_wrap=not name)
    for N in lengths(data):
        for i, (result, cells, fastest) in enumerate(table_rows(data, N)):
            style = "red" if result["status"] in ("wrong", "failed") else "bold" if fastest else ""
            table.add_row("" if i else str(N), *cells, style=style)
        table.add_section()
    console.print(data["device"])
    if data["note"]:
        console.print(data["note"], style="yellow")
    console.print(table)
    console.print(f"FLOPs: {flops_in_words(data)}. Max error: against float64.")
    console.print(f"Ceiling: {data['ceiling']['what']}: {number(data['ceiling']['tflops'])} TFLOP/s.")
    for note in notes_on(data):
        console.print(note.removeprefix(f"FLOPs: {flops_in_words(data)}. "))
    if data["edit_to_result_s"]:
        console.print(f"From saving an edited stage to its result: {data['edit_to_result_s']:.1f} s.")
    for result in data["results"]:
        if result["message"]:
            text = f"{result['label']}, N={result['N']}: {result['message']}"
            console.print(text, style="red", soft_wrap=True)
    for label, reason in data["not_run"].items():
        console.print(f"Not run: {label}: {reason}", soft_wrap=True)
    console.print(*files, sep="\n", soft_wrap=True)


def plot(data: dict, file: Path, label: str, value: Callable[[dict], Any], scale: str = "log",
         more: Callable[[Axes], None] = lambda axes: None) -> None:
    """One line per stage and peer (dashed) against N. Markers shrink, so that lines that coincide show.

    scale: "log", "linear", or "bytes": log, with ticks in KiB and MiB. more: draws what else there is.
    """
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    colours = {"stage": itertools.cycle(f"C{i}" for i in range(10)),
               "peer": itertools.cycle(("black", "dimgrey", "darkgrey", "saddlebrown"))}
    lines = list(dict.fromkeys((result["kind"], result["label"]) for result in data["results"]))
    for i, (kind, name) in enumerate(lines):
        rows = [r for r in data["results"] if r["label"] == name and r["status"] == "ok"]
        axes.plot([r["N"] for r in rows], [value(r) for r in rows], label=name, color=next(colours[kind]),
                  linestyle="-" if kind == "stage" else "--", linewidth=3 - 2 * i / len(lines),
                  marker="os^Dvp*XP<>h"[i % 12], markersize=12 - 7 * i / len(lines), markerfacecolor="none")
    more(axes)
    axes.set_xscale("log")
    axes.set_xticks(lengths(data), map(str, lengths(data)))
    if scale != "linear" and any(result["status"] == "ok" for result in data["results"]):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(4) if scale == "bytes" else LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(
            lambda y, _: re.sub(r"\.0+ ", " ", size(y)) if scale == "bytes" else f"{y:,g}"))
    axes.minorticks_off()
    axes.set_xlabel("N: rows of Q, K and V")
    axes.set_ylabel(label)
    heading = filter(None, (title(data), data["device"], data["note"]))
    axes.set_title("\n".join(textwrap.fill(line, 72) for line in heading), fontsize=10)  # left of the legend
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=130)
    plt.close(figure)


def paper_bytes(shape: dict, N: int, M: int | None = None) -> float:
    """HBM traffic of all heads in bytes, by FlashAttention-1's Theorem 2, and for the backward pass Theorem 5
    (arXiv 2205.14135): of standard attention, N d + N^2 numbers a head; or, with room for M numbers on the
    chip, of FlashAttention, N^2 d^2 / M. Both give orders of growth: no constants, no mask; d <= M <= N d."""
    d = shape["d"]
    numbers = N * d + N * N if M is None else N * N * d * d / M
    return shape["B"] * shape["H"] * flash.DTYPES[shape["dtype"]].itemsize * numbers


def plot_traffic(data: dict, file: Path) -> None:
    """HBM traffic of the stages against N; dotted, without what is repeated; dashed, the papers' formulas.
    The M of these is what a block of the last stage has of shared memory."""
    shape, Ns, last = data["shape"], lengths(data), data["results"][-1]
    M = last["shared_bytes"] // flash.DTYPES[shape["dtype"]].itemsize

    def more(axes: Axes) -> None:
        for line in list(axes.lines):
            rows = [row for row in data["results"] if row["label"] == line.get_label()]
            axes.plot([row["N"] for row in rows], [row["hbm_unique_bytes"] for row in rows], ":.",
                      color=line.get_color(), linewidth=line.get_linewidth())
        axes.plot([], [], ":", color="black", label="dotted: each byte once\na launch of a kernel")
        axes.plot(Ns, [paper_bytes(shape, N) for N in Ns], "--x", color="black",
                  label="standard attention:\nN d + N² numbers a head")
        note = ("The papers' formulas, dashed, are orders of growth, Θ, without constants or a mask: "
                f"FlashAttention (arXiv:2205.14135), {THEOREMS[direction(data)]}")
        if M:
            axes.plot(Ns, [paper_bytes(shape, N, M) for N in Ns], "--x", color="grey",
                      label="FlashAttention:\nN² d² / M numbers a head")
            note += f", for M≤Nd. M is {M:,}: the numbers in the shared memory of a {last['label']} block"
        axes.plot([], [], " ", label=textwrap.fill(note + ".", 32))

    plot(data | {"note": "Counted in the simulator, as warps ask for it: no cache"}, file,
         "HBM traffic, read and written", traffic, "bytes", more)


# ---------------------------------------------------------------------------------------- --sweep
def fastest_first(data: dict) -> list[dict]:
    """The rows of a sweep; those without a time last."""
    return sorted(data["results"], key=lambda row: row["median_ms"] or float("inf"))


def show_sweep(data: dict, files: list[Path], most: int = 12) -> None:
    """The best tile sizes on the terminal, and the default ones among them or after them."""
    console = Console(highlight=False, markup=False)
    rows = fastest_first(data)
    table = Table(title=f"{data['stage']}: {title(data)}, N={data['results'][0]['N']}", box=box.HORIZONTALS)
    for column in ("Br", "Bc", "time (ms)", "TFLOP/s", "max error", ""):
        table.add_column(column, justify="right")
    for i, row in enumerate(rows):
        default = {name: row[name] for name in ("Br", "Bc")} == data["default"]
        if i < most or default or row["status"] != "ok":
            table.add_row(str(row["Br"]), str(row["Bc"]), number(row["median_ms"]), number(row["tflops"]),
                          "-" if row["error"] is None else f"{row['error']:.1e}",
                          row["status"].replace("ok", "default" * default),
                          style="bold" if not i else "red" if row["status"] != "ok" else "")
    console.print(data["device"])
    if data["note"]:
        console.print(data["note"], style="yellow")
    console.print(table)
    best = rows[0]
    if best["median_ms"]:
        console.print(f"Best of {len(rows)}: Br={best['Br']} Bc={best['Bc']}")
    for row in rows:
        if row["message"]:
            console.print(f"{row['label']}: {row['message']}", style="red", soft_wrap=True)
    console.print(*files, sep="\n", soft_wrap=True)


def write_sweep(data: dict, folder: Path) -> list[Path]:
    """A sweep as JSON, and as a picture: TFLOP/s by Br and Bc."""
    files = [folder / f"sweep_{direction(data).replace('+', '_')}_{data['stage']}{end}"
             for end in (".json", ".png")]
    files[0].write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    times = {(row["Br"], row["Bc"]): row["tflops"] for row in data["results"] if row["tflops"]}
    if not times:
        return files[:1]
    Brs, Bcs = (sorted({key[axis] for key in times}) for axis in (0, 1))
    grid = [[times.get((Br, Bc), float("nan")) for Bc in Bcs] for Br in Brs]
    figure, axes = plt.subplots(figsize=(2.5 + 0.8 * len(Bcs), 2.5 + 0.5 * len(Brs)), layout="constrained")
    image = axes.imshow(grid, aspect="auto", origin="lower")
    middle = (max(times.values()) + min(times.values())) / 2
    for (Br, Bc), tflops in times.items():
        is_default = {"Br": Br, "Bc": Bc} == data["default"]
        axes.text(Bcs.index(Bc), Brs.index(Br), number(tflops) + "\ndefault" * is_default, ha="center",
                  va="center", fontsize=8, color="black" if tflops > middle else "white")
    axes.set_xticks(range(len(Bcs)), Bcs)
    axes.set_yticks(range(len(Brs)), Brs)
    axes.set_xlabel("Bc: rows of a tile of K and V")
    axes.set_ylabel("Br: rows of a tile of Q")
    heading = filter(None, (f"{data['stage']}: {title(data)}, N={data['results'][0]['N']}", data["device"],
                            data["note"]))
    axes.set_title("\n".join(textwrap.fill(line, 56) for line in heading), fontsize=9)
    figure.colorbar(image, label="TFLOP/s")
    figure.savefig(files[1], dpi=130)
    plt.close(figure)
    return files


def write(data: dict, folder: Path) -> list[Path]:
    """The results as JSON and plots, in a folder that exists."""
    ends = (".json", "_time.png", "_memory.png", "_tflops.png", "_hbm.png")
    *files, hbm = [folder / f"bench_{direction(data).replace('+', '_')}{end}" for end in ends]
    tensors = "Q, K, V, outputs" if direction(data) == "fwd" else "Q, K, V, O, dO, gradients"
    files[0].write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    plot(data, files[1], "time (ms)", lambda row: row["median_ms"])
    plot(data, files[2], f"peak memory: {tensors} and scratch (MiB)", lambda row: row["peak_bytes"] / 2**20)
    plot(data, files[3], "TFLOP/s", lambda row: row["tflops"], "log" if data["simulated"] else "linear")
    if counted := [r for r in data["results"] if r["status"] == "ok" and traffic(r) is not None]:
        plot_traffic(data | {"results": counted}, hbm)
        files.append(hbm)
    return files
