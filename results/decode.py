"""Decoding: the stage that calls take beside PyTorch's SDPA and flex_attention, and FlashAttention-3, in one
process on a GPU.

    python results/decode.py results/h200                        # writes decode.json there, prints the table
    python results/decode.py results/h200 --fa3 fa3_C.so --cudart libcudart.so.12
    python results/decode.py results/h200 --sweep                # tiles and splits instead; writes nothing

A decode step reads K and V once, and hardly computes: GB/s are of K, V, Q and O, as a share of what a copy
reads and writes. K and V are taken from several buffers in turn, more than any cache holds. The contenders
are timed by turns, many calls at a time in a queue that is held back, so that no host time counts; the median
of the turns is kept. Host time is from call to return. FlashAttention-3 chooses its own number of splits.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ratios  # noqa: E402

import flash  # noqa: E402
from flash_ladder import ahead, devices  # noqa: E402
from flash_ladder.bench import peers  # noqa: E402

ROTATED = 512 << 20          # bytes of K and V in all buffers together, at least
TURNS = 5
CALLS = 24                   # in a turn
HOST_CALLS = 100
DTYPE = torch.bfloat16
PAGE = 64
LABELS = {"ours": "split_kv", "paged": f"pages of {PAGE}", "ampere_tuned": "ampere_tuned", "sdpa": "SDPA",
          "fa2": "SDPA flash", "flex": "flex_attention", "fa3": "FlashAttention-3"}


@dataclass(frozen=True)
class Shape:
    """Of a decode step. Each query sees all keys."""

    B: int
    N_k: int
    N_q: int = 1
    H: int = 32
    H_kv: int = 8
    d: int = 128

    @property
    def cache_bytes(self) -> int:
        """Of K and V."""
        return 2 * 2 * self.B * self.H_kv * self.N_k * self.d

    @property
    def moved_bytes(self) -> int:
        return self.cache_bytes + 2 * 2 * self.B * self.H * self.N_q * self.d

    def __str__(self) -> str:
        return f"B={self.B} N_q={self.N_q} N_k={self.N_k} H={self.H} H_kv={self.H_kv} d={self.d}"


SHAPES = [Shape(1, 8192), Shape(1, 65536), Shape(8, 8192), Shape(64, 1024), Shape(8, 8192, N_q=4),
          Shape(8, 8192, N_q=16), Shape(2, 8192, H_kv=32), Shape(16, 8192, d=64), Shape(4, 8192, d=256)]
WITH_FLEX = SHAPES[:4]       # it is compiled for each shape, which takes a while
SWEPT = [Shape(1, 8192), Shape(8, 8192), Shape(64, 1024), Shape(8, 8192, N_q=16)]
Call = Callable[[int], torch.Tensor]     # of the n-th buffers; gives (B, H, N_q, d)


class Buffers:
    """Random q, k and v (B, heads, N, d), several of each, and the same as a cache in pages."""

    def __init__(self, shape: Shape):
        count = max(2, -(-ROTATED // shape.cache_bytes))
        torch.manual_seed(0)

        def random(heads: int, N: int) -> list[torch.Tensor]:
            return [torch.randn(shape.B, N, heads, shape.d, device="cuda", dtype=DTYPE).transpose(1, 2)
                    for _ in range(count)]

        self.q = random(shape.H, shape.N_q)
        self.k, self.v = (random(shape.H_kv, shape.N_k) for _ in "kv")
        self.lengths = torch.full((shape.B,), shape.N_k, dtype=torch.int32, device="cuda")
        pages = torch.randperm(shape.B * shape.N_k // PAGE, device="cuda")
        self.table = pages.view(shape.B, -1).int()

    def rows(self, n: int) -> tuple[torch.Tensor, ...]:
        """(B, N, heads, d), the n-th of each."""
        n %= len(self.q)
        return self.q[n].transpose(1, 2), self.k[n].transpose(1, 2), self.v[n].transpose(1, 2)

    def pages(self, n: int) -> tuple[torch.Tensor, ...]:
        """The same bytes, taken for pages: other keys than those of k and v, in another order."""
        q, k, v = self.rows(n)
        return q, k.reshape(-1, PAGE, *k.shape[2:]), v.reshape(-1, PAGE, *v.shape[2:])


def load_fa3(library: Path, cudart: Path | None):
    """torch.ops.flash_attn_3, of a library that holds it."""
    if cudart:
        ctypes.CDLL(str(cudart.absolute()), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library.absolute()))
    return torch.ops.flash_attn_3


def contenders(x: Buffers, shape: Shape, fa3) -> dict[str, Call]:
    """Each by its name; the first one is flash.attention() as a call without a stage takes it."""
    gqa = shape.H != shape.H_kv

    def at(n: int) -> tuple[torch.Tensor, ...]:
        n %= len(x.q)
        return x.q[n], x.k[n], x.v[n]

    def sdpa(n: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(*at(n), enable_gqa=gqa)

    def fa2(n: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(n)

    def paged(n: int) -> torch.Tensor:
        return flash.attention_kvcache(*x.pages(n), cache_seqlens=x.lengths,
                                       block_table=x.table).transpose(1, 2)

    found: dict[str, Call] = {
        "ours": lambda n: flash.attention(*at(n)), "paged": paged,
        "ampere_tuned": lambda n: flash.attention(*at(n), stage="ampere_tuned"), "sdpa": sdpa,
        "fa2": fa2}
    if shape in WITH_FLEX:
        found["flex"] = lambda n: peers.flex(*at(n), score_mod=None, block_mask=None)[0]
    if fa3:
        found["fa3"] = lambda n: fa3.fwd(*x.rows(n), is_causal=False, num_splits=0)[0].transpose(1, 2)
    return found


# ------------------------------------------------------------------------------------------ measuring
def turn(call: Call) -> float:
    """Milliseconds of one of CALLS calls, on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(60_000_000)
    start.record()
    for n in range(CALLS):
        call(n)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def by_turns(calls: dict[Any, Call]) -> dict[Any, float]:
    """The median of each."""
    for call in calls.values():
        call(0)
        call(1)
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            times[name].append(turn(call))
    return {name: statistics.median(each) for name, each in times.items()}


