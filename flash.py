"""FlashAttention in CUDA, one stage at a time: the Python side.

    import torch, flash
    q, k, v = torch.randn(3, 1, 2, 128, 64)             # (B, H, N, d)
    o = flash.attention(q, k, v, causal=True)           # the best stage for these tensors
    o = flash.attention(q, k, v, stage="tiled", Br=32)  # one stage, with a tile size of your own

CUDA tensors run on their GPU; CPU tensors run in the simulator, which executes the same kernels. A stage is a
.cuh file in stages/, described by the first lines of its own header; `python flash.py` lists them. Each is
compiled on first use, for exactly what the call needs, and anew after every edit.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import difflib
import fcntl
import functools
import hashlib
import math
import operator
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import cpp_extension

import simulator
from simulator.inspection import Report

ROOT = Path(__file__).resolve().parent
STAGES = ROOT / "stages"
SYSTEM_CUDA = Path("/usr/local/cuda")
BUILD = Path(os.environ.get("FLASH_BUILD_DIR") or ROOT / "build").resolve()

FIELDS = ("idea", "types", "needs", "deterministic", "tiles", "limits", "shared", "workspace", "hbm")
MAX_HEAD_DIM = 256
DTYPES = {"fp32": torch.float32}          # by their name in a stage's header
ELEMENTS = {torch.float32: "float"}       # their name in CUDA


# ------------------------------------------------------------------------------------------ the stages
@dataclass(frozen=True)
class Available:
    """Whether a stage can run on a device, as a bool; `reason` says why not, and what would help."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return self.reason or "yes"


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder, as the header of its file describes it.

    `tile_rules`, `limits` and `shared` are expressions in d, Br and Bc; `shared` is in bytes a block. `hbm`,
    in bytes, is also in B, H, N_q, N_k, Tr, Tc and Td = ceil(d / Bc).
    """

    number: int
    name: str
    direction: str                          # "fwd"
    path: Path
    idea: str = ""
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    needs: str = "any GPU"                  # or the least compute capability, such as sm_80
    deterministic: bool = True              # bit-identical results every run
    tile_rules: str = "Br=32 Bc=32"
    limits: str = ""
    shared: str = "0"
    hbm: str = ""                           # bytes read and written without a mask, if nothing is cached
    workspace: str = "workspace"            # what its scratch memory holds, such as S, P

    def available(self, device: torch.device | str | None = None) -> Available:
        """Whether this stage can run on a device (default: the GPU if any, else the CPU), or why not."""
        device = default_device() if device is None else torch.device(device)
        if device.type == "cpu":
            return Available(simulator.missing_compiler() or "")
        if device.type != "cuda":
            return Available(f"stages run on CUDA and CPU tensors, not on {device.type}")
        if needed := re.fullmatch(r"sm_(\d+)(\d)a?", self.needs):
            have = torch.cuda.get_device_capability(device)
            exact = self.needs.endswith("a")  # sm_90a: its own instructions, which no later one has
            if (have[0] != int(needed[1])) if exact else have < (int(needed[1]), int(needed[2])):
                return Available(f"needs {self.needs}; {torch.cuda.get_device_name(device)} has "
                                 f"sm_{have[0]}{have[1]}")
        try:
            find_nvcc(torch.version.cuda)
        except RuntimeError as error:
            return Available(str(error))
        return Available()

    def default_tiles(self, d: int) -> dict[str, int]:
        """Br and Bc for a head dimension: the last rule of the header whose condition holds."""
        tiles = {}
        for rule in self.tile_rules.split(";"):
            condition, _, sizes = rule.rpartition(":")
            if not condition or _evaluate(condition, d=d):
                tiles = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", sizes)}
        return tiles

    def tiles(self, d: int, shared_memory: int, **chosen: int) -> dict[str, int]:
        """The tile sizes of a call: `chosen` ones, else the defaults, or the nearest to them that fit.

        Args:
            d: head dimension.
            shared_memory: bytes that a block may have on the device.
        Raises:
            ValueError: if the stage does not know a tile by this name, or cannot use its size.
        """
        for name, size in chosen.items():
            if isinstance(size, bool) or not hasattr(size, "__index__") or not 1 <= size <= 1024:
                raise ValueError(f"{name} must be an integer from 1 to 1024, not {size!r}")
            chosen[name] = operator.index(size)
        return dict(self._fitting_tiles(d, shared_memory, tuple(chosen.items())))

    @functools.cache  # some 100 us, in every call of attention()
    def _fitting_tiles(self, d: int, shared_memory: int, chosen: tuple) -> dict[str, int]:
        tiles = self.default_tiles(d)
        if unknown := [name for name, _ in chosen if name not in tiles]:
            raise ValueError(f"{unknown[0]}: stage {self.name!r} has no such argument; "
                             f"its tile sizes are {', '.join(tiles)}")
        tiles.update(chosen)
        if not (problem := self._tile_problem(d, shared_memory, tiles)):
            return tiles
        fitting = [t for br in range(8, 257, 8) for bc in range(8, 257, 8)
                   if not self._tile_problem(d, shared_memory, t := {"Br": br, "Bc": bc})]
        if not fitting:
            raise ValueError(f"{problem}; no tile sizes fit: take a smaller d or another stage")
        nearest = min(fitting, key=lambda t: sum(abs(math.log(t[name] / tiles[name])) for name in t))
        if chosen:
            raise ValueError(f"{problem}; Br={nearest['Br']}, Bc={nearest['Bc']} would work")
        return nearest

    def hbm_bytes(self, B: int, H: int, N_q: int, N_k: int, d: int, *, Br: int, Bc: int) -> int | None:
        """Bytes that warps read from and write to HBM, without a mask and a cache: the header's formula.

        None if the header has none. `inspect` counts the same.
        """
        if not self.hbm:
            return None
        return _evaluate(self.hbm, B=B, H=H, N_q=N_q, N_k=N_k, d=d, Br=Br, Bc=Bc, Tr=-(-N_q // Br),
                         Tc=-(-N_k // Bc), Td=-(-d // Bc))

    def _tile_problem(self, d: int, shared_memory: int, tiles: dict[str, int]) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in tiles.items())
        for limit in filter(None, map(str.strip, self.limits.split(";"))):
            if not _evaluate(limit, d=d, **tiles):
                return f"stage {self.name!r} needs {limit}, and got {sizes}"
        needed = _evaluate(self.shared, d=d, **tiles)
        if needed > shared_memory:
            return (f"stage {self.name!r} with {sizes}, d={d} needs {needed} bytes of shared memory a block, "
                    f"and this device has {shared_memory}")
        return ""


def _evaluate(expression: str, **names: int) -> int:
    """The value of an expression in a stage's header, in these names, min and max."""
    return eval(expression, {"__builtins__": {}, "min": min, "max": max}, names)


