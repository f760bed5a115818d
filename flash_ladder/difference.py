"""What a stage changes of the one it grew from: a diff that prints in colours and renders in a notebook, and
the count of changed lines that the ladder keeps small."""

from __future__ import annotations

import difflib
import html
import io
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .registry import parent, read_stage, stages
from .sources import ROOT, read_source, source_files
from .stage import DIRECTIONS, Stage

# The comments around what an exercise asks for: the first has a title, the second has none
SECTION = re.compile(r"\s*// ---(?: (\S.*))?$")
CONTEXT = 3  # unchanged lines around a change
# Thin functions around single instructions, and what no stage includes: they count for nobody
INSTRUCTIONS = ("ptx.cuh", "hopper.cuh", "wgmma_widths.cuh", "cluster.cuh", "timeline.cuh",
                "timeline_fwd.cuh", "timeline_bwd.cuh")
# What every stage has of the file that includes it. That file includes mask.cuh, too, for the lists of tiles:
# it counts for the first stage that asks a mask.
TENSORS = ROOT / "stages" / "common" / "tensor.cuh"
# By the first character of a line: its colours in a terminal, and in HTML (text, background)
TERMINAL = {"+": "green", "-": "red", "@": "cyan"}
HTML = {"+": ("#055d20", "#dafbe1"), "-": ("#82071e", "#ffebe9"), "@": ("#57606a", "#ddf4ff"),
        " ": ("#1f2328", "#ffffff")}


@dataclass(frozen=True)
class Difference:
    """The lines of a unified diff of two files, as `diff` makes it. print() shows it, a notebook in colours.

    Attributes:
        before, after: the files' names.
        lines: those of the diff. The first character is " ", "-" or "+"; "@" where lines were left out.
        code: how many lines of code changed, as the ladder counts them: see `changed_lines`.
        common: lines of code in stages/common that a stage brings, which is compared with its parent.
    """

    before: str
    after: str
    lines: tuple[str, ...]
    code: int = 0
    common: int = 0

    @property
    def added(self) -> int:
        """How many lines are new."""
        return sum(line.startswith("+") for line in self.lines)

    @property
    def removed(self) -> int:
        """How many lines are gone."""
        return sum(line.startswith("-") for line in self.lines)

    @property
    def title(self) -> str:
        common = f", {self.common} more in stages/common" * (self.common > 0)
        return (f"{self.before} -> {self.after}: {self.removed} lines removed, {self.added} added; "
                f"of code {self.code}{common}")

    def __rich__(self) -> Text:
        text = Text(self.title + "\n", style="bold")
        for line in self.lines:
            text.append(line + "\n", style=TERMINAL.get(line[:1], ""))
        return text

    def __str__(self) -> str:
        """In colours if it goes to a terminal."""
        out = io.StringIO()
        console = Console(file=out, force_terminal=sys.stdout.isatty(), force_jupyter=False, soft_wrap=True,
                          highlight=False)
        console.print(self.__rich__(), end="")
        return out.getvalue().rstrip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = []
        for kind, lines in itertools.groupby(self.lines, lambda line: line[:1] if line[:1] in HTML else " "):
            colour, background = HTML[kind]
            style = f"color:{colour};background:{background};padding:0 0.6em"
            rows.append(f'<div style="{style}">{html.escape(chr(10).join(lines))}</div>')
        return (f'<div style="font-weight:bold">{html.escape(self.title)}</div>'
                '<pre style="font:12px/1.3 monospace;overflow-x:auto;padding:0">'
                f'<div style="display:inline-block;min-width:100%">{"".join(rows)}</div></pre>')


def diff(before: str | Path | Stage, after: str | Path | Stage | None = None, *,
         direction: str | None = None, context: int = CONTEXT, header: bool = False) -> Difference:
    """What a stage changes of its parent, or of another one, line by line.

        flash.diff("mma")                       # of the stage that it grew from
        flash.diff(Path("mine.cuh"))            # of the one after which its header says that it comes
        flash.diff("flash2", Path("mine.cuh"))

    Args:
        before, after: names of stages, pathlib.Paths of .cuh files, or Stages. One alone is compared with its
            parent.
        direction: "fwd" or "bwd", for names that both ladders have; default: forward, if it has them.
        context: unchanged lines to show around a change.
        header: also compare the comments at the files' tops, which say more than a diff does, and those with
            --- around what an exercise asks for.
    Returns:
        A Difference: print() it, or leave it to a notebook to show.
    Raises:
        ValueError: if no ladder has stages of these names, a path leads to no file, or a stage alone has no
            parent.
    """
    if direction not in (None, *DIRECTIONS):
        raise ValueError(f"direction must be fwd, bwd or None, not {direction!r}")
    found = _find([before] if after is None else [before, after], direction)
    if after is None:
        if not (grew_from := parent(found[0])):
            raise ValueError(f"diff(): {found[0].path.name} has no parent: name the stage to compare it "
                             "with, or give its header a line such as `// after: flash2`")
        found.insert(0, grew_from)
    (old_numbers, old), (numbers, new) = (_code(stage.path, header) for stage in found)
    lines: list[str] = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(context):
        lines.append(f"@@ line {old_numbers[group[0][1]]}, now line {numbers[group[0][3]]} @@")
        for tag, old_from, old_to, new_from, new_to in group:
            if tag == "equal":
                lines += [f" {line}" for line in new[new_from:new_to]]
            else:
                lines += [f"-{line}" for line in old[old_from:old_to]]
                lines += [f"+{line}" for line in new[new_from:new_to]]
    changed = changed_lines(found[1], found[0])
    return Difference(_shown(found[0].path), _shown(found[1].path), tuple(lines), changed.changed,
                      changed.common if parent(found[1]) == found[0] else 0)


