"""hopper_tuned without one of its parts at a time: what each is worth where all others are there.

    python results/without.py results/h200                   # writes without.json there; `make readme`

The staircase of bench.py --rungs shows what a rung gained when it was new; here it is taken away from the end
of the branch. A part is switched off by changes of the stage's text, which leave its results right
(tests/test_rungs.py). All of a shape are timed by turns, in a queue that is held back. Without a part ptxas
may find too few registers, and serialise the products: then the time is not that of the part alone.
"""

import argparse
import concurrent.futures
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ratios  # noqa: E402

import flash  # noqa: E402
from flash_ladder import ahead  # noqa: E402
from flash_ladder.bench import decode  # noqa: E402
from flash_ladder.compiled import kernels_of  # noqa: E402

STAGE, DTYPE, B, N = "hopper_tuned", "bf16", 4, 4096


@dataclass(frozen=True)
class Part:
    """What is switched off by `changes` of the stage's text: (old, new), each old one found once.

    rung: which stage it came with. masked, dims: the only calls that have it.
    """

    what: str
    rung: str
    changes: tuple[tuple[str, str], ...]
    masked: bool = False
    dims: tuple[int, ...] = tuple(ratios.HEADS)

    def of(self, text: str) -> str:
        """The stage's text without it."""
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{self.what}: {STAGE} has these lines {text.count(old)} times:\n{old}")
            text = text.replace(old, new)
        return text

    def matters(self, d: int, causal: bool) -> bool:
        return d in self.dims and (causal or not self.masked)


PARTS = (
    Part("P V under the softmax", "overlap",
         tuple((f"wgmma_wait<1>();\n      K_smem.release({step});",
                f"wgmma_wait<0>();\n      K_smem.release({step});") for step in ("step + t", "step"))),
    Part("O rescaled only where the maximum has grown much", "lazy_rescale",
         (("constexpr float slack = d > 64 ? 8.f : 0.f;", "constexpr float slack = 0.f;"),), dims=(128, 256)),
    Part("turns of warpgroups", "pingpong",
         (("const Turns<Br / 64> turns(warp / 4);", "const Turns<1> turns(0);"),)),
    Part("blocks that take tile after tile", "persistent",
         (("blocks = min(tiles, multiprocessors());", "blocks = tiles;"),)),
    Part("the longest tiles first", "persistent",
         (("const int i = Tr - 1 - work.tile, b", "const int i = work.tile, b"),
          ("return (Tr - 1 - work.tile) * Br + 16 * warp;", "return work.tile * Br + 16 * warp;"),
          ("mask.key_tiles(Tr - 1 - work.tile);", "mask.key_tiles(work.tile);")), masked=True),
    Part("several heads together", "persistent",
         (("heads_together = Mask::all_keys ? 1 : heads_in_L2(p.B * p.H, p.N_k, 2 * d, p.H / p.H_kv);",
           "heads_together = 1;"),), masked=True),
    Part("the next tile's first product under this one's last", "seamless",
         (("constexpr bool seamless = d <= 128 && Br * pitch <= 128 * 128;",
           "constexpr bool seamless = false;"),), dims=(64, 128)),
    Part("the wait for K before the exponentials", "early_wait",
         (("constexpr bool early_wait = d > 64 || CAUSAL;", "constexpr bool early_wait = false;"),)),
    Part("no more of the diagonal than a warpgroup needs", "cut_diagonal",
         (("const auto needed = mask.needed<half_cols>(tiles, end, first_row(work) / 64 * 64 + 63);",
           "const Mask::Needed needed = {end, false};"),), masked=True),
    Part("O by the copy engine", "hopper_tuned",
         (("store_panels(O_map, O_smem, O_reg, Br, 16 * warp, first_row(work), work.h, work.b);",
           "store_rows(p, O_reg, work.bh, first_row(work));"),)),
)


def shapes() -> Iterator[tuple[int, bool]]:
    """d, causal"""
    return itertools.product(ratios.HEADS, (False, True))


