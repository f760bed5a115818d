"""Every backward stage, over the grid of grid.py, against float64. New stages join by being in
stages/."""

import contextlib
import itertools
import math
import random

import pytest
import torch
from conftest import (
    cases_for,
    check_gradients,
    is_end,
    max_error,
    poisoned,
    qkv_with_gaps,
    random_gradients,
    random_qkv,
    reference,
    tile_sizes,
    type_for,
    with_gaps,
    with_two_schedules,
)

import flash
from flash_ladder import plan
from flash_ladder.arithmetic import evaluate
from flash_ladder.grid import PACKED, SIDE_BRANCH, THIN, UP_TO_64, WRITERS, thin_cases

STAGES = flash.stages("bwd")
BY_NAME = {s.name: s for s in STAGES}
# (stage, whether it is asked to be deterministic)
KERNELS = [(s.name, wanted) for s in STAGES for wanted in (False, True)[:1 + s.deterministic_on_request]]
DETERMINISTIC = [(s.name, s.deterministic_on_request) for s in STAGES if s.can_be_deterministic]
# Rungs in the middle of a branch take fewer tests: a mistake there mostly shows at its end, and a test is a
# build more. So do ends that are asked to be deterministic: they differ in where dQ is added up. On Hopper's
# branch these take least: they change little but who copies, multiplies and waits.
ENDS = [kernel for kernel in KERNELS if is_end(BY_NAME[kernel[0]]) and not kernel[1]]
MOST = [kernel for kernel in KERNELS if kernel in ENDS or not BY_NAME[kernel[0]].needs.startswith("sm_90")]
ATOMIC = [kernel for kernel in MOST if not kernel[1] and not BY_NAME[kernel[0]].deterministic]


def name_of(kernel):
    return kernel[0] + "-deterministic" * kernel[1]


def cases_of(kernel) -> list[tuple]:
    """Fewer also where dQ is added up otherwise on request."""
    return cases_for(BY_NAME[kernel[0]]) if kernel in ENDS else thin_cases(BY_NAME[kernel[0]])


def columns_of(kernel) -> int:
    """d where it hardly matters: one of test_grid's, so that no more is built."""
    return 64 if kernel in ENDS else THIN[0][5]


def type_of(kernel) -> torch.dtype:
    """That of test_grid for this d: at the ends of a branch the last one."""
    stage = BY_NAME[kernel[0]]
    return stage.dtypes[-1] if kernel in ENDS else type_for(stage, THIN[0])


every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
most_kernels = pytest.mark.parametrize("kernel", MOST, ids=name_of)
most_kernels_and_types = pytest.mark.parametrize("kernel, dtype", [
    pytest.param(kernel, dtype, id=f"{name_of(kernel)}-{dtype}".replace("torch.", ""))
    for kernel in MOST for dtype in (BY_NAME[kernel[0]].dtypes if kernel in ENDS else [type_of(kernel)])])


def random_for(kernel, *shape_and_device, **options):
    """q, k and v of a type that the stage takes."""
    return random_qkv(*shape_and_device, dtype=type_of(kernel), **options)


def diagonal_of(mask, q, k):
    return {None: None, "top": 0, "bottom": k.shape[2] - q.shape[2]}[mask]


def run(kernel, q, k, v, do, diagonal=None, scale=None, dlse=None, **tiles):
    """(dq, dk, dv), from outputs that start as NaN. O and L are float64's, rounded."""
    name, wanted = kernel
    o, lse = reference(q.double(), k.double(), v.double(), diagonal, scale)
    with poisoned():
        return plan.backward(q, k, v, o.to(q.dtype), lse.float(), do, dlse, diagonal, scale,
                               *plan.choose(name, q, "bwd", wanted, **tiles), wanted)


def assert_equal(first, second):
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("kernel, case", [
    pytest.param(kernel, case, id=f"{name_of(kernel)}-{'-'.join(map(str, case))}")
    for kernel in KERNELS for case in cases_of(kernel)])
def test_grid(kernel, case, device):
    """With dL and without. A row that sees no key, a key that no row sees: exactly 0."""
    *shape, mask = case
    q, k, v = random_qkv(*shape, device, type_for(BY_NAME[kernel[0]], case))
    do, dlse = random_gradients(q)
    diagonal = diagonal_of(mask, q, k)
    for options in ((diagonal, None, None), (diagonal, None, dlse)):
        dq, dk, dv = run(kernel, q, k, v, do, *options)
        check_gradients((dq, dk, dv), q, k, v, do, *options)
        if mask:
            last_seen = q.shape[2] - 1 + diagonal
            assert all((x == 0).all() for x in (dq[:, :, :max(-diagonal, 0)], dk[:, :, last_seen + 1:],
                                                dv[:, :, last_seen + 1:]))


@pytest.mark.parametrize("stage, shape", itertools.product(SIDE_BRANCH, [
    (1, 4, 2, 100, 150, 200, "bottom"), (2, 2, 1, 33, 64, 136, "top"), (1, 3, 3, 65, 129, 256, None)]))
def test_large_head_dimensions(stage, shape, device):
    """Of the stages for d > 128: halves of d that are no whole panels; a block of a cluster without keys."""
    *shape, mask = shape
    q, k, v = random_qkv(*shape, device, BY_NAME[stage].dtypes[shape[-1] == 136])
    do, dlse = random_gradients(q)
    options = diagonal_of(mask, q, k), None, dlse
    check_gradients(run((stage, False), q, k, v, do, *options), q, k, v, do, *options)


