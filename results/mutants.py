"""Mutants of the stages, made mechanically, and whether the simulator's checker or a wrong result shows them.

    python results/mutants.py results/cpu                 # all; writes mutants.json there: some 40 minutes
    python results/mutants.py results/cpu --stages flash2 ampere_tuned   # these; what else it has stays
    python results/mutants.py --list                      # their names alone
    python results/mutants.py results/cpu --missed        # those in mutants.json that nothing has found

A mutant is one change in the device code of a stage, or of a file of stages/common that stages include:

    a barrier, a fence, a wait for copies or a commit: removed; a statement later; a statement earlier;
        a wait: for one group less
    a bound (<, <=, >, >=, min): larger by one; smaller by one

All mutants of a stage are compiled at once: each is a place where the code asks for the number of the mutant
that runs, which launch() takes from the environment. So a stage takes one build for each shape of the calls.

A mutant is found if the checker has a finding, the launch fails or hangs, or a result is wrong. One of
stages/common is tried in one stage after another, until it is found. Those that nothing can find since they
compute the same are in tests/equivalent_mutants.txt, with the reason.
"""

import argparse
import bisect
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flash  # noqa: E402
from flash_ladder.simulator.translate import _blank as blank  # noqa: E402

COMMON = flash.STAGES / "common"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.txt"
NUMBER = "FLASH_MUTANT"                          # in the environment
SECONDS = 60                                     # for one mutant, before it counts as hanging

SYNC = re.compile(r"\b(__syncthreads|__syncwarp|__threadfence|cp_async_commit|cp_async_wait\s*<([^<>;]*)>)"
                  r"\s*\([^()]*\)\s*;")
BOUND = re.compile(r"(?<=[^\s<>=!-] )(<=?|>=?)(?= [^\s<>=])|\bmin\((?=[^)])")
FIXED = re.compile(r"^\s*#|\bconstexpr\b|\bstatic_assert\b|\btemplate\b|__launch_bounds__|\w<\(")   # lines
INCLUDE = re.compile(r'^#include "(?:common/)?(\w+\.cuh)"$', re.M)


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


# ------------------------------------------------------------------------------------------ the source
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
    if word and word[0] == "else" or word and word[0] == "do":
        return statement_end(code, next_code(code, word.end()))
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
        parts = device_parts(code) if self.file.name != "ptx.cuh" else []
        for begin, end in parts:
            for sync in SYNC.finditer(code, begin, end):
                self._add_sync(code, sync)
            for bound in BOUND.finditer(code, begin, end):
                self._add_bound(bound)

    def _new(self, position: int, change: str) -> int:
        line = bisect.bisect_right(self._lines, position)
        text = self.text[self._lines[line - 1]:].split("\n", 1)[0]
        code = " ".join(text.split("//")[0].split())
        file = str(self.file.relative_to(self.folder))
        same = sum((m.code, m.change) == (code, change) for m in self.mutants)
        self.mutants.append(Mutant(file, line, code, change, same + 1))
        return self.first + len(self.mutants) - 1

    def _add_sync(self, code: str, sync: re.Match) -> None:
        start, end = sync.span()
        before, after = neighbours(code, start)
        number = self._new(start, f"{sync[1]} removed")
        gone = [number]
        if after is not None:
            gone.append(self._new(start, f"{sync[1]} a statement later"))
            self.edits.append((after, after, f" if (MUTANT({gone[-1]})) {sync[0]}"))
        if before is not None:
            gone.append(self._new(start, f"{sync[1]} a statement earlier"))
            self.edits.append((before, before, f"if (MUTANT({gone[-1]})) {sync[0]} "))
        weaker = ""
        if sync[2]:
            gone.append(self._new(start, f"{sync[1]} for one group less"))
            weaker = f" else if (MUTANT({gone[-1]})) cp_async_wait<{sync[2]} + 1>();"
        none = " && ".join(f"!MUTANT({n})" for n in gone)
        self.edits.append((start, end, f"{{ if ({none}) {sync[0]}{weaker} }}"))

    def _add_bound(self, bound: re.Match) -> None:
        line = bisect.bisect_right(self._lines, bound.start())
        if FIXED.search(self.text[self._lines[line - 1]:].split("\n", 1)[0]):
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


def sources(stage: flash.Stage) -> list[Source]:
    """A stage's file, and those of stages/common that it includes."""
    files, waiting = [], [stage.path]
    while waiting:
        file = waiting.pop(0)
        if file not in files:
            files.append(file)
            waiting += [COMMON / name for name in INCLUDE.findall(file.read_text())]
    found: list[Source] = []
    for file in files:
        found.append(Source(file, 1 + sum(len(source.mutants) for source in found)))
    return found


def mutants(stage: flash.Stage) -> dict[int, Mutant]:
    """Those of a stage and of what it includes, by number."""
    return dict(enumerate((m for source in sources(stage) for m in source.mutants), 1))


