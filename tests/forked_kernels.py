"""Kernels of notebooks as forks of a process that has imported PyTorch and Matplotlib, which takes seconds,
and has run nothing: each is as clean as one that starts anew."""

import multiprocessing
import os
from multiprocessing.connection import Connection

from ipykernel.kernelapp import IPKernelApp

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "tutorials.lesson"])


def run(arguments: list[str], environment: dict[str, str], folder: str, ready: Connection) -> None:
    os.setsid()  # the client sends signals to the kernel's group
    ready.send(None)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    IPKernelApp.launch_instance(argv=arguments)


class Kernel:
    """One of them, with what Jupyter's client asks of a subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], *, env: dict[str, str], cwd: str, **_):
        """In place of jupyter_client's launch_kernel()."""
        ours, theirs = CONTEXT.Pipe()
        arguments = command[command.index("-f"):]
        self.process = CONTEXT.Process(target=run, args=(arguments, env, cwd, theirs))
        self.process.start()
        ours.recv()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode
