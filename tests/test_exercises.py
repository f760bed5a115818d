"""The exercises: the reference passes; the blank is refused, and wrong answers are, for the right reason."""

import dataclasses
import os
import re

import pytest

import flash
from tutorials.exercises import (
    EXERCISES,
    Change,
    Exercise,
    Mutant,
    find,
    problem_of,
)
from tutorials.exercises.comparison import difference
from tutorials.exercises.exercise import COMMON, MASKS, code_lines, inlined, sections
from tutorials.exercises.grade import (
    Answer,
    Refused,
    answer_of,
    call,
    check_determinism,
    judge,
    tiles_of,
)

ONE = find(5)  # for what is the same in all of them
# Sections of stages/common that stages of their own still have: those are what is asked
NOT_ASKED: list[tuple[str, str]] = []
# All wrong answers are tried, not some (see `tried`)
ALL_MUTANTS = bool(os.environ.get("FLASH_ALL_MUTANTS"))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.delenv("FLASH_SIM_SEED", raising=False)


def of_one_exercise(exercises, mutants=lambda exercise: [()]):
    """Parameters. One worker has all of an exercise: they share what is built, and what is inspected. (All
    of a stage would be so much that the other worker waits at the end.)"""
    return [pytest.param(e, *(mutant[1:]), id="-".join([e.file_name[:-4], *map(str, mutant[:1])]),
                         marks=pytest.mark.xdist_group(f"exercise {e.number}"))
            for e in exercises for mutant in mutants(e)]


def judged(exercise: Exercise, text: str, folder):
    file = folder / exercise.file_name
    file.write_text(text)
    return judge(exercise, file)


# ------------------------------------------------------------------------------------ the catalog
def test_the_catalog():
    """At least twelve to write and six hunts, over all lessons and both passes."""
    assert [e.number for e in EXERCISES] == list(range(1, len(EXERCISES) + 1))
    assert len({e.name for e in EXERCISES}) == len(EXERCISES)
    assert sum(not e.is_hunt for e in EXERCISES) >= 12 and sum(e.is_hunt for e in EXERCISES) >= 6
    assert {e.lesson for e in EXERCISES if not e.is_hunt} == {f"{n:02}" for n in range(1, 15)}
    assert {e.direction for e in EXERCISES if not e.is_hunt} == {"fwd", "bwd"}
    for e in EXERCISES:
        assert len(e.mutants) >= 5 and 2 <= len(e.hints) <= 4, e.number
        assert sum(m.right_on_randn for m in e.mutants) >= 2, e.number
        assert e.is_hunt == bool(e.broken) == bool(e.answer) and e.specification.strip()


def test_every_section_of_a_stage_is_an_exercise():
    """And each begins and ends; their comments change nothing else."""
    asked = {(e.file_of(title), title) for e in EXERCISES for title in e.sections}
    files = [*(s.path for s in flash.stages()), *COMMON.glob("*.cuh"), *MASKS.glob("*.cuh")]
    there = {(file, title) for file in files for title in sections(file.read_text())}
    assert asked == there - {(COMMON / name, title) for name, title in NOT_ASKED}


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.file_name[:-4])
def test_the_learners_file(exercise):
    """Like its reference, whose lines for the registry are the same; with the task and the hints."""
    text, reference = exercise.learners_file(), exercise.reference()
    assert text.split("\n")[0] == reference.split("\n")[0]
    assert f"{'BUG HUNT' if exercise.is_hunt else 'EXERCISE'} {exercise.number}: {exercise.title}" in text
    assert text.count("#pragma region Hint") == text.count("#pragma endregion") == len(exercise.hints)
    assert max(map(len, text.split("\n"))) <= 110
    for name in exercise.common:
        assert f"common/{name}, in place of its #include" in text and f'#include "common/{name}"' not in text
    for title, answer in exercise.answers().items():
        assert code_lines(answer) and not code_lines(sections(text)[title])
    solved = exercise.solved()
    assert code_lines(solved.split("#pragma region")[0]) == code_lines(reference)
    for change in exercise.broken:  # no comment that was not there says what is wrong
        assert not re.search(r"//.*(bug|wrong|broken|missing|removed)", change.new)


def test_a_common_file_in_place_of_its_include():
    """Once, with those that include it; others are included as before."""
    names = ("launch", "rowsum", "warp")
    stage = "".join(["#pragma once\n", *(f'#include "common/{name}.cuh"\n' for name in names)])
    text = inlined(stage, "warp.cuh")
    assert text.count("#pragma once") == text.count("float warp_sum(") == 1
    assert "void launch_D_kernel(" in text
    assert '#include "common/launch.cuh"' in text and "common/warp.cuh is above" in text
    with pytest.raises(ValueError, match="does not include mask.cuh"):
        inlined(stage, "mask.cuh")


