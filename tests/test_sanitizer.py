"""Mutants under compute-sanitizer, as far as no GPU is needed: the sample, the program that makes the calls,
and the table."""

import collections
import concurrent.futures
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from test_nvcc import NVCC, WHY_NOT

import flash
from flash_ladder import loader

RESULTS = flash.ROOT / "results"
sys.path.insert(0, str(RESULTS))
import compute_sanitizer  # noqa: E402
import corpus  # noqa: E402
import mutants  # noqa: E402
import mutation  # noqa: E402
import sanitized_mutants  # noqa: E402
import sanitizer  # noqa: E402

STAGES = {stage.path.stem: stage for stage in flash.stages()}
DATA = json.loads((RESULTS / "cpu" / "mutants.json").read_text())
HERE = RESULTS / "h200" / "mutants.json"


# ------------------------------------------------------------------------------------------ the sample
def test_the_sample():
    """Always the same; of every stage; no equivalent mutant; kinds of change in proportion."""
    rows = sanitized_mutants.sample(DATA["mutants"], 150)
    assert rows == sanitized_mutants.sample(DATA["mutants"], 150)
    names = [mutants.name_of(row) for row in rows]
    assert len(names) == len(set(names)) == 150
    assert names != [mutants.name_of(row) for row in sanitized_mutants.sample(DATA["mutants"], 150, seed=1)]
    assert {sanitized_mutants.stage_of(row) for row in rows} >= set(DATA["stages"])
    assert not set(names) & set(mutants.reasons(mutants.EQUIVALENT))
    of_all, chosen = (collections.Counter(map(sanitized_mutants.kind_of, some))
                      for some in (sanitized_mutants.candidates(DATA["mutants"]), rows))
    assert set(chosen) == set(of_all) == set(mutants.KINDS)
    for kind, count in of_all.items():
        assert abs(chosen[kind] - 150 * count / of_all.total()) <= 1


def test_the_sample_may_be_all():
    every = sanitized_mutants.candidates(DATA["mutants"])
    names = {mutants.name_of(row) for row in sanitized_mutants.sample(DATA["mutants"], 10 ** 6)}
    assert names == {mutants.name_of(row) for row in every}


def test_quotas():
    assert sanitized_mutants.quotas({"a": 2, "b": 100, "c": 98}, 20) == {"a": 1, "b": 10, "c": 9}
    assert sanitized_mutants.quotas({"a": 50, "b": 30, "c": 20}, 10) == {"a": 5, "b": 3, "c": 2}
    assert sanitized_mutants.quotas({"a": 50, "b": 33, "c": 17}, 10) == {"a": 5, "b": 3, "c": 2}
    assert sanitized_mutants.quotas({"a": 2, "b": 1}, 10) == {"a": 2, "b": 1}


# ------------------------------------------------------------------------------------------ the programs
CUDA = """
#include <stdlib.h>
#include <string.h>
typedef int cudaError_t;
enum { cudaSuccess, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline int cudaMalloc(void** p, size_t n) { *p = aligned_alloc(256, (n + 4096) / 256 * 256); return 0; }
inline int cudaMemset(void* p, int x, size_t n) { memset(p, x, n); return 0; }
inline int cudaMemcpy(void* to, const void* from, size_t n, int) { memcpy(to, from, n); return 0; }
inline int cudaFree(void* p) { free(p); return 0; }
inline int cudaDeviceSynchronize() { return 0; }
inline const char* cudaGetErrorString(int) { return "an error"; }
"""


@pytest.fixture(scope="module")
def replay(tmp_path_factory) -> Path:
    """replay.cu, for the memory of the host: so it can make calls of the simulator's libraries."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "cuda_runtime.h").write_text(CUDA)
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Werror", "-x", "c++", f"-I{folder}", "-o",
                    folder / "replay", RESULTS / "replay.cu", "-ldl"], check=True)
    return folder / "replay"


@pytest.mark.parametrize("stem, wrong", [("fwd_01_naive", "wrong: O: error "),
                                         ("bwd_11_cp_async", "wrong: dQ: error ")])
def test_calls_without_python(stem, wrong, replay, tmp_path, monkeypatch):
    """They give what the library's own do: without a mutant the right results, and with one wrong ones."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(Path(torch.__file__).parent / "lib"))
    stage = STAGES[stem]
    program = sanitized_mutants.Program(stage, tmp_path, [])
    program.source.write_text(mutation.schema(stage))
    for call in program.calls:
        q, causal = call.tensors["Q"], call.diagonal is not None
        macros = flash.definitions(stage, q.dtype, q.shape[3], causal, call.tiles)
        macros["STAGE_FILE"] = program.source
        library = program.libraries[program.options(call)]
        if not library.exists():
            source = flash.ROOT / f"flash_{stage.direction}.cu"
            library.symlink_to(loader.build(source, torch.device("cpu"), macros, "replayed"))
    runs = compute_sanitizer.Runs("", 100, time.monotonic() + 1000)
    assert sanitized_mutants.result(runs, replay, program, 0) == ""
    assert all(error <= allowed for errors in program.errors for error, allowed in errors.values())
    assert sanitized_mutants.result(runs, replay, program, 2).startswith(wrong)
    over = compute_sanitizer.Runs("", 100, time.monotonic() - 1)
    assert sanitized_mutants.result(over, replay, program, 0) == "not run"
    assert over.under("memcheck", ["replay"])["verdict"] == "not run"
    broken = program.libraries[program.options(program.calls[-1])]
    broken.unlink()
    assert sanitized_mutants.result(runs, replay, program, 0).startswith("failed: library: ")


