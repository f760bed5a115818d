"""What NVIDIA's compute-sanitizer finds on a GPU; needs nvcc and compute-sanitizer.

    python results/sanitizer.py results/h200                  # in the corpus of tests/corpus: corpus.json
    python results/sanitizer.py results/h200 --rest           # of that what had no time, is new or changed
    python results/sanitizer.py results/h200 --mutants 150    # in so many mutants of the stages: mutants.json

Each bug and each mutant is a process of its own under each of four tools (compute_sanitizer.py has their
verdicts). The twins of a topic of the corpus share one, and are run apart if a tool has something to say. The
mutants are a random sample, always the same for a number (sanitized_mutants.py).

On 16 cores about eight minutes for the corpus, as kernels that hang take their time; six for 150 mutants.
"""

import argparse
import concurrent.futures
import json
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import corpus
import sanitized_mutants
from compute_sanitizer import FLAGS, NOT_RUN, ROOT, TOOLS, Runs, compile_cuda, find_sanitizer, version_of
from corpus import Case

Programs = dict[tuple[str, str], Path]           # by topic and place


# ------------------------------------------------------------------------------------------ the corpus
def build(topic: Path, place: str, folder: Path, architecture: str) -> Path:
    """A program whose arguments are the numbers of the cases that it launches. Exits if nvcc refuses."""
    return compile_cuda(corpus.write_program(topic, place, folder), folder / f"{topic.stem}_{place}",
                        architecture)


def one(runs: Runs, programs: Programs, tool: str, place: str, *cases: Case) -> dict[str, str]:
    """The verdict of a tool on cases of one topic, launched one after the other."""
    return runs.under(tool, [str(programs[cases[0].topic, place]), *(str(case.number) for case in cases)])


def twins_of(runs: Runs, programs: Programs, tool: str, cases: list[Case]) -> dict[str, dict[str, str]]:
    """The verdicts of a tool on a topic's twins, by their names."""
    together = one(runs, programs, tool, "twin", *cases)
    if together["verdict"] == "clean":
        return {case.name: together for case in cases}
    return {case.name: one(runs, programs, tool, "twin", case) for case in cases}


def sanitize_corpus(known: list[dict], runs: Runs, folder: Path, architecture: str,
                    pool: concurrent.futures.Executor) -> dict:
    """Run all of it but the known rows of the JSON file, whose cases are as they were: for the JSON file."""
    everything = [case for topic in corpus.topics() for case in corpus.cases(topic)]
    code = {(case.topic, case.name): corpus.fingerprint(case) for case in everything}
    rows = {key: row for row in known
            if row["code"] == code.get(key := (row["topic"], row["name"]))}
    asked = [case for case in everything if (case.topic, case.name) not in rows]
    by_topic = {topic: cases for topic in corpus.topics()
                if (cases := [case for case in asked if case.topic == topic.stem])}
    kinds = [(topic, place) for topic in by_topic for place in corpus.PLACES]
    built = pool.map(lambda kind: build(*kind, folder, architecture), kinds)
    programs = {(topic.stem, place): program for (topic, place), program in zip(kinds, built)}
    print(f"{len(programs)} programs are built", flush=True)
    first = one(runs, programs, "memcheck", "twin", *asked[:1])
    if first["verdict"] != "clean":
        sys.exit(f"{runs.sanitizer} does not work here: {first}")
    twins = {(tool, topic.stem): pool.submit(twins_of, runs, programs, tool, cases)
             for topic, cases in by_topic.items() for tool in TOOLS}
    bugs = {(tool, case): pool.submit(one, runs, programs, tool, "bug", case)
            for case in asked for tool in TOOLS}
    for case in asked:
        row = {"topic": case.topic, "name": case.name, "code": corpus.fingerprint(case),
               "bug": {tool: bugs[tool, case].result() for tool in TOOLS},
               "twin": {tool: twins[tool, case.topic].result()[case.name] for tool in TOOLS}}
        rows[case.topic, case.name] = row
        said = {tool: row["bug"][tool]["verdict"] for tool in TOOLS}
        false = {tool: row["twin"][tool]["verdict"] for tool in TOOLS
                 if row["twin"][tool]["verdict"] != "clean"}
        print(f"{case.topic}.{case.name}: {said}{f'; its twin: {false}' if false else ''}")
    return {"cases": [rows[case.topic, case.name] for case in everything]}


# ------------------------------------------------------------------------------------------ both
def devices(kept: str, device: str) -> str:
    """Where a file's rows come from: those that are kept, if there are any, and those of this run."""
    if not kept or kept == device:
        return device
    return kept if device in kept else f"{kept}; the rest on {device}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutants", type=int, metavar="N", help="run so many mutants, and not the corpus")
    parser.add_argument("--rest", action="store_true", help="only what FOLDER's file lacks, or has changed")
    parser.add_argument("--limit", type=float, help="seconds for one run: 30, or 60 of a mutant")
    parser.add_argument("--most", type=float, default=400, help="seconds after which no run is begun")
    args = parser.parse_args()
    begun, limit = time.monotonic(), args.limit or (60 if args.mutants else 30)
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    file = args.folder / ("mutants.json" if args.mutants else "corpus.json")
    old = json.loads(file.read_text()) if args.rest else {"cases": []}
    known = [row for row in old["cases"]
             if NOT_RUN not in (*row["bug"].values(), *row["twin"].values())]
    import torch

    import flash

    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    torch.set_num_threads(1)                     # the processes of the pool have the cores
    runs = Runs(find_sanitizer(), limit, begun + args.most)
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}" + "a" * (major == 9)
    here = flash.describe_device(torch.device("cuda"))
    result = {"date": str(date.today()), "device": devices(old["device"] if known else "", here),
              "compute-sanitizer": version_of(runs.sanitizer), "flags": " ".join(FLAGS),
              "limit_s": limit}
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        work = Path(name), architecture, pool
        if args.mutants:
            mutants = json.loads((ROOT / "results" / "cpu" / "mutants.json").read_text())["mutants"]
            rows = sanitized_mutants.sample(mutants, args.mutants)
            result |= {"asked": args.mutants, "of": len(sanitized_mutants.candidates(mutants)),
                       "seed": sanitized_mutants.SEED, **sanitized_mutants.sanitize(rows, runs, *work)}
        else:
            result |= sanitize_corpus(known, runs, *work)
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.monotonic() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
