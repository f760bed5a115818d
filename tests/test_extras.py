"""Dropout, sinks, and a v of other columns than q: every stage that takes them against float64."""

import itertools
import math

import pytest
import torch
from conftest import DEVICES
from test_masks import near

import flash
from flash_ladder import extras
from flash_ladder.grid import WRITERS

FWD = [s for s in flash.stages("fwd") if "dropout" in s.takes]
BWD = [s for s in flash.stages("bwd") if "dropout" in s.takes]
NEG = -math.inf


def type_of(stage):
    return torch.float32 if torch.float32 in stage.dtypes else torch.bfloat16


# ------------------------------------------------------------------------------------------ the generator
def philox(counter, key, rounds=7):
    """Philox4x32 on tensors of int64 that hold 32 bits: four words of a counter, two of a key."""
    low = 0xFFFFFFFF
    x, y, z, w = counter
    k0, k1 = key
    for _ in range(rounds):
        # products of 64 bits, by halves of 16: int64 has a sign
        a, b = _product(0xD2511F53, x), _product(0xCD9E8D57, z)
        x, y, z, w = b[0] ^ y ^ k0, b[1], a[0] ^ w ^ k1, a[1]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return x, y, z, w


def _product(a, x):
    """(upper, lower) 32 bits of a * x."""
    lower, upper = a * (x & 0xFFFF), a * (x >> 16)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


# c and e, of columns below 64, and of the others, in the first row and the second
FACTORS = (0x297A2D39, 0x9E3779B9, 0x85EBCA77, 0xC2B2AE35), (0x1B873593, 0xCD9E8D57, 0xBB67AE85, 0xD2511F53)


def less(numbers, p):
    """Of 16 bits each, as fp16 numbers, whether they are less than the one that 65536 p are less than."""
    as_fp16 = torch.arange(65536).to(torch.int16).view(torch.half).double()
    in_order = as_fp16.nan_to_num(math.inf, math.inf, -math.inf).sort().values
    return as_fp16[numbers] < in_order[round(p * 65536)]


