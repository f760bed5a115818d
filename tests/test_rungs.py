"""What each rung gives: bench.py --rungs, its staircases, and what the stages' headers say of it."""

import json
import re
import sys

import pytest
import torch
from conftest import check, random_qkv

import flash
from flash_ladder import ahead, launch
from flash_ladder.bench import arguments, cases, modes, rung_cases, rungs, staircase
from flash_ladder.nvcc import find_nvcc

sys.path.insert(0, str(flash.ROOT / "results"))
import headers  # noqa: E402
import readme  # noqa: E402
import without  # noqa: E402

MEASURED = headers.measured_rungs()
needs_measurement = pytest.mark.skipif(not MEASURED, reason="no results/h200/rungs.json yet")
TREE = {"naive": "", "flash2": "naive", "tiles": "flash2", "tuned": "tiles", "side": "naive",
        "wmma": "flash2", "mma": "wmma", "ampere": "mma", "tma": "mma", "hopper": "tma"}
DEFAULTS = {"tuned": "any GPU", "ampere": "sm_80", "hopper": "sm_90a"}


@pytest.fixture(autouse=True)
def quick_on_the_cpu(monkeypatch):
    """No GPU, whatever the machine has, and a tiny shape to count."""
    monkeypatch.setattr(flash, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(rung_cases, "SHAPE_COUNTED", (1, 1, 32, 16))


def row(name, tflops, **others):
    """A row as bench_rungs.py writes it: of a stage of TREE, or of a peer."""
    peer = name.startswith("PyTorch")
    about = {"kind": "peer"} if peer else {"kind": "stage", "after": TREE[name],
                                           "default": DEFAULTS.get(name, "")}
    return {"pass": "fwd", "dtype": "fp32", "B": 4, "H": 12, "N": 4096, "d": 64, "causal": True, "name": name,
            "status": "ok", "message": "", "median_ms": 1.0, "tflops": tflops, "turns_ms": [1.0],
            "error": 1e-6, "error_in": "O", "allowed_error": 1e-5, "hbm_bytes": None,
            "shared_wavefronts": None} | about | others


def result(*rows):
    """A result of bench.py --rungs."""
    return {"date": "2030-01-02T03:04:05", "device": "NVIDIA H200 (sm_90), CUDA 13.0", "software": {},
            "simulated": False, "note": "", "interrupted": False, "seconds": 9, "not_run": {},
            "rows": list(rows)}


def run(folder, *arguments):
    """(exit status, the JSON) of a run without a GPU."""
    status = modes.main(["--rungs", "--out", str(folder), *arguments])
    return status, json.loads((folder / "rungs.json").read_text())


def bar():
    """A progress bar that nobody sees, and its task."""
    progress = rungs.Progress()
    return progress, progress.add_task("")


@pytest.fixture
def case(tmp_path):
    """case(stages, direction): bench.py's arguments for them at a tiny shape, and its Case."""
    def case(stages, direction="fwd", dtype="fp32"):
        args, = arguments.parse_arguments(["--rungs", "--out", str(tmp_path), "--pass", direction,
                                       "--dtype", dtype, "--stages", stages])
        args, = args.cases
        args.peers = ["math"]
        return args, cases.make_case(args.seqlens[0], args)

    return case


@pytest.fixture
def timed(monkeypatch):
    """timed(ms): in place of a GPU's clock, ms(i) the i-th time. Returns how many calls each time was of."""
    def timed(ms=lambda i: 4.0):
        asked = []

        def device_ms(call, count, host_ms):
            call()
            asked.append(count)
            return ms(len(asked) - 1)

        monkeypatch.setattr(rungs, "device_ms", device_ms)
        monkeypatch.setattr(rungs, "host_times", lambda call: (0.1, 4.0))
        return asked

    return timed


# ---------------------------------------------------------------------------------------- without a GPU
def test_counted_without_a_gpu(tmp_path, capsys):
    """It says that times need a GPU; bytes and wavefronts are those of flash.inspect()."""
    status, data = run(tmp_path, "--stages", "naive,flash2,recompute", "--dtype", "fp32")
    out, err = capsys.readouterr()
    assert status == 0 and data["simulated"] and data["seconds"] is not None
    assert "No GPU here" in err and "No GPU here" in out and "times" not in data["rows"][0]
    names = [(row["pass"], row["name"], row["after"]) for row in data["rows"]]
    assert names == [("fwd", "naive", ""), ("fwd", "flash2", "online_softmax"), ("bwd", "naive", ""),
                     ("bwd", "recompute", "naive")]
    q, k, v = cases.random_inputs(32, arguments.parse_arguments(["--batch", "1", "--heads", "1", "--head-dim",
                                                             "16", "--out", str(tmp_path)])[0])
    with flash.inspect() as report:
        flash.attention(q, k, v, causal=True, stage="flash2")
    flash2 = data["rows"][1]
    assert flash2["hbm_bytes"] == report.hbm.total and flash2["error"] <= flash2["allowed_error"]
    assert flash2["shared_wavefronts"] == sum(a.units for a in report.accesses if a.memory == "shared") > 0
    assert data["rows"][0]["shared_wavefronts"] == 0 and "none" in out
    for direction in ("fwd", "bwd"):
        picture = tmp_path / f"rungs_{direction}_fp32.png"
        assert picture.stat().st_size > 10_000 and str(picture) in out
        assert staircase.drawn_from(picture) == staircase.digest(data, direction, "fp32")


def test_a_rung_of_ones_own(tmp_path, capsys):
    """It stands after its parent; a broken one is wrong, and the exit status 1."""
    mine = tmp_path / "mine.cuh"
    source = (flash.STAGES / "fwd_04_flash2.cuh").read_text().split("\n", 1)[1]
    mine.write_text(source.replace("after:   online_softmax", "after:   flash2"))
    status, data = run(tmp_path, "--stages", f"flash2,{mine}")
    assert status == 0 and [(row["name"], row["after"]) for row in data["rows"]] == [
        ("flash2", "online_softmax"), ("mine.cuh", "flash2")]
    assert " 1.00×" in capsys.readouterr().out
    mine.write_text(mine.read_text().replace("__syncwarp();", ""))
    status, data = run(tmp_path, "--stages", str(mine))
    assert status == 1 and data["rows"][0]["status"] == "wrong" and data["rows"][0]["hbm_bytes"] is None
    assert "mine.cuh, fwd fp32 d=16 causal N=32: wrong: race in" in capsys.readouterr().out


def test_interrupted(tmp_path, capsys, monkeypatch):
    make_case, made = cases.make_case, []

    def interrupt(N, args):
        made.append(args.direction)
        if len(made) == 2:
            raise KeyboardInterrupt
        return make_case(N, args)

    monkeypatch.setattr(cases, "make_case", interrupt)
    status, data = run(tmp_path, "--stages", "naive", "--dtype", "fp32")
    assert status == 130 and data["interrupted"] and [row["pass"] for row in data["rows"]] == ["fwd"]
    assert "Interrupted after 1 rows" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, message", [
    ("--seqlens 64", "--rungs: has shapes of its own, and takes no --seqlens"),
    ("--no-causal", "takes no --causal"),
    ("--head-dim 64", "takes no --head-dim"),
    ("--inspect flash2", "takes no --inspect"),
    ("--markdown x.json", "takes no --markdown"),
    ("--pass all", "--rungs: draws each pass alone"),
    ("--stages flash2,nope", "--stages: no stage 'nope' for fp32 or bf16 in the pass fwd or bwd"),
    ("--stages recompute --pass fwd", "no stage 'recompute' for fp32 or bf16 in the pass fwd"),
    ("--stages no/where", "there is no file no/where"),
    ("--dtype fp32,fp8", "no stage takes 'fp8'"),
    ("--peers fa4", "'fa4'; there are math, flash, efficient, cudnn"),
])
def test_bad_arguments(arguments, message, capsys, monkeypatch):
    for module in (ahead, launch):
        monkeypatch.setattr(module, "build", lambda *_, **__: pytest.fail("it built something"))
    with pytest.raises(SystemExit) as exit_:
        modes.main(["--rungs", *arguments.split()])
    assert exit_.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_cases_on_a_gpu(monkeypatch):
    """Every rung of every branch, in fp32 and bf16, at each shape with and without a mask; with peers."""
    monkeypatch.setattr(flash, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(rung_cases, "why_not", lambda stage, args: "too old" * (stage.name == "mma"))
    monkeypatch.setattr(flash, "find_stage", lambda *_, **__: flash.stages("fwd")[0])
    args, = arguments.parse_arguments(["--rungs"])
    assert len(args.cases) == 2 * 2 * (3 + 3)
    for direction in ("fwd", "bwd"):
        asked = {stage.name for case in args.cases if case.direction == direction for stage in case.stages}
        assert asked == {stage.name for stage in flash.stages(direction)} - {"mma"}
    assert {(case.dtype, *case.peers) for case in args.cases} == {("fp32", "efficient", "math"),
                                                                  ("bf16", "flash", "cudnn")}
    assert args.not_run == {f"mma, {direction} bf16": "too old" for direction in ("fwd", "bwd")}
    assert {(case.head_dim * case.H, *case.seqlens) for case in args.cases if case.dtype == "bf16"} == {
        (2048, 4096)}


# ---------------------------------------------------------------------------------------- times
def test_by_turns(case, timed):
    """Each in turn; the median; a call that is slow has fewer turns."""
    args, made = case("naive,flash2")
    asked = timed(lambda i: [4.0, 4.0, 300.0][i] if i < 3 else float(i))
    rows = rungs.measured(args, made, *bar())
    assert [row["name"] for row in rows] == ["naive", "flash2", "PyTorch math"]
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert [row["turns_ms"] for row in rows] == [[3, 6, 8, 10, 12], [4, 7, 9, 11, 13], [5]]
    assert asked[:6] == [1, 1, 1, 5, 5, 1] and rows[0]["median_ms"] == 8
    assert rows[0]["tflops"] == pytest.approx(4 * 32 * 32 * 16 / 2 / 8e9)
    assert all(0 <= row["error"] <= row["allowed_error"] for row in rows)


def test_what_is_not_timed(case, timed, monkeypatch):
    """A wrong stage, one that fails, now or in a later turn, and one that takes too long."""
    attention = flash.attention

    def tampered(*tensors, stage, **options):
        o, lse = attention(*tensors, stage=stage, **options)
        return (o + 1 if stage.name == "tiled" else o), lse

    monkeypatch.setattr(flash, "attention", tampered)
    args, made = case("naive,tiled,flash2")

    def too_late(i):
        if i == 5:
            raise torch.OutOfMemoryError
        return 4.0

    timed(too_late)
    rows = rungs.measured(args, made, *bar())
    assert [row["status"] for row in rows] == ["ok", "wrong", "ok", "out of memory"]
    assert "the largest error in O" in rows[1]["message"] and rows[1]["tflops"] is None
    assert rows[3]["median_ms"] is None
    monkeypatch.setattr(rungs, "host_times", lambda call: (0.1, 2500.0))
    rows = rungs.measured(args, made, *bar())
    assert (rows[0]["status"], rows[0]["message"]) == ("skipped", "a call takes 2.5 s")


@pytest.mark.parametrize("direction, stage", [("fwd", "flash2"), ("bwd", "recompute")])
def test_what_is_built_ahead_is_run(case, monkeypatch, direction, stage):
    build, built = launch.build, []
    for module in (ahead, launch):
        monkeypatch.setattr(module, "build", lambda *call: built.append(build(*call)) or built[-1])
    args, made = case(stage, direction)
    launch._libraries.clear()
    rungs.build_all([args], bar()[0], checked=True)
    before = set(built)
    rungs.counted(args, made, *bar())
    assert set(built) == before and len(before) == 1 + (direction == "bwd")


# ---------------------------------------------------------------------------------------- the staircase
def test_branches():
    """A chain goes on with the first child that leads to a default; the others begin their own."""
    data = result(*(row(name, 1.0) for name in TREE))
    found = staircase.rungs(data, "fwd")
    chains = staircase.branches(found)
    assert chains == [["naive", "flash2", "tiles", "tuned"], ["side"], ["wmma", "mma", "ampere"],
                      ["tma", "hopper"]]
    colours = staircase.colours(found)
    assert [len({colours[name] for name in chain}) for chain in chains] == [1] * 4
    assert len(set(colours.values())) == 4 and colours["side"] in staircase.SIDE_COLOURS
    at = staircase.places(found, {"naive", "flash2", "side", "tma"})
    assert list(at.values()) == pytest.approx([0, 1, 2.6, 4.2])


def test_gains(capsys):
    """Over the parent of the same shape; the table has them, and what is missing."""
    rows = [row("naive", None, status="skipped", message="a call takes 2.1 s"), row("flash2", 10.0),
            row("tiles", 14.2), row("PyTorch math", 6.9)]
    data = result(*rows, row("naive", 0.5, causal=False), row("flash2", 10.0, causal=False))
    assert staircase.table(data, "fwd", "fp32") == [
        ["stage", "d=64 causal", "d=64 full"], ["naive", "skipped", "0.500"],
        ["flash2", "10.0", "10.0 20.0×"], ["tiles", "14.2 1.42×", "-"], ["PyTorch math", "6.90", "-"]]
    staircase.show(data, [])
    shown = capsys.readouterr().out
    assert "naive, fwd fp32 d=64 causal N=4096: skipped: a call takes 2.1 s" in shown and "1.42×" in shown


def test_a_gain_is_of_one_run():
    """Rows of several runs in one file: a stage counts over its parent as that was in the stage's own."""
    rows = [row("flash2", 10.0), row("tiles", 14.0), row("PyTorch math", 6.9)]
    rungs.note_parents(rows)
    assert [each.get("parent_tflops") for each in rows] == [None, 10.0, None]
    data = result(row("flash2", 12.0), *rows[1:])
    assert staircase.table(data, "fwd", "fp32")[2] == ["tiles", "14.0 1.40×"]
    assert [factor for *_, factor in headers.gains(data, "fwd", "tiles")] == [1.4]
    rows[0] |= {"status": "failed", "tflops": None}
    del rows[1]["parent_tflops"]
    rungs.note_parents(rows)
    assert "parent_tflops" not in rows[1]


def test_pictures_are_drawn_once(tmp_path, monkeypatch):
    """From the JSON alone, and anew when that changes. All steps, gains and peers are there, side by side."""
    rows = [row(name, 10.0 + i) for i, name in enumerate(TREE)]
    rows[3] |= {"status": "out of memory", "tflops": None}
    data = result(*rows, row("PyTorch flash", 12.0), row("PyTorch cuDNN", 12.1))
    figures = []
    monkeypatch.setattr(staircase.plt, "close", figures.append)
    file, = staircase.draw_all(data, tmp_path)
    assert file.name == "rungs_fwd_fp32.png" and staircase.draw_all(data, tmp_path) == [file]
    assert len(figures) == 1
    axes, = figures[0].axes
    texts = {text.get_text(): text for text in axes.texts}
    assert {"10.0", "19.0", "1.10×", "out of memory", "FlashAttention-2 12.0", "cuDNN 12.1"} <= set(texts)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [
        "naive", "flash2", "tiles", "tuned", "side", "wmma", "mma", "ampere", "tma", "hopper"]
    renderer = figures[0].canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts if text.get_text()]
    clashes = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert not clashes
    data["rows"][0]["tflops"] = 9.0
    staircase.draw_all(data, tmp_path)
    assert len(figures) == 2