@every_kernel
def test_random_shapes(kernel, device):
    """Shapes that nobody chose."""
    rng = random.Random(KERNELS.index(kernel))
    for seed in range(8 if kernel in ENDS else 3 if kernel in MOST else 2):
        H_kv = rng.choice([1, 2, 3])
        heads = H_kv * rng.randint(1, 3)
        q, k, v = random_for(kernel, rng.randint(1, 2), heads, H_kv, rng.randint(1, 140),
                             rng.randint(1, 140), columns_of(kernel), device, seed=seed)
        do, dlse = random_gradients(q, seed)
        options = diagonal_of(rng.choice([None, "bottom", "top"]), q, k), None, rng.choice([None, dlse])
        check_gradients(run(kernel, q, k, v, do, *options), q, k, v, do, *options)


@every_kernel
def test_strides(kernel, device):
    """Heads behind rows, as projections leave them, and one k for all heads; the gradients are laid out so,
    too. Then gaps of NaN, others in each tensor."""
    q, k, v = (x.transpose(1, 2) for x in random_for(kernel, 2, 50, 50, 6, 6, columns_of(kernel), device))
    do = random_gradients(q.transpose(1, 2))[0].transpose(1, 2)
    gradients = run(kernel, q, k, v, do)
    check_gradients(gradients, q, k, v, do)
    assert all(x.stride() == q.stride() for x in gradients)

    q, k, v = random_for(kernel, 2, 3, 1, 50, 50, columns_of(kernel), device)
    k, v = (x.expand(2, 3, -1, -1) for x in (k, v))
    do, dlse = random_gradients(q)
    check_gradients(run(kernel, q, k, v, do, 3, None, dlse), q, k, v, do, 3, None, dlse)

    q, k, v, diagonal = qkv_with_gaps(device, type_of(kernel), columns_of(kernel))
    do, dlse = random_gradients(q)
    do = with_gaps(do, 4)
    assert len({x.stride() for x in (q, k, v, do)}) == 4
    options = diagonal, None, dlse
    check_gradients(run(kernel, q, k, v, do, *options), q, k, v, do, *options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; test_checker.py looks at the grids")
@every_kernel
def test_many_heads(kernel):
    """B * H above 65535, the limit of a grid's y and z."""
    q, k, v = random_for(kernel, 65536, 1, 1, 1, 2, 8, "cuda")
    do, _ = random_gradients(q)
    check_gradients(run(kernel, q, k, v, do), q, k, v, do)


@pytest.mark.parametrize("stage, mask", [
    ("whole_group", "bottom"), ("whole_group", None), ("persistent", "bottom"), ("hopper_tuned", None),
    ("augmented", "bottom"), ("augmented", None)])
@pytest.mark.parametrize("H, H_kv, d, B, on_gpu",
                         [(6, 2, 64, 9, 400), (3, 1, 128, 9, 400), (8, 1, 64, 3, 132)])
def test_blocks_with_several_query_heads(H, H_kv, d, B, on_gpu, mask, stage, device):
    """All of a key head, or two of eight, if that leaves six blocks for each multiprocessor, of which the
    simulator has three."""
    q, k, v = random_qkv(B if device == "cpu" else on_gpu, H, H_kv, 70, 130, d, device, torch.bfloat16)
    do, dlse = random_gradients(q)
    options = diagonal_of(mask, q, k), None, dlse
    check_gradients(run((stage, False), q, k, v, do, *options), q, k, v, do, *options)


@with_two_schedules("stage, H, H_kv, N_q, N_k, d, diagonal", [
    (stage, *call) for stage in ("persistent", "whole_tiles", "hopper_tuned", *UP_TO_64)
    for n, call in enumerate((
        (2, 2, 70, 520, 64, 0),        # a tile of keys that some rows see, then four that none sees
        (4, 1, 140, 300, 128, 100),    # blocks of one query head, which write parts
        (2, 1, 150, 210, 40, None),
        (1, 1, 130, 210, 192, 60)))
    if stage == "hopper_tuned" or n % 2 == (stage == "persistent")])
def test_a_block_takes_one_tile_of_keys_after_the_other(stage, H, H_kv, N_q, N_k, d, diagonal, device,
                                                        schedule):
    """More of them than blocks, in orders in which these may ask for the next one. Of hopper_tuned all; of
    others two."""
    q, k, v = random_qkv(1 if device == "cpu" else 200, H, H_kv, N_q, N_k, d, device, torch.bfloat16)
    do, dlse = random_gradients(q)
    gradients = run((stage, False), q, k, v, do, diagonal, None, dlse)
    check_gradients(gradients, q, k, v, do, diagonal, None, dlse)
    if diagonal == 0:
        assert all((x[:, :, N_q:] == 0).all() for x in gradients[1:])


@pytest.mark.parametrize("stage", ["persistent", "whole_tiles", "hopper_tuned", *UP_TO_64])
def test_dk_and_dv_have_the_same_bits_each_time(stage, device, monkeypatch):
    """Whichever block makes them. In dQ blocks add in any order."""
    B, N, repeats = (20, 700, 50) if device == "cuda" else (1, 200, 4)
    q, k, v = random_qkv(B, 6, 3, N, N, 64, device, torch.bfloat16)
    do, _ = random_gradients(q)
    found = []
    for seed in range(repeats):
        monkeypatch.setenv("FLASH_SIM_COPIES", "random")
        monkeypatch.setenv("FLASH_SIM_SEED", str(seed))
        found.append(run((stage, False), q, k, v, do, 0)[1:])
    assert all(torch.equal(x, y) for dK_and_dV in found for x, y in zip(dK_and_dV, found[0], strict=True))


@pytest.mark.parametrize("d", [16, 32, 48, 64])
def test_dq_transposed_has_the_bits_of_dq(d, device):
    """The same products are added up, in the same order: of one tile of keys here, as sums of several have
    none. So it has hopper_tuned's bits, in its last rows and dims, too. (A GPU may add up otherwise if the
    operands of a product are exchanged.)"""
    for N_q in (1, 128, 263):
        q, k, v = random_qkv(1, 2, 1, N_q, 120, d, device, torch.bfloat16)
        do, dlse = random_gradients(q)
        options = 120 - N_q, None, dlse
        found = [run((stage, False), q, k, v, do, *options) for stage in ("hopper_tuned", *UP_TO_64)]
        for gradients in found:
            check_gradients(gradients, q, k, v, do, *options)
            if device == "cpu":
                assert_equal(gradients, found[0])


@most_kernels_and_types
def test_scale_and_large_scores(kernel, dtype, device):
    """Scores of some +-1000, where P is 0 or 1 nearly everywhere; and a negative scale, which is compiled for
    itself, of one type, and of every other rung in the middle; and a zero scale."""
    q, k, v = random_qkv(1, 2, 2, 70, 90, columns_of(kernel), device, dtype)
    do, dlse = random_gradients(q)
    negative = dtype == type_of(kernel) and (kernel in ENDS or BY_NAME[kernel[0]].number % 2)
    others = (-0.2, 0.0) if negative else (0.0,)
    for scale in (30.0, *others):
        gradients = run(kernel, q, k, v, do, 20, scale, dlse)
        check_gradients(gradients, q, k, v, do, 20, scale, dlse)
    assert (gradients[0] == 0).all() and (gradients[1] == 0).all(), "O does not depend on the scores"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_of_nan_spoils_no_other_row_of_dq(dtype, device):
    """In augmented its statistics are multiplied by 0 where other rows' are wanted: so they are finite."""
    q, k, v = random_qkv(1, 2, 2, 150, 90, 64, device, dtype)
    do, dlse = random_gradients(q)
    q[0, 0, 9], do[0, 1, 140], dlse[0, 1, 70] = torch.nan, torch.inf, torch.nan
    dq = run(("augmented", False), q, k, v, do, None, None, dlse)[0]
    spoilt = (~dq.isfinite()).any(-1).nonzero().tolist()
    assert spoilt == [[0, 0, 9], [0, 1, 70], [0, 1, 140]]


@pytest.mark.parametrize("stage", ["idle_warps", "first_stores"])
def test_tiles_that_see_no_key(stage, device):
    """Nobody adds to the first two tiles of queries: dQ is 0 there, whatever was in the workspace."""
    q, k, v = random_qkv(1, 2, 1, 400, 130, 64, device, torch.bfloat16)
    do, dlse = random_gradients(q)
    found = run((stage, False), q, k, v, do, 130 - 400, None, dlse)
    assert not found[0][:, :, :270].any()
    check_gradients(found, q, k, v, do, 130 - 400, None, dlse)


@pytest.mark.parametrize("d", [64, 128])
def test_three_parts_of_L_are_exact(d, device):
    """Scores of some +-1000: two parts are wrong by more than rounding, by less than PyTorch is (tried)."""
    q, k, v = random_qkv(1, 2, 1, 150, 90, d, device, torch.float16)
    do, dlse = random_gradients(q)
    found = [run((stage, False), q, k, v, do, 20, 30.0, dlse) for stage in ("augmented", "hopper_tuned")]
    for ours, theirs in zip(*found, strict=True):
        assert max_error(ours, theirs.double()) <= 1e-3 * theirs.abs().max().item()


@pytest.mark.parametrize("stage", ["seeded", "augmented"])
def test_scores_that_are_large_before_they_are_scaled(stage, device):
    """Some 10^6: then L / c is, too, and even the last of its parts is no trifle beside dP."""
    q, k, v = random_qkv(1, 2, 1, 150, 90, 64, device, torch.bfloat16)
    q, k = 300 * q, 300 * k
    do, dlse = random_gradients(q)
    options = 20, 1e-5, dlse
    check_gradients(run((stage, False), q, k, v, do, *options), q, k, v, do, *options)


@most_kernels
def test_far_below_zero(kernel, device):
    """L below -88: then e^(0 - L), of a key of zeros past the end, is infinite, and times 0 it is NaN."""
    q, k, v = random_for(kernel, 1, 2, 1, 70, 90, columns_of(kernel), device)
    q, k = q + 5, k - 5
    do, dlse = random_gradients(q)
    assert reference(q, k, v)[1].max() < -88
    check_gradients(run(kernel, q, k, v, do, None, None, dlse), q, k, v, do, None, None, dlse)


@every_kernel
def test_rows_that_see_no_key(kernel, device):
    """Their gradients are exactly 0, and what is in dL there, where L is -inf, goes nowhere."""
    q, k, v = random_for(kernel, 1, 2, 1, 60, 40, columns_of(kernel), device)
    do, dlse = random_gradients(q)
    expected = run(kernel, q, k, v, do, -20, None, dlse)
    assert (expected[0][:, :, :20] == 0).all() and (expected[0][:, :, 20:] != 0).any(-1).all()
    for value in (-math.inf, math.nan):
        dlse[:, :, :20] = value
        gradients = run(kernel, q, k, v, do, -20, None, dlse)
        assert (gradients[0][:, :, :20] == 0).all()
        check_gradients(gradients, q, k, v, do, -20, None, dlse)
    for x in run(kernel, q, k, v, do, -60, None, dlse):   # nobody sees anything
        assert (x == 0).all()


@pytest.mark.parametrize("what", ["q", "do"])
@every_kernel
def test_nan_stays_where_it_belongs(kernel, what, device):
    """A NaN in a row of Q or dO: in that row of dQ, and in dK and dV of its key head. Nowhere else."""
    q, k, v = random_for(kernel, 2, 4, 2, 40, 40, columns_of(kernel), device)
    do, _ = random_gradients(q)
    o, lse = reference(q, k, v)
    {"q": q, "do": do}[what][1, 2, 7, 3] = math.nan
    if what == "q":
        o[1, 2, 7], lse[1, 2, 7] = math.nan, math.nan
    with poisoned():
        dq, dk, dv = plan.backward(q, k, v, o, lse, do, None, None, None,
                                     *plan.choose(kernel[0], q, "bwd"), kernel[1])
    assert dq[1, 2, 7].isnan().all() and dk[1, 1].isnan().any() and dv[1, 1].isnan().any()
    dq[1, 2, 7], dk[1, 1], dv[1, 1] = 0, 0, 0
    assert not any(x.isnan().any() for x in (dq, dk, dv))


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_nan_in_a_key_that_no_row_sees(kernel, device):
    """It has no gradient, nor have its neighbours a wrong one: also where a tile ends past the last row."""
    q, k, v = random_for(kernel, 1, 2, 1, 40, 50, columns_of(kernel), device)
    do, _ = random_gradients(q)
    o, lse = reference(q, k, v, 0)
    k[0, 0, 45, 3] = math.nan
    with poisoned():
        _, dk, dv = plan.backward(q, k, v, o, lse, do, None, 0, None, *plan.choose(kernel[0], q, "bwd"),
                                    kernel[1])
    assert (dk[0, 0, 40:] == 0).all() and (dv[0, 0, 40:] == 0).all()
    assert not dk.isnan().any() and not dv.isnan().any()


@pytest.fixture
def scratch(monkeypatch) -> list[bytes]:
    """What each run on the CPU leaves in its workspace: sums in float, before they are rounded to 16 bits."""
    left = []

    def run_and_look(of, tensors):
        kept, empty = [], torch.empty  # perhaps poisoned()'s, which is over before monkeypatch undoes
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch, "empty", lambda *args, **options: (
                kept.append(empty(*args, **options)) or kept[-1]))
            run(of, tensors)
        if of.device.type == "cpu":
            left.append(b"".join(x.numpy().tobytes() for x in kept))
    run = plan.run
    monkeypatch.setattr(plan, "run", run_and_look)
    return left


