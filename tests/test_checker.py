"""flash.inspect() finds what is wrong, at the right line, and nothing in what is right; and it counts right.

kernels/wrong.cu has the wrong kernels, each with a right twin; the counts are compared with those of an H200.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    check,
    check_gradients,
    is_end,
    qkv_with_gaps,
    random_gradients,
    random_qkv,
    reference,
    tile_sizes,
    with_gaps,
)

import flash
from flash_ladder import plan
from flash_ladder.arithmetic import evaluate
from flash_ladder.grid import SIDE_BRANCH, WRITERS

sys.path.insert(0, str(flash.ROOT / "results"))
import counts  # noqa: E402

WRONG = Path(__file__).parent / "kernels" / "wrong.cu"
BANKS = Path(__file__).parent / "kernels" / "banks.cu"
STAGES = flash.stages("fwd")
BY_NAME = {stage.name: stage for stage in STAGES}
BACKWARD = {stage.name: stage for stage in flash.stages("bwd")}
CASES = re.findall(r"case (\d+): (\w+)<<<.*fixed", WRONG.read_text())
NUMBERS = {name: int(number) for number, name in CASES}
SCHEDULES = [("", "late"), ("1", "early"), ("2", "random")]   # FLASH_SIM_SEED, FLASH_SIM_COPIES


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(flash.build(source, torch.device("cpu"), checked=True)))


def call(source: Path, function: str, *arguments, **arrays: torch.Tensor):
    """(report, error) of run_<function> of a checked library."""
    run = getattr(library(source), f"run_{function}")
    run.restype = ctypes.c_char_p
    with flash.inspect(**arrays) as report:
        error = run(*(ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else ctypes.c_int(x)
                      for x in arguments))
    return report, error and error.decode()


def run_wrong(name: str, fixed: bool):
    x, out, count = torch.randn(200), torch.zeros(200), torch.zeros(1, dtype=torch.int32)
    return call(WRONG, "wrong", NUMBERS[name], x, out, count, int(fixed), x=x, out=out, count=count)


def lines_of(name: str) -> set[int]:
    """The lines of the comments "// HERE: name" or "// HERE: name 1" in wrong.cu."""
    lines = enumerate(WRONG.read_text().splitlines(), 1)
    return {number for number, line in lines if re.search(rf"// HERE: {name}( \d)?$", line)}


def set_schedule(monkeypatch, seed: str, copies: str) -> None:
    """The order of threads and blocks, and when copies by cp.async are made."""
    monkeypatch.setenv("FLASH_SIM_SEED", seed)
    monkeypatch.setenv("FLASH_SIM_COPIES", copies)


# ------------------------------------------------------------------------------------------ what is wrong
WRONG_KERNELS = [  # name, what is found, on which element
    ("barrier_before_use", "race", r"tile\[\d+\]"),
    ("barrier_after_use", "race", r"tile\[\d+\]"),
    ("barrier_too_early", "race", r"tile\[1\]\[\d+\]"),
    ("syncwarp_missing", "race", r"rows\[[01]\]\[\d+\]"),
    ("syncwarp_of_half", "race", r"row\[\d+\]"),
    ("syncwarp_across_warps", "race", r"tile\[\d+\]"),
    ("same_buffer", "race", r"tile\[[01]\]\[\d+\]"),
    ("sum_without_atomic", "race", "sum"),
    ("read_beside_atomic", "race", "sum"),
    ("shared_off_by_one", "out of bounds", r"a\[64\], outside of its 64 elements"),
    ("dynamic_too_small", "out of bounds",
     r"B_smem\[63\], outside of the 508 bytes of dynamic shared memory"),
    ("tile_not_filled", "uninitialised", r"tile\[[567]\]\[\d\]"),
    ("off_by_one", "out of bounds", r"out\[200\], outside of its shape \(200,\)"),
    ("before_the_start", "out of bounds", r"x\[-1\], outside of its shape \(200,\)"),
    ("wild_pointer", "out of bounds", ""),
    ("same_address", "race", r"out\[\d+\]"),
    ("reads_neighbour", "race", r"out\[\d+\]"),
    ("fence_missing", "race", r"out\[\d+\]"),
    ("misaligned", "misaligned", r"x\[\d+\]"),
    ("barrier_for_some", "deadlock", ""),
    ("barrier_in_loop", "deadlock", ""),
    ("two_barriers", "barrier", ""),
    ("write_after_two_reads", "race", r"tile\[\d+\]"),
    ("copied_by_memcpy", "race", r"tile\[\d+\]\[\d+\]"),
    ("barrier_in_reduction", "race", r"sums\[\d+\]"),
    ("fence_by_all", "race", r"out\[\d+\]"),
    ("read_after_own_atomic", "race", r"out\[0\]"),
    ("shared_atomic_between_blocks", "race", r"out\[0\]"),
    ("row_past_the_end", "out of bounds", r"a\[8\]\[\d+\], outside of its 8 x 33 elements"),
    ("vector_past_the_end", "out of bounds", r"count\[0\]"),
    ("barrier_before_atomic", "race", "sum"),
    ("read_before_atomic", "race", "sum"),
    ("atomic_of_a_third", "race", "sum"),
    ("ldmatrix_before_syncwarp", "race", r"rows\[\d+\]\[\d\]"),
    ("ldmatrix_of_nothing", "uninitialised", r"rows\[15\]\[0\]"),
    ("ldmatrix_past_the_end", "out of bounds", r"rows\[16\]\[0\], outside of its 16 x 4 elements"),
    ("stmatrix_before_syncwarp", "race", r"rows\[\d+\]\[\d\]"),
    ("copy_not_waited_for", "race", r"tile\[\d+\]"),
    ("copy_waited_for_too_late", "race", r"tile\[\d+\]"),
    ("copy_of_a_later_group", "race", r"tile\[2\]\[\d+\]"),
    ("copy_over_what_is_read", "race", r"tile\[\d+\]"),
    ("write_over_a_copy", "race", r"tile\[\d+\]"),
    ("two_copies_to_one_place", "race", r"tile\[\d+\]"),
    ("copy_from_past_the_end", "out of bounds", r"x\[2\d\d\], outside of its shape \(200,\)"),
    ("shared_before_the_start", "out of bounds", r"a\[-1\], outside of its 64 elements"),
    ("row_before_the_start", "out of bounds", r"a\[-1\]\[\d+\], outside of its 2 x 32 elements"),
    ("dynamic_before_the_start", "out of bounds",
     r"A_smem\[-1\], outside of the 256 bytes of dynamic shared memory"),
    ("vector_past_the_end_of_shared", "out of bounds", r"a\[60\]"),
]
ENDS_THE_LAUNCH = {"off_by_one", "before_the_start", "wild_pointer", "barrier_for_some", "barrier_in_loop",
                   "vector_past_the_end", "copy_from_past_the_end", "dynamic_before_the_start"}
OWN_COPY = {"copy_not_waited_for", "write_over_a_copy", "two_copies_to_one_place"}  # of the same thread


def test_every_wrong_kernel_is_tested():
    assert [name for name, _, _ in WRONG_KERNELS] == list(NUMBERS) and len(NUMBERS) >= 12


@pytest.mark.parametrize("seed, copies", SCHEDULES)
@pytest.mark.parametrize("name, what, element", WRONG_KERNELS, ids=[case[0] for case in WRONG_KERNELS])
def test_wrong_kernel(monkeypatch, name, what, element, seed, copies):
    """Found under every schedule, also where the result happens to be right."""
    set_schedule(monkeypatch, seed, copies)
    report, error = run_wrong(name, fixed=False)
    found = [f for f in report.findings if f.what == what]
    assert found, report.findings
    assert all(f.what in (what, "uninitialised") for f in report.findings), "beside it, only what it leads to"
    assert {place.line for f in found for place in f.places} == lines_of(name)
    for f in found:
        assert f.kernel == name and {Path(place.file) for place in f.places} == {WRONG}
        assert re.fullmatch(element, f.element), f.element
        assert f.element in f.message and name in f.message
        assert all(str(place) in f.message for place in f.places)
        if what == "race":
            (a, b) = f.parties
            assert ((a.block, a.thread) == (b.block, b.thread)) == (name in OWN_COPY)
            assert "read" not in (a.kind, b.kind) or a.kind != b.kind
    assert bool(error) == (name in ENDS_THE_LAUNCH), error


@pytest.mark.parametrize("seed, copies", SCHEDULES)
@pytest.mark.parametrize("name", NUMBERS)
def test_its_right_twin(monkeypatch, name, seed, copies):
    set_schedule(monkeypatch, seed, copies)
    report, error = run_wrong(name, fixed=True)
    assert (report.findings, error) == ([], None)
    assert report.kernels[0].name == name and report.kernels[0].thread_accesses > 0


def test_races_between_lanes_and_their_threads():
    report, _ = run_wrong("same_address", fixed=False)
    (race,) = report.findings
    assert [p.block for p in race.parties] == [(0, 0, 0), (1, 0, 0)]
    assert race.parties[0].thread == race.parties[1].thread and race.count == 32
    report, _ = run_wrong("shared_off_by_one", fixed=False)
    assert report.findings[0].parties[0].thread == (63, 0, 0) and report.findings[0].count == 1


def test_right_but_odd():
    """Bytes and halves of one word that belong to different threads, structs, __device__ variables."""
    small, out = torch.randint(100, (64,), dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    threes, halves = torch.randn(64, 3), torch.randint(1000, (64,), dtype=torch.int16)
    expected = threes.flip(0), halves.flip(0)
    report, error = call(WRONG, "odd_but_right", small, out, threes, halves, bytes=small, out=out,
                         threes=threes, halves=halves)
    assert (report.findings, error) == ([], None)
    assert torch.equal(threes, expected[0]) and torch.equal(halves, expected[1])
    traffic = report.traffic()
    assert {name: (t.read, t.unique_read, t.written, t.unique_written) for name, t in traffic.items()} == {
        "bytes": (64, 64, 0, 0), "out": (0, 0, 64, 64), "threes": (768,) * 4, "halves": (128,) * 4}
    assert {a.array: a.unique for a in report.accesses if (a.memory, a.kind) == ("HBM", "read")} == {
        "bytes": 64, "threes": 768, "halves": 128}


def test_a_kernel_that_starts_before_the_last_one_ends():
    """Of what that one uses it may touch nothing before it has waited: 40 threads have not."""
    def run(fixed):
        x, out = torch.randn(64), torch.zeros(128)
        return call(WRONG, "too_early", x, out, fixed, x=x, out=out)

    assert (run(1)[0].findings, run(1)[1]) == ([], None)
    report, error = run(0)
    assert error is None and {f.what for f in report.findings} == {"too early"}
    assert {(f.element.partition("[")[0], f.parties[-1].kind): f.count for f in report.findings} == {
        ("x", "write"): 40, ("out", "read"): 40}
    assert {place.line for f in report.findings for place in f.places} == lines_of("too_early")
    assert "wait_for_previous_kernel() must come first" in report.findings[0].message


FIRST, TOO = "wait_for_previous_kernel() must come first", "the one before must call"


@pytest.mark.parametrize("between, waiting_blocks, expected", [
    (0, 0, {FIRST: 128}), (0, 1, {TOO: 128}), (0, 2, {TOO: 128}),
    (1, 0, {}), (1, 2, {}), (2, 0, {FIRST: 128}), (2, 1, {FIRST: 64}), (2, 2, {}), (3, 0, {}), (3, 2, {})])
def test_a_kernel_that_starts_before_the_last_but_one_ends(between, waiting_blocks, expected):
    """That one has ended if the kernel between has waited for it, and let this one start only then; or if
    both wait. (A block of `between` that has waited is enough; of this one each must.)"""
    x, out = torch.randn(64), torch.zeros(192)
    report, error = call(WRONG, "two_back", x, out, between, waiting_blocks, x=x, out=out)
    assert error is None and torch.equal(out[64:], x.repeat(2))
    assert {(f.what, f.kernel) for f in report.findings} <= {("too early", "reads_two_back")}
    assert expected == {
        remedy: f.count for f in report.findings for remedy in (FIRST, TOO) if remedy in f.message}
    assert {place.line for f in report.findings for place in f.places} <= lines_of("two_back")


def test_all_of_shared_memory():
    x, out = torch.randn(64), torch.zeros(64)
    report, error = call(WRONG, "all_of_shared_memory", x, out, 227 * 1024 - 1024, x=x, out=out)
    assert (report.findings, error) == ([], None)
    assert torch.allclose(out, x.flip(0) + x + x[torch.arange(64) % 60] + 2 + 2)
    assert report.kernels[0].shared_bytes <= 227 * 1024
    q, k, v = random_qkv(1, 1, 1, 64, 64, 64, "cpu")
    check(*flash.attention(q, k, v, return_lse=True), q, k, v)   # unwatched, in the same memory


def test_many_fences():
    count = torch.zeros(1, dtype=torch.int32)
    start = time.perf_counter()
    report, error = call(WRONG, "fences", count, count=count)
    assert (report.findings, error, count.item()) == ([], None, 20 * 64 * 4)
    assert time.perf_counter() - start < 20


def test_messages_say_what_to_do():
    (race,) = {f.message for f in run_wrong("barrier_in_reduction", False)[0].findings}
    assert "a barrier between them" in race and "in a loop between its rounds" in race
    assert "__threadfence()" in run_wrong("fence_missing", False)[0].findings[0].message
    assert "or use atomics" in run_wrong("sum_without_atomic", False)[0].findings[0].message
    assert "8 bytes from count[0] on" in run_wrong("vector_past_the_end", False)[0].findings[0].message
    shared = run_wrong("vector_past_the_end_of_shared", False)[0].findings[0].message
    assert "reads 16 bytes from a[60] on, not all of them in its shape" in shared
    syncwarp = run_wrong("syncwarp_missing", False)[0].findings[0].message
    assert "__syncwarp() if only threads of one warp share it" in syncwarp


def test_findings_that_are_not_kept():
    """Said, if there are any: 100 instructions are the most, here of ten lines; an eleventh has one more."""
    for lines, findings, more in ((0, 0, False), (10, 10, False), (11, 10, True)):
        report, _ = call(WRONG, "many_mistakes", out := torch.zeros(1), lines, out=out)
        assert [f.what for f in report.findings] == ["uninitialised"] * findings
        assert report.more_findings is report.to_dict()["more_findings"] is more
        assert ("and more that are not kept" in str(report)) == more


@pytest.mark.parametrize("x, offset, expected", [
    (torch.zeros(2, 3), 16, "x[1, 1]"), (torch.zeros(1), 4, "x[1], outside"),
    (torch.zeros(5, 1).t(), 12, "x[0, 3]"), (torch.zeros(4, 6)[:, ::2], 8, "x[0, 1]"),
    (torch.zeros(3).expand(2, 3), 8, "x[0, 2]")])
def test_names_of_elements(x, offset, expected):
    with flash.inspect(x=x) as report:
        pass
    assert report._arrays[0].element(offset).startswith(expected)


# ------------------------------------------------------------------------------------------ what it costs
def one_access(report, memory: str, kind: str, name: str):
    (access,) = [a for a in report.accesses if (a.memory, a.kind) == (memory, kind) and
                 a.place.line in lines_of(name)]
    return access


def run_cost(number: int, n: int = 64):
    x, out = torch.randn(4096), torch.zeros(4096)
    report, error = call(WRONG, "cost", number, x, out, n, x=x, out=out)
    assert (report.findings, error) == ([], None)
    return report


@pytest.mark.parametrize("number, name, ways", [(0, "unpadded", 32), (1, "padded", 1)])
def test_bank_conflicts_of_a_transpose(number, name, ways):
    access = one_access(run_cost(number), "shared", "read", name)
    assert (access.units_per_request, access.ways, access.worst) == (ways, ways, ways)
    assert access.requests == 64 * 64 // 32 and access.array == "tile"
    banks = {address // 4 % 32 for address in access.example.values()}
    assert len(banks) == 32 // ways


def test_sectors():
    report = run_cost(2)
    read, written = (one_access(report, "HBM", kind, "strided") for kind in ("read", "write"))
    assert (read.units_per_request, written.units_per_request) == (4, 32)
    assert read.ideal == written.ideal == 4 * read.requests
    assert report.traffic()["out"].moved == 8 * report.traffic()["out"].written == 8 * 64 * 64 * 4
    for number, name, sectors, ideal, size in ((3, "float4", 16, 16, 16), (4, "every second", 4, 2, 4),
                                               (5, "shifted", 5, 4, 4)):
        access = one_access(run_cost(number), "HBM", "read", name)
        assert (access.requests, access.units_per_request, access.ideal, access.access_bytes) == (
            2, sectors, 2 * ideal, size)


def test_vectors_in_shared_memory():
    report = run_cost(6, n=4)
    expected = {"vectors in a row": ("write", 4, 4), "vectors in a column": ("read", 16, 4),
                "one vector for all": ("read", 2, 2)}
    for name, (kind, units, ideal) in expected.items():
        access = one_access(report, "shared", kind, name)
        assert (access.units, access.ideal, access.requests) == (units, ideal, 1), name


def test_banks_as_measured():
    """Every pattern of indices takes as many wavefronts as on an H200 (results/h200/banks.json)."""
    measured = json.loads((flash.ROOT / "results" / "h200" / "banks.json").read_text())["patterns"]
    patterns = counts.patterns()
    assert list(measured) == list(patterns) and len(patterns) > 50
    for (name, indices), size in itertools.product(patterns.items(), (4, 8, 16)):
        index, out = torch.tensor(indices, dtype=torch.int32), torch.zeros(32 * size // 4)
        report, error = call(BANKS, "banks", size, index, out, index=index, out=out)
        assert error is None
        store, load = (sum(a.units for a in report.accesses if (a.memory, a.kind) == ("shared", kind))
                       for kind in ("write", "read"))
        assert [store, load] == measured[name][str(size)], f"{size} bytes at {name}"


# ------------------------------------------------------------------------------------------ stages: counts
@functools.cache
def inspected(stage: str, N: int):
    """The report of a stage: B=1 H=2 d=64, not causal, its default tiles. Its result is right."""
    q, k, v = random_qkv(1, 2, 2, N, N, 64, "cpu", BY_NAME[stage].dtypes[0])
    with flash.inspect() as report:
        o, lse = flash.attention(q, k, v, stage=stage, return_lse=True)
    check(o, lse, q, k, v)
    return report


def inspected_backward(stage, q, k, v, diagonal=None, **tiles):
    """The report of a backward stage, from dO with gaps, and with dL. Its result is right, if it is one of
    the repository's."""
    o, lse = reference(q.double(), k.double(), v.double(), diagonal)
    o, lse = o.to(q.dtype), lse.float()
    do, dlse = random_gradients(q)
    options = plan.choose(stage, q, "bwd", **tiles)
    with flash.inspect() as report:
        gradients = plan.backward(q, k, v, o, lse, with_gaps(do, 1), dlse, diagonal, None, *options, False)
    if isinstance(stage, str):
        check_gradients(gradients, q, k, v, do, diagonal, None, dlse)
    return report


