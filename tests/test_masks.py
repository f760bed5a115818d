"""Masks: every one of stages/masks against a dense mask in float64, in every stage that takes them."""

import contextlib
import math

import pytest
import torch
from conftest import DEVICES, with_two_schedules

import flash
from flash_ladder.grid import MULTICAST, SIDE_BRANCH, UP_TO_64
from flash_ladder.tiles import SKIPPED, WHOLE

TAKING = [s for s in flash.stages() if s.takes_masks]
ENDS = [s for s in TAKING if s.default or s.name in ("flash2", "recompute", "deterministic")]
MIDDLES = [s for s in TAKING if s not in ENDS]
NEG = -math.inf


class Case:
    """A mask for a call, and the same as tensors: bias (B, H, N_q, N_k) in float64, -inf where a query does
    not see a key, and what becomes of a score before it is added."""

    def __init__(self, mask, bias, cap=None, leaves=()):
        self.mask, self.bias, self.cap, self.leaves = mask, bias, cap, leaves


def positions(N_q, N_k):
    """Of the queries, by the last key; and of the keys."""
    return torch.arange(N_q)[:, None] + N_k - N_q, torch.arange(N_k)


def dense(seen):
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, NEG)


def ids(generator, B, N, most=4, rising=False):
    x = torch.randint(0, most, (B, N), generator=generator, dtype=torch.int32)
    return x.sort(1).values if rising else x


