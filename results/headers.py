"""Writes into each stage's header what it gives, as measured: from rungs.json, by bench.py --rungs.

    // predicted: 1.5x at d=64, 1.3x at d=128: half the loads from shared memory
    // measured: 1.42x at d=64 causal, 1.40x full, 1.31x at d=128 causal, 1.29x full (H200, bf16, N=4096; make
    //           readme)

The factors are the stage's TFLOP/s over its parent's. results/readme.py calls this; a test fails when a
header is stale.
"""

import json
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flash  # noqa: E402
from flash_ladder.bench import staircase  # noqa: E402

RUNGS = ROOT / "results" / "h200" / "rungs.json"
COLUMNS = 110
CONTINUED = "//          "      # as flash_ladder/registry.py reads it


def measured_rungs(file: Path = RUNGS) -> dict | None:
    """The result of bench.py --rungs; None before it is measured."""
    return json.loads(file.read_text()) if file.exists() else None


def gains(data: dict, direction: str, name: str) -> list[tuple[dict, dict, float]]:
    """For each shape at which a stage and its parent were measured: their rows, and the stage's TFLOP/s over
    the parent's. A parent that does not take the stage's type counts with its own, at the same N, d, mask."""
    rows = [row for row in data["rows"] if row["pass"] == direction and row["kind"] == "stage"
            and row["status"] == "ok"]
    found = []
    for row in rows:
        if row["name"] != name:
            continue
        before = [other for other in rows if other["name"] == row["after"]
                  and all(other[key] == row[key] for key in ("N", "d", "causal"))]
        before.sort(key=lambda other: other["dtype"] != row["dtype"])
        if before:
            same_type = before[0]["dtype"] == row["dtype"]
            factor = staircase.gain(row, before[:1]) if same_type else row["tflops"] / before[0]["tflops"]
            found.append((row, before[0], factor))
    return found


def measured_text(data: dict, direction: str, name: str) -> str:
    """What the line `measured:` says; empty if a stage and its parent were not measured at one shape."""
    if not (found := gains(data, direction, name)):
        return ""
    lengths = sorted({row["N"] for row, *_ in found}, reverse=True)
    parts = []
    for N in lengths:
        texts, last = [], None
        for row, _, factor in (each for each in found if each[0]["N"] == N):
            d = f" at d={row['d']}" * (row["d"] != last)
            texts.append(f"{factor:.2f}x{d} {staircase.mask(row)}")
            last = row["d"]
        parts.append(", ".join(texts) + f" at N={N}" * (len(lengths) > 1))
    row, before, _ = found[0]
    device = re.sub(r"^NVIDIA |( 80GB HBM3)? \(.*", "", data["device"])
    beside = f" beside {before['name']} in {before['dtype']}" * (before["dtype"] != row["dtype"])
    n = f", N={lengths[0]}" * (len(lengths) == 1)
    return f"{'; '.join(parts)} ({device}, {row['dtype']}{beside}{n}; make readme)"


def renewed(source: str, measured: str) -> str:
    """A stage's source with this in its header, after `predicted:` or else the last field; empty: with
    nothing measured."""
    lines = source.split("\n")
    end = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    header, place, field = [], {}, ""
    for line in lines[:end]:
        if found := re.match(rf"// ({'|'.join(flash.FIELDS)}):", line):
            field = found[1]
        elif not re.match(r"// {8,}", line):
            field = ""
        if field == "measured":
            continue
        header.append(line)
        if field:
            place[field] = len(header)
    after = place.get("predicted", max(place.values(), default=min(end, 1)))
    new = textwrap.wrap(measured, COLUMNS, initial_indent="// measured: ", subsequent_indent=CONTINUED,
                        break_on_hyphens=False)
    return "\n".join([*header[:after], *new, *header[after:], *lines[end:]])


def stale(data: dict) -> dict[Path, str]:
    """The stages whose header does not say what rungs.json does, and what they should be."""
    found = {}
    for direction in ("fwd", "bwd"):
        known = staircase.rungs(data, direction)
        for stage in flash.stages(direction):
            if stage.name in known:
                source = stage.path.read_text()
                new = renewed(source, measured_text(data, direction, stage.name))
                found |= {stage.path: new} if new != source else {}
    return found


def without_gain(data: dict) -> list[flash.Stage]:
    """The stages that are nowhere faster than their parent: their headers say why they stay."""
    found = []
    for stage in flash.stages():
        factors = [round(factor, 2) for *_, factor in gains(data, stage.direction, stage.name)]
        if factors and max(factors) <= 1:
            found.append(stage)
    return found


def renew() -> None:
    """Bring all headers up to date."""
    if data := measured_rungs():
        for path, source in stale(data).items():
            path.write_text(source)
