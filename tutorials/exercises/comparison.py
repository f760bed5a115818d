"""The outputs of a call beside the truth in float64: which are wrong, where, and by which mistake."""

from __future__ import annotations

import torch

from flash_ladder.reference import recomputed_gradients, reference, reference_gradients, seen_by

from .cases import PATTERNS, Case, inputs_of
from .mistakes import diagnosis
from .models import Problem

Tensors = dict[str, torch.Tensor]
GRADIENTS = ("dQ", "dK", "dV")


def difference(case: Case, dtype: torch.dtype, outputs: Tensors, tiles: dict[str, int],
               splits: int = 1) -> str:
    """What is wrong with the outputs of a call, in words; nothing if they are right.

    splits: ranges of keys that the stage makes.
    """
    q, k, v, do, dlse = inputs_of(case, dtype)
    backward = "dQ" in outputs
    truth = truth_of(case, dtype, backward)
    allowed = tolerances(case, dtype, truth)
    wrong = [name for name, x in outputs.items() if bool(wrong_elements(x, truth[name], allowed[name]).any())]
    if not wrong:
        return ""
    wide = Problem(q.double(), k.double(), v.double(), case.diagonal, case.factor, tiles["Br"],
                   tiles["Bc"],
                   do=do.double() if backward else None,
                   dlse=dlse.double() if backward and dlse is not None else None, mask=case.mask,
                   splits=splits)
    tolerance = {name: 4 * x.max().item() for name, x in allowed.items()}
    found, rows = outputs, ""
    if case.patterns:  # a mistake shows in some heads only, and there it may be by overflow
        name = wrong[0]
        head = int(wrong_elements(outputs[name], truth[name], allowed[name]).nonzero()[0, 1])
        h_kv = head if name in ("dK", "dV") else head // (case.H // case.H_kv)
        rows = f" Here {PATTERNS[case.patterns[h_kv]]}."
        wide, found = wide.of_key_head(h_kv), {name: of_key_head(case, name, x, h_kv)
                                               for name, x in outputs.items()}
        exact = {name: of_key_head(case, name, x, h_kv) for name, x in truth.items()}
        limits = {name: of_key_head(case, name, x, h_kv) for name, x in allowed.items()}
        wrong_here = [name for name in found if bool(wrong_elements(found[name], exact[name],
                                                                    limits[name]).any())]
        tolerance = {name: 4 * x.max().item() for name, x in limits.items()}
        why = diagnosis(wide.rounded(), found, wrong_here, tolerance)
    else:
        why = diagnosis(wide, found, wrong, tolerance)
    parts = [f"It looks as if {why}."] if why else []
    parts += [described(name, outputs[name].double(), truth[name], allowed[name], tiles, case) + rows
              for name in wrong]
    if right := [name for name in outputs if name not in wrong]:
        parts.append(f"({' and '.join(right)} {'is' if len(right) == 1 else 'are'} right.)")
    return "\n\n".join(parts)


def truth_of(case: Case, dtype: torch.dtype, backward: bool) -> Tensors:
    """The outputs, by name, in float64."""
    q, k, v, do, dlse = inputs_of(case, dtype)
    if backward:
        return dict(zip(GRADIENTS, reference_gradients(q, k, v, do, case.visible, case.scale, dlse),
                        strict=True))
    wide = (x.double() for x in (q, k, v))
    return dict(zip("OL", reference(*wide, case.visible, case.scale), strict=True))


