"""Mutants of the stages (mutants.py) under compute-sanitizer: which of them, how they run, and the table.

sanitizer.py runs them. The chosen mutants of a stage are in one build, as all are in the simulator's, and
constant memory says which one runs. Each makes the calls of mutants.py in a process of its own (replay.cu),
once under each tool and once without one, when the results are compared with PyTorch's.
"""

import collections
import concurrent.futures
import functools
import math
import random
import re
import struct
from collections.abc import Container, Iterator
from dataclasses import fields
from pathlib import Path

import mutants
from compute_sanitizer import ROOT, SAYS_SO, TOOLS, Runs, compile_cuda, run, says_so
from mutants import Call, calls, name_of
from mutation import NUMBER, Mutant, fingerprint, schema_of_nvcc

import flash

SEED = 0                                         # of the sample
SLACK = 4      # a stage's error on a GPU over what mutants.py allows it, and a mutant's over the stage's
NAMED = 8                                        # mutants below the table
Answers = dict[str, dict[str, str]]              # by tool


# ------------------------------------------------------------------------------------------ the sample
def kind_of(row: dict) -> str:
    """The kind of change, of mutants.KINDS."""
    return next(kind for kind, pattern in mutants.KINDS.items() if re.fullmatch(pattern, row["change"]))


@functools.cache
def order() -> dict[str, int]:
    """The places of the stages, by name."""
    return {stage.path.stem: place for place, stage in enumerate(flash.stages())}


def stage_of(row: dict) -> str:
    """The stage that was the last in which the simulator tried a mutant: where it was found."""
    return max(row["tried"], key=order().__getitem__)


def quotas(counts: dict[str, int], number: int) -> dict[str, int]:
    """How many of each kind are in a sample: in proportion, but one at least."""
    number = min(number, sum(counts.values()))
    shares = {kind: count * number / sum(counts.values()) for kind, count in counts.items()}
    found = {kind: max(1, math.floor(share)) for kind, share in shares.items()}
    for kind in sorted(shares, key=lambda kind: math.floor(shares[kind]) - shares[kind]):
        found[kind] += sum(found.values()) < number and found[kind] < counts[kind]
    return found


def candidates(rows: list[dict]) -> list[dict]:
    """The rows of mutants.json without those of equivalent mutants."""
    same = mutants.reasons(mutants.EQUIVALENT)
    return [row for row in rows if name_of(row) not in same]


def sample(rows: list[dict], number: int, seed: int = SEED) -> list[dict]:
    """About so many rows of mutants.json, at random, without the equivalent ones: of each stage one at least,
    and kinds of change in proportion to all."""
    rows = candidates(rows)
    random.Random(seed).shuffle(rows)
    left = quotas(collections.Counter(map(kind_of, rows)), number)
    chosen: dict[str, dict] = {}
    stages: set[str] = set()
    for of_a_new_stage in (True, False):
        for row in rows:
            new = stage_of(row) not in stages
            if left[kind_of(row)] and name_of(row) not in chosen and (new or not of_a_new_stage):
                left[kind_of(row)] -= 1
                stages.add(stage_of(row))
                chosen[name_of(row)] = row
    return list(chosen.values())


# ------------------------------------------------------------------------------------------ programs
def call_file(call: Call) -> bytes:
    """A call as replay.cu reads it."""
    import torch

    from flash_ladder.checks import as_scale
    from flash_ladder.launch import PARAMS, Tensor
    from flash_ladder.plan import OUTPUTS, TENSORS, VECTORS, strides_of

    direction, q, k = call.stage.direction, call.tensors["Q"], call.tensors["K"]
    kind = PARAMS[direction]
    params = kind(B=q.shape[0], H=q.shape[1], H_kv=k.shape[1], N_q=q.shape[2], N_k=k.shape[2],
                  diagonal=call.diagonal or 0, scale=as_scale(None, q.shape[3]))
    params.mask.B = params.mask.H = 1
    params.mask.ints[0] = call.diagonal or 0
    every = call.tensors | outputs(call)
    names = [name for name in TENSORS[direction] if name in every]
    parts, data = b"", b""
    for name in names:
        x, is_output = every[name].contiguous(), name in OUTPUTS[direction]
        if name not in VECTORS:
            setattr(params, name, Tensor(None, *strides_of(x)))
        content = x.view(-1).view(torch.uint8).numpy().tobytes()
        parts += struct.pack("3q", getattr(kind, name).offset, len(content), is_output)
        data += b"" if is_output else content
    head = struct.pack("3q", len(bytes(params)), kind.workspace.offset, len(names))
    return head + bytes(params) + parts + data


