"""python flash.py: the ladder as a tree, and a rung of one's own: new, check, diff."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash
from flash_ladder import command, grid, registry

SMALL = [(1, 2, 1, 40, 50, 16, "bottom"), (1, 1, 1, 9, 9, 8, None), (1, 1, 1, 20, 30, 16, "top")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_grid(monkeypatch):
    for module in (grid, command):
        monkeypatch.setattr(module, "GRID", SMALL)
    monkeypatch.setattr(command, "WATCHED", SMALL[0])


def run(capsys, *argv):
    """(exit status, what was printed, errors)"""
    try:
        status = command.main(list(argv))
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


def lines_of_the_tree(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, _ = run(capsys)
    assert status == 0 and max(map(len, out.splitlines())) <= columns
    return [line.rstrip() for line in out.splitlines()]


@pytest.mark.parametrize("columns", [80, 110, 200])
def test_tree(capsys, monkeypatch, columns):
    """All stages in the ladder's order, with all that their headers say of them."""
    lines = lines_of_the_tree(capsys, monkeypatch, columns)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "in the simulator"
    assert device in " ".join(lines[:2])
    row = re.compile(r"[│├└─ ]*(\w+) +fp.*\b(?:yes|no|taken)\b")
    names = [found[1] for line in lines if (found := row.match(line))]
    assert sorted(names) == sorted(s.name for s in flash.stages())
    text = " ".join(re.sub(r"[│├└─]", " ", line) for line in lines)
    for s in flash.stages():
        for word in s.idea.split():
            assert word in text


def test_tree_has_a_branch_for_each_child(monkeypatch, tmp_path, capsys):
    ladders = {"root": "", "a": "root", "b": "root", "c": "a", "d": "c", "e": "c"}
    for n, (name, after) in enumerate(ladders.items(), 1):
        (tmp_path / f"fwd_0{n}_{name}.cuh").write_text(
            f"// Forward stage {n}: {name}\n" + f"// after: {after}\n" * bool(after)
            + "// default: any GPU\n" * (name == "d"))
    (tmp_path / "bwd_01_only.cuh").write_text("// Backward stage 1: only\n// needs: sm_90a\n// idea: one\n")
    monkeypatch.setattr(registry, "STAGES", tmp_path)
    monkeypatch.setattr(flash.Stage, "available", lambda self, *_: flash.Available(
        "needs sm_90a" * (self.needs == "sm_90a")))
    lines = lines_of_the_tree(capsys, monkeypatch, 110)
    drawn = [line[:9].rstrip() for line in lines[3:]]
    assert drawn[:drawn.index("backward") + 2] == [
        "forward", "root", "├─ a", "│  c", "│  ├─ d", "│  └─ e", "└─ b", "", "backward", "only"]
    assert any("any GPU  taken" in line for line in lines if "─ d " in line)
    assert "no: backward stage 'only': needs sm_90a" in lines


