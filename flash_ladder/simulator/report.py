"""The checker's side in Python: memory with red zones, and the report of what kernels did to it.

runtime/checker.cpp watches the accesses; flash.inspect() opens a report; messages.py says what was found,
tables.py and pictures.py show the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .guards import ALIGNMENT, GUARD_BYTES, GUARD_ROWS, Array, extent, guarded_strides, once, overlap
from .messages import message_of
from .records import (
    Access,
    Barrier,
    Finding,
    Kernel,
    Party,
    Place,
    Traffic,
    merged,
    places_of,
    source_lines,
)

if TYPE_CHECKING:
    from ..tiles import Tiles


# --------------------------------------------------------------------------------------- the report
class Report:
    """What kernels did to memory inside of a `with flash.inspect() as report:`; complete at its end.

    Attributes:
        findings: list of Finding: mistakes. Empty for a correct kernel.
        notes: list of Finding: what is right on GPUs since Volta, and may be wrong on earlier ones.
        more_findings: whether there were more, in other instructions, than the checker keeps: 100.
        kernels: list of Kernel, in the order of their first launch.
        accesses: list of Access: per kernel, line and array.
        flops: of the matrix products, 4 d for each pair of a query and a key that it sees, backward 10 d; by
            this formula, as arithmetic cannot be observed. 0 for other kernels.
        tiles: list of the stage and its Tiles, for each call with a mask: how many are skipped, cut and
            whole, and which scores count. Worked out when it is asked for.

    print(report) shows it all as tables; plot() draws.
    """

    def __init__(self, runtime: Path):
        self.findings: list[Finding] = []
        self.notes: list[Finding] = []
        self.more_findings = False
        self.kernels: list[Kernel] = []
        self.accesses: list[Access] = []
        self.flops_without_mask = 0
        self.masked: list[tuple[str, int, Callable[[], Tiles]]] = []
        self.complete = False
        self._arrays: list[Array] = []
        self.runtime = runtime  # the library with the checker
        self._checker = ctypes.CDLL(str(runtime))
        self._checker.sim_check_report.restype = ctypes.c_char_p
        self._checker.sim_check_begin()

    # ------------------------------------------------------------------------------- while it is open
    def _register(self, name: str, region: torch.Tensor, start: int, x: torch.Tensor, initialised: bool,
                  strides: tuple[int, ...]) -> Array:
        if len(region) > 1 << 32:
            raise ValueError(f"inspect(): {name} takes more than 4 GiB with its red zones")
        element = x.element_size()
        valid = torch.zeros(len(region) // element + 1, dtype=torch.uint8, device="cpu")
        once(valid.as_strided(x.shape, strides, start // element)).fill_(1)
        number = self._checker.sim_check_array(name.encode(), ctypes.c_void_p(region.data_ptr()),
                                               ctypes.c_size_t(len(region)), element,
                                               ctypes.c_void_p(valid.data_ptr()), int(initialised))
        if number < 0:
            raise ValueError(f"inspect(): too little memory to watch the {x.nbytes:,} bytes of {name}: "
                             "the checker needs about 30 times as much for floats")
        array = Array(number, name, region, start, tuple(x.shape), tuple(s * element for s in strides),
                       element)
        self._arrays.append(array)
        return array

    def watch(self, arrays: dict[str, torch.Tensor]) -> None:
        """Tell the checker of CPU tensors that kernels may use, in place.

        Raises:
            ValueError: if two of them overlap, or one is too large.
        """
        for (name, x), (other, y) in itertools.combinations(arrays.items(), 2):
            if overlap(x, y):
                raise ValueError(f"inspect(): {name} and {other} share elements: name only one of them")
        for name, x in arrays.items():
            start = int(x.storage_offset()) * x.element_size()
            first = start // ALIGNMENT * ALIGNMENT
            size = extent(x.shape, x.stride()) * x.element_size()
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(x.untyped_storage())
            self._register(name, memory[first:start + size], start - first, x, True, x.stride())

    @contextlib.contextmanager
    def guarded(self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Iterator[dict]:
        """Copies of tensors with red zones around them, for the kernels of one call; of 4-D ones, around each
        head. (Kernels take the others, such as L, to be without gaps.)

        Each row keeps its place within a cache line. Outputs start uninitialised, and are copied back.
        """
        copies, arrays = {}, []
        for name, x in {**inputs, **outputs}.items():
            strides, size = guarded_strides(x), x.element_size()
            guard = max(GUARD_BYTES, GUARD_ROWS * max(strides[-2:]) * size)
            guard = -(-guard // ALIGNMENT) * ALIGNMENT
            start = guard + int(x.storage_offset()) * size % ALIGNMENT
            bytes_ = start + extent(x.shape, strides) * size + guard
            memory = torch.full([bytes_ + ALIGNMENT], 0xFF, dtype=torch.uint8, device="cpu")  # NaN
            region = memory[-memory.data_ptr() % ALIGNMENT:][:bytes_]
            copy = region[start:bytes_ - guard].view(x.dtype).as_strided(x.shape, strides)
            if name in inputs:
                once(copy).copy_(once(x))
            copies[name] = copy
            arrays.append(self._register(name, region, start, x, name in inputs, tuple(strides)))
        try:
            yield copies
        finally:
            for array in arrays:
                self._checker.sim_check_forget(array.number)
                array.region = None
            for name, x in outputs.items():
                x.copy_(copies[name])

    def add_masked(self, stage: str, flops: int, tiles: Callable[[], Tiles]) -> None:
        """A call with a mask. flops: if it saw all."""
        self.masked.append((stage, flops, functools.cache(tiles)))

    def close(self) -> None:
        """Take over what the checker has found and counted."""
        data = json.loads(self._checker.sim_check_report())
        self._checker.sim_check_end()
        source_lines.cache_clear()
        places = places_of(data["places"])
        self._add_findings(data["findings"], places)
        self.more_findings = data["more_findings"]
        for kernel in data["kernels"]:
            self._add_kernel(kernel, places, data)
        for array in self._arrays:
            array.region = None
        self.complete = True

    def _add_kernel(self, k: dict, places: list[Place], data: dict) -> None:
        namesakes = sum(kernel.name.split(" #")[0] == k["name"] for kernel in self.kernels)
        name = f"{k['name']} #{namesakes + 1}" if namesakes else k["name"]
        traffic: dict[str, Traffic] = defaultdict(Traffic)
        for array, (read, written) in zip(self._arrays, k["unique"], strict=False):
            if read or written:
                traffic[array.name] += Traffic(unique_read=read, unique_written=written)
        for c in k["counters"]:
            number, kind = data["arrays"][c["access"]], data["kinds"][c["access"]]
            example = {int(lane): offset for lane, offset in c["example"].items()}
            if number >= 0:
                array = self._arrays[number]
                array_name = array.name
                elements = {lane: array.element(offset) for lane, offset in example.items()}
                line = array.start - array.start % ALIGNMENT
                example = {lane: offset - line for lane, offset in example.items()}
                traffic[array.name] += Traffic(
                    read=c["bytes"] * (kind != "write"), written=c["bytes"] * (kind != "read"),
                    moved=32 * c["units"])
            else:
                array_name = re.sub(r"\[.*", "", c["shared_element"])
                elements = {}
            self.accesses.append(Access(
                kernel=name, place=places[c["access"]], memory="HBM" if number >= 0 else "shared", kind=kind,
                array=array_name, example=example, example_elements=elements,
                **{x: c[x] for x in ("access_bytes", "requests", "lanes", "bytes", "unique", "units", "ideal",
                                     "worst")}))
        self.accesses = merged(self.accesses)
        barriers = sorted((Barrier(Place.read(b["file"], b["line"]), b["name"], b["count"])
                           for b in k["barriers"]), key=lambda b: (b.place.file, b.place.line))
        self.kernels.append(Kernel(
            name, tuple(k["grid"]), tuple(k["block"]), k["launches"], k["blocks"], k["shared_bytes"],
            tuple(barriers), k["accesses"], dict(traffic)))

    def _add_findings(self, findings: list[dict], places: list[Place]) -> None:
        """One for each mistake of the source, of which the compiler may have made several instructions."""
        found: dict[tuple, dict] = {}
        for f in findings:
            lines = (places[p["access"]] if p["access"] else p["line"] for p in f["parties"])
            array = f["array"] if f["array"] >= 0 else f["element"].split("[")[0]
            first = found.setdefault((f["what"], f["kernel"], array, frozenset(lines)), f)
            if first is not f:
                first["count"] += f["count"]
        all_found = [self._finding(f, places) for f in found.values()]
        self.notes = [f for f in all_found if f.what == "portability"]
        self.findings = [f for f in all_found if f.what != "portability"]
        self.findings.sort(key=lambda f: f.what == "uninitialised")  # often what a race leads to

    def _finding(self, f: dict, places: list[Place]) -> Finding:
        parties = tuple(
            Party(tuple(p["block"]), tuple(p["thread"]), p["kind"] or "",
                  places[p["access"]] if p["access"] else Place.read(p["file"], p["line"]))
            for p in f["parties"])
        element = f["element"]
        if f["array"] >= 0:
            element = self._arrays[f["array"]].element(f["offset"])
        message = message_of(f, element, parties)
        if f["count"] > 1:
            message += f"  ({f['count']:,} times)"
        return Finding(f["what"], f["kernel"], element, parties, f["count"], message)

    # ------------------------------------------------------------------------------- what it says
    @property
    def tiles(self) -> list[tuple[str, Tiles]]:
        return [(stage, tiles()) for stage, _, tiles in self.masked]

    @property
    def flops(self) -> int:
        return self.flops_without_mask + sum(int(flops * tiles().share) for _, flops, tiles in self.masked)

    def traffic(self) -> dict[str, Traffic]:
        """HBM traffic by array, over all kernels. A byte that two launches touch is unique in each."""
        touched = {name for kernel in self.kernels for name in kernel.traffic}
        total = {array.name: Traffic() for array in self._arrays if array.name in touched}
        for kernel in self.kernels:
            for name, traffic in kernel.traffic.items():
                total[name] += traffic
        return total

    @property
    def hbm(self) -> Traffic:
        """HBM traffic, over all arrays and kernels."""
        total = Traffic()
        for traffic in self.traffic().values():
            total += traffic
        return total

    def to_dict(self) -> dict:
        """All of it in plain types, for JSON."""
        def place(p: Place) -> dict:
            return {"file": p.file, "line": p.line, "callers": list(p.callers), "source": p.text}

        def access(a: Access) -> dict:
            return vars(a) | {"place": place(a.place)} | {
                name: {str(lane): x for lane, x in getattr(a, name).items()}
                for name in ("example", "example_elements")}

        def finding(f: Finding) -> dict:
            return {"what": f.what, "kernel": f.kernel, "element": f.element, "count": f.count,
                    "message": f.message,
                    "parties": [{"block": list(p.block), "thread": list(p.thread), "kind": p.kind,
                                 "place": place(p.place)} for p in f.parties]}

        return {
            "findings": [finding(f) for f in self.findings],
            "notes": [finding(f) for f in self.notes],
            "more_findings": self.more_findings,
            "kernels": [vars(k) | {"grid": list(k.grid), "block": list(k.block),
                                   "barriers": k.barriers, "warp_barriers": k.warp_barriers,
                                   "barrier_lines": [vars(b) | {"place": place(b.place)}
                                                     for b in k.barrier_lines],
                                   "traffic": {name: vars(t) for name, t in k.traffic.items()}}
                        for k in self.kernels],
            "traffic": {name: vars(t) for name, t in self.traffic().items()},
            "flops": self.flops,
            "tiles": [{"stage": stage, "Br": tiles.Br, "Bc": tiles.Bc} | tiles.counts
                      for stage, tiles in self.tiles],
            "accesses": [access(a) for a in self.accesses],
        }

    def find(self, line: str, kind: str | None = None) -> list[Access]:
        """The accesses of a line, such as "fwd_04_flash2.cuh:81"; also those of functions that it calls.

        Raises:
            ValueError: if the line has none.
        """
        found = [a for a in self.accesses if line in (str(a.place), f"{a.place.file}:{a.place.line}",
                                                      *a.place.callers) and kind in (None, a.kind)]
        if not found:
            lines = {line for a in self.accesses for line in (str(a.place), *a.place.callers)}
            known = ", ".join(sorted(lines)) or "no line"
            raise ValueError(f"no access was seen at {line!r}; there are accesses at {known}")
        return found

    def plot(self, file: str | Path | None = None, line: str | None = None):
        """Draw the HBM traffic by array or, for a line such as "fwd_04_flash2.cuh:81", which lane of a warp
        touches which bank (shared memory) or sector (HBM), in the line's worst request.

        Args:
            file: where to save the picture, if anywhere.
            line: as for `find`.
        Returns:
            The matplotlib Figure.
        Raises:
            ValueError: if the line has no accesses.
        """
        from . import pictures
        figure = pictures.traffic(self) if line is None else pictures.requests(self.find(line))
        if file is not None:
            figure.savefig(file, dpi=130)
        return figure

    def __rich__(self):
        from . import tables
        return tables.report(self)

    def __str__(self) -> str:
        from . import tables
        return tables.as_text(self)

    __repr__ = __str__