# ---------------------------------------------------------------------------------------- headers and README
def test_measured_text():
    """By N, d and mask, d said once; a parent of another type counts with its own; none, no text."""
    rows = [row("flash2", 10.0, causal=causal, d=d, N=N) for N in (1024, 4096) for d in (64, 128)
            for causal in (True, False)]
    rows += [row("tiles", tflops, d=d, causal=causal, N=N) for tflops, d, causal, N in
             [(15.0, 64, True, 1024), (14.2, 64, True, 4096), (14.0, 64, False, 4096),
              (9.91, 128, True, 4096)]]
    rows += [row("wmma", 53.4, d=64, dtype="bf16", H=32), row("wmma", 40.0, d=256, dtype="bf16", H=8)]
    rows += [row("mma", 40.0, dtype="bf16", H=32), row("ampere", 36.0, dtype="bf16", H=32)]
    data = result(*rows)
    assert headers.measured_text(data, "fwd", "tiles") == (
        "1.42x at d=64 causal, 1.40x full, 0.99x at d=128 causal at N=4096; 1.50x at d=64 causal at N=1024 "
        "(H200, fp32; make readme)")
    assert headers.measured_text(data, "fwd", "wmma") == (
        "5.34x at d=64 causal (H200, bf16 beside flash2 in fp32, N=4096; make readme)")
    assert headers.measured_text(data, "fwd", "mma") == (
        "0.75x at d=64 causal (H200, bf16, N=4096; make readme)")
    assert headers.measured_text(data, "fwd", "flash2") == headers.measured_text(data, "bwd", "tiles") == ""


