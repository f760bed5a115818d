"""The ladder: each stage names its parent, and changes little of it: one idea. DESIGN: changed lines against
the parent, added plus removed, and what a stage is the first to include."""

import functools
import re

import pytest

import flash
from flash_ladder import registry
from flash_ladder.difference import INSTRUCTIONS, Change, changed_lines
from flash_ladder.grid import MULTICAST, OWN_RANGES, PACKED, SIDE_BRANCH, UP_TO_64, WRITERS
from flash_ladder.stage import DIRECTIONS

STAGES = flash.stages()
COMMON = sorted((flash.STAGES / "common").glob("*.cuh"))

CHANGED = {"fwd": 90, "bwd": 110}           # lines at most
NEW_MULTIPLIER = {"fwd": 190, "bwd": 220}   # where the idea is who multiplies: the inner loop is new
MULTIPLIERS = ("wmma", "mma", "wgmma", "consumer_roles")
KERNELS_OF_THEIR_OWN = {"fwd": 4, "bwd": 3}   # the first stages, which share little
FILE, KERNEL = 300, 150                     # lines with comments; lines of code

# Stages that break the limit of changed lines, by direction and name: why. Two at most.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("fwd", "ampere_tuned"): "packed sequences, which no stage before takes: common/sequences.cuh",
    ("fwd", "split_kv"): "a merge that divides the ranges, and starts early: common/launch.cuh"}


def of(stage):
    return stage.direction, stage.name


def limit(stage) -> int | None:
    """Of changed lines; None: any."""
    if stage.number <= KERNELS_OF_THEIR_OWN[stage.direction]:
        return None
    return (NEW_MULTIPLIER if stage.name in MULTIPLIERS else CHANGED)[stage.direction]


@functools.cache
def change_of(stage) -> Change:
    return changed_lines(stage)


def table() -> str:
    lines = [f"{'stage':23} {'after':16} {'changed':>7} {'common':>6} {'total':>5} {'limit':>5} {'file':>4}  "
             "kernels"]
    for s in STAGES:
        c = change_of(s)
        kernels = ", ".join(f"{name} {lines}" for name, lines in c.kernels.items())
        lines.append(f"{s.direction} {s.number:2} {s.name:16} {s.after or '-':16} {c.changed:7} {c.common:6} "
                     f"{c.total:5} {limit(s) or '-':>5} {c.file_lines:4}  {kernels}")
    return "\n".join(lines)


def too_much(stage) -> list[str]:
    """Which limits a stage breaks."""
    change = change_of(stage)
    found = {f"{change.total} changed lines, {change.changed} + {change.common} in common": (
                 change.total, limit(stage)),
             f"a file of {change.file_lines} lines": (change.file_lines, FILE)}
    found |= {f"{name} has {lines} lines of code": (lines, KERNEL) for name, lines in change.kernels.items()}
    return [f"{what}; the limit is {most}" for what, (size, most) in found.items() if most and size > most]


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.path.stem)
def test_limits(stage):
    broken = too_much(stage)
    if of(stage) in EXCEPTIONS:
        assert broken and "changed lines" in broken[0], f"{stage} keeps the limit: take it off the list"
        del broken[0]
    assert not broken, f"{stage}: {'; '.join(broken)}\n\n{table()}"


def test_table():
    """pytest -s shows it."""
    print(f"\n{table()}")
    assert all(f" {s.name} " in table() for s in STAGES)


def test_exceptions_are_few_and_reasoned():
    assert len(EXCEPTIONS) <= 2 and all(EXCEPTIONS.values())
    assert set(EXCEPTIONS) <= {of(s) for s in STAGES}


# ------------------------------------------------------------------------------------------ the tree
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.path.stem)
def test_parents_come_before(stage):
    """And all chains end at the first stage."""
    line = flash.lineage(stage)
    assert [s.number for s in line] == sorted({s.number for s in line}, reverse=True)
    assert line[-1] == flash.stages(stage.direction)[0] and not line[-1].after


def test_hoppers_rungs_say_what_was_predicted():
    """Or that nothing was."""
    assert not [str(s) for s in STAGES if s.needs.startswith("sm_90") and not s.predicted]


def test_defaults_are_ends_of_branches():
    parents = {(s.direction, s.after) for s in STAGES
               if not s.calls and s.name not in (*MULTICAST, *WRITERS, *SIDE_BRANCH, *UP_TO_64,
                                         *PACKED, *OWN_RANGES)}
    assert not [str(s) for s in STAGES if s.default and of(s) in parents]
    for direction in ("fwd", "bwd"):
        for dtype in flash.DTYPES.values():
            found = [s.default for s in flash.stages(direction)
                     if s.default and not s.calls and dtype in s.dtypes]
            assert found and len(set(found)) == len(found), "one for an architecture"


