"""The parts of docs/ that tell of the simulator and its checker: what they count and find, beside an H200.
readme.py puts them there.
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

import corpus  # noqa: E402
import mutants  # noqa: E402
import sanitized_mutants  # noqa: E402
from counts import differences  # noqa: E402

import flash  # noqa: E402
from flash_ladder.bench import report, timeline  # noqa: E402

RESULTS = ROOT / "results"


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
    data = json.loads((RESULTS / "cpu" / "bench_fwd.json").read_text())
    N = report.lengths(data)[-1]
    rows = [row for row in data["results"] if row["N"] == N and row["kind"] == "stage"]
    most = report.traffic(rows[0])
    lines = ["| stage | read | written | distinct bytes, per kernel | x less than naive |",
             "|---|---:|---:|---:|---:|"]
    for row in rows:
        sizes = (report.size(row[f"hbm_{what}_bytes"]) for what in ("read", "written", "unique"))
        factor = report.number(most / report.traffic(row))
        lines.append(f"| {row['label']} | {' | '.join(sizes)} | {factor} |")
    slower = [row["inspected_ms"] / row["median_ms"] for row in data["results"] if row["kind"] == "stage"]
    seqlens = ",".join(map(str, report.lengths(data)))
    origin = (f"{report.title(data)}, N={N}, counted by `python bench.py --seqlens {seqlens}` without "
              f"a GPU. Counting takes {min(slower):.0f} to {max(slower):.0f} times as long as the same call "
              "in the simulator without it.")
    return "\n".join([*lines, "", origin])


def timelines() -> str:
    """What the model of a multiprocessor makes of the rungs from tma on: `bench.py --timeline`."""
    return _timelines("fwd", "timeline_", "python bench.py --timeline --out results/cpu/timeline")


def backward_timelines() -> str:
    return _timelines("bwd", "timeline_bwd_",
                      "python bench.py --timeline --pass bwd --out results/cpu/timeline")


def _timelines(direction: str, start: str, command: str) -> str:
    folder = RESULTS / "cpu" / "timeline"
    files = [folder / f"{start}{stage.name}.json" for stage in flash.stages(direction)]
    all_data = [json.loads(file.read_text()) for file in files if file.exists()]
    header, *rows = timeline.rows(all_data)
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---", *["---:"] * (len(header) - 1)], *rows)]
    origin = (f"{report.title(all_data[0])}, N={all_data[0]['shape']['N']}, a block alone on its "
              f"multiprocessor, in the simulator: `{command}`. {all_data[0]['note']}")
    return "\n".join([*lines, "", origin])


def counts() -> str:
    """What the simulator counts beside what an H200 did, kernel by kernel."""
    folder = RESULTS / "h200"
    data, backward = (json.loads((folder / f"counts_{direction}.json").read_text())
                      for direction in ("fwd", "bwd"))
    patterns = len(json.loads((folder / "banks.json").read_text())["patterns"])
    header = ("kernel", "HBM reads: simulator", "asked of L1", "asked of L2", "of HBM",
              "shared loads: simulator", "H200")
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * 6]
    for row in data["kernels"]:
        ours, gpu = row["simulator"], row["gpu"]
        if "ldmatrix requests" in gpu:      # in 16 bits
            continue
        sizes = (32 * ours["HBM read sectors"], 32 * gpu["HBM read sectors"],
                 32 * gpu["sectors that L1 read from L2"], gpu["bytes read from HBM"])
        loads = (x["shared read requests"] for x in (ours, gpu))
        cells = [*map(report.size, sizes), *(f"{n:,}" if n else "-" for n in loads)]
        lines.append(f"| {row['stage']}: {row['kernel'].removesuffix('_kernel')} | {' | '.join(cells)} |")
    shape = " ".join(f"{name}={data['shape'][name]}" for name in "BHNd")
    kernels = data["kernels"] + backward["kernels"]
    last = " and ".join(dict.fromkeys(part["kernels"][-1]["stage"] for part in (data, backward)))
    different = [set(differences(row)) for row in kernels]
    reads = sum("shared read requests" in what for what in different)
    assert not any(re.match("HBM (read|write)", name) for what in different for name in what), (
        "the simulator's requests or sectors of HBM differ from the GPU's")
    origin = (f"{shape} fp32 not causal; {data['device']}, {data['date']}, by NVIDIA's profiler "
              "(`results/counts.py`). Requests and sectors of HBM, read and written, are the same in both "
              f"for each of the {len(kernels)} kernels of the stages up to {last}, forward and backward, "
              f"in fp32 or else bf16. Of {sum(not what for what in different)} kernels all counts are the "
              f"same, wavefronts, ldmatrix and cp.async included; in {reads} nvcc has fewer or other loads "
              "from shared memory than the source, and "
              f"{sum('HBM atomic requests' in what for what in different)} add four numbers of dQ by one "
              "atomic. Wavefronts follow a model of the 32 banks that agrees with this "
              f"GPU for all {patterns} patterns of indices that were tried, as loads and stores of 4, 8 and "
              "16 bytes.")
    return "\n".join([*lines, "", origin])


def conflicts() -> str:
    """Wavefronts of shared memory in mma and in swizzle, which differ in the swizzle alone: the simulator's,
    and on an H200 those of ldmatrix, and the time for which shared memory is busy."""
    data = json.loads((RESULTS / "h200" / "ncu_fwd.json").read_text())
    counted = json.loads((RESULTS / "h200" / "counts_fwd.json").read_text())
    found = {row["stage"]: [row[who]["ldmatrix wavefronts"] for who in ("simulator", "gpu")]
             for row in counted["kernels"] if row["stage"] in ("mma", "swizzle")}
    assert all(ours == gpu for ours, gpu in found.values()), "ldmatrix's wavefronts differ from the GPU's"
    B, H, N, d = (data["shape"][name] for name in "BHNd")
    q, k, v = torch.randn(3, 1, 1, N, d, dtype=torch.bfloat16)
    rows = {}
    for stage in ("mma", "swizzle"):
        with flash.inspect() as report:
            flash.attention(q, k, v, causal=data["shape"]["causal"], stage=stage)
        shared = [a for a in report.accesses if a.memory == "shared"]
        loads = [a for a in shared if "ldmatrix" in a.place.text]
        kernel = next(kernel for kernel in data["kernels"] if kernel["stage"] == stage)
        what = {metric["what"]: metric["value"] for metric in kernel.values() if isinstance(metric, dict)}
        rows[stage] = (sum(a.units for a in loads) / sum(a.requests for a in loads),
                       B * H * sum(a.units for a in shared), what["of that, for shared memory"],
                       what["time"] / 1e6)
    header = ("stage", "wavefronts for an ldmatrix of four: simulator", "all of shared memory's: simulator",
              "shared memory busy: H200", "of so many ms")
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * 4]
    lines += [f"| {stage} | {each:.0f} | {total:,} | {busy:.0f} % | {ms:.3f} |"
              for stage, (each, total, busy, ms) in rows.items()]
    simulated, measured = (mma / swizzle for mma, swizzle in zip(
        *((total, busy * ms) for _, total, busy, ms in rows.values())))
    shape, small = (" ".join(f"{name}={x['shape'][name]}" for name in "BHNd") for x in (data, counted))
    origin = (f"{shape} bf16 causal; {data['device']}, {data['date']}, by NVIDIA's profiler "
              f"(`results/ncu.py`). In mma, shared memory has {simulated:.2f} times as many wavefronts as in "
              f"swizzle by the simulator, and is busy {measured:.2f} times as long on the GPU (as a share of "
              "the time in which a multiprocessor has work). The profiler's own count of ldmatrix's "
              f"wavefronts, in a smaller call ({small}, not causal; `results/counts.py`), is the "
              f"simulator's: {' and '.join(f'{gpu:,} in {stage}' for stage, (_, gpu) in found.items())}.")
    return "\n".join([*lines, "", origin])


def planted_bugs() -> str:
    """What the checker finds in the corpus of planted bugs, beside compute-sanitizer where that has run."""
    gpu = RESULTS / "h200" / "corpus.json"
    return corpus.table(json.loads((RESULTS / "cpu" / "corpus.json").read_text()),
                        json.loads(gpu.read_text()) if gpu.is_file() else None)


def stage_mutants() -> str:
    """How many mutants of the stages are found."""
    return mutants.table(json.loads((RESULTS / "cpu" / "mutants.json").read_text()))


def sampled_mutants() -> str:
    """A sample of them beside compute-sanitizer; empty before that has run."""
    gpu = RESULTS / "h200" / "mutants.json"
    return sanitized_mutants.table(json.loads((RESULTS / "cpu" / "mutants.json").read_text()),
                                   json.loads(gpu.read_text())) if gpu.is_file() else ""
