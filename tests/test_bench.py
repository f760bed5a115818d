"""bench.py in the simulator, at tiny shapes: what it writes, and what it does with a stage that fails."""

import dataclasses
import json
import math
import re

import pytest
import torch

import bench
import flash

TINY = ["--batch", "1", "--heads", "1", "--head-dim", "16"]
STAGES = [stage.name for stage in flash.stages() if torch.float32 in stage.dtypes and stage.available("cpu")]


@pytest.fixture(autouse=True)
def quick_on_the_cpu(monkeypatch):
    """No GPU, whatever the machine has; no more repetitions than the median needs."""
    monkeypatch.setattr(flash, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench, "SECONDS_A_CASE", 0.01)


@pytest.fixture
def no_plots(monkeypatch):
    """For a test that is about something else: they take most of a run's time."""
    monkeypatch.setattr(bench, "plot", lambda *_: None)


@pytest.fixture
def tamper(monkeypatch):
    """tamper(name, change): the stage of this name returns change(O) for O."""
    def tamper(name, change):
        attention = flash.attention

        def tampered(*tensors, stage, **options):
            o, lse = attention(*tensors, stage=stage, **options)
            return (change(o) if stage.name == name else o), lse

        monkeypatch.setattr(flash, "attention", tampered)

    return tamper


def run(tmp_path, *arguments):
    """(exit status, the JSON or None) of a run at tiny shapes."""
    status = bench.main([*TINY, "--out", str(tmp_path), *arguments])
    file = tmp_path / "bench_fwd.json"
    return status, json.loads(file.read_text()) if file.exists() else None


def rows(data, name):
    return [row for row in data["results"] if row["name"] == name]


def without(barrier, folder):
    """flash2 without the first of these barriers, in a file of its own: (its path, that line's number)."""
    stage = flash.find_stage("flash2", torch.float32, torch.device("cpu"))
    before, after = stage.path.read_text().split(barrier, 1)
    mine = folder / "mine.cuh"
    mine.write_text(before + after)
    return mine, before.count("\n") + 1


def test_default_run(tmp_path, capsys):
    status, data = run(tmp_path, "--seqlens", "32,64")
    shown = capsys.readouterr().out
    assert status == 0
    assert [row["name"] for row in data["results"]] == [*STAGES, "math"] * 2
    for row in data["results"]:
        assert row["status"] == "ok" and row["label"] in shown
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"] and row["repetitions"] >= 1
        assert 0 < row["error"] < 1e-5 and math.isfinite(row["allowed_error"])
        flops = 4 * row["N"] ** 2 * 16 / 2
        assert row["tflops"] == pytest.approx(flops / (row["median_ms"] * 1e9))
    assert data["shape"] == {"B": 1, "H": 1, "H_kv": 1, "d": 16, "causal": True, "dtype": "fp32"}
    assert data["simulated"] and "simulator" in data["device"] and "simulator" in data["note"]
    assert data["note"] in shown and shown.index(data["note"]) < shown.index("TFLOP/s")
    assert data["ceiling"]["tflops"] > 0 and data["date"] and data["software"]["torch"] == torch.__version__
    assert max(map(len, shown.split("Ceiling")[0].splitlines())) <= 100
    for plot in ("time", "memory", "tflops", "hbm"):
        png = tmp_path / f"bench_fwd_{plot}.png"
        assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
        assert str(png) in shown


@pytest.mark.usefixtures("no_plots")
def test_scratch_memory(tmp_path):
    """naive: S, N x N. flash2: nothing. In both cases the outputs are not counted."""
    _, data = run(tmp_path, "--seqlens", "64", "--stages", "flash2,naive", "--peers", "none")
    naive, flash2 = data["results"]  # in the order of the ladder
    assert (naive["scratch_bytes"], flash2["scratch_bytes"]) == (4 * 64 * 64, 0)
    assert flash2["peak_bytes"] == 4 * (4 * 64 * 16 + 64)  # Q, K, V, O and L


def test_memory_of_temporaries():
    """The peak, not the sum: the first tensor is freed before the last is made."""
    def call():
        a = torch.ones(1000)
        b = a.cumsum(0)
        del a
        return (b.cumsum(0),)
    call()
    assert bench.scratch_bytes(call, torch.device("cpu")) == 4000


