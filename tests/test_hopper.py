"""The copy engine, mbarriers, wgmma and named barriers: in the simulator and on a GPU against plain loops.

The references are written from the documented layouts: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix
Instructions" and "Tensors".
"""

import ctypes
import functools
import itertools

import pytest
import torch
from test_simulator import KERNELS, empty, simulator_only
from test_tensor import check_product, joined, name_of, random_numbers

import flash
from flash_ladder.simulator import resolve_addresses

TYPES = [torch.float16, torch.bfloat16]
C_NAMES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
SCHEDULES = [("late", ""), ("early", ""), ("random", "1"), ("random", "2"), ("late", "3"), ("early", "4")]
needs_sm90 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90")
pytestmark = needs_sm90


@functools.cache
def library(device: str, dtype=torch.float16, checked: bool = False) -> ctypes.CDLL:
    macros = {"ELEMENT": C_NAMES[dtype], "HEAD_DIM": "64"}
    return ctypes.CDLL(str(flash.build(KERNELS / "hopper.cu", torch.device(device), macros, checked=checked)))


def call(function: str, *arguments, device: str = "cpu", dtype=torch.float16, checked=False) -> str | None:
    run = getattr(library(device, dtype, checked), f"run_{function}")
    run.restype = ctypes.c_char_p
    values = (ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else ctypes.c_int(x)
              for x in arguments)
    error = run(*values)
    if device == "cuda":
        torch.cuda.synchronize()
    return resolve_addresses(error.decode()) if error else None


@pytest.fixture(params=SCHEDULES, ids="".join)
def schedule(request, monkeypatch, device):
    """When copies and products are made; in the simulator alone."""
    if device == "cuda" and request.param != SCHEDULES[0]:
        pytest.skip("a GPU has its own")
    monkeypatch.setenv("FLASH_SIM_COPIES", request.param[0])
    monkeypatch.setenv("FLASH_SIM_SEED", request.param[1])


# ------------------------------------------------------------------------------------------ the copy engine
def chunk_place(byte: int, swizzle: int) -> int:
    """Where a byte of a box lies: 16-byte chunks change places within `swizzle` bytes, by the 128 bytes."""
    chunks = swizzle // 16 or 1
    return byte ^ byte // 128 % chunks * 16


BOXES = [  # element bytes, (d, N, heads, B), box, swizzle, corner
    (2, (64, 50, 3, 2), (64, 16, 1, 1), 128, (0, 0, 1, 1)),
    (2, (64, 50, 3, 2), (64, 16, 1, 1), 128, (0, 40, 2, 0)),       # rows past the end
    (2, (72, 50, 3, 2), (64, 8, 1, 1), 128, (64, 3, 0, 1)),        # columns past the end
    (2, (72, 50, 3, 2), (32, 8, 2, 2), 64, (48, -3, -1, 1)),       # before the start, in several dimensions
    (2, (40, 21, 2, 3), (16, 24, 1, 2), 32, (-8, 0, 1, 1)),
    (2, (40, 21, 2, 3), (40, 5, 2, 1), 0, (3, 2, 0, 2)),
    (4, (24, 21, 2, 1), (32, 8, 1, 1), 128, (-4, 15, 1, 0)),
    (4, (24, 21, 2, 1), (12, 7, 1, 1), 0, (13, -2, 1, 0)),
]


