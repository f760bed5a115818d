"""Compares the stages with one another and with PyTorch's own attention: a table, plots and JSON.

    python bench.py                                    # every stage that runs here, at a few sequence lengths
    python bench.py --stages naive,flash2 --seqlens 512,1024 --heads 8:2 --no-causal --out build/mine
    python bench.py --markdown build/bench/bench_fwd.json --seqlens 1024      # a result as a Markdown table
    python bench.py --inspect flash2                   # every access to memory of one stage, in the simulator
    python bench.py --inspect naive --line fwd_01_naive.cuh:49           # and a picture of one line's

A stage is checked before it is timed, against attention in float64: its largest error may be twice that of
PyTorch's plain attention in the same type, plus 1e-6. Without a GPU it also runs once under flash.inspect(),
which counts its HBM traffic and finds data races and other mistakes.

Exit status: 0; 1 if a stage was wrong or failed; 2 for bad arguments; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import platform
import re
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: else its profiler writes to stderr

import matplotlib
import numpy
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import flash

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PEERS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
         "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
DEFAULTS = {"seqlens": ([512, 1024, 2048, 4096], [64, 128, 256]), "batch": (4, 1), "heads": ("12", "2"),
            "peers": (",".join(PEERS), "math")}  # on a GPU, on the CPU
SECONDS_A_CASE = 0.5
MOST_REPETITIONS = 200
COLUMNS = ("stage", "time (ms)", "TFLOP/s", "% of ceiling", "x naive", "scratch memory", "max error")
COUNTED_COLUMNS = ("HBM traffic", "x less than naive")
TIMES = ("median_ms", "p20_ms", "p80_ms", "repetitions", "tflops")
COUNTS = ("hbm_read_bytes", "hbm_written_bytes", "hbm_unique_bytes", "shared_bytes", "inspected_ms",
          "findings")
SIMULATED = "No GPU here: the stages' times are the simulator's, on the CPU. They say nothing about a GPU's."
COUNTED = ("HBM traffic: what the warps ask for, counted with no cache. A GPU's caches catch part of it, and "
           "nvcc may merge accesses into vectors or keep a value in a register.")


# ---------------------------------------------------------------------------------------- what is compared
@dataclass(frozen=True)
class Competitor:
    """A stage or a peer."""

    name: str
    label: str
    is_stage: bool
    call: Callable[..., tuple[torch.Tensor, ...]]  # call(q, k, v) returns its outputs, O first


@dataclass(frozen=True)
class Case:
    """The tensors of one N, O in float64, and the largest error that a stage may have."""

    N: int
    qkv: list[torch.Tensor]  # (B, H, N, d), (B, H_kv, N, d) and the same
    exact: torch.Tensor      # (B, H, N, d)
    allowed_error: float


def sdpa(backend: SDPBackend, causal: bool, q, k, v) -> tuple[torch.Tensor]:
    """(O,) by one of PyTorch's backends, and by no other."""
    with sdpa_kernel(backend):
        return (torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]),)


def competitors(args: argparse.Namespace) -> list[Competitor]:
    """The stages, then the peers that take the arguments; why others do not goes into `args.not_run`."""
    found = [Competitor(stage.name, stage.name, True, functools.partial(
        flash.attention, causal=args.causal, stage=stage, return_lse=True)) for stage in args.stages]
    for name in args.peers:
        label = "PyTorch " + name.replace("cudnn", "cuDNN")
        if name == "efficient" and args.dtype == "fp32":
            label += " (3xTF32)"  # on tensor cores, where the fp32 stages use FMA
        call = functools.partial(sdpa, PEERS[name], args.causal)
        if reason := refusal(call, args):
            args.not_run[label] = reason
        else:
            found.append(Competitor(name, label, False, call))
    return found


def refusal(call: Callable, args: argparse.Namespace) -> str:
    """Why a backend does not take these arguments, in PyTorch's words; empty if it does. Found by trying."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call(*random_inputs(128, args))
            return ""
        except RuntimeError as error:
            words = [str(warning.message).split(" (Triggered")[0] for warning in caught] + [str(error)]
    return next(w for w in words if not re.search("runtime disabled|not used because", w)).splitlines()[0]


def random_inputs(N: int, args: argparse.Namespace) -> list[torch.Tensor]:
    """q, k and v: normal, and the same in every run."""
    generator = torch.Generator(args.device).manual_seed(N)
    return [torch.randn(args.batch, heads, N, args.head_dim, generator=generator, device=args.device,
                        dtype=flash.DTYPES[args.dtype]) for heads in (args.H, args.H_kv, args.H_kv)]


def make_case(N: int, args: argparse.Namespace) -> Case:
    """Random inputs, their attention in float64, and PyTorch's error: head by head, so that a long N fits."""
    qkv = random_inputs(N, args)
    exact = torch.empty(qkv[0].shape, dtype=torch.float64, device=args.device)
    hidden = torch.ones(N, N, dtype=torch.bool, device=args.device).triu(1) if args.causal else None
    error = 0.0
    for b in range(args.batch):
        for h in range(args.H):
            kv_head = h // (args.H // args.H_kv)
            one_head = [x[b, i][None, None] for x, i in zip(qkv, (h, kv_head, kv_head), strict=True)]
            Q, K, V = (x[0, 0].double() for x in one_head)
            S = Q @ K.T / math.sqrt(args.head_dim)
            if hidden is not None:
                S.masked_fill_(hidden, -math.inf)
            exact[b, h] = S.softmax(-1) @ V
            error = max(error, largest_error(sdpa(SDPBackend.MATH, args.causal, *one_head)[0], exact[b, h]))
    return Case(N, qkv, exact, 2 * error + 1e-6)


# ---------------------------------------------------------------------------------------- measuring
def largest_error(o: torch.Tensor, exact: torch.Tensor) -> float:
    """max |o - exact|; NaN if there is a NaN in o."""
    return (o - exact).abs().max().item()


def complaint(error: float, allowed: float) -> str:
    """What is wrong with a largest error, NaN too; empty if it is small enough."""
    return "" if error <= allowed else f"its largest error is {error:.2g}; {allowed:.2g} is allowed"


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Here torch.empty gives NaN: what a stage leaves unwritten is noticed, whatever lay there before."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def failure(error: Exception) -> dict:
    """The status and message for an error; of a long one the first line, or what follows its colon."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return {"status": "out of memory"}
    return {"status": "failed", "message": re.match(r"(?:.*:\n)?.*", str(error))[0].replace("\n", " ")}


def empty_row(competitor: Competitor, N: int) -> dict:
    """A row of the results, with None for what is to be measured."""
    numbers = (*TIMES, "error", "allowed_error", "scratch_bytes", "peak_bytes", *COUNTS)
    return {"name": competitor.name, "label": competitor.label, "N": N, "status": "ok", "message": "",
            "kind": "stage" if competitor.is_stage else "peer"} | dict.fromkeys(numbers)


def measure(competitor: Competitor, case: Case, args: argparse.Namespace) -> dict:
    """One row of the results. Its status: "ok", "wrong", "failed" or "out of memory"."""
    row = empty_row(competitor, case.N) | {"allowed_error": case.allowed_error}
    call = functools.partial(competitor.call, *case.qkv)
    try:
        with poisoned_memory() if competitor.is_stage else contextlib.nullcontext():
            outputs = call()
        error = largest_error(outputs[0], case.exact)
        row["error"] = error if math.isfinite(error) else None  # JSON has no NaN
        if competitor.is_stage and (message := complaint(error, case.allowed_error)):
            return row | {"status": "wrong", "message": message}
        tensors = sum(x.nbytes for x in (*case.qkv, *outputs))
        del outputs
        scratch = scratch_bytes(call, args.device)
        times = milliseconds(call, args.device)
    except (RuntimeError, ValueError) as error:
        return row | failure(error)
    p20, median, p80 = numpy.percentile(times, (20, 50, 80)).tolist()
    flops = 4 * args.batch * args.H * case.N * case.N * args.head_dim / (2 if args.causal else 1)
    return row | {"median_ms": median, "p20_ms": p20, "p80_ms": p80, "repetitions": len(times),
                  "tflops": flops / median / 1e9, "scratch_bytes": scratch, "peak_bytes": tensors + scratch}


def count_traffic(competitor: Competitor, case: Case) -> dict:
    """What a run under flash.inspect() changes in the row of a stage: HBM traffic and a block's most shared
    memory, in bytes, the time that it takes, and what the checker finds. With a finding the stage is wrong,
    and loses its other times."""
    try:
        with flash.inspect() as report:
            start = time.perf_counter()
            competitor.call(*case.qkv)
            seconds = time.perf_counter() - start
    except (RuntimeError, ValueError) as error:
        return dict.fromkeys(TIMES) | failure(error)
    hbm, findings = report.hbm, [finding.message for finding in report.findings]
    counts = {"hbm_read_bytes": hbm.read, "hbm_written_bytes": hbm.written,
              "hbm_unique_bytes": hbm.unique_read + hbm.unique_written,
              "shared_bytes": max((kernel.shared_bytes for kernel in report.kernels), default=0),
              "inspected_ms": 1e3 * seconds, "findings": findings}
    if findings:
        return counts | dict.fromkeys(TIMES) | {"status": "wrong", "message": findings[0]}
    return counts


def milliseconds(call: Callable, device: torch.device) -> list[float]:
    """The time of each repetition of a call that has run before: as many as fit into SECONDS_A_CASE."""
    if device.type == "cuda":
        return _milliseconds_on_gpu(call, device)
    times: list[float] = []
    while not times or (sum(times) < 1e3 * SECONDS_A_CASE and len(times) < MOST_REPETITIONS):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _milliseconds_on_gpu(call: Callable, device: torch.device) -> list[float]:
    """By CUDA events, after a warm-up, with the L2 cache overwritten before every repetition.

    Python's share of a call must not lie between its two events. So before the first one the GPU is given
    other work, the overwriting and then a sleep of twice the time that the host takes to enqueue a call, and
    nothing waits for the GPU until all repetitions are enqueued: it reaches the first event with the call
    already in its queue.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    overwritten = torch.empty(max(2 * l2_bytes, 256 << 20), dtype=torch.uint8, device=device)
    for _ in range(3):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        host_ms = 1e3 * (time.perf_counter() - start)

    def repeat(count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            overwritten.zero_()
            torch.cuda._sleep(int(2 * host_ms * 2e6))  # in clock cycles, at about 2 GHz
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) for begin, end in events]

    one = max(repeat(2)) + 2 * host_ms
    return repeat(max(3, min(MOST_REPETITIONS, int(1e3 * SECONDS_A_CASE / one))))


