"""The copy engine, mbarriers, wgmma and named barriers: in the simulator and on a GPU against plain loops.

The references are written from the documented layouts: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix
Instructions" and "Tensors".
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import heapq
import itertools
import sys

import pytest
import torch
from conftest import check, poisoned, random_qkv, with_two_schedules
from test_simulator import KERNELS, empty, simulator_only
from test_simulator import call as call_other
from test_tensor import check_product, joined, name_of, random_numbers

import flash
from flash_ladder.simulator import resolve_addresses
from tutorials.exercises.exercise import inlined

sys.path.insert(0, str(flash.ROOT / "results"))
import wgmma_widths  # noqa: E402

TYPES = [torch.float16, torch.bfloat16]
C_NAMES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
needs_sm90 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90")
pytestmark = needs_sm90


def test_the_widths_of_wgmma_are_as_written():
    assert wgmma_widths.FILE.read_text() == wgmma_widths.text(), "python results/wgmma_widths.py"


@functools.cache
def library(device: str, dtype=torch.float16, checked: bool = False) -> ctypes.CDLL:
    macros = {"ELEMENT": C_NAMES[dtype], "HEAD_DIM": "64"}
    return ctypes.CDLL(str(flash.build(KERNELS / "hopper.cu", torch.device(device), macros, checked=checked)))


def call(function: str, *arguments, device: str = "cpu", dtype=torch.float16, checked=False) -> str | None:
    return call_in(library(device, dtype, checked), function, *arguments, device=device)


def call_in(library: ctypes.CDLL, function: str, *arguments, device: str) -> str | None:
    """Its error, if it has one."""
    run = getattr(library, f"run_{function}")
    run.restype = ctypes.c_char_p
    values = (ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else ctypes.c_int(x)
              for x in arguments)
    error = run(*values)
    if device == "cuda":
        torch.cuda.synchronize()
    return resolve_addresses(error.decode()) if error else None


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
    (2, (40, 21, 2, 3), (40, 5, 2, 1), 0, (8, 2, 0, 2)),
    (4, (24, 21, 2, 1), (32, 8, 1, 1), 128, (-4, 15, 1, 0)),
    (4, (24, 21, 2, 1), (12, 7, 1, 1), 0, (12, -2, 1, 0)),
]


def stored(case: tuple) -> tuple:
    """The same case for a store, which must not begin before the tensor."""
    *numbers, corner = case
    return *numbers, tuple(max(start, 0) for start in corner)


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
@pytest.mark.parametrize("function", ["load_box", "load_box_once"])
def test_tma_load(device, schedule, function, case):
    element, sizes, box, swizzle, corner = case
    x, arguments = box_case(element, sizes, box)
    count = box[0] * box[1] * box[2] * box[3]
    out = empty(count * element // 4, device=device)
    assert call(function, like_it(x, device), int(element == 4), *arguments, swizzle, *corner,
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
    element, sizes, box, swizzle, corner = stored(case)
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
@pytest.mark.parametrize("function, corner, says", [
    ("load_box", (3, 0, 1, 1), "begins at byte 6 of a row"), ("load_box", (4, 0, 1, 1), "byte 8 of a row"),
    ("store_box", (12, 0, 1, 1), "byte 24 of a row"), ("store_box", (-8, 0, 1, 1), "coordinate 0 is -8"),
    ("store_box", (0, -3, 1, 1), "coordinate 1 is -3"), ("store_box", (0, 0, -1, 1), "coordinate 2 is -1")])
def test_where_a_box_may_begin(device, function, corner, says):
    """An H100 calls such an instruction illegal."""
    element, sizes, box, swizzle, _ = BOXES[0]
    x, arguments = box_case(element, sizes, box)
    more = (0, empty(512)) if function == "load_box" else (torch.zeros(512).int(), 1)
    assert says in call(function, x, 0, *arguments, swizzle, *corner, 2048, *more)


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


def test_bulk_load(device, schedule):
    x, out = torch.randn(100, generator=torch.Generator().manual_seed(0)), torch.zeros(100, device=device)
    assert call("load_floats", x.to(device), out, 100, device=device) is None
    assert torch.equal(out.cpu(), x)


def test_bulk_add(device, schedule):
    x = torch.randint(-100, 100, (10, 48), generator=torch.Generator().manual_seed(0)).float()
    out = torch.ones(48, device=device)
    assert call("add_up", x.to(device), out, 48, 5, device=device) is None
    assert torch.equal(out.cpu(), 1 + x.sum(0))


@pytest.mark.parametrize("last_first, first_stores", [(False, False), (True, False), (True, True)])
def test_load_acquire_and_count_release(device, schedule, last_first, first_stores):
    """Blocks that wait for their turn at a semaphore: a sum has the bits of a loop in that order. If the
    first one stores, what was there before does not count."""
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(0))
    out = torch.full((48,), float("nan") if first_stores else 0.0, device=device)
    semaphore = torch.zeros(1, dtype=torch.int32, device=device)
    assert call("add_in_turn", x.to(device), out, semaphore, 48, 20, last_first, first_stores,
                device=device) is None

    def looped(rows):
        total = torch.zeros(48)
        for row in rows:
            total = total + row
        return total

    assert torch.equal(out.cpu(), looped(x.flip(0) if last_first else x)) and semaphore.item() == 20
    assert not torch.equal(looped(x.flip(0)), looped(x))       # so the order shows


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


# ---------------------------------------------------------------------------------------------- mistakes
ERRORS = [  # what the message says, by number
    "mbarrier_init(): the address of an mbarrier must be a multiple of 8",
    "mbarrier_init(): an mbarrier must be in shared memory",
    "mbarrier_init(): 0 arrivals; 1 to 1048575 are possible",
    "mbarrier_arrive(): nothing has initialised this mbarrier, barrier (mbarrier_init)",
    "mbarrier_wait(): a parity of 2; 0 and 1 are possible",
    "mbarrier_arrive(): of the 2 arrivals of barrier all have been made in this phase, which waits for 64 ",
    "mbarrier_arrive_expect(): 1048576 bytes to come; at most 1048575 are possible",
    "tma_load(): this is no tensor map that cuTensorMapEncodeTiled has made",
    "bulk_add(): 20 bytes; a multiple of 16 is possible",
    "bulk_add(): the address in global memory must be a multiple of 16",
    "bulk_add(): 32 bytes from here on are not in shared memory",
    "wgmma(): a part of A lies outside of shared memory",
    "wgmma(): the descriptor of B has a base offset",
    "threads of one warpgroup are at different operations: wgmma_",
    "named_barrier_sync(): barrier 16; 1 to 15 are possible",
    "named_barrier_sync(): 48 threads; a multiple of 32 is possible, no more than the block has",
    "setmaxnreg_inc(): 24 registers, where a thread has 40; setmaxnreg_dec() takes some away",
    "for a phase of parity 0 of barrier, which is in its phase 0: 1 of 2 arrivals are missing, 48 bytes are "
    "still to come",
    "named_barrier_sync()",
    "wgmma_commit()",
    "for a phase of parity 0 of barrier, which is in its phase 0: 2 of 2 arrivals are missing",
    "wgmma_fence() needs the 128 threads of a warpgroup; the block's last one has 64",
    "bulk_load(): the address in global memory must be a multiple of 16",
]
MEETINGS = {18: "(64 of 96 threads are there)", 19: "(32 of 128 threads are there)"}


@simulator_only
@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_mistakes_are_reported_at_their_line(device, number):
    source = KERNELS / "hopper_errors.cu"
    lines = [f"{source}:{n}" for n, line in enumerate(source.read_text().splitlines(), 1)
             if line.endswith(f"// HERE: {number}")]
    x = torch.zeros(256)
    error = call_other("mistake", number, x, x, source="hopper_errors")
    assert ERRORS[number] in error and lines and all(line in error for line in lines), error
    assert MEETINGS.get(number, "") in error


WRONG_MAPS = [  # what is wrong: (d, N, heads, B), strides, box, swizzle, what is added to the address
    ("must start at a multiple of 16 bytes", (64, 8, 1, 1), (128, 16, 16), (64, 8, 1, 1), 128, 8),
    ("size[1] is 0", (64, 0, 1, 1), (128, 16, 16), (64, 8, 1, 1), 128, 0),
    ("stride[0] is 130", (64, 8, 1, 1), (130, 16, 16), (64, 8, 1, 1), 128, 0),
    ("box[1] is 257", (64, 8, 1, 1), (128, 16, 16), (64, 257, 1, 1), 128, 0),
    ("box[0] is 12", (64, 8, 1, 1), (128, 16, 16), (12, 8, 1, 1), 128, 0),
    ("box[0] is 72", (72, 8, 1, 1), (144, 16, 16), (72, 8, 1, 1), 128, 0),
    ("box[0] is 40", (72, 8, 1, 1), (144, 16, 16), (40, 8, 1, 1), 64, 0),
]


@simulator_only
@pytest.mark.parametrize("case", WRONG_MAPS, ids=lambda case: case[0][:8])
def test_tensor_maps_are_checked(device, case):
    """As the driver does: CUDA_ERROR_INVALID_VALUE; the simulator says why."""
    wrong, *numbers, swizzle, shift = case
    x = torch.zeros(4096, dtype=torch.int16)[shift // 2:]
    arguments = [torch.tensor(values, dtype=torch.int32) for values in numbers]
    error = call("load_box", x, 0, *arguments, swizzle, 0, 0, 0, 0, 1024, 0, x)
    assert error.startswith("cuTensorMapEncodeTiled: ") and wrong in error


def views(device: str, dtype=torch.float16, d: int = 32):
    """q, k and v whose strides a tensor map might mind: 0 of what is expanded, rows that overlap, any where
    there is only one."""
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    generator, B, H, N = torch.Generator().manual_seed(0), 2, 2, 70
    q, k, v = (random(B, H, N, d) for _ in range(3))
    one = random(1, 1, 1, d)
    yield "the batch has one k and v", q, *(x[:1].expand_as(x) for x in (k, v))
    yield "all keys are one", q, k[:, :, :1].expand_as(k), v
    yield "all values are one", q, k, v[:, :, :1].expand_as(v)
    yield "all queries are one, and all else", *[one.expand_as(q)] * 3
    yield "rows overlap", q, *(torch.as_strided(random(2000), k.shape, (160, 80, 8, 1)) for _ in range(2))
    yield "one row", one, one, one
    yield "one head, with odd strides", *(torch.as_strided(random(N * d), (1, 1, N, d), (7, 3, d, 1))
                                          for _ in range(3))


@pytest.mark.parametrize("stage", ["tma", "hopper_tuned"])
def test_tensor_maps_of_any_strides(device, stage):
    """The driver takes every stride of 16 bytes' multiples below 2^40, 0 as well."""
    for name, *tensors in views(device):
        found = flash.attention(*tensors, stage=stage, return_lse=True)
        expected = flash.attention(*(x.clone(memory_format=torch.contiguous_format) for x in tensors),
                                   stage=stage, return_lse=True)
        assert all(map(torch.equal, found, expected)), name
        check(*found, *tensors)


