"""The judge, `python -m tutorials.exercises.remote`, and below it the process that runs the stage's code: see
process.py.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import dataclasses
import hmac
import importlib
import json
import os
import pickle
import secrets
import select
import signal
import socket
import struct
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import flash
from flash_ladder.simulator.report import Report

from . import find, grade
from .confine import lower
from .exercise import Exercise
from .grade import Answer, Case, Refused, Runner, Verdict
from .process import FORGED, MOST_BYTES, TAIL

MEMORY_BYTES = 8 << 30  # of address space, beyond what Python and PyTorch take; or half the machine's memory
DIE_WITH_PARENT, DUMPABLE = 1, 4  # PR_SET_PDEATHSIG and PR_SET_DUMPABLE of <linux/prctl.h>


def prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


# ------------------------------------------------------------------------------- the stage's process
def encoded(x: Any) -> Any:
    """As JSON knows it: tuples, dictionaries, tensors and dataclasses as lists with a word before."""
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, list):
        return ["list", *map(encoded, x)]
    if isinstance(x, tuple):
        return ["tuple", *map(encoded, x)]
    if isinstance(x, dict):
        return ["dict", *([encoded(key), encoded(value)] for key, value in x.items())]
    if isinstance(x, torch.Tensor):
        x = x.detach().contiguous()
        data = ctypes.string_at(x.data_ptr(), x.nbytes)
        return ["tensor", str(x.dtype).removeprefix("torch."), list(x.shape), base64.b64encode(data).decode()]
    if isinstance(x, Report):
        known = vars(x) | {"masked": []}   # the judge asks no mask what it leaves: that runs the mask's code
        return ["report", *([name, encoded(value)] for name, value in known.items()
                            if name not in ("runtime", "_checker"))]
    if dataclasses.is_dataclass(x):
        fields = [[f.name, encoded(getattr(x, f.name))] for f in dataclasses.fields(x)]
        return ["dataclass", type(x).__module__, type(x).__name__, *fields]
    raise TypeError(f"{type(x).__name__} is not among what the stage's process can answer")


def decoded(x: Any) -> Any:
    """What `encoded` was given. Makes nothing but data of it, whatever it is.

    Raises:
        Exception: any, if it is nothing that `encoded` returns.
    """
    if not isinstance(x, list):
        return x
    kind, *rest = x
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](map(decoded, rest))
    if kind == "dict":
        return {decoded(key): decoded(value) for key, value in rest}
    if kind == "tensor":
        name, shape, data = rest
        if name not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"a tensor of type {name}")
        return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, name)).view(shape)
    if kind == "report":
        report = Report.__new__(Report)
        for name, value in rest:
            setattr(report, name, decoded(value))
        return report
    _, module, name, *fields = x
    if kind != "dataclass" or not module.startswith("flash_ladder.simulator."):
        raise ValueError(f"{kind} {module}")
    cls = getattr(importlib.import_module(module), name)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(f"{module}.{name} is no dataclass")
    return cls(**{field: decoded(value) for field, value in fields})


def settings_now() -> dict[str, str]:
    """The simulator's, such as FLASH_SIM_SEED."""
    return {name: value for name, value in os.environ.items() if name.startswith("FLASH_SIM_")}


def serve(stream: socket.socket, exercise: Exercise) -> None:
    """Make the calls that are asked for, until there are no more."""
    torch.set_num_threads(1)  # the tensors are small
    here = Runner()
    with stream.makefile("rb") as requests:
        while True:
            try:
                mark, what, asked, case, settings = pickle.load(requests)  # the judge's
            except EOFError:
                return
            for name in settings_now():
                del os.environ[name]
            os.environ.update(settings)
            problem, answer = "", None
            try:
                answer = getattr(here, what)(exercise, asked, case)
            except (RuntimeError, ValueError) as error:
                problem, answer = type(error).__name__, str(error)
            data = json.dumps(encoded([problem, answer])).encode()
            stream.sendall(mark + struct.pack("<Q", len(data)) + data)


def limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        page = os.sysconf("SC_PAGE_SIZE")
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * page
        lower("RLIMIT_AS", taken + min(MEMORY_BYTES, os.sysconf("SC_PHYS_PAGES") * page // 2))


class Remote(Runner):
    """Has a learner's stage run in a process of its own; the reference, for its score, runs here."""

    def __init__(self, exercise: Exercise, private: tuple[int, ...] = ()):
        """private: files of this process that the other one does not get, beside stdin."""
        self.exit_code: int | None = None
        self.stream, other = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            try:
                prctl(DIE_WITH_PARENT, signal.SIGKILL)
                self.stream.close()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for fd in private:
                    os.close(fd)
                limit_memory()
                serve(other, exercise)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # what else is to be done at a process's end is the judge's
        other.close()

    def call(self, exercise: Exercise, answer: Answer, case: Case) -> dict[str, torch.Tensor]:
        return self._checked(exercise, answer, case, self._ask("call", answer, case))

    def inspected(self, exercise: Exercise, answer: Answer, case: Case) -> tuple[dict, flash.Report, str]:
        if grade.is_ours(exercise, answer):
            return super().inspected(exercise, answer, case)
        outputs, report, error = self._ask("inspected", answer, case)
        if not (error or report.findings):
            self._checked(exercise, answer, case, outputs)
        return outputs, report, error

    def _checked(self, exercise: Exercise, answer: Answer, case: Case, outputs: dict) -> dict:
        """The outputs, if they are of the shapes and types that a stage has."""
        queries, keys = (case.B, case.H, case.N_q, case.d), (case.B, case.H_kv, case.N_k, case.d)
        backward = exercise.direction == "bwd"
        shapes = {"dQ": queries, "dK": keys, "dV": keys} if backward else {"O": queries, "L": queries[:3]}
        types = {name: (torch.float32,) if name == "L" else answer.stage.dtypes for name in shapes}
        if ({name: tuple(x.shape) for name, x in outputs.items()} != shapes or
                any(x.dtype not in types[name] for name, x in outputs.items())):
            raise Refused("error", FORGED)
        return outputs

    def _ask(self, what: str, answer: Answer, case: Case) -> Any:
        """What the stage's process answers. Raises the RuntimeError or ValueError that it answers with, and
        Refused if it ends or answers nonsense."""
        mark = secrets.token_bytes(16)
        try:
            self.stream.sendall(pickle.dumps((mark, what, answer, case, settings_now())))
            head = self._receive(len(mark) + 8)
            size = struct.unpack("<Q", head[len(mark):])[0]
            if not hmac.compare_digest(head[:len(mark)], mark) or size > MOST_BYTES:
                raise Refused("error", FORGED)
            data = self._receive(size)
        except (EOFError, ConnectionError):
            raise Refused("error", f"{self._end()}\n\nIn the call {case}.") from None
        try:
            problem, answer = decoded(json.loads(data))
        except Exception:  # whatever it is that the stage's code has made of it
            raise Refused("error", FORGED) from None
        if problem:
            raise (ValueError if problem == "ValueError" else RuntimeError)(answer)
        return answer

    def _receive(self, count: int) -> bytes:
        """So many bytes. Raises EOFError if the process has ended, even if another one that it has started
        still holds its end of the socket."""
        data = bytearray()
        while len(data) < count:
            ready, _, _ = select.select([self.stream, 0], [], [], 0.1)
            if 0 in ready:  # whoever asked has gone
                os._exit(1)
            if self.stream in ready:
                part = self.stream.recv(min(count - len(data), 1 << 20))
                if not part:
                    raise EOFError
                data += part
            elif self._exit_code() is not None:
                raise EOFError
        return bytes(data)

    def _exit_code(self) -> int | None:
        """The process's, once it has ended; a signal's number is negative."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self.exit_code

    def _end(self) -> str:
        """How the process has ended, in words."""
        deadline = time.monotonic() + 5
        while self._exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.exit_code is None:
            return FORGED  # it lives, and has closed its socket
        code = self.exit_code
        how = next((s.name for s in signal.Signals if s == -code), f"exit code {code}")
        why = {-signal.SIGXCPU: " (too much CPU time)", -signal.SIGXFSZ: " (too large a file)"}.get(code, "")
        text = (f"The process that ran your code ended with {how}{why} before the checker was done. "
                "Whatever it may have written or printed, only the checker's own verdict counts.")
        with contextlib.suppress(OSError):  # stderr is a file, if check_file has started this
            size = os.fstat(2).st_size
            printed = os.pread(2, TAIL, max(0, size - TAIL)).decode(errors="replace").strip()
            text += f" Its last words:\n{printed}" * bool(printed)
        return text


# ------------------------------------------------------------------------------- the judge
def main(argv: list[str]) -> int:
    """The judge: python -m tutorials.exercises.remote NUMBER FILE VERDICT_PIPE, and a number from stdin."""
    exercise, file, pipe = find(int(argv[0])), Path(argv[1]), int(argv[2])
    os.set_inheritable(pipe, False)
    grade.runner = Remote(exercise, private=(pipe,))
    prctl(DUMPABLE, 0)  # other processes of this user cannot read its memory, nor open its pipes
    nonce = os.read(0, 64).decode()
    try:
        verdict = grade.judge(exercise, file)
    except Exception as error:
        verdict = Verdict(exercise.number, str(file), reason="error", message=(
            f"The checker could not judge this: {type(error).__name__}: {error}"))
    message = json.dumps({"nonce": nonce, "verdict": asdict(verdict)}).encode() + b"\n"
    with open(pipe, "wb") as stream:
        stream.write(message)
        stream.flush()
        os.read(0, 1)  # check_file ends this process, and all below it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
