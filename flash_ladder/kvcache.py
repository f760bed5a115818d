"""flash.attention_kvcache(): new queries over a cache of keys and values, whose lengths the GPU knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from .bound import Bound
from .checks import as_bool, as_scale, check_dense, check_kind, check_memory, check_tensors, rows_fit
from .extras import Cache, Extras, as_float, check_sink
from .inspection import current_report
from .launch import explain_loss
from .loader import debug
from .masks import Mask, as_mask
from .masks import causal as of_causal
from .operators import OPTIONS, as_arguments, as_text, has_dispatch, is_plain, of_text, visible_of
from .plan import (
    Keys,
    Plan,
    Visible,
    choose,
    empty_output,
    forward,
    keep,
    mask_tensors,
    plan_for,
)
from .stage import Stage
from .values import as_integer, shown

MOST_SPLITS = 1024
PAGE_ROWS = 16            # a page has a multiple of so many


def attention_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                      k: torch.Tensor | None = None, v: torch.Tensor | None = None, *,
                      cache_seqlens: int | torch.Tensor | None = None,
                      block_table: torch.Tensor | None = None, causal: bool = False,
                      mask: Mask | Path | None = None, scale: float | None = None,
                      sink: torch.Tensor | None = None, return_lse: bool = False, num_splits: int = 0,
                      stage: str | Path | Stage | None = None, **tiles: int):
    """attention() of new queries over a cache, as flash_attn's flash_attn_with_kvcache; no gradients.

        o = flash.attention_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    Nothing waits for the GPU, and the same kernels run whatever the lengths are: a decode step may be in a
    CUDA graph. So on a GPU nobody checks the numbers in cache_seqlens and block_table, which must be as said
    below; in the simulator they are checked.

    Args:
        q: (B, N_q, H, d), float16 or bfloat16; d a multiple of 8 up to 256.
        k_cache, v_cache: (B, N_max, H_kv, d), or with a block_table (pages, page_size, H_kv, d), page_size a
            multiple of 16. v_cache may have d_v < d columns. Strides: as of attention().
        k, v: (B, N_new, H_kv, d), or None: are written into the cache, behind what is there, before q looks
            at it.
        cache_seqlens: how many keys of the cache each batch element has, without those of k: int32 (B,), or
            an int for all; from 0 to N_max - N_new. None: N_max, of a cache without k.
        block_table: int32 (B, max_pages): key n of batch element b is in page block_table[b, n // page_size].
            N_max is max_pages * page_size. Numbers of pages that it needs are from 0 to pages - 1; the others
            may be any.
        causal: the last query sees the last key that the batch element has, those of k included.
        mask: one of flash.masks that says by a row's and a key's number which are seen, such as window, or
            changes scores, such as softcap; positions count from the last query and the last key.
        scale, sink: as of attention().
        return_lse: also return L.
        num_splits: ranges that a stage which splits keys makes of them, up to 1024; 0: as its header says.
        stage, tiles: as of attention().
    Returns:
        o (B, N_q, H, d_v), or (o, L) with L (B, H, N_q) float32.
    Raises:
        ValueError, RuntimeError: as attention().
    """
    arguments = (q, k_cache, v_cache, k, v, cache_seqlens, block_table, causal, mask, scale, sink, num_splits,
                 stage, tiles)
    if type(return_lse) is not bool:
        return_lse = as_bool("return_lse", return_lse)
    key, call = (None, None) if torch.compiler.is_compiling() else _find(*arguments)
    if call is None or call.plan is None or not call.plan.is_current() or not _at_16(q, k_cache, v_cache):
        call = _check(*arguments)
        if key:
            keep(_calls, key, call)
    before = _lengths(cache_seqlens, q, call.N_max, call.N_new)
    if call.plan and q.device.type == "cpu":
        _check_numbers(before, block_table, call.N_max, call.N_new, k_cache)
    if k is not None and v is not None:
        _append(k_cache, v_cache, k, v, before, block_table)
        before = before + call.N_new
    if call.plan is None:
        o, lse = _by_operator(q, k_cache, v_cache, before, block_table, causal, mask, scale, sink, stage,
                              tiles, call)
    else:
        if key is None:
            q, k_cache, v_cache = (x.resolve_neg() for x in (q, k_cache, v_cache))
        o, lse = _launch(q, k_cache, v_cache, before, block_table, causal, mask, as_float(sink), call)
    return (o, lse) if return_lse else o


class Call(NamedTuple):
    """What calls with certain arguments and layouts share. plan: None: they need an operator. o: the layout
    of their o: shape and strides."""

    plan: Plan | None
    N_max: int
    N_new: int
    splits: int
    o: tuple = ()


_calls: dict[tuple, Call] = {}


def _find(q, k_cache, v_cache, k, v, cache_seqlens, block_table, causal, mask, scale, sink, num_splits, stage,
          tiles) -> tuple[tuple | None, Call | None]:
    """(key, call): all that the check and the choice of a stage depend on, but addresses and numbers on the
    device, or None where they must be anew; and what was found for it before."""
    others = [x for x in (k, v, block_table, sink, cache_seqlens) if isinstance(x, torch.Tensor)]
    if isinstance(mask, Mask):
        others += [each.tensor for each in mask.arguments]
    elif mask is not None:
        return None, None
    try:
        if (not is_plain(q, k_cache, v_cache, *others) or current_report() or q.is_neg() or k_cache.is_neg()
                or v_cache.is_neg() or torch.is_grad_enabled() and any(
                    x.requires_grad for x in (q, k_cache, v_cache, *others))
                or not all(x.data_ptr() for x in others)):
            return None, None
        numbers = causal, scale, num_splits, *tiles.values()
        if any(isinstance(x, torch.Tensor) for x in numbers):                    # they may change
            return None, None
        key = (q.shape, q.stride(), q.dtype, q.device, k_cache.shape, k_cache.stride(), k_cache.dtype,
               k_cache.device, v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device,
               k is None, v is None, block_table is None, sink is None, type(cache_seqlens),
               *[y for x in others for y in (x.shape, x.stride(), x.dtype, x.device)],
               mask and (mask.text, mask.ints, mask.floats), *tiles, *map(type, numbers), *numbers, stage,
               debug(), torch.are_deterministic_algorithms_enabled())
        return key, _calls.get(key)
    except (AttributeError, RuntimeError, TypeError):  # of what is no tensor, has no strides, or no hash
        return None, None


def _launch(q, k_cache, v_cache, lengths, block_table, causal, mask, sink, call: Call):
    """(o, L), by the call's plan."""
    assert call.plan is not None
    o = torch.empty_strided(*call.o, dtype=q.dtype, device=q.device)
    B, N_q, H, _ = q.shape
    lse = torch.empty((B, H, N_q), dtype=torch.float32, device=q.device)
    of_mask = () if mask is None else mask_tensors(
        _visible(q.transpose(1, 2), k_cache.transpose(1, 2), causal, mask, call.N_max))
    tensors = q, k_cache, v_cache, o, lse, sink, None, lengths, block_table, None, None
    try:
        if report := current_report():
            views = (x.transpose(1, 2) for x in tensors[:4])
            call.plan.inspect(report, *views, *tensors[4:], *of_mask)
        else:
            call.plan.launch(*tensors, *of_mask)
    except torch.AcceleratorError as error:
        explain_loss(error)
        raise
    return o, lse


def _at_16(*tensors: torch.Tensor) -> bool:
    """Whether all have memory that starts at a multiple of 16 bytes."""
    addresses = [x.data_ptr() for x in tensors]
    return all(addresses) and not any(at % 16 for at in addresses)


# ------------------------------------------------------------------------------------------ the checks
def _check(q, k_cache, v_cache, k, v, cache_seqlens, block_table, causal, mask, scale, sink, num_splits,
           stage, tiles) -> Call:
    """Check the arguments, and choose a stage."""
    pages, N_max = _check_shapes(q, k_cache, v_cache, block_table)
    queries, keys, values = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    tensors = [x for x in (q, k_cache, v_cache, k, v, cache_seqlens, block_table, sink)
               if isinstance(x, torch.Tensor)]
    traced = torch.compiler.is_compiling() or has_dispatch(*tensors)
    of_batch = [x if block_table is None else x[:1].expand(q.shape[0], -1, -1, -1) for x in (keys, values)]
    check_tensors(queries, of_batch[0], of_batch[1], ("q", "k_cache", "v_cache"), traced)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not rows_fit(x):             # pages, too
            raise ValueError(f"{name}'s rows must start at multiples of 16 bytes: pass {name}.contiguous()")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("attention_kvcache() has no gradient, and a tensor requires one: call it under "
                         "torch.no_grad(), or attention() without a cache")
    check_sink(sink, queries)
    for name, x in (("k", k), ("v", v), ("cache_seqlens", cache_seqlens)):
        if isinstance(x, torch.Tensor):
            check_dense(name, x)
    beside = {"k": k, "v": v, "cache_seqlens": cache_seqlens, "block_table": block_table, "sink": sink}
    if isinstance(mask, Mask):
        beside |= {f"mask: {each.name}": each.tensor for each in mask.arguments}
    if not traced:
        check_memory({name: x for name, x in beside.items() if isinstance(x, torch.Tensor) and is_plain(x)})
    N_new = _check_new(q, k_cache, v_cache, k, v)
    before = _lengths(cache_seqlens, q, N_max, N_new)
    if not traced and q.device.type == "cpu":
        _check_numbers(before, block_table, N_max, N_new, k_cache)
    visible = _visible(queries, keys, as_bool("causal", causal), mask, N_max)
    splits = as_integer(num_splits)
    if splits is None or not 0 <= splits <= MOST_SPLITS:
        raise ValueError(f"num_splits must be an integer from 0 to {MOST_SPLITS}, not {shown(num_splits)}")
    if unknown := set(tiles) - {"Br", "Bc"}:
        raise ValueError(f"{min(unknown)}: attention_kvcache() has no such argument; tile sizes are Br, Bc")
    if traced:
        return Call(None, N_max, N_new, splits)
    cache, extras = Cache(pages, splits), Extras(sink=as_float(sink))
    chosen, sizes = choose(stage, queries, "fwd", None, visible, extras, Keys(keys, cache=cache), **tiles)
    o = empty_output(queries, values, "meta")
    layout = o.transpose(1, 2)
    plan = plan_for(chosen, sizes, False, visible, as_scale(scale, q.shape[3]),
                    {"Q": queries, "K": keys, "V": values, "O": o, "sink": extras.sink}, cache=cache)
    return Call(plan, N_max, N_new, splits, (layout.shape, layout.stride()))


def _check_shapes(q, k_cache, v_cache, block_table) -> tuple[int, int]:
    """How many pages a batch element has at most, or 0, and how many keys. Shapes are said as the caller has
    them."""
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
        check_kind(name, x)
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} must have 4 dimensions, (B, N, heads, d), none of them 0; its shape is "
                             f"{tuple(x.shape)}")
    (B, _, H, d), (first, rows, H_kv, _) = q.shape, k_cache.shape
    if block_table is None:
        wanted, pages = f"({B}, N_max, H_kv, {d})", 0
    else:
        if not isinstance(block_table, torch.Tensor) or block_table.dim() != 2:
            raise ValueError("block_table must be an int32 tensor (B, max_pages)")
        check_dense("block_table", block_table)
        if (block_table.dtype != torch.int32 or block_table.shape[0] != B or not block_table.shape[1]
                or block_table.device != q.device):
            raise ValueError(f"block_table must be int32 of shape ({B}, max_pages), max_pages at least 1, on "
                             f"{q.device}; it is {block_table.dtype} of shape {tuple(block_table.shape)} on "
                             f"{block_table.device}")
        if not block_table.is_contiguous():
            raise ValueError("block_table must be contiguous: pass block_table.contiguous()")
        if rows % PAGE_ROWS:
            raise ValueError(f"k_cache has pages of {rows} keys; that must be a multiple of {PAGE_ROWS}")
        wanted, pages = f"(pages, page_size, H_kv, {d})", block_table.shape[1]
    if (pages == 0 and first != B) or k_cache.shape[3] != d or H % H_kv:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}; for q of shape {tuple(q.shape)} it must "
                         f"be {wanted}, {H} a multiple of H_kv")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(f"v_cache has shape {tuple(v_cache.shape)}, k_cache {tuple(k_cache.shape)}: they "
                         "must be the same, but for the last dimension")
    return pages, rows * max(pages, 1)