def knows_its_shared_memory(stage, report, d: int, **tiles) -> bool:
    """Whether the header states the bytes that the largest of the kernels has, but for their rounding."""
    stated = evaluate(stage.shared, d=d, **tiles)
    return max(kernel.shared_bytes for kernel in report.kernels) == -(-stated // 16) * 16


@functools.cache
def inspected_group(stage: str, N: int):
    """The report of a backward stage: two query heads share a key head, d=64, not causal, default tiles."""
    return inspected_backward(stage, *random_qkv(1, 2, 1, N, N, 64, "cpu", BACKWARD[stage].dtypes[0]))


def parts(N: int, size: int) -> list[int]:
    """How many of N rows or columns each tile of this size has: the last one what is left."""
    return [min(size, N - first) for first in range(0, N, size)]


def derived_bytes(stage: str, N: int, d: int, Br: int, Bc: int) -> int:
    """HBM bytes of one head by following the algorithm: what each warp or tile reads and writes."""
    numbers = 0
    tiles_of_q, tiles_of_k = parts(N, Br), parts(N, Bc)
    if stage == "naive":
        for keys in N * parts(N, 32):            # warps of one query and 32 keys
            numbers += d * (1 + keys) + keys     # Q: one number for all lanes; K; S
        numbers += N * N * (1 + 1 + 1 + 1) + N   # S read three times, P; L
        for columns in N * parts(d, 32):         # warps of one query and 32 columns
            numbers += N * (1 + columns) + columns       # P: one number for all lanes; V; O
    elif stage == "tiled":
        for rows, keys in itertools.product(tiles_of_q, tiles_of_k):
            numbers += rows * d + keys * d + rows * keys     # Q_i, K_j, S_ij
        numbers += N * N * (1 + 1 + 1 + 1) + N
        for rows in tiles_of_q:
            numbers += sum(keys * d + rows * keys for keys in tiles_of_k) + rows * d     # V_j, P_ij; O_i
    elif stage == "online_softmax":
        numbers += N * d + 2 * N                      # O, m, l set
        for keys in tiles_of_k:
            numbers += 2 * keys * d                   # K_j, V_j
            for rows in tiles_of_q:
                numbers += rows * d + 2 * (rows * d + 2 * rows)      # Q_i; O_i, m_i, l_i read and written
        numbers += 3 * N                              # m, l, L
    else:                                             # FlashAttention-2
        for rows in tiles_of_q:
            numbers += 2 * rows * d + sum(2 * keys * d for keys in tiles_of_k)       # Q_i, O_i; K_j, V_j
        splits, merged = len(tiles_of_k), 0
        if stage.startswith("split_kv") and splits > 1:  # a block for each key tile: Q_i each time, L_s, O_s
            numbers += (splits - 1) * N * d              # both written, and read, four at a time
            merged = splits * (1 + d) + splits + 4 * (1 + d)
        if stage == "stream_k":                          # tiles that are cut: Q_i again, O_i in float
            rest, several = 2 * len(tiles_of_q) % 3, 2 * len(tiles_of_q) > 3         # three blocks, two heads
            cut = several * sum(r * rest % 3 * len(tiles_of_k) >= 3 for r in (1, 2))
            numbers += cut * (Br * d + 2 * 2 * Br * d) // 2          # it is written and read
        return BY_NAME[stage].dtypes[0].itemsize * numbers + 4 * N * (1 + merged)    # L
    return 4 * numbers


UNITS = ("exchanged_group", "exchanged_stream_k")        # dK and dV are summed over heads on chip

# These read K as it is, and once more to transpose it
KEYS_TWICE = ("register_tiles", "vectorized", "conflict_free", "fp32_tuned")


def derived_backward_bytes(stage: str, N: int, d: int, Br: int, Bc: int) -> int:
    """The same of a backward stage, for two query heads that share a key head."""
    numbers = 0
    tiles_of_k, tiles_of_q = parts(N, Bc), 2 * parts(N, Br)
    if stage == "naive":
        for keys in 2 * N * parts(N, 32):        # warps of one query and 32 keys
            numbers += 2 * d * (1 + keys) + 2 * keys     # Q, dO: one number for all lanes; K, V; S, dP
        numbers += 2 * N * (N * (4 + 1 + 2 + 1) + 1)     # S read four times, P; dP read twice, dS; dL
        for columns in 2 * N * parts(d, 32):     # warps of one query and 32 columns
            numbers += N * (1 + columns) + columns       # dS: one number for all lanes; K; dQ
        for columns in N * parts(d, 32):         # warps of one key and 32 columns
            numbers += 2 * N * 2 * (1 + columns) + 2 * columns       # of two heads: P, dS; dO, Q; then dV, dK
    elif torch.float32 not in BACKWARD[stage].dtypes:    # most numbers have 2 bytes
        bytes_ = 2 * N * (2 * 2 * d + (2 + 1) * 4)       # O, dO; L, dL; D
        whole = [Br for _ in tiles_of_q]                 # tiles, past row N
        like = dict.fromkeys(("tma", "wgmma", "warp_specialized"), "cp_async")
        like |= dict.fromkeys(("tma_reduce", "overlap", "seeded", "dq_by_turns", *SIDE_BRANCH[:3]), "late_dq")
        in_order = ["mma", "transposed", "split_warps", "cp_async", "late_dq", "split_heads"]
        name = like.get(stage, stage)
        rung = in_order.index(name) if name in in_order else len(in_order)
        prepared, late, heads = (rung >= in_order.index(name)
                                 for name in ("cp_async", "late_dq", "split_heads"))
        for keys in tiles_of_k:
            if stage in UNITS:                           # K_j, V_j; dK_j, dV_j, also in float, whole tiles;
                times = 1 + (stage == UNITS[1])          # the one that there is has two clusters
                bytes_ += times * (2 * keys * d * 2 + 2 * (Bc + keys) * d * 4) + 2 * keys * d * 2
            elif heads:                                  # K_j, V_j for each of the heads; their dK_j, dV_j
                bytes_ += 2 * (2 * keys * d * 2 + 2 * keys * d * 4)      # in float are read and added up
                bytes_ += 2 * keys * d * 2 + 2 * (2 * keys * d * 4)
            else:
                bytes_ += (2 + 2) * keys * d * 2         # K_j, V_j; dK_j, dV_j
            blocks = 1 + (stage in SIDE_BRANCH[1:])      # of a cluster: each has K_j of both
            halves = 1 + (stage in SIDE_BRANCH[2:])      # of dO_i: at this d each is all of it
            bytes_ += (blocks - 1) * (times if stage in UNITS else 1 + heads) * keys * d * 2
            bytes_ += blocks * sum((1 + halves) * rows * d * 2 for rows in tiles_of_q)     # Q_i, dO_i
            readers = blocks + (stage == "mma")          # of L_i, D_i
            bytes_ += sum(readers * 2 * rows * 4 for rows in (whole if prepared else tiles_of_q))
            bytes_ += sum(2 * rows * d * 4 for rows in (whole if late else tiles_of_q))  # dQ_i, both ways
        rows = sum(whole if prepared else tiles_of_q)    # of dQ in float, set to 0
        cleared = -1 if stage == "first_stores" else 1   # there nothing is; nor is a first sum read
        return bytes_ + cleared * rows * d * 4 + 2 * N * d * (4 + 2)     # read; dQ
    else:
        numbers += 2 * N * (2 * d + 2 + 1)               # O, dO; L, dL; D
        for keys in tiles_of_k:
            numbers += 2 * keys * d + 2 * keys * d       # K_j, V_j; dK_j, dV_j
            numbers += keys * d * (stage in KEYS_TWICE)  # K_j, to be transposed
            numbers += sum(2 * rows * d + 2 * rows for rows in tiles_of_q)       # Q_i, dO_i; L_i, D_i
        if stage == "deterministic":
            for rows in tiles_of_q:
                numbers += 2 * rows * d + rows * d       # Q_i, dO_i; dQ_i
                numbers += sum(2 * keys * d + 2 * rows for keys in tiles_of_k)       # K_j, V_j; L_i, D_i
        else:
            numbers += 2 * N * d                         # dQ set to 0
            numbers += sum(2 * rows * d for _ in tiles_of_k for rows in tiles_of_q)  # dQ_i: both ways
    return 4 * numbers


# Of the first four two, for which that takes long, the ends of branches and one of three of the others
COUNTED = [name for n, (name, stage) in enumerate(BY_NAME.items())
           if (n in (1, 3) if n < 4 else n % 3 == 0 or is_end(stage))]


# In the middle of a branch one that tiles do not divide; of those counted also one of several tiles
@pytest.mark.parametrize("stage, N", [
    (stage, N) for stage in BY_NAME
    for N in ((64, 72, 256) if is_end(BY_NAME[stage]) else (72, 512)[:1 + (stage in COUNTED)])])
def test_hbm_traffic(stage, N):
    """Within 5 % of what the algorithm says, and of the formula in the stage's header; also where tiles are
    larger than N, or do not divide it."""
    tiles = BY_NAME[stage].default_tiles(64, rows=2 * N, packed=N)
    counted, derived = inspected(stage, N).hbm.total, 2 * derived_bytes(stage, N, 64, **tiles)
    assert derived and abs(counted / derived - 1) < 0.05
    assert abs(counted / BY_NAME[stage].hbm_bytes(1, 2, N, N, 64, **tiles) - 1) < 0.05
    if stage != "split_kv":        # it asks for more where blocks are few
        assert knows_its_shared_memory(BY_NAME[stage], inspected(stage, N), 64, **tiles)


LONGER = ("exchanged_semaphores", "exchanged_stream_k")      # what calls with d > 128 take


@pytest.mark.parametrize("stage, N", [
    (stage, N) for stage in BACKWARD
    for N in ((64, 72, 128) if is_end(BACKWARD[stage]) or stage in LONGER else (72,))])
def test_hbm_traffic_of_a_backward_stage(stage, N):
    """The same. 2 N numbers more than the formula says: dL."""
    tiles = BACKWARD[stage].default_tiles(64)
    counted, derived = inspected_group(stage, N).hbm.total, derived_backward_bytes(stage, N, 64, **tiles)
    assert derived and abs(counted / derived - 1) < 0.05
    formula = BACKWARD[stage].hbm_bytes(1, 2, N, N, 64, **tiles, H_kv=1) + 4 * 2 * N
    assert abs(counted / formula - 1) < 0.05
    report = inspected_group(stage, N)
    assert knows_its_shared_memory(BACKWARD[stage], report, 64, **tiles)
    assert report.findings == [] and report.flops == 10 * 2 * N * N * 64
    assert all(kernel.grid[1:] == (1, 1) for kernel in report.kernels), "a grid's y and z end at 65535"


def test_hbm_traffic_with_copies_of_dq(monkeypatch, tmp_path):
    """Of a small call, as on a GPU of 132 multiprocessors; the simulator has three."""
    stage = "exchanged_semaphores"
    text, asked = BACKWARD[stage].path.read_text(), "copies_of_dQ(p, multiprocessors()"
    assert text.count(asked) == 1
    (tmp_path / "mine.cuh").write_text(text.replace(asked, "copies_of_dQ(p, 132"))
    tensors = random_qkv(1, 2, 1, 256, 384, 64, "cpu", torch.bfloat16)
    report = inspected_backward(tmp_path / "mine.cuh", *tensors)
    monkeypatch.setattr("flash_ladder.stage.multiprocessors_of_a_launch", lambda device: 132)
    s = BACKWARD[stage]
    formula = s.hbm_bytes(1, 2, 256, 384, 64, **s.default_tiles(64), H_kv=1) + 4 * 2 * 256
    assert report.findings == [] and abs(report.hbm.total / formula - 1) < 0.02


@pytest.mark.parametrize("stage", ["whole_group", "persistent", "hopper_tuned", "transposed_dq"])
@pytest.mark.parametrize("B, H, kernels", [(1, 8, 4), (3, 8, 4), (5, 6, 3)])
def test_blocks_with_several_query_heads(B, H, kernels, stage):
    """One, two of four and all three, by the blocks that they leave. If all, no parts are added up."""
    _, tiles, _ = tile_sizes(BACKWARD[stage], 32)
    tensors = random_qkv(B, H, 2, 50, 70, 32, "cpu", torch.bfloat16)
    report = inspected_backward(stage, *tensors, **tiles)
    assert report.findings == [] and len(report.kernels) == kernels
    formula = BACKWARD[stage].hbm_bytes(B, H, 50, 70, 32, **tiles, H_kv=2) + 4 * B * H * 50
    assert abs(report.hbm.total / formula - 1) < 0.05


@pytest.mark.parametrize("stage, dQ", [("hopper_tuned", 2 * (16 + 16)), ("transposed_dq", 16 + 32)])
def test_what_products_read_of_shared_memory(stage, dQ):
    """KB in a step of 128 queries and 128 keys. For S and dP each of two warpgroups reads 64 rows of K_j or
    V_j, and all of Q_i or dO_i; for dV and dK these alone. For dQ half of dS and all of K_j, twice;
    transposed all of both, once."""
    report = inspected_group(stage, 128)
    a_step = sum(a.bytes for a in report.accesses if a.kind == "wgmma") // 2
    assert a_step == 1024 * (2 * (2 * (8 + 16) + 2 * 16) + dQ)


def test_atomics_read_and_write():
    report = inspected_group("recompute", 128)
    assert {a.kind for a in report.accesses if a.array == "dQ"} == {"write", "atomic"}
    one, dQ = 2 * 128 * 64 * 4, report.traffic()["dQ"]
    assert (dQ.read, dQ.written) == (2 * one, 3 * one), "by two blocks; and set to 0"
    assert all(a.kind != "atomic" for a in inspected_group("deterministic", 128).accesses)


@pytest.mark.parametrize("stage, Bc", [
    *((name, 32) for name, stage in BY_NAME.items() if is_end(stage) or stage.number % 3 == 0),
    ("naive", 16), ("naive", 64)])
def test_formula_of_other_shapes(stage, Bc):
    """The header's formula, where N is no multiple of the tiles, N_q != N_k, d != 64; of rungs in the middle
    of a branch, which have those of earlier ones, one of three."""
    s = BY_NAME[stage]
    q, k, v = random_qkv(2, 2, 2, 50, 70, 24, "cpu", s.dtypes[0])
    for Br in (128, 64, 32, 16):           # the least that it takes
        with contextlib.suppress(ValueError):
            tiles = s.tiles(24, 227 * 1024, Br=Br, Bc=Bc)
    with flash.inspect() as report:
        flash.attention(q, k, v, stage=stage, **tiles)
    assert abs(report.hbm.total / s.hbm_bytes(2, 2, 50, 70, 24, **tiles) - 1) < 0.05


def measured_rows(direction: str, stage: str, report) -> list[dict]:
    """results/h200's counts of a stage: a row for each of its kernels, which are those of the report. Skips
    the test of a stage that has not been counted since its kernels are these."""
    measured = json.loads((flash.ROOT / "results" / "h200" / f"counts_{direction}.json").read_text())
    assert measured["shape"] == {"B": 1, "H": 2, "N": 512, "d": 64, "causal": False}
    rows = [row for row in measured["kernels"] if row["stage"] == stage]
    if [row["kernel"] for row in rows] != list(dict.fromkeys(kernel.name for kernel in report.kernels)):
        pytest.skip(f"{stage} in its present form was not counted: python results/counts.py, on a GPU")
    return rows


@pytest.mark.parametrize("stage", ["naive", "tiled", "online_softmax", "flash2"])
def test_the_first_stages_are_counted(stage):
    assert measured_rows("fwd", stage, inspected(stage, 72))


# What the simulator and an H200 count otherwise, and why
MERGED = {"shared read requests", "shared read wavefronts"}     # nvcc makes one load of several neighbours
BY_FOUR = {"HBM atomic requests", "HBM atomic sectors"}         # the simulator adds four numbers one by one
DIFFERENCES = {
    "fwd": {("tiled", "scores_kernel"): MERGED, ("tiled", "output_kernel"): MERGED,
            ("online_softmax", "online_softmax_kernel"): MERGED, ("flash2", "forward_kernel"): MERGED},
    "bwd": {("deterministic", "dKV_kernel"): MERGED, ("deterministic", "dQ_kernel"): MERGED} | {
        (stage, "backward_kernel"): names for names, stages in [
            (MERGED, ("recompute", "register_tiles", "transposed", "split_warps", "cp_async")),
            (BY_FOUR, ("vectorized", "conflict_free", "fp32_tuned")),
            (MERGED | BY_FOUR, ("late_dq", "split_heads", "ordered_dq", "ampere_tuned"))]
        for stage in stages}}


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_gpu_counts_the_same(direction):
    """In every kernel, all that the simulator counts, but for what is named above; and wmma (below)."""
    measured = json.loads((flash.ROOT / "results" / "h200" / f"counts_{direction}.json").read_text())
    found = {(row["stage"], row["kernel"]): counts.differences(row) for row in measured["kernels"]
             if row["stage"] != "wmma"}
    assert {kernel: set(different) for kernel, different in found.items() if different} == (
        DIFFERENCES[direction])
    for different in found.values():
        for what, (ours, gpu) in different.items():
            assert ours == 4 * gpu if what in BY_FOUR else ours > gpu


# Newer than results/h200/counts_bwd.json: by one thread two rows of a fragment, in half as many requests
NEWER = ("convert_dQ_kernel",)


def check_counts(report, rows: list[dict]) -> None:
    """The simulator counts what it did when an H200 counted in the same kernels."""
    assert [row["kernel"] for row in rows] == list(dict.fromkeys(kernel.name for kernel in report.kernels))
    for row in rows:
        same = counts.simulated(report, row["kernel"]) == row["simulator"]
        assert same != (row["kernel"] in NEWER), row["kernel"]


@pytest.mark.parametrize("stage", [name for name in COUNTED if name != "wmma"])
def test_requests_as_measured(stage):
    report = inspected(stage, 512)
    check_counts(report, measured_rows("fwd", stage, report))


def test_requests_of_wmma_as_measured():
    """Of its load_matrix_sync, which the simulator takes for ldmatrix, nvcc makes loads of 4 bytes, for about
    as many wavefronts. How often it rescales O depends on the numbers, which were others."""
    report = inspected("wmma", 512)
    row, = measured_rows("fwd", "wmma", report)
    ours, gpu = counts.simulated(report, row["kernel"]), row["gpu"]
    for what in ours:
        if what.startswith("HBM"):
            assert ours[what] == gpu[what], what
    wavefronts = ours["shared read wavefronts"] + ours["ldmatrix wavefronts"]
    assert gpu["ldmatrix requests"] == 0
    assert gpu["shared read wavefronts"] == pytest.approx(wavefronts, rel=0.01)
    for what in ("shared write requests", "shared write wavefronts"):
        assert gpu[what] == pytest.approx(ours[what], rel=0.01)


# Of those that calls take, and of others one of twelve
@pytest.mark.parametrize("stage", [
    name for n, (name, stage) in enumerate(BACKWARD.items())
    if n and (stage.default and is_end(stage) or n % 12 == 0)])
def test_backward_requests_as_measured(stage):
    """The same of a backward stage."""
    dtype = BACKWARD[stage].dtypes[-1]
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 2, 2, 512, 512, 64, "cpu", dtype))
    o = flash.attention(q, k, v, backward=stage)
    with flash.inspect() as report:
        torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
    check_counts(report, measured_rows("bwd", stage, report))