def read_stage(path: Path) -> Stage:
    """The stage in a .cuh file. Its header's fields are optional: a file of your own needs none.

    Raises:
        ValueError: if the file does not exist, or a field of its header is not understood.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise ValueError(f"stage: there is no file {path}")
    return _read_stage(path, path.stat().st_mtime_ns)


@functools.cache
def _read_stage(path: Path, modified: int) -> Stage:
    header = re.match(r"\ufeff?(?://.*\n)*", path.read_text(errors="replace"))[0]
    title = re.match(r"\ufeff?// Forward stage (\d+): (\w+)", header)
    fields = dict(re.findall(rf"^// ({'|'.join(FIELDS)}): *(.*)$", header, re.M))
    types = re.split(r",\s*", fields.get("types", "fp32"))
    if unknown := set(types) - set(DTYPES):
        raise ValueError(f"{path}: types: {', '.join(unknown)} not among {', '.join(DTYPES)}")
    if not re.fullmatch(r"any GPU|sm_\d\d+a?", needs := fields.get("needs", "any GPU")):
        raise ValueError(f"{path}: needs: {needs!r} is neither 'any GPU' nor a capability, such as sm_80")
    if (workspace := fields.get("workspace", "workspace")) in ("Q", "K", "V", "O", "L"):
        raise ValueError(f"{path}: workspace: {workspace} is a tensor of the call: give it another name")
    in_ladder = title and path.parent == STAGES
    stage = Stage(
        number=int(title[1]) if in_ladder else 0, name=title[2] if in_ladder else path.stem, direction="fwd",
        path=path, idea=fields.get("idea", ""), dtypes=tuple(DTYPES[t] for t in types), needs=needs,
        deterministic=fields.get("deterministic", "yes") == "yes",
        tile_rules=fields.get("tiles", "Br=32 Bc=32"), limits=fields.get("limits", ""),
        shared=fields.get("shared", "0"), hbm=fields.get("hbm", ""),
        workspace=workspace)
    try:
        if sorted(tiles := stage.default_tiles(64)) != ["Bc", "Br"]:
            raise ValueError("tiles: must give Br and Bc, as in Br=64 Bc=32; d > 128: Br=16 Bc=32")
        stage._tile_problem(64, 0, tiles)
        stage.hbm_bytes(1, 1, 64, 64, 64, **tiles)
    except Exception as error:  # whatever the expressions raise
        fields = "tiles, limits, shared or hbm"
        raise ValueError(f"{path}: the header's {fields} make no sense: {error}") from None
    return stage


def stages() -> list[Stage]:
    """All stages of the repository, in the order of the ladder.

    Raises:
        ValueError: if two have the same name, or a header is not understood.
    """
    by_name: dict[str, Stage] = {}
    for stage in map(read_stage, sorted(STAGES.glob("fwd_[0-9]*.cuh"))):
        if stage.name in by_name:
            raise ValueError(f"{stage.path.name} and {by_name[stage.name].path.name} are both called "
                             f"{stage.name!r}: give one of them another name, in its first line")
        by_name[stage.name] = stage
    return list(by_name.values())


def find_stage(stage: str | Path | Stage | None, dtype: torch.dtype, device: torch.device) -> Stage:
    """The stage that a call asks for; for None, the last that takes the type and runs on the device.

    Raises:
        ValueError: if there is no such stage, or it does not take `dtype`.
        RuntimeError: if it cannot run on `device`.
    """
    if isinstance(stage, str):
        known = {s.name: s for s in stages()}
        if stage not in known:
            close = difflib.get_close_matches(stage, known, n=1)
            is_file = stage.endswith(".cuh") or "/" in stage
            hint = (" For a file of your own, pass a pathlib.Path." if is_file or not close
                    else f" Did you mean {close[0]!r}?")
            raise ValueError(f"stage: there is no stage {stage!r}; there are {', '.join(known)}.{hint}")
        stage = known[stage]
    elif isinstance(stage, Path):
        stage = read_stage(stage)
    elif stage is None:
        takers = [s for s in stages() if dtype in s.dtypes]
        stage = next((s for s in reversed(takers) if s.available(device)), takers[-1] if takers else None)
        if stage is None:
            known = ", ".join(map(str, ELEMENTS))
            raise ValueError(f"q has type {dtype}; the stages take {known}: convert with .float()")
    elif not isinstance(stage, Stage):
        raise ValueError(f"stage must be a name, a pathlib.Path or a Stage, not {type(stage).__name__}")
    if dtype not in stage.dtypes:
        known = ", ".join(map(str, stage.dtypes))
        raise ValueError(f"stage {stage.name!r} takes {known}; q, k and v have {dtype}: "
                         "convert them with .float()")
    if not (available := stage.available(device)):
        raise RuntimeError(f"stage {stage.name!r} cannot run on {device}: {available}")
    return stage


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def shared_memory_per_block(device: torch.device) -> int:
    """Bytes of shared memory that a block may ask for."""
    if device.type == "cpu":
        return simulator.SHARED_MEMORY_PER_BLOCK
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


# ------------------------------------------------------------------------------------------ attention
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
              scale: float | None = None, stage: str | Path | Stage | None = None, return_lse: bool = False,
              **tiles: int):
    """softmax(scale * q k^T) v, by one stage of the ladder (FlashAttention-2, arXiv 2307.08691, section 2).

    Args:
        q: (B, H, N_q, d), float32; d a multiple of 8 up to 256.
        k, v: (B, H_kv, N_k, d), H a multiple of H_kv: query head h reads head h // (H // H_kv). All three:
            same type and device, any strides but 1 in the last dimension, rows at multiples of 16 bytes.
        causal: the last query sees the last key, as in FlashAttention: query i sees key j <= i + N_k - N_q.
        scale: default 1 / sqrt(d).
        stage: a name (see `stages()`), the pathlib.Path of a .cuh file of your own, or None for the best that
            runs here.
        return_lse: also return L.
        tiles: Br and Bc, the rows of a tile of q, and of k and v. Default: as the stage's header says, or
            smaller where the device has too little shared memory for that.
    Returns:
        o, or (o, L). o: like q. L: (B, H, N_q) float32, the natural log of the row's sum of
        exp(scaled, masked score). A query that sees no key has o = 0, L = -inf.
    Raises:
        ValueError: for arguments that do not fit, saying which and what would.
        RuntimeError: if the stage cannot be built or run here, and for errors of the kernel.

    torch.compile cannot trace it yet: call it from a function decorated with @torch.compiler.disable.
    """
    _check_tensors(q, k, v)
    _check_bool("causal", causal)
    diagonal = k.shape[2] - q.shape[2]
    o, lse = _forward(q, k, v, diagonal if causal else None, scale, stage, tiles)
    return (o, lse) if return_lse else o


def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask=None,
                                 dropout_p: float = 0.0, is_causal: bool = False, *,
                                 scale: float | None = None, enable_gqa: bool = False,
                                 stage: str | Path | Stage | None = None) -> torch.Tensor:
    """torch.nn.functional's function of this name, with its is_causal: query i sees key j <= i (top-left).

    Shapes, types, stage and errors as for `attention`.

    Raises:
        ValueError: also for attn_mask and dropout_p, which no stage supports.
    """
    if attn_mask is not None:
        raise ValueError("attn_mask: the stages know no mask but is_causal")
    if dropout_p != 0.0:
        raise ValueError("dropout_p: the stages know no dropout; pass 0.0")
    _check_tensors(query, key, value, ("query", "key", "value"))
    _check_bool("is_causal", is_causal)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}: pass enable_gqa=True")
    return _forward(query, key, value, 0 if is_causal else None, scale, stage, {})[0]


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

    The stage is unmodified, but compiled with a call before each load and store; it runs some 20 to 150 times
    slower, one block at a time. q, k, v and the outputs are copied to memory with red zones around each head.

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
    runtime = _build_simulator()
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


def _check_tensors(q, k, v, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Raise ValueError for tensors that no stage can take."""
    for name, x in zip(names, (q, k, v), strict=True):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, (B, H, N, d), not {x.dim()}: "
                             f"shape {tuple(x.shape)}")
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
        if max(x.shape) > 2**31 - 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; the kernels count up to 2^31 - 1")
        if not _has_memory(x):
            raise ValueError(f"{name} is a {type(x).__name__} without memory of its own, as in torch.func or "
                             "while torch.export traces: pass a plain tensor")
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
        strides = [stride for size, stride in zip(x.shape[:3], x.stride()) if size > 1]
        if x.data_ptr() % 16 or any(s * x.element_size() % 16 for s in strides):
            in_bytes = tuple(s * x.element_size() for s in x.stride()[:3])
            raise ValueError(f"{name}'s rows must start at multiples of 16 bytes; its first is "
                             f"{x.data_ptr() % 16} bytes past one, its strides are {in_bytes} bytes: pass "
                             f"{name}.clone(memory_format=torch.contiguous_format)")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise RuntimeError("there is no backward pass yet, so gradients would be lost: call under "
                           "torch.no_grad(), or pass tensors after .detach()")