def small_tiles(kernel) -> dict[str, int]:
    return tile_sizes(BY_NAME[kernel[0]], 32)[0]


@pytest.mark.parametrize("kernel", DETERMINISTIC, ids=name_of)
def test_bit_identical_every_run(kernel, device, monkeypatch, scratch):
    """Over repetitions, and in the simulator also over the order in which threads and blocks run: many blocks
    have a part in each row of dQ, more than there are copies of it."""
    q, k, v = random_for(kernel, 1, 4, 2, 70, 600, 32, device)
    do, dlse = random_gradients(q)
    first = run(kernel, q, k, v, do, 530, None, dlse, **small_tiles(kernel))
    for seed in range(3):
        monkeypatch.setenv("FLASH_SIM_SEED", str(seed))
        monkeypatch.setenv("FLASH_SIM_THREADS", str(seed + 1))
        assert_equal(run(kernel, q, k, v, do, 530, None, dlse, **small_tiles(kernel)), first)
    assert len(set(scratch)) == (device == "cpu")


@pytest.mark.parametrize("mask", ["window", "documents"])
@pytest.mark.parametrize("stage", ["semaphores", "exchanged_semaphores", "first_stores"])
def test_bit_identical_under_a_mask(stage, mask, monkeypatch, device):
    """Where a tile of queries sees some tiles of keys only, as a range or as a list, it waits for these."""
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 4, 2, 600, 600, 64, device, torch.float16))
    ids = (torch.arange(600, device=device) // 90 % 4).int()       # the first ones come again: not in a row
    masks = flash.masks
    given = masks.window(150, 0) if mask == "window" else masks.document(ids)
    do, found = torch.randn_like(q), []
    for seed in range(3):
        monkeypatch.setenv("FLASH_SIM_SEED", str(seed))
        monkeypatch.setenv("FLASH_SIM_THREADS", str(seed + 1))
        o = flash.attention(q, k, v, mask=given, backward=stage, deterministic=True)
        found.append(torch.autograd.grad(o, (q, k, v), do))
        assert_equal(found[-1], found[0])
    o = flash.attention(q, k, v, mask=given, backward="hopper_tuned")
    for ours, theirs in zip(found[0], torch.autograd.grad(o, (q, k, v), do), strict=True):
        assert max_error(ours, theirs.double()) < 4e-3 * theirs.abs().max().item()


@pytest.mark.parametrize("stage", ["semaphores", "exchanged_semaphores", "first_stores", "packed_semaphores"])
@pytest.mark.parametrize("H, H_kv", [(3, 3), (6, 3), (4, 1), (8, 2)])
def test_heads_with_and_without_a_pair(stage, H, H_kv, device):
    """Tiles of even heads come from the last one down, and those of odd ones from the first one up, if heads
    are even in number: all tiles of all heads come once."""
    q, k, v = random_qkv(2, H, H_kv, 200, 330, 64, device, torch.float16)
    do, dlse = random_gradients(q)
    check_gradients(run((stage, False), q, k, v, do, 130, None, dlse), q, k, v, do, 130, None, dlse)


@pytest.mark.parametrize("stage, H, H_kv, fro", [
    ("semaphores", 2, 2, [1]), ("semaphores", 3, 3, []), ("first_stores", 4, 2, [2, 3]),
    ("first_stores", 2, 1, []), ("exchanged_semaphores", 2, 1, [1]), ("exchanged_semaphores", 3, 3, []),
    ("packed_semaphores", 2, 2, [])])
def test_sums_come_to_and_fro(stage, H, H_kv, fro, device):
    """The order shows where sums are rounded. P is the same for all keys; three have a V, and so the same dS,
    and their K are large, its negative, and tiny, each in a tile of its own. To, the tiny one comes first,
    and is lost; fro it comes last."""
    q, k, v = torch.zeros(1, H, 384, 64), torch.zeros(1, H_kv, 384, 64), torch.zeros(1, H_kv, 384, 64)
    k[:, :, 5], k[:, :, 133], k[:, :, 261] = 2.**20, -2.**20, 2.**-10
    v[:, :, [5, 133, 261]] = 1
    q, k, v = (x.to(device, torch.bfloat16).requires_grad_() for x in (q, k, v))
    o = flash.attention(q, k, v, causal=True, backward=stage)
    dq, = torch.autograd.grad(o, q, torch.ones_like(o))
    assert [h for h in range(H) if dq[0, h, 261:].all()] == fro
    assert not any(dq[0, h, 261:].any() for h in range(H) if h not in fro)


@pytest.fixture
def with_copies(tmp_path):
    """exchanged_semaphores as on a GPU of 132 multiprocessors, where a call of few items has two copies of
    dQ."""
    text, asked = BY_NAME["exchanged_semaphores"].path.read_text(), "copies_of_dQ(p, multiprocessors()"
    assert text.count(asked) == 1
    (tmp_path / "copies.cuh").write_text(text.replace(asked, "copies_of_dQ(p, 132"))
    return tmp_path / "copies.cuh"


def in_three_orders(monkeypatch, gradients):
    """What gradients() returns, in the simulator by other schedules. They are the same, to the bit."""
    found = []
    for seed, copies in enumerate(("late", "early", "random")):
        monkeypatch.setenv("FLASH_SIM_SEED", str(seed))
        monkeypatch.setenv("FLASH_SIM_THREADS", str(seed + 1))
        monkeypatch.setenv("FLASH_SIM_COPIES", copies)
        found.append(gradients())
        assert_equal(found[-1], found[0])
    return found[0]


@pytest.mark.parametrize("d", [64, 136])
def test_copies_of_dq(d, monkeypatch, device, with_copies, scratch):
    """Five tiles of keys, three in a copy and two. The sums in the workspace have the same bits, too."""
    q, k, v = random_qkv(1, 4, 2, 305, 600, d, device, torch.bfloat16)
    do, dlse = random_gradients(q)
    kernel = with_copies, False
    found = in_three_orders(monkeypatch, lambda: run(kernel, q, k, v, do, None, None, dlse))
    check_gradients(found, q, k, v, do, None, None, dlse)
    assert device == "cuda" or len(set(scratch)) == 1
    if device == "cpu":
        with flash.inspect() as report:
            run(kernel, q, k, v, do, None, None, dlse)
        assert not report.findings, report


def unequal_units(N_q, N_k):
    """A few keys that all see, many that some see, and at the end tiles of keys that nobody sees."""
    rows, keys = torch.arange(N_q)[:, None], torch.arange(N_k)
    return (keys < 20) | (rows > 100) & (keys < 300) & (keys > 150) | (rows < 9) & (keys == 700)


@pytest.mark.parametrize("stage, d, kind", [
    ("exchanged_group", 64, "list"), ("exchanged_stream_k", 64, "list"),
    ("exchanged_stream_k", 136, "causal"), ("exchanged_stream_k", 72, "dropout")])
def test_clusters_share_steps(stage, d, kind, monkeypatch, device, tmp_path):
    """Of units that are unequal, some of them empty, or more than a warp has lanes; also if there are more
    clusters than steps. dK and dV have the same bits each time."""
    B, N_q, N_k = {"list": (1, 150, 900), "causal": (1, 150, 270), "dropout": (6, 40, 270)}[kind]
    q, k, v = (x.requires_grad_() for x in random_qkv(B, 4, 2, N_q, N_k, d, device, torch.float16))
    given = {"list": {"mask": flash.masks.boolean(unequal_units(N_q, N_k).to(device))},
             "causal": {"causal": True}, "dropout": {"dropout_p": 0.2, "causal": True}}[kind]
    text, asked = BY_NAME[stage].path.read_text(), "ceil_div(multiprocessors(), 2)"
    assert text.count(asked) == 1 and text.count("+ clusters();") == (stage == "exchanged_stream_k")
    mine = tmp_path / "mine.cuh"            # a plan keeps the size of its workspace
    mine.write_text(text.replace(asked, 'atoi(getenv("CLUSTERS"))').replace("+ clusters();", "+ 40;"))
    do = torch.randn_like(q)

    def gradients(backward):
        torch.manual_seed(7)
        o = flash.attention(q, k, v, backward=backward, **given)
        return torch.autograd.grad(o, (q, k, v), do)

    expected = gradients("exchanged_tuned")
    for clusters in (3,) if stage == "exchanged_group" else (1, 5, 40):
        monkeypatch.setenv("CLUSTERS", str(clusters))
        found = []
        for seed, copies in enumerate(("late", "early", "random") if clusters == 5 else ("random",)):
            monkeypatch.setenv("FLASH_SIM_SEED", str(seed))
            monkeypatch.setenv("FLASH_SIM_COPIES", copies)
            found.append(gradients(mine))
            assert_equal(found[-1][1:], found[0][1:])
        for ours, theirs in zip(found[0], expected, strict=True):
            assert max_error(ours, theirs.double()) < 2e-3 * theirs.abs().max().item(), clusters
        if device == "cpu" and clusters == 5:
            with flash.inspect() as report:
                gradients(mine)
            assert not report.findings, report


def test_copies_of_dq_with_dropout(monkeypatch, device, with_copies):
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 2, 1, 450, 450, 64, device, torch.float16))
    do = torch.randn_like(q)

    def gradients(backward):
        torch.manual_seed(7)
        o = flash.attention(q, k, v, backward=backward, dropout_p=0.2)
        return torch.autograd.grad(o, (q, k, v), do)

    found = in_three_orders(monkeypatch, lambda: gradients(with_copies))
    for ours, theirs in zip(found, gradients("hopper_tuned"), strict=True):
        assert max_error(ours, theirs.double()) < 4e-3 * theirs.abs().max().item()


