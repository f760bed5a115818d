"""What common mistakes in a mask would let a query see."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .models import Problem

PADDING = 1 << 31       # an id that is no block's, as block_causal has it for keys: above all others


def mask_mistakes(p: Problem) -> Iterator[tuple[str, torch.Tensor]]:
    """(what it is, which pairs of a query and a key then count)."""
    assert p.mask
    right = p.visible()
    yield ("there is no mask: each query sees all keys. A KeyRange is asked for first_key() and end_key(), "
           "AnyKeys for sees()", torch.ones_like(right))
    yield from {"window": _window, "prefix": _prefix, "document": _document,
                "block_causal": _block_causal}[p.mask.name](p)
    yield from _of_tiles(p)


def _window(p: Problem) -> Iterator[tuple[str, torch.Tensor]]:
    N_q, N_k = p.q.shape[2], p.k.shape[2]
    row, col = torch.arange(N_q)[:, None], torch.arange(N_k)
    left, right = p.mask.distances(N_q + N_k)
    first, last = N_k - N_q - left, N_k - N_q + right       # the rule's `from` and `to`

    def seen(first: int, last: int) -> torch.Tensor:
        return ((col >= row + first) & (col <= row + last))[None, None]

    yield ("the right edge is off by one: a query sees one key too few. end_key is the key after the last "
           "one that is seen", seen(first, last - 1))
    yield "the right edge is off by one: a query sees one key too many", seen(first, last + 1)
    yield "the left edge is off by one: a query sees one key too few", seen(first + 1, last)
    yield "the left edge is off by one: a query sees one key too many", seen(first - 1, last)
    yield "there is no left edge: the first key that a query sees is row + from", seen(-N_q, last)
    yield "there is no right edge: the last key that a query sees is row + to", seen(first, N_k)
    yield "`from` and `to` have changed places", seen(last, first)
    yield "`from` has the wrong sign: it is added to the row", seen(-first, last)
    for size in (p.Bc, p.Br):
        yield ("the left edge is that of a tile: within a tile, first_key(row) is asked for each row",
               ((col >= (row + first).clamp(min=0) // size * size) & (col <= row + last))[None, None])


def _prefix(p: Problem) -> Iterator[tuple[str, torch.Tensor]]:
    """In the backward pass, tile j of keys begins with the tile of queries that has first_row(its first
    key)."""
    seen, N_q = p.visible(), p.q.shape[2]
    diagonal = p.k.shape[2] - N_q
    row, col = torch.arange(N_q)[:, None], torch.arange(p.k.shape[2]) // p.Bc * p.Bc
    length = torch.tensor(p.mask.arguments[0])[:, None, None, None]

    def from_row(first: torch.Tensor) -> torch.Tensor:
        return seen & (row >= first.clamp(min=0) // p.Br * p.Br)

    yield ("first_row(col) knows nothing of the prefix: all rows see its keys, and tiles of queries before "
           "the diagonal are left out", from_row(col - diagonal))
    yield ("first_row(col) lacks the diagonal: behind the prefix, the first row that sees a key is col - "
           "diagonal", from_row(torch.where(col < length, 0, col)))
    for first in (length - diagonal, length):
        yield ("first_row(col) is too late: all rows see a key of the prefix, so its first row is row 0",
               from_row(torch.maximum(first, col - diagonal)))


def _document(p: Problem) -> Iterator[tuple[str, torch.Tensor]]:
    queries, keys = p.mask.ids()
    (q_least, q_greatest), (k_least, k_greatest) = _extents(queries, p.Br), _extents(keys, p.Bc)
    q_least, q_greatest = q_least[..., None], q_greatest[..., None]
    k_least, k_greatest = k_least[:, None], k_greatest[:, None]
    leak = ("a tile is called WHOLE that has several documents, and queries see keys of others: a tile is "
            "whole if all its queries and all its keys are of one document")
    yield leak, by_tiles(p, whole=(q_least == k_least) & (q_greatest == k_greatest))
    yield leak, by_tiles(p, whole=q_least == k_least)
    yield leak, by_tiles(p, whole=q_greatest == k_greatest)
    yield leak, by_tiles(p, whole=(q_least == q_greatest) & (q_greatest == k_greatest))
    yield leak, by_tiles(p, whole=(k_least == k_greatest) & (q_greatest == k_greatest))
    yield leak, by_tiles(p, whole=(q_least <= k_greatest) & (k_least <= q_greatest))
    for x in (q_least != k_least, q_greatest != k_greatest):
        yield ("a tile is called SKIPPED that has pairs of one document: it is skipped if the ids of its "
               "queries all lie before those of its keys, or all behind", by_tiles(p, skipped=x))


def _block_causal(p: Problem) -> Iterator[tuple[str, torch.Tensor]]:
    queries, keys = p.mask.ids()
    (q_least, q_greatest), (k_least, k_greatest) = (
        _extents(queries, p.Br), _extents(keys.long().where(keys >= 0, PADDING), p.Bc))
    q_least, q_greatest = q_least[..., None].long(), q_greatest[..., None].long()
    k_least, k_greatest = k_least[:, None], k_greatest[:, None]
    least, greatest = (x.where(x >= 0, PADDING) for x in (q_least, q_greatest))       # without a sign
    for skipped in (k_greatest > greatest, k_least > least, k_greatest > least):
        yield ("a tile is called SKIPPED whose greatest query sees its least key: that pair decides",
               by_tiles(p, skipped=skipped))
    for what, whole in (
            ("whose least query does not see its greatest key: that pair decides", k_greatest <= greatest),
            ("whose least query does not see its greatest key: that pair decides", k_least <= least),
            ("whose least query does not see its greatest key: that pair decides", k_least <= greatest),
            ("with a key that is padding: with a sign, that is below all blocks",
             (k_greatest == PADDING) | (k_greatest <= q_least)),
            ("with a query that is padding: without a sign, that is above all blocks", k_greatest <= least)):
        for tiles in (whole & (q_least >= 0), whole):
            yield f"a tile is called WHOLE {what}", by_tiles(p, whole=tiles)


def _extents(ids: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(least, greatest) of each tile, (B, tiles)."""
    tiles = [x.aminmax(dim=1) for x in ids.split(size, 1)]
    return torch.stack([x.min for x in tiles], 1), torch.stack([x.max for x in tiles], 1)


