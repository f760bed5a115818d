"""Where a learner's file is judged: in a process that compares, above one that runs the stage's code.

    check_file       starts the judge, and stops all of it at the time limit
      judge          knows what is right, asks for calls and compares; never loads the stage's code
        stage        loads it, and answers with outputs and with what the simulator's checker saw

remote.py has the lower two. The verdict comes up a pipe that the stage's process does not have, with a number
drawn for this check, which came down the judge's stdin. Answers of the stage's process are JSON, each with a
number of its own: that process can end, hang or write nonsense, and the judge compares its outputs with the
right ones. Both processes have limits (confine.py). TEACHING.md says what all this does not stop.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import flash

from .exercise import COMMAND, Exercise
from .grade import Verdict
from .handed_in import problem_of, read_answer

TIME_LIMIT_S = 300
KERNEL_LIMIT_S = 60     # for one kernel, of TIME_LIMIT_S; of another limit, the same part
MOST_BYTES = 256 << 20  # of an answer
TAIL = 2000             # characters of what a process has printed, in messages
FORGED = ("What came back is not the checker's: the file's code has tried to forge a verdict, or has written "
          "where the checker does. Only the checker's own verdict counts.")


def check_file(exercise: Exercise, file: Path, time_limit: float = TIME_LIMIT_S) -> Verdict:
    """The verdict on a learner's file, from processes of its own.

    Args:
        time_limit: in seconds, after which they are stopped.
    Raises:
        ValueError: if there is no such file, or it cannot be read.
    """
    try:
        text = read_answer(file)
    except FileNotFoundError:
        raise ValueError(f"{file} is no file: `{COMMAND} new {exercise.number}` writes one") from None
    if problem := problem_of(exercise, text):
        reason, message = problem
        return Verdict(exercise.number, str(file), reason=reason, message=message)
    start = time.monotonic()
    nonce = secrets.token_hex(32)
    with tempfile.TemporaryFile() as printed:
        data, code = _run_judge(exercise, file, nonce, printed.fileno(), start + time_limit, time_limit)
        printed.seek(max(0, os.fstat(printed.fileno()).st_size - TAIL))
        last = printed.read().decode(errors="replace").strip()
    if data is None:
        verdict = _refused("time limit", f"Stopped after {time_limit:.0f} s: a loop without an end, perhaps.")
    elif not data.endswith(b"\n"):
        verdict = _refused("error", f"The process ended with {code} and no verdict:\n{last}")
    else:
        verdict = believed(data, nonce, exercise.number) or _refused("error", FORGED)
    verdict.exercise, verdict.file = exercise.number, str(file)
    verdict.seconds = round(time.monotonic() - start, 1)
    return verdict


def _refused(reason: str, message: str) -> Verdict:
    return Verdict(0, "", reason=reason, message=message)


def believed(data: bytes, nonce: str, number: int) -> Verdict | None:
    """The verdict in what came up the pipe, if it is one, and has the number that went down."""
    try:
        message = json.loads(data)
        if not hmac.compare_digest(message["nonce"], nonce):
            return None
        verdict = Verdict(**message["verdict"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if any(type(x) is not type(getattr(Verdict(0, ""), name)) for name, x in vars(verdict).items()):
        return None
    return verdict if verdict.exercise == number and verdict.passed == (not verdict.reason) else None


def _run_judge(exercise: Exercise, file: Path, nonce: str, stderr: int, deadline: float,
               time_limit: float) -> tuple[bytes | None, int | None]:
    """(what it wrote up its pipe, exit code); None and None if it had to be stopped."""
    up, theirs = os.pipe()
    cpu_seconds = math.ceil(time_limit) * (os.cpu_count() or 1) + 10  # the simulator takes all cores
    command = [sys.executable, str(Path(__file__).with_name("confine.py")), str(cpu_seconds), sys.executable,
               "-m", "tutorials.exercises.remote", str(exercise.number), str(file.resolve()), str(theirs)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_SIM_")}
    environment |= {"CUDA_VISIBLE_DEVICES": "",
                    "FLASH_SIM_SECONDS": f"{max(1, time_limit * KERNEL_LIMIT_S / TIME_LIMIT_S):.0f}"}
    try:
        try:
            process = subprocess.Popen(command, cwd=flash.ROOT, env=environment, stdin=subprocess.PIPE,
                                       stdout=subprocess.DEVNULL, stderr=stderr, pass_fds=(theirs,),
                                       start_new_session=True)
        finally:
            os.close(theirs)
        with process:
            try:
                with contextlib.suppress(BrokenPipeError):  # it could not start
                    process.stdin.write(nonce.encode())
                    process.stdin.flush()
                data = _line(up, deadline)
                if data is None:
                    return None, None
                if not data.endswith(b"\n"):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(1)
                return data, process.poll()
            finally:
                kill_all(process.pid)
    finally:
        os.close(up)


def _line(pipe: int, deadline: float) -> bytes | None:
    """What comes up to the end of a line, or of it all; None if the time is over."""
    data = bytearray()
    while not data.endswith(b"\n") and len(data) < MOST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return None
        part = os.read(pipe, 1 << 20)
        if not part:
            break
        data += part
    return bytes(data)


def kill_all(pid: int) -> None:
    """Kill a process with its group and all that it has started, also what has left the group."""
    for _ in range(100):  # they may start others meanwhile
        if not (below := _descendants(pid)):
            break
        for process in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Those that live, as /proc has them; none where there is no /proc. The judge adopts those whose parents
    have ended (confine.py)."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = file.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(file.parent.name))
    found = [pid]
    for parent_pid in found:
        found += children.get(parent_pid, [])
    return found[1:]
