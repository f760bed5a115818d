"""The masks of bench.py --mask: their texts, and what they are for tensors of one length.

Each is written twice: as one of flash.masks, for the stages, and by elements, for the peers and the truth.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flash

from ..bound import file_of
from ..masks import Mask
from ..stage import MANY

# By name: how its numbers are written, the fewest and the most of them
SYNTAX = {"causal": ("", 0, 0), "window": (":LEFT[:RIGHT]", 1, 2), "prefix": (":LENGTH", 1, 1),
          "padding": ("", 0, 0), "document": (":COUNT", 1, 1), "block_causal": ("[:COUNT]", 0, 1),
          "boolean": ("", 0, 0), "bias": ("", 0, 0), "relative_bias": ("", 0, 0), "alibi": ("", 0, 0),
          "softcap": (":CAP", 1, 1)}
BLOCKS = 8                  # of block_causal without a number
MOST_SCORES = 1 << 26       # of a head that are worked on at once


@dataclass(frozen=True)
class Part:
    """One mask, twice. The functions take indices of a batch element, a head, a query and a key, as
    flex_attention's mask_mod and score_mod do.

    Attributes:
        seen: seen(b, h, i, j): whether the query sees the key; None: always.
        score: score(x, b, h, i, j): what a scaled score becomes; None: what it was.
        adds: whether score() just adds to it.
        by: of "BH", what the mask differs by.
    """

    mask: Mask
    seen: Callable | None = None
    score: Callable | None = None
    adds: bool = True
    by: str = ""


@dataclass(frozen=True)
class Pattern:
    """Masks that are joined, for N queries and keys. Without any: all pairs count."""

    parts: tuple[Part, ...]
    B: int
    H: int
    N: int
    device: torch.device

    def joined(self) -> Mask:
        """For flash.attention()."""
        return functools.reduce(operator.and_, (part.mask for part in self.parts))

    @property
    def seen(self) -> Any:
        """All parts' together; None if there is none."""
        def both(f: Callable, g: Callable) -> Callable:
            return lambda b, h, i, j: f(b, h, i, j) & g(b, h, i, j)
        found = [part.seen for part in self.parts if part.seen]
        return functools.reduce(both, found) if found else None

    @property
    def score(self) -> Any:
        """All parts' in turn; None if there is none."""
        def then(f: Callable, g: Callable) -> Callable:
            return lambda x, b, h, i, j: g(f(x, b, h, i, j), b, h, i, j)
        found = [part.score for part in self.parts if part.score]
        return functools.reduce(then, found) if found else None

    @property
    def adds(self) -> bool:
        return all(part.adds for part in self.parts)

    def heads(self, parts: Iterable[Part]) -> list[tuple[int, int]]:
        """(b, h) of each batch element and head for which these parts differ, or of the first."""
        by = "".join(part.by for part in parts)
        return list(itertools.product(range(self.B if "B" in by else 1), range(self.H if "H" in by else 1)))

    def rows(self) -> Iterator[range]:
        """The rows of a head, as many at once as memory shall hold."""
        step = max(1, MOST_SCORES // self.N)
        return (range(begin, min(begin + step, self.N)) for begin in range(0, self.N, step))

    def indices(self, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries, a column, and of keys, a row."""
        i, j = (torch.arange(x.start, x.stop, device=self.device) for x in (rows, range(self.N)))
        return i[:, None], j[None]

    def hidden(self, b: int, h: int, rows: range) -> torch.Tensor | None:
        """(rows, N): true where a query does not see a key; None: nowhere."""
        return ~self._seen(b, h, rows) if self.seen else None

    def _seen(self, b: int, h: int, rows: range) -> torch.Tensor:
        return self.seen(b, h, *self.indices(rows)).expand(len(rows), self.N)

    def of_rows(self, b: int, h: int, rows: range) -> dict:
        """For cases.plain_head: hidden(), and score() as a function of scores alone."""
        score, (i, j) = self.score, self.indices(rows)
        return {"hidden": self.hidden(b, h, rows),
                "score": score and (lambda x: score(x, b, h, i, j))}

    def pairs(self) -> int:
        """How many pairs of a query and a key count, over all batch elements and heads."""
        of = self.heads(self.parts)
        hidden = (self.hidden(b, h, rows) for b, h in of for rows in self.rows())
        none = sum(int(x.sum()) for x in hidden if x is not None)
        return self.B * self.H * self.N * self.N - self.B * self.H // len(of) * none

    def dense_seen(self) -> torch.Tensor:
        """bool (B or 1, H or 1, N, N)."""
        parts = [part for part in self.parts if part.seen]
        return self._dense(parts, torch.bool, self._seen)

    def dense_bias(self, dtype: torch.dtype, hide: bool) -> torch.Tensor:
        """What is added to the scores, (B or 1, H or 1, N, N). hide: -infinity where a key is not seen."""
        def bias(b: int, h: int, rows: range) -> torch.Tensor:
            x = self.score(torch.zeros(len(rows), self.N, device=self.device), b, h, *self.indices(rows))
            hidden = self.hidden(b, h, rows) if hide else None
            return x if hidden is None else x.masked_fill(hidden, -torch.inf)
        return self._dense([part for part in self.parts if part.score or hide], dtype, bias)

    def _dense(self, parts: list[Part], dtype: torch.dtype, of_rows: Callable) -> torch.Tensor:
        of = self.heads(parts)
        x = torch.empty(of[-1][0] + 1, of[-1][1] + 1, self.N, self.N, dtype=dtype, device=self.device)
        for b, h in of:
            for rows in self.rows():
                x[b, h, rows.start:rows.stop] = of_rows(b, h, rows)
        return x


def read(text: str) -> list[tuple[str, list[float]]]:
    """The names and numbers of a text such as causal&document:16.

    Raises:
        ValueError: if it is none.
    """
    found = []
    for one in re.split("[&+]", text):
        name, *numbers = one.strip().split(":")
        name = name.replace("-", "_")
        if name not in SYNTAX:
            known = ", ".join(name + written for name, (written, *_) in SYNTAX.items())
            raise ValueError(f"no mask {one.strip()!r}; there are {known}; & joins them")
        written, fewest, most = SYNTAX[name]
        kind = r"\d+(\.\d*)?" if name == "softcap" else r"\d+"
        if not fewest <= len(numbers) <= most or not all(re.fullmatch(kind, x) for x in numbers):
            raise ValueError(f"{one.strip()!r}; it is {name + written}, with numbers")
        found.append((name, [float(x) if name == "softcap" else int(x) for x in numbers]))
        if name in ("document", "block_causal") and 0 in found[-1][1]:
            raise ValueError(f"{one.strip()!r}; COUNT must be at least 1")
    return found


def pattern(N: int, args: argparse.Namespace) -> Pattern:
    """Of bench.py's arguments. Random tensors are the same in every run.

    Raises:
        ValueError: for a text that is no mask.
    """
    asked = read(args.mask) if args.mask else [("causal", [])] if args.causal else []
    generator = torch.Generator(args.device).manual_seed(N)
    parts = tuple(_part(name, numbers, N, args, generator) for name, numbers in asked)
    return Pattern(parts, args.batch, args.H, N, args.device)


def window(args: argparse.Namespace) -> int:
    """How many keys a row sees at most by the windows of --mask."""
    asked = read(args.mask) if args.mask else []
    return min([MANY, *(int(sum(numbers)) + 1 for name, numbers in asked if name == "window")])


def file(args: argparse.Namespace) -> Path | None:
    """What a stage is compiled with for --mask; None: there is no mask but --causal."""
    return file_of(pattern(1, args).joined().text) if args.mask else None


def _part(name: str, numbers: list, N: int, args: argparse.Namespace, generator: torch.Generator) -> Part:
    B, H, masks = args.batch, args.H, flash.masks

    def integers(least: int, end: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, end, shape, generator=generator, device=args.device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=args.device)

    match name:
        case "causal":
            return Part(masks.causal(), lambda b, h, i, j: j <= i)
        case "window":
            left, right = numbers[0], [*numbers, 0][1]
            return Part(masks.window(left, right), lambda b, h, i, j: (j >= i - left) & (j <= i + right))
        case "prefix":
            length, = numbers
            return Part(masks.prefix(length), lambda b, h, i, j: (j < length) | (j <= i))
        case "padding":     # up to half of the keys, at the end
            end = integers(N - N // 2, N + 1, B).int()
            return Part(masks.padding(end=end), lambda b, h, i, j: j < end[b], by="B")
        case "document" | "block_causal":       # of random lengths
            ends = integers(0, N, B, [*numbers, BLOCKS][0] - 1).sort(1).values
            ids = torch.searchsorted(ends, torch.arange(N, device=args.device).repeat(B, 1), right=True).int()
            if name == "document":
                return Part(masks.document(ids), lambda b, h, i, j: ids[b, i] == ids[b, j], by="B")
            return Part(masks.block_causal(ids), lambda b, h, i, j: ids[b, j] <= ids[b, i], by="B")
        case "boolean":     # half of the pairs, and each query's own
            there = (normal(N, N) > 0).fill_diagonal_(True)
            return Part(masks.boolean(there), lambda b, h, i, j: there[i, j])
        case "bias":
            bias = normal(H, N, N).to(flash.DTYPES[args.dtype])
            return Part(masks.additive(bias), score=lambda x, b, h, i, j: x + bias[h, i, j], by="H")
        case "relative_bias":
            by_distance = normal(H, 2 * N - 1)
            return Part(masks.relative_bias(by_distance), by="H",
                        score=lambda x, b, h, i, j: x + by_distance[h, j - i + N - 1])
        case "alibi":
            slopes = 2.0 ** (-8 / H * torch.arange(1, H + 1, device=args.device))
            return Part(masks.alibi(slopes), by="H",
                        score=lambda x, b, h, i, j: x - slopes[h] * (i - j).abs())
        case "softcap":
            cap, = numbers
            return Part(masks.softcap(cap), adds=False,
                        score=lambda x, b, h, i, j: cap * torch.tanh(x / cap))
    raise AssertionError(name)