@pytest.mark.parametrize("H, N_q, N_k, causal, copies", [
    (1, 200, 300, False, 2), (22, 200, 384, False, 2), (23, 200, 384, False, 1), (22, 200, 385, False, 1),
    (1, 200, 128, False, 1), (1, 600, 300, False, 2), (1, 601, 300, False, 1), (1, 200, 300, True, 1)])
def test_only_small_calls_have_copies_of_dq(H, N_q, N_k, causal, copies, with_copies):
    """No more items than pairs of multiprocessors, 66; several tiles of keys, and not many more queries; no
    mask. By the bytes of the workspace."""
    q, k, v = (x.requires_grad_() for x in random_qkv(1, H, H, N_q, N_k, 64, "cpu", torch.float16))
    one = flash.explain(q, k, v, causal=causal, backward=with_copies).backward
    tiles = H * -(-N_q // 64)
    assert one.workspace_bytes == 4 * (tiles * 64 * (copies * 64 + 2) + 2 * copies * tiles)


def test_a_block_that_has_not_started_owns_nothing(monkeypatch, tmp_path):
    """Idle warps wait for tiles that other blocks add to. With 96 blocks, of which eight run at a time, all
    comes to an end if blocks draw their first item, too; not if that is the one of their number."""
    monkeypatch.setenv("FLASH_SIM_THREADS", "1")
    monkeypatch.setenv("FLASH_SIM_SECONDS", "5")
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 8, 8, 70, 384, 16, "cpu", torch.float16))
    do = torch.randn_like(q)

    def gradients(backward):
        o = flash.attention(q, k, v, backward=backward, Br_bwd=64, Bc_bwd=64)
        return torch.autograd.grad(o, (q, k, v), do)

    def changed(name, *changes):
        text = BY_NAME["idle_warps"].path.read_text()
        for old, new in (("EarlyLaunch(items.blocks(), ", "EarlyLaunch(96, "), *changes):
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    expected = gradients("hopper_tuned")
    for ours, theirs in zip(gradients(changed("by_ticket.cuh")), expected, strict=True):
        assert max_error(ours, theirs.double()) < 4e-3 * theirs.abs().max().item()
    by_number = changed("by_number.cuh", ("next = next_item(w.ticket);;", "next = blockIdx.x;;"),
                        ("  prepare_seeds(", "  w.first_ticket = 96;\n  prepare_seeds("))
    with pytest.raises(RuntimeError, match="FLASH_SIM_SECONDS"):
        gradients(by_number)


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_least_that_is_cleared_ahead_is_enough(seed, monkeypatch, tmp_path):
    """The quarters of the heads that are together, as common/idle_warps.cuh says: then every wait ends. (Not
    if a block goes on to its next item before all of the last one is counted.)"""
    common, stage = flash.STAGES / "common" / "idle_warps.cuh", BY_NAME["idle_warps"].path
    far = "max(together, int(gridDim.x / items.tiles + 1) * items.block_heads)"
    text = common.read_text()
    assert text.count(far) == 1
    text = text.replace(far, "together").replace("#pragma once\n", "")
    text = text.replace('#include "', '#include "common/')
    without = stage.read_text().replace('#include "common/idle_warps.cuh"\n', "")
    begin = "\nconstexpr int d ="
    (tmp_path / "least.cuh").write_text(without.replace(begin, f"\n{text}{begin}", 1))
    monkeypatch.setenv("FLASH_SIM_SEED", seed)
    monkeypatch.setenv("FLASH_SIM_THREADS", "1")
    monkeypatch.setenv("FLASH_SIM_SECONDS", "5")
    q, k, v = (x.requires_grad_() for x in random_qkv(3, 8, 8, 130, 40, 16, "cpu", torch.float16))
    do, found = torch.randn_like(q), []
    for backward in (tmp_path / "least.cuh", "hopper_tuned"):
        o = flash.attention(q, k, v, backward=backward, Br_bwd=64, Bc_bwd=64)
        found.append(torch.autograd.grad(o, (q, k, v), do))
    for ours, theirs in zip(*found, strict=True):
        assert max_error(ours, theirs.double()) < 4e-3 * theirs.abs().max().item()


