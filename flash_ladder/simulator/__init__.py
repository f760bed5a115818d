"""CUDA on the CPU: what flash.py's loader needs to build a stage for a machine without a GPU.

translate.py rewrites the CUDA syntax, local_variables.py adds what the checker asks of local variables
(scan.py: where things are in the text), include/ stands in for NVIDIA's headers, and runtime/ executes the
threads.
"""

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..sources import read_source
from .translate import TranslationError, translate

__all__ = ["TranslationError", "compile_flags", "compile_library", "compile_runtime", "link_flags",
           "missing_checker", "missing_compiler", "precompile", "precompiles", "resolve_addresses",
           "signature", "translate", "translate_files", "translated_files"]

FOLDER = Path(__file__).resolve().parent
RUNTIME = FOLDER / "runtime"
UNITS = 3                             # as which its files are compiled, side by side
# -march=native as kernels have it: between code with AVX and code without, a call, such as the checker has
# for each access, lost 160 ns on an Intel Xeon. -ffp-contract=off: sums of products round as on other CPUs.
RUNTIME_FLAGS = ["-std=c++17", "-O2", "-g1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing",
                 "-fno-semantic-interposition"]
INCLUDE = FOLDER / "include"
SHARED_MEMORY_PER_BLOCK = 227 * 1024  # bytes, as on an H100; runtime.h has the same
MULTIPROCESSORS = 132, 228 * 1024     # and bytes of shared memory of one: likewise
FEW_MULTIPROCESSORS = 3               # what a stage's launch() hears when it asks (include/sim/host.h)
# Optimisations of RTL that -O1 has
AFTER_CHECKS = ("combine-stack-adjustments", "compare-elim", "cprop-registers", "dce", "dse", "if-conversion",
                "if-conversion2", "move-loop-invariants", "reorder-blocks", "shrink-wrap", "split-wide-types")
SHARED_LIBRARY = ["-shared", *["-undefined", "dynamic_lookup"] * (platform.system() == "Darwin")]
# It runs the stages of every architecture. Calls that name none take this one's: what they show, and the bits
# of their results, are then those of nearly every GPU.
ARCHITECTURE = "sm_80"


def compiler() -> str:
    """The C++ compiler that torch.utils.cpp_extension calls: $CXX, or the system's."""
    return os.environ.get("CXX", "clang++" if platform.system() == "Darwin" else "g++")


_found: set[tuple] = set()  # compilers, with the PATH that had them: to look takes long, in every call


def missing_compiler() -> str | None:
    """None if kernels can be compiled for this CPU, or why not and what to do."""
    if platform.system() not in ("Linux", "Darwin"):
        return f"the simulator runs on Linux and macOS, not on {platform.system()}: use WSL"
    if platform.machine() not in ("x86_64", "aarch64", "arm64"):
        return f"the simulator runs on x86-64 and aarch64, not on {platform.machine()}"
    sought = compiler(), os.environ.get("PATH")
    if sought not in _found:
        if not shutil.which(sought[0]):
            return (f"no C++ compiler: `{sought[0]}` is not on the PATH; install one "
                    "(Debian, Ubuntu: `apt install g++`; macOS: `xcode-select --install`) or set CXX")
        _found.add(sought)
    return None


def missing_checker() -> str | None:
    """None if checked builds can be made, or why not and what to do."""
    if missing := missing_compiler():
        return missing
    if _is_clang(compiler()):  # it splits the loads of a float4, and copies structs unseen
        return f"the checker needs GCC, and `{compiler()}` is clang: install g++ and set CXX=g++"
    return None


@functools.cache
def _is_clang(command: str) -> bool:
    return "clang" in subprocess.run([command, "--version"], capture_output=True, text=True).stdout


def compile_flags(debug: bool, checked: bool = False, in_16_bits: bool = False) -> list[str]:
    """Flags for a translated kernel. CUDA code reads memory through other types and lets integers wrap.

    -fstack-clash-protection: a large local array touches every page on its way down, so it cannot jump over
    the page that ends a thread's stack into the stack of another one.

    -O1: kernels run as fast as with -O2, which takes a third longer to compile. -fexpensive-optimizations is
    of -O2: it makes one fused operation of a product and a sum, as nvcc does.

    -g1: lines alone, which messages name; all of -g takes a quarter longer. (It comes after -gdwarf-4, which
    would make it all of -g again.)

    in_16_bits: the kernel multiplies on tensor cores, which the run-time library does: it runs as fast with
    the fewer passes of -Og, and is compiled in half the time. (Of them none fuses products and sums.)

    checked: every load and store calls the checker (runtime/hooks.cpp), and so does an index outside of a
    local array. One access of the source stays one access: nothing is vectorised, split, or made a call of
    memcpy. What g++ does to a function after it has inserted these calls is left out where it can be: most
    of the time goes to the checker, and a build takes an eighth less.
    """
    optimisation = ["-O0", "-g3"] if debug else ["-O1", "-g1", "-march=native"]
    if not debug and not checked:
        optimisation += ["-Og"] if in_16_bits else ["-fexpensive-optimizations"]
    if checked:
        optimisation += ["-DSIM_CHECKED", "-fsanitize=thread,bounds",
                         "--param=tsan-instrument-func-entry-exit=0",
                         "-fno-tree-sra", "-fno-tree-vectorize", "-fno-tree-slp-vectorize",
                         "-fno-tree-loop-distribute-patterns", "-U_FORTIFY_SOURCE",
                         *(f"-fno-builtin-{name}" for name in ("memcpy", "memmove", "memset")),
                         *(f"-fno-{name}" for name in AFTER_CHECKS)]
    return ["-std=c++17", "-gdwarf-4", *optimisation,
            "-fno-strict-aliasing", "-fwrapv", "-fno-finite-loops", "-fstack-clash-protection",
            "-Wno-unknown-pragmas", "-Wno-attributes", f"-I{INCLUDE}"]


