"""Masks: which scores count, and what becomes of those that do.

    o = flash.attention(q, k, v, mask=flash.masks.window(128, 0) & flash.masks.padding(first, end))

A mask is a file of stages/masks, a few lines of CUDA that every stage from flash2 and recompute on is
compiled with, and its arguments. `a & b`: what both see, and scores go through a, then b. `a | b`: what one
of them sees. Of your own: `from_file`, or just mask=Path("mine.cuh").

Positions count from the last query and key, as in attention(causal=True): the query of row i stands at key
i + N_k - N_q.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from .bound import Bound
from .inspection import has_memory
from .simulator.guards import once
from .values import as_integer, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .tiles import Tiles

MOST_TENSORS, MOST_INTS, MOST_FLOATS = 4, 8, 4        # as in stages/common/mask_params.cuh
FAR = 1 << 30                                         # a distance without a limit


class Diagonal(NamedTuple):
    """An int of a mask that is N_k - N_q + offset."""

    offset: int


class Argument(NamedTuple):
    """A tensor that a mask takes.

    extents: what its four dimensions stand for, each of size 1 or that: "B", "H", "q", "k", "d" for the
    N_q + N_k - 1 distances of a key from a query; "*" for any size. gradient: "elements" or "diagonals"
    of the scores, that are added up for it; "" for none. number: it was a number, and so is at home on any
    device.
    """

    name: str
    tensor: torch.Tensor
    extents: str
    gradient: str = ""
    number: bool = False


class Mask:
    """What the functions of this module make; combine them with & and |."""

    def __init__(self, text: str, arguments: Sequence[Argument] = (), ints: Sequence[int | Diagonal] = (),
                 floats: Sequence[float] = (), scores: bool = False, slopes: bool = False):
        """text: the expression of files, in JSON. scores: it changes scores. slopes: and not just by adding
        to them."""
        self.text, self.scores, self.slopes = text, scores, slopes
        self.arguments, self.ints, self.floats = tuple(arguments), tuple(ints), tuple(floats)

    def __and__(self, other: Mask) -> Mask:
        return self._combined("And", other)

    def __or__(self, other: Mask) -> Mask:
        if isinstance(other, Mask) and (self.scores or other.scores):
            raise ValueError("a | b: of masks that change no scores; one of these does (softcap, a bias, "
                             "alibi)")
        return self._combined("Or", other)

    def _combined(self, how: str, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        counts = len(self.arguments), len(self.ints), len(self.floats)
        numbers = ", ".join(map(str, counts))
        mask = Mask(f'["{how}", {self.text}, {other.text}, {numbers}]', self.arguments + other.arguments,
                    self.ints + other.ints, self.floats + other.floats,
                    self.scores or other.scores, self.slopes or other.slopes)
        for what, found, most in (("tensors", mask.arguments, MOST_TENSORS), ("ints", mask.ints, MOST_INTS),
                                  ("floats", mask.floats, MOST_FLOATS)):
            if len(found) > most:
                raise ValueError(f"the masks have {len(found)} {what} together; at most {most} are possible")
        return mask

    def __repr__(self) -> str:
        def said(x) -> str:
            return Path(x).stem if isinstance(x, str) else f"({said(x[1])} {'&' if x[0] == 'And' else '|'} " \
                                                          f"{said(x[2])})"
        return f"<mask {said(json.loads(self.text))}>"

    def tiles(self, N_q: int, N_k: int | None = None, *, Br: int = 64, Bc: int = 64) -> Tiles:
        """Which tiles of Br queries and Bc keys are skipped, cut and whole, and which scores count, for each
        batch element and head that differ. print() says how many; plot() draws them. N_k: default N_q.

            flash.masks.window(100, 0).tiles(512).plot("window.png")
        """
        from .tiles import tiles_of

        for name, size in (("N_q", N_q), ("N_k", N_k), ("Br", Br), ("Bc", Bc)):
            if size is not None and not 1 <= (as_integer(size) or 0) <= FAR:
                raise ValueError(f"{name} must be an integer of at least 1, not {shown(size)}")
        device = next((each.tensor.device for each in self.arguments if not each.number), torch.device("cpu"))
        B, H = (max([1, *(each.tensor.shape[n] for each in self.arguments)]) for n in (0, 1))
        q, k = (torch.empty(B, H, N, 0, dtype=torch.float32, device=device)
                for N in (N_q, N_q if N_k is None else N_k))
        with torch.no_grad():
            return tiles_of(self.bind(q, k), q.shape[2], k.shape[2], Br, Bc, device)

    def show(self, N_q: int, N_k: int | None = None, Br: int = 64, Bc: int = 64, *, b: int = 0,
             h: int = 0) -> Figure:
        """Draw them, of one batch element and head."""
        return self.tiles(N_q, N_k, Br=Br, Bc=Bc).plot(b=b, h=h)

    def bind(self, q: torch.Tensor, k: torch.Tensor, most_keys: int | None = None) -> Bound:
        """It, for a call of attention. most_keys: N_k of a cache; how many keys there are, the kernel knows.

        Raises:
            ValueError: for tensors that do not fit q (B, H, N_q, d) and k (B, H_kv, N_k, d).
        """
        B, H, N_q, N_k = q.shape[0], q.shape[1], q.shape[2], k.shape[2] if most_keys is None else most_keys
        sizes = {"B": B, "H": H, "q": N_q, "k": N_k, "d": N_q + N_k - 1}
        tensors = []
        for name, x, extents, gradient, number in self.arguments:
            for size, extent in zip(x.shape, extents, strict=True):
                # No `in`: of a size that is a symbol, torch.compile takes it for false
                if extent != "*" and size != 1 and size != sizes.get(extent, 1):
                    wanted = ", ".join(str(sizes.get(e, e)) for e in extents)
                    raise ValueError(f"mask: {name} has shape {tuple(x.shape)}, as (B, H, rows, columns); "
                                     f"for these q and k it must be ({wanted}), or 1 in any of them")
            if number and x.device != q.device:
                x = torch.full_like(x, int(x), device=q.device)
            if x.device != q.device:
                raise ValueError(f"mask: {name} is on {x.device}, q on {q.device}: move it there")
            if x.requires_grad and not gradient and torch.is_grad_enabled():
                raise ValueError(f"mask: {name} requires grad, and the mask has no gradient for it: "
                                 f"pass {name}.detach()")
            if x.requires_grad and self.slopes and torch.is_grad_enabled():
                raise ValueError(f"mask: {name} requires grad, and no stage has a gradient for a bias "
                                 "together with softcap, or another mask with a slope(): pass "
                                 f"{name}.detach()")
            if gradient == "elements":
                x = x.to(q.dtype)
            tensors.append(x)
        from_last = N_k - N_q if most_keys is None else 0
        ints = tuple(from_last + n.offset if isinstance(n, Diagonal) else n for n in self.ints)
        of_kernel = [most_keys is not None and isinstance(n, Diagonal) for n in self.ints]
        return Bound(self.text, tuple(tensors), ints, self.floats,
                     tuple(each.gradient for each in self.arguments),
                     tuple(torch.is_grad_enabled() and x.requires_grad for x in tensors),
                     tuple(each.name for each in self.arguments),
                     sum(is_one << n for n, is_one in enumerate(of_kernel)))


def as_mask(mask) -> Mask:
    """What attention() got for `mask`."""
    if isinstance(mask, Path):
        return from_file(mask)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be one of flash.masks, or the pathlib.Path of a file like those of "
                         f"stages/masks, not {_said(mask)}; of a tensor, flash.masks.boolean() or additive()")
    return mask


def _said(x) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else shown(x)


def _named(name: str) -> str:
    """Its text. (Not by json, which torch.compile does not trace.)"""
    return f'"{name}"'


def _tensor(name: str, x) -> torch.Tensor:
    """What stands for one, as one."""
    if isinstance(x, torch.Tensor):
        return x
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"mask: {name} must be a tensor, not {shown(x)}") from None


def _view(name: str, x: torch.Tensor, dims: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Four-dimensional. dims: what its dimensions are, of "BHqk", as in "Bk"; it may lack the first ones."""
    x = _tensor(name, x)
    if x.is_nested or x.layout != torch.strided:
        raise ValueError(f"mask: {name} must be a dense tensor")
    if x.dim() > len(dims):
        raise ValueError(f"mask: {name} has {x.dim()} dimensions, shape {tuple(x.shape)}; at most "
                         f"{len(dims)} are possible")
    if dtype is not None:
        if (x.dtype.is_floating_point != dtype.is_floating_point or x.dtype == torch.bool != dtype
                or x.dtype.is_complex):
            raise ValueError(f"mask: {name} has type {x.dtype}: pass {dtype}")
        if dtype == torch.int32:
            _check_range(name, x)
        x = x.to(dtype)
    there = dims[len(dims) - x.dim():]
    for axis, dim in enumerate("BHqk"):
        if dim not in there:
            x = x.unsqueeze(axis)
    if torch.compiler.is_compiling():
        return x
    x = x.resolve_neg()
    return x if x.requires_grad else once(x)   # of a tensor that is expanded, each element has a gradient


