"""Clusters: blocks that reach into each other, their barrier, and copies for several of them."""

import contextlib
import ctypes
import functools

import pytest
import torch
from test_hopper import call_in, needs_sm90
from test_simulator import KERNELS, empty, simulator_only

import flash

pytestmark = needs_sm90


@functools.cache
def library(device: str, checked: bool) -> ctypes.CDLL:
    return ctypes.CDLL(str(flash.build(KERNELS / "cluster.cu", torch.device(device), checked=checked)))


def call(function: str, *arguments, device: str = "cpu", checked: bool = False) -> str | None:
    return call_in(library(device, checked), function, *arguments, device=device)


def check(function: str, tensors: dict, out: torch.Tensor, expected, *numbers, device: str) -> None:
    """As it is; and, on the CPU, under the checker, which has nothing to say."""
    there = {name: x.to(device) for name, x in tensors.items()}
    assert call(function, *there.values(), out, *numbers, device=device) is None
    assert torch.equal(out.cpu(), expected)
    if device == "cpu":
        again = torch.zeros_like(out)
        with flash.inspect(**there, out=again) as report:
            assert call(function, *there.values(), again, *numbers, checked=True) is None
        assert report.findings == [] and torch.equal(again, expected)


@pytest.mark.parametrize("grid, cluster", [((4, 1), (2, 1)), ((8, 1), (8, 1)), ((4, 4), (2, 2))])
def test_ranks_and_shared_memory_of_others(device, schedule, grid, cluster):
    blocks = grid[0] * grid[1]
    x = torch.randint(-1000, 1000, (grid[1], grid[0], 64), generator=torch.Generator().manual_seed(0)).int()
    ranks = torch.zeros(blocks, dtype=torch.int32, device=device)
    tiles = x.view(grid[1] // cluster[1], cluster[1], grid[0] // cluster[0], cluster[0], 64)
    expected = tiles.sum((1, 3), keepdim=True).expand_as(tiles).reshape(x.shape).flip(2).int()
    check("sums", {"x": x, "ranks": ranks}, empty(*x.shape, device=device), expected, *grid, *cluster,
          device=device)
    assert call("sums", x.to(device), ranks, empty(*x.shape, device=device), *grid, *cluster,
                device=device) is None
    y, col = torch.meshgrid(torch.arange(grid[1]), torch.arange(grid[0]), indexing="ij")
    assert ranks.tolist() == (col % cluster[0] + y % cluster[1] * cluster[0]).flatten().tolist()


@pytest.mark.parametrize("count", [1, 6])
def test_writes_to_another_block(device, schedule, count):
    x = torch.arange(64).int().view(2, 32)
    expected = 2**count * (x.flip(0) if count % 2 else x)
    check("exchange", {"x": x}, empty(2, 32, device=device), expected, count, device=device)


@pytest.mark.parametrize("tiles", [1, 5])
def test_multicast(device, schedule, tiles):
    x = torch.randint(-8, 8, (tiles, 16, 64), generator=torch.Generator().manual_seed(0)).half()
    weights = torch.arange(tiles)[None, :, None] + torch.arange(2)[:, None, None] + 1
    expected = (x.float().sum(1)[None] * weights).sum(1)
    check("multicast", {"x": x}, empty(2, 64, dtype=torch.float32, device=device), expected, tiles,
          device=device)


@pytest.mark.parametrize("clusters, all_work", [(1, 1), (1, 6), (3, 2), (3, 50)])
def test_tickets(device, schedule, clusters, all_work):
    """Each piece of work is had once, by both blocks of one cluster."""
    out = torch.zeros(2, all_work, dtype=torch.int32, device=device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    with flash.inspect(counter=counter, out=out) if device == "cpu" else contextlib.nullcontext() as report:
        assert call("draw", counter, out, clusters, all_work, device=device, checked=device == "cpu") is None
    assert (out == 1).all() and not (report and report.findings), report


@pytest.mark.parametrize("count", [1, 2, 5])
def test_send(device, schedule, count):
    x = torch.randint(-100, 100, (2, 128), generator=torch.Generator().manual_seed(0)).int()
    expected = 2 ** (count - 1) * x.sum(0, keepdim=True).expand(2, -1).int()
    check("send", {"x": x}, empty(2, 128, device=device), expected, count, device=device)


ERRORS = [
    "in_block(): block 2 of a cluster of 2",
    "in_block(): this is not in the block's shared memory",
    "cluster_wait(): the thread has not arrived",
    "of barrier, which is in its phase 0: 1 of 1 arrivals are missing",
    "mbarrier_arrive_in_block(): block 1 of the cluster has ended already",
    "clusters of 2 x 1 x 1 blocks; 8 are possible, and the grid must be a multiple",
    "cluster_arrive(): the kernel has been launched without clusters",
    "bulk_send(): the address in shared memory must be a multiple of 16",
    "bulk_send(): 20 bytes; a multiple of 16 is possible",
    "bulk_send(): block 2 of a cluster of 2",
    "bulk_send(): block 1 has not initialised this mbarrier",
    "bulk_send(): 16 bytes from here on are not in shared memory",
]


@simulator_only
@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_mistakes(device, number):
    source = KERNELS / "cluster.cu"
    lines = [f"{source}:{n}" for n, line in enumerate(source.read_text().splitlines(), 1)
             if line.endswith(f"// HERE: {number}")]
    error = call("mistake", number, torch.zeros(1, dtype=torch.int32))
    assert ERRORS[number] in error and all(line in error for line in lines), error


@simulator_only
def test_traffic_of_a_multicast(device):
    """HBM is read once for both blocks."""
    x, out = torch.ones(3, 16, 64).half(), torch.zeros(2, 64)
    with flash.inspect(x=x, out=out) as report:
        assert call("multicast", x, out, 3, checked=True) is None
    assert report.traffic()["x"].read == x.nbytes
    written = [a.bytes for a in report.accesses if a.kind == "tma write"]
    assert sum(written) == 2 * x.nbytes


@simulator_only
def test_a_blocks_rank_is_in_its_addresses(device, tmp_path):
    """As on an H100: where it comes into descriptors, dV of every second block is wrong, and dQ right, whose
    operands are one panel wide."""
    stage = next(s for s in flash.stages("bwd") if s.name == "exchanged_ds")
    mutant = tmp_path / "bwd_24_exchanged_ds.cuh"
    mutant.write_text(stage.path.read_text().replace("matrix_at<2>(", "matrix_at("))
    q, k, v, do = (torch.randn(1, 1, N, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
                   for seed, N in enumerate((64, 128, 128, 64)))
    found = []
    for backward in (stage, mutant):
        x = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        found.append(torch.autograd.grad(flash.attention(*x, backward=backward), x, do))
    (dq, dk, dv), wrong = found
    assert torch.equal(wrong[0], dq) and torch.equal(wrong[2][:, :, :64], dv[:, :, :64])
    assert not torch.equal(wrong[1][:, :, 64:], dk[:, :, 64:])
    assert not torch.equal(wrong[2][:, :, 64:], dv[:, :, 64:])
