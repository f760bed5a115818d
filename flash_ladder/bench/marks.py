"""The marks that warps leave (stages/common/timeline.cuh): read, and made into spans of time to be drawn.

From a GPU they come with their times. From the simulator they come in order alone, and steps.py gives them
times by a model. From there on both are the same.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy

from ..sources import read_source
from ..stage import Stage

# As in timeline.cuh, which says more
BLOCKS, WARPS, MOST_MARKS = 32, 16, 1024
KINDS = ("wait", "empty", "copy", "release", "turn", "end of turn", "product", "finish", "maximum",
         "exponential", "softmax", "store", "barrier", "elements", "meeting", "mbarrier", "arrive",
         "bulk_wait", "bulk_add")
BEGIN, END, POINT = range(3)
MOST_STEPS = 4096
MOST_PLACES = 1 << 15
BUFFER = numpy.dtype([("nanoseconds_and_what", "<u4", (BLOCKS + 1, WARPS, MOST_MARKS, 2)),
                      ("multiprocessors", "<u4", (BLOCKS + 1,))])
COPIED_AT_ONCE = 16  # bytes
# The softmax and its parts; in the backward pass P and dS
SOFTMAX = ("maximum", "exponential", "softmax", "P", "dS", "P and dS")
WARPGROUP = 4        # warps; of each the first one is shown
# What a line calls, by the kind of its mark; the object before the dot is part of the name
CALLS = {"wait": r"[\w.]*\b(?:wait_until_full|pass|mbarrier_wait)\b",
         "empty": r"\w+\.(?:fill|wait_until_empty)\b", "copy": r"\w+\.fill\b|\bmbarrier_arrive_expect\b",
         "turn": r"\w+\.wait\b", "product": r"\bwgmma_(?:QK|PV)\b", "finish": r"\bwgmma_wait\b",
         "maximum": r"\bmaximum_step\b", "exponential": r"\bexponentials\b", "softmax": r"\bsoftmax_step\b",
         "store": r"\bstore_(?:rows|panels|parts?|staged)\b"}
BACKWARD = {"empty": CALLS["empty"] + r"|\bfill\(\w+", "copy": CALLS["copy"] + r"|\bfill\(\w+",
            "product": r"(?<=\()\w+(?=_reg(?:_\d)?\b)", "meeting": r"\bnamed_barrier_(?:sync|arrive)\b"}
ELEMENTS = (r"\b(?:for_\w+|round_to_A|store_fragments|seed|hand_over|add_fragments|clear_unseen)"
            r"\(\w+(?:, \w+)?")
# What a backward stage does with the elements of accumulators, by what its text has
WORK = (("P and dS", r"exp2\((?s:.*)\bdP = "), ("P", r"exp2\("), ("dS", r"\bdP = "),
        ("sums", r"\batomicAdd\b|\badd_fragments\b"), ("gradients", r"\bstride_n\b|\bstore_halves\b"),
        ("shared", r"_smem\b"), ("elements", ""))
# Kinds that go by the name of the lambda they stand in
OWN_NAME = ("copy", "product", "maximum", "exponential", "softmax", "gradients", "elements")


@dataclass(frozen=True)
class Mark:
    """One of a lane. time: in nanoseconds or steps. until: when the copy or product that is asked for here is
    done, if that is known. ring, step: whose tile it is about, if about any; or which mbarrier, and its
    phase."""

    kind: str
    side: int
    label: str
    amount: int = 0
    ring: str = ""
    step: int = 0
    time: float = 0.0
    until: float | None = None


@dataclass(frozen=True)
class Block:
    """The marks of a block, by the name of the lane: of the first warp of each four that left any, and of
    each warp beside a producer that has work of its own."""

    lanes: dict[str, list[Mark]]
    number: int = 0
    multiprocessor: int = 0          # on which it ran
    is_cut_short: bool = False       # a warp had more to mark than was kept
    tensor_cores: list[Span] = field(default_factory=list)     # by the model: what they work at


@dataclass(frozen=True)
class Span:
    """What takes time, in one row of a lane: "products" and "copies" go on beside the warp's own "work"."""

    lane: str
    row: str
    kind: str
    label: str
    start: float
    end: float


