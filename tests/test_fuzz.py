"""Calls that nobody chose: random legal ones of attention(), and of PyTorch's function, against float64.

In `make test` they are the same every time, and take kernels that test_forward.py and test_backward.py build,
too. FLASH_FUZZ_SECONDS=900 draws new ones for so long, of any tiles and head dimension; -s shows how many.
"""

import collections
import contextlib
import ctypes
import functools
import itertools
import operator
import os
import re
import secrets
import time
import warnings
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path

import numpy
import pytest
import torch
from conftest import DEVICES, poisoned, random_gradients, random_qkv, reference, reference_gradients
from hypothesis import HealthCheck, Phase, event, given, note, seed, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash
from flash_ladder import attention, launch, plan
from flash_ladder.extras import NO_EXTRAS
from flash_ladder.grid import errors, gradient_errors, wrong
from flash_ladder.values import shown

SECONDS = float(os.environ.get("FLASH_FUZZ_SECONDS") or 0)
FWD, BWD = ({s.name: s for s in flash.stages(direction)} for direction in ("fwd", "bwd"))
counted = collections.Counter()


def fuzz(examples: int, share: float, *phases: Phase):
    """Run a property over so many examples, the same every time; or with FLASH_FUZZ_SECONDS over new ones,
    for this share of them. Then all that fail are reported at the end."""
    options = settings(max_examples=10 if SECONDS else examples, derandomize=not SECONDS, database=None,
                       deadline=None, phases=(Phase.explicit, Phase.generate, *phases), print_blob=False,
                       suppress_health_check=list(HealthCheck))

    def decorate(test):
        test = options(test)
        if not SECONDS:
            return test

        @functools.wraps(test, updated=())
        def for_long():
            found, end = [], time.monotonic() + SECONDS * share
            while time.monotonic() < end and len(found) < 50:
                try:
                    seed(secrets.randbits(64))(test)()
                except Exception as error:
                    notes = getattr(error, "__notes__", [])  # of Python 3.11, with the example
                    found.append("\n".join([f"{type(error).__name__}: {error}", *notes]))
                    print(found[-1], flush=True)
            print(f"\n{test.__name__}: {dict(counted)}")
            assert not found, "\n\n".join(found)
        del for_long.__wrapped__  # pytest would look for the strategies' arguments
        return for_long
    return decorate


# ------------------------------------------------------------------------------------------ legal calls
class Drawn:
    def __repr__(self) -> str:
        """What makes it again, without what is as ever."""
        shown = [f"{x.name}={getattr(self, x.name)!r}" for x in fields(self)
                 if x.default is MISSING or getattr(self, x.name) != x.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer, cycle) -> None:
        """For hypothesis."""
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Kernels(Drawn):
    """What a call's kernels are compiled for. tiles: Br, Bc, Br_bwd, Bc_bwd, those that are not the default;
    negative: the scale's sign."""

    stage: str
    backward: str
    dtype: str
    d: int
    causal: bool
    negative: bool = False
    deterministic: bool | None = None
    tiles: dict[str, int] = field(default_factory=dict)
    device: str = "cpu"


@dataclass(frozen=True, repr=False)
class Layout(Drawn):
    """Of a tensor (B, H, N, d). order: of B, H, N in memory, the innermost first; steps: every how manieth is
    the tensor's; gaps: that many more of B, H and N, and of 16 bytes in a row; offset: in 16 bytes;
    expanded: the dimensions that have stride 0; odd: the stride of those of size 1, or 0 for an ordinary one.
    """

    order: tuple = (2, 1, 0)
    steps: tuple = (1, 1, 1)
    gaps: tuple = (0, 0, 0, 0)
    offset: int = 0
    expanded: tuple = ()
    odd: int = 0

    def strides(self, shape, unit) -> tuple[list[int], int]:
        """And the elements from the first to past the last gap."""
        strides, extent = [0, 0, 0, 1], shape[3] + self.gaps[3] * unit
        for dim in self.order:
            if dim in self.expanded:
                continue
            strides[dim] = self.odd if self.odd and shape[dim] == 1 else extent * self.steps[dim]
            extent *= shape[dim] * self.steps[dim] + self.gaps[dim]
        return strides, extent

    def of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same values, laid out so, and all of the memory around them: NaN. Where it is expanded, the
        first values."""
        unit = 16 // x.element_size()
        strides, extent = self.strides(x.shape, unit)
        memory = torch.full([self.offset * unit + extent + unit], torch.nan, dtype=x.dtype, device=x.device)
        first = [1 if dim in self.expanded else size for dim, size in enumerate(x.shape)]
        memory.as_strided(first, strides, self.offset * unit).copy_(x[tuple(slice(size) for size in first)])
        return memory.as_strided(x.shape, strides, self.offset * unit), memory


@dataclass(frozen=True, repr=False)
class Run(Drawn):
    """What such kernels are called with. diagonal: None for attention()'s; values: see `values_of`; needed:
    what gradients are asked for, of the outputs in `used`; misaligned: dO is one element past 16 bytes."""

    B: int
    H_kv: int
    group: int
    N_q: int
    N_k: int
    scale: float | None = None
    diagonal: int | None = None
    values: str = "normal"
    layouts: tuple = (Layout(),) * 4
    misaligned: bool = False
    needed: str = "qkv"
    used: str = "oL"
    seed: int = 0


def values_of(run: Run, d: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v."""
    q, k, v = random_qkv(run.B, run.H_kv * run.group, run.H_kv, run.N_q, run.N_k, d, "cpu", seed=run.seed)
    rise = torch.linspace(-2, 2, run.N_k)[:, None]
    match run.values:
        case "rising" | "falling":  # scores
            q, k = q.abs(), k.abs() * (rise if run.values == "rising" else -rise)
        case "flat":
            k = k[:, :, :1].expand_as(k)
        case "zeros":
            q = torch.zeros_like(q)
        case "far below zero":
            q, k = q + 3, k - 3
        case "one key":
            k[:, :, run.seed % run.N_k] *= 6
    if run.scale and abs(run.scale) > 4:  # scores as large as without a scale
        q = q / abs(run.scale) / d**0.5
    return [x.to(dtype) for x in (q, k, v)]


