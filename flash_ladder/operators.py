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

from .bound import Bound
from .checks import check_tangent, check_tensors
from .extras import NO_EXTRAS, Extras
from .flops import flops_of_pair, visible_pairs
from .plan import (
    Keys,
    Plan,
    Visible,
    backward,
    choose,
    empty_like,
    empty_output,
    forward,
    forward_outputs,
    run,
)
from .sequences import check_sequences
from .stage import Stage

_PLAIN = (torch.Tensor, torch.nn.Parameter)
NO_SECOND_DERIVATIVE = (
    "flash.attention() has no second derivative: for one, use "
    "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")


class Call:
    """What eager calls of attention() with certain arguments and layouts share.

    plan: the forward stage's. backward: the stage for gradients, its tiles and -DDETERMINISTIC, or None.
    dtype: that autocast asks for, or None. dropout_p: 0: none.
    """

    __slots__ = ("plan", "visible", "scale", "backward", "files", "dtype", "dropout_p")

    def __init__(self, plan: Plan, visible: Visible, scale: float, backward, files, dtype, dropout_p: float):
        self.dropout_p = dropout_p
        self.plan, self.scale, self.backward, self.files, self.dtype = plan, scale, backward, files, dtype
        self.visible = visible.with_tensors(()) if isinstance(visible, Bound) else visible

    def is_current(self) -> bool:
        return self.plan.is_current() and (self.files is None or self.files.are_unchanged())

    def run(self, q, k, v, *others) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, L), differentiable if it has a backward stage. others: the tensors of Extras, then the
        mask's."""
        if self.backward:
            return _Attention.apply(q, k, v, self, *others)
        return self.forward(q, k, v, *others)

    def forward(self, q, k, v, seed, sink, cu_seqlens_q, cu_seqlens_k, *of_mask):
        o, lse = forward_outputs(q, v)
        extras = Extras(self.dropout_p, seed, sink, cu_seqlens_q, cu_seqlens_k)
        run(self.plan, {"Q": q, "K": k, "V": v, "O": o, "L": lse, **extras.tensors}, *of_mask)
        return o, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call, *others):
        ctx.call = call
        ctx.set_materialize_grads(False)  # None for an output that the loss does not depend on
        o, lse = call.forward(q, k, v, *others)
        ctx.save_for_backward(q, k, v, o, lse, *others)
        return o, lse

    @staticmethod
    def backward(ctx, dO, dL):
        q, k, v, o, lse, seed, sink, cu_seqlens_q, cu_seqlens_k, *of_mask = ctx.saved_tensors
        if dO is None:  # the loss depends on L alone
            dO = torch.zeros_like(o)
        call = ctx.call
        extras = Extras(call.dropout_p, seed, sink, cu_seqlens_q, cu_seqlens_k)
        stage, tiles, deterministic = call.backward
        visible = call.visible.with_tensors(of_mask) if of_mask else call.visible
        if torch.is_grad_enabled() or not is_plain(q, k, v, o, lse, dO):
            *gradients, others = torch.ops.flash.backward(
                q, k, v, o, lse, dO, dL, *as_arguments(visible, extras), call.scale, as_text(stage, q.dtype),
                deterministic, tiles["Br"], tiles["Bc"], *wanted_of(visible))
            by_sink, by_mask = spread(others, sink, wanted_of(visible)[1])
        else:
            *gradients, by_sink, by_mask = split(backward(
                q, k, v, o, lse, dO, dL, visible, call.scale, stage, tiles, deterministic, extras), sink)
        gradients = (*gradients, None, None, by_sink, None, None, *by_mask)
        return tuple(x if need else None for x, need in zip(gradients, ctx.needs_input_grad))


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
# A stage is given as text, its name or its file's path; None as in attention(). Which pairs count: diagonal,
# or a mask's text and arguments, or neither.
_VISIBLE = "SymInt? diagonal, str? mask, Tensor[] mask_tensors, SymInt[] ints, float[] floats"
_EXTRAS = "float dropout_p, Tensor? seed, Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
OPTIONS = f"{_VISIBLE}, {_EXTRAS}, float? scale, str? stage"


def as_arguments(visible: Visible, extras: Extras = NO_EXTRAS) -> tuple:
    """Those of _VISIBLE and _EXTRAS."""
    if isinstance(visible, Bound):
        return (None, visible.text, list(visible.tensors), list(visible.ints), list(visible.floats), *extras)
    return visible, None, [], [], [], *extras


