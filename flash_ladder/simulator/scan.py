"""Where things are in a CUDA file's text, for the translator: brackets, functions, what the CPU skips."""

import bisect
import re

_COMMENTS_AND_STRINGS = re.compile(  # a quote after a digit separates thousands: 1'000
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'', re.S)
ALIGNMENT = r"(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?"
_NO_FUNCTION = rf"\b(?:struct|class|union|namespace|extern)\b\s*{ALIGNMENT}[^;{{}}()]*$"  # before a brace


def blank(source: str) -> str:
    """The text with comments, strings and characters as spaces: same length, same lines."""
    return _COMMENTS_AND_STRINGS.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), source)


def closing(code: str, start: int, brackets: str) -> int:
    """The position after the bracket that closes the one at `start`; -1: none does."""
    depth = 0
    for bracket in re.compile(rf"[{re.escape(brackets)}]").finditer(code, start):
        depth += 1 if bracket.group() == brackets[0] else -1
        if depth == 0:
            return bracket.end()
    return -1


def open_braces(code: str, position: int) -> list[int]:
    """Where the braces stand that are open at a position."""
    braces: list[int] = []
    for brace in re.finditer(r"[{}]", code[:position]):
        if brace.group() == "{":
            braces.append(brace.start())
        elif braces:
            braces.pop()
    return braces


def is_of_function(code: str, brace: int) -> bool:
    """True if a brace opens a function or a block, and no struct or namespace."""
    return not re.search(_NO_FUNCTION, code[:brace])


def innermost_block(code: str, position: int) -> int:
    """The brace of the innermost block of a function that a position is in; -1: it is in none."""
    *_, brace = [-1, *open_braces(code, position)]
    return brace if brace >= 0 and is_of_function(code, brace) else -1


def without_gpu_only_code(code: str) -> str:
    """Blank what stands between #ifdef __CUDACC__ (or __CUDA_ARCH__) and its #else or #endif."""
    lines, depth, hidden_at = code.split("\n"), 0, None
    for number, line in enumerate(lines):
        directive = line.replace(" ", "")
        if directive.startswith("#if"):
            depth += 1
            if hidden_at is None and re.match(r"#if(def|defined\(?)?__CUDA(CC|_ARCH)__", directive):
                hidden_at = depth
        elif directive.startswith(("#else", "#elif", "#endif")):
            if hidden_at == depth:
                hidden_at = None
            depth -= directive.startswith("#endif")
        if hidden_at is not None:
            lines[number] = " " * len(line)
    return "\n".join(lines)


class Brackets:
    """All brackets of a text: which one a position is in, and where that one closes."""

    def __init__(self, code: str):
        self.code = code
        self._positions: list[int] = []
        self._inside: list[int] = []           # of which bracket the text after each position is
        self._outer: dict[int, int] = {}
        self._end: dict[int, int] = {}
        stack = [-1]
        for bracket in re.finditer(r"[][(){}]", code):
            position = bracket.start()
            if bracket.group() in "([{":
                self._outer[position] = stack[-1]
                stack.append(position)
            elif len(stack) > 1:
                self._end[stack.pop()] = position
            self._positions.append(position)
            self._inside.append(stack[-1])

    def around(self, position: int) -> int:
        """Where the innermost bracket opens that a position is in; -1: it is in none."""
        before = bisect.bisect_left(self._positions, position) - 1
        return self._inside[before] if before >= 0 else -1

    def end(self, bracket: int) -> int:
        """Where a bracket closes; -1: it does not."""
        return self._end.get(bracket, -1)

    def block(self, position: int) -> int:
        """The innermost brace that a position is in; -1: it is in none."""
        bracket = self.around(position)
        while bracket >= 0 and self.code[bracket] != "{":
            bracket = self._outer[bracket]
        return bracket
