"""A plan: what a call of one stage needs to know, worked out once for tensors of one layout.

A call goes down once, check -> plan -> launch. The check and the choice of a stage are `choose`'s and
checks.py's, a plan is what comes of them, and `Plan.launch` fills in addresses and starts the kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings

import torch

from .checks import aligned, as_scale
from .devices import shared_memory_per_block
from .inspection import current_report
from .launch import PARAMS, Library, Tensor, definitions, explain_loss, latest, load
from .loader import debug
from .registry import find_stage, stages
from .stage import MANY, Stage

# In the order in which a plan takes them
TENSORS = {"fwd": ("Q", "K", "V", "O", "L"),
           "bwd": ("Q", "K", "V", "O", "dO", "L", "dL", "dQ", "dK", "dV")}
OUTPUTS = {"fwd": ("O", "L"), "bwd": ("dQ", "dK", "dV")}
VECTORS = ("L", "dL")                    # contiguous: an address without strides
FLOPS_PER_COLUMN = {"fwd": 4, "bwd": 10}  # of a pair of a query and a key that it sees
MOST_PLANS = 4096                        # kept; the oldest goes first


def choose(stage, q: torch.Tensor, direction: str = "fwd", deterministic: bool | None = False,
           causal: bool = False, **tiles: int | None) -> tuple[Stage, dict[str, int]]:
    """The stage that a call asks for, and its tile sizes; checked."""
    d = int(q.shape[3])
    stage = find_or_convert(stage, q.dtype, q.device, direction, deterministic, d)
    chosen = {name: size for name, size in tiles.items() if size is not None}
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    if not isinstance(rows, int):  # traced with dynamic shapes: the operator will see a number
        rows = MANY
    return stage, stage.tiles(d, shared_memory_per_block(q.device), rows, causal, **chosen)


def find_or_convert(stage, dtype: torch.dtype, device: torch.device, direction: str,
                    deterministic: bool | None = False, d: int | None = None) -> Stage:
    """find_stage(); but where no backward stage of a 16-bit type runs, one that takes float32: the gradients
    are then those of converted tensors. Before sm_80, such as on a T4."""
    if direction == "bwd" and stage is None and dtype in (torch.float16, torch.bfloat16):
        known = stages("bwd")
        if (not any(s.available(device, dtype) for s in known if dtype in s.dtypes)
                and any(s.available(device, torch.float32) for s in known)):
            stage = find_stage(None, torch.float32, device, direction, deterministic, d)
            _warn_of_conversion(dtype, str(device), stage.name)
            return stage
    return find_stage(stage, dtype, device, direction, deterministic, d)


@functools.cache  # once
def _warn_of_conversion(dtype: torch.dtype, device: str, name: str) -> None:
    warnings.warn(f"no backward stage of {dtype} runs on {device}, as they need sm_80: the gradients come "
                  f"from stage {name!r}, over tensors converted to float32. That takes their memory twice "
                  "more, and the time of a float32 backward pass", stacklevel=2)


class Plan:
    """Of a stage, for tensors of certain shapes, strides and types on a device.

    Args:
        tensors: by their names in FwdParams or BwdParams; None for one that is left out.
        diagonal: query i sees key j <= i + diagonal; None: all of them.
        scale: as as_scale gave it.
    """

    __slots__ = ("stage", "library", "device", "_at", "_template", "_words", "_workspace_floats", "_macros")

    def __init__(self, stage: Stage, tiles: dict[str, int], deterministic: bool, diagonal: int | None,
                 scale: float, tensors: dict[str, torch.Tensor | None]):
        q, k = tensors["Q"], tensors["K"]
        struct = PARAMS[stage.direction]
        params = struct(B=q.shape[0], H=q.shape[1], H_kv=k.shape[1], N_q=q.shape[2], N_k=k.shape[2],
                        diagonal=diagonal or 0, scale=scale)
        params.mask.ints[0] = diagonal or 0
        for name, x in tensors.items():
            if x is not None and name not in VECTORS:
                setattr(params, name, Tensor(None, *strides_of(x)))
        self.stage, self.device = stage, q.device
        self._macros = definitions(stage, q.dtype, q.shape[3], diagonal is not None, tiles, deterministic,
                                   scale < 0)
        self.library: Library = load(stage, self._macros, q.device)
        self._workspace_floats = -(-self.library.workspace_bytes(ctypes.byref(params)) // 4)
        self._template = bytes(params)
        self._words = ctypes.c_uint64 * (len(self._template) // 8)  # a Tensor begins with its address
        self._at = [getattr(struct, name).offset // 8
                    for name in (*TENSORS[stage.direction], "workspace")]

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
            error = self.library.run(words, torch.cuda.current_stream(device).cuda_stream)
        else:
            with torch.cuda.device(device):
                error = self.library.run(words, torch.cuda.current_stream(device).cuda_stream)
        if error is not None:
            raise self.library.failure(error)

    def inspect(self, report, *tensors: torch.Tensor | None) -> None:
        """launch(), under flash.inspect(): the kernel works on copies between red zones."""
        direction, device = self.stage.direction, self.device
        if device.type != "cpu":
            raise RuntimeError("inspect() observes the simulator, not a GPU: pass CPU tensors (q.cpu(), ...)")
        named = {name: x for name, x in zip(TENSORS[direction], tensors) if x is not None}
        inputs = {name: x for name, x in named.items() if name not in OUTPUTS[direction]}
        outputs = {name: named[name] for name in OUTPUTS[direction]}
        outputs[self.stage.workspace] = torch.empty(self._workspace_floats, dtype=torch.float32,
                                                    device=device)
        params = PARAMS[direction].from_buffer_copy(self._template)
        with report.guarded(inputs, outputs) as at:
            for name in named:
                address = at[name].data_ptr()
                setattr(params, name, address if name in VECTORS else Tensor(address, *strides_of(at[name])))
            params.workspace = at[self.stage.workspace].data_ptr()
            error = self.library.run(ctypes.byref(params), None)
        if error is not None:
            raise self.library.failure(error)
        q, k = named["Q"], named["K"]
        diagonal = params.diagonal if self._macros["CAUSAL"] == "1" else None
        report.flops += (FLOPS_PER_COLUMN[direction] * q.shape[0] * q.shape[1] * q.shape[3]
                         * visible_pairs(q.shape[2], k.shape[2], diagonal))


def strides_of(x: torch.Tensor) -> list[int]:
    """Of B, H and N. In a dimension of size 1 any stride is legal, such as 1; a row's length stands for it:
    copies of rows past the last one read nothing, but need an address that is aligned."""
    return [x.shape[3] if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride())]


_plans: dict[tuple, Plan] = {}


def plan_for(stage: Stage, tiles: dict[str, int], deterministic: bool, diagonal: int | None, scale: float,
             tensors: dict[str, torch.Tensor | None]) -> Plan:
    """The plan of a call, out of the cache or made; compiled if it is not, or no longer as its files are.

    tensors: by name, of which just the layouts count; L and dL may be left out.
    """
    q, report = tensors["Q"], current_report()
    key = (stage, *tiles.values(), deterministic, diagonal, scale, q.dtype, q.device, debug(),
           report and report.runtime,
           *((x.shape, x.stride()) for name, x in tensors.items() if name not in VECTORS))
    plan = _plans.get(key)
    if plan is None or not plan.is_current():
        plan = Plan(stage, tiles, deterministic, diagonal, scale, tensors)
        keep(_plans, key, plan)
    return plan


def keep(cache: dict, key: tuple, value) -> None:
    """Put it into a cache of bounded size."""
    if len(cache) >= MOST_PLANS:
        with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread was quicker
            del cache[next(iter(cache))]
    cache[key] = value


def forward(q, k, v, diagonal: int | None, scale: float | None, stage: Stage, tiles: dict[str, int]):
    """(o, L), for tensors that check_tensors passed. diagonal: None for no mask."""
    o, lse = forward_outputs(q)
    tensors = {"Q": q, "K": k, "V": v, "O": o, "L": lse}
    run(plan_for(stage, tiles, False, diagonal, as_scale(scale, q.shape[3]), tensors), tensors)
    return o, lse


def forward_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """O and L, to be filled."""
    return empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's, but where that would take a row apart, as it may if x is expanded: contiguous."""
    like = torch.empty_like(x)
    return like if like.stride(3) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def backward(q, k, v, o, lse, do, dlse, diagonal: int | None, scale: float | None, stage: Stage,
             tiles: dict[str, int], deterministic: bool):
    """(dq, dk, dv), from what forward was given and gave. dlse: None for zeros. deterministic: the macro.

    If the stage does not take their type, by way of float32: see find_or_convert().
    """
    if q.dtype not in stage.dtypes:
        wide = stage.dtypes[0]
        gradients = backward(q.to(wide), k.to(wide), v.to(wide), o.to(wide), lse, do.to(wide), dlse, diagonal,
                             scale, stage, tiles, deterministic)
        return tuple(x.to(q.dtype) for x in gradients)
    try:
        tensors = {"Q": q, "K": k, "V": v, "O": aligned(o), "dO": aligned(do), "L": lse.contiguous(),
                   "dL": None if dlse is None else dlse.contiguous(),
                   "dQ": empty_like(q), "dK": empty_like(k), "dV": empty_like(v)}
        run(plan_for(stage, tiles, deterministic, diagonal, as_scale(scale, q.shape[3]), tensors), tensors)
    except torch.AcceleratorError as error:
        explain_loss(error)
        raise
    return tensors["dQ"], tensors["dK"], tensors["dV"]


def run(plan: Plan, tensors: dict[str, torch.Tensor | None]) -> None:
    """Launch, or inspect where an inspection is under way."""
    report = current_report()
    if report:
        plan.inspect(report, *tensors.values())
    else:
        plan.launch(*tensors.values())


def visible_pairs(N_q: int, N_k: int, diagonal: int | None) -> int:
    """How many pairs of a query and a key that it sees."""
    if diagonal is None:
        return N_q * N_k
    return sum(min(max(row + diagonal + 1, 0), N_k) for row in range(N_q))
