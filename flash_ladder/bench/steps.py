"""Times for marks from the simulator, which have an order but no times: a model of a multiprocessor.

The simulator runs one thread at a time, so its own clock says nothing of what goes on side by side. What it
does know is what each warp does in which order, and what for: which tile it waits for, which products it has
issued. That is laid out in steps. A step is what the tensor cores take for a product of 64 x 16 x 16, 8
cycles of an H100 at its peak. They do one group of products at a time, in the order of issue; so does the
copy engine with tiles, and with sums of dQ. Warpgroups that are at their softmax at the same time share what
makes exponentials. In the backward pass P and dS stand for the softmax.
All else takes no time: barriers, the mask, rounding, rescaling. So a picture shows which waits there are and
what can overlap, not how long a GPU takes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from .marks import BEGIN, END, POINT, SOFTMAX, Block, Mark, Span

ROWS = 64                # of a warpgroup's tile of S
# 989 TFLOP/s of products and 3.9 of exponentials (H100: FlashAttention-3, section 3.1): 64 * 16 * 16
# products, of two operations each, take as long as so many exponentials
EXPONENTIALS = 128
MAXIMA = 512             # four elements in the time of an exponential: what all lanes of a multiprocessor do
HAS_EXPONENTIALS = ("exponential", "softmax", "P", "P and dS")
HAS_MAXIMA = ("maximum", "softmax", "dS", "P and dS")      # or as much: dS takes no more of an element
# Half as long for a tile of 128 x 128 as the two warpgroups' products with it: nothing waits for copies alone
COPIED_BYTES = 512
SHARED_BYTES = 1024      # in 8 cycles, by 32 banks of 4 bytes
# What a warpgroup does with a tile's elements beside that: so many bytes of a column go to memory
COLUMN_STEPS = {"store": 2 * ROWS / COPIED_BYTES, "gradients": 2 * ROWS / COPIED_BYTES,
                "sums": 4 * ROWS / COPIED_BYTES, "shared": 2 * ROWS / SHARED_BYTES, "elements": 0}


def _steps_of(mark: Mark) -> float:
    """What a warpgroup's softmax takes, or one of its two parts, of a tile of so many columns."""
    scores, kind = ROWS * mark.amount, mark.kind
    return (kind in HAS_MAXIMA) * scores / MAXIMA + (kind in HAS_EXPONENTIALS) * scores / EXPONENTIALS


def _barrier(mark: Mark) -> tuple | None:
    """Which one a warp has passed at a mark, or arrived at, if any: a named barrier has a number."""
    passed = mark.kind == "barrier" or (mark.kind == "meeting" and mark.side != BEGIN)
    return (mark.kind, mark.amount) if passed else None


def _all_but(done: list[float], left: int) -> float:
    """When all but the last `left` of these are done."""
    return done[-1 - left] if len(done) > left else 0.0


@dataclass
class _Lane:
    """Where the model is in a lane's marks."""

    marks: list[Mark]
    now: float = 0.0
    timed: list[Mark] = field(default_factory=list)
    groups: list[float] = field(default_factory=list)      # of products: when each is done
    adds: list[float] = field(default_factory=list)        # the same of sums that leave by the copy engine
    counted: dict[str | tuple, int] = field(default_factory=lambda: defaultdict(int))
    softmax: float | None = None                           # steps that are left of it, if it is under way

    @property
    def next(self) -> Mark:
        return self.marks[len(self.timed)]

    @property
    def is_done(self) -> bool:
        return len(self.timed) == len(self.marks)


