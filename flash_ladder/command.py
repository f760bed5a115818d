"""The command line of flash.py: the ladder as a tree, and a rung of one's own.

    python flash.py                              # the ladder, and what of it runs on this machine
    python flash.py diff mma                     # what a stage changes of the one that it grew from
    python flash.py new mine --after flash2      # writes mine.cuh, a copy of flash2 with a header to fill in
    python flash.py check mine.cuh               # runs the tests' calls over it
    python flash.py cache                        # the builds: where, how many, how large

Once installed, it is `flash-ladder` instead of `python flash.py`.

Exit status: 0; 1 if a stage was wrong, or could not be built or run; 2 for bad arguments; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from . import cache, difference, inspection, loader, plan, registry
from .devices import default_device, describe_device, shared_memory_per_block
from .difference import SECTION
from .grid import GRID, LARGE, diagonal_of, errors, gradient_errors, poisoned, type_for, wrong
from .reference import random_gradients, random_qkv, reference
from .sources import INSTALLED, ROOT, read_source
from .stage import DIRECTIONS, DTYPES, Stage

TYPES = {dtype: name for name, dtype in DTYPES.items()}
COPIED = ("types", "needs", "deterministic", "tiles", "limits", "shared", "workspace", "hbm")
SCALES = (-0.2, 0.0, 30.0)  # with the third of the grid's cases
WATCHED = GRID[4]           # under the checker


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"{program()}: {escape(str(error))}")
        return 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:                 # `| head` has read enough; Python's own end must not write more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        program(), formatter_class=argparse.RawDescriptionHelpFormatter,
        description="FlashAttention in CUDA, one stage at a time. Without a command: the ladder, as a tree.",
        epilog=textwrap.dedent(f"""\
            A rung of your own:
              {command()} new mine --after flash2
                  writes mine.cuh, a copy of flash2; change it
              {command()} check mine.cuh
                  right, or the first call in which it is wrong
              {command()} diff mine.cuh
                  what you changed
              {bench()} --stages flash2,mine.cuh
                  how fast it is"""))
    top.set_defaults(run=lambda args: show(Console()))
    commands = top.add_subparsers(title="commands", metavar="")
    one = commands.add_parser("diff", help="show what a stage changes of the one that it grew from")
    one.add_argument("stages", nargs="+", metavar="STAGE", help=(
        "the name of a stage or a .cuh file; of two, what the second one changes of the first"))
    one.set_defaults(run=diff)
    new = commands.add_parser("new", help="write a stage of your own to start from: a copy of another one")
    new.add_argument("name", help="its name; the file is NAME.cuh in the current folder")
    new.add_argument("--after", required=True, metavar="STAGE", help="the stage to copy")
    new.set_defaults(run=write_new)
    check = commands.add_parser("check", help=(
        "run a stage of your own over the tests' shapes, in the simulator and on the GPU if there is one; "
        "and once under the race and bounds checker"))
    check.add_argument("file", type=Path, help="its .cuh file")
    check.set_defaults(run=check_file)
    for of_stages in (one, new, check):
        of_stages.add_argument("--bwd", action="store_true", help="a backward stage")
    builds = commands.add_parser("cache", help="show the folder of the builds, their number and size")
    builds.add_argument("--clear", action="store_true", help="delete them")
    builds.set_defaults(run=show_cache)
    return top


# ------------------------------------------------------------------------------------------ the ladder
def show(console: Console) -> int:
    """Print the ladder, and what of it runs on this machine."""
    device = default_device()
    console.print(Text(f"Stages on this machine: {describe_device(device)}", style="bold"))
    console.print(tree(device, console.width))
    reasons: dict[str, list[str]] = {}
    for s in registry.stages():
        if reason := s.available(device).reason:
            reasons.setdefault(reason, []).append(str(s))
    for reason, names in reasons.items():
        console.print(Text(f"no: {', '.join(names)}: {reason}"))
    console.print(Text("\ndefault: the architecture from which on a call that names no stage takes this one; "
                       f"taken: it does so here.\n{command()} --help: the commands for a stage of your own",
                       style="dim"))
    return 0


def taken_by_default(device: torch.device) -> list[Stage]:
    """What calls that name no stage take."""
    found = []
    for direction in DIRECTIONS:
        for dtype in TYPES:
            with contextlib.suppress(ValueError, RuntimeError):  # none takes this type, or none runs
                found.append(registry.find_stage(None, dtype, device, direction))
    return found


def tree(device: torch.device, width: int) -> Table:
    """Both directions' stages."""
    drawn = {what: list(branches(registry.stages(direction))) for direction, what in DIRECTIONS.items()}
    names = max(len(first) + len(s.name) for rows in drawn.values() for s, first, _ in rows)
    widths = [10, 11, 7, 5] if width >= 100 else [5, 6, 7, 5]   # types, needs, default, here
    gap = 2 if width >= 100 else 1
    widths.append(max(width - names - sum(widths) - gap * (len(widths) + 1), 16))
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    table.add_column("stage", no_wrap=True, min_width=names)
    for name, size in zip(("types", "needs", "default", "here", "idea"), widths, strict=True):
        table.add_column(name, no_wrap=True, min_width=size)
    taken = taken_by_default(device)
    for what, rows in drawn.items():
        table.add_row()
        table.add_row(Text(what, style="bold"))
        for s, first, below in rows:
            here = "taken" if s in taken else "yes" if s.available(device) else "no"
            texts = ", ".join(TYPES[t] for t in s.dtypes), s.needs, s.default, here, s.idea
            cells = [textwrap.wrap(text, size) for text, size in zip(texts, widths, strict=True)]
            label = Text.assemble((first, "dim"), (s.name, "bold green" if s in taken else ""),
                                 (f"\n{below}" * (max(map(len, cells)) - 1), "dim"))
            table.add_row(label, *(Text("\n".join(cell)) for cell in cells))
    return table


