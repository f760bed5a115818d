"""Grading: whatever a learner's file does, the verdict is the checker's, and the class's other files get
theirs."""

import csv
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked_judges
import pytest

import flash
from tutorials.exercises import EXERCISES, Change, Verdict, check_file, find, grade, problem_of, process
from tutorials.exercises import __main__ as cli
from tutorials.exercises.cases import CASES
from tutorials.exercises.exercise import with_sections
from tutorials.exercises.handed_in import MOST_BYTES

ONE = find(5)    # to write
HUNT = find(25)  # in a hunt's file any line may change; this one is checked in little time
STAGE = ONE.path.name
CONFINE = Path(process.__file__).with_name("confine.py")
FORGED = "Only the checker's own verdict counts"
LOOP = Change("m[r] = m_new;", "m[r] = m_new; for (;;) __syncwarp();")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.delenv("FLASH_SIM_SEED", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")    # for what the judges are forks of


@pytest.fixture(autouse=True)
def judges_are_forks(monkeypatch):
    """Where a test does not ask for `judges_are_started`."""
    monkeypatch.setattr(process, "subprocess", forked_judges)


@pytest.fixture
def judges_are_started(judges_are_forks, monkeypatch):
    monkeypatch.setattr(process, "subprocess", subprocess)


def written(folder: Path, text: str, exercise=ONE) -> Path:
    file = folder / exercise.file_name
    file.write_text(text)
    return file


def at_loading(body: str, text: str | None = None) -> str:
    """A hunt's file (default: still wrong) that runs this C++ when it is loaded."""
    headers = ("arpa/inet.h", "cerrno", "csignal", "cstdio", "cstdlib", "cstring", "dlfcn.h", "fcntl.h",
               "fstream", "iterator", "string", "sys/socket.h", "unistd.h", "vector")
    code = "".join(f"#include <{name}>\n" for name in headers)
    code += f"__attribute__((constructor)) static void at_loading() {{\n{body}\n}}\n"
    text = text or HUNT.learners_file()
    return Change("#pragma once\n", f"#pragma once\n{code}").apply(text) if "#pragma once" in text else (
        Change("struct Rule", f"{code}struct Rule").apply(text))


def quoted(text: str) -> str:
    """As a C++ string."""
    return json.dumps(str(text))


def check(folder: Path, text: str, exercise=HUNT, **options) -> Verdict:
    return check_file(exercise, written(folder, text, exercise), **options)


# ------------------------------------------------------------------------------------ verdicts
RIGHT = json.dumps(dataclasses.asdict(Verdict(HUNT.number, "x", passed=True))) + "\n"
TO_ALL = f"""const char* text = {quoted(RIGHT)};
             for (int fd = 0; fd < 1024; fd++) if (write(fd, text, strlen(text))) {{}}"""
PYTHON = """import tutorials.exercises.grade as g
g.judge = lambda exercise, file: g.Verdict(exercise.number, str(file), passed=True)
g.run_case = g.take_score = lambda *arguments: None
"""


@pytest.mark.parametrize("body, message", [
    (f"{TO_ALL} _exit(0);", FORGED),
    (TO_ALL, FORGED),
    (f"puts({quoted(RIGHT)}); fputs({quoted(RIGHT)}, stderr); fflush(nullptr); exit(0);",
     "only the checker's own"),
    ("for (int fd = 3; fd < 1024; fd++) close(fd); for (;;) pause();", FORGED),
    ("abort();", "ended with SIGABRT"),
    ("kill(getppid(), SIGKILL);", "no verdict"),
], ids=["all pipes, exit", "all pipes", "stdout and stderr", "pipes closed", "abort", "ends the judge"])
def test_a_forged_verdict(body, message, tmp_path):
    verdict = check(tmp_path, at_loading(body))
    assert verdict.reason == "error" and message in verdict.message and not verdict.passed


def test_a_mask_that_forges_a_verdict(tmp_path):
    """Its code is that of the stage which is compiled with it, in that one's process."""
    hunt = find(29)
    text = TO_ALL.replace(json.dumps(RIGHT)[1:-1], json.dumps(RIGHT.replace(str(HUNT.number), "29"))[1:-1])
    verdict = check(tmp_path, at_loading(text, hunt.learners_file()), hunt)
    assert not verdict.passed and FORGED in verdict.message
    assert check(tmp_path, hunt.solved(), hunt).passed


def test_a_verdict_file_is_not_believed(tmp_path):
    """By the name that it once had, in the place of temporary files."""
    body = f"""std::string folder = getenv("TMPDIR");
      std::ofstream(folder + "/verdict.json") << {quoted(RIGHT)};
      if (system("for d in $TMPDIR/*/; do cp $TMPDIR/verdict.json $d; done")) {{}}"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        verdict = check(tmp_path, at_loading(body))
    assert (tmp_path / "verdict.json").exists()
    assert not verdict.passed and verdict.reason not in ("", "time limit")


def test_code_that_changes_pythons_side(tmp_path):
    """It does in its own process, which does not judge."""
    body = f"""auto ensure = (int (*)()) dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
      auto release = (void (*)(int)) dlsym(RTLD_DEFAULT, "PyGILState_Release");
      auto python = (int (*)(const char*)) dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
      int state = ensure();
      if (python({quoted(PYTHON)}) == 0) std::ofstream({quoted(tmp_path / "done")}) << "done";
      release(state);"""
    verdict = check(tmp_path, at_loading(body))
    assert (tmp_path / "done").exists()
    assert not verdict.passed and verdict.reason


def test_what_the_stages_process_finds(tmp_path, monkeypatch, judges_are_started):
    """No number of the check's, in its arguments, environment, stdin and memory; no pipe but its own; and its
    limits."""
    nonce, known = "1f0e2d3c" * 8, "7a6b5c4d" * 8
    monkeypatch.setattr(process.secrets, "token_hex", lambda count: nonce)
    monkeypatch.setenv("KNOWN", known)  # that the search finds
    one_more = [quoted("".join(chr(ord(x) + 1) for x in text)) for text in (nonce, known)]  # not in the stage
    body = f"""std::ofstream out({quoted(tmp_path / "found")});
      for (const char* name : {{"cmdline", "environ", "limits"}}) {{
        std::ifstream file(std::string("/proc/self/") + name);
        out << std::string(std::istreambuf_iterator<char>(file), {{}}) << "\\n";
      }}
      char text[256];
      out << "stdin: " << read(0, text, 1) << "\\n";
      for (int fd = 0; fd < 1024; fd++) {{
        ssize_t size = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), text, sizeof text);
        if (size > 0) out << "fd: " << std::string(text, size) << "\\n";
      }}
      const char* sought[] = {{{", ".join(one_more)}}};
      int memory = open("/proc/self/mem", O_RDONLY), found[2] = {{}};
      size_t from, to;
      std::ifstream maps("/proc/self/maps");
      for (std::string line; std::getline(maps, line);) {{
        if (sscanf(line.c_str(), "%zx-%zx r", &from, &to) != 2 || to - from > (1u << 28)) continue;
        std::vector<char> bytes(to - from);
        const char* end = bytes.data() + pread(memory, bytes.data(), bytes.size(), from);
        for (int n = 0; n < 2; n++) {{
          for (const char* at = bytes.data(); at + 64 <= end; at++) {{
            if (!(at = (const char*) memchr(at, sought[n][0] - 1, end - at)) || at + 64 > end) break;
            int same = 1;
            while (same < 64 && at[same] + 1 == sought[n][same]) same++;
            found[n] += same == 64;
          }}
        }}
      }}
      out << "found: " << found[0] << " and " << found[1] << "\\n";"""
    verdict = check(tmp_path, at_loading(body))
    assert verdict.reason not in ("", "error", "time limit"), verdict.message
    out = (tmp_path / "found").read_text(errors="replace")
    assert "tutorials.exercises.remote" in out and "FLASH_SIM_SECONDS=60" in out
    assert nonce not in out and "stdin: 0\n" in out and "fd: pipe:" not in out
    assert len(re.findall("fd: socket:", out)) == 1
    assert re.search(r"found: 0 and [1-9]", out)
    limits = dict(re.findall(r"^Max (.*?) {2,}(\w+)", out, re.M))
    assert limits["core file size"] == "0" and limits["file size"] == str(1 << 30)
    assert int(limits["cpu time"]) == 300 * os.cpu_count() + 10
    assert int(limits["address space"]) < 16 << 30
    assert int(limits["processes"]) < 100_000


@pytest.mark.parametrize("data", [
    b"", b"\n", b"\xff\n", b"[]\n", b"{}\n", b'{"nonce": 1, "verdict": {}}\n',
    b"[" * 100_000 + b"\n", b"NaN\n",
    RIGHT.encode(), json.dumps({"nonce": "guessed", "verdict": json.loads(RIGHT)}).encode() + b"\n",
    *(json.dumps({"nonce": "drawn", "verdict": json.loads(RIGHT) | change}).encode() + b"\n"
      for change in ({"exercise": 1}, {"passed": 1}, {"reason": "race"}, {"more": 1}, {"message": ["a"]})),
    json.dumps({"nonce": "drawn", "verdict": json.loads(RIGHT)}).encode(),
])
def test_whatever_comes_up_the_pipe(data, tmp_path, monkeypatch):
    """Without the number, of other types, with contradictions, cut short: an error, and no traceback."""
    file = written(tmp_path, HUNT.solved(), HUNT)
    monkeypatch.setattr(process.secrets, "token_hex", lambda count: "drawn")
    monkeypatch.setattr(process, "_run_judge", lambda *arguments: (data, 0))
    verdict = check_file(HUNT, file)
    assert verdict.reason == "error" and not verdict.passed
    assert FORGED in verdict.message or "no verdict" in verdict.message


def test_the_verdict_with_its_number(tmp_path, monkeypatch):
    message = json.dumps({"nonce": "drawn", "verdict": json.loads(RIGHT)}).encode() + b"\n"
    monkeypatch.setattr(process.secrets, "token_hex", lambda count: "drawn")
    monkeypatch.setattr(process, "_run_judge", lambda *arguments: (message, 0))
    assert check_file(HUNT, written(tmp_path, HUNT.solved(), HUNT)).passed


@pytest.mark.parametrize("change", [
    Change("m[r] = m_new;", "m[r] = m_new;"),
    Change("l_tile += P;", "l_tile += P_smem[(warp * rows + r) * Bc + (lane + 1) % 32 + 32 * c];")])
def test_answers_of_the_stages_process(change, tmp_path):
    """Come back as they were: outputs, findings, accesses, traffic."""
    import torch

    from tutorials.exercises.remote import decoded, encoded

    answer = grade.answer_of(ONE, written(tmp_path, change.apply(ONE.solved())))
    outputs, report, error = grade.Runner().inspected(ONE, answer, CASES[0])
    again, same, none = decoded(json.loads(json.dumps(encoded((outputs, report, error)))))
    assert error == none == "" and outputs.keys() == again.keys()
    for name, x in outputs.items():
        assert x.dtype == again[name].dtype and torch.equal(x.nan_to_num(), again[name].nan_to_num())
    assert report.accesses and report.accesses == same.accesses and report.kernels == same.kernels
    assert report.hbm == same.hbm and str(report) == str(same)
    assert same.findings == report.findings and bool(report.findings) == (change.old != change.new)


def test_each_call_has_the_judges_settings(tmp_path):
    """FLASH_SIM_SEED as it is at the time of the call; the two calls load two libraries."""
    code = f"""if True:
        import os, sys
        from pathlib import Path
        from tutorials.exercises import find, grade
        from tutorials.exercises.cases import CASES
        from tutorials.exercises.remote import Remote
        exercise, file = find({HUNT.number}), Path(sys.argv[1])
        answer, remote = grade.answer_of(exercise, file), Remote(exercise)
        os.environ["FLASH_SIM_SEED"] = "7"
        remote.call(exercise, answer, CASES[0])
        del os.environ["FLASH_SIM_SEED"]
        remote.inspected(exercise, answer, CASES[0])
        os._exit(0)"""
    body = f"""const char* seed = getenv("FLASH_SIM_SEED");
      std::ofstream({quoted(tmp_path / "seeds")}, std::ios::app) << (seed ? seed : "none") << " ";"""
    file = written(tmp_path, at_loading(body, HUNT.solved()), HUNT)
    stdin, ours = os.pipe()  # at whose end a judge ends
    with open(stdin), open(ours, "w"):
        done = subprocess.run([sys.executable, "-c", code, str(file)], cwd=flash.ROOT, stdin=stdin, text=True,
                              capture_output=True)
    seeds = (tmp_path / "seeds").read_text().split()
    assert set(seeds) == {"7", "none"} and seeds == sorted(seeds), done.stderr


@pytest.mark.parametrize("answer", [
    ["dataclass", "subprocess", "Popen", ["args", "true"]],
    ["dataclass", "flash_ladder.simulator.records", "subprocess", ["args", "true"]],
    ["dataclass", "flash_ladder.simulator.records", "subprocess.Popen", ["args", "true"]],
    ["dataclass", "flash_ladder.simulator.records", "source_lines", ["file", "x"]],
    ["dataclass", "tutorials.exercises.grade", "Verdict", ["exercise", 1], ["file", "x"], ["passed", True]],
    ["report", ["__class__", 1]], ["report", ["hbm", 1]], ["tensor", "load", [1], ""],
    ["tensor", "float32", [9], ""],
    ["dict", [["list"], 1]], ["other"], [],
], ids=str)
def test_answers_that_make_more_than_data(answer):
    from tutorials.exercises.remote import decoded

    with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError)):
        decoded(answer)


def test_outputs_of_another_shape(monkeypatch):
    """One number for all of O, which PyTorch would compare with each."""
    import torch

    from tutorials.exercises.remote import FORGED, Remote

    remote, answer, case = Remote.__new__(Remote), grade.Answer(ONE.compiled_with), CASES[0]
    q = (case.B, case.H, case.N_q, case.d)
    right = {"O": torch.zeros(q), "L": torch.zeros(q[:3])}
    assert remote._checked(ONE, answer, case, right) is right
    for wrong in ({"O": torch.zeros(1)}, {"L": torch.zeros(q)}, {"O": torch.zeros(q).half()},
                  {"dQ": torch.zeros(q)}):
        with pytest.raises(grade.Refused) as refused:
            remote._checked(ONE, answer, case, right | wrong)
        assert refused.value.args == ("error", FORGED)


# ------------------------------------------------------------------------------------ processes
def runs(pid: int) -> bool:
    """Whether it has not ended; whether its parent has heard of that does not matter. (Of Linux's /proc.)"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_process_left_behind(tmp_path):
    """Neither one in the group nor one that has left it delays the verdict, or outlives it."""
    body = f"""if (!fork()) for (;;) pause();
      if (!fork()) {{
        setsid();
        if (fork()) _exit(0);
        std::ofstream({quoted(tmp_path / "pid")}) << getpid();
        for (;;) pause();
      }}"""
    verdict = check(tmp_path, at_loading(body, HUNT.solved()), time_limit=120)
    assert verdict.passed, verdict.message
    assert not runs(int((tmp_path / "pid").read_text()))


def test_a_process_left_behind_by_one_that_ends(tmp_path):
    verdict = check(tmp_path, at_loading("if (!fork()) for (;;) pause(); _exit(3);"), time_limit=120)
    assert verdict.reason == "error" and "exit code 3" in verdict.message and verdict.seconds < 100


def test_a_loop_without_an_end(tmp_path):
    verdict = check(tmp_path, LOOP.apply(ONE.solved()), ONE, time_limit=9)
    assert verdict.reason == "time limit"


def test_host_code_without_an_end(tmp_path):
    body = f"""std::ofstream({quoted(tmp_path / "pid")}) << getpid();
      signal(SIGTERM, SIG_IGN);
      for (;;) pause();"""
    start = time.monotonic()
    verdict = check(tmp_path, at_loading(body), time_limit=9)
    assert time.monotonic() - start < 15
    assert verdict.reason == "time limit"
    assert verdict.message == "Stopped after 9 s: a loop without an end, perhaps."
    assert not runs(int((tmp_path / "pid").read_text()))


def test_an_interrupted_check(tmp_path, monkeypatch, judges_are_started):
    """Ctrl-C, or an error of ours, leaves no process."""
    before, started = process._descendants(os.getpid()), []

    def interrupted(pipe, deadline):
        while len(started) < 2 and time.monotonic() < deadline:  # the judge, and the stage's process
            started[:] = [pid for pid in process._descendants(os.getpid()) if pid not in before]
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(tmp_path, HUNT.solved())
    assert len(started) >= 2 and not any(runs(pid) for pid in started)


def test_the_judge_ends_with_whoever_asked(tmp_path):
    file = written(tmp_path, at_loading("for (;;) pause();"), HUNT)
    pipe, theirs = os.pipe()
    with open(pipe, "rb") as up:
        judge = [sys.executable, "-m", "tutorials.exercises.remote", str(HUNT.number), str(file), str(theirs)]
        judge = subprocess.Popen(judge, stdin=subprocess.PIPE, cwd=flash.ROOT, pass_fds=(theirs,))
        os.close(theirs)
        judge.stdin.write(b"5e" * 32)
        judge.stdin.close()
        assert up.read() == b"" and judge.wait(60) == 1


def test_code_that_ends_the_process(tmp_path):
    text = Change("m[r] = m_new;", "m[r] = m_new; __builtin_trap();").apply(ONE.solved())
    verdict = check(tmp_path, text, ONE)
    assert not verdict.passed and verdict.reason in ("error", "deadlock")
    assert verdict.message


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is Linux's")
def test_memory_without_an_end(tmp_path):
    body = "std::vector<char*> all; for (;;) all.push_back(new char[1 << 28]);"
    verdict = check(tmp_path, at_loading(body))
    assert verdict.reason == "error" and "bad_alloc" in verdict.message


def confined(seconds: int, code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, CONFINE, str(seconds), sys.executable, "-c", code], text=True,
                          capture_output=True)


