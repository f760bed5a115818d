"""What the notebooks share: tensors, the truth to compare with, measurements, tables, and stages to break.

    from tutorials.lesson import *

gives them flash, torch, Path and the functions below. On a machine without a GPU everything runs in the
simulator, and `measure` counts HBM traffic; with one, it takes times as well.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import PIL.Image
import torch
from IPython.display import HTML, Image, Markdown, display

import flash
from flash_ladder.difference import SECTION
from flash_ladder.reference import (
    max_error,
    random_gradients,
    random_qkv,
    reference,
    reference_gradients,
)
from flash_ladder.simulator.tables import format_bytes
from tutorials.figures import DPI
from tutorials.figures.staircase import staircase as draw_staircase

__all__ = ["DEVICE", "HTML", "Markdown", "Path", "answers", "break_stage", "code", "diff", "display", "error",
           "exercises", "findings", "flash", "format_bytes", "gpu", "gradient_errors", "gradients",
           "hide_answers", "measure", "plt", "results", "show", "staircase", "table", "tensors", "times",
           "torch", "waiting"]

DEVICE = flash.default_device()
RESULTS = flash.ROOT / "results"
BROKEN = flash.BUILD / "broken"  # stages that a lesson breaks on purpose
WIDTH = 110
COLOURS = 96  # of a picture

torch.set_printoptions(precision=4, sci_mode=False, linewidth=WIDTH)


def gpu() -> bool:
    """Whether there is a GPU to run on."""
    return DEVICE.type == "cuda"


# ------------------------------------------------------------------------------------------ attention
def tensors(N: int = 128, d: int = 64, *, B: int = 1, H: int = 2, H_kv: int | None = None,
            N_k: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple:
    """Random q (B, H, N, d), k and v (B, H_kv, N_k, d), on this machine's device. Default: H_kv = H, N_k = N.

    Each has its own scale and offset, so that no symmetry hides a mistake.
    """
    return tuple(random_qkv(B, H, H_kv or H, N, N_k or N, d, DEVICE, dtype, seed))


def error(o: torch.Tensor, q, k, v, causal: bool = False) -> float:
    """The largest difference from attention in float64. NaN if there is a NaN."""
    return max_error(o, reference(q.double(), k.double(), v.double(), _diagonal(q, k, causal))[0])


def gradients(q, k, v, causal: bool = False, **options) -> tuple:
    """(dQ, dK, dV) by flash.attention, for a random dO. options: of flash.attention, such as backward=."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    o = flash.attention(q, k, v, causal=causal, **options)
    return torch.autograd.grad(o, (q, k, v), random_gradients(q)[0])


def gradient_errors(found: tuple, q, k, v, causal: bool = False) -> dict[str, float]:
    """The largest differences of `gradients` from those in float64, by name."""
    exact = reference_gradients(q, k, v, random_gradients(q)[0], _diagonal(q, k, causal))
    return {f"d{name}": max_error(x, y) for name, x, y in zip("QKV", found, exact, strict=True)}


def _diagonal(q, k, causal: bool) -> int | None:
    return k.shape[2] - q.shape[2] if causal else None


# ------------------------------------------------------------------------------------------ measuring
def measure(stages: list, N: int = 256, d: int = 64, *, B: int = 1, H: int = 2, causal: bool = False,
            dtype: torch.dtype = torch.float32, backward: bool = False) -> Markdown:
    """A table of stages: the HBM traffic that each asks for, counted in the simulator. With a GPU then also
    `times`, of a larger call, as one of this size takes little more than its launch.

    Args:
        stages: names or paths; of (stage, {"Br": 64, "Bc": 32}) with those tile sizes.
        backward: they are backward stages.
    """
    rows: list[dict] = []
    q, k, v = (x.cpu() for x in tensors(N, d, B=B, H=H, dtype=dtype))
    for label, call in _calls(stages, q, k, v, causal, backward):
        with flash.inspect() as report:
            call()
        hbm = report.hbm
        first = rows[0]["total"] if rows else hbm.total
        rows.append({"stage": label, "HBM read": format_bytes(hbm.read), "written": format_bytes(hbm.written),
                     "different bytes, per kernel": format_bytes(hbm.unique_read + hbm.unique_written),
                     "x less than the first": f"{first / hbm.total:.3g}", "total": hbm.total})
    for row in rows:
        del row["total"]
    what = "HBM traffic, counted in the simulator (no cache)"
    counted = table(rows, f"{what}: {_described(q, causal, backward)}")
    if not gpu():
        return counted
    timed = times(stages, d=d, causal=causal, dtype=dtype, backward=backward)
    return Markdown(f"{counted.data}\n\n{timed.data}")