def outputs(call: Call) -> dict:
    """Tensors like those that a call gives, by name, in their order."""
    import torch

    q, k, v = (call.tensors[name] for name in "QKV")
    if call.stage.direction == "bwd":
        return {"dQ": torch.empty_like(q), "dK": torch.empty_like(k), "dV": torch.empty_like(v)}
    return {"O": torch.empty_like(q), "L": torch.empty(q.shape[:3])}


def read_results(content: bytes, call: Call) -> tuple[list, bytes]:
    """What replay has written of a call, as tensors; and the rest."""
    import torch

    found = []
    for x in outputs(call).values():
        size = x.numel() * x.element_size()
        found.append(torch.frombuffer(bytearray(content[:size]), dtype=x.dtype).view(x.shape))
        content = content[size:]
    return found, content


class Program:
    """The calls of a stage with some of its mutants, in a folder: files, and libraries to be built."""

    def __init__(self, stage: flash.Stage, folder: Path, numbers: Container[int]):
        self.stage, self.folder, self.calls = stage, folder / stage.path.stem, calls(stage)
        self.folder.mkdir(parents=True)
        self.source = self.folder / stage.path.name
        self.source.write_text(schema_of_nvcc(stage, numbers))
        self.libraries: dict[tuple[str, ...], Path] = {}      # by the options that they are built with
        self.arguments: list[str] = []                        # of replay
        self.errors: list[dict] = []                          # of the calls without a mutant
        for number, call in enumerate(self.calls):
            file = self.folder / f"call_{number}"
            file.write_bytes(call_file(call))
            name = self.folder / f"{stage.path.stem}_{len(self.libraries)}.so"
            self.arguments += [str(self.libraries.setdefault(self.options(call), name)), str(file)]

    def options(self, call: Call) -> tuple[str, ...]:
        """nvcc's, for a call."""
        q = call.tensors["Q"]
        macros = flash.definitions(self.stage, q.dtype, q.shape[3], call.diagonal is not None, call.tiles)
        macros["STAGE_FILE"] = f'"{self.source}"'
        macros["MASK_FILE"] = f'"{macros["MASK_FILE"]}"'
        return "-shared", "-Xcompiler", "-fPIC", *(f"-D{name}={value}" for name, value in macros.items())

    def builds(self, architecture: str) -> Iterator[tuple]:
        """The arguments of compile_cuda for each library."""
        for options, library in self.libraries.items():
            yield ROOT / f"flash_{self.stage.direction}.cu", library, architecture, *options

    def wrong(self, results: Path, number: int) -> str:
        """What is wrong in a file that replay has written, or "": of the first call that is. number: the
        mutant's. 0 comes first; of the others an error is one that is well above its, too."""
        from flash_ladder import grid

        content, found = results.read_bytes(), []
        for call in self.calls:
            tensors, content = read_results(content, call)
            found.append(call.errors(*tensors))
        if number == 0:
            self.errors = found
        for errors, own in zip(found, self.errors):
            allowed = {name: SLACK * allowed if number == 0 else max(allowed, SLACK * own[name][0])
                       for name, (_, allowed) in errors.items()}
            if wrong := grid.wrong({name: (error, allowed[name]) for name, (error, _) in errors.items()}):
                return f"wrong: {wrong}"
        return ""


