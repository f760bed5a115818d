"""What the tests share: the devices to run on, the reference in float64, and outputs that start as NaN."""

import contextlib
import gc
import itertools
import math
import os
import re
import sys
from pathlib import Path

import pytest

gc.disable()  # what is imported and collected stays; see pytest_collection_finish()

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, and PyTorch's threads wait busily
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for each other: test_forward took 4 times the CPU time
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that a test starts compiles our modules
os.environ.setdefault("FLASH_SIM_SECONDS", "200")  # a kernel that hangs fails its test, with the line

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flash_ladder import attention  # noqa: E402
from flash_ladder.grid import (  # noqa: E402
    GRID,
    cases_for,
    errors,
    gradient_errors,
    is_end,
    poisoned,
    type_for,
    wrong,
)
from flash_ladder.reference import (  # noqa: E402
    max_error,
    random_gradients,
    random_qkv,
    recomputed_gradients,
    reference,
    reference_gradients,
)

__all__ = ["GRID", "cases_for", "is_end", "max_error", "poisoned", "random_gradients", "random_qkv",
           "recomputed_gradients", "reference", "reference_gradients", "type_for"]

# Of these files any worker may run any test; of the others one worker runs a whole file. (The former come
# last, when no whole file is left.)
IN_PIECES = ("test_containment.py", "test_exercises.py", "test_grading.py", "test_mutants.py",
             "test_notebooks.py", "test_nvcc.py")


# `make quick` leaves out these files, and of the tests of all stages those of stages but these
SLOW = ("test_checker.py", "test_containment.py", "test_corpus.py", "test_exercises.py", "test_grading.py",
        "test_install.py", "test_mutants.py", "test_notebooks.py", "test_nvcc.py", "test_sanitizer.py")
OF_ALL_STAGES = ("test_forward.py", "test_backward.py")
QUICK_STAGES = {"flash2", "recompute", "ampere_tuned"}


def is_slow(item) -> bool:
    words = set(re.split(r"[^a-z0-9_]+", item.name))
    return item.path.name in SLOW or item.path.name in OF_ALL_STAGES and not words & QUICK_STAGES


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the groups
def pytest_collection_modifyitems(items):
    for item in items:
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
        if item.path.name not in IN_PIECES:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


def pytest_collection_finish():
    """Garbage is looked for among what tests make: not, time and again, among a million objects that stay."""
    gc.freeze()
    gc.enable()


EMPTY = torch.empty, torch.empty_like


@pytest.fixture(autouse=True)
def calls_are_forgotten():
    """What a test replaces, an earlier one's call may have kept; nor may it leave PyTorch replaced."""
    attention._calls.clear()
    yield
    assert (torch.empty, torch.empty_like) == EMPTY


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    """The simulator always; a GPU when there is one."""
    return request.param


def check(o, lse, q, k, v, diagonal=None, scale=None) -> None:
    """Assert that (o, lse) is exact enough: see grid.py."""
    assert o.shape == q.shape and lse.shape == q.shape[:3]
    assert not (found := wrong(errors(o, lse, q, k, v, diagonal, scale))), found


def check_gradients(gradients, q, k, v, do, diagonal=None, scale=None, dlse=None) -> None:
    """Assert that (dq, dk, dv) are exact enough: see grid.py."""
    for x, like in zip(gradients, (q, k, v), strict=True):
        assert x.shape == like.shape and x.dtype == q.dtype
    assert not (found := wrong(gradient_errors(gradients, q, k, v, do, diagonal, scale, dlse))), found


def tile_sizes(stage, d) -> list[dict[str, int]]:
    """Three that a stage takes: small, middling and large ones."""
    sizes = sorted(itertools.product((4, 8, 16, 32, 64, 128), (8, 32, 64, 96)), key=math.prod)
    taken = []
    for Br, Bc in sizes:
        with contextlib.suppress(ValueError):
            taken.append(stage.tiles(d, 227 * 1024, Br=Br, Bc=Bc))
    taken = taken or [stage.default_tiles(d)]
    return [taken[0], taken[len(taken) // 2], taken[-1]]


def with_gaps(x, gap):
    """The same values, with gaps of NaN between heads, rows and columns."""
    B, H, N, d = x.shape
    wide = torch.full((B, H + gap, N + 2 * gap, d + 16 // x.element_size() * gap), torch.nan, dtype=x.dtype,
                      device=x.device)
    wide[:, :H, :N, :d] = x
    return wide[:, :H, :N, :d]


def qkv_with_gaps(device, dtype=torch.float32, d=32):
    """q, k, v and the causal diagonal. Each tensor has its own gaps."""
    tensors = random_qkv(2, 4, 2, 50, 70, d, device, dtype)
    return *(with_gaps(x, gap) for x, gap in zip(tensors, (1, 2, 3))), 20


SCHEDULES = [("late", ""), ("early", ""), ("random", "1"), ("random", "2"), ("late", "3"), ("early", "4")]


def with_two_schedules(names: str, cases):
    """Parametrize `schedule` and these: each case with the first schedule, and with one of the others by
    turns, where all of them would take long."""
    return pytest.mark.parametrize(f"schedule, {names}", [
        pytest.param(schedule, *case, id="-".join(["".join(schedule), *map(str, case)]))
        for n, case in enumerate(cases)
        for schedule in (SCHEDULES[0], SCHEDULES[1 + n % (len(SCHEDULES) - 1)])], indirect=["schedule"])


@pytest.fixture(params=SCHEDULES, ids="".join)
def schedule(request, monkeypatch, device):
    """When copies and products are made; in the simulator alone."""
    if device == "cuda" and request.param != SCHEDULES[0]:
        pytest.skip("a GPU has its own")
    monkeypatch.setenv("FLASH_SIM_COPIES", request.param[0])
    monkeypatch.setenv("FLASH_SIM_SEED", request.param[1])