def test_a_thread_that_has_not_used_the_gpu(device):
    """It has no context, and the driver makes no tensor map without one. (So a model's first backward pass
    failed, in autograd's thread, where nothing was allocated ahead of it.)"""
    q, k, v = torch.randn(3, 1, 2, 70, 64).to(device, torch.float16)
    expected = flash.attention(q, k, v, stage="tma")
    with concurrent.futures.ThreadPoolExecutor(1) as new:
        assert torch.equal(new.submit(flash.attention, q, k, v, stage="tma").result(), expected)


# ------------------------------------------------------------------------------------------ what it costs
def inspected(function: str, *arguments, **arrays: torch.Tensor):
    with flash.inspect(**arrays) as report:
        error = call(function, *arguments, checked=True)
    assert (error, report.findings) == (None, [])
    return {(access.kind, access.array): access for access in report.accesses}, report


@simulator_only
def test_traffic_of_copies_and_products(device, schedule):
    """In bounds: what is past the end is no traffic. Shared memory has all of the box."""
    cols, steps = 328, 6
    A, B, C = random_numbers(64, cols, dtype=torch.float16), random_numbers(128, cols, dtype=torch.float16), (
        torch.zeros(64, 128))
    accesses, report = inspected("ring", A, B, C, cols, A=A, B=B, C=C)
    assert (report.traffic()["A"].read, report.traffic()["B"].read) == (A.nbytes, B.nbytes)
    assert (report.traffic()["A"].unique_read, report.traffic()["C"].written) == (A.nbytes, C.nbytes)
    loads, products = accesses["tma write", "B_smem"], accesses["wgmma", "B_smem"]
    assert (loads.requests, loads.bytes) == (steps, steps * 128 * 128)
    assert (products.requests, products.bytes) == (4 * steps, 4 * steps * (64 + 128) * 32)


