"""flash.scaled_dot_product_attention(): PyTorch's function, by the stages.

What it takes beyond attention()'s contract is brought to that by views, and by copies where it must: any
number of dimensions, broadcasting, any d and d_v, any strides. A call that needs none of it goes straight
down.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from pathlib import Path

import torch

from .attention import attend
from .checks import MAX_HEAD_DIM, check_kind, check_memory, rows_fit
from .conversion import autocast
from .masks import Mask, causal, of_tensor
from .operators import is_plain
from .stage import DTYPES, Stage
from .values import shown

NAMES = ("query", "key", "value")
TYPES = frozenset(DTYPES.values())


def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                                 attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, *, scale: float | None = None,
                                 enable_gqa: bool = False, stage: str | Path | Stage | None = None,
                                 backward: str | Path | Stage | None = None,
                                 deterministic: bool | None = None) -> torch.Tensor:
    """torch.nn.functional's function of this name, by one stage of the ladder.

    Differentiable, compiled and under autocast as `attention`. What of it is copied: docs/use.md.

    Args:
        query: (..., H, N_q, d), float32, float16 or bfloat16; d at most 256.
        key, value: (..., H_kv, N_k, d) and (..., H_kv, N_k, d_v), d_v at most 256. The dimensions before N
            broadcast, and may be left out. Any strides. No keys, no queries, batch elements or heads are
            fine, too.
        attn_mask: broadcast to (..., H, N_q, N_k): of bools, True where the query sees the key; or of query's
            type or float32, added to the scaled scores, and differentiable. It is rounded to query's type;
            where it is -1e30 or less, the query does not see the key.
        dropout_p: as of `attention`.
        is_causal: query i sees key j <= i (top-left).
        scale: default 1 / sqrt(d).
        enable_gqa: H may be a multiple of the heads of key, and of those of value.
        stage, backward, deterministic: as of `attention`.
    Returns:
        (..., H, N_q, d_v), with its dimensions in memory in the order of query's. A query that sees no key
        has 0, and no gradient.
    Raises:
        TypeError: for arguments of another kind, as in PyTorch.
        RuntimeError: as in PyTorch, for tensors that do not fit each other; for attn_mask together with
            is_causal; for a dropout_p that is no probability. Also as of `attention`.
        NotImplementedError: for complex numbers and 8 bits, as in PyTorch.
        IndexError: for enable_gqa without a dimension of heads, as in PyTorch.
        ValueError: for what PyTorch takes, but no stage: float64, d above 256, a scale above 65536, nested
            tensors. Also as of `attention`.
    """
    if type(is_causal) is not bool:
        raise TypeError(f"is_causal must be a bool, not {shown(is_causal)}")
    if type(enable_gqa) is not bool:
        raise TypeError(f"enable_gqa must be a bool, not {shown(enable_gqa)}")
    if scale is not None and type(scale) is not float:
        scale = _number("scale", scale)
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = _number("dropout_p", dropout_p)
        if not 0 <= dropout_p <= 1:
            raise RuntimeError(f"dropout_p must be a probability, from 0 to 1, not {dropout_p}")
    if attn_mask is not None and is_causal:
        raise RuntimeError("attn_mask and is_causal=True: pass one of them; is_causal is the mask "
                           "torch.ones(N_q, N_k, dtype=torch.bool).tril()")
    if (not torch.compiler.is_compiling() and _fits(query, key, value, enable_gqa)
            and (attn_mask is None or query.dtype in TYPES)):
        mask = None
        if attn_mask is not None:
            mask = _mask(attn_mask, query, [*query.shape[:3], key.shape[2]], query.shape[:1])
        try:
            return attend(query, key, value, "is_causal", is_causal, mask, scale, stage, backward,
                          deterministic, {}, dropout_p)[0]
        except ValueError:  # of types or devices, it may be, which nobody looked at: the error is another one
            pass
    return _of_any_shape(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, stage,
                         backward, deterministic)


def _of_any_shape(query, key, value, attn_mask, dropout_p: float, is_causal: bool, scale: float | None,
                  enable_gqa: bool, stage, backward, deterministic) -> torch.Tensor:
    """The same for all that PyTorch takes: as tensors (B, H, N, d), with a multiple of 8 columns."""
    _check(query, key, value)
    if not torch.compiler.is_compiling():  # before autocast, or a copy, reads it
        check_memory({name: x for name, x in zip(NAMES, (query, key, value)) if is_plain(x)})
    query, key, value = autocast(query, key, value, stage, backward)
    _check_fit(query, key, value)
    d, d_v, N_q, N_k = query.shape[-1], value.shape[-1], query.shape[-2], key.shape[-2]
    batch, H, H_kv = _leading(query, key, value, enable_gqa)
    matrices = query.dim() == key.dim() == value.dim() == 2
    shape = [N_q, d_v] if matrices else [*batch, H, N_q, d_v]
    mask = None if attn_mask is None else _mask(attn_mask, query, [*shape[:-1], N_k], batch)
    if 0 in shape or N_k == 0:
        of_mask = [each.tensor for each in mask.arguments] if mask else []
        return _nothing(query, shape, [query, key, value, *of_mask])

    columns = _columns(max(d, d_v))
    if scale is None and columns != d:
        scale = 1 / math.sqrt(max(d, 1))
    query, key = (_laid_out(x, columns) for x in (query, key))
    value = _laid_out(value, _columns(d_v))
    q = _of_batch(query, batch, H)
    k, v = (_of_batch(x, batch, H_kv) for x in (key, value))
    o = attend(q, k, v, "is_causal", is_causal, mask, scale, stage, backward, deterministic, {},
               dropout_p)[0]
    if o.shape[3] != d_v:
        o = o[..., :d_v].clone()  # without gaps
    return o if len(shape) == 4 else o.view(shape)


def _fits(q, k, v, enable_gqa: bool) -> bool:
    """Whether attend() takes them as they are, if it takes their types. False also where that needs a longer
    look."""
    try:
        B, H, N_q, d = q.shape
        of_k = B_k, H_kv, N_k, d_k = k.shape
        if (B_k != B or d_k != d or v.shape != of_k or d % 8 or d > MAX_HEAD_DIM
                or H != H_kv and (not enable_gqa or not H_kv or H % H_kv)
                or not (B and H and N_q and N_k and d)):
            return False
        q0, q1, q2, q3 = q.stride()
        k0, k1, k2, k3 = k.stride()
        v0, v1, v2, v3 = v.stride()
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not (at_q and at_k and at_v):
            return False
        return (q3 == k3 == v3 == 1 and not (at_q | at_k | at_v) % 16
                and not (q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2) % 8)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # no tensors, no 4 dimensions, no memory
        return False


# ------------------------------------------------------------------------------------------ checks
def _number(name: str, value) -> float:
    """A float, of what PyTorch takes for one."""
    of_tensor = isinstance(value, torch.Tensor) and value.dim() == 0 and not value.requires_grad
    if not (of_tensor or isinstance(value, numbers.Real)):
        raise TypeError(f"{name} must be a number, and none that requires grad, not {shown(value)}")
    return float(value)


def _check(query, key, value) -> None:
    """Raise for what is no tensor of matrices, on query's device."""
    for name, x in zip(NAMES, (query, key, value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
        check_kind(name, x)
        if x.layout != torch.strided:
            raise RuntimeError(f"{name} has layout {x.layout}: make it dense with .to_dense()")
        if x.device != query.device:
            raise RuntimeError(f"{name} is on {x.device}, query on {query.device}: move them to one device")
        if x.dim() < 2:
            raise RuntimeError(f"{name} must have at least 2 dimensions, (..., N, d), not {x.dim()}: shape "
                               f"{tuple(x.shape)}")


def _check_fit(query, key, value) -> None:
    """Raise for types, and numbers of rows and columns, that do not go together."""
    for name, x in zip(NAMES, (query, key, value)):
        if x.dtype != query.dtype:
            raise RuntimeError(f"{name} has type {x.dtype}, query {query.dtype}: make them the same")
        if x.shape[-1] > MAX_HEAD_DIM:
            raise ValueError(f"{name} has d = {x.shape[-1]}; the stages take {MAX_HEAD_DIM} columns at most")
    if query.dtype not in TYPES and query.dtype != torch.float64:
        of_numbers = query.dtype.is_floating_point or query.dtype.is_complex
        raise (NotImplementedError if of_numbers else RuntimeError)(
            f"query has type {query.dtype}: pass float32, float16 or bfloat16")
    if key.shape[-1] != query.shape[-1]:
        raise RuntimeError(f"key has shape {tuple(key.shape)}, query {tuple(query.shape)}: they must have "
                           "the same d, the last dimension")
    if value.shape[-2] != key.shape[-2]:
        raise RuntimeError(f"value has shape {tuple(value.shape)}, key {tuple(key.shape)}: they must have "
                           "the same N_k, the last dimension but one")


def _leading(query, key, value, enable_gqa: bool) -> tuple[list[int], int, int]:
    """What the dimensions before N come to: the batch, of any number of dimensions; H; H_kv."""
    if not enable_gqa:
        *batch, H = _broadcast(*(x.shape[:-2] for x in (query, key, value))) or [1]
        alone = all(x.dim() == 2 or x.shape[-3] == 1 for x in (key, value))
        return batch, H, 1 if alone else H
    for name, x in zip(NAMES, (query, key, value)):
        if x.dim() < 3:
            raise IndexError(f"{name} has shape {tuple(x.shape)}: with enable_gqa=True, it must have heads, "
                             "(..., H, N, d)")
    H, of_key, of_value = (x.shape[-3] for x in (query, key, value))
    if any(H % heads if heads else H for heads in (of_key, of_value)):
        raise RuntimeError(f"query has {H} heads, key {of_key} and value {of_value}: with enable_gqa=True, H "
                           "must be a multiple of both")
    H_kv = of_key if of_key == of_value else math.lcm(of_key, of_value)
    return _broadcast(*(x.shape[:-3] for x in (query, key, value))), H, H_kv


def _broadcast(*shapes: Sequence[int]) -> list[int]:
    """As torch.broadcast_shapes()."""
    found = []
    for axis in range(-max(map(len, shapes)), 0):
        sizes = [shape[axis] for shape in shapes if -axis <= len(shape)]
        size = next((size for size in sizes if size != 1), 1)
        if any(other != 1 and other != size for other in sizes):   # no `in`: see Mask.bind()
            raise RuntimeError("query, key and value have " + ", ".join(str(tuple(x)) for x in shapes)
                               + " before N and d, which do not broadcast: sizes must be equal, or 1; for "
                               "grouped heads, pass enable_gqa=True")
        found.append(size)
    return found


def _mask(mask, query, scores: list[int], batch: Sequence[int]) -> Mask:
    """attn_mask, for scores of this shape, the first dimensions of which are the batch's."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor, not {type(mask).__name__}")
    if type(mask) not in (torch.Tensor, torch.nn.Parameter) and (of_bias := _of_causal_bias(mask, scores)):
        return of_bias
    if mask.layout != torch.strided:
        raise RuntimeError(f"attn_mask has layout {mask.layout}: make it dense with .to_dense()")
    if mask.device != query.device:
        raise RuntimeError(f"attn_mask is on {mask.device}, query on {query.device}: move them to one device")
    converted = mask.dtype in TYPES and torch.is_autocast_enabled(query.device.type)
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) and not converted:
        raise RuntimeError(f"attn_mask has type {mask.dtype}: it must be torch.bool, torch.float32 or "
                           f"query's type, {query.dtype}")
    sizes = scores[len(scores) - mask.dim():]
    if mask.dim() > len(scores) or any(m != 1 and m != size for m, size in zip(mask.shape, sizes)):
        raise RuntimeError(f"attn_mask has shape {tuple(mask.shape)}; it must broadcast to {tuple(scores)}, "
                           "the shape of the scores")
    if mask.dim() > 3 and len(batch) > 1:
        mask = mask[(None,) * (len(scores) - mask.dim())]
        if any(size != 1 for size in mask.shape[:-3]):
            mask = mask.expand(*batch, -1, -1, -1)
        mask = mask.flatten(0, -4)
    return of_tensor("attn_mask", mask)


def _of_causal_bias(mask: torch.Tensor, scores: list[int]) -> Mask | None:
    """Of one of torch.nn.attention.bias, which is a tensor whose memory nobody fills; None: it is none."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(mask, CausalBias):
        return None
    if [mask.seq_len_q, mask.seq_len_kv] != scores[-2:]:
        raise RuntimeError(f"attn_mask is {mask.variant.name} of {mask.seq_len_q} queries and "
                           f"{mask.seq_len_kv} keys; query and key have {scores[-2]} and {scores[-1]}")
    return causal(0 if mask.variant == CausalVariant.UPPER_LEFT else None)


# ------------------------------------------------------------------------------------------ views and copies
def _columns(d: int) -> int:
    """The multiple of 8 that holds d."""
    return max(-(-d // 8) * 8, 8)


def _laid_out(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x (..., N, d), or a copy of it where it has fewer columns, which are zeros then, or rows that a stage
    cannot read. A copy has its dimensions in memory in the same order."""
    more = columns - x.shape[-1]
    if not more and x.stride(-1) == 1 and rows_fit(x):
        # Of a tensor that is traced, or otherwise without memory, nobody knows the address
        if torch.compiler.is_compiling() or not is_plain(x) or x.data_ptr() % 16 == 0:
            return x
    order = _in_memory(x)
    copy = x.permute(*order, -1)
    if more:
        copy = torch.nn.functional.pad(copy, (0, more))
    else:
        copy = copy.clone(memory_format=torch.contiguous_format)
    return copy.permute(*[order.index(axis) for axis in range(x.dim() - 1)], -1)


def _in_memory(x: torch.Tensor) -> list[int]:
    """All dimensions but the last one, by their strides, the largest first. (torch.compile traces no sorted()
    of symbols.)"""
    strides = x.stride()
    order: list[int] = []
    for axis in range(x.dim() - 1):
        at = len(order)
        while at and strides[order[at - 1]] < strides[axis]:
            at -= 1
        order.insert(at, axis)
    return order


def _of_batch(x: torch.Tensor, batch: list[int], heads: int) -> torch.Tensor:
    """(B, heads, N, d), of x (..., N, d)."""
    batch = batch or [1]
    x = x[(None,) * (len(batch) + 3 - x.dim())]
    if x.shape[-3] != 1 and x.shape[-3] != heads:
        x = x.repeat_interleave(heads // x.shape[-3], -3)
    return x.expand(*batch, heads, -1, -1).flatten(0, -4)


def _nothing(query, shape: list[int], tensors: list[torch.Tensor]) -> torch.Tensor:
    """The result where there is no query, or no key: zeros, of which all gradients are zeros, too."""
    return query.new_zeros(shape) + sum(x[..., :0].sum() for x in tensors)
