"""Writes the parts of README.md that are made from elsewhere: the ladder, from the stages' headers, the
measured results, from the JSON files here, and a finding of the checker, from a stage broken on purpose.
`make readme` runs it; a test fails when README.md is stale.
"""

import json
import re
import sys
import tempfile
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench  # noqa: E402
import flash  # noqa: E402

SHOWN_N = 1024


def ladder() -> str:
    """The stages as a Markdown table."""
    names = {dtype: name for name, dtype in flash.DTYPES.items()}
    lines = ["| # | stage | types | needs | idea |", "|---|---|---|---|---|"]
    for s in flash.stages():
        types = ", ".join(names[dtype] for dtype in s.dtypes)
        link = f"[{s.name}]({s.path.relative_to(ROOT)})"
        lines.append(f"| {s.number} | {link} | {types} | {s.needs} | {s.idea} |")
    return "\n".join(lines)


def results() -> str:
    """The forward pass on an H200, and the time from an edit to a result."""
    gpu, cpu = (json.loads((ROOT / "results" / f / "bench_fwd.json").read_text()) for f in ("h200", "cpu"))
    table, origin = bench.results_table(gpu, SHOWN_N).split("\n\n")
    return (
        f"{table}\n\n{origin} Measured on {gpu['date'][:10]} by `python bench.py`.\n\n"
        "![time against N](results/h200/bench_fwd_time.png)\n\n"
        "From saving an edited stage to its result, in the same Python process: "
        f"{gpu['edit_to_result_s']:.1f} s with nvcc, on the machine of that GPU; "
        f"{cpu['edit_to_result_s']:.1f} s in the simulator, on {re.search('[0-9]+ cores', cpu['device'])[0]}."
    )


def finding() -> str:
    """What the checker says of flash2 without its __syncwarp()."""
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder, "mine.cuh")
        mine.write_text((flash.STAGES / "fwd_04_flash2.cuh").read_text().replace("__syncwarp();", ""))
        q, k, v = torch.ones(3, 1, 1, 64, 64)
        with flash.inspect() as report:
            flash.attention(q, k, v, stage=mine)
    (found,) = report.findings
    return "```\n" + textwrap.fill(found.message, 110) + "\n```"


def traffic() -> str:
    """The bench's HBM traffic of each stage, counted in the simulator."""
    data = json.loads((ROOT / "results" / "cpu" / "bench_fwd.json").read_text())
    N = bench.lengths(data)[-1]
    rows = [row for row in data["results"] if row["N"] == N and row["kind"] == "stage"]
    most = bench.traffic(rows[0])
    lines = ["| stage | read | written | distinct bytes | x less than naive |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        sizes = (bench.size(row[f"hbm_{what}_bytes"]) for what in ("read", "written", "unique"))
        factor = bench.number(most / bench.traffic(row))
        lines.append(f"| {row['label']} | {' | '.join(sizes)} | {factor} |")
    slower = [row["inspected_ms"] / row["median_ms"] for row in data["results"] if row["kind"] == "stage"]
    origin = (f"{bench.title(data)}, N={N}, counted by `python bench.py` without a GPU. Counting takes "
              f"{min(slower):.0f} to {max(slower):.0f} times as long as the same call in the simulator "
              "without it.")
    return "\n".join([*lines, "", origin])


def counts() -> str:
    """What the simulator counts beside what an H200 did, kernel by kernel."""
    folder = ROOT / "results" / "h200"
    data = json.loads((folder / "counts_fwd.json").read_text())
    patterns = len(json.loads((folder / "banks.json").read_text())["patterns"])
    header = ("kernel", "HBM reads: simulator", "asked of L1", "asked of L2", "of HBM",
              "shared loads: simulator", "H200")
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * 6]
    same = True
    for row in data["kernels"]:
        ours, gpu = row["simulator"], row["gpu"]
        hbm = [what for what in ours if what.startswith("HBM")]
        same &= all(ours[what] == gpu[what] for what in hbm)
        sizes = (32 * ours["HBM read sectors"], 32 * gpu["HBM read sectors"],
                 32 * gpu["sectors that L1 read from L2"], gpu["bytes read from HBM"])
        loads = (x["shared read requests"] for x in (ours, gpu))
        cells = [*map(bench.size, sizes), *(f"{n:,}" if n else "-" for n in loads)]
        lines.append(f"| {row['stage']}: {row['kernel'].removesuffix('_kernel')} | {' | '.join(cells)} |")
    shape = " ".join(f"{name}={data['shape'][name]}" for name in "BHNd")
    assert same, "the simulator's requests or sectors of HBM differ from the GPU's"
    origin = (f"{shape} fp32 not causal; {data['device']}, {data['date']}, by NVIDIA's profiler "
              "(`results/counts.py`). Requests and sectors of HBM, read and written, are the same in both "
              "for every kernel. Wavefronts follow a model of the 32 banks that agrees with this GPU for all "
              f"{patterns} patterns of indices that were tried, as loads and stores of 4, 8 and 16 bytes.")
    return "\n".join([*lines, "", origin])


def updated(text: str) -> str:
    """README's text with its parts between <!-- name --> and <!-- end of name --> made anew."""
    for name, make in {"ladder": ladder, "results": results, "finding": finding, "traffic": traffic,
                       "counts": counts}.items():
        part = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)", re.S)
        assert part.search(text), f"README.md has no place for {name}"
        text = part.sub(lambda m, make=make: m[1] + make() + m[2], text)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text()))
