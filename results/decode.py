"""Decoding: the contenders of bench.py --decode, and FlashAttention-3, in one process on a GPU.

    python results/decode.py results/h200                        # writes decode.json there, prints the table
    python results/decode.py results/h200 --fa3 fa3_C.so --cudart libcudart.so.12
    python results/decode.py results/h200 --sweep                # tiles and splits instead; writes nothing

How they are measured, flash_ladder/bench/decode.py says. Host time is from call to return.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import itertools
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ratios  # noqa: E402

import flash  # noqa: E402
from flash_ladder import ahead, devices  # noqa: E402
from flash_ladder.bench import decode  # noqa: E402
from flash_ladder.bench.decode import (  # noqa: E402
    LABELS,
    PAGE,
    Buffers,
    Call,
    Shape,
    by_turns,
    copy_gb_per_s,
)

HOST_CALLS = 100
DTYPE = torch.bfloat16
SHAPES = [Shape(1, 8192), Shape(1, 65536), Shape(8, 8192), Shape(64, 1024), Shape(8, 8192, N_q=4),
          Shape(8, 8192, N_q=16), Shape(1, 8192, N_q=16), Shape(1, 65536, N_q=16), Shape(2, 8192, H_kv=32),
          Shape(16, 8192, d=64), Shape(4, 8192, d=256)]
WITH_FLEX = SHAPES[:4]       # it is compiled for each shape, which takes a while
SWEPT = [Shape(1, 8192), Shape(8, 8192), Shape(64, 1024), Shape(8, 8192, N_q=16)]


def load_fa3(library: Path, cudart: Path | None):
    """torch.ops.flash_attn_3, of a library that holds it."""
    if cudart:
        ctypes.CDLL(str(cudart.absolute()), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library.absolute()))
    return torch.ops.flash_attn_3


def contenders(x: Buffers, fa3) -> dict[str, Call]:
    """Those of bench.py --decode; and FlashAttention-3, which chooses its own number of splits."""
    found = decode.contenders(x, decode.PEERS if x.shape in WITH_FLEX else ("sdpa", "fa2"))
    if fa3:
        found["fa3"] = lambda n: fa3.fwd(*x.rows(n), is_causal=False, num_splits=0)[0].transpose(1, 2)
    return found


def host_us(call: Call) -> float:
    """Microseconds from call to return."""
    times = []
    for n in range(HOST_CALLS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call(n)
        times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times)


def measured(shape: Shape, copy: float, fa3, say) -> list[dict]:
    """A row for each contender, with its host time."""
    x = Buffers(shape)
    calls = contenders(x, fa3)
    rows = decode.measured(x, calls, copy)
    for row in rows:
        row["host_us"] = host_us(calls[row["name"]]) if row["ms"] else None
    say(f"{shape}: " + ", ".join(f"{row['name']} {row['ms'] * 1e3:.1f} us" for row in rows if row["ms"]))
    return rows


# ------------------------------------------------------------------------------------------ builds
def job(shape: Shape, name: str | None, tiles: dict[str, int], *of_cache) -> ahead.Job:
    """What build_all() is called with. name: None: what a call without one takes. of_cache: KV_CACHE and
    PAGE_SIZE, of definitions()."""
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = {field: getattr(shape, field) for field in ("B", "H", "H_kv", "N_q", "N_k", "d")}
    stage = flash.find_stage(name, DTYPE, device, d=shape.d, sizes=sizes | {"gradients": 0, "masked": 0})
    chosen = stage.tiles(shape.d, flash.shared_memory_per_block(device), shape.B * shape.H * shape.N_q,
                         packed=shape.N_q * shape.H // shape.H_kv, **tiles)
    no_extras = False, False, None, None, False, False
    return ahead.job(stage, DTYPE, shape.d, False, chosen, device, *no_extras, *of_cache)


def prepare(shapes: list[Shape], say) -> None:
    """Compile the stages, several at a time, and meanwhile flex_attention. Its error comes again, in its
    row."""
    each = {str(one): one for shape in shapes
            for one in (job(shape, None, {}), job(shape, "split_kv", {}),
                        job(shape, "split_kv", {}, True, PAGE), job(shape, "ampere_tuned", {}))}
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        building = beside.submit(ahead.build_all, list(each.values()))
        for shape in filter(WITH_FLEX.__contains__, shapes):
            with contextlib.suppress(Exception):
                x = Buffers(shape)
                contenders(x, None)["flex"](0)
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
    first = next(iter(decode.by_shape(data["rows"]).values()))
    names = list(dict.fromkeys(row["name"] for row in data["rows"]))
    host = ", ".join(f"{LABELS[name]} {row['host_us']:.0f}" for name, row in first.items() if row["host_us"])
    worst = ", ".join(f"{LABELS[name]} {max(errors):.1e}" for name in names
                      if (errors := [row["error"] for row in data["rows"]
                                     if row["name"] == name and row["error"] is not None]))
    return "\n".join([
        decode.table(data["rows"]), "",
        f"Decode steps, bf16; {data['device']}; {data['date']}, by `python results/decode.py`. "
        f"{decode.caption(data['copy_gb_per_s'])}; K and V lie in several buffers in turn, "
        f"{decode.ROTATED['cuda'] >> 20} MiB or more in all. Microseconds from call to return: {host}. "
        f"Largest error beside float64: {worst}."])


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