def made_of(words):
    """Of x, y, z, w the 128 words of a group: of eight rows, sixteen each."""
    made = []
    for row in range(8):
        odd = 0x85EBCA6B if row >= 4 else 1
        words_of_rows = words[0], _product(odd, words[1])[1], _product(odd, words[2])[1], words[3]
        x, y, z, w = (words_of_rows[n] for n in ([0, 1, 2, 3], [2, 0, 3, 1])[row // 2 % 2])
        for n, factor in enumerate(FACTORS[row % 2]):
            a, b, *others = (z, w, x, y) if n % 2 else (x, y, z, w)
            made += [_product(factor, word)[1] + a + b & 0xFFFFFFFF for word in (a, b, *others)]
    return made


def expected_keep(seed, B, H, N_q, N_k, p):
    """(B, H, N_q, N_k), as stages/common/dropout.cuh defines it."""
    down, across = -(-N_q // 64), -(-N_k // 128)         # tiles of 8 x 4 groups
    head, row = torch.arange(B * H).view(-1, 1, 1), torch.arange(8 * down).view(-1, 1)
    col = torch.arange(4 * across)
    words = philox((head, col, torch.zeros_like(head), row), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    made = torch.stack(made_of(torch.stack(torch.broadcast_tensors(*words))))
    bits = torch.stack([made & 0xFFFF, made >> 16], -1).view(8, 16, B * H, down, 8, across, 4, 2)
    bits = bits.permute(2, 3, 0, 4, 5, 1, 6, 7).reshape(B, H, 64 * down, 128 * across)[:, :, :N_q, :N_k]
    return torch.where(less(bits, min(p, 1 - p)) == (p <= 0.5), 0.0, 1 / (1 - p)).double()


def test_philox_is_the_papers():
    """Against the known answers of the authors' own library (Random123, kat_vectors)."""
    def words(*texts):
        return tuple(torch.tensor(int(x, 16)) for x in texts)

    for rounds, counter, key, found in [
            (7, ["0"] * 4, ["0"] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
            (7, ["ffffffff"] * 4, ["ffffffff"] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
            (7, "243f6a88 85a308d3 13198a2e 03707344".split(), "a4093822 299f31d0".split(),
             "4dfccaba 190a87f0 c47362ba b6b5242a"),
            (10, ["0"] * 4, ["0"] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8")]:
        assert [int(x) for x in philox(words(*counter), words(*key), rounds)] == \
               [int(x, 16) for x in found.split()]


def held(monkeypatch, seed=-0x123456789ABCDEF):
    """Calls draw this seed."""
    monkeypatch.setattr(extras, "torch", _Held(seed))
    return seed


class _Held:
    """torch, but for randint()."""

    def __init__(self, seed):
        self.seed = seed

    def __getattr__(self, name):
        return getattr(torch, name)

    def randint(self, low, high, size, *, dtype, device):
        return torch.full(size, self.seed, dtype=dtype, device=device)


def read_back(B, H, N_q, N_k, p, device, stage, **tiles):
    """keep of the next call, by V = identity: with Q = 0 each P is 1 / N_k."""
    dtype = type_of(next(s for s in FWD if s.name == stage))
    columns = 8 * -(-N_k // 8)
    q = torch.zeros(B, H, N_q, columns, dtype=dtype, device=device)
    k = torch.zeros(B, 1, N_k, columns, dtype=dtype, device=device)
    v = torch.eye(N_k, columns, dtype=dtype, device=device).expand(B, 1, N_k, columns)
    o = flash.attention(q, k, v, dropout_p=p, stage=stage, **tiles)
    return o[..., :N_k].double().cpu() * N_k


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", FWD, ids=lambda s: s.name)
def test_stages_drop_the_same(stage, device, monkeypatch):
    """The mask read back is the one that the seed stands for, with other tiles and another p, too."""
    seed = held(monkeypatch)
    B, H, N_q, N_k = 2, 3, 75, 85                   # rows of both halves of a group, and of the next one
    small, wide_warps = {"Br": 32, "Bc": 32}, {"Br": 128, "Bc": 64}
    tiles = {"flash2": [small], "fp32_tuned": [small], "ampere_tuned": [small, wide_warps]}
    for p, options in [(0.3, {}), (0.85, {}), *((0.3, x) for x in tiles.get(stage.name, []))]:
        expected = expected_keep(seed, B, H, N_q, N_k, p)
        found = read_back(B, H, N_q, N_k, p, device, stage.name, **options)
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage, Br", [("ampere_tuned", 32), ("hopper_tuned", 64)])
def test_a_tile_of_80_keys(stage, Br, device, monkeypatch):
    """Of which most begin within a group of 128."""
    seed = held(monkeypatch, 77)
    found = read_back(1, 1, 33, 245, 0.5, device, stage, Br=Br, Bc=80)
    assert torch.equal(found > 0, expected_keep(seed, 1, 1, 33, 245, 0.5) > 0)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rate_and_independence(p):
    """Within four standard deviations: of elements, of neighbours in a row, a column, a group, heads,
    batch elements and seeds."""
    torch.manual_seed(1)
    keep, other = ((read_back(2, 2, 160, 160, p, "cpu", "flash2") > 0).double() for _ in range(2))
    n = keep.numel()
    assert abs(keep.mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / n)
    x, y = keep - keep.mean(), other - other.mean()
    for a, b in [(x, y), (x[0], x[1]), (x[:, 0], x[:, 1]),
                 *((x[..., step:], x[..., :-step]) for step in (1, 2, 8, 16, 24, 32, 64)),
                 *((x[..., step:, :], x[..., :-step, :]) for step in (1, 2, 8, 16, 24, 32))]:
        correlation = (a * b).mean() / (p * (1 - p))
        assert abs(correlation) < 4.5 / math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_a_group(p):
    """Its rate is p at each of 256 places, and no two elements are correlated, nor three."""
    keep = expected_keep(0x3243F6A8885A308D, 1, 2, 1024, 1024, p) > 0
    rate = round(p * 65536) / 65536
    x = (keep.float() - (1 - rate)) / math.sqrt(rate * (1 - rate))
    x = x.view(2, 16, 8, 8, 8, 16, 4, 2).permute(2, 5, 7, 0, 1, 3, 4, 6).flatten(3).flatten(0, 2)
    places, n = x.shape
    assert places == 256 and (x.mean(1).abs() < 4.5 / math.sqrt(n)).all()
    assert ((x @ x.T / n).triu(1).abs() < 5 / math.sqrt(n)).all()
    for a in range(places):
        if a % 8 == 0:                      # their products have long tails
            of_three = (x[a] * x) @ x.T / n
            assert (of_three[a + 1:, a + 1:].triu(1).abs() < 7 / math.sqrt(n)).all()


def test_which_words_depend():
    """Any three words in the same row and half have numbers of x, y, z, w that are independent modulo 2, and
    any two at all, but for 960 pairs. These have four bits in common at most, which hardly matters."""
    one_each = torch.eye(4, dtype=torch.int64)              # the words are sums, so of 1, 0, 0, 0 and so on
    words = torch.stack(made_of(one_each))                  # the numbers of x, y, z, w
    for of_half in words.view(16, 8, 4) % 2:
        assert len(of_half.unique(dim=0)) == 8
        assert (of_half.sum(1) % 2 == 1).all()              # so no two of them add up to a third
    left, right = words[list(itertools.combinations(range(len(words)), 2))].unbind(1)
    minors = torch.stack([left[:, i] * right[:, j] - left[:, j] * right[:, i]       # modulo 2^64
                          for i, j in itertools.combinations(range(4), 2)], 1)
    close = minors[(minors % 2 == 0).all(1)]            # one's last bits are an odd number times the other's
    assert len(close) == 960 and (close % 32 != 0).any(1).all()
    for p in (0.05, 0.1, 0.5):
        by_last_bits = less(torch.arange(65536), p).double().view(-1, 16).mean(0)
        assert by_last_bits.var(correction=0) < 1e-6 * p * (1 - p)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5])
def test_three_that_depend(p):
    """The lower halves of s + c x and s + c' x, of two rows, and s + c y: 2^24 pairs of x and y."""
    dropped = less(torch.arange(65536), p).double()
    rate = dropped.mean()
    words = torch.stack(made_of(torch.eye(4, dtype=torch.int64))) % 65536        # the numbers of x, y, z, w
    assert not words[[0, 16, 1], 2:].any()
    x, y = torch.randint(65536, (2, 2**24), generator=torch.Generator().manual_seed(2))
    a, b, c = (dropped[(word[0] * x + word[1] * y) % 65536] - rate for word in words[[0, 16, 1]])
    assert abs((a * b * c).mean()) < 5 * (rate * (1 - rate))**1.5 / 2**12
    assert abs((a * b).mean()) < 5 * rate * (1 - rate) / 2**12


@pytest.mark.parametrize("count", [0, 1, 6554, 0x7C00, 0x7C01, 0x7C02, 32768])
def test_how_many_numbers_are_less(count):
    """As many as there should be, but for one: that is one of the two zeros without the other."""
    assert less(torch.arange(65536), count / 65536).sum() == count - (count == 0x7C01)


def test_the_seed_is_torchs():
    """manual_seed() fixes it, without it each call draws another one, and without dropout nobody draws."""
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind(0)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    flash.attention(q, k, v)
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (flash.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    again = flash.attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.half], ids=str)
def test_all_and_none(dtype, device):
    """p = 1: zeros, with gradients 0, as in PyTorch. A p that is less than 2^-17 drops none."""
    q, k, v = (x.to(dtype).requires_grad_() for x in torch.randn(3, 1, 2, 20, 16, device=device).unbind(0))
    o = flash.attention(q, k, v, dropout_p=1.0)
    gradients = torch.autograd.grad(o.sum(), [q, k, v])
    assert all((x == 0).all() for x in (o, *gradients))
    few = flash.attention(q, k, v, dropout_p=1e-6)
    torch.testing.assert_close(few, flash.attention(q, k, v), rtol=2e-3, atol=1e-6)


# ------------------------------------------------------------------------------------------ all three
def exactly(q, k, v, keep, sink, diagonal):
    """(o, L) in PyTorch, in q's type."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    S = q @ k.mT / math.sqrt(q.shape[3])
    if diagonal is not None:
        seen = torch.ones(S.shape[-2:], dtype=torch.bool, device=q.device).tril(diagonal)
        S = S.masked_fill(~seen, NEG)
    lse = S.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(S.dtype)[:, None].expand_as(lse))
    P = torch.exp(S - torch.where(lse > NEG, lse, 0)[..., None])
    if keep is not None:
        P = P * keep.to(P)
    return P @ v, lse


# B, H, H_kv, N_q, N_k, d, d_v, causal, dropout_p, whether there is a sink
CASES = [(2, 4, 2, 37, 75, 64, 32, True, 0.3, True),
         (1, 2, 1, 70, 50, 40, 40, True, 0.5, False),      # with rows that see no key
         (1, 2, 2, 33, 65, 136, 72, True, 0.0, True),
         (1, 3, 3, 40, 40, 200, 128, False, 0.1, True),
         (1, 2, 1, 100, 300, 64, 64, False, 0.4, False)]  # several groups of dropout, in either direction


def compare(forward, backward, case, dtype, device, seed):
    B, H, H_kv, N_q, N_k, d, d_v, causal, p, with_sink = case
    g = torch.Generator().manual_seed(0)
    shapes = (B, H, N_q, d), (B, H_kv, N_k, d), (B, H_kv, N_k, d_v)
    leaves = [torch.randn(s, generator=g).to(dtype).to(device) for s in shapes]
    if with_sink:
        leaves.append(torch.randn(H, generator=g).to(device) + 1)
    do = torch.randn(B, H, N_q, d_v, generator=g).to(dtype).to(device)
    dlse = torch.randn(B, H, N_q, generator=g).to(device)
    keep = expected_keep(seed, B, H, N_q, N_k, p).to(device) if p else None
    diagonal = N_k - N_q if causal else None

    def at(precision):
        x = [leaf.to(precision).requires_grad_() for leaf in leaves]
        o, lse = exactly(*x[:3], keep, x[3] if with_sink else None, diagonal)
        seen = lse > NEG
        gradients = torch.autograd.grad([o, lse[seen]], x, [do.to(precision), dlse.to(precision)[seen]])
        return o, torch.where(seen, lse, 0), *gradients

    x = [leaf.clone().requires_grad_() for leaf in leaves]
    o, lse = flash.attention(*x[:3], causal=causal, stage=forward, backward=backward, dropout_p=p,
                             sink=x[3] if with_sink else None, return_lse=True)
    seen = lse > NEG
    assert with_sink or bool(seen.all()) == (N_q <= N_k)
    gradients = torch.autograd.grad([o, lse], x, [do, torch.where(seen, dlse, 0)])
    found = (o, torch.where(seen, lse, 0), *gradients)
    assert o.shape == do.shape and o.dtype == dtype
    # the gradient of the sink is a few numbers, one a head: how near PyTorch comes is luck
    for mine, right, plain, times in zip(found, at(torch.float64), at(dtype), (2, 2, 3, 3, 3, 6)):
        near(mine, right, plain, times)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("stage", [*FWD, *BWD], ids=lambda s: s.path.stem)
def test_against_float64(stage, case, device, monkeypatch):
    """The gradients with the mask held. Stages in the middle of the branch: one case; others that, and half
    of the rest by turns, or those with a d for which calls take them."""
    is_end = stage.default or stage.name in ("flash2", "recompute", "hopper_tuned")
    has_turn = case[5] > 128 if "d > 128" in stage.calls else CASES.index(case) % 2 == stage.number % 2
    if case is not CASES[0] and not (is_end and has_turn):
        pytest.skip("of another stage")
    if stage.name in WRITERS and case[5] > 192:
        pytest.skip("a tile of dQ does not fit in shared memory")
    forward, backward = (stage.name, None) if stage.direction == "fwd" else (None, stage.name)
    compare(forward, backward, case, type_of(stage), device, held(monkeypatch))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", ["ampere_tuned", "hopper_tuned", "exchanged_tuned"])
def test_with_a_mask_that_has_a_slope(backward, device, monkeypatch):
    """In 16 bits: ampere_tuned's warps for dK get P times slope from those for dV, before dropout; in
    the others P's sign says what is dropped, and the slope comes after it."""
    seed = held(monkeypatch)
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 70, 64, generator=g).half().to(device) for _ in range(4))
    sink = torch.randn(2, generator=g).to(device)
    keep = expected_keep(seed, 1, 2, 70, 70, 0.2).to(device)

    def at(precision):
        x = [t.to(precision).requires_grad_() for t in (q, k, v, sink)]
        S = 2 * torch.tanh(x[0] @ x[1].mT / 8 / 2)
        P = torch.exp(S - torch.logaddexp(S.logsumexp(-1), x[3][:, None])[..., None])
        o = (P * keep.to(P)) @ x[2]
        return o, *torch.autograd.grad(o, x, do.to(precision))

    x = [t.clone().requires_grad_() for t in (q, k, v, sink)]
    o = flash.attention(*x[:3], mask=flash.masks.softcap(2.0), dropout_p=0.2, sink=x[3], backward=backward)
    for mine, right, plain in zip((o, *torch.autograd.grad(o, x, do)), at(torch.float64), at(torch.float16)):
        near(mine, right, plain, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d, d_v, p, with_sink", [(64, 40, 0.2, True), (128, 128, 0.2, False),
                                                  (256, 256, 0.0, True)])
def test_with_a_window(d, d_v, p, with_sink, device, monkeypatch):
    """As a call with one takes it on Hopper, with that stage's largest tiles."""
    seed = held(monkeypatch)
    g, N = torch.Generator().manual_seed(0), 330
    q, k, v = (torch.randn(1, 2, N, n, generator=g).bfloat16().to(device) for n in (d, d, d_v))
    sink = torch.randn(2, generator=g).to(device) if with_sink else None
    keep = expected_keep(seed, 1, 2, N, N, p).to(device) if p else torch.ones(1, 1, N, N, device=device)
    seen = torch.ones(N, N, dtype=torch.bool, device=device).tril(7).triu(-100)

    def at(precision):
        S = (q.to(precision) @ k.to(precision).mT / math.sqrt(d)).masked_fill(~seen, -torch.inf)
        L = S.logsumexp(-1)
        L = torch.logaddexp(L, sink.to(precision)[:, None]) if with_sink else L
        return (torch.exp(S - L[..., None]) * keep.to(precision)) @ v.to(precision), L

    stage = next(stage for stage in FWD if stage.name == "own_ranges")
    found = flash.attention(q, k, v, mask=flash.masks.window(100, 7), dropout_p=p, sink=sink, stage=stage,
                            return_lse=True, **stage.default_tiles(d, window=108))
    for mine, right, plain in zip(found, at(torch.float64), at(torch.bfloat16), strict=True):
        near(mine, right, plain, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", [
    "ampere_tuned", "hopper_tuned", "exchanged_tuned", "exchanged_semaphores"])
def test_the_gradient_of_a_bias(backward, device, monkeypatch):
    """It is dS itself: in Hopper's stages that lacks dropout's scale, which the others get in the end."""
    seed = held(monkeypatch)
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 70, n, generator=g).half().to(device) for n in (136, 136, 72, 72))
    bias = torch.randn(70, 70, generator=g).half().to(device)
    keep = expected_keep(seed, 1, 2, 70, 70, 0.4).to(device)

    def at(precision):
        x = [t.to(precision).requires_grad_() for t in (q, k, v, bias)]
        P = torch.softmax(x[0] @ x[1].mT / math.sqrt(136) + x[3], -1)
        return torch.autograd.grad((P * keep.to(P)) @ x[2], x, do.to(precision))

    x = [t.clone().requires_grad_() for t in (q, k, v, bias)]
    o = flash.attention(*x[:3], mask=flash.masks.additive(x[3]), dropout_p=0.4, backward=backward)
    for mine, right, plain in zip(torch.autograd.grad(o, x, do), at(torch.float64), at(torch.float16)):
        near(mine, right, plain, 4)


