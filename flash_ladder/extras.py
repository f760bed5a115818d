"""What few calls ask for beside a mask: dropout of P, a sink, and several sequences in a row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import check_kind
from .registry import stages
from .stage import Stage
from .values import shown


class Extras(NamedTuple):
    """As a plan takes them.

    Attributes:
        dropout_p: the probability with which an element of P becomes 0.
        seed: (1,) int64, on q's device: what its random numbers are made of; None if dropout_p is 0.
        sink: (H,) float32, contiguous: a logit in the denominator of each row; None: there is none.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, contiguous: where the rows of q's sequences, and
            of k's and v's, begin, and at last where they end: see sequences.py. None: all is one.
    """

    dropout_p: float = 0.0
    seed: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """By their names, and in the order, of stage.py's TENSORS."""
        return {"sink": self.sink, "seed": self.seed, "cu_seqlens_q": self.cu_seqlens_q,
                "cu_seqlens_k": self.cu_seqlens_k}


NO_EXTRAS = Extras()


class Cache(NamedTuple):
    """Of K and V that are a cache, whose lengths the GPU knows: what a plan depends on.

    Attributes:
        pages: that a batch element has at most; 0: it is not in pages.
        splits: ranges of keys that a stage which splits them makes; 0: as many as it wants.
    """

    pages: int = 0
    splits: int = 0

    def N_k(self, k: torch.Tensor) -> int:
        """The keys that a batch element has at most. k: (B, H_kv, N_k, d), or (pages, H_kv, PAGE_SIZE, d)."""
        return k.shape[2] * max(self.pages, 1)


def as_probability(dropout_p) -> float:
    try:
        p = float(dropout_p)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        p = -1.0
    if isinstance(dropout_p, bool) or not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p must be a probability from 0 to 1, not {shown(dropout_p)}")
    return p


def check_sink(sink, q: torch.Tensor) -> None:
    """Raise ValueError for what is no sink of q (B, H, N_q, d)."""
    if sink is None:
        return
    if not isinstance(sink, torch.Tensor):
        raise ValueError(f"sink must be a tensor (H,), not {type(sink).__name__}")
    check_kind("sink", sink)
    if sink.shape != q.shape[1:2] or not sink.dtype.is_floating_point:
        raise ValueError(f"sink must be floats of shape ({q.shape[1]},), a logit a head of q, not "
                         f"{sink.dtype} of shape {tuple(sink.shape)}")
    if sink.layout != torch.strided or sink.device != q.device:
        raise ValueError(f"sink is on {sink.device}, with layout {sink.layout}; it must be dense, and on "
                         f"{q.device}")


def as_float(sink: torch.Tensor | None) -> torch.Tensor | None:
    """As kernels take it; autograd takes its gradient back to the type that it had."""
    return None if sink is None else sink.to(torch.float32).contiguous().resolve_neg()


def draw_seed(dropout_p: float, device: torch.device) -> torch.Tensor | None:
    """A new one, by torch's generator of the device: so torch.manual_seed() fixes it, a CUDA graph draws
    another in each replay, and checkpointing the same."""
    if not dropout_p:
        return None
    return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=device)


def needs_of(extras: Extras, cached: bool = False, by_head: bool = False) -> tuple[str, ...]:
    """What a call asks for that not every stage knows, as of Stage.lacks(). cached: K and V are a cache.
    by_head: its mask differs from head to head."""
    asked = {"dropout": extras.dropout_p > 0, "sink": extras.sink is not None,
             "varlen": extras.cu_seqlens_q is not None, "kv_cache": cached, "masks by head": by_head}
    return tuple(what for what, needed in asked.items() if needed)


def check_takes(stage: Stage, needs: tuple[str, ...]) -> None:
    """Raise ValueError for a stage that does not know what the call asks for."""
    what = stage.lacks(needs)
    if what in stage.refuses:
        raise ValueError(f"{stage} takes no mask that differs from head to head, as its tiles have rows of "
                         f"several: {stage.after} does")
    if what:
        those = [s.name for s in stages(stage.direction)
                 if what in s.takes and set(s.dtypes) & set(stage.dtypes)]
        also = ("; every stage from flash2 and recompute on takes attention(q[None].transpose(1, 2), "
                "..., mask=flash.masks.document(ids))") * (what == "varlen")
        raise ValueError(f"{stage} takes no {what}; of its type these do: {', '.join(those) or 'none'}{also}")
