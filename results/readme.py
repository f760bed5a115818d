"""Writes the parts of README.md that are made from elsewhere: the ladders, from the stages' headers, the
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

import bench_report  # noqa: E402
import flash  # noqa: E402

RESULTS = ROOT / "results"
SHOWN_N = 1024
LONG = (1024, 2048, 4096)


def ladder() -> str:
    """The stages as Markdown tables, one for each direction."""
    names = {dtype: name for name, dtype in flash.DTYPES.items()}
    tables = []
    for direction in ("fwd", "bwd"):
        lines = [f"{bench_report.PASSES[direction].capitalize()}:", "",
                 "| # | stage | types | needs | idea |", "|---|---|---|---|---|"]
        for s in flash.stages(direction):
            types = ", ".join(names[dtype] for dtype in s.dtypes)
            link = f"[{s.name}]({s.path.relative_to(ROOT)})"
            lines.append(f"| {s.number} | {link} | {types} | {s.needs} | {s.idea} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def bench_json(device: str, direction: str) -> dict:
    """A result of bench.py in one of the folders here."""
    return json.loads((RESULTS / device / f"bench_{direction.replace('+', '_')}.json").read_text())


def measured(direction: str) -> str:
    """A pass on an H200: the bench's table and plot."""
    data = bench_json("h200", direction)
    table, origin = bench_report.results_table(data, SHOWN_N).split("\n\n")
    option = f" --pass {direction}" * (direction != "fwd")
    return (f"{table}\n\n{origin} Measured on {data['date'][:10]} by `python bench.py{option}`.\n\n"
            f"![time against N](results/h200/bench_{direction}_time.png)")


def results() -> str:
    """The forward pass on an H200, and the time from an edit to a result."""
    gpu, cpu = bench_json("h200", "fwd"), bench_json("cpu", "fwd")
    return (
        f"{measured('fwd')}\n\n"
        "From saving an edited stage to its result, in the same Python process: "
        f"{gpu['edit_to_result_s']:.1f} s with nvcc, on the machine of that GPU; "
        f"{cpu['edit_to_result_s']:.1f} s in the simulator, on {re.search('[0-9]+ cores', cpu['device'])[0]}."
    )


def backward() -> str:
    """The backward pass on an H200."""
    return measured("bwd")


def ratios() -> str:
    """The speed of the stage vectorized on an H200, as a multiple of PyTorch's efficient backend's."""
    found, origins, dates = {}, set(), set()
    for file in (RESULTS / "h200" / "ratios").glob("*.json"):
        data = json.loads(file.read_text())
        shape = re.sub(r" d=\d+|( not)? causal$", "", bench_report.title(data).split(", ", 1)[1])
        origins.add(f"{shape}; {data['device']}")
        dates.add(data["date"][:10])
        key = bench_report.direction(data), data["shape"]["d"], not data["shape"]["causal"]
        if key in found:
            raise ValueError(f"{file}: another file has the same pass, d and mask; keep one of the two")
        found[key] = {(row["name"], row["N"]): row for row in data["results"]}
    if len(origins) != 1:
        raise ValueError(f"results/h200/ratios: measured on {' and on '.join(sorted(origins)) or 'nothing'}: "
                         "measure all anew, on one device, with python bench.py --pass fwd,bwd --stages "
                         "vectorized --peers efficient")
    lines = [f"| pass | d | mask | {' | '.join(f'N={N}' for N in LONG)} |",
             "|---|---:|---|" + "---:|" * len(LONG)]
    best: dict[str, float] = {}
    for key in sorted(found, key=lambda key: (list(bench_report.PASSES).index(key[0]), *key[1:])):
        direction, d, full = key
        cells = []
        for N in LONG:
            ours, theirs = (found[key][name, N] for name in ("vectorized", "efficient"))
            fits = ours["status"] == theirs["status"] == "ok"
            cells.append(f"{theirs['median_ms'] / ours['median_ms']:.2f}×" if fits else "-")
            best[direction] = max(best.get(direction, 0), ours["tflops"] or 0)
        lines.append(f"| {bench_report.PASSES[direction]} | {d} | {'full' if full else 'causal'} | "
                     f"{' | '.join(cells)} |")
    most = " and ".join(f"{bench_report.number(tflops)} TFLOP/s {bench_report.PASSES[direction]}"
                        for direction, tflops in best.items())
    origin = (f"{origins.pop()}; {' and '.join(sorted(dates))}. The time of PyTorch's efficient backend "
              "(3xTF32, on tensor cores) over that of vectorized, in the same run: above 1, vectorized is "
              f"faster. Of these, its best are {most}.")
    return "\n".join([*lines, "", origin])


