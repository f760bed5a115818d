"""Masks: the best stages beside flex_attention, SDPA with a dense mask, and plain PyTorch, in one process.

    python results/masks.py results/h200                     # writes masks.json there; `make readme`
    python results/masks.py results/h200 --cases vla,bias    # measures these, and keeps the others' rows

Stages and peers are measured by turns, as by ratios.py. Besides: the time of a window's full mask, whether
the results of 8 calls have the same bits, and how long a new mask's file takes to compile. The file is
written after each pass, with what failed. After --seconds no pass begins.
"""

import argparse
import concurrent.futures
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ratios  # noqa: E402

import flash  # noqa: E402
from flash_ladder import ahead  # noqa: E402
from flash_ladder.bench import arguments, cases, competitors, masked, measuring, report  # noqa: E402
from flash_ladder.bench.rungs import libraries  # noqa: E402

LONG = ("--seqlens", "16384", "--batch", "1", "--heads", "16")
MODEL = ("--seqlens", "4096", "--batch", "4", "--heads", "16")
CASES: dict[str, tuple[str, ...]] = {         # options of bench.py
    "vla": ("--preset", "vla"),
    "window64": ("--mask", "window:1024", *LONG, "--heads", "32", "--head-dim", "64"),
    "window128": ("--mask", "window:1024", *LONG, "--head-dim", "128"),
    "documents": ("--mask", "document:16", *LONG, "--head-dim", "128"),
    "padding": ("--mask", "causal&padding", *MODEL, "--head-dim", "128"),
    "bias": ("--mask", "bias", *MODEL, "--head-dim", "64")}
WHOLE = ("--pass", "fwd+bwd", "--checkpoint")
PASSES = {name: [("--pass", "fwd"), ("--pass", "bwd")] + [WHOLE] * (name == "vla") for name in CASES}
REPEATS = 8
LABELS = {"flex": "flex_attention", "sdpa": "SDPA", "eager": "eager"}
PEERS = (*LABELS, "all")                      # all: none of the case's could run
KEPT = (*ratios.KEPT, "pairs", "scratch_bytes", "peak_bytes")


def best_stage(args: argparse.Namespace, direction: str, deterministic: bool = False) -> flash.Stage:
    """The one that a call of this very shape and mask takes without a name."""
    on_cpu = argparse.Namespace(**vars(args) | {"device": torch.device("cpu")})
    by_head = any("H" in part.by for part in masked.pattern(1, on_cpu).parts)
    return flash.find_stage(None, flash.DTYPES[args.dtype], args.device, direction, deterministic,
                            args.head_dim, competitors.sizes_of(args), ("masks by head",) * by_head)


def passes(name: str, folder: Path) -> Iterator[argparse.Namespace]:
    """bench.py's arguments for each pass of a case, with the stage that a call takes without a name."""
    for options in PASSES[name]:
        options = ("--dtype", "bf16", "--out", str(folder), *CASES[name], *options)
        args, = arguments.parse_arguments(list(options))
        best = best_stage(args, "fwd" if args.direction == "fwd" else "bwd")
        yield from arguments.parse_arguments([*options, "--stages", best.name])


def full(args: argparse.Namespace) -> argparse.Namespace:
    """The same without a mask, and without peers."""
    return argparse.Namespace(**vars(args) | {"mask": None, "causal": False, "peers": [], "not_run": {}})


def share_of_tiles(args: argparse.Namespace) -> float:
    """Of all tiles of the stage, those with a score that counts."""
    stage, = args.stages
    tiles = stage.tiles(args.head_dim, flash.shared_memory_per_block(args.device),
                        args.batch * args.H * args.seqlens[0])
    seen = masked.pattern(args.seqlens[0], args).dense_seen()
    for axis, name in ((3, "Bc"), (2, "Br")):
        past = [0, 0] * (3 - axis) + [0, -seen.shape[axis] % tiles[name]]
        seen = torch.nn.functional.pad(seen, past).unflatten(axis, (-1, tiles[name])).any(axis + 1)
    return int(seen.sum()) / seen.numel()