# ------------------------------------------------------------------------------------------ running them
def result(runs: Runs, replay: Path, program: Program, number: int) -> str:
    """What a run without a tool shows: "", or that a result is wrong, or that it fails or hangs."""
    if runs.is_over():
        return "not run"
    results = program.folder / f"results_{number}"
    output, code = run([str(replay), str(results), *program.arguments], runs.limit, {NUMBER: str(number)})
    if code == 0:
        shown = program.wrong(results, number)
    else:
        shown = "hang" if code is None else f"failed: {(output.splitlines() or [str(code)])[-1]}"
    results.unlink(missing_ok=True)
    return shown


def numbered(rows: list[dict]) -> dict[str, dict[str, int]]:
    """The numbers of these mutants in their stages, by stage and name."""
    stages = {stage.path.stem: stage for stage in flash.stages()}
    names: dict[str, set[str]] = {}
    for row in rows:
        names.setdefault(stage_of(row), set()).add(name_of(row))
    return {stem: {mutant.name: number for number, mutant in mutants.mutants(stages[stem]).items()
                   if mutant.name in chosen} for stem, chosen in names.items()}


def sanitize(rows: list[dict], runs: Runs, folder: Path, architecture: str,
             pool: concurrent.futures.Executor) -> dict:
    """Run these mutants, and before them each of their stages without one: for the JSON file."""
    chosen = numbered(rows)
    stages = {stage.path.stem: stage for stage in flash.stages() if stage.path.stem in chosen}
    programs = {stem: Program(stage, folder, chosen[stem].values()) for stem, stage in stages.items()}
    replay = pool.submit(compile_cuda, ROOT / "results" / "replay.cu", folder / "replay", architecture)
    builds = [pool.submit(compile_cuda, *build) for program in programs.values()
              for build in program.builds(architecture)]
    for build in [replay, *builds]:
        build.result()
    print(f"{len(builds)} libraries are built", flush=True)

    def begin(stem: str, number: int) -> dict[str, concurrent.futures.Future]:
        command = [str(replay.result()), "-", *programs[stem].arguments]
        begun = {tool: pool.submit(runs.under, tool, command, {NUMBER: str(number)}) for tool in TOOLS}
        return begun | {"result": pool.submit(result, runs, replay.result(), programs[stem], number)}

    without = {stem: begin(stem, 0) for stem in stages}
    for runs_of in without.values():                          # the mutants' results are compared with these
        runs_of["result"].result()
    begun = [begin(stage_of(row), chosen[stage_of(row)][name_of(row)]) for row in rows]
    made = []
    for stem, runs_of in without.items():
        print(f"{stem} without a mutant: {summary(ended(runs_of))}", flush=True)
    for row, runs_of in zip(rows, begun):
        made.append({field.name: row[field.name] for field in fields(Mutant)}
                    | {"stage": stage_of(row)} | ended(runs_of))
        print(f"{stage_of(row)}, {name_of(row)}: {summary(made[-1])}", flush=True)
    return {"stages": {stem: {"code": fingerprint(stages[stem])} | ended(runs_of)
                       for stem, runs_of in without.items()}, "mutants": made}


def ended(runs: dict[str, concurrent.futures.Future]) -> dict:
    """What came of them."""
    return {what: run.result() for what, run in runs.items()}


# ------------------------------------------------------------------------------------------ the table
def has_run(row: dict) -> bool:
    """Under all tools, and without one."""
    return row["result"] != "not run" and all(row[tool]["verdict"] != "not run" for tool in TOOLS)


def answers(row: dict, stages: dict[str, dict]) -> Answers:
    """The tools' on a mutant: of those that are silent on its stage without a mutant."""
    return {tool: row[tool] for tool in TOOLS if stages[row["stage"]][tool]["verdict"] not in SAYS_SO}


