"""Whatever a stage does, on the device or the host: an error in Python, which lives on, and the next call is
right. Each case is a process of its own, which says at its end that it is alive."""

import contextlib
import contextvars
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch

import flash
from flash_ladder import attention, launch, plan

HOSTILE = flash.ROOT / "tests" / "kernels" / "hostile.cuh"
STACK = "stack overflow"
MEMORY = "out of memory|no memory|bad_alloc"
WHAT = {                                       # by the number in hostile.cuh: what the error says
    1: "integer division by zero",
    2: "division by zero",
    3: "division by zero",
    4: r"abort\(\) was called",
    5: r"exit\(0\) was called",
    6: r"_exit\(3\) was called",
    7: r"quick_exit\(4\) was called",
    8: r"C\+\+ exception: thrown here",
    9: r"C\+\+ exception",
    10: "which is no memory",
    11: "which is no memory",
    12: "no memory",
    13: STACK,
    14: MEMORY,
    15: MEMORY,
    16: "a trap",
    17: "no memory",
    18: "division by zero",
    19: r"C\+\+ exception: .*",
    20: r"abort\(\) was called",
    21: "no memory",
    22: "no memory|abort",
}
ENDLESS = {30: "a plain loop", 31: "malloc and free", 32: "strings", 33: "sleeping"}
WITH_LINE = (1, 4, 10, 12, 13)                 # of those a line is named
SIDES = {"kernel": 0, "launch()": 1000, "workspace_bytes()": 2000}

# Each case is a fork of a process that has imported PyTorch and flash, which takes more than a second, and
# has called nothing. It is sent the case and where to write; it replies the fork's number and how that ended.
CASES = """
import json, os, signal, socket, sys
from pathlib import Path
import torch, flash
from flash_ladder.reference import reference

socket_of_test = socket.socket(fileno=int(sys.argv[1]))
def reply(number):
    socket_of_test.send(b"%d\\n" % number)

while True:
    request, outputs, *_ = socket.recv_fds(socket_of_test, 1 << 16, 2)
    if not request:
        sys.exit()
    child = os.fork()
    if not child:
        break
    for output in outputs:
        os.close(output)
    reply(child)
    reply(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

socket_of_test.close()
for output, place in zip(outputs, (1, 2)):
    os.dup2(output, place)
    os.close(output)
signal.signal(signal.SIGINT, signal.default_int_handler)   # a background process starts without
stage, scale, environment = json.loads(request)
os.environ.update(environment)
q, k, v = torch.randn(3, 1, 2, 16, 8)

def call(number):
    return flash.attention(q, k, v, stage=Path(stage), scale=float(number))

assert (call(0) == 7).all()
print("started", flush=True)
try:
    call(scale)
except RuntimeError as error:
    print("RuntimeError:", " ".join(str(error).split()))
except KeyboardInterrupt:
    print("KeyboardInterrupt", flush=True)
else:
    print("nothing was raised")
for _ in range(2):
    assert (call(0) == 7).all()
o = flash.attention(q, k, v, stage="flash2")
assert (o - reference(q, k, v, None, None)[0]).abs().max() < 1e-5
print("alive", flush=True)
if scale % 7:      # Python's own end takes longer than all else: one of seven has it
    os._exit(0)
"""


class Case:
    """One of them. out: what it prints, as it comes."""

    def __init__(self, server: socket.socket, number: int, environment: dict[str, str]):
        read, write = os.pipe()
        self.out = open(read)
        self.errors = tempfile.TemporaryFile("w+")
        self.replies = server.makefile()
        request = json.dumps([str(HOSTILE), number, {"FLASH_SIM_THREADS": "2"} | environment])
        socket.send_fds(server, [request.encode()], [write, self.errors.fileno()])
        os.close(write)
        self.pid = int(self.replies.readline())

    def rest(self, timeout: float) -> tuple[int, str, str]:
        """Its exit status, what it still prints, and its errors. It is killed when the time is over."""
        watch = threading.Timer(timeout, os.kill, (self.pid, signal.SIGKILL))
        watch.start()
        out = self.out.read()
        status = int(self.replies.readline())
        watch.cancel()
        self.errors.seek(0)
        return status, out, self.errors.read()

    def result(self) -> str:
        """What was raised, if it is alive to its end."""
        status, out, errors = self.rest(120)
        assert status == 0 and out.splitlines()[-1:] == ["alive"], out + errors
        return out.splitlines()[-2]