def scratch_bytes(call: Callable, device: torch.device) -> int:
    """The most memory that a call holds at a time beyond its outputs, in bytes; not for the first call, in
    which cuBLAS allocates a workspace that it keeps."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # "requested": as the allocator rounds allocated bytes up
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        outputs = call()
        peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            outputs = call()
        held = peak = 0
        for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            held += event.nbytes() if event.name() == "[memory]" else 0  # negative when memory is freed
            peak = max(peak, held)
    return peak - sum(x.nbytes for x in outputs)


def ceiling(args: argparse.Namespace) -> dict:
    """TFLOP/s of a square matrix product in the bench's type: what the stages' are a percentage of."""
    n = 8192 if args.device.type == "cuda" else 1024
    torch.backends.cuda.matmul.allow_tf32 = False  # for PyTorch's math backend too
    a, b = (torch.randn(n, n, device=args.device).to(flash.DTYPES[args.dtype]) for _ in range(2))
    torch.mm(a, b)
    median = float(numpy.median(milliseconds(lambda: torch.mm(a, b), args.device)))
    what = f"PyTorch's {n} x {n} x {n} product of {args.dtype} matrices"
    return {"what": what + ", TF32 off" * (args.dtype == "fp32"), "tflops": 2 * n**3 / median / 1e9}


def edit_to_result(args: argparse.Namespace) -> float:
    """Seconds from saving an edited stage to its result, in a Python process that has run it before. (Each
    bench leaves two builds behind that nothing uses again: make clean.)"""
    q, k, v = random_inputs(128, args)
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder, args.stages[-1].path.name)
        mine.write_text(args.stages[-1].path.read_text())
        flash.attention(q, k, v, causal=args.causal, stage=mine, return_lse=True)
        mine.write_text(mine.read_text() + f"// {time.time()}\n")  # which no earlier run has built
        start = time.perf_counter()
        flash.attention(q, k, v, causal=args.causal, stage=mine, return_lse=True)[0][0, 0, 0, 0].item()
        return time.perf_counter() - start


def run(args: argparse.Namespace, data: dict) -> None:
    """Measure everything, result by result, into `data`, with a progress bar on stderr."""
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=Console(stderr=True)) as bar:
        task = bar.add_task("matrix product", total=None)
        data["ceiling"] = ceiling(args)
        entries = competitors(args)
        counting = data["simulated"] and flash.can_inspect()
        if data["simulated"] and not counting:
            args.not_run["HBM traffic"] = flash.can_inspect().reason
        bar.update(task, total=len(args.stages) + len(args.seqlens) * len(entries))
        for entry in entries[:len(args.stages)]:
            bar.update(task, description=f"building {entry.name}")
            with contextlib.suppress(RuntimeError):  # it comes again when the stage is measured, and is kept
                entry.call(*random_inputs(8, args))
                with flash.inspect() if counting else contextlib.nullcontext():
                    entry.call(*random_inputs(8, args))
            bar.advance(task)
        with contextlib.suppress(RuntimeError):  # as above
            data["edit_to_result_s"] = edit_to_result(args)
        for N in args.seqlens:
            bar.update(task, description=f"N={N} float64")
            try:
                case = make_case(N, args)
            except RuntimeError as error:  # too long an N; or a GPU that an earlier error left unusable
                data["results"] += [empty_row(entry, N) | failure(error) for entry in entries]
                continue
            for entry in entries:
                bar.update(task, description=f"N={N} {entry.label}")
                data["results"].append(row := measure(entry, case, args))
                if counting and entry.is_stage and row["status"] == "ok":
                    bar.update(task, description=f"N={N} {entry.label}: counting HBM traffic")
                    row.update(count_traffic(entry, case))
                bar.advance(task)


def origin(args: argparse.Namespace) -> dict:
    """Of a result: when, where, with what software, and for which shape."""
    gpu = args.device.type == "cuda"
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": flash.describe_device(args.device),
        "software": {"python": platform.python_version(),
                     "system": f"{platform.system()} {platform.machine()}",
                     "torch": torch.__version__, "cuda": torch.version.cuda,
                     "cudnn": torch.backends.cudnn.version(),
                     "nvcc": flash.nvcc_version(flash.find_nvcc(torch.version.cuda)) if gpu else None},
        "shape": {"B": args.batch, "H": args.H, "H_kv": args.H_kv, "d": args.head_dim, "causal": args.causal,
                  "dtype": args.dtype}}


def new_data(args: argparse.Namespace) -> dict:
    """What is measured, where and with what; no results yet."""
    gpu = args.device.type == "cuda"
    return origin(args) | {
        "simulated": not gpu, "note": "" if gpu else SIMULATED,
        "arguments": {"pass": args.direction, "stages": [stage.name for stage in args.stages],
                      "peers": args.peers, "seqlens": args.seqlens},
        "ceiling": None, "edit_to_result_s": None, "not_run": args.not_run, "interrupted": False,
        "results": []}


# ---------------------------------------------------------------------------------------- showing
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
    shape = data["shape"]
    heads = f"H={shape['H']}" + f" H_kv={shape['H_kv']}" * (shape["H_kv"] != shape["H"])
    mask = "causal" if shape["causal"] else "not causal"
    return f"Attention forward, B={shape['B']} {heads} d={shape['d']} {shape['dtype']} {mask}"


def lengths(data: dict) -> list[int]:
    """Every N of the results, once."""
    return list(dict.fromkeys(result["N"] for result in data["results"]))


def traffic(result: dict) -> int | None:
    """Bytes read from and written to HBM; None if they were not counted."""
    counted = result.get("hbm_read_bytes") is not None  # older results have no such key
    return result["hbm_read_bytes"] + result["hbm_written_bytes"] if counted else None


def columns(data: dict) -> tuple[str, ...]:
    """Those of a table of the results."""
    return COLUMNS + COUNTED_COLUMNS * any(traffic(result) is not None for result in data["results"])


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
        cells = [
            result["label"], number(ms) if status == "ok" else status, number(tflops),
            number(tflops and 100 * tflops / data["ceiling"]["tflops"]),
            number(naive_ms and ms and naive_ms / ms),
            size(result["scratch_bytes"]), error if result["error"] is None else f"{result['error']:.1e}",
            size(bytes_), number(naive_bytes and bytes_ and naive_bytes / bytes_)]
        rows.append((result, cells[:len(columns(data))],
                     result["kind"] == "stage" and ms is not None and ms == fastest))
    return rows


def results_table(data: dict, N: int | None = None) -> str:
    """A result in Markdown for an N, else the largest: a table, the fastest stage in bold; its origin."""
    N = max(lengths(data)) if N is None else N
    header = columns(data)
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    for _, cells, fastest in table_rows(data, N):
        lines.append("| " + " | ".join(f"**{cell}**" if fastest else cell for cell in cells) + " |")
    notes = " ".join(filter(None, (data["note"], COUNTED * (header != COLUMNS))))
    lines += ["", f"{title(data)}, N={N}; {data['device']}; ceiling: {data['ceiling']['what']}, "
                  f"{number(data['ceiling']['tflops'])} TFLOP/s. {notes}".strip()]
    return "\n".join(lines)


def show(data: dict, files: list[Path]) -> None:
    """The results on the terminal, with what a reader must know of them."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 100
    table = Table(title=title(data), box=box.HORIZONTALS, padding=(0, 1, 0, 0))
    for column in ("N", *columns(data)):
        side = "left" if column == "stage" else "right"
        table.add_column(textwrap.fill(column, 7), justify=side, no_wrap=True)
    for N in lengths(data):
        for i, (result, cells, fastest) in enumerate(table_rows(data, N)):
            style = "red" if result["status"] in ("wrong", "failed") else "bold" if fastest else ""
            table.add_row("" if i else str(N), *cells, style=style)
        table.add_section()
    console.print(data["device"])
    if data["note"]:
        console.print(data["note"], style="yellow")
    console.print(table)
    half = "; causal: half of that" * data["shape"]["causal"]
    console.print(f"FLOPs: 4 B H N N d{half}. Max error: against float64.")
    console.print(f"Ceiling: {data['ceiling']['what']}: {number(data['ceiling']['tflops'])} TFLOP/s.")
    if columns(data) != COLUMNS:
        console.print(COUNTED)
    if data["edit_to_result_s"]:
        console.print(f"From saving an edited stage to its result: {data['edit_to_result_s']:.1f} s.")
    for result in data["results"]:
        if result["message"]:
            text = f"{result['label']}, N={result['N']}: {result['message']}"
            console.print(text, style="red", soft_wrap=True)
    for label, reason in data["not_run"].items():
        console.print(f"Not run: {label}: {reason}", soft_wrap=True)
    console.print(*files, sep="\n", soft_wrap=True)


