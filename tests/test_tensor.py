"""16-bit numbers, ldmatrix, stmatrix, tensor cores and asynchronous copies, in the simulator and on a GPU.

The references are written from the documented layouts (PTX ISA 9.0, "Warp Level Matrix Instructions"), as
index arrays: which lane's which register holds which element.
"""

import ctypes
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from test_simulator import KERNELS, call, check_call, empty, simulator_only

import flash

TYPES = [torch.float16, torch.bfloat16]
LANE = torch.arange(32)
GROUP, PAIR = LANE // 4, LANE % 4 * 2      # as the PTX ISA calls them: groupID, 2 * threadID_in_group
needs_sm80 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="needs sm_80")


def run(function: str, *arguments, device: str) -> None:
    check_call(function, *arguments, device=device, source="tensor")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random_bits(*shape, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2**15, 2**15, shape, generator=generator, dtype=torch.int16)


def random_numbers(*shape, dtype, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Registers of 32 bits from two of 16, the first in the lower half."""
    return torch.stack([first, second], -1).contiguous().view(torch.int32)[..., 0]


# ------------------------------------------------------------------------------------------ 16-bit numbers
@pytest.mark.parametrize("dtype", TYPES, ids=name_of)
def test_every_16_bit_number_as_a_float(device, dtype):
    x = torch.arange(2**16).to(torch.int16).view(dtype)
    out = empty(2**16, dtype=torch.float32, device=device)
    run(f"widen_{name_of(dtype)}", x.to(device), out, 2**16, device=device)
    torch.testing.assert_close(out.cpu(), x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES, ids=name_of)
def test_floats_are_rounded_to_nearest_even(device, dtype):
    """Random ones of every exponent, ties between neighbours, and what lies just beside a tie."""
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-2**31, 2**31, (1 << 19,), generator=generator).int().view(torch.float32)
    near_1 = 2.0 ** (60 * torch.rand(1 << 18, generator=generator) - 30)
    below = torch.arange(2**15 - 1).to(torch.int16).view(dtype)
    above = torch.arange(1, 2**15).to(torch.int16).view(dtype)
    ties = ((below.double() + above.double()) / 2).float()
    up, down = (torch.nextafter(ties, torch.tensor(x)) for x in (torch.inf, -torch.inf))
    edges = torch.tensor([65519.99, 65520.0, 0.0, -0.0])
    x = torch.cat([anything, near_1, -near_1, ties, -ties, up, down, edges])
    out = empty(len(x), dtype=torch.float32, device="cpu").to(dtype).to(device)
    run(f"narrow_{name_of(dtype)}", x.to(device), out, len(x), device=device)
    expected, numbers = x.to(dtype), ~x.isnan()
    assert torch.equal(out.cpu()[numbers].view(torch.int16), expected[numbers].view(torch.int16))
    assert out.cpu()[~numbers].isnan().all() and (~numbers).any()


def odd_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c; where that is no float64, its neighbour with the last digit 1, which rounds as a * b + c."""
    found = []
    for x, y, z in zip(*(map(Fraction, t.tolist()) for t in (a, b, c))):
        exact = x * y + z
        near = float(exact)
        if near != exact and not np.float64(near).view(np.int64) % 2:
            near = math.nextafter(near, math.inf if exact > near else -math.inf)
        found.append(near)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("dtype", TYPES, ids=name_of)
def test_arithmetic_is_rounded_once(device, dtype):
    n = 1 << 14
    x, y, z = (random_bits(n, seed=seed).view(dtype) for seed in range(3))
    finite = x.isfinite() & y.isfinite() & z.isfinite()
    x, y, z = (t[finite].contiguous() for t in (x, y, z))
    x[:100] = y[:100]
    out = torch.full((len(x), 12), torch.nan, dtype=dtype, device=device)
    run(f"arithmetic_{name_of(dtype)}", *(t.to(device) for t in (x, y, z)), out, len(x), device=device)
    a, b, c = x.double(), y.double(), z.double()
    exact = [a + b, a - b, a * b, a / b, odd_fma(a, b, c), torch.maximum(a, b), torch.minimum(a, b), -a,
             a.abs(), a.abs().sqrt(), (a < b).double(), (a == b).double()]

    def rounded(t: torch.Tensor) -> torch.Tensor:
        if dtype == torch.float16:               # NumPy rounds once, from float64
            with np.errstate(over="ignore"):
                return torch.from_numpy(t.numpy().astype(np.float16))
        whole = t.view(torch.int64)              # keep 7 of 52 digits, ties to even
        cut = (whole + (1 << 44) - 1 + (whole >> 45 & 1)) >> 45 << 45
        normal = (t.abs() > 2.0**-125) & (t.abs() < 2.0**127)
        return torch.where(normal, cut.view(torch.float64), t).float().to(dtype)
    expected = torch.stack([rounded(t) for t in exact], 1)
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_pairs_of_16_bit_numbers(device):
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    out = empty(100, 4, 2, dtype=torch.float32, device=device)
    run("pairs", x.to(device), out, 100, device=device)
    h, b = x.half(), x.bfloat16()
    fma = (h.double() ** 2 + torch.tensor([1.0, 2.0])).numpy().astype(np.float16)
    expected = [torch.from_numpy(fma).float(), h.float().flip(1), (b * 3).float(), b.float().flip(1)]
    assert torch.equal(out.cpu(), torch.stack(expected, 1))


@pytest.mark.parametrize("flip", [0, 1])
def test_where_less(device, flip):
    """With subnormal numbers, both zeros, infinity and NaN."""
    halves = random_bits(500, 2)
    halves[:4] = torch.tensor([[0x7C00, 0x7C01], [0x7FFF, -1], [0, -0x8000], [-0x400, -0x3FF]])
    bounds = torch.tensor([[-0x800, 0x0123]], dtype=torch.int16)          # -32768, and a subnormal
    out = empty(500, dtype=torch.int32, device=device)
    words = joined(halves[:, 0], halves[:, 1]).contiguous()
    run("masks_where_less", words.to(device), joined(*bounds[0]).item(), flip, out, 500, device=device)
    less = (halves.to(torch.int16).view(torch.half) < bounds.view(torch.half)) != bool(flip)
    lower, upper = (0xFFFF * less.int()).unbind(1)
    assert torch.equal(out.cpu() & 0xFFFF, lower) and torch.equal(out.cpu() >> 16 & 0xFFFF, upper)


# ---------------------------------------------------------------------------------------- ldmatrix, stmatrix
def registers_of(matrices: torch.Tensor, transposed: bool) -> torch.Tensor:
    """(32, count): lane l's register i has elements (GROUP, PAIR) and (GROUP, PAIR + 1) of matrix i."""
    m = matrices.transpose(1, 2) if transposed else matrices
    return joined(m[:, GROUP, PAIR], m[:, GROUP, PAIR + 1]).T.contiguous()


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("count", [2, 4])
def test_ldmatrix(device, count, transposed):
    matrices = random_bits(count, 8, 8)
    order = torch.randperm(8 * count, generator=torch.Generator().manual_seed(1)).int()
    out = empty(32, count, device=device)
    run("load_matrices", count, transposed, matrices.to(device), order.to(device), out, device=device)
    assert torch.equal(out.cpu(), registers_of(matrices, bool(transposed)))


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("count", [2, 4])
def test_stmatrix(device, count, transposed):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("stmatrix needs sm_90")
    matrices = random_bits(count, 8, 8)
    out = empty(count, 8, 8, device=device).to(torch.int16)
    run("store_matrices", count, transposed, registers_of(matrices, bool(transposed)).to(device), out,
        device=device)
    assert torch.equal(out.cpu(), matrices)


# ------------------------------------------------------------------------------------------ tensor cores
def check_product(result: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> None:
    """A B + C, within what sums of 17 numbers in float may lose, in any order, even if digits are cut off."""
    A, B, C = A.double(), B.double(), C.double()
    allowed = 2.0**-20 * (A.abs() @ B.abs() + C.abs())
    assert ((result.double() - (A @ B + C)).abs() <= allowed).all()


@needs_sm80
@pytest.mark.parametrize("dtype", TYPES, ids=name_of)
def test_mma(device, dtype):
    A, B = random_numbers(16, 16, dtype=dtype), random_numbers(16, 8, dtype=dtype, seed=1)
    C = random_numbers(16, 8, dtype=torch.float32, seed=2)
    a = torch.stack([joined(A[GROUP + row, PAIR + col], A[GROUP + row, PAIR + col + 1])
                     for col, row in itertools.product((0, 8), (0, 8))], 1)
    b = torch.stack([joined(B[PAIR + row, GROUP], B[PAIR + row + 1, GROUP]) for row in (0, 8)], 1)
    places = [(GROUP + row, PAIR + col) for row, col in itertools.product((0, 8), (0, 1))]
    d = torch.stack([C[place] for place in places], 1).to(device)
    run(f"multiply_{name_of(dtype)}", a.to(device), b.to(device), d, device=device)
    result = torch.full((16, 8), torch.nan)
    for i, place in enumerate(places):
        result[place] = d[:, i].cpu()
    check_product(result, A, B, C)


@needs_sm80
@pytest.mark.parametrize("dtype", TYPES, ids=name_of)
@pytest.mark.parametrize("a_by_columns, b_by_columns, c_by_columns", itertools.product((0, 1), repeat=3))
def test_wmma(device, dtype, a_by_columns, b_by_columns, c_by_columns):
    ld = 24
    A, B = random_numbers(16, 16, dtype=dtype), random_numbers(16, 16, dtype=dtype, seed=1)
    C = random_numbers(16, 16, dtype=torch.float32, seed=2)

    def stored(matrix: torch.Tensor, by_columns: int) -> torch.Tensor:
        padded = torch.full((16, ld), torch.nan, dtype=matrix.dtype)
        padded[:, :16] = matrix.T if by_columns else matrix
        return padded.to(device)
    out = stored(torch.full((16, 16), torch.nan), 0)
    run(f"fragments_{name_of(dtype)}", stored(A, a_by_columns), stored(B, b_by_columns),
        stored(C, c_by_columns), out, ld, a_by_columns, b_by_columns, c_by_columns, device=device)
    out = out.cpu()
    assert out[:, 16:].isnan().all(), "nothing is written between the rows"
    check_product((out[:, :16].T if c_by_columns else out[:, :16]) / 2, A, B, C)


# ---------------------------------------------------------------------------------------- asynchronous copies
@needs_sm80
@pytest.mark.parametrize("n", [0, 1, 50, 51, 52, 127, 128])
def test_copies_are_filled_up_with_zeros(device, n):
    x = torch.randn(128, generator=torch.Generator().manual_seed(0)) + 10
    out = empty(128, dtype=torch.float32, device=device)
    run("copy_zero_filled", x.to(device), out, n, device=device)
    expected = torch.where(torch.arange(128) < n, x, 0.0)
    assert torch.equal(out.cpu(), expected.flip(0))


def pipeline(right: int, device: str = "cpu", tiles: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, expected) of kernels/tensor.cu's pipeline of copies."""
    x = torch.randint(-100, 100, (tiles, 256), generator=torch.Generator().manual_seed(0)).float()
    out = empty(64, dtype=torch.float32, device=device)
    run("pipeline", x.to(device), out, tiles, right, device=device)
    t = torch.arange(64)
    expected = sum(x[:, (4 * (t ^ 32) + 37 * i) % 256].sum(0) * (i + 1) for i in range(4))
    return out.cpu(), expected


@needs_sm80
def test_pipeline(device):
    result, expected = pipeline(1, device)
    assert torch.equal(result, expected)


COPIES_LAND = [("late", ""), *itertools.product(("early", "random", "late"), ("1", "2", "3"))]


@simulator_only
@pytest.mark.parametrize("when, seed", COPIES_LAND)
def test_pipeline_whenever_copies_land(device, monkeypatch, when, seed):
    monkeypatch.setenv("FLASH_SIM_COPIES", when)
    monkeypatch.setenv("FLASH_SIM_SEED", seed)
    result, expected = pipeline(1)
    assert torch.equal(result, expected)


@simulator_only
def test_late_copies_show_a_missing_wait(device, monkeypatch):
    """Not before the wait: so what is read without one is what was there before, a NaN."""
    assert pipeline(0)[0].isnan().all()
    monkeypatch.setenv("FLASH_SIM_COPIES", "early")
    result, expected = pipeline(0)
    assert torch.equal(result, expected), "early copies hide it"


@simulator_only
def test_early_copies_show_a_missing_barrier_after_use(device, monkeypatch):
    result, expected = pipeline(2)
    assert torch.equal(result, expected), "late copies hide it"
    monkeypatch.setenv("FLASH_SIM_COPIES", "early")
    result, expected = pipeline(2)
    assert not torch.equal(result, expected) and not result.isnan().any()


@simulator_only
def test_random_copies_show_both_and_repeat(device, monkeypatch):
    monkeypatch.setenv("FLASH_SIM_COPIES", "random")
    for right in (0, 2):
        wrong = 0
        for seed in ("1", "2", "3", "4"):
            monkeypatch.setenv("FLASH_SIM_SEED", seed)
            (result, expected), (again, _) = pipeline(right), pipeline(right)
            assert torch.equal(result.nan_to_num(), again.nan_to_num()), "a seed stands for one order"
            wrong += not torch.equal(result, expected)
        assert wrong


@simulator_only
def test_unknown_time_of_copies(device, monkeypatch):
    monkeypatch.setenv("FLASH_SIM_COPIES", "soon")
    x = torch.zeros(128)
    error = call("copy_zero_filled", x, x, 128, source="tensor")
    assert "FLASH_SIM_COPIES=soon; late, early and random are possible" in error


# ------------------------------------------------------------------------------------------ mistakes
ERRORS = [  # what the message says, by number
    "ldmatrix.x2: a row must start at a multiple of 16 bytes",
    "ldmatrix.x2: the address 4294967280 lies outside of shared memory",
    "__cvta_generic_to_shared: this is no address of shared memory",
    "mma.m16n8k16 needs 32 lanes; the block's last warp has fewer",
    "lanes of one warp are at different operations: ldmatrix.x2",
    "cp.async: the address in global memory must be a multiple of 16",
    "cp.async: the address in shared memory must be a multiple of 16",
    "cp.async: of 16 bytes, 20 are to be copied",
    "load_matrix_sync(): the tile must start at a multiple of 32 bytes",
    "deadlock: no thread of the block can go on",
]


@simulator_only
@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_mistakes_are_reported_at_their_line(device, number):
    source = KERNELS / "tensor_errors.cu"
    lines = [f"{source}:{n}" for n, line in enumerate(source.read_text().splitlines(), 1)
             if line.endswith(f"// HERE: {number}")]
    x = torch.zeros(256)
    error = call("mistake", number, x, x, source="tensor_errors")
    assert ERRORS[number] in error and lines and all(line in error for line in lines), error


# ------------------------------------------------------------------------------------------ what it costs
def inspected(function: str, *arguments, **arrays: torch.Tensor):
    run = getattr(ctypes.CDLL(str(flash.build(KERNELS / "tensor.cu", torch.device("cpu"), checked=True))),
                  f"run_{function}")
    run.restype = ctypes.c_char_p
    with flash.inspect(**arrays) as report:
        error = run(*(ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments))
    assert (error, report.findings) == (None, [])
    return report


@simulator_only
@pytest.mark.parametrize("kind, pitch, swizzle, ways", [
    ("read", 8, 0, 1), ("read", 16, 0, 2), ("read", 32, 0, 4), ("read", 64, 0, 8), ("read", 128, 0, 8),
    ("read", 72, 0, 1), ("read", 64, 1, 1), ("read", 128, 1, 1), ("write", 64, 0, 8), ("write", 64, 1, 1)])
def test_bank_conflicts_of_ldmatrix_and_stmatrix(device, kind, pitch, swizzle, ways):
    """8 rows at a time, 16 bytes each: without conflicts if they lie in 8 different groups of four banks."""
    out = torch.zeros(32, 4, dtype=torch.int32)
    report = inspected("conflicts", int(kind == "write"), pitch, swizzle, out, out=out)
    (access,) = [a for a in report.accesses if a.memory == "shared" and a.access_bytes == 16]
    assert (access.kind, access.requests, access.ideal, access.units) == (kind, 1, 4, 4 * ways)


@simulator_only
def test_copies_count_as_traffic(device):
    """A copy reads HBM and writes shared memory; what is filled with zeros reads nothing."""
    x, out = torch.zeros(128), torch.zeros(128)
    for n, requests in ((128, 1), (64, 1), (0, 0)):
        report = inspected("copy_zero_filled", x, out, n, x=x, out=out)
        reads = [a for a in report.accesses if (a.array, a.kind) == ("x", "read")]
        copies = [a for a in report.accesses if (a.array, a.kind) == ("tile", "copy")]
        assert report.traffic()["x"].read == 4 * n if n else "x" not in report.traffic()
        assert sum(a.requests for a in reads) == requests and sum(a.units for a in reads) == n // 8
        assert [(a.requests, a.bytes, a.units) for a in copies] == [(1, 512, 4)]


@simulator_only
@pytest.mark.parametrize("when, seed", COPIES_LAND)
def test_no_finding_in_a_correct_pipeline(device, monkeypatch, when, seed):
    monkeypatch.setenv("FLASH_SIM_COPIES", when)
    monkeypatch.setenv("FLASH_SIM_SEED", seed)
    x, out = torch.randn(5, 256), torch.zeros(64)
    report = inspected("pipeline", x, out, 5, 1, x=x, out=out)
    assert report.kernels[0].thread_accesses > 0


@simulator_only
def test_no_finding_in_tensor_core_kernels(device):
    matrices, order = random_bits(4, 8, 8), torch.randperm(32).int()
    out = torch.zeros(32, 4, dtype=torch.int32)
    for transposed in (0, 1):
        inspected("load_matrices", 4, transposed, matrices, order, out, matrices=matrices, order=order,
                  out=out)
    A, B = torch.randn(16, 16).half(), torch.randn(16, 16).half()
    C, out = torch.randn(16, 16), torch.zeros(16, 16)
    for layouts in itertools.product((0, 1), repeat=3):
        report = inspected("fragments_float16", A, B, C, out, 16, *layouts, A=A, B=B, C=C, out=out)
        traffic = report.traffic()
        assert {name: (t.read, t.written) for name, t in traffic.items()} == {
            "A": (512, 0), "B": (512, 0), "C": (1024, 0), "out": (0, 1024)}