def _check_range(name: str, x: torch.Tensor) -> None:
    """Raise ValueError for integers that int32 does not hold. On a GPU nobody waits for them."""
    if x.dtype.itemsize < 4 or x.dtype == torch.int32 or x.device.type != "cpu" or not x.numel():
        return
    if torch.compiler.is_compiling() or not has_memory(x):
        return
    least, most = x.long().min().item(), x.long().max().item()
    if not -(1 << 31) <= least <= most < 1 << 31:
        raise ValueError(f"mask: {name} has numbers from {least} to {most}; kernels read int32: number them "
                         "anew (torch.unique(..., return_inverse=True))")


def _integer(name: str, n) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or abs(n) > FAR:
        raise ValueError(f"mask: {name} must be an int from -2^30 to 2^30, not {shown(n)}")
    return n


def _number(name: str, x) -> float:
    try:
        return float(x)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"mask: {name} must be numbers, not {shown(x)}") from None


# ------------------------------------------------------------------------------------------ the masks
def none() -> Mask:
    """Each query sees all keys."""
    return Mask(_named("none"))


def causal(diagonal: int | None = None) -> Mask:
    """Query i sees key j <= i + diagonal; None: N_k - N_q, as attention(causal=True)."""
    return Mask(_named("causal"), ints=[Diagonal(0) if diagonal is None else _integer("diagonal", diagonal)])


