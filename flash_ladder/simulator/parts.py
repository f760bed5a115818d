"""Where the parts of dynamic shared memory end, which kernels cut by hand: for local_variables.py.

Only declarations say how long they are:

    float* K_smem = smem;
    float* V_smem = K_smem + Bc * d;       K_smem ends where V_smem begins

So it is for pointers X_smem that are never changed. A part from which no other one is declared has no end
here.
"""

import re

from .scan import Brackets, is_of_function, open_braces

# A whole statement: type, *, name; and the pointer that it is a distance from
_NEXT = re.compile(
    r"(?<=[;{}])\s*(?!else\b|do\b|return\b)[\w:]+(?:[\w:\s]|<[\w:,\s]*>)*\*\s*(?:const\s+|__restrict__\s+)*"
    r"(?P<next>\w+_smem)\s*=\s*(?:reinterpret_cast\s*<[^<>;]*>\s*\(\s*)?(?P<name>\w+_smem)\s*\+[^;{}?]*;")
# What sets a pointer, or hands it on so that something else may; or declares the name once more
_SET = r"(?<![\w.])%s\s*(?:[-+]?=(?!=)|\+\+|--)|(?:\+\+|--|[&*])\s*(?:const\s+|__restrict__\s+)*%s\s*[,;)=]"
_CAPTURES_BY_NAME = re.compile(
    r"(?<![\w\])\s])\s*\[\s*(?:[&=]\s*,|&?\w+\s*[],])[^][;]*\]?\s*(?:\([^;]*?\)\s*)?\{")


class Parts:
    """Those of a file's text, without comments and lines of the preprocessor."""

    def __init__(self, code: str, brackets: Brackets):
        self._ends: dict[str, list[tuple[int, int, str]]] = {}     # from where to where in the text, and what
        for pointer in _NEXT.finditer(code):
            braces = [brace for brace in open_braces(code, pointer.end()) if is_of_function(code, brace)]
            if not braces or brackets.end(braces[0]) < 0:
                continue
            name, function = pointer["name"], code[braces[0]:brackets.end(braces[0])]
            if len(re.findall(_SET % (name, name), function)) == 1 and not _CAPTURES_BY_NAME.search(function):
                scope = pointer.end(), brackets.end(braces[-1]), pointer["next"]
                self._ends.setdefault(name, []).append(scope)

    def end(self, name: str, position: int) -> str:
        """The pointer where a pointer's part ends, as known at a position; "": none, or one of several."""
        found = [next_ for start, end, next_ in self._ends.get(name, ()) if start <= position < end]
        return found[0] if len(found) == 1 else ""
