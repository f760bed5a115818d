"""flash.scaled_dot_product_attention() beside torch.nn.functional's: what it takes, returns and refuses."""

import contextlib
import math
import re

import numpy
import pytest
import torch
from conftest import max_error, poisoned
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.flop_counter import FlopCounterMode

import flash
from flash_ladder import launch, plan, sdpa

N_q, N_k, d = 19, 26, 40      # d as in test_masks.py, which builds the same kernels
PAIR = {"stage": "flash2", "backward": "recompute"}
B, H = 2, 4


@contextlib.contextmanager
def math_in_its_type():
    """PyTorch's formula, in 16 bits where its tensors have 16 bits."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def pytorch(*tensors, **options):
    with math_in_its_type():
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def seen(*shape):
    """Bools, of which some rows are False."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(9)) < 0.6
    return mask & (torch.arange(shape[-2])[:, None] % 5 != 2 if shape[-2] > 1 else True)


def qkv(batch=(B, H), of_k=None, of_v=None, d=d, d_v=None, N_q=N_q, N_k=N_k):
    """Shapes; the dimensions before N are `batch`, those of key and value the same if None."""
    of_k = batch if of_k is None else of_k
    return ((*batch, N_q, d), (*of_k, N_k, d), (*(of_k if of_v is None else of_v), N_k, d_v or d))


GQA = {"enable_gqa": True}
# Shapes of query, key and value; attn_mask; options
CASES = {
    "plain": (qkv(), None, {}),
    "grouped heads": (qkv(of_k=(B, 2)), None, GQA),
    "grouped heads of 3 dimensions": (qkv((4,), (2,)), None, GQA),
    "grouped heads, of key and value others": (qkv((B, 12), (B, 4), (B, 6)), None, GQA),
    "grouped heads, of value alone": (qkv(of_v=(B, 1)), None, GQA),
    "grouped heads and batch that broadcasts": (qkv((1, 3, 4), (2, 1, 2), (2,)), seen(2, 3, 1, 1, N_k), GQA),
    "2 dimensions": (qkv(()), None, {}),
    "2 dimensions, d and d_v": (qkv((), d=37, d_v=33), normal(N_q, N_k), {}),
    "3 dimensions": (qkv((3,)), None, {"is_causal": True}),
    "3 dimensions, d and d_v": (qkv((3,), d=35, d_v=39), normal(3, 1, N_k), {}),
    "5 dimensions": (qkv((2, 3, 2)), normal(3, 1, N_q, N_k), {}),
    "5 dimensions that broadcast": (qkv((2, 1, 2), (1, 3, 1), (3, 2)), seen(2, 1, 1, N_q, N_k), {}),
    "query's batch broadcasts": (qkv((1, H), (B, H)), None, {}),
    "key's batch broadcasts": (qkv((B, H), (H,)), None, {"is_causal": True}),
    "key's heads broadcast": (qkv((B, H), (B, 1)), None, {}),
    "query's heads broadcast": (qkv((B, 1), (B, H)), None, {}),
    "value's heads broadcast": (qkv(of_v=(1, 1)), seen(H, N_q, N_k), {}),
    "a query of 2 dimensions": (qkv((), (B, H)), None, {}),
    "d = 37": (qkv(d=37), None, {"is_causal": True}),
    "d_v < d": (qkv(d_v=8), None, {"is_causal": True}),
    "d_v > d": (qkv(d=8, d_v=40), None, {}),
    "d = 33, d_v = 35": (qkv(d=33, d_v=35), normal(B, H, N_q, N_k), {}),
    "d = 1, d_v = 3": (qkv(d=1, d_v=3), None, {}),
    "d = 7, d_v = 1": (qkv(d=7, d_v=1), None, {}),
    "causal, more queries": (qkv(N_q=30, N_k=21), None, {"is_causal": True}),
    "causal, one query": (qkv(N_q=1), None, {"is_causal": True}),
    "scale": (qkv(), None, {"scale": 0.4}),
    "scale of 0": (qkv(d=38), None, {"scale": 0.0}),
    "scale below 0": (qkv(d=38), None, {"scale": -0.2}),
    "scale, an integer": (qkv(), None, {"scale": 1}),
    "bools, 0 dimensions": (qkv(), torch.tensor(True), {}),
    "bools, 1 dimension": (qkv(), seen(1, N_k)[0], {}),
    "bools, 2 dimensions": (qkv(), seen(N_q, N_k), {}),
    "bools, 3 dimensions": (qkv(), seen(H, 1, N_k), {}),
    "bools, 4 dimensions": (qkv(), seen(B, H, N_q, N_k), {}),
    "bools of each query": (qkv(), seen(B, 1, N_q, 1), {}),
    "bias, 0 dimensions": (qkv(), normal(), {}),
    "bias, 2 dimensions": (qkv(), normal(N_q, N_k), {}),
    "bias, 3 dimensions": (qkv(), normal(1, N_q, N_k), {"scale": 0.3}),
    "bias, 4 dimensions": (qkv(of_k=(B, 2)), normal(B, H, N_q, N_k), GQA),
    "bias of each batch element": (qkv(), normal(B, 1, 1, N_k), {}),
    "bias of each head": (qkv(), normal(1, H, N_q, 1), {}),
    "bias of -infinity": (qkv(), torch.zeros(N_q, N_k).masked_fill(~seen(N_q, N_k), -math.inf), {}),
}
IN_16_BITS = {torch.float16: ["plain", "3 dimensions, d and d_v", "5 dimensions", "d = 33, d_v = 35",
                              "grouped heads, of key and value others", "bias, 4 dimensions"],
              torch.bfloat16: ["2 dimensions", "query's batch broadcasts", "d_v > d", "causal, one query",
                               "bools, 3 dimensions", "bools of each query", "value's heads broadcast"]}