def branches(ladder: list[Stage]) -> Iterator[tuple[Stage, str, str]]:
    """(stage, what stands before its name, what stands below that) from the root on, each branch to its end.

    An only child stands below its parent, as in a list; where there are several, the branch lines begin.
    """
    children: dict[str, list[Stage]] = {}
    for s in ladder:
        children.setdefault(s.after, []).append(s)

    def walk(s: Stage, first: str, rest: str) -> Iterator[tuple[Stage, str, str]]:
        grown = children.get(s.name, [])
        yield s, first, rest + "│  " * (len(grown) > 1)
        if len(grown) == 1:
            yield from walk(grown[0], rest, rest)
            return
        for child in grown:
            last = child is grown[-1]
            yield from walk(child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))

    for root in children.get("", []):
        yield from walk(root, "", "")


def diff(args: argparse.Namespace) -> int:
    if len(args.stages) > 2:
        raise ValueError(f"diff: one stage or two, not {len(args.stages)}")
    asked = [Path(name) if name.endswith(".cuh") else name for name in args.stages]
    print(difference.diff(*asked, direction="bwd" if args.bwd else None))
    return 0


# ------------------------------------------------------------------------------------------ your own rung
def write_new(args: argparse.Namespace) -> int:
    direction = "bwd" if args.bwd else "fwd"
    known = {s.name: s for s in registry.stages(direction)}
    if args.after not in known:
        close = difflib.get_close_matches(args.after, known, n=1)
        other = "fwd" if args.bwd else "bwd"
        if any(s.name == args.after for s in registry.stages(other)):
            hint = f" It is a {DIRECTIONS[other]} stage: {'leave out' if args.bwd else 'add'} --bwd."
        else:
            hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"--after: there is no {DIRECTIONS[direction]} stage {args.after!r}; there are "
                         f"{', '.join(known)}.{hint}")
    if not re.fullmatch(r"[A-Za-z]\w*", args.name, re.A):
        raise ValueError(f"new: a stage's name has letters, digits and _, and begins with a letter, such as "
                         f"mine; not {args.name!r}")
    if args.name in known:
        raise ValueError(f"new: there is a {DIRECTIONS[direction]} stage {args.name!r}: take another name")
    file = Path(f"{args.name}.cuh")
    try:
        with open(file, "x") as out:
            out.write(copy_of(known[args.after], args.name))
    except FileExistsError:
        raise ValueError(f"new: {file} is there already, and is left as it is: take another name") from None
    bwd = " --bwd" * args.bwd
    print(f"{file}: a copy of {known[args.after]}. Say at its top what is new, and change it. Then:\n"
          f"  {command()} check {file}\n  {command()} diff {file}\n"
          f"  {bench()} --stages {args.after},{file}{bwd and ' --pass bwd'}")
    return 0