@pytest.mark.parametrize("backward, copies", [
    ("exchanged_tuned", "late"), ("exchanged_tuned", "early"), ("exchanged_semaphores", "early")])
def test_checker_finds_nothing_where_D_is_kept(backward, copies, monkeypatch):
    """A block has four tiles of Q: all buffers are filled anew."""
    monkeypatch.setenv("FLASH_SIM_COPIES", copies)
    q, k = (torch.randn(1, 2, n, 136).half().requires_grad_() for n in (200, 150))
    v = torch.randn(1, 2, 150, 72).half().requires_grad_()
    with flash.inspect() as report:
        o = flash.attention(q, k, v, dropout_p=0.4, causal=True, backward=backward)
        found = torch.autograd.grad(o.sum(), [q, k, v])
    assert not report.findings, str(report)
    assert all(torch.isfinite(x).all() for x in found)


@pytest.mark.slow
@pytest.mark.parametrize("forward, backward", [
    ("flash2", "recompute"), ("fp32_tuned", "fp32_tuned"), ("ampere_tuned", "ampere_tuned")])
def test_checker_finds_nothing(forward, backward):
    dtype = torch.float16 if forward == "ampere_tuned" else torch.float32
    q, k = (torch.randn(1, 2, n, 40).to(dtype).requires_grad_() for n in (40, 50))
    v = torch.randn(1, 2, 50, 24).to(dtype).requires_grad_()
    sink = torch.randn(2, requires_grad=True)
    with flash.inspect() as report:
        o = flash.attention(q, k, v, dropout_p=0.4, sink=sink, causal=True, stage=forward, backward=backward,
                            Br=32, Bc=32, Br_bwd=32, Bc_bwd=32)
        found = torch.autograd.grad(o.sum(), [q, k, v, sink])
    assert not report.findings, str(report)
    assert all(torch.isfinite(x).all() for x in found)


