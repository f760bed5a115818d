"""A plan: what a call of one stage needs to know, worked out once for tensors of one layout.

A call goes down once, check -> plan -> launch. The check and the choice of a stage are `choose`'s and
checks.py's, a plan is what comes of them, and `Plan.launch` fills in addresses and starts the kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from .bound import Bound, fill_mask, gradients_of
from .bound import strides_of as mask_strides_of
from .checks import aligned, as_scale, materialized
from .devices import multiprocessors, shared_memory_per_block
from .extras import NO_EXTRAS, Cache, Extras, check_takes, needs_of
from .flops import flops_of_pair, visible_pairs
from .inspection import current_report
from .launch import Library, MaskTensor, Tensor, definitions, explain_loss, latest, load, params_of
from .loader import debug
from .registry import find_stage, stages
from .stage import MANY, TENSORS, Stage
from .tiles import tiles_of

OUTPUTS = {"fwd": ("O", "L"), "bwd": ("dQ", "dK", "dV", "dsink")}
# Contiguous: an address without strides
VECTORS = ("L", "dL", "sink", "seed", "seqlens_k", "block_table", "cu_seqlens_q", "cu_seqlens_k", "dsink")
MOST_PLANS = 4096                        # kept; the oldest goes first

Visible = int | Bound | None             # query i sees key j <= i + this; what a mask says; all of them


class Keys(NamedTuple):
    """What stages that are for some calls only look at.

    Attributes:
        k: (B, H_kv, N_k, d); of a cache in pages (pages, H_kv, page_size, d).
        alone: nobody needs gradients, or it is about the backward stage.
        cache: what k is, or None.
    """

    k: torch.Tensor
    alone: bool = True
    cache: Cache | None = None

    @property
    def rows(self) -> int:
        """N_k."""
        return self.cache.N_k(self.k) if self.cache else self.k.shape[2]

    def sizes(self, q: torch.Tensor, visible: Visible) -> dict[str, int] | None:
        """Those of Stage.is_for(), if they are known."""
        B, H, N_q, d = q.shape
        sizes = dict(B=B, H=H, H_kv=self.k.shape[1], N_q=N_q, N_k=self.rows, d=d, window=window_of(visible),
                     gradients=not self.alone, masked=visible is not None, causal=isinstance(visible, int))
        return sizes if all(isinstance(size, int) for size in sizes.values()) else None


def choose(stage, q: torch.Tensor, direction: str = "fwd", deterministic: bool | None = False,
           visible: Visible = None, extras: Extras = NO_EXTRAS, keys: Keys | None = None,
           **tiles: int | None) -> tuple[Stage, dict[str, int]]:
    """The stage that a call asks for, and its tile sizes; checked. keys: None: they are not known, and
    without a name only a stage that is for any call is taken."""
    B, H, N_q, d = *q.shape[:3], int(q.shape[3])
    needs = needs_of(extras, keys is not None and keys.cache is not None, by_head(visible))
    stage = find_or_convert(stage, q.dtype, q.device, direction, deterministic, d,
                            keys.sizes(q, visible) if keys else None, needs)
    check_takes(stage, needs)
    chosen = {name: size for name, size in tiles.items() if size is not None}
    packed, N_k = (N_q * H // keys.k.shape[1], keys.rows) if keys else (1, 1)
    rows, packed, N_k = (size if isinstance(size, int) else unknown  # of dynamic shapes: the operator knows
                         for size, unknown in ((B * H * N_q, MANY), (packed, 1), (N_k, 1)))
    return stage, stage.tiles(d, shared_memory_per_block(q.device), rows,
                              isinstance(visible, int), window_of(visible), packed, N_k, **chosen)


def by_head(visible: Visible) -> bool:
    """Whether a mask differs from head to head."""
    return isinstance(visible, Bound) and visible.extents[1] > 1


def find_or_convert(stage, dtype: torch.dtype, device: torch.device, direction: str,
                    deterministic: bool | None = False, d: int | None = None,
                    sizes: dict[str, int] | None = None, needs: tuple[str, ...] = ()) -> Stage:
    """find_stage(); but where no backward stage of a 16-bit type runs, one that takes float32: the gradients
    are then those of converted tensors. Before sm_80, such as on a T4."""
    if direction == "bwd" and stage is None and dtype in (torch.float16, torch.bfloat16):
        known = stages("bwd")
        if (not any(s.available(device, dtype) for s in known if dtype in s.dtypes)
                and any(s.available(device, torch.float32) for s in known)):
            stage = find_stage(None, torch.float32, device, direction, deterministic, d, None, needs)
            _warn_of_conversion(dtype, str(device), stage.name)
            return stage
    return find_stage(stage, dtype, device, direction, deterministic, d, sizes, needs)


@functools.cache  # once
def _warn_of_conversion(dtype: torch.dtype, device: str, name: str) -> None:
    warnings.warn(f"no backward stage of {dtype} runs on {device}, as they need sm_80: the gradients come "
                  f"from stage {name!r}, over tensors converted to float32. That takes their memory twice "
                  "more, and the time of a float32 backward pass", stacklevel=2)


class Plan:
    """Of a stage, for tensors of certain shapes, strides and types on a device.

    Args:
        tensors: by their names in FwdParams or BwdParams; None for one that is left out.
        visible: which pairs of a query and a key count.
        scale: as as_scale gave it.
        dropout_p: 0: none.
    """

    __slots__ = ("stage", "library", "device", "visible", "_at", "_template", "_words", "_workspace_floats",
                 "_tiles", "_struct")

    def __init__(self, stage: Stage, tiles: dict[str, int], deterministic: bool, visible: Visible,
                 scale: float, tensors: dict[str, torch.Tensor | None], dropout_p: float = 0.0,
                 cache: Cache | None = None):
        q, k, v = tensors["Q"], tensors["K"], tensors["V"]
        assert q is not None and k is not None and v is not None
        starts = tensors.get("cu_seqlens_q")
        struct = self._struct = params_of(stage.direction, starts is not None)
        diagonal = visible if isinstance(visible, int) else 0
        params = struct(B=q.shape[0], H=q.shape[1], H_kv=k.shape[1], N_q=q.shape[2], N_k=k.shape[2],
                        diagonal=diagonal, scale=scale, dropout=dropout_p)
        if starts is not None:  # whole tiles of all sequences: stages/common/sequences.cuh
            params.sequences, params.total_q, params.total_k = len(starts) - 1, q.shape[2], k.shape[2]
            params.N_q, params.N_k = ((N // tiles[name] + params.sequences) * tiles[name]
                                      for N, name in ((q.shape[2], "Br"), (k.shape[2], "Bc")))
        if cache:
            params.N_k, params.pages = cache.N_k(k), cache.pages
            params.mask.diagonals = 1  # of causal
        if stage.direction == "fwd":
            sizes = {name: getattr(params, name) for name in ("B", "H", "H_kv", "N_q", "N_k")}
            params.splits = (cache and cache.splits or stage.number_of_splits(
                sizes | {"d": q.shape[3]}, tiles, multiprocessors(q.device)))
        params.mask.B = params.mask.H = 1
        params.mask.ints[0] = diagonal
        for name, x in tensors.items():
            if x is not None and name not in VECTORS:
                setattr(params, name, Tensor(None, *strides_of(x)))
        self.stage, self.device, self._tiles = stage, q.device, tiles
        self.visible = visible.with_tensors(()) if isinstance(visible, Bound) else visible
        at = [getattr(struct, name).offset if hasattr(struct, name) else 0  # of what is None
              for name in TENSORS[stage.direction]]
        if isinstance(visible, Bound):
            at += fill_mask(params.mask, visible, struct.mask.offset)
        macros = definitions(stage, q.dtype, q.shape[3], isinstance(visible, int), tiles, deterministic,
                             scale < 0, mask_file(visible), v.shape[3], dropout_p > 0,
                             tensors.get("sink") is not None, cache is not None,
                             k.shape[2] if cache and cache.pages else 0, starts is not None)
        self.library: Library = load(stage, macros, q.device)
        with torch.cuda.device(q.device) if q.device.type == "cuda" else contextlib.nullcontext():
            self._workspace_floats = -(-self.library.workspace_bytes(ctypes.byref(params)) // 4)
        self._template = bytes(params)
        self._words = ctypes.c_uint64 * (len(self._template) // 8)  # a Tensor begins with its address
        self._at = [offset // 8 for offset in (*at, struct.workspace.offset)]

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory of a launch."""
        return 4 * self._workspace_floats

    def is_current(self) -> bool:
        """Whether no file of the stage has changed."""
        return self.library.files.are_unchanged()

    def launch(self, *tensors: torch.Tensor | None) -> None:
        """Run it on the current stream, over tensors in the order of TENSORS, of the plan's layout.

        Raises:
            RuntimeError: for an error of the launch, or, in the simulator, of the kernel.
        """
        words = self._words.from_buffer_copy(self._template)  # a copy: other threads may use the plan
        for at, x in zip(self._at, tensors):
            if x is not None:
                words[at] = x.data_ptr()
        device = self.device
        if device.type == "cuda":
            latest[:] = (self.stage,)
        if self._workspace_floats:
            workspace = torch.empty(self._workspace_floats, dtype=torch.float32, device=device)
            words[self._at[-1]] = workspace.data_ptr()
        if device.type == "cpu":
            error = self.library.run(words, None)
        elif device.index == torch.cuda.current_device():
            error = self.library.run(words, torch._C._cuda_getCurrentRawStream(device.index))
        else:
            with torch.cuda.device(device):
                error = self.library.run(words, torch._C._cuda_getCurrentRawStream(device.index))
        if error is not None:
            raise self.library.failure(error)

    def inspect(self, report, *tensors: torch.Tensor | None) -> None:
        """launch(), under flash.inspect(): the kernel works on copies between red zones."""
        direction, device = self.stage.direction, self.device
        if device.type != "cpu":
            raise RuntimeError("inspect() observes the simulator, not a GPU: pass CPU tensors (q.cpu(), ...)")
        named = {name: x for name, x in zip(TENSORS[direction], tensors) if x is not None}
        inputs = {name: x for name, x in named.items() if name not in OUTPUTS[direction]}
        outputs = {name: named[name] for name in OUTPUTS[direction] if name in named}
        outputs[self.stage.workspace] = torch.empty(self._workspace_floats, dtype=torch.float32,
                                                    device=device)
        params = self._struct.from_buffer_copy(self._template)
        own = dict(zip(self._mask_names(), tensors[len(TENSORS[direction]):]))
        gradient = own.pop(GRADIENT, None)
        if gradient is not None:
            outputs[GRADIENT] = gradient.flatten(0, 1)  # of three dimensions: without red zones between heads
        with report.guarded(inputs | own, outputs) as at:
            for name in named:
                address = at[name].data_ptr()
                setattr(params, name, address if name in VECTORS else Tensor(address, *strides_of(at[name])))
            for n, name in enumerate(own):
                params.mask.tensors[n] = MaskTensor(at[name].data_ptr(), *mask_strides_of(at[name]))
            if gradient is not None:
                at[GRADIENT].zero_()
                params.mask.gradient = at[GRADIENT].data_ptr()
            params.workspace = at[self.stage.workspace].data_ptr()
            error = self.library.run(ctypes.byref(params), None)
        if error is not None:
            raise self.library.failure(error)
        q, k = named["Q"], named["K"]
        (B, H, N_q, d), N_k = q.shape, k.shape[2]
        flops = flops_of_pair(direction, d, named["V"].shape[3]) * B * H
        if "seqlens_k" in named:  # of a mask, all keys that there are
            causal = isinstance(self.visible, int)
            report.flops_without_mask += flops // B * sum(
                visible_pairs(N_q, n, n - N_q if causal else None) for n in named["seqlens_k"].tolist())
        elif isinstance(self.visible, Bound):
            bound = self.visible.with_tensors([x.clone() for x in own.values()])
            report.add_masked(str(self.stage), flops * N_q * N_k, functools.partial(
                tiles_of, bound, N_q, N_k, self._tiles["Br"], self._tiles["Bc"], device, q.dtype))
        elif "cu_seqlens_q" in named:
            lengths = (named[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
            report.flops_without_mask += flops * sum(
                visible_pairs(N_q, N_k, None if self.visible is None else N_k - N_q)
                for N_q, N_k in zip(*lengths))
        else:
            report.flops_without_mask += flops * visible_pairs(N_q, N_k, self.visible)

    def _mask_names(self) -> list[str]:
        if not isinstance(self.visible, Bound):
            return []
        names = [f"mask.{name}" for name in self.visible.names]
        return [*(f"{name}_{n}" if name in names[:n] else name for n, name in enumerate(names)), GRADIENT]


GRADIENT = "dMask"


def strides_of(x: torch.Tensor) -> list[int]:
    """Of B, H and N. In a dimension of size 1 any stride is legal, such as 1; a row's length stands for it:
    copies of rows past the last one read nothing, but need an address that is aligned. In that of batch
    elements 0: packed sequences have several, in one."""
    B, H, N = (x.shape[3] if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()))
    return [0 if x.shape[0] == 1 else B, H, N]


_plans: dict[tuple, Plan] = {}


def plan_for(stage: Stage, tiles: dict[str, int], deterministic: bool, visible: Visible, scale: float,
             tensors: dict[str, torch.Tensor | None], dropout_p: float = 0.0,
             cache: Cache | None = None) -> Plan:
    """The plan of a call, out of the cache or made; compiled if it is not, or no longer as its files are.

    tensors: by name, of which just the layouts count; of VECTORS, whether there is a sink: the others may be
    left out.
    """
    q, report = tensors["Q"], current_report()
    key = (stage, *tiles.values(), deterministic,
           visible.layout if isinstance(visible, Bound) else visible, scale, q.dtype, q.device, debug(),
           report and report.runtime, dropout_p, tensors.get("sink") is not None, cache,
           None if (starts := tensors.get("cu_seqlens_q")) is None else len(starts),
           *((x.shape, x.stride()) for name, x in tensors.items() if name not in VECTORS))
    plan = _plans.get(key)
    if plan is None or not plan.is_current():
        plan = Plan(stage, tiles, deterministic, visible, scale, tensors, dropout_p, cache)
        keep(_plans, key, plan)
    return plan


def keep(cache: dict, key: tuple, value) -> None:
    """Put it into a cache of bounded size."""
    if len(cache) >= MOST_PLANS:
        with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread was quicker
            del cache[next(iter(cache))]
    cache[key] = value


def forward(q, k, v, visible: Visible, scale: float | None, stage: Stage, tiles: dict[str, int],
            extras: Extras = NO_EXTRAS, cache: Cache | None = None, **of_cache: torch.Tensor | None):
    """(o, L), for tensors that check_tensors passed. of_cache: seqlens_k and block_table."""
    o, lse = forward_outputs(q, v)
    tensors = {"Q": q, "K": k, "V": v, "O": o, "L": lse, **extras.tensors, **of_cache}
    run(plan_for(stage, tiles, False, visible, as_scale(scale, q.shape[3]), tensors, extras.dropout_p, cache),
        tensors, *mask_tensors(visible))
    return o, lse


def check_mask(stage: Stage, visible: Visible) -> None:
    """Raise ValueError for a mask and a stage that takes none."""
    if isinstance(visible, Bound) and not stage.takes_masks:
        raise ValueError(f"{stage} takes no mask but `causal`: flash2, recompute and what grew from them "
                         "take any")


def mask_file(visible: Visible) -> Path | None:
    return visible.file if isinstance(visible, Bound) else None


def window_of(visible: Visible) -> int:
    """The keys that a row sees at most, as far as the mask's own numbers say."""
    return visible.window if isinstance(visible, Bound) else MANY


def mask_tensors(visible: Visible) -> tuple[torch.Tensor, ...]:
    return visible.tensors if isinstance(visible, Bound) else ()


def names_of_mask(visible: Visible) -> tuple[str, ...]:
    return visible.names if isinstance(visible, Bound) else ()


def forward_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """O and L, to be filled."""
    return empty_output(q, v), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def empty_like(x: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """PyTorch's, but where that would take a row apart, as it may if x is expanded: contiguous."""
    like = torch.empty_like(x) if device is None else torch.empty_like(x, device=device)
    return like if like.stride(3) == 1 else torch.empty(x.shape, dtype=x.dtype, device=device or x.device)


def empty_output(q: torch.Tensor, v: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """O: of q's layout, with v's columns. device: "meta" for the layout without memory; default: q's."""
    if v.shape[3] == q.shape[3]:
        return empty_like(q, device)      # of a tensor on "meta" PyTorch would import sympy to make one
    on = q.device if device is None else device
    B, H, N, d_v = *q.shape[:3], v.shape[3]
    if q.stride(1) < q.stride(2):                            # (B, N, H, d), seen the other way
        return torch.empty((B, N, H, d_v), dtype=q.dtype, device=on).transpose(1, 2)
    return torch.empty((B, H, N, d_v), dtype=q.dtype, device=on)


def backward(q, k, v, o, lse, do, dlse, visible: Visible, scale: float | None, stage: Stage,
             tiles: dict[str, int], deterministic: bool, extras: Extras = NO_EXTRAS):
    """(dq, dk, dv, *others), from what forward was given and gave. dlse: None for zeros. deterministic: the
    macro. others: the sink's, if there is one; then, of a mask with gradients, one for each of its tensors.

    If the stage does not take their type, by way of float32: see find_or_convert().
    """
    if q.dtype not in stage.dtypes:
        wide = stage.dtypes[0]
        if isinstance(visible, Bound):
            kinds = zip(visible.tensors, visible.kinds)
            visible = visible.with_tensors([x.to(wide) if kind == "elements" else x for x, kind in kinds])
        gradients = backward(q.to(wide), k.to(wide), v.to(wide), o.to(wide), lse, do.to(wide), dlse, visible,
                             scale, stage, tiles, deterministic, extras)
        return (*(x.to(q.dtype) for x in gradients[:3]),
                *(x if x is None or x.dim() == 1 else x.to(q.dtype) for x in gradients[3:]))
    tensors = {"Q": q, "K": k, "V": v, "O": aligned(o), "dO": aligned(do), "L": lse.contiguous(),
               "dL": None if dlse is None else materialized(dlse.contiguous()), **extras.tensors,
               "dQ": empty_like(q), "dK": empty_like(k), "dV": empty_like(v),
               "dsink": None if extras.sink is None else torch.empty_like(lse.contiguous())}
    of_mask = list(mask_tensors(visible))
    dS = None
    by_mask: list[torch.Tensor | None] = [None] * len(of_mask)
    if isinstance(visible, Bound) and any(visible.wanted):
        dS = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float32, device=q.device)
    try:
        run(plan_for(stage, tiles, deterministic, visible, as_scale(scale, q.shape[3]), tensors,
                     extras.dropout_p), tensors, *of_mask, *() if dS is None else (dS,))
    except torch.AcceleratorError as error:
        explain_loss(error)
        raise
    if dS is not None and isinstance(visible, Bound):
        by_mask = gradients_of(visible, dS)
    # of a sink: added up over batch elements and rows, in a fixed order
    by_sink = () if extras.sink is None else (tensors["dsink"].sum((0, 2)),)
    return tensors["dQ"], tensors["dK"], tensors["dV"], *by_sink, *by_mask


def run(plan: Plan, tensors: dict[str, torch.Tensor | None], *of_mask: torch.Tensor | None) -> None:
    """Launch, or inspect where an inspection is under way."""
    report = current_report()
    in_order = map(tensors.get, TENSORS[plan.stage.direction])
    if report:
        plan.inspect(report, *in_order, *of_mask)
    else:
        plan.launch(*in_order, *of_mask)