def link_flags(checked: bool) -> list[str]:
    """exit() must not end Python; in a checked build the checker sees calls of memcpy and its like, too.

    Not to libstdc++, which the run-time library brings along: to read its symbols takes longer than all else.
    """
    if platform.system() != "Linux":
        return []
    names = ["exit", "_exit", "_Exit", "quick_exit", *["memcpy", "memmove", "memset"] * checked]
    libraries = [] if _is_clang(compiler()) else ["-nodefaultlibs", "-lm", "-lc", "-lgcc"]
    return [*(f"-Wl,--wrap={name}" for name in names), *libraries]


def compile_runtime(library: Path) -> None:
    """Compile the run-time library: not file by file, as reading the headers takes most of the time then.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    sources = sorted(RUNTIME.glob("*.cpp"), key=lambda file: file.stat().st_size)
    units = [library.with_name(f"unit_{n}.cpp") for n in range(UNITS)]
    for n, unit in enumerate(units):
        unit.write_text("".join(f'#include "{source.name}"\n' for source in sources[n::UNITS]))
    objects = [unit.with_suffix(".o") for unit in units]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda unit, compiled: _compile(
            ["-fPIC", *RUNTIME_FLAGS, f"-I{RUNTIME}", "-c", str(unit)], compiled), units, objects))
    _compile([*SHARED_LIBRARY, *map(str, objects), "-ldl", "-pthread"], library)
    for compiled in objects:
        compiled.unlink()


def compile_library(source: Path, library: Path, cflags: list[str], ldflags: list[str]) -> None:
    """Compile one C++ file, and link it: not to torch, which it does not use, and whose libraries take longer
    to link than all else. (The flags of the checker must not reach the linker, who would add libtsan.)

    Raises:
        RuntimeError: with the compiler's messages.
    """
    compiled = library.with_suffix(".o")
    _compile(["-fPIC", *cflags, "-c", str(source)], compiled)
    _compile([*SHARED_LIBRARY, str(compiled), *ldflags], library)
    compiled.unlink(missing_ok=True)


def precompiles() -> bool:
    """Whether the compiler finds a precompiled header by the name of the header that is included."""
    return not _is_clang(compiler())


def precompile(header: Path, flags: list[str]) -> None:
    """Parse cuda_runtime.h once for all kernels with these flags, to cuda_runtime.h.gch, whose path is given.
    g++ takes that for the header if its folder comes first among those with headers; beside it is a
    cuda_runtime.h that includes ours, for when g++ must not take it.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    source = header.with_suffix("")
    source.write_text(f'#include "{INCLUDE / source.name}"\n')
    _compile(["-fPIC", "-x", "c++-header", str(source), *flags], header)


def _compile(arguments: list[str], output: Path) -> None:
    """Call the compiler. The output is there when it is complete, not before."""
    part = output.with_name(f"{output.name}.{os.getpid()}")
    done = subprocess.run([compiler(), *arguments, "-o", str(part)], capture_output=True, text=True,
                          errors="replace")
    if done.returncode:
        part.unlink(missing_ok=True)
        raise RuntimeError(done.stderr)
    part.replace(output)


def signature() -> str:
    """A hash of all that a simulated kernel depends on beside its own source: the simulator, this CPU."""
    digest = hashlib.sha256()
    python = [FOLDER / name for name in ("__init__.py", "translate.py", "local_variables.py", "scan.py")]
    for file in sorted([*INCLUDE.rglob("*.h"), *RUNTIME.iterdir(), *python]):
        digest.update(file.read_bytes())
    cpu_info = Path("/proc/cpuinfo")  # -march=native: a build is not for every machine that shares the folder
    text = cpu_info.read_text() if cpu_info.exists() else ""
    features = set(re.findall(r"^(?:flags|Features)\s*:.*", text, re.M))
    digest.update(repr((sorted(features), platform.machine(), compiler())).encode())
    return digest.hexdigest()


def translated_files(files: list[Path], root: Path, folder: Path) -> dict[Path, Path]:
    """Where in `folder` the C++ of each file goes: in the same place as under `root`, else as on the disk."""
    places = {file: folder / (file.relative_to(root) if file.is_relative_to(root) else
                              Path("elsewhere", *file.resolve().parts[1:])) for file in files}
    return {file: place.with_suffix(".cpp") if place.suffix == ".cu" else place
            for file, place in places.items()}


def translate_files(targets: dict[Path, Path], checked: bool = False) -> None:
    """Translate each file to its target. checked: with what the checker asks of local variables.

    Raises:
        TranslationError: see translate().
    """
    for file, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        text = read_source(file)
        target.write_text(translate(text, str(file), checked))


def resolve_addresses(report: str) -> str:
    """Replace @library+offset@, as written after a crash, by file:line where addr2line is there."""
    def line_of(match: re.Match) -> str:
        try:
            out = subprocess.run(["addr2line", "-i", "-e", match[1], match[2]],
                                 capture_output=True, text=True).stdout
        except FileNotFoundError:
            return f"{match[1]}+{match[2]}"
        lines = [line.split(" (")[0] for line in out.splitlines() if not line.startswith("?")]
        stage = [line for line in lines if ".cu" in line]
        return (stage or lines or [f"{match[1]}+{match[2]}"])[0]

    return re.sub(r"@([^@]+)\+(0x[0-9a-f]+)@", line_of, report)