def _check_new(q, k_cache, v_cache, k, v) -> int:
    """How many keys are new."""
    if (k is None) != (v is None):
        raise ValueError("k and v come together: pass both, or neither")
    if k is None:
        return 0
    for name, x, cached in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = q.shape[0], cached.shape[2], cached.shape[3]
        if (not isinstance(x, torch.Tensor) or x.dim() != 4 or (x.shape[0], *x.shape[2:]) != wanted
                or not x.shape[1] or (x.dtype, x.device) != (cached.dtype, cached.device)):
            said = f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else shown(x)
            raise ValueError(f"{name} must be {cached.dtype} ({wanted[0]}, N_new, {wanted[1]}, {wanted[2]}) "
                             f"on {cached.device}, not {said}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k has {k.shape[1]} new keys, v {v.shape[1]}: they must be as many")
    return k.shape[1]


def _lengths(cache_seqlens, q, N_max: int, N_new: int) -> torch.Tensor:
    """int32 (B,), on q's device."""
    B = q.shape[0]
    if isinstance(cache_seqlens, torch.Tensor):
        if (cache_seqlens.shape, cache_seqlens.dtype, cache_seqlens.device) != ((B,), torch.int32, q.device):
            raise ValueError(f"cache_seqlens must be int32 of shape ({B},) on {q.device}; it is "
                             f"{cache_seqlens.dtype} of shape {tuple(cache_seqlens.shape)} on "
                             f"{cache_seqlens.device}")
        return cache_seqlens.contiguous()
    if cache_seqlens is None and N_new:
        raise ValueError("cache_seqlens must say where k and v go: how many keys the cache has before them")
    length = N_max if cache_seqlens is None else as_integer(cache_seqlens)
    if length is None or not 0 <= length <= N_max - N_new:
        raise ValueError(f"cache_seqlens must be from 0 to {N_max - N_new}, so that the cache has room for "
                         f"all keys, not {shown(cache_seqlens)}")
    return torch.full((B,), length, dtype=torch.int32, device=q.device)