def test_limits_end_a_process():
    done = confined(1, "while True: pass")
    assert done.returncode == -signal.SIGXCPU
    done = confined(9, "import os\nwith open('/dev/shm/flash_large', 'wb') as f:\n  os.unlink(f.name)\n"
                       f"  f.truncate({(1 << 30) + 1})")
    assert "File too large" in done.stderr


def test_lower_limits_stay():
    code = f"import resource as r, os, sys; r.setrlimit(r.RLIMIT_CPU, (3, 4)); os.execv(sys.executable, " \
           f"[sys.executable, {str(CONFINE)!r}, '9', sys.executable, '-c', " \
           "'import resource as r; print(r.getrlimit(r.RLIMIT_CPU))'])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "(3, 4)\n"


def can_leave_network() -> bool:
    """Asked of another program than the one that is tested."""
    options = ["--net"] if os.getuid() == 0 else ["--user", "--net"]
    return bool(shutil.which("unshare")) and not subprocess.run(["unshare", *options, "true"],
                                                                capture_output=True).returncode


@pytest.mark.skipif(not can_leave_network(), reason="this system does not allow network namespaces")
def test_no_network(tmp_path, judges_are_started):
    """Not even this machine's own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        body = f"""sockaddr_in address {{}};
          address.sin_family = AF_INET;
          address.sin_port = htons({server.getsockname()[1]});
          address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
          int s = socket(AF_INET, SOCK_STREAM, 0);
          int failed = connect(s, (sockaddr*) &address, sizeof address);
          std::ofstream({quoted(tmp_path / "failed")}) << failed << " " << strerror(errno);"""
        check(tmp_path, at_loading(body))
    assert (tmp_path / "failed").read_text() == "-1 Network is unreachable"


def test_a_kernel_that_the_simulator_stops(tmp_path, monkeypatch):
    """The reason is the time limit, whether the simulator reports it as a finding or raises it."""
    said = "forward_kernel ran longer than 60 s (FLASH_SIM_SECONDS), and was at mine.cuh:117"
    finding = flash.Report.__new__(flash.Report)
    finding.findings = []

    class Stopped(grade.Runner):
        def inspected(self, exercise, answer, case):
            return {}, finding, said

    monkeypatch.setattr(grade, "runner", Stopped())
    verdict = grade.judge(ONE, written(tmp_path, ONE.solved()))
    assert verdict.reason == "time limit" and "mine.cuh:117" in verdict.message
    from flash_ladder.simulator.records import Finding

    finding.findings = [Finding("error", "forward_kernel", "", (), 1, said)]
    verdict = grade.judge(ONE, written(tmp_path, ONE.solved()))
    assert verdict.reason == "time limit" and "mine.cuh:117" in verdict.message


@pytest.mark.parametrize("limit, seconds", [(300, "60"), (60, "12"), (1, "1")])
def test_a_kernels_limit_is_part_of_the_files(limit, seconds, tmp_path, monkeypatch):
    class Started(Exception):
        pass

    def popen(command, env, **options):
        assert env["FLASH_SIM_SECONDS"] == seconds and "FLASH_SIM_SEED" not in env
        assert options["start_new_session"] and not any("drawn" in x for x in (*command, *env.values()))
        raise Started

    monkeypatch.setenv("FLASH_SIM_SEED", "1")
    monkeypatch.setattr(process.secrets, "token_hex", lambda count: "drawn")
    monkeypatch.setattr(process.subprocess, "Popen", popen)
    with pytest.raises(Started):
        check(tmp_path, HUNT.solved(), time_limit=limit)


# ------------------------------------------------------------------------------------ the header
NO_RESCALING = Change("O_reg[r][c] *= alpha;", "O_reg[r][c] *= 1.f;")
TILES = "// tiles:   Br=8 Bc=160\n"


def headers(text: str) -> dict[str, str]:
    """Ways to give a file other tiles."""
    first, rest = text.split("\n", 1)
    tiles = next(line for line in text.split("\n") if line.startswith("// tiles:"))
    return {
        "changed": text.replace(f"{tiles}\n", TILES),
        "goes on": text.replace(tiles, f"{tiles}\n//          ; d > 0: Br=8 Bc=160"),
        "a second one": text.replace("\n#pragma once", f"\n{TILES}#pragma once"),
        "one before": f"{first}\n{TILES}{rest}",
        "without a header": f"\n{text}",
        "cut short": f"{first}\n\n{rest}",
        "taken out": text.replace(f"{tiles}\n", ""),
        "after a carriage return": text.replace(tiles, f"{tiles}\r// Br=8 Bc=160"),
        "another direction": text.replace("// Forward stage", "// Backward stage"),
        "other spaces": text.replace(tiles, tiles.replace("// tiles:", "//  tiles:")),
    }


@pytest.mark.parametrize("way", headers(ONE.learners_file()))
def test_the_tiles_are_the_exercises(way, tmp_path):
    """With one tile of keys nothing shows that rescaling is left out."""
    text = headers(NO_RESCALING.apply(ONE.solved()))[way]
    assert text != NO_RESCALING.apply(ONE.solved())
    verdict = grade.judge(ONE, written(tmp_path, text))
    assert verdict.reason == "changed" and re.search("lines at the top|carriage return", verdict.message)


@pytest.mark.parametrize("way", ["changed", "goes on", "a second one", "without a header", "cut short"])
def test_the_tiles_are_the_exercises_once_more(way, tmp_path, monkeypatch):
    """Even if the comparison of texts had overlooked it."""
    monkeypatch.setattr(grade, "problem_of", lambda exercise, text: None)
    text = headers(NO_RESCALING.apply(ONE.solved()))[way]
    assert grade.judge(ONE, written(tmp_path, text)).reason == "changed"


def test_comments_elsewhere_may_look_like_a_header(tmp_path):
    """And a name may stand above it."""
    text = Change("m[r] = m_new;", "m[r] = m_new;\n// shared: nothing").apply(ONE.solved())
    for right in (text, f"// By Ada\n{text}", text.replace("\n#pragma once", "\n// By Ada\n#pragma once")):
        assert problem_of(ONE, right) is None
        stage = grade.answer_of(ONE, written(tmp_path, right)).stage
        assert grade.tiles_of(ONE, stage, CASES[0]) == {"Br": 64, "Bc": 64}


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.file_name[:-4])
def test_the_header_of_each_exercise(exercise, tmp_path):
    """Is that of its stage, in the file as it is given."""
    given = exercise.compiled_with
    answer = grade.answer_of(exercise, written(tmp_path, exercise.learners_file(), exercise))
    stage = answer.stage
    assert (stage.tile_rules, stage.dtypes, stage.limits) == (given.tile_rules, given.dtypes, given.limits)
    assert answer.path.name == exercise.file_name


IN_BLANK = "m[r] = m_new;"


@pytest.mark.parametrize("code, message", [
    ("/* m[r] = m_new;", "comment without an end"),
    ("/*/ m[r] = m_new;", "comment without an end"),
    ("/\\\n* m[r] = m_new;", "comment without an end"),
    ("'\\'' /* '", "comment without an end"),
    ("1'0 /* '", "comment without an end"),
    ("} {", "without its"),
    ("}", "without its"),
    ("{", "without its"),
    ("#define Bc 160", "begins with `#define`"),
    ("#\tundef Bc", "begins with `#\tundef`"),
    ("%:define Bc 160", "begins with `%:define`"),
    ("#if 0", "begins with `#if`"),
    ('R"(', "raw string"),
    ('u8R"x(', "raw string"),
    ("/* a } and # */ { m[r] = m_new; } // {", None),
    ("#pragma unroll", None),
    ('puts("/* { #"); // /* {', None),
    ("f('{', 1'000, 0xA'B);", None),
])
def test_a_blank_leaves_what_follows_as_it_is(code, message):
    problem = problem_of(ONE, Change(IN_BLANK, f"{IN_BLANK}\n{code}\n").apply(ONE.solved()))
    assert not problem if message is None else problem[0] == "changed" and message in problem[1]


@pytest.mark.parametrize("text", [
    "/" * 190_000 + "\\", "/*" * 90_000, '"\\' * 90_000, "'\\" * 90_000, "\\ " * 90_000, "// tiles:" * 20_000,
    "\n// --- ".join(map(str, range(15_000))), "{" * 190_000, "1'" * 90_000, "// " + " " * 180_000,
    "#" * 190_000,
], ids=lambda text: repr(text[:8]))
def test_long_lines_take_no_time(text):
    for whole in (f"{text}\n{ONE.solved()}", f"{ONE.solved()}\n{text}\n",
                  Change(IN_BLANK, f"{IN_BLANK}\n{text}\n").apply(ONE.solved())):
        start = time.process_time()
        problem_of(ONE, whole)
        assert time.process_time() - start < 3


# ------------------------------------------------------------------------------------ the command line
def run(*arguments):
    return cli.main([str(a) for a in arguments])


def test_list(capsys, tmp_path):
    assert run("list", "--folder", tmp_path) == 0
    out = capsys.readouterr().out
    assert all(f" {e.number} " in out for e in EXERCISES) and "bug hunt" in out
    run("new", ONE.number, "--folder", tmp_path)
    run("list", "4", "--folder", tmp_path)
    out = capsys.readouterr().out
    assert "begun" in out and EXERCISES[0].title not in out


def test_new_never_overwrites(capsys, tmp_path):
    assert run("new", ONE.number, "--folder", tmp_path / "mine") == 0
    file = tmp_path / "mine" / ONE.file_name
    assert "your code" in file.read_text() and f"check {ONE.number}" in capsys.readouterr().out
    file.write_text("my work")
    with pytest.raises(SystemExit):
        run("new", ONE.number, "--folder", tmp_path / "mine")
    assert file.read_text() == "my work"
    assert "is left as it is" in " ".join(capsys.readouterr().err.split())


def test_check_as_a_learner_does(capsys, tmp_path):
    """From new to passed, by the commands, the last one in a process of its own, with JSON."""
    folder = ["--folder", str(tmp_path)]
    assert run("new", ONE.number, *folder) == 0 and run("check", ONE.number, *folder) == 1
    assert "Nothing is written yet" in " ".join(capsys.readouterr().out.split())
    file = tmp_path / ONE.file_name
    file.write_text(with_sections(file.read_text(), ONE.answers()))
    after = subprocess.run([sys.executable, "-m", "tutorials.exercises", "check", str(ONE.number), *folder,
                            "--json"], cwd=flash.ROOT, capture_output=True, text=True)
    verdict = json.loads(after.stdout)
    assert after.returncode == 0 and verdict["passed"] and verdict["exercise"] == ONE.number
    assert verdict["score"]["hbm"][0] == verdict["score"]["hbm"][1] > 0


def test_a_whole_class(capsys, tmp_path):
    """One row a file, also of those that fail; a student without files has none."""
    for student, text in (("ada", ONE.solved()), ("bob", ONE.learners_file()), ("eve", None)):
        (tmp_path / student).mkdir()
        if text:
            (tmp_path / student / ONE.file_name).write_text(text)
    (tmp_path / "ada" / "notes.txt").write_text("nothing to check")
    assert run("check", "--all", tmp_path) == 0
    rows = list(csv.DictReader(open(tmp_path / "results.csv", newline="")))
    assert [(row["student"], row["exercise"], row["passed"], row["reason"]) for row in rows] == [
        ("ada", str(ONE.number), "1", ""), ("bob", str(ONE.number), "0", "not started")]
    assert rows[0]["hbm"] == rows[0]["hbm of the reference"] != ""
    assert "2 files, 1 passed" in " ".join(capsys.readouterr().out.split())


def test_solution(capsys):
    assert run("solution", ONE.number) == 0
    assert "O_reg[r][c] *= alpha" in capsys.readouterr().out
    hunt = next(e for e in EXERCISES if e.is_hunt)
    run("solution", hunt.number)
    out = " ".join(re.sub("[│╭╰─]", " ", capsys.readouterr().out).split())
    assert " ".join(hunt.answer.split())[:40] in out


@pytest.mark.parametrize("arguments, message", [
    (("new", 99), "there is no exercise 99"),
    (("list", "77"), "lesson 77 has no exercises"),
    (("check",), "which exercise"),
    (("check", 5, "--file", "nothing.cuh"), "is no file"),
    (("check", "--all", "nowhere"), "is no folder"),
    (("check", 5, "--all", "nowhere"), "a number, or --all"),
])
def test_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit):
        run(*arguments)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.file_name[:-4])
def test_new_says_where_to_write(exercise, capsys, tmp_path):
    """The lines of the blanks in the file, which follow the line that begins a section."""
    run("new", exercise.number, "--folder", tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    lines = (tmp_path / exercise.file_name).read_text().split("\n")
    titles = [f"// --- {title}" for title in exercise.sections]
    begins = [n for n, line in enumerate(lines) if line.strip() in titles]
    blanks = [next(n for n in range(start, len(lines)) if lines[n].strip().startswith("// your code")) + 1
              for start in begins]
    said = re.search(r"Write your code at lines? ([\d and]+)\.", out)
    assert [int(n) for n in re.findall(r"\d+", said[1])] == blanks if blanks else not said
    assert len(blanks) == len(exercise.sections)


# ------------------------------------------------------------------------------------ a class
def test_a_class_with_everything_in_it(capsys, tmp_path):
    """A row for each answer, whatever it is."""
    name = ONE.file_name
    for student in ("binary", "dangling", "fifo", "folder", "huge", "latin", "loop", "right", "socket", "two",
                    "unreadable", "zero"):
        (tmp_path / student).mkdir()
    (tmp_path / "binary" / name).write_bytes(bytes(range(256)) * 40)
    (tmp_path / "dangling" / name).symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo" / name)
    (tmp_path / "folder" / name).mkdir()
    with open(tmp_path / "huge" / name, "wb") as huge:
        huge.truncate(1 << 40)
    (tmp_path / "latin" / name).write_bytes(ONE.solved().replace("#pragma once", "// \xe4\n#pragma once")
                                            .encode("latin-1"))
    (tmp_path / "loop" / name).symlink_to(tmp_path / "loop" / name)
    (tmp_path / "right" / name).write_text(ONE.solved())
    (tmp_path / "two" / name).write_text(ONE.learners_file())
    (tmp_path / "two" / f"{name[:2]}_another.cuh").mkdir()
    (tmp_path / "zero" / name).symlink_to("/dev/zero")
    (tmp_path / "unreadable" / name).write_text(ONE.learners_file())
    (tmp_path / "unreadable" / name).chmod(0)
    (tmp_path / "nobody").symlink_to(tmp_path / "nowhere")
    folder = os.open(tmp_path / "socket", os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{folder}/{name}")  # a socket's whole name has 107 bytes at most
        assert run("check", "--all", tmp_path) == 0
    os.close(folder)
    rows = list(csv.DictReader(open(tmp_path / "results.csv", newline="")))
    found = {(row["student"], row["reason"]): row["message"] for row in rows}
    expected = {"binary": "null byte within line 1", "dangling": "a link to nothing", "fifo": "a named pipe",
                "folder": "a folder", "huge": f"more than {MOST_BYTES:,} bytes", "latin": "not UTF-8",
                "loop": "symbolic links", "socket": "a socket", "zero": "a device"}
    reasons = {"binary": "changed", "latin": "does not compile"}
    for student, message in expected.items():
        reason = reasons.get(student, "unreadable")
        assert (student, reason) in found, found
        assert re.search(message, found[student, reason]), found
    assert ("right", "") in found and ("two", "not started") in found and ("two", "unreadable") in found
    assert ("unreadable", "not started" if os.getuid() == 0 else "unreadable") in found
    assert len(rows) == 13
    out = " ".join(capsys.readouterr().out.split())
    assert "13 files" in out and "nobody" not in out


def test_a_csv_file_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / ONE.file_name).write_text(ONE.learners_file())
    with pytest.raises(SystemExit):
        run("check", "--all", tmp_path, "--csv", tmp_path / "ada")
    assert "Is a directory" in capsys.readouterr().err


def test_a_checker_that_fails(monkeypatch, tmp_path, capsys):
    """Gives the answer a row, and goes on."""
    for student in ("ada", "bob"):
        (tmp_path / student).mkdir()
        (tmp_path / student / ONE.file_name).write_text(ONE.learners_file())

    def fails(exercise, file, time_limit):
        if "ada" in str(file):
            raise MemoryError("too little")
        return check_file(exercise, file, time_limit)

    monkeypatch.setattr(cli, "check_file", fails)
    assert run("check", "--all", tmp_path) == 0
    rows = list(csv.DictReader(open(tmp_path / "results.csv", newline="")))
    assert [(row["student"], row["reason"]) for row in rows] == [("ada", "error"), ("bob", "not started")]
    assert "MemoryError: too little" in rows[0]["message"]


@pytest.mark.skipif(os.getuid() == 0, reason="root can read every folder")
def test_a_students_folder_that_cannot_be_read(tmp_path, capsys):
    for student in ("ada", "bob"):
        (tmp_path / student).mkdir()
        (tmp_path / student / ONE.file_name).write_text(ONE.learners_file())
    (tmp_path / "ada").chmod(0)
    try:
        assert run("check", "--all", tmp_path) == 0
    finally:
        (tmp_path / "ada").chmod(0o700)
    rows = list(csv.DictReader(open(tmp_path / "results.csv", newline="")))
    found = [(row["student"], row["reason"]) for row in rows]
    assert found == [("ada", "unreadable"), ("bob", "not started")]


def test_names_that_are_formulas_or_markup(capsys, tmp_path):
    """Neither a spreadsheet nor a terminal takes a student's name for anything else."""
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "[red]ada", "\x1b[31mred", "a\\",
             "\udcff", "\u202eevil", "ada"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / ONE.file_name).write_text(ONE.learners_file())
        (tmp_path / name / f"{ONE.number:02}_[bold]x.cuh").mkdir()
    assert run("check", "--all", tmp_path) == 0
    out = capsys.readouterr().out
    for shown in ("[red]ada", "\\x1b[31mred", "a\\", "\\udcff", "\\u202eevil", "=1+1"):
        assert shown in out
    assert "\x1b[31m" not in out and "\u202e" not in out
    rows = list(csv.DictReader(open(tmp_path / "results.csv", newline="", encoding="utf-8")))
    assert len(rows) == 2 * len(names)
    cells = {row["student"] for row in rows}
    assert {"'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\\tx", "'\\rx", "[red]ada", "ada"} <= cells
    assert not any(text.startswith(("=", "+", "-", "@", "\t", "\r")) for row in rows for text in row.values())