@pytest.mark.usefixtures("no_plots")
def test_traffic(tmp_path, capsys):
    """The counts are those of flash.inspect(), a peer has none; the tables show them, and say of what."""
    _, data = run(tmp_path, "--seqlens", "40", "--heads", "2:1")
    shown = capsys.readouterr().out
    args = bench.parse_arguments([*TINY, "--heads", "2:1"])
    naive = bench.traffic(rows(data, "naive")[0])
    for name in STAGES:
        row, = rows(data, name)
        with flash.inspect() as report:
            flash.attention(*bench.random_inputs(40, args), causal=True, stage=name)
        hbm = report.hbm
        assert (row["hbm_read_bytes"], row["hbm_written_bytes"]) == (hbm.read, hbm.written)
        assert row["hbm_unique_bytes"] == hbm.unique_read + hbm.unique_written
        assert row["shared_bytes"] == max(kernel.shared_bytes for kernel in report.kernels)
        assert row["findings"] == [] and row["inspected_ms"] > row["median_ms"] > 0
        assert f"{bench.size(hbm.total)}  {bench.number(naive / hbm.total):>6}" in shown
        assert f" | {bench.size(hbm.total)}" in bench.results_table(data).replace("**", "")
    assert all(rows(data, "math")[0][key] is None for key in bench.COUNTS)
    assert bench.COUNTED in " ".join(shown.split()) and bench.COUNTED in bench.results_table(data)


def test_race_with_a_right_result(tmp_path, capsys, monkeypatch):
    """The checker's finding makes a stage wrong, and takes its times away."""
    mine, _ = without("__syncwarp();", tmp_path)
    stages = [dataclasses.replace(stage, path=mine) if stage.name == "flash2" else stage
              for stage in flash.stages()]
    monkeypatch.setattr(flash, "stages", lambda: stages)
    status, data = run(tmp_path, "--seqlens", "32", "--stages", "naive,flash2")
    row, = rows(data, "flash2")
    assert status == 1 and row["status"] == "wrong" and row["error"] < row["allowed_error"]
    assert row["message"] == row["findings"][0] and "race in flash2_kernel on P_smem" in row["message"]
    assert row["median_ms"] is row["tflops"] is None and rows(data, "naive")[0]["status"] == "ok"
    shown = capsys.readouterr().out
    assert "WRONG" in shown and row["message"] in shown


@pytest.mark.usefixtures("no_plots")
def test_no_traffic_on_a_gpu(tmp_path, capsys):
    """Nor in results from before it was counted: no columns, no plot."""
    _, data = run(tmp_path, "--seqlens", "32", "--stages", "naive")
    old = data | {"results": [{key: value for key, value in row.items() if key not in bench.COUNTS}
                              for row in data["results"]]}
    on_gpu = data | {"results": [row | dict.fromkeys(bench.COUNTS) for row in data["results"]]}
    capsys.readouterr()
    for data in (old, on_gpu):
        files = bench.write(data, tmp_path)
        bench.show(data, files)
        table = bench.results_table(data)
        assert "HBM" not in capsys.readouterr().out + table and not any("hbm" in file.name for file in files)
        assert table.startswith(f"| {' | '.join(bench.COLUMNS)} |\n|---|")