def host_us(call: Call) -> float:
    """Microseconds from call to return."""
    times = []
    for n in range(HOST_CALLS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call(n)
        times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times)


def copy_gb_per_s() -> float:
    """Bytes read and written by a copy of 1 GiB."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * a.numel() / by_turns({"copy": lambda n: b.copy_(a)})["copy"] / 1e6


def error(name: str, o: torch.Tensor, x: Buffers, shape: Shape) -> float:
    """The largest error of a contender's result for the first buffers, beside float64."""
    worst = 0.0
    for b in range(shape.B):        # one after the other: they are large
        q, k, v = x.q[0][b], x.k[0][b], x.v[0][b]
        if name == "paged":
            _, *pages = x.pages(0)
            k, v = (y[x.table[b].long()].flatten(0, 1).transpose(0, 1) for y in pages)
        q, k, v = (y.double() for y in (q, k, v))
        k, v = (y.repeat_interleave(shape.H // shape.H_kv, 0) for y in (k, v))
        right = torch.softmax(q @ k.mT / shape.d**0.5, -1) @ v
        worst = max(worst, (o[b].double() - right).abs().max().item())
    return worst


def measured(shape: Shape, copy: float, fa3, say) -> list[dict]:
    """A row for each contender; its status says why one has no time."""
    x = Buffers(shape)
    calls, rows = contenders(x, shape, fa3), {}
    for name, call in list(calls.items()):
        row: dict = {"status": "ok", "error": None, "ms": None, "gb_per_s": None, "of_copy": None,
                     "host_us": None}
        rows[name] = asdict(shape) | {"name": name} | row
        try:
            rows[name]["error"] = error(name, call(0), x, shape)
        except Exception as problem:  # whatever a peer or its compiler raises
            rows[name]["status"] = (str(problem).splitlines() or [type(problem).__name__])[0][:200]
            del calls[name]
    times = by_turns(calls)
    for name, ms in times.items():
        gb = shape.moved_bytes / ms / 1e6
        rows[name] |= {"ms": ms, "gb_per_s": gb, "of_copy": gb / copy, "host_us": host_us(calls[name])}
    say(f"{shape}: " + ", ".join(f"{name} {ms * 1e3:.1f} us" for name, ms in times.items()))
    return list(rows.values())


# ------------------------------------------------------------------------------------------ builds
def job(shape: Shape, name: str, tiles: dict[str, int], *of_cache) -> ahead.Job:
    """What build_all() is called with. of_cache: KV_CACHE and PAGE_SIZE, of definitions()."""
    device = torch.device("cuda", torch.cuda.current_device())
    stage = flash.find_stage(name, DTYPE, device)
    chosen = stage.tiles(shape.d, flash.shared_memory_per_block(device), shape.B * shape.H * shape.N_q,
                         packed=shape.N_q * shape.H // shape.H_kv, **tiles)
    no_extras = False, False, None, None, False, False
    return ahead.job(stage, DTYPE, shape.d, False, chosen, device, *no_extras, *of_cache)


def prepare(shapes: list[Shape], say) -> None:
    """Compile the stages, several at a time, and meanwhile flex_attention. Its error comes again, in its
    row."""
    each = {str(one): one for shape in shapes
            for one in (job(shape, "split_kv", {}), job(shape, "split_kv", {}, True, PAGE),
                        job(shape, "ampere_tuned", {}))}
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        building = beside.submit(ahead.build_all, list(each.values()))
        for shape in filter(WITH_FLEX.__contains__, shapes):
            with contextlib.suppress(Exception):
                x = Buffers(shape)
                contenders(x, shape, None)["flex"](0)
            say(f"flex_attention, compiled: {shape}")
        building.result()
    say(f"{len(each)} builds of stages")


def sweep(say) -> None:
    """Print GB/s of split_kv by Br and Bc, and for the best of them by the number of splits."""
    tiles = [{"Br": Br, "Bc": Bc} for Br, Bc in itertools.product((16, 32, 64), (32, 64, 128))]
    each = {str(one): one
            for shape in SWEPT for size in tiles for one in [job(shape, "split_kv", size, True)]}
    ahead.build_all(list(each.values()))
    say(f"{len(each)} builds")
    copy = copy_gb_per_s()
    print(f"copy: {copy:.0f} GB/s")
    for shape in SWEPT:
        x = Buffers(shape)

        def call(size: dict[str, int], splits: int, x: Buffers = x) -> Call:
            return lambda at: flash.attention_kvcache(*x.rows(at), cache_seqlens=x.lengths,
                                                      stage="split_kv", num_splits=splits, **size)

        def show(times: dict[tuple[int, int, int], float], shape: Shape = shape) -> None:
            for (Br, Bc, splits), ms in times.items():
                gb = shape.moved_bytes / ms / 1e6
                print(f"{shape}: Br={Br} Bc={Bc} splits={splits}: {1e3 * ms:.1f} us, {gb:.0f} GB/s, "
                      f"{100 * gb / copy:.0f} %", flush=True)

        stage = flash.find_stage("split_kv", DTYPE, x.lengths.device)
        sizes = {name: getattr(shape, name) for name in ("B", "H", "H_kv", "N_q", "N_k", "d")}
        multiprocessors = devices.multiprocessors(x.lengths.device)
        times = by_turns({(*size.values(), stage.number_of_splits(sizes, size, multiprocessors)):
                          call(size, 0) for size in tiles})
        show(times)
        Br, Bc, splits = min(times, key=times.__getitem__)
        others = {max(round(splits * factor), 1) for factor in (0.25, 0.5, 0.75, 1.33, 1.5, 2, 3)}
        show(by_turns({(Br, Bc, n): call({"Br": Br, "Bc": Bc}, n) for n in sorted(others)}))


# ------------------------------------------------------------------------------------------ in words
def table(data: dict) -> str:
    """The result in Markdown: a line for each shape."""
    names = list(dict.fromkeys(row["name"] for row in data["rows"]))
    lines = [f"| shape | K and V | {' | '.join(LABELS[name] for name in names)} | of the best peer |",
             f"|---|---:|{'---:|' * len(names)}---:|"]
    groups: dict[Shape, dict[str, dict]] = {}
    for row in data["rows"]:
        shape = Shape(**{name: row[name] for name in ("B", "N_k", "N_q", "H", "H_kv", "d")})
        groups.setdefault(shape, {})[row["name"]] = row
    for shape, found in groups.items():
        cells = []
        for name in names:
            row = found.get(name)
            cells.append("-" if row is None else row["status"] if row["ms"] is None else
                         f"{1e3 * row['ms']:.1f} us, {row['gb_per_s']:.0f} ({100 * row['of_copy']:.0f} %)")
        best = min((row["ms"] for name, row in found.items()
                    if row["ms"] and name not in ("ours", "paged", "ampere_tuned")), default=None)
        ours = found["ours"]["ms"]
        share = f"{best / ours:.2f}" if best and ours else "-"
        lines.append(f"| {shape} | {shape.cache_bytes / 2**20:.0f} MiB | {' | '.join(cells)} | {share} |")
    first = next(iter(groups.values()))
    host = ", ".join(f"{LABELS[name]} {row['host_us']:.0f}" for name, row in first.items() if row["host_us"])
    worst = ", ".join(f"{LABELS[name]} {max(errors):.1e}" for name in names
                      if (errors := [row["error"] for row in data["rows"]
                                     if row["name"] == name and row["error"] is not None]))
    origin = (f"Decode steps, bf16; {data['device']}; {data['date']}, by `python results/decode.py`. Of "
              "each: time, and GB/s of K, V, Q and O, as a share of a copy's "
              f"{data['copy_gb_per_s']:.0f}. Of the best peer: its time over split_kv's. Each query sees all "
              f"keys; K and V lie in several buffers in turn, {ROTATED >> 20} MiB or more in all. "
              f"Microseconds from call to return: {host}. Largest error beside float64: {worst}.")
    return "\n".join([*lines, "", origin])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fa3", type=Path, help="a library with torch.ops.flash_attn_3")
    parser.add_argument("--cudart", type=Path, help="the CUDA runtime that it needs, loaded first")
    parser.add_argument("--sweep", action="store_true", help="tiles and splits of split_kv; writes nothing")
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    begun = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begun:5.0f} s  {what}", flush=True)

    with torch.no_grad():
        if args.sweep:
            sweep(say)
            return
        fa3 = load_fa3(args.fa3, args.cudart) if args.fa3 else None
        prepare(SHAPES, say)
        data = {"device": flash.describe_device(torch.device("cuda", torch.cuda.current_device())),
                "date": time.strftime("%Y-%m-%d"), "copy_gb_per_s": copy_gb_per_s(), "rows": []}
        for shape in SHAPES:
            data["rows"] += measured(shape, data["copy_gb_per_s"], fa3, say)
            ratios.write(data, args.folder / "decode.json")
            torch.cuda.empty_cache()
    print(table(data))


if __name__ == "__main__":
    main()
