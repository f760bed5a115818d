"""The library of a stage: compiled, loaded, and handed the twins of FwdParams and BwdParams."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .inspection import current_report
from .loader import build, debug
from .simulator import resolve_addresses
from .sources import ROOT, STAGES, source_files
from .stage import Stage

ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}   # in CUDA
# In the texts of CUDA's errors after which no kernel runs any more (CUDA Runtime API, cudaError_t: "To
# continue using CUDA, the process must be terminated and relaunched")
CONTEXT_IS_LOST = ("illegal memory access", "unspecified launch failure", "misaligned address",
                   "illegal instruction", "invalid program counter", "invalid address space",
                   "hardware stack error", "device-side assert")
ADVICE = (". The CUDA context is lost: nothing more runs on the GPU in this process; start Python again. It "
          "may have been a kernel of an earlier call: CUDA_LAUNCH_BLOCKING=1 shows which, compute-sanitizer "
          "the line")
LOOK_AGAIN = 0.1  # seconds: so long after an edit, at the latest, a stage is compiled anew


class Tensor(ctypes.Structure):
    """struct Tensor of stages/common/tensor.cuh."""

    _fields_ = [("data", ctypes.c_void_p), *((f"stride_{x}", ctypes.c_int64) for x in "bhn")]


class MaskTensor(ctypes.Structure):
    """struct MaskTensor of stages/common/mask_params.cuh."""

    _fields_ = [("data", ctypes.c_void_p),
                *((f"stride_{x}", ctypes.c_int64) for x in ("b", "h", "row", "col"))]


class MaskParams(ctypes.Structure):
    """struct MaskParams of stages/common/mask_params.cuh."""

    _fields_ = [("tensors", MaskTensor * 4), ("ints", ctypes.c_int * 8), ("floats", ctypes.c_float * 4),
                *((x, ctypes.c_int) for x in ("diagonals", "B", "H")),
                *((x, ctypes.c_void_p) for x in ("lists", "gradient"))]


_SIZES: list[tuple[str, Any]] = [*((x, ctypes.c_int) for x in ("B", "H", "H_kv", "N_q", "N_k", "diagonal")),
          ("scale", ctypes.c_float), ("mask", MaskParams), ("sink", ctypes.c_void_p),
          ("seed", ctypes.c_void_p), ("dropout", ctypes.c_float)]


class FwdParams(ctypes.Structure):
    """struct FwdParams of flash_fwd.cu."""

    _fields_ = [*((x, Tensor) for x in ("Q", "K", "V", "O")),
                *((x, ctypes.c_void_p) for x in ("L", "workspace")), *_SIZES,
                *((x, ctypes.c_void_p) for x in ("seqlens_k", "block_table")),
                *((x, ctypes.c_int) for x in ("pages", "splits"))]


class BwdParams(ctypes.Structure):
    """struct BwdParams of flash_bwd.cu."""

    _fields_ = [*((x, Tensor) for x in ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")),
                *((x, ctypes.c_void_p) for x in ("L", "dL", "workspace")), *_SIZES,
                ("dsink", ctypes.c_void_p)]


_SEQUENCES: Any = [*((f"cu_seqlens_{x}", ctypes.c_void_p) for x in "qk"),
              *((x, ctypes.c_int) for x in ("sequences", "total_q", "total_k"))]


class VarlenFwdParams(FwdParams):
    """With -DVARLEN=1."""

    _fields_ = _SEQUENCES


class VarlenBwdParams(BwdParams):
    """With -DVARLEN=1."""

    _fields_ = _SEQUENCES


PARAMS = {"fwd": FwdParams, "bwd": BwdParams}
VARLEN_PARAMS = {"fwd": VarlenFwdParams, "bwd": VarlenBwdParams}


def params_of(direction: str, varlen: bool) -> Any:
    """The twin that a launch fills."""
    return (VARLEN_PARAMS if varlen else PARAMS)[direction]


class Files:
    """Files, as they are now."""

    def __init__(self, files: list[Path]):
        self._times = {file: file.stat().st_mtime_ns for file in files}
        self._look_at = time.monotonic() + LOOK_AGAIN

    def are_unchanged(self) -> bool:
        """Whether their times are the same; looks every LOOK_AGAIN seconds."""
        now = time.monotonic()
        if now < self._look_at:
            return True
        try:
            unchanged = all(file.stat().st_mtime_ns == then for file, then in self._times.items())
        except FileNotFoundError:
            return False
        if unchanged:
            self._look_at = now + LOOK_AGAIN
        return unchanged


def stage_files(stage: Stage, *others: Path) -> Files:
    """All that a stage is compiled from, and what `others` are; and its folder, since where none is named a
    new one may be taken."""
    return Files([*source_files(ROOT / f"flash_{stage.direction}.cu", stage.path, *others), STAGES])


class Library:
    """flash_fwd.cu, flash_bwd.cu or flash_mask.cu, compiled for a device and certain macros.

    run(params, stream) launches it, and returns null or what went wrong; workspace_bytes(params) says how
    much scratch memory it wants. Both take the address of a `struct`. subject: what errors are about.
    checked: for an inspection.
    """

    def __init__(self, entry: str, struct: Any, macros: dict[str, str | Path], device: torch.device,
                 name: str, subject: Stage | str, checked: bool):
        source = ROOT / f"{entry}.cu"
        self.subject = subject
        included = [value for value in macros.values() if isinstance(value, Path)]
        self.files = Files([*source_files(source, *included), STAGES])  # before they are read
        library = ctypes.CDLL(str(build(source, device, macros, name, checked)))
        run, workspace_bytes = library[entry], library[f"{entry}_workspace_bytes"]
        run.restype, run.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_void_p]
        params_bytes = library[f"{entry}_params_bytes"]
        workspace_bytes.restype = params_bytes.restype = ctypes.c_size_t
        workspace_bytes.argtypes = [ctypes.c_void_p]
        if params_bytes() != ctypes.sizeof(struct):
            raise RuntimeError(f"{struct.__name__} in {source.name} and its twin in Python differ: make "
                               "them the same")
        self.symbols = library
        self.run: Callable[[Any, int | None], bytes | None] = run
        self.workspace_bytes: Callable[[Any], int] = workspace_bytes
        if device.type == "cpu":
            self._contain(library, run, workspace_bytes)

    def failure(self, error: bytes) -> RuntimeError:
        """What run() returned, to be raised."""
        return _failure(self.subject, resolve_addresses(error.decode(errors="replace")))

    def _contain(self, library: ctypes.CDLL, *host_code: Any) -> None:
        """Let the simulator call the host code, so that its faults become errors, too."""
        run, size_of = (ctypes.cast(f, ctypes.c_void_p) for f in host_code)
        guarded_run, guarded_size = library["sim_guarded_run"], library["sim_guarded_size"]
        guarded_run.restype = guarded_size.restype = ctypes.c_char_p
        guarded_run.argtypes = guarded_size.argtypes = [ctypes.c_void_p] * 3

        def workspace_bytes(params: Any) -> int:
            size = ctypes.c_size_t()
            if error := guarded_size(size_of, params, ctypes.byref(size)):
                raise self.failure(error)
            return size.value

        self.run = functools.partial(guarded_run, run)
        self.workspace_bytes = workspace_bytes


latest: list[Stage] = []     # the stage that was launched last on a GPU


def is_lost(error: object) -> bool:
    """Whether an error says that the CUDA context is lost."""
    return any(words in str(error) for words in CONTEXT_IS_LOST)


def explain_loss(error: Exception) -> None:
    """Where PyTorch's own use of the GPU has found that the context is lost: raise an error that names the
    stage which was launched last, as the mistake may be its own."""
    if latest and is_lost(error):
        raise _failure(latest[0], str(error).splitlines()[0]) from error


def _failure(subject: Stage | str, text: str) -> RuntimeError:
    return RuntimeError(f"{subject}: {text}{ADVICE if is_lost(text) else ''}")


# With which every stage is compiled here: marks, for bench.py --timeline
more_macros: contextvars.ContextVar[dict[str, str | Path] | None]
more_macros = contextvars.ContextVar("more_macros", default=None)
_libraries: dict[tuple, Library] = {}  # by stage's file, macros, target, debug, checker


def load(stage: Stage, macros: dict[str, str | Path], device: torch.device) -> Library:
    """The stage compiled for a device; compiled anew if its files have changed."""
    target = torch.cuda.get_device_capability(device) if device.type == "cuda" else "cpu"
    report, macros = current_report(), macros | (more_macros.get() or {})
    key = (stage.path, tuple(macros.items()), target, debug(), report and report.runtime)
    library = _libraries.get(key)
    if library is None or not library.files.are_unchanged():
        direction = stage.direction
        library = _libraries[key] = Library(
            f"flash_{direction}", params_of(direction, "VARLEN" in macros), macros, device,
            f"{direction}_{stage.name}", stage, report is not None)
    return library


def definitions(stage: Stage, dtype: torch.dtype, d: int, causal: bool, tiles: dict[str, int],
                deterministic: bool = False, negative_scale: bool = False,
                mask: Path | None = None, d_v: int | None = None, dropout: bool = False,
                sink: bool = False, kv_cache: bool = False, page_size: int = 0,
                varlen: bool = False) -> dict[str, str | Path]:
    """The macros that flash_fwd.cu or flash_bwd.cu is compiled with; a path stands for a file to include.

    mask: a mask's file, if it is another one than that of `causal`. d_v: columns of v, if they are not d.
    page_size: of a cache in pages, the rows of one; 0: it is in none.
    """
    macros: dict[str, str | Path] = {"STAGE_FILE": stage.path, "ELEMENT": ELEMENTS[dtype], "HEAD_DIM": str(d),
              "MASK_FILE": mask or STAGES / "masks" / ("causal.cuh" if causal else "none.cuh"),
              "CAUSAL": str(int(causal)), "NEGATIVE_SCALE": str(int(negative_scale)),
              "BLOCK_R": str(tiles["Br"]), "BLOCK_C": str(tiles["Bc"])}
    if d_v not in (None, d):
        macros["HEAD_DIM_V"] = str(d_v)
    flags = {"DROPOUT": dropout, "SINK": sink, "KV_CACHE": kv_cache, "VARLEN": varlen}
    macros |= {name: "1" for name, asked in flags.items() if asked}
    if page_size:
        macros["PAGE_SIZE"] = str(page_size)
    if stage.direction == "bwd":
        macros["DETERMINISTIC"] = str(int(deterministic and stage.deterministic_on_request))
    return macros
