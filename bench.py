"""Compares the stages with one another and with PyTorch's own attention: a table, plots and JSON.

    python bench.py                                    # every stage that runs here, at a few sequence lengths
    python bench.py --stages naive,flash2 --seqlens 512,1024 --heads 8:2 --no-causal --out build/mine
    python bench.py --stages flash2,mine.cuh           # a file of your own beside it, in every mode
    python bench.py --rungs                            # what each rung gives: TFLOP/s as a staircase
    python bench.py --pass bwd                         # the gradients; fwd+bwd: both passes; all: all three
    python bench.py --markdown build/bench/bench_fwd.json --seqlens 1024      # a result as a Markdown table
    python bench.py --inspect flash2                   # every access to memory of one stage, in the simulator
    python bench.py --inspect naive --line fwd_01_naive.cuh:50           # and a picture of one line's
    python bench.py --sweep flash2 --seqlens 4096      # one stage with all tile sizes that fit

A stage is checked before it is timed, against attention in float64. Its largest error in O may be twice that
of plain PyTorch, plus 1e-6; in dQ, dK and dV three times, plus 1e-6 of the gradient's largest element, or
of 1. (Plain: what goes into a product and comes out of it is of the type. The math backend, in the table,
computes 16-bit types in fp32.) Without a GPU a stage also runs once under flash.inspect(), which counts its
HBM traffic and finds data races and other mistakes.

bwd: the gradients alone are timed, for a random dO. O and L are made before, by the best forward stage.
fwd+bwd: a backward stage runs after the forward stage of its name, such as naive after naive. One without a
namesake takes the next namesake on its branch, and of that the parent: recompute runs after flash2.

Exit status: 0; 1 if a stage was wrong or failed; 2 for bad arguments; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: else its profiler writes to stderr

import numpy
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import flash
from bench_report import (
    FLOPS,
    PASSES,
    lengths,
    results_table,
    show,
    show_sweep,
    title,
    write,
    write_sweep,
)

PEERS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
         "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
DEFAULTS = {"seqlens": ([512, 1024, 2048, 4096], [64, 128, 256]), "batch": (4, 1), "heads": ("12", "2"),
            "head_dim": (64, 64), "causal": (True, True), "dtype": ("fp32", "fp32"),
            "peers": (",".join(PEERS), "math")}  # on a GPU, on the CPU
SECONDS_A_CASE = 0.5
MOST_REPETITIONS = 200
TILE_SIZES = (8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)     # that --sweep tries, of those that fit
TIMES = ("median_ms", "p20_ms", "p80_ms", "repetitions", "tflops")
COUNTS = ("hbm_read_bytes", "hbm_written_bytes", "hbm_unique_bytes", "shared_bytes", "shared_wavefronts",
          "inspected_ms", "findings")
SIMULATED = "No GPU here: the stages' times are the simulator's, on the CPU. They say nothing about a GPU's."


# ---------------------------------------------------------------------------------------- what is compared
@dataclasses.dataclass(frozen=True)
class Competitor:
    """A stage, or a forward and a backward one, or a peer."""

    name: str       # of the stage that is compared, or of the peer
    label: str
    is_stage: bool
    forward: Callable[..., tuple[torch.Tensor, ...]]  # forward(q, k, v) returns its outputs, O first

    def prepare(self, direction: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                dO: torch.Tensor | None = None) -> Callable[[], tuple[torch.Tensor, ...]]:
        """What is timed: a call that returns (O, ...) or (dQ, dK, dV). The forward pass of "bwd" runs now."""
        if direction == "fwd":
            return functools.partial(self.forward, q, k, v)
        if direction == "bwd":
            return functools.partial(torch.autograd.grad, self.forward(q, k, v)[0], (q, k, v), dO,
                                     retain_graph=True)
        return lambda: torch.autograd.grad(self.forward(q, k, v)[0], (q, k, v), dO)


@dataclasses.dataclass(frozen=True)
class Case:
    """The tensors of one N, what is to be computed from them, and how wrong a stage may be."""

    N: int
    inputs: list[torch.Tensor]      # random_inputs
    exact: dict[str, torch.Tensor]  # O, or dQ, dK and dV, in float64
    allowed: dict[str, float]       # the largest error of each


def sdpa(backend: SDPBackend, causal: bool, q, k, v) -> tuple[torch.Tensor]:
    """(O,) by one of PyTorch's backends, and by no other."""
    with sdpa_kernel(backend):
        return (torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]),)