HEAD = """
#include <stdlib.h>
static int mutant_that_runs = 0;
static int mutant_of_the_environment() { const char* x = getenv("FLASH_MUTANT"); return x ? atoi(x) : 0; }
#define MUTANT(number) (mutant_that_runs == (number))
"""


def schema(stage: flash.Stage) -> str:
    """The text of a stage with all mutants in it, and with its includes in place."""
    texts = {source.file: source.mutated() for source in sources(stage)}
    there = set()

    def lines_of(file: Path) -> str:
        """With the lines' numbers and the file's name for the compiler."""
        text = texts[file].replace("#pragma once", "")

        def put(include: re.Match) -> str:
            inner = COMMON / include[1]
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
    return text.replace(header, header + pragma + HEAD + f'#line {number} "{stage.path}"', 1)


# ------------------------------------------------------------------------------------------ running them
# B, H, H_kv, N_q, N_k, d, diagonal, which of the tiles that it takes. In the first, early rows see no key and
# late ones all; in the second the last key's scores are so large that e^score is infinite, which the maximum
# must prevent; in the third there are keys that no row sees
SHAPES = [(1, 2, 1, 70, 33, 40, -10, 1), (1, 1, 1, 100, 70, 64, None, 0), (1, 1, 1, 65, 97, 136, 0, 0)]