@pytest.mark.parametrize("last", ["// predicted: 1.5x at d=64,\n//            1.3x at d=128\n", ""])
def test_renewed_header(tmp_path, last):
    """The line is written, changed, not written twice, and goes; the registry reads it back."""
    prose = "//\n// What it does.\n//            indented prose\n#include <a>\n// measured: not a header\n"
    source = f"// Forward stage 5: mine\n// idea:    an idea\n// hbm:     4 * B\n{last}{prose}"
    long = ", ".join(f"1.{i}x at d={i}" for i in range(10, 22)) + " (H200, bf16, N=4096; make readme)"
    file = tmp_path / "mine.cuh"
    for text in ("1.42x at d=64 (H200, bf16, N=4096; make readme)", long):
        new = headers.renewed(source, text)
        assert headers.renewed(new, text) == new and max(map(len, new.splitlines())) <= 110
        file.write_text(new)
        assert flash.read_stage(file).measured == text
        assert flash.read_stage(file).predicted == ("1.5x at d=64, 1.3x at d=128" if last else "")
        assert headers.renewed(new, "") == source
        source = headers.renewed(new, "")
    assert new.index(last or "// hbm") < new.index("// measured: 1") < new.index("// What it does")


def test_renewing_headers(tmp_path, monkeypatch):
    """All stages of rungs.json, and no others; those without a gain are found."""
    for name, after in (("flash2", ""), ("tiles", "flash2"), ("ampere", "")):
        number = list(TREE).index(name) + 1
        after = f"// after:   {after}\n" if after else ""
        file = tmp_path / f"fwd_{number:02}_{name}.cuh"
        file.write_text(f"// Forward stage {number}: {name}\n{after}//\n")
    stages = [flash.read_stage(file) for file in sorted(tmp_path.glob("*.cuh"))]
    monkeypatch.setattr(flash, "stages", lambda direction=None: stages if direction != "bwd" else [])
    monkeypatch.setattr(headers.staircase, "rungs", lambda data, direction: {
        stage.name: {} for stage in stages if stage.name != "ampere"})
    for stage, name in zip(stages, ("flash2", "tiles", "ampere"), strict=True):
        object.__setattr__(stage, "name", name)
    monkeypatch.setattr(headers, "RUNGS", tmp_path / "rungs.json")
    data = result(row("flash2", 10.0), row("tiles", 10.04))
    assert [path.name for path in headers.stale(data)] == ["fwd_03_tiles.cuh"]
    monkeypatch.setattr(headers, "measured_rungs", lambda: data)
    headers.renew()
    assert not headers.stale(data)
    assert [stage.name for stage in headers.without_gain(data)] == ["tiles"]
    assert not headers.without_gain(result(row("flash2", 10.0), row("tiles", 10.0),
                                           row("flash2", 10.0, d=128), row("tiles", 10.1, d=128)))


