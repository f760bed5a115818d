"""bench.py --timeline: what the warps of a block do side by side, from the marks that a stage leaves when
it is compiled with stages/common/timeline.cuh."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import json
import math
import re
import sys
from pathlib import Path

import numpy
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import flash

from ..grid import PACKED
from ..launch import more_macros
from ..plan import Plan, as_scale, empty_like, forward_outputs
from ..simulator import missing_compiler
from ..sources import STAGES, source_files
from ..stage import TENSORS
from . import chart
from .cases import random_inputs
from .marks import BUFFER, Block, Span, from_zero, read, shares, spans
from .measuring import milliseconds, origin
from .report import direction, number, title
from .steps import in_steps

FILES = {direction: STAGES / "common" / f"timeline_{direction}.cuh" for direction in TENSORS}
NEEDED = "hopper.cuh"     # whose instructions leave marks
MOST_SIMULATED = 512      # rows, where the simulator's is drawn beside a GPU's
MANY_ROWS = 1 << 20       # in the simulator a small call has the tiles of a large one
TOO_SLOW = 1.05           # marks that cost more than this are left out where products are under way
SOFTMAX_OF = {"fwd": "softmax", "bwd": "P and dS"}      # what the table tells of, beside products
SIMULATED = ("Time in steps of a model, not measured: the simulator says what each warp does in which order, "
             "and the model says what that takes. A step is a product of 64 x 16 x 16 on the tensor cores.")
ON_GPU = "Products are drawn from their issue until the wait for them has ended: they may be done before."
SPARSE = ("Marks where products are under way cost too much, and are left out: a bar of products is all that "
          "are issued together, and what goes on beside it is not seen.")


def has_marks(stage: flash.Stage) -> bool:
    """Whether a stage calls what leaves marks: those from tma on, but for the backward's for packed
    sequences, whose copies are asked for in stages/common."""
    includes = any(file.name == NEEDED for file in source_files(stage.path))
    return includes and not (stage.direction == "bwd" and stage.name in PACKED)


def check_stages(stages: list[flash.Stage]) -> None:
    """Raise ValueError for a stage that leaves no marks."""
    if without := [stage for stage in stages if not has_marks(stage)]:
        able = ",".join(stage.name for stage in flash.stages(without[0].direction) if has_marks(stage))
        raise ValueError(f"--timeline: {without[0].name} leaves no marks; those from tma on do, whose copies "
                         f"and products are asynchronous: --stages {able}")


# ---------------------------------------------------------------------------------------- a run
def tensors(N: int, args: argparse.Namespace) -> dict[str, torch.Tensor | None]:
    """Those of a call, by name. A backward pass gets O and L of a forward one; in the simulator zeros, as no
    number changes which marks there are."""
    inputs = [x.detach() for x in random_inputs(N, args)]
    q, k, v = inputs[:3]
    named: dict[str, torch.Tensor | None] = dict(zip(("Q", "K", "V", "dO"), inputs, strict=False))
    if args.direction == "fwd":
        o, lse = forward_outputs(q, v)
        return named | {"O": o, "L": lse}
    gradients = {"dQ": empty_like(q), "dK": empty_like(k), "dV": empty_like(v)}
    if args.device.type == "cuda":
        o, lse = flash.attention(q, k, v, causal=args.causal, return_lse=True)
    else:
        o, lse = (x.zero_() for x in forward_outputs(q, v))
    return named | gradients | {"O": o, "L": lse}


class Run:
    """A call of a stage, ready to be launched. marked: None, or whether it also leaves marks while products
    are under way.

    Raises:
        RuntimeError: if it does not compile.
    """

    def __init__(self, stage: flash.Stage, N: int, args: argparse.Namespace, marked: bool | None):
        rows = args.batch * args.H * N if args.device.type == "cuda" else MANY_ROWS
        self.tiles = stage.tiles(args.head_dim, flash.shared_memory_per_block(args.device), rows, args.causal)
        self._tensors = tensors(N, args)
        macros: dict[str, str | Path] = {} if marked is None else {
            "TIMELINE_FILE": FILES[stage.direction], "TIMELINE_IN_FLIGHT": str(int(marked))}
        token = more_macros.set(macros)
        try:
            self._plan = Plan(stage, self.tiles, False, 0 if args.causal else None,
                              as_scale(None, args.head_dim), self._tensors)
        finally:
            more_macros.reset(token)
        self._device = args.device

    def __call__(self) -> None:
        self._plan.launch(*map(self._tensors.get, TENSORS[self._plan.stage.direction]))

    def marks(self) -> numpy.ndarray:
        """Of one launch: a BUFFER.

        Raises:
            RuntimeError: for an error of the launch, or if timeline.cuh and marks.py differ.
        """
        symbols, buffer = self._plan.library.symbols, numpy.zeros((), BUFFER)
        size_of, clear, copy_to = (symbols[f"flash_timeline_{name}"] for name in ("bytes", "clear", "read"))
        size_of.restype, clear.restype, copy_to.restype = ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p
        if size_of() != buffer.nbytes:
            raise RuntimeError("struct Marks in timeline.cuh and BUFFER in marks.py differ: make them "
                               "the same")
        for do in (clear, self, lambda: copy_to(ctypes.c_void_p(buffer.ctypes.data))):
            if error := do():
                raise RuntimeError(f"{self._plan.stage}: {error.decode()}")
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        return buffer


def simulated(stage: flash.Stage, N: int, args: argparse.Namespace) -> dict:
    """What the model makes of a run in the simulator: spans in steps."""
    run = Run(stage, N, args, marked=True)
    of_product = math.ceil(args.head_dim / 16) * run.tiles["Bc"] // 16
    block = in_steps(read(run.marks(), stage), of_product)
    return result(block) | {"unit": "steps", "note": SIMULATED, "tiles": run.tiles}


def measured(stage: flash.Stage, N: int, args: argparse.Namespace) -> dict:
    """The marks of a run on a GPU, and what they cost: spans in nanoseconds."""
    plain, sparse, everywhere = (Run(stage, N, args, marked) for marked in (None, False, True))
    ms = {}
    for name, run in (("unmarked", plain), ("marked", sparse), ("marked everywhere", everywhere)):
        run()
        ms[name] = float(numpy.median(milliseconds(run, args.device)))
    in_flight = ms["marked everywhere"] <= TOO_SLOW * ms["unmarked"]
    chosen = everywhere if in_flight else sparse
    data = of_marks(chosen.marks(), stage, in_flight) | {"ms": ms, "tiles": chosen.tiles}
    model = beside(stage, N, args)
    return data | ({"model": model} if model else {})


def beside(stage: flash.Stage, N: int, args: argparse.Namespace) -> dict | None:
    """What the model makes of the same stage, for a shape that the simulator runs in seconds; None without
    a compiler."""
    if missing_compiler():
        return None
    N, small = min(N, MOST_SIMULATED), {"device": torch.device("cpu"), "batch": 1, "H": 2, "H_kv": 2}
    args = argparse.Namespace(**vars(args) | small)
    return of_call(stage, N, args) | simulated(stage, N, args)


def of_call(stage: flash.Stage, N: int, args: argparse.Namespace) -> dict:
    """What a result says of a call: origin(), and the stage. The simulator runs no forward stage before."""
    data = origin(args) | {"stage": stage.name}
    data["shape"]["N"] = N
    if args.device.type == "cpu":
        data["arguments"].pop("forward", None)
    return data


def of_marks(buffer: numpy.ndarray, stage: flash.Stage, in_flight: bool) -> dict:
    """Marks with times, as a result. clock_ns: the least time between two of them."""
    block = from_zero(read(buffer, stage))
    times = sorted({mark.time for marks in block.lanes.values() for mark in marks})
    clock = min((int(after - before) for before, after in itertools.pairwise(times)), default=0)
    note = f"{ON_GPU if in_flight else SPARSE} The clock moves on by {clock} ns at a time."
    return result(block) | {"unit": "ns", "note": note, "multiprocessor": block.multiprocessor,
                            "in_flight": in_flight, "clock_ns": clock}


def result(block: Block) -> dict:
    found = spans(block)
    return {"block": block.number, "cut_short": block.is_cut_short, "shares": shares(found),
            "spans": [list(dataclasses.astuple(span)) for span in found]}


# ---------------------------------------------------------------------------------------- the mode
def timeline(args: argparse.Namespace) -> int:
    """Run each stage at each N, show and write. Returns the exit status."""
    status, N, all_data, files = 0, args.seqlens[0], [], []
    for stage in args.stages:
        data = of_call(stage, N, args) | {"error": ""}
        with Console(stderr=True).status(f"time line of {stage.name}"):
            try:
                data |= (measured if args.device.type == "cuda" else simulated)(stage, N, args)
            except (RuntimeError, ValueError) as error:
                data["error"], status = str(error), 1
        all_data.append(data)
        files += write(data, args.out)
    show(all_data, files)
    for data in all_data:
        if data["error"]:
            print(f"{data['stage']}: {data['error']}", file=sys.stderr)
    return status


def write(data: dict, folder: Path) -> list[Path]:
    """A time line as JSON and as a picture, in a folder that exists."""
    name = f"{direction(data)}_{data['stage']}".removeprefix("fwd_")
    files = [folder / f"timeline_{name}{end}" for end in (".json", ".png")]
    text = json.dumps(data, indent=1, allow_nan=False)
    a_line_each = re.sub(r'\[\n\s+("[^][]*?)\n\s+\]', lambda m: f"[{' '.join(m[1].split())}]", text)
    files[0].write_text(a_line_each + "\n")
    if data["error"]:
        return files[:1]
    chart.draw(data, files[1])
    return files


def spans_of(data: dict) -> list[Span]:
    """Those of a result, as JSON holds it."""
    return [Span(*span) for span in data["spans"]]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def rows(all_data: list[dict]) -> list[list[str]]:
    """The table's texts, a header first."""
    on_gpu = any("ms" in data for data in all_data)
    header = ["stage", "products under way", f"{SOFTMAX_OF[direction(all_data[0])]} beside products"]
    found = [header + ["unmarked (ms)", "marked", "everywhere"] * on_gpu]
    for data in all_data:
        if data["error"]:
            continue
        row = [data["stage"], percent(data["shares"]["products"]), percent(data["shares"]["softmax"])]
        if ms := data.get("ms"):
            row += [number(ms["unmarked"]), *(f"{ms[name] / ms['unmarked']:.2f}x"
                                              for name in ("marked", "marked everywhere"))]
        found.append(row)
    return found


def show(all_data: list[dict], files: list[Path]) -> None:
    """The table on the terminal, with what a reader must know of it."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 100
    header, *lines = rows(all_data)
    table = Table(title=f"{title(all_data[0])}, N={all_data[0]['shape']['N']}", box=box.HORIZONTALS)
    for column in header:
        table.add_column(column, justify="left" if column == "stage" else "right")
    for line in lines:
        table.add_row(*line)
    console.print(all_data[0]["device"])
    console.print(table)
    console.print(f"Of a block's time, and of that of its {SOFTMAX_OF[direction(all_data[0])]}.")
    for note in dict.fromkeys(data["note"] for data in all_data if not data["error"]):
        console.print(note)
    console.print(*files, sep="\n", soft_wrap=True)