def make(name, B, H, N_q, N_k, device="cpu", dtype=torch.float32):
    g = torch.Generator().manual_seed(7)
    i, j = positions(N_q, N_k)
    m = flash.masks

    def on(x):
        return x.to(device)

    def uniform(*shape, least=0, most=1):
        return torch.rand(*shape, generator=g) * (most - least) + least

    if name == "none":
        return Case(m.none(), dense(torch.ones(1, 1, N_q, N_k, dtype=torch.bool)))
    if name == "causal":
        return Case(m.causal(), dense((j <= i)[None, None]))
    if name == "causal_diagonal":
        return Case(m.causal(-5), dense((j <= torch.arange(N_q)[:, None] - 5)[None, None]))
    if name.startswith("window:"):
        left, right = map(int, name.split(":")[1:])
        return Case(m.window(left, right), dense(((j >= i - left) & (j <= i + right))[None, None]))
    if name == "window":
        return Case(m.window(20, 7), dense(((j >= i - 20) & (j <= i + 7))[None, None]))
    if name == "window_left":
        return Case(m.window(left=33), dense((j >= i - 33)[None, None]))
    if name == "prefix":
        length = torch.randint(0, N_k + 1, (B,), generator=g)
        return Case(m.prefix(on(length)), dense((j < length[:, None, None, None]) | (j <= i)))
    if name == "padding":
        first = torch.randint(0, N_k // 2, (B,), generator=g)
        end = torch.randint(N_k // 2, N_k + 1, (B,), generator=g)
        seen = (j >= first[:, None, None, None]) & (j < end[:, None, None, None])
        return Case(m.padding(on(first), on(end)), dense(seen.expand(B, 1, N_q, N_k)))
    if name == "document":
        q, k = ids(g, B, N_q, rising=True), ids(g, B, N_k, rising=True)
        return Case(m.document(on(q), on(k)), dense((q[:, :, None] == k[:, None])[:, None]))
    if name == "block_causal":
        q, k = ids(g, B, N_q, 6) - 1, ids(g, B, N_k, 6) - 1
        seen = (k[:, None] >= 0) & (k[:, None] <= q[:, :, None])
        return Case(m.block_causal(on(q), on(k)), dense(seen[:, None]))
    if name == "boolean":
        seen = uniform(B, 1, N_q, N_k) < 0.5
        seen[:, :, : N_q // 2, : N_k // 2] = False
        return Case(m.boolean(on(seen)), dense(seen))
    if name == "boolean_2d":
        seen = uniform(N_q, N_k) < 0.3
        return Case(m.boolean(on(seen)), dense(seen[None, None]))
    if name in ("additive", "additive_heads", "additive_rows"):
        shape = {"additive": (B, H, N_q, N_k), "additive_heads": (H, 1, N_k), "additive_rows": (N_q, 1)}[name]
        bias = uniform(*shape, least=-2, most=2)
        if name == "additive":
            bias[..., N_k // 3: N_k // 2] = NEG
        leaf = on(bias.to(dtype)).requires_grad_()
        return Case(m.additive(leaf), bias.to(dtype).double().expand(B, H, N_q, N_k), leaves=[leaf])
    if name == "alibi":
        slopes = uniform(H)
        return Case(m.alibi(on(slopes)), -slopes.double()[None, :, None, None] * (i - j).abs())
    if name == "softcap":
        return Case(m.softcap(1.5), torch.zeros(1, 1, N_q, N_k, dtype=torch.float64), cap=1.5)
    if name == "relative_bias":
        bias = on(uniform(H, N_q + N_k - 1, least=-1)).requires_grad_()
        distance = torch.arange(N_k) - torch.arange(N_q)[:, None] + N_q - 1
        return Case(m.relative_bias(bias), bias.detach().cpu().double()[None][:, :, distance], leaves=[bias])
    if name == "window_and_padding":
        a, b = (make(x, B, H, N_q, N_k, device) for x in ("window", "padding"))
        return Case(a.mask & b.mask, a.bias + b.bias)
    if name == "causal_and_document":
        a, b = (make(x, B, H, N_q, N_k, device) for x in ("causal", "document"))
        return Case(a.mask & b.mask, a.bias + b.bias)
    if name == "window_or_prefix":
        a, b = (make(x, B, H, N_q, N_k, device) for x in ("window", "prefix"))
        return Case(a.mask | b.mask, torch.maximum(a.bias, b.bias))
    if name == "softcap_and_causal_and_alibi":
        a, b, c = (make(x, B, H, N_q, N_k, device) for x in ("softcap", "causal", "alibi"))
        return Case(a.mask & b.mask & c.mask, a.bias + b.bias + c.bias, cap=a.cap)
    raise AssertionError(name)


NAMES = ["none", "causal", "causal_diagonal", "window", "window_left", "prefix", "padding", "document",
         "block_causal", "boolean", "boolean_2d", "additive", "additive_heads", "additive_rows", "alibi",
         "softcap", "relative_bias", "window_and_padding", "causal_and_document", "window_or_prefix",
         "softcap_and_causal_and_alibi"]


def exactly(q, k, v, case, dtype=torch.float64):
    """(o, L), in PyTorch at a type. Rows that see nothing: 0, -inf."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    S = q @ k.mT / math.sqrt(q.shape[3])
    if case.cap:
        S = case.cap * torch.tanh(S / case.cap)
    S = S + case.bias.to(S.device, dtype)
    seen = S > NEG
    m = torch.where(seen.any(-1, keepdim=True), S.amax(-1, keepdim=True), 0).detach()
    P = torch.where(seen, torch.exp(torch.where(seen, S, 0) - m), 0)
    l = P.sum(-1, keepdim=True)
    return P / torch.where(l > 0, l, 1) @ v, torch.where(l > 0, m + l.log(), NEG)[..., 0]


def data(B, H, H_kv, N_q, N_k, d, dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (B, H, N_q, d), (B, H_kv, N_k, d), (B, H_kv, N_k, d)
    return [torch.randn(shape, generator=g).to(dtype).to(device).requires_grad_() for shape in shapes]


def check(name, forward, backward, sizes, dtype, device, gradients=True, change=None, **tiles):
    """change: of q, k, v and the case, which takes their place."""
    B, H, H_kv, N_q, N_k, d = sizes
    q, k, v = data(*sizes, dtype, device)
    case = make(name, B, H, N_q, N_k, device, dtype)
    if change:
        q, k, v, case = change(q, k, v, case)
    o, lse = flash.attention(q, k, v, mask=case.mask, stage=forward, backward=backward, return_lse=True,
                             **tiles)
    exact, exact_L = exactly(q, k, v, case)
    cast, _ = exactly(q, k, v, case, dtype)
    near(o, exact, cast, 2)
    seen = exact_L > NEG
    assert torch.equal(lse > NEG, seen) and (o[~seen] == 0).all()
    close = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(lse[seen].double(), exact_L[seen].detach(), rtol=close, atol=close)
    if not gradients:
        return
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    wanted = [q, k, v, *case.leaves]
    found = torch.autograd.grad(o, wanted, do)
    truth = gradients_at(torch.float64, q, k, v, case, do)
    plain = gradients_at(dtype, q, k, v, case, do)
    for mine, right, other in zip(found, truth, plain, strict=True):
        near(mine, right, other, 3)


def gradients_at(dtype, q, k, v, case, do):
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    bias = case.bias.to(q.device, dtype).requires_grad_()
    o, _ = exactly(*leaves, Case(None, bias, case.cap), dtype)
    *gradients, dS = torch.autograd.grad(o, [*leaves, bias], do.to(dtype))
    for leaf in case.leaves:
        if leaf.dim() == 2 and leaf.shape[1] == q.shape[2] + k.shape[2] - 1:
            distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] + q.shape[2] - 1
            one_hot = torch.zeros(leaf.shape, dtype=dtype, device=q.device)
            gradients.append(one_hot.index_add(1, distance.flatten().to(q.device), dS.sum(0).flatten(1)))
        else:
            gradients.append(dS.sum_to_size(leaf.shape))
    return gradients


def near(mine, right, other, times):
    """Within some times PyTorch's own error at that type, plus 1e-6."""
    assert torch.isfinite(mine).all() and mine.shape == right.shape
    error = (mine.double() - right.double()).abs().max()
    theirs = (other.double() - right.double()).abs().max()
    assert error <= times * theirs + 1e-6, f"{error:.2e}, PyTorch's {theirs:.2e}"


def type_of(stage):
    return torch.float32 if torch.float32 in stage.dtypes else torch.bfloat16


SIZES = 2, 4, 2, 75, 101, 40


# What three of the other ends take in the simulator, and the rest half of, or a third in the forward pass:
# each mask is a build of the stage
SOME = ("causal_diagonal", "block_causal", "additive", "relative_bias", "window_and_padding",
        "causal_and_document", "softcap_and_causal_and_alibi")
THREE = ("fwd ampere_tuned", "fwd row_by_row", "bwd hopper_tuned")
ALL_MASKS = ("fwd flash2", "bwd ampere_tuned")
# Of these, what a stage that packs heads takes none of, and what it does instead
BY_HEAD = ("additive", "relative_bias", "softcap_and_causal_and_alibi")


def some_of(stage) -> list[str]:
    """What it takes in the simulator."""
    if stage.refuses:
        return ["softcap", *(name for name in SOME if name not in BY_HEAD)]
    if f"{stage.direction} {stage.name}" in ALL_MASKS:
        return NAMES
    if f"{stage.direction} {stage.name}" in THREE:
        return list(SOME)
    by_turns = 3 if stage.direction == "fwd" else 2
    return list(SOME[stage.number % by_turns::by_turns])


@pytest.mark.parametrize("stage, name, device", [
    pytest.param(stage, name, device, id=f"{stage.path.stem}-{name}-{device}")
    for device in DEVICES for stage in ENDS for name in NAMES
    if name in some_of(stage) or device == "cuda" and not stage.refuses])
def test_ends_of_branches(stage, name, device):
    if stage.direction == "fwd":
        check(name, stage.name, None, SIZES, type_of(stage), device, gradients=False)
    else:
        check(name, None, stage.name, SIZES, type_of(stage), device)


@pytest.mark.parametrize("stage, d", [("hopper_tuned", 64), ("next_keys", 64), ("exchanged_tuned", 136)])
def test_a_lane_asks_for_all_of_its_elements(stage, d):
    """Of a tile that is cut, to its last row and key: clear_unseen.cuh has bits for them."""
    check("causal_and_document", None, stage, (1, 2, 1, 130, 130, d), torch.bfloat16, "cpu")


SMALL = {"Br": 32, "Bc": 32}
SMALL_BWD = {"Br_bwd": 32, "Bc_bwd": 32}


# In the simulator a third of the stages, by turns
@pytest.mark.parametrize("stage, kind, device", [
    pytest.param(stage, kind, device, id=f"{stage.path.stem}-{kind}-{device}")
    for device in DEVICES for n, stage in enumerate(MIDDLES) for turn, kind in enumerate(["range", "list"])
    if device == "cuda" or n % 6 == 3 * turn])
def test_other_stages(stage, kind, device):
    """A mask of ranges with scores; a list, in the backward pass with the gradient of a bias."""
    sizes, forward = (1, 4, 2, 50, 70, 40), stage.direction == "fwd"
    name = {"range": "softcap_and_causal_and_alibi", "list": "causal_and_document" if forward else "additive"}
    if forward:
        rows = 128 if stage.name in MULTICAST else 64    # of a warpgroup, or of those of a cluster
        small = SMALL | {"Br": rows} if stage.needs == "sm_90a" else SMALL
        check(name[kind], stage.name, None, sizes, type_of(stage), device, gradients=False, **small)
    else:
        small = dict.fromkeys(SMALL_BWD, 64) if stage.needs == "sm_90a" else SMALL_BWD
        small = default_tiles(stage) if stage.name in SIDE_BRANCH else small
        forward = "flash2" if type_of(stage) == torch.float32 else "ampere_tuned"
        check(name[kind], forward, stage.name, sizes, type_of(stage), device, **SMALL, **small)


def default_tiles(stage) -> dict[str, int]:
    return {f"{name}_bwd": size for name, size in stage.default_tiles(SIZES[-1]).items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, stage", [("window", "exchanged_ds"), ("block_causal", "exchanged_ds"),
                                         ("window", "exchanged_tuned")])
def test_a_cluster_walks_through_the_tiles_of_both_blocks(name, stage, device):
    """Of the last cluster of three, a block has no key; of the others one may see less than the other."""
    check(name, "ampere_tuned", stage, (1, 4, 2, 140, 300, 200), torch.bfloat16, device, **SMALL)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, stage", zip(
    ["window", "prefix", "causal_and_document", "softcap_and_causal_and_alibi"], MULTICAST * 2))
def test_a_cluster_walks_through_the_keys_of_both_blocks(name, stage, device):
    """Tiles of 256 rows, of which each block has 128; the last ones are 44."""
    check(name, stage, None, (1, 4, 2, 300, 290, 200), torch.bfloat16, device, gradients=False, Br=256,
          Bc=80)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, stage", [("window", "hopper_tuned"), ("window", "whole_tiles"),
                                         ("causal_and_document", "hopper_tuned"),
                                         ("window", "transposed_dq"), ("window", "next_keys"),
                                         ("causal_and_document", "persistent")])