def of_stage(stage: flash.Stage, args: argparse.Namespace, **tiles: int) -> Competitor:
    """A stage of the pass, with its default tiles or these; for gradients with the forward stage that goes
    with it."""
    suffix = "_bwd" * (stage.direction == "bwd")
    options = {"stage": stage} | {f"{name}{suffix}": size for name, size in tiles.items()}
    name = stage.name if stage.number else stage.path.name  # a file may be called as a stage is
    label = " ".join(f"{name}={size}" for name, size in tiles.items()) or name
    if args.direction != "fwd":
        forward = forward_stage(stage, args)
        # deterministic: else the backward would follow torch's setting, which poisoned_memory() changes
        options |= {"stage": forward, "backward": stage, "deterministic": False}
        if args.direction == "fwd+bwd" and forward.name != stage.name:
            label = f"{forward.name} + {name}"
    return Competitor(stage.name, label, True, functools.partial(
        flash.attention, causal=args.causal, return_lse=True, **options))


def forward_stage(backward: flash.Stage, args: argparse.Namespace) -> flash.Stage:
    """The forward stage that runs before a backward one. For "bwd" the best that runs here; for "fwd+bwd" its
    namesake, else the parent of the next namesake on its branch; else that of the stage that it grew from."""
    best = flash.find_stage(None, flash.DTYPES[args.dtype], args.device, d=args.head_dim)
    if args.direction == "bwd":
        return best
    able = {stage.name: stage for stage in flash.stages("fwd") if not why_not(stage, args)}
    ladder = {stage.name: stage for stage in flash.stages("bwd")}
    stage: flash.Stage | None = backward
    while stage:
        if stage.name in able:
            return able[stage.name]
        if pair := next((name for name in descendants(stage, ladder) if name in able), None):
            return able.get(able[pair].after, able[pair])
        stage = ladder.get(stage.after)
    return best


def descendants(stage: flash.Stage, ladder: dict[str, flash.Stage]) -> list[str]:
    """The names of the stages that grew from it, its children first."""
    found = [stage.name]
    for name in found:
        found += [other.name for other in ladder.values() if other.after == name]
    return found[1:]


def competitors(args: argparse.Namespace) -> list[Competitor]:
    """The stages, then the peers that take the arguments; why others do not goes into `args.not_run`."""
    found = [of_stage(stage, args) for stage in args.stages]
    for name in args.peers:
        label = "PyTorch " + name.replace("cudnn", "cuDNN")
        if name == "efficient" and args.dtype == "fp32":
            label += " (3xTF32)"  # on tensor cores, where the fp32 stages use FMA
        peer = Competitor(name, label, False, functools.partial(sdpa, PEERS[name], args.causal))
        if reason := refusal(peer, args):
            args.not_run[label] = reason
        else:
            found.append(peer)
    return found


