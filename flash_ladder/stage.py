"""A stage: what the header of its file says of it, and its tile sizes."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from . import simulator
from .arithmetic import ArithmeticProblem, evaluate
from .devices import default_device, multiprocessors, multiprocessors_of_a_launch
from .nvcc import find_nvcc
from .sources import STAGES, line_of, read_source, source_files
from .values import as_integer, shown

FIELDS = ("idea", "types", "needs", "after", "default", "deterministic", "takes", "refuses", "tiles",
          "limits", "shared", "splits", "workspace", "hbm", "predicted", "measured")
ARCHITECTURE = r"(any GPU|sm_\d\d+a?)"
# By their name in a stage's header
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MANY = 1 << 62                            # rows of Q, where nobody says how many
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
# Of a call, in the order in which a plan takes them
TENSORS = {"fwd": ("Q", "K", "V", "O", "L", "sink", "seed", "seqlens_k", "block_table", "cu_seqlens_q",
                   "cu_seqlens_k"),
           "bwd": ("Q", "K", "V", "O", "dO", "L", "dL", "sink", "seed", "cu_seqlens_q", "cu_seqlens_k", "dQ",
                   "dK", "dV", "dsink")}
# What a call may need
TAKES = ("dropout", "sink", "d_v", "varlen", "kv_cache")  # what not every stage knows; d_v: d_v < d
REFUSES = ("masks by head",)              # what the others know
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

    The conditions of `tile_rules` are expressions in d, causal, rows and keys, which are B * H * N_q and N_k
    rounded down to powers of 2, window, the keys that a row sees at most by the mask's own numbers, and
    packed, which is N_q * H / H_kv rounded up to one. `calls` is one in what is_for() takes. `limits` and
    `shared`, in bytes a block, are in d, Br and Bc; `splits` also in B, H, H_kv, N_q, N_k, Tr, Tc,
    Td = ceil(d / Bc) and blocks, those that a device has shared memory for at once, and multiprocessors;
    `hbm`, in bytes, in splits and multiprocessors instead.
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
    calls: str = ""                         # the condition on calls that do; empty: all
    deterministic: bool = True              # bit-identical results every run
    deterministic_on_request: bool = False  # if compiled with -DDETERMINISTIC=1, at a cost
    takes: tuple[str, ...] = ()             # of TAKES
    refuses: tuple[str, ...] = ()           # of REFUSES
    tile_rules: str = "Br=32 Bc=32"
    limits: str = ""
    shared: str = "0"
    splits: str = "1"                       # ranges of keys, a block each
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
        if not has_architecture(device, needs):
            what = f"{needs} for {dtype}" if needs != self.needs and dtype else needs
            have = torch.cuda.get_device_capability(device)
            return Available(f"needs {what}; {torch.cuda.get_device_name(device)} has sm_{have[0]}{have[1]}")
        try:
            find_nvcc(torch.version.cuda)
        except RuntimeError as error:
            return Available(str(error))
        return Available()

    def is_for(self, sizes: dict[str, int] | None) -> bool:
        """Whether a call without a name takes it, as far as sizes tell: B, H, H_kv, N_q, N_k, d; gradients: 1
        in the forward pass of a call that needs them, or 0; masked: 1 if it has a mask, such as causal, or 0;
        causal: 1 if that is its mask; deterministic: 1 if it has to be; and window, as of default_tiles(), if
        it has one. None: nobody knows them."""
        return not self.calls or sizes is not None and bool(
            self._value("default", self.calls, **{"window": MANY, "causal": 0, "deterministic": 0} | sizes))

    def lacks(self, needs: Iterable[str]) -> str:
        """The first of what a call needs that it does not know, of TAKES and REFUSES; empty: nothing."""
        return next((what for what in needs
                     if what in self.refuses or what in TAKES and what not in self.takes), "")

    def default_tiles(self, d: int, rows: int = MANY, causal: bool = False, window: int = MANY,
                      packed: int = 1, keys: int = 1) -> dict[str, int]:
        """Br and Bc for a call, as of tiles(): the last rule whose condition holds."""
        tiles = {}
        for rule in self.tile_rules.split(";"):
            condition, _, sizes = rule.rpartition(":")
            if not condition or self._value("tiles", condition, d=d, rows=rows, causal=causal,
                                            window=window, packed=packed, keys=keys):
                tiles = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", sizes)}
        return tiles

    def tiles(self, d: int, shared_memory: int, rows: int = MANY, causal: bool = False, window: int = MANY,
              packed: int = 1, keys: int = 1, **chosen: int) -> dict[str, int]:
        """The tile sizes of a call: `chosen` ones, else the defaults, or the nearest to them that fit.

        In messages they have attention()'s names: Br_bwd and Bc_bwd for a backward stage.

        Args:
            d: head dimension.
            shared_memory: bytes that a block may have on the device.
            rows: B * H * N_q.
            causal: whether it is causal.
            window: how many keys a row sees at most, as far as the mask's own numbers say.
            packed: N_q * H / H_kv.
            keys: N_k; 1: nobody knows it.
        Raises:
            ValueError: if the stage does not know a tile by this name, or cannot use its size.
        """
        for name, size in chosen.items():
            if name not in ("Br", "Bc"):
                raise ValueError(f"{name}: {self} has no such argument; its tile sizes are Br and Bc")
            whole = as_integer(size)
            if whole is None or not 1 <= whole <= 1024:
                raise ValueError(f"{name}{self._suffix} must be an integer from 1 to 1024, not {shown(size)}")
            chosen[name] = whole
        rows = 1 << rows.bit_length() - 1  # rounded down, so that the cache stays small
        packed = 1 << (packed - 1).bit_length()  # rounded up, likewise
        keys = 1 << keys.bit_length() - 1
        return dict(self._fitting_tiles(d, shared_memory, rows, causal, window, packed, keys,
                                        tuple(chosen.items())))

    @functools.cache
    def fits(self, d: int, shared_memory: int) -> bool:
        """Whether it has tile sizes for this head dimension and so many bytes of shared memory a block."""
        try:
            self._fitting_tiles(d, shared_memory, MANY, False, MANY, 1, 1, ())
        except ValueError:
            return False
        return True

    @functools.cache  # some 100 us, in every call of attention()
    def _fitting_tiles(self, d: int, shared_memory: int, rows: int, causal: bool, window: int, packed: int,
                       keys: int, chosen: tuple) -> dict[str, int]:
        tiles = self.default_tiles(d, rows, causal, window, packed, keys)
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
        """Bytes that warps read from and write to HBM, without a mask and a cache: the header's formula. (Of
        splits, those of this machine.)

        None if the header has none. H_kv: default H. `inspect` counts the same.
        """
        if not self.hbm:
            return None
        sizes = {"B": B, "H": H, "H_kv": H_kv or H, "N_q": N_q, "N_k": N_k, "d": d}
        tiles = {"Br": Br, "Bc": Bc}
        device = default_device()
        splits = self.number_of_splits(sizes, tiles, multiprocessors(device))
        return self._value("hbm", self.hbm, **sizes, **tiles, **_tiles_of(sizes, tiles), splits=splits,
                           multiprocessors=multiprocessors_of_a_launch(device))

    def number_of_splits(self, sizes: dict[str, int], tiles: dict[str, int],
                         multiprocessors: tuple[int, int]) -> int:
        """Ranges of keys for a call of these sizes, as of is_for(). multiprocessors: how many a device has,
        and bytes of shared memory of one; a block takes 1 KiB more than it asks for."""
        count, shared_memory = multiprocessors
        blocks = count * max(shared_memory // (self.shared_bytes(sizes["d"], tiles) + 1024), 1)
        return self._value("splits", self.splits, **sizes, **tiles, **_tiles_of(sizes, tiles), blocks=blocks,
                           multiprocessors=count)

    def _value(self, field: str, expression: str, **names: int):
        """Of an expression in the header."""
        try:
            return evaluate(expression, **names)
        except ArithmeticProblem as error:
            raise ValueError(f"{line_of(self.path, field)}: {field}: {error}") from None

    def shared_bytes(self, d: int, tiles: dict[str, int]) -> int:
        """Shared memory that a block of its largest kernel asks for: the header's formula."""
        return self._value("shared", self.shared, d=d, **tiles)

    @functools.cached_property
    def takes_masks(self) -> bool:
        """Whether it asks stages/common/mask.cuh which scores count."""
        return STAGES / "common" / "mask.cuh" in source_files(self.path)

    @property
    def _suffix(self) -> str:
        return "_bwd" if self.direction == "bwd" else ""

    def _tile_problem(self, d: int, shared_memory: int, tiles: dict[str, int]) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in tiles.items())
        for limit in filter(None, map(str.strip, self.limits.split(";"))):
            if not self._value("limits", limit, d=d, **tiles):
                return f"{self} needs {limit}, and got {sizes}"
        needed = self.shared_bytes(d, tiles)
        if needed > shared_memory:
            return (f"{self} with {sizes}, d={d} needs {needed} bytes of shared memory a block, "
                    f"and this device has {shared_memory}")
        return ""


