"""bench.py --decode: steps of a few queries over a long cache, in one piece and in pages, beside split_kv,
ampere_tuned, SDPA, its flash backend and flex_attention.

A decode step reads K and V once, and hardly computes: GB/s are of K, V, Q and O, as a share of what a copy
reads and writes. K and V are taken from several buffers in turn, more than any cache holds. On a GPU the
contenders are timed by turns, many calls at a time in a queue that is held back, so that no host time counts;
the median of the turns is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash

from .measuring import failure, origin
from .peers import NO_GPU, flex

QUERIES = {"cuda": [1, 4, 16], "cpu": [1, 4]}
MOST_QUERIES = 16            # of a decode step
ROTATED = {"cuda": 512 << 20, "cpu": 1}      # bytes of K and V in all buffers together, at least
TURNS = {"cuda": 5, "cpu": 1}
CALLS = {"cuda": 24, "cpu": 1}               # in a turn
COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}   # bytes, to see what a copy reaches
PAGE = 64
OURS = ("ours", "split_kv", "paged", "ampere_tuned")
PEERS = ("sdpa", "fa2", "flex")
LABELS = {"ours": "a plain call", "split_kv": "split_kv", "paged": f"pages of {PAGE}",
          "ampere_tuned": "ampere_tuned", "sdpa": "SDPA", "fa2": "SDPA flash", "flex": "flex_attention",
          "fa3": "FlashAttention-3"}
Call = Callable[[int], torch.Tensor]         # of the n-th buffers; gives (B, H, N_q, d)


@dataclass(frozen=True)
class Shape:
    """Of a decode step, in 16 bits. Each query sees all keys."""

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


@dataclass
class Buffers:
    """Random q, k and v (B, heads, N, d), several of each, and the same as a cache in pages."""

    shape: Shape
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    q: list[torch.Tensor] = field(init=False)
    k: list[torch.Tensor] = field(init=False)
    v: list[torch.Tensor] = field(init=False)

    def __post_init__(self):
        shape = self.shape
        count = max(2, -(-ROTATED[self.device] // shape.cache_bytes))
        generator = torch.Generator(self.device).manual_seed(0)

        def random(heads: int, N: int) -> list[torch.Tensor]:
            return [torch.randn(shape.B, N, heads, shape.d, generator=generator, device=self.device,
                                dtype=self.dtype).transpose(1, 2) for _ in range(count)]

        self.q = random(shape.H, shape.N_q)
        self.k, self.v = (random(shape.H_kv, shape.N_k) for _ in "kv")
        self.lengths = torch.full((shape.B,), shape.N_k, dtype=torch.int32, device=self.device)
        pages = torch.randperm(shape.B * shape.N_k // PAGE, generator=generator, device=self.device)
        self.table = pages.view(shape.B, -1).int()

    def at(self, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, heads, N, d), the n-th of each."""
        n %= len(self.q)
        return self.q[n], self.k[n], self.v[n]

    def rows(self, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, N, heads, d)"""
        q, k, v = self.at(n)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def pages(self, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same bytes, taken for pages: other keys than those of k and v, in another order."""
        q, k, v = self.rows(n)
        return q, k.reshape(-1, PAGE, *k.shape[2:]), v.reshape(-1, PAGE, *v.shape[2:])


