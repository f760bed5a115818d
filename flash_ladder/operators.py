"""attention() for autograd, and for torch.compile and export.

In eager mode a plain torch.autograd.Function: an operator's dispatch costs more than a small kernel. Whatever
has to see an operator gets one: torch.compile, torch.export, a dispatch mode (FlopCounterMode, selective
checkpointing, FakeTensorMode), a tensor subclass.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from .checks import check_tangent, check_tensors
from .plan import (
    FLOPS_PER_COLUMN,
    Plan,
    backward,
    choose,
    empty_like,
    forward,
    forward_outputs,
    run,
    visible_pairs,
)
from .stage import Stage

_PLAIN = (torch.Tensor, torch.nn.Parameter)
NO_SECOND_DERIVATIVE = (
    "flash.attention() has no second derivative: for one, use "
    "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")


class Call:
    """What eager calls of attention() with certain arguments and layouts share.

    plan: the forward stage's. backward: the stage for gradients, its tiles and -DDETERMINISTIC, or None.
    dtype: that autocast asks for, or None.
    """

    __slots__ = ("plan", "diagonal", "scale", "backward", "files", "dtype")

    def __init__(self, plan: Plan, diagonal: int | None, scale: float, backward, files, dtype):
        self.plan, self.diagonal, self.scale, self.backward = plan, diagonal, scale, backward
        self.files, self.dtype = files, dtype

    def is_current(self) -> bool:
        return self.plan.is_current() and (self.files is None or self.files.are_unchanged())

    def run(self, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, L), differentiable if it has a backward stage."""
        return _Attention.apply(q, k, v, self) if self.backward else self.forward(q, k, v)

    def forward(self, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = forward_outputs(q)
        run(self.plan, {"Q": q, "K": k, "V": v, "O": o, "L": lse})
        return o, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call):
        ctx.call = call
        ctx.set_materialize_grads(False)  # None for an output that the loss does not depend on
        o, lse = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx, dO, dL):
        q, k, v, o, lse = ctx.saved_tensors
        if dO is None:  # the loss depends on L alone
            dO = torch.zeros_like(o)
        call = ctx.call
        stage, tiles, deterministic = call.backward
        if torch.is_grad_enabled() or not is_plain(q, k, v, o, lse, dO):
            gradients = torch.ops.flash.backward(q, k, v, o, lse, dO, dL, call.diagonal, call.scale,
                                                 as_text(stage, q.dtype), deterministic, tiles["Br"],
                                                 tiles["Bc"])
        else:
            gradients = backward(q, k, v, o, lse, dO, dL, call.diagonal, call.scale, stage, tiles,
                                 deterministic)
        return (*(x if need else None for x, need in zip(gradients, ctx.needs_input_grad)), None)


