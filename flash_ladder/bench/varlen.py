"""bench.py --varlen: packed sequences of mixed lengths beside the same kernel on one shape, a document mask,
SDPA with nested tensors, and flex_attention with a document mask."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import flash

from ..flops import flops_of_pair
from ..grid import PACKED
from .measuring import failure, milliseconds, origin
from .peers import NO_GPU, compiled_flex
from .report import PASSES, number

SEQUENCES = 64
RANGE = {"cuda": (64, 8192), "cpu": (8, 128)}        # of lengths: their logarithms are uniform
PEERS = ("document", "nested", "flex")
LABELS = {"varlen": "attention_varlen", "deterministic": "the same, deterministic", "one": "one shape",
          "document": "document mask", "nested": "SDPA, nested tensors", "flex": "flex_attention"}


def mixed_lengths(device: str, sequences: int = SEQUENCES, seed: int = 0) -> list[int]:
    shortest, longest = RANGE[device]
    share = torch.rand(sequences, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [int(n) for n in shortest * (longest / shortest) ** share]


def one_shape(lengths: list[int]) -> tuple[int, int]:
    """(B, N) with as many FLOPs, and about as many rows: N = sum(n^2) / sum(n) and B = sum(n) / N, which is
    rounded; then N once more, from the FLOPs."""
    pairs, rows = sum(n * n for n in lengths), sum(lengths)
    B = max(1, round(rows * rows / pairs))
    return B, round((pairs / B) ** 0.5)


@dataclass
class Case:
    """Tensors packed, and of the one shape, of what --varlen measures."""

    lengths: list[int]
    H: int
    H_kv: int
    d: int
    causal: bool
    dtype: torch.dtype
    device: str
    packed: list[torch.Tensor] = field(init=False)       # q, k, v, dO: (total, H, d)
    one: list[torch.Tensor] = field(init=False)          # (B, H, N, d)

    def __post_init__(self):
        generator = torch.Generator(self.device).manual_seed(1)

        def random(heads: int, *shape: int) -> torch.Tensor:
            x = torch.randn(heads, *shape, self.d, generator=generator, device=self.device, dtype=self.dtype)
            return x.transpose(0, 1).contiguous()

        (B, N), total = one_shape(self.lengths), sum(self.lengths)
        heads = self.H, self.H_kv, self.H_kv, self.H
        self.packed = [random(n, total) for n in heads]
        self.one = [random(n, B, N) for n in heads]
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        self.starts, self.offsets = starts.to(self.device, torch.int32), starts.to(self.device)
        ids = torch.arange(len(self.lengths), dtype=torch.int32)
        self.ids = ids.repeat_interleave(torch.tensor(self.lengths)).to(self.device)

    def stages(self, deterministic: bool = False) -> dict[str, Any]:
        """Those that a call with packed sequences takes, as arguments of attention()."""
        return {argument: flash.find_stage(None, self.dtype, torch.device(self.device), direction,
                                           deterministic, self.d, needs=("varlen",))
                for argument, direction in (("stage", "fwd"), ("backward", "bwd"))}

    def of_one_shape(self) -> dict[str, Any]:
        """The same kernels without packed sequences: packed's are its parent's."""
        return {argument: stage.after if stage.name in PACKED else stage
                for argument, stage in self.stages().items()}

    def stage_of(self, direction: str, name: str) -> str | None:
        """The name of the stage that is measured; None of a peer."""
        if name in PEERS:
            return None
        found = self.of_one_shape() if name == "one" else self.stages(name == "deterministic")
        stage = found["stage" if direction == "fwd" else "backward"]
        return stage if isinstance(stage, str) else stage.name

    def flops(self, direction: str, name: str) -> int:
        B, N = one_shape(self.lengths)
        lengths = [N] * B if name == "one" else self.lengths
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in lengths)
        return self.H * flops_of_pair(direction, self.d, self.d) * pairs

    def inputs(self, name: str) -> list[torch.Tensor]:
        """q, k, v and dO"""
        if name in ("document", "flex"):
            return [x.transpose(0, 1)[None] for x in self.packed]
        return self.one if name == "one" else self.packed

    def forward(self, name: str) -> Callable:
        """Of q, k and v, as inputs() gives them, to O."""
        causal, gqa = self.causal, self.H != self.H_kv
        if name in ("varlen", "deterministic"):
            return lambda q, k, v: flash.attention_varlen(
                q, k, v, self.starts, causal=causal, deterministic=name == "deterministic")
        if name == "one":
            return lambda q, k, v: flash.attention(q, k, v, causal=causal, **self.of_one_shape())
        if name == "document":
            mask = flash.masks.document(self.ids)
            return lambda q, k, v: flash.attention(q, k, v, causal=causal, mask=mask)
        if self.device == "cpu":
            raise RuntimeError(NO_GPU if name == "flex" else "needs a GPU: for the flash backend")
        if name == "nested":
            return self._nested
        from torch.nn.attention.flex_attention import create_block_mask

        ids, rows = self.ids, sum(self.lengths)

        def seen(b, h, i, j):
            return (ids[i] == ids[j]) & (i >= j) if causal else ids[i] == ids[j]

        blocks = create_block_mask(seen, None, None, rows, rows, device=self.device, _compile=True)
        return lambda q, k, v: compiled_flex()(q, k, v, block_mask=blocks, enable_gqa=gqa)

    def _nested(self, *tensors: torch.Tensor) -> torch.Tensor:
        """PyTorch's FlashAttention-2, which gets cu_seqlens by way of jagged tensors."""
        q, k, v = (torch.nested.nested_tensor_from_jagged(
            x, self.offsets, min_seqlen=min(self.lengths), max_seqlen=max(self.lengths)).transpose(1, 2)
            for x in tensors)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal,
                                                                 enable_gqa=self.H != self.H_kv)
        return o.transpose(1, 2).values()

    def call(self, name: str, direction: str) -> Callable:
        """What is measured, after it has run once."""
        f, (q, k, v, dO) = self.forward(name), self.inputs(name)
        leaves = [x.detach().requires_grad_(direction == "bwd") for x in (q, k, v)]
        o = f(*leaves)
        if direction == "fwd":
            return lambda: [f(*leaves)]
        return lambda: torch.autograd.grad(o, leaves, dO, retain_graph=True)


