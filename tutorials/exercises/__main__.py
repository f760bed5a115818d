"""The exercises on the command line: python -m tutorials.exercises list | new 3 | check 3 | solution 3"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import Progress
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

import flash

from . import EXERCISES, Exercise, Verdict, check_file, find
from .exercise import COMMAND, YOUR_CODE
from .grade import SCORES, shown
from .process import TIME_LIMIT_S

MINE = flash.ROOT / "mine"
COLUMNS = ("student", "exercise", "name", "passed", "reason", "seconds", *SCORES,
           *(f"{name} of the reference" for name in SCORES), "message")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError
    return seconds


_seconds.__name__ = "number of seconds above 0"      # what argparse calls it


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
    check.add_argument("--time-limit", type=_seconds, default=TIME_LIMIT_S, metavar="SECONDS",
                       help=f"for one file (default: {TIME_LIMIT_S})")
    return top


def list_exercises(console: Console, lesson: str | None, folder: Path) -> int:
    chosen = [e for e in EXERCISES if lesson in (None, e.lesson, e.lesson.lstrip("0"))]
    if not chosen:
        raise ValueError(f"lesson {lesson} has no exercises; there are some for "
                         f"{', '.join(dict.fromkeys(e.lesson for e in EXERCISES))}")
    table = Table(title="Exercises", caption=f"{COMMAND} new {chosen[0].number}")
    for name in ("#", "lesson", "exercise", "stage", "lines", "yours"):
        table.add_column(name, justify="right" if name in ("#", "lines") else "left")
    for e in chosen:
        table.add_row(str(e.number), e.lesson, e.title, e.subject,
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
    lines = [str(line) for line in blanks(file.read_text())]
    where = f" Write your code at line{'s' * (len(lines) > 1)} {' and '.join(lines)}." if lines else ""
    task = f": {exercise.title}. The task is at its top.{where}"
    console.print(Text.assemble((_shown(file), "bold"), task))
    console.print(f"Then: {COMMAND} check {exercise.number}{_in(folder)}")
    return 0


def _in(folder: Path) -> str:
    return "" if folder == MINE else f" --folder {_shown(folder)}"


def first_lines(message: str) -> str:
    """The first one, and the next if it announces one."""
    first, *others = message.split("\n")
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def blanks(text: str) -> list[int]:
    """The lines of a learner's file that say "your code"."""
    return [n for n, line in enumerate(text.split("\n"), 1) if line.strip().startswith(YOUR_CODE)]


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
        text.append(f"{plain(verdict.message)}\n")
        if verdict.cases:
            count = len(verdict.cases)
            text.append(f"\nRight before that, in {count} call{'s' * (count > 1)}.\n", style="dim")
    for name, (theirs, ours) in verdict.score.items():
        text.append(f"\nYour {SCORES[name]}: {shown(name, theirs)}; the reference's: {shown(name, ours)}")
    word = "passed" if verdict.passed else verdict.reason
    console.print(Panel(text, title=Text(f"{exercise.number}. {exercise.title}: {plain(word)}"),
                        border_style=colour, title_align="left", subtitle=f"{verdict.seconds:.0f} s",
                        subtitle_align="right"))


def check_one(console: Console, exercise: Exercise, file: Path, as_json: bool, time_limit: float) -> int:
    if as_json:
        verdict = check_file(exercise, file, time_limit)
        print(json.dumps(asdict(verdict), indent=2))
    else:
        with console.status(Text(f"Checking {_shown(file)}: compiling, then running in the simulator ...")):
            verdict = check_file(exercise, file, time_limit)
        show(console, exercise, verdict)
    return 0 if verdict.passed else 1


def answers_in(folder: Path) -> list[Path]:
    """All FOLDER/STUDENT/NN_*.cuh, whatever they are; and each student's folder that cannot be read."""
    numbers = {e.number for e in EXERCISES}
    found = []
    for student in sorted(folder.iterdir()):
        try:
            names = sorted(os.listdir(student))
        except NotADirectoryError:
            continue
        except OSError:  # a link to nothing is no student
            found += [student] if student.is_dir() else []
            continue
        found += [student / name for name in names
                  if re.fullmatch(r"\d\d_.*\.cuh", name, re.S) and int(name[:2]) in numbers]
    return found


