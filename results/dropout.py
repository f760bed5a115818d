"""What dropout costs: the stages that calls take with it and without, beside PyTorch's, in one process.

    python results/dropout.py results/h200                   # writes dropout.json there; `make readme`

All are timed by turns, as by ratios.py; the middle turn of each is kept. Whether what is dropped is right is
for tests/test_extras.py. Beside a stage is the backend of ratios.py that takes its type.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ratios  # noqa: E402

import flash  # noqa: E402
from flash_ladder import ahead  # noqa: E402
from flash_ladder.bench import cases, competitors, measuring  # noqa: E402

P = 0.1
N = 4096
SHAPES = {"bf16": (4, ratios.HEADS), "fp32": (4, {64: 12, 128: 12})}     # by type: B, and H by d


def shapes() -> Iterator[ratios.Shape]:
    for (dtype, (B, heads)), direction, causal in itertools.product(
            SHAPES.items(), ("fwd", "bwd"), (False, True)):
        for d, H in heads.items():
            taken = (stage_of(direction, dtype, d, causal, B, H, needs) for needs in (("dropout",), ()))
            peer = "efficient" if dtype == "fp32" else "flash"
            stages = ",".join(dict.fromkeys(taken))
            yield ratios.Shape(direction, dtype, d, causal, B, str(H), N, stages, peer)


def stage_of(direction: str, dtype: str, d: int, causal: bool, B: int, H: int, needs: tuple[str, ...]) -> str:
    """The name of the stage that such a call takes here. needs: as of find_stage()."""
    sizes = ahead.a_call(d, causal, N) | {"B": B, "H": H, "H_kv": H}
    return flash.find_stage(None, flash.DTYPES[dtype], flash.default_device(), direction, d=d, sizes=sizes,
                            needs=needs).name


def builds(args: argparse.Namespace) -> Iterator[tuple]:
    """What flash.build() is called with for a shape, without dropout and with it."""
    stages = set(args.stages)
    if args.direction == "bwd":
        stages |= {competitors.forward_stage(stage, args) for stage in args.stages}
    for stage, dropout in itertools.product(stages, (False, True)):
        if dropout and "dropout" not in stage.takes:
            continue
        for tiles in ahead.variants(stage, args.head_dim, args.device, args.causal):
            yield ahead.job(stage, flash.DTYPES[args.dtype], args.head_dim, args.causal, tiles, args.device,
                            False, False, None, None, dropout)


def measured(args: argparse.Namespace, stages: list[str]) -> dict[str, float]:
    """Milliseconds of a call by the stage and by its peer, without dropout and with it.

    stages: which of args.stages a call with dropout takes, and last which one without.
    """
    inputs = cases.random_inputs(N, args)
    calls = {}
    for entry in competitors.competitors(args):
        for p, taken in ((0.0, stages[-1]), (P, stages[0])):
            if entry.is_stage and entry.name != taken:
                continue
            dropping = dataclasses.replace(entry, mask=lambda N, p=p: {"dropout_p": p})
            name = ("stage" if entry.is_stage else "peer") + "_dropout" * (p > 0)
            calls[f"{name}_ms"] = dropping.prepare(args.direction, *inputs)
    for call in calls.values():
        call()
    turns = [{name: statistics.median(measuring.milliseconds(call, args.device))
              for name, call in calls.items()} for _ in range(ratios.TURNS)]
    return {name: statistics.median(turn[name] for turn in turns) for name in calls}


# ---------------------------------------------------------------------------------------- in words
def table(data: dict) -> str:
    """Of dropout.json, for docs/: the time of a call with dropout over that of one without it."""
    lines = ["| type, d | mask | forward | PyTorch | backward | PyTorch |", "|---|---|---:|---:|---:|---:|"]
    found = {(row["dtype"], row["d"], row["causal"], row["pass"]): row for row in data["rows"]}
    for dtype, d, causal in dict.fromkeys(key[:3] for key in found):
        cells = [f"{row[f'{who}_dropout_ms'] / row[f'{who}_ms']:.2f}" for direction in ("fwd", "bwd")
                 for row in [found[dtype, d, causal, direction]] for who in ("stage", "peer")]
        lines.append(f"| {dtype}, {d} | {'causal' if causal else 'none'} | {' | '.join(cells)} |")
    heads = "; ".join(f"{dtype}: B={B}, H={', '.join(map(str, H.values()))}"
                      for dtype, (B, H) in SHAPES.items())
    stages, without = (", ".join(dict.fromkeys(row.get(name, row["stage"]) for row in data["rows"]))
                       for name in ("stage", "stage_without"))
    of_others = f"of {without} " * (without != stages)
    origin = (f"Time of {stages} with dropout_p = {data['p']} over that {of_others}without it, "
              f"N={data['N']}, {heads}. {data['device']}, {data['date']}, by `python results/dropout.py`. "
              "PyTorch: FlashAttention-2 in 16 bits, its efficient backend in fp32.")
    return "\n".join([*lines, "", origin])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    measuring.SECONDS_A_CASE = ratios.SECONDS_A_CASE
    each = {shape: shape.arguments(args.folder) for shape in shapes()}
    origin = measuring.origin(next(iter(each.values())))
    data = {"date": origin["date"][:10], "device": origin["device"], "software": origin["software"], "p": P,
            "N": N, "rows": []}
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("building", total=None)
        ahead.build_all({str(job): job for options in each.values() for job in builds(options)}.values())
        bar.update(task, description="measuring", total=len(each))
        for shape, options in each.items():
            stages = shape.stage.split(",")
            row = {"pass": shape.direction, "dtype": shape.dtype, "d": shape.d, "causal": shape.causal,
                   "B": shape.B, "H": options.H, "stage": stages[0], "stage_without": stages[-1],
                   "peer": shape.peers}
            data["rows"].append(row | measured(options, stages))
            ratios.write(data, args.folder / "dropout.json")
            torch.cuda.empty_cache()
            bar.advance(task)
    print(table(data))


if __name__ == "__main__":
    main()
