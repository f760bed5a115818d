"""The CUDA compiler: where it is, and which version."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SYSTEM_CUDA = Path("/usr/local/cuda")


def nvcc_version(nvcc: Path) -> str:
    """Such as "13.0"; empty if the program does not run."""
    return _nvcc_version(str(nvcc))


@functools.cache
def _nvcc_version(nvcc: str) -> str:
    try:
        out = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ""
    found = re.search(r"release (\d+\.\d+)", out)
    return found[1] if found else ""


def find_nvcc(cuda: str | None = None) -> Path:
    """The CUDA compiler: the first that will do in $CUDA_HOME, NVIDIA's wheels, the PATH, /usr/local/cuda.

    Args:
        cuda: the CUDA version that PyTorch was built with, such as "13.0"; nvcc's major version must be the
            same. None: any.
    Raises:
        RuntimeError: if there is none, saying what was found.
    """
    return _find_nvcc(cuda, os.environ.get("CUDA_HOME"), tuple(sys.path), os.environ.get("PATH"))


@functools.cache  # once found; not finding any is an exception, which is not kept
def _find_nvcc(cuda: str | None, cuda_home: str | None, python_path: tuple, path: str | None) -> Path:
    on_path = shutil.which("nvcc", path=path)
    candidates = [
        *([Path(cuda_home) / "bin/nvcc"] if cuda_home else []),
        *(nvcc for entry in python_path for nvcc in sorted(Path(entry).glob("nvidia/cu*/bin/nvcc"))),
        *([Path(on_path).resolve()] if on_path else []),
        SYSTEM_CUDA / "bin/nvcc",
    ]
    versions = {nvcc: version for nvcc in candidates if nvcc.is_file() and (version := nvcc_version(nvcc))}
    for nvcc, version in versions.items():
        if cuda is None or version.split(".")[0] == cuda.split(".")[0]:
            return nvcc
    wanted = f"nvcc {cuda.split('.')[0]}.x (PyTorch was built with CUDA {cuda})" if cuda else "nvcc"
    found = ", ".join(f"{nvcc} is {version}" for nvcc, version in versions.items()) or "there is no nvcc"
    major = (cuda or "13").split(".")[0]
    raise RuntimeError(f"needs {wanted}; {found}: pip install 'cuda-toolkit[nvcc,cccl]=={major}.*', "
                       "or set CUDA_HOME")