CONFLICTS = {        # that their headers admit
    "fwd register_tiles": {"Q_smem": 32, "K_smem": 32, "P_smem": 8},
    "fwd vectorized": {"Q_smem": 8, "K_smem": 8, "P_smem": 8},
    "fwd mma": {"Q_smem": 8, "K_smem": 8, "V_smem": 8},
    "bwd register_tiles": dict.fromkeys(("KT_smem", "VT_smem"), 32) | dict.fromkeys(
        ("Q_smem", "dO_smem", "P_smem", "dS_smem"), 4),
    "bwd vectorized": dict.fromkeys(("KT_smem", "VT_smem"), 8) | dict.fromkeys(
        ("Q_smem", "dO_smem", "dS_smem"), 2),
}
STORED_WITH_CONFLICTS = ("register_tiles", "vectorized")


@pytest.mark.parametrize("stage", flash.stages(), ids=lambda s: s.path.stem)
def test_no_bank_conflicts(stage):
    """No other stage has any at d = 64: each access takes the least wavefronts that its size allows. At the
    ends of branches also with the tiles of middling and large calls, and a mask."""
    in_small_calls = inspected if stage.direction == "fwd" else inspected_group
    reports = [in_small_calls(stage.name, 72)]
    tiles = [stage.default_tiles(64, 1 << n) for n in (15, 20)] if is_end(stage) else []
    for tile in [tile for n, tile in enumerate(tiles) if tile not in tiles[:n]]:
        q, k, v = random_qkv(1, 1, 1, 70, 90, 64, "cpu", stage.dtypes[0])
        if stage.direction == "bwd":
            reports.append(inspected_backward(stage.name, q, k, v, 20, **tile))
        else:
            with flash.inspect() as report:
                flash.attention(q, k, v, causal=True, stage=stage, **tile)
            reports.append(report)
    for report in reports:
        shared = [access for access in report.accesses if access.memory == "shared"]
        assert bool(shared) == (stage.name != "naive") and report.findings == []
        conflicts = {access.array: access.ways for access in shared if access.units > access.ideal}
        assert conflicts == CONFLICTS.get(f"{stage.direction} {stage.name}", {})
        assert stage.name in STORED_WITH_CONFLICTS or all(
            access.kind == "read" for access in shared if access.units > access.ideal)


