"""An exercise: which parts of a stage are blank, what they are to do, and which wrong answers it must refuse.

The blanks are sections of the stage files, between a comment that begins with `---` and the next `// ---`:

    // --- m and l follow the new maximum
    ...
    // ---

So an exercise changes with its stage; or with the file of stages/masks that it is about, and which its stage
is compiled with. A bug hunt has no blanks, but a stage or a mask that is broken on purpose. Where the blank
or the bug is in a file of stages/common, that file stands in the learner's file in place of its #include.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import flash
from flash_ladder.difference import SECTION
from flash_ladder.sources import source_files

from .cases import Calls, calls_with
from .probes import Probe

WIDTH = 108
COMMAND = "python -m tutorials.exercises"
YOUR_CODE = "// your code"
HINTS = "#pragma region Hint"
TELLING = 20  # letters and digits of a line that says something
COMMON, MASKS = flash.STAGES / "common", flash.STAGES / "masks"
FIELD = re.compile(rf"// ({'|'.join(flash.FIELDS)}):")
_INCLUDE = re.compile(r'^#include "(?:common/)?(\w+\.cuh)"$', re.M)


@dataclass(frozen=True)
class Change:
    """One piece of a file's text, which must be there exactly once, in place of another."""

    old: str
    new: str

    def apply(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise ValueError(f"{self.old!r} is there {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Mutant:
    """A plausible wrong answer: the reference with changes.

    reason: a pattern that the verdict must match. right_on_randn: random tensors without a mask, in lengths
    that are multiples of the tiles, give the right numbers.
    """

    what: str
    changes: tuple[Change, ...]
    reason: str
    right_on_randn: bool = False


@dataclass(frozen=True)
class Exercise:
    """What a learner is asked to write, or to find.

    Attributes:
        number: in the order of the lessons.
        lesson: the notebook that it belongs to, such as "04".
        direction, stage: "fwd" or "bwd", and the stage's name.
        sections: the titles of the stage's sections that are blank; none for a bug hunt.
        mask: the mask of stages/masks that it is about, which the stage is compiled with; "" if it is about
            the stage.
        common: the files of stages/common, such as "mask.cuh", in which blanks or bugs are.
        specification: what the blanks are to do, or what is wrong: paragraphs with an empty line between.
        hints: from a nudge to nearly the answer.
        answer: for a bug hunt: what was wrong.
        broken: for a bug hunt: the changes that break the stage.
        mutants: wrong answers. For a bug hunt, "mendings" that do not mend it: changes of the broken stage.
        tiles: Br and Bc of the check; default: the stage's.
        score: the resources that are compared with the reference's: "hbm" (bytes), "wavefronts" (of shared
            memory) or "barriers" (of a block).
        at_most: by resource, how many times the reference's a score may be.
        own_calls: the calls of the check; None: the ten of cases.py, with its mask.
        deterministic: pass deterministic=True.
        probes: what is looked at besides, in copies of the file.
    """

    number: int
    name: str
    title: str
    lesson: str
    direction: str
    stage: str
    specification: str
    hints: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    sections: tuple[str, ...] = ()
    mask: str = ""
    common: tuple[str, ...] = ()
    answer: str = ""
    broken: tuple[Change, ...] = ()
    tiles: dict[str, int] = field(default_factory=dict)
    score: tuple[str, ...] = ("hbm",)
    at_most: dict[str, float] = field(default_factory=dict)
    own_calls: Calls | None = None
    deterministic: bool = False
    probes: tuple[Probe, ...] = ()

    @property
    def is_hunt(self) -> bool:
        return not self.sections

    @property
    def compiled_with(self) -> flash.Stage:
        """The stage."""
        return next(s for s in flash.stages(self.direction) if s.name == self.stage)

    @property
    def path(self) -> Path:
        """The mask's file, or the stage's: the reference."""
        return MASKS / f"{self.mask}.cuh" if self.mask else self.compiled_with.path

    @property
    def subject(self) -> str:
        """What the file is, such as "fwd flash2"."""
        return f"mask {self.mask}" if self.mask else f"{self.direction} {self.stage}"

    @property
    def file_name(self) -> str:
        return f"{self.number:02}_{self.name}.cuh"

    @property
    def calls(self) -> Calls:
        """Those of the check."""
        return self.own_calls or (calls_with(self.mask) if self.mask else Calls())

    @property
    def lines(self) -> int:
        """Of code in the reference's sections."""
        return sum(len(code_lines(section)) for section in self.answers().values())

    def reference(self) -> str:
        """The text of the file, with the files `common` in place of their #include."""
        return inlined(self.path.read_text(), *self.common)

    def answers(self) -> dict[str, str]:
        """What the reference has in the sections that are blank, by title."""
        found = sections(self.reference())
        if missing := [title for title in self.sections if title not in found]:
            raise ValueError(f"exercise {self.number}: {self.path.name} has no section {missing[0]!r}")
        return {title: found[title] for title in self.sections}

    def telling_lines(self) -> set[str]:
        """Of the answers, each in one_line(): what gives them away. Short lines do not, nor do those that the
        learner's file has elsewhere."""
        given = {one_line(line) for line in code_lines(self.learners_file())}
        asked = {one_line(line) for answer in self.answers().values() for line in code_lines(answer)}
        return {line for line in asked - given if len(re.findall(r"\w", line)) >= TELLING}

    def file_of(self, title: str) -> Path:
        """The file that has the section of this title: the reference, or one of stages/common."""
        files = [self.path, *(COMMON / name for name in self.common)]
        return next(file for file in files if title in sections(file.read_text()))

    def learners_file(self) -> str:
        """The text of the file that a learner gets: the reference with blanks, or broken."""
        text = self.reference()
        for change in self.broken:
            text = change.apply(text)
        if self.is_hunt:  # what others have to write says nothing about the bug
            text = "\n".join(line for line in text.split("\n") if not SECTION.match(line))
        text = with_sections(text, {title: _blank(answer) for title, answer in self.answers().items()})
        first, rest = text.split("\n", 1)
        header = [first]
        lines = rest.split("\n")
        title = r"//(?! ---)" if self.mask else rf"{FIELD.pattern}|// {{8,}}"
        while lines and re.match(title, lines[0]):
            header.append(lines.pop(0))
        if lines[:1] == ["//"]:
            del lines[0]
        return "\n".join([*header, "//", *self._task(), *lines]).rstrip("\n") + "\n" + self._hints()

    def with_answers(self, answers: dict[str, str]) -> str:
        """The learner's file with these texts in its blanks."""
        return with_sections(self.learners_file(), answers)

    def solved(self) -> str:
        """The learner's file, solved: with the reference's sections, or without the bug."""
        if not self.is_hunt:
            return self.with_answers(self.answers())
        text = self.learners_file()
        for change in reversed(self.broken):
            text = Change(change.new, change.old).apply(text)
        return text

    def _task(self) -> list[str]:
        kind = "BUG HUNT" if self.is_hunt else "EXERCISE"
        ask = ("Mend it" if self.is_hunt else
               f"Write {_about(self.lines)} where it says \"{YOUR_CODE[3:]}\", and nothing elsewhere")
        parts = [f"{kind} {self.number}: {self.title} (lesson {self.lesson})",
                 *self.specification.strip().split("\n\n"),
                 f"{ask}. Then, in the repository's folder (hints are at the end of this file):",
                 f"  {COMMAND} check {self.number}"]
        lines = []
        for part in parts:
            lines += [f"// {line}".rstrip() for line in wrapped(part)] + ["//"]
        return lines

    def _hints(self) -> str:
        parts = []
        for number, hint in enumerate(self.hints, 1):
            lines = "\n".join(f"// {line}".rstrip() for line in wrapped(hint))
            parts.append(f"\n{HINTS} {number} of {len(self.hints)}\n{lines}\n#pragma endregion\n")
        return "".join(parts)


def wrapped(text: str) -> list[str]:
    """A paragraph in lines that fit; lines that begin with two spaces, such as formulas, stay as they are."""
    lines: list[str] = []
    for piece in re.split(r"\n(?=  )|(?<=\S)\n(?!  )", text.strip("\n")):
        if piece.startswith("  "):
            lines.append(piece)
        elif lines and not lines[-1].startswith("  "):
            lines[-1] += " " + piece.strip()
        else:
            lines.append(piece.strip())
    return [line for piece in lines
            for line in ([piece] if piece.startswith("  ") else textwrap.wrap(piece, WIDTH - 3) or [""])]


def code_lines(text: str) -> list[str]:
    """The lines that have code, without comments. A comment that a backslash prolongs stays, and so does what
    is no // comment."""
    lines = (line.strip() if line.rstrip().endswith("\\") else line.partition("//")[0].strip()
             for line in text.split("\n"))
    return [line for line in lines if line and not line.startswith((HINTS, "#pragma endregion"))]


def one_line(line: str) -> str:
    """Without a comment, and with single spaces: to compare."""
    return " ".join(re.sub(r"//.*", "", line).split())


def inlined(text: str, *names: str) -> str:
    """A stage's text with these files of stages/common in place of their #include. A file that includes one
    of them comes in as well: it would bring a second copy.

    Raises:
        ValueError: for a file that the stage does not include.
    """
    files = {COMMON / name for name in names}
    there: set[Path] = set()

    def put(include: re.Match) -> str:
        file = COMMON / include[1]
        if not files.intersection(source_files(file)):
            return f'#include "common/{file.name}"'
        if file in there:
            return f"// common/{file.name} is above"
        there.add(file)
        body = _INCLUDE.sub(put, file.read_text().replace("#pragma once\n", "").strip("\n"))
        return f"\n// stages/common/{file.name}, in place of its #include.\n{body}\n"

    text = _INCLUDE.sub(put, text)
    if missing := files - there:
        raise ValueError(f"the stage does not include {', '.join(sorted(file.name for file in missing))}")
    return text


def sections(text: str) -> dict[str, str]:
    """The sections of a stage's text, by title: the lines between the two comments."""
    return {title: "\n".join(lines) for title, lines, _ in _split(text) if title}


def with_sections(text: str, replacements: dict[str, str]) -> str:
    """The text with other lines in its sections of these titles."""
    out: list[str] = []
    for title, lines, marks in _split(text):
        if not title:
            out += lines
            continue
        body = replacements[title].split("\n") if title in replacements else lines
        out += [marks[0], *body, *marks[1:]]
    return "\n".join(out)


def _split(text: str) -> list[tuple[str, list[str], list[str]]]:
    """(title, lines, marks) of a text's parts in order: sections, and with the title "" what is between.

    Raises:
        ValueError: for a section without an end, one in another one, or two of the same title.
    """
    parts: list[tuple[str, list[str], list[str]]] = [("", [], [])]
    known: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        title, _, marks = parts[-1]
        mark = SECTION.match(line)
        if mark and mark[1]:
            if title:
                raise ValueError(f"line {number}: a section begins in the section {title!r}")
            if mark[1] in known:
                raise ValueError(f"line {number}: a second section {mark[1]!r}")
            known.add(mark[1])
            parts.append((mark[1], [], [line]))
        elif mark:
            if not title:
                raise ValueError(f"line {number}: a section ends that has not begun")
            marks.append(line)
            parts.append(("", [], []))
        else:
            parts[-1][1].append(line)
    if parts[-1][0]:
        raise ValueError(f"the section {parts[-1][0]!r} has no end: a line with // --- and nothing else")
    return parts


def _blank(answer: str) -> str:
    indent = re.match(r"\s*", answer)[0]
    return f"\n{indent}{YOUR_CODE}: {_about(len(code_lines(answer)))}\n"


def _about(lines: int) -> str:
    return f"about {lines} line{'s' * (lines > 1)} of code"