def test_all_of_it_but_the_gpu(monkeypatch, tmp_path, capsys):
    """What is written, where each tool says one thing; the stage without a mutant runs first."""
    rows = [row for row in DATA["mutants"] if sanitized_mutants.stage_of(row) == "fwd_01_naive"][:2]
    begun = []
    monkeypatch.setattr(sanitized_mutants, "compile_cuda", lambda source, output, *_: output)
    monkeypatch.setattr(sanitized_mutants, "result", lambda runs, replay, program, number: f"wrong: {number}")

    def under(runs, tool, command, environment):
        begun.append((tool, command[1], len(command), environment["FLASH_MUTANT"]))
        return {"verdict": "found" if tool == "memcheck" else "clean", "message": ""}

    monkeypatch.setattr(compute_sanitizer.Runs, "under", under)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        made = sanitized_mutants.sanitize(rows, compute_sanitizer.Runs("", 1, 0), tmp_path, "90a", pool)
    words = 2 + 2 * len(mutants.SHAPES)
    assert begun == [(tool, "-", words, n) for n in "012" for tool in compute_sanitizer.TOOLS]
    assert [it["result"] for it in (made["stages"]["fwd_01_naive"], *made["mutants"])] == [
        "wrong: 0", "wrong: 1", "wrong: 2"]
    assert [mutants.name_of(it) for it in made["mutants"]] == [mutants.name_of(row) for row in rows]
    assert all(map(sanitized_mutants.has_run, made["mutants"]))
    assert "fwd_01_naive without a mutant: found, clean, clean, clean; wrong: 0" in capsys.readouterr().out
    assert json.dumps(made)


@pytest.mark.parametrize("options, name, limit", [
    (["--mutants", "40"], "mutants.json", 60), ([], "corpus.json", 30), (["--limit", "7"], "corpus.json", 7)])
def test_the_command(options, name, limit, monkeypatch, tmp_path):
    """What it writes where; the mutants are the sample's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(flash, "describe_device", lambda device: "a GPU")
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: "true")
    monkeypatch.setattr(sanitizer, "sanitize_corpus", lambda *rest: {"cases": rest[3]})
    monkeypatch.setattr(sanitized_mutants, "sanitize", lambda rows, *rest: {"mutants": len(rows)})
    monkeypatch.setattr(sys, "argv", ["sanitizer.py", str(tmp_path), *options])
    sanitizer.main()
    made = json.loads((tmp_path / name).read_text())
    assert (made["device"], made["limit_s"]) == ("a GPU", limit)
    assert made.get("cases") == "90a" if "corpus" in name else made["mutants"] == made["asked"] == 40


def test_the_rest_is_what_had_no_time_or_has_changed(monkeypatch, tmp_path):
    """Rows in which something has not run, or other code has, are asked for again; the others stay."""
    clean, not_run = ({"verdict": verdict, "message": ""} for verdict in ("clean", "not run"))
    case, other, changed, *_ = corpus.cases(corpus.topics()[0])
    rows = [{"topic": it.topic, "name": it.name, "code": code, "bug": {"memcheck": bug},
             "twin": {"memcheck": clean}}
            for it, code, bug in ((case, corpus.fingerprint(case), clean),
                                  (other, corpus.fingerprint(other), not_run), (changed, "another", clean))]
    (tmp_path / "corpus.json").write_text(json.dumps({"device": "another GPU", "cases": rows}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(flash, "describe_device", lambda device: "a GPU")
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: "true")
    monkeypatch.setattr(corpus, "topics", lambda: [Path(f"{case.topic}.cu")])
    monkeypatch.setattr(corpus, "cases", lambda topic: [case, other, changed])
    monkeypatch.setattr(sanitizer, "build", lambda topic, place, *rest: topic)
    asked = []
    monkeypatch.setattr(sanitizer, "one", lambda runs, programs, tool, place, *cases: (
        asked.append((place, *(it.name for it in cases))), clean)[1])
    monkeypatch.setattr(sys, "argv", ["sanitizer.py", str(tmp_path), "--rest"])
    sanitizer.main()
    assert set(asked) == {("twin", other.name),              # whether the tool works here
                          ("twin", other.name, changed.name), ("bug", other.name), ("bug", changed.name)}
    data = json.loads((tmp_path / "corpus.json").read_text())
    made = data["cases"]
    assert made[0] == rows[0] and data["device"] == "another GPU; the rest on a GPU"
    assert all(it["bug"] == {tool: clean for tool in compute_sanitizer.TOOLS} for it in made[1:])
    assert made[2]["code"] == corpus.fingerprint(changed)


def test_where_rows_come_from():
    assert sanitizer.devices("", "b") == sanitizer.devices("b", "b") == "b"
    assert sanitizer.devices("a; the rest on b", "b") == "a; the rest on b"


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
@pytest.mark.parametrize("stem", ["fwd_02_tiled", "fwd_17_ampere_tuned", "bwd_15_ampere_tuned"])
def test_nvcc_compiles_mutants_at_once(stem, tmp_path):
    """As it compiles the stage; and the code asks constant memory which one runs."""
    rows = [row for row in DATA["mutants"] if sanitized_mutants.stage_of(row) == stem][::3]
    numbers = sanitized_mutants.numbered(rows)[stem].values()
    *_, build = sanitized_mutants.Program(STAGES[stem], tmp_path, numbers).builds("90a")
    library = compute_sanitizer.compile_cuda(*build)
    assert b"mutant_on_the_device" in library.read_bytes()


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
def test_nvcc_compiles_the_program_that_makes_the_calls(tmp_path):
    source = RESULTS / "replay.cu"
    assert compute_sanitizer.compile_cuda(source, tmp_path / "replay", "90a").stat().st_size > 0


def test_builds_are_shared():
    """Calls of the same tiles, d and mask share a library, with the mutants that are asked for."""
    with tempfile.TemporaryDirectory() as folder:
        program = sanitized_mutants.Program(STAGES["fwd_04_flash2"], Path(folder), [3, 5])
        text = program.source.read_text()
    assert len(program.arguments) == 2 * len(mutants.SHAPES) > 2 * len(program.libraries)
    assert "mutant_on_the_device == (number)" in text and 'getenv("FLASH_MUTANT")' in text
    assert set(re.findall(r"MUTANT\((\d+)\)", text)) == {"3", "5"} and "false - false + " in text


# ------------------------------------------------------------------------------------------ the table
def row(change: str, stage: str, result: str = "", occurrence: int = 1, **found: str) -> dict:
    """Of the GPU's results."""
    return {"file": f"{stage}.cuh", "line": 1, "code": "code", "change": change, "occurrence": occurrence,
            "stage": stage, "result": result,
            **{tool: {"verdict": found.get(tool, "clean")} for tool in compute_sanitizer.TOOLS}}


