"""Building ahead of time, several kernels at once: flash.compile(), and a call's variants on a GPU."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from .checks import MAX_HEAD_DIM, as_bool
from .devices import default_device, shared_memory_per_block
from .launch import definitions
from .loader import build
from .registry import find_stage
from .sources import ROOT
from .stage import Stage

# B * H * N_q and N_k: all that a rule for tiles can tell apart
SIZES = [1 << power for power in range(0, 48)]


def a_call(d: int, causal: bool, N: int, group: int = 1, H_kv: int = 1) -> dict[str, int]:
    """Of a call in training all that a stage's `default` may ask. group: query heads of a key head."""
    return {"B": 1, "H": group * H_kv, "H_kv": H_kv, "N_q": N, "N_k": N, "d": d, "gradients": 1,
            "masked": int(causal), "causal": int(causal)}


def stages_of_calls(stage: str | Path | Stage | None, dtype: torch.dtype, device: torch.device,
                    direction: str, deterministic: bool, d: int, causal: bool) -> list[Stage]:
    """What calls in training take, small and large ones, with grouped heads and without."""
    calls = (a_call(d, causal, *how) for how in itertools.product(SIZES, (1, 2), (1, 2)))
    return list(dict.fromkeys(find_stage(stage, dtype, device, direction, deterministic, d, call)
                              for call in calls))


Job = tuple  # the arguments of build()


def variants(stage: Stage, d: int, device: torch.device, causal: bool) -> list[dict[str, int]]:
    """The tile sizes that calls without any get, over all sizes of a call."""
    found: list[dict[str, int]] = []
    for rows, keys in itertools.product(SIZES, SIZES if "keys" in stage.tile_rules else SIZES[:1]):
        tiles = stage.tiles(d, shared_memory_per_block(device), rows, causal, keys=keys)
        if tiles not in found:
            found.append(tiles)
    return found


def job(stage: Stage, dtype: torch.dtype, d: int, causal: bool, tiles: dict[str, int], device: torch.device,
        deterministic: bool = False, negative_scale: bool = False, mask: Path | None = None,
        *extras) -> Job:
    """What build() is called with for a stage. extras: as of definitions()."""
    macros = definitions(stage, dtype, d, causal, tiles, deterministic, negative_scale, mask, *extras)
    return (ROOT / f"flash_{stage.direction}.cu", device, macros, f"{stage.direction}_{stage.name}")


def build_all(jobs: Iterable[Job], done: Callable[[], None] = lambda: None) -> list[Path]:
    """Compile all of them, as many at a time as there are cores.

    done: called after each.
    Returns:
        The libraries' paths, in the jobs' order.
    Raises:
        RuntimeError: the first one that a build raised, when all have ended.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        builds = [pool.submit(build, *one) for one in jobs]
        try:
            for _ in concurrent.futures.as_completed(builds):
                done()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
        return [one.result() for one in builds]


_built: set[tuple] = set()


def build_variants(stage: Stage, dtype: torch.dtype, d: int, causal: bool, device: torch.device,
                   deterministic: bool, negative_scale: bool, mask: Path | None = None, *extras) -> None:
    """Compile a stage for all the tiles that its rules know, once in a process: so that no later call of
    another size has to wait for a compiler. An error comes again, in the call that it is for."""
    key = (stage, dtype, d, causal, device, deterministic, negative_scale, mask, extras)
    if key not in _built:
        _built.add(key)
        with contextlib.suppress(RuntimeError):
            build_all(job(stage, dtype, d, causal, tiles, device, deterministic, negative_scale, mask,
                          *extras)
                      for tiles in variants(stage, d, device, causal))


def compile(d: int, dtype: torch.dtype = torch.float32, *, causal: bool | None = None,
            stage: str | Path | Stage | None = None, backward: str | Path | Stage | None = None,
            gradients: bool = True, deterministic: bool = False,
            device: torch.device | str | None = None) -> list[Path]:
    """Build what attention() would build at its first call, with a progress bar: for all sizes of a call.

        flash.compile(64, torch.bfloat16)      # head dimension 64: both masks, forward and backward

    Args:
        d: head dimension.
        dtype: of q, k and v.
        causal: with the mask, without it, or None for both.
        stage, backward, deterministic: as for attention().
        gradients: the backward stage, too.
        device: default: the GPU if there is one, else the CPU.
    Returns:
        The paths of the libraries.
    Raises:
        ValueError: for arguments that do not fit.
        RuntimeError: if a stage cannot be built or run here.
    """
    from rich.console import Console
    from rich.progress import Progress

    if not isinstance(d, int) or not 0 < d <= MAX_HEAD_DIM or d % 8:
        raise ValueError(f"d must be a multiple of 8 up to {MAX_HEAD_DIM}, not {d!r}")
    masks = (False, True) if causal is None else (as_bool("causal", causal),)
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    asked = [(stage, "fwd"), *[(backward, "bwd")] * as_bool("gradients", gradients)]
    jobs = [job(found, dtype, d, mask, tiles, device, deterministic)
            for (name, direction), mask in itertools.product(asked, masks)
            for found in stages_of_calls(name, dtype, device, direction, deterministic, d, mask)
            for tiles in variants(found, d, device, mask)]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("building", total=len(jobs))
        return build_all(jobs, lambda: bar.advance(task))
