"""The simulator: kernels mean in it what they mean on a GPU, and it reports mistakes by thread and line.

kernels/semantics.cu runs on both, kernels/errors.cu in the simulator alone.
"""

import ctypes
import functools
import itertools
import math
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import flash
from flash_ladder.simulator import resolve_addresses

KERNELS = Path(__file__).parent / "kernels"
ERRORS = KERNELS / "errors.cu"
FULL = 0xFFFFFFFF
simulator_only = pytest.mark.parametrize("device", ["cpu"])


@functools.cache
def library(name: str, device: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(flash.build(KERNELS / f"{name}.cu", torch.device(device))))


def _c_value(x):
    if isinstance(x, torch.Tensor):
        return ctypes.c_void_p(x.data_ptr())
    return ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int(x)


def call(function: str, *arguments, device: str = "cpu", source: str = "semantics") -> str | None:
    """Call run_<function> with tensors, integers and floats. Returns its error, with lines for addresses."""
    run = getattr(library(source, device), f"run_{function}")
    run.restype = ctypes.c_char_p
    error = run(*map(_c_value, arguments))
    if device == "cuda":
        torch.cuda.synchronize()
    return resolve_addresses(error.decode()) if error else None


def check_call(function: str, *arguments, device: str = "cpu", source: str = "semantics") -> None:
    assert call(function, *arguments, device=device, source=source) is None


