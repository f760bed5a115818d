"""The simulator's counts beside a GPU's own, by NVIDIA's profiler: how far they can be trusted.

    python results/counts.py results/h200     # writes counts_fwd.json, counts_bwd.json, banks.json; needs ncu
    python results/counts.py --simulate FILE  # the simulator's part, on any machine
    python results/counts.py results/h200 --simulated FILE               # the rest

counts_fwd.json: requests, sectors and wavefronts of every kernel of the forward stages, in fp32 or else bf16,
and the traffic that really reached HBM. counts_bwd.json: the same of the backward stages, and their atomics.
banks.json: wavefronts of single accesses to shared memory, for many patterns of indices; the simulator's
model of the banks is tested against it. (These by l1tex's counters. The profiler's count by instructions,
which the other files have, differs for loads in 7 of 55 patterns, with few lanes or few places; why is not
known.)
"""

import argparse
import concurrent.futures
import ctypes
import functools
import json
import multiprocessing
import random
import re
import shutil
import sys
from collections import Counter
from datetime import date
from pathlib import Path

from ncu import calls, launches, own_type

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPE = {"B": 1, "H": 2, "N": 512, "d": 64, "causal": False}
METRICS = {
    "smsp__sass_inst_executed_op_global_ld.sum": "HBM read requests",
    "smsp__sass_inst_executed_op_global_st.sum": "HBM write requests",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "HBM read sectors",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "HBM write sectors",
    "smsp__sass_inst_executed_op_shared_ld.sum": "shared read requests",
    "smsp__sass_inst_executed_op_shared_st.sum": "shared write requests",
    # As the profiler assigns them to instructions. (Without "sass" the reads include ldmatrix's, and those of
    # cp_async's stores are counted about twice: 4440, where the instructions take 2176.)
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": "shared read wavefronts",
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum": "shared write wavefronts",
    "lts__t_sectors_srcunit_tex_op_read.sum": "sectors that L1 read from L2",
    "dram__bytes_read.sum": "bytes read from HBM",
    "dram__bytes_write.sum": "bytes written to HBM",
}
ATOMICS = {  # whose old value is not used
    "smsp__inst_executed_op_global_red.sum": "HBM atomic requests",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum": "HBM atomic sectors",
}
MATRIX = {  # of the stages in 16 bits: ldmatrix, LDSM in SASS, and cp.async, LDGSTS
    "smsp__sass_inst_executed_op_ldsm.sum": "ldmatrix requests",
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum": "ldmatrix wavefronts",
    "smsp__sass_inst_executed_op_ldgsts.sum": "cp.async requests",
    "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_bypass.sum": "cp.async sectors",
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum": "cp.async wavefronts",
}
MATRIX_LOADS = "ldmatrix|load_matrix_sync"    # in the source; wmma's, of 16 bits, are made of ldmatrix
ALL_PATTERNS = """
import sys, torch
sys.path.insert(0, "results")
import counts
torch.cuda.profiler.start()
counts.run_patterns()
"""


# ------------------------------------------------------------------------------------------ the stages
def simulated(report, kernel: str) -> dict:
    """The simulator's counts of a kernel, by the names in METRICS; by those in ATOMICS and MATRIX, if it has
    any of these. (Its "shared read" leaves ldmatrix out.)"""
    counts = Counter(dict.fromkeys(list(METRICS.values())[:8], 0))
    copies = {a.place for a in report.accesses if a.kind == "copy"}
    for a in report.accesses:
        if a.kernel != kernel:
            continue
        what, units = f"{a.memory} {a.kind}", "sectors" if a.memory == "HBM" else "wavefronts"
        if a.place in copies:        # cp.async, which reads HBM and writes to shared memory: one request
            what = "cp.async"
        elif a.memory == "shared" and a.access_bytes == 16 and re.search(MATRIX_LOADS, a.place.text):
            what = "ldmatrix"
        counts[f"{what} {units}"] += a.units
        if (what, a.memory) != ("cp.async", "HBM"):
            counts[f"{what} requests"] += a.requests
    return dict(counts)


def simulate(stage) -> dict[str, dict]:
    """The simulator's counts of a flash.Stage, by kernel. (Some take minutes: so in a process of its own.)"""
    import torch

    import flash

    q, k, v, dO = torch.randn(4, *(SHAPE[x] for x in "BHNd"), dtype=flash.DTYPES[own_type(stage)])
    if stage.direction == "fwd":
        call = functools.partial(flash.attention, q, k, v, stage=stage)
    else:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        o = flash.attention(q, k, v, backward=stage, deterministic=False)
        call = functools.partial(torch.autograd.grad, o, (q, k, v), dO)
    with flash.inspect() as report:
        call()
    return {kernel.name: simulated(report, kernel.name) for kernel in report.kernels}


def simulate_all() -> dict[str, dict]:
    """The simulator's counts of every stage, by its file's name."""
    import flash

    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        counts = {stage.path.stem: pool.submit(simulate, stage) for stage in flash.stages()}
        return {name: future.result() for name, future in counts.items()}


def compare(direction: str, simulated: dict[str, dict]) -> list[dict]:
    """Of each kernel of the stages: its counts in the simulator, which are given, and on the GPU."""
    import flash

    metrics = METRICS | MATRIX | (ATOMICS if direction == "bwd" else {})
    stages = flash.stages(direction)
    names = dict.fromkeys(kernel for stage in stages for kernel in simulated[stage.path.stem])
    rows = []
    for stage, found in calls(stages, f"^({'|'.join(names)})$", metrics, SHAPE):
        gpu: dict[str, Counter] = {}
        for kernel, row in found:
            counts = {what: int(row[metric][0]) for metric, what in metrics.items()
                      if own_type(stage) != "fp32" or metric not in MATRIX}
            gpu.setdefault(kernel, Counter()).update(counts)      # of all its launches, as in the simulator
        rows += [{"stage": stage.name, "dtype": own_type(stage), "kernel": kernel,
                  "simulator": simulated[stage.path.stem][kernel], "gpu": counts}
                 for kernel, counts in gpu.items()]
    return rows