def test_the_table_of_the_sample():
    """A tool that is not silent on a stage does not count there; what has not run is not in the
    table, nor one of a stage that gave no right result."""
    rows = [row("< + 1", "a", "wrong: O", memcheck="found"), row("< - 1", "a", "wrong: O"),
            row("< - 1", "a", "", 2, racecheck="warning"),
            row("__syncthreads removed", "b", "", racecheck="found"),
            row("__syncthreads removed", "b", "hang", 2, synccheck="hang", initcheck="failed"),
            row("< + 1", "b", "not run"), row("< + 1", "a", "", 2, synccheck="not run"),
            row("< + 1", "wrong", "wrong: O", memcheck="found"), row("< + 1", "gone", memcheck="found")]
    how = ["race", "wrong: O", "", "race", "barrier", "race", "race", "race"]
    ours = {"mutants": [{**it, "how": shown} for it, shown in zip(rows, how)]}
    silent = row("", "") | {"code": ""}
    gpu = {"date": "2030-01-03", "device": "a GPU", "compute-sanitizer": "1.2", "flags": "-O3",
           "limit_s": 7.0, "of": 100, "asked": 9, "mutants": rows,
           "stages": {"a": silent, "b": silent | {"racecheck": {"verdict": "found"}},
                      "wrong": silent | {"result": "wrong: O"}}}
    text = sanitized_mutants.table(ours, gpu)
    lines = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines()[2:-2])
    assert lines["a barrier or fence removed"] == "2 | 2 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 1"
    assert lines["a bound larger by one"] == "1 | 1 | 0 | 0 | 1 | 0 | 0 | 0 | 1 | 0 | 0"
    assert lines["a bound smaller by one"] == "2 | 0 | 1 | 1 | 0 | 1 | 0 | 0 | 1 | 1 | 0"
    assert lines["**all**"] == "5 | 3 | 1 | 1 | 1 | 1 | 0 | 0 | 2 | 2 | 1"
    assert "1 mutants are found by warnings alone." in text
    assert "1 have a finding of compute-sanitizer, and none" in text
    assert "`a.cuh: code: < - 1 (no. 2)`" in text
    assert "does not count: racecheck on b." in text
    assert "no right result without a mutant: wrong." in text
    assert "Not done within 7 s: 1 mutants without a tool, and 0 runs" in text


@pytest.mark.skipif(not HERE.is_file(), reason="compute-sanitizer has not run on mutants")
def test_the_results_are_of_these_mutants():
    """Else, on a GPU: python results/sanitizer.py results/h200 --mutants 150."""
    data = json.loads(HERE.read_text())
    assert {row["stage"] for row in data["mutants"]} <= set(data["stages"]) <= set(STAGES)
    assert sanitized_mutants.table(DATA, data)
    if old := [stem for stem, it in data["stages"].items()
               if it["code"] != mutation.fingerprint(STAGES[stem])]:
        warnings.warn(f"results/h200/mutants.json is older than {', '.join(old)}", stacklevel=1)
