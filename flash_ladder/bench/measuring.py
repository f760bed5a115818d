"""Times, memory and counted traffic of one stage or peer."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import platform
import re
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.profiler import ProfilerActivity, profile

import flash

from ..launch import LOOK_AGAIN
from .cases import Case, poisoned_memory, random_inputs, verdict
from .competitors import Competitor, forward_stage, of_stage
from .report import FLOPS

SECONDS_A_CASE = 0.5
MOST_REPETITIONS = 200
TIMES = ("median_ms", "p20_ms", "p80_ms", "repetitions", "tflops")
COUNTS = ("hbm_read_bytes", "hbm_written_bytes", "hbm_unique_bytes", "shared_bytes", "shared_wavefronts",
          "inspected_ms", "findings")


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
    row = empty_row(competitor, case.N) | ({"pairs": case.pairs} if args.mask else {})
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
                  "tflops": tflops(median, case, args),
                  "scratch_bytes": peak - tensors, "peak_bytes": peak}


def tflops(ms: float, case: Case, args: argparse.Namespace) -> float:
    """TFLOP/s of a call that takes so many milliseconds: over pairs that count; --causal leaves half."""
    pairs = args.batch * args.H * case.N * case.N / 2 if args.causal else case.pairs
    return FLOPS[args.direction] * pairs * args.head_dim / ms / 1e9


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
    """Seconds from saving an edited stage to its result, in a Python process that has run it before, with the
    time until a call looks at the file again. (Each bench leaves two builds behind that nothing uses again:
    make clean.)"""
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder, args.stages[-1].path.name)
        mine.write_text(args.stages[-1].path.read_text())
        entry = of_stage(dataclasses.replace(args.stages[-1], path=mine), args)
        inputs = random_inputs(128, args)
        entry.prepare(args.direction, *inputs)()
        mine.write_text(mine.read_text() + f"// {time.time()}\n")  # which no earlier run has built
        start = time.perf_counter()
        time.sleep(LOOK_AGAIN)
        entry.prepare(args.direction, *inputs)()[0][0, 0, 0, 0].item()
        return time.perf_counter() - start


def origin(args: argparse.Namespace) -> dict:
    """Of a result: when, where, with what software, for which shape, pass and stages."""
    gpu = args.device.type == "cuda"
    arguments = {"pass": args.direction, "stages": [stage.name for stage in args.stages]}
    if args.direction != "fwd":
        arguments |= {"checkpoint": True} if args.checkpoint else {}
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
                  "dtype": args.dtype} | ({"mask": args.mask} if args.mask else {}),
        "arguments": arguments}