def times(stages: list, N: int = 1024, d: int = 64, *, B: int = 4, H: int = 12, causal: bool = False,
          dtype: torch.dtype = torch.float32, backward: bool = False) -> Markdown:
    """A table of the time of each stage on this machine's GPU, in ms (the median). Arguments: as of measure.

    Raises:
        RuntimeError: without a GPU.
    """
    from flash_ladder.bench import measuring

    if not gpu():
        raise RuntimeError("times() needs a GPU; without one, measure() counts HBM traffic")
    q, k, v = tensors(N, d, B=B, H=H, dtype=dtype)
    rows = [{"stage": label, "time (ms)": f"{statistics.median(measuring.milliseconds(call, DEVICE)):.4f}"}
            for label, call in _calls(stages, q, k, v, causal, backward)]
    return table(rows, f"Time on this GPU: {_described(q, causal, backward)}")


def _calls(stages: list, q, k, v, causal: bool, backward: bool) -> Iterator[tuple[str, Callable]]:
    """The label of each stage, and a call of it."""
    for stage in stages:
        stage, tiles = stage if isinstance(stage, tuple) else (stage, {})
        label = stage if isinstance(stage, str) else stage.stem
        if tiles:
            label += " " + ", ".join(f"{name}={size}" for name, size in tiles.items())
        if backward:
            tiles = {f"{name}_bwd": size for name, size in tiles.items()}
            yield label, _backward_call(q, k, v, causal, stage, tiles)
        else:
            yield label, functools.partial(flash.attention, q, k, v, causal=causal, stage=stage, **tiles)


def _described(q, causal: bool, backward: bool) -> str:
    B, H, N, d = q.shape
    dtype = next(name for name, known in flash.DTYPES.items() if known == q.dtype)
    return (f"{'backward' if backward else 'forward'}, B={B} H={H} N={N} d={d} {dtype}, "
            f"{'causal' if causal else 'not causal'}")


def _backward_call(q, k, v, causal: bool, stage, tiles: dict):
    """The backward pass alone, ready to be called; the forward pass is done here."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = flash.attention(q, k, v, causal=causal, backward=stage, **tiles)
    do = random_gradients(q)[0]
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


# ------------------------------------------------------------------------------------------ measured before
def results(name: str = "h200/bench_fwd") -> dict:
    """What was measured: results/<name>.json, such as h200/bench_fwd, h200/bf16/bench_bwd, cpu/bench_fwd."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def waiting(counters: dict[str, float], what: str = "L1, L2 or HBM") -> float:
    """The share of its time for which a warp waits for this, from a kernel's counters in ncu_*.json.

    The profiler has the warps that wait, for each instruction that is issued; a scheduler holds 16 at most.
    """
    warps = 16 * counters["warps, of the most possible"] / counters["issue slots used"]
    return counters[f"warps waiting for {what}"] / warps


# ------------------------------------------------------------------------------------------ showing
def table(rows: list[dict], caption: str = "") -> Markdown:
    """Rows with the same keys, as a table: numbers to the right."""
    columns = list(rows[0])
    numbers = r"[-+]?(\d|\.|inf)|-?$"
    right = {c for c in columns if all(re.match(numbers, str(row[c])) for row in rows)}
    lines = ["| " + " | ".join(columns) + " |",
             "|" + "|".join("---:" if c in right else "---" for c in columns) + "|",
             *("| " + " | ".join(str(row[c]) for c in columns) + " |" for row in rows)]
    return Markdown("\n".join(lines) + (f"\n\n*{caption}*" if caption else ""))


def code(stage: str | Path, first: str, last: str, direction: str | None = None) -> Markdown:
    """The lines of a stage from the first that has the text `first` to the next that has `last`.

    Raises:
        ValueError: if there are no such lines, so that a lesson cannot show what is no longer there.
    """
    path = _path(stage, direction)
    lines = path.read_text().splitlines()
    start = next((n for n, line in enumerate(lines) if first in line), None)
    end = None if start is None else next((n for n in range(start, len(lines)) if last in lines[n]), None)
    if end is None:
        raise ValueError(f"{path.name} has no lines from {first!r} to {last!r}")
    code_shown = _without_answers(_without_sections(lines)[start:end + 1])
    shown = textwrap.dedent("\n".join(code_shown))
    where = f"line {start + 1}" if start == end else f"lines {start + 1} to {end + 1}"
    # The div is for nbconvert's HTML, in which code of an output has the font of what is around it
    return Markdown(f"`{_shown(path)}`, {where}:\n\n"
                    f'<div style="font: 12px/1.3 monospace">\n\n```cpp\n{shown}\n```\n\n</div>')


def diff(*stages, **options) -> flash.Difference:
    """flash.diff, without what the lesson's exercises ask for."""
    found = flash.diff(*stages, **options)
    return dataclasses.replace(found, lines=tuple(_without_answers(found.lines, prefix=1)))


def findings(report: flash.Report, most: int = 3) -> None:
    """Print what the checker found, in lines that fit."""
    if not report.findings:
        print("No findings.")
    for finding in report.findings[:most]:
        print(textwrap.fill(finding.message, WIDTH, subsequent_indent="    "))
    if len(report.findings) > most:
        print(f"... and {len(report.findings) - most} more findings")


