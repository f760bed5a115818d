"""What tutorials/exercises/process.py has of `subprocess`, with judges that are forks of a process that has
imported what they do. Their limits, pipes and environment are those of one that is started."""

import os
from multiprocessing.reduction import DupFd
from subprocess import DEVNULL, PIPE, TimeoutExpired

from forks import Fork

from tutorials.exercises import confine, remote

__all__ = ["DEVNULL", "PIPE", "Popen", "TimeoutExpired"]


def run(cpu_seconds: int, number: str, file: str, stdin: DupFd, stderr: DupFd, verdict: DupFd) -> None:
    os.dup2(stdin.detach(), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(stderr.detach(), 2)
    pipe = verdict.detach()
    os.closerange(3, pipe)
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
    confine.confine(cpu_seconds)
    os._exit(remote.main([number, file, str(pipe)]))


class Popen(Fork):
    def __init__(self, command: list[str], *, cwd: str, env: dict[str, str], stderr: int,
                 pass_fds: tuple[int], **_):
        cpu_seconds, number, file = command[2], *command[-3:-1]
        theirs, ours = os.pipe()
        self.stdin = open(ours, "wb")
        arguments = int(cpu_seconds), number, file, *map(DupFd, (theirs, stderr, *pass_fds))
        super().__init__(run, arguments, env, cwd)
        os.close(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stdin.close()
        self.wait()