def check_answer(exercise: Exercise, file: Path, time_limit: float) -> Verdict:
    """As check_file(), with a verdict for a file that cannot be read, or if something else goes wrong."""
    verdict = Verdict(exercise.number, str(file))
    try:
        return check_file(exercise, file, time_limit)
    except ValueError as error:
        verdict.reason, verdict.message = "unreadable", str(error)
    except Exception as error:
        verdict.reason, verdict.message = "error", f"The checker failed: {type(error).__name__}: {error}"
    return verdict


def row_of(folder: Path, file: Path, time_limit: float) -> dict:
    """An answer's row in the CSV file."""
    if file.parent == folder:
        return {"student": file.name, "exercise": "", "name": "", "passed": 0, "reason": "unreadable",
                "seconds": 0, "message": "the student's folder cannot be read"}
    exercise = find(int(file.name[:2]))
    verdict = check_answer(exercise, file, time_limit)
    row = {"student": file.parent.name, "exercise": exercise.number, "name": exercise.name,
           "passed": int(verdict.passed), "reason": verdict.reason, "seconds": verdict.seconds,
           "message": first_lines(verdict.message)}
    for name, (theirs, ours) in verdict.score.items():
        row |= {name: theirs, f"{name} of the reference": ours}
    return row


def check_class(console: Console, folder: Path, out: Path | None, as_json: bool, time_limit: float) -> int:
    """Every FOLDER/STUDENT/NN_*.cuh. The CSV grows file by file: nothing is lost if it is interrupted."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    files = answers_in(folder)
    if not files:
        raise ValueError(f"no files FOLDER/STUDENT/03_name.cuh in {folder}")
    out = out or folder / "results.csv"
    rows = []
    with (open(out, "w", newline="", encoding="utf-8") as stream,
          Progress(console=console, disable=as_json) as progress):
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        task = progress.add_task("Checking", total=len(files))
        for file in files:
            progress.update(task, description=escape(plain(f"{file.parent.name}/{file.name}")))
            rows.append(row_of(folder, file, time_limit))
            writer.writerow({name: cell(value) for name, value in rows[-1].items()})
            stream.flush()
            progress.advance(task)
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    console.print(table_of(rows, f"{len(rows)} files, {sum(row['passed'] for row in rows)} passed: {out}"))
    return 0


def table_of(rows: list[dict], title: str) -> Table:
    """A student a row, an exercise a column."""
    table = Table(title=Text(plain(title)))
    checked = sorted({row["exercise"] for row in rows if row["exercise"]})
    table.add_column("student")
    for number in checked:
        table.add_column(str(number), justify="center")
    marks: dict[str, dict[int, Text]] = {}
    for row in rows:
        mark = Text("ok", "green") if row["passed"] else Text(plain(row["reason"]), "red")
        of_student = marks.setdefault(row["student"], {})
        for number in [row["exercise"]] if row["exercise"] else checked:
            of_student[number] = Text("\n").join([of_student[number], mark]) if number in of_student else mark
    for student, found in marks.items():
        table.add_row(Text(plain(student)), *(found.get(number, "") for number in checked))
    return table


def _shown(file: Path) -> str:
    file = file.resolve()
    return plain(str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file))


def plain(text: str) -> str:
    """Without what steers a terminal, and what UTF-8 cannot say: in place of it, its number."""
    return "".join(x if x == "\n" or x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def cell(value: str | int | float) -> str | int | float:
    """For a CSV file, so that no spreadsheet takes it for a formula."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


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
        if not file.exists():
            where = _in(args.folder)
            raise ValueError(f"{file} is no file: `{COMMAND} new {exercise.number}{where}` writes one")
        return check_one(console, exercise, file, args.json, args.time_limit)
    except (ValueError, OSError) as error:
        top.error(plain(str(error)))
    except KeyboardInterrupt:
        console.print("Interrupted.")
    return 130


if __name__ == "__main__":
    sys.exit(main())