def contenders(x: Buffers, peers: Iterable[str] = PEERS) -> dict[str, Call]:
    """Each by its name; the first one is flash.attention() as a call without a stage takes it."""
    gqa = x.shape.H != x.shape.H_kv

    def sdpa(n: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(*x.at(n), enable_gqa=gqa)

    def fa2(n: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(n)

    def paged(n: int) -> torch.Tensor:
        return flash.attention_kvcache(*x.pages(n), cache_seqlens=x.lengths,
                                       block_table=x.table).transpose(1, 2)

    def compiled(n: int) -> torch.Tensor:
        if x.device == "cpu":
            raise RuntimeError(NO_GPU)
        return flex(*x.at(n), score_mod=None, block_mask=None)[0]

    found: dict[str, Call] = {
        "ours": lambda n: flash.attention(*x.at(n)),
        "split_kv": lambda n: flash.attention(*x.at(n), stage="split_kv"), "paged": paged,
        "ampere_tuned": lambda n: flash.attention(*x.at(n), stage="ampere_tuned"), "sdpa": sdpa,
        "fa2": fa2, "flex": compiled}
    return {name: call for name, call in found.items() if name in OURS or name in peers}


# ------------------------------------------------------------------------------------------ measuring
def turn(call: Call, device: str) -> float:
    """Milliseconds of one of CALLS calls."""
    if device == "cpu":
        begun = time.perf_counter()
        for n in range(CALLS[device]):
            call(n)
        return 1e3 * (time.perf_counter() - begun) / CALLS[device]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(60_000_000)
    start.record()
    for n in range(CALLS[device]):
        call(n)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS[device]


def by_turns(calls: dict[Any, Call], device: str = "cuda") -> dict[Any, float]:
    """The median of each."""
    for call in calls.values():
        call(0)
        call(1)
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS[device]):
        for name, call in calls.items():
            times[name].append(turn(call, device))
    return {name: statistics.median(each) for name, each in times.items()}


def copy_gb_per_s(device: str = "cuda") -> float:
    """Bytes read and written by a copy."""
    a, b = (torch.empty(COPIED[device], dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * a.numel() / by_turns({"copy": lambda n: b.copy_(a)}, device)["copy"] / 1e6


def error(name: str, o: torch.Tensor, x: Buffers) -> float:
    """The largest error of a contender's result for the first buffers, beside float64."""
    worst, shape = 0.0, x.shape
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


def measured(x: Buffers, calls: dict[str, Call], copy: float) -> list[dict]:
    """A row for each contender; its status and message say why one has no time."""
    rows: dict[str, dict] = {}
    able = dict(calls)
    for name, call in calls.items():
        rows[name] = asdict(x.shape) | {"name": name, "status": "ok", "message": None, "error": None,
                                        "ms": None, "gb_per_s": None, "of_copy": None}
        try:
            rows[name]["error"] = error(name, call(0), x)
        except Exception as problem:  # whatever a peer or its compiler raises
            rows[name] |= {"message": "out of memory"} | failure(problem)
            del able[name]
    for name, ms in by_turns(able, x.device).items():
        gb = x.shape.moved_bytes / ms / 1e6
        rows[name] |= {"ms": ms, "gb_per_s": gb, "of_copy": gb / copy}
    return list(rows.values())


# ------------------------------------------------------------------------------------------ in words
def by_shape(rows: list[dict]) -> dict[Shape, dict[str, dict]]:
    """The rows by shape and name."""
    groups: dict[Shape, dict[str, dict]] = {}
    for row in rows:
        shape = Shape(**{name: row[name] for name in ("B", "N_k", "N_q", "H", "H_kv", "d")})
        groups.setdefault(shape, {})[row["name"]] = row
    return groups


def table(rows: list[dict]) -> str:
    """In Markdown: a line for each shape."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines = [f"| shape | K and V | {' | '.join(LABELS[name] for name in names)} | of the best peer |",
             f"|---|---:|{'---:|' * len(names)}---:|"]
    for shape, found in by_shape(rows).items():
        cells = []
        for name in names:
            row = found.get(name)
            cells.append("-" if row is None else row["status"] if row["ms"] is None else
                         f"{1e3 * row['ms']:.1f} us, {row['gb_per_s']:.0f} ({100 * row['of_copy']:.0f} %)")
        best = min((row["ms"] for name, row in found.items() if row["ms"] and name not in OURS), default=None)
        ours = found["ours"]["ms"]
        share = f"{best / ours:.2f}" if best and ours else "-"
        lines.append(f"| {shape} | {shape.cache_bytes / 2**20:.3g} MiB | {' | '.join(cells)} | {share} |")
    return "\n".join(lines)


def caption(copy: float) -> str:
    return (f"Of each: time, and GB/s of K, V, Q and O, as a share of a copy's {copy:.0f}. Of the best peer: "
            "its time over a plain call's. Each query sees all keys")


def decode(args: argparse.Namespace) -> int:
    """Measure, show and write. Returns the exit status."""
    device = args.device.type
    shapes = [Shape(args.batch, N_k, N_q, args.H, args.H_kv, args.head_dim)
              for N_k in args.seqlens for N_q in args.queries]
    rows: list[dict] = []
    with torch.no_grad():
        copy = copy_gb_per_s(device)
        for shape in shapes:
            x = Buffers(shape, device, flash.DTYPES[args.dtype])
            rows += measured(x, contenders(x, args.peers), copy)
    data = origin(args) | {"copy_gb_per_s": copy, "rows": rows}
    file = args.out / "decode.json"
    file.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    print(f"{table(rows)}\n\n{caption(copy)}. {args.dtype}; {data['device']}.\n")
    for shape, found in by_shape(rows).items():
        for name, row in found.items():
            if row["message"]:
                print(f"{LABELS[name]}, {shape}: {row['message']}", file=sys.stderr)
    print(file)
    return int(any(row["status"] == "failed" for row in rows if row["name"] in OURS))