@pytest.mark.parametrize("exercise", [find(13)], ids=lambda e: e.file_name[:-4])
@pytest.mark.parametrize("declared, refused", [
    ("__device__ __forceinline__ int P_swizzle(int x)", False), ("__device__ int P_swizzle(int x)", False),
    ("int P_swizzle(int x)", True), ("static inline int P_swizzle(int x)", True),
    ("constexpr int P_swizzle(int x)", True),
])
def test_functions_of_a_kernel_need_device(exercise, declared, refused):
    """nvcc refuses a call of a function for the CPU; the simulator would not."""
    old = "__device__ __forceinline__ int P_swizzle(int x) { return x"
    found = problem_of(exercise, Change(old, f"{declared} {{ return x").apply(exercise.solved()))
    assert bool(found) == refused
    if found:
        assert found[0] == "does not compile" and "P_swizzle(), which lacks __device__" in found[1]


# ------------------------------------------------------------------------------------ verdicts
def calls_of(exercise: Exercise) -> tuple:
    """What the calls of a reference's check depend on, beside its text."""
    return (exercise.compiled_with.path, exercise.mask, exercise.tiles, exercise.deterministic,
            exercise.calls.cases)


CALLS = [calls_of(e) for e in EXERCISES]
FIRST = {e.number: EXERCISES[CALLS.index(calls)] for e, calls in zip(EXERCISES, CALLS, strict=True)}


@pytest.mark.parametrize("exercise", of_one_exercise(EXERCISES))
def test_the_reference_passes(exercise, tmp_path):
    """Of exercises whose solved files are the same code (by test_the_learners_file) one makes their cases,
    a third of them by turns; the rest of each check is its own."""
    if FIRST[exercise.number] is not exercise or not ALL_MUTANTS:
        cases = exercise.calls.cases[exercise.number % 3::3] if FIRST[exercise.number] is exercise else ()
        exercise = dataclasses.replace(exercise, own_calls=dataclasses.replace(exercise.calls, cases=cases))
    verdict = judged(exercise, exercise.solved(), tmp_path)
    assert verdict.passed, verdict.message
    assert len(verdict.cases) == len(exercise.calls.cases) and verdict.score
    assert all(theirs == ours for theirs, ours in verdict.score.values())


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.file_name[:-4])
def test_the_file_as_given_is_refused(exercise, tmp_path):
    verdict = judged(exercise, exercise.learners_file(), tmp_path)
    assert not verdict.passed and verdict.reason == "not started"
    assert ("Nothing is changed yet" if exercise.is_hunt else "Nothing is written yet") in verdict.message


def tried(exercise: Exercise) -> list[tuple[int, Mutant]]:
    """The wrong answers of this run, with numbers: one of every third exercise, of two kinds by turns."""
    mutants = list(enumerate(exercise.mutants))
    if ALL_MUTANTS:
        return mutants
    if exercise.number % 3:
        return []
    right = [(n, m) for n, m in mutants if m.right_on_randn]
    others = [(n, m) for n, m in mutants if not m.right_on_randn]
    return ((right or others) if exercise.number % 2 else (others or right))[:1]


@pytest.mark.parametrize("exercise, mutant", of_one_exercise(EXERCISES, tried))
def test_a_wrong_answer_is_refused_for_the_right_reason(exercise, mutant, tmp_path, monkeypatch):
    text = exercise.learners_file() if exercise.is_hunt else exercise.solved()
    for change in mutant.changes:
        text = change.apply(text)
    problem = problem_of(exercise, text)
    assert problem is None or problem[0] == "does not compile"  # it is looked at
    verdict = judged(exercise, text, tmp_path)
    assert not verdict.passed
    assert re.search(mutant.reason, f"{verdict.reason}\n{verdict.message}", re.S), verdict.message
    if mutant.right_on_randn:  # as a hasty test would call it: without the checker, whatever that finds there
        monkeypatch.setenv("FLASH_SIM_THREADS", "1")
        plain, answer = exercise.calls.plain, answer_of(exercise, tmp_path / exercise.file_name)
        stage, outputs = answer.stage, call(exercise, answer, plain)
        assert not difference(plain, stage.dtypes[0], outputs, tiles_of(exercise, stage, plain))


def test_a_window_may_ask_for_each_pair(tmp_path):
    """Another right answer: lists of tiles skip as many."""
    exercise = find(27)
    text = exercise.with_answers({exercise.sections[0]: """struct Rule : AnyKeys {
  int from, to;
  __device__ Rule(const Arguments& a, int b, int h) : from(a.integer(0)), to(a.integer(1)) {}
  __device__ bool sees(int row, int col) const { return col >= row + from && col <= row + to; }
};"""})
    assert problem_of(exercise, text) is None
    verdict = judged(exercise, text, tmp_path)
    assert verdict.passed, verdict.message