@pytest.mark.parametrize("kernel", ATOMIC, ids=name_of)
def test_atomics_only_where_the_header_says_so(kernel, monkeypatch, scratch):
    """dQ depends on the order of the blocks, so "deterministic: no" is no idle warning; dK and dV do not.
    (In 16 bits dQ's sum does, and rounding may hide it.)"""
    q, k, v = random_for(kernel, 1, 4, 2, 70, 400, columns_of(kernel), "cpu")
    do, _ = random_gradients(q)
    runs = []
    for seed in range(4):
        monkeypatch.setenv("FLASH_SIM_SEED", str(seed))
        monkeypatch.setenv("FLASH_SIM_THREADS", str(seed + 1))
        runs.append(run(kernel, q, k, v, do))
    in_fp32 = type_of(kernel) == torch.float32
    assert any(not torch.equal(dq, runs[0][0]) for dq, _, _ in runs) if in_fp32 else len(set(scratch)) > 1
    for gradients in runs:
        assert_equal(gradients[1:], runs[0][1:])


@pytest.mark.parametrize("kernel, visible", [
    *(pytest.param(kernel, 230, id=name_of(kernel)) for kernel in DETERMINISTIC),
    *(pytest.param((name, False), None, id=f"{name}-full") for name in ("semaphores", "first_stores"))])
