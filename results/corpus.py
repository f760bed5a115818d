"""The corpus in tests/corpus: kernels with one planted bug each, and what the simulator's checker finds.

    python results/corpus.py results/cpu      # writes corpus.json there

A file is a topic. Its kernels are right; a line "//! buggy: ..." under one of their lines has what stands in
its place in the bug: nothing, if nothing follows. So a bug and its correct twin differ in that line. Before a
kernel, "//! race <<<1, 64>>>" says what the checker must find in the bug, and how the kernel is launched.
Kernels have (x, out, count) as arguments: 1000 floats from 1 to 7; 1000 floats to be written; 8 zeros. Where
others follow in brackets, they have those. <<<4, 64, cluster 2>>>: by InClusters of the topic.
"""

import argparse
import ctypes
import functools
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

from compute_sanitizer import TOOLS, says_so  # noqa: E402

from flash_ladder.simulator.scan import blank  # noqa: E402

FOLDER = ROOT / "tests" / "corpus"
HEAD = re.compile(r"^//! ([\w ]+?) <<<(.*)>>>(?: (\(.*\)))?\n"
                  r"__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(", re.M)
CLUSTER = re.compile(r"(.*), cluster (\d+)")            # after the other numbers of a launch
BUGGY = re.compile(r"^( *)(.*)\n *//! buggy:(.*)$", re.M)
PLACES = ("bug", "twin")
SCHEDULES = (("", "late"), ("1", "early"), ("2", "random"))   # FLASH_SIM_SEED, FLASH_SIM_COPIES
# What follows a topic's kernels: a function that launches one of them, and for nvcc a program that launches
# those whose numbers are its arguments
LAUNCHES = """
extern "C" const char* run_case(int number, const float* x, float* out, unsigned* count) {{
  switch (number) {{
{cases}
  }}
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}}
"""
PROGRAM = """
#ifdef __CUDACC__
#include <cstdio>
#include <cstdlib>
int main(int number_of_arguments, char** arguments) {
  float host[1000];
  for (int i = 0; i < 1000; i++) host[i] = 1 + i % 7;
  for (int i = 1; i < number_of_arguments; i++) {
    float *x, *out;
    unsigned* count;
    cudaMalloc(&x, sizeof host);
    cudaMalloc(&out, sizeof host);
    cudaMalloc(&count, 8 * sizeof(unsigned));
    cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice);
    cudaMemset(count, 0, 8 * sizeof(unsigned));
    const char* error = run_case(atoi(arguments[i]), x, out, count);
    const cudaError_t after = cudaDeviceSynchronize();
    if (!error && after != cudaSuccess) error = cudaGetErrorString(after);
    if (error) {
      printf("case %s: %s\\n", arguments[i], error);
      return 1;
    }
    cudaFree(x);
    cudaFree(out);
    cudaFree(count);
  }
  return 0;
}
#endif
"""


@dataclass(frozen=True)
class Case:
    """A kernel of a topic. expected: what the checker must find in the bug, one of these."""

    topic: str
    name: str
    number: int              # in its topic
    expected: tuple[str, ...]
    launch: str              # between <<< and >>>
    arguments: str           # with their brackets
    lines: tuple[int, int]   # of its file: the first and the last


def topics() -> list[Path]:
    """The files of the corpus."""
    return sorted(FOLDER.glob("*.cu"))


def cases(topic: Path) -> list[Case]:
    """The kernels of a file."""
    text = topic.read_text()
    heads = list(HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return [Case(topic.stem, head[4], number, tuple(head[1].split(" or ")), head[2],
                 head[3] or "(x, out, count)",
                 tuple(1 + text.count("\n", 0, position) for position in (head.start(), end)))
            for number, (head, end) in enumerate(zip(heads, ends))]


@functools.cache
def code_of(topic: Path, place: str) -> list[str]:
    """The lines of a topic's bugs, or of their twins, without comments."""
    return blank(program(topic, place)).splitlines()


def fingerprint(case: Case) -> str:
    """A hash of its bug, its twin and its launch, and of what stands before its topic's first kernel, without
    comments and space."""
    topic, (first, last) = FOLDER / f"{case.topic}.cu", case.lines
    before_all = cases(topic)[0].lines[0] - 1
    code = [case.launch, case.arguments]
    for place in PLACES:
        lines = code_of(topic, place)
        code += " ".join([*lines[:before_all], *lines[first - 1:last - 1]]).split()
    return hashlib.sha256(" ".join(code).encode()).hexdigest()[:16]


def launch_of(case: Case) -> str:
    """A statement."""
    if cluster := CLUSTER.fullmatch(case.launch):
        return (f"cudaLaunchKernelEx(InClusters({cluster[2]}, {cluster[1]}), {case.name}, "
                f"{case.arguments[1:-1]})")
    return f"{case.name}<<<{case.launch}>>>{case.arguments}"


def program(topic: Path, place: str) -> str:
    """The text of a topic's bugs, or of their correct twins, line for line as in its file."""
    text = topic.read_text()
    if place == "bug":
        text = BUGGY.sub(lambda m: f"{m[1]}{m[3].strip()}".rstrip() + "\n", text)
    launches = [f"    case {c.number}: {launch_of(c)}; break;" for c in cases(topic)]
    return text + LAUNCHES.format(cases="\n".join(launches)) + PROGRAM


def write_program(topic: Path, place: str, folder: Path) -> Path:
    """The same in a file of the topic's name."""
    file = folder / place / topic.name
    file.parent.mkdir(parents=True, exist_ok=True)
    text = program(topic, place)
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)
    return file