def test_unique_bytes():
    report = inspected("flash2", 256)
    one = 2 * 256 * 64 * 4
    traffic = report.traffic()
    assert list(traffic) == ["Q", "K", "V", "O", "L"]
    assert all((traffic[x].unique_read, traffic[x].unique_written) == (one, 0) for x in "QKV")
    assert (traffic["O"].unique_read, traffic["O"].unique_written) == (0, one)
    assert traffic["K"].read == 4 * one and traffic["Q"].read == one
    assert {(a.array, a.unique) for a in report.accesses if a.memory == "HBM"} == {
        *((x, one) for x in "QKVO"), ("L", 2 * 256 * 4)}
    naive = inspected("naive", 128)
    softmax = [a for a in naive.accesses if (a.kernel, a.kind) == ("softmax_kernel", "read")]
    assert [a.unique for a in softmax] == [2 * 128 * 128 * 4] * 3, "three lines read all of S"
    assert naive.traffic()["S, P"].unique_written == 2 * 2 * 128 * 128 * 4, "by scores and by softmax_kernel"
    assert [kernel.name for kernel in naive.kernels] == ["scores_kernel", "softmax_kernel", "output_kernel"]


def test_loads_of_K_with_a_thread_per_row():
    (k_load,) = [a for a in inspected("naive", 64).accesses if a.array == "K"]
    assert k_load.units_per_request == 32 and k_load.ideal == 4 * k_load.requests
    assert "K[col * p.K.stride_n + k]" in k_load.place.text