def call(kernels: Kernels, run: Run, q, k, v):
    """(o, L), by attention() or, for another diagonal, by the operator behind it."""
    scale, names = run.scale, (kernels.stage, kernels.backward)
    if run.diagonal is None:
        return flash.attention(q, k, v, causal=kernels.causal, scale=scale, stage=names[0],
                               backward=names[1], return_lse=True, deterministic=kernels.deterministic,
                               **kernels.tiles)
    tiles = [kernels.tiles.get(name) for name in ("Br", "Bc", "Br_bwd", "Bc_bwd")]
    return torch.ops.flash.forward(q, k, v, run.diagonal, None, [], [], [], *NO_EXTRAS, scale, *names,
                                   kernels.deterministic, *tiles, [], [])


def rounding(q, k, scale: float = 1.0) -> float:
    """How far scale * q k^T may be away. grid.py's bounds compare with PyTorch, and hold for data of random
    signs. Where products have one sign, PyTorch's sum, of vectors, has a smaller error than d additions one
    after the other: each adds up to half a unit in the last place, and that of d of them grows like the root
    of d. So: twice that, and 4, of the sum of the products' magnitudes."""
    sizes = q.double().abs() @ k.double().abs().mT
    return (4 + 2 * q.shape[3] ** 0.5) * 2**-24 * abs(scale) * sizes.max().item()


def wider(found: dict, more: dict) -> str:
    """What is wrong nevertheless."""
    return wrong({name: (error, allowed + more[name]) for name, (error, allowed) in found.items()})


def problem_of(o, lse, q, k, v, diagonal, scale) -> str:
    """As grid.py has it, but for `rounding`."""
    k_of_all = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    away = rounding(q, k_of_all, q.shape[3] ** -0.5 if scale is None else scale)
    return wider(errors(o, lse, q, k, v, diagonal, scale), {"O": 2 * away * v.abs().max().item(), "L": away})


def gradient_problem_of(gradients, q, k, v, do, diagonal, scale, dlse) -> str:
    """Likewise. P may be away by twice that of a score, of itself, and dP by that of dO V^T; dS by both. A
    large scale makes much of a dS that should be 0, as that of a row which sees one key."""
    group, factor = q.shape[1] // k.shape[1], q.shape[3] ** -0.5 if scale is None else scale
    Q, dO = q.double(), do.double()
    K, V = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    lse = reference(Q, k.double(), v.double(), diagonal, scale)[1]
    P = torch.exp(factor * Q @ K.mT - lse.where(lse > -torch.inf, torch.inf)[..., None])
    if diagonal is not None:
        P = P.where(torch.ones(P.shape[-2:], dtype=torch.bool, device=q.device).tril(diagonal), 0)
    P_away, dP_away = 2 * rounding(Q, K, factor), rounding(dO, V)
    dP_size = (dO.abs() @ V.abs().mT).max() + (0 if dlse is None else dlse.abs().max())
    dS_away = abs(factor) * 2 * P * (dP_away + P_away * dP_size)
    dK_away, dV_away = (x.unflatten(1, (-1, group)).sum(2) for x in (dS_away.mT @ Q.abs(),
                                                                     P_away * P.mT @ dO.abs()))
    more = {"dQ": dS_away @ K.abs(), "dK": dK_away, "dV": dV_away}
    return wider(gradient_errors(gradients, q, k, v, do, diagonal, scale, dlse),
                 {name: x.max().item() for name, x in more.items()})