def _check_bool(name: str, value) -> None:
    if not isinstance(value, (bool, int)):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def _has_memory(x: torch.Tensor) -> bool:
    try:
        return x.data_ptr() != 0
    except RuntimeError:
        return False


class _Tensor(ctypes.Structure):
    """struct Tensor of stages/common/tensor.cuh."""

    _fields_ = [("data", ctypes.c_void_p), *((f"stride_{x}", ctypes.c_int64) for x in "bhn")]

    @classmethod
    def of(cls, x: torch.Tensor) -> _Tensor:
        return cls(x.data_ptr(), *x.stride()[:3])


class _FwdParams(ctypes.Structure):
    """struct FwdParams of flash_fwd.cu."""

    _fields_ = [*((x, _Tensor) for x in "QKVO"), ("L", ctypes.c_void_p), ("workspace", ctypes.c_void_p),
                *((x, ctypes.c_int) for x in ("B", "H", "H_kv", "N_q", "N_k", "diagonal")),
                ("scale", ctypes.c_float)]


def _forward(q, k, v, diagonal: int | None, scale: float | None, stage, tiles: dict):
    """(o, L) by a stage, for tensors that _check_tensors passed. diagonal: None for no mask."""
    B, H, N_q, d = q.shape
    try:
        scale = ctypes.c_float(1 / math.sqrt(d) if scale is None else scale).value
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"scale must be a number, not {scale!r}") from None
    if not math.isfinite(scale):
        raise ValueError("scale must be finite in float32")
    report = _inspection.get()
    if report and q.device.type != "cpu":
        raise RuntimeError("inspect() observes the simulator, not a GPU: pass CPU tensors (q.cpu(), ...)")
    stage = find_stage(stage, q.dtype, q.device)
    tiles = stage.tiles(d, shared_memory_per_block(q.device), **tiles)
    library = _library(stage, definitions(stage, q.dtype, d, diagonal is not None, tiles), q.device)
    o = torch.empty_like(q)
    lse = torch.empty(B, H, N_q, dtype=torch.float32, device=q.device)
    params = _FwdParams(_Tensor.of(q), _Tensor.of(k), _Tensor.of(v), _Tensor.of(o), lse.data_ptr(), None,
                        B, H, k.shape[1], N_q, k.shape[2], diagonal or 0, scale)
    workspace_bytes = library.flash_fwd_workspace_bytes(ctypes.byref(params))
    workspace = torch.empty(-(-workspace_bytes // 4), dtype=torch.float32, device=q.device)
    inputs, outputs = {"Q": q, "K": k, "V": v}, {"O": o, "L": lse, stage.workspace: workspace}
    # under inspect(), the kernel works on copies between red zones
    with (report.guarded(inputs, outputs) if report else contextlib.nullcontext(inputs | outputs)) as at:
        for name in "QKVO":
            setattr(params, name, _Tensor.of(at[name]))
        params.L, params.workspace = at["L"].data_ptr(), at[stage.workspace].data_ptr()
        error = _run(library, params, q.device)
    if error:
        raise RuntimeError(f"stage {stage.name!r}: {simulator.resolve_addresses(error.decode())}")
    if report:
        report.flops += 4 * B * H * d * _visible_pairs(N_q, k.shape[2], diagonal)
    return o, lse


def _run(library: ctypes.CDLL, params: _FwdParams, device: torch.device) -> bytes | None:
    """Launch on the device's current stream. Returns what went wrong, or None."""
    if device.type == "cpu":
        return library.flash_fwd(ctypes.byref(params), None)
    with torch.cuda.device(device):
        return library.flash_fwd(ctypes.byref(params), torch.cuda.current_stream().cuda_stream)


def _visible_pairs(N_q: int, N_k: int, diagonal: int | None) -> int:
    """How many pairs of a query and a key that it sees."""
    if diagonal is None:
        return N_q * N_k
    return sum(min(max(row + diagonal + 1, 0), N_k) for row in range(N_q))


# ------------------------------------------------------------------------------------------ the loader
def definitions(stage: Stage, dtype: torch.dtype, d: int, causal: bool,
                tiles: dict[str, int]) -> dict[str, str | Path]:
    """The macros that flash_fwd.cu is compiled with; a path stands for a file to include."""
    return {"STAGE_FILE": stage.path, "ELEMENT": ELEMENTS[dtype], "HEAD_DIM": str(d),
            "CAUSAL": str(int(causal)), "BLOCK_R": str(tiles["Br"]), "BLOCK_C": str(tiles["Bc"])}


_libraries: dict = {}  # (stage's name, macros, target, debug, checker) -> (library, {source file: its time})


def _library(stage: Stage, macros: dict[str, str | Path], device: torch.device) -> ctypes.CDLL:
    """The stage compiled for a device; compiled anew if a file's time and content have changed."""
    target = torch.cuda.get_device_capability(device) if device.type == "cuda" else "cpu"
    report = _inspection.get()
    checked = report is not None
    key = (stage.name, tuple(macros.items()), target, _debug(), checked and report.runtime)
    if key in _libraries:
        library, times = _libraries[key]
        with contextlib.suppress(FileNotFoundError):
            if all(file.stat().st_mtime_ns == time for file, time in times.items()):
                return library
    source = ROOT / "flash_fwd.cu"
    times = {file: file.stat().st_mtime_ns for file in source_files(source, stage.path)}
    library = ctypes.CDLL(str(build(source, device, macros, f"fwd_{stage.name}", checked)))
    library.flash_fwd.restype = ctypes.c_char_p
    library.flash_fwd.argtypes = [ctypes.POINTER(_FwdParams), ctypes.c_void_p]
    library.flash_fwd_workspace_bytes.restype = library.flash_fwd_params_bytes.restype = ctypes.c_size_t
    if library.flash_fwd_params_bytes() != ctypes.sizeof(_FwdParams):
        raise RuntimeError("FwdParams in flash_fwd.cu and _FwdParams in flash.py differ: make them the same")
    _libraries[key] = library, times
    return library


def build(source: Path, device: torch.device, macros: dict[str, str | Path] | None = None,
          name: str | None = None, checked: bool = False) -> Path:
    """Compile a .cu file to a shared library, once per content: by nvcc for a GPU, else for the simulator.

    Args:
        source: the file. What it and the files among `macros` include is part of the build.
        macros: by name; a pathlib.Path is a file that the source includes by this macro.
        name: the first part of the library's name.
        checked: with calls of the checker, for `inspect`; in the simulator only.
    Returns:
        The library's path, to be loaded with ctypes.CDLL.
    Raises:
        RuntimeError: without a compiler; with the compiler's messages; for CUDA syntax that the simulator
            does not know.
    """
    macros = macros or {}
    files = source_files(source, *(value for value in macros.values() if isinstance(value, Path)))
    if device.type == "cuda":
        return _build_for_gpu(name or source.stem, files, macros, torch.cuda.get_device_capability(device))
    return _build_for_cpu(name or source.stem, files, macros, checked)


def _debug() -> bool:
    """FLASH_DEBUG=1: without optimisation, for a debugger."""
    return os.environ.get("FLASH_DEBUG", "0") not in ("", "0")


def source_files(*files: Path) -> list[Path]:
    """These files and all that they include by #include "...", each once."""
    found: list[Path] = []
    waiting = list(files)
    while waiting:
        file = waiting.pop(0)
        if file in found:
            continue
        found.append(file)
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(errors="replace"), re.M):
            places = (folder / name for folder in (file.parent, ROOT, STAGES))
            waiting += [place.resolve() for place in places if place.is_file()][:1]
    return found


def _name(prefix: str, files: list[Path], *rest) -> str:
    """A name for a build, with a hash of everything that goes into it."""
    digest = hashlib.sha256(repr(rest).encode())
    prefix = re.sub(r"\W", "_", prefix)
    for file in files:
        digest.update(f"{file}\0".encode() + file.read_bytes())
    return f"{prefix}_{digest.hexdigest()[:16]}"


def _build_for_cpu(name: str, files: list[Path], macros: dict[str, str | Path], checked: bool) -> Path:
    if missing := simulator.missing_compiler():
        raise RuntimeError(missing)
    runtime = _build_simulator()
    flags = simulator.compile_flags(_debug(), checked)
    name = f"{name}_cpu" + "_checked" * checked
    name = _name(name, files, macros, flags, simulator.signature(), torch.__version__)
    folder = BUILD / name / "translated"
    translated = simulator.translated_files(files, ROOT, folder)

    def write_sources() -> list[Path]:
        try:
            simulator.translate_files(translated)
        except simulator.TranslationError as error:
            raise RuntimeError(f"cannot translate CUDA for the CPU: {error}") from None
        return [translated[files[0]]]

    macros = {macro: translated[value] if isinstance(value, Path) else value
              for macro, value in macros.items()}
    return _build(name, write_sources, macros, cflags=[*flags, f"-I{folder}", f"-I{folder / 'stages'}"],
                  ldflags=[str(runtime), f"-Wl,-rpath,{runtime.parent}", *simulator.link_flags(checked)])


def _build_simulator() -> Path:
    name = _name("simulator", [], simulator.signature(), torch.__version__)
    if not _is_built(name):
        print("Building the simulator, once: a few seconds ...", file=sys.stderr, flush=True)
    return _build(name, simulator.runtime_sources, {},
                  cflags=["-std=c++17", "-O2", "-g", "-fno-strict-aliasing", "-fno-semantic-interposition"],
                  ldflags=["-ldl", "-pthread"])


def _build_for_gpu(name: str, files: list[Path], macros: dict[str, str | Path], capability: tuple) -> Path:
    nvcc = find_nvcc(torch.version.cuda)
    arch = f"{capability[0]}{capability[1]}" + "a" * (capability[0] == 9)  # sm_90a: Hopper's own too
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-std=c++17", "-lineinfo",
             f"-I{ROOT}", f"-I{STAGES}",  # -U in what follows: torch's load() defines them
             "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
             "-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
             *(["-G"] if _debug() else ["-O3"])]
    name = _name(f"{name}_sm{arch}", files, macros, flags, str(nvcc), nvcc_version(nvcc), torch.__version__)
    cpp_extension.CUDA_HOME = str(nvcc.parent.parent)
    return _build(name, lambda: [files[0]], macros, cuda_cflags=flags,
                  ldflags=[f"-L{_linkable_cudart(nvcc.parent.parent)}"])