def test_bank_conflicts_without_padding(tmp_path):
    mine = mutated(tmp_path, "flash2", lambda text: text.replace("K_smem, d + 1,", "K_smem, d,").replace(
        "* (d + 1) + k", "* d + k"))
    q, k, v = random_qkv(1, 1, 1, 64, 64, 64, "cpu")
    with flash.inspect() as report:
        flash.attention(q, k, v, stage=mine)
    (load,) = [a for a in report.accesses if a.array == "K_smem" and a.kind == "read"]
    assert load.ways == 32


def test_barriers_and_flops():
    report = inspected("flash2", 128)
    (kernel,) = report.kernels
    assert (kernel.blocks, kernel.barriers, kernel.warp_barriers) == (4, 4 * 2 * 2, 4 * 2 * 8)
    assert (kernel.grid, kernel.block, kernel.launches) == ((4, 1, 1), (256, 1, 1), 1)
    assert kernel.shared_bytes == 4 * (64 * 64 + 64 * 129 + 64 * 64)
    assert report.flops == 4 * 2 * 128 * 128 * 64
    q, k, v = random_qkv(1, 1, 1, 3, 5, 8, "cpu")
    with flash.inspect() as report:
        flash.attention(q, k, v, causal=True)
    assert report.flops == 4 * 8 * (3 + 4 + 5)