def check_call(kernels: Kernels, run: Run) -> None:
    """Forward and backward, against float64."""
    tensors = [x.to(kernels.device) for x in values_of(run, kernels.d, flash.DTYPES[kernels.dtype])]
    placed = [layout.of(x) for layout, x in zip(run.layouts, tensors)]
    before = [memory.clone() for _, memory in placed]
    q, k, v = leaves = [x.requires_grad_(name in run.needed)
                        for name, (x, _) in zip("qkv", placed)]
    plain = [x.detach().clone() for x in leaves]
    diagonal = None
    if kernels.causal:
        diagonal = run.N_k - run.N_q if run.diagonal is None else run.diagonal
    do, dlse = random_gradients(plain[0], run.seed + 1)
    do = run.layouts[3].of(do)[0]
    if run.misaligned:
        do = torch.cat([do.new_zeros(1), do.flatten()])[1:].view(do.shape)
    like = torch.empty_like(q).stride()
    if like[3] != 1:  # which torch may make of an expanded one
        like = torch.empty(q.shape).stride()
    with poisoned():
        o, lse = call(kernels, run, q, k, v)
        wanted = [x for name, x in zip("qkv", leaves) if name in run.needed]
        outputs = [x for name, x in (("o", o), ("L", lse)) if name in run.used]
        by = [x for name, x in (("o", do), ("L", dlse)) if name in run.used]
        found = [torch.autograd.grad(outputs, wanted, by, retain_graph=True) if wanted else ()
                 for _ in range(1 + (kernels.deterministic is True))]
    assert (o.shape, o.dtype, o.stride()) == (q.shape, q.dtype, like)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32) and lse.is_contiguous()
    for (_, memory), bits in zip(placed, before):
        assert torch.equal(memory.view(torch.uint8), bits.view(torch.uint8)), "an input was changed"
    assert not (problem := problem_of(o.detach(), lse.detach(), *plain, diagonal, run.scale)), problem
    unseen = reference(*plain, diagonal, run.scale)[1] == -torch.inf
    assert (o[unseen] == 0).all() and (lse[unseen] == -torch.inf).all()
    if not wanted:
        return
    assert all(torch.equal(x, y) for x, y in zip(found[0], found[-1], strict=True)), "not deterministic"
    options = (do if "o" in run.used else torch.zeros_like(do), diagonal, run.scale,
               dlse if "L" in run.used else None)
    gradients = list(reference_gradients(*plain, *options))  # of those that are not asked for
    for name, x in zip([name for name in "qkv" if name in run.needed], found[0], strict=True):
        assert x.dtype == q.dtype
        gradients["qkv".index(name)] = x
    assert not (problem := gradient_problem_of(gradients, *plain, *options)), problem


# ------------------------------------------------------------------------------------------ what is drawn
@functools.cache
def pairs(*dtypes: str) -> list[tuple[str, str, str]]:
    """Forward stage, backward stage, type."""
    return [(f.name, b.name, name) for name in dtypes for f in FWD.values() for b in BWD.values()
            if flash.DTYPES[name] in f.dtypes and flash.DTYPES[name] in b.dtypes]


@functools.cache
def tiles_of(direction: str, name: str, d: int) -> list[dict[str, int]]:
    """Those that a stage takes on an H100, and has room for on the device."""
    stage, sizes = {"fwd": FWD, "bwd": BWD}[direction][name], (1, 3, *range(8, 129, 8), 256)
    room = min(flash.shared_memory_per_block(torch.device(device)) for device in DEVICES)
    return [t for Br, Bc in itertools.product(sizes, sizes)
            if not stage._tile_problem(d, room, t := {"Br": Br, "Bc": Bc})]


@st.composite
def built_kernels(draw) -> Kernels:
    """Those that the tests of all stages build, too, if they are not built."""
    d = draw(st.sampled_from([32, 64]))
    fwd, bwd, dtype = draw(st.sampled_from(pairs("fp32", "bf16") if d == 32 else pairs(*flash.DTYPES)))
    return Kernels(fwd, bwd, dtype, d, causal=d == 64 or draw(st.booleans()),
                   negative=d == 64 and draw(st.booleans()), deterministic=deterministic(draw, bwd),
                   device=draw(st.sampled_from(DEVICES)))


@st.composite
def any_kernels(draw) -> Kernels:
    fwd, bwd, dtype = draw(st.sampled_from(pairs(*flash.DTYPES)))
    d = draw(st.sampled_from([8, 16, 24, 40, 48, 64, 72, 80, 96, 104, 128, 136, 192, 256]))
    tiles = {}
    for direction, name, suffix in (("fwd", fwd, ""), ("bwd", bwd, "_bwd")):
        if draw(st.booleans()):
            chosen = draw(st.sampled_from(tiles_of(direction, name, d)))
            tiles |= {f"{tile}{suffix}": size for tile, size in chosen.items()}
    return Kernels(fwd, bwd, dtype, d, draw(st.booleans()), draw(st.booleans()), deterministic(draw, bwd),
                   tiles, draw(st.sampled_from(DEVICES)))