def measured(case: Case, direction: str, names: list[str], turns: int) -> Iterator[dict]:
    """A row for each, after as many turns: its middle time, TFLOP/s, and the largest difference from ours,
    over our largest element."""
    shape = {"pass": direction, "d": case.d, "causal": case.causal}
    calls: dict[str, Callable] = {}
    results: dict[str, list[torch.Tensor]] = {}
    for name in names:
        try:
            calls[name] = case.call(name, direction)
            results[name] = [x.detach() for x in calls[name]()]
        except Exception as error:  # whatever a compiler of a peer raises: the others are to be measured
            yield shape | {"name": name, "stage": None, "median_ms": None, "tflops": None, "difference": None,
                           "message": "out of memory", **failure(error)}
    differences = {}
    for name, theirs in results.items():
        if name != "one":
            packed = [x[0].transpose(0, 1) if x.dim() == 4 else x for x in theirs]
            differences[name] = max(float((x - y).abs().max() / y.abs().max())
                                    for x, y in zip(packed, results["varlen"]))
    results.clear()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(statistics.median(milliseconds(call, torch.device(case.device))))
    for name, each in times.items():
        median = statistics.median(each)
        yield shape | {"name": name, "stage": case.stage_of(direction, name), "status": "ok", "message": None,
                       "median_ms": median,
                       "tflops": case.flops(direction, name) / median / 1e9,
                       "difference": differences.get(name)}


def names_for(direction: str, peers: list[str]) -> list[str]:
    return ["varlen", *["deterministic"] * (direction == "bwd"), "one", *peers]


def heading(name: str, rows: list[dict]) -> str:
    """Of a column: with the stages that its rows are of."""
    stages = dict.fromkeys(row["stage"] for row in rows if row["name"] == name and row["stage"])
    return LABELS[name] + f" ({', '.join(stages)})" * bool(stages)


def table(rows: list[dict]) -> str:
    """In Markdown: a line for each pass of a shape. What is not ours, also as ours over it."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        groups.setdefault((row["d"], row["causal"], row["pass"]), {})[row["name"]] = row
    names = [name for name in LABELS if any(name in found for found in groups.values())]
    lines = [f"| d | mask | pass | {' | '.join(heading(name, rows) for name in names)} |",
             f"|---|---|---|{'---|' * len(names)}"]
    for (d, causal, direction), found in groups.items():
        ours = found["varlen"]["tflops"]

        def cell(name: str, found: dict[str, dict] = found, ours: float | None = ours) -> str:
            row = found.get(name)
            if row is None or row["tflops"] is None:
                return "-" if row is None else row["status"]
            of_it = f" ({ours / row['tflops']:.2f}×)" if ours and name != "varlen" else ""
            return f"{number(row['tflops'])}{of_it}"
        lines.append(f"| {d} | {'causal' if causal else 'none'} | {PASSES[direction]} | "
                     f"{' | '.join(map(cell, names))} |")
    return "\n".join(lines)


def caption(lengths: list[int], H: int, H_kv: int, dtype: str) -> str:
    B, N = one_shape(lengths)
    heads = f"H={H}" + f" H_kv={H_kv}" * (H_kv != H)
    return (f"TFLOP/s, and attention_varlen's over them. {dtype}, {heads}; {len(lengths)} sequences of "
            f"{min(lengths)} to {max(lengths)} rows, {sum(lengths)} in all; one shape: B={B} N={N}")


def varlen(args: argparse.Namespace) -> int:
    """Measure, show and write. Returns the exit status."""
    lengths = mixed_lengths(args.device.type, SEQUENCES if args.device.type == "cuda" else 4)
    case = Case(lengths, args.H, args.H_kv, args.head_dim, args.causal, flash.DTYPES[args.dtype],
                args.device.type)
    rows: list[dict[str, Any]] = []
    for direction in args.passes:
        rows += measured(case, direction, names_for(direction, args.peers), turns=3)
    file = args.out / "varlen.json"
    data = origin(args) | {"lengths": lengths, "rows": rows}
    file.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    print(f"{table(rows)}\n\n{caption(lengths, args.H, args.H_kv, args.dtype)}; {data['device']}.\n")
    for row in rows:
        if row["message"]:
            print(f"{LABELS[row['name']]}, {PASSES[row['pass']]}: {row['message']}", file=sys.stderr)
    print(file)
    return int(any(row["status"] == "failed" for row in rows if row["name"] in ("varlen", "deterministic")))
