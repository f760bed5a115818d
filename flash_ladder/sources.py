"""Where the .cu files are, and how they are read."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
INSTALLED = not (PACKAGE.parent / "flash_fwd.cu").is_file()  # else a clone, perhaps an editable install
ROOT = PACKAGE / "sources" if INSTALLED else PACKAGE.parent  # holds flash_fwd.cu, flash_bwd.cu, stages/
STAGES = ROOT / "stages"


def read_source(path: Path) -> str:
    """The text of a .cu or .cuh file.

    Raises:
        ValueError: if it is not UTF-8, saying where.
    """
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")  # an editor may have written a byte order mark
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8 (is the file in "
                         "Latin-1?): save it as UTF-8") from None


def line_of(path: Path, field: str) -> str:
    """file:line of a field in a stage's header; the file alone if the field is not there."""
    for number, line in enumerate(read_source(path).splitlines(), 1):
        if re.match(rf"// {field}:", line):
            return f"{path}:{number}"
    return str(path)


def source_files(*files: Path) -> list[Path]:
    """These files and all that they include by #include "...", each once."""
    found: dict[Path, None] = {}
    waiting = list(files)
    for file in waiting:  # it grows
        if file in found:
            continue
        found[file] = None
        status = file.stat()
        for name in _included(file, status.st_ino, status.st_size, status.st_mtime_ns):
            places = (os.path.join(folder, name) for folder in (file.parent, ROOT, STAGES))
            waiting += [_resolved(place) for place in places if os.path.isfile(place)][:1]
    return list(found)


@functools.lru_cache(1024)
def _included(file: Path, *status: int) -> list[str]:
    """The names that a file includes, as it was when it had this status."""
    return re.findall(r'^\s*#\s*include\s*"([^"]+)"', read_source(file), re.M)


@functools.lru_cache(4096)
def _resolved(place: str) -> Path:
    return Path(place).resolve()