def refusal(peer: Competitor, args: argparse.Namespace) -> str:
    """Why a backend does not take these arguments, in PyTorch's words; empty if it does. Found by trying."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            peer.prepare(args.direction, *random_inputs(128, args))()
            return ""
        except RuntimeError as error:
            words = [str(warning.message).split(" (Triggered")[0] for warning in caught] + [str(error)]
    return next(w for w in words if not re.search("runtime disabled|not used because", w)).splitlines()[0]


def random_inputs(N: int, args: argparse.Namespace) -> list[torch.Tensor]:
    """q, k and v, (B, H, N, d), (B, H_kv, N, d) and the same; for gradients also dO, like q. They are normal,
    and the same in every run."""
    gradients = args.direction != "fwd"
    generator = torch.Generator(args.device).manual_seed(N)
    tensors = [torch.randn(args.batch, heads, N, args.head_dim, generator=generator, device=args.device,
                           dtype=flash.DTYPES[args.dtype])
               for heads in (args.H, args.H_kv, args.H_kv, *[args.H] * gradients)]
    for x in tensors[:3]:
        x.requires_grad_(gradients)
    return tensors


def plain_head(Q, K, V, dO=None, hidden: torch.Tensor | None = None,
               rounded: bool = False) -> tuple[torch.Tensor, ...]:
    """(O,) of one head, or for a dO (dQ, dK, dV), by the formulas of flash_fwd.cu and flash_bwd.cu.

    Args:
        Q, K, V, dO: (N, d), of any type.
        hidden: (N, N), true where a query does not see a key.
        rounded: products take and give Q's type, and what lies between is in float32; else all is in float64.
    """
    narrow, wide = (Q.dtype, torch.float32) if rounded else (torch.float64, torch.float64)
    Q, K, V = (x.to(narrow) for x in (Q, K, V))
    scale = 1 / math.sqrt(Q.shape[1])
    S = (scale * Q @ K.T).to(wide)
    P = (S if hidden is None else S.masked_fill_(hidden, -math.inf)).softmax(-1)
    if dO is None:
        return (P.to(narrow) @ V,)
    dO = dO.to(narrow)
    dP = (dO @ V.T).to(wide)
    dS = (P * (dP - (P * dP).sum(-1, keepdim=True))).to(narrow)
    return scale * dS @ K, scale * dS.T @ Q, P.to(narrow).T @ dO


def make_case(N: int, args: argparse.Namespace) -> Case:
    """Random inputs, what is exact for them, and plain PyTorch's error: by heads, so that a long N fits."""
    inputs = random_inputs(N, args)
    gradients = args.direction != "fwd"
    names = ("dQ", "dK", "dV") if gradients else ("O",)
    group = args.H // args.H_kv
    by_head = [x.detach().unflatten(1, (args.H_kv, -1)) for x in inputs]  # (B, H_kv, group or 1, N, d)
    exact, plain = ([torch.zeros_like(x, dtype=torch.float64) for x, _ in zip(by_head, names, strict=False)]
                    for _ in range(2))
    hidden = torch.ones(N, N, dtype=torch.bool, device=args.device).triu(1) if args.causal else None
    for at in itertools.product(range(args.batch), range(args.H_kv), range(group)):
        one_head = [x[at[:2]].expand(group, -1, -1)[at[2]] for x in by_head]
        for sums, rounded in (exact, False), (plain, True):
            for x, part in zip(sums, plain_head(*one_head, hidden=hidden, rounded=rounded), strict=True):
                x[at[:2]].expand(group, -1, -1)[at[2]].add_(part)  # dK and dV: the group's sum
    errors = [largest_error(x, truth) for x, truth in zip(plain, exact, strict=True)]
    exact = [x.flatten(1, 2) for x in exact]
    sizes = [max(1, x.abs().max().item()) for x in exact]  # a gradient may be a sum over many rows
    allowed = [3 * error + 1e-6 * size if gradients else 2 * error + 1e-6
               for error, size in zip(errors, sizes, strict=True)]
    return Case(N, inputs, dict(zip(names, exact, strict=True)), dict(zip(names, allowed, strict=True)))


# ---------------------------------------------------------------------------------------- measuring
def largest_error(o: torch.Tensor, exact: torch.Tensor) -> float:
    """max |o - exact|; NaN if there is a NaN in o."""
    return (o - exact).abs().max().item()


def worst_error(outputs: tuple[torch.Tensor, ...], case: Case) -> tuple[str, float]:
    """The output that is nearest to what is allowed, or most beyond it, or has a NaN; its largest error."""
    errors = {name: largest_error(x, exact) for (name, exact), x in zip(case.exact.items(), outputs)}
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name] / case.allowed[name]))
    return worst, errors[worst]


def complaint(name: str, error: float, allowed: float) -> str:
    """What is wrong with the largest error in an output, NaN too; empty if it is small enough."""
    return "" if error <= allowed else f"the largest error in {name} is {error:.2g}; {allowed:.2g} is allowed"


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Here torch.empty gives NaN: what a stage leaves unwritten is noticed, whatever lay there before."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def verdict(competitor: Competitor, outputs: tuple[torch.Tensor, ...], case: Case) -> dict:
    """What the largest error in the outputs changes in a row: a stage for which it is too large is wrong."""
    name, error = worst_error(outputs, case)
    found = {"error": error if math.isfinite(error) else None,  # JSON has no NaN
             "error_in": name, "allowed_error": case.allowed[name]}
    if competitor.is_stage and (message := complaint(name, error, case.allowed[name])):
        found |= {"status": "wrong", "message": message}
    return found