def _linkable_cudart(cuda_home: Path) -> Path:
    """A folder with libcudart.so.

    NVIDIA's wheels have only libcudart.so.13: then a link to that, in the build folder.
    """
    versioned = []
    for lib in (cuda_home / "lib64", cuda_home / "lib", *cuda_home.glob("targets/*/lib")):
        if (lib / "libcudart.so").exists():
            return lib
        versioned += lib.glob("libcudart.so.*")
    if not versioned:
        raise RuntimeError(f"no libcudart.so under {cuda_home}: install the CUDA runtime "
                           "(pip install -r requirements.txt)")
    link = BUILD / "cudart" / "libcudart.so"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.unlink(missing_ok=True)  # it may lead to what an upgrade has removed
        with contextlib.suppress(FileExistsError):
            link.symlink_to(versioned[0])
    return link.parent


def _is_built(name: str) -> bool:
    return (BUILD / name / "done").exists()


def _build(name: str, sources, macros: dict[str, str | Path], cflags=(), cuda_cflags=(), ldflags=()) -> Path:
    """Compile and link `sources()` to build/<name>/<name>.so with torch's cpp_extension, unless it is there.

    Safe beside another process that builds the same, and after a build that was interrupted: our lock is the
    kernel's, so it ends with the process that holds it. torch's lock is a file, which an interrupted build
    leaves behind and the next one waits for without end; under our lock such a file can only be an orphan,
    and is deleted.

    Raises:
        RuntimeError: with the compiler's errors.
    """
    folder = BUILD / name
    library = folder / f"{name}.so"
    if _is_built(name):
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "flash_lock", "w")
    except OSError as error:
        raise RuntimeError(f"cannot write to the build folder {BUILD} ({error.strerror}): "
                           "set FLASH_BUILD_DIR to another one") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_built(name):
            return library
        (folder / "lock").unlink(missing_ok=True)
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)  # else a failed build counts as done
        files = [str(file) for file in sources()]
        defines = [f'-D{macro}="{value}"' if isinstance(value, Path) else f"-D{macro}={value}"
                   for macro, value in macros.items()]
        try:
            cpp_extension.load(name, files, extra_cflags=_ninja_quoted([*defines, *cflags]),
                               extra_cuda_cflags=_ninja_quoted([*defines, *cuda_cflags]),
                               extra_ldflags=_ninja_quoted(ldflags), build_directory=str(folder),
                               with_cuda=bool(cuda_cflags), is_python_module=False, verbose=False)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            message = f"{error}\n{error.__cause__ or ''}"  # of a library that cannot be loaded
            raise RuntimeError(_compile_error(name, message)) from None
        (folder / "done").touch()
    return library


