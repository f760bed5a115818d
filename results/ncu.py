"""Hardware counters of every forward stage, by NVIDIA's profiler: what each kernel waits for.

    python results/ncu.py results/h200        # writes ncu_fwd.json there; ncu must be on the PATH

The lines "Bound by" in the stages' headers are read off it.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPE = {"B": 4, "H": 12, "N": 1024, "d": 64, "causal": True, "dtype": "fp32"}
ONE_CALL = """
import sys, torch, flash
B, H, N, d = map(int, sys.argv[2:])
q, k, v = torch.randn(3, B, H, N, d, device="cuda")
flash.attention(q, k, v, causal=True, stage=sys.argv[1])
torch.cuda.synchronize()
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
    "smsp__issue_active" + OF_PEAK: "issue slots used",
    "sm__warps_active" + OF_PEAK: "warps, of the most possible",
    "launch__registers_per_thread": "registers per thread",
}
WAITING = {"long_scoreboard": "L1, L2 or HBM", "short_scoreboard": "shared memory", "barrier": "a barrier",
           "lg_throttle": "a place in the queue to L1"}
METRICS |= {f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio": f"warps waiting for {what}"
            for reason, what in WAITING.items()}


def profile(stage: str) -> list[dict]:
    """The metrics of each kernel of a stage, in one call."""
    size = [str(SHAPE[x]) for x in "BHNd"]
    kernels = "regex:^(" + "|".join(("scores", "softmax", "output", stage)) + ")_kernel"
    done = subprocess.run(
        ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "-k", kernels,
         "--metrics", ",".join(METRICS), sys.executable, "-c", ONE_CALL, stage, *size],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    header, units, *rows = csv.reader(line for line in done.stdout.splitlines() if line.startswith('"'))
    return [{"stage": stage, "kernel": row[header.index("Kernel Name")].split("(")[0]} | {
        metric: {"what": what, "value": float(row[header.index(metric)].replace(",", "")),
                 "unit": units[header.index(metric)]} for metric, what in METRICS.items()} for row in rows]


def main() -> None:
    import torch

    import flash

    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python results/ncu.py FOLDER")
    if not torch.cuda.is_available() or not shutil.which("ncu"):
        sys.exit("needs a GPU, and NVIDIA's Nsight Compute: ncu on the PATH")
    result = {"device": flash.describe_device(torch.device("cuda")), "date": str(date.today()),
              "shape": SHAPE,
              "kernels": [kernel for stage in flash.stages() for kernel in profile(stage.name)]}
    Path(sys.argv[1], "ncu_fwd.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
