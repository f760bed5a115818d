"""flash.attention(): check, plan, launch.

What the check and the choice of stages come to is kept as a Call, by a key of everything that they looked at.
The next call with the same key looks at addresses only, and launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .ahead import build_variants
from .checks import (
    MAX_HEAD_DIM,
    as_bool,
    as_scale,
    check_dimensions,
    check_memory,
    check_tangent,
    check_tensors,
)
from .conversion import autocast, take_d_v
from .extras import Extras, as_float, as_probability, check_sink, draw_seed
from .inspection import current_report
from .launch import explain_loss, stage_files
from .loader import debug
from .masks import Mask, as_mask
from .masks import causal as of_causal
from .operators import Call, as_arguments, as_text, has_dispatch, is_plain, wanted_of
from .plan import (
    Keys,
    Visible,
    check_mask,
    choose,
    empty_output,
    keep,
    mask_file,
    mask_tensors,
    plan_for,
)
from .stage import Stage


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
              mask: Mask | Path | None = None, scale: float | None = None,
              stage: str | Path | Stage | None = None,
              backward: str | Path | Stage | None = None, return_lse: bool = False,
              deterministic: bool | None = None, dropout_p: float = 0.0,
              sink: torch.Tensor | None = None, **tiles: int):
    """softmax(scale * q k^T) v, by one stage of the ladder (FlashAttention-2, arXiv 2307.08691, section 2).

    Differentiable, once: the gradients of q, k and v come from a backward stage, for a loss of o, of L or of
    both. torch.compile, torch.export and torch.utils.checkpoint go through it, torch.func's transforms do
    not. Under torch.autocast, q, k and v are converted to its type, and o has it; or to float32, if a stage
    that you name does not take it, or none that takes it runs here.

    Args:
        q: (B, H, N_q, d), float32, float16 or bfloat16; d a multiple of 8 up to 256.
        k, v: (B, H_kv, N_k, d), H a multiple of H_kv: query head h reads head h // (H // H_kv). v may have
            d_v < d columns, a multiple of 8; o then has them, too. All three: same type and device; the last
            dimension contiguous, other strides any, but rows start at multiples of 16 bytes.
        causal: the last query sees the last key, as in FlashAttention: query i sees key j <= i + N_k - N_q.
        mask: one of flash.masks, or a combination of them; or the pathlib.Path of a file of your own, like
            those of stages/masks. With causal=True, what both see.
        scale: default 1 / sqrt(d).
        stage: a name (see `stages()`), the pathlib.Path of a .cuh file of your own, or None for the best that
            runs here.
        backward: the backward stage, likewise.
        return_lse: also return L.
        deterministic: True: only stages that give the same bits every run; with stage=None or backward=None
            the best of those. False: any. None: as torch.use_deterministic_algorithms() says at this call.
        dropout_p: the probability with which an element of softmax(...) becomes 0; the others are multiplied
            by 1 / (1 - dropout_p). Which ones is drawn by torch's generator of the device. L knows nothing of
            it.
        sink: (H,), a logit a head: e^sink is added to the denominator of each row, with no key and no value
            (Agarwal et al., gpt-oss, arXiv 2508.10925, section 2.2); of at most 2e38 in size, or -inf for
            none. Differentiable.
        tiles: Br and Bc, the rows of a tile of q, and of k and v; Br_bwd and Bc_bwd, those of the backward
            stage. Default: as the stage's header says, or smaller where the device has too little shared
            memory for that.
    Returns:
        o, or (o, L). o: like q. L: (B, H, N_q) float32, the natural log of the row's sum of
        exp(scaled, masked score), the sink's included. A query that sees no key has o = 0, L = -inf (or the
        sink), and no gradient.
    Raises:
        ValueError: for arguments that do not fit, saying which and what would. What concerns the backward
            pass is checked here, too, if a gradient is needed, or the call has an argument for it.
        RuntimeError: if the stage cannot be built or run here, for errors of the kernel, and for stages that
            torch.use_deterministic_algorithms() forbids.

    The gradients are like q, k and v. That of o is copied if its rows are not as q's must be.
    """
    if type(return_lse) is not bool:
        return_lse = as_bool("return_lse", return_lse)
    if mask is not None:
        mask, causal = together(mask, causal), False
    o, lse = attend(q, k, v, "causal", causal, mask, scale, stage, backward, deterministic, tiles,
                    dropout_p, sink)
    return (o, lse) if return_lse else o


def together(mask, causal: bool) -> Mask:
    """A mask and attention()'s causal."""
    mask = as_mask(mask)
    return of_causal() & mask if as_bool("causal", causal) else mask