def failure(error: Exception) -> dict:
    """The status and message for an error; of a long one the first line, or what follows its colon."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return {"status": "out of memory"}
    return {"status": "failed", "message": re.match(r"(?:.*:\n)?.*", str(error))[0].replace("\n", " ")}


def empty_row(competitor: Competitor, N: int) -> dict:
    """A row of the results, with None for what is to be measured."""
    numbers = (*TIMES, "error", "error_in", "allowed_error", "scratch_bytes", "peak_bytes", *COUNTS)
    return {"name": competitor.name, "label": competitor.label, "N": N, "status": "ok", "message": "",
            "kind": "stage" if competitor.is_stage else "peer"} | dict.fromkeys(numbers)


def measure(competitor: Competitor, case: Case, args: argparse.Namespace) -> dict:
    """One row of the results. Its status: "ok", "wrong", "failed" or "out of memory"."""
    row = empty_row(competitor, case.N)
    prepare = functools.partial(competitor.prepare, args.direction, *case.inputs)
    try:
        with poisoned_memory() if competitor.is_stage else contextlib.nullcontext():
            outputs = prepare()()
        row |= verdict(competitor, outputs, case)
        if row["status"] != "ok":
            return row
        tensors = sum(x.nbytes for x in (*case.inputs, *outputs))
        tensors += case.inputs[0].nbytes * (args.direction != "fwd")  # O, which is like q
        del outputs
        call, held, _ = memory(prepare, args.device)
        peak = sum(x.nbytes for x in case.inputs) + held + memory(call, args.device)[2]
        times = milliseconds(call, args.device)
    except (RuntimeError, ValueError) as error:
        return row | failure(error)
    p20, median, p80 = numpy.percentile(times, (20, 50, 80)).tolist()
    return row | {"median_ms": median, "p20_ms": p20, "p80_ms": p80, "repetitions": len(times),
                  "tflops": tflops(median, case.N, args),
                  "scratch_bytes": peak - tensors, "peak_bytes": peak}


def tflops(ms: float, N: int, args: argparse.Namespace) -> float:
    """TFLOP/s of a call that takes so many milliseconds."""
    flops = FLOPS[args.direction] * args.batch * args.H * N * N * args.head_dim
    return flops / (2 if args.causal else 1) / ms / 1e9


def count_traffic(competitor: Competitor, case: Case, args: argparse.Namespace) -> dict:
    """What a run under flash.inspect() changes in the row of a stage: HBM traffic and a block's most shared
    memory, in bytes, wavefronts of shared memory, the time that it takes, the error, and what the checker
    finds. With a finding the stage is wrong, and loses its other times."""
    try:
        call = competitor.prepare(args.direction, *case.inputs)
        with flash.inspect() as report:
            start = time.perf_counter()
            outputs = call()
            seconds = time.perf_counter() - start
    except (RuntimeError, ValueError) as error:
        return dict.fromkeys(TIMES) | failure(error)
    hbm, findings = report.hbm, [finding.message for finding in report.findings]
    counts = {"hbm_read_bytes": hbm.read, "hbm_written_bytes": hbm.written,
              "hbm_unique_bytes": hbm.unique_read + hbm.unique_written,
              "shared_bytes": max((kernel.shared_bytes for kernel in report.kernels), default=0),
              "shared_wavefronts": sum(a.units for a in report.accesses if a.memory == "shared"),
              "inspected_ms": 1e3 * seconds, "findings": findings} | verdict(competitor, outputs, case)
    if findings:
        counts |= {"status": "wrong", "message": findings[0]}
    return counts | (dict.fromkeys(TIMES) if "status" in counts else {})


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


def memory(call: Callable, device: torch.device) -> tuple[Any, int, int]:
    """What a call returns, and how many bytes more than before it are held at its end, and at its peak. Not
    for the first call, in which cuBLAS allocates a workspace that it keeps."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # "requested": as the allocator rounds allocated bytes up
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        result = call()
        after = torch.cuda.memory_stats(device)
        return result, *(after[f"requested_bytes.all.{when}"] - before for when in ("current", "peak"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = call()
    held = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0  # negative when memory is freed
        peak = max(peak, held)
    return result, held, peak


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
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder, args.stages[-1].path.name)
        mine.write_text(args.stages[-1].path.read_text())
        entry = of_stage(dataclasses.replace(args.stages[-1], path=mine), args)
        inputs = random_inputs(128, args)
        entry.prepare(args.direction, *inputs)()
        mine.write_text(mine.read_text() + f"// {time.time()}\n")  # which no earlier run has built
        start = time.perf_counter()
        entry.prepare(args.direction, *inputs)()[0][0, 0, 0, 0].item()
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
                call = entry.prepare(args.direction, *random_inputs(8, args))
                call()
                with flash.inspect() if counting else contextlib.nullcontext():
                    call()
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
                    row.update(count_traffic(entry, case, args))
                bar.advance(task)


def origin(args: argparse.Namespace) -> dict:
    """Of a result: when, where, with what software, for which shape, pass and stages."""
    gpu = args.device.type == "cuda"
    arguments = {"pass": args.direction, "stages": [stage.name for stage in args.stages]}
    if args.direction != "fwd":
        arguments["forward"] = [forward_stage(stage, args).name for stage in args.stages]
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": flash.describe_device(args.device),
        "software": {"python": platform.python_version(),
                     "system": f"{platform.system()} {platform.machine()}",
                     "torch": torch.__version__, "cuda": torch.version.cuda,
                     "cudnn": torch.backends.cudnn.version(),
                     "nvcc": flash.nvcc_version(flash.find_nvcc(torch.version.cuda)) if gpu else None},
        "shape": {"B": args.batch, "H": args.H, "H_kv": args.H_kv, "d": args.head_dim, "causal": args.causal,
                  "dtype": args.dtype},
        "arguments": arguments}


