"""The tensors of a case, and whether what comes of them is right: against float64."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

import flash

from .masked import pattern

if TYPE_CHECKING:
    from .competitors import Competitor


@dataclasses.dataclass(frozen=True)
class Case:
    """The tensors of one N, what is to be computed from them, and how wrong a stage may be."""

    N: int
    pairs: int                      # of a query and a key that count, over all batch elements and heads
    inputs: list[torch.Tensor]      # random_inputs
    exact: dict[str, torch.Tensor]  # O, or dQ, dK and dV, in float64
    allowed: dict[str, float]       # the largest error of each


def random_inputs(N: int, args: argparse.Namespace) -> list[torch.Tensor]:
    """q, k and v, (B, H, N, d), (B, H_kv, N, d) and the same; for gradients also dO, like q. They are normal,
    and the same in every run."""
    gradients = args.direction != "fwd"
    generator = torch.Generator(args.device).manual_seed(N)
    tensors = [torch.randn(args.batch, heads, N, args.head_dim, generator=generator, device=args.device,
                           dtype=flash.DTYPES[args.dtype])
               for heads in (args.H, args.H_kv, args.H_kv, *[args.H] * gradients)]
    for x in tensors[:3]:
        x.requires_grad_(gradients)
    return tensors


def plain_head(Q, K, V, dO=None, *, hidden: torch.Tensor | None = None, score: Callable | None = None,
               rounded: bool = False) -> tuple[torch.Tensor, ...]:
    """(O,) of one head, or for a dO (dQ, dK, dV), by the formulas of flash_fwd.cu and flash_bwd.cu.

    Args:
        Q, K, V, dO: (rows, d), (N, d), (N, d) and (rows, d), of any type.
        hidden: (rows, N), true where a query does not see a key.
        score: what becomes of scaled scores, element by element.
        rounded: products take and give Q's type, and what lies between is in float32; else all is in float64.
    """
    narrow, wide = (Q.dtype, torch.float32) if rounded else (torch.float64, torch.float64)
    Q, K, V = (x.to(narrow) for x in (Q, K, V))
    scale = 1 / math.sqrt(Q.shape[1])
    S = (scale * Q @ K.T).to(wide)
    slope = None
    if score:
        S, slope = scored(S, score, dO is not None)
    if hidden is None:
        P = S.softmax(-1)
    else:  # of a row that sees nothing, 0
        P = S.masked_fill(hidden, -math.inf).softmax(-1).masked_fill_(hidden.all(-1, keepdim=True), 0)
    if dO is None:
        return (P.to(narrow) @ V,)
    dO = dO.to(narrow)
    dP = (dO @ V.T).to(wide)
    dS = P * (dP - (P * dP).sum(-1, keepdim=True))
    dS = (dS if slope is None else dS * slope).to(narrow)
    return scale * dS @ K, scale * dS.T @ Q, P.to(narrow).T @ dO


def scored(S: torch.Tensor, score: Callable, gradient: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """score(S), and its derivative if asked for."""
    with torch.enable_grad():
        changed = score(S.requires_grad_(gradient))
    slope = torch.autograd.grad(changed.sum(), S)[0] if gradient else None
    return changed.detach(), slope


def make_case(N: int, args: argparse.Namespace) -> Case:
    """Random inputs, what is exact for them, and plain PyTorch's error: by heads, and of a long N some rows
    at once, so that it fits."""
    inputs = random_inputs(N, args)
    gradients = args.direction != "fwd"
    names = ("dQ", "dK", "dV") if gradients else ("O",)
    group = args.H // args.H_kv
    by_head = [x.detach().unflatten(1, (args.H_kv, -1)) for x in inputs]  # (B, H_kv, group or 1, N, d)
    exact, plain = ([torch.zeros_like(x, dtype=torch.float64) for x, _ in zip(by_head, names, strict=False)]
                    for _ in range(2))
    mask = pattern(N, args)
    for b, h_kv, n in itertools.product(range(args.batch), range(args.H_kv), range(group)):
        Q, K, V, *dO = (x[b, h_kv].expand(group, -1, -1)[n] for x in by_head)
        for rows in mask.rows():
            at = slice(rows.start, rows.stop)
            options = mask.of_rows(b, h_kv * group + n, rows)
            for sums, rounded in (exact, False), (plain, True):
                parts = plain_head(Q[at], K, V, *(x[at] for x in dO), rounded=rounded, **options)
                for name, x, part in zip(names, sums, parts, strict=False):
                    head = x[b, h_kv].expand(group, -1, -1)[n]  # dK and dV: the group's sum
                    (head[at] if name in ("O", "dQ") else head).add_(part)
    errors = [largest_error(x, truth) for x, truth in zip(plain, exact, strict=True)]
    exact = [x.flatten(1, 2) for x in exact]
    sizes = [max(1, x.abs().max().item()) for x in exact]  # a gradient may be a sum over many rows
    allowed = [3 * error + 1e-6 * size if gradients else 2 * error + 1e-6
               for error, size in zip(errors, sizes, strict=True)]
    return Case(N, mask.pairs(), inputs, dict(zip(names, exact, strict=True)),
                dict(zip(names, allowed, strict=True)))


def largest_error(o: torch.Tensor, exact: torch.Tensor) -> float:
    """max |o - exact|; NaN if there is a NaN in o."""
    return (o - exact).abs().max().item()


def worst_error(outputs: tuple[torch.Tensor, ...], case: Case) -> tuple[str, float]:
    """The output that is nearest to what is allowed, or most beyond it, or has a NaN; its largest error."""
    errors = {name: largest_error(x, exact) for (name, exact), x in zip(case.exact.items(), outputs)}
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name] / case.allowed[name]))
    return worst, errors[worst]


def complaint(name: str, error: float, allowed: float) -> str:
    """What is wrong with the largest error in an output, NaN too; empty if it is small enough."""
    return "" if error <= allowed else f"the largest error in {name} is {error:.2g}; {allowed:.2g} is allowed"


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Here torch.empty gives NaN: what a stage leaves unwritten is noticed, whatever lay there before."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def verdict(competitor: Competitor, outputs: tuple[torch.Tensor, ...], case: Case) -> dict:
    """What the largest error in the outputs changes in a row: a stage for which it is too large is wrong."""
    name, error = worst_error(outputs, case)
    found = {"error": error if math.isfinite(error) else None,  # JSON has no NaN
             "error_in": name, "allowed_error": case.allowed[name]}
    if competitor.is_stage and (message := complaint(name, error, case.allowed[name])):
        found |= {"status": "wrong", "message": message}
    return found