def deterministic(draw, backward: str) -> bool | None:
    return draw(st.sampled_from([None, False, True] if BWD[backward].can_be_deterministic else [None, False]))


LAYOUTS = st.builds(
    Layout, st.permutations([0, 1, 2]).map(tuple), st.tuples(*[st.sampled_from([1, 1, 2, 3])] * 3),
    st.tuples(*[st.sampled_from([0, 0, 0, 1, 3])] * 4), st.integers(0, 3),
    st.sampled_from([(), (), (), (0,), (1,), (2,), (0, 1), (0, 1, 2)]), st.sampled_from([0, 0, 1, 7]))
LENGTHS = st.one_of(st.integers(1, 150), st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127,
                                                          128, 129]))
SCALES = st.one_of(st.floats(2**-6, 2.0), st.floats(4, 65536), st.sampled_from([1e-45, 1e-30, 65536.0]))
VALUES = ("normal", "normal", "rising", "falling", "flat", "zeros", "far below zero", "one key")


@st.composite
def runs(draw, kernels: Kernels) -> Run:
    N_q, N_k = draw(LENGTHS), draw(LENGTHS)
    if kernels.d > 136:
        N_q, N_k = N_q % 70 + 1, N_k % 70 + 1
    scale = -draw(SCALES) if kernels.negative else draw(st.one_of(st.none(), st.just(0.0), SCALES))
    if scale and kernels.dtype == "fp16":  # dQ, which it multiplies, ends at 65504
        scale = max(-64.0, min(scale, 64.0))
    diagonal = draw(st.one_of(st.none(), st.just(0), st.integers(-N_q - 2, N_k + 2)))
    return Run(draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), N_q, N_k, scale,
               diagonal if kernels.causal else None, draw(st.sampled_from(VALUES)),
               tuple(draw(st.one_of(st.just(Layout()), LAYOUTS)) for _ in range(4)), draw(st.booleans()),
               draw(st.sampled_from(["qkv", "qkv", "q", "k", "v", "kv", ""])),
               draw(st.sampled_from(["oL", "oL", "o", "L"])), draw(st.integers(0, 999)))


@st.composite
def legal(draw) -> tuple[Kernels, list[Run]]:
    """Several calls of the same kernels, as these take seconds to build."""
    kernels = draw(any_kernels() if SECONDS else built_kernels())
    return kernels, draw(st.lists(runs(kernels), min_size=2, max_size=8 if SECONDS else 2))


@pytest.mark.slow
@fuzz(24, 0.8)
@given(legal())
def test_legal_calls(drawn):
    kernels, calls = drawn
    for run in calls:
        counted["legal calls"] += 1
        note(f"{kernels}\n{run}")  # the last one that is printed is the one that failed
        check_call(kernels, run)


PLAIN = Layout()
# What it found, each a wrong gradient or an error; with the reason
FOUND_LEGAL = {
    # dQ of some columns: a second step began at no multiple of 64 columns, where addresses take it for one
    "dQ at d from 136 to 192": (Kernels("mma", "ampere_tuned", "bf16", 136, False), Run(1, 1, 1, 27, 59)),
    "dQ at d from 72 to 96, square tiles": (
        Kernels("mma", "late_dq", "bf16", 80, False, tiles={"Br_bwd": 64, "Bc_bwd": 64}),
        Run(1, 1, 1, 27, 59)),
    # the address of a row past the last one, which is copied as zeros, has to be aligned, too
    "one key, whose stride is 7": (Kernels("ampere_tuned", "ampere_tuned", "bf16", 32, True),
                                   Run(2, 1, 1, 4, 1, layouts=(PLAIN, Layout(odd=7), PLAIN, PLAIN))),
    # torch.empty_like() had the gradient's columns lie apart
    "one row for all values": (
        Kernels("swizzle", "ampere_tuned", "bf16", 32, True),
        Run(1, 1, 3, 80, 89, layouts=(PLAIN, PLAIN, Layout((1, 2, 0), expanded=(2,), odd=1), PLAIN))),
    "one row for all queries": (
        Kernels("flash2", "recompute", "fp32", 32, True),
        Run(2, 1, 1, 40, 50, layouts=(Layout((1, 2, 0), expanded=(2,), odd=1), PLAIN, PLAIN, PLAIN))),
}


@pytest.mark.parametrize("case", FOUND_LEGAL)
def test_legal_calls_that_were_found(case, device):
    kernels, run = FOUND_LEGAL[case]
    check_call(replace(kernels, device=device), run)