def test_bits_do_not_depend_on_the_batch(kernel, visible, device):
    """A sample gives the same bits alone and as the first or the last of four. Not dK and dV where a block
    takes as many query heads as the call has blocks for: their sums have another order then. (In the first
    type, as rounding to bf16 hides that.)"""
    q, k, v = random_qkv(4, 4, 2, 70, 300, 32, device, BY_NAME[kernel[0]].dtypes[0])
    do, dlse = random_gradients(q)
    tiles = small_tiles(kernel)
    q[3], k[3], v[3], do[3], dlse[3] = q[0], k[0], v[0], do[0], dlse[0]
    alone = run(kernel, *(x[:1] for x in (q, k, v, do)), visible, None, dlse[:1], **tiles)
    together = run(kernel, q, k, v, do, visible, None, dlse, **tiles)
    same = 1 if kernel[0] in (*WRITERS, *PACKED) else 3
    for b in (0, 3):
        assert_equal([x[b:b + 1] for x in together[:same]], alone[:same])


@pytest.mark.parametrize("kernel, mask", [
    pytest.param(kernel, mask, id=f"{name_of(kernel)}-{mask}")
    for kernel in MOST for mask in ((None, "top", "bottom") if kernel in ENDS else ("bottom",))])
def test_directional_derivative(kernel, mask, device):
    """What the loss does when q, k or v moves a little, by the forward pass alone: without autograd."""
    q, k, v = random_qkv(1, 2, 1, 5, 7, columns_of(kernel), device, BY_NAME[kernel[0]].dtypes[0])
    do, dlse = random_gradients(q)
    diagonal = diagonal_of(mask, q, k)
    gradients = run(kernel, q, k, v, do, diagonal, None, dlse)
    allowed = 1e-5 if q.dtype == torch.float32 else 16 * torch.finfo(q.dtype).eps

    def loss(step):
        o, lse = reference(*(x.double() + step * u for x, u in zip((q, k, v), direction)), diagonal)
        return ((o * do).sum() + (lse * dlse).sum()).item()

    for moved in range(3):  # q alone, k alone, v alone
        direction = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
        direction[moved] = torch.randn(direction[moved].shape, dtype=torch.float64,
                                       generator=torch.Generator().manual_seed(moved)).to(device)
        expected = (loss(1e-5) - loss(-1e-5)) / 2e-5
        found = (gradients[moved].double() * direction[moved]).sum().item()
        assert abs(expected) > 0.1 and abs(found - expected) < allowed * max(1, abs(expected))


