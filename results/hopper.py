"""Hopper's ends of branches beside the best libraries: cuDNN, FlashAttention-2, -3 and, by a ratio, -4.

    python results/hopper.py results/h200 --fa3 fa3_C.so --cudart libcudart.so.12  # writes hopper.json there
    python results/hopper.py results/h200 --cases gqa,window --dtypes bf16         # the others' rows are kept
    python results/hopper.py results/h200 --stages a.cuh,hopper_tuned:Br=192:Bc=80 # variants; writes nothing

All of a shape by turns, many calls at a time in a queue that is held back, so that no host time counts; the
median of the turns. The GPU's clock and power are read while it works. A result is compared with cuDNN's.
(FlashAttention-3: any library with torch.ops.flash_attn_3. Its causal mask and window are aligned as ours.
FlashAttention-4 does not run here: fa4.json, beside hopper.json, has its speed beside FlashAttention-3's.)
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ratios  # noqa: E402
from decode import load_fa3  # noqa: E402

import flash  # noqa: E402
from flash_ladder import ahead  # noqa: E402
from flash_ladder.bench import competitors, decode  # noqa: E402
from flash_ladder.stage import MANY  # noqa: E402

ROWS = 16384                                      # B N, of the large shapes
GQA_N = (2048, 16384)
SMALL = ((4, 512), (1, 1024), (8, 1024))          # (B, N)
WINDOW = 1024                                     # keys that a query sees
DTYPES = ("bf16", "fp16")
CASES = ("large", "small", "gqa", "window")
IN_WORDS = {"large": "large", "small": "small", "gqa": "grouped heads", "window": "a window"}
LABELS = {"fa2": "FlashAttention-2", "cudnn": "cuDNN", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}
BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Calls = dict[str, Callable[[int], object]]        # by name; called with the number of the call


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a pass. window: keys that a query sees, up to its own; 0: as causal says."""

    case: str
    direction: str
    dtype: str
    d: int
    B: int
    H: int
    H_kv: int
    N: int
    causal: bool
    window: int = 0

    @property
    def flops(self) -> float:
        """4 B H N^2 d forward, 2.5 times that backward; of the pairs that count."""
        pairs = self.N * self.N / (2 if self.causal else 1)
        if self.window:
            pairs = self.N * self.window - self.window * (self.window - 1) / 2
        return 4 * self.B * self.H * self.d * pairs * {"fwd": 1, "bwd": 2.5}[self.direction]

    def __str__(self) -> str:
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        heads = str(self.H) if self.H == self.H_kv else f"{self.H}:{self.H_kv}"
        return f"{self.direction} {self.dtype} d={self.d} {mask} B={self.B} H={heads} N={self.N}"