def measured(name: str, args: argparse.Namespace, bar: Progress) -> list[dict]:
    """A row for the stage and each peer. The stage's also has, of a window, the full mask's time."""
    shape = {"case": name, "pass": args.direction, "checkpoint": bool(args.checkpoint), "mask": args.mask,
             "dtype": args.dtype, "B": args.batch, "H": args.H, "H_kv": args.H_kv, "d": args.head_dim}
    try:
        rows = [shape | {name: row.get(name) for name in KEPT} for row in ratios.by_turns(args, bar)]
        if name.startswith("window") and rows[0]["status"] == "ok":
            alone, = ratios.by_turns(full(args), bar)
            rows[0] |= {"full_ms": alone["median_ms"], "share_of_tiles": share_of_tiles(args)}
    except Exception as error:  # whatever a compiler of a peer raises: the other cases are to be measured
        return [shape | dict.fromkeys(KEPT) | measuring.failure(error)
                | {"name": "all", "label": "all", "N": args.seqlens[0]}]
    return rows


def same_bits(args: argparse.Namespace) -> dict[str, bool]:
    """Whether O and L, and in deterministic mode dQ, dK and dV, have the same bits in each of 8 calls."""
    q, k, v, dO = cases.random_inputs(args.seqlens[0], args)
    mask = masked.pattern(args.seqlens[0], args).joined()

    def call() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        o, lse = flash.attention(q, k, v, mask=mask, return_lse=True, deterministic=True)
        return [o, lse], list(torch.autograd.grad(o, (q, k, v), dO))

    first, *others = (call() for _ in range(REPEATS))
    return {direction: all(torch.equal(x, y) for other in others for x, y in zip(first[n], other[n]))
            for n, direction in enumerate(("fwd", "bwd"))}


def seconds_to_compile(args: argparse.Namespace) -> dict[str, float]:
    """Of the best stages, with a file of a mask that is new. One build at a time."""
    dtype, found = flash.DTYPES[args.dtype], {"d": args.head_dim}
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder, "new.cuh")
        text = (flash.STAGES / "masks" / "window.cuh").read_text()
        new.write_text(f"{text}// {time.time_ns()}\n")
        for direction in ("fwd", "bwd"):
            stage = best_stage(args, direction)
            tiles = stage.tiles(args.head_dim, flash.shared_memory_per_block(args.device))
            job = ahead.job(stage, dtype, args.head_dim, False, tiles, args.device, mask=new)
            begun = time.perf_counter()
            ahead.build_all([job])
            found[direction] = time.perf_counter() - begun
    return found


def builds(each: list[argparse.Namespace]) -> list[tuple]:
    """What flash.build() is called with for all of it: same_bits() has a backward stage of its own."""
    calls = {str(call): call for args in each for call in libraries(args)}
    calls |= {str(call): call for args in each if args.mask and args.mask.startswith("window")
              for call in libraries(full(args))}
    for args in each:
        if args.preset and args.direction == "bwd":
            stage = best_stage(args, "bwd", deterministic=True)
            for tiles in ahead.variants(stage, args.head_dim, args.device, False):
                call = ahead.job(stage, flash.DTYPES[args.dtype], args.head_dim, False, tiles, args.device,
                                 deterministic=True, mask=masked.file(args))
                calls[str(call)] = call
    return list(calls.values())


def prepare(each: list[argparse.Namespace], say) -> None:
    """Compile the stages, several at a time, and meanwhile flex_attention. An error comes again, in its
    case."""
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        jobs = builds(each)
        building = beside.submit(ahead.build_all, jobs)
        for args in each:
            with contextlib.suppress(Exception):
                entry = competitors.of_peer("flex", args)
                entry.prepare(args.direction, *cases.random_inputs(args.seqlens[0], args))()
            say(f"flex_attention, compiled: {args.direction} {args.mask} d={args.head_dim}")
        with contextlib.suppress(RuntimeError):
            building.result()
        say(f"{len(jobs)} builds of stages")
    torch.cuda.empty_cache()


