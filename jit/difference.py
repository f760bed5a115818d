"""What a stage changes of the one before: a diff that prints in colours and renders in a notebook."""

from __future__ import annotations

import difflib
import html
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .registry import DIRECTIONS, ROOT, Stage, parent, read_stage, stages

# The comments around what an exercise asks for: the first has a title, the second has none
SECTION = re.compile(r"\s*// ---(?: (\S.*))?$")
CONTEXT = 3  # unchanged lines around a change
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
    """

    before: str
    after: str
    lines: tuple[str, ...]

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
        return f"{self.before} -> {self.after}: {self.removed} lines removed, {self.added} added"

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
        for line in self.lines:
            colour, background = HTML[line[:1] if line[:1] in HTML else " "]
            style = f"color:{colour};background:{background};padding:0 0.6em;min-height:1.3em"
            rows.append(f'<div style="{style}">{html.escape(line)}</div>')
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
    return Difference(*(_shown(stage.path) for stage in found), tuple(lines))


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
    lines = file.read_text().splitlines()
    first = next((n for n, line in enumerate(lines) if not re.match("//|\ufeff", line)), len(lines))
    chosen = [n for n in range(len(lines)) if header or (n >= first and not SECTION.match(lines[n]))]
    return [n + 1 for n in [*chosen, len(lines)]], [lines[n] for n in chosen]


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
