"""The build folder: where it is, what lies there, and a bound on its size.

A build is a folder of its own, with its lock in it; its time of last use is that of its file `done`. Whatever
else lies in the build folder, such as a bench's results, is neither counted nor deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from platformdirs import user_cache_dir

from .sources import INSTALLED, ROOT

LOCK = "flash_lock"
DONE = "done"
LIMIT = 5000              # MB, without FLASH_BUILD_LIMIT
YOUNG = 3600              # seconds since its last use: such a build is not deleted to make room
LOOK_AGAIN = 60           # seconds between two looks at the size
LOOKED = "flash_looked"   # its time is that of the last look


@dataclass(frozen=True)
class Build:
    """One of them, as it was when it was looked at. used: seconds since the epoch."""

    path: Path
    size: int
    used: float


def build_folder() -> Path:
    """$FLASH_BUILD_DIR; else build/ in a clone, and the user's cache folder once installed."""
    usual = Path(user_cache_dir("flash-ladder", appauthor=False)) if INSTALLED else ROOT / "build"
    return Path(os.environ.get("FLASH_BUILD_DIR") or usual).resolve()


def limit_bytes() -> int:
    """FLASH_BUILD_LIMIT, which is in MB, in bytes.

    Raises:
        ValueError: if it is no number of MB.
    """
    text = os.environ.get("FLASH_BUILD_LIMIT") or str(LIMIT)
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = -1
    if not megabytes >= 0:
        raise ValueError(f"FLASH_BUILD_LIMIT must be a number of MB, such as 5000, not {text!r}")
    return int(min(megabytes, 1e12) * 1e6)


def builds(folder: Path) -> list[Build]:
    """All builds in a build folder, the one whose last use is longest ago first."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False) and (path / LOCK).exists():
                with contextlib.suppress(FileNotFoundError):  # another process deletes it
                    found.append(Build(path, _size(path), _last_use(path)))
    return sorted(found, key=lambda build: build.used)


def _size(folder: Path) -> int:
    """Bytes on the disk."""
    return sum(os.lstat(os.path.join(place, file)).st_blocks * 512
               for place, _, files in os.walk(folder) for file in files)


def _last_use(build: Path) -> float:
    done = build / DONE
    return (done if done.exists() else build / LOCK).stat().st_mtime


def mark_used(build: Path) -> None:
    """Set the time of its last use, if it is built and the folder can be written."""
    with contextlib.suppress(OSError):
        os.utime(build / DONE)


@contextlib.contextmanager
def locked(build: Path) -> Iterator[None]:
    """Make a build's folder and hold its lock, which is the kernel's: it ends with the process.

    Raises:
        OSError: if the folder cannot be written.
    """
    while True:
        build.mkdir(parents=True, exist_ok=True)
        try:
            lock = open(build / LOCK, "w")
        except FileNotFoundError:  # deleted in this moment
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_same(lock, build / LOCK):  # deleted while we waited
                continue
            yield
            return


def _is_same(lock: IO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False


def delete(build: Path, younger_than: float = 0) -> bool:
    """Delete a build, unless another process holds its lock or has used it in the last so many seconds."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), open(build / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_same(lock, build / LOCK) or time.time() - _last_use(build) < younger_than:
            return False
        rubbish = build.with_name(f"deleted_{build.name}_{os.getpid()}")
        build.rename(rubbish)  # at once: nobody sees half a build
        shutil.rmtree(rubbish)
        return True
    return False


def trim(folder: Path) -> None:
    """Delete builds, those not used for longest first, until the rest is within the limit.

    Looks at the size once a minute at most, as that takes a second if there are thousands.

    Raises:
        ValueError: see limit_bytes().
    """
    limit, looked = limit_bytes(), folder / LOOKED
    with contextlib.suppress(FileNotFoundError):
        if time.time() - looked.stat().st_mtime < LOOK_AGAIN:
            return
    looked.touch()
    found = builds(folder)
    total = sum(build.size for build in found)
    for build in found:
        if total <= limit or time.time() - build.used < YOUNG:
            return
        if delete(build.path, YOUNG):
            total -= build.size


def clear(folder: Path) -> tuple[list[Build], list[Build]]:
    """Delete all builds. Returns those deleted, and those that are being built and stay."""
    deleted: list[Build] = []
    kept: list[Build] = []
    for build in builds(folder):
        (deleted if delete(build.path) else kept).append(build)
    return deleted, kept