def visible_of(diagonal, mask, tensors, ints, floats, kinds=(), wanted=()) -> Visible:
    if mask is None:
        return diagonal
    names = tuple(f"tensor_{n}" for n in range(len(tensors)))
    return Bound(mask, tuple(tensors), tuple(ints), tuple(floats), tuple(kinds), tuple(wanted), names)


def wanted_of(visible: Visible) -> tuple[list[str], list[bool]]:
    """Of which kind the gradients of the mask's tensors are, and which are wanted."""
    return (list(visible.kinds), list(visible.wanted)) if isinstance(visible, Bound) else ([], [])


def split(gradients: tuple, sink: torch.Tensor | None) -> tuple:
    """(dq, dk, dv, the sink's or None, those of the mask's tensors), of what backward() returns."""
    dq, dk, dv, *others = gradients
    return dq, dk, dv, others.pop(0) if sink is not None else None, others


def spread(others: list[torch.Tensor], sink: torch.Tensor | None, wanted: list[bool]) -> tuple:
    """(the sink's or None, those of the mask's tensors): an operator returns those that there are."""
    waiting = iter(others)
    by_sink = next(waiting) if sink is not None else None
    return by_sink, [next(waiting) if want else None for want in wanted]


@torch.library.custom_op(
    "flash::forward", mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {OPTIONS}, str? backward, bool? deterministic, int? Br, "
           "int? Bc, int? Br_bwd, int? Bc_bwd, str[] kinds, bool[] wanted) -> (Tensor o, Tensor L)")
def _forward_op(q, k, v, diagonal, mask, mask_tensors, ints, floats, dropout_p, seed, sink, cu_seqlens_q,
                cu_seqlens_k, scale, stage, backward, deterministic, Br, Bc, Br_bwd, Bc_bwd, kinds, wanted):
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    check_tensors(q, k, v)
    check_sequences(cu_seqlens_q, cu_seqlens_k, q, k)
    extras = Extras(dropout_p, seed, sink, cu_seqlens_q, cu_seqlens_k)
    visible = visible_of(diagonal, mask, mask_tensors, ints, floats)
    chosen = choose(of_text(stage), q, "fwd", deterministic, visible, extras, Keys(k), Br=Br,
                    Bc=Bc)
    return forward(q, k, v, visible, scale, *chosen, extras)


@_forward_op.register_fake
def _(q, k, v, diagonal, mask, mask_tensors, ints, floats, dropout_p, seed, sink, cu_seqlens_q, cu_seqlens_k,
      scale, stage, backward, deterministic, Br, Bc, Br_bwd, Bc_bwd, kinds, wanted):
    check_tensors(q, k, v, traced=True)
    check_sequences(cu_seqlens_q, cu_seqlens_k, q, k, traced=True)
    extras = Extras(dropout_p, seed, sink, cu_seqlens_q, cu_seqlens_k)
    choose(of_text(stage), q, "fwd", deterministic, diagonal, extras, Br=Br, Bc=Bc)
    inputs = q, k, v, *mask_tensors, *(() if sink is None else (sink,))
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if gradients or (backward, Br_bwd, Bc_bwd) != (None, None, None):
        choose(of_text(backward), q, "bwd", deterministic, diagonal, extras, Br=Br_bwd, Bc=Bc_bwd)
    return empty_output(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "flash::backward", mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor L, Tensor dO, Tensor? dL, {OPTIONS}, "
           "bool deterministic, int? Br, int? Bc, str[] kinds, bool[] wanted) -> "
           "(Tensor dq, Tensor dk, Tensor dv, Tensor[] others)")
def _backward_op(q, k, v, o, L, dO, dL, diagonal, mask, mask_tensors, ints, floats, dropout_p, seed, sink,
                 cu_seqlens_q, cu_seqlens_k, scale, stage, deterministic, Br, Bc, kinds, wanted):
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    check_tensors(q, k, v)
    check_sequences(cu_seqlens_q, cu_seqlens_k, q, k)
    rows, output = (q.shape[:3], torch.float32), ((*q.shape[:3], v.shape[3]), q.dtype)
    for name, x, (shape, dtype) in (("o", o, output), ("dO", dO, output),
                                    ("L", L, rows), ("dL", dL, rows)):
        if x is None:
            continue
        if (x.shape, x.dtype, x.device) != (shape, dtype, q.device):
            raise ValueError(f"{name} must have shape {tuple(shape)} and type {dtype} and be on {q.device}; "
                             f"it has {tuple(x.shape)} and {x.dtype} and is on {x.device}")
        check_tangent(name, x)
    extras = Extras(dropout_p, seed, sink, cu_seqlens_q, cu_seqlens_k)
    visible = visible_of(diagonal, mask, mask_tensors, ints, floats, kinds, wanted)
    chosen = choose(of_text(stage), q, "bwd", deterministic, visible, extras, Br=Br, Bc=Bc)
    dq, dk, dv, *others = backward(q, k, v, o, L, dO, dL, visible, scale, *chosen, deterministic, extras)
    return dq, dk, dv, [x for x in others if x is not None]