# ------------------------------------------------------------------------------------------ sinks
@pytest.mark.parametrize("device", DEVICES)
def test_a_sink_is_a_key_of_value_0(device):
    """Of one more key, whose score is the sink and whose value is 0. And without keys: o = 0, L = sink."""
    q, k, v = torch.randn(3, 1, 2, 20, 16, device=device).unbind(0)
    sink = torch.tensor([0.7, -1.0], device=device)
    o, lse = flash.attention(q, k, v, sink=sink, return_lse=True, scale=1.0)
    zero = torch.zeros(1, 2, 20, 1, device=device)
    q1 = torch.cat([q, zero + 1, zero.expand(1, 2, 20, 7)], 3)      # column 16 makes the score
    k1 = torch.cat([torch.cat([k, zero.expand(1, 2, 20, 8)], 3), torch.zeros(1, 2, 1, 24, device=device)], 2)
    k1[:, :, 20, 16] = sink
    v1 = torch.nn.functional.pad(v, (0, 8, 0, 1))
    o1, lse1 = flash.attention(q1, k1, v1, return_lse=True, scale=1.0)
    torch.testing.assert_close(o, o1[..., :16])
    torch.testing.assert_close(lse, lse1)
    o, lse = flash.attention(q, k, v, sink=sink, mask=flash.masks.causal(-30), return_lse=True)
    assert (o == 0).all() and torch.equal(lse, sink[:, None].expand(1, 2, 20))


