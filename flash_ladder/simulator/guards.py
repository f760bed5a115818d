"""Arrays between red zones: where each begins, and which element an address is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GUARD_ROWS = 64        # of red zone before and after the rows of a head
GUARD_BYTES = 1 << 14  # of red zone around memory without rows
ALIGNMENT = 128        # of red zones and heads: as a GPU's cache lines


@dataclass
class Array:
    """Global memory as the checker knows it."""

    number: int
    name: str
    region: torch.Tensor | None  # uint8: with its red zones; None once it is forgotten
    start: int                 # of element 0, in bytes from the region's start
    shape: tuple[int, ...]
    strides: tuple[int, ...]   # in bytes
    element_bytes: int

    def element(self, offset: int) -> str:
        """The name of the element at an offset in the region, such as K[0, 1, 5, 3]."""
        index = self._index(offset)
        shape = "" if self._holds(index) else f", outside of its shape {self.shape}"
        name = f"({self.name})" if "," in self.name else self.name
        return f"{name}[{', '.join(map(str, index))}]{shape}"

    def _index(self, offset: int) -> list[int]:
        index, rest = [0] * len(self.shape), offset - self.start
        long = [axis for axis in range(len(self.shape)) if self.shape[axis] > 1 and self.strides[axis]]
        for axis in sorted(long or range(len(self.shape))[-1:], key=lambda axis: -self.strides[axis]):
            index[axis], rest = divmod(rest, self.strides[axis] or self.element_bytes)
        if {1, 2} < set(long) and len(index) == 4 and index[2] >= self.shape[2] + GUARD_ROWS // 2:
            rows = self.strides[1] // self.strides[2]  # nearer to the next head
            index[1:3] = [index[1] + 1, index[2] - rows]
        return index

    def _holds(self, index: list[int]) -> bool:
        return all(0 <= i < size for i, size in zip(index, self.shape, strict=True))


def guarded_strides(x: torch.Tensor) -> list[int]:
    """Strides, in elements, for a copy with red zones between the heads of a (B, H, N, d) tensor.

    A repeated dimension (stride 0) stays one. Every row keeps its place within a cache line.
    """
    if x.dim() != 4:
        return list(x.stride())
    B, H, N, d = x.shape
    row = x.stride(2) if N > 1 and (x.stride(2) == 0 or d <= x.stride(2) <= 4 * d) else d
    line = ALIGNMENT // x.element_size()
    head = _at_least((N + GUARD_ROWS) * max(row, d), x.stride(1), line)
    batch = _at_least(H * head, x.stride(0), line)
    return [0 if B > 1 and x.stride(0) == 0 else batch, 0 if H > 1 and x.stride(1) == 0 else head, row, 1]


def _at_least(least: int, like: int, modulus: int) -> int:
    """The first number from `least` on that is `like` modulo `modulus`."""
    return least + (like - least) % modulus


def once(x: torch.Tensor) -> torch.Tensor:
    """Without the repetitions of dimensions with stride 0."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one, both included."""
    steps = (n - 1 for n in shape)
    return 0 if 0 in shape else 1 + sum(n * stride for n, stride in zip(steps, strides, strict=True))


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors share elements."""
    starts, ends = zip(*((t.data_ptr(), t.data_ptr() + extent(t.shape, t.stride()) * t.element_size())
                         for t in (x, y)), strict=True)
    if max(starts) >= min(ends):
        return False
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return True  # of NumPy's, say
    used = torch.zeros(x.untyped_storage().nbytes(), dtype=torch.bool, device="cpu")

    def bytes_of(t: torch.Tensor) -> torch.Tensor:
        size = t.element_size()
        strides = [*(stride * size for stride in t.stride()), 1]
        return used.as_strided([*t.shape, size], strides, t.storage_offset() * size)

    once(bytes_of(x)).fill_(True)
    return bool(bytes_of(y).any())


# --------------------------------------------------------------------------------------- findings in words
