"""What a mask leaves of a matrix of scores, tile by tile: as the kernels see it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .bound import Bound, fill_mask
from .launch import ELEMENTS, Library, MaskParams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SKIPPED, CUT, WHOLE = range(3)           # enum TileKind of stages/common/tile_lists.cuh


class MaskQuery(ctypes.Structure):
    """struct MaskQuery of flash_mask.cu."""

    _fields_ = [*((x, ctypes.c_void_p) for x in ("seen", "kinds", "workspace")),
                *((x, ctypes.c_int) for x in ("B", "H", "N_q", "N_k")), ("mask", MaskParams)]


@dataclass(frozen=True, eq=False)
class Tiles:
    """A mask for tiles of Br queries and Bc keys.

    Attributes:
        kinds: uint8 (B, H, Tr, Tc): SKIPPED, CUT or WHOLE, as a forward kernel visits tiles of K and V.
        seen: bool (B, H, N_q, N_k). B, H: 1, where all batch elements or heads are alike.
    """

    Br: int
    Bc: int
    kinds: torch.Tensor
    seen: torch.Tensor

    @property
    def counts(self) -> dict[str, int]:
        """How many tiles are skipped, cut and whole."""
        return {name: int((self.kinds == kind).sum())
                for kind, name in ((SKIPPED, "skipped"), (CUT, "cut"), (WHOLE, "whole"))}

    @property
    def share(self) -> Fraction:
        """Of the scores, those that count."""
        return Fraction(int(self.seen.sum()), self.seen.numel())

    def __str__(self) -> str:
        tiles = ", ".join(f"{n} {name}" for name, n in self.counts.items())
        scores = f"{int(self.seen.sum())} of {self.seen.numel()} scores count"
        return f"tiles of {self.Br} x {self.Bc}: {tiles}; {scores}"

    def plot(self, path: str | None = None, b: int = 0, h: int = 0) -> Figure:
        """Of one head: the scores that count, and the tiles. path: also save it there. Returns the Figure."""
        from .simulator.pictures import mask_figure

        figure = mask_figure(self.kinds[b, h].cpu(), self.seen[b, h].cpu(), self.Br, self.Bc)
        figure.axes[0].set_title(str(self), fontsize=9)
        if path:
            figure.savefig(path, dpi=150)
        return figure


def tiles_of(bound: Bound, N_q: int, N_k: int, Br: int, Bc: int, device: torch.device,
             dtype: torch.dtype = torch.float32) -> Tiles:
    """By a small kernel, which asks the mask's own file: on the GPU, or in the simulator, where no inspection
    watches it. dtype: of q.

    Raises:
        RuntimeError: if the mask's file cannot be compiled, or fails.
    """
    macros: dict[str, str | Path] = {"MASK_FILE": bound.file, "ELEMENT": ELEMENTS[dtype],
                                     "BLOCK_R": str(Br), "BLOCK_C": str(Bc)}
    library = Library("flash_mask", MaskQuery, macros, device, "mask", "the mask", checked=False)
    B, H = bound.extents
    seen = torch.empty(B, H, N_q, N_k, dtype=torch.bool, device=device)
    kinds = torch.zeros(B, H, -(-N_q // Br), -(-N_k // Bc), dtype=torch.uint8, device=device)
    query = MaskQuery(seen.data_ptr(), kinds.data_ptr(), None, B, H, N_q, N_k)
    fill_mask(query.mask, bound, 0)
    for n, x in enumerate(bound.tensors):
        query.mask.tensors[n].data = x.data_ptr()
    workspace = torch.empty(library.workspace_bytes(ctypes.byref(query)), dtype=torch.uint8, device=device)
    query.workspace = workspace.data_ptr()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    error = library.run(ctypes.byref(query), stream)
    if error is not None:
        raise library.failure(error)
    return Tiles(Br, Bc, kinds, seen)
