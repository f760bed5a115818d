"""The checker of the exercises: runs a learner's stage over shapes that leave nothing to luck, and says what
is wrong and where.

A stage runs in the simulator with the race and bounds checker on. Outputs start as NaN. process.py has it
run in a process of its own, with limits.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import flash
from flash_ladder.reference import (
    max_error,
    random_gradients,
    random_qkv,
    recomputed_gradients,
    reference,
    reference_gradients,
)
from flash_ladder.simulator.records import Access
from flash_ladder.simulator.tables import format_bytes

from .exercise import Exercise, problem_of, read_answer
from .mistakes import Problem, diagnosis

TOO_LONG = "ran longer than"  # what the simulator says of a kernel that it has stopped
SCORES = {"hbm": "bytes asked of HBM", "wavefronts": "wavefronts of shared memory"}


@dataclass
class Verdict:
    """What the checker says of a file.

    Attributes:
        reason: "" if it passed; else "not started", "changed", "does not compile", "race", "out of bounds",
            "misaligned", "uninitialised", "barrier", "copy", "deadlock", "error", "wrong result",
            "too much traffic", "bank conflicts", "not deterministic", "time limit" or "unreadable".
        message: in words.
        cases: the calls that were right.
        score: by resource, [the learner's, the reference's].
    """

    exercise: int
    file: str
    passed: bool = False
    reason: str = ""
    message: str = ""
    cases: list[str] = field(default_factory=list)
    score: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Case:
    """One call. with_dL: of a backward stage, whether the loss depends on L, too."""

    B: int
    H: int
    H_kv: int
    N_q: int
    N_k: int
    d: int
    causal: bool
    scale: float | None
    seed: int
    with_dL: bool = True

    @property
    def diagonal(self) -> int | None:
        return self.N_k - self.N_q if self.causal else None

    def __str__(self) -> str:
        mask = "causal" if self.causal else "not causal"
        scale = f", scale={self.scale}" if self.scale else ""
        return (f"B={self.B} H={self.H} H_kv={self.H_kv} N_q={self.N_q} N_k={self.N_k} d={self.d} "
                f"{mask}{scale}")


# From plain to nasty: sizes that are no multiples of a tile, scores whose exponentials overflow, more queries
# than keys, so that the first rows see none, and more keys than queries.
CASES = (
    Case(1, 2, 2, 64, 64, 64, False, None, 1),
    Case(2, 2, 1, 75, 139, 64, False, 3.0, 2),
    Case(1, 2, 2, 77, 77, 40, True, None, 3, with_dL=False),
    Case(1, 4, 2, 101, 70, 40, True, -0.3, 4),
    Case(1, 4, 2, 50, 150, 40, True, 0.4, 5),
)
ORDER = Case(1, 4, 2, 150, 150, 64, False, None, 6)             # for determinism
SCORE = {False: Case(1, 1, 1, 128, 128, 64, False, None, 7),    # by whether it is causal
         True: Case(1, 1, 1, 160, 160, 40, True, None, 7)}


# ------------------------------------------------------------------------------- the verdict
class Refused(Exception):
    """The end of a check: (reason, message)."""


def judge(exercise: Exercise, file: Path) -> Verdict:
    """The verdict on a learner's file, here and now, without a time limit."""
    verdict = Verdict(exercise.number, str(file))
    start, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    if problem := problem_of(exercise, read_answer(file)):
        verdict.reason, verdict.message = problem
    else:
        try:
            run(exercise, file, verdict)
            verdict.passed = True
        except Refused as refused:
            verdict.reason, verdict.message = refused.args
        except ValueError as error:  # of the lines at the file's top
            verdict.reason, verdict.message = "does not compile", str(error)
        except RuntimeError as error:
            verdict.reason, verdict.message = reason_of(str(error)), str(error)
    torch.set_num_threads(threads)
    verdict.seconds = round(time.monotonic() - start, 1)
    return verdict