def test_one_module(folder):
    """python flash.py is the module flash: its operators are registered once. From any folder."""
    done = subprocess.run([sys.executable, flash.ROOT / "flash.py", "diff", "swizzle"], capture_output=True,
                          text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == f"{flash.diff('swizzle')}\n"


def test_help(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0 and all(word in out for word in ("new mine --after flash2", "check", "diff"))


# ------------------------------------------------------------------------------------------ new
# In the middle of a branch one of six
@pytest.mark.parametrize("direction, after", [(s.direction, s.name) for s in flash.stages()
                                              if grid.is_end(s) or s.number % 6 == 0])
def test_new_is_a_copy(capsys, folder, direction, after):
    status, out, err = run(capsys, "new", "mine", "--after", after, *["--bwd"] * (direction == "bwd"))
    assert (status, err) == (0, "") and "check mine.cuh" in out
    mine = flash.read_stage(Path("mine.cuh"))
    source = next(s for s in flash.stages(direction) if s.name == after)
    assert (mine.name, mine.direction, mine.after, mine.default) == ("mine", direction, after, "")
    same = ("dtypes", "needs", "deterministic", "deterministic_on_request", "tile_rules", "limits", "shared",
            "workspace", "hbm")
    assert all(getattr(mine, name) == getattr(source, name) for name in same)
    assert mine.idea and mine.predicted and not mine.measured
    assert mine.path.read_text().startswith(f"// {'Back' if direction == 'bwd' else 'For'}ward stage: mine\n")
    assert flash.diff(Path("mine.cuh")).lines == ()
    assert flash.diff(Path("mine.cuh")).before == str(source.path.relative_to(flash.ROOT))


@pytest.mark.parametrize("arguments, message", [
    (["mine", "--after", "falsh2"], r"--after: there is no forward stage 'falsh2'; there are naive, .* Did "
                                    r"you mean 'flash2'\?"),
    (["mine", "--after", "recompute"], "no forward stage 'recompute'; .* It is a backward stage: add --bwd"),
    (["mine", "--after", "flash2", "--bwd"], "no backward stage 'flash2'; .* forward stage: leave out --bwd"),
    (["my-own", "--after", "flash2"], "a stage's name has letters, digits and _, .* not 'my-own'"),
    (["../mine", "--after", "flash2"], "a stage's name has letters"),
    (["1st", "--after", "flash2"], "begins with a letter"),
    (["tiled", "--after", "flash2"], "there is a forward stage 'tiled': take another name"),
    (["mine"], "required: --after"),
])
def test_new_refuses(capsys, folder, arguments, message):
    status, _, err = run(capsys, "new", *arguments)
    assert status == 2 and re.search(message, err), err
    assert not list(folder.iterdir())


def test_new_overwrites_nothing(capsys, folder):
    (folder / "mine.cuh").write_text("precious")
    status, _, err = run(capsys, "new", "mine", "--after", "flash2")
    assert status == 2 and "mine.cuh is there already, and is left as it is" in err
    assert (folder / "mine.cuh").read_text() == "precious"


# ------------------------------------------------------------------------------------------ check
def own(capsys, after, *changes, bwd=False):
    """mine.cuh, with some of its text replaced."""
    run(capsys, "new", "mine", "--after", after, *["--bwd"] * bwd)
    text = Path("mine.cuh").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    Path("mine.cuh").write_text(text)


@pytest.mark.parametrize("after, bwd", [("flash2", False), ("wmma", False), ("recompute", True)])
def test_check(capsys, folder, small_grid, after, bwd):
    own(capsys, after, bwd=bwd)
    status, out, err = run(capsys, "check", "mine.cuh")
    assert (status, err) == (0, "")
    watched = ", and the checker found nothing" if flash.can_inspect() else "; no checker"
    assert re.match(rf"ok: (backward )?stage 'mine' is right in \d+ calls, in the simulator.*{watched}", out)


@pytest.mark.skipif(not flash.can_inspect(), reason=str(flash.can_inspect()))
def test_check_shows_notes(capsys, folder, small_grid):
    """Threads that have left before a barrier are no mistake: the check passes, and says so."""
    end = "}\n\nsize_t workspace_bytes("
    own(capsys, "flash2", (end, f"  if (warp == 0) return;\n  __syncthreads();\n{end}"))
    status, out, err = run(capsys, "check", "mine.cuh")
    assert (status, err) == (0, "")
    assert re.search(r"ok: stage 'mine' is right.*\nnote: portability in forward_kernel: thread 0 of block 0 "
                     r"has returned before the others pass __syncthreads\(\) at mine.cuh:\d+", out)


@pytest.mark.parametrize("changes, message", [
    ([("mask.sees(row, col)", "true")],
     "O: error .*, allowed .*; L: error .*\nin the call B=1 H=2 H_kv=1 N_q=40 N_k=50 d=16, causal, float32, "
     "Br=64 Bc=64, in the simulator"),
    ([("if (lane == 0) ", "if (false) ")], "L: error nan, allowed"),
    ([("cudaError_t launch(", "cudaError_t no_launch(")], "building .*‘launch’ was not declared"),
    ([("threads, bytes, stream", "2048, bytes, stream")], "stage 'mine': .*1024"),
    ([("__syncwarp();", ";")], r"race in \w+ on P_smem\[.*mine.cuh:\d+.*in the call B=1 H=2 H_kv=1 N_q=40"),
], ids=["wrong", "not written", "not compiled", "not launched", "race"])
def test_check_finds(capsys, folder, small_grid, changes, message):
    """The first call that goes wrong; what the checker sees, though the result is right."""
    if "race" in message and not flash.can_inspect():
        pytest.skip(str(flash.can_inspect()))
    own(capsys, "flash2", *changes)
    status, out, _ = run(capsys, "check", "mine.cuh")
    assert status == 1 and out.startswith("failed: ") and re.search(message, out, re.S), out


@pytest.mark.skipif(not flash.can_inspect(), reason=str(flash.can_inspect()))
def test_check_asks_the_checker_about_a_wrong_result(capsys, folder, small_grid):
    """Where a number alone would say little."""
    own(capsys, "flash2", ("__syncthreads();                      // nobody reads", "// nobody reads"))
    status, out, _ = run(capsys, "check", "mine.cuh")
    assert status == 1 and re.match(r"failed: O: error .*\nin the call .*\nThe checker, in this call: "
                                    r"race .*mine.cuh:\d+", out, re.S), out


def test_check_is_for_files(capsys, folder):
    status, _, err = run(capsys, "check", "flash2")
    assert status == 2 and "flash2 is a stage of the ladder" in err and "new mine --after flash2" in err


def test_a_pipe_that_is_closed(tmp_path):
    """As by `| head`: no traceback."""
    done = subprocess.run(f"{shlex.quote(sys.executable)} flash.py diff hopper_tuned | head -1", shell=True,
                          cwd=flash.ROOT, capture_output=True, text=True)
    assert not done.stderr and done.stdout.count("\n") == 1


def test_check_finds_wrong_gradients(capsys, folder, small_grid):
    own(capsys, "naive", ("p.scale * dq;", "2.f * dq;"), bwd=True)
    status, out, _ = run(capsys, "check", "mine.cuh")
    assert status == 1 and re.match(r"failed: dQ: error \S+, allowed \S+\nin the call", out), out


def test_check_tries_other_scales(capsys, folder):
    """And all types, tiles of large calls, and determinism on request."""
    stage = next(s for s in flash.stages("bwd") if s.name == grid.WRITERS[-1])
    found = list(command.calls(stage, "cpu"))
    assert {call.scale for call in found} == {None, *command.SCALES}
    fitting = {case for case in grid.GRID if stage.fits(case[5], 227 * 1024)}
    assert {call.case for call in found} == fitting < set(grid.GRID), "it takes d up to 192"
    assert {grid.type_for(stage, call.case) for call in found} == set(stage.dtypes)
    assert {call.deterministic for call in found} == {False, stage.deterministic_on_request}
    stage = next(s for s in flash.stages("fwd") if "rows" in s.tile_rules)
    assert any(call.tiles != tuple(stage.default_tiles(call.case[5], 1, bool(call.case[6])).items())
               for call in command.calls(stage, "cpu"))


@pytest.mark.parametrize("arguments, message", [
    (["check", "none.cuh"], "none.cuh is no file"),
    (["check"], "required: file"),
    (["check", "bad.cuh"], "bad.cuh: after: there is no forward stage 'nothing' to grow from; there are "),
    (["diff", "a", "b", "c"], "one stage or two, not 3"),
    (["diff", "nothing"], "there is no stage 'nothing'"),
    (["diff", "naive"], "fwd_01_naive.cuh has no parent"),
    (["nothing"], "invalid choice: 'nothing'"),
])
def test_bad_arguments(capsys, folder, arguments, message):
    (folder / "bad.cuh").write_text("// after: nothing\n")
    status, _, err = run(capsys, *arguments)
    assert status == 2 and message in err, err


def test_diff(capsys, folder):
    own(capsys, "flash2", ("0.f", "0.0f"))
    for arguments, expected in [(["mine.cuh"], flash.diff(Path("mine.cuh"))),
                                (["tiled", "mine.cuh"], flash.diff("tiled", Path("mine.cuh"))),
                                (["naive", "recompute", "--bwd"], flash.diff("recompute"))]:
        assert run(capsys, "diff", *arguments) == (0, f"{expected}\n", "")


def test_interrupted(capsys, folder, monkeypatch):
    own(capsys, "flash2")

    def stop(self):
        raise KeyboardInterrupt
    monkeypatch.setattr(command.Call, "run", stop)
    assert run(capsys, "check", "mine.cuh") == (130, "", "Interrupted.\n")