# By the flag's name; "varlen": causal, of packed sequences
NAMES = {"causal": ("q", "k", "v"), "is_causal": ("query", "key", "value"), "varlen": ("q", "k", "v")}
TILES = ("Br", "Bc", "Br_bwd", "Bc_bwd")
_calls: dict[tuple, Call] = {}


def attend(q, k, v, flag: str, causal: bool, mask: Mask | None, scale: float | None, stage, backward,
           deterministic: bool | None, tiles: dict[str, int], dropout_p: float = 0.0,
           sink: torch.Tensor | None = None, sequences: tuple = (None, None)):
    """(o, L). flag: the name of the argument `causal`, which says how that is aligned. sequences:
    cu_seqlens_q and cu_seqlens_k of Extras."""
    if torch.compiler.is_compiling():
        return _traced(q, k, v, flag, causal, mask, scale, stage, backward, deterministic, tiles, dropout_p,
                       sink, sequences)
    if isinstance(stage, Path):
        stage = stage.absolute()
    if isinstance(backward, Path):
        backward = backward.absolute()
    key = _key(q, k, v, flag, causal, mask, scale, stage, backward, deterministic, tiles, dropout_p, sink,
               sequences)
    call = _calls.get(key) if key else None
    try:
        if call and call.is_current() and _have_memory(mask, sink, sequences):
            if call.dtype and q.data_ptr() and k.data_ptr() and v.data_ptr():
                q, k, v = q.to(call.dtype), k.to(call.dtype), v.to(call.dtype)
            of_mask = mask.bind(q, k).tensors if mask else ()
            at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
            if at_q and at_k and at_v and not (at_q | at_k | at_v) % 16:
                return call.run(q, k, v, draw_seed(dropout_p, q.device), as_float(sink), *sequences, *of_mask)
        return _check_and_run(key, q, k, v, flag, causal, mask, scale, stage, backward, deterministic, tiles,
                              dropout_p, sink, sequences)
    except torch.AcceleratorError as error:
        explain_loss(error)
        raise


