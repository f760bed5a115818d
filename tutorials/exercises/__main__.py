"""The exercises on the command line: python -m tutorials.exercises list | new 3 | check 3 | solution 3"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

import flash

from . import EXERCISES, Exercise, Verdict, check_file, find
from .grade import SCORES, TIME_LIMIT_S, shown

MINE = flash.ROOT / "mine"
COLUMNS = ("student", "exercise", "name", "passed", "reason", "seconds", *SCORES,
           *(f"{name} of the reference" for name in SCORES), "message")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tutorials.exercises", description=(
        "Parts of the stages to write yourself, and bugs to find; checked without a GPU."))
    commands = top.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the exercises, and which of them you have begun")
    listing.add_argument("lesson", nargs="?", help="only those of a lesson, such as 04")
    new = commands.add_parser("new", help="write the file to complete; never over one that is there")
    check = commands.add_parser("check", help="check what you wrote")
    solution = commands.add_parser("solution", help="show the reference's lines")
    for command in (new, solution):
        command.add_argument("number", type=int)
    check.add_argument("number", type=int, nargs="?")
    for command in (listing, new, check):
        command.add_argument("--folder", type=Path, default=MINE, help="where the files are (default: mine/)")
    check.add_argument("--file", type=Path, help="a file of another name")
    check.add_argument("--all", type=Path, metavar="FOLDER", help=(
        "all files of a class, FOLDER/STUDENT/03_name.cuh: a table, and a CSV file"))
    check.add_argument("--csv", type=Path, help="the CSV file (default: FOLDER/results.csv)")
    check.add_argument("--json", action="store_true", help="print the verdict as JSON, and nothing else")
    check.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="SECONDS",
                       help=f"for one file (default: {TIME_LIMIT_S})")
    return top


def list_exercises(console: Console, lesson: str | None, folder: Path) -> int:
    chosen = [e for e in EXERCISES if lesson in (None, e.lesson, e.lesson.lstrip("0"))]
    if not chosen:
        raise ValueError(f"lesson {lesson} has no exercises; there are some for "
                         f"{', '.join(dict.fromkeys(e.lesson for e in EXERCISES))}")
    table = Table(title="Exercises", caption="python -m tutorials.exercises new 1")
    for name in ("#", "lesson", "exercise", "stage", "lines", "yours"):
        table.add_column(name, justify="right" if name in ("#", "lines") else "left")
    for e in chosen:
        direction = "backward " if e.direction == "bwd" else ""
        table.add_row(str(e.number), e.lesson, e.title, direction + e.stage,
                      "bug hunt" if e.is_hunt else f"~{e.lines}",
                      "begun" if (folder / e.file_name).exists() else "")
    console.print(table)
    return 0


def new_file(console: Console, exercise: Exercise, folder: Path) -> int:
    file = folder / exercise.file_name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with open(file, "x") as out:
            out.write(exercise.learners_file())
    except FileExistsError:
        raise ValueError(f"{_shown(file)} is there already, and is left as it is; for a second one: "
                         f"new {exercise.number} --folder ANOTHER") from None
    at = next((n for n, line in enumerate(file.read_text().split("\n"), 1) if "// your code" in line), None)
    where = f", from line {at} on" if at else ""
    console.print(f"[bold]{_shown(file)}[/bold]: {exercise.title}. What to do is at its top{where}.\n"
                  f"Then: python -m tutorials.exercises check {exercise.number}")
    return 0


def solution(console: Console, exercise: Exercise) -> int:
    if exercise.is_hunt:
        title = f"{exercise.number}. {exercise.title}"
        console.print(Panel(Text(exercise.answer), title=title, border_style="cyan"))
        for change in exercise.broken:
            console.print(Text("\n".join(f"- {line}" for line in change.new.split("\n")), style="red"))
            console.print(Text("\n".join(f"+ {line}" for line in change.old.split("\n")), style="green"))
        return 0
    for title, text in exercise.answers().items():
        console.print(Text(f"{_shown(exercise.file_of(title))}: {title}", style="bold"))
        console.print(Syntax(text, "cuda", background_color="default", word_wrap=True))
    return 0


def show(console: Console, exercise: Exercise, verdict: Verdict) -> None:
    colour = "green" if verdict.passed else "red"
    text = Text()
    if verdict.passed:
        text.append(f"Right, in {len(verdict.cases)} calls:\n")
        for case in verdict.cases:
            text.append(f"  {case}\n", style="dim")
    else:
        text.append(f"{verdict.message}\n")
        if verdict.cases:
            text.append(f"\nRight before that, in {len(verdict.cases)} calls.\n", style="dim")
    for name, (theirs, ours) in verdict.score.items():
        text.append(f"\nYour {SCORES[name]}: {shown(name, theirs)}; the reference's: {shown(name, ours)}")
    word = "passed" if verdict.passed else verdict.reason
    console.print(Panel(text, title=f"{exercise.number}. {exercise.title}: {word}", border_style=colour,
                        title_align="left", subtitle=f"{verdict.seconds:.0f} s", subtitle_align="right"))


def check_one(console: Console, exercise: Exercise, file: Path, as_json: bool, time_limit: float) -> int:
    if as_json:
        verdict = check_file(exercise, file, time_limit)
        print(json.dumps(asdict(verdict), indent=2))
    else:
        with console.status(f"Checking {_shown(file)}: compiling, then running in the simulator ..."):
            verdict = check_file(exercise, file, time_limit)
        show(console, exercise, verdict)
    return 0 if verdict.passed else 1


def check_class(console: Console, folder: Path, out: Path | None, as_json: bool, time_limit: float) -> int:
    """Every FOLDER/STUDENT/NN_*.cuh. The CSV grows file by file: nothing is lost if it is interrupted."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    numbers = {e.number for e in EXERCISES}
    files = [file for file in sorted(folder.glob("*/[0-9][0-9]_*.cuh")) if int(file.name[:2]) in numbers]
    if not files:
        raise ValueError(f"no files FOLDER/STUDENT/03_name.cuh in {folder}")
    out = out or folder / "results.csv"
    rows = []
    with open(out, "w", newline="") as stream, Progress(console=console, disable=as_json) as progress:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        task = progress.add_task("Checking", total=len(files))
        for file in files:
            progress.update(task, description=f"{file.parent.name}/{file.name}")
            exercise = find(int(file.name[:2]))
            verdict = check_file(exercise, file, time_limit)
            row = {"student": file.parent.name, "exercise": exercise.number, "name": exercise.name,
                   "passed": int(verdict.passed), "reason": verdict.reason, "seconds": verdict.seconds,
                   "message": verdict.message.split("\n")[0]}
            for name, (theirs, ours) in verdict.score.items():
                row |= {name: theirs, f"{name} of the reference": ours}
            rows.append(row)
            writer.writerow(row)
            stream.flush()
            progress.advance(task)
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table(title=f"{len(rows)} files, {sum(row['passed'] for row in rows)} passed: {out}")
    students = dict.fromkeys(row["student"] for row in rows)
    checked = sorted({row["exercise"] for row in rows})
    table.add_column("student")
    for number in checked:
        table.add_column(str(number), justify="center")
    for student in students:
        marks = {row["exercise"]: "[green]ok[/green]" if row["passed"] else f"[red]{row['reason']}[/red]"
                 for row in rows if row["student"] == student}
        table.add_row(student, *(marks.get(number, "") for number in checked))
    console.print(table)
    return 0


def _shown(file: Path) -> str:
    file = file.resolve()
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def main(argv: list[str] | None = None) -> int:
    top = parser()
    args = top.parse_args(argv)
    console = Console(highlight=False)
    try:
        if args.command == "list":
            return list_exercises(console, args.lesson, args.folder)
        if args.command == "new":
            return new_file(console, find(args.number), args.folder)
        if args.command == "solution":
            return solution(console, find(args.number))
        if args.all and (args.number is not None or args.file):
            top.error("check: a number, or --all for all files of a folder, not both")
        if args.all:
            return check_class(console, args.all, args.csv, args.json, args.time_limit)
        if args.number is None:
            top.error("check: which exercise? Such as check 3, or check --all FOLDER")
        exercise = find(args.number)
        file = args.file or args.folder / exercise.file_name
        return check_one(console, exercise, file, args.json, args.time_limit)
    except ValueError as error:
        top.error(str(error))
    except KeyboardInterrupt:
        console.print("Interrupted.")
    return 130


if __name__ == "__main__":
    sys.exit(main())
