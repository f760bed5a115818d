"""flash.explain(): what a call takes, and why."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .attention import Checked, checked, together
from .bound import Bound
from .compiled import Kernel, kernels_of
from .extras import needs_of
from .flops import flops_of_pair, visible_pairs
from .launch import definitions
from .masks import Mask
from .plan import Keys, by_head, empty_output, mask_file, plan_for, window_of
from .registry import why_this
from .sources import ROOT, source_files
from .stage import Stage
from .tiles import Tiles, tiles_of

TITLES = {"fwd": "forward", "bwd": "backward"}
WITHOUT_GPU = "sm_90a"  # what registers are counted for
MOST_SCORES = 1 << 28   # of a mask that is asked for each: a byte a score, and in the simulator some seconds


@dataclass(frozen=True)
class Choice:
    """A stage that a call takes, and what that comes to.

    Attributes:
        why, why_tiles: in words.
        shared_bytes: dynamic shared memory a block of its largest kernel, as the header says.
        workspace_bytes: scratch memory of the call.
        flops: of the products, over the pairs of a query and a key that it sees.
        of_mask: how many tiles a mask skips, cuts and leaves whole, and which scores count; None: there is no
            mask but `causal`, or the call is too large to ask for each score. Then flops has all pairs.
        hbm_bytes: read and written without a mask, if nothing is cached; None: the header does not say, as of
            a v with other columns than d.
        kernels: as compiled for `architecture`; empty: see `problem`.
        files: that are compiled.
    """

    stage: Stage
    why: str
    tiles: dict[str, int]
    why_tiles: str
    shared_bytes: int
    workspace_bytes: int
    flops: int
    of_mask: Tiles | None
    hbm_bytes: int | None
    architecture: str
    kernels: tuple[Kernel, ...]
    problem: str
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Explanation:
    """Both stages of a call; print() it, or leave it to a notebook to show."""

    title: str
    forward: Choice
    backward: Choice | None

    def __rich__(self) -> Table:
        shown = [x for x in (self.forward, self.backward) if x]
        table = Table(title=self.title, title_justify="left", show_lines=False)
        table.add_column("")
        for one in shown:
            table.add_column(TITLES[one.stage.direction], overflow="fold")
        for name, texts in zip(ROWS, zip(*map(_rows, shown))):
            table.add_row(name, *texts)
        return table

    def __str__(self) -> str:
        """In colours if it goes to a terminal."""
        out = io.StringIO()
        console = Console(file=out, force_terminal=sys.stdout.isatty(), force_jupyter=False, width=110)
        console.print(self.__rich__())
        return out.getvalue().rstrip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        console = Console(record=True, file=io.StringIO(), force_jupyter=False, width=110)
        console.print(self.__rich__())
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


ROWS = ("stage", "because", "tiles", "because", "shared memory", "workspace", "kernels", "FLOPs",
        "HBM traffic", "files")


def _rows(one: Choice) -> list[str]:
    kernels = []
    for kernel in one.kernels:
        # only the largest kernel has all of the header's shared memory: the small ones have static arrays
        main = kernel.name in ("forward_kernel", "backward_kernel")
        occupancy = kernel.occupancy(one.architecture, one.shared_bytes * main)
        kernels.append(f"{kernel.name}: {kernel.registers} registers"
                       + f", {kernel.spilled_bytes} bytes spilled" * bool(kernel.spilled_bytes)
                       + ", products serialised" * kernel.serialised
                       + f"; {occupancy}" * bool(occupancy))
    hbm = "not in the header" if one.hbm_bytes is None else f"{one.hbm_bytes:,} bytes without mask and cache"
    tiles = ", ".join(f"{name}={size}" for name, size in one.tiles.items())
    files = [file.relative_to(ROOT) if file.is_relative_to(ROOT) else file for file in one.files]
    if one.of_mask:
        tiles += f"\n{one.of_mask}"
    return [
        one.stage.name, one.why, tiles, one.why_tiles,
        f"{one.shared_bytes:,} bytes a block", f"{one.workspace_bytes:,} bytes",
        one.problem or "\n".join([f"for {one.architecture}:", *kernels]), f"{one.flops:,}", hbm,
        "\n".join(map(str, files))]


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
            mask: Mask | Path | None = None, scale: float | None = None,
            stage: str | Path | Stage | None = None,
            backward: str | Path | Stage | None = None, deterministic: bool | None = None,
            architecture: str | None = None, dropout_p: float = 0.0, sink: torch.Tensor | None = None,
            **tiles: int) -> Explanation:
    """Which stages a call of `attention` with these arguments takes and why, and what that comes to.

        print(flash.explain(q, k, v, causal=True))

    Args:
        q, k, v, causal, mask, scale, stage, backward, deterministic, dropout_p, sink, tiles: as of
            `attention`.
        architecture: to compile for, such as "sm_80": registers and occupancy are of that. Default: the
            GPU's; without one, sm_90a.
    Returns:
        An Explanation: a table; its numbers are in `forward` and, if the call needs a gradient or names a
        backward stage, in `backward`.
    Raises:
        ValueError, RuntimeError: as `attention`. Without nvcc the table says so in the row of the kernels.
    """
    if mask is not None:
        mask, causal = together(mask, causal), False
    call = checked(q, k, v, "causal", causal, mask, scale, stage, backward, deterministic, tiles, dropout_p,
                   sink)
    q, k, v = call.tensors
    if architecture is None:
        architecture = WITHOUT_GPU
        if q.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(q.device)
            architecture = f"sm_{major}{minor}" + "a" * (major == 9)
    forward = _choice(call, "fwd", stage, *call.forward, False, tiles, deterministic, architecture)
    chosen = None
    if call.backward:
        chosen = _choice(call, "bwd", backward, *call.backward, tiles, deterministic, architecture)
    said = str(mask) if mask else "causal" if causal else "no mask"
    shapes = f"k {tuple(k.shape)}, v {tuple(v.shape)}" if v.shape != k.shape else f"k and v {tuple(k.shape)}"
    said += f", dropout {dropout_p:g}" * bool(dropout_p) + ", a sink" * (sink is not None)
    title = (f"q {tuple(q.shape)}, {shapes}, {str(q.dtype).removeprefix('torch.')}, {said}, "
             f"on {q.device}")
    return Explanation(title, forward, chosen)


def _choice(call: Checked, direction: str, asked, stage: Stage, tiles: dict[str, int], deterministic: bool,
            asked_tiles: dict[str, int], wanted: bool | None, architecture: str) -> Choice:
    q, k, v = call.tensors
    (B, H, N_q, d), (_, H_kv, N_k, _) = q.shape, k.shape
    o, extras = empty_output(q, v, "meta"), call.extras
    tensors: dict[str, torch.Tensor | None] = {"Q": q, "K": k, "V": v, "O": o}
    if direction == "bwd":
        tensors |= {"dO": o, "dQ": q, "dK": k, "dV": v}
    plan = plan_for(stage, tiles, deterministic, call.visible, call.scale, tensors | extras.tensors,
                    extras.dropout_p)
    causal = isinstance(call.visible, int)
    mask = mask_file(call.visible)
    macros = definitions(stage, q.dtype, d, causal, tiles, deterministic, call.scale < 0, mask, v.shape[3],
                         extras.dropout_p > 0, extras.sink is not None)
    kernels: list[Kernel] = []
    problem = ""
    try:
        kernels = kernels_of(stage, macros, architecture)
    except RuntimeError as error:
        problem = str(error)
    sizes = Keys(k, direction == "bwd" or not call.needs_gradients).sizes(q, call.visible)
    flops = flops_of_pair(direction, d, v.shape[3]) * B * H * visible_pairs(N_q, N_k, call.visible)
    of_mask = None
    if isinstance(call.visible, Bound) and math.prod(call.visible.extents) * N_q * N_k <= MOST_SCORES:
        of_mask = tiles_of(call.visible, N_q, N_k, tiles["Br"], tiles["Bc"], q.device, q.dtype)
        flops = int(flops * of_mask.share)
    suffix = "_bwd" * (direction == "bwd")
    named = [name for name in tiles if f"{name}{suffix}" in asked_tiles]
    if named:
        why_tiles = f"{' and '.join(named)} by the call"
    elif tiles == stage.default_tiles(d, 1 << (B * H * N_q).bit_length() - 1, causal,
                                      window_of(call.visible), N_q * H // H_kv, N_k):
        why_tiles = "the header's rule for this d, size and mask"
    else:
        why_tiles = "the nearest to the header's that fit into this device's shared memory"
    return Choice(
        stage, why_this(stage, asked, q.dtype, q.device, wanted, d, sizes,
                        needs_of(extras, by_head=by_head(call.visible))), tiles, why_tiles,
        stage.shared_bytes(d, tiles), plan.workspace_bytes,
        flops, of_mask,
        stage.hbm_bytes(B, H, N_q, N_k, d, H_kv=H_kv, **tiles) if v.shape[3] == d else None,
        architecture, tuple(kernels), problem,
        tuple(source_files(ROOT / f"flash_{direction}.cu", stage.path, *[mask] if mask else [])))
