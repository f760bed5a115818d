"""What an inspection found: findings, accesses and traffic, each with its place in the source."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

INCLUDE = Path(__file__).resolve().parent / "include"


# --------------------------------------------------------------------------------------- where in the source
@dataclass(frozen=True)
class Place:
    """A line of a kernel's source, and the lines that called the function in which it stands."""

    file: str
    line: int
    callers: tuple[str, ...] = ()  # "file:line", the nearest first
    text: str = ""                 # the source of the line, as it was

    @classmethod
    def read(cls, file: str, line: int, callers: tuple[str, ...] = ()) -> Place:
        """With the line's text, from the file."""
        lines = source_lines(file)
        return cls(file, line, callers, lines[line - 1].strip() if 0 < line <= len(lines) else "")

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


NOWHERE = Place("?", 0)


@functools.cache
def source_lines(file: str) -> list[str]:
    path = Path(file)
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def places_of(addresses: list) -> list[Place]:
    """The source of addresses in libraries, [library, offset] each or None, by addr2line.

    Without that program the library and the offset stand in for file and line.
    """
    found: dict[tuple, Place] = {}
    for library in {address[0] for address in addresses if address}:
        offsets = sorted({address[1] for address in addresses if address and address[0] == library})
        try:
            out = subprocess.run(["addr2line", "-a", "-i", "-e", library, *map(hex, offsets)],
                                 capture_output=True, text=True).stdout
        except FileNotFoundError:
            for offset in offsets:
                found[library, offset] = Place(f"{Path(library).name}+{offset:#x}", 0)
            continue
        for part in re.split(r"^(?=0x)", out, flags=re.M)[1:]:
            address, *lines = part.splitlines()
            calls = [re.match(r"(.*):(\d+)", line) for line in lines]
            kernel = [c for c in calls if c and _is_kernel_source(c[1])]
            if kernel:
                callers = tuple(f"{Path(c[1]).name}:{c[2]}" for c in kernel[1:])
                found[library, int(address, 16)] = Place.read(kernel[0][1], int(kernel[0][2]), callers)
    return [found.get(tuple(address), NOWHERE) if address else NOWHERE for address in addresses]


def _is_kernel_source(file: str) -> bool:
    system = file.startswith(("/usr/include/", "/usr/lib/")) or "/include/c++/" in file
    return Path(file).suffix in (".cu", ".cuh", ".h", ".hpp", ".cpp") and not (
        system or Path(file).is_relative_to(INCLUDE))


# --------------------------------------------------------------------------------------- what is reported
@dataclass(frozen=True)
class Party:
    """One side of a finding: a thread, and where it was."""

    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    kind: str  # as an Access has it; of cp.async also "source"; "" for waiting or failing
    place: Place

    def __str__(self) -> str:
        thread, block = (x[0] if x[1:] == (0, 0) else x for x in (self.thread, self.block))
        return f"thread {thread} of block {block}"


@dataclass(frozen=True)
class Finding:
    """A mistake in a kernel, at its first occurrence.

    what: "race", "out of bounds", "misaligned", "uninitialised" (a read of what nothing has written),
    "too early" (before the kernel in front has ended), "barrier" (threads at different barriers), "copy" and
    "wgmma" (one that nobody waits for), "accumulator" (used while a wgmma may add to it), "register fence"
    and "proxy fence" (one is missing), "ended block" (of a cluster), "deadlock", or "error" (a failed assert,
    say); of notes "portability".
    """

    what: str
    kernel: str
    element: str  # such as K_smem[70] or O[0, 1, 5, 3]
    parties: tuple[Party, ...]
    count: int    # how often it happened
    message: str

    @property
    def places(self) -> list[Place]:
        return [party.place for party in self.parties]

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Access:
    """What one line of one kernel asked of one array, all its requests together.

    units are sectors of 32 bytes (HBM), or wavefronts (shared memory). ideal: sectors if the bytes lay side
    by side, wavefronts without bank conflicts. (Lanes of 4 bytes: 1 ideally, n with an n-way conflict.)

    example is the worst request, as the address of each lane: in bytes from the start of shared memory, or of
    the cache line (128 bytes) in which the array starts. example_elements: such as K[0, 1, 5, 3].
    """

    kernel: str
    place: Place
    memory: str        # "HBM" or "shared"
    kind: str          # "read", "write", "atomic"; of shared memory also "copy" (cp.async), and, a whole copy
    #                    or product a request, "tma write", "tma read", "send", "wgmma"
    array: str
    access_bytes: int  # of a lane
    requests: int
    lanes: int         # that took part, over all requests
    bytes: int         # asked for, over all requests; what several lanes of one ask for, once
    unique: int        # different ones of these in each launch; of HBM only
    units: int
    ideal: int
    worst: int         # units of the worst request
    example: dict[int, int] = field(repr=False)           # by lane
    example_elements: dict[int, str] = field(repr=False)  # by lane; of HBM only

    @property
    def units_per_request(self) -> float:
        return self.units / self.requests

    @property
    def ways(self) -> float:
        """Units per ideal unit: n for an n-way bank conflict."""
        return self.units / self.ideal


def merged(accesses: list[Access]) -> list[Access]:
    """One Access for all instructions that the compiler has made of one access of the source."""
    merged: dict[tuple, Access] = {}
    for a in accesses:
        key = (a.kernel, a.place, a.memory, a.kind, a.array, a.access_bytes)
        b = merged.get(key, a)
        totals = ("requests", "lanes", "bytes", "unique", "units", "ideal")
        sums = {name: getattr(a, name) + getattr(b, name) for name in totals}
        merged[key] = a if b is a else replace(a if a.worst > b.worst else b, **sums)
    return list(merged.values())


@dataclass
class Traffic:
    """HBM traffic in bytes: what warps ask for, how much of that is distinct in a launch, and in sectors."""

    read: int = 0
    written: int = 0
    unique_read: int = 0
    unique_written: int = 0
    moved: int = 0  # in sectors of 32 bytes, read and written

    @property
    def total(self) -> int:
        return self.read + self.written

    def __iadd__(self, other: Traffic) -> Traffic:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass(frozen=True)
class Barrier:
    """A line of one kernel at which threads wait for each other."""

    place: Place
    name: str   # __syncwarp(), __syncthreads() or a relative of it
    count: int  # over all blocks; of __syncwarp(), over all warps


@dataclass(frozen=True)
class Kernel:
    """A kernel, over all its launches."""

    name: str
    grid: tuple[int, int, int]   # of the last launch
    block: tuple[int, int, int]
    launches: int
    blocks: int
    shared_bytes: int            # a block
    barrier_lines: tuple[Barrier, ...]  # in the order of the source
    thread_accesses: int
    traffic: dict[str, Traffic]  # by array

    @property
    def barriers(self) -> int:
        """__syncthreads and its relatives, over all blocks."""
        return sum(b.count for b in self.barrier_lines) - self.warp_barriers

    @property
    def warp_barriers(self) -> int:
        """__syncwarp, over all warps."""
        return sum(b.count for b in self.barrier_lines if b.name == "__syncwarp()")


# --------------------------------------------------------------------------------------- arrays