def _ninja_quoted(flags) -> list[str]:
    """load() writes flags into a ninja file as they are, and ninja hands them to a shell."""
    return [shlex.quote(flag).replace("$", "$$") for flag in flags]


def _compile_error(name: str, output: str) -> str:
    """What the compiler and the linker said, out of what ninja printed: not its own lines, nor commands."""
    ninja = r"Error building|ninja: |FAILED: |\[\d+/\d+\] |\S+ .*(-DTORCH_EXTENSION_NAME|-shared )"
    lines = [line for line in output.splitlines() if not re.match(ninja, line)]
    return f"building {name} failed:\n" + "\n".join(lines[:30])


# ------------------------------------------------------------------------------------------ nvcc
def nvcc_version(nvcc: Path) -> str:
    """Such as "13.0"; empty if the program does not run."""
    return _nvcc_version(str(nvcc))


@functools.cache
def _nvcc_version(nvcc: str) -> str:
    try:
        out = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ""
    found = re.search(r"release (\d+\.\d+)", out)
    return found[1] if found else ""


def find_nvcc(cuda: str | None = None) -> Path:
    """The CUDA compiler: the first that will do in $CUDA_HOME, NVIDIA's wheels, the PATH, /usr/local/cuda.

    Args:
        cuda: the CUDA version that PyTorch was built with, such as "13.0"; nvcc's major version must be the
            same. None: any.
    Raises:
        RuntimeError: if there is none, saying what was found.
    """
    return _find_nvcc(cuda, os.environ.get("CUDA_HOME"), tuple(sys.path), os.environ.get("PATH"))