@simulator_only
def test_no_findings_in_what_is_right(device, schedule):
    x, out = torch.arange(96).int(), torch.zeros(96, dtype=torch.int32)
    inspected("rounds", x, out, 5, x=x, out=out)
    inspected("turns", out, 5, out=out)
    x, out = torch.ones(480), torch.zeros(48)
    inspected("add_up", x, out, 48, 5, x=x, out=out)
    x, out = torch.ones(100), torch.zeros(100)
    _, report = inspected("load_floats", x, out, 100, x=x, out=out)
    assert report.traffic()["x"].read == x.nbytes


@simulator_only
@pytest.mark.parametrize("case", BOXES[3:6], ids=lambda case: "-".join(map(str, case[2])))
def test_boxes_without_findings(device, schedule, case):
    """Of a load and a store, past the ends of a tensor with gaps."""
    element, sizes, box, swizzle, corner = case
    x, arguments = box_case(element, sizes, box)
    bytes_ = box[0] * box[1] * box[2] * box[3] * element
    shared = torch.zeros(bytes_ // 4, dtype=torch.int32)
    numbers = int(element == 4), *arguments, swizzle

    def inside(corner: tuple) -> int:
        return sum(index is not None for _, index in box_elements(sizes, box, corner)) * element
    _, report = inspected("load_box", x, *numbers, *corner, bytes_, 0, shared, x=x, shared=shared)
    assert report.traffic()["x"].read == inside(corner)
    *_, corner = stored(case)
    _, report = inspected("store_box", x, *numbers, *corner, bytes_, shared, 1, x=x, shared=shared)
    assert report.traffic()["x"].written == inside(corner)


@simulator_only
def test_copies_of_a_kernel_that_starts_early(device, schedule):
    """The engine's are those of the thread that asks: right if that one has waited."""
    x, out = torch.randn(32, generator=torch.Generator().manual_seed(0)), torch.zeros(32)
    inspected("double_early", x, out, 1, x=x, out=out)
    assert torch.equal(out, 2 * x)
    with flash.inspect(x=x, out=out) as report:
        call("double_early", x, out, 0, checked=True)
    assert {f.what for f in report.findings} == {"too early"} and len(report.findings) == 2


# ------------------------------------------------------------------------------------------ stages
ON_THE_DIAGONAL = (200, 200, 192, 64), (192, 330, 192, 64), (128, 49, 128, 32), (130, 140, 128, 80)
OF_TWO_BLOCKS = (256, 256, 256, 80), (400, 330, 256, 80), (300, 310, 256, 32), (130, 130, 128, 32)


def on_the_diagonal(path, device, sizes=ON_THE_DIAGONAL, d=16):
    """Tiles of Q of which one warpgroup needs all, another half of the last tile of keys, or none of it."""
    for N_q, N_k, Br, Bc in sizes:
        q, k, v = random_qkv(1, 2, 1, N_q, N_k, d, device, torch.bfloat16)
        k[:, :, -1] = 2 * q[:, :1, -1]          # so that it counts
        o, lse = flash.attention(q, k, v, causal=True, stage=path, Br=Br, Bc=Bc, return_lse=True)
        check(o, lse, q, k, v, N_k - N_q)


TOO_FEW = "first_row(work) / 64 * 64 + 63", "first_row(work) / 64 * 64"


@pytest.mark.parametrize("stage, code, other", [
    ("cut_diagonal", *TOO_FEW), ("hopper_tuned", *TOO_FEW),
    ("cut_diagonal", "BLOCK_C + some}", "BLOCK_C + some + 1}"),
    ("cut_diagonal", "to_A(P_frag, S);", "for (int k = 0; k < sizeof(S) / 32; k++) to_A(P_frag[k], S, k);"),
], ids=["a tile too few", "a tile too few, hopper_tuned", "a half too few", "the other half stays"])
def test_what_a_warpgroup_leaves_out(device, stage, code, other, tmp_path):
    """The last tile of keys, or half of it, where its rows see nothing of it, and only there."""
    path = next(s for s in flash.stages("fwd") if s.name == stage).path
    on_the_diagonal(path, device)
    text = inlined(path.read_text(), "mask.cuh")
    wrong = tmp_path / "wrong.cuh"
    wrong.write_text(text.replace(code, other))
    assert wrong.read_text() != text
    with pytest.raises(AssertionError):
        on_the_diagonal(wrong, device)


@pytest.mark.parametrize("d", [16, 136])
def test_what_a_warpgroup_of_a_cluster_leaves_out(device, d, tmp_path):
    """With d > 128 several tiles, else one."""
    path = next(s for s in flash.stages("fwd") if s.name == "multicast").path
    on_the_diagonal(path, device, OF_TWO_BLOCKS, d)
    wrong = tmp_path / "wrong.cuh"
    wrong.write_text(path.read_text().replace(*TOO_FEW))
    assert wrong.read_text() != path.read_text()
    with pytest.raises(AssertionError):
        on_the_diagonal(wrong, device, OF_TWO_BLOCKS, d)


@with_two_schedules("stage, d, Br, Bc, causal", [
    ("multicast", 256, 256, 80, True), ("multicast", 64, 384, 128, False),
    ("multicast_tuned", 256, 256, 80, False), ("multicast_tuned", 256, 256, 80, True),
    ("multicast_tuned", 128, 256, 128, True)])
def test_two_blocks_share_tiles_of_K_and_V(device, schedule, stage, d, Br, Bc, causal):
    """Several rounds (of a GPU's 66 clusters, too); of the last cluster a block has few rows, or none."""
    q, k, v = random_qkv(1 if device == "cpu" else 60, 2, 1, Br + 44, 330, d, device, torch.bfloat16)
    with flash.inspect() if device == "cpu" else contextlib.nullcontext() as report:
        o, lse = flash.attention(q, k, v, causal=causal, stage=stage, return_lse=True, Br=Br, Bc=Bc)
    check(o, lse, q, k, v, 330 - (Br + 44) if causal else None)
    assert not (report and report.findings), report


@simulator_only
def test_columns_of_S_of_a_cluster(device):
    """On the diagonal each warpgroup multiplies what its own 64 rows need, of 256."""
    N, d, Br, Bc = 576, 192, 256, 80
    q = torch.randn(1, 1, N, d, generator=torch.Generator().manual_seed(0)).bfloat16()
    with flash.inspect(Q=q) as report:
        flash.attention(q, q, q, causal=True, stage="multicast", Br=Br, Bc=Bc)
    products = sum(a.requests for a in report.accesses
                   if a.kind == "wgmma" and a.bytes == a.requests * 32 * (64 + Bc))
    needed = [-(-min(row + 64, N) // Bc) for row in range(0, -(-N // Br) * Br, 64)]
    assert products == sum(needed) * d // 16


def columns_of_S(stage: str, N: int, d: int = 64, **options) -> int:
    """Columns of 64 rows that are multiplied. (64 + Bc is not d, by which P V is told apart.)"""
    q = torch.randn(1, 1, N, d, generator=torch.Generator().manual_seed(0)).bfloat16()
    with flash.inspect(Q=q) as report:
        flash.attention(q, q, q, stage=stage, **options)
    products = [(a.requests, a.bytes // a.requests // 32 - 64) for a in report.accesses
                if a.kind == "wgmma" and a.bytes // a.requests // 32 not in (64, d)]      # not P V
    return sum(requests * n for requests, n in products) // (d // 16)


@simulator_only
@pytest.mark.parametrize("Br, Bc", [(192, 128), (128, 80)])
def test_columns_of_S_on_the_diagonal(device, Br, Bc):
    """As many as its header says: columns of 64 rows that are multiplied, by stage; without a mask all."""
    N = 576

    def columns(stage, causal):
        return columns_of_S(stage, N, causal=causal, Br=Br, Bc=Bc)

    of_blocks = of_warpgroups = 0
    for row in range(0, -(-N // Br) * Br, 64):
        end = -(-min(row // Br * Br + Br, N) // Bc)
        needed = end - (end > 1 and row + 64 <= (end - 1) * Bc)
        half = Bc % 32 == 0 and needed > 1 and row + 64 <= needed * Bc - Bc // 2
        of_blocks += end * Bc
        of_warpgroups += needed * Bc - half * Bc // 2
    assert columns("early_wait", True) == of_blocks > of_warpgroups
    assert columns("cut_diagonal", True) == columns("hopper_tuned", True) == of_warpgroups
    assert columns("cut_diagonal", False) == columns("early_wait", False)


@simulator_only
@pytest.mark.parametrize("Br, Bc", [(192, 80), (128, 32)])
def test_columns_of_S_in_a_window(device, Br, Bc):
    """Of own_ranges those of the tiles that the 64 rows of a warpgroup see, and no more; of its parent more.
    In a call without a window as many as of its parent."""
    N, W = 576, 150
    options = {"mask": flash.masks.window(W - 1, 0), "Br": Br, "Bc": Bc}
    of_warpgroups = sum(-(-min(row + 64, N) // Bc) - max(row - W + 1, 0) // Bc
                        for row in range(0, -(-N // Br) * Br, 64)) * Bc
    assert columns_of_S("own_ranges", N, **options) == of_warpgroups
    assert columns_of_S("short_last", N, **options) > of_warpgroups
    causal = {"causal": True, "Br": Br, "Bc": Bc}
    assert columns_of_S("own_ranges", N, **causal) == columns_of_S("short_last", N, **causal)


@simulator_only
@pytest.mark.parametrize("Bc", [80, 64, 48])
def test_columns_of_S_in_half_tiles_of_a_cluster(device, Bc):
    """As many as 64 rows need, by whole tiles, and of the last one perhaps half, or 48 of 80."""
    half = -(-Bc // 32) * 16
    columns = 0
    for row in range(0, 512, 64):
        tiles = -(-(row + 64) // Bc)
        in_last = row + 64 - (tiles - 1) * Bc
        columns += tiles * Bc - (Bc - half if tiles > 1 and in_last <= half else 0)
    assert columns_of_S("multicast_tuned", 512, 192, causal=True, Br=256, Bc=Bc) == columns


@simulator_only
@pytest.mark.parametrize("N", [64, 256, 320, 384])
@pytest.mark.parametrize("Bc", [80, 128])
def test_columns_of_S_behind_the_last_row(device, N, Bc):
    """The last tile of 192 rows has some for one, two or three warpgroups. The others multiply nothing in
    own_rows, and all that the block needs in its parent. Without a mask, or with 128 rows, both do."""
    without = -N % 192 // 64                     # warpgroups
    options = {"causal": True, "Br": 192, "Bc": Bc}
    assert columns_of_S("short_last", N, **options) - columns_of_S("own_rows", N, **options) == (
        without * -(-N // Bc) * Bc)
    for others in ({"causal": False}, {"Br": 128}):
        columns = [columns_of_S(stage, N, **options | others) for stage in ("short_last", "own_rows")]
        assert columns[0] == columns[1]


SHARES = """\
// Forward stage: shares
// types:   fp16
#include "common/mask.cuh"
#include "common/stream_k.cuh"
// A block for each head, whose tiles are N_k steps long. L is the n of each step that it does, or -1.
__global__ void shares_kernel(FwdParams p) {
  const int all = p.N_q / p.N_k;
  float* L = p.L + blockIdx.x * p.N_q;
  for (int i = 0; i < p.N_q; i++) L[i] = -1.f;
  for (int n = 0, number; true; n++) {
    const Steps steps = share_of(n, all, p.N_k, number);
    if (number >= all) return;
    for (int t = steps.first; t < steps.end; t++) L[number * p.N_k + t] = n;
  }
}
size_t workspace_bytes(const FwdParams&) { return 0; }
cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  shares_kernel<<<p.H, 1, 0, stream>>>(p);
  return cudaGetLastError();
}
"""


@pytest.mark.parametrize("blocks, all_tiles, Tc", [
    (1, 1, 1), (1, 3, 4), (3, 3, 2), (3, 4, 1), (3, 4, 5), (3, 5, 2), (3, 11, 4), (4, 8, 3), (4, 10, 7),
    (132, 133, 16), (132, 198, 3), (132, 263, 2)])
def test_shares_of_equal_tiles(device, blocks, all_tiles, Tc, tmp_path):
    """Each step is done once, by a block that has as many as the others, or one more; and who takes up what
    another block leaves does so at its end, what that one does at its start."""
    (tmp_path / "shares.cuh").write_text(SHARES)
    q, k = (torch.zeros(1, blocks, N, 8, dtype=torch.float16, device=device) for N in (all_tiles * Tc, Tc))
    _, L = flash.attention(q, k, k, stage=tmp_path / "shares.cuh", return_lse=True)
    n_of = L.view(blocks, all_tiles, Tc).int().cpu()
    does = n_of >= 0
    assert (does.sum(0) == 1).all()
    steps = does.sum((1, 2))
    assert steps.max() - steps.min() <= 1
    for tile in range(all_tiles):
        owners = does[:, tile].int().argmax(0)
        if owners.min() == owners.max():
            continue
        first, last = owners[0].item(), owners[-1].item()
        assert last == first - 1 and set(owners.tolist()) == {first, last}
        assert (owners.diff() <= 0).all() and n_of[last, tile, -1] == 0
        assert n_of[first, tile, 0] == n_of[first].max()


@pytest.mark.parametrize("tiles, heads, N_k, group, together", [
    (16, 10, 16384, 1, (5, 10)), (128, 40, 16384, 1, (4, 20)), (128, 32, 16384, 4, (4, 16)),
    (3, 64, 512, 1, (64, 64)), (1, 3, 1 << 20, 1, (3, 3)), (7, 5, 1 << 20, 1, (5, 5)),
    (6, 9, 1 << 20, 1, (5, 9))])
def test_the_order_of_tiles(device, tiles, heads, N_k, group, together):
    """Each tile of each head once. Short last: the last quarter of the tiles comes when all others are drawn,
    of all heads at once; before that so many heads go together, tile by tile. Else all of their tiles. (Rows
    of K have 512 bytes: 20 MB are 19531 keys of K and V.)"""
    for short_last in (True, False):
        out = torch.full((tiles * heads, 2), -1, dtype=torch.int32, device=device)
        assert call("drawn", out, tiles, heads, N_k, group, int(short_last), device=device) is None
        longer, few = (tiles - tiles // 4, together[0]) if short_last else (tiles, together[1])
        expected = [(tile, head) for first in range(0, heads, few) for tile in range(longer)
                    for head in range(first, min(first + few, heads))]
        expected += [(tile, head) for tile in range(longer, tiles) for head in range(heads)]
        assert list(map(tuple, out.tolist())) == expected


@pytest.mark.parametrize("tiles, heads, together", [(16, 10, 5), (5, 7, 7), (4, 1, 1), (2, 6, 6)])
@pytest.mark.parametrize("Br, part", [(128, 4), (192, 3)])
def test_the_order_of_late_tickets(device, tiles, heads, together, Br, part):
    """As with short tiles last; but these come of half of the heads at a time, and are a third of a head's if
    tiles have 192 rows."""
    out = torch.full((tiles * heads, 2), -1, dtype=torch.int32, device=device)
    assert call("drawn", out, tiles, heads, 16384, 1, 2 + (Br == 192), device=device) is None
    longer, half = tiles - tiles // part, -(-heads // 2)
    expected = [(tile, head) for few, lengths in ((together, range(longer)), (half, range(longer, tiles)))
                for first in range(0, heads, few) for tile in lengths
                for head in range(first, min(first + few, heads))]
    assert list(map(tuple, out.tolist())) == expected


@with_two_schedules("turn, d, Br, Bc, N_q, N_k", [
    (0, 64, 64, 64, 300, 300), (1, 128, 128, 128, 390, 500), (2, 256, 64, 80, 260, 200),
    (3, 64, 64, 64, 190, 190)])
def test_short_tiles_come_last(device, schedule, turn, d, Br, Bc, N_q, N_k):
    """More tiles than multiprocessors: five, four, five of a head, and three, of which none is a quarter. The
    bits of hopper_tuned, as the order of tiles changes none; where the order is hopper_tuned's, too. A tile
    that nobody drew would be NaN. (Of what else a call may ask for, two by turns.)"""
    B = 1 if device == "cpu" else 60
    q, k, v = random_qkv(B, 3, 3, N_q, N_k, d, device, torch.bfloat16)
    others = [{"sink": torch.ones(3, device=device)}, {"dropout_p": 0.3}, {"scale": -0.1},
              {"causal": False, "mask": flash.masks.window(90, 0)}]
    for options in ({}, others[turn], others[(turn + 1) % 4]):
        found = []
        for stage in ("short_last", "hopper_tuned"):
            torch.manual_seed(0)
            with poisoned():
                found.append(flash.attention(q, k, v, stage=stage, return_lse=True, Br=Br, Bc=Bc,
                                             **{"causal": True} | options))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    with flash.inspect() if device == "cpu" else contextlib.nullcontext() as report:
        o, lse = flash.attention(q, k, v, causal=True, stage="short_last", return_lse=True, Br=Br, Bc=Bc)
    check(o, lse, q, k, v, N_k - N_q)
    assert not (report and report.findings), report


@simulator_only
def test_tickets_are_for_unequal_tiles(device):
    """Without a mask each block of own_rows knows its tiles: no kernel clears a counter, and none counts."""
    q = torch.randn(1, 5, 128, 64, dtype=torch.float16)
    for causal in (True, False):
        with flash.inspect() as report:
            flash.attention(q, q, q, causal=causal, stage="own_rows", Br=64)
        kernels = {access.kernel for access in report.accesses}
        counting = [access for access in report.accesses if access.kind == "atomic"]
        assert (kernels == {"clear_kernel", "forward_kernel"}) == causal == bool(counting)


@with_two_schedules("turn, d, Bc, N_q, N_k", [
    (0, 64, 128, 256, 256), (1, 128, 80, 449, 333), (2, 64, 128, 40, 200), (3, 128, 80, 320, 320),
    (0, 64, 128, 200, 90)])
def test_rows_that_end_before_a_warpgroup(device, schedule, turn, d, Bc, N_q, N_k):
    """A block's first tile is one of those, or all are, or several in a row. The bits of its parent. (Of what
    else a call may ask for, one by turns: there it is its parent.)"""
    B = 1 if device == "cpu" else 60
    q, k, v = random_qkv(B, 5, 5, N_q, N_k, d, device, torch.bfloat16)
    others = [{"sink": torch.ones(5, device=device)}, {"dropout_p": 0.3}, {"scale": -0.1},
              {"causal": False, "mask": flash.masks.window(90, 0)}]
    for options in ({}, others[turn]):
        found = []
        for stage in ("own_rows", "short_last"):
            torch.manual_seed(0)
            with poisoned():
                found.append(flash.attention(q, k, v, stage=stage, return_lse=True, Br=192, Bc=Bc,
                                             **{"causal": True} | options))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    with flash.inspect() if device == "cpu" else contextlib.nullcontext() as report:
        o, lse = flash.attention(q, k, v, causal=True, stage="own_rows", return_lse=True, Br=192, Bc=Bc)
    check(o, lse, q, k, v, N_k - N_q)
    assert not (report and report.findings), report


def test_rows_that_end_after_another_tile(device):
    """L2 holds K and V of four heads of eight: a block has a short tile of these, and then the last one of
    another head, of which two warpgroups have no row. They finish the short one before they pass by."""
    q, k, v = random_qkv(1 if device == "cpu" else 20, 8, 8, 200, 15700, 64, device, torch.bfloat16)
    o, lse = flash.attention(q, k, v, causal=True, stage="own_rows", return_lse=True, Br=192, Bc=128)
    check(o, lse, q, k, v, 15500)


@with_two_schedules("d, Br, Bc, N_q, N_k", [
    (128, 128, 128, 300, 300), (64, 192, 128, 449, 333), (128, 192, 80, 320, 320), (256, 128, 80, 200, 130),
    (128, 64, 64, 300, 200)])
@pytest.mark.parametrize("turn", range(2))
def test_maxima_that_nobody_looks_for(device, schedule, turn, d, Br, Bc, N_q, N_k):
    """In some warps m of a row grows by more than 8 again and again, in others never; a row may see no key.
    A stage that looks for a maximum only then has the bits of one that always does; and those after it."""
    q, k, v = random_qkv(1 if device == "cpu" else 60, 3, 3, N_q, N_k, d, device, torch.bfloat16)
    q[:, :, ::37] *= 6                           # of these rows
    k *= torch.linspace(0.2, 3, N_k, device=device)[:, None].bfloat16()
    options = [{"causal": True}, {"mask": flash.masks.causal() & flash.masks.window(90, 0)}][turn]
    found = {}
    for stage in ("own_rows", "lazy_maximum", "late_ticket", "row_by_row"):
        with poisoned():
            found[stage] = flash.attention(q, k, v, stage=stage, return_lse=True, Br=Br, Bc=Bc, **options)
    parent = "own_rows" if d > 64 else "lazy_maximum"       # whose m stays at d = 64, as well
    for stage in ("lazy_maximum", "late_ticket", "row_by_row"):
        assert all(torch.equal(x, y) for x, y in zip(found[parent], found[stage], strict=True)), stage
    if turn == 0:
        check(*found["row_by_row"], q, k, v, N_k - N_q)


def work_of_the_last_block(N, B, H, d, Br, Bc, late: bool) -> float:
    """Over the mean of all 132 blocks, in steps: a tile costs one more than it has. The order is that of
    common/tile_order.cuh. A block draws its next ticket two steps before a tile ends, or it begins."""
    tiles, heads = -(-N // Br), B * H
    out = torch.zeros(tiles * heads, 2, dtype=torch.int32)
    keys = N * d // 256              # of 512 bytes: as much for L2 to hold
    assert call("drawn", out, tiles, heads, keys, 1, 1) is None
    costs = [1 + -(-(tiles - tile) * Br // Bc) for tile in out[:, 0].tolist()]
    blocks = [(costs[n] - 2 if late else 0, costs[n]) for n in range(132)]     # when it draws, when it ends
    heapq.heapify(blocks)
    for cost in costs[132:]:
        drawn, end = blocks[0]
        heapq.heapreplace(blocks, (max(drawn, (end + cost if late else end) - 2), end + cost))
    return max(end for _, end in blocks) / (sum(costs) / 132)


@simulator_only
@pytest.mark.parametrize("Br, Bc, d, N, B, before, late", [
    (128, 128, 128, 2048, 8, 1.004, 1.004), (128, 128, 128, 4096, 4, 1.009, 1.005),
    (128, 128, 128, 16384, 1, 1.004, 1.002), (192, 80, 128, 4096, 4, 1.083, 1.025),
    (192, 80, 128, 8192, 2, 1.039, 1.005), (192, 80, 128, 16384, 1, 1.018, 1.005),
    (128, 80, 256, 2048, 8, 1.091, 1.014), (128, 80, 256, 4096, 4, 1.126, 1.006)])
def test_what_late_tickets_save(device, Br, Bc, d, N, B, before, late):
    """The figures of late_ticket's header."""
    found = [work_of_the_last_block(N, B, 2048 // d, d, Br, Bc, late) for late in (False, True)]
    assert found == [pytest.approx(before, abs=6e-4), pytest.approx(late, abs=6e-4)]


EQUAL_TILES = [  # d, Br, Bc, N_q, N_k
    (64, 192, 128, 250, 700), (64, 64, 64, 130, 500), (128, 128, 128, 200, 513), (128, 192, 80, 250, 333),
    (256, 128, 80, 200, 300), (136, 64, 80, 70, 170)]


@with_two_schedules("d, Br, Bc, N_q, N_k", EQUAL_TILES)
def test_tiles_that_are_cut_between_blocks(device, schedule, d, Br, Bc, N_q, N_k):
    """More tiles than a round, and no multiple of one: of three multiprocessors or 132. The first keys and
    the last ones count most, for some rows."""
    B = 1 if device == "cpu" else 40
    q, k, v = random_qkv(B, 5, 1, N_q, N_k, d, device, torch.bfloat16)
    k[:, :, 0], k[:, :, -1] = 2 * q[:, :1, 0], 2 * q[:, :1, -1]
    with flash.inspect() if device == "cpu" else contextlib.nullcontext() as report:
        o, lse = flash.attention(q, k, v, stage="stream_k", return_lse=True, Br=Br, Bc=Bc)
    check(o, lse, q, k, v)
    assert not (report and report.findings), report


@simulator_only
@pytest.mark.parametrize("code, other", [
    ("all.cut - steps.first", "all.cut"), ("some_are_left && row < p.N_q ?", "false ?"),
    ("(some_are_left || SINK)", "SINK"), ("x = *(left += 2 * BLOCK_R)", "x = 0.f"),
    ("  rescale(O, factor);", ""),
    ("min(from + rest - start, blocks)", "min(from + rest - start + 1, blocks)"),
    ("2 * BLOCK_R * (1 + width / 2)", "2 * BLOCK_R * (width / 2)"),
    ("if (work.first > 0) return leave", "if (work.first > 0) leave"),
    ("== 0.f) {}", "== 2.f) {}")])
def test_mistakes_in_tiles_that_are_cut(device, code, other, tmp_path, monkeypatch):
    """Some give wrong numbers, others only work for the checker."""
    if "== 2.f" in other:  # in the order of their numbers no block has to wait
        monkeypatch.setenv("FLASH_SIM_SEED", "1")
    path = next(s for s in flash.stages("fwd") if s.name == "stream_k").path
    text = inlined(path.read_text(), "stream_k.cuh")
    wrong = tmp_path / "wrong.cuh"
    wrong.write_text(text.replace(code, other))
    assert wrong.read_text() != text
    q, k, v = random_qkv(1, 5, 1, 70, 170, 40, device, torch.bfloat16)
    k[:, :, 0], k[:, :, -1] = 2 * q[:, :1, 0], 2 * q[:, :1, -1]
    with pytest.raises((AssertionError, RuntimeError)):
        with flash.inspect() as report:
            found = flash.attention(q, k, v, stage=wrong, return_lse=True, Br=64, Bc=32)
        check(*found, q, k, v)
        assert not report.findings


@pytest.mark.parametrize("d, Br, Bc, N_q, N_k", EQUAL_TILES[::2])
def test_what_a_cut_leaves_as_it_is(device, d, Br, Bc, N_q, N_k):
    """A sink counts once, dropout drops the same elements and is scaled once, rows may see no key of a part,
    or of both: as in hopper_tuned, but for the last bits. With another mask all bits are the same. (Of each
    size some of these.)"""
    B = 1 if device == "cpu" else 40
    q, k, v = random_qkv(B, 5, 5, N_q, N_k, d, device, torch.float16)
    bias = torch.zeros(N_q, N_k, device=device)
    bias[0], bias[1, :-1], bias[2, 1:], bias[3, N_k // 2:] = (float("-inf"),) * 4
    sink = torch.linspace(-1, 3, 5).to(device)

    def both(**options):
        for stage in ("hopper_tuned", "stream_k"):
            torch.manual_seed(0)
            yield flash.attention(q, k, v, stage=stage, return_lse=True, Br=Br, Bc=Bc, **options)
    turn = EQUAL_TILES[::2].index((d, Br, Bc, N_q, N_k))
    for options in (
            ({"sink": sink, "dropout_p": 0.3}, {"mask": flash.masks.additive(bias)}),
            ({"dropout_p": 0.8}, {"dropout_p": 1.0}, {"mask": flash.masks.softcap(1.0), "sink": sink}),
            ({"mask": flash.masks.additive(bias)}, {"sink": sink, "dropout_p": 0.3}))[turn]:
        for expected, found in zip(*both(**options), strict=True):
            torch.testing.assert_close(found, expected, atol=4e-3, rtol=2e-3)
    if turn < 2:
        for expected, found in zip(*both(mask=flash.masks.window(90, 60)), strict=True):
            assert torch.equal(expected, found)


@pytest.mark.parametrize("stage, causal", [
    ("hopper_tuned", True), ("stream_k", False), ("stream_k", True), ("row_by_row", True)])
def test_repeats_have_the_same_bits(device, monkeypatch, stage, causal):
    """Which block takes which tile, and when, is a matter of chance: the result is not."""
    B, N, repeats = (8, 700, 50) if device == "cuda" else (1, 140, 4)        # more tiles than multiprocessors
    q, k, v = random_qkv(B, 6, 3, N, N, 64, device, torch.bfloat16)
    found = []
    for seed in range(repeats):
        monkeypatch.setenv("FLASH_SIM_COPIES", "random")
        monkeypatch.setenv("FLASH_SIM_SEED", str(seed))
        found.append(flash.attention(q, k, v, causal=causal, stage=stage, return_lse=True))
    assert all(torch.equal(x, y) for o_and_L in found for x, y in zip(o_and_L, found[0], strict=True))
    check(*found[0], q, k, v, 0 if causal else None)
