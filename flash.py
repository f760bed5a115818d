"""FlashAttention in CUDA, one stage at a time: the Python side.

    import torch, flash
    q, k, v = torch.randn(3, 1, 2, 128, 64)             # (B, H, N, d)
    o = flash.attention(q, k, v, causal=True)           # the best stage for these tensors
    o = flash.attention(q, k, v, stage="tiled", Br=32)  # one stage, with a tile size of your own

    q.requires_grad_()                                  # the same for the gradients' stage
    flash.attention(q, k, v, backward="naive", Bc_bwd=16).square().sum().backward()

CUDA tensors run on their GPU; CPU tensors run in the simulator, which executes the same kernels. A stage is a
.cuh file in stages/, described by the first lines of its own header; `python flash.py` lists them. Each is
compiled on first use, for exactly what the call needs, and anew after every edit: jit/ has the registry of
stages and the loader.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import math
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.autograd import forward_ad

import simulator
from jit.difference import Difference, diff
from jit.loader import BUILD, build, build_simulator, debug, source_files
from jit.nvcc import find_nvcc, nvcc_version
from jit.registry import (
    DTYPES,
    FIELDS,
    MANY,
    ROOT,
    STAGES,
    Available,
    Stage,
    default_device,
    find_stage,
    lineage,
    parent,
    read_stage,
    shared_memory_per_block,
    stages,
)
from simulator.inspection import Report

__all__ = ["BUILD", "DTYPES", "FIELDS", "MAX_HEAD_DIM", "ROOT", "STAGES", "Available", "Difference", "Report",
           "Stage", "attention", "build", "build_simulator", "can_inspect", "default_device", "definitions",
           "describe_device", "diff", "find_nvcc", "find_stage", "inspect", "lineage", "nvcc_version",
           "parent", "read_stage", "scaled_dot_product_attention", "shared_memory_per_block", "stages"]

MAX_HEAD_DIM = 256
ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}   # in CUDA


# ------------------------------------------------------------------------------------------ attention
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
              scale: float | None = None, stage: str | Path | Stage | None = None,
              backward: str | Path | Stage | None = None, return_lse: bool = False,
              deterministic: bool | None = None, **tiles: int):
    """softmax(scale * q k^T) v, by one stage of the ladder (FlashAttention-2, arXiv 2307.08691, section 2).

    Differentiable, once: the gradients of q, k and v come from a backward stage, for a loss of o, of L or of
    both. torch.compile, torch.export and torch.utils.checkpoint go through it, torch.func's transforms do
    not. Under torch.autocast, q, k and v are converted to its type, and o has it; or to float32, if a stage
    that you name does not take it, or none that takes it runs here.

    Args:
        q: (B, H, N_q, d), float32, float16 or bfloat16; d a multiple of 8 up to 256.
        k, v: (B, H_kv, N_k, d), H a multiple of H_kv: query head h reads head h // (H // H_kv). All three:
            same type and device; the last dimension contiguous, other strides any, but rows start at
            multiples of 16 bytes.
        causal: the last query sees the last key, as in FlashAttention: query i sees key j <= i + N_k - N_q.
        scale: default 1 / sqrt(d).
        stage: a name (see `stages()`), the pathlib.Path of a .cuh file of your own, or None for the best that
            runs here.
        backward: the backward stage, likewise.
        return_lse: also return L.
        deterministic: True: only stages that give the same bits every run; with stage=None or backward=None
            the best of those. False: any. None: as torch.use_deterministic_algorithms() says at this call.
        tiles: Br and Bc, the rows of a tile of q, and of k and v; Br_bwd and Bc_bwd, those of the backward
            stage. Default: as the stage's header says, or smaller where the device has too little shared
            memory for that.
    Returns:
        o, or (o, L). o: like q. L: (B, H, N_q) float32, the natural log of the row's sum of
        exp(scaled, masked score). A query that sees no key has o = 0, L = -inf, and no gradient.
    Raises:
        ValueError: for arguments that do not fit, saying which and what would. What concerns the backward
            pass is checked here, too, if a gradient is needed, or the call has an argument for it.
        RuntimeError: if the stage cannot be built or run here, for errors of the kernel, and for stages that
            torch.use_deterministic_algorithms() forbids.

    The gradients are like q, k and v. That of o is copied if its rows are not as q's must be.
    """
    q, k, v = _autocast(q, k, v, stage, backward)
    check = _check_dimensions if torch.compiler.is_compiling() else _check_tensors
    check(q, k, v)
    diagonal = k.shape[2] - q.shape[2] if _bool("causal", causal) else None
    o, lse = _attention(q, k, v, diagonal, scale, stage, backward, deterministic, tiles)
    return (o, lse) if return_lse else o


def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask=None,
                                 dropout_p: float = 0.0, is_causal: bool = False, *,
                                 scale: float | None = None, enable_gqa: bool = False,
                                 stage: str | Path | Stage | None = None,
                                 backward: str | Path | Stage | None = None,
                                 deterministic: bool | None = None) -> torch.Tensor:
    """torch.nn.functional's function of this name, with its is_causal: query i sees key j <= i (top-left).

    Shapes, types, stages, gradients and errors as for `attention`.

    Raises:
        ValueError: also for attn_mask and dropout_p, which no stage supports.
    """
    if attn_mask is not None:
        raise ValueError("attn_mask: the stages know no mask but is_causal")
    if dropout_p != 0.0:
        raise ValueError("dropout_p: the stages know no dropout; pass 0.0")
    q, k, v = _autocast(query, key, value, stage, backward)
    check = _check_dimensions if torch.compiler.is_compiling() else _check_tensors
    check(q, k, v, ("query", "key", "value"))
    diagonal = 0 if _bool("is_causal", is_causal) else None
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(f"query has {q.shape[1]} heads and key {k.shape[1]}: pass enable_gqa=True")
    return _attention(q, k, v, diagonal, scale, stage, backward, deterministic, {})[0]


def _attention(q, k, v, diagonal: int | None, scale: float | None, stage, backward,
               deterministic: bool | None, tiles: dict[str, int]):
    """(o, L). diagonal: query i sees key j <= i + diagonal; None: all of them.

    Checks the arguments, the backward pass's too. Under torch.compile the operator checks most of them, as
    that could not be traced.
    """
    for name in tiles:
        if name not in ("Br", "Bc", "Br_bwd", "Bc_bwd"):
            raise ValueError(f"{name}: attention() has no such argument; "
                             "tile sizes are Br, Bc, Br_bwd, Bc_bwd")
    if deterministic is not None:
        deterministic = _bool("deterministic", deterministic)
    backward_tiles = {name[:-4]: size for name, size in tiles.items() if name.endswith("_bwd")}
    tiles = {name: size for name, size in tiles.items() if not name.endswith("_bwd")}
    if torch.compiler.is_compiling():
        return torch.ops.flash.forward(
            q, k, v, diagonal, scale, _text(stage), _text(backward), deterministic, tiles.get("Br"),
            tiles.get("Bc"), backward_tiles.get("Br"), backward_tiles.get("Bc"))
    scale = _scale(scale, q.shape[3])
    stage, tiles = _choose(stage, q, "fwd", deterministic, diagonal is not None, **tiles)
    gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if gradients or backward is not None or backward_tiles:
        backward, backward_tiles = _choose(backward, q, "bwd", deterministic, diagonal is not None,
                                           **backward_tiles)
    if not gradients:
        return _forward(q, k, v, diagonal, scale, stage, tiles)
    return torch.ops.flash.forward(
        q, k, v, diagonal, scale, _text(stage), _text(backward), deterministic, tiles["Br"], tiles["Bc"],
        backward_tiles["Br"], backward_tiles["Bc"])


def _autocast(q, k, v, stage, backward):
    """q, k and v, under torch.autocast in the type that it asks for."""
    tensors = q, k, v
    if not all(isinstance(x, torch.Tensor) and x.device.type in ("cpu", "cuda") for x in tensors):
        return tensors
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    gradients = backward is not None or (
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    dtype = _autocast_type(device, torch.get_autocast_dtype(device), _text(stage), _text(backward), gradients)
    return [x.to(dtype) if x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x for x in tensors]


@torch.compiler.assume_constant_result  # torch.compile need not look into the registry
def _autocast_type(device: str, dtype: torch.dtype, stage: str | None, backward: str | None,
                   gradients: bool) -> torch.dtype:
    """Autocast's type, or float32 if a stage that the call names does not take it, or none that runs here."""
    for direction, name in [("fwd", stage), *[("bwd", backward)] * gradients]:
        try:
            find_stage(_of_text(name), dtype, torch.device(device), direction)
        except (ValueError, RuntimeError):
            return torch.float32
    return dtype