def new_data(args: argparse.Namespace) -> dict:
    """What is measured, where and with what; no results yet."""
    gpu, data = args.device.type == "cuda", origin(args)
    data["arguments"] |= {"peers": args.peers, "seqlens": args.seqlens}
    return data | {
        "simulated": not gpu, "note": "" if gpu else SIMULATED,
        "ceiling": None, "edit_to_result_s": None, "not_run": args.not_run, "interrupted": False,
        "results": []}


# ---------------------------------------------------------------------------------------- --inspect
def inspect(args: argparse.Namespace) -> int:
    """Run one stage under flash.inspect(); print and write the report. Returns the exit status."""
    stage, N, error = args.stages[0], args.seqlens[0], ""
    with Console(stderr=True).status(f"inspecting {stage.name}"):
        call = of_stage(stage, args).prepare(args.direction, *random_inputs(N, args))
        with flash.inspect() as report:
            try:
                call()
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
    name = f"{data['arguments']['pass']}_{data['stage']}".removeprefix("fwd_")
    files = [folder / f"inspect_{name}.json"]
    files[0].write_text(json.dumps(data | report.to_dict(), indent=1, allow_nan=False) + "\n")
    if report.kernels:
        files.append(files[0].with_suffix(".png"))
        report.plot(files[1])
    if report.kernels and line:
        files.append(folder / f"inspect_{name}_line.png")
        report.plot(files[2], line=line)
    return files


