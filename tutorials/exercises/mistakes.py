"""What common mistakes would give, in float64: to tell a learner not only that a number is wrong, but why.

A kernel's output is compared with what each mistake would give. If they agree where the truth does not, that
is the diagnosis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """The inputs of a call, in float64, and the size of a tile of keys."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    diagonal: int | None
    scale: float
    Bc: int
    do: torch.Tensor | None = None
    dlse: torch.Tensor | None = None

    def with_heads(self, head_of: Callable[[int, int, int], int]) -> Problem:
        """With a key head for each query head: (h, H, H_kv) -> h_kv."""
        H, H_kv = self.q.shape[1], self.k.shape[1]
        heads = [head_of(h, H, H_kv) for h in range(H)]
        return replace(self, k=self.k[:, heads], v=self.v[:, heads])

    def scores(self) -> torch.Tensor:
        """scale * Q K^T (B, H, N_q, N_k), without a mask."""
        group = self.q.shape[1] // self.k.shape[1]
        return self.scale * self.q @ self.k.repeat_interleave(group, 1).mT

    def values(self) -> torch.Tensor:
        return self.v.repeat_interleave(self.q.shape[1] // self.v.shape[1], 1)

    def visible(self, diagonal: int | None = None) -> torch.Tensor:
        diagonal = self.diagonal if diagonal is None else diagonal
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
             divide: bool = True) -> Tensors:
    """The online softmax, with other factors than alpha = e^(m - m_new): functions of alpha times it."""
    S, V = p.scores().masked_fill(~p.visible(), -math.inf), p.values()
    m = torch.full(S.shape[:-1], -math.inf, dtype=S.dtype)
    l, O = torch.zeros_like(m), torch.zeros_like(p.q)
    for j in range(0, S.shape[-1], p.Bc):
        tile = S[..., j:j + p.Bc]
        m_new = torch.maximum(m, tile.amax(-1))
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