def test_formulas_of_the_paper():
    """Theorem 2: N d + N^2 and N^2 d^2 / M numbers of 4 bytes, for each of 2 * 3 heads."""
    shape = {"B": 2, "H": 3, "H_kv": 1, "d": 64, "causal": True, "dtype": "fp32"}
    assert bench.paper_bytes(shape, 128) == 24 * (8192 + 16384)
    assert bench.paper_bytes(shape, 128, 4096) == 24 * 16384
    assert bench.paper_bytes(shape, 512, 16384) == 24 * 65536


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("arguments", [("--heads", "4:2", "--causal"), ("--heads", "2:1", "--no-causal")])
def test_grouped_heads(tmp_path, arguments):
    status, data = run(tmp_path, "--seqlens", "40", "--stages", "flash2", *arguments)
    assert status == 0 and all(row["status"] == "ok" for row in data["results"])
    assert data["shape"]["H"] == 2 * data["shape"]["H_kv"]
    assert data["shape"]["causal"] == ("--causal" in arguments)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference(causal):
    """make_case against PyTorch in float64: two computations of the same."""
    arguments = ["--seqlens", "24", "--batch", "2", "--heads", "4:2", "--head-dim", "8"]
    case = bench.make_case(24, bench.parse_arguments([*arguments, "--causal" if causal else "--no-causal"]))
    q, k, v = (x.double() for x in case.qkv)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(case.exact, expected, rtol=0, atol=1e-12)
    assert 1e-6 < case.allowed_error < 1e-5


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("change", [lambda o: o + 1e-2, lambda o: o * math.nan, lambda o: o.fill_(math.inf),
                                    lambda o: torch.empty_like(o)], ids=["off", "NaN", "inf", "unwritten"])
def test_wrong_stage_is_not_timed(tmp_path, capsys, tamper, change):
    tamper("tiled", change)
    status, data = run(tmp_path, "--seqlens", "32", "--stages", "naive,tiled")
    row, = rows(data, "tiled")
    assert status == 1
    assert row["status"] == "wrong" and row["median_ms"] is None and "is allowed" in row["message"]
    assert "WRONG" in capsys.readouterr().out
    assert rows(data, "naive")[0]["status"] == rows(data, "math")[0]["status"] == "ok"


def raise_(error):
    raise error