# ------------------------------------------------------------------------------------------ PyTorch's own
@dataclass(frozen=True, repr=False)
class Sdpa(Drawn):
    """A call of scaled_dot_product_attention. shapes: of query, key, value; mask: attn_mask's shape, or None;
    orders: of query's, key's and value's dimensions in memory; sliced: more columns than each has there."""

    shapes: tuple
    orders: tuple
    sliced: tuple
    mask: tuple | None = None
    boolean: bool = False
    causal: bool = False
    scale: float | None = None
    grouped: bool = False
    seed: int = 0


@st.composite
def sdpa_calls(draw) -> Sdpa:
    """With 33 to 40 columns in q or v, so that all take kernels of d = 40, which test_masks.py builds."""
    def some(shape) -> tuple:
        """Of a shape, what broadcasts to it."""
        ones = tuple(1 if draw(st.sampled_from([False, False, True])) else size for size in shape)
        return ones[draw(st.sampled_from([0, 0, *range(len(ones) + 1)])):]

    grouped = draw(st.booleans())
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    H, N_q, N_k = draw(st.sampled_from([1, 2, 4, 6])), draw(st.integers(1, 40)), draw(st.integers(1, 40))
    wide, other = draw(st.integers(33, 40)), draw(st.integers(1, 40))
    d, d_v = (wide, other) if draw(st.booleans()) else (other, wide)
    if grouped:
        heads = [H, *draw(st.permutations([n for n in (1, 2, 3, 6) if H % n == 0] * 2))[:2]]
        leading = [(*some(batch), n) for n in heads]
    else:
        leading = [some((*batch, H)) for _ in range(3)]
    shapes = tuple((*first, *last) for first, last in zip(leading, [(N_q, d), (N_k, d), (N_k, d_v)]))
    before = torch.broadcast_shapes(*(x[:-1] if grouped else x for x in leading[:2])) + (H,) * grouped
    kind = draw(st.sampled_from(["", "causal", "bools", "bias"]))
    return Sdpa(shapes, tuple(tuple(draw(st.permutations(range(len(x))))) for x in shapes),
                tuple(draw(st.sampled_from([0, 0, 1, 8])) for _ in shapes),
                some((*before, N_q, N_k)) if kind in ("bools", "bias") else None, kind == "bools",
                kind == "causal", draw(st.sampled_from([None, None, 0.0, 0.3])), grouped,
                draw(st.integers(0, 999)))


