"""The checker of the exercises: runs a learner's stage over shapes that leave nothing to luck, and says what
is wrong and where.

A stage runs in the simulator with the race and bounds checker on. Outputs start as NaN. process.py has it
run in a process of its own, with limits.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import flash
from flash_ladder import plan
from flash_ladder.devices import multiprocessors
from flash_ladder.reference import reference
from flash_ladder.simulator.records import Access
from flash_ladder.simulator.tables import format_bytes

from .cases import ORDER, Case, inputs_of
from .comparison import difference
from .exercise import MASKS, Exercise, sections
from .handed_in import problem_of, read_answer
from .masks import MaskCall
from .probes import Probe

TOO_LONG = "ran longer than"  # what the simulator says of a kernel that it has stopped
SCORES = {"hbm": "bytes asked of HBM", "wavefronts": "wavefronts of shared memory",
          "barriers": "barriers of a block"}


@dataclass
class Verdict:
    """What the checker says of a file.

    Attributes:
        reason: "" if it passed; else "not started", "changed", "does not compile", "race", "out of bounds",
            "misaligned", "uninitialised", "barrier", "copy", "deadlock", "error", "wrong result",
            "too much traffic", "bank conflicts", "too many barriers", "no overlap", "not deterministic",
            "time limit", "unreadable",
            "accumulator", "proxy fence" or "too early".
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
class Answer:
    """What is run: a stage, and of an exercise about a mask, the mask's file."""

    stage: flash.Stage
    mask: Path | None = None

    @property
    def path(self) -> Path:
        """The learner's file, or the reference."""
        return self.mask or self.stage.path


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
    answer = answer_of(exercise, file)
    for case in exercise.calls.cases:
        run_case(exercise, answer, case)
        verdict.cases.append(str(case))
    for probe in exercise.probes:
        run_probe(exercise, file, probe)
    if exercise.deterministic:
        check_determinism(exercise, answer)
    take_score(exercise, answer, verdict)


def answer_of(exercise: Exercise, file: Path) -> Answer:
    """A learner's file: a mask; or a stage, with the tiles, limits and types of the exercise's.

    Raises:
        Refused: if a stage's file has other ones.
    """
    if exercise.mask:
        return Answer(exercise.compiled_with, file)
    theirs, given = (flash.read_stage(path, exercise.direction) for path in (file, exercise.path))
    stage = replace(given, number=0, name=theirs.name, path=theirs.path)
    if theirs != stage:
        raise Refused("changed", ("The lines at the top of the file (types:, tiles:, limits:, ...) have "
                                  "changed: put them back."))
    return Answer(stage)


def named(stage: flash.Stage, case: Case) -> str:
    """The call, with its type if the stage takes several."""
    name = next(name for name, dtype in flash.DTYPES.items() if dtype == dtype_of(stage, case))
    return f"{case}, {name}" if len(stage.dtypes) > 1 else str(case)


def dtype_of(stage: flash.Stage, case: Case) -> torch.dtype:
    return stage.dtypes[-1 if case.last_dtype else 0]


def tiles_of(exercise: Exercise, stage: flash.Stage, case: Case) -> dict[str, int]:
    shared_memory = flash.shared_memory_per_block(torch.device("cpu"))
    return stage.tiles(case.d, shared_memory, causal=case.causal, **exercise.tiles)


def splits_of(exercise: Exercise, stage: flash.Stage, case: Case) -> int:
    """Ranges of keys in this call."""
    sizes = {name: getattr(case, name) for name in ("B", "H", "H_kv", "N_q", "N_k", "d")}
    tiles = tiles_of(exercise, stage, case)
    return stage.number_of_splits(sizes, tiles, multiprocessors(torch.device("cpu")))


def call(exercise: Exercise, answer: Answer, case: Case) -> dict[str, torch.Tensor]:
    """The outputs of the stage, by name. Of a backward stage with O and L from the reference, in float64."""
    stage = answer.stage
    dtype = dtype_of(stage, case)
    q, k, v, do, dlse = inputs_of(case, dtype)
    tiles = tiles_of(exercise, stage, case)
    mask = case.mask.mask(answer.path) if case.mask else None
    if exercise.direction == "fwd":
        o, lse = flash.attention(q, k, v, causal=case.causal, mask=mask, scale=case.scale, stage=stage,
                                 return_lse=True, **tiles)
        return {"O": o, "L": lse}
    o, lse = reference(q.double(), k.double(), v.double(), case.visible, case.scale)
    visible = mask.bind(q, k) if mask else case.diagonal
    chosen = plan.choose(stage.path, q, "bwd", exercise.deterministic, visible, **tiles)
    found = plan.backward(q, k, v, o.to(dtype), lse.float(), do, dlse, visible, case.scale, *chosen,
                          exercise.deterministic)
    return dict(zip(("dQ", "dK", "dV"), found, strict=False))  # without the mask's