def shapes(cases: list[str], directions: list[str], dtypes: list[str], dims: list[int]) -> Iterator[Shape]:
    """H d = 2048, as in a model; B N = 16384 in the large ones."""
    for case, direction, dtype, d in itertools.product(cases, directions, dtypes, dims):
        H = ratios.HEADS[d]
        if case == "gqa":
            for N, H_kv in itertools.product(GQA_N, (H // 4, 1)):
                yield Shape(case, direction, dtype, d, ROWS // N, H, H_kv, N, True)
        elif case == "window":
            yield Shape(case, direction, dtype, d, 1, H, H, ROWS, False, WINDOW)
        else:
            sizes = SMALL if case == "small" else [(B, N) for N, B in ratios.LENGTHS.items()]
            for (B, N), causal in itertools.product(sizes, (False, True)):
                yield Shape(case, direction, dtype, d, B, H, H, N, causal)


# ------------------------------------------------------------------------------------------ contenders
def of_stages(direction: str, asked: list[str]) -> dict[str, tuple[flash.Stage, dict[str, int]]]:
    """Those that are asked for, each a name or a file, with tiles: hopper_tuned:Br=192:Bc=80."""
    found = {}
    for text in asked:
        name, *sizes = text.split(":")
        path = Path(name) if name.endswith(".cuh") else None
        stage = flash.read_stage(path, direction) if path else next(
            (s for s in flash.stages(direction) if s.name == name), None)
        if not stage:
            sys.exit(f"--stages: no stage {name!r} in the pass {direction}; python flash.py lists them")
        found[text] = stage, {size: int(n) for size, n in (part.split("=") for part in sizes)}
    return found


def taken(shape: Shape, device: torch.device) -> str:
    """The stage that a call takes."""
    sizes = {"B": shape.B, "H": shape.H, "H_kv": shape.H_kv, "N_q": shape.N, "N_k": shape.N, "d": shape.d,
             "gradients": 0, "masked": int(shape.causal or shape.window > 0),
             "causal": int(shape.causal and not shape.window), "window": shape.window or MANY}
    return flash.find_stage(None, flash.DTYPES[shape.dtype], device, shape.direction, d=shape.d,
                            sizes=sizes).name


def masked(shape: Shape) -> dict:
    """The mask, as attention() takes it."""
    return {"mask": flash.masks.window(shape.window - 1, 0)} if shape.window else {"causal": shape.causal}


def contenders(shape: Shape, stages: dict, fa3, device: str = "cuda") -> tuple[Calls, Calls]:
    """What is timed; and, of the same names, what gives the tensors that are compared."""
    q, k, v, dO = (torch.randn(shape.B, heads, shape.N, shape.d, device=device,
                               dtype=flash.DTYPES[shape.dtype], requires_grad=grad)
                   for heads, grad in ((shape.H, True), (shape.H_kv, True), (shape.H_kv, True),
                                       (shape.H, False)))
    forward: dict[str, Callable] = {}
    for name, (stage, tiles) in stages.items():
        if shape.direction == "fwd":
            options = {"stage": stage, **tiles}
        else:
            options = {"backward": stage, **{f"{size}_bwd": n for size, n in tiles.items()}}
        forward[name] = lambda *x, options=options: flash.attention(*x, **masked(shape), **options)
    if not shape.window:
        forward |= {name: lambda *x, backend=backend: competitors.sdpa(backend, shape.causal, *x)[0]
                    for name, backend in BACKENDS.items()}
    if shape.direction == "fwd":
        x = [y.detach() for y in (q, k, v)]
        calls: Calls = {name: lambda n, f=f: f(*x) for name, f in forward.items()}
    else:
        calls = {}
        for name, f in forward.items():
            o = f(q, k, v)
            calls[name] = lambda n, o=o: torch.autograd.grad(o, (q, k, v), dO, retain_graph=True)
    results = dict(calls)
    if fa3:
        calls["fa3"], results["fa3"] = of_fa3(shape, fa3, q, k, v, dO)
    return calls, results


def of_fa3(shape: Shape, fa3, q, k, v, dO) -> tuple[Callable, Callable]:
    """The same of FlashAttention-3, whose tensors are (B, N, H, d)."""
    rows = [x.detach().transpose(1, 2).contiguous() for x in (q, k, v, dO)]
    mask = {"is_causal": shape.causal}
    if shape.window:
        mask |= {"window_size_left": shape.window - 1, "window_size_right": 0}

    def forward(n: int):
        return fa3.fwd(*rows[:3], **mask, num_splits=1)

    if shape.direction == "fwd":
        return forward, lambda n: forward(n)[0].transpose(1, 2)
    o, L, *_ = forward(0)
    gradients = [torch.empty_like(x) for x in rows[:3]]

    def backward(n: int):
        fa3.bwd(rows[3], *rows[:3], o, L, *gradients, **mask)
        return [x.transpose(1, 2) for x in gradients]

    return backward, backward


def difference(found, expected) -> float:
    """Of all tensors together: the norm of the difference over that of what is expected."""
    found, expected = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (found, expected))
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
            ).sqrt().item()


# ------------------------------------------------------------------------------------------ measuring
def clock_and_power(call: Callable[[int], object]) -> dict:
    """MHz of the multiprocessors and watts, while this call is repeated."""
    until = time.perf_counter() + 0.3
    while time.perf_counter() < until:
        for n in range(20):
            call(n)
        torch.cuda.current_stream().synchronize()
    for n in range(200):
        call(n)
    read = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True)
    torch.cuda.synchronize()
    if read.returncode:
        return {"mhz": None, "watts": None}
    mhz, watts = read.stdout.splitlines()[0].split(",")
    return {"mhz": int(mhz), "watts": round(float(watts))}


