"""Hardware counters of every stage, by NVIDIA's profiler: what each kernel waits for.

    python results/ncu.py results/h200               # writes ncu_fwd.json there; ncu must be on the PATH
    python results/ncu.py results/h200 --pass bwd    # ncu_bwd.json: the backward stages

A stage is profiled in fp32, or, where it does not take that, in bf16. The lines "Bound by" in the stages'
headers are read off it.
"""

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPE = {"B": 4, "H": 12, "N": 1024, "d": 64, "causal": True}
MARK = "spin_kernel"         # torch.cuda._sleep()'s: it stands before the kernels of each stage
ONE_CALL_EACH = """
import json, sys, torch, flash
for name, direction, dtype, causal, *size in json.loads(sys.argv[1]):
    q, k, v, dO = torch.randn(4, *size, device="cuda", dtype=flash.DTYPES[dtype])
    if direction == "bwd":
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        o = flash.attention(q, k, v, causal=causal, backward=name, deterministic=False)
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    if direction == "bwd":
        torch.autograd.grad(o, (q, k, v), dO)
    else:
        flash.attention(q, k, v, causal=causal, stage=name)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
"""
OF_PEAK = ".avg.pct_of_peak_sustained_active"
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes.sum": "HBM traffic",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "HBM bandwidth used",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 busy",
    "l1tex__data_pipe_lsu_wavefronts" + OF_PEAK: "data pipe of L1 and shared memory busy",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared" + OF_PEAK: "of that, for shared memory",
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio": "sectors per global load",
    "sm__inst_executed_pipe_fma" + OF_PEAK: "FMA pipe busy",
    "sm__pipe_tensor_op_hmma_cycles_active" + OF_PEAK: "tensor cores busy",    # up to 4 % without any use
    "smsp__issue_active" + OF_PEAK: "issue slots used",
    "sm__warps_active" + OF_PEAK: "warps, of the most possible",
    "launch__registers_per_thread": "registers per thread",
    "launch__shared_mem_per_block_dynamic": "dynamic shared memory per block",
}
WAITING = {"long_scoreboard": "L1, L2 or HBM", "short_scoreboard": "shared memory", "barrier": "a barrier",
           "lg_throttle": "a place in the queue to L1", "wait": "a fixed latency",
           "math_pipe_throttle": "the tensor cores or another busy unit"}
METRICS |= {f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio": f"warps waiting for {what}"
            for reason, what in WAITING.items()}


def kernels(files: Iterable[Path]) -> list[str]:
    """The names of the __global__ functions in CUDA sources."""
    bounds = r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)"
    pattern = rf"__global__\s+(?:void\s+|{bounds}\s+)+(\w+)\s*\("
    return list(dict.fromkeys(name for file in files for name in re.findall(pattern, file.read_text())))


def launches(pattern: str, metrics: Collection[str], *command: str) -> Iterator[tuple[str, dict]]:
    """Of each launch of the kernels that match a regular expression: its kernel, and the metrics as (value,
    unit), in base units. command: Python code that calls profiler.start(), and its arguments."""
    done = subprocess.run(
        ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base",
         "--profile-from-start", "off", "-k", f"regex:{pattern}", "--metrics", ",".join(metrics),
         sys.executable, "-c", *command],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        sys.exit(f"ncu measured nothing of {pattern}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    header, *table = csv.reader(lines)
    units, *rows = (dict(zip(header, row)) for row in table)
    for row in rows:
        name = re.search(r"\w+(?=[<(])", row["Kernel Name"])       # a(anonymous)::name<int>(const P&)
        yield name[0], {metric: (float(row[metric].replace(",", "")), units[metric]) for metric in metrics}


def by_call(pattern: str, metrics: Collection[str], *command: str) -> list[list[tuple[str, dict]]]:
    """The same for each call, before which the command has launched MARK."""
    found: list[list[tuple[str, dict]]] = []
    for kernel, measured in launches(f"{pattern}|^{MARK}$", metrics, *command):
        if kernel == MARK:
            found.append([])
        else:
            found[-1].append((kernel, measured))
    return found


def own_type(stage) -> str:
    """In which a flash.Stage is profiled."""
    import torch

    return "fp32" if torch.float32 in stage.dtypes else "bf16"


def calls(stages: Iterable, pattern: str, metrics: Collection[str], shape: dict) -> Iterator[tuple]:
    """Each flash.Stage, with what `launches` gives of the kernels that match, in one call of that shape."""
    stages = list(stages)
    what = [(stage.name, stage.direction, own_type(stage), shape["causal"], *(shape[x] for x in "BHNd"))
            for stage in stages]
    return zip(stages, by_call(pattern, metrics, ONE_CALL_EACH, json.dumps(what)), strict=True)


def profile(stages: Iterable) -> list[dict]:
    """The metrics of each kernel of flash.Stages, in one call each."""
    from flash_ladder.sources import source_files

    stages = list(stages)
    names = dict.fromkeys(name for stage in stages for name in kernels(source_files(stage.path)))
    return [{"stage": stage.name, "dtype": own_type(stage), "kernel": kernel} | {
        metric: {"what": METRICS[metric], "value": value, "unit": unit}
        for metric, (value, unit) in measured.items()}
        for stage, found in calls(stages, f"^({'|'.join(names)})$", METRICS, SHAPE)
        for kernel, measured in found]


def main() -> None:
    import torch

    import flash

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pass", dest="direction", choices=["fwd", "bwd"], default="fwd")
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available() or not shutil.which("ncu"):
        sys.exit("needs a GPU, and NVIDIA's Nsight Compute: ncu on the PATH")
    result = {"device": flash.describe_device(torch.device("cuda")), "date": str(date.today()),
              "shape": SHAPE,
              "kernels": profile(flash.stages(args.direction))}
    (args.folder / f"ncu_{args.direction}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