def program() -> str:
    """The name in messages."""
    return "flash-ladder" if INSTALLED or Path(sys.argv[0]).name == "flash-ladder" else "flash.py"


def command() -> str:
    """As one types it in the current folder."""
    return program() if program() == "flash-ladder" else f"python {in_tree('flash.py')}"


def bench() -> str:
    return "python -m flash_ladder.bench" if INSTALLED else f"python {in_tree('bench.py')}"


def in_tree(file: str) -> str:
    """The path of a file of the tree, as one types it in the current folder."""
    return file if ROOT == Path.cwd() else str(ROOT / file)


def copy_of(stage: Stage, name: str) -> str:
    """The file of a stage of one's own: its parent's code and what its header says for the registry."""
    text = read_source(stage.path)
    header = re.match(r"(?://.*\n)*", text)[0]
    fields = {field: lines for lines, field in re.findall(r"^(// (\w+):.*\n(?://  {7,}.*\n)*)", header, re.M)}
    lines = [f"// {DIRECTIONS[stage.direction].capitalize()} stage: {name}\n",
             "// idea:    what is new, in a line\n",
             *(fields[field] for field in ("types", "needs") if field in fields),
             f"// after:   {stage.name}\n",
             *(fields[field] for field in COPIED[2:] if field in fields),
             f"// predicted: the gain over {stage.name} that you expect, and why: before you measure it\n",
             "//\n",
             "// What is done in another way, and why; what bounds it then.\n",
             "//\n",
             f"// Changed from {stage.name}: nothing yet.\n"]
    code = text[len(header):].splitlines(keepends=True)
    return "".join([*lines, *(line for line in code if not SECTION.match(line.rstrip("\n")))])


@dataclass(frozen=True)
class Call:
    """One of those that a stage is run with. deterministic: a backward stage, asked to be."""

    stage: Stage
    case: tuple
    device: str
    tiles: tuple[tuple[str, int], ...]
    scale: float | None = None
    deterministic: bool = False

    def __str__(self) -> str:
        *shape, mask = self.case
        sizes = " ".join(f"{name}={n}" for name, n in zip(("B", "H", "H_kv", "N_q", "N_k", "d"), shape))
        words = [{None: "no mask", "bottom": "causal", "top": "causal, aligned to the top left"}[mask],
                 str(type_for(self.stage, self.case)).removeprefix("torch."),
                 " ".join(f"{name}={n}" for name, n in self.tiles),
                 *[f"scale={self.scale}"] * (self.scale is not None), *["deterministic"] * self.deterministic,
                 "on the GPU" if self.device == "cuda" else "in the simulator"]
        return f"{sizes}, {', '.join(words)}"

    def run(self) -> str:
        """What is wrong; empty if nothing is."""
        B, H, H_kv, N_q, N_k, d, mask = self.case
        q, k, v = random_qkv(B, H, H_kv, N_q, N_k, d, self.device, type_for(self.stage, self.case))
        diagonal = diagonal_of(mask, N_q, N_k)
        options = diagonal, self.scale
        if self.stage.direction == "fwd":
            with poisoned():
                o, lse = plan.forward(q, k, v, *options, self.stage, dict(self.tiles))
            return wrong(errors(o, lse, q, k, v, *options))
        do, dlse = random_gradients(q)
        o, lse = reference(q.double(), k.double(), v.double(), *options)
        with poisoned():
            gradients = plan.backward(q, k, v, o.to(q.dtype), lse.float(), do, dlse, *options, self.stage,
                                        dict(self.tiles), self.deterministic)
        return wrong(gradient_errors(gradients, q, k, v, do, *options, dlse))