def gradients_of(function, tensors, do, **options):
    """o, and the gradients of all tensors that are not of bools."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    o = function(*leaves)
    return o, *torch.autograd.grad(o, [x for x in leaves if x.requires_grad], do.to(o.dtype), **options)


def check(shapes, mask, options, dtype=torch.float32, device="cpu", change=lambda x: x, **stages):
    """Results and gradients, against float64: twice and three times what PyTorch's error is in the type."""
    tensors = [normal(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
    tensors += [] if mask is None else [mask if mask.dtype == torch.bool else mask.to(dtype)]
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    do = normal(*pytorch(*wide, **options).shape, seed=7).to(dtype)
    truth = gradients_of(lambda *x: pytorch(*x, **options), wide, do)
    theirs = gradients_of(lambda *x: pytorch(*x, **options), tensors, do)
    placed = [change(x.to(device)) for x in tensors]
    with poisoned():
        found = gradients_of(lambda *x: flash.scaled_dot_product_attention(*x, **options, **stages), placed,
                             do.to(device))
    for n, (mine, right, other) in enumerate(zip(found, truth, theirs, strict=True)):
        assert (mine.shape, mine.dtype) == (right.shape, dtype)
        size = 1e-6 * max(1.0, right.abs().max().item())
        error, allowed = max_error(mine.cpu(), right), (3 if n else 2) * max_error(other, right) + size
        assert error <= allowed, f"{['o', 'dq', 'dk', 'dv', 'dmask'][n]}: error {error}, allowed {allowed}"
    return found


@pytest.mark.parametrize("case", CASES)
def test_as_pytorchs(case, device):
    check(*CASES[case], device=device, **PAIR)


@pytest.mark.parametrize("dtype, case", [(t, case) for t, cases in IN_16_BITS.items() for case in cases],
                         ids=str)
def test_as_pytorchs_in_16_bits(dtype, case, device):
    check(*CASES[case], dtype, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_float32_bias_of_16_bit_tensors(dtype):
    """It is rounded; its gradient is not."""
    q, k, v = (normal(*shape, seed=n).to(dtype) for n, shape in enumerate(qkv()))
    bias = normal(N_q, N_k)
    found, rounded, theirs = (
        gradients_of(function, [q, k, v, mask], torch.ones(B, H, N_q, d)) for function, mask in (
            (flash.scaled_dot_product_attention, bias), (flash.scaled_dot_product_attention, bias.to(dtype)),
            (torch.nn.functional.scaled_dot_product_attention, bias)))
    assert torch.equal(found[0], rounded[0])
    assert found[4].dtype == theirs[4].dtype == torch.float32
    assert torch.equal(found[4].to(dtype), rounded[4])
    torch.testing.assert_close(found[0], theirs[0], rtol=3e-2, atol=3e-2)


Q, K, V = (normal(*shape, seed=n) for n, shape in enumerate(qkv()))
RIGHT = {"query": Q, "key": K, "value": V}


# ------------------------------------------------------------------------------------------ memory
def in_order(order, x):
    """The same values, with these dimensions in memory, the outermost first."""
    return x.permute(order).contiguous().permute([order.index(n) for n in range(x.dim())])


LAYOUTS = {"(B, N, H, d)": (0, 2, 1, 3), "(N, B, H, d)": (2, 0, 1, 3), "(H, B, N, d)": (1, 0, 2, 3)}


@pytest.mark.parametrize("d_v", [40, 37])
@pytest.mark.parametrize("d", [40, 35])
@pytest.mark.parametrize("order", LAYOUTS)
def test_querys_layout_is_kept(order, d, d_v):
    """Without gaps, as PyTorch does where it keeps it: for d_v = d."""
    tensors = [in_order(LAYOUTS[order], normal(*shape)) for shape in qkv(d=d, d_v=d_v)]
    o = flash.scaled_dot_product_attention(*tensors, **PAIR)
    assert o.stride() == in_order(LAYOUTS[order], torch.empty(B, H, N_q, d_v)).stride()
    if d_v == d:
        assert o.stride() == torch.nn.functional.scaled_dot_product_attention(*tensors).stride()


def test_layout_of_3_dimensions():
    q, k, v = (normal(N, 3, 36).transpose(0, 1) for N in (N_q, N_k, N_k))
    assert flash.scaled_dot_product_attention(q, k, v, **PAIR).stride() == q.stride()
    o = flash.scaled_dot_product_attention(*(x.contiguous() for x in (q, k, v)), **PAIR)
    assert o.is_contiguous()


# Tensors of the same values that attention() refuses
AWKWARD = {
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "rows apart": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "misaligned": lambda x: torch.nn.functional.pad(x, (1, 7))[..., 1:-7],
    "transposed": lambda x: x.mT.contiguous().mT,
    "one column": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("way", AWKWARD)
def test_strides_that_are_copied(way):
    """Of each tensor and of all; the gradients come back to where they belong."""
    tensors = [normal(*shape, seed=n) for n, shape in enumerate(qkv())]
    with pytest.raises(ValueError, match="16 bytes|not contiguous"):
        flash.attention(tensors[0], AWKWARD[way](tensors[1]), tensors[2])
    for which in ({0}, {1}, {2}, {0, 1, 2}):
        bent = [AWKWARD[way](x) if n in which else x for n, x in enumerate(tensors)]
        plain = [x.clone(memory_format=torch.contiguous_format) for x in bent]
        do = normal(B, H, N_q, d)
        found, expected = (gradients_of(lambda *x: flash.scaled_dot_product_attention(*x, **PAIR), x, do)
                           for x in (bent, plain))
        assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_a_plain_call_goes_straight_down(monkeypatch):
    """Also with grouped heads, a mask, query's layout."""
    monkeypatch.setattr(sdpa, "_of_any_shape", lambda *_: pytest.fail("took the long way"))
    q, k, v = (normal(*shape).transpose(1, 2).contiguous().transpose(1, 2) for shape in qkv(of_k=(B, 2)))
    for mask in (None, seen(N_q, N_k)):
        assert flash.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **PAIR).shape == q.shape


def test_what_is_not_copied(monkeypatch):
    """A key's only head stays one, and a mask for the whole batch; what broadcasts has stride 0."""
    passed, attend = [], sdpa.attend
    monkeypatch.setattr(sdpa, "attend", lambda *arguments: passed.append(arguments) or attend(*arguments))
    q, k, v = normal(3, H, N_q, d), normal(1, N_k, d), normal(1, 1, N_k, d)
    flash.scaled_dot_product_attention(q, k, v, **PAIR)
    assert all(mine.data_ptr() == x.data_ptr() for x, mine in zip((q, k, v), passed[0]))
    assert [x.shape[1] for x in passed[0][:3]] == [H, 1, 1] and passed[0][1].stride(0) == 0
    mask = seen(1, 1, H, N_q, N_k)
    flash.scaled_dot_product_attention(normal(2, 3, H, N_q, d), k, v, mask, **PAIR)
    (argument,) = passed[1][5].arguments
    assert argument.tensor.shape == (1, H, N_q, N_k) and argument.tensor.data_ptr() == mask.data_ptr()


# ------------------------------------------------------------------------------------------ nothing there
EMPTY = {
    "no keys": (qkv(N_k=0), None, {}),
    "no keys, causal": (qkv(N_k=0), None, {"is_causal": True}),
    "no keys, a bias": (qkv(N_k=0), normal(N_q, 1), {}),
    "no keys, bools": (qkv(N_k=0), seen(B, 1, N_q, 1)[..., :0], {}),
    "no keys, 3 dimensions": (qkv((3,), N_k=0, d=5, d_v=3), None, {}),
    "no queries": (qkv(N_q=0), None, {"is_causal": True}),
    "no queries, a bias": (qkv(N_q=0), normal(1, N_k), {}),
    "no queries, 2 dimensions": (qkv((), N_q=0), None, {}),
    "no batch": (qkv((0, H)), None, {}),
    "no batch of 5 dimensions": (qkv((2, 0, H)), normal(H, N_q, N_k), {}),
    "no heads": (qkv((B, 0)), None, {}),
    "no heads, grouped": (qkv((B, 0), (B, 2)), None, GQA),
    "no batch, the other has one": (qkv((0, H), (1, H)), None, {}),
    "no values": (((2, N_q, d), (2, N_k, d), (2, N_k, 0)), None, {}),
}


@pytest.fixture
def nothing_is_built(monkeypatch):
    monkeypatch.setattr(plan, "load", lambda *_: pytest.fail("a library was asked for"))
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(launch, "build", lambda *_, **__: pytest.fail("built something"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.usefixtures("nothing_is_built")
def test_nothing_there(case, dtype):
    """Zeros, as in PyTorch, and zeros for gradients; without a kernel."""
    shapes, mask, options = EMPTY[case]
    tensors = [normal(*shape).to(dtype) for shape in shapes]
    tensors += [] if mask is None else [mask if mask.dtype == torch.bool else mask.to(dtype)]
    do = torch.ones(*shapes[0][:-1], shapes[2][-1])
    theirs = gradients_of(lambda *x: pytorch(*x, **options), tensors, do, materialize_grads=True)
    for x in tensors[:3]:      # which the zeros must not come from
        x.fill_(math.nan)
    found = gradients_of(lambda *x: flash.scaled_dot_product_attention(*x, **options), tensors, do)
    for mine, other in zip(found, theirs, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        assert not mine.any() and not other.any()


def test_no_columns():
    """All scores are 0 then: the mean of the values."""
    q, k, v = normal(2, N_q, 0), normal(2, N_k, 0), normal(2, N_k, 36)
    o = flash.scaled_dot_product_attention(q, k, v, **PAIR)
    torch.testing.assert_close(o, pytorch(q, k, v))


@pytest.mark.parametrize("mask", [torch.zeros(N_q, N_k, dtype=torch.bool),
                                  torch.full((N_q, N_k), -math.inf)], ids=["bools", "bias"])
def test_queries_that_see_nothing(mask):
    """0, and no gradient, as in PyTorch."""
    for x in check(qkv(), mask, {}, **PAIR):
        assert not x.any()


def test_a_row_of_the_least_number():
    """Not as in PyTorch, which gives the mean of the values."""
    bias = torch.zeros(N_q, N_k)
    bias[3] = torch.finfo(torch.float32).min
    o, theirs = flash.scaled_dot_product_attention(Q, K, V, bias, **PAIR), pytorch(Q, K, V, attn_mask=bias)
    assert not o[:, :, 3].any()
    torch.testing.assert_close(theirs[:, :, 3], V.mean(2))
    theirs[:, :, 3] = 0
    torch.testing.assert_close(o, theirs, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------ refusals
TRIL = torch.ones(N_q, N_k, dtype=torch.bool).tril()
ILLEGAL = {     # arguments that take the place of right ones, and what our message says
    "no tensor": ({"query": [1.0]}, "query must be a torch.Tensor, not list"),
    "no key": ({"key": None}, "key must be a torch.Tensor, not NoneType"),
    "an array": ({"value": V.numpy()}, "value must be a torch.Tensor, not ndarray"),
    "1 dimension": ({"query": Q[0, 0, 0]}, "query must have at least 2 dimensions"),
    "key's type": ({"key": K.half()}, "key has type torch.float16, query torch.float32"),
    "value's type": ({"value": V.double()}, "value has type torch.float64, query torch.float32"),
    **{str(dtype): ({name: x.to(dtype) for name, x in RIGHT.items()}, f"query has type {dtype}")
       for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn)},
    "key's device": ({"key": K.to("meta")}, "key is on meta, query on cpu"),
    "sparse": ({"query": Q.to_sparse()}, "query has layout torch.sparse_coo"),
    "key's d": ({"key": K[..., :32]}, "they must have the same d"),
    "value's N_k": ({"value": V[:, :, :-1]}, "they must have the same N_k"),
    "batch": ({"key": torch.cat([K, K]), "value": torch.cat([V, V])}, "which do not broadcast"),
    "heads": ({"key": K[:, :2], "value": V[:, :2]}, "for grouped heads, pass enable_gqa=True"),
    "grouped heads": ({"key": K[:, :3], "value": V[:, :3], **GQA}, "H must be a multiple of both"),
    "more heads of key": ({"query": Q[:, :2], **GQA}, "query has 2 heads, key 4 and value 4"),
    "grouped heads without heads": ({"query": Q[0, 0], "key": K[0, 0], "value": V[0, 0], **GQA},
                                    "with enable_gqa=True, it must have heads"),
    "no queries for keys": ({"query": Q[:0]}, "which do not broadcast"),
    "two masks": ({"attn_mask": TRIL, "is_causal": True}, "attn_mask and is_causal=True: pass one of them"),
    "a mask's kind": ({"attn_mask": [[True]]}, "attn_mask must be a torch.Tensor, not list"),
    "a mask of integers": ({"attn_mask": TRIL.int()}, "attn_mask has type torch.int32"),
    "a mask's type": ({"attn_mask": TRIL.half()}, "attn_mask has type torch.float16"),
    "a mask's shape": ({"attn_mask": TRIL[:, 1:]}, "attn_mask has shape (19, 25); it must broadcast to"),
    "a mask's rows": ({"query": Q[:, :, :1], "attn_mask": TRIL}, "it must broadcast to (2, 4, 1, 26)"),
    "a mask's batch": ({"query": Q[:1], "key": K[:1], "value": V[:1],
                        "attn_mask": TRIL.expand(B, 1, N_q, N_k)}, "it must broadcast to (1, 4, 19, 26)"),
    "a mask's dimensions": ({"attn_mask": TRIL.expand(1, 1, 1, N_q, N_k)}, "(1, 1, 1, 19, 26)"),
    "a mask for 3 dimensions": ({"query": Q[0], "key": K[0], "value": V[0],
                                 "attn_mask": TRIL.expand(B, H, N_q, N_k)}, "broadcast to (4, 19, 26)"),
    "a mask's device": ({"attn_mask": TRIL.to("meta")}, "attn_mask is on meta, query on cpu"),
    "a sparse mask": ({"attn_mask": torch.ones(N_q, N_k).to_sparse()}, "attn_mask has layout"),
    "integers, and a mask of them": ({name: x.to(torch.int32) for name, x in RIGHT.items()}
                                     | {"attn_mask": TRIL.int()}, "query has type torch.int32"),
    "complex, and a mask": ({name: x.to(torch.complex64) for name, x in RIGHT.items()} | {"attn_mask": TRIL},
                            "query has type torch.complex64"),
    "a chance above 1": ({"dropout_p": 1.5}, "dropout_p must be a probability, from 0 to 1, not 1.5"),
    "a text for dropout_p": ({"dropout_p": "0"}, "dropout_p must be a number"),
    "None for dropout_p": ({"dropout_p": None}, "dropout_p must be a number"),
    "a text for scale": ({"scale": "1"}, "scale must be a number"),
    "two scales": ({"scale": torch.ones(2)}, "scale must be a number"),
    "an array for scale": ({"scale": numpy.ones(1)}, "scale must be a number"),
    "a scale with gradients": ({"scale": torch.tensor(1.0, requires_grad=True)}, "none that requires grad"),
    "a number for is_causal": ({"is_causal": 1}, "is_causal must be a bool, not 1"),
    "None for enable_gqa": ({"enable_gqa": None}, "enable_gqa must be a bool, not None"),
    "an argument that is not there": ({"causal": True}, "unexpected keyword argument 'causal'"),
}


@pytest.mark.parametrize("case", ILLEGAL)
@pytest.mark.usefixtures("nothing_is_built")
def test_errors_are_of_pytorchs_types(case):
    wrong, message = ILLEGAL[case]
    arguments = {**RIGHT, **wrong}
    with pytest.raises(Exception) as theirs:  # noqa: B017
        pytorch(**arguments)
    with pytest.raises(theirs.type, match=re.escape(message)) as ours:
        flash.scaled_dot_product_attention(**arguments)
    assert ours.type is theirs.type


BEYOND = {      # what PyTorch takes
    "float64": ({name: x.double() for name, x in RIGHT.items()}, "the stages take torch.float32"),
    "d": ({"query": Q.repeat(1, 1, 1, 7), "key": K.repeat(1, 1, 1, 7)},
          "query has d = 280; the stages take 256 columns at most"),
    "d_v": ({"value": V.repeat(1, 1, 1, 7)}, "value has d = 280; the stages take 256 columns at most"),
    "scale": ({"scale": 1e6}, "scale must be a number from -65536 to 65536"),
    "nested": ({name: torch.nested.nested_tensor([x[0], x[1]], layout=torch.strided)
                for name, x in RIGHT.items()}, "query is a nested tensor"),
}


@pytest.mark.parametrize("case", BEYOND)
@pytest.mark.usefixtures("nothing_is_built")
def test_what_no_stage_takes(case):
    other, message = BEYOND[case]
    arguments = {**RIGHT, **other}
    torch.nn.functional.scaled_dot_product_attention(**arguments)
    with pytest.raises(ValueError, match=re.escape(message)):
        flash.scaled_dot_product_attention(**arguments)


@pytest.mark.parametrize("scale", [numpy.float32(0.5), numpy.int64(1), torch.tensor(0.5), torch.tensor(1),
                                   True], ids=repr)
def test_numbers_of_other_kinds(scale):
    o = flash.scaled_dot_product_attention(Q, K, V, dropout_p=0, scale=scale, **PAIR)
    assert torch.equal(o, flash.scaled_dot_product_attention(Q, K, V, scale=float(scale), **PAIR))
    torch.testing.assert_close(o, pytorch(Q, K, V, dropout_p=0, scale=scale), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------ who looks on
def test_compile():
    """One graph for all lengths: 3 dimensions, d and d_v that are padded, a mask with a gradient."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def function(q, k, v, bias):
        return flash.scaled_dot_product_attention(q, k, v, bias, **PAIR)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for N in (17, 20, 33):
        tensors = normal(3, N, 37), normal(3, N + 3, 37), normal(3, N + 3, 34), normal(N, N + 3)
        found, expected = (gradients_of(f, tensors, normal(3, N, 34)) for f in (compiled, function))
        assert all(torch.equal(x, y) for x, y in zip(found, expected))
    assert len(graphs) == 1


@pytest.mark.parametrize("case", ["5 dimensions that broadcast", "no keys", "(N, B, H, d)", "transposed"])
def test_compile_what_is_copied(case):
    shapes, mask, options = {**CASES, **EMPTY}.get(case, (qkv(d=36, d_v=36), None, {}))
    tensors = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    if case in LAYOUTS:
        tensors = [in_order(LAYOUTS[case], x) for x in tensors]
    elif case in AWKWARD:
        tensors = [AWKWARD[case](x) for x in tensors]

    def function(*tensors):
        return flash.scaled_dot_product_attention(*tensors, mask, **options, **PAIR)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*tensors)
    expected = function(*tensors)
    assert torch.equal(compiled, expected) and compiled.stride() == expected.stride()


class WithParameters(torch.nn.Module):
    """Whose sizes are numbers, where those of its arguments are symbols."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(normal(2, 24, 24))
        self.kv = torch.nn.Parameter(normal(1, 2, 24, d))

    def forward(self, q, k, v):
        N = q.shape[2]
        o = flash.scaled_dot_product_attention(q, k, v, self.bias[:, :N, :N] > 0, **PAIR)
        o = o + flash.scaled_dot_product_attention(q, self.kv, self.kv, **PAIR)
        return o + flash.attention(q, k, v, mask=flash.masks.relative_bias(q.new_ones(2, 2 * N - 1)), **PAIR)


def test_compile_parameters_beside_symbols():
    module = WithParameters()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.no_grad():
        for N in (12, 17, 24):                     # the last one as many as the parameters have
            tensors = normal(3, 1, 2, N, d)
            torch.testing.assert_close(compiled(*tensors), module(*tensors))


def test_compile_sizes_that_become_symbols():
    """Fewer columns of v; several heads of k for one of q, in another call others."""
    compiled = torch.compile(flash.scaled_dot_product_attention, fullgraph=True, backend="eager")
    for columns, heads, heads_kv in ((40, 4, 2), (48, 6, 3)):
        q, k, v = normal(1, heads, 9, columns), normal(1, heads_kv, 9, columns), normal(1, heads_kv, 9, 8)
        torch.testing.assert_close(compiled(q, k, v, enable_gqa=True, **PAIR),
                                   pytorch(q, k, v, enable_gqa=True), rtol=1e-4, atol=1e-5)


def test_an_address_is_not_known_to_the_compiler():
    def function(q, k, v):
        return flash.scaled_dot_product_attention(q[..., 1:33], k[..., :32], v[..., :32])

    assert function(Q, K, V).shape == (B, H, N_q, 32)
    with pytest.raises(ValueError, match="q's rows must start at multiples of 16 bytes"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(Q, K, V)


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x[0, :, :, :37], lambda x: x[:, :, :0]],
                         ids=["plain", "padded", "nothing there"])
def test_autocast(change):
    """Types that differ, and the mask's, become one; gradients have those of the tensors."""
    tensors = [change(x) for x in (Q, K.half(), V.bfloat16())]
    bias = normal(tensors[0].shape[-2], tensors[1].shape[-2]).half()
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = (
            gradients_of(f, [*tensors, bias], torch.ones_like(tensors[0]), materialize_grads=True)
            for f in (flash.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention))
    assert found[0].dtype == torch.bfloat16
    for x, y in zip(found, theirs):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        torch.testing.assert_close(x.float(), y.float(), rtol=3e-2, atol=3e-2)


def test_autocast_and_a_stage_that_is_not_there():
    """The error is of the stage, not of types that differ."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="there is no stage 'falsh2'"):
        flash.scaled_dot_product_attention(Q, K.half(), V, stage="falsh2")


def test_autocast_mends_no_float64():
    with torch.autocast("cpu", torch.bfloat16):
        for arguments in ({"key": K.double()}, {"attn_mask": torch.zeros(N_q, N_k).double()}):
            with pytest.raises(RuntimeError, match="has type torch.float64"):
                flash.scaled_dot_product_attention(**{**RIGHT, **arguments})


def test_transforms_are_refused():
    with pytest.raises(ValueError, match="does not take part in torch.func's transforms"):
        torch.func.vmap(flash.scaled_dot_product_attention)(Q[..., :36], K[..., :36], V)
    with pytest.raises(ValueError, match="does not take part in torch.func's transforms"):
        torch.func.grad(lambda q: flash.scaled_dot_product_attention(q, K[0], V[0]).sum())(Q[0])


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("rows", [N_q, N_k])
def test_a_causal_bias(make, rows):
    """A tensor of PyTorch's whose memory nobody fills."""
    q, bias = normal(B, H, rows, d), make(rows, N_k)
    o = flash.scaled_dot_product_attention(q, K, V, bias, **PAIR)
    seen = torch.ones(rows, N_k, dtype=torch.bool).tril(0 if make is causal_upper_left else N_k - rows)
    assert type(o) is torch.Tensor
    torch.testing.assert_close(o, pytorch(q, K, V, attn_mask=seen), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match=f"of {rows} queries and {N_k} keys; query and key have 1 and"):
        flash.scaled_dot_product_attention(q[:, :, :1], K, V, bias)


def test_memory_that_is_gone():
    for name in RIGHT:
        gone = normal(3, N_k, 37)
        gone.untyped_storage().resize_(0)
        tensors = dict.fromkeys(RIGHT, normal(3, N_k, 37)) | {name: gone}
        with pytest.raises(ValueError, match=f"{name} is a Tensor without memory"):
            flash.scaled_dot_product_attention(**tensors)


class Subclass(torch.Tensor):
    pass


def test_a_dispatch_mode_and_a_subclass():
    tensors = [normal(3, N, columns) for N, columns in ((N_q, 37), (N_k, 37), (N_k, 34))]
    expected = flash.scaled_dot_product_attention(*tensors, **PAIR)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(flash.scaled_dot_product_attention(*tensors, **PAIR), expected)
    assert counter.get_total_flops() == 4 * 3 * N_q * N_k * 40
    o = flash.scaled_dot_product_attention(*(x.as_subclass(Subclass) for x in tensors), **PAIR)
    assert torch.equal(o.as_subclass(torch.Tensor), expected)