def window(left: int = -1, right: int = -1) -> Mask:
    """A sliding window: so many keys to the left and to the right of a query's own position; -1: all.

    (Beltagy, Peters, Cohan, arXiv 2004.05150, section 3.1.)
    """
    for name, n in (("left", left), ("right", right)):
        if _integer(name, n) < -1:
            raise ValueError(f"mask: {name} must be a number of keys, or -1 for all, not {n}")
    return Mask(_named("window"), ints=[-FAR if left < 0 else Diagonal(-left),
                                        FAR if right < 0 else Diagonal(right)])


def prefix(length: int | torch.Tensor, diagonal: int | None = None) -> Mask:
    """Prefix-LM: all queries see the first `length` keys, an int or int32 (B,); what follows is causal.

    (Raffel et al., arXiv 1910.10683, section 3.2.1.)
    """
    number = isinstance(length, int)
    if number and not isinstance(length, bool):
        _integer("length", length)
    return Mask(_named("prefix"), [Argument("length", _of_batch("length", length), "B111", number=number)],
                [Diagonal(0) if diagonal is None else _integer("diagonal", diagonal)])


def padding(first: torch.Tensor | None = None, end: torch.Tensor | None = None) -> Mask:
    """Of batch element b, the keys from first[b] to end[b] - 1 are there; int32 (B,). None: from 0, to the
    last one."""
    starts = None if first is None else _of_batch("first", first)
    ends = None if end is None else _of_batch("end", end)
    some = ends if starts is None else starts
    if some is None:
        raise ValueError("mask: padding() needs `first`, `end` or both")
    starts = torch.zeros_like(some) if starts is None else starts
    ends = torch.full_like(some, FAR) if ends is None else ends
    return Mask(_named("padding"), [Argument("first", starts, "B111"), Argument("end", ends, "B111")])


def document(queries: torch.Tensor, keys: torch.Tensor | None = None) -> Mask:
    """Packed sequences: a query sees the keys with its own id. queries: int (B, N_q) or (N_q,), numbers that
    int32 holds; keys likewise, the same if None."""
    return Mask(_named("document"), _ids(queries, keys))


def block_causal(queries: torch.Tensor, keys: torch.Tensor | None = None) -> Mask:
    """A query of block n sees the keys of blocks 0 to n. Negative numbers are padding: seen by nobody, seeing
    nothing. queries: int (B, N_q) or (N_q,); keys likewise, the same if None.

    Causal blocks, prefix-LM, a bidirectional part and cross-attention to a prefix are cases of it (as in
    Black et al., arXiv 2410.24164, section IV).
    """
    return Mask(_named("block_causal"), _ids(queries, keys))


def boolean(seen: torch.Tensor) -> Mask:
    """Any mask: bool, broadcast to (B, H, N_q, N_k); True where the query sees the key."""
    if not isinstance(seen, torch.Tensor) or seen.dtype != torch.bool:
        raise ValueError(f"mask: boolean() takes a tensor of torch.bool, not {_said(seen)}")
    return of_tensor("seen", seen)


