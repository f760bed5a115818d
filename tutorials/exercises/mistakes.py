"""What common mistakes would give, in float64: to tell a learner not only that a number is wrong, but why.

A kernel's output is compared with what each mistake would give. If they agree where the truth does not, that
is the diagnosis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from .copy_mistakes import copy_mistakes
from .mask_mistakes import mask_mistakes
from .models import (
    Problem,
    Tensors,
    attention,
    by_lanes,
    by_merging,
    by_tiles,
    gradients,
    moved,
    one,
    same,
    softmax,
    with_maximum,
)
from .split_mistakes import split_mistakes
from .warpgroup_mistakes import warpgroup_mistakes


def tile_masks(p: Problem) -> Iterator[tuple[str, torch.Tensor]]:
    """(what it is, which keys are then seen), for loops that end at the wrong tile, and masks by the tile."""
    N_q, N_k = p.q.shape[2], p.k.shape[2]
    row, col = torch.arange(N_q)[:, None], torch.arange(N_k)[None]
    first, last = row // p.Br * p.Br, row // p.Br * p.Br + p.Br - 1

    def seen_by(row, diagonal):
        return (row + 1 + diagonal).clamp(0, N_k)

    diagonal = p.diagonal or 0
    missing = ("tiles of keys are left out: the loop of tile i must go on to the last key that the tile's "
               "last row sees")
    ends = [seen_by(last, 0), seen_by(last, N_k - N_q), torch.full_like(last, N_k // p.Bc * p.Bc)]
    if p.diagonal is not None:
        ends += [seen_by(last, diagonal - 1), seen_by(first, diagonal),
                 seen_by(first, diagonal) // p.Bc * p.Bc]
    for end in ends:
        visible = p.visible() & (col < -(-end // p.Bc) * p.Bc)
        if not torch.equal(visible, p.visible()):
            yield missing, visible
    if p.diagonal is not None:
        yield ("the mask is asked by row and column within the tile: they must be those of the whole matrix",
               (col % p.Bc <= row % p.Br + diagonal) & (col // p.Bc * p.Bc <= last + diagonal))


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
    yield ("m does not follow the maximum: it stays the first tile's, and e^(S - m) overflows when scores "
           "rise", by_tiles(p, same, same, maximum=lambda m, tile: m.where(m > -math.inf, tile)))
    yield ("m is the last tile's maximum, not that of all tiles: e^(m - m_new) overflows when scores fall",
           by_tiles(p, same, same, maximum=lambda m, tile: tile.where(tile > -math.inf, m)))
    for normalised in (False, True):
        yield ("the maximum is not subtracted: e^S overflows above 88, and S may be any number",
               with_maximum(p, lambda S: torch.zeros_like(S[..., 0]), normalised))
        yield ("the maximum begins with 0: it must begin with -inf, as all scores of a row may be far below "
               "0",
               with_maximum(p, lambda S: S.amax(-1).clamp(min=0), normalised))
        yield ("rows share a maximum: each row must subtract its own, or e^(S - m) is 0 in all of a row",
               with_maximum(p, lambda S: S.amax((-2, -1))[..., None].expand(S.shape[:-1]), normalised))
    zero = attention(p, p.visible() & (p.scores() != 0))
    for outputs in (zero, {"O": zero["O"], "L": L}):
        yield "a score of 0 is taken for a key that is not seen: 0 is a score like others", outputs
    for what, visible in tile_masks(p):
        yield what, attention(p, visible)
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
            ("S is made of the first 64 columns of Q and K: d may be larger",
             {"q": moved(q, lambda row, col: (row, col.where(col < 64, q.shape[-1])))}),
            # Stages with tensor cores: 8 x 8 blocks of fragments
            ("in every 16 x 16 of Q two blocks have changed places: a[1] is lower left, a[2] upper right",
             {"q": moved(q, blocks_swapped)}),
            ("in every 16 x 16 of K two blocks have changed places: b[0] and b[1] are of the same 8 keys, "
             "side by side in K_smem, and the next two matrices are of the next 8 keys",
             {"k": moved(k, blocks_swapped)}),
            ("in every 16 x 16 of V two blocks have changed places: b[0] and b[1] are of the same 8 columns, "
             "one below the other in V_smem, and the next two matrices are of the next 8 columns",
             {"v": moved(v, blocks_swapped)}),
            ("of every 16 keys the two halves have changed places, in K and in V: the mask counts keys in "
             "order",
             {name: moved(x, lambda row, col: (row ^ 8, col)) for name, x in (("k", k), ("v", v))}),
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
            ("tile j of V is taken from row j * Br on: it begins at row j * Bc",
             {"v": moved(v, lambda row, col: (row // Bc * p.Br + row % Bc, col))}),
            ("tile j of K is taken from row j * Br on: it begins at row j * Bc",
             {"k": moved(k, lambda row, col: (row // Bc * p.Br + row % Bc, col))}),
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
    exact = p.scores().masked_fill(~p.visible(), -math.inf)
    for seen in (exact != 0, (exact.amax(-1) != 0)[..., None]):
        yield ("a score or a maximum of 0 is taken for \"sees no key\": 0 is a score like others, and such "
               "a row has l = 0 and L = -inf", gradients(p, visible=p.visible() & seen))
    for running in (False, True):
        yield ("e^S is divided by e^L, or by e^m times l: both overflow above 88; subtract in the exponent",
               gradients(p, quotient=True, D_of_P=running))
    for what, visible in tile_masks(p):
        found = gradients(p, visible=visible)
        for outputs in (found, right | {"dQ": found["dQ"]}):
            yield what, outputs
    unseen = ~p.visible().any(-1)
    if unseen.any():
        of_rows = {"dQ": right["dQ"].masked_fill(unseen[:, None], math.nan),
                   "dK": torch.full_like(right["dK"], math.nan)}
        if p.dlse is not None:
            yield ("dL is used in a row that sees no key: it may be infinite there, and 0 * inf is NaN; "
                   "leave it out where l = 0", right | of_rows)
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
    yield "dQ is made of P: it is scale * dS K", right | {"dQ": p.scale * P @ p.k.repeat_interleave(group, 1)}
    col = torch.arange(p.k.shape[2])
    last = col // p.Bc == (p.visible() * col).amax(-1, keepdim=True) // p.Bc
    yield ("dQ holds the last tile of keys only: it must be added to, not begun anew",
           right | {"dQ": gradients(p, visible=p.visible() & last)["dQ"]})
    yield "dQ is made of V: it is scale * dS K", right | {"dQ": gradients(p, keys=p.v)["dQ"]}
    yield "dV is made of S: it is P^T dO", right | {
        "dV": (S.mT @ p.do).unflatten(1, (p.k.shape[1], group)).sum(2)}


def mistakes_of(p: Problem) -> Iterator[tuple[str, Tensors]]:
    """(what it is, the outputs that would come of it)."""
    if p.mask:
        for what, visible in mask_mistakes(p):
            yield what, attention(p, visible) if p.do is None else gradients(p, visible=visible)
    else:
        yield from split_mistakes(p)
        yield from forward_mistakes(p) if p.do is None else backward_mistakes(p)
        if p.do is None:
            yield from copy_mistakes(p)
            yield from warpgroup_mistakes(p)


def diagnosis(p: Problem, found: Tensors, wrong: list[str], tolerance: dict[str, float]) -> str:
    """The mistake that gives what was found in the outputs `wrong`, or an empty text. One that leaves the
    others right is preferred.

    tolerance: by output, how far a number may be from what the mistake would give.
    """
    forward = p.do is None
    for problem in (p, p.rounded()):  # that some mistakes overflow shows in float32 only
        truth = attention(problem) if forward else gradients(problem)
        loose = ""
        for what, outputs in mistakes_of(problem):
            agrees = {name: _agree(found[name].double(), outputs[name].double(), tolerance[name])
                      for name in found}
            if all(agrees[name] for name in wrong) and not any(
                    _agree(truth[name].double(), outputs[name].double(), tolerance[name]) for name in wrong):
                if all(agrees.values()):
                    return what
                loose = loose or what
        if loose:
            return loose
    return _symptom(p, found, wrong)


def _symptom(p: Problem, found: Tensors, wrong: list[str]) -> str:
    """What can be told by where the wrong numbers are, whatever they are."""
    if p.mask:
        return ""
    truth = attention(p) if p.do is None else gradients(p)
    unseen = ~p.visible().any(-1)
    if p.do is None and wrong == ["O", "L"] and unseen.any():
        L = found["L"][..., unseen]
        rest = _agree(found["L"][..., ~unseen].double(), truth["L"][..., ~unseen].double(), 0.01)
        if rest and bool((L.isfinite() & (L < -1e3)).all()):
            return ("a key that is not seen has a large negative score, such as -1e9: it must be -inf, as "
                    "in a row that sees no key all of these would count the same")
    if p.do is None and bool(((found["L"] == -math.inf) & (truth["L"] > -math.inf)).any()):
        return ("l is 0 in a row that sees keys, so what is subtracted there is far above the row's own "
                "maximum: all lanes of a row must subtract that one, and no other row's")
    if p.do is not None and unseen.any():
        dQ, right = found["dQ"].double(), truth["dQ"]
        if not dQ[:, :, unseen].isfinite().any() and _agree(dQ[:, :, ~unseen], right[:, :, ~unseen], 0.01):
            return ("in a row that sees no key P is infinite or NaN: it must be 0 there, and e^(S - L) is "
                    "not, as L is -inf, even with a score such as -1e9")
    columns = [name for name in wrong if name != "L"]
    if p.q.shape[-1] > 64 and columns == wrong and all(
            _agree(found[name][..., :64].double(), truth[name][..., :64].double(), 0.01) for name in wrong):
        return "only the first 64 columns are made: d may be larger"
    return ""


def _agree(x: torch.Tensor, y: torch.Tensor, tolerance: float) -> bool:
    """Within the tolerance, 1e-4 of the number, or 1e-5 of the largest: a mistake may give large numbers that
    cancel each other. NaN agrees with NaN."""
    largest = y.where(y.isfinite(), 0).abs().max()
    near = y.isfinite() & ((x - y).abs() <= tolerance + 1e-4 * y.abs() + 1e-5 * largest)
    return bool((near | (x == y) | (x.isnan() & y.isnan())).all())