def check_sdpa(drawn: Sdpa) -> None:
    """o, and all gradients, of float32: as PyTorch's in float64."""
    generator = torch.Generator().manual_seed(drawn.seed)
    tensors = []
    for shape, order, more in zip(drawn.shapes, drawn.orders, drawn.sliced):
        memory = torch.randn([(*shape[:-1], shape[-1] + more)[n] for n in order], generator=generator)
        tensors.append(memory.permute([order.index(n) for n in range(len(shape))])[..., :shape[-1]])
    if drawn.mask is not None:
        tensors.append(torch.randn(drawn.mask, generator=generator))
    found = []
    for function, dtype, stages in (
            (flash.scaled_dot_product_attention, torch.float32, {"stage": "flash2", "backward": "recompute"}),
            (torch.nn.functional.scaled_dot_product_attention, torch.float64, {})):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        mask = leaves[3] if drawn.mask is not None else None
        with sdpa_kernel(SDPBackend.MATH):
            o = function(*leaves[:3], mask > -0.5 if drawn.boolean else mask, is_causal=drawn.causal,
                         scale=drawn.scale, enable_gqa=drawn.grouped, **stages)
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(drawn.seed + 1)).to(dtype)
        wanted = leaves[:3] if drawn.boolean else leaves
        found.append((o, *torch.autograd.grad(o, wanted, do, materialize_grads=True)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@fuzz(60, 0.1, Phase.shrink)
@given(sdpa_calls())
def test_legal_calls_of_pytorchs_function(drawn):
    counted["calls of PyTorch's function"] += 1
    note(f"{drawn}")
    check_sdpa(drawn)


# ------------------------------------------------------------------------------------------ illegal calls
class Reached(AssertionError):
    """The call has passed all checks."""


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


class Subclass(torch.Tensor):
    pass


class Arguments(dict):
    def __repr__(self) -> str:
        """Tensors by what of them counts."""
        return "{" + ", ".join(f"{name}: {self.in_words(x)}" for name, x in self.items()) + "}"

    @staticmethod
    def in_words(x) -> str:
        if not isinstance(x, torch.Tensor) or torch.nn.parameter.is_lazy(x) or x.is_nested:
            return shown(x)
        strides = x.stride() if x.layout == torch.strided else x.layout
        return (f"{type(x).__name__} of {x.dtype}, {tuple(x.shape)}, {strides} on {x.device}"
                + ", requires grad" * x.requires_grad + ", of inference" * x.is_inference())


class FakeLibrary:
    """Loaded by calls that are right; launches nothing."""

    def __init__(self, *_):
        self.files = self

    def are_unchanged(self) -> bool:
        return True

    def workspace_bytes(self, _) -> int:
        return 0

    def run(self, *_):
        raise Reached


def freed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def padded(x: torch.Tensor, before: int, after: int, dim: int = -1) -> torch.Tensor:
    """Zeros on either side of a dimension."""
    sides = [0, 0] * (-1 - dim) + [before, after]
    return torch.nn.functional.pad(x, sides)


# What makes q, k or v one that no stage takes, whatever the others are
BAD_TENSORS = {
    "None": lambda x: None, "text": lambda x: "q", "list": torch.Tensor.tolist, "type": type,
    "array": lambda x: x.float().numpy(), "shape": lambda x: x.shape, "memory": lambda x: x.storage(),
    "scalar": lambda x: x[0, 0, 0, 0], "3 dimensions": lambda x: x[0], "5 dimensions": lambda x: x[None],
    "no batch": lambda x: x[:0], "no heads": lambda x: x[:, :0], "no rows": lambda x: x[:, :, :0],
    "no columns": lambda x: x[..., :0], "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(), "mkldnn": lambda x: x.float().to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x[0].float()] * 2),
    "uninitialized": lambda x: torch.nn.parameter.UninitializedParameter(),
    "without memory": freed, "zeros without memory": lambda x: torch._efficientzerotensor(x.shape),
    "batch": lambda x: torch.cat([x, x]), "columns": lambda x: padded(x, 0, 8),
    **{str(dtype): functools.partial(torch.Tensor.to, dtype=dtype)
       for dtype in (torch.float64, torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64,
                     torch.float8_e4m3fn)},
}
# The same for some; not under autocast, whose conversion mends them
BAD_WITHOUT_AUTOCAST = {
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "rows apart": lambda x: padded(x, 0, 1)[..., :-1],
    "misaligned": lambda x: padded(x, 1, 15)[..., 1:-15],
    "other type": lambda x: x.to(torch.float16 if x.dtype == torch.bfloat16 else torch.bfloat16),
}
# All three at once
BAD_TOGETHER = {
    "d": lambda x: padded(x, 0, 4), "large d": lambda x: padded(x, 0, 256),
    "numbers": torch.Tensor.int, "wide": torch.Tensor.double, "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(), "no rows": lambda x: x[:, :, :0],
    "transposed": lambda x: x.mT,
}
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=3),
    st.complex_numbers(), st.fractions(), st.decimals(), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.integers(), st.integers(), max_size=1),
    st.builds(pow, st.just(10), st.just(5000)), st.builds(Unprintable),  # nor can hypothesis print them
    st.sampled_from([
        -10**400, "flash", "naive", "deterministic", b"flash2", float, object(),
        torch.tensor([1, 2]), torch.tensor(2.5), torch.tensor(True), torch.ones(1, device="meta"),
        torch.tensor(1.0, requires_grad=True), torch.empty(0), numpy.array([1.0, 2.0]), numpy.array("a"),
        numpy.True_, numpy.int64(-1), numpy.float32("nan"), torch.float32, Path("none.cuh"), Path("/"),
        Path("a" * 5000), Path("\0"), Path("/dev/null"), FWD["naive"], BWD["naive"],
        replace(FWD["naive"], path=Path("/none.cuh")), replace(BWD["naive"], path=Path("/none.cuh"))]))


def is_number(value, least: float, most: float) -> bool:
    """As ctypes.c_float takes them, rounded to it; for tiles as operator.index does."""
    try:
        return least <= ctypes.c_float(value).value <= most
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def is_tile(value) -> bool:
    try:
        return not isinstance(value, bool) and 1 <= operator.index(value) <= 1024
    except (TypeError, RuntimeError):
        return False


def is_flag(value) -> bool:
    return isinstance(value, (bool, numpy.bool_, int)) and value in (0, 1)


# What each argument takes, of ANYTHING
TAKEN = {
    "causal": is_flag, "return_lse": is_flag, "deterministic": lambda x: x is None or is_flag(x),
    "scale": lambda x: x is None or is_number(x, -65536, 65536) and not getattr(x, "requires_grad", False),
    "stage": lambda x: x is None or x == FWD["naive"] or isinstance(x, str) and x in FWD,
    "backward": lambda x: x is None or x == BWD["naive"] or isinstance(x, str) and x in BWD,
    **dict.fromkeys(("Br", "Bc", "Br_bwd", "Bc_bwd"), lambda x: x is None or is_tile(x)),
}


