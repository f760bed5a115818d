"""Hardware counters of Hopper's ends of branches, beside FlashAttention-3: what bounds them.

    python results/ncu_hopper.py results/h200 --fa3 fa3_C.so --cudart libcudart.so.12
                                             # writes ncu_hopper.json there; ncu must be on the PATH

The large shapes of hopper.py with N=4096 in bf16, one call of each contender, cold; its longest kernel. (Of a
GPU that is hot, hopper.json has the clock.)
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ncu  # noqa: E402

METRICS = {
    "gpu__time_duration.sum": "time",
    "sm__cycles_elapsed.avg.per_second": "clock",
    "sm__pipe_tensor_cycles_active" + ncu.OF_PEAK: "tensor cores",
    "sm__inst_executed_pipe_xu" + ncu.OF_PEAK: "exponentials",
    "smsp__issue_active" + ncu.OF_PEAK: "issue slots",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared" + ncu.OF_PEAK: "shared memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "HBM"}
BUSY = [name for name, what in METRICS.items() if what not in ("time", "clock")]
N, FA3 = 4096, "fa3"
KERNELS = "forward_kernel|backward_kernel|device_kernel"       # the last one: FlashAttention-3's
ONE_CALL_EACH = """
import json, sys, torch, hopper
from pathlib import Path
from decode import load_fa3
shapes, fa3, cudart = json.loads(sys.argv[1])
fa3 = load_fa3(Path(fa3), Path(cudart)) if fa3 else None
hopper.BACKENDS.clear()      # no other library
for shape, stage in shapes:
    shape = hopper.Shape(**shape)
    calls, _ = hopper.contenders(shape, hopper.of_stages(shape.direction, [stage]), fa3, "cuda")
    for name in [stage, *["fa3"] * bool(fa3)]:
        calls[name](0)
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        calls[name](1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    del calls
"""


def profile(chosen: dict, fa3: Path | None, cudart: Path | None) -> list[dict]:
    """A row for each contender of each hopper.Shape; chosen: the shapes' stages."""
    what = [(dataclasses.asdict(shape), stage) for shape, stage in chosen.items()]
    names = [(shape, name) for shape, stage in chosen.items() for name in [stage, *[FA3] * bool(fa3)]]
    paths = [str(path.absolute()) if path else "" for path in (fa3, cudart)]
    found = ncu.by_call(KERNELS, METRICS, ONE_CALL_EACH, json.dumps([what, *paths]))
    rows = []
    for (shape, name), kernels in zip(names, found, strict=True):
        kernel, measured = max(kernels, key=lambda each: each[1]["gpu__time_duration.sum"][0])
        rows.append(dataclasses.asdict(shape) | {"name": name, "kernel": kernel}
                    | {metric: value for metric, (value, _) in measured.items()})
    return rows


def table(data: dict) -> str:
    """Of ncu_hopper.json, for docs/: how busy is what, of the stage and of FlashAttention-3."""
    import hopper

    lines = [f"| shape | stage | {' | '.join(METRICS[name] for name in BUSY)} | us | MHz |",
             "|---|---|" + "---|" * len(BUSY) + "---:|---:|"]
    for shape, rows in hopper.by_shape(data["rows"]).items():
        by_name = {row["name"]: row for row in rows}
        ours = next(row for name, row in by_name.items() if name != FA3)
        cells = [" / ".join(f"{row[name]:.0f}" for row in (ours, by_name.get(FA3)) if row) for name in BUSY]
        ns, hz = ours["gpu__time_duration.sum"], ours["sm__cycles_elapsed.avg.per_second"]
        lines.append(f"| {shape} | {ours['name']} | {' | '.join(cells)} | {ns / 1e3:.0f} | {hz / 1e6:.0f} |")
    return "\n".join([*lines, "", "Percent of what is possible; stage / FlashAttention-3. The main kernel "
                      "of one call, cold. Exponentials: the unit that makes them. "
                      f"{data['device']}, {data['date']}, by `python results/ncu_hopper.py`."])


def main(argv: list[str] | None = None) -> None:
    import hopper
    import torch

    import flash
    from flash_ladder import ahead

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fa3", type=Path, help="a library with torch.ops.flash_attn_3")
    parser.add_argument("--cudart", type=Path, help="the CUDA runtime that it needs, loaded first")
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available() or not shutil.which("ncu"):
        sys.exit("needs a GPU, and NVIDIA's Nsight Compute: ncu on the PATH")
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = {shape: hopper.taken(shape, device)
              for shape in hopper.shapes(["large"], ["fwd", "bwd"], ["bf16"], [64, 128, 256]) if shape.N == N}
    ahead.build_all({str(job): job for shape, stage in chosen.items()
                     for job in hopper.jobs(shape, hopper.of_stages(shape.direction, [stage]))}.values())
    result = {"device": flash.describe_device(device), "date": time.strftime("%Y-%m-%d"),
              "rows": profile(chosen, args.fa3, args.cudart)}
    (args.folder / "ncu_hopper.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