def one(alpha: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(alpha)


def same(alpha: torch.Tensor) -> torch.Tensor:
    return alpha


def gradients(p: Problem, *, visible: torch.Tensor | None = None, D_times: float = 1, with_dL: bool = True,
              heads: slice = slice(None), swapped: bool = False, S_times: float = 1, with_L: bool = True,
              running: bool = False, neighbours: bool = True, transposed: bool = True,
              keys: torch.Tensor | None = None) -> Tensors:
    """dQ, dK and dV by the formulas of flash_bwd.cu.

    D_times: a factor of D. heads: the query heads of a group that dK and dV sum over. swapped: dV is made of
    dS, and dK of P. S_times: a factor of S in P = e^(S - L). with_L: L is subtracted there. running: D is
    summed up while dS is made. neighbours: the heads of a group are. transposed: dK and dV are made of dS^T
    and P^T. keys: instead of K in dQ.
    """
    assert p.do is not None
    H_kv, group = p.k.shape[1], p.q.shape[1] // p.k.shape[1]
    exact = p.scores().masked_fill(~p.visible(), -math.inf)
    _, L = softmax(exact)
    S = (S_times * p.scores()).masked_fill(~(p.visible() if visible is None else visible), -math.inf)
    P = torch.where(L[..., None] > -math.inf, torch.exp(S - (L[..., None] if with_L else 0)), 0)
    O = softmax(exact)[0] @ p.values()
    dP = p.do @ p.values().mT
    rowsum = (P * dP).cumsum(-1) if running else (p.do * O).sum(-1, keepdim=True)
    D = rowsum * D_times - (p.dlse[..., None] if with_dL and p.dlse is not None else 0)
    dS = torch.where(P > 0, P * (dP - D), 0)
    left, right = (P, dS) if swapped else (dS, P)
    if transposed:
        left, right = left.mT, right.mT
    dK, dV = (x.unflatten(1, (H_kv, group))[:, :, heads].sum(2) if neighbours else
              x.unflatten(1, (group, H_kv)).sum(1) for x in (p.scale * left @ p.q, right @ p.do))
    keys = (p.k if keys is None else keys).repeat_interleave(group, 1)
    return {"dQ": p.scale * dS @ keys, "dK": dK, "dV": dV}


def forward_mistakes(p: Problem) -> Iterator[tuple[str, Tensors]]:
    """(what it is, the outputs that would come of it)."""
    right = attention(p)
    O, L = right["O"], right["L"]
    if p.diagonal is not None:
        diagonal = p.diagonal
        for shift, what in ((1, "a query sees one key too many (col <= row + diagonal)"),
                            (-1, "a query sees one key too few (col <= row + diagonal)")):
            yield f"the mask is off by one: {what}", attention(p, p.visible(diagonal + shift))
        yield "there is no causal mask", attention(p, torch.ones_like(p.visible()))
        if diagonal:
            yield ("the diagonal is left out of the mask, which must be col <= row + diagonal",
                   attention(p, p.visible(0)))
        yield "a key that is not seen has the score 0: it must be -inf, as e^0 is 1", attention(p, hidden=0)
        if p.scale < 0:
            hides = ~p.visible().all(-1)
            yield ("a key that is not seen has scale * -inf, which is +inf for a negative scale: scale "
                   "first, then mask",
                   {"O": O.masked_fill(hides[:, None], math.nan), "L": L.masked_fill(hides, math.nan)})
        unseen = ~p.visible().any(-1)
        if unseen.any():
            yield ("in a row that sees no key O is divided by l = 0, which gives NaN: its O is 0",
                   {"O": O.masked_fill(unseen[:, None], math.nan), "L": L})
            yield ("in a row that sees no key -inf is subtracted from -inf, which is NaN: subtract 0 where "
                   "the maximum is -inf",
                   {"O": O.masked_fill(unseen[:, None], math.nan), "L": L.masked_fill(unseen, math.nan)})
    d, H, H_kv = p.q.shape[3], p.q.shape[1], p.k.shape[1]
    for what, scale in (("the scale is missing", 1.0), ("the scale is applied twice", p.scale ** 2),
                        ("the scale is 1 / sqrt(d), not the one that was asked for", d ** -0.5)):
        if scale != p.scale:
            yield what, attention(replace(p, scale=scale))
    if 1 < H_kv < H:
        yield ("the key head is wrong: query head h reads h / (H / H_kv), not h % H_kv",
               attention(p.with_heads(lambda h, H, H_kv: h % H_kv)))
    if 1 < H_kv < H:
        own = p.with_heads(lambda h, H, H_kv: h // (H // H_kv))
        other = p.with_heads(lambda h, H, H_kv: h % H_kv)
        for name, mixed in (("K", replace(own, k=other.k)), ("V", replace(own, v=other.v))):
            yield (f"the key head of {name} is wrong: query head h reads h / (H / H_kv), not h % H_kv",
                   attention(mixed))
    if H_kv < H:
        yield ("the key head is wrong: every query head reads key head 0",
               attention(p.with_heads(lambda h, H, H_kv: 0)))
    padding = -p.k.shape[2] % p.Bc
    if padding:
        wide = replace(p, k=torch.nn.functional.pad(p.k, (0, 0, 0, padding)),
                       v=torch.nn.functional.pad(p.v, (0, 0, 0, padding)))
        seen = torch.nn.functional.pad(p.visible(), (0, padding), value=p.diagonal is None)
        yield ("keys from N_k on count: the last tile's empty rows are zeros, so their scores are 0, and not "
               "-inf",
               attention(wide, seen))
    yield "O is not divided by l", {"O": by_tiles(p, same, same, divide=False)["O"], "L": L}
    old = "its old part needs the factor e^(m - m_new)"
    for what, O_factor, l_factor in (
            (f"O is not rescaled when the maximum grows: {old}", one, same),
            (f"l is not rescaled when the maximum grows: {old}", same, one),
            ("neither O nor l is rescaled when the maximum grows: old parts need e^(m - m_new)", one, one),
            *((f"O is rescaled by the inverse of e^(m - m_new){which}: when the maximum grows, old terms get "
               "smaller",
               factor, same) for which, factor in (
                   ("", lambda alpha: torch.where(alpha > 0, 1 / alpha, 0)),
                   (", which for the first tile is 1 / 0", torch.reciprocal))),
            ("O is rescaled by e^(m - m_new) twice", lambda alpha: alpha ** 2, same)):
        yield what, by_tiles(p, O_factor, l_factor)
    yield ("O holds the last tile of keys only: it must be added to, not overwritten",
           {"O": by_tiles(p, torch.zeros_like, same)["O"], "L": L})
    yield ("l is the sum of each lane's own columns only: it must be the sum over the warp", by_lanes(p))
    for what, factors in (
            ("the old O lacks the factor l: it is normalised, and l O is the sum that it was made of",
             lambda l, alpha, beta: (alpha, alpha, beta, beta)),
            ("the tile's P~ V_j lacks the factor e^(m~ - m_new): it is relative to the tile's own maximum",
             lambda l, alpha, beta: (alpha, l * alpha, beta, one(beta))),
            ("the tile's l~ lacks the factor e^(m~ - m_new): it is relative to the tile's own maximum",
             lambda l, alpha, beta: (alpha, l * alpha, one(beta), beta)),
            ("alpha and beta have changed places: e^(m - m_new) is for the old l and O, e^(m~ - m_new) for "
             "the tile's", lambda l, alpha, beta: (beta, l * beta, alpha, alpha))):
        yield what, by_merging(p, factors)
    masked = p.scores().masked_fill(~p.visible(), -math.inf)
    terms = torch.where(masked > -math.inf, torch.exp(masked - masked.cummax(-1).values), 0)
    early = terms.sum(-1)
    m = masked.amax(-1)
    unscaled = torch.exp(masked - m.where(m > -math.inf, 0)[..., None]) @ p.values()
    yield ("l is summed up before the maximum is complete: its terms are relative to different maxima",
           {"O": torch.where(early[..., None] > 0, unscaled / early[..., None], 0),
            "L": torch.where(early > 0, m + early.log(), -math.inf)})
    yield "L lacks the maximum: it is m + log(l)", {"O": O, "L": torch.where(L > -math.inf, L - m, L)}
    yield "L is m + l: it is m + log(l)", {"O": O, "L": torch.where(L > -math.inf, m + (L - m).exp(), L)}
    yield "L is the maximum alone: it is m + log(l)", {"O": O, "L": m}
    yield "L is in base 2: it is the natural logarithm", {"O": O, "L": L / math.log(2)}
    yield from tile_mistakes(p)


def moved(x: torch.Tensor, source: Callable[[torch.Tensor, torch.Tensor], tuple]) -> torch.Tensor:
    """x with the element (row, col) taken from another place, source(row, col); 0 if that is outside."""
    rows, cols = x.shape[-2:]
    row, col = source(*torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij"))
    taken = x[..., row.clamp(max=rows - 1), col.clamp(max=cols - 1)]
    return torch.where((row < rows) & (col < cols), taken, 0)


def blocks_swapped(row: torch.Tensor, col: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper right and lower left 8 x 8 of every 16 x 16 change places."""
    return row - row % 16 // 8 * 8 + col % 16 // 8 * 8, col - col % 16 // 8 * 8 + row % 16 // 8 * 8


def blocks_transposed(row: torch.Tensor, col: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every 8 x 8."""
    return row - row % 8 + col % 8, col - col % 8 + row % 8


def tile_mistakes(p: Problem) -> Iterator[tuple[str, Tensors]]:
    """What comes of numbers that are not where they should be: in shared memory, or in registers."""
    Bc = p.Bc
    q, k, v = p.q, p.k, p.v

    def swizzled(row, col):
        return row ^ col // 4 % 2 * 16, col

    # Stage conflict_free: Q_smem and K_smem are transposed, with columns that change places
    for what, change in (
            ("Q_smem is read without the swizzle: at k, row x of Q is in column x ^ swizzle_of(k)",
             {"q": moved(q, swizzled)}),
            ("K_smem is read without the swizzle: at k, key x is in column x ^ swizzle_of(k)",
             {"k": moved(k, swizzled)}),
            ("Q_smem and K_smem are read without the swizzle: at k, column x is in column x ^ swizzle_of(k)",
             {"q": moved(q, swizzled), "k": moved(k, swizzled)}),
            ("a thread's keys come in fours that are 16 apart: they are 32 apart (col_of), as 8 lanes take 4",
             {"k": moved(k, lambda row, col: (row - row % 64 // 32 * 16, col))}),
            ("S is made of the first 8 columns of Q and K, again and again: all d of them count",
             {name: moved(x, lambda row, col: (row, col % 8)) for name, x in (("q", q), ("k", k))}),
            # Stages with tensor cores: 8 x 8 blocks of fragments
            ("in every 16 x 16 of Q two blocks have changed places: a[1] is lower left, a[2] upper right",
             {"q": moved(q, blocks_swapped)}),
            ("in every 16 x 16 of K two blocks have changed places: b[0] and b[1] are of the same 8 keys, "
             "side by side in K_smem, and the next two matrices are of the next 8 keys",
             {"k": moved(k, blocks_swapped)}),
            ("in every 16 x 16 of V two blocks have changed places: b[0] and b[1] are of the same 8 columns, "
             "one below the other in V_smem, and the next two matrices are of the next 8 columns",
             {"v": moved(v, blocks_swapped)}),
            ("of every 16 keys the last 8 are the first 8 once more: lanes 16 to 31 point to the second 8",
             {"k": moved(k, lambda row, col: (row - row % 16 // 8 * 8, col))}),
            ("no 8 x 8 of V is transposed: a column of B crosses V's rows, so ldmatrix must do that (trans)",
             {"v": moved(v, blocks_transposed)}),
            ("the block of V for k and n is that for n and k: rows of V are keys (k), its columns O's (n)",
             {"v": moved(v, lambda row, col: (row - row % Bc + col // 16 * 16 + row % 16,
                                              row % Bc // 16 * 16 + col % 16))}),
            ("block n of O is tiles n and n + 1: it is 16 columns wide, tiles 2 * n and 2 * n + 1",
             {"v": moved(v, lambda row, col: (row, col // 8 * 16 + col % 8))
              + moved(v, lambda row, col: (row, (col // 8 * 16 - 8 + col % 8).where(col > 7, v.shape[-1])))}),
            ("each tile of keys is the one before: during tile j, tile j + 1 is to be copied",
             {name: moved(x, lambda row, col: (row - Bc * (row >= Bc), col))
              for name, x in (("k", k), ("v", v))})):
        yield what, attention(replace(p, **change))
    S = p.scores()

    def exchanged(row, col):  # 8 x 8 numbers of S a thread: in fours, 16 rows and 32 columns apart
        return (row - row % 32 + col // 32 % 2 * 16 + row % 16 // 4 * 4 + col % 4,
                col - col % 64 + row % 32 // 16 * 32 + col % 32 // 4 * 4 + row % 4)

    if S.shape[-2] % 32 == S.shape[-1] % 64 == 0:
        other = moved(S, exchanged).masked_fill(~p.visible(), -math.inf)
        P, L = softmax(other)
        yield "query and key have changed places in the product: S_reg[r][c] is query r times key c", {
            "O": P @ p.values(), "L": L}
    if S.shape[-1] > Bc:
        return
    # P, of one tile, on its way to the product with V
    S = S.masked_fill(~p.visible(), -math.inf)
    m = S.amax(-1, keepdim=True)
    P, L = torch.exp(S - m.where(m > -math.inf, 0)), softmax(S)[1]
    l = P.sum(-1, keepdim=True)
    for what, source in (
            ("in every 16 x 16 of P two blocks have changed places: P_reg[1] is lower left, 2 is upper right",
             blocks_swapped),
            ("in every register of P the two elements have changed places: the left one is the lower half",
             lambda row, col: (row, col ^ 1)),
            ("the tiles of S for step k are k and k + 1: a fragment of P is 16 columns wide, two tiles",
             lambda row, col: (row, col // 16 * 8 + col % 16)),
            ("P changes places when it is read, and not when it is stored: row x of P_smem has column c at "
             "c ^ P_swizzle(x)", lambda row, col: (row ^ col // 4 % 4 * 8, col))):
        yield what, {"O": torch.where(l > 0, moved(P, source) @ p.values() / l, 0), "L": L}


def backward_mistakes(p: Problem) -> Iterator[tuple[str, Tensors]]:
    """(what it is, the gradients that would come of it)."""
    right = gradients(p)
    for name in ("dQ", "dK"):
        yield f"{name} lacks the scale: it is scale * dS{' K' if name == 'dQ' else '^T Q'}", right | {
            name: right[name] / p.scale}
        yield f"{name} is scaled twice", right | {name: right[name] * p.scale}
    yield "dV is scaled, and must not be: it is P^T dO", right | {"dV": right["dV"] * p.scale}
    yield "D is left out: dS = P (dP - D)", gradients(p, D_times=0, with_dL=False)
    yield "D has the wrong sign: dS = P (dP - D)", gradients(replace(
        p, dlse=None if p.dlse is None else -p.dlse), D_times=-1)
    if p.dlse is not None:
        yield "dL is left out: it is subtracted from D", gradients(p, with_dL=False)
        yield "dL has the wrong sign: it is subtracted from D", gradients(replace(p, dlse=-p.dlse))
    if p.diagonal is not None:
        for shift, what in ((1, "many"), (-1, "few")):
            yield (f"the mask is off by one: a query sees one key too {what} (col <= row + diagonal)",
                   gradients(p, visible=p.visible(p.diagonal + shift)))
        yield "P has no causal mask", gradients(p, visible=torch.ones_like(p.visible()))
        yield ("the diagonal is left out of the mask, which must be col <= row + diagonal",
               gradients(p, visible=p.visible(0)))
    group = p.q.shape[1] // p.k.shape[1]
    if group > 1:
        for heads, what in ((slice(0, 1), "first"), (slice(-1, None), "last")):
            yield (f"dK and dV have the {what} query head of a group only: they are sums over all of them",
                   gradients(p, heads=heads))
    if 1 < p.k.shape[1] < p.q.shape[1]:
        yield ("dK and dV sum over every H_kv-th query head: the heads of a group are neighbours",
               gradients(p, neighbours=False))
    yield "P and dS have changed places: dV = P^T dO, dK = scale * dS^T Q", gradients(p, swapped=True)
    unseen = ~p.visible().any(-1)
    if unseen.any():
        yield ("in a row that sees no key P is 0 / 0, or e^(-inf - -inf), which is NaN: it is 0 there",
               {name: torch.full_like(x, math.nan) for name, x in right.items()} | {
                   "dQ": right["dQ"].masked_fill(unseen[:, None], math.nan)})
    if p.q.shape[2] == p.k.shape[2]:
        yield "P and dS are not transposed: dV = P^T dO, dK = scale * dS^T Q", gradients(p, transposed=False)
    yield "D is used before its sum is complete: it is one number for a row", gradients(p, running=True)
    yield "P lacks the scale: it is e^(scale * Q K^T - L)", gradients(p, S_times=1 / p.scale)
    yield "P lacks L: it is e^(scale * Q K^T - L)", gradients(p, with_L=False)
    yield "dQ and dK are scaled twice: dS itself has no scale", right | {
        name: right[name] * p.scale for name in ("dQ", "dK")}
    S = p.scores().masked_fill(~p.visible(), -math.inf)
    P = softmax(S)[0]
    keys = p.k.repeat_interleave(group, 1)
    yield "dQ is made of P: it is scale * dS K", right | {"dQ": p.scale * P @ keys}
    yield "dQ is made of V: it is scale * dS K", right | {"dQ": gradients(p, keys=p.v)["dQ"]}
    yield "dV is made of S: it is P^T dO", right | {
        "dV": (S.mT @ p.do).unflatten(1, (p.k.shape[1], group)).sum(2)}


def diagnosis(p: Problem, found: Tensors, wrong: list[str], tolerance: dict[str, float]) -> str:
    """The mistake that gives what was found in the outputs `wrong`, or an empty text.

    tolerance: by output, how far a number may be from what the mistake would give.
    """
    forward = p.do is None
    truth = attention(p) if forward else gradients(p)
    for what, outputs in forward_mistakes(p) if forward else backward_mistakes(p):
        if all(_agree(found[name].double(), outputs[name], tolerance[name]) for name in wrong) and not any(
                _agree(truth[name], outputs[name], tolerance[name]) for name in wrong):
            return what
    return ""


def _agree(x: torch.Tensor, y: torch.Tensor, tolerance: float) -> bool:
    """Within the tolerance, 1e-4 of the number, or 1e-5 of the largest: a mistake may give large numbers that
    cancel each other. NaN agrees with NaN."""
    largest = y.where(y.isfinite(), 0).abs().max()
    near = y.isfinite() & ((x - y).abs() <= tolerance + 1e-4 * y.abs() + 1e-5 * largest)
    return bool((near | (x == y) | (x.isnan() & y.isnan())).all())
