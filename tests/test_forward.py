"""Every forward stage, over one grid of shapes, against float64. New stages join by being in stages/."""

import contextlib
import math
import random

import pytest
import torch
from conftest import (
    GRID,
    cases_for,
    check,
    is_end,
    max_error,
    poisoned,
    qkv_with_gaps,
    random_qkv,
    reference,
    tile_sizes,
    type_for,
)

import flash
from flash_ladder import plan
from flash_ladder.grid import LARGE, THIN

BY_NAME = {s.name: s for s in flash.stages("fwd")}
STAGES = list(BY_NAME)
KINDS = [pytest.param(s.name, dtype, id=f"{s.name}-{dtype}".replace("torch.", ""))
         for s in BY_NAME.values() for dtype in (s.dtypes if is_end(s) else [type_for(s, THIN[0])])]
DETERMINISTIC = [s.name for s in flash.stages("fwd") if s.deterministic]


def columns_of(stage) -> int:
    """d where it hardly matters: one of test_grid's, so that no more is built."""
    return 64 if is_end(BY_NAME[stage]) else THIN[0][5]


def type_of(stage) -> torch.dtype:
    """That of test_grid for this d: at the ends of a branch the last one."""
    return BY_NAME[stage].dtypes[-1] if is_end(BY_NAME[stage]) else type_for(BY_NAME[stage], THIN[0])


def random_for(stage, *shape_and_device, **options):
    """q, k and v of a type that the stage takes."""
    return random_qkv(*shape_and_device, dtype=type_of(stage), **options)


def run(stage, q, k, v, mask=None, **options):
    """(o, L, diagonal) with outputs that start as NaN."""
    with poisoned():
        if mask == "top":
            scale = options.pop("scale", None)
            chosen = plan.choose(stage, q, visible=0, **options)
            return *plan.forward(q, k, v, 0, scale, *chosen), 0
        o, lse = flash.attention(q, k, v, causal=mask == "bottom", stage=stage, return_lse=True, **options)
    return o, lse, k.shape[2] - q.shape[2] if mask else None


def test_poison_is_nan_and_guarded(device):
    with poisoned():
        assert torch.empty(3, 5, dtype=torch.float32, device=device).isnan().all()
        like = torch.empty_like(torch.zeros(2, 3, 4, device=device).transpose(1, 2))
        assert like.isnan().all() and like.shape == (2, 4, 3) and like.stride() == (12, 1, 4)
        assert torch.empty(400, dtype=torch.uint8, device=device).view(torch.float32).isnan().all()
    for outside, message in [(-1, "before the start"), (12, "past the end")]:
        with pytest.raises(AssertionError, match=message), poisoned():
            x = torch.empty(12, dtype=torch.float32, device=device)
            x.as_strided([1], [1], x.storage_offset() + outside).zero_()


@pytest.mark.parametrize("stage, case", [
    pytest.param(s.name, case, id=f"{s.name}-{'-'.join(map(str, case))}")
    for s in BY_NAME.values() for case in cases_for(s)])
def test_grid(stage, case, device):
    *shape, mask = case
    q, k, v = random_qkv(*shape, device, type_for(BY_NAME[stage], case))
    o, lse, diagonal = run(stage, q, k, v, mask)
    check(o, lse, q, k, v, diagonal)
    unseen = reference(q, k, v, diagonal)[1] == -torch.inf
    assert (o[unseen] == 0).all() and (lse[unseen] == -torch.inf).all()


def large_tiles(stage, case) -> list[tuple]:
    """Those of large calls, where they differ from the tiles of calls as small as those of the grid."""
    d, causal = case[5], bool(case[6])
    found = [stage.default_tiles(d, rows, causal, keys=keys) for rows, keys in LARGE]
    return list(dict.fromkeys(tuple(x.values()) for x in found if x != stage.default_tiles(d, 1, causal)))


# Of the grid what rungs in the middle take, and each d again that has other tiles, with a mask and without;
# of what grew from hopper_tuned, whose tiles it has, every other one
LARGE_CALLS = [(s.name, case, *tiles[n % len(tiles)]) for s in flash.stages("fwd")
               for n, case in enumerate([*THIN, *GRID[1:3], *GRID[7:9]])
               if (s.number <= BY_NAME["hopper_tuned"].number or (n + s.number) % 2)
               and (tiles := large_tiles(s, case))]


