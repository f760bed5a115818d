"""Packed sequences of mixed lengths: attention_varlen() beside the same kernel on one shape, SDPA with nested
tensors, flex_attention with a document mask, and our own document mask, in one process.

    python results/varlen.py results/h200                    # writes varlen.json there
    python results/varlen.py results/h200 --peers none       # ours alone

64 sequences, of lengths from 64 to 8192 whose logarithms are uniform. The one shape has as many FLOPs and
rows: N = sum(n^2) / sum(n), and B = sum(n) / N, rounded; then N anew, from the FLOPs. All are measured by
turns, as by ratios.py; the file is written after each pass. After --seconds no pass begins.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ratios  # noqa: E402

import flash  # noqa: E402
from flash_ladder import ahead  # noqa: E402
from flash_ladder.bench import measuring, report  # noqa: E402
from flash_ladder.bench.peers import compiled_flex  # noqa: E402
from flash_ladder.plan import flops_of_pair  # noqa: E402

SEQUENCES, SHORTEST, LONGEST, H = 64, 64, 8192, 16
DEVICE = "cuda"
CASES = [(d, causal) for d in (64, 128) for causal in (True, False)]
PASSES = ("fwd", "bwd")
PEERS = ("document", "nested", "flex")
LABELS = {"varlen": "attention_varlen", "deterministic": "the same, deterministic", "one": "one shape",
          "document": "document mask", "nested": "SDPA, nested tensors", "flex": "flex_attention"}


def lengths(seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(SEQUENCES, generator=generator, dtype=torch.float64)
    return [int(n) for n in SHORTEST * (LONGEST / SHORTEST) ** share]


def one_shape(of: list[int]) -> tuple[int, int]:
    """(B, N) with as many FLOPs, and about as many rows."""
    pairs, rows = sum(n * n for n in of), sum(of)
    B = max(1, round(rows * rows / pairs))
    return B, round((pairs / B) ** 0.5)


def flops(direction: str, of: list[int], d: int, causal: bool) -> int:
    return H * flops_of_pair(direction, d, d) * sum(n * (n + 1) // 2 if causal else n * n for n in of)


@dataclass
class Case:
    """Tensors of one d and mask: packed, and of the one shape."""

    d: int
    causal: bool
    lengths: list[int]

    def __post_init__(self):
        generator = torch.Generator(DEVICE).manual_seed(1)
        B, N = one_shape(self.lengths)
        self.packed = self._random(generator, sum(self.lengths), H, self.d)
        self.one = self._random(generator, B, H, N, self.d)
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        self.starts, self.offsets = starts.to(DEVICE, torch.int32), starts.to(DEVICE)
        ids = torch.arange(len(self.lengths), dtype=torch.int32)
        self.ids = ids.repeat_interleave(torch.tensor(self.lengths)).to(DEVICE)

    @staticmethod
    def _random(generator: torch.Generator, *shape: int) -> list[torch.Tensor]:
        """q, k, v, dO"""
        options = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
        return [torch.randn(shape, **options) for _ in range(4)]

    def forward(self, name: str) -> Callable:
        """Of q, k, v, as inputs() gives them."""
        causal = self.causal
        if name in ("varlen", "deterministic"):
            return lambda q, k, v: flash.attention_varlen(
                q, k, v, self.starts, causal=causal, deterministic=name == "deterministic")
        if name == "one":
            return lambda q, k, v: flash.attention(q, k, v, causal=causal)
        if name == "document":
            return lambda q, k, v: flash.attention(q, k, v, causal=causal,
                                                   mask=flash.masks.document(self.ids))
        if name == "nested":
            def nested(*tensors):
                q, k, v = (torch.nested.nested_tensor_from_jagged(
                    x, self.offsets, min_seqlen=min(self.lengths),
                    max_seqlen=max(self.lengths)).transpose(1, 2) for x in tensors)
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
                return o.transpose(1, 2).values()
            return nested
        from torch.nn.attention.flex_attention import create_block_mask

        ids, rows = self.ids, sum(self.lengths)

        def seen(b, h, i, j):
            return (ids[i] == ids[j]) & (i >= j) if causal else ids[i] == ids[j]

        blocks = create_block_mask(seen, None, None, rows, rows, device=DEVICE, _compile=True)
        return lambda q, k, v: compiled_flex()(q, k, v, block_mask=blocks)

    def inputs(self, name: str) -> list[torch.Tensor]:
        """q, k, v and dO"""
        if name == "one":
            return self.one
        if name in ("document", "flex"):
            return [x.transpose(0, 1)[None] for x in self.packed]
        return self.packed

    def call(self, name: str, direction: str) -> Callable:
        """What is measured, after it has run once."""
        f, (q, k, v, dO) = self.forward(name), self.inputs(name)
        if direction == "fwd":
            def run():
                with torch.no_grad():
                    return [f(q, k, v)]
        else:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            o = f(*leaves)

            def run():
                return torch.autograd.grad(o, leaves, dO, retain_graph=True)
        run()
        return run


def same_bits(case: Case) -> dict[str, bool]:
    """Whether O, and in deterministic mode dQ, dK and dV, have the bits of one sequence at a time, with the
    same tiles."""
    q, k, v, dO = (x.detach() for x in case.packed)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    tiles = {"Br": 128, "Bc": 128 if case.d <= 64 else 64, "Br_bwd": 64, "Bc_bwd": 128}
    o = flash.attention_varlen(*leaves, case.starts, causal=case.causal, deterministic=True, **tiles)
    gradients = torch.autograd.grad(o, leaves, dO)
    same = {"fwd": True, "bwd": True}
    first = 0
    for n in case.lengths:
        rows = slice(first, first + n)
        first += n
        alone = [x[rows].transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        o_alone = flash.attention(*alone, causal=case.causal, deterministic=True, **tiles)
        found = torch.autograd.grad(o_alone, alone, dO[rows].transpose(0, 1)[None])
        same["fwd"] &= torch.equal(o_alone[0].transpose(0, 1), o[rows])
        same["bwd"] &= all(torch.equal(x[0].transpose(0, 1), y[rows]) for x, y in zip(found, gradients))
    return same


def same_values(case: Case, results: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    """Of each peer, the largest difference from ours, over our largest element: all compute the same."""
    ours, found = results["varlen"], {}
    for name, theirs in results.items():
        if name not in ("varlen", "one"):
            packed = [x[0].transpose(0, 1) if x.dim() == 4 else x for x in theirs]
            found[name] = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(packed, ours))
    return found


def builds() -> list[tuple]:
    """What flash.build() is called with, for all of it, but document masks: those build in their turn."""
    device, jobs = torch.device("cuda", torch.cuda.current_device()), {}
    for d, causal in CASES:
        for direction, deterministic in (("fwd", False), ("bwd", False), ("bwd", True)):
            stage = flash.find_stage(None, torch.bfloat16, device, direction, deterministic, d)
            for tiles in ahead.variants(stage, d, device, causal):
                for varlen in (False, True):
                    job = ahead.job(stage, torch.bfloat16, d, causal, tiles, device, deterministic, False,
                                    None, None, False, False, varlen)
                    jobs[str(job)] = job
    return list(jobs.values())


def measured(case: Case, direction: str, names: list[str], say) -> Iterator[dict]:
    """A row for each: the middle of the turns."""
    shape = {"pass": direction, "d": case.d, "causal": case.causal}
    calls, times, results = {}, {}, {}
    for name in names:
        try:
            calls[name] = case.call(name, direction)
            results[name] = [x.detach() for x in calls[name]()]
        except Exception as error:  # whatever a compiler of a peer raises: the others are to be measured
            torch.cuda.empty_cache()
            yield shape | {"name": name, "median_ms": None, "tflops": None, "difference": None,
                            **measuring.failure(error)}
            say(f"{name}: {error}")
    differences = same_values(case, results)
    results.clear()
    for _ in range(ratios.TURNS):
        for name, call in calls.items():
            device = torch.device(DEVICE)
            times.setdefault(name, []).append(statistics.median(measuring.milliseconds(call, device)))
    B, N = one_shape(case.lengths)
    for name, each in times.items():
        median = statistics.median(each)
        work = flops(direction, [N] * B if name == "one" else case.lengths, case.d, case.causal)
        yield shape | {"name": name, "status": "ok", "message": None, "median_ms": median,
                       "tflops": work / median / 1e9, "difference": differences.get(name)}


def run(names: list[str], data: dict, file: Path, seconds: float, say) -> None:
    begun = time.perf_counter()
    with contextlib.suppress(RuntimeError):      # an error comes again, in its case
        say(f"{len(ahead.build_all(builds()))} builds")
    for d, causal in CASES:
        case = Case(d, causal, lengths())
        for direction in PASSES:
            what = f"d={d}, {'causal' if causal else 'full'}, {direction}"
            if time.perf_counter() - begun > seconds:
                data.setdefault("left_out", []).append(f"{what}: no time left")
                continue
            asked = [name for name in names if name != "deterministic" or direction == "bwd"]
            data["rows"] += measured(case, direction, asked, say)
            data["rows"] = data.pop("rows")      # the last key, for a line each
            ratios.write(data, file)
            say(what)
            torch.cuda.empty_cache()
        data.setdefault("same_bits", {})[f"d={d} {'causal' if causal else 'full'}"] = same_bits(case)
    data["rows"] = data.pop("rows")
    ratios.write(data, file)


def table(data: dict) -> str:
    """The result in Markdown: a line for each pass."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in data["rows"]:
        groups.setdefault((row["d"], row["causal"], row["pass"]), {})[row["name"]] = row
    names = [name for name in LABELS if any(name in found for found in groups.values())]
    lines = [f"| d | mask | pass | {' | '.join(LABELS[name] for name in names)} |",
             f"|---|---|---|{'---|' * len(names)}"]
    for (d, causal, direction), found in groups.items():
        ours = found["varlen"]["tflops"]
        cells = []
        for name in names:
            row = found.get(name)
            if row is None or row["tflops"] is None:
                cells.append("-" if row is None else row["status"])
                continue
            of_ours = f" ({ours / row['tflops']:.2f}×)" if name != "varlen" else ""
            cells.append(f"{report.number(row['tflops'])}{of_ours}")
        lines.append(f"| {d} | {'causal' if causal else 'none'} | {report.PASSES[direction]} | "
                     f"{' | '.join(cells)} |")
    of = data["lengths"]
    B, N = one_shape(of)
    origin = (f"TFLOP/s, and in brackets attention_varlen's as a multiple. bf16, H={H}; {len(of)} sequences "
              f"of {min(of)} to {max(of)} rows, {sum(of)} in all; one shape: B={B} N={N}. "
              f"{data['device']}; {data['date']}, by `python results/varlen.py`.")
    said = {True: "the same", False: "OTHER"}
    bits = "; ".join(f"{name}: forward {said[same['fwd']]}, deterministic backward {said[same['bwd']]}"
                     for name, same in data["same_bits"].items())
    failed = [f"{LABELS[row['name']]}, d={row['d']}, {row['pass']}: {row['message']}"
              for row in data["rows"] if row["message"]] + data.get("left_out", [])
    return "\n\n".join(["\n".join(lines), origin, f"The bits of one sequence at a time: {bits}.",
                        *[f"Failed: {'; '.join(failed)}."] * bool(failed)])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", metavar="A,B", default=",".join(PEERS),
                        help="or none; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=200, help="after which no pass begins; %(default)s")
    args = parser.parse_args(argv)
    peers = [] if args.peers == "none" else args.peers.split(",")
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--peers: no {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    begun, measuring.SECONDS_A_CASE = time.perf_counter(), ratios.SECONDS_A_CASE
    data = {"date": time.strftime("%Y-%m-%d"), "device": flash.describe_device(torch.device("cuda")),
            "software": {"torch": torch.__version__, "cuda": torch.version.cuda}, "lengths": lengths(),
            "rows": []}

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {text}", flush=True)

    run(["varlen", "deterministic", "one", *peers], data, args.folder / "varlen.json", args.seconds, say)
    print(f"\n{table(data)}")


if __name__ == "__main__":
    main()