def tiles_of(stage: flash.Stage, d: int) -> list[dict[str, int]]:
    """Small tiles and middling ones, that a stage takes."""
    taken = []
    for size in sorted((Br * Bc, Br, Bc) for Br in (8, 16, 32, 64, 128) for Bc in (8, 16, 32, 64)):
        try:
            taken.append(stage.tiles(d, 227 * 1024, Br=size[1], Bc=size[2]))
        except ValueError:
            continue
    return [taken[0], taken[len(taken) // 2]]


def calls(stage: flash.Stage) -> list:
    """Functions that call a stage in the shapes, and return what is wrong with the results, or ""."""
    import torch

    from flash_ladder import grid, plan
    from flash_ladder.reference import random_gradients, random_qkv, reference

    made = []
    for B, H, H_kv, N_q, N_k, d, diagonal, which in SHAPES:
        torch.manual_seed(0)
        dtype, tiles = stage.dtypes[0], tiles_of(stage, d)[which]
        q, k, v = random_qkv(B, H, H_kv, N_q, N_k, d, "cpu", dtype)
        if diagonal is None:
            k[:, :, -1] *= 50
        options = plan.choose(stage, q, stage.direction, **tiles)

        def forward(tensors=(q, k, v, diagonal), options=options):
            with grid.poisoned():
                o, lse = plan.forward(*tensors, None, *options)
            return grid.wrong(grid.errors(o, lse, *tensors))

        o, lse = reference(q.double(), k.double(), v.double(), diagonal)
        o, lse = o.to(dtype), lse.float()
        do, dlse = random_gradients(q)
        dlse[lse == -torch.inf] = -torch.inf

        def backward(tensors=(q, k, v), rest=(o, lse, do, dlse), diagonal=diagonal, options=options):
            _, _, do, dlse = rest
            with grid.poisoned():
                gradients = plan.backward(*tensors, *rest, diagonal, None, *options, False)
            return grid.wrong(grid.gradient_errors(gradients, *tensors, do, diagonal, None, dlse))

        made.append(forward if stage.direction == "fwd" else backward)
    return made


def how_found(call) -> str:
    """What shows in a call: the checker's first finding, an error of the launch, or a wrong result; or ""."""
    error = ""
    with flash.inspect() as report:
        try:
            error = call()
        except (RuntimeError, AssertionError) as raised:
            error = str(raised).splitlines()[0]
    return report.findings[0].what if report.findings else f"wrong: {error}" if error else ""


def work(name: str, numbers: list[int]) -> None:
    """In a process of its own: print a line of JSON for each mutant of a stage. Number 0 is the stage."""
    stage = next(s for s in flash.stages() if s.path.name == name)
    file = flash.BUILD / "mutants" / stage.path.name         # always the same: then it is built once
    file.parent.mkdir(parents=True, exist_ok=True)
    text = schema(stage)
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)
    ready = calls(flash.read_stage(file))
    for number in numbers:
        os.environ[NUMBER] = str(number)
        found = next((how for call in ready if (how := how_found(call))), "")
        print(json.dumps([number, found]), flush=True)


def verdicts(stage: flash.Stage, numbers: list[int]) -> Iterator[tuple[int, str]]:
    """How each mutant is found, or "". A worker that dies or hangs has found the one that it was at."""
    left = list(numbers)
    while left:
        worker = subprocess.Popen(
            [sys.executable, __file__, "--work", stage.path.name, *map(str, left)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        done = 0
        while True:
            timer = threading.Timer(SECONDS if done else 20 * SECONDS, worker.kill)   # it builds first
            timer.start()
            line = worker.stdout.readline()
            timed_out = not timer.is_alive()
            timer.cancel()
            if not line:
                break
            yield tuple(json.loads(line))
            done += 1
        worker.wait()
        if done < len(left):
            errors = worker.stderr.read()
            if not done and (left[0] == 0 or "building" in errors):
                raise RuntimeError(f"{stage.path.name} with its mutants does not run:\n{errors[-3000:]}")
            yield left[done], "hang" if timed_out else "the process ended"
            done += 1
        left = left[done:]


def name_of(row: dict) -> str:
    """The name of the mutant in a row of mutants.json."""
    return Mutant(**{field.name: row[field.name] for field in fields(Mutant)}).name


def run(stages: list[flash.Stage], known: dict[str, dict], out: Path | None) -> dict[str, dict]:
    """Rows by the names of mutants: in which stages each was tried, and how the last one found it. One of
    stages/common that a stage has found is not tried in the next. Rows of mutants that are gone are left out.
    """
    present = {m.name for stage in flash.stages() for m in mutants(stage).values()}
    rows = {name: row for name, row in known.items() if name in present}
    for stage in stages:
        own = {number: m for number, m in mutants(stage).items()
               if m.file == stage.path.name or not rows.get(m.name, {}).get("how")}
        for number, how in verdicts(stage, [0, *own]):
            if number == 0:
                assert not how, f"{stage.path.name} without a mutation: {how}"
                continue
            mutant = own[number]
            tried = {*rows.get(mutant.name, {}).get("tried", []), stage.path.stem}
            rows[mutant.name] = asdict(mutant) | {"tried": sorted(tried), "how": how}
        mine = [rows[m.name] for m in own.values()]
        print(f"{stage.path.name}: {len(mine)} mutants, {sum(not row['how'] for row in mine)} not found",
              flush=True)
        if out:
            result = {"date": str(date.today()), "mutants": list(rows.values())}
            out.write_text(json.dumps(result, indent=1) + "\n")
    return rows


def equivalent() -> dict[str, str]:
    """The reasons of equivalent_mutants.txt, by the names of the mutants: a paragraph is a reason, and the
    names that it is for, one a line after two spaces."""
    found = {}
    for part in re.split(r"\n\n+", EQUIVALENT.read_text().strip()):
        lines = [line for line in part.splitlines() if not line.startswith("#")]
        reason = " ".join(line for line in lines if not line.startswith("  "))
        found |= {line.strip(): reason for line in lines if line.startswith("  ")}
    return found


# ------------------------------------------------------------------------------------------ the table
KINDS = {"a barrier or fence removed": "(__sync|__threadfence).* removed",
         "a barrier or fence moved": "(__sync|__threadfence).* a statement .*",
         "a wait or commit removed": "cp_async.* removed",
         "a wait or commit moved": "cp_async.* a statement .*",
         "a wait for one group less": "cp_async.* less", "a bound larger by one": r".* \+ 1",
         "a bound smaller by one": ".* - 1"}


def missed(rows: list[dict]) -> list[str]:
    """The names of mutants that nothing has found, and that are not equivalent."""
    same = equivalent()
    return [name for row in rows if not row["how"] and (name := name_of(row)) not in same]


def table(data: dict) -> str:
    """What was found, by kind of change, as Markdown."""
    header = ("change", "mutants", "equivalent", "found by the checker", "by the result alone", "missed")
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for kind, pattern in [*KINDS.items(), ("**all**", ".*")]:
        rows = [row for row in data["mutants"] if re.fullmatch(pattern, row["change"])]
        alone = sum(row["how"].startswith("wrong") for row in rows)
        left = len(missed(rows))
        equal = sum(not row["how"] for row in rows) - left
        numbers = len(rows), equal, len(rows) - equal - left - alone, alone, left
        lines.append(f"| {kind} | {' | '.join(map(str, numbers))} |")
    tried = len({name for row in data["mutants"] for name in row["tried"]})
    return "\n".join([*lines, "", f"Of {tried} of {len(flash.stages())} stages, in three calls each: ragged, "
                      f"with grouped heads, with masks. By `python results/mutants.py`, {data['date']}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--stages", nargs="+", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--missed", action="store_true")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work[0], [int(number) for number in args.work[1:]])
    chosen = [s for s in flash.stages() if not args.stages or {s.name, s.path.stem} & set(args.stages)]
    if args.list:
        names = dict.fromkeys(m.name for stage in chosen for m in mutants(stage).values())
        print(*names, f"{len(names)} mutants", sep="\n")
        return None
    if not args.folder or not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    out = args.folder / "mutants.json"
    keep = out.is_file() and (args.stages or args.missed)
    there = json.loads(out.read_text())["mutants"] if keep else []
    if args.missed:
        print(*missed(there), sep="\n")
        return None
    run(chosen, {name_of(row): row for row in there}, out)
    return None


if __name__ == "__main__":
    main()
