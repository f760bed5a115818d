"""What the tests share: the devices to run on, the reference in float64, and outputs that start as NaN."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    """The simulator always; a GPU when there is one."""
    return request.param


GUARD_BYTES = 1 << 16


@contextlib.contextmanager
def poisoned():
    """Inside, torch.empty and torch.empty_like give memory that starts as NaN, so that an output that a
    kernel forgets to write shows; and at the end, nothing beside that memory may have changed."""
    guarded = []
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned_empty_like(x):
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

    torch.empty, torch.empty_like = poisoned_empty, poisoned_empty_like
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like
    for data in guarded:
        assert (data[:GUARD_BYTES] == 0xA5).all(), "the kernel wrote before the start of its memory"
        assert (data[len(data) - GUARD_BYTES:] == 0xA5).all(), "the kernel wrote past the end of its memory"


def reference(q, k, v, diagonal=None, scale=None):
    """(O, L) by PyTorch, in the type of q: float64 for the truth, float32 for the error to compare with.

    Query i sees key j <= i + diagonal; None: all. L in the natural logarithm. Rows that see no key: O = 0,
    L = -inf.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.transpose(-1, -2) * scale
    if diagonal is not None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(diagonal)
        scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    probabilities = torch.exp(scores - lse.where(lse > -torch.inf, 0)[..., None])
    return probabilities @ v, lse


def max_error(x, truth) -> float:
    """The largest absolute difference; infinities must be the same ones.

    NaN if there is a NaN, which fails every comparison.
    """
    same = x.double() == truth.double()
    return torch.where(same, 0.0, (x.double() - truth.double()).abs()).max().item()


def check(o, lse, q, k, v, diagonal=None, scale=None) -> None:
    """Assert that (o, lse) is at most twice as wrong as PyTorch's computation in q's type, plus 1e-6."""
    truth = reference(q.double(), k.double(), v.double(), diagonal, scale)
    pytorch = reference(q, k, v, diagonal, scale)
    for name, x, x_pytorch, x_truth in zip("OL", (o, lse), pytorch, truth):
        assert x.shape == x_truth.shape
        error, allowed = max_error(x, x_truth), 2 * max_error(x_pytorch, x_truth) + 1e-6
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def random_qkv(B, H, H_kv, N_q, N_k, d, device, dtype=torch.float32, seed=0):
    """q, k, v: random normal, each with its own scale and offset, so no symmetry hides a swapped index."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, N_q, d, generator=generator)
    k = torch.randn(B, H_kv, N_k, d, generator=generator) * 1.1 + 0.1
    v = torch.randn(B, H_kv, N_k, d, generator=generator) * 0.7 - 0.3
    return (x.to(device, dtype) for x in (q, k, v))


def qkv_with_gaps(device):
    """q, k, v and the causal diagonal. Each tensor has its own gaps, of NaN, between heads and rows."""
    tensors = []
    for x, gap in zip(random_qkv(2, 4, 2, 50, 70, 32, device), (1, 2, 3)):
        B, H, N, d = x.shape
        wide = torch.full((B, H + gap, N + 2 * gap, d + 4 * gap), torch.nan, device=device)
        wide[:, :H, :N, :d] = x
        tensors.append(wide[:, :H, :N, :d])
    return *tensors, 20
