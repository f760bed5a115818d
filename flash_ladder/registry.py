"""The stages: what the headers of the files in stages/ say of them, and which of them a call takes."""

from __future__ import annotations

import difflib
import functools
import math
import operator
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from flash_ladder import simulator

from .nvcc import find_nvcc

ROOT = Path(__file__).resolve().parent.parent
STAGES = ROOT / "stages"

FIELDS = ("idea", "types", "needs", "after", "default", "deterministic", "tiles", "limits", "shared",
          "workspace", "hbm", "predicted", "measured")
ARCHITECTURE = r"(any GPU|sm_\d\d+a?)"
# By their name in a stage's header
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MANY = 1 << 62                            # rows of Q, where nobody says how many
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
TENSORS = {"fwd": ("Q", "K", "V", "O", "L"),
           "bwd": ("Q", "K", "V", "O", "dO", "L", "dL", "dQ", "dK", "dV")}
DETERMINISM = {"yes": (True, False), "no": (False, False), "on request": (False, True)}


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
    """One rung of a ladder, as the header of its file describes it.

    The conditions of `tile_rules` are expressions in d, causal, and rows, which is B * H * N_q rounded down
    to a power of 2; `limits` and `shared`, in bytes a block, in d, Br and Bc; `hbm`, in bytes, also in B, H,
    H_kv, N_q, N_k, Tr, Tc and Td = ceil(d / Bc).
    """

    number: int
    name: str
    direction: str                          # "fwd" or "bwd"
    path: Path
    idea: str = ""
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    needs: str = "any GPU"                  # or the least compute capability, such as sm_70; bf16: sm_80
    after: str = ""                         # the stage that it grew from, its parent; empty for a root
    default: str = ""                       # the end of a branch: from which architecture on a call without a
                                            # name takes it; empty: never
    deterministic: bool = True              # bit-identical results every run
    deterministic_on_request: bool = False  # if compiled with -DDETERMINISTIC=1, at a cost
    tile_rules: str = "Br=32 Bc=32"
    limits: str = ""
    shared: str = "0"
    hbm: str = ""                           # bytes read and written without a mask, if nothing is cached
    workspace: str = "workspace"            # what its scratch memory holds, such as S, P
    predicted: str = ""                     # the gain over its parent: written before it was measured
    measured: str = ""

    def __str__(self) -> str:
        return f"{'backward ' * (self.direction == 'bwd')}stage {self.name!r}"

    @property
    def can_be_deterministic(self) -> bool:
        return self.deterministic or self.deterministic_on_request

    def needs_for(self, dtype: torch.dtype | None = None) -> str:
        """What it needs for a type; None: for the one that needs least."""
        first, *others = self.needs.split(";")
        by_type = dict(other.strip().split(": ") for other in others)
        return next((needed for name, needed in by_type.items() if DTYPES[name] == dtype), first)

    def available(self, device: torch.device | str | None = None,
                  dtype: torch.dtype | None = None) -> Available:
        """Whether this stage can run on a device (default: the GPU if any, else the CPU), or why not.

        dtype: of q, k and v; None: some type.
        """
        device = default_device() if device is None else torch.device(device)
        if device.type == "cpu":
            return Available(simulator.missing_compiler() or "")
        if device.type != "cuda":
            return Available(f"stages run on CUDA and CPU tensors, not on {device.type}")
        needs = self.needs_for(dtype)
        if not _has(device, needs):
            what = f"{needs} for {dtype}" if needs != self.needs and dtype else needs
            have = torch.cuda.get_device_capability(device)
            return Available(f"needs {what}; {torch.cuda.get_device_name(device)} has sm_{have[0]}{have[1]}")
        try:
            find_nvcc(torch.version.cuda)
        except RuntimeError as error:
            return Available(str(error))
        return Available()

    def default_tiles(self, d: int, rows: int = MANY, causal: bool = False) -> dict[str, int]:
        """Br and Bc for a head dimension, B * H * N_q rows and a mask or none: the last rule whose condition
        holds."""
        tiles = {}
        for rule in self.tile_rules.split(";"):
            condition, _, sizes = rule.rpartition(":")
            if not condition or _evaluate(condition, d=d, rows=rows, causal=causal):
                tiles = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", sizes)}
        return tiles

    def tiles(self, d: int, shared_memory: int, rows: int = MANY, causal: bool = False,
              **chosen: int) -> dict[str, int]:
        """The tile sizes of a call: `chosen` ones, else the defaults, or the nearest to them that fit.

        In messages they have attention()'s names: Br_bwd and Bc_bwd for a backward stage.

        Args:
            d: head dimension.
            shared_memory: bytes that a block may have on the device.
            rows: B * H * N_q.
            causal: whether there is a mask.
        Raises:
            ValueError: if the stage does not know a tile by this name, or cannot use its size.
        """
        for name, size in chosen.items():
            if name not in ("Br", "Bc"):
                raise ValueError(f"{name}: {self} has no such argument; its tile sizes are Br and Bc")
            if isinstance(size, bool) or not hasattr(size, "__index__") or not 1 <= size <= 1024:
                raise ValueError(f"{name}{self._suffix} must be an integer from 1 to 1024, not {size!r}")
            chosen[name] = operator.index(size)
        rows = 1 << rows.bit_length() - 1  # rounded down, so that the cache stays small
        return dict(self._fitting_tiles(d, shared_memory, rows, causal, tuple(chosen.items())))

    @functools.cache
    def fits(self, d: int, shared_memory: int) -> bool:
        """Whether it has tile sizes for this head dimension and so many bytes of shared memory a block."""
        try:
            self._fitting_tiles(d, shared_memory, MANY, False, ())
        except ValueError:
            return False
        return True

    @functools.cache  # some 100 us, in every call of attention()
    def _fitting_tiles(self, d: int, shared_memory: int, rows: int, causal: bool,
                       chosen: tuple) -> dict[str, int]:
        tiles = self.default_tiles(d, rows, causal)
        tiles.update(chosen)
        if not (problem := self._tile_problem(d, shared_memory, tiles)):
            return tiles
        fitting = [t for br in range(8, 257, 8) for bc in range(8, 257, 8)
                   if not self._tile_problem(d, shared_memory, t := {"Br": br, "Bc": bc})]
        if not fitting:
            raise ValueError(f"{problem}; no tile sizes fit: take a smaller d or another stage")
        nearest = min(fitting, key=lambda t: sum(abs(math.log(t[name] / tiles[name])) for name in t))
        if chosen:
            would = ", ".join(f"{name}{self._suffix}={size}" for name, size in nearest.items())
            raise ValueError(f"{problem}; {would} would work")
        return nearest

    def hbm_bytes(self, B: int, H: int, N_q: int, N_k: int, d: int, *, Br: int, Bc: int,
                  H_kv: int | None = None) -> int | None:
        """Bytes that warps read from and write to HBM, without a mask and a cache: the header's formula.

        None if the header has none. H_kv: default H. `inspect` counts the same.
        """
        if not self.hbm:
            return None
        return _evaluate(self.hbm, B=B, H=H, H_kv=H_kv or H, N_q=N_q, N_k=N_k, d=d, Br=Br, Bc=Bc,
                         Tr=-(-N_q // Br), Tc=-(-N_k // Bc), Td=-(-d // Bc))

    @property
    def _suffix(self) -> str:
        return "_bwd" if self.direction == "bwd" else ""

    def _tile_problem(self, d: int, shared_memory: int, tiles: dict[str, int]) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in tiles.items())
        for limit in filter(None, map(str.strip, self.limits.split(";"))):
            if not _evaluate(limit, d=d, **tiles):
                return f"{self} needs {limit}, and got {sizes}"
        needed = _evaluate(self.shared, d=d, **tiles)
        if needed > shared_memory:
            return (f"{self} with {sizes}, d={d} needs {needed} bytes of shared memory a block, "
                    f"and this device has {shared_memory}")
        return ""


def capability(architecture: str) -> tuple[int, int]:
    """sm_80: (8, 0). any GPU: (0, 0)."""
    found = re.fullmatch(r"sm_(\d+)(\d)a?", architecture)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _has(device: torch.device, architecture: str) -> bool:
    """Whether a device is of this architecture or a later one; the simulator is of every one."""
    if device.type == "cpu":
        return True
    needed, have = capability(architecture), torch.cuda.get_device_capability(device)
    if architecture.endswith("a"):  # sm_90a: its own instructions, which no later one has
        return have[0] == needed[0]
    return have >= needed


def _evaluate(expression: str, **names: int) -> int:
    """The value of an expression in a stage's header, in these names, min and max."""
    return eval(expression, {"__builtins__": {}, "min": min, "max": max}, names)


def read_stage(path: Path, direction: str = "fwd") -> Stage:
    """The stage in a .cuh file. Its header's fields are optional: a file of your own needs none.

    Args:
        direction: "fwd" or "bwd", for a file whose first line does not say "Forward stage" or "Backward
            stage".
    Raises:
        ValueError: if it is no file, or a field of its header is not understood.
    """
    path = Path(path)
    if not path.is_absolute():  # resolve() takes longer than all the rest
        path = path.resolve()
    if not path.is_file():
        raise ValueError(f"{_argument(direction)}: {path} is no file")
    return _read_stage(path, direction, path.stat().st_mtime_ns)


@functools.cache
def _read_stage(path: Path, direction: str, modified: int) -> Stage:
    header = re.match(r"\ufeff?(?://.*\n)*", path.read_text(errors="replace"))[0]
    title = re.match(r"\ufeff?// (Forward|Backward) stage(?: (\d+))?: (\w+)", header)
    if title:
        direction = "fwd" if title[1] == "Forward" else "bwd"
    lines = re.sub(r"\n// {8,}", " ", header)  # a long field goes on in the next line
    fields = dict(re.findall(rf"^// ({'|'.join(FIELDS)}): *(.*)$", lines, re.M))
    types = re.split(r",\s*", fields.get("types", "fp32"))
    if unknown := set(types) - set(DTYPES):
        raise ValueError(f"{path}: types: {', '.join(unknown)} not among {', '.join(DTYPES)}")
    by_type = rf"{ARCHITECTURE}(; ({'|'.join(types)}): {ARCHITECTURE})*"
    if not re.fullmatch(by_type, needs := fields.get("needs", "any GPU")):
        raise ValueError(f"{path}: needs: {needs!r} is neither 'any GPU' nor a capability, such as sm_80; "
                         "others may follow for one of the types each, as in sm_70; bf16: sm_80")
    default, after = (fields.get(name, "").strip() for name in ("default", "after"))
    if default and not re.fullmatch(ARCHITECTURE, default):
        raise ValueError(f"{path}: default: {default!r} is neither 'any GPU' nor an architecture, such as "
                         "sm_80, from which on this stage is taken; leave the line out if it never is")
    if (determinism := fields.get("deterministic", "yes")) not in DETERMINISM:
        raise ValueError(f"{path}: deterministic: {determinism!r} is not among {', '.join(DETERMINISM)}")
    if (workspace := fields.get("workspace", "workspace")) in TENSORS[direction]:
        raise ValueError(f"{path}: workspace: {workspace} is a tensor of the call: give it another name")
    deterministic, on_request = DETERMINISM[determinism]
    in_ladder = title and title[2] and path.parent == STAGES
    if after and not in_ladder:
        _check_parent(path, after, [s.name for s in stages(direction)], direction)
    stage = Stage(
        number=int(title[2]) if in_ladder else 0, name=title[3] if in_ladder else path.stem,
        direction=direction, path=path, idea=fields.get("idea", ""),
        dtypes=tuple(DTYPES[t] for t in types), needs=needs, after=after, default=default,
        deterministic=deterministic,
        deterministic_on_request=on_request, tile_rules=fields.get("tiles", "Br=32 Bc=32"),
        limits=fields.get("limits", ""), shared=fields.get("shared", "0"), hbm=fields.get("hbm", ""),
        workspace=workspace, predicted=fields.get("predicted", ""), measured=fields.get("measured", ""))
    try:
        if sorted(tiles := stage.default_tiles(64)) != ["Bc", "Br"]:
            raise ValueError("tiles: must give Br and Bc, as in Br=64 Bc=32; d > 128: Br=16 Bc=32")
        stage._tile_problem(64, 0, tiles)
        stage.hbm_bytes(1, 1, 64, 64, 64, **tiles)
    except Exception as error:  # whatever the expressions raise
        fields = "tiles, limits, shared or hbm"
        raise ValueError(f"{path}: the header's {fields} make no sense: {error}") from None
    return stage


def stages(direction: str | None = None) -> list[Stage]:
    """All stages of the repository, in the order of the ladders: the forward stages, then the backward ones.

    Args:
        direction: only "fwd" or only "bwd".
    Raises:
        ValueError: if two of one direction have the same name, a header is not understood, or the `after:`
            lines make no tree.
    """
    if direction not in (None, *DIRECTIONS):
        raise ValueError(f"direction must be fwd, bwd or None, not {direction!r}")
    found: list[Stage] = []
    for which in DIRECTIONS if direction is None else (direction,):
        by_name: dict[str, Stage] = {}
        for path in sorted(STAGES.glob(f"{which}_[0-9]*.cuh")):
            stage = _read_stage(path, which, path.stat().st_mtime_ns)
            if stage.name in by_name:
                raise ValueError(f"{path.name} and {by_name[stage.name].path.name} are both called "
                                 f"{stage.name!r}: give one of them another name, in its first line")
            by_name[stage.name] = stage
        _check_tree(tuple((s.name, s.after, s.path) for s in by_name.values()), which)
        found += by_name.values()
    return found


def _check_parent(path: Path, after: str, known: Iterable[str], direction: str) -> None:
    if after not in known:
        raise ValueError(f"{path}: after: there is no {DIRECTIONS[direction]} stage {after!r} to grow from; "
                         f"there are {', '.join(known)}. A root has no such line")


@functools.cache  # stages() is in every call of attention()
def _check_tree(ladder: tuple[tuple[str, str, Path], ...], direction: str) -> None:
    """Raise ValueError if a parent is not there, or ancestors lead back to where they began.

    ladder: the name, the parent's name and the file of each stage.
    """
    parents = {name: after for name, after, _ in ladder}
    for name, _, path in ladder:
        passed = [name]
        while after := parents[passed[-1]]:
            _check_parent(path, after, parents, direction)
            passed.append(after)
            if passed.count(after) > 1:
                raise ValueError(f"{path}: after: {' after '.join(passed)}: a circle; let one of them grow "
                                 "from a stage outside of it")


def parent(stage: Stage) -> Stage | None:
    """The stage that it grew from, or None for a root."""
    return next((s for s in stages(stage.direction) if s.name == stage.after), None) if stage.after else None


def lineage(stage: Stage) -> list[Stage]:
    """The stage, its parent, and so on up to the root."""
    return list(_lineage(stage, {s.name: s for s in stages(stage.direction)}))


def _lineage(stage: Stage, by_name: dict[str, Stage]) -> Iterator[Stage]:
    yield stage
    while stage.after:
        yield (stage := by_name[stage.after])


def find_stage(stage: str | Path | Stage | None, dtype: torch.dtype, device: torch.device,
               direction: str = "fwd", deterministic: bool | None = False, d: int | None = None) -> Stage:
    """The stage that a call asks for; for None, the best that takes the type and `d`, runs on the device and,
    if so asked, is deterministic: see `best_stage`.

    Args:
        direction: "fwd" or "bwd".
        deterministic: refuse a stage that cannot be. None: as torch.use_deterministic_algorithms() says.
        d: head dimension, for which the device may have too little shared memory. None: any.
    Raises:
        ValueError: if there is no such stage, it does not take `dtype`, or is not deterministic.
        RuntimeError: if it cannot run on `device`, or PyTorch's switch asks for a deterministic one.
    """
    argument, ladder = _argument(direction), "backward stages" if direction == "bwd" else "stages"
    wanted = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    if isinstance(stage, str):
        stage = _named(stage, direction)
    elif isinstance(stage, Path):
        stage = read_stage(stage, direction)
    elif stage is None:
        known = stages(direction)
        if dtype not in (types := dict.fromkeys(t for s in known for t in s.dtypes)):
            raise ValueError(f"q has type {dtype}; the {ladder} take {', '.join(map(str, types))}: convert "
                             f"with {_conversion(known[0])}")
        stage = best_stage(known, device, dtype, wanted, d)
    elif not isinstance(stage, Stage):
        raise ValueError(f"{argument} must be a name, a pathlib.Path or a Stage, not {type(stage).__name__}")
    if stage.direction != direction:
        raise ValueError(f"{argument}: {stage.path.name} is a {DIRECTIONS[stage.direction]} stage: pass it "
                         f"as {_argument(stage.direction)}=")
    if dtype not in stage.dtypes:
        known = ", ".join(map(str, stage.dtypes))
        raise ValueError(f"{stage} takes {known}; q, k and v have {dtype}: convert them with "
                         f"{_conversion(stage)}")
    if not (available := stage.available(device, dtype)):
        raise RuntimeError(f"{stage} cannot run on {device}: {available}")
    if wanted and not stage.can_be_deterministic:
        names = ", ".join(s.name for s in stages(direction) if s.can_be_deterministic) or "none"
        message = f"{stage} is not deterministic; those of the {ladder} that can be: {names}"
        if deterministic:
            raise ValueError(message)
        message += ". torch.use_deterministic_algorithms(True) asks for one"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(f"{message}; deterministic=False overrules it for a call")
        warnings.warn(message, stacklevel=1)  # of one line, so shown once
    return stage


def best_stage(ladder: list[Stage], device: torch.device, dtype: torch.dtype, deterministic: bool = False,
               d: int | None = None) -> Stage:
    """The stage that a call takes without naming one.

    That is the one whose `default:` is the latest architecture that the device has. Where it will not do,
    being too large for `d`, say, or not deterministic, its nearest relative that will.

    Args:
        ladder: all stages of a direction; some take `dtype`.
        deterministic: whether it has to be.
    Returns:
        A stage that takes `dtype`. If none will do, one for the error message.
    """
    takers = [s for s in ladder if dtype in s.dtypes]
    takers = [s for s in takers if s.can_be_deterministic or not deterministic] or takers
    candidates = (s for s in _by_preference(ladder, device, dtype) if s in takers)
    first = next(candidates)
    return next((s for s in (first, *candidates) if s.available(device, dtype)
                 and (d is None or s.fits(d, shared_memory_per_block(device)))), first)


def _by_preference(ladder: list[Stage], device: torch.device, dtype: torch.dtype) -> Iterator[Stage]:
    """All stages, some several times. For each default, that of the latest architecture that the device has
    first: it, what grew from it, its parent, what else grew from that, and so on. At last, the rest."""
    by_name = {s.name: s for s in ladder}
    defaults = sorted((s for s in ladder if s.default and dtype in s.dtypes),
                      key=lambda s: (_has(device, s.default), capability(s.default)), reverse=True)
    for default in defaults:
        for ancestor in _lineage(default, by_name):
            yield ancestor
            yield from (s for s in reversed(ladder) if ancestor in _lineage(s, by_name))
    yield from reversed(ladder)


def _conversion(stage: Stage) -> str:
    return f".to({stage.dtypes[0]})"


def _argument(direction: str) -> str:
    """The argument of attention() that takes such a stage."""
    return "backward" if direction == "bwd" else "stage"


def _named(name: str, direction: str) -> Stage:
    """The stage of this name, or an error that helps to find it."""
    known = {s.name: s for s in stages(direction)}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    if other := next((s for s in stages() if s.name == name), None):
        hint = f"It is a {DIRECTIONS[other.direction]} stage: pass it as {_argument(other.direction)}=."
    elif name.endswith(".cuh") or "/" in name or not close:
        hint = "For a file of your own, pass a pathlib.Path."
    else:
        hint = f"Did you mean {close[0]!r}?"
    what = "backward stage" if direction == "bwd" else "stage"
    raise ValueError(f"{_argument(direction)}: there is no {what} {name!r}; there are {', '.join(known)}. "
                     f"{hint}")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return f"{name} (sm_{major}{minor}), CUDA {torch.version.cuda}, PyTorch {torch.__version__}"
    return f"CPU, in the simulator ({os.cpu_count()} cores), PyTorch {torch.__version__}"


def shared_memory_per_block(device: torch.device) -> int:
    """Bytes of shared memory that a block may ask for."""
    if device.type == "cpu":
        return simulator.SHARED_MEMORY_PER_BLOCK
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