def _key(q, k, v, flag, causal, mask, scale, stage, backward, deterministic, tiles, dropout_p,
         sink, sequences) -> tuple | None:
    """All that the check and the choice of stages depend on, but addresses; None where they must be anew."""
    if not (type(causal) is bool and (scale is None or type(scale) is float) and type(dropout_p) is float
            and (deterministic is None or type(deterministic) is bool) and current_report() is None):
        return None
    try:
        if (not is_plain(q, k, v) or q.is_neg() or k.is_neg() or v.is_neg()
                or torch.is_deterministic_algorithms_warn_only_enabled()):  # a warning in each call
            return None
        needs_gradients = torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad)
        if mask:
            tensors = [each.tensor for each in mask.arguments]
            if not is_plain(*tensors):
                return None
            needs_gradients |= torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if sink is not None:
            if not is_plain(sink):
                return None
            needs_gradients |= torch.is_grad_enabled() and sink.requires_grad
        if needs_gradients and (q.is_inference() or k.is_inference() or v.is_inference()
                                or mask and any(x.is_inference() for x in tensors)
                                or sink is not None and sink.is_inference()):
            return None
        device = q.device
        key: tuple = (flag, causal, scale, stage, backward, deterministic, debug(),
               q.shape, q.stride(), q.dtype, device, k.shape, k.stride(), k.dtype, k.device,
               v.shape, v.stride(), v.dtype, v.device,
               needs_gradients,
               torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
               torch.are_deterministic_algorithms_enabled())
        if mask:
            key += (mask.text, mask.ints, mask.floats,
                    *((x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors))
        if sequences[0] is not None:
            if not is_plain(*sequences):
                return None
            key += sequences[0].shape
        if dropout_p or sink is not None:
            key += (dropout_p, sink is not None and (sink.shape, sink.stride(), sink.dtype, sink.device,
                                                     sink.requires_grad))
        if tiles:
            if any(isinstance(size, torch.Tensor) for size in tiles.values()):  # it may change
                return None
            key += tuple((name, size, type(size)) for name, size in tiles.items())
        hash(key)
    except (AttributeError, RuntimeError, TypeError):  # of what is no tensor, or has no strides
        return None
    return key


def _tensors_beside(mask: Mask | None, sink, sequences: tuple) -> dict[str, torch.Tensor]:
    """Those of a call beside q, k and v, by the names that messages have for them."""
    named = {f"mask: {each.name}": each.tensor for each in mask.arguments} if mask else {}
    others = zip(("sink", "cu_seqlens_q", "cu_seqlens_k"), (sink, *sequences))
    return named | {name: x for name, x in others if x is not None}


def _have_memory(mask: Mask | None, sink, sequences: tuple) -> bool:
    """Whether those have memory, if there are any. (q, k and v: attend() looks at their addresses anyway.)"""
    if mask is None and sink is None and sequences[0] is None:
        return True
    return all(x.data_ptr() for x in _tensors_beside(mask, sink, sequences).values())


@dataclass(frozen=True)
class Checked:
    """A call's arguments, all of them right, and the stages that it takes.

    tensors: q, k and v as the stages get them: v padded to d columns for a stage that takes no others.
    columns: of v as it was. forward: the stage and its tiles. backward: likewise, and
    -DDETERMINISTIC; None if the call needs none and names none. converted: autocast's type if they were
    converted. operator: somebody waits for one.
    """

    tensors: list[torch.Tensor]
    columns: int
    visible: Visible
    scale: float
    deterministic: bool | None
    forward: tuple[Stage, dict[str, int]]
    backward: tuple[Stage, dict[str, int], bool] | None
    needs_gradients: bool
    converted: torch.dtype | None
    operator: bool
    extras: Extras


def checked(q, k, v, flag, causal, mask, scale, stage, backward, deterministic, tiles, dropout_p=0.0,
            sink=None, sequences=(None, None)) -> Checked:
    """Check the arguments, those of the backward pass, too; choose the stages. Errors: as of attention()."""
    names = NAMES[flag]
    check_dimensions(q, k, v, names)
    if torch._C._are_functorch_transforms_active():
        raise ValueError("flash.attention() does not take part in torch.func's transforms (grad, vmap, jvp "
                         "and so on): use torch.autograd.grad, and a batch dimension of q, k and v")
    if torch.jit.is_tracing():
        raise ValueError("flash.attention() cannot be traced by torch.jit.trace: use torch.export or "
                         "torch.compile")
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    dtype = q.dtype
    operator = has_dispatch(q, k, v)
    # before autocast reads it
    check_memory({name: x for name, x in zip(names, (q, k, v), strict=True) if is_plain(x)})
    q, k, v = autocast(q, k, v, stage, backward)
    check_tensors(q, k, v, names, traced=operator)
    check_sink(sink, q)
    named = _tensors_beside(mask, sink, sequences)
    check_memory({name: x for name, x in named.items() if is_plain(x)})   # before a conversion reads it
    visible = _visible(q, k, flag, causal, mask)
    if deterministic is not None:
        deterministic = as_bool("deterministic", deterministic)
    forward_tiles, backward_tiles = _split(tiles)
    scale = as_scale(scale, q.shape[3])
    dropout_p = as_probability(dropout_p)
    sink = as_float(sink)
    operator |= has_dispatch(*named.values())
    for name, x in named.items():
        check_tangent(name, x)
    extras = Extras(dropout_p, None, sink, *sequences)
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *named.values()))
    forward = choose(stage, q, "fwd", deterministic, visible, extras,
                     Keys(k, not needs_gradients), **forward_tiles)
    check_mask(forward[0], visible)
    for name, x in (*zip(names, (q, k, v), strict=True), *named.items()):
        if needs_gradients and x.is_inference():
            raise ValueError(f"{name} was made in inference mode, so autograd cannot keep it: pass "
                             f"{name.removeprefix('mask: ')}.clone()")
    chosen = None
    if needs_gradients or backward is not None or backward_tiles:
        backward, sizes = choose(backward, q, "bwd", deterministic, visible, extras, Keys(k),
                                 **backward_tiles)
        check_mask(backward, visible)
        # as torch.use_deterministic_algorithms() says now: it may not in the backward pass
        wanted = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        chosen = backward, sizes, wanted and backward.can_be_deterministic
    columns = v.shape[3]
    if columns < q.shape[3] and not all("d_v" in x[0].takes for x in (forward, chosen) if x):
        v = torch.nn.functional.pad(v, (0, q.shape[3] - columns))
    return Checked([q, k, v], columns, visible, scale, deterministic, forward, chosen, needs_gradients,
                   q.dtype if q.dtype != dtype else None, operator,
                   extras._replace(seed=draw_seed(dropout_p, q.device)))