def _tiles_of(sizes: dict[str, int], tiles: dict[str, int]) -> dict[str, int]:
    """How many there are."""
    return {"Tr": -(-sizes["N_q"] // tiles["Br"]), "Tc": -(-sizes["N_k"] // tiles["Bc"]),
            "Td": -(-sizes["d"] // tiles["Bc"])}


def capability(architecture: str) -> tuple[int, int]:
    """sm_80: (8, 0). any GPU: (0, 0)."""
    found = re.fullmatch(r"sm_(\d+)(\d)a?", architecture)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def has_architecture(device: torch.device, architecture: str) -> bool:
    """Whether a device is of this architecture or a later one. The simulator counts as its ARCHITECTURE,
    though it runs the stages of all."""
    needed, have = capability(architecture), _capability_of(device)
    if architecture.endswith("a"):  # sm_90a: its own instructions, which no later one has
        return have[0] == needed[0]
    return have >= needed


def architecture_in_words(device: torch.device) -> str:
    """What has_architecture() goes by."""
    major, minor = _capability_of(device)
    is_one = "the simulator counts as" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)} is"
    return f"{is_one} sm_{major}{minor}"


def _capability_of(device: torch.device) -> tuple[int, int]:
    if device.type == "cpu":
        return capability(simulator.ARCHITECTURE)
    return torch.cuda.get_device_capability(device)


@functools.cache
def read_header(path: Path, direction: str, is_rung: bool, modified: int) -> Stage:
    """The stage in a file that is there. is_rung: one of the repository's ladder, if its first line says so.

    modified: the file's time; another one is another header.
    """
    if '"' in str(path):
        raise ValueError(f"{path}: the path has a double quote, which no #include can name: rename it")
    header = re.match(r"(?://.*\n)*", read_source(path))[0]
    title = re.match(r"// (Forward|Backward) stage(?: (\d+))?: (\w+)", header)
    if title:
        direction = "fwd" if title[1] == "Forward" else "bwd"
    lines = re.sub(r"\n// {8,}", " ", header)  # a long field goes on in the next line
    fields = dict(re.findall(rf"^// ({'|'.join(FIELDS)}): *(.*)$", lines, re.M))
    for name in re.findall(r"^// (\w+):", lines.split("\n//\n")[0], re.M):
        if name not in FIELDS and (close := difflib.get_close_matches(name, FIELDS, 1, 0.75)):
            raise ValueError(f"{line_of(path, name)}: {name}: is no line of a header; {close[0]}: is one")
    types = re.split(r",\s*", fields.get("types", "fp32"))
    if unknown := set(types) - set(DTYPES):
        raise ValueError(f"{path}: types: {', '.join(unknown)} not among {', '.join(DTYPES)}")
    by_type = rf"{ARCHITECTURE}(; ({'|'.join(types)}): {ARCHITECTURE})*"
    if not re.fullmatch(by_type, needs := fields.get("needs", "any GPU")):
        raise ValueError(f"{path}: needs: {needs!r} is neither 'any GPU' nor a capability, such as sm_80; "
                         "others may follow for one of the types each, as in sm_70; bf16: sm_80")
    default, after = (fields.get(name, "").strip() for name in ("default", "after"))
    default, _, calls = default.partition(" if ")
    if default and not re.fullmatch(ARCHITECTURE, default):
        raise ValueError(f"{path}: default: {default!r} is neither 'any GPU' nor an architecture, such as "
                         "sm_80, from which on this stage is taken; leave the line out if it never is")
    if (determinism := fields.get("deterministic", "yes")) not in DETERMINISM:
        raise ValueError(f"{path}: deterministic: {determinism!r} is not among {', '.join(DETERMINISM)}")
    if (workspace := fields.get("workspace", "workspace")) in TENSORS[direction]:
        raise ValueError(f"{path}: workspace: {workspace} is a tensor of the call: give it another name")
    takes = tuple(filter(None, re.split(r",\s*", fields.get("takes", "").strip())))
    if unknown := set(takes) - set(TAKES):
        raise ValueError(f"{path}: takes: {', '.join(unknown)} not among {', '.join(TAKES)}")
    refuses = tuple(filter(None, re.split(r",\s*", fields.get("refuses", "").strip())))
    if unknown := set(refuses) - set(REFUSES):
        raise ValueError(f"{path}: refuses: {', '.join(unknown)} not among {', '.join(REFUSES)}")
    deterministic, on_request = DETERMINISM[determinism]
    in_ladder = title and title[2] and is_rung
    stage = Stage(
        number=int(title[2]) if in_ladder else 0, name=title[3] if in_ladder else path.stem,
        direction=direction, path=path, idea=fields.get("idea", ""),
        dtypes=tuple(DTYPES[t] for t in types), needs=needs, after=after, default=default, calls=calls,
        deterministic=deterministic, deterministic_on_request=on_request, takes=takes, refuses=refuses,
        tile_rules=fields.get("tiles", "Br=32 Bc=32"), limits=fields.get("limits", ""),
        shared=fields.get("shared", "0"), splits=fields.get("splits", "1"), hbm=fields.get("hbm", ""),
        workspace=workspace, predicted=fields.get("predicted", ""), measured=fields.get("measured", ""))
    if sorted(tiles := stage.default_tiles(64)) != ["Bc", "Br"]:
        raise ValueError(f"{line_of(path, 'tiles')}: tiles: must give Br and Bc, as in Br=64 Bc=32; d > 128: "
                         "Br=16 Bc=32")
    stage._tile_problem(64, 0, tiles)
    stage.hbm_bytes(1, 1, 64, 64, 64, **tiles)
    sizes = {"B": 1, "H": 1, "H_kv": 1, "N_q": 1, "N_k": 64, "d": 64}
    stage.is_for(sizes | {"gradients": 0, "masked": 0})
    stage.number_of_splits(sizes, tiles, (1, 0))
    return stage
