"""What nvcc and ptxas make of a stage: registers, spills, and how many blocks a multiprocessor holds."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .nvcc import find_nvcc
from .sources import ROOT, STAGES
from .stage import Stage

REGISTERS = 65536        # of a multiprocessor
REGISTERS_AT_ONCE = 256  # a warp gets so many, or a multiple
# Of a multiprocessor, by architecture: warps, blocks, KiB of shared memory, KiB that each block takes for
# itself (CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability")
MULTIPROCESSOR = {
    "sm_75": (32, 16, 64, 0), "sm_80": (64, 32, 164, 1), "sm_86": (48, 16, 100, 1), "sm_89": (48, 24, 100, 1),
    "sm_90a": (64, 32, 228, 1), "sm_100": (64, 32, 228, 1), "sm_120": (48, 24, 100, 1)}


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a kernel that a multiprocessor holds at once, the warps that makes, and what limits them."""

    blocks: int
    warps: int
    most_warps: int
    limit: str

    def __str__(self) -> str:
        blocks = f"{self.blocks} block{'s' * (self.blocks > 1)} a multiprocessor"
        return f"{blocks} ({self.warps} of {self.most_warps} warps), bound by {self.limit}"


@dataclass(frozen=True)
class Kernel:
    """A kernel as ptxas reports it. threads: of a block, as __launch_bounds__ says; 0: it does not.
    serialised: whether products by wgmma wait for each other, as ptxas could not do otherwise (C7508 on)."""

    name: str
    registers: int
    spilled_bytes: int
    static_shared_bytes: int
    threads: int
    serialised: bool = False

    def occupancy(self, architecture: str, shared_bytes: int) -> Occupancy | None:
        """With so much dynamic shared memory a block. None if its threads are unknown, or it does not fit."""
        if not self.threads:
            return None
        most_warps, most_blocks, shared_KiB, own_KiB = MULTIPROCESSOR[architecture]
        warps = -(-self.threads // 32)
        a_warp = -(-self.registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        a_block = shared_bytes + self.static_shared_bytes + own_KiB * 1024
        limits = {"registers": REGISTERS // (a_warp * warps),
                  "shared memory": shared_KiB * 1024 // a_block if a_block else most_blocks,
                  "warps": most_warps // warps, "blocks": most_blocks}
        limit = min(limits, key=lambda name: limits[name])
        blocks = limits[limit]
        return Occupancy(blocks, blocks * warps, most_warps, limit) if blocks else None


def kernels_of(stage: Stage, macros: dict[str, str | Path], architecture: str) -> list[Kernel]:
    """The kernels of a stage, compiled for an architecture such as sm_90a.

    Raises:
        RuntimeError: without nvcc, or with its messages.
    """
    return list(_kernels_of(stage, tuple(macros.items()), architecture, str(find_nvcc())))


@functools.lru_cache(64)
def _kernels_of(stage: Stage, macros: tuple, architecture: str, nvcc: str) -> tuple[Kernel, ...]:
    defines = [f'-D{name}="{value}"' if isinstance(value, Path) else f"-D{name}={value}"
               for name, value in macros]
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "stage.ptx")
        _run([nvcc, "-ptx", "-std=c++17", "-O3", f"-arch={architecture.replace('sm', 'compute')}",
              f"-I{ROOT}", f"-I{STAGES}", *defines, "-o", ptx, ROOT / f"flash_{stage.direction}.cu"])
        report = _run([nvcc, "-cubin", f"-arch={architecture}", "-Xptxas", "-v",
                       "-o", Path(folder, "stage.cubin"), ptx])
        return tuple(_read(ptx.read_text(), report))


def _run(command: list) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[:30]))
    return done.stdout + done.stderr


def _read(ptx: str, report: str) -> Iterable[Kernel]:
    threads = {name: int(most) for name, most in re.findall(
        r"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+)", ptx)}
    for entry in report.split("Compiling entry function '")[1:]:
        mangled = entry[:entry.index("'")]
        plain = re.match(r"_Z(\d+)(\w+)", mangled)
        name = plain[2][:int(plain[1])] if plain else mangled

        def number(pattern: str, text: str = entry) -> int:
            found = re.search(pattern, text)
            return int(found[1]) if found else 0
        yield Kernel(name, number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"),
                     number(r"(\d+) bytes smem"), threads.get(mangled, 0),
                     bool(re.search(rf"\(C75\d\d\).*'{mangled}'", report)))