def test_masks_at_the_end_of_hoppers_backward(name, stage, device):
    """More tiles of keys than blocks, in an order of their own; some are short, or seen by nobody. At the end
    a window, which no call takes there by itself, looks at either side of a tile in those alone that are cut
    there."""
    tiles, d = {"Br_bwd": 64, "Bc_bwd": 64}, 48 if stage in UP_TO_64 else 40
    check(name, "ampere_tuned", stage, (1, 4, 2, 200, 230, d), torch.bfloat16, device, **SMALL, **tiles)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", ["exp2", "ampere_tuned", "split_kv", "hopper_tuned"])
@pytest.mark.parametrize("name", ["window:14:100", "window:100:14"])
def test_a_corner_that_a_window_misses(name, stage, device):
    """Of 16 rows and a tile of keys all elements are seen but the lower left one, or the upper right one."""
    small = SMALL | {"Br": 64} if stage == "hopper_tuned" else SMALL
    check(name, stage, None, (1, 2, 1, 150, 150, 40), torch.bfloat16, device, gradients=False, **small)


@with_two_schedules("name, d, Br, Bc, N_q, N_k", [
    ("window:40:0", 64, 192, 32, 400, 333), ("window:130:7", 128, 192, 80, 390, 500),
    ("window:15:3", 40, 128, 16, 200, 230), ("window_and_padding", 256, 128, 80, 260, 200),
    ("window_or_prefix", 64, 192, 64, 200, 190)])