def read(file: Path, asked: list[str], origin: dict) -> dict:
    """The file's result without these cases' rows, measured with the same device and software; empty if there
    is none."""
    data = json.loads(file.read_text()) if file.exists() else {"date": {}, "rows": []}
    data["rows"] = [row for row in data["rows"] if row["case"] not in asked]
    data["date"] = {row["case"]: data["date"][row["case"]] for row in data["rows"]}
    if data["rows"] and (data["device"], data["software"]) != (origin["device"], origin["software"]):
        sys.exit(f"{file} has rows of {', '.join(data['date'])}, measured on {data['device']} with "
                 f"{data['software']}: measure these cases too, here, or write into another folder")
    data.pop("left_out", None)
    return data | {"device": origin["device"], "software": origin["software"]}


def run(each: dict[str, list[argparse.Namespace]], data: dict, file: Path, seconds: float, say) -> None:
    """Measure all, pass by pass, into `data` and the file."""
    begun, bar = time.perf_counter(), Progress(disable=True)
    prepare([args for of_case in each.values() for args in of_case], say)
    for name, of_case in each.items():
        for args in of_case:
            what = f"{name}, {args.direction}"
            if time.perf_counter() - begun > seconds:
                data.setdefault("left_out", []).append(f"{what}: no time left")
                say(data["left_out"][-1])
                continue
            data["rows"] += measured(name, args, bar)
            data["date"][name] = time.strftime("%Y-%m-%d")
            if name == "vla" and args.direction == "bwd":
                for fact in (same_bits, seconds_to_compile):
                    try:
                        data[fact.__name__] = fact(args)
                    except Exception as error:      # as in measured()
                        data.setdefault("left_out", []).append(f"{fact.__name__}: {measuring.failure(error)}")
            rows = sorted(data.pop("rows"), key=lambda row: list(CASES).index(row["case"]))
            data["rows"] = rows     # the last key, for a line each
            ratios.write(data, file)
            torch.cuda.empty_cache()
            say(what)


# ---------------------------------------------------------------------------------------- in words
def cell(row: dict | None, ours: float | None) -> str:
    """A time, how many times ours it is, and the peak of memory."""
    if row is None:
        return "-"
    if row["status"] != "ok":
        return row["status"]
    times = f" ({row['median_ms'] / ours:.1f}×)" if ours and row["median_ms"] != ours else ""
    return f"{report.number(row['median_ms'])}{times}, {report.size(row['peak_bytes'])}"


