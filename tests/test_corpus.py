"""The checker finds every planted bug of tests/corpus, and nothing in its twin, under every schedule."""

import json
import subprocess
import sys

import pytest
from test_nvcc import NVCC, WHY_NOT

import flash

sys.path.insert(0, str(flash.ROOT / "results"))
import compute_sanitizer  # noqa: E402
import corpus  # noqa: E402
import sanitizer  # noqa: E402

TOPICS = {topic.stem: topic for topic in corpus.topics()}
CASES = [case for topic in TOPICS.values() for case in corpus.cases(topic)]

# The lines of a case's file without those of other cases: its own, and those of functions that several call
OWN_OR_NOBODYS = {case: set(range(1, 1000)).difference(*(
    range(*other.lines) for other in CASES if other != case and other.topic == case.topic)) for case in CASES}

# Bugs that are found where the writer's block runs first, or the reader's: a flag says whether it has
IN_ONE_ORDER = {"flag_without_a_fence", "flag_read_without_a_fence", "fence_of_the_block_alone",
                "write_after_the_fence", "reader_fences_its_block_alone", "read_before_the_flag"}
# Bugs that are not found, and why
MISSED: dict[str, str] = {}
# Twins with a finding
FALSE: dict[str, str] = {}


def library(topic: str, place: str):
    return corpus.library(TOPICS[topic], place)


@pytest.fixture(autouse=True)
def schedule_as_it_was(monkeypatch):
    """After the tests, which change it."""
    for name in ("FLASH_SIM_SEED", "FLASH_SIM_COPIES"):
        monkeypatch.setenv(name, "")


def test_the_corpus_is_whole():
    """Each kernel has a bug, names are unique, and a bug lies line for line where its twin does."""
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 60
    assert {*MISSED, *FALSE, *IN_ONE_ORDER} <= set(names)
    for topic in TOPICS.values():
        text = topic.read_text()
        bug, twin = (corpus.program(topic, place).splitlines() for place in ("bug", "twin"))
        assert text.count("__global__") == len(corpus.cases(topic)), f"{topic.name}: a head is not understood"
        assert text.count("//! buggy:") == sum(a.startswith("//! buggy:") for a in map(str.strip, twin))
        assert len(bug) == len(twin)
        changed = {n for n, (a, b) in enumerate(zip(bug, twin), 1) if a != b}
        for case in corpus.cases(topic):
            first, last = case.lines
            assert changed & set(range(first, last)), f"{case.name} has no bug"
        assert not [line for line in bug if "//! buggy" in line]


@pytest.mark.parametrize("case", [
    pytest.param(case, id=f"{case.topic}-{case.name}", marks=[
        pytest.mark.xfail(strict=True, reason=MISSED.get(case.name))] * (case.name in MISSED))
    for case in CASES])
def test_bug_is_found(case):
    """By a finding of the expected kind, in the kernel's lines or those of a function that several call."""
    found = []
    for schedule in corpus.SCHEDULES:
        findings = corpus.findings(TOPICS[case.topic], "bug", case, schedule)
        expected = [finding for finding in findings if finding.what in case.expected]
        found.append(bool(expected))
        lines = {place.line for finding in expected for place in finding.places if place.line}
        assert lines <= OWN_OR_NOBODYS[case], "\n".join(map(str, expected))
    assert any(found) and all(found) != (case.name in IN_ONE_ORDER), found


@pytest.mark.parametrize("schedule", corpus.SCHEDULES, ids="-".join)
@pytest.mark.parametrize("topic", TOPICS)
def test_nothing_in_the_twins(topic, schedule):
    corpus.set_schedule(*schedule)
    cases = corpus.cases(TOPICS[topic])
    report, errors = corpus.inspected(library(topic, "twin"), *cases)
    assert [kernel.name for kernel in report.kernels] == [case.name for case in cases]
    wrong = {finding.kernel: finding for finding in report.findings}
    assert set(wrong) == {case.name for case in cases} & set(FALSE), wrong
    assert {case.name for case, error in zip(cases, errors) if error} <= set(FALSE), errors


@pytest.mark.parametrize("schedule", corpus.SCHEDULES, ids="-".join)
def test_notes_of_portability(schedule):
    """That threads have exited before a barrier is no mistake: it is said beside the findings."""
    corpus.set_schedule(*schedule)
    cases = [case for case in CASES if case.topic == "barrier_divergence"]
    report, errors = corpus.inspected(library("barrier_divergence", "twin"), *cases)
    assert (report.findings, set(errors)) == ([], {""})
    notes = {(note.kernel, note.what) for note in report.notes}
    assert notes == {(name, "portability") for name in ("threads_that_left", "a_warp_that_left")}
    text = " ".join(str(report).split())
    assert "No findings" in text and "thread 64 of block 0 has returned before the others pass" in text
    assert [note["what"] for note in report.to_dict()["notes"]] == ["portability"] * len(report.notes)


