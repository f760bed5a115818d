"""flash.attention_varlen(): packed sequences of several lengths in one call."""

from __future__ import annotations

from pathlib import Path

import torch

from .attention import attend, together
from .checks import as_bool
from .masks import Mask
from .sequences import check_longest, check_packed, check_sequences, in_each_sequence
from .stage import Stage


def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                     cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None,
                     max_seqlen_k: int | None = None, *, causal: bool = False, mask: Mask | None = None,
                     scale: float | None = None, stage: str | Path | Stage | None = None,
                     backward: str | Path | Stage | None = None, return_lse: bool = False,
                     deterministic: bool | None = None, dropout_p: float = 0.0,
                     sink: torch.Tensor | None = None, **tiles: int):
    """attention() of each of several sequences, whose rows follow each other: none sees another one's keys.

        cu_seqlens = torch.tensor([0, 100, 100, 128], dtype=torch.int32)      # of 100, 0 and 28 rows
        o = flash.attention_varlen(q, k, v, cu_seqlens, causal=True)          # q, k, v: (128, H, d)

    Differentiable, and to be compiled, as attention() is. O and L have the bits that each sequence alone gets
    by the same stage with the same tiles; and so have gradients, with deterministic=True: on Hopper with
    grouped heads dQ alone.

    Args:
        q: (total_q, H, d), float16 or bfloat16. Sequence b has the rows from cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] - 1.
        k, v: (total_k, H_kv, d) and (total_k, H_kv, d_v), likewise by cu_seqlens_k. Strides of all three: as
            in attention().
        cu_seqlens_q: (sequences + 1,) int32, on q's device: it begins with 0, never falls, and ends with
            total_q. On the CPU that is checked. On a GPU it is not, as one would have to wait for it.
        cu_seqlens_k: likewise; None: as cu_seqlens_q. A sequence may have no queries, no keys, or more
            queries than keys.
        max_seqlen_q, max_seqlen_k: the longest sequence's rows, or more, as flash_attn's function wants them.
            The kernels do without: leave them out. They are checked on the CPU.
        causal: the last query of a sequence sees its last key.
        mask: of flash.masks: window, prefix, alibi, softcap, and what they see together (&). Their arguments
            are the same for all sequences.
        dropout_p, sink, scale, stage, backward, deterministic, tiles: as for attention(). A stage must take
            `varlen`, as its header says.
        return_lse: also return L.
    Returns:
        o, (total_q, H, d_v), or (o, L), with L (H, total_q) float32.
    Raises:
        ValueError, RuntimeError: as attention(). Nothing synchronises with a GPU, and CUDA graphs take such
            calls; in each replay the lengths may be others, of as many sequences and rows.
    """
    traced = torch.compiler.is_compiling()
    if type(return_lse) is not bool:
        return_lse = as_bool("return_lse", return_lse)
    causal = as_bool("causal", causal)
    check_packed(q, k, v)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))     # one batch element, (1, H, total, d)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    check_sequences(cu_seqlens_q, cu_seqlens_k, q, k, traced)
    check_longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q, traced)
    check_longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k, traced)
    if mask is not None:
        mask, causal = in_each_sequence(together(mask, causal)), False
    o, lse = attend(q, k, v, "varlen", causal, mask, scale, stage, backward, deterministic, tiles, dropout_p,
                    sink, (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()))
    o = o.squeeze(0).transpose(0, 1)      # not o[0]: its gradient is a copy of dO, into zeros
    return (o, lse.squeeze(0)) if return_lse else o
