"""The stages: which there are, and which of them a call takes."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from .devices import shared_memory_per_block
from .sources import STAGES
from .stage import DIRECTIONS, Stage, architecture_in_words, capability, has_architecture, read_header


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
    try:
        if not path.is_file():
            raise ValueError(f"{_argument(direction)}: {path} is no file")
        stage = read_header(path, direction, path.parent == STAGES, path.stat().st_mtime_ns)
    except OSError as error:  # such as that of a name which is too long
        raise ValueError(f"{_argument(direction)}: {path} cannot be read: {error.strerror}") from None
    if stage.after and not stage.number:
        _check_parent(path, stage.after, [s.name for s in stages(stage.direction)], stage.direction)
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
            stage = read_header(path, which, True, path.stat().st_mtime_ns)
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
               direction: str = "fwd", deterministic: bool | None = False, d: int | None = None,
               sizes: dict[str, int] | None = None, needs: tuple[str, ...] = ()) -> Stage:
    """The stage that a call asks for; for None, the best that takes the type, `d` and what the call needs,
    runs on the device and, if so asked, is deterministic: see `best_stage`.

    Args:
        direction: "fwd" or "bwd".
        deterministic: refuse a stage that cannot be. None: as torch.use_deterministic_algorithms() says.
        d: head dimension, for which the device may have too little shared memory. None: any.
        sizes: of the call, as of Stage.is_for().
        needs: of the call, as of Stage.lacks(). A stage that the call names is not asked.
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
        stage = best_stage(known, device, dtype, wanted, d, sizes, needs)
    elif not isinstance(stage, Stage):
        raise ValueError(f"{argument} must be a name, a pathlib.Path or a Stage, not {type(stage).__name__}")
    elif not stage.path.is_file():
        raise ValueError(f"{argument}: {stage.path} is no file: read_stage() it where it is now")
    if stage.direction != direction:
        raise ValueError(f"{argument}: {stage.path.name} is a {DIRECTIONS[stage.direction]} stage: pass it "
                         f"as {_argument(stage.direction)}=")
    if dtype not in stage.dtypes:
        taken = ", ".join(map(str, stage.dtypes))
        raise ValueError(f"{stage} takes {taken}; q, k and v have {dtype}: convert them with "
                         f"{_conversion(stage)}")
    if not (available := stage.available(device, dtype)):
        raise RuntimeError(f"{stage} cannot run on {device}: {available}")
    if wanted and not stage.can_be_deterministic:
        names = ", ".join(s.name for s in stages(direction)
                          if s.can_be_deterministic and dtype in s.dtypes) or "none"
        message = f"{stage} is not deterministic; those of the {ladder} for {dtype} that can be: {names}"
        if deterministic:
            raise ValueError(message)
        message += ". torch.use_deterministic_algorithms(True) asks for one"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(f"{message}; deterministic=False overrules it for a call")
        warnings.warn(message, stacklevel=1)  # of one line, so shown once
    return stage


def best_stage(ladder: list[Stage], device: torch.device, dtype: torch.dtype, deterministic: bool = False,
               d: int | None = None, sizes: dict[str, int] | None = None,
               needs: tuple[str, ...] = ()) -> Stage:
    """The stage that a call takes without naming one.

    That is the one whose `default:` is the latest architecture that the device has; first one that is for
    such calls alone. Where it will not do, being too large for `d`, say, or without what the call needs, its
    nearest relative that will.

    Args:
        ladder: all stages of a direction; some take `dtype`.
        deterministic: whether it has to be.
        sizes, needs: of the call, as of find_stage().
    Returns:
        A stage that takes `dtype`. If none will do, one for the error message.
    """
    sizes = _asked(sizes, deterministic)
    takers = [s for s in ladder if dtype in s.dtypes and s.is_for(sizes)]
    takers = [s for s in takers if not s.lacks(needs)] or takers
    takers = [s for s in takers if s.can_be_deterministic or not deterministic] or takers
    names = {s.name for s in takers}        # stages have many fields to be compared by
    candidates = (s for s in _by_preference(ladder, device, dtype, sizes, needs) if s.name in names)
    first = next(candidates)
    return next((s for s in (first, *candidates) if s.available(device, dtype)
                 and (d is None or s.fits(d, shared_memory_per_block(device)))), first)