@pytest.mark.parametrize("message", ["=HYPERLINK(1)", "+1", "-1", "@x", "\tx", "\rx"])
def test_messages_that_are_formulas(message, monkeypatch, capsys, tmp_path):
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / ONE.file_name).write_text(ONE.learners_file())
    monkeypatch.setattr(cli, "check_file", lambda exercise, file, time_limit: Verdict(
        exercise.number, str(file), reason=message, message=message, score={"hbm": [-1, 2]}))
    run("check", "--all", tmp_path)
    row = next(csv.DictReader(open(tmp_path / "results.csv", newline="")))
    assert row["message"] == row["reason"] == "'" + message.replace("\t", "\\t").replace("\r", "\\r")
    assert row["hbm"] == "-1"  # a number stays one


def test_markup_in_a_verdict(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "check_file", lambda exercise, file, time_limit: Verdict(
        exercise.number, str(file), reason="[/nothing]", message="[link=x]y[/link] \x1b[2J [/nothing]"))
    folder = tmp_path / "[bold]x"
    folder.mkdir()
    file = written(folder, ONE.learners_file())
    assert run("check", ONE.number, "--file", file) == 1
    out = capsys.readouterr().out
    assert "[link=x]y[/link] \\x1b[2J [/nothing]" in out and "\x1b[2J" not in out
    run("new", HUNT.number, "--folder", folder)
    assert "[bold]x" in capsys.readouterr().out.replace("\n", "")