def run(exercise: Exercise, file: Path, verdict: Verdict) -> None:
    """Run all cases; raises Refused at the first thing that is wrong."""
    stage = stage_of(exercise, file)
    for case in (*CASES, *(replace(CASES[2], N_k=100, d=d) for d in exercise.wide)):
        run_case(exercise, stage, case)
        verdict.cases.append(str(case))
    if exercise.deterministic:
        check_determinism(exercise, stage)
    take_score(exercise, stage, verdict)


def stage_of(exercise: Exercise, file: Path) -> flash.Stage:
    """A learner's file as a stage, with the tiles, limits and types of the exercise's.

    Raises:
        Refused: if the file has other ones.
    """
    theirs, given = (flash.read_stage(path, exercise.direction) for path in (file, exercise.path))
    stage = replace(given, number=0, name=theirs.name, path=theirs.path)
    if theirs != stage:
        raise Refused("changed", ("The lines at the top of the file (types:, tiles:, limits:, ...) have "
                                  "changed: put them back."))
    return stage


def inputs_of(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
    """q, k, v, dO, and dL or None. dL is infinite where L is: in rows that see no key."""
    q, k, v = random_qkv(case.B, case.H, case.H_kv, case.N_q, case.N_k, case.d, "cpu", dtype, case.seed)
    do, dlse = random_gradients(q, case.seed + 100)
    if case.diagonal is not None and case.diagonal < 0:
        dlse[:, :, :-case.diagonal] = -torch.inf
    return q, k, v, do, dlse if case.with_dL else None


def tiles_of(exercise: Exercise, stage: flash.Stage, case: Case) -> dict[str, int]:
    shared_memory = flash.shared_memory_per_block(torch.device("cpu"))
    return stage.tiles(case.d, shared_memory, causal=case.causal, **exercise.tiles)


def call(exercise: Exercise, stage: flash.Stage, case: Case) -> dict[str, torch.Tensor]:
    """The outputs of the stage, by name. Of a backward stage with O and L from the reference, in float64."""
    dtype = stage.dtypes[0]
    q, k, v, do, dlse = inputs_of(case, dtype)
    tiles = tiles_of(exercise, stage, case)
    if exercise.direction == "fwd":
        o, lse = flash.attention(q, k, v, causal=case.causal, scale=case.scale, stage=stage, return_lse=True,
                                 **tiles)
        return {"O": o, "L": lse}
    o, lse = reference(q.double(), k.double(), v.double(), case.diagonal, case.scale)
    found = torch.ops.flash.backward(q, k, v, o.to(dtype), lse.float(), do, dlse, case.diagonal, case.scale,
                                     str(stage.path), exercise.deterministic, tiles["Br"], tiles["Bc"])
    return dict(zip(("dQ", "dK", "dV"), found, strict=True))


def inspected(exercise: Exercise, stage: flash.Stage, case: Case) -> tuple[dict, flash.Report, str]:
    """(outputs, report, error) of a call under the checker."""
    error, outputs = "", {}
    with flash.inspect() as report:
        try:
            outputs = call(exercise, stage, case)
        except RuntimeError as e:
            error = str(e)
    return outputs, report, error


class Runner:
    """Runs a stage's code: in this process. remote.py has another runner."""

    def call(self, exercise: Exercise, stage: flash.Stage, case: Case) -> dict[str, torch.Tensor]:
        return call(exercise, stage, case)

    def inspected(self, exercise: Exercise, stage: flash.Stage, case: Case) -> tuple[dict, flash.Report, str]:
        return inspected(exercise, stage, case)


runner = Runner()


def reason_of(error: str) -> str:
    return "time limit" if TOO_LONG in error else "error"


def watched(exercise: Exercise, stage: flash.Stage, case: Case) -> tuple[dict, flash.Report]:
    """(outputs, report) of a call under the checker. Raises Refused for what it finds, and for errors."""
    outputs, report, error = runner.inspected(exercise, stage, case)
    if error.startswith("building") and "failed:" in error:
        raise Refused("does not compile", error.split("failed:", 1)[1].strip())
    where = f"\n\nIn the call {case}."
    if report.findings:
        first = report.findings[0]
        lines = [first.message]
        lines += [f"  {place}: {place.text}" for place in dict.fromkeys(first.places) if place.text]
        if len(report.findings) > 1:
            lines.append(f"({len(report.findings) - 1} more findings)")
        what = reason_of(first.message) if first.what == "error" else first.what
        raise Refused(what, "\n".join(lines) + where)
    if error:
        raise Refused(reason_of(error), error + where)
    return outputs, report


def run_case(exercise: Exercise, stage: flash.Stage, case: Case) -> None:
    """Compare with float64. The error may be 2 times (gradients: 3) that of PyTorch in the stage's type."""
    outputs, _ = watched(exercise, stage, case)
    q, k, v, do, dlse = inputs_of(case, stage.dtypes[0])
    wide = [x.double() for x in (q, k, v)]
    if exercise.direction == "fwd":
        truth, plain = (dict(zip("OL", reference(*x, case.diagonal, case.scale), strict=True))
                        for x in (wide, (q, k, v)))
        allowed = {name: 2 * max_error(plain[name], truth[name]) + 1e-6 for name in truth}
    else:
        options = do, case.diagonal, case.scale, dlse
        truth, plain = (dict(zip(("dQ", "dK", "dV"), f(q, k, v, *options), strict=True))
                        for f in (reference_gradients, recomputed_gradients))
        allowed = {name: 3 * max_error(plain[name], x) + 1e-6 * max(1.0, x.abs().max().item())
                   for name, x in truth.items()}
    wrong = [name for name, x in outputs.items() if not max_error(x, truth[name]) <= allowed[name]]
    if not wrong:
        return
    tiles = tiles_of(exercise, stage, case)
    scale = case.d ** -0.5 if case.scale is None else case.scale
    gradients = exercise.direction == "bwd"
    problem = Problem(*wide, case.diagonal, scale, tiles["Bc"], do=do.double() if gradients else None,
                      dlse=dlse.double() if gradients and dlse is not None else None)
    why = diagnosis(problem, outputs, wrong, {name: 4 * allowed[name] for name in outputs})
    parts = [f"It looks as if {why}."] if why else []
    parts += [described(name, outputs[name].double(), truth[name], allowed[name], tiles, case)
              for name in wrong]
    if right := [name for name in outputs if name not in wrong]:
        parts.append(f"({' and '.join(right)} {'is' if len(right) == 1 else 'are'} right.)")
    raise Refused("wrong result", "\n\n".join([*parts, f"In the call {case}."]))


def described(name: str, x: torch.Tensor, truth: torch.Tensor, allowed: float, tiles: dict[str, int],
              case: Case) -> str:
    """The first wrong element of an output with its row, column and tile, and where the others are."""
    wrong = ~((x == truth) | ((x - truth).abs() <= allowed))
    at = wrong.nonzero()[0].tolist()
    of_keys = name in ("dK", "dV")
    size, what, letter = (tiles["Bc"], "K and V", "j") if of_keys else (tiles["Br"], "Q", "i")
    row = at[2]
    column = f", column {at[3]}" if len(at) == 4 else ""
    first = row // size * size
    text = (f"{name}[{', '.join(map(str, at))}] is {x[tuple(at)]:.6g}, and should be {truth[tuple(at)]:.6g} "
            f"(to within {allowed:.1g}): batch {at[0]}, head {at[1]}, row {row}{column}, which is in tile "
            f"{letter} = {row // size} of {what} (rows {first} to {min(first + size, x.shape[2]) - 1}).")
    if case.diagonal is not None and not of_keys:
        seen = min(max(row + case.diagonal + 1, 0), case.N_k)
        text += f" Row {row} sees {f'the keys 0 to {seen - 1}' if seen else 'no key'}."

    def along(axis: int) -> torch.Tensor:
        return wrong.movedim(axis, 0).flatten(1).any(1)

    heads = "all heads" if bool(along(1).all()) else f"heads {ranges(along(1))}"
    text += (f" {int(wrong.sum()):,} of {wrong.numel():,} elements are wrong: in rows {ranges(along(2))} of "
             f"{heads}")
    if len(at) == 4 and not bool(along(3).all()):
        text += f", columns {ranges(along(3))}"
    nans = int(x.isnan().sum())
    return f"{text}." + (f" {nans:,} are NaN: never written, or made of NaN or of inf - inf." if nans else "")


def ranges(flags: torch.Tensor) -> str:
    """Where they are true, as 0-15, 32-47; the first few."""
    found: list[list[int]] = []
    for n in flags.nonzero().flatten().tolist():
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    text = ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in found[:4])
    return text + ", ..." * (len(found) > 4)