def test_a_warpgroup_has_its_own_range(device, schedule, name, d, Br, Bc, N_q, N_k):
    """Tiles passed by in front and at the end: several, one; of a list of tiles none. In blocks that go on to
    the next tile of Q. With 15 and 3 of the first and the last tile of a warpgroup one row sees one key."""
    B = 1 if device == "cpu" else 60
    with flash.inspect() if device == "cpu" else contextlib.nullcontext() as report:
        check(name, "own_ranges", None, (B, 4, 2, N_q, N_k, d), torch.bfloat16, device, gradients=False,
              Br=Br, Bc=Bc)
    assert not (report and report.findings), report


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, sizes, dtype", [
    ("additive", (2, 4, 1, 1, 70, 40), torch.float32),
    ("additive", (1, 8, 2, 90, 33, 40), torch.bfloat16),
    ("softcap_and_causal_and_alibi", (1, 4, 1, 90, 33, 40), torch.float32),
    ("causal_and_document", (1, 4, 1, 45, 70, 136), torch.float16),
], ids=str)
def test_shapes(name, sizes, dtype, device):
    """Groups of 4 heads, one key head; a single query, more queries than keys; a d that is no power of 2."""
    stage = "fp32_tuned" if dtype == torch.float32 else "ampere_tuned"
    check(name, stage, stage, sizes, dtype, device, **SMALL, **SMALL_BWD)