# ---------------------------------------------------------------------------------------- reading
class Source:
    """A stage's file, for the names of its lines."""

    def __init__(self, stage: Stage):
        self._lines = [line.split("//")[0] for line in read_source(stage.path).splitlines()]
        self._calls = CALLS | (BACKWARD if stage.direction == "bwd" else {})

    def text(self, line: int) -> str:
        return self._lines[line - 1] if 0 < line <= len(self._lines) else ""

    def work(self, line: int) -> str:
        """What the call in a line does with elements: of WORK."""
        found = re.search(ELEMENTS, self.text(line))
        text, depth = "\n".join(self._lines[line - 1:])[found.start() if found else 0:], 0
        for at, character in enumerate(text):
            depth += (character == "(") - (character == ")")
            if character == ")" and not depth:
                text = text[:at]
                break
        return next(kind for kind, pattern in WORK if re.search(pattern, text))

    def label(self, kind: str, line: int) -> str:
        """Such as K_smem.wait_until_full, multiply_S, turns.wait; of elements for_both(S_reg, dP_reg)."""
        is_work = any(kind == work for work, _ in WORK)
        pattern = ELEMENTS if is_work else self._calls.get(kind)
        found = re.search(pattern, self.text(line)) if pattern else None
        name = found[0] + ")" * ("(" in found[0]) if found else kind
        return (self._enclosing(line) if kind in OWN_NAME else "") or name

    def ring(self, line: int) -> str:
        """Whose tile a line is about: K of K_smem.fill(...) or fill(K_smem, ...); empty if of none."""
        found = re.search(r"(\w+)_smem\.\w+\(|\bfill\((\w+)_smem\b", self.text(line))
        return found[1] or found[2] if found else ""

    def _enclosing(self, line: int) -> str:
        """The name of the lambda around a line, if there is one; of a whole `step` that says nothing."""
        def indent(text: str) -> int:
            return len(text) - len(text.lstrip())
        most = indent(self.text(line)) + (re.match(r"\s*auto \w+ = \[", self.text(line)) is not None)
        for text in reversed(self._lines[:line]):
            if text.strip() and not text.lstrip().startswith("#") and indent(text) < most:
                most = indent(text)
                if found := re.match(r"\s*auto (\w+) = \[", text):
                    return "" if found[1] == "step" else found[1]
        return ""


