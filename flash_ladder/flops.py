"""How much a call computes."""

from __future__ import annotations

from .bound import Bound


def flops_of_pair(direction: str, d: int, d_v: int) -> int:
    """Of a query and a key that it sees, in both products, or in the five of the backward pass."""
    return 2 * (d + d_v) if direction == "fwd" else 2 * (3 * d + 2 * d_v)


def visible_pairs(N_q: int, N_k: int, visible: Bound | int | None) -> int:
    """How many pairs of a query and a key that it sees. visible: as of a plan. Of a mask: all,
    as it depends on its tensors, which tiles.py asks."""
    if not isinstance(visible, int):
        return N_q * N_k
    return sum(min(max(row + visible + 1, 0), N_k) for row in range(N_q))