def calls(stage: Stage, device: str) -> Iterator[Call]:
    """The grid, as far as the stage's tiles fit, each case with those of small and of large calls; and other
    scales."""
    shared_memory = shared_memory_per_block(torch.device(device))
    cases = [case for case in GRID if stage.fits(case[5], shared_memory)]
    for wanted in (False, True)[:1 + stage.deterministic_on_request]:
        for case in cases:
            sizes = [tuple(stage.tiles(case[5], shared_memory, rows, bool(case[6]), keys=keys).items())
                     for rows, keys in ((1, 1), *LARGE)]
            of_case = functools.partial(Call, stage, case, device, deterministic=wanted)
            yield from map(of_case, dict.fromkeys(sizes))
            if case == GRID[2] and not wanted:
                yield from (of_case(sizes[0], scale) for scale in SCALES)


def check_file(args: argparse.Namespace) -> int:
    """Run the grid over a file, and the checker over one case."""
    if not args.file.exists() and any(stage.name == str(args.file) for stage in registry.stages()):
        raise ValueError(f"check: {args.file} is a stage of the ladder, which `make test` checks; for a copy "
                         f"of it: new mine --after {args.file}, then check mine.cuh")
    stage = registry.read_stage(args.file, "bwd" if args.bwd else "fwd")
    console = Console(soft_wrap=True, highlight=False)
    devices = [device for device in ("cpu", "cuda") if device == "cpu" or torch.cuda.is_available()]
    todo: dict[Call, Callable[[], str]] = {}
    for device in devices:
        if not (runs := stage.available(device)):
            console.print(f"not on {device}: {escape(runs.reason)}")
        todo |= {call: call.run for call in calls(stage, device) if runs}
    if not todo:
        raise ValueError(f"check: {stage} runs nowhere on this machine")
    if inspecting := inspection.can_inspect():
        case = WATCHED
        tiles = stage.tiles(case[5], shared_memory_per_block(torch.device("cpu")), 1, bool(case[6]))
        call = Call(stage, case, "cpu", tuple(tiles.items()))
    notes: list[str] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(stage.name, total=len(todo) + bool(inspecting))
        for one, run in todo.items():
            if problem := tried(run):
                again = functools.partial(watched, replace(one, device="cpu"), notes)
                return failed(console, stage, problem, one, tried(again) if inspecting else "")
            bar.advance(task)
        if inspecting and (problem := tried(functools.partial(watched, call, notes))):
            return failed(console, stage, problem, call)
    where = " and ".join({"cpu": "the simulator", "cuda": "the GPU"}[d] for d in devices)
    checked = ", and the checker found nothing" if inspecting else f"; no checker: {inspecting}"
    number = "1 call" if len(todo) == 1 else f"{len(todo)} calls"
    console.print(f"[bold green]ok[/]: {stage} is right in {number}, in {where}{escape(checked)}.")
    for note in notes:
        console.print(f"note: {escape(note)}")
    return 0


def tried(run: Callable[[], str]) -> str:
    """What is wrong, an error that was raised being it."""
    try:
        return run()
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error)


def watched(call: Call, notes: list[str]) -> str:
    """What the checker finds; its notes are added to notes."""
    with inspection.inspect() as report:
        problem = tried(call.run)
    notes += map(str, report.notes)
    return "\n".join(map(str, report.findings)) or problem


def failed(console: Console, stage: Stage, problem: str, call: Call, seen: str = "") -> int:
    """seen: what came of the same call under the checker, in the simulator."""
    console.print(f"[bold red]failed[/]: {escape(problem)}\nin the call {call}")
    if seen and seen != problem:
        console.print(f"The checker, in this call: {escape(seen)}")
    return 1


# ------------------------------------------------------------------------------------------ builds
def show_cache(args: argparse.Namespace) -> int:
    """Say where the builds are, how many and how large; or delete them."""
    console = Console(soft_wrap=True, highlight=False)
    if args.clear:
        deleted, kept = cache.clear(loader.BUILD)
        console.print(f"Deleted from {escape(str(loader.BUILD))}: {amount(deleted)}.")
        if kept:
            console.print(f"Left, as they are being built: {amount(kept)}.")
        return 0
    console.print(f"{escape(str(loader.BUILD))}: {amount(cache.builds(loader.BUILD))}; the limit is "
                  f"{cache.limit_bytes() / 1e6:,.0f} MB (FLASH_BUILD_LIMIT).")
    return 0


def amount(builds: list[cache.Build]) -> str:
    return f"{len(builds)} build{'s' * (len(builds) != 1)}, {sum(b.size for b in builds) / 1e6:,.1f} MB"