def why_this(stage: Stage, asked: str | Path | Stage | None, dtype: torch.dtype, device: torch.device,
             deterministic: bool | None, d: int, sizes: dict[str, int] | None = None,
             needs: tuple[str, ...] = ()) -> str:
    """Why find_stage() gave this stage for these arguments, in words."""
    if asked is not None:
        return "the call names it"
    ladder = stages(stage.direction)
    wanted = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    sizes = _asked(sizes, wanted)
    first = next(s for s in _by_preference(ladder, device, dtype, sizes, needs) if s.is_for(sizes))
    if stage == first:
        calls = f" by calls of {stage.calls}" * bool(stage.calls)
        return (f"the end of its branch, which is taken {_where(stage)}{calls}"
                f"{_elsewhere(ladder, device, dtype) * (not stage.calls)}")
    if lacking := first.lacks(needs):
        problem = f"takes no {lacking}"
    elif wanted and not first.can_be_deterministic:
        problem = "is not deterministic"
    elif not (available := first.available(device, dtype)):
        problem = f"cannot run here: {available}"
    else:
        problem = f"has no tiles that fit d={d} into {shared_memory_per_block(device)} bytes of shared memory"
    return f"the nearest relative of {first.name}, which {problem}"


def _asked(sizes: dict[str, int] | None, deterministic: bool) -> dict[str, int] | None:
    """What a `default:` may ask of a call: its sizes, if known, and whether it has to be deterministic."""
    return sizes and sizes | {"deterministic": int(deterministic)}


def _where(stage: Stage) -> str:
    """On which devices calls take a default."""
    if stage.default == "any GPU":
        return "on any GPU"
    return f"on {stage.default}" if stage.default.endswith("a") else f"from {stage.default} on"


def _elsewhere(ladder: list[Stage], device: torch.device, dtype: torch.dtype) -> str:
    """Which defaults of the type are for other architectures than this device has."""
    others = [f"{s.name} is taken {_where(s)}" for s in ladder
              if s.default and not s.calls and dtype in s.dtypes and not has_architecture(device, s.default)]
    return f"; {', '.join(others)}, and {architecture_in_words(device)}" if others else ""


def _by_preference(ladder: list[Stage], device: torch.device, dtype: torch.dtype,
                   sizes: dict[str, int] | None, needs: tuple[str, ...]) -> Iterator[Stage]:
    """All stages, some several times. For each default, that of the latest architecture that the device has
    first, and before others one that is for such calls alone (of several, the last one): it, what grew from
    it, its parent, what else grew from that, and so on. Of what grew from one, the last ones first, but for
    those that are for packed sequences, or for the same bits in each run, if the call has not asked. At last,
    the rest."""
    by_name = {s.name: s for s in ladder}

    def rank(default: Stage) -> tuple:
        has, (major, minor) = has_architecture(device, default.default), capability(default.default)
        return has, bool(default.calls), (major, minor) if has else (-major, -minor)

    def unasked(s: Stage) -> tuple:
        return "varlen" in s.takes and "varlen" not in needs, s.can_be_deterministic

    defaults = sorted((s for s in reversed(ladder) if s.default and dtype in s.dtypes
                       and (not s.calls or s.is_for(sizes) and not s.lacks(needs))), key=rank, reverse=True)
    lineages = {s.name: {ancestor.name for ancestor in _lineage(s, by_name)} for s in ladder}
    for default in defaults:
        for ancestor in _lineage(default, by_name):
            yield ancestor
            grown = (s for s in reversed(ladder) if ancestor.name in lineages[s.name])
            yield from sorted(grown, key=unasked)
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
