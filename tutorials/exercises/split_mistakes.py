"""What common mistakes give where keys are split into ranges, and query heads packed: stage split_kv."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .models import Problem, Tensors, attention, softmax


def split_mistakes(p: Problem) -> Iterator[tuple[str, Tensors]]:
    """(what it is, the outputs that would come of it); of one range nothing."""
    if p.splits > 1:
        yield from _merged(p)
        yield from _packed(p)


def packed(p: Problem) -> torch.Tensor:
    """(H, N_q): a query's row among those of its key head. G neighbours are of one query."""
    H, N_q = p.q.shape[1:3]
    G = H // p.k.shape[1]
    return torch.arange(N_q) * G + torch.arange(H)[:, None] % G


def tiles_end(p: Problem, row: torch.Tensor) -> torch.Tensor:
    """Of packed rows, how many tiles of keys the loop of their tile walks over, in all ranges together."""
    G, N_k = p.q.shape[1] // p.k.shape[1], p.k.shape[2]
    last = row // p.Br // G * p.Br + p.Br - 1       # as of tile i / G of queries
    keys = torch.full_like(last, N_k) if p.diagonal is None else (last + 1 + p.diagonal).clamp(0, N_k)
    return -(-keys // p.Bc)


def partial(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """O and L of the ranges: (splits, B, H, N_q, d) and (splits, B, H, N_q)."""
    S, end = p.scores().masked_fill(~p.visible(), -math.inf), tiles_end(p, packed(p))[..., None]
    tile = torch.arange(S.shape[-1]) // p.Bc
    parts = []
    for s in range(p.splits):
        others = (tile < end * s // p.splits) | (tile >= end * (s + 1) // p.splits)
        parts.append(softmax(S.masked_fill(others, -math.inf)))
    return torch.stack([P @ p.values() for P, _ in parts]), torch.stack([L for _, L in parts])


def _merged(p: Problem) -> Iterator[tuple[str, Tensors]]:
    """By merge_kernel, which is to weigh the ranges; m: the greatest L_s."""
    O_s, L_s = partial(p)
    m = L_s.amax(0)
    m = m.where(m > -math.inf, 0)
    weights = torch.exp(L_s - m)
    l = weights.sum(0)

    def merged(weights: torch.Tensor, O_s: torch.Tensor = O_s, shift: torch.Tensor = m) -> Tensors:
        l = weights.sum(0)
        O = (weights[..., None] * O_s).sum(0)
        return {"O": torch.where(l[..., None] == 0, 0, O / l[..., None]), "L": shift + l.log()}

    right = merged(weights)
    yield ("the ranges' weights are e^L_s, and e^L overflows above 88: subtract m, the greatest L_s, in the "
           "exponent", merged(L_s.exp(), shift=torch.zeros_like(m)))
    mean = O_s.mean(0)
    for O in (mean, O_s.sum(0)):
        for L in (right["L"], merged(torch.ones_like(weights))["L"]):
            yield ("the ranges count the same: range s has the weight e^(L_s - L), as large as its part of "
                   "the softmax's sum", {"O": O, "L": L})
    yield "O is not divided by the sum of the weights", right | {"O": right["O"] * l[..., None]}
    yield "L lacks m: the weights are e^(L_s - m), so L is m + log(their sum)", right | {"L": l.log()}
    yield "L is the greatest L_s: it is m + log(the sum of the weights)", right | {"L": m}
    yield "L is m and a logarithm to base 2: all L are natural logarithms", right | {"L": m + l.log2()}
    yield ("the weights are 2^(L_s - m), and L_s is a natural logarithm: e^x is 2^(x log2(e))",
           merged(torch.exp2(L_s - m)))
    yield "the weights are upside down: e^(L_s - m), not e^(m - L_s)", merged(torch.exp(m - L_s))
    for s, which in ((0, "first"), (-1, "last")):
        left = weights.clone()
        left[s] = 0
        yield f"the {which} range is left out", merged(left)
    again, own = weights.clone(), weights.clone()
    shares = min(16, 1 << (-(-p.splits // 4) - 1).bit_length())
    again[-1] *= 1 + -p.splits % (4 * shares)
    yield ("the last range counts several times: where four are taken at once, those past the end have the "
           "weight 0", merged(again))
    own[torch.arange(p.splits) % shares != 0] = 0
    yield (f"of {shares} ranges only one counts: the neighbours have the others, and warp_sum(x, shares) "
           "adds them up", merged(own))
    zero = torch.where(L_s > -math.inf, L_s, 0)
    for found in (merged(torch.exp(zero - m)), merged(weights.where(L_s > -math.inf, 1))):
        yield ("a range without a key counts: its L_s is -inf, so it has the weight 0", found)


def _packed(p: Problem) -> Iterator[tuple[str, Tensors]]:
    """By places in the kernel that do not agree about which head's query a packed row is."""
    H, N_q = p.q.shape[1:3]
    G, N_k = H // p.k.shape[1], p.k.shape[2]
    by_query = packed(p)
    by_head = torch.arange(H)[:, None] % G * N_q + torch.arange(N_q)
    if p.diagonal is None:
        right, first = attention(p), torch.arange(H)[:, None] // G * G
        for head, query in ((by_head % G, by_head // G), (by_query // N_q, by_query % N_q)):
            yield ("a row's O and L are in the place of another: Q is loaded, and O and L are stored, in two "
                   "orders of rows, by query and by head",
                   {name: x[:, first + head, query] for name, x in right.items()})
        return
    col = torch.arange(N_k)
    told = "the mask is asked about another query than a row's: "
    for what, row, query in (
            ("row r is query r % N_q, and the mask takes it for query r / G", by_head, by_head // G),
            ("it takes packed row r for query r", by_head, by_head),
            ("row r is query r % N_q, and the mask takes it for query r / N_q, its head", by_head,
             by_head // N_q),
            ("it takes packed row r for query r, which is query r / G", by_query, by_query)):
        loop = tiles_end(p, row)[..., None] * p.Bc
        whole = (row // p.Br // G * p.Br + 1 + p.diagonal)[..., None].clamp(0, N_k) // p.Bc * p.Bc
        seen = (col < (query[..., None] + 1 + p.diagonal).clamp(max=N_k)) & (col < loop) | (col < whole)
        yield told + what, attention(p, seen)
