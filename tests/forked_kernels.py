"""Kernels of notebooks as forks of a process that has imported what they do."""

import os

from forks import Fork
from ipykernel.kernelapp import IPKernelApp


def run(arguments: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    IPKernelApp.launch_instance(argv=arguments)


class Kernel(Fork):
    """What Jupyter's client asks of a subprocess.Popen."""

    def __init__(self, command: list[str], *, env: dict[str, str], cwd: str, **_):
        """In place of jupyter_client's launch_kernel()."""
        super().__init__(run, (command[command.index("-f"):],), env, cwd)