def _check_numbers(before: torch.Tensor, block_table, N_max: int, N_new: int, k_cache) -> None:
    """In the simulator: on a GPU nobody waits for these."""
    lengths = before.tolist()
    if min(lengths) < 0 or max(lengths) > N_max - N_new:
        raise ValueError(f"cache_seqlens must be from 0 to {N_max - N_new}, so that the cache has room for "
                         f"all keys, not {lengths}")
    if block_table is None:
        return
    page_size = k_cache.shape[1]
    for b, (length, table) in enumerate(zip(lengths, block_table.tolist())):
        needed = table[:-(-(length + N_new) // page_size)]
        if needed and not 0 <= min(needed) <= max(needed) < k_cache.shape[0]:
            raise ValueError(f"block_table[{b}] has {needed}; the cache's pages are 0 to "
                             f"{k_cache.shape[0] - 1}")


def _visible(q, k, causal: bool, mask, N_max: int) -> Visible:
    """Which pairs count, by numbers that are as if N_k and N_q were the same: the kernel adds N_k - N_q."""
    if mask is None:
        return 0 if causal else None
    mask = of_causal() & as_mask(mask) if causal else as_mask(mask)
    for each in mask.arguments:
        if set(each.extents) & set("qkd"):
            raise ValueError(f"mask: {each.name} is a tensor by query or key, and how many keys a cache has "
                             "only the GPU knows: pass a mask by position, such as window, prefix or softcap")
    if '"Or"' in mask.text:
        raise ValueError("mask: a | b is none that a cache takes: pass masks by position, or a & b of them")
    return mask.bind(q, k, N_max)


def _append(k_cache, v_cache, k, v, before: torch.Tensor, block_table) -> None:
    """Write k and v into the cache, behind the `before` keys of each batch element."""
    at = before.long().unsqueeze(1)
    if k.shape[1] > 1:
        at = at + torch.arange(k.shape[1], device=k.device)
    if block_table is None:
        batch = torch.arange(k.shape[0], device=k.device).unsqueeze(1)
    else:
        page_size = k_cache.shape[1]
        batch, at = block_table.gather(1, at // page_size).long(), at % page_size
    k_cache[batch, at] = k
    v_cache[batch, at] = v


# ------------------------------------------------------------------------------------------ the operator
def _by_operator(q, k_cache, v_cache, lengths, block_table, causal, mask, scale, sink, stage, tiles,
                 call: Call):
    """(o, L), where a call is traced, or somebody else looks on."""
    queries, keys, values = (x.transpose(1, 2).resolve_neg() for x in (q, k_cache, v_cache))
    visible = _visible(queries, keys, causal, mask, call.N_max)
    diagonals = visible.diagonals if isinstance(visible, Bound) else 0
    o, lse = torch.ops.flash.kvcache(
        queries, keys, values, lengths, block_table, *as_arguments(visible, Extras(sink=as_float(sink))),
        scale, as_text(stage), diagonals, call.splits, tiles.get("Br"), tiles.get("Bc"))
    return o.transpose(1, 2), lse


@torch.library.custom_op(
    "flash::kvcache", mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor seqlens_k, Tensor? block_table, {OPTIONS}, int diagonals, "
           "int splits, int? Br, int? Bc) -> (Tensor o, Tensor L)")
def _kvcache_op(q, k, v, seqlens_k, block_table, diagonal, mask, mask_tensors, ints, floats, dropout_p, seed,
                sink, cu_seqlens_q, cu_seqlens_k, scale, stage, diagonals, splits, Br, Bc):
    """Of tensors (B, heads, N, d), which attention_kvcache() has checked; no packed sequences."""
    visible = visible_of(diagonal, mask, mask_tensors, ints, floats)
    if isinstance(visible, Bound):
        visible = replace(visible, diagonals=diagonals)
    extras = Extras(dropout_p, seed, sink, cu_seqlens_q, cu_seqlens_k)
    cache = Cache(0 if block_table is None else block_table.shape[1], splits)
    chosen = choose(of_text(stage), q, "fwd", None, visible, extras, Keys(k, cache=cache), Br=Br, Bc=Bc)
    return forward(q, k, v, visible, scale, *chosen, extras, cache, seqlens_k=seqlens_k,
                   block_table=block_table)


@_kvcache_op.register_fake
def _(q, k, v, *_):
    return empty_output(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)