def read(buffer: numpy.ndarray, stage: Stage) -> Block:
    """Of the blocks in a BUFFER the first one with the most marks: with a causal mask others have less to do.
    Times are nanoseconds since the first mark of its first warp.

    Raises:
        ValueError: if there are no marks.
    """
    source, lanes = Source(stage), {}
    number = int(numpy.count_nonzero(buffer["nanoseconds_and_what"][:BLOCKS, ..., 1], axis=(1, 2)).argmax())
    nanoseconds, what = numpy.moveaxis(buffer["nanoseconds_and_what"][number], 2, 0)
    warps = [warp for warp in range(0, WARPS, WARPGROUP) if what[warp, 0]]
    if not warps:
        raise ValueError(f"{stage.path.name} left no marks")
    arrivals = set((what[(what >> 16 & 0x3f) // 3 == KINDS.index("arrive")] & 0xffff).tolist())
    times = (nanoseconds - nanoseconds[warps[0], 0]).view(numpy.int32)   # the lower half goes round

    def marks_of(warp: int, alone: bool = False) -> list[Mark]:
        count = numpy.count_nonzero(what[warp])
        return list(_marks(times[warp, :count].tolist(), what[warp, :count].tolist(), source, arrivals,
                           alone))

    for first in warps:
        marks = marks_of(first)
        kinds = {mark.kind for mark in marks}
        fills = "empty" in kinds and "product" not in kinds
        # They come before the producer: of what both wait for at the same time, theirs is there first
        for warp in range(first + 1, first + WARPGROUP) if fills else ():
            own = marks_of(warp, alone=True)
            if any(mark.kind != "barrier" for mark in own):
                lanes[f"warp {warp}"] = own
        lanes[f"producer, warp {first}" if fills else f"warps {first} to {first + WARPGROUP - 1}"] = marks
    if not any(mark.kind == "product" for marks in lanes.values() for mark in marks):
        lanes = {lane: with_mma(marks) for lane, marks in lanes.items()}
    return Block(lanes, number, int(buffer["multiprocessors"][number]), bool(what[:, -1].any()))


def _marks(times: list[int], all_what: list[int], source: Source, arrivals: set[int],
           alone: bool = False) -> Iterable[Mark]:
    """A warp's, with their labels and tiles. Where no ring counts the steps, they are counted here, as are
    the phases of mbarriers at which warps arrive: arrivals, their places. At others copies do. alone: it does
    what no other warp does, in stages/common. So no line tells its rings, and what it does with them is left
    out."""
    counted: dict[str, int] = defaultdict(int)
    phases: dict[str, int] = {}        # that were waited for last; for a first parity of 1 there is none yet
    step = buffers = 0
    barrier = ""
    for time, what in zip(times, all_what, strict=True):
        line, (number, side), amount = what >> 22, divmod(what >> 16 & 0x3f, 3), what & 0xffff
        if alone and KINDS[number] in ("wait", "release"):
            continue
        kind = source.work(line) if KINDS[number] == "elements" else KINDS[number]
        ring, label = source.ring(line), source.label(kind, line)
        if kind in ("wait", "empty", "release") and side != END:
            step, buffers = amount % MOST_STEPS, amount // MOST_STEPS
        if kind == "mbarrier":         # maybe in a file of stages/common, whose lines are not the stage's
            kind, label = "wait", "mbarrier_wait"
            parity, place = divmod(amount, MOST_PLACES)
            if side != END:
                barrier = f"mbarrier {place}" if place in arrivals else ""
            ring = barrier
            if ring and side != END:
                last = phases.get(ring, -1)
                step = phases[ring] = last + (last % 2 != parity)      # the same parity: the same phase again
        if kind == "arrive":
            kind, ring = "release", f"mbarrier {amount}"
            step = counted[ring]
            counted[ring] += 1
        if not ring and kind in ("wait", "copy") and side != END:
            step = counted[kind]
            counted[kind] += 1
        if kind == "copy":
            amount *= COPIED_AT_ONCE
            if ring:
                yield Mark("empty", END, label, buffers, ring, step, time)
        if kind == "bulk_add":
            amount *= COPIED_AT_ONCE * (1 if alone else WARPGROUP)
        yield Mark(kind, side, label, buffers if kind == "empty" else amount, ring, step, time)


def with_mma(marks: list[Mark]) -> list[Mark]:
    """With the products of a stage that has mma.sync, which leave no marks: from a barrier to the softmax,
    and from there to what comes next. They are done where they stand."""
    made: list[Mark] = []
    for mark, following in zip(marks, [*marks[1:], marks[-1]], strict=True):
        made.append(mark)
        if (mark.kind == "barrier" and len(made) > 1) or (mark.kind, mark.side) == ("softmax", END):
            label = "S, by mma.sync" if mark.kind == "barrier" else "P V, by mma.sync"
            made += [Mark("product", POINT, label, time=mark.time),
                     Mark("finish", END, label, time=following.time)]
    return made


# ---------------------------------------------------------------------------------------- spans
def spans(block: Block) -> list[Span]:
    """What the marks of a block say, by lane; as far as all lanes have marks."""
    arrivals: dict[tuple, float] = {}
    for marks in block.lanes.values():
        for mark in marks:
            if (mark.kind, mark.side) == ("wait", END):
                key = mark.ring, mark.step
                arrivals[key] = min(mark.time, arrivals.get(key, mark.time))
    found = [*block.tensor_cores, *itertools.chain.from_iterable(
        _spans(lane, marks, arrivals) for lane, marks in block.lanes.items())]
    if not block.is_cut_short:
        return found
    last = min(marks[-1].time for marks in block.lanes.values() if marks)
    return [replace(span, end=min(span.end, last)) for span in found if span.start < last]


def _spans(lane: str, marks: Iterable[Mark], arrivals: dict[tuple, float]) -> list[Span]:
    found: list[Span] = []
    begun: dict[str, Mark] = {}
    under_way: list[Mark] = []       # groups of products,
    leaving: list[Mark] = []         # and of sums that leave by the copy engine
    before = 0.0                     # the last mark's time
    for mark in marks:
        kind, time = mark.kind, mark.time
        if mark.side == BEGIN:
            begun[kind] = mark
        elif mark.side == END and kind in begun:
            start = begun.pop(kind)
            found.append(Span(lane, "work", kind, start.label, start.time, time))
        if kind == "barrier":
            found.append(Span(lane, "work", kind, "__syncthreads", before or time, time))
        if kind == "product":
            under_way.append(mark)
        if (kind, mark.side) == ("finish", END):
            left = mark.amount
            done, under_way = under_way[:len(under_way) - left], under_way[len(under_way) - left:]
            found += [Span(lane, "products", "product", p.label, p.time, p.until or time) for p in done]
        if kind == "bulk_add":
            leaving.append(mark)
        if (kind, mark.side) == ("bulk_wait", END):
            gone, leaving = leaving[:len(leaving) - mark.amount], leaving[len(leaving) - mark.amount:]
            found += [Span(lane, "copies", "bulk_add", add.label, add.time, add.until or time)
                      for add in gone]
        if kind == "copy":
            until = mark.until or arrivals.get((mark.ring, mark.step))
            if until is not None:
                found.append(Span(lane, "copies", kind, mark.label, mark.time, until))
        before = time
    return [span for span in found if span.end > span.start]


def union(these: Iterable[Span]) -> list[tuple[float, float]]:
    """The times in which at least one of them goes on."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in these):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def shares(all_spans: list[Span]) -> dict[str, float | None]:
    """Of the time from first to last: in which products are under way, "products"; and of the softmax's time,
    over all lanes: in which they are beside it, "softmax". Under way they are, by the model, while the tensor
    cores work at them; on a GPU from their issue until the wait for them has ended."""
    first, last = min(s.start for s in all_spans), max(s.end for s in all_spans)
    modelled = [s for s in all_spans if s.row == "tensor cores"]
    products = union(modelled or (s for s in all_spans if s.row == "products"))
    softmax = [s for s in all_spans if s.kind in SOFTMAX]
    beside = sum(max(0.0, min(s.end, end) - max(s.start, start)) for s in softmax for start, end in products)
    total = sum(s.end - s.start for s in softmax)
    return {"products": sum(end - start for start, end in products) / (last - first),
            "softmax": beside / total if total else None}


def from_zero(block: Block) -> Block:
    """With times that begin at the first mark."""
    first = min(mark.time for marks in block.lanes.values() for mark in marks)
    return replace(block, lanes={lane: [replace(mark, time=mark.time - first) for mark in marks]
                                 for lane, marks in block.lanes.items()})