def test_a_folder_of_ones_own(capsys, tmp_path):
    """It stays in what the commands say next."""
    assert run("new", 5, "--folder", tmp_path) == 0
    assert f"check 5 --folder {tmp_path}" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        run("check", 6, "--folder", tmp_path)
    assert f"new 6 --folder {tmp_path}` writes one" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("seconds", ["-3", "0", "nan", "soon"])
def test_a_time_limit_that_makes_no_sense(capsys, seconds):
    with pytest.raises(SystemExit):
        run("check", 5, f"--time-limit={seconds}")
    assert f"invalid number of seconds above 0 value: '{seconds}'" in capsys.readouterr().err


def test_a_row_has_what_its_message_announces():
    assert cli.first_lines("32 wavefronts, and 4 would do:\n  mine.cuh:7: x = y[8];\nmore") == (
        "32 wavefronts, and 4 would do: mine.cuh:7: x = y[8];")
    assert cli.first_lines("O is wrong\nmore") == "O is wrong"


def test_a_lesson_of_the_list_begins_with_its_own(capsys):
    assert run("list", "04") == 0
    first = next(e.number for e in EXERCISES if e.lesson == "04")
    assert f"python -m tutorials.exercises new {first}" in " ".join(capsys.readouterr().out.split())


def test_how_long_blanks_are():
    """As TEACHING.md says."""
    lines = [e.lines for e in EXERCISES if not e.is_hunt]
    text = (flash.ROOT / "tutorials" / "TEACHING.md").read_text()
    assert f"A blank has {min(lines)} to {max(lines)} lines" in text