def apart(x):
    """The same values, other strides: every second of twice as many heads, rows of another length."""
    wide = torch.full((x.shape[0], 2 * x.shape[1], x.shape[2] + 3, x.shape[3] + 8), math.nan).to(x)
    view = wide[:, ::2, 1: x.shape[2] + 1, : x.shape[3]]
    return view.copy_(x.detach())


@pytest.mark.parametrize("device", DEVICES)
def test_strided_tensors(device):
    """Of q, k and v; of a bias in float32 for a q in bfloat16, transposed."""
    def change(q, k, v, case):
        q, k, v = (apart(x).requires_grad_() for x in (q, k, v))
        bias = case.leaves[0].detach().float().mT.contiguous().mT
        bias = torch.cat([bias, bias], 3)[..., ::2].requires_grad_()
        assert bias.stride(3) != 1 and bias.dtype == torch.float32
        rounded = bias.detach().to(q.dtype).double()
        return q, k, v, Case(flash.masks.additive(bias), rounded, leaves=[bias])

    check("additive", "ampere_tuned", "ampere_tuned", (1, 4, 2, 50, 70, 40), torch.bfloat16, device,
          change=change, **SMALL, **SMALL_BWD)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_booleans(device):
    """Transposed; with every second column; expanded, with lists of one head for all."""
    q, k, v = data(2, 4, 2, 75, 101, 40, torch.float32, device)
    seen = make("boolean_2d", 2, 4, 75, 101).mask.arguments[0].tensor.to(device)
    expected = flash.attention(q, k, v, mask=flash.masks.boolean(seen), stage="flash2")
    views = (seen.mT.contiguous().mT, seen.repeat_interleave(2, 3)[..., ::2], seen.expand(2, 4, 75, 101))
    for view in views:
        mask = flash.masks.boolean(view)
        assert mask.bind(q, k).extents == (1, 1)
        assert torch.equal(flash.attention(q, k, v, mask=mask, stage="flash2"), expected)


