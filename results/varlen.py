"""Packed sequences of mixed lengths, by bench.py's --varlen: attention_varlen() beside the same kernel on one
shape, and peers, for d=64 and 128, causal and full, forward and backward.

    python results/varlen.py results/h200                    # writes varlen.json there; `make readme`
    python results/varlen.py results/h200 --peers none       # ours alone
    python results/varlen.py results/h200 --cases 128:full   # the others' rows are kept

Those of a case are measured by turns, as by ratios.py. Besides: whether O, and in deterministic mode the
gradients, have the bits of one sequence at a time. The file is written after each pass. After --seconds no
pass begins.
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ratios  # noqa: E402

import flash  # noqa: E402
from flash_ladder import ahead  # noqa: E402
from flash_ladder.bench import measuring, varlen  # noqa: E402
from flash_ladder.bench.varlen import Case  # noqa: E402

H = 16
CASES = {f"{d}:{mask}": (d, mask == "causal") for d in (64, 128) for mask in ("causal", "full")}


def same_bits(case: Case) -> dict[str, bool]:
    """Whether O, and in deterministic mode dQ, dK and dV, have the bits of one sequence at a time, with the
    same stages and tiles."""
    q, k, v, dO = (x.detach() for x in case.packed)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    tiles = {"Br": 128, "Bc": 128 if case.d <= 64 else 64, "Br_bwd": 64, "Bc_bwd": 128}
    options = {"causal": case.causal, "deterministic": True, **case.stages(deterministic=True), **tiles}
    o = flash.attention_varlen(*leaves, case.starts, **options)
    gradients = torch.autograd.grad(o, leaves, dO)
    same = {"fwd": True, "bwd": True}
    first = 0
    for n in case.lengths:
        rows = slice(first, first + n)
        first += n
        alone = [x[rows].transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        o_alone = flash.attention(*alone, **options)
        found = torch.autograd.grad(o_alone, alone, dO[rows].transpose(0, 1)[None])
        same["fwd"] &= torch.equal(o_alone[0].transpose(0, 1), o[rows])
        same["bwd"] &= all(torch.equal(x[0].transpose(0, 1), y[rows]) for x, y in zip(found, gradients))
    return same


def name_of(d: int, causal: bool) -> str:
    return f"d={d} {'causal' if causal else 'full'}"


def read(file: Path, asked: list[str], fresh: dict) -> dict:
    """The file's result without these cases, measured with the same device, software and lengths; `fresh` if
    nothing else is there."""
    data = json.loads(file.read_text()) if file.exists() else fresh
    gone = {CASES[case] for case in asked}
    rows = [row for row in data["rows"] if (row["d"], row["causal"]) not in gone]
    same = {shape: bits for shape, bits in data["same_bits"].items()
            if shape not in {name_of(*case) for case in gone}}
    if rows and any(data[key] != fresh[key] for key in ("device", "software", "lengths")):
        sys.exit(f"{file} has rows of another device, software or lengths: measure all cases, or write into "
                 "another folder")
    return fresh | {"date": data["date"] if rows else fresh["date"], "same_bits": same, "rows": rows}


def builds(cases: list[str]) -> list[tuple]:
    """What flash.build() is called with, for all of it, but document masks: those build in their turn."""
    device, jobs = torch.device("cuda", torch.cuda.current_device()), {}
    for d, causal in map(CASES.__getitem__, cases):
        for direction, deterministic in (("fwd", False), ("bwd", False), ("bwd", True)):
            stage = flash.find_stage(None, torch.bfloat16, device, direction, deterministic, d,
                                     needs=("varlen",))
            for tiles in ahead.variants(stage, d, device, causal):
                for packed in (False, True):
                    job = ahead.job(stage, torch.bfloat16, d, causal, tiles, device, deterministic, False,
                                    None, None, False, False, packed)
                    jobs[str(job)] = job
    return list(jobs.values())


def run(cases: list[str], peers: list[str], data: dict, file: Path, seconds: float, say) -> None:
    begun = time.perf_counter()
    with contextlib.suppress(RuntimeError):      # an error comes again, in its case
        say(f"{len(ahead.build_all(builds(cases)))} builds")
    for d, causal in map(CASES.__getitem__, cases):
        case = Case(data["lengths"], H, H, d, causal, torch.bfloat16, "cuda")
        shape = name_of(d, causal)
        for direction in ("fwd", "bwd"):
            if time.perf_counter() - begun > seconds:
                data.setdefault("left_out", []).append(f"{shape}, {direction}: no time left")
                continue
            names = varlen.names_for(direction, peers)
            data["rows"] += varlen.measured(case, direction, names, ratios.TURNS)
            ratios.write(data, file)
            say(f"{shape}, {direction}")
            torch.cuda.empty_cache()
        data["same_bits"][shape] = same_bits(case)
        ratios.write(data, file)


def table(data: dict) -> str:
    """The result in Markdown."""
    said = {True: "the same", False: "OTHER"}
    bits = "; ".join(f"{shape}: forward {said[same['fwd']]}, deterministic backward {said[same['bwd']]}"
                     for shape, same in data["same_bits"].items())
    failed = [f"{varlen.LABELS[row['name']]}, d={row['d']}, {row['pass']}: {row['message']}"
              for row in data["rows"] if row["message"]] + data.get("left_out", [])
    return "\n\n".join([
        varlen.table(data["rows"]),
        f"{varlen.caption(data['lengths'], H, H, 'bf16')}. {data['device']}; {data['date']}, by `python "
        "results/varlen.py`.",
        f"The bits of one sequence at a time: {bits}.", *[f"Failed: {'; '.join(failed)}."] * bool(failed)])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", metavar="A,B", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--peers", metavar="A,B", default=",".join(varlen.PEERS),
                        help="or none; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=200, help="after which no pass begins; %(default)s")
    args = parser.parse_args(argv)
    peers = [] if args.peers == "none" else args.peers.split(",")
    if unknown := set(peers) - set(varlen.PEERS):
        parser.error(f"--peers: no {', '.join(sorted(unknown))}; there are {', '.join(varlen.PEERS)}")
    cases = args.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"--cases: no {unknown[0]!r}; there are {', '.join(CASES)}")
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    begun, measuring.SECONDS_A_CASE = time.perf_counter(), ratios.SECONDS_A_CASE
    fresh = {"date": time.strftime("%Y-%m-%d"), "device": flash.describe_device(torch.device("cuda")),
             "software": {"torch": torch.__version__, "cuda": torch.version.cuda},
             "lengths": varlen.mixed_lengths("cuda"), "same_bits": {}, "rows": []}
    data = read(args.folder / "varlen.json", cases, fresh)

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {text}", flush=True)

    run(cases, peers, data, args.folder / "varlen.json", args.seconds, say)
    print(f"\n{table(data)}")


if __name__ == "__main__":
    main()
