"""What no result shows: looked at in a copy of the learner's file, with lines of the checker's own in it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Probe:
    """Lines that are put into a copy of a learner's file, which is then run once.

    Attributes:
        old, new: a text that is there exactly once, outside of the blanks; and what takes its place. (Spaces
            and comments may differ from `old`.)
        message: what to tell if the probe shows a mistake.
        under_way: arrays whose copies must be under way: the probe reads them, and each must be a race with a
            copy.
        finding: what the checker must find, such as "accumulator": products are under way there.

    With neither of the two the run must have no finding.
    """

    old: str
    new: str
    message: str
    under_way: tuple[str, ...] = ()
    finding: str = ""

    def insert(self, text: str) -> str | None:
        """The text with the probe, all in the line of `old`, or None if its place is not there."""
        words = [re.escape(word) for word in self.old.split()]
        places = list(re.finditer(r"(?:\s|//[^\n]*\n)*".join(words), text))
        if len(places) != 1:
            return None
        start, end = places[0].span()
        return text[:start] + " ".join(self.new.split()) + text[end:]


# ------------------------------------------------------------------------------------ what nvcc would refuse
# What stages ask a mask for: stages/common/rule.cuh
OF_A_RULE = ("Rule", "sees", "first_key", "end_key", "first_row", "kind", "score", "slope")
# Bounded, and with ends that may be missing: no text takes a time that grows with the square of its length.
_NOT_CODE = re.compile(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*"?', re.S)
_FUNCTION = re.compile(
    r"(?:^|(?<=[;}\n]))[ \t]{0,100}(?!#)(?P<head>(?:template\s{0,9}<[^<>]{0,200}>\s{0,100})?"
    r"[A-Za-z_][\w\s:<>,*&]{0,200}?[\s*&])(?P<name>\w{1,100})\s{0,9}\((?P<parameters>[^;{}]{0,1000}?)\)"
    r"\s{0,100}(?:const\s{0,9})?\{")


def without_device(text: str, called: tuple[str, ...] = ()) -> tuple[str, int] | None:
    """(name, line) of the first function that a kernel uses, but that nvcc would make for the CPU only.

    called: those that are called from elsewhere.
    """
    code = _NOT_CODE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    functions, position = [], 0
    while found := _FUNCTION.search(code, position):
        end = _closing(code, found.end() - 1)
        functions.append((found, code[found.end():end]))
        position = max(end, found.end())
    on_device = [body for found, body in functions if re.search(r"__(device|global)__", found["head"])]
    for found, _ in functions:
        if re.search(r"__(device|global)__", found["head"]):
            continue
        name = found["name"]
        if name in called or any(re.search(rf"(?<![\w.]){name}\s*\(", body) for body in on_device):
            return name, code.count("\n", 0, found.start("name")) + 1
    return None


def _closing(code: str, start: int) -> int:
    """The position after the brace that closes the one at `start`."""
    depth = 0
    for brace in re.finditer(r"[{}]", code[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return start + brace.end()
    return len(code)
