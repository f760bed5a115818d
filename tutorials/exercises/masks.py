"""Masks that exercises are about: with their arguments, and in PyTorch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

import flash

Runs = tuple[tuple[int, int], ...]       # ids of neighbours: (id, how many), ...


@dataclass(frozen=True)
class MaskCall:
    """One of flash.masks, with its arguments in a call: ints; a tuple of ints, one a batch element; or a
    tuple of Runs."""

    name: str
    arguments: tuple = ()

    def mask(self, file: Path) -> flash.masks.Mask:
        """With these arguments, and a file in place of its own."""
        made = getattr(flash.masks, self.name)(*self._tensors())
        return flash.masks.Mask(json.dumps(str(file.absolute())), made.arguments, made.ints, made.floats)

    def seen(self, N_q: int, N_k: int) -> torch.Tensor:
        """Which pairs of a query and a key count, (B or 1, 1, N_q, N_k)."""
        col = torch.arange(N_k)
        at = torch.arange(N_q)[:, None] + N_k - N_q       # where a query stands, by the last key
        if self.name == "none":
            return torch.ones(1, 1, N_q, N_k, dtype=torch.bool)
        if self.name == "window":
            left, right = self.distances(N_q + N_k)
            return ((col >= at - left) & (col <= at + right))[None, None]
        if self.name == "prefix":
            return (col < self._tensors()[0][:, None, None, None]) | (col <= at)
        queries, keys = self.ids()
        queries, keys = queries[:, None, :, None], keys[:, None, None]
        return queries == keys if self.name == "document" else (keys >= 0) & (keys <= queries)

    def distances(self, far: int) -> tuple[int, int]:
        """Of a window: how many keys to the left and to the right; `far` for all."""
        left, right = (n if n >= 0 else far for n in self.arguments)
        return left, right

    def ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries (B, N_q) and of keys (B, N_k)."""
        queries, keys = self._tensors()
        return queries, keys

    def _tensors(self) -> list:
        return [x if isinstance(x, int) else torch.tensor([_ids(y) for y in x], dtype=torch.int32)
                for x in self.arguments]

    def __str__(self) -> str:
        """As one would write it."""
        shown = [str(x) if isinstance(x, int) else f"[{', '.join(map(_shown, x))}]" for x in self.arguments]
        return f"{self.name}({', '.join(shown)})"


def _ids(x: int | Runs) -> int | list[int]:
    return x if isinstance(x, int) else [number for number, count in x for _ in range(count)]


def _shown(x: int | Runs) -> str:
    return str(x) if isinstance(x, int) else " + ".join(f"[{number}] * {count}" for number, count in x)


# ------------------------------------------------------------------------------------ in the calls of a check
# For the ten CASES, in their order
WINDOWS = ((16, 0), (20, 7), (33, 0), (25, 0), (0, 0), (60, 10), (500, 500), (200, -1), (40, 30), (-1, 5))
PREFIXES = ((50,), (100, 20), (40,), (60,), (120,), (100,), (1,), (70,), (100,), (0,))


def in_case(name: str, number: int, B: int, N_q: int, N_k: int) -> MaskCall:
    """The mask of this name in the call of a number, for tensors of these sizes."""
    if name == "window":
        return MaskCall(name, WINDOWS[number])
    if name == "prefix":
        return MaskCall(name, (PREFIXES[number],))
    keys = _random(name, number, B, N_k)
    return MaskCall(name, (keys if N_q == N_k else _random(name, number + 100, B, N_q), keys))


def _random(name: str, seed: int, B: int, N: int) -> tuple[Runs, ...]:
    """Documents one after the other; or blocks in any order, with padding among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(B):
        runs: list[tuple[int, int]] = []
        while (left := N - sum(count for _, count in runs)) > 0:
            length, block = (int(torch.randint(low, high, (), generator=generator))
                             for low, high in ((5, 45), (-1, 4)))
            runs.append((len(runs) if name == "document" else block, min(length, left)))
        rows.append(tuple(runs))
    return tuple(rows)


def _alike(name: str, *runs: tuple[int, int]) -> MaskCall:
    return MaskCall(name, ((runs,), (runs,)))


PLAIN = {"window": MaskCall("window", (64, 0)), "prefix": MaskCall("prefix", ((20,),)),    # for N = 128
         "document": _alike("document", (0, 32), (1, 64), (2, 32)),
         "block_causal": _alike("block_causal", (0, 64), (1, 32), (2, 32))}
SCORE = {"window": MaskCall("window", (40, 0)), "prefix": MaskCall("prefix", ((96,),)),    # for N = 160
         "document": _alike("document", (0, 50), (1, 110)),
         "block_causal": _alike("block_causal", (0, 32), (1, 64), (2, 32), (-1, 32))}