# ---------------------------------------------------------------------------------------- --sweep
def sweep(args: argparse.Namespace) -> int:
    """Time one stage with all tile sizes that it takes here; show and write the result. Returns the exit
    status."""
    stage, shared_memory = args.stages[0], flash.shared_memory_per_block(args.device)
    data = new_data(args) | {"stage": stage.name, "d": args.head_dim}
    rows = args.batch * args.H * args.seqlens[0]
    data["default"] = stage.tiles(args.head_dim, shared_memory, rows, args.causal)
    choices = []
    for Br, Bc in itertools.product(TILE_SIZES, repeat=2):
        with contextlib.suppress(ValueError):
            choices.append(stage.tiles(args.head_dim, shared_memory, Br=Br, Bc=Bc))
    entries = {tuple(tiles.values()): of_stage(stage, args, **tiles) for tiles in [data["default"], *choices]}
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   console=Console(stderr=True), transient=True)
    try:
        with bar:
            task = bar.add_task(f"building {stage.name}", total=2 * len(entries))

            def build(entry: Competitor) -> None:
                with contextlib.suppress(RuntimeError):  # it comes again when it is measured, and is kept
                    entry.prepare(args.direction, *random_inputs(8, args))()
                bar.advance(task)
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(build, entries.values()))
            case = make_case(args.seqlens[0], args)
            for (Br, Bc), entry in entries.items():
                bar.update(task, description=f"N={case.N} {entry.label}")
                data["results"].append(measure(entry, case, args) | {"Br": Br, "Bc": Bc})
                bar.advance(task)
    except KeyboardInterrupt:
        data["interrupted"] = True
    if data["results"]:
        show_sweep(data, write_sweep(data, args.out))
    if data["interrupted"]:
        print(f"Interrupted after {len(data['results'])} of {len(entries)} tile sizes.", file=sys.stderr)
        return 130
    return int(any(row["status"] in ("wrong", "failed") for row in data["results"]))


# ---------------------------------------------------------------------------------------- python bench.py
def positive_integers(text: str) -> list[int]:
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; it takes integers of at least 1, such as 512,1024")
    return list(dict.fromkeys(numbers))


def passes(text: str) -> list[str]:
    asked = text.split(",")
    if unknown := [name for name in asked if name not in (*PASSES, "all")]:
        raise argparse.ArgumentTypeError(f"no pass {unknown[0]!r}; there are {', '.join(PASSES)}, and all")
    return list(PASSES) if "all" in asked else list(dict.fromkeys(asked))


