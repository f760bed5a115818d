"""A Report as text: findings, then kernel by kernel HBM traffic, the accesses of each line, and barriers."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .records import Access, Finding, Kernel, Traffic

if TYPE_CHECKING:
    from .report import Report

WIDTH = 120
NOTE = (
    "Counted from the source, with no cache: a GPU's L1 and L2 catch much of the HBM traffic, and nvcc may "
    "make several reads of shared memory one, or keep a value in a register. asked for: bytes that warps ask "
    "for; what several lanes of a request share, once. unique: distinct bytes of a launch, all that an "
    "endless cache would let through. moved: in whole sectors of 32 bytes.")


def as_text(r: Report) -> str:
    out = io.StringIO()
    Console(file=out, width=WIDTH, highlight=False, force_jupyter=False).print(r)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def report(r: Report) -> Group:
    """All of it, for rich to print."""
    if not r.complete:
        return Group(Text("The report is complete at the end of the with block."))
    if not r.kernels and not r.findings:
        return Group(Text("No kernel was seen. Libraries of your own must be built with checked=True."))
    parts = [_findings_part(r.findings, r.more_findings), *_described(r.notes)]
    for kernel in r.kernels:
        accesses = [a for a in r.accesses if a.kernel == kernel.name]
        parts += [Text(""), _kernel_heading(kernel), _traffic_table(kernel)]
        parts += [table for memory in ("HBM", "shared") if (table := _access_table(accesses, memory))]
        parts += [_barrier_table(kernel)] if kernel.barrier_lines else []
    total = r.hbm.total
    if r.findings and r.masked:  # its file, which would be asked, may be what is wrong
        return Group(*parts, Text(NOTE, style="dim"))
    parts += [Text(f"{stage}: {tiles}.") for stage, tiles in dict(r.tiles).items()]
    if r.flops and total:
        parts += [Text(""), Text(f"{r.flops:,} FLOPs in matrix products, by formula (4 d a visible pair; "
                                 f"backward, 10 d); {r.flops / total:.3g} per byte of HBM traffic, "
                                 f"{format_bytes(total)}.")]
    return Group(*parts, Text(NOTE, style="dim"))


def format_bytes(n: float) -> str:
    """A number of bytes with its unit, such as 64 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}" if n < 1000 else f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.3g} GiB"


def _findings_part(findings: list[Finding], more: bool):
    if not findings:
        return Text("No findings: no race, no access out of bounds, nothing read that was not written.",
                    style="green")
    title = f"{len(findings)} finding{'s' * (len(findings) > 1)}"
    if more:
        title += ", and more that are not kept: mend these, and look again"
    return Group(Text(title, style="bold red"), *_described(findings))


def _described(findings: list[Finding]) -> list[Text | Padding]:
    """What each of them says, and its lines of the source."""
    lines: list[Text | Padding] = []
    for finding in findings:
        lines.append(Padding(Text(finding.message), (0, 0, 0, 2)))
        for place in dict.fromkeys(finding.places):
            if place.text:
                lines.append(Padding(Text(f"{place}: {place.text}", style="dim"), (0, 0, 0, 4)))
    return lines


def _kernel_heading(k: Kernel) -> Text:
    def product(extents: tuple[int, int, int]) -> int:
        return extents[0] * extents[1] * extents[2]

    blocks, run = product(k.grid), max(k.blocks, 1)
    text = f"{k.name}: {blocks:,} block{'s' * (blocks > 1)} of {product(k.block)} threads"
    text += f", {k.launches} launches" if k.launches > 1 else ""
    text += f", {format_bytes(k.shared_bytes)} of shared memory a block" if k.shared_bytes else ""
    text += f", {k.barriers / run:.3g} __syncthreads() a block" if k.barriers else ""
    text += f", {k.warp_barriers / run:.3g} __syncwarp() over its warps" if k.warp_barriers else ""
    return Text(text, style="bold")


def _table(title: str, *columns: str) -> Table:
    """An empty table; its first column is text, and takes what width the numbers leave if it holds source."""
    table = Table(title=title, title_justify="left", title_style="", box=box.HORIZONTALS,
                  padding=(0, 1, 0, 0), expand=columns[0] == "line")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True, overflow="ellipsis",
                         ratio=1 if name == "line" else None)
    return table


def _traffic_table(kernel: Kernel) -> Table:
    table = _table("HBM traffic", "array", "read", "unique", "written", "unique", "moved")
    total = Traffic()
    for traffic in kernel.traffic.values():
        total += traffic
    for name, t in [*kernel.traffic.items(), ("all", total)]:
        if t is total:
            table.add_section()
        numbers = (t.read, t.unique_read, t.written, t.unique_written, t.moved)
        table.add_row(name, *map(format_bytes, numbers))
    return table


def _access_table(accesses: list[Access], memory: str) -> Table | None:
    rows = sorted((a for a in accesses if a.memory == memory), key=lambda a: -a.units)
    if not rows:
        return None
    unit = "sectors" if memory == "HBM" else "wavefronts"
    title = {"HBM": "HBM, by line. Sectors of 32 bytes that a request of a warp moves, on average",
             "shared": "Shared memory, by line. Wavefronts that a request of a warp takes, on average; more "
                       "than ideal: bank conflicts"}
    asked = ("asked for", "unique") if memory == "HBM" else ("asked for",)
    table = _table(title[memory], "line", "requests", *asked, unit, "ideal", "worst")
    for a in rows:
        called = f", called at {a.place.callers[0]}" if a.place.callers else ""
        line = f"{a.place}  {a.place.text}\n    {a.kind} {a.array}, {a.access_bytes} B a lane{called}"
        sizes = (a.bytes, a.unique)[:len(asked)]
        table.add_row(
            Text(line), f"{a.requests:,}", *map(format_bytes, sizes), f"{a.units_per_request:.3g}",
            f"{a.ideal / a.requests:.3g}", str(a.worst), style="yellow" if a.units > a.ideal else "")
    return table


def _barrier_table(kernel: Kernel) -> Table:
    table = _table("Barriers, by line. __syncwarp(): all warps of a block together", "line", "a block")
    for b in kernel.barrier_lines:
        table.add_row(Text(f"{b.place}  {b.place.text}"), f"{b.count / max(kernel.blocks, 1):,.4g}")
    return table
