"""What the tests share: the devices to run on, the reference in float64, and outputs that start as NaN."""

import contextlib
import itertools
import math
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
    """(O, L) by PyTorch, in the type of q: float64 for the truth, another one for the error to compare with.

    Query i sees key j <= i + diagonal; None: all. L in the natural logarithm. Rows that see no key: O = 0,
    L = -inf. In 16 bits S and P are rounded, and the softmax between them is computed in float32, as PyTorch
    does it.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.transpose(-1, -2) * scale
    if diagonal is not None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(diagonal)
        scores = scores.masked_fill(~seen, -torch.inf)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    lse = scores.logsumexp(-1)
    probabilities = torch.exp(scores - lse.where(lse > -torch.inf, 0)[..., None])
    return probabilities.to(q.dtype) @ v, lse


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


def random_gradients(q, seed=7):
    """dO and dL for q: random normal, each with its own scale and offset, as in random_qkv."""
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(q.shape, generator=generator) * 0.9 + 0.2
    dlse = torch.randn(q.shape[:3], generator=generator) * 0.5 - 0.1
    return do.to(q.device, q.dtype), dlse.to(q.device)


def reference_gradients(q, k, v, do, diagonal=None, scale=None, dlse=None):
    """(dq, dk, dv) by autograd through `reference`, in float64. dlse: the gradient by L, or None."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, lse = reference(*inputs, diagonal, scale)
    seen = lse > -torch.inf  # a row that sees no key has no gradient, whatever dlse is there
    outputs, gradients = [o], [do.double()]
    if dlse is not None and seen.any():
        outputs, gradients = [o, lse[seen]], [do.double(), dlse.double()[seen]]
    return torch.autograd.grad(outputs, inputs, gradients)


def recomputed_gradients(q, k, v, do, diagonal=None, scale=None, dlse=None):
    """(dq, dk, dv) by the formulas of flash_bwd.cu, from O and L, in PyTorch and the type of q: for the error
    to compare with. An L of 1000 has an error of 3e-5, and so has then all of its row of P. In 16 bits what
    goes into a product is rounded, and what lies between two of them is computed in float32."""
    o, lse = reference(q.double(), k.double(), v.double(), diagonal, scale)
    o, lse = o.to(q.dtype), lse.float()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    H_kv, group = k.shape[1], q.shape[1] // k.shape[1]
    K, V = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    P = torch.exp((q @ K.mT * scale).float() - lse[..., None])
    if diagonal is not None:
        P = P.where(torch.ones(P.shape[-2:], dtype=torch.bool, device=q.device).tril(diagonal), 0)
    D = (do.float() * o.float()).sum(-1) - (0 if dlse is None else dlse)
    dS = P * ((do @ V.mT).float() - D.where(lse > -torch.inf, 0)[..., None])
    P, dS = P.to(q.dtype), dS.to(q.dtype)
    dK, dV = (x.unflatten(1, (H_kv, group)).sum(2) for x in (scale * dS.mT @ q, P.mT @ do))
    return scale * dS @ K, dK, dV


def check_gradients(gradients, q, k, v, do, diagonal=None, scale=None, dlse=None) -> None:
    """Assert that (dq, dk, dv) are at most three times as wrong as what PyTorch computes in q's type, plus
    1e-6 of the gradient's largest element, or of 1: an element may be a sum over many rows."""
    options = diagonal, scale, dlse
    truth, pytorch = (f(q, k, v, do, *options) for f in (reference_gradients, recomputed_gradients))
    for name, x, x_pytorch, x_truth in zip("QKV", gradients, pytorch, truth, strict=True):
        assert x.shape == x_truth.shape and x.dtype == q.dtype
        size = max(1.0, x_truth.abs().max().item())
        error, allowed = max_error(x, x_truth), 3 * max_error(x_pytorch, x_truth) + 1e-6 * size
        assert error <= allowed, f"d{name}: error {error:.3g}, allowed {allowed:.3g}"


def random_qkv(B, H, H_kv, N_q, N_k, d, device, dtype=torch.float32, seed=0):
    """q, k, v: random normal, each with its own scale and offset, so no symmetry hides a swapped index."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, N_q, d, generator=generator)
    k = torch.randn(B, H_kv, N_k, d, generator=generator) * 1.1 + 0.1
    v = torch.randn(B, H_kv, N_k, d, generator=generator) * 0.7 - 0.3
    return (x.to(device, dtype) for x in (q, k, v))


def tile_sizes(stage, d) -> list[dict[str, int]]:
    """Three that a stage takes: small, middling and large ones."""
    sizes = sorted(itertools.product((4, 8, 16, 32, 64, 128), (8, 32, 64, 96)), key=math.prod)
    taken = []
    for Br, Bc in sizes:
        with contextlib.suppress(ValueError):
            taken.append(stage.tiles(d, 227 * 1024, Br=Br, Bc=Bc))
    return [taken[0], taken[len(taken) // 2], taken[-1]]


def with_gaps(x, gap):
    """The same values, with gaps of NaN between heads, rows and columns."""
    B, H, N, d = x.shape
    wide = torch.full((B, H + gap, N + 2 * gap, d + 16 // x.element_size() * gap), torch.nan, dtype=x.dtype,
                      device=x.device)
    wide[:, :H, :N, :d] = x
    return wide[:, :H, :N, :d]


def qkv_with_gaps(device, dtype=torch.float32):
    """q, k, v and the causal diagonal. Each tensor has its own gaps."""
    tensors = random_qkv(2, 4, 2, 50, 70, 32, device, dtype)
    return *(with_gaps(x, gap) for x, gap in zip(tensors, (1, 2, 3))), 20
