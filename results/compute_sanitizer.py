"""How programs run under NVIDIA's compute-sanitizer, and its verdicts. sanitizer.py has what is run.

    found      the tool names a mistake
    warning    racecheck names a hazard, and takes it for a warning only
    failed     the program failed, or the tool, without a word on why
    hang       it did not end within the limit
    clean      nothing
    not run    the time was up before
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SAYS_SO = ("found", "warning")
NOT_RUN = {"verdict": "not run", "message": ""}
FLAGS = ("-std=c++17", "-O3", "-lineinfo")       # those of the stages
# First lines of what a tool prints that say nothing about a mistake in a kernel
NO_DIAGNOSIS = re.compile(r"COMPUTE-SANITIZER|(ERROR|RACECHECK|LEAK) SUMMARY|Program hit|Target application|"
                          r"Error: (?!Race reported)|Warning: (?!Race reported)|Internal")


def says_so(answers: dict[str, dict]) -> bool:
    """Whether one of the tools has named a mistake, if only as a warning."""
    return any(answer["verdict"] in SAYS_SO for answer in answers.values())


def find_sanitizer() -> str:
    """The program. Exits without it."""
    installed = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    if not (found := next(filter(None, [shutil.which("compute-sanitizer"), *installed]), None)):
        sys.exit("needs NVIDIA's compute-sanitizer, on the PATH or in /usr/local/cuda/bin")
    return str(found)


def version_of(sanitizer: str) -> str:
    """Such as "2025.3.1.0"; empty if it does not say."""
    said = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version (\S+)", said)
    return found[1] if found else ""


def compile_cuda(source: Path, output: Path, architecture: str, *options: str) -> Path:
    """A file by nvcc, as the stages are. architecture: such as 90a. Exits if nvcc refuses."""
    from flash_ladder.nvcc import find_nvcc

    nvcc = find_nvcc()
    libraries = [f"-L{nvcc.parent.parent / name}" for name in ("lib64", "lib")]
    done = subprocess.run(
        [nvcc, *FLAGS, f"-gencode=arch=compute_{architecture},code=sm_{architecture}", f"-I{ROOT}",
         f"-I{ROOT / 'stages'}", *libraries, *options, "-o", output, source], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"nvcc refuses {source.name}, for {output.name}:\n{done.stdout}{done.stderr}")
    return output


def run(command: list[str], seconds: float,
        environment: dict[str, str] | None = None) -> tuple[str, int | None]:
    """What a command prints, and its return code: None if it did not end in time. Its children end, too.
    environment: beside the one here."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True, env=os.environ | (environment or {}))
    try:
        output, _ = process.communicate(timeout=seconds)
        return output, process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return output, None


def verdict(output: str, code: int | None) -> dict[str, str]:
    """The verdict on what a tool has printed, and its first words on it."""
    lines = [line[1] for line in re.finditer(r"^========= (\S.*)$", output, re.M)]
    diagnoses = [line for line in lines if not NO_DIAGNOSIS.match(line)]
    if errors := [line for line in diagnoses if not line.startswith("Warning")]:
        return {"verdict": "found", "message": errors[0]}
    if diagnoses:
        return {"verdict": "warning", "message": diagnoses[0]}
    if code is None:
        return {"verdict": "hang", "message": ""}
    if code:
        said = [line for line in lines if line.startswith(("Program hit", "Internal", "Error"))]
        return {"verdict": "failed", "message": (said or output.splitlines()[-1:] or [""])[0]}
    return {"verdict": "clean", "message": ""}


class Runs:
    """Runs of programs, until a point in time after which no more are begun.

    sanitizer: its path. limit: seconds for one run. until: of time.monotonic().
    """

    def __init__(self, sanitizer: str, limit: float, until: float):
        self.sanitizer, self.limit, self.until = sanitizer, limit, until

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.until

    def under(self, tool: str, command: list[str],
              environment: dict[str, str] | None = None) -> dict[str, str]:
        """The verdict of a tool on a command."""
        if self.is_over():
            return dict(NOT_RUN)
        return verdict(*run([self.sanitizer, "--tool", tool, "--error-exitcode", "99", "--print-limit", "3",
                             *command], self.limit, environment))