@pytest.mark.parametrize("stage, case, Br, Bc", LARGE_CALLS, ids=str)
def test_grid_with_the_tiles_of_large_calls(stage, case, Br, Bc, device):
    """If there are several, they take turns."""
    *shape, mask = case
    q, k, v = random_for(stage, *shape, device)
    o, lse, diagonal = run(stage, q, k, v, mask, Br=Br, Bc=Bc)
    check(o, lse, q, k, v, diagonal)


def test_more_tiles_than_a_grid_has_rows(device):
    """65535, of its y and z: a grid has one dimension. With one key, O is V."""
    q, k, v = random_qkv(1, 1, 1, 65535 * 16 + 40, 1, 8, device, torch.float16)
    o, lse, _ = run("ampere_tuned", q, k, v, Br=16, Bc=16)
    assert torch.equal(o, v.expand_as(o))
    torch.testing.assert_close(lse, (q.float() @ k.float().mT)[..., 0] / 8**0.5, rtol=0, atol=1e-5)


@pytest.mark.parametrize("B, H, H_kv", [(3, 8, 4), (1, 37, 37), (2, 16, 1), (1, 5, 1)])
def test_heads_together(B, H, H_kv, device):
    """ampere_tuned takes 16 heads at a time, the last ones fewer; with a mask, all."""
    q, k, v = random_for("ampere_tuned", B, H, H_kv, 40, 20, 8, device)
    for mask in (None, "bottom"):
        with flash.inspect() if device == "cpu" else contextlib.nullcontext() as report:
            o, lse, diagonal = run("ampere_tuned", q, k, v, mask, Br=16, Bc=16)
        check(o, lse, q, k, v, diagonal)
        if report:
            assert report.kernels[0].grid == (3 * B * H, 1, 1)


@pytest.mark.parametrize("stage", STAGES)
def test_random_shapes(stage, device):
    """Shapes that nobody chose, of one d: see columns_of()."""
    rng = random.Random(STAGES.index(stage))
    for seed in range(8 if is_end(BY_NAME[stage]) else 2):
        H_kv = rng.choice([1, 2, 3])
        shape = (
            rng.randint(1, 2),
            H_kv * rng.randint(1, 3),
            H_kv,
            rng.randint(1, 140),
            rng.randint(1, 140),
            columns_of(stage),
        )
        mask = rng.choice([None, "bottom", "top"])
        q, k, v = random_for(stage, *shape, device, seed=seed)
        o, lse, diagonal = run(stage, q, k, v, mask)
        check(o, lse, q, k, v, diagonal)