@pytest.fixture(scope="module")
def server():
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", CASES, str(theirs.fileno())], cwd=flash.ROOT,
                               pass_fds=[theirs.fileno()])
    theirs.close()
    with ours:
        yield ours
    assert process.wait(60) == 0


@pytest.fixture
def start(server):
    def start(number: int, **environment: str) -> Case:
        started.append(Case(server, number, environment))
        return started[-1]

    started: list[Case] = []
    yield start
    for case in started:
        for file in (case.out, case.errors, case.replies):
            file.close()


def cases(numbers) -> list:
    """All of them in kernels and in launch(), some in workspace_bytes(), which is called likewise."""
    return [(n, side) for n in numbers for side in SIDES
            if side != "workspace_bytes()" or n in (1, 5, 8, 10, 13, 15, 30)]


@pytest.mark.parametrize("number, side", cases(WHAT))
def test_a_fault_is_an_error(start, number, side):
    message = start(SIDES[side] + number).result()
    assert re.search(f"RuntimeError: .*hostile.*({WHAT[number]})", message), message
    assert ("kernel hostile_kernel, block" if side == "kernel" else f"host code, {side}") in message, message
    if number in WITH_LINE:
        assert re.search(r"hostile\.cuh:\d+", message), message


@pytest.mark.parametrize("number, side", cases(ENDLESS))
def test_ctrl_c(start, number, side):
    """Within a second; that of the loop around malloc as well."""
    case = start(SIDES[side] + number)
    assert case.out.readline() == "started\n"
    time.sleep(0.3)
    os.kill(case.pid, signal.SIGINT)
    sent = time.monotonic()
    line = case.out.readline()
    took = time.monotonic() - sent
    status, out, errors = case.rest(60)
    assert line == "KeyboardInterrupt\n" and took < 1, (line, took, status, errors)
    assert out == "alive\n" and status == 0, out + errors


@pytest.mark.parametrize("side", ["kernel", "launch()"])
def test_signals_that_come_faster_than_handlers_end(start, side):
    """As on a machine so busy that each tick finds the handler of the one before still at work."""
    case = start(SIDES[side] + 30)
    assert case.out.readline() == "started\n"
    time.sleep(0.3)
    os.kill(case.pid, signal.SIGINT)
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):          # it may be at its end by now
            os.kill(case.pid, signal.SIGURG)
    status, out, errors = case.rest(60)
    assert out == "KeyboardInterrupt\nalive\n" and status == 0, (status, out, errors)


@pytest.mark.parametrize("number, side", cases(ENDLESS))
def test_the_time_limit(start, number, side):
    """With the line that it was at."""
    message = start(SIDES[side] + number, FLASH_SIM_SECONDS="0.5").result()
    assert re.search(r"RuntimeError: .*ran longer than 0\.5 s \(FLASH_SIM_SECONDS\)", message), message
    if number in (30, 33):  # where it calls the C library again and again, the call's stub has no line
        assert re.search(r"hostile\.cuh:\d+", message), message


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan"])
def test_a_time_limit_that_makes_no_sense(seconds, monkeypatch):
    monkeypatch.setenv("FLASH_SIM_SECONDS", seconds)
    with pytest.raises(RuntimeError, match="FLASH_SIM_SECONDS.*more than 0"):
        flash.attention(*torch.randn(3, 1, 2, 16, 8), stage="flash2")


def test_a_time_limit_is_of_one_kernel(monkeypatch):
    """Not of all that a call launches, nor of a process: many short ones take longer than it."""
    monkeypatch.setenv("FLASH_SIM_SECONDS", "2")
    q = torch.randn(1, 2, 64, 32)
    flash.attention(q, q, q, stage="naive")
    start = time.monotonic()
    while time.monotonic() - start < 2.5:
        flash.attention(q, q, q, stage="naive")