def inspected(exercise: Exercise, answer: Answer, case: Case) -> tuple[dict, flash.Report, str]:
    """(outputs, report, error) of a call under the checker."""
    error, outputs = "", {}
    with flash.inspect() as report:
        try:
            outputs = call(exercise, answer, case)
        except RuntimeError as e:
            error = str(e)
    return outputs, report, error


class Runner:
    """Runs a stage's code: in this process. remote.py has another runner."""

    def call(self, exercise: Exercise, answer: Answer, case: Case) -> dict[str, torch.Tensor]:
        return call(exercise, answer, case)

    def inspected(self, exercise: Exercise, answer: Answer, case: Case) -> tuple[dict, flash.Report, str]:
        return inspected(exercise, answer, case)


runner = Runner()
NO_MASK = MASKS / "none.cuh"


def reference_of(exercise: Exercise) -> Answer:
    return Answer(exercise.compiled_with, exercise.path if exercise.mask else None)


def is_ours(exercise: Exercise, answer: Answer) -> bool:
    """Whether it runs nothing of a learner's."""
    return answer.path in (exercise.path, NO_MASK)


def reason_of(error: str) -> str:
    return "time limit" if TOO_LONG in error else "error"


def watched(exercise: Exercise, answer: Answer, case: Case) -> tuple[dict, flash.Report]:
    """(outputs, report) of a call under the checker. Raises Refused for what it finds, and for errors."""
    outputs, report, error = runner.inspected(exercise, answer, case)
    if error.startswith("building") and "failed:" in error:
        raise Refused("does not compile", error.split("failed:", 1)[1].strip())
    where = f"\n\nIn the call {named(answer.stage, case)}."
    if report.findings:
        first = report.findings[0]
        lines = [first.message]
        lines += [f"  {place}: {place.text}" for place in dict.fromkeys(first.places) if place.text]
        if "(nil)" in first.message and not case.with_dL and exercise.direction == "bwd":
            lines.append("p.dL is null in this call, as the loss does not depend on L.")
        if len(report.findings) > 1:
            more = len(report.findings) - 1
            lines.append(f"({more} more finding{'s' * (more > 1)})")
        what = reason_of(first.message) if first.what == "error" else first.what
        raise Refused(what, "\n".join(lines) + where)
    if error:
        raise Refused(reason_of(error), error + where)
    return outputs, report


def run_case(exercise: Exercise, answer: Answer, case: Case) -> None:
    """Under the checker, and beside float64."""
    outputs, _ = watched(exercise, answer, case)
    stage = answer.stage
    if wrong := difference(case, dtype_of(stage, case), outputs, tiles_of(exercise, stage, case),
                           splits_of(exercise, stage, case)):
        raise Refused("wrong result", f"{wrong}\n\nIn the call {named(stage, case)}.")


def run_probe(exercise: Exercise, file: Path, probe: Probe) -> None:
    """Run a copy of the learner's file with the checker's lines in it."""
    text = read_answer(file)
    if not exercise.is_hunt:
        text = exercise.with_answers({title: sections(text)[title] for title in exercise.sections})
    probed = probe.insert(text)
    if probed is None:
        raise Refused("changed", f"The line `{probe.old}` must stay as it is: the check looks what is under "
                                 f"way "
                                 "there.")
    case = exercise.calls.score
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_text(probed)
        answer = answer_of(exercise, copy)
        outputs, report, error = runner.inspected(exercise, answer, case)
    if probe.under_way or probe.finding:
        raced = {finding.element.split("[")[0] for finding in report.findings
                 if any(party.kind == "copy" for party in finding.parties)}
        if set(probe.under_way) <= raced and probe.finding in ("", *(f.what for f in report.findings)):
            return
        raise Refused("no overlap", f"{probe.message}\n\nIn the call {case}.")
    if error or report.findings or difference(case, answer.stage.dtypes[0], outputs,
                                              tiles_of(exercise, answer.stage, case)):
        raise Refused("wrong result", probe.message)


def check_determinism(exercise: Exercise, answer: Answer) -> None:
    """Blocks in another order must give the same bits."""
    first: dict[str, torch.Tensor] = {}
    try:
        for seed in ("0", "1", "2"):
            os.environ["FLASH_SIM_SEED"] = seed
            outputs = runner.call(exercise, answer, ORDER)
            for name, x in outputs.items():
                if name in first and not torch.equal(first[name], x):
                    raise Refused("not deterministic", (
                        f"{name} has other bits when blocks run in another order: the order of a sum must "
                        f"not depend on who comes first.\n\nIn the call {ORDER}."))
            first = first or outputs
    finally:
        os.environ.pop("FLASH_SIM_SEED")