def parse_arguments(argv: list[str] | None = None) -> list[argparse.Namespace]:
    """The arguments for each pass, checked: what cannot run is refused here, before anything is built (exit
    status 2)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pass", dest="passes", metavar="A,B", type=passes,
        help=f"of {', '.join(PASSES)}, or all; each has its own table and files; default: fwd, with --rungs "
             "fwd,bwd. bwd: the gradients alone, after the best forward stage. fwd+bwd: each backward stage "
             "with the forward stage of its name or, if there is none, with the parent of the next namesake "
             "on its branch (recompute: flash2)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stages", metavar="A,B",
                      help="by name (python flash.py lists them) or a .cuh file, for bwd and fwd+bwd of the "
                           "backward pass; each of several passes takes those it knows; default: all that "
                           "run here")
    what.add_argument("--inspect", metavar="STAGE",
                      help="time nothing: run this stage, a name or a .cuh file, once in the simulator, and "
                           "report every access to memory, and what is wrong with any; with --pass bwd, a "
                           "stage of the backward pass")
    what.add_argument("--sweep", metavar="STAGE",
                      help="time this stage, a name or a .cuh file, with all tile sizes that it takes here: "
                           "a table with the best first, and a picture; the header's tiles come from this")
    add("--rungs", action="store_true",
        help="time all stages, or --stages, by turns at a few shapes, and draw TFLOP/s by rung. Without a "
             "GPU: HBM traffic and wavefronts of shared memory by rung, counted")
    add("--line", metavar="FILE:LINE",
        help="with --inspect: also draw which lane of a warp touches which bank or sector at this line")
    what.add_argument("--markdown", metavar="JSON", type=Path,
                      help="measure nothing: print this result as a table")
    add("--seqlens", metavar="N,N", type=positive_integers,
        help="default: 512 to 4096, or 64 to 256 on CPU; with --inspect, 128; with --sweep, the largest")
    add("--batch", metavar="B", type=int, help="default: 4, or 1 on CPU")
    add("--heads", metavar="H[:H_kv]", help="of Q, and of K and V if fewer; default: 12, or 2 on CPU")
    add("--head-dim", metavar="d", type=int, help=f"a multiple of 8, to {flash.MAX_HEAD_DIM}; default: 64")
    add("--causal", action=argparse.BooleanOptionalAction, help="default: --causal")
    add("--dtype", help=f"of {', '.join(flash.DTYPES)}; default: fp32, with --rungs fp32 and bf16")
    add("--peers", metavar="A,B", help=f"PyTorch's backends, of {', '.join(PEERS)}, or none; those that "
                                       "refuse are left out; default: all, or math on CPU")
    add("--out", metavar="FOLDER", type=Path, default=flash.BUILD / "bench", help="default: build/bench")
    args = parser.parse_args(argv)
    args.device = torch.device("cpu") if args.inspect else flash.default_device()
    try:
        if args.markdown and not args.rungs:
            read_result(args)
            return [args]
        set_defaults(args)
        if args.rungs:
            import bench_rungs

            each = [bench_rungs.with_cases(args)]
        else:
            check_shape(args)
            args.peers = choose_peers(args.peers)
            each = [for_pass(direction, args) for direction in args.passes]
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    return each


def set_defaults(args: argparse.Namespace) -> None:
    """Set what is not given and depends on the device; check what goes together."""
    if args.line and not args.inspect:
        raise ValueError("--line: goes with --inspect")
    if args.rungs:
        options = ("inspect", "sweep", "markdown", "seqlens", "batch", "heads", "head_dim", "causal")
        if given := [name for name in options if getattr(args, name) is not None]:
            option = given[0].replace("_", "-")
            raise ValueError(f"--rungs: has shapes of its own, and takes no --{option}")
        if "fwd+bwd" in (args.passes or ()):
            raise ValueError("--rungs: draws each pass alone: --pass fwd, bwd or fwd,bwd")
        args.passes = args.passes or ["fwd", "bwd"]
        return
    args.passes = args.passes or ["fwd"]
    if args.inspect:
        if not (possible := flash.can_inspect()):
            raise ValueError(f"--inspect: {possible}")
        if args.passes not in (["fwd"], ["bwd"]):
            raise ValueError("--inspect: takes one pass: --pass fwd, the default, or --pass bwd")
        args.seqlens = args.seqlens or [128]
    if args.sweep:
        if len(args.passes) > 1:
            raise ValueError(f"--sweep: takes one pass; --pass has {', '.join(args.passes)}")
        args.seqlens = args.seqlens or DEFAULTS["seqlens"][args.device.type == "cpu"][-1:]
    for option in ("inspect", "sweep"):
        if getattr(args, option) and len(args.seqlens) > 1:
            raise ValueError(f"--{option}: takes one N; --seqlens has {', '.join(map(str, args.seqlens))}")
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


def for_pass(direction: str, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments for one of the passes, with its stages."""
    args = argparse.Namespace(**vars(args) | {"direction": direction, "not_run": {}})
    args.stages = choose_stages(args)
    if direction != "fwd" and all(why_not(stage, args) for stage in flash.stages("fwd")):
        raise ValueError(f"--pass {direction}: no forward stage runs here; python flash.py says why")
    return args


def stages_of(direction: str, args: argparse.Namespace) -> dict[str, flash.Stage]:
    """By name, the stages that a pass compares and that take the type."""
    return {stage.name: stage for stage in flash.stages(kind(direction))
            if flash.DTYPES[args.dtype] in stage.dtypes}


def choose_stages(args: argparse.Namespace) -> list[flash.Stage]:
    """The stages to run, in the ladder's order. One that cannot run goes into `args.not_run`, or, if it was
    asked for, is an error."""
    option = "--inspect" if args.inspect else "--sweep" if args.sweep else "--stages"
    one = args.inspect or args.sweep
    asked = [one] if one else args.stages.split(",") if args.stages else []
    own = own_stages(asked, option, args)
    known = stages_of(args.direction, args)
    known |= {text: stage for text, stage in own.items() if stage.direction == kind(args.direction)}
    elsewhere = {name for direction in args.passes for name in stages_of(direction, args)}
    elsewhere |= {text for text, stage in own.items() if stage.direction in map(kind, args.passes)}
    missing = [name for name in asked if name not in known]
    if unknown := [name for name in missing if missing == asked or name not in elsewhere]:
        if unknown[0] not in own:
            raise ValueError(f"{option}: {no_stage(unknown[0], args)}")
        if unknown[0] in elsewhere:
            raise ValueError(f"{option}: --pass {args.direction} has none of {', '.join(asked)}")
        raise ValueError(f"{option}: {unknown[0]} is {a_stage_of(own[unknown[0]].direction)}")
    chosen = [name for name in known if name in asked] if asked else list(known)
    reasons = {name: reason for name in chosen if (reason := why_not(known[name], args))}
    if reasons and (asked or len(reasons) == len(chosen)):
        raise ValueError("{}: {}: {}".format(option, *next(iter(reasons.items()))))
    args.not_run |= reasons
    able = (known[name] for name in chosen if name not in reasons)
    return list({(stage.path, stage.name): stage for stage in able}.values())  # by path and by name: once