def integers(*shape, low=-1000, high=1000, seed=0, dtype=torch.int32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def empty(*shape, device="cpu", dtype=torch.int32) -> torch.Tensor:
    """Filled with what no kernel writes."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -77777, dtype=dtype, device=device)


def here(name: str) -> str:
    """file:line of the comment `// HERE: name` in errors.cu."""
    source = enumerate(ERRORS.read_text().splitlines(), 1)
    lines = [number for number, line in source if line.endswith(f"// HERE: {name}")]
    assert len(lines) == 1
    return f"{ERRORS}:{lines[0]}"


# --------------------------------------------------------------------------------------------------- who am I
@pytest.mark.parametrize(
    "block, grid", [((5, 3, 2), (3, 2, 4)), ((70, 1, 1), (7, 1, 1)), ((1, 1, 64), (1, 5, 3))]
)
def test_indices(device, block, grid):
    threads = math.prod(block) * math.prod(grid)
    out = empty(threads, 12, device=device)
    check_call("indices", out, *block, *grid, device=device)
    expected = [
        [tx, ty, tz, bx, by, bz, *block, *grid]
        for bz, by, bx, tz, ty, tx in itertools.product(
            *map(range, reversed(grid)), *map(range, reversed(block))
        )
    ]
    assert out.tolist() == expected


def test_blocks_run_at_the_same_time(device, monkeypatch):
    monkeypatch.setenv("FLASH_SIM_THREADS", "2")
    flag, met = torch.zeros(1, dtype=torch.int32, device=device), empty(1, device=device)
    check_call("meet", flag, met, device=device)
    assert met.item() == 1


# --------------------------------------------------------------------------------------------------- barriers
@pytest.mark.parametrize("blocks, threads", [(5, 33), (3, 64), (2, 1024), (3, 1)])
def test_barriers_count_predicates(device, blocks, threads):
    p = integers(blocks, threads, low=0, high=4)  # any number but 0 counts as one
    p[0], p[-1] = 5, 0
    out = empty(blocks, threads, 3, device=device)
    check_call("barrier_predicates", p.to(device), out, blocks, threads, device=device)
    count = (p != 0).sum(1)
    expected = torch.stack([count, count > 0, count == threads], 1)
    assert torch.equal(out.cpu().long(), expected.long()[:, None].expand(-1, threads, -1))


def reduction(device="cpu", with_barrier=True, threads=256, seed=0) -> tuple[list, list]:
    """(sums, expected sums) of 9 blocks; of integers, so that the order of the additions does not matter."""
    x = integers(9, threads, seed=seed).float()
    out = empty(9, device=device, dtype=torch.float32)
    check_call("reduce", x.to(device), out, 9, threads, int(with_barrier), device=device)
    return out.tolist(), x.sum(1).tolist()


@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_reduction(device, threads):
    sums, expected = reduction(device, threads=threads)
    assert sums == expected


@simulator_only
def test_reduction_under_random_schedules(device, monkeypatch):
    """Right with its barriers, under every schedule; wrong without, and the same every time for one seed."""
    wrong = {}
    for seed, os_threads in itertools.product(["", *map(str, range(1, 21))], ["1", "2"]):
        monkeypatch.setenv("FLASH_SIM_THREADS", os_threads)
        monkeypatch.setenv("FLASH_SIM_SEED", seed) if seed else monkeypatch.delenv(
            "FLASH_SIM_SEED", raising=False
        )
        sums, expected = reduction()
        assert sums == expected
        sums, expected = reduction(with_barrier=False)
        assert wrong.setdefault(seed, sums) == sums, "a seed stands for one schedule, on any number of cores"
    assert all(sums != expected for sums in wrong.values())
    assert len({tuple(sums) for sums in wrong.values()}) > 10, "seeds make different schedules"


@pytest.mark.parametrize("seed", ["", "3"])
def test_syncwarp(device, monkeypatch, seed):
    if seed:
        monkeypatch.setenv("FLASH_SIM_SEED", seed)
    x, out = integers(3, 128), empty(3, 128, device=device)
    check_call("rotate_warps", x.to(device), out, 5, device=device)
    assert torch.equal(out.cpu(), x.view(3, 4, 32).roll(-5, 2).view(3, 128))


# -------------------------------------------------------------------------------------------- shuffles, votes
def shuffled(x: list, sources: list, width: int, distance: int) -> list:
    """CUDA C++ Programming Guide, "Warp Shuffle Functions": in segments of `width` lanes."""
    out = [[], [], [], []]
    for t in range(len(x)):
        first = t // width * width
        end = first + width
        out[0].append(x[first + sources[t] % width])
        out[1].append(x[t - distance] if t - distance >= first else x[t])
        out[2].append(x[t + distance] if t + distance < end else x[t])
        other = t // 32 * 32 + (t % 32 ^ distance)  # may be in an earlier segment, not in a later one
        out[3].append(x[other] if other < end else x[t])
    return out


@pytest.mark.parametrize("threads, widths", [(64, (4, 8, 16, 32)), (40, (4, 8))])
@pytest.mark.parametrize(
    "type_, dtype", [("float", torch.float32), ("int", torch.int32), ("double", torch.float64)]
)
def test_shuffles(device, threads, widths, type_, dtype):
    """Also in a last warp of 8 threads: with distances below 8 its lanes read only lanes that are there."""
    x = integers(threads, low=-(10**6), high=10**6).to(dtype) / (1 if type_ == "int" else 7)
    x = x.to(dtype)
    for width in widths:
        sources = integers(threads, low=0, high=64, seed=width)
        for distance in range(32 if threads == 64 else 8):
            out = empty(4, threads, device=device, dtype=dtype)
            check_call(
                f"shuffles_{type_}",
                x.to(device),
                sources.to(device),
                out,
                threads,
                width,
                distance,
                device=device,
            )
            assert out.tolist() == shuffled(x.tolist(), sources.tolist(), width, distance), (width, distance)


@pytest.mark.parametrize("seed", ["", "1", "2", "3"])
def test_threads_that_have_exited_are_not_waited_for(device, monkeypatch, seed):
    monkeypatch.setenv("FLASH_SIM_SEED", seed)
    out = empty(40, 4, device=device)
    check_call("exits", out, device=device)
    odd = 0xAAAAAAAA
    assert out.tolist() == [[10 * (63 - t), 35, ctypes.c_int(odd if t < 32 else odd & 0xFF).value, t ^ 1]
                            for t in range(40)]


@pytest.mark.parametrize("mask", [FULL, 0x00FF_FF0F, 0x8000_0001, 0x0000_0100])
@pytest.mark.parametrize("predicates", ["some", "none", "all"])
def test_votes(device, mask, predicates):
    p = {"some": integers(64, low=0, high=3), "none": torch.zeros(64), "all": integers(64, low=1, high=9)}[
        predicates
    ].int()
    out = empty(64, 3, device=device)
    check_call("votes", p.to(device), ctypes.c_int(mask).value, out, 64, device=device)
    for t in range(64):
        ballot = sum(1 << lane for lane in range(32) if mask >> lane & 1 and p[t // 32 * 32 + lane])
        expected = (
            [ctypes.c_int(ballot).value, int(ballot != 0), int(ballot == mask)]
            if mask >> t % 32 & 1
            else [-77777] * 3
        )
        assert out[t].tolist() == expected


@pytest.mark.parametrize("seed", ["", *map(str, range(1, 11))])
def test_sets_of_lanes_work_apart(device, monkeypatch, seed):
    if seed:
        monkeypatch.setenv("FLASH_SIM_SEED", seed)
    x, out = integers(64), empty(3, 64, device=device)
    check_call("halves", x.to(device), out, device=device)
    halves = x.view(2, 2, 16).clone()
    halves[:, 0] = halves[:, 0].sum(1, keepdim=True)
    halves[:, 1] = halves[:, 1].view(2, 8, 2).amax(2).repeat_interleave(2, 1)
    expected = [halves.view(64), halves.view(2, 32).flip(1).reshape(64)]
    fours = halves.view(16, 4).clone()
    for four in range(16):
        for r in range(four % 8 + 1):
            fours[four] += fours[four, [lane ^ (1 + r % 3) for lane in range(4)]]
    warps = fours.view(2, 32)
    expected.append(torch.cat([warps[:, 1:], warps[:, -1:]], 1).view(64))
    assert torch.equal(out.cpu().long(), torch.stack(expected).long())


# ---------------------------------------------------------------------------------------------------- atomics
# struct Totals: float, int x 4, unsigned x 3, unsigned long long, double; no padding between
TOTALS = "=fiiiiIIIQd"


def test_atomics_in_global_memory(device, monkeypatch):
    """Totals over many blocks are exact, and every old value comes back once."""
    blocks, threads = 25, 96
    n = blocks * threads
    x = integers(n, low=1, high=5000)
    totals = torch.zeros(struct.calcsize(TOTALS), dtype=torch.uint8)
    totals[:] = torch.frombuffer(
        bytearray(struct.pack(TOTALS, 0, 0, 10**9, -(10**9), 0, 0, 0xF0000000, 3, 5, 0)), dtype=torch.uint8
    )
    totals = totals.to(device)
    tickets, exchanged = empty(n, device=device), empty(n, device=device)
    cell, float_cell = (
        torch.full((1,), -5, dtype=torch.int32, device=device),
        empty(1, device=device, dtype=torch.float32),
    )
    check_call(
        "atomics", x.to(device), totals, tickets, exchanged, cell, float_cell, blocks, threads, device=device
    )
    total = x.sum().item()
    f, i, smallest, largest, cas, u, u_smallest, u_largest, ull, d = struct.unpack(
        TOTALS, totals.cpu().numpy().tobytes()
    )
    assert (f, i, u, cas, ull, d) == (total, n, total, total, (total << 33) + 5, total / 4)
    assert (smallest, largest, u_smallest, u_largest) == (x.min(), x.max(), x.min(), x.max())
    assert sorted(tickets.tolist()) == list(range(n))
    assert sorted([*exchanged.tolist(), cell.item()]) == [-5, *range(n)]
    assert float_cell.item() in {t + 0.5 for t in range(n)}


def test_atomics_in_shared_memory(device):
    x, out = integers(4, 500, low=0, high=10), empty(4, 11, device=device)
    check_call("histogram", x.to(device), 500, out, 4, device=device)
    for block in range(4):
        largest = max(value * 1000 + i for i, value in enumerate(x[block].tolist()))
        assert out[block].tolist() == [*x[block].bincount(minlength=10).tolist(), largest]


@pytest.mark.parametrize("os_threads, seed", [("1", ""), ("2", ""), ("2", "4")])
def test_a_spin_lock_ends_and_excludes(device, monkeypatch, os_threads, seed):
    monkeypatch.setenv("FLASH_SIM_THREADS", os_threads)
    if seed:
        monkeypatch.setenv("FLASH_SIM_SEED", seed)
    lock, counters = (
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )
    check_call("locked", lock, counters, 5, 70, device=device)
    assert [lock.item(), *counters.tolist()] == [0, 350, 1050]


# ------------------------------------------------------------------------------------ blocks among each other
def started_as(blocks, threads, backwards=False, device="cpu") -> list[int]:
    """By block, how many have started before it. The blocks take turns, whoever starts first."""
    state, started, chain = (torch.zeros(n, dtype=torch.int32, device=device) for n in (2, blocks, threads))
    check_call("turns", state, started, chain, blocks, threads, int(backwards), device=device)
    expected = functools.reduce(lambda sum_, block: (3 * sum_ + block) % 2**32,
                                range(blocks)[::-1] if backwards else range(blocks), 0)
    assert state.tolist() == [blocks, blocks]
    assert {x % 2**32 for x in chain.tolist()} == {expected}
    return started.tolist()


@pytest.mark.parametrize("os_threads, seed", itertools.product("12", ["", "1", "2", "3"]))
def test_blocks_that_wait_for_others_end(device, monkeypatch, os_threads, seed):
    """For those of lower numbers however many there are; for any, as many as an OS thread runs by turns."""
    monkeypatch.setenv("FLASH_SIM_THREADS", os_threads)
    monkeypatch.setenv("FLASH_SIM_SEED", seed)
    monkeypatch.setenv("FLASH_SIM_SECONDS", "60")
    started_as(100, 33, device=device)
    started_as(5, 1024, device=device)
    started_as(16, 128, backwards=True, device=device)
    started_as(2, 1024, backwards=True, device=device)
    maps = Path("/proc/self/maps")       # stacks are kept, but a process has 65530 mappings for all it does
    assert not maps.exists() or len(maps.read_text().splitlines()) < 20_000


@simulator_only
def test_the_order_of_blocks(device, monkeypatch):
    """By their numbers, or by the seed: within stretches, each in an order of its own, always the same."""
    monkeypatch.setenv("FLASH_SIM_THREADS", "1")
    assert started_as(100, 128) == list(range(100))
    orders = []
    for seed in range(10):
        monkeypatch.setenv("FLASH_SIM_SEED", str(seed))
        order = started_as(100, 128)
        assert order == started_as(100, 128) and order != list(range(100))
        stretches = [order[first:first + 16] for first in range(0, 100, 16)]
        for number, stretch in enumerate(stretches):
            assert sorted(stretch) == list(range(16 * number, 16 * number + len(stretch)))
        assert [x % 16 for x in stretches[0]] != [x % 16 for x in stretches[1]]
        orders.append(order)
    assert len({*map(tuple, orders)}) == 10
    pairs = []
    for seed in range(10):
        monkeypatch.setenv("FLASH_SIM_SEED", str(seed))
        pairs.append(started_as(2, 32))
    assert [0, 1] in pairs and [1, 0] in pairs


@pytest.mark.parametrize("os_threads", ["1", "2"])
def test_a_block_that_waits_for_one_that_fails(monkeypatch, os_threads):
    monkeypatch.setenv("FLASH_SIM_THREADS", os_threads)
    monkeypatch.setenv("FLASH_SIM_SECONDS", "60")
    error = call("fails_while_waited_for", torch.zeros(2, dtype=torch.int32), source="errors")
    assert "block (0, 0, 0)" in error and 'assertion failed: !"waited for"' in error


# ---------------------------------------------------------------------------------------------- shared memory
def check_fill_shared(device, n, allowed):
    out = empty(3, n + 77, device=device, dtype=torch.float32)
    error = call("fill_shared", out, n, 3, allowed, device=device)
    if error is None:
        expected = torch.cat(
            [
                torch.arange(n).flip(0).expand(3, n) + 1000.0 * torch.arange(3)[:, None],
                -1.0 - torch.arange(77).flip(0).expand(3, 77),
            ],
            1,
        )
        assert torch.equal(out.cpu(), expected)
    return error


def test_static_and_dynamic_shared_memory_together(device):
    assert check_fill_shared(device, 1001, 0) is None


@simulator_only
def test_dynamic_shared_memory_above_48_kb_must_be_allowed(device):
    refused = check_fill_shared(device, 15000, 0)
    assert refused.startswith(f"kernel fill_shared at {KERNELS / 'semantics.cu'}:")
    assert refused.endswith(
        ": launched with 60000 bytes of shared memory a block; above 49152 they must first be allowed with "
        "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)"
    )
    assert "60000 bytes" in check_fill_shared(device, 15000, 59999)
    assert check_fill_shared(device, 15000, 60000) is None


def test_60_000_bytes_when_allowed(device):
    assert check_fill_shared(device, 15000, 60000) is None


@simulator_only
def test_shared_memory_starts_as_nan_in_every_block(device, monkeypatch):
    monkeypatch.setenv("FLASH_SIM_THREADS", "1")
    for n in (1000, 10, 3000):
        out = torch.zeros(5, n + 201)
        check_call("initially", out, n, 5, source="errors")
        assert out.isnan().all()


CONFIGURATION = dict(bx=32, by=1, bz=1, gx=1, gy=1, gz=1, bytes=0, allowed=0)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(bx=1024), None),
        (dict(bx=1025), "launched with 1025 threads a block; 1 to 1024 are possible"),
        (dict(bx=33, by=32), "launched with 1056 threads a block; 1 to 1024 are possible"),
        (dict(bx=0), "launched with 0 threads a block; 1 to 1024 are possible"),
        (dict(bx=1, bz=64), None),
        (dict(bx=1, bz=65), "launched with a block of 65 threads in z; at most 64 are possible"),
        (dict(gx=0), "launched with a grid without blocks"),
        (dict(gy=65535, bx=1), None),
        (
            dict(gy=65536),
            "launched with a grid of 1 x 65536 x 1 blocks; at most 2147483647 x 65535 x 65535 are possible",
        ),
        (
            dict(gz=65536),
            "launched with a grid of 1 x 1 x 65536 blocks; at most 2147483647 x 65535 x 65535 are possible",
        ),
        (dict(bytes=48 * 1024), None),
        (
            dict(bytes=48 * 1024 + 1),
            "launched with 49153 bytes of shared memory a block; above 49152 they must first be allowed",
        ),
        (dict(bytes=227 * 1024, allowed=227 * 1024), None),
        (
            dict(bytes=227 * 1024 + 1),
            "launched with 232449 bytes of shared memory a block; at most 232448 are possible",
        ),
        (
            dict(allowed=227 * 1024 + 1),
            "cudaFuncSetAttribute: 232449 bytes of shared memory a block; at most 232448 are possible",
        ),
    ],
)
def test_launches_that_no_gpu_allows(change, message):
    error = call("configuration", *(CONFIGURATION | change).values(), source="errors")
    if message is None:
        assert error is None
    elif message.startswith("launched"):
        assert error.startswith(f"kernel dynamic_only at {here('launch')}: {message}")
    else:
        assert error == message
    # for the next test, allow no more than at first
    check_call("configuration", *(CONFIGURATION | {"allowed": 1}).values(), source="errors")


def test_static_shared_memory_above_48_kb():
    error = call("large_static", torch.zeros(1), source="errors")
    assert error.startswith(
        "kernel large_static, block (0, 0, 0), thread (0, 0, 0): __shared__ large: arrays of a fixed size "
        "may take 49152 bytes a block in all; larger ones must be dynamic"
    )


def test_static_and_dynamic_shared_memory_above_48_kb():
    assert call("static_and_dynamic", torch.zeros(1), 9152, 0, source="errors") is None
    assert (
        "the block needs 50000 bytes of shared memory; above 49152 the dynamic ones must first be allowed"
        in call("static_and_dynamic", torch.zeros(1), 10000, 0, source="errors")
    )
    assert call("static_and_dynamic", torch.zeros(1), 10000, 10000, source="errors") is None
    assert "the block needs 240000 bytes of shared memory, and has 232448" in call(
        "static_and_dynamic", torch.zeros(1), 200000, 200000, source="errors"
    )


# ------------------------------------------------------------------------------------------ types, arithmetic
def test_vector_types(device):
    threads = 37
    x = integers(threads * 4).float()
    out, layout = empty(threads, 12, device=device, dtype=torch.float32), empty(14, device=device)
    check_call("vectors", x.to(device), out, layout, threads, device=device)
    four, two = x.view(threads, 4), x[: 2 * threads].view(threads, 2)
    expected = torch.cat(
        [four.roll(1, 1), four.flip(1), two.flip(1), torch.tensor([[0.0, 1.0]]).expand(threads, 2)], 1
    )
    assert torch.equal(out.cpu(), expected)
    assert layout.tolist() == [8, 12, 16, 8, 16, 8, 16, 8, 4, 16, 8, 16, 8, 16]


def test_float_intrinsics(device):
    generator = torch.Generator().manual_seed(0)
    n = 50
    x, y = torch.randn(n, generator=generator), torch.rand(n, generator=generator) * 5 + 0.1
    out = empty(26, n, device=device, dtype=torch.float32)
    check_call("float_intrinsics", x.to(device), y.to(device), out, n, device=device)
    a, b = x.double(), y.double()
    approximate = [a.exp(), 10**a, b.log(), b.log2(), b**a, a.sin(), a.cos(), a / b, b.rsqrt()]
    exact = [a + b, a - b, a * b, a / b, a * b + a, 1 / b, b.sqrt()]  # to the last bit: rounded once
    assert torch.allclose(out[:9].cpu().double(), torch.stack(approximate), rtol=2e-5, atol=2e-6)
    assert torch.equal(out[9:16].cpu(), torch.stack(exact).float())
    assert torch.allclose(out[16].cpu().double(), b.rsqrt(), rtol=1e-6, atol=0)
    rest = [
        x.clamp(0, 1),
        x.minimum(y),
        x.maximum(y),
        x,
        y,
        x.maximum(y),
        None,
        (x * 1000).trunc(),
        torch.zeros(n),
    ]
    for i, expected in enumerate(rest):
        assert i == 6 or torch.equal(out[17 + i].cpu(), expected), i
    assert torch.allclose(out[23].cpu().double(), 2**a, rtol=1e-6, atol=0)


def test_int_intrinsics(device):
    special = torch.tensor(
        [0, 1, -1, -(2**31), 2**31 - 1, 0x00FF0100, 16777216, 16777217, 16777218, -16777219],
        dtype=torch.int32,
    )
    x = torch.cat([special, integers(40, low=-(2**31), high=2**31 - 1)])
    y = torch.cat([torch.tensor([0.5, -0.5, 1.5, 2.5, -2.5, -0.0]), torch.randn(44) * 100])
    n = len(x)
    out = empty(20, n, device=device)
    check_call("int_intrinsics", x.to(device), y.to(device), out, n, device=device)
    for t, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        u = a % 2**32
        bits = struct.unpack("i", struct.pack("f", b))[0]
        expected = [
            u.bit_count(),
            32 - u.bit_length(),
            (u & -u).bit_length(),
            int(f"{u:032b}"[::-1], 2),
            bits,
            bits,
            a & 0x7F7FFFFF,
            a & 0x7F7FFFFF,
            round(b),
            math.floor(b),
            math.ceil(b),
            math.trunc(b),
            min(a, 16777217),
            max(a, 16777217),
            max(u, 16777217),
            min(u, 16777217),
            min(a, 2**40),
            a,
            (~u >> 16 & 0xFFFF) | (u >> 16) << 16,           # bytes 6, 7, 2, 3
            (~u >> 8 & 0xFF) | (~u & 0xFF) << 8 | (u >> 8 & 0xFF) << 16 | (u & 0xFF) << 24,
        ]
        assert out[:, t].tolist() == [ctypes.c_int(e).value for e in expected], a


def test_printf(device, capfd):
    check_call("print", 1.25, device=device)
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["block 0, thread 5: 2.500 text", "block 1, thread 5: 2.500 text"]


# ---------------------------------------------------------------------------------------------------- reports
def check_that_launches_work():
    out = empty(7 * 64)
    check_call("fill", out, 4711, 7, 64, source="errors")
    assert (out == 4711).all()


DEADLOCK = "deadlock: no thread of the block can go on\n"
REPORTS = [  # by the numbers of run_waiting; {name}: the line of that comment
    "divergent_barrier, block (0, 0, 0): "
    + DEADLOCK
    + "  threads 0-2, 40-42, 80-82 wait at __syncthreads() at {divergent barrier} "
    "(9 of 96 threads are there)\n"
    "  threads 3-39, 43-79, 83-95 wait at __syncwarp() at {warp that waits}",
    "two_barriers, block (0, 0, 0): " + DEADLOCK + "  threads 34-63 have returned from the kernel\n"
    "  threads 0-6, 8-32 wait at __syncthreads() at {barrier 1} (33 of 34 threads are there)\n"
    "  threads 7 wait at __syncthreads_count() at {barrier 2} (33 of 34 threads are there)\n"
    "  threads 33 wait at __syncwarp() at {the other lane}",
    "different_operations, block (0, 0, 0), thread (7, 0, 0) at {ballot}: lanes of one warp are at different "
    "operations: __shfl_sync() at {shuffle}, and __ballot_sync() here",
    "different_masks, block (0, 0, 0), thread (1, 0, 0) at {half mask}: lanes of one warp are at different "
    "operations: __shfl_xor_sync() at {whole mask}, and __shfl_xor_sync() here (their masks differ)",
    "returned_lane, block (0, 0, 0), thread (63, 0, 0) at {returned lane}: __shfl_down_sync(): lane 2 reads "
    "lane 3, which has returned from the kernel",
    "not_in_mask, block (0, 0, 0), thread (0, 0, 0) at {own mask}: __any_sync(): the lane that calls is not "
    "in its own mask",
    "reads_outside, block (0, 0, 0), thread (15, 0, 0) at {outside}: __shfl_sync(): lane 0 reads lane 19, "
    "which is not in the mask",
    "past_the_last, block (0, 0, 0), thread (39, 0, 0) at {past}: __shfl_down_sync(): lane 4 reads lane 8, "
    "which is not in the mask",
]


@pytest.mark.parametrize("which, report", enumerate(REPORTS), ids=[r.split(",")[0] for r in REPORTS])
def test_threads_that_wait_for_ever(monkeypatch, which, report):
    monkeypatch.setenv("FLASH_SIM_THREADS", "1")
    error = call("waiting", which, empty(64), source="errors")
    assert error == "kernel " + re.sub(r"\{(.+?)\}", lambda m: here(m[1]), report)
    check_that_launches_work()


THREAD = 19  # of a block of 8 x 4: (3, 2, 0)


NO_MEMORY = r"access to address %s, which is no memory: an index out of bounds\?"
STACK_OVERFLOW = "stack overflow: local arrays take more than 128 KB a thread"
FAILURES = [  # by the numbers of run_fails: the comment on its line, what is said
    ("null", NO_MEMORY % r"\(nil\)"),
    (
        "far",
        r"access to (address 0x[0-9a-f]+, which|an address that) is no memory.*: an index out of bounds\?",
    ),
    ("atomic", NO_MEMORY % r"\(nil\)"),
    ("stack", STACK_OVERFLOW),
    ("recursion", STACK_OVERFLOW),
    ("division", "integer division by zero"),
    ("assert", r'assertion failed: zero == 1 && "a reason"'),
    ("trap", r"__trap\(\)"),
    (None, r"C\+\+ exception: thrown"),
    (None, r"C\+\+ exception"),
    ("arena", NO_MEMORY % "0x[0-9a-f]+"),
]


@pytest.mark.parametrize(
    "which, line, message",
    [(i, *f) for i, f in enumerate(FAILURES)],
    ids=[line or "exception" for line, _ in FAILURES],
)
def test_threads_that_fail(monkeypatch, which, line, message):
    """The report names kernel, block, thread and line; Python lives on, and so does the simulator."""
    if which == 5 and platform.machine() != "x86_64":
        pytest.skip("this CPU divides by zero without complaint")
    monkeypatch.setenv("FLASH_SIM_THREADS", "1")
    for _ in range(2):
        error = call("fails", which, THREAD, torch.zeros(1, dtype=torch.int32), source="errors")
        place = f" at {here(line)}" if line else ""
        start = re.escape(f"kernel fails, block (0, 0, 0), thread (3, 2, 0){place}: ")
        assert re.fullmatch(start + message, error), error
        check_that_launches_work()


def test_errors_stay_until_they_are_read():
    run = library("errors", "cpu").run_sticky
    assert run(ctypes.c_void_p(torch.zeros(1, dtype=torch.int32).data_ptr())) == 0b11111


def test_an_assert_of_the_host_does_not_end_python():
    """It is an error of CUDA's: reported, and no later kernel is launched until it is read."""
    out = torch.zeros(1, dtype=torch.int32)
    error = call("host_assert", out, source="errors")
    assert error == f"host code at {here('host assert')}: assertion failed: out == nullptr"
    assert out.item() == 0
    check_that_launches_work()


@pytest.mark.parametrize("os_threads", ["1", "2"])
def test_workers_are_used_anew_after_errors(monkeypatch, os_threads):
    monkeypatch.setenv("FLASH_SIM_THREADS", os_threads)
    for round_, threads in enumerate((32, 1024, 64, 512) * 2):
        assert "deadlock" in call("waiting", 0, empty(64), source="errors")
        sums, expected = reduction(threads=threads, seed=round_)
        assert sums == expected
        assert "stack overflow" in call("fails", 3, 30, empty(1), source="errors")
        assert "C++ exception: thrown" in call("fails", 8, 1, empty(1), source="errors")
        check_that_launches_work()


# -------------------------------------------------------------------------------------------- several at once
def test_the_number_of_cores_changes_nothing(monkeypatch):
    results = []
    for os_threads in ("1", "2", "5"):
        monkeypatch.setenv("FLASH_SIM_THREADS", os_threads)
        q, k, v = torch.randn(3, 2, 2, 50, 24, generator=torch.Generator().manual_seed(0))
        results.append(flash.attention(q, k, v, causal=True, stage="flash2", return_lse=True))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


def test_launches_from_two_python_threads(monkeypatch):
    """Each gets its own results, and its own errors."""
    monkeypatch.setenv("FLASH_SIM_THREADS", "2")
    library("errors", "cpu"), library("semantics", "cpu")
    wrong, start = [], threading.Barrier(2)

    def work(number):
        start.wait()
        for i in range(30):
            sums, expected = reduction(threads=(256, 64)[number], seed=100 * number + i)
            if sums != expected:
                wrong.append((number, i, "sums"))
            error = call("fails", (7, 0)[number], THREAD, torch.zeros(1, dtype=torch.int32), source="errors")
            if ("__trap()", "which is no memory")[number] not in error:
                wrong.append((number, i, error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ----------------------------------------------------------------------------------------------------- Ctrl-C
ENDLESS = """
import ctypes, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)   # a background process starts without
library, which, blocks, threads = ctypes.CDLL(sys.argv[1]), *map(int, sys.argv[2:])
x = (ctypes.c_int * 1024)()
for function in (library.run_endless, library.run_fill):
    function.restype = ctypes.c_char_p
print("started", flush=True)
try:
    print(library.run_endless(which, x, blocks, threads), flush=True)
finally:
    assert library.run_fill(x, 42, 2, 64) is None and list(x)[:129] == [42] * 128 + [0]
    print("and launches work", flush=True)
"""


@pytest.mark.parametrize("os_threads", ["1", "2"])
@pytest.mark.parametrize(
    "which, threads",
    [(0, 64), (1, 64), (1, 1), (2, 64), (2, 1), (3, 64), (4, 64), (5, 64), (6, 64), (7, 64)],
    ids=lambda x: str(x),
)
def test_ctrl_c_ends_an_endless_loop(which, threads, os_threads):
    """A plain loop, barriers, barriers of a lone thread, __syncwarp, expf and logf, atomics, shuffles,
    printf, a loop that does nothing."""
    command = [sys.executable, "-c", ENDLESS, library("errors", "cpu")._name, str(which), "5", str(threads)]
    environment = os.environ | {
        "FLASH_SIM_THREADS": os_threads,  # and to load it without importing torch:
        "LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib"),
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "started\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in error and process.returncode != 0
    assert out == "and launches work\n"


# -------------------------------------------------------------------------------------------------------- gdb
DEBUGGED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, flash
flash.attention(*torch.randn(3, 1, 2, 128, 64), stage="flash2")
"""


@pytest.mark.skipif(not shutil.which("gdb"), reason="gdb is not installed")
@pytest.mark.slow
def test_gdb_stops_in_a_stage_at_a_thread():
    stage = flash.STAGES / "fwd_04_flash2.cuh"
    line = next(i for i, text in enumerate(stage.read_text().splitlines(), 1) if "S_reg[r][c] +=" in text)
    commands = [
        "set breakpoint pending on",
        f"break {stage.name}:{line} if threadIdx.x == 37 && blockIdx.x == 1",
        "run",
        "print threadIdx.x",
        "print blockIdx.x",
        "print warp",
        "print lane",
        "print rows",
        "bt 3",
        "kill",
    ]
    arguments = [argument for command in commands for argument in ("-ex", command)]
    process = subprocess.run(
        ["gdb", "-nx", "-batch", *arguments, "--args", sys.executable, "-c", DEBUGGED, str(flash.ROOT)],
        env=os.environ | {"FLASH_DEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    out = process.stdout + process.stderr
    if "ptrace" in out and "hit Breakpoint" not in out:
        pytest.skip("gdb may not trace processes here")
    stopped = rf"hit Breakpoint 1, forward_kernel \(p=.*\) at {re.escape(str(stage))}:{line}\n"
    assert re.search(stopped, out), out
    assert re.search(rf"^{line}\s.*S_reg\[r\]\[c\] \+=", out, re.M)
    for number, value in enumerate((37, 1, 1, 5), 1):
        assert re.search(rf"^\${number} = {value}$", out, re.M), out
    assert re.search(r"^#0  forward_kernel", out, re.M)
