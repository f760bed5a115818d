"""A mask with the arguments of one call, as a plan takes it: its file, and the gradients of its tensors.

masks.py makes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .cache import build_folder
from .launch import MaskTensor
from .sources import STAGES
from .stage import MANY


@dataclass(frozen=True, eq=False)
class Bound:
    """A mask with the arguments of one call: four-dimensional tensors, ints, floats."""

    text: str
    tensors: tuple[torch.Tensor, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    kinds: tuple[str, ...] = ()          # of gradients, as in Argument of masks.py,
    wanted: tuple[bool, ...] = ()        # and whether there is to be one
    names: tuple[str, ...] = ()
    diagonals: int = 0                   # bit n: to ints[n] the kernel adds N_k - N_q, which it alone knows

    @property
    def layout(self) -> tuple:
        """All that a plan depends on: everything but addresses."""
        return (self.text, self.ints, self.floats, self.diagonals,
                *((x.shape, x.stride(), x.dtype) for x in self.tensors))

    @property
    def file(self) -> Path:
        return file_of(self.text)

    @property
    def window(self) -> int:
        """So many keys a row sees at most, as far as the ints say."""
        return _window(json.loads(self.text), self.ints)

    @property
    def extents(self) -> tuple[int, int]:
        """Batch elements and heads that differ."""
        B, H = (max([1, *(x.shape[n] for x in self.tensors)]) for n in (0, 1))
        return B, H

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Bound:
        return replace(self, tensors=tuple(tensors))


def _window(expression: Any, ints: tuple[int, ...]) -> int:
    if expression == "window":
        return max(ints[1] - ints[0] + 1, 0)
    if expression[0] != "And":
        return MANY
    _, a, b, _, ints_of_a, _ = expression
    return min(_window(a, ints[:ints_of_a]), _window(b, ints[ints_of_a:]))


def strides_of(x: torch.Tensor) -> list[int]:
    """As struct MaskTensor has them: 0 where it is broadcast."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride())]


def fill_mask(params, visible: Bound, start: int) -> list[int]:
    """Write a mask's arguments, but addresses, to a MaskParams; where those come, in bytes."""
    params.B, params.H = visible.extents
    params.diagonals = visible.diagonals
    params.ints[:len(visible.ints)] = visible.ints
    params.floats[:len(visible.floats)] = visible.floats
    for n, x in enumerate(visible.tensors):
        params.tensors[n] = MaskTensor(None, *strides_of(x))
    at = [start + n * ctypes.sizeof(MaskTensor) for n in range(len(visible.tensors))]
    return [*at, start + type(params).gradient.offset]


def gradients_of(bound: Bound, dS: torch.Tensor) -> list[torch.Tensor | None]:
    """By the mask's tensors, of dS (B, H, N_q, N_k) in float32: added up over what is broadcast, in a fixed
    order."""
    return [_gradient(x, kind, dS) if wanted else None
            for x, kind, wanted in zip(bound.tensors, bound.kinds, bound.wanted)]


def _gradient(x: torch.Tensor, kind: str, dS: torch.Tensor) -> torch.Tensor:
    if kind == "diagonals":
        dS = _diagonals(dS)
    axes = [axis for axis in range(4) if x.shape[axis] == 1 and dS.shape[axis] > 1]
    return (dS.sum(axes, keepdim=True) if axes else dS).to(x.dtype)


def _diagonals(dS: torch.Tensor) -> torch.Tensor:
    """(B, H, 1, N_q + N_k - 1): of each distance of a key from a query the sum, along the diagonal."""
    B, H, N_q, N_k = dS.shape
    rows = torch.nn.functional.pad(dS, (N_q - 1, 0)).flatten(2)     # in rows that are one longer, each one
    skewed = torch.nn.functional.pad(rows, (0, N_q)).view(B, H, N_q, N_q + N_k)   # begins one further left
    return skewed.sum(2, keepdim=True)[..., :-1]


# ------------------------------------------------------------------------------------------ files
def file_of(text: str) -> Path:
    """The file to compile a stage with; of a combination, it is written into the build folder."""
    expression = json.loads(text)
    if isinstance(expression, str):
        return Path(expression) if os.sep in expression else STAGES / "masks" / f"{expression}.cuh"
    parts: list[str] = []

    def rule(x) -> str:
        if isinstance(x, str):
            name = f"mask_{len(parts)}"
            file = x if os.sep in x else f"stages/masks/{x}.cuh"
            parts.append(f'namespace {name} {{\n#include "{file}"\n}}\n')
            return f"{name}::Rule"
        return f"{x[0]}<{rule(x[1])}, {rule(x[2])}, {x[3]}, {x[4]}, {x[5]}>"

    combined = rule(expression)
    source = ("// Mask: a combination, written by flash_ladder. The numbers are how many tensors, ints and "
              f"floats\n// the first one takes.\n{''.join(parts)}using Rule = {combined};\n")
    folder = build_folder() / "masks"
    file = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.cuh"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.is_file() or file.read_text() != source:
            part = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            part.write_text(source)
            part.replace(file)
    except OSError as error:
        raise RuntimeError(f"cannot write to the build folder {build_folder()} ({error.strerror}): "
                           "set FLASH_BUILD_DIR to another one") from None
    return file