def test_barriers_by_line():
    """flash2: four blocks, of 8 warps, with two tiles of keys each."""
    stage, report = BY_NAME["flash2"].path, inspected("flash2", 128)
    lines = [(number, text.strip()) for number, text in enumerate(stage.read_text().splitlines(), 1)
             if "__sync" in text]
    expected = [(stage, number, text, text.split(";")[0], 4 * 2 * (8 if "warp" in text else 1))
                for number, text in lines]
    (kernel,) = report.kernels
    assert len(expected) == 3 and expected == [
        (Path(b.place.file), b.place.line, b.place.text, b.name, b.count) for b in kernel.barrier_lines]
    table = str(report).split("Barriers, by line")[1]
    for (number, text), a_block in zip(lines, (2, 2, 16), strict=True):
        assert re.search(rf"^ *{stage.name}:{number}  {re.escape(text[:40])}.* {a_block}$", table, re.M)
    data = json.loads(json.dumps(report.to_dict()))["kernels"][0]
    assert (data["barriers"], data["warp_barriers"]) == (kernel.barriers, kernel.warp_barriers)
    assert [(b["place"]["line"], b["name"], b["count"]) for b in data["barrier_lines"]] == [
        (b.place.line, b.name, b.count) for b in kernel.barrier_lines]
    naive = inspected("naive", 64)
    assert all(kernel.barrier_lines == () for kernel in naive.kernels) and "Barriers" not in str(naive)


# ------------------------------------------------------------------------------------------ stages: right
SHAPES = [  # B, H, H_kv, N_q, N_k, d, causal, which of tile_sizes() (None: the default), which type
    (1, 2, 2, 64, 64, 64, True, None, 0),
    (2, 4, 2, 45, 70, 24, True, 1, -1),
    (1, 4, 1, 100, 33, 40, False, 2, 0),
    (1, 2, 2, 70, 50, 8, True, 0, -1),
    (1, 1, 1, 1, 1, 128, False, None, 0),
    (1, 1, 1, 33, 65, 256, True, None, -1),
]
SHAPES_IN_BETWEEN = SHAPES[1:2]                    # for rungs that are no end of a branch


@pytest.mark.parametrize("stage, shape", [
    (name, shape) for name, stage in BY_NAME.items()
    for shape in (SHAPES if is_end(stage) else SHAPES_IN_BETWEEN[stage.number % 2:])], ids=str)
def test_no_finding_in_a_correct_stage(monkeypatch, stage, shape):
    """Under the default schedule and a random one; in the middle of a branch of every other stage. (Of all,
    without a mask: test_no_bank_conflicts.)"""
    B, H, H_kv, N_q, N_k, d, causal, which, dtype = shape
    q, k, v = random_qkv(B, H, H_kv, N_q, N_k, d, "cpu", BY_NAME[stage].dtypes[dtype])
    tiles = {} if which is None else tile_sizes(BY_NAME[stage], d)[which]
    for seed, copies in (SCHEDULES[0], SCHEDULES[1 + SHAPES.index(shape) % (len(SCHEDULES) - 1)]):
        set_schedule(monkeypatch, seed, copies)
        with flash.inspect() as report:
            o, lse = flash.attention(q, k, v, causal=causal, stage=stage, return_lse=True, **tiles)
        assert report.findings == []
        check(o, lse, q, k, v, N_k - N_q if causal else None)


@pytest.mark.parametrize("stage, seed, copies", [
    (name, *schedule) for name, stage in BACKWARD.items() if is_end(stage) or stage.number % 2
    for schedule in (SCHEDULES[stage.number % 2::2] if stage.default
                     else [SCHEDULES[stage.number % len(SCHEDULES)]])])
def test_no_finding_in_a_correct_backward_stage(monkeypatch, stage, seed, copies):
    """With small tiles, gaps and a mask, in the middle of a branch of every other stage; at its ends also
    with middling ones, fewer keys than queries, and the last type: then the header's formula holds, too, but
    for 7 % where so little is read. (Of all, without a mask: test_hbm_traffic_of_a_backward_stage.)"""
    set_schedule(monkeypatch, seed, copies)
    small, middling, _ = tile_sizes(BACKWARD[stage], 32)
    dtypes, both = BACKWARD[stage].dtypes, is_end(BACKWARD[stage])
    dtype = dtypes[0 if both else BACKWARD[stage].number // 2 % len(dtypes)]
    assert inspected_backward(stage, *qkv_with_gaps("cpu", dtype), **small).findings == []
    if both:
        q, k, v = random_qkv(1, 4, 2, 60, 50, 32, "cpu", dtypes[-1])
        report = inspected_backward(stage, q, k, v, **middling)
        formula = BACKWARD[stage].hbm_bytes(1, 4, 60, 50, 32, **middling, H_kv=2) + 4 * 4 * 60
        assert report.findings == [] and abs(report.hbm.total / formula - 1) < 0.07


@pytest.mark.parametrize("stage", [name for name, stage in BY_NAME.items() if is_end(stage)])
def test_no_finding_with_gaps_and_repeated_heads(stage):
    """Strided tensors keep their meaning in the checker's copies."""
    dtype = BY_NAME[stage].dtypes[0]
    q, k, v, diagonal = qkv_with_gaps("cpu", dtype)
    with flash.inspect() as report:
        o, lse = flash.attention(q, k, v, causal=True, stage=stage, return_lse=True)
    assert report.findings == []
    check(o, lse, q, k, v, diagonal)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)      # (B, N, H, d) in memory
    one_head = random_qkv(2, 1, 1, 70, 70, 32, "cpu", dtype)
    k, v = (next(one_head).expand(2, 4, 70, 32) for _ in range(2))
    with flash.inspect() as report:
        o, lse = flash.attention(q, k, v, causal=True, stage=stage, return_lse=True)
    assert report.findings == []
    check(o, lse, q, k, v, diagonal)
    assert o.stride() == q.stride(), "the output is as it would be without the checker"
    once = 2 * 70 * 32 * dtype.itemsize
    assert report.traffic()["K"].unique_read == once, "repeated heads are the same memory"


# ------------------------------------------------------------------------------------------ stages: wrong
def mutated(tmp_path: Path, stage: str | flash.Stage, change, name: str = "mutant") -> Path:
    file = tmp_path / f"{name}.cuh"
    text = (BY_NAME[stage] if isinstance(stage, str) else stage).path.read_text()
    file.write_text(change(text))
    assert file.read_text() != text
    return file


# At the ends of branches every other one; of all others results/cpu/mutants.json has them (test_mutants.py).
BARRIERS = [(stage, line) for stage in filter(is_end, flash.stages())
            for line, text in enumerate(stage.path.read_text().splitlines(), 1)
            if re.search(r"__sync(threads|warp)\(\);", text)][::2]


@pytest.mark.parametrize("stage, line", BARRIERS, ids=[f"{s.path.stem}-{line}" for s, line in BARRIERS])
def test_no_barrier_can_be_spared(tmp_path, stage, line):
    """Each one removed is a race, between lines of this stage or of functions that it calls; or an mbarrier
    is used before it is initialised."""
    def without(text):
        lines = text.splitlines()
        lines[line - 1] = re.sub(r"__sync\w+\(\);", "", lines[line - 1])
        return "\n".join(lines) + "\n"
    file = mutated(tmp_path, stage, without)
    file.write_text(re.sub("// splits: .*", "", file.read_text()))     # several tiles a block
    # some are needed for some of these; of 20 keys, a tile of queries sees none
    shapes = [(16, None, 70), (16, -0.1, 70), (256, None, 70), (128, None, 70), (16, None, 20)]
    if stage.needs == "sm_90a":
        shapes.insert(0, (64, None, 70))                               # for two warpgroups
    for d, scale, N_k in [shape for shape in shapes if stage.fits(shape[0], 227 * 1024)]:
        q, k, v = random_qkv(1, 1, 1, 70, N_k, d, "cpu", stage.dtypes[0])
        tiles = min(tile_sizes(stage, d)[0], {"Br": 32, "Bc": 32}, key=lambda tile: -tile["Br"])
        tiles = stage.default_tiles(d) if d == 128 else {"Br": 128, "Bc": 16} if d == 64 else tiles
        if stage.direction == "bwd":
            tiles = stage.default_tiles(d) if d == 64 else tiles
            report = inspected_backward(file, q, k, v, **tiles)
        else:
            with flash.inspect() as report, contextlib.suppress(RuntimeError):
                flash.attention(q, k, v, causal=N_k == 20, stage=file, scale=scale, **tiles)
        races = [f for f in report.findings if f.what == "race" or "initialised this mbarrier" in f.message]
        if races:
            break
    assert races and {f.what for f in report.findings} <= {"race", "uninitialised", "error"}
    enough = any if stage.name in WRITERS else all     # the warps of these work in functions of functions
    for race in races:
        assert enough(str(file.name) in f"{p} {p.callers}" or p.file == str(file) for p in race.places)


