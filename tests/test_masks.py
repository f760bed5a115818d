"""Masks: every one of stages/masks against a dense mask in float64, in every stage that takes them."""

import math

import pytest
import torch
from conftest import DEVICES

import flash
from flash_ladder.tiles import SKIPPED, WHOLE

TAKING = [s for s in flash.stages() if s.takes_masks]
ENDS = [s for s in TAKING if s.default or s.name in ("flash2", "recompute", "deterministic")]
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


def check(name, forward, backward, sizes, dtype, device, gradients=True, **tiles):
    B, H, H_kv, N_q, N_k, d = sizes
    q, k, v = data(*sizes, dtype, device)
    case = make(name, B, H, N_q, N_k, device, dtype)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", ENDS, ids=lambda s: s.path.stem)
def test_ends_of_branches(stage, name, device):
    if stage.direction == "fwd":
        check(name, stage.name, None, SIZES, type_of(stage), device, gradients=False)
    else:
        check(name, None, stage.name, SIZES, type_of(stage), device)


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
