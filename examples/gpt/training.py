"""One training run: settings in, a curve and what it cost out."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import masking_utils

from .data import batch_of, checksum, corpus
from .models import build, implementation, stages_of

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NO_KERNEL = ("No available kernel", "No viable backend")  # SDPA's words, on a GPU and on the CPU
WARM_UP = 10     # steps: the learning rate rises, kernels are compiled, and no time is taken
LOOK = 10        # every so many steps the progress bar reads the loss: the host waits for the GPU


@dataclass(frozen=True)
class Settings:
    """What a run is; the options of train_gpt.py, which explains them."""

    model: str
    size: str
    attention: str
    batch: int
    seq_len: int
    lr: float = 3e-4
    seed: int = 0
    dtype: str = "fp32"
    dropout: float = 0.0
    weights: Path | None = None
    stage: str | None = None
    backward: str | None = None
    backend: str | None = None
    compile: bool = False
    checkpointing: bool = False

    def as_text(self) -> dict[str, str]:
        return {name: str(value) for name, value in dataclasses.asdict(self).items()}


@dataclass
class Result:
    """losses: of each step, in nats a token. tokens_per_s: without the first steps; None if there are no
    others. peak: bytes on the GPU; None on the CPU. error: why there is none of it. stages: that
    flash.attention took, by pass."""

    attention: str
    losses: list[float] = field(default_factory=list)
    tokens_per_s: float | None = None
    peak: int | None = None
    error: str | None = None
    stages: dict[str, str] = field(default_factory=dict)

    @property
    def final_loss(self) -> float | None:
        """The mean over the last tenth of the steps."""
        last = self.losses[-max(len(self.losses) // 10, 1):]
        return sum(last) / len(last) if last else None


def train(settings: Settings, steps: int, checkpoint: Path = Path("checkpoint.pt"), save_every: int = 0,
          resume: bool = False, console: Console | None = None) -> Result:
    """Train for so many steps in all.

    checkpoint: a file, written every save_every steps and at the end, if that is not 0. With resume=True the
    run goes on from it, and its curve is the one that it would have had.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = corpus()
    torch.manual_seed(settings.seed)
    attention = implementation(settings.attention, settings.stage, settings.backward)
    with device:  # random weights are drawn there
        model = build(settings.model, settings.size, attention, settings.seq_len, settings.dropout,
                      settings.weights)
    model.to(device).train()
    if settings.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=device.type == "cuda")
    begin, losses = 0, list[Any]()
    if resume:
        begin, losses = load(checkpoint, settings, data, model, optimizer, steps)
    run = torch.compile(model, fullgraph=True) if settings.compile else model
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed_from, clock = begin + min(WARM_UP, (steps - begin) // 2), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("loss {task.fields[loss]}"))
    console = console or Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar, \
            backend_of(settings), without_packing():
        task = bar.add_task(settings.attention, total=steps, completed=begin, loss="-")
        for step in range(begin, steps):
            if step == timed_from:
                clock = now(device)
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * min((step + 1) / WARM_UP, 1.0)
            ids = batch_of(data, settings.seed, step, settings.batch, settings.seq_len)
            if device.type == "cuda":  # a copy from memory that is not pinned would make the host wait
                ids = ids.pin_memory().to(device, non_blocking=True)
            with torch.autocast(device.type, DTYPES[settings.dtype], enabled=settings.dtype != "fp32"):
                loss = run(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
            if not bar.disable and (step % LOOK == 0 or step == steps - 1):
                bar.update(task, completed=step + 1, loss=f"{losses[-1].item():.3f}")
            if save_every and ((step + 1) % save_every == 0 or step == steps - 1):
                save(checkpoint, settings, data, model, optimizer, step + 1, losses)
    seconds = now(device) - clock
    done = settings.batch * settings.seq_len * (steps - timed_from)
    return Result(settings.attention, [float(x) for x in losses],
                  done / seconds if steps > timed_from else None,
                  torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
                  stages=of_flash(model.config, settings, device))


def of_flash(config, settings: Settings, device: torch.device) -> dict[str, str]:
    """The stages of a run with flash.attention, by pass; none of another."""
    if settings.attention != "flash":
        return {}
    return stages_of(config, DTYPES[settings.dtype], device, settings.batch, settings.seq_len,
                     settings.dropout, settings.stage, settings.backward)


def try_to_train(settings: Settings, *arguments, **options) -> Result:
    """train(); a GPU that is too small, or a backend of SDPA's that refuses the call, is a result, too. The
    next run finds the memory empty."""
    try:
        result = train(settings, *arguments, **options)
    except torch.OutOfMemoryError:
        result = Result(settings.attention, error="out of memory")
    except RuntimeError as error:
        if not str(error).startswith(NO_KERNEL):
            raise
        result = Result(settings.attention, error=f"refused by --backend {settings.backend}")
    if settings.compile:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def backend_of(settings: Settings) -> contextlib.AbstractContextManager:
    if settings.attention != "sdpa" or settings.backend is None:
        return contextlib.nullcontext()
    return sdpa_kernel(BACKENDS[settings.backend])


def without_packing() -> contextlib.AbstractContextManager:
    """No batch here packs several sequences into one. Transformers looks for them in each forward pass, and
    reads the answer back: the host would wait for the GPU in each step."""
    return mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ------------------------------------------------------------------------------------------ checkpoints
def common(settings: Settings, data: torch.Tensor) -> dict[str, str]:
    """What a run that goes on must have in common with its beginning."""
    return {**settings.as_text(), "data": checksum(data)}


def save(file: Path, settings: Settings, data: torch.Tensor, model, optimizer, step: int,
         losses: list) -> None:
    """All that a run needs to go on; the file is there whole or not at all."""
    states = {"common": common(settings, data), "step": step, "losses": [float(x) for x in losses],
              "model": model.state_dict(), "optimizer": optimizer.state_dict(),
              "random": torch.get_rng_state(),
              "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    torch.save(states, part)
    part.replace(file)


def load(file: Path, settings: Settings, data: torch.Tensor, model, optimizer,
         steps: int) -> tuple[int, list[float]]:
    """Put its states back; the steps that it has done, and their losses."""
    if not file.is_file():
        raise ValueError(f"--resume: there is no {file}; a run with --save-every N writes it")
    states = torch.load(file, map_location="cpu", weights_only=True)
    for name, value in common(settings, data).items():
        if states["common"][name] != value:
            raise ValueError(f"--resume: {file} has {name.replace('_', '-')} {states['common'][name]}, not "
                             f"{value}: it must be the same; or begin anew in another --out")
    if states["step"] >= steps:
        raise ValueError(f"--resume: {file} has {states['step']} steps already: pass more by --steps")
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    torch.set_rng_state(states["random"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["random_cuda"])
    return states["step"], states["losses"]