CHECKED = [("flash2", "recompute"), ("flash2", "fp32_tuned"), ("flash2", "deterministic"),
           ("ampere_tuned", "ampere_tuned")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["additive", "window_and_padding"])
@pytest.mark.parametrize("forward, backward", CHECKED)
def test_checker_finds_nothing(forward, backward, name):
    """A list with the gradient of a bias; a range that is cut at both ends."""
    dtype = torch.bfloat16 if forward == "ampere_tuned" else torch.float32
    q, k, v = data(1, 2, 1, 40, 50, 16, dtype, "cpu")
    case = make(name, 1, 2, 40, 50, dtype=dtype)
    options = {"stage": forward, "backward": backward, "mask": case.mask, **SMALL, **SMALL_BWD}
    with flash.inspect() as report:
        o = flash.attention(q, k, v, **options)
        found = torch.autograd.grad(o, [q, k, v, *case.leaves], torch.ones_like(o))
    assert not report.findings, str(report)
    assert all(torch.isfinite(x).all() for x in found)
    seen = int((case.bias > NEG).expand(1, 2, 40, 50).sum())
    assert report.flops == 14 * 16 * seen
    assert all(f"{stage}: {tiles}." in " ".join(str(report).split()) for stage, tiles in report.tiles)
    assert [tiles["skipped"] for tiles in report.to_dict()["tiles"]] == [
        case.mask.tiles(40, 50, **tiles).counts["skipped"]
        for tiles in (SMALL, {name[:2]: size for name, size in SMALL_BWD.items()})]


@pytest.mark.parametrize("first, last, N_q, N_k", [
    (-33, 0, 200, 230), (-20, 10, 200, 64), (-20, 10, 200, 63), (10, 50, 161, 190), (-150, -90, 160, 90),
    (-1 << 30, 3, 70, 150), (-20, 1 << 30, 130, 65)])
def test_rows_that_see_a_key_are_those_that_are_found(first, last, N_q, N_k, tmp_path):
    """A window says which queries see a key. A search finds the same tiles: as many bytes are read."""
    text = (flash.STAGES / "masks" / "window.cuh").read_text()
    (tmp_path / "searched.cuh").write_text(text.replace("has_rows = true", "has_rows = false"))
    read, gradients = [], []
    for file in (flash.STAGES / "masks" / "window.cuh", tmp_path / "searched.cuh"):
        mask = flash.masks.from_file(file, ints=(first, last))
        q, k, v = data(1, 2, 1, N_q, N_k, 16, torch.float32, "cpu")
        o = flash.attention(q, k, v, stage="flash2", backward="recompute", mask=mask, **SMALL, **SMALL_BWD)
        with flash.inspect() as report:
            gradients += torch.autograd.grad(o, [q, k, v], torch.ones_like(o))
        assert not report.findings, str(report)
        read.append(report.hbm.read)
    assert read[0] == read[1]
    assert all(torch.equal(x, y) for x, y in zip(gradients[:3], gradients[3:], strict=True))


@pytest.mark.parametrize("backward, d", [("exchanged_tuned", 136), ("exchanged_semaphores", 136),
                                         ("exchanged_group", 136), ("exchanged_stream_k", 136),
                                         ("hopper_tuned", 64), ("augmented", 64)])
