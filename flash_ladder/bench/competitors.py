"""What is compared: the stages, and PyTorch's own attention. For masks, peers.py has that."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import flash

from . import masked, peers
from .cases import random_inputs
from .masked import pattern

PEERS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
         "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclasses.dataclass(frozen=True)
class Competitor:
    """A stage, or a forward and a backward one, or a peer."""

    name: str       # of the stage that is compared, or of the peer
    label: str
    is_stage: bool
    forward: Callable[..., tuple[torch.Tensor, ...]]  # forward(q, k, v, **mask) returns its outputs, O first
    mask: Callable[[int], dict[str, Any]] = lambda N: {}  # for N rows; made before it is timed
    checkpoint: bool = False                          # do not keep what the backward pass needs: compute it

    def prepare(self, direction: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                dO: torch.Tensor | None = None) -> Callable[[], tuple[torch.Tensor, ...]]:
        """What is timed: a call that returns (O, ...) or (dQ, dK, dV). The forward pass of "bwd" runs now."""
        forward = functools.partial(self.forward, **self.mask(q.shape[2]))
        if self.checkpoint:
            forward = functools.partial(checkpoint, forward, use_reentrant=False)
        if direction == "fwd":
            return functools.partial(forward, q, k, v)
        if direction == "bwd":
            return functools.partial(torch.autograd.grad, forward(q, k, v)[0], (q, k, v), dO,
                                     retain_graph=True)
        return lambda: torch.autograd.grad(forward(q, k, v)[0], (q, k, v), dO)


def sdpa(backend: SDPBackend, causal: bool, q, k, v, dropout_p: float = 0.0) -> tuple[torch.Tensor]:
    """(O,) by one of PyTorch's backends, and by no other."""
    with sdpa_kernel(backend):
        return (torch.nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]),)


def of_stage(stage: flash.Stage, args: argparse.Namespace, **tiles: int) -> Competitor:
    """A stage of the pass, with its default tiles or these; for gradients with the forward stage that goes
    with it."""
    suffix = "_bwd" * (stage.direction == "bwd")
    options: dict[str, Any] = {"stage": stage} | {f"{name}{suffix}": size for name, size in tiles.items()}
    name = stage.name if stage.number else stage.path.name  # a file may be called as a stage is
    label = " ".join(f"{name}={size}" for name, size in tiles.items()) or name
    if args.direction != "fwd":
        forward = forward_stage(stage, args)
        # deterministic: else the backward would follow torch's setting, which poisoned_memory() changes
        options |= {"stage": forward, "backward": stage, "deterministic": False}
        if args.direction == "fwd+bwd" and forward.name != stage.name:
            label = f"{forward.name} + {name}"
    return Competitor(stage.name, label, True, functools.partial(
        flash.attention, causal=args.causal, return_lse=True, **options),
        lambda N: {"mask": pattern(N, args).joined()} if args.mask else {}, args.checkpoint)


def sizes_of(args: argparse.Namespace) -> dict[str, int] | None:
    """Of the calls, as Stage.is_for() takes them; None: they have several lengths."""
    if len(args.seqlens) > 1:
        return None
    N, = args.seqlens
    return {"B": args.batch, "H": args.H, "H_kv": args.H_kv, "N_q": N, "N_k": N, "d": args.head_dim,
            "gradients": int(args.direction != "fwd"), "masked": int(bool(args.mask or args.causal)),
            "causal": int(args.causal and not args.mask), "window": masked.window(args)}


def forward_stage(backward: flash.Stage, args: argparse.Namespace) -> flash.Stage:
    """The forward stage that runs before a backward one. For "bwd" the best that runs here; for "fwd+bwd" its
    namesake, else, of what calls take, the best, else the parent of the next namesake on its branch; else
    that of the stage that it grew from."""
    best = flash.find_stage(None, flash.DTYPES[args.dtype], args.device, d=args.head_dim,
                            sizes=sizes_of(args))
    if args.direction == "bwd":
        return best
    able = {stage.name: stage for stage in flash.stages("fwd") if not why_not(stage, args)}
    if backward.default and backward.name not in able:
        return best
    ladder = {stage.name: stage for stage in flash.stages("bwd")}
    stage: flash.Stage | None = backward
    while stage:
        if stage.name in able:
            return able[stage.name]
        if pair := next((name for name in descendants(stage, ladder) if name in able), None):
            return able.get(able[pair].after, able[pair])
        stage = ladder.get(stage.after)
    return best


def descendants(stage: flash.Stage, ladder: dict[str, flash.Stage]) -> list[str]:
    """The names of the stages that grew from it, its children first."""
    found = [stage.name]
    for name in found:
        found += [other.name for other in ladder.values() if other.after == name]
    return found[1:]


def competitors(args: argparse.Namespace) -> list[Competitor]:
    """The stages, then the peers that take the arguments; why others do not goes into `args.not_run`."""
    found = [of_stage(stage, args) for stage in args.stages]
    for name in args.peers:
        peer = of_peer(name, args)
        if reason := refusal(peer, args):
            args.not_run[peer.label] = reason
        else:
            found.append(peer)
    return found


def of_peer(name: str, args: argparse.Namespace) -> Competitor:
    """One of PEERS or, with a mask, one of peers.PEERS."""
    if args.mask:
        forward, mask = peers.PEERS[name]
        return Competitor(name, peers.label(name, args), False, forward, functools.partial(mask, args),
                          args.checkpoint)
    label = "PyTorch " + name.replace("cudnn", "cuDNN")
    if name == "efficient" and args.dtype == "fp32":
        label += " (3xTF32)"  # on tensor cores, where the fp32 stages use FMA
    return Competitor(name, label, False, functools.partial(sdpa, PEERS[name], args.causal),
                      checkpoint=args.checkpoint)


def refusal(peer: Competitor, args: argparse.Namespace) -> str:
    """Why a backend does not take these arguments, in PyTorch's words; empty if it does. Found by trying: but
    flex_attention, which would be compiled for that, fails in its row."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            peer.mask(128)
            if peer.name != "flex":
                peer.prepare(args.direction, *random_inputs(128, args))()
            return ""
        except RuntimeError as error:
            words = [str(warning.message).split(" (Triggered")[0] for warning in caught] + [str(error)]
    return next(w for w in words if not re.search("runtime disabled|not used because", w)).splitlines()[0]


def why_not(stage: flash.Stage, args: argparse.Namespace) -> str:
    """Why a stage cannot run with these arguments; empty if it can."""
    if flash.DTYPES[args.dtype] not in stage.dtypes:
        return f"does not take {args.dtype}"
    if args.mask and not stage.takes_masks:
        return "takes no mask but --causal"
    try:
        stage.tiles(args.head_dim, flash.shared_memory_per_block(args.device))
        return stage.available(args.device, flash.DTYPES[args.dtype]).reason
    except ValueError as error:
        return str(error)
