"""Forks of a process that has imported PyTorch and Matplotlib, which takes seconds, and has run nothing: each
is as clean as a process that starts anew."""

import multiprocessing
import os
from collections.abc import Callable

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tutorials.lesson", "tutorials.exercises.remote", "ipykernel.kernelapp"])


def run(target: Callable, arguments: tuple, environment: dict[str, str], folder: str, ready) -> None:
    os.setsid()  # signals are sent to its group
    ready.send(None)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    target(*arguments)


class Fork:
    """One of them, with some of what a subprocess.Popen has: what calls target(*arguments)."""

    stdin = stdout = stderr = None

    def __init__(self, target: Callable, arguments: tuple, environment: dict[str, str], folder: str):
        ours, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=run, args=(target, arguments, environment, folder, theirs))
        self.process.start()
        ours.recv()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode
