"""The calls that a check makes, and their tensors: random ones, and scores that random ones never give.

With random scores a row's maximum soon stays where it is, e^S does not overflow, and no score is 0. So a
second group of calls has another pattern of scores in each head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flash_ladder.reference import random_gradients, random_qkv, seen_by

from . import masks
from .masks import MaskCall

LARGE = 200.0  # e^200 is infinite in float32, and e^-200 is 0
PATTERNS = {
    "rising": f"scores rise along the keys, from 0 to {LARGE:.0f}",
    "falling": f"scores fall along the keys, from {LARGE:.0f} to 0",
    "flat": f"all scores of a row are equal: 0, {LARGE:.0f}, -{LARGE:.0f}, 0, and so on, row by row",
    "huge": "scores are in the hundreds, of both signs",
}


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        with_dL: of a backward stage, whether the loss depends on L, too.
        patterns: of PATTERNS, for the key heads 0, 1, ... and the query heads that read them; none: random.
        spread: rows are not d elements apart, and in each tensor another number: q and k lie as (B, N, heads,
            d) in memory, and v and dO have a gap behind each row.
        last_dtype: in the last of the stage's types, not the first.
        mask: in place of the causal one.
    """

    B: int
    H: int
    H_kv: int
    N_q: int
    N_k: int
    d: int
    causal: bool
    scale: float | None
    seed: int
    with_dL: bool = True
    patterns: tuple[str, ...] = ()
    spread: bool = False
    last_dtype: bool = False
    mask: MaskCall | None = None

    @property
    def diagonal(self) -> int | None:
        return self.N_k - self.N_q if self.causal else None

    @property
    def visible(self) -> int | torch.Tensor | None:
        """Which pairs of a query and a key count: as `reference` wants it."""
        return self.mask.seen(self.N_q, self.N_k) if self.mask else self.diagonal

    @property
    def factor(self) -> float:
        """Of the scores: the scale, or its default."""
        return self.d ** -0.5 if self.scale is None else self.scale

    def __str__(self) -> str:
        mask = self.mask or ("causal" if self.causal else "not causal")
        scale = f", scale={self.scale}" if self.scale else ""
        layout = ", rows stride_n apart, which is not d, and not the same in any two" if self.spread else ""
        patterns = "".join(f"; in key head {n} {PATTERNS[name]}" for n, name in enumerate(self.patterns))
        return (f"B={self.B} H={self.H} H_kv={self.H_kv} N_q={self.N_q} N_k={self.N_k} d={self.d} "
                f"{mask}{scale}{layout}{patterns}")


# From plain to nasty: sizes that are no multiples of a tile, scores whose exponentials overflow, more queries
# than keys, so that the first rows see none, and more keys than queries.
RANDOM = (
    Case(1, 2, 2, 64, 64, 64, False, None, 1),
    Case(2, 2, 1, 75, 139, 64, False, 3.0, 2),
    Case(1, 2, 2, 77, 77, 40, True, None, 3, with_dL=False),
    Case(1, 4, 2, 101, 70, 40, True, -0.3, 4),
    Case(1, 4, 2, 50, 150, 40, True, 0.4, 5),
)
# Then what these do not show: a d that takes a part of a third group of 64 columns, and another type; one
# key; rows that are not d apart; and the patterns.
OTHERS = (
    Case(1, 2, 1, 40, 139, 136, False, None, 8, last_dtype=True),
    Case(1, 2, 1, 3, 1, 40, True, None, 9),
    Case(1, 4, 2, 50, 75, 40, True, None, 10, spread=True),
    Case(1, 4, 4, 70, 139, 64, False, None, 11, patterns=("rising", "falling", "flat", "huge")),
    Case(1, 4, 2, 40, 150, 40, True, -0.3, 12, patterns=("rising", "flat"), with_dL=False),
)
CASES = RANDOM + OTHERS
ORDER = Case(1, 4, 2, 150, 150, 64, False, None, 6)             # for determinism


@dataclass(frozen=True)
class Calls:
    """The calls of a check.

    Attributes:
        cases: until one is wrong.
        plain: all that a hasty test would try.
        score: what the score is taken of, and what probes are run in.
    """

    cases: tuple[Case, ...] = CASES
    plain: Case = Case(1, 4, 2, 128, 128, 64, False, None, 13)
    score: Case = Case(1, 1, 1, 128, 128, 64, False, None, 7)


CAUSAL_SCORE = Calls(score=Case(1, 1, 1, 160, 160, 40, True, None, 7))
# Where blanks know nothing of columns, masks and types: one kernel to compile
FEW = Calls((replace(CASES[0], N_k=96), CASES[1], replace(CASES[6], d=64, causal=False), CASES[8]))


def calls_with(mask: str) -> Calls:
    """Those of an exercise about a mask: with that one in place of the causal one."""
    cases = (replace(case, causal=False, mask=masks.in_case(mask, n, case.B, case.N_q, case.N_k))
             for n, case in enumerate(CASES))
    return Calls(tuple(cases), replace(Calls.plain, mask=masks.PLAIN[mask]),
                 replace(CAUSAL_SCORE.score, causal=False, mask=masks.SCORE[mask]))


def inputs_of(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
    """q, k, v, dO, and dL or None. dL is infinite where L is: in rows that see no key."""
    q, k, v = random_qkv(case.B, case.H, case.H_kv, case.N_q, case.N_k, case.d, "cpu", torch.float32,
                         case.seed)
    group = case.H // case.H_kv
    for head, pattern in enumerate(case.patterns):
        with_pattern(q[:, head * group:(head + 1) * group], k[:, head], pattern, case.factor)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    do, dlse = random_gradients(q, case.seed + 100)
    if case.spread:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        v, do = (torch.cat((x, x.new_zeros(*x.shape[:3], gap)), -1)[..., :case.d]
                 for x, gap in ((v, 2 * case.d), (do, 16)))
    if case.visible is not None:
        seen = seen_by(case.visible, torch.empty(case.N_q, case.N_k))
        dlse = dlse.where(seen.any(-1), -torch.inf)
    return q, k, v, do, dlse if case.with_dL else None


def with_pattern(q: torch.Tensor, k: torch.Tensor, pattern: str, factor: float) -> None:
    """Change q (B, group, N_q, d) and k (B, N_k, d) in place, so that factor * q k^T has a pattern.

    Along one direction, `axis`, q has what makes the score along it k's share; across it both stay random.
    """
    N_k, d = k.shape[-2:]
    if pattern == "huge":
        q *= 30 / abs(factor)
        return
    axis = torch.full((d,), d ** -0.5)
    for x in (q, k):
        x -= (x @ axis)[..., None] * axis
    if pattern == "flat":
        k[:] = axis
        level = torch.tensor([0.0, LARGE, -LARGE])[torch.arange(q.shape[-2]) % 3]
        q += level[:, None] / factor * axis
        q[..., level == 0, :] = 0
    else:
        target = torch.linspace(0, LARGE, N_k)
        k += (target if pattern == "rising" else target.flip(0))[:, None] * axis
        q += axis / factor