@functools.cache  # once found; not finding any is an exception, which is not kept
def _find_nvcc(cuda: str | None, cuda_home: str | None, python_path: tuple, path: str | None) -> Path:
    on_path = shutil.which("nvcc", path=path)
    candidates = [
        *([Path(cuda_home) / "bin/nvcc"] if cuda_home else []),
        *(nvcc for entry in python_path for nvcc in sorted(Path(entry).glob("nvidia/cu*/bin/nvcc"))),
        *([Path(on_path).resolve()] if on_path else []),
        SYSTEM_CUDA / "bin/nvcc",
    ]
    versions = {nvcc: version for nvcc in candidates if nvcc.is_file() and (version := nvcc_version(nvcc))}
    for nvcc, version in versions.items():
        if cuda is None or version.split(".")[0] == cuda.split(".")[0]:
            return nvcc
    wanted = f"nvcc {cuda.split('.')[0]}.x (PyTorch was built with CUDA {cuda})" if cuda else "nvcc"
    found = ", ".join(f"{nvcc} is {version}" for nvcc, version in versions.items()) or "there is no nvcc"
    major = (cuda or "13").split(".")[0]
    raise RuntimeError(f"needs {wanted}; {found}: pip install 'cuda-toolkit[nvcc,cccl]=={major}.*', "
                       "or set CUDA_HOME")


# ------------------------------------------------------------------------------------------ python flash.py
def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return f"{name} (sm_{major}{minor}), CUDA {torch.version.cuda}, PyTorch {torch.__version__}"
    return f"CPU, in the simulator ({os.cpu_count()} cores), PyTorch {torch.__version__}"


def main() -> None:
    """Print the ladder, and what of it runs on this machine."""
    from rich.console import Console
    from rich.table import Table

    device = default_device()
    table = Table(title=f"Stages on this machine: {describe_device(device)}",
                  caption="flash.attention(q, k, v, stage=...)")
    for column in ("#", "stage", "types", "needs", "runs here", "idea"):
        table.add_column(column, no_wrap=column == "stage", overflow="fold")
    type_names = {dtype: name for name, dtype in DTYPES.items()}
    for s in stages():
        table.add_row(f"{s.direction} {s.number}", s.name, ", ".join(type_names[t] for t in s.dtypes),
                      s.needs, str(s.available(device)), s.idea)
    Console().print(table)


if __name__ == "__main__":
    main()