def additive(bias: torch.Tensor) -> Mask:
    """A bias, broadcast to (B, H, N_q, N_k), is added to the scaled scores; differentiable. It is converted
    to q's type. A pair whose bias is -1e30 or less is not seen: so torch.finfo's least number masks, too."""
    if not isinstance(bias, torch.Tensor) or not bias.dtype.is_floating_point:
        raise ValueError(f"mask: additive() takes a tensor of a floating-point type, not {_said(bias)}")
    return of_tensor("bias", bias)


def of_tensor(name: str, x: torch.Tensor) -> Mask:
    """boolean() or additive(), of an argument of this name."""
    if x.dtype == torch.bool:
        return Mask(_named("boolean"), [Argument(name, _view(name, x, "BHqk"), "BHqk")])
    if not x.dtype.is_floating_point:
        raise ValueError(f"mask: {name} must be of torch.bool or a floating-point type, not {x.dtype}")
    return Mask(_named("additive"), [Argument(name, _view(name, x, "BHqk"), "BHqk", "elements")], scores=True)


def alibi(slopes: torch.Tensor) -> Mask:
    """ALiBi: from a score goes slope * distance of the key. slopes: float (H,) or (B, H); no gradient.

    (Press, Smith, Lewis, arXiv 2108.12409, section 3.)
    """
    slopes = _view("slopes", slopes, "BH", torch.float32)
    return Mask(_named("alibi"), [Argument("slopes", slopes, "BH11")], [Diagonal(0)], scores=True)


def softcap(cap: float) -> Mask:
    """A score x becomes cap * tanh(x / cap). (Gemma 2, arXiv 2408.00118, section 2.)"""
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 1e-37 <= cap <= 3e38:
        raise ValueError(f"mask: cap must be a number from 1e-37 to 3e38, not {shown(cap)}")
    return Mask(_named("softcap"), floats=[float(cap)], scores=True, slopes=True)


def relative_bias(bias: torch.Tensor) -> Mask:
    """A bias by distance: float (H, N_q + N_k - 1), or 1 instead of H, of the distances of a key's index from
    a query's, from -(N_q - 1) to N_k - 1; differentiable. (As in T5: Raffel et al., arXiv 1910.10683, section
    2.1; a table of buckets becomes it by indexing, table[:, buckets].)"""
    if not isinstance(bias, torch.Tensor) or not bias.dtype.is_floating_point or bias.dim() not in (1, 2):
        raise ValueError(f"mask: relative_bias() takes a floating-point tensor (H, N_q + N_k - 1), not "
                         f"{_said(bias)}")
    bias = _view("bias", bias, "Hk", torch.float32)
    return Mask(_named("relative_bias"), [Argument("bias", bias, "1H1d", "diagonals")], scores=True)


def from_file(path: str | Path, *tensors: torch.Tensor, ints: Sequence[int] = (),
              floats: Sequence[float] = (), scores: bool = False) -> Mask:
    """A mask of your own: a file that defines a struct Rule, as those of stages/masks do.

    tensors: up to four of four dimensions or fewer, the first two of size 1, or B and H. The kernel reads
    them as they are: their types are the file's affair. ints, floats: at most eight and four. scores: it has
    a score(); it may have a slope(), too.
    """
    path = Path(path).absolute()
    if not path.is_file():
        raise ValueError(f"mask: there is no file {path}")
    arguments = [Argument(f"tensor_{n}", _view(f"tensor {n}", x, "BHqk"), "BH**")
                 for n, x in enumerate(tensors)]
    mask = Mask(json.dumps(str(path)), arguments, [_integer("ints", n) for n in ints],
                [_number("floats", x) for x in floats], scores, slopes=scores)
    if len(arguments) > MOST_TENSORS or len(mask.ints) > MOST_INTS or len(mask.floats) > MOST_FLOATS:
        raise ValueError(f"mask: at most {MOST_TENSORS} tensors, {MOST_INTS} ints and {MOST_FLOATS} floats")
    return mask


def _of_batch(name: str, x: int | torch.Tensor) -> torch.Tensor:
    """int32 (B, 1, 1, 1)"""
    x = _tensor(name, x)
    if x.dim() > 1 or x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
        raise ValueError(f"mask: {name} must be ints (B,), not {_said(x)}")
    if x.dtype != torch.int32:               # which is kept: what it will hold by then counts
        x = x.long().clamp(-FAR, FAR).to(torch.int32)
    return x.reshape(-1, 1, 1, 1)


def _ids(queries, keys) -> list[Argument]:
    keys = queries if keys is None else keys
    return [Argument("queries", _view("queries", queries, "Bq", torch.int32), "B1q1"),
            Argument("keys", _view("keys", keys, "Bk", torch.int32), "B11k")]