def _text(stage: str | Path | Stage | None) -> str | None:
    """A stage as an operator's argument: its name, or the path of its file, which has a slash."""
    if isinstance(stage, Stage):
        return str(stage.path)
    return os.path.join(".", str(stage)) if isinstance(stage, Path) else stage


def _of_text(stage: str | None) -> str | Path | None:
    return Path(stage) if stage and "/" in stage else stage


def _scale(scale: float | None, d: int) -> float:
    """As a float32, checked."""
    try:
        rounded = ctypes.c_float(1 / math.sqrt(d) if scale is None else scale).value
    except (TypeError, ValueError, OverflowError):
        rounded = math.nan
    if not abs(rounded) <= 2.0**127:  # times log2(e), in some stages, it must be finite, too
        raise ValueError(f"scale must be a number from -2^127 to 2^127, not {scale!r}")
    return rounded


def _choose(stage, q: torch.Tensor, direction: str = "fwd", deterministic: bool | None = False,
            causal: bool = False, **tiles: int | None) -> tuple[Stage, dict[str, int]]:
    """The stage that a call asks for, and its tile sizes; checked."""
    d = int(q.shape[3])
    stage = find_stage(stage, q.dtype, q.device, direction, deterministic, d)
    chosen = {name: size for name, size in tiles.items() if size is not None}
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    if not isinstance(rows, int):  # traced with dynamic shapes: the operator will see a number
        rows = MANY
    return stage, stage.tiles(d, shared_memory_per_block(q.device), rows, causal, **chosen)