def made_bad(way, x: torch.Tensor):
    """Of a plain tensor; requires gradients if x does, and it can."""
    bad = way(x.detach().as_subclass(torch.Tensor))
    with contextlib.suppress(AttributeError, RuntimeError, TypeError, ValueError):
        bad.requires_grad_(x.requires_grad)
    return bad


@st.composite
def bad_tensors(draw, tensors: dict, autocast: bool) -> tuple[dict, set[str]]:
    """What to replace of q, k and v, and the arguments of which the error should name one."""
    kind = draw(st.sampled_from(["one", "one", "together", "heads", "v"] + ["inference"] * (not autocast)))
    if kind == "one":
        name = draw(st.sampled_from("qkv"))
        ways = BAD_TENSORS if autocast else BAD_TENSORS | BAD_WITHOUT_AUTOCAST
        return {name: made_bad(ways[draw(st.sampled_from(sorted(ways)))], tensors[name])}, {name}
    if kind == "together":
        way = BAD_TOGETHER[draw(st.sampled_from(sorted(BAD_TOGETHER)))]
        return {name: made_bad(way, x) for name, x in tensors.items()}, {"q"}
    if kind == "heads":
        return {"q": torch.cat([tensors["q"], tensors["q"][:, :1]], 1)}, {"q"}
    if kind == "v":
        return {"v": padded(tensors["v"], 0, 1, dim=-2)}, {"v"}
    with torch.inference_mode():
        name = draw(st.sampled_from("qkv"))
        mine = torch.empty_like(tensors[name]).zero_()
    others = {other: x.detach().clone().requires_grad_() for other, x in tensors.items() if other != name}
    return {name: mine, **others}, {name}


@st.composite
def bad_options(draw) -> tuple[dict, set[str]]:
    kind = draw(st.sampled_from(["value", "value", "name", "tiles"]))
    if kind == "name":
        name = draw(st.text(min_size=1, max_size=9).filter(lambda x: x not in {*TAKEN, "q", "k", "v"}))
        return {name: draw(ANYTHING)}, {name}
    if kind == "value":
        name = draw(st.sampled_from(sorted(TAKEN)))
        return {name: draw(ANYTHING.filter(lambda x: not TAKEN[name](x)))}, {name}
    stage = draw(st.sampled_from([*FWD.values(), *BWD.values()]))
    argument, suffix = ("backward", "_bwd") if stage.direction == "bwd" else ("stage", "")
    sizes = st.integers(1, 1024)
    tiles = draw(st.fixed_dictionaries({"Br": sizes, "Bc": sizes}).filter(
        lambda tiles: stage._tile_problem(16, flash.shared_memory_per_block(torch.device("cpu")), tiles)))
    return ({argument: stage.name, **{f"{name}{suffix}": size for name, size in tiles.items()}},
            {"Br" + suffix, "Bc" + suffix, "q"})


@st.composite
def illegal(draw) -> tuple[dict, dict, set[str], torch.dtype | None]:
    """The arguments of a call that is right; what makes it wrong; the arguments that an error may name."""
    B, H_kv, group, N = (draw(st.integers(*ends)) for ends in ((1, 2), (2, 3), (1, 2), (2, 9)))
    dtype = draw(st.sampled_from([*flash.DTYPES.values()]))
    kind = draw(st.sampled_from([torch.Tensor, torch.nn.Parameter, Subclass]))
    needed = draw(st.sampled_from(["", "", "q", "kv", "qkv"]))
    tensors = {name: x.as_subclass(kind) if kind is Subclass else kind(x) if kind is torch.nn.Parameter else x
               for name, x in zip("qkv", random_qkv(B, H_kv * group, H_kv, N, N, 16, "cpu", dtype))}
    tensors = {name: x.requires_grad_(name in needed) for name, x in tensors.items()}
    right = {**tensors, **draw(st.fixed_dictionaries({}, optional={
        "causal": st.booleans(), "scale": st.floats(-1, 1), "return_lse": st.booleans()}))}
    autocast = draw(st.sampled_from([None, None, torch.bfloat16, torch.float16]))
    which = draw(st.sampled_from(["tensors", "options", "both"]))
    wrong, names = {}, set()
    for drawn in ([bad_tensors(tensors, autocast is not None)] if which != "options" else []) + (
            [bad_options()] if which != "tensors" else []):
        more, of = draw(drawn)
        wrong, names = wrong | more, names | of
    return Arguments(right), Arguments(wrong), names, autocast


def attempt(arguments: dict, autocast: torch.dtype | None) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if autocast:
            stack.enter_context(torch.autocast("cpu", autocast))
        flash.attention(**arguments)