def written(folder: Path) -> dict[str, Path]:
    """The stage, as "", and the variants, by what they lack: files in this folder."""
    text = next(stage for stage in flash.stages("fwd") if stage.name == STAGE).path.read_text()
    files = {"": folder / f"{STAGE}.cuh"}
    files[""].write_text(text)
    for n, part in enumerate(PARTS):
        files[part.what] = folder / f"{STAGE}_{n}.cuh"
        files[part.what].write_text(part.of(text))
    return files


def measured(d: int, causal: bool, files: dict[str, Path]) -> dict[str, float]:
    """Milliseconds of a call, by what is lacking."""
    q, k, v = (torch.randn(B, ratios.HEADS[d], N, d, device="cuda", dtype=flash.DTYPES[DTYPE])
               for _ in range(3))
    able = {"", *(part.what for part in PARTS if part.matters(d, causal))}
    return decode.by_turns({what: lambda _, file=file: flash.attention(q, k, v, causal=causal, stage=file)
                            for what, file in files.items() if what in able})


def tiles_of(stage: flash.Stage, d: int, causal: bool, shared: int) -> dict[str, int]:
    return stage.tiles(d, shared, B * ratios.HEADS[d] * N, causal)


def builds(files: dict[str, Path], device: torch.device) -> Iterator[tuple]:
    """What flash.build() is called with."""
    for file, (d, causal) in itertools.product(files.values(), shapes()):
        stage = flash.read_stage(file, "fwd")
        tiles = tiles_of(stage, d, causal, flash.shared_memory_per_block(device))
        yield ahead.job(stage, flash.DTYPES[DTYPE], d, causal, tiles, device)


def is_serialised(file: Path, d: int, causal: bool) -> bool:
    """Whether ptxas serialises products of a variant on sm_90a."""
    stage = flash.read_stage(file, "fwd")
    tiles = tiles_of(stage, d, causal, 227 * 1024)
    macros = flash.definitions(stage, flash.DTYPES[DTYPE], d, causal, tiles)
    return any(kernel.serialised for kernel in kernels_of(stage, macros, "sm_90a"))


def serialised(files: dict[str, Path]) -> dict[tuple[int, bool], list[str]]:
    """Of which variants, by shape."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = {shape: {what: pool.submit(is_serialised, file, *shape) for what, file in files.items()}
                 for shape in shapes()}
    return {shape: [what for what, one in of.items() if one.result()] for shape, of in found.items()}


def table(data: dict) -> str:
    """Of without.json, for docs/: time over that of the whole stage."""
    found = {(row["d"], row["causal"]): row["ms"] for row in data["rows"]}
    lost = {(row["d"], row["causal"]): row["serialised"] for row in data["rows"]}
    heads = [f"d={d} {'causal' if causal else 'full'}" for d, causal in found]
    lines = [f"| without | rung | {' | '.join(heads)} |", "|---|---|" + "---:|" * len(found)]
    for part in PARTS:
        cells = [f"{ms[part.what] / ms['']:.2f}" + " s" * (part.what in lost[shape]) if part.what in ms
                 else "-" for shape, ms in found.items()]
        lines.append(f"| {part.what} | {part.rung} | {' | '.join(cells)} |")
    heads_of = ", ".join(f"{H} at d={d}" for d, H in ratios.HEADS.items())
    return "\n".join([*lines, "", f"Time of {STAGE} without a part over its time with all of them. {DTYPE}, "
                      f"B={B}, N={N}, H={heads_of}. {data['device']}, {data['date']}, by `python "
                      "results/without.py`. -: such a call does not have it. s: ptxas serialises the "
                      "products of what is left, so it is more than the part's time."])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    device = torch.device("cuda")
    data = {"date": time.strftime("%Y-%m-%d"), "device": flash.describe_device(device),
            "software": {"torch": torch.__version__, "cuda": torch.version.cuda}, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        files = written(Path(folder))
        ahead.build_all(builds(files, device))
        lost = serialised(files)
        for d, causal in track(list(shapes()), "measuring", console=Console(stderr=True)):
            data["rows"].append({"d": d, "causal": causal, "ms": measured(d, causal, files),
                                 "serialised": lost[d, causal]})
            ratios.write(data, args.folder / "without.json")
    print(table(data))


if __name__ == "__main__":
    main()