# ------------------------------------------------------------------------------------------ inspect
_inspection: contextvars.ContextVar[Report | None] = contextvars.ContextVar("inspection", default=None)
_one_inspection = threading.Lock()


def can_inspect() -> Available:
    """Whether `inspect` works on this machine, or why not."""
    return Available(simulator.missing_checker() or "")


@contextlib.contextmanager
def inspect(**arrays: torch.Tensor) -> Iterator[Report]:
    """Watch every access to memory that kernels make, in the simulator: its checker and its counters.

        with flash.inspect() as report:
            flash.attention(q, k, v, stage="flash2")
        print(report)            # findings, HBM traffic, sectors and bank conflicts by line
        report.plot("traffic.png")

    The stage is unmodified, but compiled with a call before each load and store; and it runs one block at a
    time. That takes 13 to 184 times as long for the fp32 stages, 6 to 10 times for 16-bit ones (measured, the
    latter at N=128). q, k, v, o and their gradients are copied to memory with red zones around each head; L,
    its gradient and scratch memory have them around the whole. The backward pass, where it runs inside, is
    watched likewise.

    Found: data races in shared memory, and in global memory, between blocks too; accesses out of bounds,
    misaligned, or of memory that nothing has written; barriers that not all threads reach; deadlocks.
    A kernel that fails still raises its RuntimeError; the report then says why.

    Args:
        arrays: CPU tensors, by name, that kernels of your own use (built with `build(..., checked=True)`).
            They are watched in place, without red zones, and must not overlap. `attention`'s own are known.
    Returns:
        A context manager; its Report is complete at its end.
    Raises:
        RuntimeError: without g++, or inside of another inspection; in it, for CUDA tensors.
        ValueError: for arrays that are not on the CPU, overlap or are too large.
    """
    for name, x in arrays.items():
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu" or not _has_memory(x):
            raise ValueError(f"inspect(): {name} must be a tensor on the CPU")
    if not (possible := can_inspect()):
        raise RuntimeError(str(possible))
    runtime = build_simulator()
    if not _one_inspection.acquire(blocking=False):
        raise RuntimeError("inspect(): another inspection is under way; there can be one at a time")
    try:
        report = Report(runtime)
        token = _inspection.set(report)
        try:
            report.watch(arrays)
            yield report
        finally:
            _inspection.reset(token)
            report.close()
    finally:
        _one_inspection.release()


