"""Packed sequences of several lengths, the rows of one after those of the one before: what says where they
begin, and what such a call refuses. Kernels: stages/common/sequences.cuh."""

from __future__ import annotations

import json

import torch

from .checks import check_kind
from .inspection import has_memory
from .masks import FAR, Diagonal, Mask

# Of these a sequence's mask is that of a call of its own. Tensors, if any, are the same for all sequences.
MASKS = ("none", "causal", "window", "prefix", "alibi", "softcap")
MOST_SEQUENCES = 1 << 20


def check_packed(q, k, v) -> None:
    """Raise ValueError for what are no packed q (total_q, H, d), k (total_k, H_kv, d), v (total_k, H_kv,
    d_v). (What attention() checks, too, is left to it.)"""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
        check_kind(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions, (total, H, d), not {x.dim()}: shape "
                             f"{tuple(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"{name} is empty: shape {tuple(x.shape)}; total, H and d must be at least 1")
        if x.shape[0] > FAR:
            raise ValueError(f"{name} has {x.shape[0]} rows; at most 2^30 are possible")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k has shape {tuple(k.shape)}; for q of shape {tuple(q.shape)} it must be "
                         f"(total_k, H_kv, {q.shape[2]})")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}: they must be the same, but for "
                         "the last dimension")


def check_sequences(cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None, q: torch.Tensor,
                    k: torch.Tensor, traced: bool = False) -> None:
    """Raise ValueError for what are no beginnings of sequences in q (1, H, total_q, d) and k (1, H_kv,
    total_k, d). traced: nobody may look at numbers. Nor does anybody on a GPU: one would wait for it."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return
    for name, starts, x, of in (("cu_seqlens_q", cu_seqlens_q, q, "q"),
                                ("cu_seqlens_k", cu_seqlens_k, k, "k")):
        if not isinstance(starts, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, not {type(starts).__name__}")
        check_kind(name, starts)
        if (starts.dtype != torch.int32 or starts.layout != torch.strided or starts.dim() != 1
                or len(starts) < 2):
            raise ValueError(f"{name} must be a dense torch.int32 of shape (sequences + 1,), not "
                             f"{starts.dtype} of shape {tuple(starts.shape)}")
        if len(starts) > MOST_SEQUENCES + 1:
            raise ValueError(f"{name} has {len(starts) - 1} sequences; at most 2^20 are possible")
        if starts.device != x.device:
            raise ValueError(f"{name} is on {starts.device}, {of} on {x.device}: move it there")
        if traced or starts.device.type != "cpu" or not has_memory(starts):
            continue
        if starts[0] != 0 or starts[-1] != x.shape[2] or (starts.diff() < 0).any():
            raise ValueError(f"{name} must begin with 0, never fall, and end with the rows of {of}, "
                             f"{x.shape[2]}: it is {starts.tolist()}")
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(f"cu_seqlens_q has {len(cu_seqlens_q)} numbers, cu_seqlens_k {len(cu_seqlens_k)}: "
                         "one more than sequences, both")


def check_longest(name: str, longest, starts: torch.Tensor, traced: bool) -> None:
    """Raise ValueError for what is not the length of the longest sequence, or more."""
    if longest is None:
        return
    if not isinstance(longest, (int, torch.SymInt)) or isinstance(longest, bool) or longest < 1:
        raise ValueError(f"{name} must be an int of at least 1, not {longest!r}")
    if not traced and starts.device.type == "cpu" and has_memory(starts):
        if (found := int(starts.diff().max())) > longest:
            raise ValueError(f"{name} is {longest}, and a sequence has {found} rows")


def in_each_sequence(mask: Mask) -> Mask:
    """A mask, for a call of packed sequences: its diagonals count from each sequence's own last key.

    Raises:
        ValueError: for one that has something for single queries or keys, or batch elements.
    """
    if refused := _refused(mask.text):
        raise ValueError(f"mask: attention_varlen() takes {', '.join(MASKS)} and what they see together (&), "
                         f"not {refused}: for that, attention(q[None].transpose(1, 2), ...) with "
                         "flash.masks.document(ids) & the mask")
    if any(not isinstance(n, Diagonal) and abs(n) != FAR for n in mask.ints):
        raise ValueError("mask: its `diagonal` would be that of all sequences, whatever their lengths: leave "
                         "it out")
    if any(each.tensor.shape[0] != 1 for each in mask.arguments):
        raise ValueError("mask: its tensors must be the same for all sequences: leave out their dimension B")
    ints = [n.offset if isinstance(n, Diagonal) else n for n in mask.ints]
    return Mask(mask.text, mask.arguments, ints, mask.floats, mask.scores, mask.slopes)


def _refused(text: str) -> str:
    """Of a mask's text: the first part that is none of MASKS joined by &, or nothing."""
    def names(x) -> list[str]:
        return [x] if isinstance(x, str) else [*([] if x[0] == "And" else ["|"]), *names(x[1]), *names(x[2])]

    return next((name for name in names(json.loads(text)) if name not in MASKS), "")


# torch.compile, which does not trace json, need not look into it: see conversion.py
setattr(_refused, "_dynamo_marked_constant", True)  # noqa: B010