def plot(data: dict, file: Path, label: str, value: Callable[[dict], float], scale: str = "log",
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
    axes.set_title("\n".join(filter(None, (title(data), data["device"], data["note"]))), fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=130)
    plt.close(figure)


def paper_bytes(shape: dict, N: int, M: int | None = None) -> float:
    """HBM traffic of all heads in bytes, by FlashAttention-1's Theorem 2 (arXiv 2205.14135): of standard
    attention, N d + N^2 numbers a head; or, with room for M numbers on the chip, of FlashAttention,
    N^2 d^2 / M. The theorem gives orders of growth: no constants, no mask; d <= M <= N d."""
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
                "FlashAttention (arXiv:2205.14135), Theorem 2")
        if M:
            axes.plot(Ns, [paper_bytes(shape, N, M) for N in Ns], "--x", color="grey",
                      label="FlashAttention:\nN² d² / M numbers a head")
            note += f", for M≤Nd. M is {M:,}: the numbers in the shared memory of a {last['label']} block"
        axes.plot([], [], " ", label=textwrap.fill(note + ".", 32))

    plot(data | {"note": "Counted in the simulator, as warps ask for it: no cache"}, file,
         "HBM traffic, read and written", traffic, "bytes", more)


def write(data: dict, folder: Path) -> list[Path]:
    """The results as JSON and plots, in a folder that exists."""
    ends = (".json", "_time.png", "_memory.png", "_tflops.png", "_hbm.png")
    *files, hbm = [folder / f"bench_{data['arguments']['pass']}{end}" for end in ends]
    files[0].write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    plot(data, files[1], "time (ms)", lambda row: row["median_ms"])
    plot(data, files[2], "memory: Q, K, V, outputs and scratch (MiB)", lambda row: row["peak_bytes"] / 2**20)
    plot(data, files[3], "TFLOP/s", lambda row: row["tflops"], "log" if data["simulated"] else "linear")
    if counted := [r for r in data["results"] if r["status"] == "ok" and traffic(r) is not None]:
        plot_traffic(data | {"results": counted}, hbm)
        files.append(hbm)
    return files