# ------------------------------------------------------------------------------------------ checks
def _check_dimensions(q, k, v, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Raise ValueError for what has no shape (B, H, N, d)."""
    for name, x in zip(names, (q, k, v), strict=True):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, (B, H, N, d), not {x.dim()}: "
                             f"shape {tuple(x.shape)}")


def _check_tensors(q, k, v, names: tuple[str, str, str] = ("q", "k", "v"), traced: bool = False) -> None:
    """Raise ValueError for tensors that no stage can take. traced: they have no memory, and need none, and
    their sizes may be symbols."""
    _check_dimensions(q, k, v, names)
    for name, x in zip(names, (q, k, v), strict=True):
        if 0 in x.shape:
            raise ValueError(f"{name} is empty: shape {tuple(x.shape)}; B, H, N and d must be at least 1")
        if x.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} is on {x.device}; stages run on CUDA and CPU tensors: "
                             "move it with .to()")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has type {x.dtype}, {names[0]} {q.dtype}: make them the same")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, {names[0]} on {q.device}: move them to one device")
        if x.layout != torch.strided:
            raise ValueError(f"{name} has layout {x.layout}: make it dense with .to_dense()")
        if not traced and any(size > 2**31 - 1024 for size in x.shape):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; the kernels count up to 2^31 in whole "
                             "tiles: at most 2^31 - 1024")
        if not traced and not _has_memory(x):
            raise ValueError(f"{name} is a {type(x).__name__} without memory of its own, as in torch.func or "
                             "a FakeTensorMode: pass a plain tensor")
        if not traced:
            _check_tangent(name, x)
    B, H, _, d = q.shape
    if d % 8 or d > MAX_HEAD_DIM:
        raise ValueError(f"{names[0]} has d = {d}; d must be a multiple of 8 up to {MAX_HEAD_DIM}: pad all "
                         "three with zeros (torch.nn.functional.pad) and keep scale at 1 / sqrt of the "
                         "true d")
    if k.shape[0] != B or k.shape[3] != d:
        raise ValueError(f"{names[1]} has shape {tuple(k.shape)}; for {names[0]} of shape {tuple(q.shape)} "
                         f"it must be ({B}, H_kv, N_k, {d})")
    if v.shape != k.shape:
        raise ValueError(f"{names[2]} has shape {tuple(v.shape)}, {names[1]} {tuple(k.shape)}: "
                         "they must be the same")
    if H % k.shape[1]:
        raise ValueError(f"{names[0]} has {H} heads, {names[1]} and {names[2]} {k.shape[1]}: "
                         "H must be a multiple of H_kv")
    for name, x in zip(names, (q, k, v), strict=True):
        if x.stride(3) != 1:
            raise ValueError(f"{name}'s last dimension is not contiguous (stride {x.stride(3)}): "
                             f"pass {name}.contiguous()")
        past = 0 if traced else x.data_ptr() % 16
        if past or not _rows_fit(x):
            in_bytes = tuple(s * x.element_size() for s in x.stride()[:3])
            raise ValueError(f"{name}'s rows must start at multiples of 16 bytes; its first is {past} bytes "
                             f"past one, its strides are {in_bytes} bytes: pass "
                             f"{name}.clone(memory_format=torch.contiguous_format)")


def _rows_fit(x: torch.Tensor) -> bool:
    """Whether all rows start at multiples of 16 bytes, if the first one does."""
    return not any(stride * x.element_size() % 16
                   for size, stride in zip(x.shape[:3], x.stride()) if size > 1)


def _check_tangent(name: str, x: torch.Tensor) -> None:
    if forward_ad.unpack_dual(x).tangent is not None:
        raise ValueError(f"{name} has a tangent, and the stages no forward-mode derivative: pass "
                         "torch.autograd.forward_ad.unpack_dual(...).primal")


def _bool(name: str, value) -> bool:
    """As Python's own, checked: NumPy's is called bool_ or, since 2.0, bool."""
    if type(value).__name__ not in ("bool", "bool_", "int") or value not in (True, False):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _has_memory(x: torch.Tensor) -> bool:
    try:
        return x.data_ptr() != 0
    except RuntimeError:
        return False


# ------------------------------------------------------------------------------------------ the launch
class _Tensor(ctypes.Structure):
    """struct Tensor of stages/common/tensor.cuh."""

    _fields_ = [("data", ctypes.c_void_p), *((f"stride_{x}", ctypes.c_int64) for x in "bhn")]

    @classmethod
    def of(cls, x: torch.Tensor) -> _Tensor:
        return cls(x.data_ptr(), *x.stride()[:3])


_SIZES = [*((x, ctypes.c_int) for x in ("B", "H", "H_kv", "N_q", "N_k", "diagonal")),
          ("scale", ctypes.c_float)]


class _FwdParams(ctypes.Structure):
    """struct FwdParams of flash_fwd.cu."""

    _fields_ = [*((x, _Tensor) for x in ("Q", "K", "V", "O")),
                *((x, ctypes.c_void_p) for x in ("L", "workspace")), *_SIZES]


class _BwdParams(ctypes.Structure):
    """struct BwdParams of flash_bwd.cu."""

    _fields_ = [*((x, _Tensor) for x in ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")),
                *((x, ctypes.c_void_p) for x in ("L", "dL", "workspace")), *_SIZES]


_PARAMS = {"fwd": _FwdParams, "bwd": _BwdParams}


def _forward(q, k, v, diagonal: int | None, scale: float | None, stage: Stage, tiles: dict[str, int]):
    """(o, L), for tensors that _check_tensors passed. diagonal: None for no mask."""
    o = torch.empty_like(q)
    lse = torch.empty(*q.shape[:3], dtype=torch.float32, device=q.device)
    _launch(stage, tiles, False, diagonal, scale, {"Q": q, "K": k, "V": v}, {"O": o, "L": lse}, 4)
    return o, lse


def _backward(q, k, v, o, lse, do, dlse, diagonal: int | None, scale: float | None, stage: Stage,
              tiles: dict[str, int], deterministic: bool):
    """(dq, dk, dv), from what _forward was given and gave. dlse: None for zeros. deterministic: the macro."""
    inputs = {"Q": q, "K": k, "V": v, "O": _aligned(o), "dO": _aligned(do), "L": lse.contiguous()}
    if dlse is not None:
        inputs["dL"] = dlse.contiguous()
    outputs = {f"d{name}": torch.empty_like(inputs[name]) for name in "QKV"}
    _launch(stage, tiles, deterministic, diagonal, scale, inputs, outputs, 10)
    return tuple(outputs[name] for name in ("dQ", "dK", "dV"))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Autograd's tensors come with any strides, such as 0 from a sum: a copy, where a stage needs others."""
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0 and _rows_fit(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _launch(stage: Stage, tiles: dict[str, int], deterministic: bool, diagonal: int | None,
            scale: float | None, inputs: dict, outputs: dict, flops: int) -> None:
    """Build and run a stage. flops: for each column of a pair of a query and a key that it sees."""
    q, k = inputs["Q"], inputs["K"]
    B, H, N_q, d = q.shape
    scale = _scale(scale, d)
    report = _inspection.get()
    if report and q.device.type != "cpu":
        raise RuntimeError("inspect() observes the simulator, not a GPU: pass CPU tensors (q.cpu(), ...)")
    macros = definitions(stage, q.dtype, d, diagonal is not None, tiles, deterministic, scale < 0)
    library = _library(stage, macros, q.device)
    params = _PARAMS[stage.direction](B=B, H=H, H_kv=k.shape[1], N_q=N_q, N_k=k.shape[2],
                                      diagonal=diagonal or 0, scale=scale)
    _point(params, inputs | outputs)
    workspace_bytes = library.workspace_bytes(ctypes.byref(params))
    workspace = torch.empty(-(-workspace_bytes // 4), dtype=torch.float32, device=q.device)
    outputs = outputs | {stage.workspace: workspace}
    # under inspect(), the kernel works on copies between red zones
    with (report.guarded(inputs, outputs) if report else contextlib.nullcontext(inputs | outputs)) as at:
        params.workspace = at[stage.workspace].data_ptr()
        if report:
            _point(params, {name: x for name, x in at.items() if name != stage.workspace})
        error = _run(library, params, q.device)
    if error:
        raise RuntimeError(f"{stage}: {simulator.resolve_addresses(error.decode())}")
    if report:
        report.flops += flops * B * H * d * _visible_pairs(N_q, k.shape[2], diagonal)


def _point(params: ctypes.Structure, tensors: dict[str, torch.Tensor]) -> None:
    """Let the fields of these names lead to the tensors."""
    for name, x in tensors.items():
        setattr(params, name, x.data_ptr() if name in ("L", "dL") else _Tensor.of(x))


def _run(library: ctypes.CDLL, params: ctypes.Structure, device: torch.device) -> bytes | None:
    """Launch on the device's current stream. Returns what went wrong, or None."""
    if device.type == "cpu":
        return library.run(ctypes.byref(params), None)
    with torch.cuda.device(device):
        return library.run(ctypes.byref(params), torch.cuda.current_stream().cuda_stream)


def _visible_pairs(N_q: int, N_k: int, diagonal: int | None) -> int:
    """How many pairs of a query and a key that it sees."""
    if diagonal is None:
        return N_q * N_k
    return sum(min(max(row + diagonal + 1, 0), N_k) for row in range(N_q))


def definitions(stage: Stage, dtype: torch.dtype, d: int, causal: bool, tiles: dict[str, int],
                deterministic: bool = False, negative_scale: bool = False) -> dict[str, str | Path]:
    """The macros that flash_fwd.cu or flash_bwd.cu is compiled with; a path stands for a file to include."""
    macros = {"STAGE_FILE": stage.path, "ELEMENT": ELEMENTS[dtype], "HEAD_DIM": str(d),
              "CAUSAL": str(int(causal)), "NEGATIVE_SCALE": str(int(negative_scale)),
              "BLOCK_R": str(tiles["Br"]), "BLOCK_C": str(tiles["Bc"])}
    if stage.direction == "bwd":
        macros["DETERMINISTIC"] = str(int(deterministic and stage.deterministic_on_request))
    return macros


_libraries: dict = {}  # (stage's name, macros, target, debug, checker) -> (library, {source file: its time})


def _library(stage: Stage, macros: dict[str, str | Path], device: torch.device) -> ctypes.CDLL:
    """The stage compiled for a device; compiled anew if a file's time and content have changed.

    Its functions are library.run and library.workspace_bytes.
    """
    target = torch.cuda.get_device_capability(device) if device.type == "cuda" else "cpu"
    report = _inspection.get()
    checked = report is not None
    key = (stage.name, tuple(macros.items()), target, debug(), checked and report.runtime)
    if key in _libraries:
        library, times = _libraries[key]
        with contextlib.suppress(FileNotFoundError):
            if all(file.stat().st_mtime_ns == time for file, time in times.items()):
                return library
    entry, struct = f"flash_{stage.direction}", _PARAMS[stage.direction]
    source = ROOT / f"{entry}.cu"
    times = {file: file.stat().st_mtime_ns for file in source_files(source, stage.path)}
    library = ctypes.CDLL(str(build(source, device, macros, f"{stage.direction}_{stage.name}", checked)))
    library.run, library.workspace_bytes = library[entry], library[f"{entry}_workspace_bytes"]
    library.run.restype = ctypes.c_char_p
    library.run.argtypes = [ctypes.POINTER(struct), ctypes.c_void_p]
    params_bytes = library[f"{entry}_params_bytes"]
    library.workspace_bytes.restype = params_bytes.restype = ctypes.c_size_t
    if params_bytes() != ctypes.sizeof(struct):
        name = f"{stage.direction.capitalize()}Params"
        raise RuntimeError(f"{name} in {source.name} and _{name} in flash.py differ: make them the same")
    _libraries[key] = library, times
    return library


# ------------------------------------------------------------------------------------------ the operators
# What torch.compile, torch.export and autograd see of attention(): two operators with plain arguments.
# A stage is given as text, its name or its file's path; None as in attention().
_OPTIONS = "SymInt? diagonal, float? scale, str? stage"


@torch.library.custom_op(
    "flash::forward", mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, str? backward, bool? deterministic, int? Br, "
           "int? Bc, int? Br_bwd, int? Bc_bwd) -> (Tensor o, Tensor L)")
def _forward_op(q, k, v, diagonal, scale, stage, backward, deterministic, Br, Bc, Br_bwd, Bc_bwd):
    _check_tensors(q, k, v)
    return _forward(q, k, v, diagonal, scale,
                    *_choose(_of_text(stage), q, "fwd", deterministic, diagonal is not None, Br=Br, Bc=Bc))


@_forward_op.register_fake
def _(q, k, v, diagonal, scale, stage, backward, deterministic, Br, Bc, Br_bwd, Bc_bwd):
    _check_tensors(q, k, v, traced=True)
    _choose(_of_text(stage), q, "fwd", deterministic, diagonal is not None, Br=Br, Bc=Bc)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if gradients or (backward, Br_bwd, Bc_bwd) != (None, None, None):
        _choose(_of_text(backward), q, "bwd", deterministic, diagonal is not None, Br=Br_bwd, Bc=Bc_bwd)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "flash::backward", mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor L, Tensor dO, Tensor? dL, {_OPTIONS}, "
           "bool deterministic, int? Br, int? Bc) -> (Tensor dq, Tensor dk, Tensor dv)")
def _backward_op(q, k, v, o, L, dO, dL, diagonal, scale, stage, deterministic, Br, Bc):
    _check_tensors(q, k, v)
    rows = q.shape[:3], torch.float32
    for name, x, (shape, dtype) in (("o", o, (q.shape, q.dtype)), ("dO", dO, (q.shape, q.dtype)),
                                    ("L", L, rows), ("dL", dL, rows)):
        if x is None:
            continue
        if (x.shape, x.dtype, x.device) != (shape, dtype, q.device):
            raise ValueError(f"{name} must have shape {tuple(shape)} and type {dtype} and be on {q.device}; "
                             f"it has {tuple(x.shape)} and {x.dtype} and is on {x.device}")
        _check_tangent(name, x)
    return _backward(q, k, v, o, L, dO, dL, diagonal, scale,
                     *_choose(_of_text(stage), q, "bwd", deterministic, diagonal is not None, Br=Br, Bc=Bc),
                     deterministic)


@_backward_op.register_fake
def _(q, k, v, o, L, dO, dL, diagonal, scale, stage, deterministic, Br, Bc):
    _check_tensors(q, k, v, traced=True)
    _choose(_of_text(stage), q, "bwd", deterministic, diagonal is not None, Br=Br, Bc=Bc)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:
    q, k, v, diagonal, scale, _, backward, deterministic, _, _, Br, Bc = inputs
    if deterministic is None and torch.are_deterministic_algorithms_enabled():  # it may not be by then
        stage, _ = _choose(_of_text(backward), q, "bwd", None, diagonal is not None, Br=Br, Bc=Bc)
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
    raise RuntimeError("flash.attention() has no second derivative: for one, use "
                       "torch.nn.functional.scaled_dot_product_attention under "
                       "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")


_backward_op.register_autograd(_refuse_second_derivative)


# ------------------------------------------------------------------------------------------ python flash.py
def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return f"{name} (sm_{major}{minor}), CUDA {torch.version.cuda}, PyTorch {torch.__version__}"
    return f"CPU, in the simulator ({os.cpu_count()} cores), PyTorch {torch.__version__}"


if __name__ == "__main__":
    sys.modules["flash"] = sys.modules["__main__"]  # this module, once: its operators can be registered once

    import ladder
    sys.exit(ladder.main())
