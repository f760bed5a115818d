"""What the tests share: the devices to run on, the reference in float64, and outputs that start as NaN."""

import contextlib
import itertools
import math
import os
import sys
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, and PyTorch's threads wait busily
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for each other: test_forward took 4 times the CPU time

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reference import (  # noqa: E402
    max_error,
    random_gradients,
    random_qkv,
    recomputed_gradients,
    reference,
    reference_gradients,
)

__all__ = ["max_error", "random_gradients", "random_qkv", "recomputed_gradients", "reference",
           "reference_gradients"]

# Of these files any worker may run any test; of the others one worker runs a whole file. (The former come
# last, when no whole file is left.)
IN_PIECES = ("test_exercises.py", "test_mutants.py", "test_notebooks.py", "test_nvcc.py")


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the groups
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name not in IN_PIECES:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


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


def check(o, lse, q, k, v, diagonal=None, scale=None) -> None:
    """Assert that (o, lse) is at most twice as wrong as PyTorch's computation in q's type, plus 1e-6."""
    truth = reference(q.double(), k.double(), v.double(), diagonal, scale)
    pytorch = reference(q, k, v, diagonal, scale)
    for name, x, x_pytorch, x_truth in zip("OL", (o, lse), pytorch, truth):
        assert x.shape == x_truth.shape
        error, allowed = max_error(x, x_truth), 2 * max_error(x_pytorch, x_truth) + 1e-6
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


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
