"""The calls that every stage must get right, and how exact it must be: for the tests, and for
`python flash.py check`.
"""

import contextlib

import torch

from .reference import max_error, recomputed_gradients, reference, reference_gradients
from .registry import stages

# B * H * N_q and N_k of large calls, as rules for tiles see them
LARGE = ((1 << 15, 1), (1 << 20, 1), (1 << 20, 1 << 14))
# B, H, H_kv, N_q, N_k, d, mask; N around and between the multiples of the tiles. "bottom": the last query
# sees the last key (attention's causal); "top": query i sees key j <= i (scaled_dot_product_attention's).
GRID = [
    (1, 1, 1, 1, 1, 8, None),
    (2, 2, 2, 64, 64, 64, None),
    (1, 2, 2, 67, 67, 64, "bottom"),
    (1, 3, 1, 63, 129, 32, "bottom"),  # MQA; N_q < N_k
    (2, 4, 2, 130, 67, 40, "bottom"),  # GQA; N_q > N_k: the first 63 rows see no key
    (1, 8, 1, 33, 31, 72, None),  # a group of 8
    (1, 2, 2, 70, 45, 128, "top"),
    (1, 4, 2, 45, 100, 64, "top"),  # keys that no query sees
    (1, 1, 1, 100, 100, 256, "bottom"),
    (2, 2, 1, 17, 200, 200, None),
    (1, 2, 2, 1, 300, 128, "bottom"),  # a query alone, as in decoding
    (1, 2, 1, 300, 1, 32, "bottom"),
    (1, 1, 1, 40, 50, 104, "top"),
]

# Of these, what rungs in the middle of a branch take, the first and one of the others: see `thin_cases`
THIN = [GRID[n] for n in (4, 6, 9)]


# Side branches, for d > 128: they take what rungs in the middle take.
# test_backward.py, test_hopper.py and test_masks.py have more of them.
SIDE_BRANCH = ("consumer_roles", "exchanged_ds", "half_tiles", "exchanged_tuned",        # of the backward
               "exchanged_semaphores", "exchanged_group", "exchanged_stream_k")
MULTICAST = ("multicast", "multicast_tuned")       # of the forward
# Of the backward, for d <= 64, as with more their products are serialised: a side branch, too
UP_TO_64 = ("transposed_dq", "next_keys")
STREAM_K = ("stream_k",)       # of the forward, where all tiles are equal
# Of the backward, for d <= 192, as a tile of dQ has to fit
WRITERS = ("writer_warp", "semaphores", "idle_warps", "augmented", "first_stores")
PACKED = ("packed", "packed_semaphores")   # for packed sequences: few other calls take one
ROW_BY_ROW = ("row_by_row",)   # of the forward, what most calls take
OWN_RANGES = ("own_ranges",)   # of the forward, with a window; else its parent


def is_end(stage) -> bool:
    """Whether a stage is an end of a branch: the root or a leaf of the ladder, or what calls take. One's own
    file is. A fork is not: what is wrong there shows at the ends of all that grew from it."""
    if stage.name in (*SIDE_BRANCH, *MULTICAST, *UP_TO_64, *PACKED, *OWN_RANGES):
        return False
    is_leaf = all(s.after != stage.name for s in stages(stage.direction))
    return not stage.after or is_leaf or bool(stage.default) or not stage.number


def cases_for(stage) -> list[tuple]:
    """All of GRID at the ends of a branch; fewer in between, as a mistake there mostly shows at the end."""
    if not is_end(stage):
        return thin_cases(stage)
    return [case for case in GRID if stage.fits(case[5], 227 * 1024)]


def thin_cases(stage) -> list[tuple]:
    """The first of THIN; and by turns one with more columns, for which work is shared out otherwise."""
    others = [case for case in THIN[1:] if stage.fits(case[5], 227 * 1024)]
    return [THIN[0], others[stage.number % len(others)]]


def type_for(stage, case) -> torch.dtype:
    """The types of a stage take turns."""
    return stage.dtypes[GRID.index(case) % len(stage.dtypes)]


def diagonal_of(mask: str | None, N_q: int, N_k: int) -> int | None:
    """Query i sees key j <= i + diagonal; None: all."""
    return {None: None, "top": 0, "bottom": N_k - N_q}[mask]


def errors(o, lse, q, k, v, diagonal=None, scale=None) -> dict[str, tuple[float, float]]:
    """The largest errors of O and L, and what is allowed: twice that of PyTorch's computation in q's type,
    plus 1e-6."""
    truth = reference(q.double(), k.double(), v.double(), diagonal, scale)
    pytorch = reference(q, k, v, diagonal, scale)
    return {name: (max_error(x, x_truth), 2 * max_error(x_pytorch, x_truth) + 1e-6)
            for name, x, x_pytorch, x_truth in zip("OL", (o, lse), pytorch, truth, strict=True)}


def gradient_errors(gradients, q, k, v, do, diagonal=None, scale=None,
                    dlse=None) -> dict[str, tuple[float, float]]:
    """Those of (dq, dk, dv): three times what PyTorch's computation in q's type has, plus 1e-6 of the
    gradient's largest element, or of 1: an element may be a sum over many rows."""
    options = diagonal, scale, dlse
    truth, pytorch = (f(q, k, v, do, *options) for f in (reference_gradients, recomputed_gradients))
    found = {}
    for name, x, x_pytorch, x_truth in zip(("dQ", "dK", "dV"), gradients, pytorch, truth, strict=True):
        size = max(1.0, x_truth.abs().max().item())
        found[name] = max_error(x, x_truth), 3 * max_error(x_pytorch, x_truth) + 1e-6 * size
    return found


def wrong(found: dict[str, tuple[float, float]]) -> str:
    """Which errors are larger than allowed, in words; empty if none is. NaN is."""
    return "; ".join(f"{name}: error {error:.3g}, allowed {allowed:.3g}"
                     for name, (error, allowed) in found.items() if not error <= allowed)


GUARD_BYTES = 1 << 16


@contextlib.contextmanager
def poisoned():
    """Inside, torch.empty and torch.empty_like give memory that starts as NaN, so that an output that a
    kernel forgets to write shows; and at the end, nothing beside that memory may have changed.

    Raises:
        AssertionError: if something has.
    """
    guarded = []
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned_empty_like(x, device=None):
        if "meta" in (x.device.type, device):
            return empty_like(x, device=device)
        strides = empty_like(x, device="meta").stride()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides)) if x.numel() else 0
        size = extent * x.element_size() + 2 * GUARD_BYTES
        data = torch.full([size], 0xA5, dtype=torch.uint8, device=x.device)
        data[GUARD_BYTES:len(data) - GUARD_BYTES] = 0xFF  # NaN in every floating-point type
        guarded.append(data)
        inside = data[GUARD_BYTES:len(data) - GUARD_BYTES].view(x.dtype)
        return inside.as_strided(x.shape, strides)

    def poisoned_empty(*shape, dtype, device):
        return poisoned_empty_like(empty(*shape, dtype=dtype, device=device))

    torch.empty, torch.empty_like = poisoned_empty, poisoned_empty_like  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like
    for data in guarded:
        for where, guard in (("before the start", data[:GUARD_BYTES]), ("past the end", data[-GUARD_BYTES:])):
            if not (guard == 0xA5).all():
                raise AssertionError(f"the kernel wrote {where} of its memory")