def _of_tiles(p: Problem) -> Iterator[tuple[str, torch.Tensor]]:
    """Whatever the mask: tiles of which too little was looked at."""
    seen = p.visible().expand(-1, 1, -1, -1)[:, 0]
    Tr, Tc = -(-seen.shape[1] // p.Br), -(-seen.shape[2] // p.Bc)
    first_row, first_col = torch.arange(Tr) * p.Br, torch.arange(Tc) * p.Bc
    last_row = (first_row + p.Br - 1).clamp(max=seen.shape[1] - 1)
    last_col = (first_col + p.Bc - 1).clamp(max=seen.shape[2] - 1)
    for name, rows, cols in (("first", first_row, first_col), ("last", last_row, last_col)):
        of_row = _any(seen[:, rows], 2, p.Bc)
        yield (f"a tile is skipped of which the {name} row sees nothing: other rows may see keys of it",
               by_tiles(p, skipped=~of_row))
        corner = seen[:, rows][..., cols]
        yield (f"a tile is taken for whole of which the {name} row sees the {name} key: all its pairs must "
               "count", by_tiles(p, whole=corner))
    both = seen[:, first_row][..., first_col] & seen[:, last_row][..., last_col]
    yield ("a tile is taken for whole whose first and last pairs count: all that lie between must, too",
           by_tiles(p, whole=both))
    some = _any(_any(seen, 1, p.Br), 2, p.Bc)
    yield ("tiles that the mask cuts are taken for whole ones: their pairs must be asked for one by one",
           by_tiles(p, whole=some))
    every = ~_any(_any(~seen, 1, p.Br), 2, p.Bc)
    yield "tiles that the mask cuts are skipped: some of their pairs count", by_tiles(p, skipped=~every)


def _any(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Of each tile along an axis, whether any is true."""
    return torch.stack([part.any(axis) for part in x.split(size, axis)], axis)


def by_tiles(p: Problem, skipped: torch.Tensor | None = None,
             whole: torch.Tensor | None = None) -> torch.Tensor:
    """What is seen if these tiles (B, Tr, Tc) are skipped, or not asked for single pairs. One that goes past
    the last key is always asked."""
    seen = p.visible()
    N_q, N_k = seen.shape[2:]

    def spread(tiles: torch.Tensor) -> torch.Tensor:
        tiles = tiles.repeat_interleave(p.Br, 1).repeat_interleave(p.Bc, 2)
        return tiles[:, None, :N_q, :N_k]

    if whole is not None:
        seen = seen | (spread(whole) & (torch.arange(N_k) < N_k // p.Bc * p.Bc))
    return seen if skipped is None else seen & ~spread(skipped)
