"""flash.inspect(): kernels under the simulator's checker and its counters."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from . import simulator
from .loader import build_simulator
from .stage import Available

if TYPE_CHECKING:
    from .simulator.report import Report

_inspection: contextvars.ContextVar[Report | None] = contextvars.ContextVar("inspection", default=None)
_one_inspection = threading.Lock()


def current_report() -> Report | None:
    """That of the inspection under way in this context. (A copy of a context outlives what is in it.)"""
    report = _inspection.get()
    return None if report is None or report.complete else report


def _forget_what_others_inspect() -> None:
    """In the child of a fork, which has the thread that forked alone."""
    global _one_inspection
    if not current_report():
        _one_inspection = threading.Lock()


os.register_at_fork(after_in_child=_forget_what_others_inspect)


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
    time. That takes 11 to 121 times as long for the forward's fp32 stages (measured, N = 128 to 1024). q, k,
    v, o and their gradients are copied to memory with red zones around each head; L, its gradient and scratch
    memory have them around the whole. The backward pass, where it runs inside, is watched likewise.

    Found: data races in shared memory, and in global memory, between blocks too; accesses out of bounds,
    misaligned, or of memory that nothing has written; barriers that not all threads reach; deadlocks; waits
    and fences that asynchronous copies and products lack.
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
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu" or not has_memory(x):
            raise ValueError(f"inspect(): {name} must be a tensor on the CPU")
    from .simulator.report import Report  # rich, and the C++ side: for those who inspect

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
            report.close()
            try:
                _inspection.reset(token)
            except ValueError:
                raise RuntimeError("inspect(): left in another thread, or another context, than it was "
                                   "entered in; an inspection belongs to one") from None
    finally:
        _one_inspection.release()


def has_memory(x: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own: not as under torch.func or a FakeTensorMode."""
    try:
        return x.data_ptr() != 0
    except RuntimeError:
        return False
