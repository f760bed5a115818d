"""What common mistakes give where warpgroups multiply: stages from wgmma on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from .copy_mistakes import PANEL, panel_index
from .models import Problem, Tensors, attention, by_tiles, one, same, softmax

ROW_BYTES = 2 * PANEL              # of a panel
SLACK = 8 * math.log(2)            # of lazy_rescale: 2^8


def warpgroup_mistakes(p: Problem) -> Iterator[tuple[str, Tensors]]:
    """(what it is, the outputs that would come of it)."""
    yield from _overlapped(p)
    yield from _lazy(p)
    yield from _described(p)


# ------------------------------------------------------------------------------------ stage overlap
def _overlapped(p: Problem) -> Iterator[tuple[str, Tensors]]:
    N_q, N_k = p.q.shape[2], p.k.shape[2]
    last_row = torch.arange(N_q) // p.Br * p.Br + p.Br - 1
    keys = torch.full((N_q,), N_k) if p.diagonal is None else (last_row + 1 + p.diagonal).clamp(1, N_k)
    last = torch.arange(N_k) // p.Bc == (-(-keys // p.Bc) - 1)[:, None]
    P, L = softmax(p.scores().masked_fill(~p.visible(), -math.inf))
    yield ("P V of the last tile is missing: after the last step its P~ has not been multiplied",
           {"O": P.masked_fill(last, 0) @ p.values(), "L": L})
    V = p.values()
    next_V = torch.nn.functional.pad(V[..., p.Bc:, :], (0, 0, 0, min(p.Bc, N_k)))
    yield ("P~ of a tile is multiplied by V of the next one: in step t P_frag is of tile t - 1",
           {"O": P.masked_fill(last, 0) @ next_V + P.masked_fill(~last, 0) @ V, "L": L})


# ------------------------------------------------------------------------------------ stage lazy_rescale
def _lazy(p: Problem) -> Iterator[tuple[str, Tensors]]:
    def stays(m: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
        return torch.where(tile - m <= SLACK, m, torch.maximum(m, tile))

    def voted(vote: Callable) -> Callable:
        """alpha in warps of 16 rows whose vote on alpha != 1, (..., 2, 8), is true; else 1."""
        def factor(alpha: torch.Tensor) -> torch.Tensor:
            moves = torch.nn.functional.pad(alpha != 1, (0, -alpha.shape[-1] % 16)).unflatten(-1, (-1, 2, 8))
            taken = vote(moves)[..., None].expand(*moves.shape[:-2], 16).flatten(-2)
            return alpha.where(taken[..., :alpha.shape[-1]], 1)
        return factor

    not_rescaled = "its old part needs the factor alpha in each row in which m moves"
    yield f"O is not rescaled when m moves: {not_rescaled}", by_tiles(p, one, same, maximum=stays)
    yield ("O is not rescaled in the second row of a lane, if the first one's m stays: both are to vote",
           by_tiles(p, voted(lambda moves: moves[..., 0, :].any(-1)), same, maximum=stays))
    yield (f"O is not rescaled unless m moves in all rows of a warp: {not_rescaled}",
           by_tiles(p, voted(lambda moves: moves.flatten(-2).all(-1)), same, maximum=stays))


# ------------------------------------------------------------------------------------ stage wgmma
@dataclass(frozen=True)
class Descriptors:
    """Where wgmma looks for the tiles of a stage. By default, where TMA has put them.

    stride: SBO; leading: LBO of V, by the tile's rows. K_step, V_step: the bytes to the k-th 16 columns of Q
    and K, by k and the tile's rows, and to the k-th 16 rows of V.
    """

    stride: int = 8 * ROW_BYTES
    leading: Callable[[int], int] = lambda rows: rows * ROW_BYTES
    K_step: Callable = lambda k, rows: k // 4 * ROW_BYTES * rows + k % 4 * 32
    V_step: Callable = lambda k: k * 16 * ROW_BYTES

    def K_major(self, x: torch.Tensor, tile_rows: int, together: int) -> torch.Tensor:
        """What a product takes for x (..., N, d), whose `together` rows begin at an address of their own."""
        def offset(row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
            start = self.K_step(col // 16, tile_rows) + row // together * together * ROW_BYTES
            return start + self._within(row % together, col % 16, 16)
        return self._taken(x, tile_rows, offset)

    def MN_major(self, x: torch.Tensor, tile_rows: int) -> torch.Tensor:
        def offset(row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
            return self.V_step(row // 16) + self._within(row % 16, col, self.leading(tile_rows))
        return self._taken(x, tile_rows, offset)

    def _within(self, across: torch.Tensor, along: torch.Tensor, leading: int) -> torch.Tensor:
        return (across // 8 * self.stride + across % 8 * ROW_BYTES + along // PANEL * leading +
                along % PANEL * 2)

    def _taken(self, x: torch.Tensor, tile_rows: int, offset: Callable) -> torch.Tensor:
        """x with each element taken from where it is looked for; what is not in the tile: 0."""
        N, d = x.shape[-2:]
        panels, width = -(-d // PANEL), -(-d // 16) * 16
        x = torch.nn.functional.pad(x, (0, panels * PANEL - d, 0, -N % tile_rows))
        row, col = torch.meshgrid(torch.arange(tile_rows), torch.arange(panels * PANEL), indexing="ij")
        there = torch.empty(tile_rows * panels * PANEL, dtype=torch.long)
        there[panel_index(row, col, tile_rows, panels).flatten()] = torch.arange(len(there))
        found = offset(row, col)[:, :width]
        found = found ^ found // ROW_BYTES % 8 * 16                      # the hardware's swizzle
        inside = (found >= 0) & (found < 2 * len(there))
        tiles = x.unflatten(-2, (-1, tile_rows)).flatten(-2)
        taken = torch.where(inside, tiles[..., there[(found // 2).clamp(0, len(there) - 1)]], 0)
        return taken.flatten(-3, -2)[..., :N, :]


WRONG_DESCRIPTORS = {
    "the next 16 columns of Q and K are always 32 bytes further: after 64 of them comes the next panel, "
    "128 * tile_rows bytes from this one": Descriptors(K_step=lambda k, rows: 32 * k),
    "the next 16 columns of Q and K are 16 bytes further: an element has two bytes":
        Descriptors(K_step=lambda k, rows: k // 4 * ROW_BYTES * rows + k % 4 * 16),
    "the next 16 rows of V are 32 bytes further, as if k ran along its rows: they are 16 rows of 128 bytes":
        Descriptors(V_step=lambda k: 32 * k),
    "the next 16 rows of V are 1024 bytes further: that is 8 rows": Descriptors(V_step=lambda k: 1024 * k),
    "columns of V from 64 on are looked for in the first panel: LBO leads to the next one":
        Descriptors(leading=lambda rows: 0),
    "SBO is 128 bytes, a row: it leads to the next 8 rows": Descriptors(stride=128),
}


def _described(p: Problem) -> Iterator[tuple[str, Tensors]]:
    d = p.q.shape[-1]
    for what, wrong in WRONG_DESCRIPTORS.items():
        found = attention(replace(p, q=wrong.K_major(p.q, p.Br, 64), k=wrong.K_major(p.k, p.Bc, p.Bc),
                                  v=wrong.MN_major(p.v, p.Bc)))
        yield what, {"O": found["O"][..., :d], "L": found["L"]}