def test_part_of_readme(tmp_path, monkeypatch):
    """Only if it is measured: the pictures, and beside what was predicted the least and the greatest gain."""
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    (tmp_path / "h200").mkdir()
    assert readme.rungs() == ""
    naive = row("naive", 0.5)
    flash2 = row("flash2", 10.0) | {"after": "naive"}
    data = result(naive, flash2, naive | {"causal": False}, flash2 | {"causal": False, "tflops": 12.0})
    rungs.write(data, tmp_path / "h200" / "rungs.json")
    text = readme.rungs()
    assert "![TFLOP/s by rung: forward, fp32](results/h200/rungs_fwd_fp32.png)" in text
    assert re.search(r"^\| flash2 \| online_softmax \| .* \| 20\.00× to 24\.00× \|$", text, re.M)
    assert re.search(r"^\| naive \| - \| .* \| - \|$", text, re.M)
    assert "measured on 2030-01-02 by `python bench.py --rungs`" in text


@needs_measurement
def test_headers_say_what_is_measured():
    """Else: make readme."""
    assert not headers.stale(MEASURED)


@needs_measurement
def test_pictures_show_what_is_measured():
    """Else: make readme."""
    for direction, dtype in staircase.figures(MEASURED):
        picture = headers.RUNGS.parent / f"rungs_{direction}_{dtype}.png"
        assert staircase.drawn_from(picture) == staircase.digest(MEASURED, direction, dtype)


