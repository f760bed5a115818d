"""How mutants are made: where a stage's code can be changed, and its text with all changes in it.

See mutants.py.
"""

import bisect
import functools
import hashlib
import re
import sys
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flash  # noqa: E402
from flash_ladder.difference import INSTRUCTIONS  # noqa: E402
from flash_ladder.simulator.scan import blank  # noqa: E402

COMMON = flash.STAGES / "common"
NUMBER = "FLASH_MUTANT"                          # in the environment

SYNC = re.compile(
    r"(?<![\w.])(?:return\s+)?((?:__syncthreads|__syncwarp|__threadfence|named_barrier_(?:sync|arrive)|"
    r"(?:cp_async|bulk|wgmma)_commit|"
    r"(?:cp_async_wait|bulk_wait|bulk_wait_read|wgmma_wait)\s*<(?P<left>[^<>;]*)>|"
    r"mbarrier_(?:init|wait|wait_for_blocks|arrive|arrive_expect|arrive_in_block|arrive_as_reader)|"
    r"cluster_(?:sync|arrive|wait)|"
    r"fence_mbarrier_init|fence_proxy_async(?:_global)?|wgmma_fence|wait_for_previous_kernel|count_release)|"
    r"(?:\w+\.)?"                            # ring.cuh, turns.cuh
    r"(?:wait_until_(?:full|empty|cleared)|fill|release|pass|wait|end|end_all|skip))"
    r"\s*\((?P<arguments>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\s*;")    # brackets within brackets, twice
# What is changed in some of their arguments: which one, to what, and how that is called
STEPS = ("{} + 1", "of the step after"), ("{} - 1", "of the step before")
OTHERS = {
    "mbarrier_init": [(1, "{} + 1", "of an arrival more"), (1, "{} - 1", "of an arrival less")],
    "mbarrier_arrive_expect": [(1, "{} + 16", "of 16 bytes more"), (1, "{} - 16", "of 16 bytes less")],
    **{name: [(1, "({}) ^ 1", "of the other parity")]
       for name in ("mbarrier_wait", "mbarrier_wait_for_blocks")},
    **{name: [(0, "{} + 1", "of the number after"), (1, "{} + 32", "of a warp more"),
              (1, "{} - 32", "of a warp less")] for name in ("named_barrier_sync", "named_barrier_arrive")},
    **{name: [(0, *step) for step in STEPS]
       for name in ("wait_until_full", "wait_until_empty", "release", "pass")},
    "fill": [(1, *step) for step in STEPS],
}
BOUND = re.compile(r"(?<=[^\s<>=!-] )(<=?|>=?)(?= [^\s<>=])|\bmin\((?=[^)])")
FIXED = re.compile(r"^\s*#|\bconstexpr\b|\bstatic_assert\b|\btemplate\b|__launch_bounds__|"
                   r"\w<\(|\w<[^;()]* [<>]=? [^;()]*>\(")   # lines
INCLUDE = re.compile(r'^#include "(?:common/)?(\w+\.cuh)"(?: *//.*)?$', re.M)
# What comes in with mask.cuh, and is not mutated: calls of mutants.py have one of RULES, which run little of
# it (no lists of tiles, no `a & b` and `a | b`).
MASKS = ("mask_params.cuh", "rule.cuh", "tile_lists.cuh")
RULES = ("causal.cuh", "none.cuh")
BROUGHT = ("tensor.cuh",)        # by flash_fwd.cu and flash_bwd.cu
# Lines of mask.cuh that only other rules run: those that begin after key 0, are no ranges, or change scores
OTHER_RULES = re.compile(r"\bt < cut\b|whole_j|p\.mask\.|\bscores &&|has_gradient|unseen_by|first_tile|"
                         r"first_key\(end|is_range\) return t|low < high|min\(row, N_q|side == 0|bits_before|"
                         r"\bbits\b|first_key\(\(t")
