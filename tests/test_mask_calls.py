"""Masks in calls: PyTorch's signature, a file of one's own, refusals, torch.compile, pictures."""

import itertools
import math
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import DEVICES
from test_masks import SIZES, Case, check, data, exactly, make
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash
from flash_ladder import launch, plan
from flash_ladder.extras import NO_EXTRAS

M = flash.masks
PAIR = {"stage": "flash2", "backward": "recompute"}     # of one d, so they build once
B, H, H_kv, N_q, N_k, d = SIZES


def qkv(device="cpu", dtype=torch.float32):
    return data(*SIZES, dtype, device)


def gradients(o, *leaves):
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(o)
    return torch.autograd.grad(o, leaves, do)


# ------------------------------------------------------------------------------------------ gradients
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_a_bias_have_the_same_bits(device, monkeypatch):
    """Whatever the order of blocks; those of q only if deterministic. The simulator shuffles them."""
    q, k, v = qkv(device)
    bias = make("additive", B, H, N_q, N_k, device).leaves[0]
    for deterministic in (False, True):
        found = []
        for seed in ("1", "2", "3"):
            monkeypatch.setenv("FLASH_SIM_SEED", seed)
            o = flash.attention(q, k, v, mask=M.additive(bias), deterministic=deterministic)
            found.append(gradients(o, bias, *[q, k, v] * deterministic))
        for other in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_broadcast_biases(device):
    """In each combination of dimensions: their sum, and the same bits each time."""
    q, k, v = qkv(device)
    full = torch.randn(B, H, N_q, N_k, generator=torch.Generator().manual_seed(5)).to(device)
    for ones in itertools.product((False, True), repeat=4):
        bias = full[tuple(slice(0, 1) if one else slice(None) for one in ones)].clone().requires_grad_()
        whole = bias.detach().expand(full.shape).clone().requires_grad_()
        found = [gradients(flash.attention(q, k, v, mask=M.additive(x), **PAIR), x)[0]
                 for x in (bias, bias, whole)]
        assert torch.equal(found[0], found[1]) and found[0].shape == bias.shape
        torch.testing.assert_close(found[0], found[2].sum_to_size(bias.shape), rtol=1e-4, atol=1e-5)


def test_an_expanded_leaf_has_a_gradient_for_each_element():
    q, k, v = qkv()
    leaf = torch.zeros(1, 1, N_q, 1).expand(B, H, N_q, N_k).detach().requires_grad_()
    plain = torch.zeros(B, H, N_q, N_k, requires_grad=True)
    found = [gradients(flash.attention(q, k, v, mask=M.additive(x), **PAIR), x)[0] for x in (leaf, plain)]
    assert torch.equal(*found) and found[0].std(3).min() > 0


def test_a_bias_with_the_negative_bit():
    q, k, v = qkv()
    bias = torch.randn(N_q, N_k)
    o = [flash.attention(q, k, v, mask=M.additive(x), **PAIR) for x in (torch._neg_view(bias), -bias)]
    assert torch.equal(*o)


@pytest.mark.parametrize("stage", ["flash2", "fp32_tuned"])
def test_a_nan_of_a_bias_is_not_lost(stage):
    """The row, and no other, is NaN, as in PyTorch. Infinity is a NaN as well: inf - inf."""
    q, k, v = (x.detach() for x in qkv())
    for value in (math.nan, math.inf):
        bias = torch.zeros(N_q, N_k)
        bias[3, 4] = value
        o = flash.attention(q, k, v, mask=M.additive(bias), stage=stage)
        assert o[:, :, 3].isnan().all() and o[:, :, :3].isfinite().all() and o[:, :, 4:].isfinite().all()