def test_two_threads_one_of_them_endless(monkeypatch):
    """The time limit ends the one, and not the other."""
    monkeypatch.setenv("FLASH_SIM_SECONDS", "1")
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    flash.attention(q, k, v, stage=HOSTILE, scale=0.)
    found = {}

    def call(scale):
        try:
            found[scale] = flash.attention(q, k, v, stage=HOSTILE, scale=scale)
        except RuntimeError as error:
            found[scale] = str(error)

    endless = threading.Thread(target=call, args=(30.,))
    endless.start()
    for _ in range(20):
        call(0.)
        assert (found[0.] == 7).all()
        time.sleep(0.02)
    endless.join(20)
    assert "ran longer than 1 s" in found[30.]


def test_what_was_there_is_there_again():
    """The signals' handlers, the alternate stack's, and the limit of memory."""
    signals = [signal.SIGINT, signal.SIGABRT, signal.SIGILL, signal.SIGURG]
    before = [*map(signal.getsignal, signals), resource.getrlimit(resource.RLIMIT_AS)]
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    for scale in (0., 4., 1004., 1015.):
        with contextlib.suppress(RuntimeError):
            flash.attention(q, k, v, stage=HOSTILE, scale=scale)
    assert before == [*map(signal.getsignal, signals), resource.getrlimit(resource.RLIMIT_AS)]


def test_a_fork_is_contained_too():
    """After a call; the threads of the parent are not there."""
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    flash.attention(q, k, v, stage=HOSTILE, scale=0.)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(False)

    def child():
        os.environ["FLASH_SIM_SECONDS"] = "0.5"
        for scale in (10., 31.):
            try:
                flash.attention(q, k, v, stage=HOSTILE, scale=scale)
            except RuntimeError as error:
                send.send(str(error))
        send.send((flash.attention(q, k, v, stage=HOSTILE, scale=0.) == 7).all().item())

    process = context.Process(target=child)
    process.start()
    assert receive.poll(60) and "no memory" in receive.recv()
    assert receive.poll(60) and "ran longer" in receive.recv()
    assert receive.poll(60) and receive.recv() is True
    process.join()


def fork_beside(work, done: threading.Event, is_well) -> None:
    """Ten times while another thread works until it is done. is_well(): what the child has to say."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            time.sleep(0.05)
            child = os.fork()
            if not child:
                signal.alarm(60)
                try:
                    os._exit(0 if is_well() else 1)
                finally:
                    os._exit(2)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        thread.join()


def test_forks_during_a_call(monkeypatch):
    """The child has none of it: its calls are right and contained, Ctrl-C and the limit of memory its own."""
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    flash.attention(q, k, v, stage=HOSTILE, scale=0.)
    monkeypatch.setenv("FLASH_SIM_SECONDS", "0.5")
    done = threading.Event()

    def call_endless():
        while not done.is_set():
            with contextlib.suppress(RuntimeError):
                flash.attention(q, k, v, stage=HOSTILE, scale=30.)

    def is_well() -> bool:
        limited = resource.getrlimit(resource.RLIMIT_AS) != memory
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
            return False
        right = (flash.attention(q, k, v, stage=HOSTILE, scale=0.) == 7).all().item()
        with contextlib.suppress(RuntimeError):
            flash.attention(q, k, v, stage=HOSTILE, scale=31.)
            return False
        return right and not limited

    try:
        fork_beside(call_endless, done, is_well)
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------ inspections
def test_a_fork_while_another_thread_inspects():
    """The child inspects a call of its own."""
    q, k, v = torch.randn(3, 1, 2, 64, 8)
    done = threading.Event()

    def inspect_until_done():
        while not done.is_set():
            with flash.inspect():
                flash.attention(q, k, v, stage="flash2")

    def is_well() -> bool:
        torch.set_num_threads(1)  # OpenMP's others are not there, and PyTorch would wait for them
        with flash.inspect() as report:
            flash.attention(q, k, v, stage="flash2")
        return bool(report.kernels) and not report.findings

    with flash.inspect():                    # it is built before
        flash.attention(q, k, v, stage="flash2")
    fork_beside(inspect_until_done, done, is_well)


def test_a_context_that_outlives_an_inspection():
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    with flash.inspect() as report:
        context = contextvars.copy_context()
    o = context.run(flash.attention, q, k, v, stage="flash2")
    assert torch.equal(o, flash.attention(q, k, v, stage="flash2")) and not report.kernels


def test_an_inspection_where_tensors_are_elsewhere_by_default():
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    torch.set_default_device("meta")
    try:
        with flash.inspect(q=q) as report:
            o = flash.attention(q, k, v, stage="flash2")
    finally:
        torch.set_default_device(None)
    assert report.kernels and not report.findings
    assert (o - flash.attention(q, k, v, stage="flash2")).abs().max() < 1e-5


def test_an_inspection_left_in_another_thread():
    """An error that says so; and another one can begin."""
    inspection, errors = flash.inspect(), []
    inspection.__enter__()

    def leave():
        try:
            inspection.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "left in another thread" in errors[0]
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    flash.attention(q, k, v, stage="flash2")
    with flash.inspect() as report:
        flash.attention(q, k, v, stage="flash2")
    assert report.kernels and not report.findings


# ------------------------------------------------------------------------------------ a GPU
LOST = """
import sys
from pathlib import Path
import torch, flash
q, k, v = torch.randn(3, 1, 2, 16, 8, device="cuda")
for scale in (10., 0.):
    try:
        flash.attention(q, k, v, stage=Path(sys.argv[1]), scale=scale)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(" ".join(str(error).split())[:600])