@pytest.mark.parametrize("topic", TOPICS)
def test_the_table_is_of_this_corpus(topic):
    """results/cpu/corpus.json has what the checker finds now; else: python results/corpus.py results/cpu. The
    results of compute-sanitizer may lack cases that are newer."""
    rows = json.loads((flash.ROOT / "results" / "cpu" / "corpus.json").read_text())["cases"]
    made = json.loads(json.dumps(corpus.check(TOPICS[topic])))
    assert made == [row for row in rows if row["topic"] == topic]
    assert {row["topic"] for row in rows} == set(TOPICS)
    file = flash.ROOT / "results" / "h200" / "corpus.json"
    if file.exists():
        there = {(row["topic"], row["name"]) for row in json.loads(file.read_text())["cases"]}
        assert there <= {(case.topic, case.name) for case in CASES}


def test_the_table():
    """By topic, with what compute-sanitizer found where it has run."""
    ours = {"date": "2030-01-02", "cases": [
        {"topic": "two_words", "name": "a", "code": "1", "expected": ["race"], "bug": ["race"], "twin": []},
        {"topic": "two_words", "name": "b", "code": "1", "expected": ["race"], "bug": ["deadlock"],
         "twin": ["deadlock"]},
        {"topic": "other", "name": "c", "code": "1", "expected": ["race"], "bug": ["race"], "twin": []}]}
    text = corpus.table(ours, None)
    assert text.splitlines()[2:5] == ["| two words | 2 | 1 | 1 | 1 |", "| other | 1 | 1 | 0 | 0 |",
                                      "| **all** | 3 | 2 | 1 | 1 |"]
    assert "Missed: `b`. False: `b`." in text

    def answers(**others):
        return {tool: {"verdict": others.get(tool, "clean")} for tool in corpus.TOOLS}

    gpu = {"date": "2030-01-03", "device": "a GPU", "compute-sanitizer": "1.2", "flags": "-O3",
           "limit_s": 7.0, "cases": [
        {"topic": "two_words", "name": "a", "code": "1", "twin": answers(),
         "bug": answers(**dict.fromkeys(corpus.TOOLS, "hang"))},
        {"topic": "two_words", "name": "b", "code": "1", "twin": answers(initcheck="found"),
         "bug": answers(memcheck="failed", racecheck="warning")},
        {"topic": "other", "name": "c", "code": "0", "twin": answers(memcheck="found"), "bug": answers()}]}
    text = corpus.table(ours, gpu)
    assert text.splitlines()[2:5] == [
        "| two words | 2 | 1 | 1 | 1 | 2 | 0 | 1 | 0 | 0 | 1 | 1 |",
        "| other | 1 | 1 | 0 | 0 | 0 | - | - | - | - | - | - |",
        "| **all** | 3 | 2 | 1 | 1 | 2 | 0 | 1 | 0 | 0 | 1 | 1 |"]
    assert "Found by compute-sanitizer alone: `b`." in text and "1 cases are newer, or have" in text
    assert "False there: `b`. Not done within 7 s under any tool: `a`." in text


# ------------------------------------------------------------------------------------------ on a GPU
HEAD = "========= COMPUTE-SANITIZER\n"


@pytest.mark.parametrize("output, code, expected", [
    (HEAD + "========= ERROR SUMMARY: 0 errors\n", 0, "clean"),
    (HEAD + "========= Invalid __shared__ read of size 4 bytes\n=========     at f()\n"
     "========= ERROR SUMMARY: 1 error\n", 99, "found"),
    (HEAD + "========= Uninitialized __global__ memory read of size 4 bytes\n", None, "found"),
    (HEAD + "========= Barrier error detected. Divergent thread(s) in warp.\n", 99, "found"),
    (HEAD + "========= Error: Race reported between Write access at f() and Read access at f()\n"
     "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", 99, "found"),
    (HEAD + "========= Warning: Race reported between Write access at f() and Read access at f()\n"
     "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n", 0, "warning"),
    (HEAD + "========= Program hit cudaErrorLaunchFailure (error 719) due to \"unspecified launch failure\"\n"
     "=========     Saved host backtrace up to driver entry point at error\n"
     "========= ERROR SUMMARY: 1 error\n", 99, "failed"),
    (HEAD + "========= Error: process didn't terminate successfully\n"
     "========= Target application returned an error\n", 1, "failed"),
    (HEAD, None, "hang")])
def test_verdicts_of_compute_sanitizer(output, code, expected):
    found = compute_sanitizer.verdict(output, code)
    assert found["verdict"] == expected
    assert bool(found["message"]) == (expected in ("found", "warning", "failed"))


def test_a_run_that_hangs_is_ended():
    """With its children; what it had printed is kept."""
    output, code = compute_sanitizer.run(["bash", "-c", "echo here; sleep 1000 & echo $!; wait"], 1)
    word, child = output.split()
    assert (word, code) == ("here", None)
    state = subprocess.run(["ps", "-p", child, "-o", "stat="], capture_output=True).stdout
    assert state[:1] in (b"", b"Z")


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
@pytest.mark.parametrize("topic", list(TOPICS)[::2])
def test_the_programs_compile(topic, tmp_path):
    """By nvcc, the bugs of every other topic: their twins differ in a line each."""
    assert sanitizer.build(TOPICS[topic], "bug", tmp_path, "90a").stat().st_size > 0