def tolerances(case: Case, dtype: torch.dtype, truth: Tensors) -> Tensors:
    """How far an output may be from the truth: one number for each of its heads, (B, heads, 1, ...).

    2 times (gradients: 3 times) the error of PyTorch in the stage's type. If heads have patterns, each by
    itself, with what the rounding of a large score may cost: a score of 200 is wrong by 1e-5, and so is then
    its row of P. (There in float32, as no stage rounds its scores to 16 bits, which PyTorch does.)
    """
    q, k, v, do, dlse = inputs_of(case, dtype)
    backward = "dQ" in truth
    if case.patterns:
        q, k, v = (x.float() for x in (q, k, v))
    if backward:
        plain = dict(zip(GRADIENTS, recomputed_gradients(q, k, v, do, case.visible, case.scale, dlse),
                         strict=True))
    else:
        plain = dict(zip("OL", reference(q, k, v, case.visible, case.scale), strict=True))
    allowed = {}
    for name, x in truth.items():
        distance = (plain[name].double() - x).where(plain[name] != x, 0.0).abs()
        floor = 1e-6 * max(1.0, x.abs().max().item()) if backward else 1e-6
        if case.patterns:
            error = distance.flatten(2).max(-1).values
            size = x.where(x.isfinite(), 0).abs().flatten(2).max(-1).values
            group = case.H // case.H_kv
            scores = (case.factor * q @ k.repeat_interleave(group, 1).mT).abs().flatten(2).max(-1).values
            if name in ("dK", "dV"):
                scores = scores.unflatten(1, (case.H_kv, group)).max(-1).values
            rounding = 8 * torch.finfo(torch.float32).eps * (scores.double() if name != "L" else 1)
            if name == "O":
                rounding = rounding + (2 * torch.finfo(dtype).eps if dtype != torch.float32 else 0)
                size = v.double().abs().flatten(2).max(-1).values.repeat_interleave(group, 1)
            limit = 3 * error + rounding * size + floor
        else:
            limit = ((3 if backward else 2) * distance.max() + floor).expand(x.shape[:2])
        allowed[name] = limit.reshape(*x.shape[:2], *(1 for _ in x.shape[2:]))
    return allowed


def wrong_elements(x: torch.Tensor, truth: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Where an output is wrong. Infinities must be the same ones; NaN is wrong."""
    x = x.double()
    return ~((x == truth) | ((x - truth).abs() <= allowed))


def of_key_head(case: Case, name: str, x: torch.Tensor, h_kv: int) -> torch.Tensor:
    """The heads of an output that belong to a key head."""
    group = case.H // case.H_kv
    return x[:, h_kv:h_kv + 1] if name in ("dK", "dV") else x[:, h_kv * group:(h_kv + 1) * group]


def described(name: str, x: torch.Tensor, truth: torch.Tensor, allowed: torch.Tensor, tiles: dict[str, int],
              case: Case) -> str:
    """The first wrong element of an output with its row, column and tile, and where the others are."""
    wrong = wrong_elements(x, truth, allowed)
    at = wrong.nonzero()[0].tolist()
    of_keys = name in ("dK", "dV")
    size, what, letter = (tiles["Bc"], "K and V", "j") if of_keys else (tiles["Br"], "Q", "i")
    row = at[2]
    column = f", column {at[3]}" if len(at) == 4 else ""
    first = row // size * size
    limit = allowed[at[0], at[1]].max().item()
    text = (f"{name}[{', '.join(map(str, at))}] is {x[tuple(at)]:.6g}, and should be {truth[tuple(at)]:.6g} "
            f"(to within {limit:.1g}): batch {at[0]}, head {at[1]}, row {row}{column}, which is in tile "
            f"{letter} = {row // size} of {what} (rows {first} to {min(first + size, x.shape[2]) - 1}).")
    if case.visible is not None and not of_keys:
        seen = seen_by(case.visible, torch.empty(1, 1, case.N_q, case.N_k)).expand(case.B, 1, -1, -1)
        keys = ranges(seen[at[0], 0, row])
        text += f" Row {row} sees {f'the keys {keys}' if keys else 'no key'}."

    def along(axis: int) -> torch.Tensor:
        return wrong.movedim(axis, 0).flatten(1).any(1)

    heads = "all heads" if bool(along(1).all()) else f"heads {ranges(along(1))}"
    text += (f" {int(wrong.sum()):,} of {wrong.numel():,} elements are wrong: in rows {ranges(along(2))} of "
             f"{heads}")
    if len(at) == 4 and not bool(along(3).all()):
        text += f", columns {ranges(along(3))}"
    nans = int(x.isnan().sum())
    return f"{text}." + (f" {nans:,} are NaN: never written, or made of NaN or of inf - inf." if nans else "")


def ranges(flags: torch.Tensor) -> str:
    """Where they are true, as 0-15, 32-47; the first few."""
    found: list[list[int]] = []
    for n in flags.nonzero().flatten().tolist():
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    text = ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in found[:4])
    return text + ", ..." * (len(found) > 4)