# ---------------------------------------------------------------------------------------- --inspect
def inspect(args: argparse.Namespace) -> int:
    """Run one stage under flash.inspect(); print and write the report. Returns the exit status."""
    stage, N, error = args.stages[0], args.seqlens[0], ""
    qkv = random_inputs(N, args)
    with Console(stderr=True).status(f"inspecting {stage.name}"), flash.inspect() as report:
        try:
            flash.attention(*qkv, causal=args.causal, stage=stage)
        except (RuntimeError, ValueError) as caught:  # the report may say why
            error = str(caught) or type(caught).__name__
    data = origin(args) | {"stage": stage.name, "error": error}
    data["shape"]["N"] = N
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(f"{stage.name}: {title(data)}, N={N}\n", style="bold")
    if error:
        console.print(f"It failed: {error}\n", style="red", soft_wrap=True)
    if report.kernels or report.findings:
        console.print(report)
    try:
        files = write_report(data, report, args.out, args.line)
    except ValueError as no_such_line:
        print(f"--line: {no_such_line}", file=sys.stderr)
        return 2
    console.print("", *files, sep="\n", soft_wrap=True)
    return int(bool(error or report.findings))


def write_report(data: dict, report: flash.Report, folder: Path, line: str | None) -> list[Path]:
    """A report and its origin as JSON, and if a kernel ran plots of its traffic and of what the lanes of a
    warp do at a line, in a folder that exists."""
    files = [folder / f"inspect_{data['stage']}.json"]
    files[0].write_text(json.dumps(data | report.to_dict(), indent=1, allow_nan=False) + "\n")
    if report.kernels:
        files.append(files[0].with_suffix(".png"))
        report.plot(files[1])
    if report.kernels and line:
        files.append(folder / f"inspect_{data['stage']}_line.png")
        report.plot(files[2], line=line)
    return files