# ------------------------------------------------------------------------------------------ attn_mask
@pytest.mark.parametrize("shape", [(N_q, N_k), (H, 1, N_k), (B, 1, N_q, N_k), (B, H, N_q, N_k)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("device", DEVICES)
def test_scaled_dot_product_attention(kind, shape, device):
    """attn_mask as PyTorch's own, on the CPU: results, gradients, the mask's among them."""
    q, k, v = qkv(device)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    mask = (mask > 0.3) | (torch.arange(N_k) == 3) if kind == "bool" else mask
    leaves = [q, k, v]
    mine, theirs = mask.to(device), mask.clone()
    if kind == "float":
        mine, theirs = mine.requires_grad_(), theirs.requires_grad_()
        leaves.append(mine)
    o = flash.scaled_dot_product_attention(q, k, v, attn_mask=mine, enable_gqa=True)
    plain = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=theirs, enable_gqa=True)
    torch.testing.assert_close(o.cpu(), expected, rtol=1e-4, atol=1e-5)
    for x, y in zip(gradients(o, *leaves), gradients(expected, *plain, *[theirs][:len(leaves) - 3])):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------ own files
SINK = """// Mask: a window, and the first keys, which all see
// ints: window, sink, diagonal
struct Rule : AnyKeys {
  int window, sink, diagonal;
  __device__ Rule(const Arguments& a, int b, int h)
      : window(a.integer(0)), sink(a.integer(1)), diagonal(a.integer(2)) {}
  __device__ bool sees(int row, int col) const {
    const int at = row + diagonal;
    return col <= at && (col > at - window || col < sink);
  }
};
"""
BAND = """struct Rule : KeyRange {
  int N_k;
  __device__ Rule(const Arguments& a, int b, int h) : N_k(a.N_k) {}
  __device__ int first_key(int row) const { return row - 5; }
  __device__ int end_key(int row) const { return row + 12; }
};
"""
QUADRATIC = """struct Rule : AllKeys {
  static constexpr bool scores = true;
  View<float> weights;
  float curve;
  __device__ Rule(const Arguments& a, int b, int h)
      : AllKeys(a, b, h), weights(a.tensor<float>(0, b, h)), curve(a.number(0)) {}
  __device__ float at(int col) const { return curve * weights.at(0, col); }
  __device__ float score(float x, int row, int col) const { return x + at(col) * x * x; }
  __device__ float slope(float x, int row, int col) const { return 1.f + 2.f * at(col) * x; }
};
"""


@pytest.fixture
def mine(tmp_path):
    return tmp_path / "mine.cuh"


def write(file: Path, text: str) -> None:
    """With a time of its own, and so late that calls look again."""
    then = file.stat().st_mtime_ns if file.exists() else 0
    file.write_text(text)
    os.utime(file, ns=(then + 10**9, max(then + 10**9, file.stat().st_mtime_ns)))
    time.sleep(1.5 * launch.LOOK_AGAIN)


I, J = torch.arange(N_q)[:, None], torch.arange(N_k)


def near_exact(o, q, k, v, seen, differentiate=True):
    bias = torch.zeros(1, 1, *seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)
    exact, _ = exactly(q, k, v, Case(None, bias))
    torch.testing.assert_close(o.double(), exact, rtol=1e-4, atol=1e-5)
    if differentiate:
        torch.testing.assert_close(gradients(o, q)[0], gradients(exact, q)[0], rtol=1e-3, atol=1e-4)


def test_a_file(mine):
    """A list, with ints; a range, as a Path; and edited, it counts from the next call on."""
    q, k, v = qkv()
    write(mine, SINK)
    mask = M.from_file(mine, ints=(20, 4, N_k - N_q))
    at = I + N_k - N_q
    near_exact(flash.attention(q, k, v, mask=mask, **PAIR), q, k, v,
               (at >= J) & ((at - 20 < J) | (J < 4)))
    for end in (12, 14):
        write(mine, BAND.replace("12", str(end)))
        found = [flash.attention(q, k, v, mask=x, **PAIR) for x in (mine, M.from_file(mine), mine)]
        near_exact(found[0], q, k, v, (J >= I - 5) & (I + end > J))
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    both = M.from_file(mine) & M.causal(3)
    for end in (14, 2):
        write(mine, BAND.replace("12", str(end)))
        o = flash.attention(q.detach(), k.detach(), v.detach(), mask=both, stage="flash2")
        near_exact(o, q, k, v, (J >= I - 5) & (I + min(end, 4) > J), differentiate=False)


def test_a_file_with_a_slope(mine):
    q, k, v = qkv()
    write(mine, QUADRATIC)
    weights = torch.rand(B, 1, 1, N_k)
    mask = M.from_file(mine, weights, floats=[0.3], scores=True)
    S = q.double() @ k.double().repeat_interleave(H // H_kv, 1).mT / math.sqrt(d)
    P = torch.softmax(S + 0.3 * S * S * weights, -1)
    expected = P @ v.double().repeat_interleave(H // H_kv, 1)
    o = flash.attention(q, k, v, mask=mask, **PAIR)
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
    for x, y in zip(gradients(o, q, k, v), gradients(expected, q, k, v)):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="bias requires grad, and no stage has a gradient for a bias"):
        flash.attention(q, k, v, mask=mask & M.additive(torch.zeros(N_q, N_k, requires_grad=True)))


@pytest.mark.parametrize("stage", ["flash2", "fp32_tuned", "ampere_tuned"])
def test_a_score_of_minus_infinity(mine, stage):
    """Of all keys of a row, in tiles that are whole: o = 0 and L = -inf there, and no NaN."""
    mine.write_text("struct Rule : AllKeys {\n  using AllKeys::AllKeys;\n"
                    "  static constexpr bool scores = true;\n"
                    "  __device__ float score(float x, int row, int) const {\n"
                    "    return row == 3 ? -INFINITY : x;\n  }\n};\n")
    dtype = torch.bfloat16 if stage == "ampere_tuned" else torch.float32
    q, k, v = torch.randn(3, 1, 1, 128, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    options = {"stage": stage, "return_lse": True}
    o, lse = flash.attention(q, k, v, mask=M.from_file(mine, scores=True), **options)
    expected, expected_lse = flash.attention(q, k, v, **options)
    expected[:, :, 3], expected_lse[:, :, 3] = 0, -torch.inf
    assert not o[:, :, 3].any()
    atol = 1e-3 if dtype == torch.bfloat16 else 1e-5  # other code may sum, and so round P, otherwise
    torch.testing.assert_close(o, expected, rtol=2 * torch.finfo(dtype).eps, atol=atol)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_errors_of_a_file(mine):
    """Of the compiler: file and line, until it is mended. Out of bounds: a finding; never the end of
    Python."""
    q, k, v = (x.detach() for x in qkv())
    write(mine, SINK.replace("col <= at &&", "col <= art &&"))
    line = next(n for n, text in enumerate(mine.read_text().splitlines(), 1) if "art" in text)
    mask = M.from_file(mine, ints=(20, 4, 0))
    for call in (lambda: flash.attention(q, k, v, mask=mask, stage="flash2"), lambda: mask.tiles(N_q, N_k)):
        with pytest.raises(RuntimeError, match=rf"{re.escape(str(mine))}:{line}.*art") as error:
            call()
        assert "ninja" not in str(error.value)
    write(mine, SINK)
    flash.attention(q, k, v, mask=mask, stage="flash2")


def test_out_of_bounds(mine):
    write(mine, """struct Rule : AnyKeys {
  View<bool> seen;
  __device__ Rule(const Arguments& a, int b, int h) : seen(a.tensor<bool>(0, b, h)) {}
  __device__ bool sees(int row, int col) const { return seen.at(row + 1, col); }
};
""")
    q, k, v = data(1, 1, 1, 20, 20, 16, torch.float32, "cpu")
    seen = torch.ones(20, 20, dtype=torch.bool)
    with flash.inspect() as report:
        flash.attention(q.detach(), k.detach(), v.detach(), mask=M.from_file(mine, seen), stage="flash2",
                        Br=32, Bc=32)
    assert report.findings and "mask.tensor_0" in str(report) and "mine.cuh:4" in str(report)


# ------------------------------------------------------------------------------------------ refusals
@pytest.fixture
def nothing_is_built(monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(launch, "build", lambda *_, **__: pytest.fail("built something before the error"))


ONES = torch.ones(N_q, N_k)
IDS = torch.zeros(N_q, dtype=torch.int32)
WINDOW = flash.STAGES / "masks" / "window.cuh"


def leaf(*shape):
    return torch.ones(*shape, requires_grad=True)


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("mask, message", [
    (lambda: M.boolean(ONES[1:].bool()),
     r"mask: seen has shape \(1, 1, 74, 101\), .* must be \(2, 4, 75, 101\)"),
    (lambda: M.additive(ONES[None, None].repeat(3, 1, 1, 1)), "mask: bias has shape"),
    (lambda: M.document(IDS[1:], torch.zeros(N_k, dtype=torch.int32)), "mask: queries has shape"),
    (lambda: M.document(IDS), "mask: keys has shape"),
    (lambda: M.padding(end=torch.zeros(3, dtype=torch.int32)), "mask: end has shape|mask: first has shape"),
    (lambda: M.alibi(torch.ones(3)), "mask: slopes has shape"),
    (lambda: M.relative_bias(torch.ones(H, 40)), "mask: bias has shape"),
    (lambda: M.additive(torch.ones(1, 1, 1, N_q, N_k)), "mask: bias has 5 dimensions"),
    (lambda: M.boolean(ONES.bool().to("meta")), "mask: seen is on meta, q on cpu"),
    (lambda: M.document(IDS.to("meta")), "mask: queries is on meta|mask: keys has shape"),
    (lambda: M.boolean(ONES), r"mask: boolean\(\) takes a tensor of torch.bool"),
    (lambda: M.additive(ONES.int()), r"mask: additive\(\) takes a tensor of a floating-point type"),
    (lambda: M.relative_bias(ONES.int()), r"mask: relative_bias\(\) takes a floating-point tensor"),
    (lambda: M.document(IDS.float()), "mask: queries has type torch.float32: pass torch.int32"),
    (lambda: M.document(None), "mask: queries must be a tensor, not None"),
    (lambda: M.alibi(torch.ones(H, dtype=torch.int)), "mask: slopes has type torch.int32"),
    (lambda: M.alibi("steep"), "mask: slopes must be a tensor, not 'steep'"),
    (lambda: M.prefix(0.5), "mask: length must be ints"),
    (lambda: M.prefix(2**40), "mask: length must be an int from"),
    (lambda: M.padding(), r"mask: padding\(\) needs `first`, `end` or both"),
    (lambda: M.padding(torch.ones(B)), "mask: first must be ints"),
    (lambda: M.window(-2), "mask: left must be a number of keys, or -1 for all, not -2"),
    (lambda: M.window(0, 2.5), "mask: right must be an int"),
    (lambda: M.causal("top"), "mask: diagonal must be an int"),
    (lambda: M.softcap(0), "mask: cap must be a number from 1e-37 to 3e38, not 0"),
    (lambda: M.softcap(True), "mask: cap must be a number from 1e-37 to 3e38, not True"),
    (lambda: M.softcap(1e-40), "mask: cap must be a number from 1e-37 to 3e38, not 1e-40"),
    (lambda: M.causal() | M.softcap(1.0), r"a \| b: of masks that change no scores"),
    (lambda: M.document(IDS) & M.block_causal(IDS) & M.alibi(torch.ones(H)),
     "the masks have 5 tensors together; at most 4"),
    (lambda: M.from_file(WINDOW, ints=[1] * 9), "mask: at most 4 tensors, 8 ints and 4 floats"),
    (lambda: M.from_file(WINDOW, ints=["a"]), "mask: ints must be an int"),
    (lambda: M.from_file(WINDOW, floats=["a"]), "mask: floats must be numbers, not 'a'"),
    (lambda: M.from_file(WINDOW, object()), "mask: tensor 0 must be a tensor"),
    (lambda: M.from_file("none.cuh"), "mask: there is no file .*none.cuh"),
    (lambda: "causal", "mask must be one of flash.masks, .* not 'causal'"),
    (lambda: ONES.bool(), "mask must be one of flash.masks, .* not torch.bool of shape"),
    (lambda: M.causal, "mask must be one of flash.masks"),
    (lambda: M.alibi(leaf(H)), "mask: slopes requires grad, .*: pass slopes.detach()"),
    (lambda: M.from_file(WINDOW, leaf(1)), "mask: tensor_0 requires grad"),
    (lambda: M.softcap(1.0) & M.additive(leaf(N_q, N_k)), "mask: bias requires grad, and no .* softcap"),
    (lambda: M.additive(leaf(N_q, N_k)) & M.softcap(1.0), "mask: bias requires grad, and no .* softcap"),
    (lambda: M.softcap(1.0) & M.causal() & M.relative_bias(leaf(H, N_q + N_k - 1)),
     "mask: bias requires grad"),
])
def test_refused(mask, message):
    """By name, in the function that makes the mask or in the call."""
    q, k, v = (x.detach() for x in qkv())
    for call in (flash.attention, flash.explain):
        with pytest.raises(ValueError, match=message):
            call(q, k, v, mask=mask())


@pytest.mark.parametrize("mask, most", [
    (M.window(1023, 0), 1024), (M.window(-1, 0), None), (M.causal() & M.window(3, 4), 8),
    (M.window(9, 0) & M.padding(torch.tensor([3])) & M.window(2, 1), 4), (M.window(3, 4) | M.causal(), None),
    (M.causal(), None)], ids=str)
def test_tiles_by_the_width_of_a_window(mask, most):
    """A narrow one gets smaller tiles; no other mask does, whatever its size."""
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, 16, 16384, 64)
    bound = mask.bind(q, q)
    assert bound.window == most if most else bound.window > 1 << 29
    _, tiles = plan.choose("ampere_tuned", q, visible=bound)
    assert tiles == ({"Br": 64, "Bc": 64} if most else {"Br": 128, "Bc": 128})


@pytest.mark.usefixtures("nothing_is_built")
def test_refused_by_stages():
    q, k, v = qkv()
    for options in ({"stage": "naive"}, {"stage": "tiled"}, {"stage": "online_softmax"},
                    {"backward": "naive"}):
        with pytest.raises(ValueError, match=f"{[*options.values()][0]}' takes no mask but `causal`"):
            flash.attention(q, k, v, mask=M.window(3, 3), **options)


@pytest.mark.usefixtures("nothing_is_built")
def test_refused_in_the_call():
    """What the functions of masks cannot know: a tangent, inference mode, a tensor without memory."""
    q, k, v = qkv()
    with torch.inference_mode():
        bias = torch.zeros(N_q, N_k)
    with pytest.raises(ValueError, match=r"mask: bias was made in inference mode, .*bias.clone\(\)"):
        flash.attention(q, k, v, mask=M.additive(bias))
    q, k, v = (x.detach() for x in (q, k, v))
    with forward_ad.dual_level(), pytest.raises(ValueError, match="mask: bias has a tangent"):
        flash.attention(q, k, v, mask=M.additive(forward_ad.make_dual(ONES, ONES)))
    for sizes in ({"N_q": 0}, {"N_q": 8, "N_k": -1}, {"N_q": 8, "Br": 0}, {"N_q": 8, "Bc": 2.5}):
        with pytest.raises(ValueError, match=f"{[*sizes][-1]} must be an integer of at least 1"):
            M.causal().tiles(**sizes)


def test_a_number_is_at_home_on_any_device():
    """prefix(5) goes where q is."""
    q = torch.empty(1, 2, 8, 16, device="meta")
    assert M.prefix(5).bind(q, q).tensors[0].device.type == "meta"


# ------------------------------------------------------------------------------------------ PyTorch's tools
def masked(q, k, v, bias, queries, keys):
    """A mask with tensors of both kinds, made within the function."""
    return flash.attention(q, k, v, mask=M.document(queries, keys) & M.additive(bias), **PAIR)


@pytest.fixture(scope="module")
def arguments():
    g = torch.Generator().manual_seed(2)
    bias = torch.randn(H, N_q, N_k, generator=g).requires_grad_()
    ids = [torch.randint(0, 3, (B, N), generator=g, dtype=torch.int32).sort(1).values for N in (N_q, N_k)]
    return *qkv(), bias, *ids


@pytest.fixture(scope="module")
def expected(arguments):
    o = masked(*arguments)
    return o.detach(), *gradients(o, *arguments[:4])


def test_compile(arguments, expected):
    """One graph, the same bits; made within it or outside."""
    o = torch.compile(masked, fullgraph=True, backend="aot_eager")(*arguments)
    assert all(torch.equal(x, y) for x, y in zip((o, *gradients(o, *arguments[:4])), expected, strict=True))
    q, k, v, bias, *ids = arguments
    mask = M.document(*ids) & M.additive(bias)
    o = torch.compile(lambda q, k, v: flash.attention(q, k, v, mask=mask, **PAIR), fullgraph=True,
                      backend="aot_eager")(q, k, v)
    assert torch.equal(o, expected[0]) and torch.equal(gradients(o, q)[0], expected[1])


def test_checkpoint(arguments, expected):
    for reentrant in (True, False):
        o = checkpoint(masked, *arguments, use_reentrant=reentrant)
        for x in arguments[:4]:
            x.grad = None
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3))
        o.backward(do)
        assert all(torch.equal(x.grad, y) for x, y in zip(arguments, expected[1:]))


def test_flops(arguments, expected):
    """They count all pairs, as what a mask leaves depends on its tensors."""
    with FlopCounterMode(display=False) as counter:
        o = masked(*arguments)
        found = gradients(o, *arguments[:4])
    assert counter.get_total_flops() == 14 * B * H * N_q * N_k * d
    assert all(torch.equal(x, y) for x, y in zip((o, *found), expected, strict=True))


def test_opcheck(arguments):
    """PyTorch's own tests of both operators, with a mask of three tensors."""
    q, k, v, bias, *ids = arguments
    bound = (M.document(*ids) & M.additive(bias)).bind(q, k)
    tensors = [x.detach().requires_grad_(x.requires_grad) for x in bound.tensors]
    visible = None, bound.text, tensors, list(bound.ints), list(bound.floats)
    rest = list(bound.kinds), list(bound.wanted)
    given = (q, k, v, *visible, *NO_EXTRAS, None, "flash2", "recompute", None, None, None, None, None, *rest)
    torch.library.opcheck(torch.ops.flash.forward, given)
    o, L = (x.detach() for x in torch.ops.flash.forward(*given))
    visible = None, bound.text, [x.detach() for x in tensors], *visible[3:]
    q, k, v = (x.detach() for x in (q, k, v))
    torch.library.opcheck(torch.ops.flash.backward, (
        q, k, v, o, L, torch.randn_like(o), None, *visible, *NO_EXTRAS, None, "recompute", False, None, None,
        *rest))


# ------------------------------------------------------------------------------------------ to look at
def test_pictures(tmp_path):
    ids = torch.arange(4).repeat_interleave(16)
    mask = M.causal() & M.document(ids)
    tiles = mask.tiles(64, Br=16, Bc=16)
    assert tiles.counts == {"skipped": 12, "cut": 4, "whole": 0}
    assert str(tiles) == "tiles of 16 x 16: 12 skipped, 4 cut, 0 whole; 544 of 4096 scores count"
    tiles.plot(str(tmp_path / "mask.png"))
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")
    assert mask.show(64, Br=16, Bc=16).axes[0].get_title() == str(tiles)


def test_repr(mine):
    mine.write_text(SINK)
    mask = (M.causal() & M.window(3, 4) | M.prefix(5)) & M.from_file(mine, ints=(1, 2, 3)) & M.softcap(2.0)
    assert repr(mask) == "<mask ((((causal & window) | prefix) & mine) & softcap)>"


PAGE = flash.ROOT / "docs" / "masks.md"


def test_the_page_lists_all_masks():
    """Each file, with its lines, what it is, and its function."""
    row = r"^\| \[(\w+)\]\(\.\./(\S+)\) \| (\d+) \| ([\w ,]+) \| `(\w+)\(.*\)` \|"
    rows = re.findall(row, PAGE.read_text(), re.M)
    files = sorted((flash.STAGES / "masks").glob("*.cuh"))
    assert sorted(row[0] for row in rows) == [file.stem for file in files]
    bases = {"from 0": ("KeysFrom0", "AllKeys"), "range": ("KeyRange",), "list": ("AnyKeys",)}
    for name, path, lines, kind, function in rows:
        text = (flash.ROOT / path).read_text()
        assert path == f"stages/masks/{name}.cuh" and int(lines) == text.count("\n"), name
        assert re.search(r"struct Rule : (\w+)", text)[1] in bases[kind.partition(",")[0]], name
        assert ("scores = true" in text) == kind.endswith("scores") and callable(getattr(M, function)), name


def test_the_pages_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict = {}
    exec(compile(first, str(PAGE), "exec"), names)
    assert (tmp_path / "window.png").is_file() and names["bias"].grad.abs().max() > 0
    (rule,) = re.findall(r"```cuda\n(.*?)```", PAGE.read_text(), re.S)
    Path("sink.cuh").write_text(rule)
    names |= {"N_q": 40, "N_k": 90}
    exec(compile(second.replace("256, 4", "10, 4"), str(PAGE), "exec"), names)
    at, key = torch.arange(40)[:, None] + 50, torch.arange(90)
    seen = names["mask"].tiles(40, 90, Br=16, Bc=24).seen
    assert torch.equal(seen[0, 0], (at >= key) & ((at - 10 < key) | (key < 4)))


def test_explain(monkeypatch):
    q, k, v = qkv()
    found = flash.explain(q, k, v, mask=M.window(20, 7), **PAIR)
    assert "<mask window>" in str(found)
    assert WINDOW in found.forward.files and WINDOW in found.backward.files
    for one, flops in ((found.forward, 4), (found.backward, 10)):
        tiles = M.window(20, 7).tiles(N_q, N_k, **one.tiles)
        assert one.of_mask.counts == tiles.counts
        assert f"{tiles.counts['skipped']} skipped, {tiles.counts['cut']} cut" in str(found)
        assert one.flops == flops * B * H * d * int(tiles.seen.sum())
    found = flash.explain(q, k, v, mask=M.window(20, 7), causal=True, **PAIR)
    assert "<mask (causal & window)>" in str(found)
    monkeypatch.setattr("flash_ladder.explain.MOST_SCORES", N_q * N_k - 1)
    one = flash.explain(q, k, v, mask=M.window(20, 7), **PAIR).forward
    assert one.of_mask is None and one.flops == 4 * B * H * N_q * N_k * d


def test_threads_write_one_combination(monkeypatch, tmp_path):
    """At once, the first time."""
    monkeypatch.setenv("FLASH_BUILD_DIR", str(tmp_path))
    both = threading.Barrier(2, timeout=10)
    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda file, text: (write(file, text), both.wait()))
    visible = (M.window(3, 0) & M.softcap(9.0)).bind(*qkv()[:2])
    with ThreadPoolExecutor(2) as pool:
        files = list(pool.map(lambda _: plan.mask_file(visible), range(2)))
    assert files[0] == files[1] and list((tmp_path / "masks").iterdir()) == files[:1]


def test_the_cases_of_the_grid_are_in_reach():
    """check() compares masks with float64; this one compares it with a call that is wrong."""
    def change(q, k, v, case):
        return q, k, v, Case(M.causal(1), case.bias)

    with pytest.raises(AssertionError):
        check("causal", "flash2", None, SIZES, torch.float32, "cpu", gradients=False, change=change)
