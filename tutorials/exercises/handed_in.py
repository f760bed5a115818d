"""What a learner hands in: read, and compared with what `new` wrote."""

from __future__ import annotations

import itertools
import os
import re
import stat
from pathlib import Path

from .exercise import COMMAND, FIELD, Exercise, code_lines, sections, with_sections
from .probes import OF_A_RULE, without_device

MOST_BYTES = 200_000  # of a file that is handed in: ten times the longest that `new` writes
QUOTED = 200          # characters of a line of it, in messages
_TITLE = re.compile(r"// (Forward|Backward) stage")
# Comments, numbers (which may have apostrophes) and strings, to be left out of account; braces and directives
_TOKEN = re.compile(r"""//[^\n]*|/\*.*?(?:\*/|\Z)|\b\d[\w'.]*|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|"""
                    r"[{}]|(?:#|%:)[ \t]*\w*", re.S)


def read_answer(file: Path) -> str:
    """The text of a learner's file, as compilers see it: its bytes that are not UTF-8 replaced.

    Raises:
        ValueError: if it is no file, cannot be read, or is far too long.
    """
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # else a named pipe waits for a writer
    except FileNotFoundError:
        if file.is_symlink():
            raise ValueError(f"{file} is no file, but a link to nothing") from None
        raise
    except OSError as error:
        if file.is_socket():
            raise ValueError(f"{file} is no file, but a socket") from None
        raise ValueError(f"{file} is no file that can be read: {error.strerror}") from None
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != stat.S_IFREG:
            raise ValueError(f"{file} is no file, but {kinds.get(kind, 'a device')}")
        with open(fd, "rb", closefd=False) as stream:
            data = stream.read(MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{file} has more than {MOST_BYTES:,} bytes, and is not read")
    return data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")


def problem_of(exercise: Exercise, text: str) -> tuple[str, str] | None:
    """Why a learner's file need not be run: ("not started" or "changed", in words). None if it can be run."""
    given = exercise.learners_file()
    if found := re.search(r"[\0\r]", text):  # to some programs the end of a line, to others not
        line = 1 + text.count("\n", 0, found.start())
        name = "carriage return" if found[0] == "\r" else "null byte"
        return "changed", f"There is a {name} within line {line}: take it out."
    expected, theirs = (_registry_lines(t) for t in (given, text))
    if not (theirs and _TITLE.match(theirs[0])):
        expected = [line for line in expected if not _TITLE.match(line)]
    for line, other in itertools.zip_longest(expected, theirs, fillvalue=""):
        if line != other:
            return "changed", (
                "The lines at the top of the file (types:, tiles:, limits:, ...) have changed, or something "
                f"parts them: put them back. {_instead(line, other)}")
    if exercise.is_hunt:
        if code_lines(text) == code_lines(given):
            return "not started", ("Nothing is changed yet: the bug is still in. The text at the top of the "
                                   "file says what is seen of it.")
        return _host_function(exercise, text)
    try:
        theirs = sections(text)
    except ValueError as error:
        return "changed", (f"The comments with --- around a blank have changed: {error}. Put them back as "
                           f"they were, or begin anew: `{COMMAND} new {exercise.number} --folder ANOTHER`.")
    if missing := [title for title in exercise.sections if title not in theirs]:
        return "changed", (f"The line `// --- {missing[0]}`, where a blank begins, is gone: put it back, and "
                           "`// ---` at the blank's end.")
    empty = [title for title in exercise.sections if not code_lines(theirs[title])]
    if empty:
        where = next(n for n, line in enumerate(text.split("\n"), 1) if line.strip() == f"// --- {empty[0]}")
        return "not started", (f"Nothing is written yet after line {where}, `// --- {empty[0]}`: the text at "
                               "the top of the file says what is to stand there, and the hints at its end "
                               "help.")
    for title in exercise.sections:
        if misfit := _misfit(theirs[title]):
            return "changed", (f"What is written after `// --- {title}` {misfit}: that changes the lines "
                               "below the blank, which are not yours.")
    blanks = dict.fromkeys(exercise.sections, "")
    expected, found = (code_lines(with_sections(t, blanks)) for t in (given, text))
    for line, other in zip([*expected, ""], [*found, ""], strict=False):
        if line != other:
            return "changed", (f"Something else than the blanks has changed: {_instead(line, other)} Put "
                               "that back: only what is between the comments with --- is yours.")
    return _host_function(exercise, text)


def _host_function(exercise: Exercise, text: str) -> tuple[str, str] | None:
    found = without_device(text, OF_A_RULE if exercise.mask else ())
    if not found:
        return None
    name, line = found
    return "does not compile", (f"Line {line}: a kernel calls {name}(), which lacks __device__. It is then a "
                                "function for the CPU, and nvcc refuses the call. (The simulator, where all "
                                "is C++ for the CPU, would take it.)")


def _misfit(section: str) -> str:
    """Why a section would change what follows it, or ""."""
    text = re.sub(r"\\[ \t]*\n", "", section)
    if re.search(r'\b(u8|[uUL])?R"', text):
        return "has a raw string"
    depth = 0
    for token in _TOKEN.findall(text):
        if token.startswith("/*") and not token[2:].endswith("*/"):
            return "has a comment without an end"
        if token[0] in "#%" and not token.endswith("pragma"):
            return f"has a line that begins with `{token}`"
        depth += (token == "{") - (token == "}")
        if depth < 0:
            break
    return "has a { without its }, or a } without its {" if depth else ""


def _instead(line: str, other: str) -> str:
    return f"where the file had `{line}`, it now has `{other[:QUOTED]}{'...' * (len(other) > QUOTED)}`."


def _registry_lines(text: str) -> list[str]:
    """The lines that the registry reads, as it does (flash_ladder/stage.py): the one that names the stage, if
    it is the file's first, and the header's fields, each with the lines that go on with it."""
    header = re.match(r"(?://.*\n)*", text)[0]
    lines = re.sub(r"\n// {8,}", " ", header).split("\n")
    return [line for n, line in enumerate(lines) if FIELD.match(line) or n == 0 and _TITLE.match(line)]