def box_case(element: int, sizes: tuple, box: tuple, seed: int = 0):
    """A tensor (B, heads, N, d) with odd gaps between its rows, heads and batches; its arguments for C."""
    d, N, heads, B = sizes
    wide = torch.randint(-2**15, 2**15, (B, heads + 1, N + 3, d + 16 // element * 3),
                         generator=torch.Generator().manual_seed(seed))
    x = wide.to(torch.int16 if element == 2 else torch.int32)[:, :heads, :N, :d]
    strides = [x.stride(axis) * element for axis in (2, 1, 0)]
    return x, [torch.tensor(values, dtype=torch.int32) for values in (sizes, strides, box)]


def with_its_gaps(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def like_it(x: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """A copy with the same gaps, and what is in them."""
    return with_its_gaps(x).to(device, copy=True).as_strided(x.shape, x.stride())


def box_elements(sizes: tuple, box: tuple, corner: tuple):
    """Of each element of a box, the innermost first: where it is in the box, and in the tensor or None."""
    for place, (b, h, r, c) in enumerate(itertools.product(*map(range, reversed(box)))):
        at = [start + i for start, i in zip(corner, (c, r, h, b))]
        inside = all(0 <= i < size for i, size in zip(at, sizes))
        yield place, tuple(reversed(at)) if inside else None


@pytest.mark.parametrize("case", BOXES, ids=lambda case: "-".join(map(str, case[2])))
def test_tma_load(device, schedule, case):
    element, sizes, box, swizzle, corner = case
    x, arguments = box_case(element, sizes, box)
    count = box[0] * box[1] * box[2] * box[3]
    out = empty(count * element // 4, device=device)
    assert call("load_box", like_it(x, device), int(element == 4), *arguments, swizzle, *corner,
                count * element, 0, out, device=device) is None
    loaded = out.cpu().view(x.dtype)
    expected = torch.empty_like(loaded)
    for place, index in box_elements(sizes, box, corner):
        expected[chunk_place(place * element, swizzle) // element] = 0 if index is None else x[index]
    assert torch.equal(loaded, expected)


@simulator_only
def test_the_swizzle_is_of_the_real_address(device):
    """A box that starts at 128 bytes beside a multiple of 1024 has another pattern."""
    element, sizes, box, swizzle, corner = BOXES[0]
    x, arguments = box_case(element, sizes, box)
    loaded = []
    for offset in (0, 128):
        out = empty(512)
        assert call("load_box", x, 0, *arguments, swizzle, *corner, 2048, offset, out) is None
        loaded.append(out)
    assert not torch.equal(*loaded) and torch.equal(*(out.sort()[0] for out in loaded))


@pytest.mark.parametrize("case", BOXES, ids=lambda case: "-".join(map(str, case[2])))
def test_tma_store(device, schedule, case):
    element, sizes, box, swizzle, corner = case
    x, arguments = box_case(element, sizes, box)
    bytes_ = box[0] * box[1] * box[2] * box[3] * element
    source = torch.randint(-2**31, 2**31, (bytes_ // 4,), generator=torch.Generator().manual_seed(1)).int()
    expected, there = like_it(x), like_it(x, device)
    assert call("store_box", there, int(element == 4), *arguments, swizzle, *corner, bytes_,
                source.to(device), 1, device=device) is None
    values = source.view(x.dtype)
    for place, index in box_elements(sizes, box, corner):
        if index is not None:
            expected[index] = values[chunk_place(place * element, swizzle) // element]
    assert torch.equal(with_its_gaps(there).cpu(), with_its_gaps(expected)), "nothing beside it is written"


@simulator_only
def test_late_stores_show_a_missing_wait(device, monkeypatch):
    element, sizes, box, swizzle, corner = BOXES[0]
    x, arguments = box_case(element, sizes, box)
    for when, made in (("late", False), ("early", True)):
        monkeypatch.setenv("FLASH_SIM_COPIES", when)
        out = like_it(x)
        zeros = torch.zeros(512).int()
        assert call("store_box", out, 0, *arguments, swizzle, *corner, 2048, zeros, 0) is None
        assert torch.equal(out, x) != made


def test_bulk_add(device, schedule):
    x = torch.randint(-100, 100, (10, 48), generator=torch.Generator().manual_seed(0)).float()
    out = torch.ones(48, device=device)
    assert call("add_up", x.to(device), out, 48, 5, device=device) is None
    assert torch.equal(out.cpu(), 1 + x.sum(0))


# ---------------------------------------------------------------------------------------------- mbarriers
@pytest.mark.parametrize("count", [1, 2, 7])
def test_mbarrier_as_a_barrier(device, schedule, count):
    x, out = torch.arange(96).int() * 1000, empty(96, device=device)
    assert call("rounds", x.to(device), out, count, device=device) is None
    assert torch.equal(out.cpu(), x.roll(-count) + sum(range(count)))


def test_parities(device):
    """Two arrivals a phase: of a new barrier parity 1 is complete, from the second arrival on parity 0."""
    out = empty(10, device=device)
    assert call("parities", out, device=device) is None
    assert out.tolist() == [0, 1] * 2 + [1, 0] * 2 + [0, 1]


# ------------------------------------------------------------------------------------------------- wgmma
ROW = torch.arange(128) // 32 * 16 + torch.arange(128) % 32 // 4     # of D and A, by thread
COL = torch.arange(128) % 4 * 2


def operand(x: torch.Tensor, mn_major: bool, swizzle: int):
    """The bytes of an operand (mn, 16) in shared memory, and its layout: leading and stride bytes, mode.

    Rows of the pattern have `swizzle` bytes, along k or, if MN-major, along mn; without a swizzle there are
    matrices of 8 x 8, here in the order of k first. (16 of k fill a part of a K-major row.)
    """
    rows, cols = (16, len(x)) if mn_major else (len(x), 16)
    along = x.T if mn_major else x                              # (rows, cols), cols next to each other
    pitch = swizzle or 16
    width = pitch // 2
    panels = -(-cols // width)
    panel_bytes = -(-rows // 8) * 8 * pitch
    image = torch.zeros(panels * panel_bytes // 2, dtype=x.dtype)
    for r, c in itertools.product(range(rows), range(cols)):
        byte = c // width * panel_bytes + r * pitch + c % width * 2
        image[chunk_place(byte, swizzle) // 2] = along[r, c]
    leading, stride = panel_bytes, 8 * pitch
    if mn_major and not swizzle:
        leading, stride = stride, leading
    return image, (leading, stride, {0: 0, 128: 1, 64: 2, 32: 3}[swizzle])


WIDTHS = [2, 8, 10, 16, 32]
PRODUCTS = [  # tiles of n, A in registers, A MN-major, B MN-major, swizzle
    *((n, registers, False, n % 4 == 0, 128) for n in WIDTHS for registers in (False, True)),
    *((8, False, A, B, 128) for A, B in itertools.product((False, True), repeat=2)),
    *((8, False, A, B, swizzle) for A, B in ((False, False), (True, True)) for swizzle in (0, 32, 64)),
]


@pytest.mark.parametrize("dtype", TYPES, ids=name_of)
@pytest.mark.parametrize("n_tiles, registers, A_mn_major, B_mn_major, swizzle", PRODUCTS)
def test_wgmma(device, dtype, n_tiles, registers, A_mn_major, B_mn_major, swizzle):
    n = 8 * n_tiles
    A, B = random_numbers(64, 16, dtype=dtype), random_numbers(n, 16, dtype=dtype, seed=1)
    C = random_numbers(64, n, dtype=torch.float32, seed=2)
    A_image, A_layout = operand(A, A_mn_major, swizzle)
    B_image, B_layout = operand(B, B_mn_major, swizzle)
    start = -(-A_image.nbytes // 1024) * 1024
    image = torch.zeros((start + B_image.nbytes) // 2, dtype=dtype)
    image[:len(A_image)] = A_image
    image[start // 2:] = B_image
    a = torch.stack([joined(A[ROW + row, COL + col], A[ROW + row, COL + col + 1])
                     for col, row in itertools.product((0, 8), (0, 8))], 1)
    index = [(ROW + e // 2 * 8, 8 * tile + COL + e % 2) for tile in range(n_tiles) for e in range(4)]
    for accumulate in (1, 0):
        d = torch.stack([C[at] for at in index], 1).to(device)
        layouts = [torch.tensor(values, dtype=torch.int32) for values in ((0, *A_layout), (start, *B_layout))]
        assert call("multiply", n_tiles, int(registers), int(A_mn_major), int(B_mn_major), image.to(device),
                    image.nbytes, *layouts, a.to(device), d, accumulate, device=device, dtype=dtype) is None
        result = torch.full((64, n), torch.nan)
        for i, at in enumerate(index):
            result[at] = d[:, i].cpu()
        check_product(result, A, B.T, C * accumulate)


@pytest.mark.parametrize("dtype", TYPES, ids=name_of)
@pytest.mark.parametrize("cols", [64, 328])
def test_ring(device, schedule, dtype, cols):
    """Copies and products through two stages; the last columns are filled up with zeros."""
    A, B = random_numbers(64, cols, dtype=dtype), random_numbers(128, cols, dtype=dtype, seed=1)
    C = empty(64, 128, dtype=torch.float32, device=device)
    assert call("ring", A.to(device), B.to(device), C, cols, device=device, dtype=dtype) is None
    check_product(C.cpu(), A, B.T, torch.zeros(64, 128))


# ---------------------------------------------------------------------------------------- named barriers
@pytest.mark.parametrize("count", [1, 6])
def test_named_barriers(device, schedule, count):
    out = empty(1, device=device)
    assert call("turns", out, count, device=device) is None
    assert out.item() == functools.reduce(lambda x, _: 2 * x + 3, range(count), 1)