# ---------------------------------------------------------------------------------------- python bench.py
def positive_integers(text: str) -> list[int]:
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; it takes integers of at least 1, such as 512,1024")
    return list(dict.fromkeys(numbers))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments, checked: what cannot run is refused here, before anything is built (exit status 2)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pass", dest="direction", choices=["fwd"], default="fwd", help="there is no backward pass yet")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stages", metavar="A,B",
                      help="by name (python flash.py lists them); default: all that run here")
    what.add_argument("--inspect", metavar="STAGE",
                      help="time nothing: run this stage, a name or a .cuh file, once in the simulator, and "
                           "report every access to memory, and what is wrong with any")
    add("--line", metavar="FILE:LINE",
        help="with --inspect: also draw which lane of a warp touches which bank or sector at this line")
    what.add_argument("--markdown", metavar="JSON", type=Path,
                      help="measure nothing: print this result as a table")
    add("--seqlens", metavar="N,N", type=positive_integers,
        help="default: 512 to 4096, or 64 to 256 on CPU; with --inspect, 128")
    add("--batch", metavar="B", type=int, help="default: 4, or 1 on CPU")
    add("--heads", metavar="H[:H_kv]", help="of Q, and of K and V if fewer; default: 12, or 2 on CPU")
    add("--head-dim", metavar="d", type=int, default=64,
        help=f"a multiple of 8, to {flash.MAX_HEAD_DIM}; default: %(default)s")
    add("--causal", action=argparse.BooleanOptionalAction, default=True, help="default: --causal")
    add("--dtype", default="fp32", help=f"of {', '.join(flash.DTYPES)}; default: fp32")
    add("--peers", metavar="A,B", help=f"PyTorch's backends, of {', '.join(PEERS)}, or none; those that "
                                       "refuse are left out; default: all, or math on CPU")
    add("--out", metavar="FOLDER", type=Path, default=flash.BUILD / "bench", help="default: build/bench")
    args = parser.parse_args(argv, argparse.Namespace(not_run={}))
    args.device = torch.device("cpu") if args.inspect else flash.default_device()
    try:
        if args.markdown:
            read_result(args)
        else:
            set_defaults(args)
            check_shape(args)
            args.stages = choose_stages(args)
            args.peers = choose_peers(args.peers)
            args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    return args


