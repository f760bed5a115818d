"""Runs a command with limits, away from the network: python confine.py CPU_SECONDS COMMAND ...

What the system does not have or does not allow is left out. Only the standard library, and run by its path:
before a thread of PyTorch's exists, as a process with several cannot leave its user namespace.
"""

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

FILE_BYTES = 1 << 30    # that a file may grow to
MORE_PROCESSES = 1024   # and threads, beyond those that the user has: compilers start some
NEW_USER, NEW_NET = 0x10000000, 0x40000000  # CLONE_NEWUSER and CLONE_NEWNET of <linux/sched.h>
SUBREAPER = 36                              # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def lower(name: str, value: int, more: int = 0) -> None:
    """Set a limit of the resource module, such as "RLIMIT_CPU", unless it is lower already; the hard limit,
    which nobody can raise, is so much more."""
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        what = getattr(resource, name)
        soft, hard = (math.inf if x == resource.RLIM_INFINITY else x for x in resource.getrlimit(what))
        resource.setrlimit(what, (min(value, soft, hard), min(value + more, hard)))


def threads_of_user() -> int:
    """How many threads this user has, of all processes; RLIMIT_NPROC counts them."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if process.stat().st_uid == os.getuid():
                count += len(os.listdir(process / "task"))
    return count


def call(name: str, *arguments: int) -> bool:
    """Call a function of the C library; whether it is there, and has returned 0."""
    try:
        return getattr(ctypes.CDLL(None), name)(*map(ctypes.c_ulong, arguments)) == 0
    except (AttributeError, OSError):
        return False


def leave_network() -> None:
    """Into a network namespace of its own, where there is not even a loopback.

    root can do that. Others need a user namespace, in which they keep their user id; root would lose the
    right to other users' files there.
    """
    if not sys.platform.startswith("linux"):
        return
    user, group = os.getuid(), os.getgid()
    if user == 0:
        call("unshare", NEW_NET)
    elif call("unshare", NEW_USER | NEW_NET):
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"),
                           ("gid_map", f"{group} {group} 1")):
            with contextlib.suppress(OSError):
                Path("/proc/self", file).write_text(text)


def confine(seconds: int) -> None:
    """Give this process the limits: so many seconds of CPU time, and the constants above."""
    lower("RLIMIT_CPU", seconds, more=5)  # SIGXCPU, then SIGKILL
    lower("RLIMIT_FSIZE", FILE_BYTES)
    lower("RLIMIT_CORE", 0)
    lower("RLIMIT_NPROC", threads_of_user() + MORE_PROCESSES)
    leave_network()
    if sys.platform.startswith("linux"):
        call("prctl", SUBREAPER, 1, 0, 0, 0)  # who leaves the group is still this process's descendant


def main(argv: list[str]) -> None:
    seconds, *command = argv
    confine(int(seconds))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
