"""From a CUDA file to a shared library: by nvcc for a GPU, by the translator and g++ for the simulator."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flash_ladder import simulator

from . import cache
from .nvcc import find_nvcc, nvcc_version
from .sources import ROOT, STAGES, source_files

BUILD = cache.build_folder()


def build(source: Path, device: torch.device, macros: dict[str, str | Path] | None = None,
          name: str | None = None, checked: bool = False) -> Path:
    """Compile a .cu file to a shared library, once per content: by nvcc for a GPU, else for the simulator.

    Args:
        source: the file. What it and the files among `macros` include is part of the build.
        macros: by name; a pathlib.Path is a file that the source includes by this macro.
        name: the first part of the library's name.
        checked: with calls of the checker, for `inspect`; in the simulator only.
    Returns:
        The library's path, to be loaded with ctypes.CDLL.
    Raises:
        RuntimeError: without a compiler; with the compiler's messages; for CUDA syntax that the simulator
            does not know.
    """
    macros = macros or {}
    files = source_files(source, *(value for value in macros.values() if isinstance(value, Path)))
    if device.type == "cuda":
        return _build_for_gpu(name or source.stem, files, macros, torch.cuda.get_device_capability(device))
    return _build_for_cpu(name or source.stem, files, macros, checked)


def debug() -> bool:
    """FLASH_DEBUG=1: without optimisation, for a debugger."""
    return os.environ.get("FLASH_DEBUG", "0") not in ("", "0")


def _name(prefix: str, files: list[Path], *rest) -> str:
    """A name for a build, with a hash of everything that goes into it."""
    digest = hashlib.sha256(repr(rest).encode())
    prefix = re.sub(r"\W", "_", prefix)
    for file in files:
        digest.update(f"{file}\0".encode() + file.read_bytes())
    return f"{prefix}_{digest.hexdigest()[:16]}"


def _build_for_cpu(name: str, files: list[Path], macros: dict[str, str | Path], checked: bool) -> Path:
    if missing := simulator.missing_compiler():
        raise RuntimeError(missing)
    runtime = build_simulator()
    flags = simulator.compile_flags(debug(), checked, macros.get("ELEMENT", "float") != "float")
    name = f"{name}_cpu" + "_checked" * checked
    name = _name(name, files, macros, flags, simulator.signature(), torch.__version__)
    folder = BUILD / name / "translated"
    translated = simulator.translated_files(files, ROOT, folder)
    macros = {macro: translated[value] if isinstance(value, Path) else value
              for macro, value in macros.items()}

    def compile_into(library: Path, with_checks: bool) -> None:
        try:
            simulator.translate_files(translated, with_checks)
        except simulator.TranslationError as error:
            raise RuntimeError(f"cannot translate CUDA for the CPU: {error}") from None
        includes = [f"-I{folder}", f"-I{folder / 'stages'}"]
        with _explained(name):
            simulator.compile_library(
                translated[files[0]], library,
                [*_defines(macros), *_precompiled_header(flags), *flags, *includes],
                [str(runtime), f"-Wl,-rpath,{runtime.parent}", *simulator.link_flags(checked)])
            ctypes.CDLL(str(library))  # or the linker's errors would be the first call's

    def build(with_checks: bool) -> Path:
        return _once(name, f"{name}.so", lambda library: compile_into(library, with_checks))

    if checked:
        with contextlib.suppress(RuntimeError):
            return build(True)
    return build(False)  # so the compiler's messages are of the user's text, and what is right compiles


def _precompiled_header(flags: list[str]) -> list[str]:
    """Where the simulator's cuda_runtime.h is, already parsed, for builds with these flags: as a flag, which
    must be the first -I. It saves a third of most builds. [] if there is none: then it is read as it is.
    """
    if not simulator.precompiles():
        return []
    name = _name("header", [], flags, simulator.signature())
    try:
        header = _once(name, "cuda_runtime.h.gch", lambda file: simulator.precompile(file, flags))
    except RuntimeError:
        return []
    return [f"-I{header.parent}"]


def build_simulator() -> Path:
    name = _name("simulator", [], simulator.RUNTIME_FLAGS, simulator.signature())
    if not _is_built(name, f"{name}.so"):
        print("Building the simulator, once: a few seconds ...", file=sys.stderr, flush=True)

    def compile_into(library: Path) -> None:
        with _explained(name):
            simulator.compile_runtime(library)

    return _once(name, f"{name}.so", compile_into)


def _build_for_gpu(name: str, files: list[Path], macros: dict[str, str | Path], capability: tuple) -> Path:
    nvcc = find_nvcc(torch.version.cuda)
    arch = f"{capability[0]}{capability[1]}" + "a" * (capability[0] == 9)  # sm_90a: Hopper's own too
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-std=c++17", "-lineinfo",
             f"-I{ROOT}", f"-I{STAGES}",  # -U in what follows: torch's load() defines them
             "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
             "-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
             *(["-G"] if debug() else ["-O3"])]
    name = _name(f"{name}_sm{arch}", files, macros, flags, str(nvcc), nvcc_version(nvcc), torch.__version__)
    return _build(name, [files[0]], macros, cuda_cflags=flags, cuda_home=nvcc.parent.parent,
                  ldflags=[f"-L{_linkable_cudart(nvcc.parent.parent)}"])


def _linkable_cudart(cuda_home: Path) -> Path:
    """A folder with libcudart.so.

    NVIDIA's wheels have only libcudart.so.13: then a link to that, in the build folder.
    """
    versioned: list[Path] = []
    for lib in (cuda_home / "lib64", cuda_home / "lib", *cuda_home.glob("targets/*/lib")):
        if (lib / "libcudart.so").exists():
            return lib
        versioned += lib.glob("libcudart.so.*")
    if not versioned:
        raise RuntimeError(f"no libcudart.so under {cuda_home}: install the CUDA runtime "
                           "(pip install -r requirements.txt)")
    link = BUILD / "cudart" / "libcudart.so"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.unlink(missing_ok=True)  # it may lead to what an upgrade has removed
        with contextlib.suppress(FileExistsError):
            link.symlink_to(versioned[0])
    return link.parent


def _is_built(name: str, file: str) -> bool:
    """Whether the file is there, as it was when it was done: not cut short, say by a full disk."""
    try:
        return (BUILD / name / cache.DONE).read_text() == _fingerprint(BUILD / name / file)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _fingerprint(file: Path) -> str:
    status = file.stat()
    return _hash_of(file, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(1024)
def _hash_of(file: Path, *status: int) -> str:
    """Of a file as it was when it had this status."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _once(name: str, file: str, make: Callable[[Path], None]) -> Path:
    """build/<name>/<file>, by make(its path) unless it is there.

    Safe beside another process that builds the same, and after a build that was interrupted: our lock is the
    kernel's, so it ends with the process that holds it.

    Raises:
        RuntimeError: with the compiler's errors.
    """
    folder = BUILD / name
    path = folder / file
    cache.mark_used(folder)  # before we look: then nobody deletes it
    if _is_built(name, file):
        return path
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(cache.locked(folder))
        except OSError as error:
            raise RuntimeError(f"cannot write to the build folder {BUILD} ({error.strerror}): "
                               "set FLASH_BUILD_DIR to another one") from None
        if _is_built(name, file):
            return path
        for old in (folder / cache.DONE, path):  # a new file: another process may have mapped the old one
            old.unlink(missing_ok=True)
        make(path)
        (folder / cache.DONE).write_text(_fingerprint(path))
    cache.trim(BUILD)
    return path