def set_defaults(args: argparse.Namespace) -> None:
    """Set what is not given and depends on the device; check what only --inspect takes."""
    if args.line and not args.inspect:
        raise ValueError("--line: goes with --inspect")
    if args.inspect:
        if not (possible := flash.can_inspect()):
            raise ValueError(f"--inspect: {possible}")
        args.seqlens = args.seqlens or [128]
        if len(args.seqlens) > 1:
            raise ValueError(f"--inspect: takes one N; --seqlens has {', '.join(map(str, args.seqlens))}")
    for name, (on_gpu, on_cpu) in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, on_gpu if args.device.type == "cuda" else on_cpu)


def read_result(args: argparse.Namespace) -> None:
    """Set `args.data`, and `args.seqlens` to its last N if none is asked for."""
    try:
        args.data = json.loads(args.markdown.read_text())
        there = lengths(args.data)
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"--markdown: {args.markdown} is no result of bench.py") from None
    args.seqlens = args.seqlens or there[-1:]
    if missing := set(args.seqlens) - set(there):
        raise ValueError(f"--seqlens: no N={min(missing)} in the result; it has {', '.join(map(str, there))}")


def check_shape(args: argparse.Namespace) -> None:
    """Check the type and the shape but for N; set `args.H` and `args.H_kv`."""
    if args.dtype not in flash.DTYPES:
        raise ValueError(f"--dtype: no stage takes {args.dtype!r}; they take {', '.join(flash.DTYPES)}")
    if args.head_dim % 8 or not 8 <= args.head_dim <= flash.MAX_HEAD_DIM:
        raise ValueError(f"--head-dim: {args.head_dim}; d must be a multiple of 8 up to {flash.MAX_HEAD_DIM}")
    if args.batch < 1:
        raise ValueError(f"--batch: {args.batch}; B must be at least 1")
    heads = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", args.heads)
    if not heads or int(heads[1]) % int(heads[2] or 1):
        raise ValueError(f"--heads: {args.heads!r}; H or H:H_kv, H a multiple of H_kv, such as 12 or 8:2")
    args.H, args.H_kv = int(heads[1]), int(heads[2] or heads[1])


def choose_stages(args: argparse.Namespace) -> list[flash.Stage]:
    """The stages to run, in the ladder's order. One that cannot run goes into `args.not_run`, or, if it was
    asked for, is an error."""
    option = "--inspect" if args.inspect else "--stages"
    asked = [args.inspect] if args.inspect else args.stages.split(",") if args.stages else []
    known = {stage.name: stage for stage in flash.stages()
             if stage.direction == args.direction and flash.DTYPES[args.dtype] in stage.dtypes}
    if args.inspect and args.inspect.endswith(".cuh"):
        known[args.inspect] = flash.read_stage(Path(args.inspect))
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f"{option}: no stage {unknown[0]!r} for {args.dtype}; there are {', '.join(known)}")
    for name in asked or known:
        try:
            known[name].tiles(args.head_dim, flash.shared_memory_per_block(args.device))
            reason = known[name].available(args.device).reason
        except ValueError as error:
            reason = str(error)
        if reason:
            args.not_run[name] = reason
    if args.not_run and (asked or len(args.not_run) == len(known)):
        raise ValueError("{}: {}: {}".format(option, *next(iter(args.not_run.items()))))
    return [stage for name, stage in known.items() if name in (asked or known) and name not in args.not_run]


def choose_peers(text: str) -> list[str]:
    peers = [] if text == "none" else list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in peers if name not in PEERS]:
        raise ValueError(f"--peers: there is no {unknown[0]!r}; there are {', '.join(PEERS)}, or none")
    return peers


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse_arguments(argv)
    if args.markdown:
        print("\n\n".join(results_table(args.data, N) for N in args.seqlens))
        return 0
    data = new_data(args)
    try:
        if args.inspect:
            return inspect(args)
        run(args, data)
    except KeyboardInterrupt:
        data["interrupted"] = True
    if data["results"]:
        show(data, write(data, args.out))
    if data["interrupted"]:
        print(f"Interrupted after {len(data['results'])} cases.", file=sys.stderr)
        return 130
    return int(any(r["kind"] == "stage" and r["status"] in ("wrong", "failed") for r in data["results"]))


if __name__ == "__main__":
    sys.exit(main())