OUT_OF_BOUNDS = [
    ("naive", r"row >= p.N_q \|\| k >= d", "k >= d", {"S, P", "O"}),
    ("naive", r"row >= p.N_q \|\| col >= p.N_k", "col >= p.N_k", {"Q", "S, P"}),
    ("tiled", r"row < p.N_q && k < d", "k < d", {"O"}),
    ("tiled", r"Bc, p.N_k\);", "Bc, p.N_k + 1);", {"K", "V"}),
    ("online_softmax", r"if \(row >= p.N_q\) continue;", "", {"O", "m, l"}),
    ("online_softmax", r"return 2 \* sizeof", "return sizeof", {"m, l"}),
    ("flash2", r"if \(row >= p.N_q\) continue;", "", {"O", "L"}),
    ("flash2", r"i \* Br, Br, p.N_q", "i * Br, Br, 1 << 20", {"Q"}),
    ("vectorized", r"j \* Bc, Bc, p.N_k", "j * Bc, Bc, 1 << 20", {"K", "V"}),
    ("conflict_free", r"if \(row >= p.N_q\) continue;", "", {"O", "L"}),
    ("prefetch", r"pos.x < N && ", "", {"K"}),
    ("fp32_tuned", r"0, Bc, p.N_k - j \* Bc", "0, Bc, Bc", {"V"}),
    *((stage, r"warp_row \+ row < p\.N_q && ", "", {"O"}) for stage in ("mma", "swizzle", "wide_warps")),
    *((stage, r" && row < p\.N_q", "", {"L"}) for stage in ("mma", "cp_async", "ampere_tuned")),
    ("wmma", r"if \(row >= p.N_q\) return;", "", {"O", "L"}),
    ("ampere_tuned", r"if \(warp_row \+ row < p\.N_q\)", "", {"O"}),
]


@pytest.mark.parametrize("stage, pattern, replacement, arrays", OUT_OF_BOUNDS)
def test_out_of_bounds_in_a_stage(tmp_path, stage, pattern, replacement, arrays):
    """Also past the rows of a head, where the next head's would follow."""
    file = mutated(tmp_path, stage, lambda text: re.sub(pattern, replacement, text))
    q, k, v = random_qkv(2, 2, 2, 50, 50, 16, "cpu", BY_NAME[stage].dtypes[0])
    with flash.inspect() as report:
        flash.attention(q, k, v, stage=file, Br=32, Bc=32)
    found = [f for f in report.findings if f.what == "out of bounds"]
    assert {re.match(r"\(?([\w, ]+?)\)?\[", f.element)[1] for f in found} == arrays
    assert all("outside of its shape" in f.element for f in found)
    first_heads = {f.element[0] for f in found if f.element[1:].startswith("[0, 0, ")}
    assert first_heads == arrays & set("QKVO")
    races = {f.element[0] for f in report.findings if f.what == "race"}
    assert ("L" in races) == ("L" in arrays), "its heads have no gaps between them: two blocks write there"


OUT_OF_BOUNDS_BACKWARD = [
    ("naive", r"row >= p\.N_q \|\| k >= d", "k >= d", {"P, dS", "dQ"}),
    ("naive", r"col >= p\.N_k \|\| k >= d", "k >= d", {"P, dS", "dK", "dV"}),
    ("recompute", r"row < p\.N_q \? D", "true ? D", {"D"}),
    ("recompute", r"if \(row >= p\.N_q\) continue;", "", {"dQ"}),
    ("recompute", r"if \(k < d\) atomicAdd", "atomicAdd", {"dQ"}),
    ("deterministic", r"i \* Br, Br, p\.N_q", "i * Br, Br, 1 << 20", {"Q", "dO"}),
    ("fp32_tuned", r"row \+ n \* tile_step < N && ", "", {"Q", "dO"}),
    ("fp32_tuned", r"if \(k >= d(_v)?\) continue;", "", {"dQ", "dK", "dV"}),
    ("fp32_tuned", r"row < p\.N_q \? ", "true ? ", {"L", "D"}),
]


@pytest.mark.parametrize("stage, pattern, replacement, arrays", OUT_OF_BOUNDS_BACKWARD)
def test_out_of_bounds_in_a_backward_stage(tmp_path, stage, pattern, replacement, arrays):
    file = mutated(tmp_path, BACKWARD[stage], lambda text: re.sub(pattern, replacement, text))
    report = inspected_backward(file, *random_qkv(2, 2, 2, 50, 50, 16, "cpu"), Br=32, Bc=32)
    found = [f for f in report.findings if f.what == "out of bounds"]
    assert {re.match(r"\(?([\w, ]+?)\)?\[", f.element)[1] for f in found} == arrays


def test_dQ_needs_atomics(tmp_path):
    """Blocks add to the same rows: without atomics a race, whatever the result."""
    file = mutated(tmp_path, BACKWARD["recompute"], lambda text: re.sub(
        r"atomicAdd\((dQ .*?), (.*)\);", r"*(\1) += \2;", text))
    report = inspected_backward(file, *random_qkv(1, 1, 1, 70, 70, 16, "cpu"), Br=32, Bc=32)
    assert {(f.what, f.element[:3]) for f in report.findings} == {("race", "dQ[")}
    assert "use atomics" in report.findings[0].message


def test_dQ_must_start_at_0(tmp_path):
    file = mutated(tmp_path, BACKWARD["recompute"], lambda text: re.sub(
        r"(launch_D_kernel\(.*)/\*clear_dQ=\*/true", r"\1/*clear_dQ=*/false", text))
    report = inspected_backward(file, *random_qkv(1, 1, 1, 20, 20, 16, "cpu"), Br=32, Bc=32)
    assert {(f.what, f.element[:3]) for f in report.findings} == {("uninitialised", "dQ[")}


def test_row_past_the_end_is_named(tmp_path):
    file = mutated(tmp_path, "flash2", lambda text: text.replace("Br, Br, p.N_q", "Br, Br, p.N_q + 1"))
    q, k, v = random_qkv(1, 2, 2, 50, 50, 16, "cpu")
    with flash.inspect() as report:
        flash.attention(q, k, v, stage=file, Br=32, Bc=32)
    (finding,) = report.findings
    assert finding.element == "Q[0, 0, 50, 0], outside of its shape (1, 2, 50, 16)" and finding.count == 32
    assert finding.places[0].callers[0].startswith("mutant.cuh:")
    assert "called at mutant.cuh:" in finding.message


def test_wrong_row_of_the_workspace_is_uninitialised(tmp_path):
    file = mutated(tmp_path, "tiled", lambda text: text.replace(
        "scores_kernel<<<heads * Tr * Tc", "scores_kernel<<<heads * Tr"))
    q, k, v = random_qkv(1, 1, 1, 64, 64, 16, "cpu")
    with flash.inspect() as report:
        flash.attention(q, k, v, stage=file, Br=32, Bc=32)
    finding = report.findings[0]
    assert (finding.what, finding.kernel) == ("uninitialised", "softmax_kernel")
    assert finding.element.startswith("(S, P)[")


def test_error_of_a_kernel_is_raised_and_found(tmp_path):
    file = mutated(tmp_path, "flash2", lambda text: text.replace(
        "extern __shared__", "if (threadIdx.x == 5) __syncwarp(0x60);\n  extern __shared__"))
    q, k, v = random_qkv(1, 1, 1, 64, 64, 16, "cpu")
    with pytest.raises(RuntimeError, match="deadlock"), flash.inspect() as report:
        flash.attention(q, k, v, stage=file)
    (finding,) = report.findings
    assert finding.what == "deadlock" and "mutant.cuh" in finding.message
    assert {place.line for place in finding.places if place.line}, "the barrier's line"
    assert "deadlock" in str(report)