def check_refused(right: dict, wrong_ones: dict, names: set[str], autocast: torch.dtype | None) -> str:
    """A ValueError that names one of these arguments, before anything is built. The same call put right
    passes all checks, and does so first: its plan is kept."""
    with pytest.MonkeyPatch.context() as patch:
        for module, cache in ((attention, "_calls"), (plan, "_plans"), (launch, "_libraries")):
            patch.setattr(module, cache, {})
        patch.setattr(plan, "load", FakeLibrary)
        patch.setattr(launch, "build", lambda *_, **__: pytest.fail("built something"))
        with pytest.raises(Reached):
            attempt(right, autocast)
        patch.setattr(plan, "load", lambda *_: pytest.fail("a library was asked for"))
        with pytest.raises(ValueError) as caught:
            attempt({**right, **wrong_ones}, autocast)
    message = str(caught.value)
    assert any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names), message
    return message


@fuzz(150, 0.1, Phase.shrink)
@given(illegal())
def test_illegal_calls(drawn):
    counted["illegal calls"] += 1
    event(check_refused(*drawn)[:30])


Q, K, V = random_qkv(1, 4, 2, 6, 6, 16, "cpu")
TOO_LONG_TO_PRINT = 10**5000
BF16 = torch.bfloat16
# What it found: another exception, a message that named nothing, no error at all; and once a segmentation
# fault, of torch's conversion where the memory is gone
FOUND = {
    "a tile of two": ({"Br": torch.tensor([1, 2])}, None),
    "a tile that is a float tensor": ({"Bc": torch.tensor(32.0)}, None),
    "a tile that is an array": ({"Br_bwd": numpy.array([1, 2])}, None),
    "a tile without memory": ({"Bc_bwd": torch.tensor(32, device="meta")}, None),
    "a tile too long to print": ({"Br": TOO_LONG_TO_PRINT}, None),
    "a scale too long to print": ({"scale": TOO_LONG_TO_PRINT}, None),
    "a scale that cannot be printed": ({"scale": Unprintable()}, None),
    "a scale without memory": ({"scale": torch.tensor(1.0, device="meta")}, None),
    "a mask too long to print": ({"causal": TOO_LONG_TO_PRINT}, None),
    "a switch too long to print": ({"deterministic": TOO_LONG_TO_PRINT}, None),
    "a text for return_lse": ({"return_lse": "no"}, None),
    "two truths for return_lse": ({"return_lse": torch.tensor([True, False])}, None),
    "a number as stage under autocast": ({"stage": 4}, BF16),
    "bytes as backward stage under autocast": ({"backward": b"naive"}, BF16),
    "a path that is too long": ({"stage": Path("a" * 5000)}, None),
    "a stage without its file": ({"stage": replace(FWD["naive"], path=Path("/none.cuh"))}, None),
    "a backward stage without its file": ({"backward": replace(BWD["naive"], path=Path("/none.cuh"))}, None),
    "a layout that autocast cannot convert": ({"k": K.to_mkldnn()}, BF16),
    "an uninitialized parameter": ({"v": torch.nn.parameter.UninitializedParameter()}, None),
    "no memory under autocast": ({"q": freed(Q)}, BF16),
    "no memory beside a subclass under autocast": ({"q": freed(Q), "k": K.as_subclass(Subclass)}, BF16),
}


@pytest.mark.parametrize("case", FOUND)
def test_illegal_calls_that_were_found(case):
    wrong_ones, autocast = FOUND[case]
    check_refused({"q": Q, "k": K, "v": V}, wrong_ones, {next(iter(wrong_ones))}, autocast)


def test_tensors_of_inference_mode_where_a_gradient_is_needed():
    """Found so, too. Autograd cannot keep them; without gradients they will do."""
    with torch.inference_mode():
        k = K.clone()
    check_refused({"q": Q, "k": k, "v": V}, {"q": Q.clone().requires_grad_()}, {"k"}, None)


def test_a_tile_that_changes(monkeypatch):
    """A tensor of one integer is a tile, whatever it was in an earlier call."""
    taken = []
    monkeypatch.setattr(plan, "load", lambda stage, macros, device: taken.append(macros) or FakeLibrary())
    monkeypatch.setattr(plan, "_plans", {})
    tile = torch.tensor(32)
    for size in (32, 64):
        with pytest.raises(Reached):
            flash.attention(Q, K, V, stage="flash2", Br=tile.fill_(size))
    assert [macros["BLOCK_R"] for macros in taken] == ["32", "64"]


@pytest.mark.parametrize("arguments, options, message", [
    ((), {}, "missing 3 required positional arguments: 'q', 'k', and 'v'"),
    ((1, 2), {}, "missing 1 required positional argument: 'v'"),
    ((1, 2, 3, True), {}, "takes 3 positional arguments but 4 were given"),
    ((1, 2, 3), {"q": 1}, "got multiple values for argument 'q'"),
])
def test_other_signatures(arguments, options, message):
    """Python's own errors."""
    with pytest.raises(TypeError, match=re.escape(message)):
        flash.attention(*arguments, **options)
