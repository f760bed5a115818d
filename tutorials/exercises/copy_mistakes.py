"""What common mistakes give where the copy engine brings tiles: stage tma."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .models import Problem, Tensors, attention, moved

PANEL = 64                 # columns
Index = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]   # (row, col, tile_rows, panels)


def panel_index(row: torch.Tensor, col: torch.Tensor, tile_rows: int, panels: int) -> torch.Tensor:
    """Where the engine has put the element (row, col) of a tile."""
    return col // PANEL * tile_rows * PANEL + row * PANEL + (col % PANEL ^ row % 8 * 8)


WRONG_INDICES: dict[str, Index] = {
    "elements are looked for without the swizzle: in row r of a panel, chunk c is at c ^ r % 8":
        lambda row, col, tile_rows, panels:
            col // PANEL * tile_rows * PANEL + row * PANEL + col % PANEL,
    "the swizzle is by row / 8: in row r of a panel, chunk c is at c ^ r % 8":
        lambda row, col, tile_rows, panels:
            col // PANEL * tile_rows * PANEL + row * PANEL + (col % PANEL ^ row // 8 % 8 * 8),
    "the swizzle is by row % 4: in row r of a panel, chunk c is at c ^ r % 8":
        lambda row, col, tile_rows, panels:
            col // PANEL * tile_rows * PANEL + row * PANEL + (col % PANEL ^ row % 4 * 8),
    "a tile's rows are looked for side by side, panel after panel in each: the second panel comes after all "
    "rows of the first":
        lambda row, col, tile_rows, panels: row * panels * PANEL + (col ^ row % 8 * 8),
    "all columns are looked for in the first panel: with more than 64 columns a tile has several":
        lambda row, col, tile_rows, panels: row * PANEL + (col % PANEL ^ row % 8 * 8),
}


def misread(x: torch.Tensor, tile_rows: int, index: Index) -> torch.Tensor:
    """x (..., N, d), in tiles of panels, if each element is looked for where `index` says. So many columns as
    the products have, a multiple of 16."""
    N, d = x.shape[-2:]
    panels, width = -(-d // PANEL), -(-d // 16) * 16
    x = torch.nn.functional.pad(x, (0, panels * PANEL - d, 0, -N % tile_rows))
    row, col = torch.meshgrid(torch.arange(tile_rows), torch.arange(panels * PANEL), indexing="ij")
    there = torch.empty(tile_rows * panels * PANEL, dtype=torch.long)
    there[panel_index(row, col, tile_rows, panels).flatten()] = torch.arange(len(there))
    source = there[index(row, col, tile_rows, panels)[:, :width]]
    return x.unflatten(-2, (-1, tile_rows)).flatten(-2)[..., source].flatten(-3, -2)[..., :N, :]


def copy_mistakes(p: Problem) -> Iterator[tuple[str, Tensors]]:
    """(what it is, the outputs that would come of it)."""
    d = p.q.shape[-1]
    for what, index in WRONG_INDICES.items():
        found = attention(replace(p, q=misread(p.q, p.Br, index), k=misread(p.k, p.Bc, index),
                                  v=misread(p.v, p.Bc, index)))
        yield what, {"O": found["O"][..., :d], "L": found["L"]}
    for name, letter, rows in (("q", "i", p.Br), ("k", "j", p.Bc), ("v", "j", p.Bc)):
        def rows_of_tiles(row: torch.Tensor, col: torch.Tensor, rows: int = rows) -> tuple:
            return row // rows + row % rows, col

        x = getattr(p, name)
        size = "Br" if name == "q" else "Bc"
        yield (f"boxes of {name.upper()} begin at row {letter}: tile {letter} begins at {letter} * {size}",
               attention(replace(p, **{name: moved(x, rows_of_tiles)})))
    H, H_kv = p.q.shape[1], p.k.shape[1]
    if H_kv < H:
        own = p.with_heads(lambda h, H, H_kv: h // (H // H_kv))
        there = torch.arange(H)[:, None, None] < H_kv
        k, v = (torch.where(there, x[:, torch.arange(H) % H_kv], 0) for x in (p.k, p.v))
        for what, changed in (("K and V are", {"k": k, "v": v}), ("K is", {"k": k}), ("V is", {"v": v})):
            yield (f"{what} asked for by the query head h: it is h_kv, and past the last key head the engine "
                   "brings zeros", attention(replace(own, **changed)))