def take_score(exercise: Exercise, answer: Answer, verdict: Verdict) -> None:
    """HBM bytes and wavefronts of one call beside the reference's."""
    case = exercise.calls.score
    scores, shared, reports = [], [], []
    for report in (watched(exercise, answer, case)[1], report_of_reference(exercise)):
        shared.append([a for a in report.accesses if a.memory == "shared"])
        reports.append(report)
        scores.append({"hbm": report.hbm.total, "wavefronts": sum(a.units for a in shared[-1]),
                       "barriers": sum(kernel.barriers for kernel in report.kernels)})
    theirs, ours = scores
    for name in exercise.score:
        verdict.score[name] = [theirs[name], ours[name]]
        if theirs[name] <= exercise.at_most.get(name, math.inf) * ours[name]:
            continue
        reason, where = "too much traffic", excess(*reports, "HBM") if name == "hbm" else ""
        if exercise.mask and theirs[name] >= without_mask(exercise, case):
            where = ("Without a mask it would take no more: no tile is skipped. A mask saves time by tiles "
                     f"that it skips, not by scores that it hides. {where}")
        if name == "barriers":
            reason, where = "too many barriers", "Nothing needs the others. "
        elif name == "wavefronts" and lost(shared[0]) > lost(shared[1]):
            worst = max(shared[0], key=lambda a: a.units - a.ideal)
            called = f", called at {worst.place.callers[0]}" if worst.place.callers else ""
            reason = "bank conflicts"
            where = (f"The worst bank conflicts are in this {worst.kind} of {worst.array}, where a request "
                     f"takes {worst.units_per_request:.3g} wavefronts and {worst.ideal / worst.requests:.3g} "
                     f"would do:\n  {worst.place}{called}: {worst.place.text}\n")
        elif name == "wavefronts":
            where = ("Not by bank conflicts: it asks more often, or for more than it needs. "
                     + excess(*reports, "shared"))
        raise Refused(reason, (
            f"The result is right, but it takes {theirs[name] / max(ours[name], 1):.2f} times the "
            f"{SCORES[name]} of "
            f"the reference: {shown(name, theirs[name])}, not {shown(name, ours[name])}. {where}"
            "`with flash.inspect() as report:` around a call shows which line asks for them.\n\n"
            f"In the call {case}."))


_of_references: dict[tuple, flash.Report] = {}


def report_of_reference(exercise: Exercise) -> flash.Report:
    """Of the call that the score is taken of: once in a process, for all exercises with this one."""
    reference, case = reference_of(exercise), exercise.calls.score
    key = reference.stage.path, reference.mask, case, *sorted(exercise.tiles.items()), exercise.deterministic
    if key not in _of_references:
        _of_references[key] = watched(exercise, reference, case)[1]
    return _of_references[key]


def without_mask(exercise: Exercise, case: Case) -> int:
    """HBM bytes of the call if each query sees all keys."""
    case = replace(case, mask=MaskCall("none"))
    return watched(exercise, Answer(exercise.compiled_with, NO_MASK), case)[1].hbm.total


def excess(theirs: flash.Report, ours: flash.Report, memory: str) -> str:
    """Which array has most of what the reference does not ask for, in bytes or in wavefronts, and at which "
      "line."""
    def amount(a: Access) -> int:
        return a.bytes if memory == "HBM" else a.units

    totals: list[Counter[str]] = [Counter(), Counter()]
    for total, report in zip(totals, (theirs, ours), strict=True):
        for a in report.accesses:
            if a.memory == memory:
                total[a.array] += amount(a)
    array = max(totals[0], key=lambda name: totals[0][name] - totals[1][name])
    line = max((a for a in theirs.accesses if a.memory == memory and a.array == array), key=amount)
    called = f", called at {line.place.callers[-1]}" if line.place.callers else ""
    resource = "hbm" if memory == "HBM" else "wavefronts"
    return (f"Most of the excess is of {array}, {shown(resource, totals[0][array])} in place of "
            f"{shown(resource, totals[1][array])}, above all in this {line.kind}:\n"
            f"  {line.place}{called}: {line.place.text}\n")


def lost(accesses: list[Access]) -> int:
    """Wavefronts of shared memory that there would not be without bank conflicts."""
    return sum(a.units - a.ideal for a in accesses)


def shown(name: str, number: int) -> str:
    return format_bytes(number) if name == "hbm" else f"{number:,}"
