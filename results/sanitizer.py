"""What NVIDIA's compute-sanitizer finds in the corpus of tests/corpus (corpus.py), on a GPU.

    python results/sanitizer.py results/h200     # writes corpus.json there; needs nvcc and compute-sanitizer

Each bug is a process of its own under each of four tools. The twins of a topic share one, and are run apart
if a tool has something to say. Verdicts:

    found      the tool names a mistake
    warning    racecheck names a hazard, and takes it for a warning only
    failed     the program failed, or the tool, without a word on why
    hang       it did not end within the limit
    clean      nothing

About two minutes on 16 cores.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import corpus
from corpus import TOOLS, Case

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("-std=c++17", "-O3", "-lineinfo")       # those of the stages
# First lines of what a tool prints that say nothing about a mistake in a kernel
NO_DIAGNOSIS = re.compile(r"COMPUTE-SANITIZER|(ERROR|RACECHECK|LEAK) SUMMARY|Program hit|Target application|"
                          r"Error: (?!Race reported)|Warning: (?!Race reported)|Internal")


def find_sanitizer() -> str:
    """The program. Exits without it."""
    installed = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    if not (found := next(filter(None, [shutil.which("compute-sanitizer"), *installed]), None)):
        sys.exit("needs NVIDIA's compute-sanitizer, on the PATH or in /usr/local/cuda/bin")
    return str(found)


def build(topic: Path, place: str, folder: Path, architecture: str) -> Path:
    """A program whose arguments are the numbers of the cases that it launches. Exits if nvcc refuses."""
    from flash_ladder.nvcc import find_nvcc

    nvcc = find_nvcc()
    program = folder / f"{topic.stem}_{place}"
    libraries = [f"-L{nvcc.parent.parent / name}" for name in ("lib64", "lib")]
    done = subprocess.run(
        [nvcc, *FLAGS, f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
         f"-I{ROOT / 'stages'}", *libraries, "-o", program, corpus.write_program(topic, place, folder)],
        capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"nvcc refuses {topic.name}, {place}:\n{done.stdout}{done.stderr}")
    return program


def run(command: list[str], seconds: float) -> tuple[str, int | None]:
    """What a command prints, and its return code: None if it did not end in time. Its children end, too."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
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
    """Runs of the programs under the tools, until a point in time after which no more are begun."""

    def __init__(self, sanitizer: str, programs: dict[tuple[str, str], Path], limit: float, until: float):
        self.sanitizer, self.programs, self.limit, self.until = sanitizer, programs, limit, until

    def one(self, tool: str, place: str, *cases: Case) -> dict[str, str]:
        """The verdict of a tool on cases of one topic, launched one after the other."""
        if time.monotonic() > self.until:
            return {"verdict": "not run", "message": ""}
        program = self.programs[cases[0].topic, place]
        numbers = [str(case.number) for case in cases]
        return verdict(*run([self.sanitizer, "--tool", tool, "--error-exitcode", "99", "--print-limit", "3",
                             str(program), *numbers], self.limit))

    def twins(self, tool: str, cases: list[Case]) -> dict[str, dict[str, str]]:
        """The verdicts of a tool on a topic's twins, by their names."""
        together = self.one(tool, "twin", *cases)
        if together["verdict"] == "clean":
            return {case.name: together for case in cases}
        return {case.name: self.one(tool, "twin", case) for case in cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=float, default=30, help="seconds for one run")
    parser.add_argument("--most", type=float, default=270, help="seconds after which no run is begun")
    args = parser.parse_args()
    begun = time.monotonic()
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    import torch

    import flash

    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    sanitizer = find_sanitizer()
    version = re.search(r"Version (\S+)", subprocess.run([sanitizer, "--version"], capture_output=True,
                                                         text=True).stdout)
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}" + "a" * (major == 9)
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        kinds = [(topic, place) for topic in corpus.topics() for place in corpus.PLACES]
        built = pool.map(lambda kind: build(*kind, Path(name), architecture), kinds)
        programs = {(topic.stem, place): program for (topic, place), program in zip(kinds, built)}
        print(f"{time.monotonic() - begun:.0f} s: {len(programs)} programs are built", flush=True)
        runs = Runs(sanitizer, programs, args.limit, begun + args.most)
        by_topic = [corpus.cases(topic) for topic in corpus.topics()]
        first = runs.one("memcheck", "twin", by_topic[0][0])
        if first["verdict"] != "clean":
            sys.exit(f"{sanitizer} does not work here: {first}")
        twins = {(tool, cases[0].topic): pool.submit(runs.twins, tool, cases)
                 for cases in by_topic for tool in TOOLS}
        bugs = {(tool, case): pool.submit(runs.one, tool, "bug", case)
                for cases in by_topic for case in cases for tool in TOOLS}
        rows = [{"topic": case.topic, "name": case.name,
                 "bug": {tool: bugs[tool, case].result() for tool in TOOLS},
                 "twin": {tool: twins[tool, case.topic].result()[case.name] for tool in TOOLS}}
                for cases in by_topic for case in cases]
    result = {"date": str(date.today()), "device": flash.describe_device(torch.device("cuda")),
              "compute-sanitizer": version[1] if version else "", "flags": " ".join(FLAGS),
              "limit_s": args.limit, "cases": rows}
    (args.folder / "corpus.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        said = {tool: row["bug"][tool]["verdict"] for tool in TOOLS}
        false = {tool: row["twin"][tool]["verdict"] for tool in TOOLS
                 if row["twin"][tool]["verdict"] != "clean"}
        print(f"{row['topic']}.{row['name']}: {said}{f'; its twin: {false}' if false else ''}")
    print(f"{time.monotonic() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