def measured(shape: Shape, stages: dict, fa3, device: str = "cuda") -> list[dict]:
    """A row for each contender. One that refuses the shape has its words instead of a time."""
    calls, results = contenders(shape, stages, fa3, device)
    refused, expected = {}, None
    for name in ("cudnn", "fa2", "fa3", *calls):              # who is compared with: the first that runs
        if expected is None and name in calls:
            try:
                expected = results[name](0)
            except RuntimeError as error:
                refused[name] = str(error).splitlines()[0]
    differences = {}
    for name in [name for name in calls if name not in refused]:
        try:
            differences[name] = difference(results[name](0), expected)
        except (RuntimeError, ValueError) as error:
            refused[name] = str(error).splitlines()[0]
    times = decode.by_turns({name: calls[name] for name in differences}, device)
    state = clock_and_power(calls[next(iter(stages))]) if device == "cuda" else {"mhz": None, "watts": None}
    return [dataclasses.asdict(shape) | {
        "name": name, "ms": times.get(name), "message": refused.get(name, ""),
        "tflops": shape.flops / times[name] / 1e9 if name in times else None,
        "difference": differences.get(name)} | state for name in calls]


def ratio(rows: list[dict], name: str) -> float | None:
    """Of a shape's rows: the best library's time over this contender's."""
    times = {row["name"]: row["ms"] for row in rows if row["ms"]}
    best = min((ms for other, ms in times.items() if other in LABELS), default=None)
    return best / times[name] if best and name in times else None


def with_fa4(rows: list[dict], folder: Path) -> list[dict]:
    """And FlashAttention-4's rows, for the large shapes that fa4.json in the folder has, if it is there:
    FlashAttention-3's of these rows, by what FlashAttention-4 was of it in the run of that file."""
    if not (file := folder / "fa4.json").exists():
        return rows

    def key(row: dict, direction: str) -> tuple:
        return row[direction], row["d"], row["B"], row["N"], row["causal"]

    gains = {key(row, "pass"): row["fa4"] / row["fa3"] for row in json.loads(file.read_text())["rows"]}
    known = [(row, gains[key(row, "direction")]) for row in rows if row["case"] == "large"
             and row["name"] == "fa3" and row["ms"] and key(row, "direction") in gains]
    return rows + [row | {"name": "fa4", "ms": row["ms"] / gain, "tflops": row["tflops"] * gain}
                   for row, gain in known]


def by_shape(rows: list[dict]) -> dict[Shape, list[dict]]:
    found: dict[Shape, list[dict]] = {}
    for row in rows:
        shape = Shape(**{field.name: row[field.name] for field in dataclasses.fields(Shape)})
        found.setdefault(shape, []).append(row)
    return found


def table(rows: list[dict]) -> str:
    """Markdown: TFLOP/s of each contender, and for each that is no library the best library's time over
    its."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    ours = [name for name in names if name not in LABELS]
    heads = [*(LABELS.get(name, name) for name in names), *(f"{name}: of the best" for name in ours)]
    lines = [f"| shape | {' | '.join(heads)} | MHz, W |", "|---|" + "---:|" * (len(heads) + 1)]
    for shape, each in by_shape(rows).items():
        tflops = {row["name"]: row["tflops"] for row in each}
        cells = [f"{tflops[name]:.0f}" if tflops.get(name) else "-" for name in names]
        cells += [f"{x:.3f}" if (x := ratio(each, name)) else "-" for name in ours]
        lines.append(f"| {shape} | {' | '.join(cells)} | {each[0]['mhz']}, {each[0]['watts']} |")
    return "\n".join(lines)


def summary(rows: list[dict]) -> str:
    """Markdown, of rows with one contender a shape that is no library: the least and the greatest ratio by
    case, pass, type and d, how many are at least 1, and the median."""
    found: dict[tuple, dict[int, list[float]]] = {}
    for shape, each in by_shape(rows).items():
        ours = next(row["name"] for row in each if row["name"] not in LABELS)
        if x := ratio(each, ours):
            group = found.setdefault((CASES.index(shape.case), shape.direction != "fwd", shape.dtype), {})
            group.setdefault(shape.d, []).append(x)
    dims = sorted({d for group in found.values() for d in group})
    lines = [f"| shapes | pass | {' | '.join(f'd={d}' for d in dims)} | at 1 or above | median |",
             "|---|---|" + "---:|" * (len(dims) + 2)]
    for (case, is_backward, dtype), group in sorted(found.items()):
        cells = [f"{min(group[d]):.2f} to {max(group[d]):.2f}" if d in group else "-" for d in dims]
        all_d = [x for each in group.values() for x in each]
        lines.append(f"| {IN_WORDS[CASES[case]]} | {'backward' if is_backward else 'forward'}, {dtype} | "
                     f"{' | '.join(cells)} | {sum(x >= 1 for x in all_d)} of {len(all_d)} | "
                     f"{statistics.median(all_d):.2f} |")
    return "\n".join(lines)


def jobs(shape: Shape, stages: dict) -> Iterator[ahead.Job]:
    """What is built for a shape; a window's builds come with its first call."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = shape.B * shape.H * shape.N
    for stage, tiles in stages.values() if not shape.window else ():
        chosen = stage.tiles(shape.d, flash.shared_memory_per_block(device), rows, shape.causal,
                             keys=shape.N, **tiles)
        yield ahead.job(stage, flash.DTYPES[shape.dtype], shape.d, shape.causal, chosen, device)