@pytest.mark.parametrize("file", COMMON, ids=lambda file: file.name)
def test_common_files_say_who_introduces_them(file):
    if file.name in INSTRUCTIONS:
        return
    first = next((s for s in STAGES if file in change_of(s).introduced), None)
    assert first, f"no stage includes {file.name}"
    said = re.search(r"Introduced by:\s+(forward|backward) stage (\d+), (\w+)",
                     file.read_text().replace("\n// ", " "))
    assert said, f"{file.name} must say `Introduced by: forward stage 1, naive`"
    assert said.groups() == (DIRECTIONS[first.direction], str(first.number), first.name)


# ------------------------------------------------------------------------------------------ how it is counted
BEFORE = """\
// Forward stage 1: before
#pragma once
#include "common/old.cuh"
int a;
int b;  // a comment

__global__ void __launch_bounds__(max(32, 64), 2)
kernel(int x) {
  if (x) {
    /* a comment
       of two lines */
    x = 1;
  }
}
"""
AFTER = """\
// Forward stage 2: after
// after: before
#pragma once
#include "common/new.cuh"
#include "common/old.cuh"
#include "common/ptx.cuh"

int   b;            // moved: white space and comments do not count
int a;
int c;
__global__ void other();
template <int n> __global__ void kernel(int x) { x = 2; }
"""


@pytest.fixture
def small_ladder(tmp_path, monkeypatch):
    """Two stages, and three files in common."""
    (tmp_path / "common").mkdir()
    for name, text in {"fwd_01_before.cuh": BEFORE, "fwd_02_after.cuh": AFTER, "common/old.cuh": "int o;\n",
                       "common/new.cuh": '#include "newer.cuh"\n// A comment.\nint n;\nint m;\n',
                       "common/newer.cuh": "#pragma once\nint r;\n", "common/ptx.cuh": "int p;\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(registry, "STAGES", tmp_path)
    return flash.stages("fwd")


def test_what_counts_as_changed(small_ladder, tmp_path):
    before, after = map(changed_lines, small_ladder)
    assert before.changed == 8 and before.file_lines == 14 and before.kernels == {"kernel": 6}
    assert {f.name: n for f, n in before.introduced.items()} == {"tensor.cuh": 21, "old.cuh": 1}
    # one of the two that are exchanged, 6 lines of the kernel; and one of the two, c, other, the new kernel
    assert after.changed == 7 + 4 and after.kernels == {"kernel": 1}
    assert {f.name: n for f, n in after.introduced.items()} == {"new.cuh": 2, "newer.cuh": 1}
    assert (after.common, after.total) == (3, 14)
    assert changed_lines(small_ladder[1], small_ladder[1]).changed == 0
    difference = flash.diff("after")
    assert (difference.code, difference.common) == (11, 3)
    assert difference.title.endswith(" added; of code 11, 3 more in stages/common")
    assert flash.diff("after", "before").title.endswith(" added; of code 11")


def test_what_counts_in_a_file_of_ones_own(small_ladder, tmp_path):
    """It comes after all stages; a file beside it is its own."""
    mine = tmp_path / "own" / "mine.cuh"
    mine.parent.mkdir()
    mine.write_text(AFTER.replace("after: before", "after: after").replace("int c;", '#include "own.cuh"'))
    (mine.parent / "own.cuh").write_text("int x;\nint y;\n")
    change = changed_lines(flash.read_stage(mine))
    assert (change.changed, change.common) == (1, 2)


# ------------------------------------------------------------------------------------------ nothing is joined
def joined(text: str) -> list[str]:
    """Lines of code with two statements."""
    text = re.sub(r"//[^\n]*|\"[^\"\n]*\"", "", text)
    heads = re.compile(r"for \((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
    return [line.strip() for line in heads.sub("", text).split("\n") if re.search(r";\s*[^\s})]", line)]


def test_one_statement_a_line():
    """Else the count of lines would say little."""
    assert joined("a = 1; b = 2;\nfor (int i = 0; i < f(g(n)); i++) a += i;\n  return \"a; b\";  // c; d\n"
                  "[&](int i) { a = i; });\n") == ["a = 1; b = 2;"]
    for file in [*COMMON, *(s.path for s in STAGES)]:
        assert not joined(file.read_text()), file.name