def test_a_sink_of_minus_infinity_is_none():
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind(0)
    sink = torch.full((2,), NEG)
    assert torch.equal(flash.attention(q, k, v, sink=sink), flash.attention(q, k, v))


def test_a_sinks_gradient_has_its_type():
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind(0)
    sink = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    flash.attention(q, k, v, sink=sink[::2]).sum().backward()
    assert sink.grad.dtype == torch.bfloat16 and (sink.grad[::2] != 0).all() and (sink.grad[1::2] == 0).all()


# ------------------------------------------------------------------------------------------ d_v
@pytest.mark.parametrize("stage, backward", [("naive", "naive"), ("mma", "mma"), (None, "cp_async"),
                                             ("tiled", None), ("exp2", None)])
def test_stages_without_d_v_get_a_copy(stage, backward):
    q, k = torch.randn(2, 1, 2, 33, 40).unbind(0)
    v = torch.randn(1, 2, 33, 24)
    if stage in ("mma", "exp2") or backward == "cp_async":
        q, k, v = (x.half() for x in (q, k, v))
    x = [t.requires_grad_() for t in (q, k, v)]
    o = flash.attention(*x, stage=stage, backward=backward)
    expected = torch.nn.functional.scaled_dot_product_attention(*x)
    close = {"rtol": 1e-2, "atol": 5e-3} if q.dtype == torch.half else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(o, expected, **close)
    do = torch.randn(o.shape).to(o.dtype)
    for mine, theirs in zip(torch.autograd.grad(o, x, do), torch.autograd.grad(expected, x, do)):
        torch.testing.assert_close(mine, theirs, **close)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_layout_of_o_is_qs(transposed):
    def made(N, columns):
        return torch.randn(2, N, 3, columns).transpose(1, 2) if transposed else torch.randn(2, 3, N, columns)

    o = flash.attention(made(20, 16), made(30, 16), made(30, 8))
    assert o.shape == (2, 3, 20, 8) and o.transpose(1, 2).is_contiguous() == transposed