class Model:
    """A multiprocessor that does what the lanes of a block say."""

    def __init__(self, block: Block):
        self._block = block
        self._lanes = {name: _Lane(marks) for name, marks in block.lanes.items()}
        has = {name: {mark.kind for mark in marks} for name, marks in block.lanes.items()}
        self._warpgroups = [name for name in block.lanes if "product" in has[name]]
        self._tensor_cores = self._engine = 0.0            # when they are free
        self._shared_at = 0.0                              # up to when what is left of softmaxes counts
        self._busy: list[Span] = []
        self._arrived: dict[tuple, float] = {}             # by ring and step: when the tile is there
        self._released: dict[tuple, dict[str, float]] = defaultdict(dict)
        self._barriers: dict[tuple, dict[str, float]] = defaultdict(dict)     # who is there, and since when
        self._turns: dict[str, list[float]] = defaultdict(list)     # when each lane has ended its turns
        self._of: dict[str, dict[tuple, set[str]]] = {kind: defaultdict(set)
                                                      for kind in ("copy", "empty", "release")}
        for name, marks in block.lanes.items():
            for mark in marks:
                if mark.kind in self._of and mark.side != END:
                    self._of[mark.kind][mark.ring, mark.step].add(name)
        self._meetings = {name: Counter(map(_barrier, marks)) for name, marks in block.lanes.items()}

    def run(self) -> Block:
        """The block with times in steps, and what the tensor cores do.

        Raises:
            ValueError: if the marks wait for something that no mark brings.
        """
        while True:
            waiting = [lane for lane in self._lanes.items() if not lane[1].is_done]
            able = [(name, lane, at) for name, lane in waiting
                    if (at := self._time_of_next(name)) is not None]
            if not able:
                break
            name, lane, at = min(able, key=lambda each: each[2])
            self._take(name, lane, at)
        if waiting and not self._block.is_cut_short:
            where = "; ".join(f"{name} at {lane.next.label}" for name, lane in waiting)
            raise ValueError(f"the marks do not fit together: {where} would wait for ever")
        return replace(self._block, lanes={name: lane.timed for name, lane in self._lanes.items()},
                       tensor_cores=self._busy)

    def _time_of_next(self, name: str) -> float | None:
        """When a lane's next mark is left; None while that is not known."""
        lane, mark = self._lanes[name], self._lanes[name].next
        if barrier := _barrier(mark):
            passed = lane.counted[barrier]
            there = self._barriers[barrier, passed]
            there.setdefault(name, lane.now)
            if (mark.kind, mark.side) == ("meeting", POINT):   # it arrives, and goes on
                return lane.now
            to_come = {other for other, count in self._meetings.items() if count[barrier] > passed}
            return max(there.values()) if to_come <= there.keys() else None
        if mark.side != END:
            return lane.now
        if mark.kind in SOFTMAX:     # if no other begins or ends before
            assert lane.softmax is not None
            return self._shared_at + lane.softmax * len(self._sharing())
        if mark.kind in COLUMN_STEPS:
            return lane.now + COLUMN_STEPS[mark.kind] * mark.amount
        needed = {"wait": self._tile, "empty": self._buffer, "turn": self._turn, "finish": self._products,
                  "bulk_wait": self._sums}[mark.kind]
        at = needed(name, mark)
        return None if at is None else max(lane.now, at)

    def _sharing(self) -> list[_Lane]:
        return [lane for lane in self._lanes.values() if lane.softmax is not None]

    def _share_until(self, at: float) -> None:
        """Each that is at its softmax has had its part of the time since the last call."""
        sharing = self._sharing()
        for lane in sharing:
            assert lane.softmax is not None
            lane.softmax -= (at - self._shared_at) / len(sharing)
        self._shared_at = at

    def _tile(self, name: str, mark: Mark) -> float | None:
        key = mark.ring, mark.step
        if mark.ring.startswith("mbarrier"):
            return self._given_back(key)
        if key in self._of["copy"] or not self._of["empty"][key]:
            return self._arrived.get(key)
        for producer in self._of["empty"][key]:     # no copy: the producer alone says that there is no more
            lane = self._lanes[producer]
            for other in lane.timed:
                if (other.kind, other.side, other.ring, other.step) == ("empty", END, *key):
                    return other.time
        return None

    def _buffer(self, name: str, mark: Mark) -> float | None:
        return self._given_back((mark.ring, mark.step - mark.amount))

    def _given_back(self, key: tuple[str, int]) -> float | None:
        """When all that release this step of a ring, or arrive at this phase of an mbarrier, have done so."""
        if key[1] < 0:
            return 0.0
        users, there = self._of["release"][key], self._released[key]
        return max(there.values()) if users and users == there.keys() else None

    def _turn(self, name: str, mark: Mark) -> float | None:
        before = self._turns[self._warpgroups[self._warpgroups.index(name) - 1]]
        number = self._lanes[name].counted["turn"]
        return before[number] if number < len(before) else None

    def _products(self, name: str, mark: Mark) -> float:
        return _all_but(self._lanes[name].groups, mark.amount)

    def _sums(self, name: str, mark: Mark) -> float:
        return _all_but(self._lanes[name].adds, mark.amount)

    def _take(self, name: str, lane: _Lane, at: float) -> None:
        mark, until = lane.next, None
        lane.now = at
        if mark.kind == "product":
            start = max(at, self._tensor_cores)
            until = self._tensor_cores = start + mark.amount
            lane.groups.append(until)
            self._busy.append(Span("tensor cores", "tensor cores", "product",
                                   f"{mark.label} {self._warpgroups.index(name)}", start, until))
        elif mark.kind == "copy":
            until = self._engine = max(at, self._engine) + mark.amount / COPIED_BYTES
            self._arrived[mark.ring, mark.step] = until
        elif mark.kind == "bulk_add":
            until = self._engine = max(at, self._engine) + mark.amount / COPIED_BYTES
            lane.adds.append(until)
        elif mark.kind == "release":
            self._released[mark.ring, mark.step][name] = at
        elif mark.kind == "end of turn":
            self._turns[name].append(at)
        elif mark.kind in SOFTMAX:
            self._share_until(at)
            lane.softmax = _steps_of(mark) if mark.side != END else None
        if (mark.kind, mark.side) == ("turn", END):
            lane.counted["turn"] += 1
        if barrier := _barrier(mark):
            lane.counted[barrier] += 1
        lane.timed.append(replace(mark, time=at, until=until))


def in_steps(block: Block, of_product: int = 0) -> Block:
    """A block from the simulator with times in steps. of_product: what each of the two products of a tile
    takes, where they leave no marks of their own (mma.sync).

    Raises:
        ValueError: if the marks do not fit together.
    """
    lanes = {name: [replace(mark, amount=mark.amount or of_product) if mark.kind == "product" else mark
                    for mark in marks] for name, marks in block.lanes.items()}
    return Model(replace(block, lanes=lanes)).run()