def run(chosen: list[Shape], stages: dict[Shape, dict], fa3, file: Path | None, data: dict,
        device: str = "cuda") -> None:
    """Measure all, shape by shape, into `data` and the file, if there is one; say what was found."""
    begun = time.perf_counter()
    for number, shape in enumerate(chosen, 1):
        rows = measured(shape, stages[shape], fa3, device)
        data["rows"] += rows
        if file:
            ratios.write(data, file)
        what = ", ".join(f"{row['name']} {row['tflops']:.0f}" if row["ms"] else
                         f"{row['name']}: {row['message'][:60]}" for row in rows)
        print(f"{time.perf_counter() - begun:5.0f} s  {number}/{len(chosen)} {shape}: {what}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()


def kept(old: dict, device: str, chosen: list[Shape]) -> list[dict]:
    """The rows of a result that are not measured again. They are of the same device."""
    left = [row for shape, rows in by_shape(old["rows"]).items() if shape not in chosen for row in rows]
    if left and old["device"] != device:
        sys.exit(f"the file has rows of {old['device']}, and this is {device}: write into another folder")
    return left


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fa3", type=Path, help="a library with torch.ops.flash_attn_3")
    parser.add_argument("--cudart", type=Path, help="the CUDA runtime that it needs, loaded first")
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--pass", dest="directions", default="fwd,bwd", help="default: %(default)s")
    parser.add_argument("--dtypes", default="bf16,fp16", help="default: %(default)s")
    parser.add_argument("--dims", default="64,128,256", help="default: %(default)s")
    parser.add_argument("--stages", help="variants, instead of what a call takes: names or .cuh files of one "
                                         "pass, with tiles, as in hopper_tuned:Br=192:Bc=80; writes nothing")
    args = parser.parse_args(argv)
    lists = {name: getattr(args, name).split(",") for name in ("cases", "directions", "dtypes", "dims")}
    allowed = {"cases": CASES, "directions": ("fwd", "bwd"), "dtypes": DTYPES,
               "dims": tuple(map(str, ratios.HEADS))}
    for name, values in lists.items():
        if unknown := set(values) - set(allowed[name]):
            parser.error(f"--{name}: no {', '.join(sorted(unknown))}; there are {', '.join(allowed[name])}")
    if args.stages and len(lists["directions"]) > 1:
        parser.error("--stages: takes one pass; add --pass fwd or --pass bwd")
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    chosen = list(shapes(lists["cases"], lists["directions"], lists["dtypes"],
                         [int(d) for d in lists["dims"]]))
    device = torch.device("cuda", torch.cuda.current_device())
    asked = args.stages.split(",") if args.stages else None
    stages = {shape: of_stages(shape.direction, asked or [taken(shape, device)]) for shape in chosen}
    builds = {str(job): job for shape in chosen for job in jobs(shape, stages[shape])}
    ahead.build_all(builds.values())
    file = None if args.stages else args.folder / "hopper.json"
    data = {"device": flash.describe_device(device), "date": time.strftime("%Y-%m-%d"), "rows": []}
    if file and file.exists():
        data["rows"] = kept(json.loads(file.read_text()), data["device"], chosen)
    run(chosen, stages, load_fa3(args.fa3, args.cudart) if args.fa3 else None, file, data)
    print(table(with_fa4(data["rows"], args.folder)))


if __name__ == "__main__":
    main()