def _check_and_run(key: tuple | None, *arguments):
    """(o, L), by a Call that is kept for the key. arguments: of checked()."""
    found = checked(*arguments)
    q, k, v = found.tensors
    extras = found.extras
    stage, tiles = found.forward
    backward, backward_tiles, deterministic = found.backward or (None, {}, False)
    if found.operator:
        o, lse = torch.ops.flash.forward(
            q, k, v, *as_arguments(found.visible, extras), found.scale, as_text(stage),
            as_text(backward, q.dtype), found.deterministic, tiles["Br"], tiles["Bc"],
            backward_tiles.get("Br"), backward_tiles.get("Bc"),
            *wanted_of(found.visible))
        return _narrowed(o, v, found.columns), lse
    later = backward if found.needs_gradients else None
    mask = mask_file(found.visible)
    if q.device.type == "cuda":
        causal = isinstance(found.visible, int)
        options = (mask, v.shape[3], extras.dropout_p > 0, extras.sink is not None,
                   extras.cu_seqlens_q is not None)
        build_variants(stage, q.dtype, q.shape[3], causal, q.device, False, found.scale < 0, *options)
        if later:
            dtype = q.dtype if q.dtype in later.dtypes else later.dtypes[0]
            build_variants(later, dtype, q.shape[3], causal, q.device, deterministic, found.scale < 0,
                           *options)
    o = empty_output(q, v, "meta")  # its layout, without memory
    plan = plan_for(stage, tiles, False, found.visible, found.scale,
                    {"Q": q, "K": k, "V": v, "O": o, **extras.tensors}, extras.dropout_p)
    call = Call(plan, found.visible, found.scale, found.backward if later else None,
                stage_files(later, *[mask] if mask else []) if later else None, found.converted,
                extras.dropout_p)
    if key and found.columns == v.shape[3]:
        keep(_calls, key, call)
    o, lse = call.run(q, k, v, *extras[1:], *mask_tensors(found.visible))
    return _narrowed(o, v, found.columns), lse


def _traced(q, k, v, flag, causal, mask, scale, stage, backward, deterministic, tiles, dropout_p,
            sink, sequences):
    """The same under torch.compile and torch.export: the operator checks what cannot be traced."""
    q, k, v = autocast(q, k, v, stage, backward)
    check_dimensions(q, k, v, NAMES[flag])
    forward_tiles, backward_tiles = _split(tiles)
    if deterministic is not None:
        deterministic = as_bool("deterministic", deterministic)
    visible = _visible(q, k, flag, causal, mask)
    dropout_p = as_probability(dropout_p)
    check_sink(sink, q)
    extras = Extras(dropout_p, draw_seed(dropout_p, q.device), as_float(sink), *sequences)
    columns = v.shape[3]
    # d as a constant: a symbol is none, and int() leaves it one
    d = next((d for d in range(8, MAX_HEAD_DIM + 1, 8) if q.shape[3] == d), MAX_HEAD_DIM)
    if columns < q.shape[3] and not take_d_v(q.device.type, q.dtype, d, as_text(stage), as_text(backward),
                                             deterministic):
        v = torch.nn.functional.pad(v, (0, q.shape[3] - columns))
    o, lse = torch.ops.flash.forward(
        q, k, v, *as_arguments(visible, extras), scale, as_text(stage), as_text(backward), deterministic,
        forward_tiles.get("Br"), forward_tiles.get("Bc"), backward_tiles.get("Br"), backward_tiles.get("Bc"),
        *wanted_of(visible))
    return _narrowed(o, v, columns), lse


def _narrowed(o: torch.Tensor, v: torch.Tensor, columns: int) -> torch.Tensor:
    """Without the columns that v was padded with."""
    return o if columns == v.shape[3] else o[..., :columns]


def _visible(q, k, flag: str, causal: bool, mask: Mask | None) -> Visible:
    """Which pairs of a query and a key count."""
    if mask is not None:
        return mask.bind(q, k)
    if not as_bool(flag, causal):
        return None
    return k.shape[2] - q.shape[2] if flag == "causal" else 0


def _split(tiles: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """The forward stage's and the backward stage's."""
    for name in tiles:
        if name not in TILES:
            raise ValueError(f"{name}: attention() has no such argument; "
                             "tile sizes are Br, Bc, Br_bwd, Bc_bwd")
    return ({name: size for name, size in tiles.items() if not name.endswith("_bwd")},
            {name[:-4]: size for name, size in tiles.items() if name.endswith("_bwd")})
