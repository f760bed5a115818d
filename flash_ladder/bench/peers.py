"""PyTorch's attention with a mask: flex_attention, SDPA and plain code. Of each what is called, and what it
takes for the mask, which is made before the call.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend

import flash

from .cases import random_inputs
from .masked import Pattern, pattern

NO_GPU = "needs a GPU: on the CPU, flex_attention has no backward pass, and takes a minute to compile"
BACKENDS = {SDPBackend.MATH.value: "math", SDPBackend.FLASH_ATTENTION.value: "flash",
            SDPBackend.EFFICIENT_ATTENTION.value: "efficient", SDPBackend.CUDNN_ATTENTION.value: "cuDNN"}
MOST_COMPILED = 256     # masks, shapes and passes, after which torch.compile would no longer compile


@functools.cache
def compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention  # a second, for those who use it

    torch._dynamo.config.recompile_limit = MOST_COMPILED
    torch._dynamo.config.accumulated_recompile_limit = MOST_COMPILED
    return torch.compile(flex_attention, dynamic=False)


def flex(q, k, v, *, score_mod: Callable | None, block_mask: Any) -> tuple[torch.Tensor]:
    """(O,) by flex_attention, compiled. (Dong et al., arXiv 2412.05496.)"""
    return (compiled_flex()(q, k, v, score_mod=score_mod, block_mask=block_mask,
                            enable_gqa=q.shape[1] != k.shape[1]),)


def flex_mask(args: argparse.Namespace, N: int) -> dict[str, Any]:
    if args.device.type != "cuda":
        raise RuntimeError(NO_GPU)
    from torch.nn.attention.flex_attention import create_block_mask

    mask = pattern(N, args)
    by = "".join(part.by for part in mask.parts if part.seen)
    block_mask = create_block_mask(mask.seen, mask.B if "B" in by else None, mask.H if "H" in by else None,
                                   N, N, device=str(args.device)) if mask.seen else None
    return {"score_mod": mask.score, "block_mask": block_mask}


def sdpa(q, k, v, *, attn_mask: torch.Tensor) -> tuple[torch.Tensor]:
    """(O,) by whatever backend PyTorch chooses."""
    return (torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, enable_gqa=q.shape[1] != k.shape[1]),)


def sdpa_mask(args: argparse.Namespace, N: int) -> dict[str, Any]:
    """A dense tensor: boolean or, with scores that are added, of q's type."""
    mask = pattern(N, args)
    if not mask.adds:
        raise RuntimeError("SDPA has no softcap: its mask is a tensor of booleans, or is added")
    return {"attn_mask": mask.dense_bias(flash.DTYPES[args.dtype], hide=True) if mask.score
            else mask.dense_seen()}


def backend(args: argparse.Namespace) -> str:
    """The one that PyTorch chooses for SDPA with the mask."""
    q, k, v, *_ = random_inputs(128, args)
    chosen = torch._fused_sdp_choice(q, k, v, **sdpa_mask(args, 128), enable_gqa=args.H != args.H_kv)
    return BACKENDS.get(chosen, "a backend of its own")


def eager(q, k, v, *, steps: list[Callable], hidden: torch.Tensor | None,
          blind: torch.Tensor | None) -> tuple[torch.Tensor]:
    """(O,) by plain code in q's type. steps: what is done to the scores, in turn. blind: rows that see no
    key."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    S = q @ k.mT * q.shape[3] ** -0.5
    for step in steps:
        S = step(S)
    if hidden is not None:  # by a finite number: a row of -infinity would be NaN
        S = S.masked_fill(hidden, torch.finfo(S.dtype).min)
    P = S.softmax(-1)
    return ((P if blind is None else P.masked_fill(blind, 0)) @ v,)


def eager_mask(args: argparse.Namespace, N: int) -> dict[str, Any]:
    mask, dtype = pattern(N, args), flash.DTYPES[args.dtype]
    i, j = mask.indices(range(N))
    b, h = (torch.arange(n, device=mask.device) for n in (mask.B, mask.H))
    steps: list[Callable] = []
    for part in mask.parts:
        if part.score and part.adds:
            alone = Pattern((part,), mask.B, mask.H, N, mask.device)
            steps.append(functools.partial(torch.add, alone.dense_bias(dtype, hide=False)))
        elif part.score:
            steps.append(functools.partial(part.score, b=b[:, None, None, None], h=h[:, None, None], i=i,
                                           j=j))
    hidden = ~mask.dense_seen() if mask.seen else None
    blind = None if hidden is None else hidden.all(-1, keepdim=True)
    return {"steps": steps, "hidden": hidden, "blind": blind if blind is not None and blind.any() else None}


# By name: what is called, and what it takes for the mask
PEERS: dict[str, tuple[Callable, Callable]] = {
    "flex": (flex, flex_mask), "sdpa": (sdpa, sdpa_mask), "eager": (eager, eager_mask)}


def label(name: str, args: argparse.Namespace) -> str:
    if name == "sdpa" and pattern(8, args).adds:
        return f"PyTorch SDPA ({backend(args)})"
    return {"flex": "PyTorch flex_attention", "sdpa": "PyTorch SDPA", "eager": "PyTorch eager"}[name]