@pytest.mark.parametrize("stage", STAGES)
def test_strides(stage, device):
    """Heads behind rows (as projections leave them), q, k, v in one tensor, row gaps, one k for all heads."""
    B, H, N, d = 2, 3, 50, columns_of(stage)
    q, k, v = random_for(stage, B, N, N, H, H, d, device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse, _ = run(stage, q, k, v)
    check(o, lse, q, k, v)
    assert o.stride() == q.stride()

    gap = 16 // q.element_size()
    fused = torch.randn(B, N, 3, H, d + gap, generator=torch.Generator().manual_seed(1)).to(device, q.dtype)
    q, k, v = (x.transpose(1, 2)[..., :d] for x in fused.unbind(2))
    o, lse, diagonal = run(stage, q, k, v, "bottom")
    check(o, lse, q, k, v, diagonal)

    q, k, v = random_for(stage, B, H, 1, N, N, d, device)
    k, v = k.expand(B, H, N, d), v.expand(B, H, N, d)
    o, lse, _ = run(stage, q, k, v)
    check(o, lse, q, k, v)


@pytest.mark.parametrize("stage", STAGES)
def test_every_tensor_has_its_own_strides(stage, device):
    """And NaN lies between what belongs to each."""
    q, k, v, diagonal = qkv_with_gaps(device, type_of(stage), columns_of(stage))
    o, lse, _ = run(stage, q, k, v, "bottom")
    check(o, lse, q, k, v, diagonal)


@pytest.mark.parametrize("stage", STAGES)
def test_many_heads(stage, device):
    """B * H above 65535, the limit of a grid's y and z; on a GPU as many groups of 16. The
    simulator runs every thread: there a stage with few of them, and the one with an order of its own."""
    if device == "cpu" and stage not in ("naive", "ampere_tuned"):
        pytest.skip("slow in the simulator; it runs on a GPU")
    q, k, v = random_for(stage, 65536 if device == "cpu" else 1 << 20, 1, 1, 1, 2, 8, device)
    o, lse, _ = run(stage, q, k, v, **tile_sizes(BY_NAME[stage], 8)[0])
    check(o, lse, q, k, v)


@pytest.mark.parametrize("stage, dtype", KINDS)
def test_scale_and_large_scores(stage, dtype, device):
    """Scores of some +-1000: exp of them overflows without the maximum; and a zero scale, and a negative one,
    which is compiled for itself: of one type, and of every other rung in the middle."""
    q, k, v = random_qkv(1, 2, 2, 70, 90, columns_of(stage), device, dtype)
    negative = dtype == type_of(stage) and (is_end(BY_NAME[stage]) or BY_NAME[stage].number % 2)
    others = (-0.2, 0.0) if negative else (0.0,)
    for scale in (30.0, *others):
        o, lse, diagonal = run(stage, q, k, v, "bottom", scale=scale)
        check(o, lse, q, k, v, diagonal, scale)


@pytest.mark.parametrize("stage", STAGES)
def test_growing_maximum(stage, device):
    """Keys sorted by score: the row maximum changes in every tile, so that every rescaling counts."""
    q, k, v = random_for(stage, 1, 1, 1, 40, 400, columns_of(stage), device)
    q[:] = q[:, :, :1]
    order = (q[:, :, :1] @ k.transpose(-1, -2)).flatten().argsort()
    k = k[:, :, order].contiguous()
    o, lse, _ = run(stage, q, k, v, scale=1.0)
    check(o, lse, q, k, v, scale=1.0)


@pytest.mark.parametrize("stage", STAGES)
def test_nan_stays_in_its_row(stage, device):
    q, k, v = random_for(stage, 1, 1, 1, 40, 40, columns_of(stage), device)
    q[0, 0, 7, 3] = math.nan
    o, lse, _ = run(stage, q, k, v)
    assert o[0, 0, 7].isnan().all()
    o[0, 0, 7], q[0, 0, 7, 3] = 0, 0
    assert not o.isnan().any()


@pytest.mark.parametrize("stage", DETERMINISTIC)
def test_bit_identical_every_run(stage, device, monkeypatch):
    """Over repetitions, and in the simulator also over the order in which threads and blocks run."""
    q, k, v = random_for(stage, 1, 4, 2, 70, 70, columns_of(stage), device)
    first = run(stage, q, k, v, "bottom")
    for seed in range(3):
        monkeypatch.setenv("FLASH_SIM_SEED", str(seed))
        monkeypatch.setenv("FLASH_SIM_THREADS", str(seed + 1))
        again = run(stage, q, k, v, "bottom")
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("stage", [s for s in STAGES if is_end(BY_NAME[s]) or BY_NAME[s].number % 3])
def test_tile_sizes(stage, device):
    """Small and large tiles, the same result; in the middle of a branch, of two stages of three, the smallest
    or the largest, by turns. Of the last type."""
    q, k, v = random_qkv(1, 2, 1, 75, 90, 64, device, BY_NAME[stage].dtypes[-1])
    small, _, large = tile_sizes(BY_NAME[stage], 64)
    for tiles in [small, large] if is_end(BY_NAME[stage]) else [(small, large)[BY_NAME[stage].number % 2]]:
        o, lse, diagonal = run(stage, q, k, v, "bottom", **tiles)
        check(o, lse, q, k, v, diagonal)


def test_scaled_dot_product_attention_is_pytorchs(device):
    """Same arguments, same result as torch.nn.functional's, whose is_causal is aligned to the top left."""
    q, k, v = random_qkv(2, 4, 2, 30, 50, 64, device)
    for options in ({}, {"is_causal": True}, {"scale": 0.3}):
        ours = flash.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), enable_gqa=True, **options
        )
        assert max_error(ours, theirs) < 3e-6


def test_stage_none_takes_the_best(device):
    dtypes = {dtype for s in flash.stages("fwd") for dtype in s.dtypes if s.available(device, dtype)}
    assert torch.float32 in dtypes
    for dtype in dtypes:
        q, k, v = random_qkv(1, 1, 1, 20, 20, 16, device, dtype)
        best = flash.find_stage(None, dtype, torch.device(device))
        assert best.default
        assert torch.equal(flash.attention(q, k, v), flash.attention(q, k, v, stage=best.name))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_runs_on_torchs_stream():
    """A stage must wait for what its stream does before, and not for other streams."""
    q, k, v = random_qkv(1, 2, 2, 128, 128, 64, "cuda")
    expected = flash.attention(q, k, v, stage="flash2")
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(q)
        o = flash.attention(late, k, v, stage="flash2")
    stream.synchronize()
    assert torch.equal(o, expected)
