"""Attention and its gradients in PyTorch, with switches for what learners get wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .masks import MaskCall

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """The inputs of a call, in float64, the sizes of the tiles, and how many ranges keys are split into."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    diagonal: int | None
    scale: float
    Br: int
    Bc: int
    do: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    mask: MaskCall | None = None
    splits: int = 1

    def with_heads(self, head_of: Callable[[int, int, int], int]) -> Problem:
        """With a key head for each query head: (h, H, H_kv) -> h_kv."""
        H, H_kv = self.q.shape[1], self.k.shape[1]
        heads = [head_of(h, H, H_kv) for h in range(H)]
        return replace(self, k=self.k[:, heads], v=self.v[:, heads])

    def of_key_head(self, h_kv: int) -> Problem:
        """That key head and the query heads that read it."""
        group = self.q.shape[1] // self.k.shape[1]
        heads, key_heads = slice(h_kv * group, (h_kv + 1) * group), slice(h_kv, h_kv + 1)
        return replace(self, q=self.q[:, heads], k=self.k[:, key_heads], v=self.v[:, key_heads],
                       do=None if self.do is None else self.do[:, heads],
                       dlse=None if self.dlse is None else self.dlse[:, heads])

    def rounded(self) -> Problem:
        """In float32, where e^89 is infinite."""
        return replace(self, **{name: x.float() for name in ("q", "k", "v", "do", "dlse")
                                if (x := getattr(self, name)) is not None})

    def scores(self) -> torch.Tensor:
        """scale * Q K^T (B, H, N_q, N_k), without a mask."""
        group = self.q.shape[1] // self.k.shape[1]
        return self.scale * self.q @ self.k.repeat_interleave(group, 1).mT

    def values(self) -> torch.Tensor:
        return self.v.repeat_interleave(self.q.shape[1] // self.v.shape[1], 1)

    def visible(self, diagonal: int | None = None) -> torch.Tensor:
        diagonal = self.diagonal if diagonal is None else diagonal
        if self.mask:
            return self.mask.seen(self.q.shape[2], self.k.shape[2])
        seen = torch.ones(self.q.shape[2], self.k.shape[2], dtype=torch.bool)
        return seen if self.diagonal is None else seen.tril(diagonal)


def softmax(S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(P, L) of masked scores; rows of -inf: 0 and -inf."""
    L = S.logsumexp(-1)
    return torch.exp(S - L.where(L > -math.inf, 0)[..., None]), L


def attention(p: Problem, visible: torch.Tensor | None = None, hidden: float = -math.inf) -> Tensors:
    """O and L. hidden: the score of a key that is not seen."""
    S = p.scores().masked_fill(~(p.visible() if visible is None else visible), hidden)
    P, L = softmax(S)
    return {"O": P @ p.values(), "L": L}


def by_tiles(p: Problem, O_factor: Callable = torch.ones_like, l_factor: Callable = torch.ones_like,
             divide: bool = True, maximum: Callable = torch.maximum) -> Tensors:
    """The online softmax, with other factors than alpha = e^(m - m_new): functions of alpha times it.

    maximum: what m becomes, of m and the tile's maximum.
    """
    S, V = p.scores().masked_fill(~p.visible(), -math.inf), p.values()
    m = torch.full(S.shape[:-1], -math.inf, dtype=S.dtype)
    l, O = torch.zeros_like(m), torch.zeros_like(p.q)
    for j in range(0, S.shape[-1], p.Bc):
        tile = S[..., j:j + p.Bc]
        m_new = maximum(m, tile.amax(-1))
        shift = m_new.where(m_new > -math.inf, 0)
        alpha = torch.exp(m - shift)
        P = torch.exp(tile - shift[..., None])
        l = l_factor(alpha) * l + P.sum(-1)
        O = O_factor(alpha)[..., None] * O + P @ V[..., j:j + p.Bc, :]
        m = m_new
    if divide:
        O = torch.where(l[..., None] > 0, O / l[..., None], 0)
    return {"O": O, "L": torch.where(l > 0, m + l.log(), -math.inf)}


def by_merging(p: Problem, factors: Callable) -> Tensors:
    """FlashAttention-1's online softmax, whose O is normalised after each tile, with other factors.

    factors: of (l, alpha, beta), where alpha = e^(m - m_new) and beta = e^(m~ - m_new): those of the old l,
    the old O, the tile's l~ and its P~ V_j. The right ones are alpha, l * alpha, beta and beta.
    """
    S, V = p.scores().masked_fill(~p.visible(), -math.inf), p.values()
    m = torch.full(S.shape[:-1], -math.inf, dtype=S.dtype)
    l, O = torch.zeros_like(m), torch.zeros_like(p.q)
    for j in range(0, S.shape[-1], p.Bc):
        tile = S[..., j:j + p.Bc]
        m_tile = tile.amax(-1)
        m_new = torch.maximum(m, m_tile)
        shift = m_new.where(m_new > -math.inf, 0)
        P = torch.exp(tile - m_tile.where(m_tile > -math.inf, 0)[..., None])
        of_l, of_O, of_l_tile, of_O_tile = factors(l, torch.exp(m - shift), torch.exp(m_tile - shift))
        m, l = m_new, of_l * l + of_l_tile * P.sum(-1)
        O = of_O[..., None] * O + of_O_tile[..., None] * (P @ V[..., j:j + p.Bc, :])
        O = torch.where(l[..., None] > 0, O / l[..., None], 0)
    return {"O": O, "L": torch.where(l > 0, m + l.log(), -math.inf)}


def by_lanes(p: Problem) -> Tensors:
    """O and L if lane t, with the columns t, t + 32, ... of S and of O, has the l of its own columns only."""
    S = p.scores().masked_fill(~p.visible(), -math.inf)
    m = S.amax(-1)
    P = torch.exp(S - m.where(m > -math.inf, 0)[..., None])
    column = torch.arange(S.shape[-1]) % p.Bc % 32
    l = torch.stack([P[..., column == lane].sum(-1) for lane in range(32)], -1)
    lanes = l[..., torch.arange(p.q.shape[-1]) % 32]
    return {"O": torch.where(lanes > 0, P @ p.values() / lanes, 0),
            "L": torch.where(l[..., 0] > 0, m + l[..., 0].log(), -math.inf)}


def with_maximum(p: Problem, maximum: Callable, normalised: bool = False) -> Tensors:
    """O and L if another number than the maximum is subtracted: a function of the masked scores.

    normalised: P is divided by l, not O.
    """
    S = p.scores().masked_fill(~p.visible(), -math.inf)
    m = maximum(S)
    P = torch.exp(S - m.where(m > -math.inf, 0)[..., None])
    l = P.sum(-1)
    O = (P / l[..., None]) @ p.values() if normalised else P @ p.values() / l[..., None]
    return {"O": torch.where(l[..., None] == 0, 0, O), "L": torch.where(l == 0, -math.inf, m + l.log())}


def moved(x: torch.Tensor, source: Callable[[torch.Tensor, torch.Tensor], tuple]) -> torch.Tensor:
    """x with the element (row, col) taken from another place, source(row, col); 0 if that is outside."""
    rows, cols = x.shape[-2:]
    row, col = source(*torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij"))
    taken = x[..., row.clamp(max=rows - 1), col.clamp(max=cols - 1)]
    return torch.where((row < rows) & (col < cols), taken, 0)


def one(alpha: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(alpha)


def same(alpha: torch.Tensor) -> torch.Tensor:
    return alpha


def gradients(p: Problem, *, visible: torch.Tensor | None = None, D_times: float = 1, with_dL: bool = True,
              heads: slice = slice(None), swapped: bool = False, S_times: float = 1, with_L: bool = True,
              running: bool = False, neighbours: bool = True, transposed: bool = True,
              keys: torch.Tensor | None = None, quotient: bool = False, D_of_P: bool = False) -> Tensors:
    """dQ, dK and dV by the formulas of flash_bwd.cu.

    D_times: a factor of D. heads: the query heads of a group that dK and dV sum over. swapped: dV is made of
    dS, and dK of P. S_times: a factor of S in P = e^(S - L). with_L: L is subtracted there. running: D is
    summed up while dS is made. neighbours: the heads of a group are. transposed: dK and dV are made of dS^T
    and P^T. keys: instead of K in dQ. quotient: P = e^S / e^L. D_of_P: D is made of P
    and dP.
    """
    assert p.do is not None
    H_kv, group = p.k.shape[1], p.q.shape[1] // p.k.shape[1]
    exact = p.scores().masked_fill(~p.visible(), -math.inf)
    _, L = softmax(exact)
    S = (S_times * p.scores()).masked_fill(~(p.visible() if visible is None else visible), -math.inf)
    P = torch.where(L[..., None] > -math.inf, torch.exp(S - (L[..., None] if with_L else 0)), 0)
    if quotient:
        P = torch.where(S > -math.inf, S.exp() / L[..., None].exp(), 0)
    O = softmax(exact)[0] @ p.values()
    dP = p.do @ p.values().mT
    rowsum = (P * dP).cumsum(-1) if running else (p.do * O).sum(-1, keepdim=True)
    if D_of_P:
        rowsum = (P * dP).sum(-1, keepdim=True)
    D = rowsum * D_times - (p.dlse[..., None] if with_dL and p.dlse is not None else 0)
    dS = torch.where(L[..., None] > -math.inf, P * (dP - D), 0)
    left, right = (P, dS) if swapped else (dS, P)
    if transposed:
        left, right = left.mT, right.mT
    dK, dV = (x.unflatten(1, (H_kv, group))[:, :, heads].sum(2) if neighbours else
              x.unflatten(1, (group, H_kv)).sum(1) for x in (p.scale * left @ p.q, right @ p.do))
    keys = (p.k if keys is None else keys).repeat_interleave(group, 1)
    return {"dQ": p.scale * dS @ keys, "dK": dK, "dV": dV}