"""


def test_a_lost_context_is_explained():
    """Where CUDA says so, and nowhere else."""
    library = object.__new__(launch.Library)
    library.subject = flash.find_stage("flash2", torch.float32, torch.device("cpu"), "fwd")
    lost, other = (str(library.failure(text)) for text in
                   (b"an illegal memory access was encountered", b"invalid argument"))
    assert lost.startswith("stage 'flash2': an illegal") and "The CUDA context is lost" in lost
    assert other == "stage 'flash2': invalid argument"


@pytest.fixture
def launched_last():
    """flash2, as if on a GPU."""
    launch.latest[:] = [flash.find_stage("flash2", torch.float32, torch.device("cpu"), "fwd")]
    yield
    launch.latest.clear()


@pytest.mark.parametrize("text, lost", [
    ("CUDA error: an illegal memory access was encountered\nSearch for it", True),
    ("CUDA error: out of memory", False), ("", False)])
def test_a_lost_context_that_pytorch_finds(monkeypatch, launched_last, text, lost):
    """Its memory asks CUDA first, in the call after the one that failed: the stage of that is named, too.
    Other errors stay what they are."""
    q, k, v = torch.randn(3, 1, 1, 16, 8)
    o = flash.attention(q.requires_grad_(), k, v, stage="flash2")

    def fails(*_, **__):
        raise torch.AcceleratorError(text)

    monkeypatch.setattr(attention, "_check_and_run", fails)
    monkeypatch.setattr(plan, "plan_for", fails)
    for call in (lambda: flash.attention(q, k, v, stage="naive", scale=0.5), o.sum().backward):
        with pytest.raises(RuntimeError) as caught:
            call()
        said = str(caught.value)
        assert said.startswith(f"stage 'flash2': {text.splitlines()[0]}. The CUDA") if lost else said == text
        assert (caught.value.__cause__ is not None) == lost


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_that_fails_on_a_gpu(tmp_path):
    """The call after it says which stage found what, and that nothing more will run."""
    stage = tmp_path / "wild.cuh"
    stage.write_text("""
#pragma once
__global__ void wild_kernel(int* p) { if (p) *p = 1; }
size_t workspace_bytes(const FwdParams&) { return 0; }
cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  wild_kernel<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(p.scale > 5.f ? 16 : 0));
  return cudaGetLastError();
}
""")
    done = subprocess.run([sys.executable, "-c", LOST, str(stage)], cwd=flash.ROOT, capture_output=True,
                          text=True)
    assert "wild" in done.stdout and "context" in done.stdout, done.stdout + done.stderr
