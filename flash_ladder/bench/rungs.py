"""What each rung of the ladders gives: bench.py --rungs.

On a GPU all stages are timed by turns, beside PyTorch's backends, at the shapes below. Without one the
simulator counts what each asks of HBM and of shared memory. staircase.py draws both.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

import flash

from .. import ahead
from . import cases, competitors, masked, measuring, staircase
from .rung_cases import note_not_run

TURNS = 5
MS_A_TURN, MOST_CALLS = 20, 8        # of a turn: as many calls as fit, but no more than these
MS_A_STAGE = 500                     # slow stages have fewer turns
LONGEST_MS = 1000                    # of a call; slower stages are skipped
NO_GPU = ("No GPU here. Times by rung need one: the simulator's say nothing about a GPU's. Counted instead, "
          "for one small shape: what each rung asks of HBM and of shared memory.")


def described(args: argparse.Namespace) -> str:
    """The pass, the type and the shape."""
    mask = "causal" if args.causal else "full"
    return f"{args.direction} {args.dtype} d={args.head_dim} {mask} N={args.seqlens[0]}"


# ---------------------------------------------------------------------------------------- building ahead
def libraries(args: argparse.Namespace, checked: bool = False) -> Iterator[tuple]:
    """What flash.build() is called with for the stages, and for gradients also for the forward ones.
    checked: those of the pass are to be inspected."""
    d, dtype, mask = args.head_dim, flash.DTYPES[args.dtype], masked.file(args)
    before = {competitors.forward_stage(stage, args): None
              for stage in args.stages if args.direction != "fwd"}
    for stage in (*args.stages, *before):
        sizes = [stage.tiles(d, flash.shared_memory_per_block(args.device),
                             args.batch * args.H * args.seqlens[0], args.causal, keys=args.seqlens[0])]
        if args.device.type == "cuda":  # a call there builds them all
            sizes = ahead.variants(stage, d, args.device, args.causal)
        for tiles in sizes:
            yield (*ahead.job(stage, dtype, d, args.causal, tiles, args.device, mask=mask),
                   checked and stage not in before)


def build_all(cases: list[argparse.Namespace], bar: Progress, checked: bool = False) -> None:
    """Compile all kernels, several at a time. An error comes again in its case, and is kept."""
    calls = {str(call): call for args in cases for call in libraries(args, checked)}
    task = bar.add_task("building", total=len(calls))
    with contextlib.suppress(RuntimeError):
        ahead.build_all(calls.values(), lambda: bar.advance(task))


# ---------------------------------------------------------------------------------------- times, by turns
@dataclasses.dataclass
class Runner:
    """A stage or a peer that is right, and its times so far."""

    row: dict
    call: Callable[[], tuple[torch.Tensor, ...]]
    calls: int          # of a turn
    turns: int
    host_ms: float      # that the host takes to enqueue a call
    times: list[float] = dataclasses.field(default_factory=list)


def entries(args: argparse.Namespace) -> list[tuple[competitors.Competitor, dict]]:
    """The stages, then the peers that take the arguments, each with its row, which is empty."""
    pairs = itertools.zip_longest(competitors.competitors(args), args.stages)
    return [(entry, empty_row(entry, stage, args)) for entry, stage in pairs]


def empty_row(entry: competitors.Competitor, stage: flash.Stage | None, args: argparse.Namespace) -> dict:
    """A row of the results, with None for what is to be measured or counted. stage: None for a peer."""
    row = {"pass": args.direction, "dtype": args.dtype, "B": args.batch, "H": args.H, "N": args.seqlens[0],
           "d": args.head_dim, "causal": args.causal, "name": entry.label, "kind": "peer"}
    if stage:
        row |= {"kind": "stage", "after": stage.after, "default": stage.default}
    return row | {"status": "ok", "message": ""} | dict.fromkeys(
        ("median_ms", "tflops", "turns_ms", "error", "error_in", "allowed_error", "hbm_bytes",
         "shared_wavefronts"))


def device_ms(call: Callable, count: int, host_ms: float) -> float:
    """Milliseconds of one of `count` calls, by CUDA events. A sleep holds the queue back until all are in it,
    so that no host time counts."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2 * host_ms * count * 2e6))  # in clock cycles, at about 2 GHz
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def host_times(call: Callable) -> tuple[float, float]:
    """Milliseconds that the host takes to enqueue a call, and until that is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    return 1e3 * (enqueued - start), 1e3 * (time.perf_counter() - start)


def check(entry: competitors.Competitor, row: dict, case: cases.Case,
          args: argparse.Namespace) -> Runner | None:
    """Complete the row of a stage or a peer. Returns what to time, if it is right and not too slow."""
    try:
        with cases.poisoned_memory() if entry.is_stage else contextlib.nullcontext():
            call = entry.prepare(args.direction, *case.inputs)
            row |= cases.verdict(entry, call(), case)
        if row["status"] != "ok":
            return None
        enqueuing, one = host_times(call)
        if one > LONGEST_MS:
            row |= {"status": "skipped", "message": f"a call takes {one / 1e3:.1f} s"}
            return None
        if one < MS_A_TURN:  # the first time the host may have waited, for memory, say
            enqueuing = min(enqueuing, host_times(call)[0])
        one = device_ms(call, 1, enqueuing)
    except (RuntimeError, ValueError) as error:
        row |= measuring.failure(error)
        return None
    calls = max(1, min(MOST_CALLS, int(MS_A_TURN / one)))
    return Runner(row, call, calls, max(1, min(TURNS, int(MS_A_STAGE / (calls * one)))), enqueuing)


def time_by_turns(runners: list[Runner]) -> None:
    """Several turns of each, as a GPU that is hot and at its power limit is slower than before."""
    for turn in range(TURNS):
        for runner in runners:
            if turn < runner.turns and runner.row["status"] == "ok":
                try:
                    runner.call()
                    runner.times.append(device_ms(runner.call, runner.calls, runner.host_ms))
                except RuntimeError as error:
                    runner.row |= measuring.failure(error)


def measured(args: argparse.Namespace, case: cases.Case, bar: Progress, task: TaskID) -> list[dict]:
    """A row for each stage, and for each peer that takes the arguments."""
    rows, runners = [], []
    for entry, row in entries(args):
        bar.update(task, description=f"{described(args)} {entry.label}: checking")
        rows.append(row)
        if runner := check(entry, row, case, args):
            runners.append(runner)
        bar.advance(task, entry.is_stage)
    bar.update(task, description=f"{described(args)}: timing by turns")
    time_by_turns(runners)
    for runner in runners:
        if runner.row["status"] == "ok":
            ms = statistics.median(runner.times)
            runner.row |= {"turns_ms": runner.times, "median_ms": ms,
                           "tflops": measuring.tflops(ms, case, args)}
    note_parents(rows)
    return rows


def note_parents(rows: list[dict]) -> None:
    """Each stage's row has its parent's TFLOP/s of the same run, if that was in it: another run may find the
    GPU at another clock, so that a gain over a row of that would be of the clock, too."""
    found = {row["name"]: row["tflops"] for row in rows if row["status"] == "ok"}
    for row in rows:
        if parent := found.get(row.get("after")):
            row["parent_tflops"] = parent


def counted(args: argparse.Namespace, case: cases.Case, bar: Progress, task: TaskID) -> list[dict]:
    """A row for each stage: its traffic, counted in the simulator."""
    rows = []
    for entry, row in entries(args):
        bar.update(task, description=f"{described(args)} {entry.label}: counting")
        counts = measuring.count_traffic(entry, case, args)
        rows.append(row | {name: value for name, value in counts.items() if name in row})
        if rows[-1]["status"] == "ok":
            rows[-1]["hbm_bytes"] = counts["hbm_read_bytes"] + counts["hbm_written_bytes"]
        bar.advance(task)
    return rows


# ---------------------------------------------------------------------------------------- the whole run
def run(args: argparse.Namespace, data: dict, file: Path) -> None:
    """Measure or count everything, shape by shape, into `data` and the file, with a progress bar."""
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=Console(stderr=True)) as bar:
        build_all(args.cases, bar, data["simulated"])
        task = bar.add_task("", total=sum(len(case.stages) for case in args.cases))
        for case_args in args.cases:
            bar.update(task, description=f"{described(case_args)}: float64")
            try:
                case = cases.make_case(case_args.seqlens[0], case_args)
                rows = (counted if data["simulated"] else measured)(case_args, case, bar, task)
            except RuntimeError as error:  # too long an N; or a GPU that an earlier error left unusable
                rows = [empty_row(competitors.of_stage(stage, case_args), stage, case_args)
                        | measuring.failure(error)
                        for stage in case_args.stages]
            data["rows"] += rows
            note_not_run(case_args, data["not_run"])
            write(data, file)
            if not data["simulated"]:
                torch.cuda.empty_cache()


def write(data: dict, file: Path) -> None:
    """As JSON, with a line for each row. Never half of it: the old file, or the new one."""
    head = json.dumps(data | {"rows": []}, indent=1).removesuffix("[]\n}")
    rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in data["rows"])
    beside = file.with_suffix(".tmp")
    beside.write_text(f"{head}[\n{rows}\n ]\n}}\n")
    os.replace(beside, file)


def rungs(args: argparse.Namespace) -> int:
    """Measure, show, draw and write all rungs. Returns the exit status."""
    start, simulated = time.perf_counter(), args.device.type == "cpu"
    origin = measuring.origin(args.cases[0])
    data = {name: origin[name] for name in ("date", "device", "software")}
    data |= {"simulated": simulated, "note": NO_GPU if simulated else "", "interrupted": False,
             "seconds": None, "not_run": args.not_run, "rows": []}
    torch.backends.cuda.matmul.allow_tf32 = False  # for PyTorch's math backend
    if simulated:
        if not (possible := flash.can_inspect()):
            print(f"--rungs: without a GPU it counts, and cannot here: {possible}", file=sys.stderr)
            return 2
        print(NO_GPU, file=sys.stderr)
    file = args.out / "rungs.json"
    try:
        run(args, data, file)
    except KeyboardInterrupt:
        data["interrupted"] = True
    data["seconds"] = round(time.perf_counter() - start)
    if data["rows"]:
        write(data, file)
        staircase.show(data, [file, *staircase.draw_all(data, args.out)])
    if data["interrupted"]:
        print(f"Interrupted after {len(data['rows'])} rows.", file=sys.stderr)
        return 130
    return int(any(row["kind"] == "stage" and row["status"] in ("wrong", "failed") for row in data["rows"]))