def has_dispatch(*tensors: torch.Tensor) -> bool:
    """Whether somebody waits for an operator: a dispatch mode, or a subclass of torch.Tensor."""
    return bool(torch._C._len_torch_dispatch_stack()) or any(type(x) not in _PLAIN for x in tensors)


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether nothing but autograd looks on: no dispatch either, no transform, tracer or tangent."""
    return not (has_dispatch(*tensors) or torch._C._are_functorch_transforms_active()
                or torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0)


def as_text(stage: str | Path | Stage | None, dtype: torch.dtype | None = None) -> str | None:
    """A stage as an operator's argument: its name, or the path of its file, which has a slash.

    dtype: of the tensors; None for a stage that does not take it, but was chosen: find_or_convert().
    """
    if isinstance(stage, Stage):
        return str(stage.path) if dtype is None or dtype in stage.dtypes else None
    return os.path.join(".", str(stage)) if isinstance(stage, Path) else stage


def of_text(stage: str | None) -> str | Path | None:
    return Path(stage) if isinstance(stage, str) and "/" in stage else stage


# ------------------------------------------------------------------------------------------ the operators
# A stage is given as text, its name or its file's path; None as in attention().
_OPTIONS = "SymInt? diagonal, float? scale, str? stage"


@torch.library.custom_op(
    "flash::forward", mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, str? backward, bool? deterministic, int? Br, "
           "int? Bc, int? Br_bwd, int? Bc_bwd) -> (Tensor o, Tensor L)")
def _forward_op(q, k, v, diagonal, scale, stage, backward, deterministic, Br, Bc, Br_bwd, Bc_bwd):
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    check_tensors(q, k, v)
    return forward(q, k, v, diagonal, scale,
                   *choose(of_text(stage), q, "fwd", deterministic, diagonal is not None, Br=Br, Bc=Bc))


@_forward_op.register_fake
def _(q, k, v, diagonal, scale, stage, backward, deterministic, Br, Bc, Br_bwd, Bc_bwd):
    check_tensors(q, k, v, traced=True)
    choose(of_text(stage), q, "fwd", deterministic, diagonal is not None, Br=Br, Bc=Bc)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if gradients or (backward, Br_bwd, Bc_bwd) != (None, None, None):
        choose(of_text(backward), q, "bwd", deterministic, diagonal is not None, Br=Br_bwd, Bc=Bc_bwd)
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "flash::backward", mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor L, Tensor dO, Tensor? dL, {_OPTIONS}, "
           "bool deterministic, int? Br, int? Bc) -> (Tensor dq, Tensor dk, Tensor dv)")
def _backward_op(q, k, v, o, L, dO, dL, diagonal, scale, stage, deterministic, Br, Bc):
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    check_tensors(q, k, v)
    rows = q.shape[:3], torch.float32
    for name, x, (shape, dtype) in (("o", o, (q.shape, q.dtype)), ("dO", dO, (q.shape, q.dtype)),
                                    ("L", L, rows), ("dL", dL, rows)):
        if x is None:
            continue
        if (x.shape, x.dtype, x.device) != (shape, dtype, q.device):
            raise ValueError(f"{name} must have shape {tuple(shape)} and type {dtype} and be on {q.device}; "
                             f"it has {tuple(x.shape)} and {x.dtype} and is on {x.device}")
        check_tangent(name, x)
    return backward(q, k, v, o, L, dO, dL, diagonal, scale,
                    *choose(of_text(stage), q, "bwd", deterministic, diagonal is not None, Br=Br, Bc=Bc),
                    deterministic)


@_backward_op.register_fake
def _(q, k, v, o, L, dO, dL, diagonal, scale, stage, deterministic, Br, Bc):
    check_tensors(q, k, v, traced=True)
    choose(of_text(stage), q, "bwd", deterministic, diagonal is not None, Br=Br, Bc=Bc)
    return empty_like(q), empty_like(k), empty_like(v)


def _save(ctx, inputs, output) -> None:
    q, k, v, diagonal, scale, _, backward, deterministic, _, _, Br, Bc = inputs
    if deterministic is None and torch.are_deterministic_algorithms_enabled():  # it may not be by then
        stage, _ = choose(of_text(backward), q, "bwd", None, diagonal is not None, Br=Br, Bc=Bc)
        deterministic = stage.can_be_deterministic
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # None for an output that the loss does not depend on
    ctx.options = diagonal, scale, backward, bool(deterministic), Br, Bc


def _differentiate(ctx, dO, dL):
    q, k, v, o, L = ctx.saved_tensors
    if dO is None:  # the loss depends on L alone
        dO = torch.zeros_like(o)
    gradients = torch.ops.flash.backward(q, k, v, o, L, dO, dL, *ctx.options)
    needed = (x if need else None for x, need in zip(gradients, ctx.needs_input_grad))
    return (*needed, *[None] * 9)


_forward_op.register_autograd(_differentiate, setup_context=_save)


def _refuse_second_derivative(ctx, *_):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


_backward_op.register_autograd(_refuse_second_derivative)


# ------------------------------------------------------------------------------------------ FLOPs
def _flops(q, k, diagonal: int | None, of_a_column: int) -> int:
    B, H, N_q, d = q
    return of_a_column * B * H * d * visible_pairs(N_q, k[2], diagonal)


@register_flop_formula(torch.ops.flash.forward)
def _forward_flops(q, k, v, diagonal, *_, out_shape=None, **__) -> int:
    """For FlopCounterMode: the two products, over the pairs of a query and a key that it sees."""
    return _flops(q, k, diagonal, FLOPS_PER_COLUMN["fwd"])


@register_flop_formula(torch.ops.flash.backward)
def _backward_flops(q, k, v, o, L, dO, dL, diagonal, *_, out_shape=None, **__) -> int:
    """The five products."""
    return _flops(q, k, diagonal, FLOPS_PER_COLUMN["bwd"])