def long() -> str:
    """Every pass at long N on an H200: PyTorch's N x N version beside the fastest stage."""
    header = ("pass", "N", "PyTorch math (ms)", "best stage (ms)", "speed-up", "PyTorch math, peak memory",
              "best stage, peak memory", "x less")
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    origins, dates, number = set(), set(), bench_report.number
    for direction, what in bench_report.PASSES.items():
        data = bench_json("h200", direction)
        origins.add(f"{bench_report.title(data).split(', ', 1)[1]}; {data['device']}")
        dates.add(data["date"][:10])
        for N in LONG:
            rows = [row for row in data["results"] if row["N"] == N]
            math = next(row for row in rows if row["name"] == "math")
            best = min((row for row in rows if row["kind"] == "stage" and row["status"] == "ok"),
                       key=lambda row: row["median_ms"])
            fits = math["status"] == "ok"
            cells = (number(math["median_ms"]) if fits else math["status"],
                     f"{best['label']}: {number(best['median_ms'])}",
                     number(math["median_ms"] / best["median_ms"] if fits else None),
                     *(bench_report.size(row["peak_bytes"]) for row in (math, best)),
                     number(math["peak_bytes"] / best["peak_bytes"] if fits else None))
            lines.append(f"| {what} | {N} | {' | '.join(cells)} |")
    if len(origins) > 1:
        raise ValueError(f"the passes were measured apart, on {' and on '.join(sorted(origins))}: "
                         "measure all anew with python bench.py --pass all")
    return "\n".join([*lines, "", f"{origins.pop()}. Peak memory: with the tensors that go in and come out. "
                      f"Measured on {' and '.join(sorted(dates))} by `python bench.py --pass all`."])


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
    data = bench_json("cpu", "fwd")
    N = bench_report.lengths(data)[-1]
    rows = [row for row in data["results"] if row["N"] == N and row["kind"] == "stage"]
    most = bench_report.traffic(rows[0])
    lines = ["| stage | read | written | distinct bytes | x less than naive |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        sizes = (bench_report.size(row[f"hbm_{what}_bytes"]) for what in ("read", "written", "unique"))
        factor = bench_report.number(most / bench_report.traffic(row))
        lines.append(f"| {row['label']} | {' | '.join(sizes)} | {factor} |")
    slower = [row["inspected_ms"] / row["median_ms"] for row in data["results"] if row["kind"] == "stage"]
    origin = (f"{bench_report.title(data)}, N={N}, counted by `python bench.py` without a GPU. Counting "
              f"takes {min(slower):.0f} to {max(slower):.0f} times as long as the same call in the simulator "
              "without it.")
    return "\n".join([*lines, "", origin])


def counts() -> str:
    """What the simulator counts beside what an H200 did, kernel by kernel."""
    folder = RESULTS / "h200"
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
        cells = [*map(bench_report.size, sizes), *(f"{n:,}" if n else "-" for n in loads)]
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
    for name, make in {"ladder": ladder, "results": results, "backward": backward, "ratios": ratios,
                       "long": long, "finding": finding, "traffic": traffic, "counts": counts}.items():
        part = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.S)
        assert part.search(text), f"README.md has no place for {name}"
        text = part.sub(lambda m, make=make: m[1] + make() + "\n" + m[2], text)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text()))
