"""Ends of branches beside PyTorch's backends, over many shapes, in one process: fp32's best stage, Ampere's.

    python results/ratios.py results/h200                  # writes ratios.json there
    python results/ratios.py results/h200 --dtypes fp32    # measures these types, and keeps the others' rows

A stage is checked and timed as by bench.py, for a shorter time; but stages and peers by turns, as a GPU that
is hot and at its power limit is slower than before. The middle turn of each is kept. The file is written
after each shape, so that a run that is cut off keeps its rows.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import flash  # noqa: E402
from flash_ladder import ahead  # noqa: E402
from flash_ladder.bench import arguments, cases, competitors, measuring  # noqa: E402
from flash_ladder.bench.rungs import build_all  # noqa: E402

TURNS = 3
SECONDS_A_CASE = 0.1                               # in a turn
HEADS = {64: 32, 128: 16, 256: 8}                  # by d, for 16 bits: H d is 2048, as in a model
LENGTHS = {2048: 8, 4096: 4, 16384: 1}             # B by N, for 16 bits: B N is 16384
AMPERE = "ampere_tuned"                            # beside FlashAttention-2, which is for Ampere, too
KEPT = ("name", "label", "N", "status", "message", *measuring.TIMES, "error", "error_in", "allowed_error")


@dataclass(frozen=True)
class Shape:
    """What is measured at once: a stage and peers, for the same tensors."""

    direction: str
    dtype: str
    d: int
    causal: bool
    B: int
    heads: str      # as bench.py's --heads
    N: int
    stage: str
    peers: str      # as bench.py's --peers

    def arguments(self, folder: Path) -> argparse.Namespace:
        """bench.py's arguments for it."""
        args, = arguments.parse_arguments([
            "--pass", self.direction, "--stages", self.stage, "--peers", self.peers, "--dtype", self.dtype,
            "--batch", str(self.B), "--heads", self.heads, "--head-dim", str(self.d),
            "--causal" if self.causal else "--no-causal", "--seqlens", str(self.N), "--out", str(folder)])
        return args

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.direction} {self.dtype} d={self.d} {mask} N={self.N}"


def shapes(dtypes: list[str]) -> Iterator[Shape]:
    """Those to measure, of these types: in fp32 the stage that a call takes here without a name."""
    for dtype, direction in itertools.product(dtypes, ("fwd", "bwd")):
        if dtype == "fp32":
            for d, causal, N in itertools.product((64, 128), (True, False), (1024, 2048, 4096)):
                yield Shape(direction, dtype, d, causal, 4, "12", N, best_stage(direction, dtype, d),
                            "efficient")
            continue
        for (d, H), causal, (N, B) in itertools.product(HEADS.items(), (True, False), LENGTHS.items()):
            yield Shape(direction, dtype, d, causal, B, str(H), N, AMPERE, "flash")
        if dtype == "bf16":  # many query heads to a key head, and few blocks
            yield Shape(direction, dtype, 256, True, 2, "8:1", 1024, AMPERE, "flash,math")


def best_stage(direction: str, dtype: str, d: int) -> str:
    """The name of the stage that a large call with a mask takes here without one."""
    return flash.find_stage(None, flash.DTYPES[dtype], flash.default_device(), direction, d=d,
                            sizes=ahead.a_call(d, True, ahead.SIZES[-1], H_kv=2)).name


def middle(turns: tuple[dict, ...]) -> dict:
    """Of one stage's rows that of the median time; or the first that is not ok."""
    failed = [row for row in turns if row["status"] != "ok"]
    return failed[0] if failed else sorted(turns, key=lambda row: row["median_ms"])[len(turns) // 2]


def by_turns(args: argparse.Namespace, bar: Progress) -> list[dict]:
    """The stage's row, and that of each peer that takes the arguments."""
    N, entries = args.seqlens[0], competitors.competitors(args)
    for label, reason in args.not_run.items():
        bar.console.print(f"Not run: {label}: {reason}")
    try:
        case = cases.make_case(N, args)
        turns = [[measuring.measure(entry, case, args) for entry in entries] for _ in range(TURNS)]
        return [middle(same) for same in zip(*turns, strict=True)]
    except RuntimeError as error:  # too long an N; or a GPU that an earlier error left unusable
        return [measuring.empty_row(entry, N) | measuring.failure(error) for entry in entries]


def measured(args: argparse.Namespace, bar: Progress) -> list[dict]:
    """The same, with the shape, and of what is measured what is kept."""
    shape = {"pass": args.direction, "dtype": args.dtype, "d": args.head_dim, "causal": args.causal,
             "B": args.batch, "H": args.H, "H_kv": args.H_kv}
    return [shape | {name: row[name] for name in KEPT} for row in by_turns(args, bar)]


def kept(file: Path, dtypes: list[str], origin: dict) -> dict:
    """The file's result without the rows of these types, measured with the same device and software; empty if
    there are none."""
    data = json.loads(file.read_text()) if file.exists() else {"date": {}, "rows": []}
    data["rows"] = [row for row in data["rows"] if row["dtype"] not in dtypes]
    data["date"] = {row["dtype"]: data["date"][row["dtype"]] for row in data["rows"]}
    if data["rows"] and (data["device"], data["software"]) != (origin["device"], origin["software"]):
        sys.exit(f"{file} has rows of {', '.join(data['date'])}, measured on {data['device']} with "
                 f"{data['software']}: measure these types too, here, or write into another folder")
    return data


def write(data: dict, file: Path) -> None:
    """With a line for each row. Never half of it: the old file, or the new one."""
    rest = {key: value for key, value in data.items() if key != "rows"}
    head = json.dumps(rest | {"rows": []}, indent=1).removesuffix("[]\n}")
    rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in data["rows"])
    beside = file.with_suffix(".tmp")
    beside.write_text(f"{head}[\n{rows}\n ]\n}}\n")
    os.replace(beside, file)


def run(cases: dict[Shape, argparse.Namespace], data: dict, file: Path) -> None:
    """Measure all, shape by shape, into `data` and the file, with a progress bar on stderr."""
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=Console(stderr=True)) as bar:
        build_all(list(cases.values()), bar)
        task = bar.add_task("measuring", total=len(cases))
        for shape, args in cases.items():
            bar.update(task, description=str(shape))
            data["rows"] += measured(args, bar)
            write(data, file)
            torch.cuda.empty_cache()
            bar.advance(task)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtypes", metavar="A,B", default=",".join(flash.DTYPES),
                        help="default: %(default)s")
    args = parser.parse_args(argv)
    dtypes = args.dtypes.split(",")
    if unknown := set(dtypes) - set(flash.DTYPES):
        parser.error(f"--dtypes: no {', '.join(sorted(unknown))}; there are {', '.join(flash.DTYPES)}")
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    measuring.SECONDS_A_CASE = SECONDS_A_CASE
    file = args.folder / "ratios.json"
    cases = {shape: shape.arguments(args.folder) for shape in shapes(dtypes)}
    origin = measuring.origin(next(iter(cases.values())))
    old = kept(file, dtypes, origin)
    data = {"date": old["date"] | dict.fromkeys(dtypes, origin["date"][:10]), "device": origin["device"],
            "software": origin["software"], "rows": old["rows"]}
    run(cases, data, file)


if __name__ == "__main__":
    main()
