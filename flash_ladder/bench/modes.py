"""What bench.py does: a comparison, --inspect, --sweep; the other modes have modules of their own."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

import flash

from .arguments import parse_arguments
from .cases import make_case, random_inputs
from .competitors import Competitor, competitors, of_stage
from .decode import decode
from .measuring import ceiling, count_traffic, edit_to_result, empty_row, failure, measure, origin
from .report import results_table, show, show_sweep, title, write, write_sweep
from .rungs import rungs
from .timeline import timeline
from .varlen import varlen

TILE_SIZES = (8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)     # that --sweep tries, of those that fit
SIMULATED = "No GPU here: the stages' times are the simulator's, on the CPU. They say nothing about a GPU's."


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


def new_data(args: argparse.Namespace) -> dict:
    """What is measured, where and with what; no results yet."""
    gpu, data = args.device.type == "cuda", origin(args)
    data["arguments"] |= {"peers": args.peers, "seqlens": args.seqlens}
    return data | {
        "simulated": not gpu, "note": "" if gpu else SIMULATED,
        "ceiling": None, "edit_to_result_s": None, "not_run": args.not_run, "interrupted": False,
        "results": []}


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


def sweep(args: argparse.Namespace) -> int:
    """Time one stage with all tile sizes that it takes here; show and write the result. Returns the exit
    status."""
    stage, shared_memory = args.stages[0], flash.shared_memory_per_block(args.device)
    data = new_data(args) | {"stage": stage.name, "d": args.head_dim}
    rows = args.batch * args.H * args.seqlens[0]
    data["default"] = stage.tiles(args.head_dim, shared_memory, rows, args.causal,
                                 keys=args.seqlens[0])
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


MODES = (inspect, sweep, rungs, varlen, decode, timeline)       # each by an option of its name


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    each = parse_arguments(argv)
    if each[0].markdown:
        print("\n\n".join(results_table(each[0].data, N) for N in each[0].seqlens))
        return 0
    if mode := next((mode for mode in MODES if getattr(each[0], mode.__name__)), None):
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