def show(figure) -> None:
    """Display a figure, such as report.plot() or tutorials.figures draw."""
    drawn, picture = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    plt.close(figure)
    few_colours = PIL.Image.open(drawn).convert("RGB").quantize(COLOURS, dither=PIL.Image.Dither.NONE)
    few_colours.save(picture, format="png", optimize=True)  # a quarter of the bytes
    display(Image(picture.getvalue()))


def staircase(stage: str, direction: str = "fwd", last: int = 8) -> None:
    """Show the TFLOP/s of a rung and of those it grew from, as measured; the last so many of them."""
    found = next((s for s in flash.stages(direction) if s.name == stage), None)
    if found is None:
        raise ValueError(f"staircase(): there is no {direction} stage {stage!r}")
    names = [s.name for s in flash.lineage(found)][::-1]
    show(draw_staircase(results("h200/rungs"), names[-last:], direction))


def exercises(lesson: str) -> Markdown:
    """The exercises that belong to a lesson, such as "03", and how to start one."""
    from tutorials.exercises import EXERCISES

    rows = [{"#": e.number, "exercise": e.title, "stage": e.subject,
             "lines": "find the bug" if e.is_hunt else f"about {e.lines}"}
            for e in EXERCISES if e.lesson == lesson]
    command = "python -m tutorials.exercises"
    number = rows[0]["#"]
    start = (f"In a terminal, in the repository's folder: `{command} new {number}` writes a file to "
             f"complete, and `{command} check {number}` checks it. In a notebook put a `!` before them.")
    return table(rows, start)


# By line, and by a section's title, the exercise that asks for it: what code() and diff() leave out
_answers: dict[str, int] = {}


def hide_answers(lesson: str) -> None:
    """From here to answers(), code() and diff() leave out the lines that the lesson's exercises ask for."""
    from tutorials.exercises import EXERCISES

    _answers.clear()
    for e in EXERCISES:
        if e.lesson == lesson and not e.is_hunt:
            _answers.update(dict.fromkeys([*e.telling_lines(), *e.sections], e.number))


def _without_sections(lines: list[str]) -> list[str | None]:
    """A stage's lines: a note in place of those in an exercise's section; None for a section's comments."""
    shown: list[str | None] = []
    number = None
    for line in lines:
        if mark := SECTION.match(line):
            number = _answers.get(mark[1])
            shown.append(None)
        else:
            shown.append(_note(number, line) if number and line.strip() else line)
    return shown


def _note(number: int, line: str, prefix: int = 0) -> str:
    """What stands in place of a line, with its indentation and the diff's first character."""
    indent = " " * (len(line[prefix:]) - len(line[prefix:].lstrip()))
    return f"{line[:prefix]}{indent}// exercise {number} asks for this; the answer is folded below it"


def _without_answers(lines: Iterable[str | None], prefix: int = 0) -> Iterator[str]:
    """prefix: characters before the code, such as the + of a diff."""
    from tutorials.exercises.exercise import one_line

    last = ""
    for line in lines:
        if line is None:
            continue
        number = _answers.get(one_line(line[prefix:]))
        if number is not None:
            line = _note(number, line, prefix)
        if "// exercise" not in line:
            yield line
            last = line if line.strip() else last
        elif line.split() != last.split():
            yield line
            last = line
        elif prefix:
            yield line[:prefix]  # a diff keeps the number of its lines


def answers(lesson: str) -> Markdown:
    """The answers of a lesson's exercises, folded. From here on code() and diff() show all lines."""
    from tutorials.exercises import EXERCISES

    _answers.clear()
    parts = []
    for e in EXERCISES:
        if e.lesson == lesson and not e.is_hunt:
            texts = "\n\n".join(textwrap.dedent(text) for text in e.answers().values())
            parts.append(f"<details><summary>Exercise {e.number}, {e.title}: the answer</summary>\n\n"
                         f'<div style="font: 12px/1.3 monospace">\n\n```cpp\n{texts}\n```\n\n</div>\n\n'
                         "</details>")
    return Markdown("\n\n".join(parts))


# ------------------------------------------------------------------------------------------ breaking
def break_stage(stage: str | Path, *changes: tuple[str, str], direction: str | None = None) -> Path:
    """A copy of a stage, mine.cuh, in which each (old, new) of `changes` is replaced: to be passed as stage=.

    Raises:
        ValueError: if an `old` is not there exactly once.
    """
    path = _path(stage, direction)
    text = path.read_text()
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{path.name} has {old!r} {text.count(old)} times, not once")
        text = text.replace(old, new)
    file = BROKEN / path.stem / hashlib.sha256(text.encode()).hexdigest()[:8] / "mine.cuh"
    if not file.exists():  # a later time would compile it anew
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return file


def _path(stage: str | Path, direction: str | None) -> Path:
    if isinstance(stage, Path):
        return stage
    found = [s.path for s in flash.stages(direction) if s.name == stage]
    if not found:
        known = ", ".join(s.name for s in flash.stages(direction))
        raise ValueError(f"there is no stage {stage!r}; there are {known}")
    return found[0]


def _shown(path: Path) -> str:
    return str(path.relative_to(flash.ROOT)) if path.is_relative_to(flash.ROOT) else path.name