@most_kernels
def test_tile_sizes(kernel, device):
    """Small and large tiles, the same result; in the middle of a branch one of them, by turns. Of the last
    type."""
    stage = BY_NAME[kernel[0]]
    q, k, v = random_qkv(1, 2, 1, 75, 90, 64, device, stage.dtypes[-1])
    do, _ = random_gradients(q)
    small, _, large = tile_sizes(stage, 64)
    sizes = [small, large] if kernel in ENDS else [(small, large)[stage.number % 2]]
    for tiles in [tiles for n, tiles in enumerate(sizes) if tiles not in sizes[:n]]:
        check_gradients(run(kernel, q, k, v, do, 15, **tiles), q, k, v, do, 15)


@pytest.mark.parametrize("name", [*WRITERS, "packed_semaphores"])
def test_a_tile_of_queries_is_half_of_one_of_keys(name, device):
    """Then the room for sums of dQ is half as large, and dK and dV, which leave through it, keep to that."""
    asked = BY_NAME[name].can_be_deterministic
    q, k, v = random_qkv(1, 1, 1, 140, 270, 64, device, torch.bfloat16)
    do, _ = random_gradients(q)
    with flash.inspect() if device == "cpu" else contextlib.nullcontext() as report:
        found = run((name, asked), q, k, v, do, 0, Br=64, Bc=128)
    check_gradients(found, q, k, v, do, 0)
    assert not (report and report.findings), report