def how_shown(row: dict, stages: dict[str, dict]) -> str:
    """What shows a mutant on the GPU: "finding" of a tool; or just "result", a wrong one, an error of the
    launch or no end; or ""."""
    return "finding" if says_so(answers(row, stages)) else "result" if row["result"] else ""


def table(ours: dict, gpu: dict) -> str:
    """Of a sample of mutants: found by the checker and by compute-sanitizer, by kind of change, as Markdown.

    ours, gpu: what mutants.py and sanitizer.py have written."""
    how = {name_of(row): row["how"] for row in candidates(ours["mutants"])}
    rows = [row for row in gpu["mutants"]
            if has_run(row) and name_of(row) in how and not gpu["stages"][row["stage"]]["result"]]
    header = ["change", "mutants", "by the checker", "by the result alone", "missed",
              *(f"`{tool}`" for tool in TOOLS), "any of the four", "by the result alone", "missed"]
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for kind in [*mutants.KINDS, None]:
        here = [row for row in rows if kind in (kind_of(row), None)]
        checker = [how[name_of(row)] for row in here]
        alone = sum(shown.startswith("wrong") for shown in checker)
        there = [answers(row, gpu["stages"]) for row in here]
        shown = collections.Counter(how_shown(row, gpu["stages"]) for row in here)
        cells = [len(here), len(here) - alone - checker.count(""), alone, checker.count(""),
                 *(sum(tool in it and it[tool]["verdict"] in SAYS_SO for it in there) for tool in TOOLS),
                 shown["finding"], shown["result"], shown[""]]
        lines.append(f"| {kind or '**all**'} | {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", " ".join(remarks(rows, how, gpu))])


def remarks(rows: list[dict], how: dict[str, str], gpu: dict) -> Iterator[str]:
    """The sentences below the table. rows: those in it; how: the checker found them."""
    yield (f"A random sample of the {gpu['of']} mutants that are not equivalent: of {len(gpu['stages'])} "
           f"stages, each kind of change in proportion, in the same calls on both sides. On the left the "
           f"simulator, on the right compute-sanitizer {gpu['compute-sanitizer']}, nvcc {gpu['flags']}: "
           f"{gpu['device']}, {gpu['date']}, by `python results/sanitizer.py results/h200 --mutants "
           f"{gpu['asked']}`. Its warnings count as found.")
    stages = gpu["stages"]
    warned = sum(all(it["verdict"] != "found" for it in answers(row, stages).values())
                 for row in rows if how_shown(row, stages) == "finding")
    yield f"{warned} mutants are found by warnings alone."
    only = [f"`{name_of(row)}`" for row in rows if how_shown(row, stages) == "finding"
            and (not (its := how[name_of(row)]) or its.startswith("wrong"))]
    if only:
        more = f" and {len(only) - NAMED} others" if len(only) > NAMED else ""
        yield (f"{len(only)} have a finding of compute-sanitizer, and none of the checker in the first call "
               f"that shows them: {', '.join(only[:NAMED])}{more}.")
    false = [f"{tool} on {stem}" for stem, it in stages.items() for tool in TOOLS
             if it[tool]["verdict"] in SAYS_SO]
    yield (f"False findings in stages without a mutant, where the tool does not count: {', '.join(false)}."
           if false else "The tools are silent on the stages without a mutant.")
    if wrong := [stem for stem, it in stages.items() if it["result"]]:
        yield f"Left out, since they gave no right result without a mutant: {', '.join(wrong)}."
    hangs = [row for row in rows if row["result"] == "hang"]
    slow = sum(row[tool]["verdict"] == "hang" for row in rows if row not in hangs for tool in TOOLS)
    if hangs or slow:
        yield (f"Not done within {gpu['limit_s']:.0f} s: {len(hangs)} mutants without a tool, and {slow} "
               "runs of others under one.")


def summary(row: dict) -> str:
    """What came of the runs of a mutant, to be printed."""
    return f"{', '.join(row[tool]['verdict'] for tool in TOOLS)}; {row['result'] or 'the result is right'}"