# Nor has one of these calls dropout, packed sequences, or a mask that changes scores. Of the first files none
# runs anything.
NOT_RUN = ("drop.cuh", "drop_shared.cuh", "drop_signed.cuh", "drop_transposed.cuh", "lean_scores.cuh")
OTHER_CALLS = (*NOT_RUN, "dropout.cuh", "sequences.cuh", "packed.cuh")


@dataclass(frozen=True)
class Mutant:
    """code: the line's, without its comment. occurrence: of this code and change in the file, from 1 on."""

    file: str                # relative to stages/
    line: int
    code: str
    change: str
    occurrence: int

    @property
    def name(self) -> str:
        again = f" (no. {self.occurrence})" if self.occurrence > 1 else ""
        return f"{self.file}: {self.code}: {self.change}{again}"


def closing(code: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`."""
    pairs, depth = {"(": ")", "{": "}", "[": "]"}, 0
    for position in range(start, len(code)):
        depth += (code[position] in pairs) - (code[position] in pairs.values())
        if depth == 0:
            return position + 1
    raise ValueError("a bracket is not closed")


def device_parts(code: str) -> list[tuple[int, int]]:
    """Where the bodies of device functions are."""
    parts, position, before = [], 0, 0
    while (brace := code.find("{", position)) >= 0:
        end = closing(code, brace)
        if re.search(r"__global__|__device__", code[before:brace] + code[brace:end]):
            parts.append((brace, end))
        position = before = end
    return parts


def statement_end(code: str, start: int) -> int:
    """The position after the statement that begins at `start`."""
    word = re.compile(r"(?:for|while|if|switch|else|do)\b(?:\s+constexpr)?").match(code, start)
    if code[start] == "{":
        return closing(code, start)
    if word and word[0] in ("else", "do"):
        end = statement_end(code, next_code(code, word.end()))
        return end if word[0] == "else" else statement_end(code, next_code(code, end) + len("while"))
    if word:
        end = statement_end(code, next_code(code, closing(code, code.index("(", word.end()))))
        follows = next_code(code, end)
        return statement_end(code, follows) if re.compile(r"else\b").match(code, follows) else end
    position = start
    while code[position] != ";":
        position = closing(code, position) if code[position] in "({[" else position + 1
    return position + 1


def next_code(code: str, position: int) -> int:
    """The first position from there on that is neither space nor in a line of the preprocessor."""
    return re.compile(r"(?:\s+|#[^\n]*)*").match(code, position).end()


def neighbours(code: str, start: int) -> tuple[int | None, int | None]:
    """Where the statement before the one at `start` begins, and where the one after it ends. None: there is
    none in the same block."""
    depth, brace = 0, start - 1
    while depth or code[brace] != "{":
        depth += (code[brace] == "}") - (code[brace] == "{")
        brace -= 1
    before, position = None, next_code(code, brace + 1)
    while position < start:
        before, position = position, next_code(code, statement_end(code, position))
    if position != start:                                     # it is a part of another statement
        return None, None
    after = next_code(code, statement_end(code, start))
    return before, None if code[after] == "}" else statement_end(code, after)


def declares(statement: str, use: str) -> bool:
    """Whether a statement declares a variable that another one uses."""
    if not re.match(r"(?:const\s+)?[A-Za-z_][\w:]*[\s*&]+\w+\s*[=({\[;]", statement):
        return False
    declared, used = re.findall(r"(\w+)\s*[=({\[]", statement), re.findall(r"\w+", use)
    return not set(declared).isdisjoint(used)


def arguments(text: str) -> list[str]:
    """Those of a call, from what is between its brackets."""
    found, start, depth = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append(text[start:position].strip())
            start = position + 1
    return [*found, text[start:].strip()]


@dataclass
class Source:
    """A file and its mutants, numbered from `first` on."""

    file: Path
    first: int
    folder: Path = flash.STAGES      # names of files are relative to it

    def __post_init__(self):
        self.text = self.file.read_text()
        self.mutants: list[Mutant] = []
        self.edits: list[tuple[int, int, str]] = []           # from, to, what stands there instead
        self._lines = [0, *(m.end() for m in re.finditer("\n", self.text))]
        code = blank(self.text)
        parts = device_parts(code) if self.file.name not in INSTRUCTIONS else []   # thin functions
        for begin, end in parts:
            for sync in SYNC.finditer(code, begin, end):
                self._add_sync(code, sync)
            for bound in BOUND.finditer(code, begin, end):
                self._add_bound(bound)

    def _line(self, position: int) -> tuple[int, str]:
        """The number of the line there, and its text."""
        line = bisect.bisect_right(self._lines, position)
        return line, self.text[self._lines[line - 1]:].split("\n", 1)[0]

    def _new(self, position: int, change: str) -> int:
        line, text = self._line(position)
        code = " ".join(text.split("//")[0].split())
        file = str(self.file.relative_to(self.folder))
        same = sum((m.code, m.change) == (code, change) for m in self.mutants)
        self.mutants.append(Mutant(file, line, code, change, same + 1))
        return self.first + len(self.mutants) - 1

    def _add_sync(self, code: str, sync: re.Match) -> None:
        start, end = sync.span()
        if not re.search(r"[{};)]\s*$|\belse\s+$", code[max(0, start - 200):start]):
            return                                            # a part of an expression
        if "if (DROPOUT)" in self._line(start)[1]:
            return
        before, after = neighbours(code, start)
        returns, call = sync[0].startswith("return"), sync[0][sync.start(1) - start:]
        what = sync[1].rpartition(".")[2]
        number = self._new(start, f"{what} removed")
        gone = [number]
        if after is not None and not returns and not code.startswith("return", next_code(code, end)):
            gone.append(self._new(start, f"{what} a statement later"))
            self.edits.append((after, after, f" if (MUTANT({gone[-1]})) {call}"))
        if before is not None and not declares(code[before:start], call):
            gone.append(self._new(start, f"{what} a statement earlier"))
            self.edits.append((before, before, f"if (MUTANT({gone[-1]})) {call} "))
        instead = ""
        if sync["left"]:
            gone.append(self._new(start, f"{what} for one group less"))
            name = what.split("<")[0]
            instead = f" else if (MUTANT({gone[-1]})) {name}<{sync['left']} + 1>();"
        free = what == "fill" and "." not in sync[1]          # fill(ring, map, step, ...)
        for place, changed, by in OTHERS.get(what, ()):
            gone.append(self._new(start, f"{what} {by}"))
            given = arguments(sync["arguments"])
            given[place + free] = changed.format(given[place + free])
            instead += f" else if (MUTANT({gone[-1]})) {sync[1]}({', '.join(given)});"
        none = " && ".join(f"!MUTANT({n})" for n in gone)
        self.edits.append((start, end, f"{{ if ({none}) {call}{instead}{' return;' * returns} }}"))

    def _add_bound(self, bound: re.Match) -> None:
        line, text = self._line(bound.start())
        if FIXED.search(text) or self.file.name == "mask.cuh" and OTHER_RULES.search(text):
            return
        if self.file.name in OTHER_CALLS or "DROPOUT" in text:
            return
        what = bound[0].rstrip("(")
        again = sum(m.line == line and m.change.startswith(f"{what} ") for m in self.mutants) // 2
        place = f"{what} no. {again + 1} of the line" if again else what
        more, less = (self._new(bound.start(), f"{place} {by}") for by in ("+ 1", "- 1"))
        space = " " if what != "min" else ""
        changed = f"{space}MUTANT({more}) - MUTANT({less}) +{' ' * (not space)}"
        self.edits.append((bound.end(), bound.end(), changed))

    def mutated(self) -> str:
        """The text, with all mutants in it; its lines are numbered as in the file."""
        pieces, position = [], 0
        for start, end, replacement in sorted(self.edits):
            pieces += [self.text[position:start], replacement]
            position = end
        return "".join(pieces) + self.text[position:]


def files_of(stage: flash.Stage) -> list[Path]:
    """A stage's file, and those of stages/common that it includes, but for MASKS and BROUGHT."""
    files, waiting = [], [stage.path]
    while waiting:
        file = waiting.pop(0)
        if file not in files:
            files.append(file)
            waiting += [COMMON / name for name in INCLUDE.findall(file.read_text())
                        if name not in (*MASKS, *BROUGHT)]
    return files


def sources(stage: flash.Stage) -> list[Source]:
    """The files of a stage."""
    found: list[Source] = []
    for file in files_of(stage):
        found.append(Source(file, 1 + sum(len(source.mutants) for source in found)))
    return found


def mutants(stage: flash.Stage) -> dict[int, Mutant]:
    """Those of a stage and of what it includes, by number."""
    return dict(enumerate((m for source in sources(stage) for m in source.mutants), 1))


@functools.lru_cache(256)
def words(text: str) -> str:
    """A file's code."""
    return " ".join(blank(text).split())


def fingerprint(stage: flash.Stage) -> str:
    """A hash of its code and of what it includes and the calls run, without comments and space."""
    files = [file for file in files_of(stage) if file.name not in NOT_RUN]
    if COMMON / "mask.cuh" in files:
        files += [*(COMMON / name for name in MASKS), *(flash.STAGES / "masks" / name for name in RULES)]
    code = " ".join(words(file.read_text()) for file in files)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


HEAD = f"""
#include <stdlib.h>
static int mutant_that_runs = 0;
static int mutant_of_the_environment() {{ const char* x = getenv("{NUMBER}"); return x ? atoi(x) : 0; }}
#define MUTANT(number) (mutant_that_runs == (number))
"""


HEAD_OF_NVCC = f"""
#include <stdlib.h>
static int mutant_that_runs = 0;
static __constant__ int mutant_on_the_device = 0;
static int mutant_of_the_environment() {{
  const char* x = getenv("{NUMBER}");
  const int number = x ? atoi(x) : 0;
  cudaMemcpyToSymbol(mutant_on_the_device, &number, sizeof number);
  return number;
}}
#ifdef __CUDA_ARCH__
#define MUTANT(number) (mutant_on_the_device == (number))
#else
#define MUTANT(number) (mutant_that_runs == (number))
#endif
"""


def schema_of_nvcc(stage: flash.Stage, numbers: Container[int]) -> str:
    """schema() for a GPU, with these mutants alone: of all at once nvcc makes other code than of the stage,
    and takes two minutes for some."""
    return re.sub(r"\bMUTANT\((\d+)\)", lambda use: use[0] if int(use[1]) in numbers else "false",
                  schema(stage, HEAD_OF_NVCC))


def schema(stage: flash.Stage, head: str = HEAD) -> str:
    """The text of a stage with all mutants in it, with its includes in place, but for MASKS, BROUGHT and
    MASK_FILE.
    head: how it learns which one runs.

    (mask.cuh has a guard: flash_fwd.cu and flash_bwd.cu, which include it, do not bring it once more.)
    """
    texts = {source.file: source.mutated() for source in sources(stage)}
    there = set()

    def lines_of(file: Path) -> str:
        """With the lines' numbers and the file's name for the compiler."""
        text = texts[file].replace("#pragma once", "")

        def put(include: re.Match) -> str:
            inner = COMMON / include[1]
            if inner not in texts:
                return f'#include "common/{include[1]}"'
            if inner in there:
                return ""
            there.add(inner)
            number = text.count("\n", 0, include.start()) + 2
            return f'#line 1 "{inner}"\n{lines_of(inner)}\n#line {number} "{file}"'

        return INCLUDE.sub(put, text)

    text = re.sub(r"(cudaError_t launch\([^{]*\{)", r"\1 mutant_that_runs = mutant_of_the_environment();",
                  lines_of(stage.path))
    header, pragma, _ = stage.path.read_text().partition("#pragma once")
    number = header.count("\n") + 1
    return text.replace(header, header + pragma + head + f'#line {number} "{stage.path}"', 1)