def test_the_first_wrong_element(tmp_path):
    """With its row, column and tile, where the others are, and the call."""
    change = Change("m[r] = m_new;", "m[r] = m_new;\n      if (row == 70 && lane == 3) l[r] *= 2.f;")
    verdict = judged(ONE, change.apply(ONE.solved()), tmp_path)
    assert verdict.reason == "wrong result" and len(verdict.cases) == 1
    assert re.search(r"O\[0, 0, 70, 3\] is -?[\d.e-]+, and should be -?[\d.e-]+ .*batch 0, head 0, row 70, "
                     r"column 3, which is in tile i = 1 of Q \(rows 64 to 74\)", verdict.message)
    assert "in rows 70 of all heads, columns 3, 35." in verdict.message
    assert "(L is right.)" in verdict.message and "B=2 H=2 H_kv=1 N_q=75 N_k=139" in verdict.message


def test_both_lines_of_a_race(tmp_path):
    """Of the reader and of the writer, in the learner's file."""
    change = Change("l_tile += P;", "l_tile += P_smem[(warp * rows + r) * Bc + (lane + 1) % 32 + 32 * c];")
    text = change.apply(ONE.solved())
    written, read = (next(n for n, line in enumerate(text.split("\n"), 1) if part in line)
                     for part in ("* Bc + col] = P *", "(lane + 1) % 32"))
    verdict = judged(ONE, text, tmp_path)
    assert verdict.reason == "race" and "P_smem" in verdict.message
    assert f"{ONE.file_name}:{written}" in verdict.message and f"{ONE.file_name}:{read}" in verdict.message


def test_a_deadlock_names_its_barrier(tmp_path):
    change = Change("m[r] = m_new;", "m[r] = m_new;\n      if (warp == 1) __syncthreads();")
    text = change.apply(ONE.solved())
    line = next(n for n, line in enumerate(text.split("\n"), 1) if "if (warp == 1)" in line)
    verdict = judged(ONE, text, tmp_path)
    assert verdict.reason in ("barrier", "deadlock")
    assert f"{ONE.file_name}:{line}" in verdict.message and "__syncthreads" in verdict.message


def test_compile_errors_name_the_learners_line(tmp_path):
    change = Change("m[r] = m_new;", "m[r] = m_next;")
    text = change.apply(ONE.solved())
    line = next(n for n, line in enumerate(text.split("\n"), 1) if "m_next" in line)
    verdict = judged(ONE, text, tmp_path)
    assert verdict.reason == "does not compile"
    assert f"{ONE.file_name}:{line}" in verdict.message and "m_next" in verdict.message


@pytest.mark.parametrize("old, new, message", [
    ("warps = 8", "warps = 4", "Something else than the blanks has changed.*warps = 8.*warps = 4"),
    ("// types:   fp32", "// types:   fp32, fp16", "lines at the top of the file"),
    ("      // --- m, l and O follow the new maximum\n", "", "has changed|is gone|not begun"),
    ("size_t workspace_bytes", "// ---\nsize_t workspace_bytes", "Put them back as they were"),
    ("#pragma once", '#include "fwd_04_flash2.cuh"\n#if 0\n#pragma once', "Something else.*#include"),
    ("#pragma region Hint 1", "void more() {}\n#pragma region Hint 1", "Something else.*void more"),
    ("    __syncthreads();                      // nobody", "    // \\\n    __syncthreads();  // nobody",
     "Something else"),
])
def test_only_the_blanks_may_change(old, new, message, tmp_path):
    text = Change(old, new).apply(ONE.solved())
    verdict = judged(ONE, text, tmp_path)
    assert verdict.reason == "changed" and re.search(message, verdict.message, re.S)


def test_comments_and_empty_lines_may_change_everywhere(tmp_path):
    text = ONE.solved().replace("  extern __shared__", "\n  // tiles in shared memory\n  extern __shared__")
    assert problem_of(ONE, text) is None


def test_a_hunt_keeps_its_tiles(tmp_path):
    """Other tiles may hide a bug."""
    hunt = next(e for e in EXERCISES if e.is_hunt)
    text = re.sub(r"// tiles: .*", "// tiles:   Br=64 Bc=160", hunt.learners_file())
    verdict = judged(hunt, text, tmp_path)
    assert verdict.reason == "changed" and "tiles:" in verdict.message


def test_other_bits_in_another_order(monkeypatch):
    """recompute adds to dQ by atomics. No timing of the host's threads is needed to see it."""
    monkeypatch.setenv("FLASH_SIM_THREADS", "1")
    exercise = dataclasses.replace(find(11), stage="recompute", deterministic=False)
    with pytest.raises(Refused) as refused:
        check_determinism(exercise, Answer(exercise.compiled_with))
    assert refused.value.args[0] == "not deterministic"
    assert refused.value.args[1].startswith("dQ has other bits")