def _find(asked: list[str | Path | Stage], direction: str | None) -> list[Stage]:
    """The stages of diff()'s arguments; names must be of one ladder."""
    names = [x for x in asked if isinstance(x, str)]
    directions = [direction] if direction else list(DIRECTIONS)
    ladders = [{s.name: s for s in stages(d)} for d in directions]
    ladder = next((known for known in ladders if all(name in known for name in names)), None)
    if ladder is None:
        missing = next((n for n in names if not any(n in known for known in ladders)), None)
        what = f"there is no stage {missing!r}" if missing else f"{' and '.join(names)} are of two ladders"
        known = "; ".join(f"{DIRECTIONS[d]}: {', '.join(known)}" for d, known in zip(directions, ladders))
        raise ValueError(f"diff(): {what}; the stages are {known}")
    found = []
    for x in asked:
        if not isinstance(x, (str, Path, Stage)):
            raise ValueError("diff() compares stages, by name, pathlib.Path or Stage, not by "
                             f"{type(x).__name__}")
        found.append(ladder[x] if isinstance(x, str) else read_stage(x, direction or "fwd")
                     if isinstance(x, Path) else x)
    return found


def _code(file: Path, header: bool) -> tuple[list[int], list[str]]:
    """The numbers and the texts of the lines to compare, and a number for what follows the last one."""
    lines = read_source(file).splitlines()
    first = next((n for n, line in enumerate(lines) if not re.match("//|\ufeff", line)), len(lines))
    chosen = [n for n in range(len(lines)) if header or (n >= first and not SECTION.match(lines[n]))]
    return [n + 1 for n in [*chosen, len(lines)]], [lines[n] for n in chosen]


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


# ------------------------------------------------------------------------------------------ how much changes
@dataclass(frozen=True)
class Change:
    """How much of a stage is new, as the ladder's limits count it.

    Attributes:
        changed: lines of code added to the parent, and removed; of a root, all of its lines.
        introduced: the files that it is the first stage in reading order to include, and their lines of code.
        file_lines: of its file, with comments.
        kernels: the lines of code of its kernels, by name.
    """

    stage: Stage
    changed: int
    introduced: dict[Path, int]
    file_lines: int
    kernels: dict[str, int]

    @property
    def common(self) -> int:
        return sum(self.introduced.values())

    @property
    def total(self) -> int:
        return self.changed + self.common


def changed_lines(stage: Stage, before: Stage | None = None) -> Change:
    """How much a stage changes of its parent, or of another one.

    White space, comments, blank lines and #includes do not count, nor do wrappers of single instructions. A
    changed line is one removed and one added.
    """
    before = before or parent(stage)
    code = _code_lines(stage.path)
    old = _code_lines(before.path) if before else []
    return Change(stage, len(old) + len(code) - 2 * _in_common(old, code),
                  {file: len(_code_lines(file)) for file in introduced(stage)},
                  len(read_source(stage.path).splitlines()), _kernels(stage.path))


def introduced(stage: Stage) -> list[Path]:
    """The files that it is the first to include, forward stages before backward ones; one of your own comes
    last. Not wrappers of single instructions."""
    known: set[Path] = set()
    for earlier in stages():
        if earlier.path == stage.path:
            break
        known.update(_included(earlier))
    return [file for file in _included(stage) if file not in known and file.name not in INSTRUCTIONS]


def _included(stage: Stage) -> list[Path]:
    """What it includes, directly or not, and the tensors."""
    return [*source_files(stage.path)[1:], TENSORS]


def _without_comments(file: Path) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", read_source(file), flags=re.S)


def _code_lines(file: Path) -> list[str]:
    """Without white space; not #include and #pragma once."""
    lines = (re.sub(r"\s", "", line) for line in _without_comments(file).splitlines())
    return [line for line in lines if line and not line.startswith(("#include", "#pragmaonce"))]


def _in_common(a: list[str], b: list[str]) -> int:
    """The length of the longest common subsequence: difflib's diff need not be the shortest one."""
    row = [0] * (len(b) + 1)
    for x in a:
        above, row = row, [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
    return row[-1]


def _kernels(file: Path) -> dict[str, int]:
    """The lines of code of each __global__ function, from this word to the brace that closes it."""
    text = _without_comments(file)
    found = {}
    for head in re.finditer(r"__global__[^;{]*\{", text):
        bounds = r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)"
        name = re.search(r"(\w+)\s*\(", re.sub(bounds, "", head[0]))
        depth, end = 1, head.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        lines = text[head.start():end].split("\n")
        found[name[1] if name else "?"] = sum(bool(line.strip()) for line in lines)
    return found