def kind(direction: str) -> str:
    """Of the stages that a pass compares: "fwd" or "bwd"."""
    return "fwd" if direction == "fwd" else "bwd"


def own_stages(asked: list[str], option: str, args: argparse.Namespace) -> dict[str, flash.Stage]:
    """Those of `asked` that are paths: they end in .cuh, or have a slash. If the file's first line does not
    say for which pass it is, its parameters do."""
    found: dict[str, flash.Stage] = {}
    for text in asked:
        if not text.endswith(".cuh") and "/" not in text:
            continue
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"{option}: there is no file {text}")
        code = path.read_text(errors="replace")
        named = [which for which in ("fwd", "bwd") if f"{which.capitalize()}Params" in code]
        stage = flash.read_stage(path, (named or [kind(args.passes[0])])[0])
        if any(other.path.name == path.name and other != stage for other in found.values()):
            raise ValueError(f"{option}: two files are called {path.name}: give one of them another name")
        found[text] = stage
    return found


def a_stage_of(direction: str) -> str:
    """For an error: what a stage is, and which option takes it."""
    return f"a {PASSES[direction]} stage: add --pass {direction}"


def no_stage(name: str, args: argparse.Namespace) -> str:
    """For an error: that the pass, or each of several, has no such stage, and which there are."""
    there = {which: stages_of(which, args) for which in ("fwd", "bwd")}
    here = kind(args.direction)
    asked = set(map(kind, args.passes))
    if len(asked) == 2 and not any(name in stages for stages in there.values()):
        names = "; ".join(f"{PASSES[which]}: {', '.join(stages)}" for which, stages in there.items())
        return f"no stage {name!r} for {args.dtype} in any of the passes; there are {names}"
    text = f"no {PASSES[here]} stage {name!r} for {args.dtype}; there are {', '.join(there[here])}"
    other = "bwd" if here == "fwd" else "fwd"
    return text + f"; it is {a_stage_of(other)}" * (len(asked) == 1 and name in there[other])


def why_not(stage: flash.Stage, args: argparse.Namespace) -> str:
    """Why a stage cannot run with these arguments; empty if it can."""
    if flash.DTYPES[args.dtype] not in stage.dtypes:
        return f"does not take {args.dtype}"
    try:
        stage.tiles(args.head_dim, flash.shared_memory_per_block(args.device))
        return stage.available(args.device, flash.DTYPES[args.dtype]).reason
    except ValueError as error:
        return str(error)


def choose_peers(text: str) -> list[str]:
    peers = [] if text == "none" else list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in peers if name not in PEERS]:
        raise ValueError(f"--peers: there is no {unknown[0]!r}; there are {', '.join(PEERS)}, or none")
    return peers


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    each = parse_arguments(argv)
    if each[0].markdown:
        print("\n\n".join(results_table(each[0].data, N) for N in each[0].seqlens))
        return 0
    if each[0].inspect or each[0].sweep or each[0].rungs:
        import bench_rungs

        mode = inspect if each[0].inspect else sweep if each[0].sweep else bench_rungs.rungs
        try:
            return mode(each[0])
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
            return 130
    status = 0
    for args in each:
        status = max(status, run_pass(args))
        if status == 130:
            break
    return status


def run_pass(args: argparse.Namespace) -> int:
    """Measure, show and write one pass. Returns the exit status."""
    data = new_data(args)
    try:
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
    import bench  # this file as a module, which bench_rungs imports too

    sys.exit(bench.main())