def test_d_v_of_an_expanded_q():
    """Its strides of 0 say nothing of o's layout: once the plan and the call understood them differently."""
    q = torch.randn(2, 1, 20, 16).expand(2, 3, 20, 16)
    k, v = torch.randn(2, 3, 30, 16), torch.randn(2, 3, 30, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(flash.attention(q, k, v, stage="flash2"), expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------ around it
def test_compile_checkpoint_and_opcheck():
    """torch.compile in one graph; checkpointing, whose second forward pass drops the same; the operators."""
    x = [torch.randn(1, 2, 20, n).requires_grad_() for n in (16, 16, 8)]
    sink = torch.randn(2, requires_grad=True)

    def loss(q, k, v, sink):
        return flash.attention(q, k, v, causal=True, dropout_p=0.3, sink=sink).square().sum()

    def gradients(f, seed):
        torch.manual_seed(seed)
        value = f(*x, sink)
        return value.detach(), *torch.autograd.grad(value, [*x, sink])

    plain = gradients(loss, 5)
    again = gradients(lambda *a: torch.utils.checkpoint.checkpoint(loss, *a, use_reentrant=False), 5)
    for mine, theirs in zip(plain, again):
        torch.testing.assert_close(mine, theirs)
    compiled = gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"), 5)
    for mine, theirs in zip(plain, compiled):
        torch.testing.assert_close(mine, theirs)
    seed = torch.tensor([11])
    torch.library.opcheck(torch.ops.flash.forward, (
        *x, None, None, [], [], [], 0.3, seed, sink, None, None, None, "flash2", *[None] * 6, [], []))


def test_with_operators_the_same(monkeypatch):
    """Where somebody waits for an operator, as FlopCounterMode does."""
    held(monkeypatch)
    q, k, v = (torch.randn(1, 2, 20, n).requires_grad_() for n in (16, 16, 8))
    sink, bias = torch.randn(2, requires_grad=True), torch.randn(20, 20, requires_grad=True)

    def gradients():
        o = flash.attention(q, k, v, mask=flash.masks.additive(bias), dropout_p=0.3, sink=sink,
                            backward="deterministic")
        return o, *torch.autograd.grad(o.square().sum(), [q, k, v, bias, sink])

    plain = gradients()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        for mine, theirs in zip(gradients(), plain):
            assert torch.equal(mine, theirs)
    assert counter.get_total_flops() == (2 * 24 + 2 * (3 * 16 + 2 * 8)) * 2 * 20 * 20


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_cuda_graphs_draw_anew():
    q, k, v = torch.randn(3, 1, 2, 64, 64, device="cuda", dtype=torch.half).unbind(0)
    flash.attention(q, k, v, dropout_p=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash.attention(q, k, v, dropout_p=0.5)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(o.clone())
    assert not torch.equal(*found)


# ------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize("options, message", [
    ({"dropout_p": 1.5}, "dropout_p must be a probability from 0 to 1, not 1.5"),
    ({"dropout_p": math.nan}, "dropout_p must be a probability"),
    ({"dropout_p": "much"}, "dropout_p must be a probability"),
    ({"dropout_p": True}, "dropout_p must be a probability"),
    ({"sink": 1.0}, "sink must be a tensor (H,), not float"),
    ({"sink": torch.zeros(3)}, "sink must be floats of shape (2,)"),
    ({"sink": torch.zeros(2, dtype=torch.int32)}, "sink must be floats"),
    ({"sink": torch.zeros(2, device="meta")}, "sink is on meta"),
    ({"dropout_p": 0.1, "stage": "tiled"}, "stage 'tiled' takes no dropout; of its type these do: flash2"),
    ({"sink": torch.zeros(2), "stage": "naive"}, "stage 'naive' takes no sink"),
    ({"dropout_p": 0.1, "backward": "naive"}, "backward stage 'naive' takes no dropout"),
])
def test_refused(options, message):
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind(0)
    with pytest.raises(ValueError) as error:
        flash.attention(q, k, v, **options)
    assert message in str(error.value)


def test_pytorchs_function_takes_them():
    """Dropout and any d_v: what is dropped is the same as in attention()."""
    q, k = torch.randn(2, 1, 2, 20, 24).unbind(0)
    for d_v in (8, 20, 30):
        v = torch.randn(1, 2, 20, d_v)
        torch.manual_seed(2)
        o = flash.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        torch.manual_seed(2)
        more = torch.nn.functional.pad(v, (0, 32 - d_v))
        wide = (torch.nn.functional.pad(x, (0, 8)) for x in (q, k))
        expected = flash.attention(*wide, more, dropout_p=0.4, scale=24**-0.5)
        torch.testing.assert_close(o, expected[..., :d_v])


def test_refused_in_16_bits():
    """By a name of that type that would do."""
    q, k, v = torch.randn(3, 1, 2, 20, 16).half().unbind(0)
    with pytest.raises(ValueError, match="stage 'mma' takes no dropout; of its type these do: ampere_tuned"):
        flash.attention(q, k, v, dropout_p=0.5, stage="mma")
    with pytest.raises(ValueError, match="v has d_v = 20; it must be a multiple of 8 up to q's d, 16"):
        flash.attention(q, k, torch.randn(1, 2, 20, 20).half())


@pytest.mark.parametrize("stages", [{}, {"stage": "flash2", "backward": "recompute"}],
                         ids=["default", "first"])
def test_the_largest_sinks(stages):
    """As attention() says: of 2e38 in size, or -inf."""
    q, k, v = torch.randn(3, 1, 3, 19, 16)
    sink = torch.tensor([2e38, -2e38, -math.inf], requires_grad=True)
    o, lse = flash.attention(q, k, v, sink=sink, return_lse=True, **stages)
    without = flash.attention(q, k, v, stage="flash2")
    assert not o[:, 0].any() and (lse[:, 0] > 1.99e38).all()
    assert torch.allclose(o[:, 1:], without[:, 1:], atol=1e-5)
    (gradient,) = torch.autograd.grad(o.sum(), sink)
    assert gradient.isfinite().all() and not gradient[1:].any()