# ------------------------------------------------------------------------------------------ the checker
@functools.cache
def library(topic: Path, place: str) -> ctypes.CDLL:
    """A topic's kernels, for the simulator, with the checker."""
    import torch

    from flash_ladder import loader

    file = write_program(topic, place, loader.BUILD / "corpus")
    built = ctypes.CDLL(str(loader.build(file, torch.device("cpu"), name=f"{topic.stem}_{place}",
                                         checked=True)))
    built.run_case.restype = ctypes.c_char_p
    return built


def inspected(built: ctypes.CDLL, *chosen: Case):
    """The report of these cases, one launched after the other, and their errors."""
    import torch

    import flash

    errors = []
    with flash.inspect() as report:
        for case in chosen:
            inputs = {"x": 1 + torch.arange(1000.) % 7, "count": torch.zeros(8, dtype=torch.int32)}
            with report.guarded(inputs, {"out": torch.empty(1000)}) as arrays:
                pointers = (ctypes.c_void_p(arrays[name].data_ptr()) for name in ("x", "out", "count"))
                error = built.run_case(case.number, *pointers)
                errors.append(error.decode() if error else "")
    return report, errors


def set_schedule(seed: str, copies: str) -> None:
    """Of the launches from now on."""
    os.environ["FLASH_SIM_SEED"], os.environ["FLASH_SIM_COPIES"] = seed, copies


@functools.cache
def findings(topic: Path, place: str, case: Case, schedule: tuple[str, str]) -> list:
    """What the checker says of a case launched alone."""
    set_schedule(*schedule)
    return inspected(library(topic, place), case)[0].findings


def check(topic: Path) -> list[dict]:
    """What the checker finds in each case of a topic, in the bug and in the twin, under all schedules."""
    found: dict[tuple, set[str]] = {(case, place): set() for case in cases(topic) for place in PLACES}
    for schedule in SCHEDULES:
        for (case, place), kinds in found.items():
            kinds |= {finding.what for finding in findings(topic, place, case, schedule)}
    return [{"topic": case.topic, "name": case.name, "code": fingerprint(case), "expected": case.expected,
             **{place: sorted(found[case, place]) for place in PLACES}} for case in cases(topic)]


def is_found(row: dict) -> bool:
    """Whether the bug gives a finding of an expected kind."""
    return bool(set(row["bug"]) & set(row["expected"]))


# ------------------------------------------------------------------------------------------ the table
def table(ours: dict, gpu: dict | None) -> str:
    """Found, missed and false by topic, as Markdown: of the checker; of compute-sanitizer, where it has run
    on the same code.

    ours, gpu: what this script and sanitizer.py have written."""
    code = {(row["topic"], row["name"]): row["code"] for row in ours["cases"]}
    theirs = {key: row for row in (gpu["cases"] if gpu else ())
              if row["code"] == code.get(key := (row["topic"], row["name"]))}
    header = ["topic", "bugs", "found", "missed", "false"]
    if gpu:
        header += ["run on a GPU", *(f"`{tool}`" for tool in TOOLS), "any of the four", "false by them"]
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    topics = list(dict.fromkeys(row["topic"] for row in ours["cases"]))
    for topic in [*topics, None]:
        rows = [row for row in ours["cases"] if topic in (row["topic"], None)]
        found = sum(map(is_found, rows))
        numbers: list[object] = [len(rows), found, len(rows) - found, sum(bool(row["twin"]) for row in rows)]
        if gpu:
            there = [theirs[key] for row in rows if (key := (row["topic"], row["name"])) in theirs]
            said_so = [*(sum(says_so({tool: row["bug"][tool]}) for row in there) for tool in TOOLS),
                       sum(says_so(row["bug"]) for row in there), sum(says_so(row["twin"]) for row in there)]
            numbers += [len(there), *(said_so if there else "-" * len(said_so))]
        name = topic.replace("_", " ") if topic else "**all**"
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    named = {"Missed": [row["name"] for row in ours["cases"] if not is_found(row)],
             "False": [row["name"] for row in ours["cases"] if row["twin"]]}
    said = [f"{what}: {', '.join(f'`{name}`' for name in names)}." for what, names in named.items() if names]
    said.append(f"The checker's columns: `python results/corpus.py`, {ours['date']}.")
    if gpu:
        only = sorted(row["name"] for row in ours["cases"] if not is_found(row)
                      and (it := theirs.get((row["topic"], row["name"]))) and says_so(it["bug"]))
        if only:
            said.append(f"Found by compute-sanitizer alone: {', '.join(f'`{name}`' for name in only)}.")
        false = [f"`{row['name']}`" for row in theirs.values() if says_so(row["twin"])]
        hangs = [f"`{row['name']}`" for row in theirs.values()
                 if all(answer["verdict"] == "hang" for answer in row["bug"].values())]
        said.append(f"compute-sanitizer {gpu['compute-sanitizer']}, nvcc {gpu['flags']}: {gpu['device']}, "
                    f"{gpu['date']}, by `python results/sanitizer.py`; its warnings count as found.")
        said += [f"False there: {', '.join(false)}."] * bool(false)
        said += [f"Not done within {gpu['limit_s']:.0f} s under any tool: {', '.join(hangs)}."] * bool(hangs)
        if missing := len(ours["cases"]) - len(theirs):
            said.append(f"{missing} cases are newer, or have changed since, and have not run there.")
    return "\n".join([*lines, "", " ".join(said)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    rows = [row for topic in topics() for row in check(topic)]
    for row in rows:
        verdict = "found" if is_found(row) else f"MISSED (found {', '.join(row['bug']) or 'nothing'})"
        false = f"; its twin: {', '.join(row['twin'])}" if row["twin"] else ""
        print(f"{row['topic']}.{row['name']}: {verdict}{false}")
    result = {"date": str(date.today()), "cases": rows}
    (args.folder / "corpus.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