def check_determinism(exercise: Exercise, stage: flash.Stage) -> None:
    """Blocks in another order must give the same bits."""
    first: dict[str, torch.Tensor] = {}
    try:
        for seed in ("0", "1", "2"):
            os.environ["FLASH_SIM_SEED"] = seed
            outputs = runner.call(exercise, stage, ORDER)
            for name, x in outputs.items():
                if name in first and not torch.equal(first[name], x):
                    raise Refused("not deterministic", (
                        f"{name} has other bits when blocks run in another order: the order of a sum must "
                        f"not depend on who comes first.\n\nIn the call {ORDER}."))
            first = first or outputs
    finally:
        os.environ.pop("FLASH_SIM_SEED")


def take_score(exercise: Exercise, stage: flash.Stage, verdict: Verdict) -> None:
    """HBM bytes and wavefronts of one call beside the reference's."""
    case = SCORE[exercise.causal_score]
    scores, shared = [], []
    for s in (stage, flash.read_stage(exercise.path, exercise.direction)):
        _, report = watched(exercise, s, case)
        shared.append([a for a in report.accesses if a.memory == "shared"])
        scores.append({"hbm": report.hbm.total, "wavefronts": sum(a.units for a in shared[-1])})
    theirs, ours = scores
    for name in exercise.score:
        verdict.score[name] = [theirs[name], ours[name]]
        if theirs[name] <= exercise.at_most.get(name, math.inf) * ours[name]:
            continue
        reason, where = "too much traffic", ""
        if name == "wavefronts" and lost(shared[0]) > lost(shared[1]):
            worst = max(shared[0], key=lambda a: a.units - a.ideal)
            called = f", called at {worst.place.callers[0]}" if worst.place.callers else ""
            reason = "bank conflicts"
            where = (f"The worst bank conflicts are in this {worst.kind} of {worst.array}, where a request "
                     f"takes {worst.units_per_request:.3g} wavefronts and {worst.ideal / worst.requests:.3g} "
                     f"would do:\n  {worst.place}{called}: {worst.place.text}\n")
        elif name == "wavefronts":
            where = "Not by bank conflicts: it asks more often, or for more than it needs. "
        raise Refused(reason, (
            f"The result is right, but it takes {theirs[name] / ours[name]:.2f} times the {SCORES[name]} of "
            f"the reference: {shown(name, theirs[name])}, not {shown(name, ours[name])}. {where}"
            "`with flash.inspect() as report:` around a call shows which line asks for them.\n\n"
            f"In the call {case}."))


def lost(accesses: list[Access]) -> int:
    """Wavefronts of shared memory that there would not be without bank conflicts."""
    return sum(a.units - a.ideal for a in accesses)


def shown(name: str, number: int) -> str:
    return format_bytes(number) if name == "hbm" else f"{number:,}"