@pytest.mark.parametrize("kernel", ENDS[1:], ids=name_of)
def test_as_naive(kernel, device):
    """From the O and L that a forward stage leaves, as in training: what the plainest stage makes of them."""
    q, k, v = random_for(kernel, 1, 4, 2, 200, 230, 64, device)
    do, dlse = random_gradients(q)
    o, lse = plan.forward(q, k, v, 30, None, *plan.choose(None, q))
    ours = plan.backward(q, k, v, o, lse, do, dlse, 30, None, *plan.choose(kernel[0], q, "bwd"),
                           kernel[1])
    in_fp32 = [x.float() for x in (q, k, v, o, lse, do, dlse)]
    naive = plan.backward(*in_fp32, 30, None, *plan.choose("naive", in_fp32[0], "bwd"), False)
    allowed = 3e-6 if q.dtype == torch.float32 else 4 * torch.finfo(q.dtype).eps
    for x, y in zip(ours, naive):
        assert max_error(x, y.double()) < allowed * y.abs().max().item()


@pytest.mark.parametrize("name", SIDE_BRANCH)
def test_header_knows_the_shared_memory_that_fits(name):
    """The bytes that the kernel has, of stages that take one size of tiles."""
    stage = BY_NAME[name]
    q, k, v = random_qkv(1, 1, 1, 16, 16, 256, "cpu", stage.dtypes[0])
    with flash.inspect() as report:
        run((name, False), q, k, v, q)
    stated = evaluate(stage.shared, d=256, **stage.default_tiles(256))
    assert max(kernel.shared_bytes for kernel in report.kernels) == -(-stated // 16) * 16


@pytest.mark.parametrize("stage", [s for s in STAGES if s.shared != "0" and is_end(s)], ids=lambda s: s.name)
def test_header_knows_the_shared_memory(stage, monkeypatch):
    """The bytes that the kernels ask for: past Python's check, CUDA names the number. (Of all stages:
    test_hbm_traffic_of_a_backward_stage.)"""
    monkeypatch.setattr(plan, "shared_memory_per_block", lambda device: 10**9)
    sizes = [{"Br": n, "Bc": n} for n in (128, 64)]
    tiles = next(tiles for tiles in sizes if not stage._tile_problem(256, 10**9, tiles))
    stated = evaluate(stage.shared, d=256, **tiles)
    assert stated > 227 * 1024
    q, k, v = random_qkv(1, 1, 1, 16, 16, 256, "cpu", stage.dtypes[0])
    with pytest.raises(RuntimeError, match=f" {stated} bytes of shared memory a block; at most 232448 are"):
        run((stage.name, False), q, k, v, q, **tiles)


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.name)
def test_default_tiles_shrink_to_fit(stage):
    """Every d on an H100. Up to stage 3 every d on every GPU since Ampere, too (99 KB a block at least), and
    up to 192 on a T4 (64 KB)."""
    for d in range(8, 193 if stage.name in WRITERS else 257, 8):
        assert stage.tiles(d, 227 * 1024) == stage.default_tiles(d)
        if stage.number <= 3:
            assert stage.tiles(d, 99 * 1024) and (d > 192 or stage.tiles(d, 64 * 1024))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_kernel
def test_runs_on_torchs_stream(kernel):
    """All kernels of a stage must wait for what the stream does before, and not for other streams."""
    q, k, v = random_for(kernel, 1, 2, 2, 128, 128, 64, "cuda")
    do, _ = random_gradients(q)
    late = torch.zeros_like(do)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        o, lse = reference(q, k, v)
        torch.cuda._sleep(100_000_000)
        late.copy_(do)
        gradients = plan.backward(q, k, v, o, lse, late, None, None, None,
                                    *plan.choose(kernel[0], q, "bwd"), kernel[1])
    stream.synchronize()
    check_gradients(gradients, q, k, v, do)