def differences(row: dict) -> dict[str, tuple[int, int]]:
    """What the simulator and the GPU have counted otherwise in a kernel, a row of counts_*.json: (simulator,
    GPU) by name. The GPU's HBM read sectors include those of cp.async."""
    ours, gpu = dict(row["simulator"]), row["gpu"]
    ours["HBM read sectors"] += ours.get("cp.async sectors", 0)
    return {what: (count, gpu[what]) for what, count in ours.items() if count != gpu[what]}


# ------------------------------------------------------------------------------------------ patterns
def patterns() -> dict[str, list[int]]:
    """Indices by lane, -1 for a lane that does nothing, of vectors of 4, 8 or 16 bytes."""
    found = {f"{i} i": [i * lane for lane in range(32)] for i in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33)}
    found |= {f"i / {i}": [lane // i for lane in range(32)] for i in (2, 4, 8, 16)}
    found |= {f"i % {i}": [lane % i for lane in range(32)] for i in (2, 4, 8, 16)}
    found |= {f"i / {i} * 32": [lane // i * 32 for lane in range(32)] for i in (2, 4, 8, 16)}
    found |= {f"i % {i} * 32": [lane % i * 32 for lane in range(32)] for i in (2, 4, 8, 16)}
    found |= {f"i % {i} * 9": [lane % i * 9 for lane in range(32)] for i in (4, 8, 16)}
    found |= {f"i if i < {i}": [lane if lane < i else -1 for lane in range(32)] for i in (1, 4, 8, 16)}
    found |= {f"i if i % {i} == 0": [-1 if lane % i else lane for lane in range(32)] for i in (2, 4, 8)}
    found |= {f"5 if i % {i} == 0": [-1 if lane % i else 5 for lane in range(32)] for i in (2, 8)}
    mixed = {"i / 2 if i % 2 == 0": lambda i: -1 if i % 2 else i // 2,
             "i / 4 if i % 4 == 0": lambda i: -1 if i % 4 else i // 4,
             "5 if i < 16 else i": lambda i: 5 if i < 16 else i,
             "i if i < 16 else 5": lambda i: i if i < 16 else 5,
             "i / 2 if i < 8 else 4 + i % 2": lambda i: i // 2 if i < 8 else 4 + i % 2,
             "i / 2 if i < 16 else 8 + i % 2": lambda i: i // 2 if i < 16 else 8 + i % 2,
             "i / 2 * 9": lambda i: i // 2 * 9}
    found |= {name: [index(lane) for lane in range(32)] for name, index in mixed.items()}
    for seed, most in enumerate((8, 16, 32, 32, 64, 64, 256, 1024)):
        generator = random.Random(seed)
        found[f"random below {most}, seed {seed}"] = [generator.randrange(most) for _ in range(32)]
    return found


def run_patterns() -> None:
    """Launch banks_kernel on the GPU for each pattern and vector."""
    import torch

    import flash

    source = ROOT / "tests" / "kernels" / "banks.cu"
    library = ctypes.CDLL(str(flash.build(source, torch.device("cuda"))))
    library.run_banks.restype = ctypes.c_char_p
    for indices in patterns().values():
        for size in (4, 8, 16):
            index = torch.tensor(indices, dtype=torch.int32, device="cuda")
            out = torch.zeros(32 * size // 4, device="cuda")
            error = library.run_banks(size, *(ctypes.c_void_p(x.data_ptr()) for x in (index, out)))
            assert error is None, error
    torch.cuda.synchronize()


def measure_patterns() -> dict[str, dict[str, list[int]]]:
    """By pattern and bytes a lane: the wavefronts of the store and of the load."""
    metrics = {kind: f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{op}.sum"
               for kind, op in (("write", "st"), ("read", "ld"))}
    rows = launches("banks_kernel", metrics.values(), ALL_PATTERNS)
    found: dict[str, dict[str, list[int]]] = {}
    for name in patterns():
        found[name] = {}
        for size in (4, 8, 16):
            _, row = next(rows)
            found[name][str(size)] = [int(row[metrics[kind]][0]) for kind in ("write", "read")]
    return found


def to_json(result: dict) -> str:
    """With a line for each pattern or kernel."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\n {3,}\s*|\n {2}(?=[\]}])", " ", text) + "\n"


def main() -> None:
    import torch

    import flash

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--simulate", type=Path, metavar="FILE", help="write the simulator's counts, no more")
    parser.add_argument("--simulated", type=Path, metavar="FILE", help="take them from there")
    args = parser.parse_args()
    if args.simulate:
        args.simulate.write_text(json.dumps(simulate_all(), indent=1) + "\n")
        return
    if not args.folder or not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available() or not shutil.which("ncu"):
        sys.exit("needs a GPU, and NVIDIA's Nsight Compute: ncu on the PATH")
    simulated = json.loads(args.simulated.read_text()) if args.simulated else simulate_all()
    origin = {"device": flash.describe_device(torch.device("cuda")), "date": str(date.today())}
    files = {"banks.json": {"patterns": measure_patterns()}}
    for direction in ("fwd", "bwd"):
        files[f"counts_{direction}.json"] = {"shape": SHAPE, "kernels": compare(direction, simulated)}
    for name, result in files.items():
        (args.folder / name).write_text(to_json(origin | result))


if __name__ == "__main__":
    main()