@needs_measurement
def test_a_rung_without_gain_says_why_it_stays():
    silent = [stage.path.name for stage in headers.without_gain(MEASURED)
              if not re.search(r"^// Stays because ", stage.path.read_text(), re.M)]
    assert not silent, "no line '// Stays because ...' in the headers of these"


@pytest.mark.parametrize("part", without.PARTS, ids=lambda part: part.what)
def test_hopper_tuned_is_right_without_a_part(part, tmp_path):
    """More tiles than the simulator has multiprocessors: blocks take several."""
    q, k, v = random_qkv(1, 4, 2, 300, 300, part.dims[0], "cpu", torch.bfloat16)
    o, lse = flash.attention(q, k, v, causal=True, stage=without.written(tmp_path)[part.what],
                             return_lse=True, Br=128, Bc=64)
    check(o, lse, q, k, v, diagonal=0)


def test_a_table_of_hopper_tuned_without_its_parts():
    ms = [{part.what: 3.0 for part in without.PARTS if part.matters(d, causal)} | {"": 2.0}
          for d, causal in without.shapes()]
    data = {"device": "a GPU", "date": "2026-01-01",
            "rows": [{"d": d, "causal": causal, "ms": of, "serialised": ["turns of warpgroups"] * causal}
                     for (d, causal), of in zip(without.shapes(), ms)]}
    lines = without.table(data).splitlines()
    assert lines[0].count("|") == 9 and len(without.PARTS) == sum("1.50" in line for line in lines)
    cut = next(line for line in lines if "cut_diagonal" in line)
    assert cut.split("|")[3:9] == [" - ", " 1.50 "] * 3     # of causal calls alone
    turns = next(line for line in lines if "pingpong" in line)
    assert turns.split("|")[3:9] == [" 1.50 ", " 1.50 s "] * 3


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_what_ptxas_serialises_is_known(tmp_path):
    files = without.written(tmp_path)
    assert not without.is_serialised(files[""], 64, True)
    assert without.is_serialised(files["O by the copy engine"], 64, True)      # its addresses need registers