@pytest.mark.parametrize("error, status, exit_status", [
    (RuntimeError("building it failed:\nerror: no such thing\nand more"), "failed", 1),
    (RuntimeError(), "failed", 1),
    (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", 0)])
def test_stage_that_raises(tmp_path, capsys, tamper, error, status, exit_status):
    tamper("naive", lambda o: raise_(error))
    exit_, data = run(tmp_path, "--seqlens", "32,64", "--stages", "naive,tiled")
    assert exit_ == exit_status
    assert [row["status"] for row in rows(data, "naive")] == [status] * 2
    assert all(row["status"] == "ok" and row["median_ms"] > 0 for row in rows(data, "tiled"))
    shown = capsys.readouterr().out
    assert status in shown and ("error: no such thing" in shown) == bool(str(error) and status == "failed")
    assert "and more" not in shown


def test_reference_that_does_not_fit(tmp_path, monkeypatch):
    make_case = bench.make_case
    monkeypatch.setattr(bench, "make_case", lambda N, args: (
        raise_(torch.OutOfMemoryError()) if N == 64 else make_case(N, args)))
    status, data = run(tmp_path, "--seqlens", "64,32", "--stages", "naive")
    assert status == 0
    assert [row["status"] for row in data["results"]] == ["out of memory"] * 2 + ["ok"] * 2


@pytest.mark.usefixtures("no_plots")
def test_interrupted(tmp_path, capsys, tamper):
    tamper("tiled", lambda o: raise_(KeyboardInterrupt()) if o.shape[2] == 64 else o)
    status, data = run(tmp_path, "--seqlens", "32,64", "--stages", "naive,tiled")
    assert status == 130 and data["interrupted"]
    measured = [(row["name"], row["N"]) for row in data["results"]]
    assert measured == [("naive", 32), ("tiled", 32), ("math", 32), ("naive", 64)]
    assert "Interrupted" in capsys.readouterr().err


@pytest.mark.usefixtures("no_plots")
def test_interrupted_while_counting(tmp_path, monkeypatch):
    """The times are kept."""
    monkeypatch.setattr(bench, "count_traffic", lambda *_: raise_(KeyboardInterrupt()))
    status, data = run(tmp_path, "--seqlens", "32", "--stages", "naive")
    row, = data["results"]
    assert status == 130 and row["median_ms"] > 0 and row["findings"] is None


@pytest.mark.usefixtures("no_plots")
def test_peer_that_refuses(tmp_path, capsys):
    status, data = run(tmp_path, "--seqlens", "32", "--stages", "naive", "--peers", "cudnn,math")
    assert status == 0 and data["not_run"]["PyTorch cuDNN"] and not rows(data, "cudnn")
    assert "Not run: PyTorch cuDNN: " in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    ("--pass bwd", "invalid choice: 'bwd'"),
    ("--stages naive,flsh2", "'flsh2' for fp32; there are naive, tiled,"),
    ("--peers fa4", "'fa4'; there are math, flash, efficient, cudnn"),
    ("--dtype int8", "'int8'; they take fp32"),
    ("--head-dim 60", "multiple of 8 up to 256"),
    ("--head-dim 264", "multiple of 8 up to 256"),
    ("--heads 12:5", "H a multiple of H_kv"),
    ("--heads none", "such as 12 or 8:2"),
    ("--seqlens 64,0", "such as 512,1024"),
    ("--batch 0", "at least 1"),
    ("--out bench.py/x", "bench.py"),
    ("--markdown nowhere.json", "nowhere.json"),
    ("--markdown README.md", "README.md"),
    ("--inspect flsh2", "--inspect: no stage 'flsh2' for fp32; there are naive, tiled,"),
    ("--inspect naive,flash2", "no stage 'naive,flash2'"),
    ("--inspect nowhere.cuh", "there is no file"),
    ("--inspect flash2 --seqlens 64,128", "takes one N; --seqlens has 64, 128"),
    ("--inspect flash2 --stages naive", "not allowed with argument"),
    ("--inspect flash2 --markdown results/cpu/bench_fwd.json", "not allowed with argument"),
    ("--inspect flash2 --heads 12:5", "H a multiple of H_kv"),
    ("--line fwd_01_naive.cuh:49", "--line: goes with --inspect"),
])
def test_bad_arguments(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(flash.ROOT)
    monkeypatch.setattr(flash, "build", lambda *_, **__: pytest.fail("it built something"))
    with pytest.raises(SystemExit) as exit_:
        bench.main(arguments.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("no_plots")
def test_markdown(tmp_path, capsys):
    _, data = run(tmp_path, "--seqlens", "32,64", "--stages", "naive,tiled")
    file = str(tmp_path / "bench_fwd.json")
    capsys.readouterr()
    assert bench.main(["--markdown", file, "--seqlens", "32"]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == bench.results_table(data, 32).strip()
    header, rule, naive, tiled, math_, empty, origin = printed.strip().split("\n")
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert columns == [*bench.COLUMNS, *bench.COUNTED_COLUMNS]
    assert len({line.count("|") for line in (header, rule, naive, tiled, math_)}) == 1
    assert (naive + tiled).count("**") == 2 * len(columns) and "**" not in math_  # one stage is fastest
    assert "N=32" in origin and data["device"] in origin and data["note"] in origin
    assert bench.main(["--markdown", file]) == 0
    assert "N=64" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--markdown", file, "--seqlens", "128"])
    assert "it has 32, 64" in capsys.readouterr().err


def inspect(folder, stage, *arguments):
    """(exit status, the JSON, whether there is a plot) of a run with --inspect at tiny shapes."""
    status = bench.main([*TINY, "--out", str(folder), "--inspect", str(stage), *arguments])
    file, = folder.glob("inspect_*.json")
    png = file.with_suffix(".png")
    return status, json.loads(file.read_text()), png.exists() and png.read_bytes().startswith(b"\x89PNG")


def test_inspect(tmp_path, capsys):
    """One stage, untimed: the same report as flash.inspect() gives, on the terminal and in files."""
    status, data, plot = inspect(tmp_path, "flash2", "--seqlens", "40", "--heads", "2:1", "--no-causal")
    shown = capsys.readouterr().out
    assert status == 0 and plot
    assert data["stage"] == "flash2" and data["findings"] == [] and data["error"] == ""
    assert data["shape"] == {"B": 1, "H": 2, "H_kv": 1, "d": 16, "causal": False, "dtype": "fp32", "N": 40}
    assert data["date"] and "simulator" in data["device"] and data["software"]["torch"] == torch.__version__
    args = bench.parse_arguments([*TINY, "--heads", "2:1"])
    with flash.inspect() as report:
        flash.attention(*bench.random_inputs(40, args), stage="flash2")
    assert data["traffic"] == report.to_dict()["traffic"]
    printed = [line.rstrip() for line in shown.splitlines()]
    assert [line for line in str(report).splitlines() if line not in printed] == []
    assert all(str(tmp_path / f"inspect_flash2.{end}") in printed for end in ("json", "png"))
    assert max(map(len, printed)) == 120


def test_inspect_draws_a_line(tmp_path, capsys):
    stage = next(stage.path for stage in flash.stages() if stage.name == "naive")
    number = 1 + next(i for i, line in enumerate(stage.read_text().splitlines()) if "s += Q[" in line)
    status, _, _ = inspect(tmp_path, "naive", "--line", f"{stage.name}:{number}", "--seqlens", "32")
    picture = tmp_path / "inspect_naive_line.png"
    assert status == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in capsys.readouterr().out.splitlines()
    assert inspect(tmp_path, "naive", "--line", f"{stage.name}:1", "--seqlens", "32")[0] == 2
    assert "--line: no access was seen at 'fwd_01_naive.cuh:1'; there are" in capsys.readouterr().err


def test_without_the_checker(tmp_path, capsys, monkeypatch):
    """With clang, for example: nothing is counted, and the table says why."""
    monkeypatch.setattr(flash, "can_inspect", lambda: flash.Available("the checker needs GCC"))
    status, data = run(tmp_path, "--seqlens", "32", "--stages", "naive")
    assert status == 0 and rows(data, "naive")[0]["hbm_read_bytes"] is None
    assert "Not run: HBM traffic: the checker needs GCC" in capsys.readouterr().out


def test_inspect_needs_no_gpu(tmp_path, monkeypatch):
    """With one, too, it takes CPU tensors, and the defaults for them."""
    monkeypatch.setattr(flash, "default_device", lambda: torch.device("cuda"))
    args = bench.parse_arguments(["--inspect", "flash2", "--out", str(tmp_path)])
    assert (args.device.type, args.seqlens, args.batch, args.H) == ("cpu", [128], 1, 2)


def test_inspect_finds_a_race(tmp_path, capsys):
    """In a file of one's own; exit status 1."""
    mine, line = without("__syncthreads();", tmp_path)
    status, data, plot = inspect(tmp_path, mine, "--seqlens", "128")
    shown = " ".join(capsys.readouterr().out.split())
    assert status == 1 and plot and data["stage"] == "mine"
    finding = next(f for f in data["findings"] if f["what"] == "race")
    written = next(party["place"] for party in finding["parties"] if party["kind"] == "write")
    assert re.fullmatch(r"mine\.cuh:(\d+)", written["callers"][0]) and written["file"].endswith("tile.cuh")
    assert int(written["callers"][0].split(":")[1]) in (line + 1, line + 2)  # load_tile for K or V
    assert " ".join(finding["message"].split()) in shown


@pytest.mark.parametrize("line, message, ran", [
    ("float m_new = m[r]; assert(row < 7);", "row < 7", True),
    ("float m_new = m_[r];", "was not declared", False)], ids=["assert", "compiler"])
def test_inspect_of_a_stage_that_fails(tmp_path, capsys, line, message, ran):
    """The error, and of a report what there is; exit status 1."""
    mine, _ = without("__syncwarp();", tmp_path)
    mine.write_text("#include <cassert>\n" + mine.read_text().replace("float m_new = m[r];", line))
    status, data, plot = inspect(tmp_path, mine, "--seqlens", "16")
    shown = capsys.readouterr().out
    assert status == 1 and plot == ran and bool(data["findings"]) == ran
    assert message in data["error"] and f"It failed: {data['error']}" in shown and "No findings" not in shown


def test_numbers():
    numbers = [bench.number(x) for x in (None, 0.000123456, 1.5, 999.4, 12345.6)]
    assert numbers == ["-", "0.000123", "1.50", "999", "12,346"]
    sizes = [bench.size(n) for n in (None, 0, 1536, 3 * 2**30)]
    assert sizes == ["-", "0 B", "1.50 KiB", "3.00 GiB"]