# ------------------------------------------------------------------------------------------ the report
def test_report_as_text_and_dict():
    report = inspected("flash2", 64)
    text = str(report)
    assert repr(report) == text and max(map(len, text.splitlines())) <= 120
    assert "No findings" in text and "forward_kernel: 2 blocks of 256 threads" in text
    assert re.search(r"fwd_04_flash2.cuh:\d+  const float key = K_smem", text)
    assert re.search(r"tile.cuh:\d+  tile\[row \* pitch \+ k\]", text)
    assert "read K, 4 B a lane, called at fwd_04_flash2.cuh:" in text
    assert "no cache" in text and "nvcc" in text
    data = json.loads(json.dumps(report.to_dict()))
    assert data["findings"] == [] and data["flops"] == report.flops
    assert data["traffic"]["K"]["read"] == report.traffic()["K"].read
    assert data["kernels"][0]["traffic"]["O"]["written"] == 2 * 64 * 64 * 4
    assert sum(a["bytes"] for a in data["accesses"] if a["memory"] == "HBM") == report.hbm.total
    wrong = json.loads(json.dumps(run_wrong("barrier_before_use", fixed=False)[0].to_dict()))
    assert wrong["findings"][0]["parties"][0]["place"]["source"].startswith(("tile[", "out["))
    assert "2 findings" in str(run_wrong("barrier_before_use", fixed=False)[0])


def test_find_and_plot(tmp_path):
    report = inspected("naive", 64)
    line = next(str(a.place) for a in report.accesses if a.array == "K")
    assert {a.array for a in report.find(line)} == {"Q", "K"} == {a.array for a in report.find(line, "read")}
    with pytest.raises(ValueError, match=r"'fwd_01_naive.cuh:1'; there are accesses at fwd_01"):
        report.find("fwd_01_naive.cuh:1")
    stage = BY_NAME["flash2"].path
    number = next(i for i, text in enumerate(stage.read_text().splitlines(), 1) if "load_tile(K_smem" in text)
    of_a_function = inspected("flash2", 64).find(f"{stage.name}:{number}")
    assert {(a.array, a.kind, a.place.file.split("/")[-1]) for a in of_a_function} == {
        ("K", "read", "tile.cuh"), ("K_smem", "write", "tile.cuh")}
    for number, arguments in enumerate(({}, {"line": line})):
        file = tmp_path / f"{number}.png"
        figure = report.plot(file, **arguments)
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
        assert len(figure.axes) == number + 1
    bars, lanes = report.plot(), report.plot(line=line)
    assert [label.get_text() for label in bars.axes[0].get_yticklabels()] == ["Q", "K", "V", "O", "L", "S, P"]
    texts = [text.get_text() for text in lanes.axes[0].texts]
    assert texts == [str(lane) for lane in range(32)], "K: a sector for each lane"
    assert [text.get_text() for text in lanes.axes[1].texts] == ["0-31"], "Q: one number for all"


def test_picture_of_banks():
    unpadded, padded = run_cost(0), run_cost(1)
    rows = {}
    for report, name in ((unpadded, "unpadded"), (padded, "padded")):
        access = one_access(report, "shared", "read", name)
        (axes,) = report.plot(line=str(access.place)).axes
        rows[name] = len(axes.get_yticks())
        assert len(axes.texts) == 32 and len(axes.get_xticks()) == 32
    assert rows == {"unpadded": 32, "padded": 1}
    access = one_access(run_cost(6, n=4), "shared", "read", "vectors in a column")
    from flash_ladder.simulator import pictures
    assert len(pictures.requests([access]).axes[0].get_yticks()) == access.units == 16


def test_several_calls_in_one_report():
    q, k, v = random_qkv(1, 1, 1, 32, 32, 16, "cpu")
    with flash.inspect() as report:
        first = flash.attention(q, k, v, stage="flash2", Br=32, Bc=32)
        second = flash.attention(q, k, v, stage="flash2", Br=32, Bc=32)
    assert torch.equal(first, second) and report.findings == []
    assert report.kernels[0].launches == 2 and report.traffic()["Q"].read == 2 * 32 * 16 * 4
    with flash.inspect() as report:          # two kernels of the same name
        for stage in ("naive", "tiled"):
            flash.attention(q, k, v, stage=stage)
    names = ["scores_kernel", "softmax_kernel", "output_kernel"]
    assert [kernel.name for kernel in report.kernels] == [*names, *(f"{name} #2" for name in names)]
    with flash.inspect() as report:
        assert "complete at the end of the with block" in str(report)
    assert report.kernels == report.findings == [] and report.hbm.total == 0
    assert "No kernel was seen" in str(report)


def test_one_inspection_at_a_time():
    with flash.inspect(), pytest.raises(RuntimeError, match="one at a time"), flash.inspect():
        pass
    with flash.inspect() as report:         # the refusal has left no trace
        assert report.findings == []
    x = torch.zeros(64)
    with pytest.raises(ValueError, match="x and y share elements"), flash.inspect(x=x, y=x[32:]):
        pass
    with flash.inspect(x=x[:32], y=x[32:], even=torch.zeros(8)[::2]):
        pass
    for wrong in ([1, 2], torch.empty(3, device="meta")):
        with pytest.raises(ValueError, match=r"x must be a tensor on the CPU"), flash.inspect(x=wrong):
            pass


def test_clang_is_refused(tmp_path, monkeypatch):
    clang = tmp_path / "c++"
    clang.write_text("#!/bin/sh\necho clang version 14.0.6\n")
    clang.chmod(0o755)
    monkeypatch.setenv("CXX", str(clang))
    with pytest.raises(RuntimeError, match="the checker needs GCC"), flash.inspect():
        pass


def test_an_inspection_ends_while_another_thread_runs():
    """Its launches are watched or not; Python lives."""
    x, out, count = torch.zeros(200), torch.zeros(200), torch.zeros(1, dtype=torch.int32)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, out, count)]
    done = threading.Event()

    def launch():
        while not done.is_set():
            library(WRONG).run_wrong(NUMBERS["barrier_in_reduction"], *pointers, 1)

    library(WRONG)
    thread = threading.Thread(target=launch)
    thread.start()
    for _ in range(50):
        with flash.inspect(x=x, out=out, count=count):
            pass
    done.set()
    thread.join()
    assert run_wrong("barrier_in_reduction", fixed=True)[0].findings == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_GPU_are_refused():
    q, k, v = random_qkv(1, 1, 1, 32, 32, 16, "cuda")
    with flash.inspect(), pytest.raises(RuntimeError, match="pass CPU tensors"):
        flash.attention(q, k, v)


def test_other_threads_are_not_watched():
    """A call in another Python thread meanwhile: not in the report, and right."""
    q, k, v = random_qkv(1, 2, 2, 64, 64, 16, "cpu")
    results = []
    with flash.inspect() as report:
        thread = threading.Thread(target=lambda: results.append(flash.attention(q, k, v, stage="tiled")))
        thread.start()
        o = flash.attention(q, k, v, stage="flash2")
        thread.join()
    assert [kernel.name for kernel in report.kernels] == ["forward_kernel"]
    assert torch.allclose(o, results[0], atol=1e-5)


def test_an_edited_stage_is_inspected_anew(tmp_path):
    file = tmp_path / "mine.cuh"
    text = BY_NAME["flash2"].path.read_text()
    q, k, v = random_qkv(1, 1, 1, 70, 70, 16, "cpu")
    for content, wrong in ((text, False), (text.replace("__syncwarp();", ""), True), (text, False)):
        file.write_text(content)
        with flash.inspect() as report:
            flash.attention(q, k, v, stage=file, Br=32, Bc=32)
        assert bool(report.findings) == wrong
        flash.attention(q, k, v, stage=file, Br=32, Bc=32)


ENDLESS = """
import ctypes, signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)   # a background process starts without
sys.path.insert(0, sys.argv[1])
import flash
source = flash.ROOT / "tests" / "kernels" / "errors.cu"
library = ctypes.CDLL(str(flash.build(source, torch.device("cpu"), checked=True)))
x = torch.zeros(1024, dtype=torch.int32)
with flash.inspect(x=x) as report:
    print("started", flush=True)
    library.run_endless(int(sys.argv[2]), ctypes.c_void_p(x.data_ptr()), 2, 64)
"""


@pytest.mark.parametrize("which", [0, 1, 4, 7])
def test_ctrl_c(which):
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(flash.ROOT), str(which)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "started\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode in (1, -signal.SIGINT) and "KeyboardInterrupt" in errors, errors