def test_lists_of_tiles_are_awaited(backward, d):
    """What makes them, prepare_kernel and the stage's own kernel may all run at a time."""
    q, k, v = data(1, 2, 1, 70, 90, d, torch.bfloat16, "cpu")
    mask = make("document", 1, 2, 70, 90).mask
    with flash.inspect() as report:
        o = flash.attention(q, k, v, mask=mask, backward=backward)
        torch.autograd.grad(o, [q, k, v], torch.ones_like(o))
    assert not report.findings, str(report)


def test_a_window_asks_for_no_tile_past_the_last_row():
    """Where tiles end with the last row; what is added to dQ there would be another head's."""
    q, k, v = data(1, 2, 1, 128, 300, 64, torch.bfloat16, "cpu")
    mask = flash.masks.from_file(flash.STAGES / "masks" / "window.cuh", ints=(100, 172))
    with flash.inspect() as report:
        o = flash.attention(q, k, v, mask=mask, backward="tma_reduce")
        torch.autograd.grad(o, [q, k, v], torch.ones_like(o))
    assert not report.findings, str(report)


@pytest.mark.parametrize("sizes", [(2, 4, 75, 101), (1, 2, 200, 130)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_tiles(name, sizes):
    """The mask's file sees what the reference does; no tile with a score that counts is skipped, a whole one
    has no other, and few are visited in vain."""
    B, H, N_q, N_k = sizes
    case = make(name, B, H, N_q, N_k)
    found = case.mask.tiles(N_q, N_k, Br=16, Bc=24)
    assert torch.equal(*torch.broadcast_tensors(found.seen, case.bias > NEG))
    counts = torch.nn.functional.pad(found.seen.float(), (0, -N_k % 24, 0, -N_q % 16))
    counts = counts.unflatten(3, (-1, 24)).unflatten(2, (-1, 16)).sum((3, 5))
    rows = torch.full((counts.shape[2],), 16)
    rows[-1] = N_q - 16 * (len(rows) - 1)
    assert (found.kinds[counts > 0] > SKIPPED).all()
    assert (counts == 24 * rows[:, None])[found.kinds == WHOLE].all()
    assert ((counts == 0) & (found.kinds > SKIPPED)).sum() <= 0.05 * counts.numel()
    assert sum(found.counts.values()) == counts.numel() and str(found.counts["cut"]) in str(found)


def test_tiles_do_not_depend_on_the_default_type():
    bias = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]], requires_grad=True)
    expected = torch.eye(2, dtype=torch.bool)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            for mask in (flash.masks.additive(bias), flash.masks.softcap(2.0) & flash.masks.additive(bias)):
                assert torch.equal(mask.tiles(2).seen[0, 0], expected)
    finally:
        torch.set_default_dtype(before)


def test_numbers_that_kernels_do_not_hold():
    """They have 32 bits. A length counts as one beyond all keys."""
    with pytest.raises(ValueError, match="queries has numbers from 5 to 4294967301; kernels read int32"):
        flash.masks.document(torch.tensor([5, 5 + 2**32]))
    with pytest.raises(ValueError, match="queries has type torch.complex64: pass torch.int32"):
        flash.masks.document(torch.ones(3, dtype=torch.complex64))
    for end in (2**32 + 1, 2**62):
        assert flash.masks.padding(end=torch.tensor([end])).tiles(4).seen.all()
    for dtype in (torch.uint8, torch.int16, torch.uint32, torch.int64):
        assert flash.masks.padding(end=torch.tensor([3], dtype=dtype)).tiles(1, 4).seen.sum() == 3
        flash.masks.document(torch.tensor([3], dtype=dtype))
    lengths = torch.tensor([1], dtype=torch.int32)
    mask = flash.masks.padding(end=lengths)
    lengths.fill_(2)
    assert mask.tiles(1, 4).seen.sum() == 2, "a tensor of the right type is kept"
    with pytest.raises(ValueError, match="cap must be a number from 1e-37 to 3e38, not 1e[+]39"):
        flash.masks.softcap(1e39)