@_backward_op.register_fake
def _(q, k, v, o, L, dO, dL, diagonal, mask, mask_tensors, ints, floats, dropout_p, seed, sink, cu_seqlens_q,
      cu_seqlens_k, scale, stage, deterministic, Br, Bc, kinds, wanted):
    check_tensors(q, k, v, traced=True)
    choose(of_text(stage), q, "bwd", deterministic, diagonal,
           Extras(dropout_p, seed, sink, cu_seqlens_q, cu_seqlens_k), Br=Br, Bc=Bc)
    others = [x.new_empty(x.shape) for x in (*(() if sink is None else (sink,)),
                                             *(x for x, needed in zip(mask_tensors, wanted) if needed))]
    return empty_like(q), empty_like(k), empty_like(v), others


def _save(ctx, inputs, output) -> None:
    (q, k, v, diagonal, mask, mask_tensors, ints, floats, dropout_p, seed, sink, cu_seqlens_q, cu_seqlens_k,
     scale, _, backward, deterministic, _, _, Br, Bc, kinds, wanted) = inputs
    if deterministic is None and torch.are_deterministic_algorithms_enabled():  # it may not be by then
        extras = Extras(dropout_p, seed, sink, cu_seqlens_q, cu_seqlens_k)
        stage, _ = choose(of_text(backward), q, "bwd", None, diagonal, extras, Br=Br, Bc=Bc)
        deterministic = stage.can_be_deterministic
    ctx.save_for_backward(q, k, v, *output, seed, sink, cu_seqlens_q, cu_seqlens_k, *mask_tensors)
    ctx.set_materialize_grads(False)  # None for an output that the loss does not depend on
    ctx.visible, ctx.dropout_p = (diagonal, mask, ints, floats), dropout_p
    ctx.options = scale, backward, bool(deterministic), Br, Bc, kinds, wanted


def _differentiate(ctx, dO, dL):
    q, k, v, o, L, seed, sink, cu_seqlens_q, cu_seqlens_k, *of_mask = ctx.saved_tensors
    if dO is None:  # the loss depends on L alone
        dO = torch.zeros_like(o)
    diagonal, mask, ints, floats = ctx.visible
    *gradients, others = torch.ops.flash.backward(q, k, v, o, L, dO, dL, diagonal, mask, of_mask, ints,
                                                  floats, ctx.dropout_p, seed, sink, cu_seqlens_q,
                                                  cu_seqlens_k, *ctx.options)
    needed = (x if need else None for x, need in zip(gradients, ctx.needs_input_grad))
    wanted = ctx.options[-1]
    by_sink, by_mask = spread(others, sink, wanted)
    by_tensors = by_mask or [None] * len(of_mask)
    # An empty list may be one of tensors, so PyTorch wants a list for it
    of_lists: list[list | None] = [None if x else [] for x in (ints, floats, ctx.options[-2], wanted)]
    return (*needed, None, None, by_tensors, *of_lists[:2], None, None, by_sink, *[None] * 10, *of_lists[2:])


_forward_op.register_autograd(_differentiate, setup_context=_save)


def _refuse_second_derivative(ctx, *_):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


_backward_op.register_autograd(_refuse_second_derivative)


# ------------------------------------------------------------------------------------------ FLOPs
def _flops(direction: str, q, k, v, diagonal: int | None) -> int:
    B, H, N_q, d = q
    return flops_of_pair(direction, d, v[3]) * B * H * visible_pairs(N_q, k[2], diagonal)


@register_flop_formula(torch.ops.flash.forward)
def _forward_flops(q, k, v, diagonal, *_, out_shape=None, **__) -> int:
    """For FlopCounterMode: the two products, over the pairs of a query and a key that it sees; with a mask,
    over all pairs."""
    return _flops("fwd", q, k, v, diagonal)


@register_flop_formula(torch.ops.flash.backward)
def _backward_flops(q, k, v, o, L, dO, dL, diagonal, *_, out_shape=None, **__) -> int:
    """The five products."""
    return _flops("bwd", q, k, v, diagonal)