def _build(name: str, sources: list[Path], macros: dict[str, str | Path], cflags=(), cuda_cflags=(),
           ldflags=(), cuda_home: Path | None = None) -> Path:
    """Compile and link the sources to build/<name>/<name>.so with torch's cpp_extension, unless it is there.

    torch's lock is a file, which an interrupted build leaves behind and the next one waits for without end;
    under our lock (`_once`) such a file can only be an orphan, and is deleted.

    Raises:
        RuntimeError: with the compiler's errors.
    """
    def load(library: Path) -> None:
        from torch.utils import cpp_extension  # a tenth of a second, for those who build

        if cuda_home:
            cpp_extension.CUDA_HOME = str(cuda_home)
        (library.parent / "lock").unlink(missing_ok=True)
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)  # else a failed build counts as done
        defines = _defines(macros)
        with _explained(name):
            cpp_extension.load(name, [str(file) for file in sources],
                               extra_cflags=_ninja_quoted([*defines, *cflags]),
                               extra_cuda_cflags=_ninja_quoted([*defines, *cuda_cflags]),
                               extra_ldflags=_ninja_quoted(ldflags), build_directory=str(library.parent),
                               with_cuda=bool(cuda_cflags), is_python_module=False, verbose=False)

    return _once(name, f"{name}.so", load)


def _defines(macros: dict[str, str | Path]) -> list[str]:
    return [f'-D{macro}="{value}"' if isinstance(value, Path) else f"-D{macro}={value}"
            for macro, value in macros.items()]


def _ninja_quoted(flags) -> list[str]:
    """load() writes flags into a ninja file as they are, and ninja hands them to a shell."""
    return [shlex.quote(flag).replace("$", "$$") for flag in flags]


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Errors of a compiler, a linker, or of a library that cannot be loaded, in few words."""
    try:
        yield
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        message = f"{error}\n{error.__cause__ or ''}"
        raise RuntimeError(_compile_error(name, message)) from None


def _compile_error(name: str, output: str) -> str:
    """What the compiler and the linker said, out of what ninja printed: not its own lines, nor commands."""
    ninja = (r"Error building|Command '\['ninja'|ninja: |FAILED: |\[\d+/\d+\] |"
             r"\S+ .*(-DTORCH_EXTENSION_NAME|-shared )")
    lines = [line for line in output.splitlines() if not re.match(ninja, line)]
    return f"building {name} failed:\n" + "\n".join(lines[:30])