def table(data: dict) -> str:
    """The result in Markdown: a line for each pass of a case, and what else was measured."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in data["rows"]:
        key = (row["mask"], *(row[name] for name in ("B", "H", "H_kv", "N", "d")), row["pass"],
               row["checkpoint"])
        kind = row["name"] if row["name"] in PEERS else "stage"
        groups.setdefault(key, {})[kind] = row
    heads = ("mask", "shape", "pass", "scores that count", "stage", "its time", "TFLOP/s", "flex_attention",
             "SDPA", "eager")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---:|---|---|---:|---|---|---|"]
    for (mask, B, H, H_kv, N, d, direction, checkpointed), found in groups.items():
        ours = found.get("stage", {})
        heads = f"H={H}" + f" H_kv={H_kv}" * (H_kv != H)
        what = report.PASSES[direction] + ", checkpointed" * checkpointed
        pairs = ours.get("pairs")
        share = f"{100 * pairs / (B * H * N * N):.1f} %" if pairs else "-"
        cells = [cell(found.get(kind), ours.get("median_ms")) for kind in LABELS]
        if "sdpa" in found:
            cells[1] += " " + found["sdpa"]["label"].removeprefix("PyTorch SDPA ")
        lines.append(f"| {mask} | B={B} {heads} N={N} d={d} | {what} | {share} | "
                     f"{ours.get('label', '-')} | {cell(ours or None, ours.get('median_ms'))} | "
                     f"{report.number(ours.get('tflops'))} | {' | '.join(cells)} |")
    dates = " and ".join(sorted(set(data["date"].values())))
    origin = (f"bf16; {data['device']}; {dates}, by `python results/masks.py`. Of each: milliseconds, "
              "as a multiple of the stage's, too, and peak memory with all tensors, the mask's among them. "
              "TFLOP/s: over scores that count. flex_attention is compiled. SDPA takes a dense mask, in the "
              "backend that PyTorch chooses: it is named. eager is plain PyTorch.")
    return "\n\n".join(["\n".join(lines), origin, *beside_peers(data), *windows(data), *others(data),
                        *failures(data)])


def beside_peers(data: dict) -> Iterator[str]:
    """Eager's time over the stage's for block_causal, by pass and of both; and where a peer is faster."""
    times: dict[tuple, dict[str, float]] = {}
    for row in data["rows"]:
        if row["status"] == "ok":
            kind = row["name"] if row["name"] in PEERS else "stage"
            times.setdefault((row["mask"], row["d"], row["pass"]), {})[kind] = row["median_ms"]
    for mask, d in dict.fromkeys(key[:2] for key in times if key[0].startswith("block_causal")):
        found = {name: times.get((mask, d, name), {}) for name in report.PASSES}
        if all({"stage", "eager"} <= set(each) for each in found.values()):
            alone = found["fwd"], found["bwd"]
            both = sum(each["eager"] for each in alone) / sum(each["stage"] for each in alone)
            whole = found["fwd+bwd"]["eager"] / found["fwd+bwd"]["stage"]
            by_pass = " and ".join(f"{each['eager'] / each['stage']:.1f} {report.PASSES[name]}"
                                   for name, each in zip(("fwd", "bwd"), alone))
            yield (f"{mask}, eager's time over the stage's: {by_pass}, {both:.2f} of both together, "
                   f"{whole:.1f} checkpointed. 3 was the aim.")
    slower = [f"{mask} d={d}, {report.PASSES[direction]}: {report.number(each['stage'])} ms, "
              f"{LABELS[best]} {report.number(each[best])}"
              for (mask, d, direction), each in times.items() if len(each) > 1 and "stage" in each
              for best in [min((name for name in each if name != "stage"), key=each.__getitem__)]
              if each[best] < each["stage"]]
    if slower:
        yield f"Slower than a peer: {'; '.join(slower)}."


def windows(data: dict) -> Iterator[str]:
    rows = [row for row in data["rows"] if row.get("full_ms")]
    if rows:
        found = []
        for row in rows:
            expected = row["full_ms"] * row["share_of_tiles"]
            found.append(f"d={row['d']}, {report.PASSES[row['pass']]}: {row['median_ms'] / expected:.2f} "
                         f"({100 * row['share_of_tiles']:.1f} % of {report.number(row['full_ms'])} ms)")
        yield ("A window's time, over that without a mask times the share of tiles that have a score which "
               f"counts: {'; '.join(found)}.")


def others(data: dict) -> Iterator[str]:
    if "same_bits" in data:
        found = (f"{report.PASSES[direction]}: {'the same bits' if same else 'DIFFERENT bits'}"
                 for direction, same in data["same_bits"].items())
        yield (f"{REPEATS} calls with block_causal, the backward pass in deterministic mode: "
               f"{', '.join(found)}.")
    if "seconds_to_compile" in data:
        took = data["seconds_to_compile"]
        found = (f"{report.PASSES[direction]} {took[direction]:.1f} s" for direction in ("fwd", "bwd"))
        yield f"A new mask's file, compiled with the best stage at d={took['d']}: {', '.join(found)}."


def failures(data: dict) -> Iterator[str]:
    found = [f"{row['label']}, {row['mask']} d={row['d']}, {report.PASSES[row['pass']]}: {row['message']}"
             for row in data["rows"] if row.get("message")]
    found += data.get("left_out", [])
    if found:
        yield "Failed: " + "; ".join(found) + "."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", metavar="A,B", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=200, help="after which no pass begins; %(default)s")
    args = parser.parse_args(argv)
    asked = args.cases.split(",")
    if unknown := [name for name in asked if name not in CASES]:
        parser.error(f"--cases: no {unknown[0]!r}; there are {', '.join(CASES)}")
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    begun, file = time.perf_counter(), args.folder / "masks.json"
    measuring.SECONDS_A_CASE = ratios.SECONDS_A_CASE
    each = {name: list(passes(name, args.folder)) for name in asked}
    origin = measuring.origin(next(iter(each.values()))[0])
    run(each, read(file, asked, origin), file, args.seconds,
        lambda what: print(f"{time.perf_counter() - begun:5.0f} s  {what}", flush=True))
    print(table(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
