"""bench.py in the simulator, at tiny shapes: what it writes, and what it does with a stage that fails."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_contract
import torch

import flash
from flash_ladder import ahead, launch, loader, registry
from flash_ladder import stage as stage_module
from flash_ladder.bench import arguments as bench_arguments
from flash_ladder.bench import cases, competitors, masked, measuring, modes, peers
from flash_ladder.bench import report as bench_report

sys.path.insert(0, str(flash.ROOT / "results"))
import dropout as dropout_results  # noqa: E402
import hopper  # noqa: E402
import masks as mask_results  # noqa: E402
import ratios  # noqa: E402
import varlen as varlen_results  # noqa: E402

COLUMNS = ["stage", "time (ms)", "TFLOP/s", "% of ceiling", "x naive", "scratch memory", "max error"]
TINY = ["--batch", "1", "--heads", "1", "--head-dim", "16"]
STAGES, BACKWARD = ([stage.name for stage in flash.stages(direction) if torch.float32 in stage.dtypes
                     and stage.available("cpu")] for direction in ("fwd", "bwd"))


@pytest.fixture(autouse=True)
def quick_on_the_cpu(monkeypatch):
    """No GPU, whatever the machine has; no more repetitions than the median needs."""
    monkeypatch.setattr(flash, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(measuring, "SECONDS_A_CASE", 0.01)


@pytest.fixture
def no_plots(monkeypatch):
    """For a test that is about something else: they and the edited stage take most of a run's time."""
    monkeypatch.setattr(bench_report, "plot", lambda *_: None)
    monkeypatch.setattr(modes, "edit_to_result", lambda args: 1.0)


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


class ChangedGradient(torch.autograd.Function):
    """The identity, of which the gradient is change(gradient)."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


@pytest.fixture
def tamper_gradient(monkeypatch):
    """tamper_gradient(name, i, change): the backward stage of this name gives change(dX) for dQ, dK or dV."""
    def tamper_gradient(name, i, change):
        attention = flash.attention

        def tampered(*tensors, backward=None, **options):
            if backward and backward.name == name:
                tensors = [ChangedGradient.apply(x, change) if j == i else x for j, x in enumerate(tensors)]
            return attention(*tensors, backward=backward, **options)

        monkeypatch.setattr(flash, "attention", tampered)

    return tamper_gradient


def run(tmp_path, *arguments, direction="fwd"):
    """(exit status, the JSON or None) of a run of a pass at tiny shapes."""
    status = modes.main([*TINY, "--out", str(tmp_path), "--pass", direction, *arguments])
    file = tmp_path / f"bench_{direction.replace('+', '_')}.json"
    return status, json.loads(file.read_text()) if file.exists() else None


def parse(*arguments):
    """The arguments of a run of one pass at tiny shapes."""
    args, = bench_arguments.parse_arguments([*TINY, *arguments])
    return args


def best_forward():
    """The name of the stage that a call takes without one."""
    return flash.find_stage(None, torch.float32, torch.device("cpu")).name


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
    _, held, peak = measuring.memory(call, torch.device("cpu"))
    assert (held, peak) == (4000, 8000)


@pytest.mark.usefixtures("no_plots")
def test_traffic(tmp_path, capsys):
    """The counts are those of flash.inspect(), a peer has none; the tables show them, and say of what."""
    _, data = run(tmp_path, "--seqlens", "40", "--heads", "2:1")
    shown = capsys.readouterr().out
    args = parse("--heads", "2:1")
    naive = bench_report.traffic(rows(data, "naive")[0])
    for name in STAGES:
        row, = rows(data, name)
        with flash.inspect() as report:
            flash.attention(*cases.random_inputs(40, args), causal=True, stage=name)
        hbm = report.hbm
        assert (row["hbm_read_bytes"], row["hbm_written_bytes"]) == (hbm.read, hbm.written)
        assert row["hbm_unique_bytes"] == hbm.unique_read + hbm.unique_written
        assert row["shared_bytes"] == max(kernel.shared_bytes for kernel in report.kernels)
        assert row["shared_wavefronts"] == sum(a.units for a in report.accesses if a.memory == "shared")
        assert row["findings"] == [] and row["inspected_ms"] > row["median_ms"] > 0
        assert f"{bench_report.size(hbm.total)}  {bench_report.number(naive / hbm.total):>6}" in shown
        assert f" | {bench_report.size(hbm.total)}" in bench_report.results_table(data).replace("**", "")
    assert all(rows(data, "math")[0][key] is None for key in measuring.COUNTS)
    for text in (" ".join(shown.split()), bench_report.results_table(data)):
        assert bench_report.COUNTED in text


def test_race_with_a_right_result(tmp_path, capsys, monkeypatch):
    """The checker's finding makes a stage wrong, and takes its times away."""
    mine, _ = without("__syncwarp();", tmp_path)
    stages = [dataclasses.replace(stage, path=mine) if stage.name == "flash2" else stage
              for stage in flash.stages("fwd")]
    monkeypatch.setattr(flash, "stages", lambda direction: stages)
    status, data = run(tmp_path, "--seqlens", "32", "--stages", "naive,flash2")
    row, = rows(data, "flash2")
    assert status == 1 and row["status"] == "wrong" and row["error"] < row["allowed_error"]
    assert row["message"] == row["findings"][0] and "race in forward_kernel on P_smem" in row["message"]
    assert row["median_ms"] is row["tflops"] is None and rows(data, "naive")[0]["status"] == "ok"
    shown = capsys.readouterr().out
    assert "WRONG" in shown and row["message"] in shown


@pytest.mark.usefixtures("no_plots")
def test_no_traffic_on_a_gpu(tmp_path, capsys):
    """Nor in results from before it was counted: no columns, no plot."""
    _, data = run(tmp_path, "--seqlens", "32", "--stages", "naive")
    old = data | {"results": [{key: value for key, value in row.items() if key not in measuring.COUNTS}
                              for row in data["results"]]}
    on_gpu = data | {"results": [row | dict.fromkeys(measuring.COUNTS) for row in data["results"]]}
    capsys.readouterr()
    for data in (old, on_gpu):
        files = bench_report.write(data, tmp_path)
        bench_report.show(data, files)
        table = bench_report.results_table(data)
        assert "HBM" not in capsys.readouterr().out + table and not any("hbm" in file.name for file in files)
        assert table.startswith(f"| {' | '.join(COLUMNS)} |\n|---|")


def test_formulas_of_the_paper():
    """Theorem 2: N d + N^2 and N^2 d^2 / M numbers of 4 bytes, for each of 2 * 3 heads."""
    shape = {"B": 2, "H": 3, "H_kv": 1, "d": 64, "causal": True, "dtype": "fp32"}
    assert bench_report.paper_bytes(shape, 128) == 24 * (8192 + 16384)
    assert bench_report.paper_bytes(shape, 128, 4096) == 24 * 16384
    assert bench_report.paper_bytes(shape, 512, 16384) == 24 * 65536


def test_plot_of_traffic(tmp_path, monkeypatch):
    """Against N, both logarithmic: what was counted, and dashed the formulas of Theorem 2."""
    data = json.loads((flash.ROOT / "results" / "cpu" / "bench_fwd.json").read_text())
    data["results"] = [row for row in data["results"] if row["kind"] == "stage"]
    figures, Ns, d, heads = [], bench_report.lengths(data), data["shape"]["d"], data["shape"]["H"]
    assert len(Ns) > 1 and (data["shape"]["B"], data["shape"]["dtype"]) == (1, "fp32")
    monkeypatch.setattr(bench_report.plt, "close", figures.append)
    bench_report.plot_traffic(data, tmp_path / "hbm.png")
    (figure,) = figures
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    drawn = {style: [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
                     if line.get_linestyle() == style and len(line.get_xdata())] for style in ("-", "--")}
    M = data["results"][-1]["shared_bytes"] // 4
    assert drawn["--"] == [(Ns, [4 * heads * (N * d + N * N) for N in Ns]),
                           (Ns, [4 * heads * N * N * d * d / M for N in Ns])]
    names = dict.fromkeys(row["name"] for row in data["results"])
    assert drawn["-"] == [(Ns, [bench_report.traffic(row) for row in rows(data, name)]) for name in names]


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
    arguments = ["--batch", "2", "--heads", "4:2", "--head-dim", "8", "--causal" if causal else "--no-causal"]
    case = cases.make_case(24, parse(*arguments))
    q, k, v = (x.double() for x in case.inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(case.exact, {"O": expected}, rtol=0, atol=1e-12)
    assert 1e-6 < case.allowed["O"] < 1e-5 and not any(x.requires_grad for x in case.inputs)

    case = cases.make_case(24, parse(*arguments, "--pass", "bwd"))
    q, k, v, dO = (x.detach().double().requires_grad_() for x in case.inputs)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    expected = dict(zip(("dQ", "dK", "dV"), torch.autograd.grad(o, (q, k, v), dO), strict=True))
    torch.testing.assert_close(case.exact, expected, rtol=0, atol=1e-12)
    assert list(case.allowed) == ["dQ", "dK", "dV"] and all(1e-6 < x < 2e-5 for x in case.allowed.values())
    assert dO.shape == q.shape and not torch.equal(case.inputs[3], case.inputs[0])


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
    make_case = cases.make_case
    monkeypatch.setattr(modes, "make_case", lambda N, args: (
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
    monkeypatch.setattr(modes, "count_traffic", lambda *_: raise_(KeyboardInterrupt()))
    status, data = run(tmp_path, "--seqlens", "32", "--stages", "naive")
    row, = data["results"]
    assert status == 130 and row["median_ms"] > 0 and row["findings"] is None


@pytest.mark.usefixtures("no_plots")
def test_peer_that_refuses(tmp_path, capsys):
    status, data = run(tmp_path, "--seqlens", "32", "--stages", "naive", "--peers", "cudnn,math")
    assert status == 0 and data["not_run"]["PyTorch cuDNN"] and not rows(data, "cudnn")
    assert "Not run: PyTorch cuDNN: " in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    ("--pass back", "no pass 'back'; there are fwd, bwd, fwd+bwd, and all"),
    ("--pass back,all", "no pass 'back'; there are"),
    ("--pass bwd --stages flash2", "no backward stage 'flash2' for fp32; there are naive, recompute,"),
    ("--pass bwd --stages flash2", "fp32_tuned; it is a forward stage: add --pass fwd"),
    ("--pass fwd+bwd --stages flash2", "; it is a forward stage: add --pass fwd"),
    ("--stages recompute", "no forward stage 'recompute' for fp32; there are naive, tiled,"),
    ("--stages recompute", "; it is a backward stage: add --pass bwd"),
    ("--pass fwd,bwd --stages naive,flsh2",
     "--stages: no stage 'flsh2' for fp32 in any of the passes; there are forward: naive, tiled,"),
    ("--pass all --stages flash2,recompute,nope", "; backward: naive, recompute,"),
    ("--pass bwd,fwd+bwd --stages naive,nope", "no backward stage 'nope' for fp32; there are naive,"),
    ("--pass fwd+bwd,fwd --stages flash2", "no backward stage 'flash2'"),
    ("--pass bwd --inspect flash2", "--inspect: no backward stage 'flash2' for fp32; there are naive,"),
    ("--pass bwd --inspect flash2", "; it is a forward stage: add --pass fwd"),
    ("--inspect recompute", "--inspect: no forward stage 'recompute' for fp32; there are naive,"),
    ("--inspect recompute", "; it is a backward stage: add --pass bwd"),
    ("--pass fwd+bwd --inspect naive", "--inspect: takes one pass"),
    ("--pass fwd,bwd --inspect naive", "--inspect: takes one pass"),
    ("--inspect stages/bwd_01_naive.cuh", "bwd_01_naive.cuh is a backward stage: add --pass bwd"),
    ("--inspect stages/fwd_01_naive.cuh --pass bwd", "fwd_01_naive.cuh is a forward stage: add --pass fwd"),
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
    ("--inspect flsh2", "--inspect: no forward stage 'flsh2' for fp32; there are naive, tiled,"),
    ("--inspect naive,flash2", "no forward stage 'naive,flash2'"),
    ("--inspect nowhere.cuh", "error: --inspect: there is no file nowhere.cuh"),
    ("--inspect nowhere.cuh --pass bwd", "error: --inspect: there is no file nowhere.cuh"),
    ("--stages naive,nowhere.cuh", "error: --stages: there is no file nowhere.cuh"),
    ("--stages naive,no/where --pass all", "error: --stages: there is no file no/where"),
    ("--stages stages/", "error: --stages: there is no file stages/"),
    ("--stages naive,stages/bwd_01_naive.cuh", "bwd_01_naive.cuh is a backward stage: add --pass bwd"),
    ("--pass bwd --stages stages/fwd_01_naive.cuh", "naive.cuh is a forward stage: add --pass fwd"),
    ("--pass fwd,bwd --stages stages/bwd_01_naive.cuh",
     "--stages: --pass fwd has none of stages/bwd_01_naive.cuh"),
    ("--dtype bf16 --stages stages/fwd_01_naive.cuh", "stages/fwd_01_naive.cuh: does not take bf16"),
    ("--inspect flash2 --seqlens 64,128", "--inspect: takes one N; --seqlens has 64, 128"),
    ("--sweep flash2 --seqlens 64,128", "--sweep: takes one N; --seqlens has 64, 128"),
    ("--sweep flash2 --pass fwd,bwd", "--sweep: takes one pass; --pass has fwd, bwd"),
    ("--sweep flsh2", "--sweep: no forward stage 'flsh2' for fp32; there are naive, tiled,"),
    ("--sweep nowhere.cuh --pass fwd+bwd", "error: --sweep: there is no file nowhere.cuh"),
    ("--sweep stages/fwd_01_naive.cuh --pass bwd", "fwd_01_naive.cuh is a forward stage: add --pass fwd"),
    ("--sweep flash2 --inspect flash2", "not allowed with argument"),
    ("--inspect flash2 --stages naive", "not allowed with argument"),
    ("--inspect flash2 --markdown results/cpu/bench_fwd.json", "not allowed with argument"),
    ("--inspect flash2 --heads 12:5", "H a multiple of H_kv"),
    ("--line fwd_01_naive.cuh:50", "--line: goes with --inspect"),
    ("--mask windw:3", "--mask: no mask 'windw:3'; there are causal, window:LEFT[:RIGHT], prefix:LENGTH,"),
    ("--mask window", "--mask: 'window'; it is window:LEFT[:RIGHT], with numbers"),
    ("--mask causal:3", "--mask: 'causal:3'; it is causal, with numbers"),
    ("--mask causal&window:1:2:3", "--mask: 'window:1:2:3'; it is window"),
    ("--mask prefix:-3", "--mask: 'prefix:-3'; it is prefix:LENGTH"),
    ("--mask document:0", "--mask: 'document:0'; COUNT must be at least 1"),
    ("--stages mma", "no forward stage 'mma' for fp32"),
    ("--stages mma", "; it takes fp16, bf16: add --dtype bf16"),
    ("--mask softcap:0", "--mask: cap must be a number from 1e-37 to 3e38"),
    ("--mask document:2&block_causal&bias", "--mask: the masks have 5 tensors together; at most 4"),
    ("--mask window:9 --causal", "--mask: takes no --causal beside it; causal&window:9 is both"),
    ("--mask causal --stages naive", "--stages: naive: takes no mask but --causal"),
    ("--mask causal --peers math", "--peers: there is no 'math'; with --mask there are flex, sdpa, eager"),
    ("--checkpoint --pass bwd", "--checkpoint: goes with --pass fwd+bwd"),
    ("--rungs --mask causal", "--rungs: has shapes of its own, and takes no --mask"),
    ("--preset nothing", "argument --preset: invalid choice: 'nothing'"),
])
def test_bad_arguments(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(flash.ROOT)
    for module in (ahead, launch):
        monkeypatch.setattr(module, "build", lambda *_, **__: pytest.fail("it built something"))
    with pytest.raises(SystemExit) as exit_:
        modes.main(arguments.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_all_among_others():
    """In the order of the passes, each once."""
    assert bench_arguments.passes("bwd,fwd,bwd") == ["bwd", "fwd"]
    for text in ("all", "all,bwd", "bwd,all"):
        assert bench_arguments.passes(text) == ["fwd", "bwd", "fwd+bwd"]


@pytest.mark.usefixtures("no_plots")
def test_markdown(tmp_path, capsys):
    _, data = run(tmp_path, "--seqlens", "32,64", "--stages", "naive,tiled")
    file = str(tmp_path / "bench_fwd.json")
    capsys.readouterr()
    assert modes.main(["--markdown", file, "--seqlens", "32"]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == bench_report.results_table(data, 32).strip()
    header, rule, naive, tiled, math_, empty, origin = printed.strip().split("\n")
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert columns == [*COLUMNS, "HBM traffic", "x less than naive"]
    assert len({line.count("|") for line in (header, rule, naive, tiled, math_)}) == 1
    assert (naive + tiled).count("**") == 2 * len(columns) and "**" not in math_  # one stage is fastest
    assert "N=32" in origin and data["device"] in origin and data["note"] in origin
    assert modes.main(["--markdown", file]) == 0
    assert "N=64" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        modes.main(["--markdown", file, "--seqlens", "128"])
    assert "it has 32, 64" in capsys.readouterr().err


def inspect(folder, stage, *arguments):
    """(exit status, the JSON, whether there is a plot) of a run with --inspect at tiny shapes."""
    status = modes.main([*TINY, "--out", str(folder), "--inspect", str(stage), *arguments])
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
    args = parse("--heads", "2:1")
    with flash.inspect() as report:
        flash.attention(*cases.random_inputs(40, args), stage="flash2")
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


@pytest.mark.parametrize("direction, stage", [("fwd", "flash2"), ("bwd", "recompute")])
def test_sweep(tmp_path, capsys, monkeypatch, direction, stage):
    """Every size that the stage takes of those to try, and the default; the fastest first."""
    monkeypatch.setattr(modes, "TILE_SIZES", (12, 16, 32))
    options = ["--sweep", stage, "--pass", direction, "--seqlens", "32", "--out", str(tmp_path)]
    assert modes.main([*TINY, *options]) == 0
    file = tmp_path / f"sweep_{direction}_{stage}.json"
    data, shown = json.loads(file.read_text()), capsys.readouterr().out
    taken = {(64, 64), (16, 32), (32, 32)}
    assert {(row["Br"], row["Bc"]) for row in data["results"]} == taken and data["default"]["Br"] == 64
    assert all(row["status"] == "ok" and row["tflops"] > 0 for row in data["results"])
    best = min(data["results"], key=lambda row: row["median_ms"])
    assert f"Best of 3: Br={best['Br']} Bc={best['Bc']}" in shown and "default" in shown
    assert data["note"] in " ".join(shown.split()) and str(file) in shown
    assert file.with_suffix(".png").stat().st_size > 10_000


def test_sweep_shows_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(modes, "TILE_SIZES", (32,))
    mine = tmp_path / "mine.cuh"
    text = (flash.STAGES / "fwd_04_flash2.cuh").read_text()
    mine.write_text(text.replace("O_reg[r][c] *= alpha", "O_reg[r][c] *= BLOCK_R == 32 ? 1.f : alpha"))
    assert modes.main([*TINY, "--sweep", str(mine), "--seqlens", "64", "--out", str(tmp_path)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Br=32 Bc=32: the largest error in O is" in shown and "Best of 2: Br=64 Bc=64" in shown


def test_inspect_needs_no_gpu(tmp_path, monkeypatch):
    """With one, too, it takes CPU tensors, and the defaults for them."""
    monkeypatch.setattr(flash, "default_device", lambda: torch.device("cuda"))
    args, = bench_arguments.parse_arguments(["--inspect", "flash2", "--out", str(tmp_path)])
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
    numbers = [bench_report.number(x) for x in (None, 0.000123456, 1.5, 999.4, 12345.6)]
    assert numbers == ["-", "0.000123", "1.50", "999", "12,346"]
    sizes = [bench_report.size(n) for n in (None, 0, 1536, 3 * 2**30)]
    assert sizes == ["-", "0 B", "1.50 KiB", "3.00 GiB"]


# ------------------------------------------------------------------------------------------ the gradients
@pytest.mark.parametrize("direction, flops", [("bwd", 10), ("fwd+bwd", 14)])
def test_gradients(tmp_path, capsys, direction, flops):
    status, data = run(tmp_path, "--seqlens", "32,64", direction=direction)
    shown = capsys.readouterr().out
    assert status == 0
    assert [row["name"] for row in data["results"]] == [*BACKWARD, "math"] * 2
    for row in data["results"]:
        assert row["status"] == "ok" and set(row["label"].split()) <= set(shown.split())
        assert 0 < row["error"] < 1e-5 and row["error_in"] in ("dQ", "dK", "dV")
        assert row["kind"] == "peer" or row["error"] <= row["allowed_error"] < 2e-5
        assert row["tflops"] == pytest.approx(flops * row["N"] ** 2 * 16 / 2 / (row["median_ms"] * 1e9))
        assert row["kind"] == "peer" or row["findings"] == []
    assert data["edit_to_result_s"] > launch.LOOK_AGAIN
    assert data["arguments"]["pass"] == direction and data["arguments"]["stages"] == BACKWARD
    assert f"Attention {bench_report.PASSES[direction]}, B=1" in shown
    assert f"FLOPs: {flops} B H N N d" in shown
    columns = [*COLUMNS[:-1], "peak memory", COLUMNS[-1], "HBM traffic", "x less than naive"]
    assert bench_report.columns(data) == columns and bench_report.results_table(data).startswith(
        f"| {' | '.join(columns)} |\n|---|")
    assert max(map(len, shown.split("Ceiling")[0].splitlines())) <= 100 and "…" not in shown
    before = f"O and L are made before, by {best_forward()}."
    assert (before in shown) == (before in bench_report.results_table(data)) == (direction == "bwd")
    for plot in ("time", "memory", "tflops", "hbm"):
        png = tmp_path / f"bench_{direction.replace('+', '_')}_{plot}.png"
        assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
        assert str(png) in shown


def test_an_edited_stage_is_built_while_the_clock_runs(monkeypatch):
    """Once, between saving it and the result; and within the seconds that are told."""
    built = []

    def build(*arguments):
        start = time.perf_counter()
        path = loader.build(*arguments)
        built.append((path, time.perf_counter() - start))
        return path

    monkeypatch.setattr(launch, "build", build)
    seconds = measuring.edit_to_result(parse("--pass", "bwd", "--stages", "naive"))
    (first, _), (edited, took) = [pair for pair in built if pair[0].name.startswith("bwd_naive")]
    assert first != edited and seconds > launch.LOOK_AGAIN + took


@pytest.mark.usefixtures("no_plots")
def test_all_passes(tmp_path, capsys):
    """Each has its table and its JSON, and takes the stages that it knows."""
    status = modes.main([*TINY, "--out", str(tmp_path), "--pass", "all", "--seqlens", "32", "--peers", "none",
                         "--stages", "flash2,naive,recompute"])
    shown = capsys.readouterr().out
    assert status == 0
    names = {file.stem: [row["name"] for row in json.loads(file.read_text())["results"]]
             for file in tmp_path.glob("*.json")}
    assert names == {"bench_fwd": ["naive", "flash2"], "bench_bwd": ["naive", "recompute"],
                     "bench_fwd_bwd": ["naive", "recompute"]}
    assert " + recompute " in shown
    assert [shown.count(f"Attention {what},") for what in bench_report.PASSES.values()] == [1, 1, 1]


def test_pairs(monkeypatch):
    """A backward stage runs after its namesake, else after the parent of the next namesake on its branch,
    else as the stage does that it grew from."""
    ladders = {"fwd": {"naive": "", "tiled": "naive", "flash2": "tiled", "vectorized": "flash2",
                       "mma": "flash2", "swizzle": "mma", "cp_async": "swizzle"},
               "bwd": {"naive": "", "recompute": "naive", "deterministic": "recompute",
                       "vectorized": "recompute", "mma": "recompute", "split": "mma", "cp_async": "split",
                       "newer": "cp_async"}}
    example, = (stage for stage in flash.stages("fwd") if stage.name == "naive")
    best = flash.find_stage(None, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(flash, "stages", lambda direction: [
        dataclasses.replace(example, number=i, name=name, after=after, direction=direction)
        for i, (name, after) in enumerate(ladders[direction].items(), 1)])
    both, backward = (parse("--pass", direction) for direction in ("fwd+bwd", "bwd"))
    pairs = [competitors.forward_stage(stage, both).name for stage in both.stages]
    assert pairs == ["naive", "flash2", "flash2", "vectorized", "mma", "swizzle", "cp_async", "cp_async"]
    labels = [competitors.of_stage(stage, both).label for stage in both.stages]
    assert labels == ["naive", "flash2 + recompute", "flash2 + deterministic", "vectorized", "mma",
                      "swizzle + split", "cp_async", "cp_async + newer"]
    assert {competitors.forward_stage(stage, backward) for stage in backward.stages} == {best}
    mine = dataclasses.replace(backward.stages[0], number=0, name="mine", after="recompute")
    assert competitors.forward_stage(mine, both).name == "flash2"
    assert competitors.forward_stage(dataclasses.replace(mine, after=""), both) == best
    assert competitors.forward_stage(dataclasses.replace(mine, default="sm_90a"), both) == best


@pytest.mark.parametrize("name", BACKWARD)
def test_only_the_backward_pass_is_timed(monkeypatch, name):
    """And not a deterministic one instead, though torch.empty is made to give NaN."""
    calls, attention = [], flash.attention
    monkeypatch.setattr(flash, "attention", lambda *tensors, **options: (
        calls.append(options), attention(*tensors, **options))[1])
    args = parse("--pass", "bwd", "--stages", name)
    inputs = cases.random_inputs(16, args)
    with cases.poisoned_memory():
        call = competitors.of_stage(*args.stages, args).prepare("bwd", *inputs)
        assert len(calls) == 1 and calls[0]["backward"].name == name and calls[0]["deterministic"] is False
        first, second = call(), call()
    assert len(calls) == 1 and not torch.are_deterministic_algorithms_enabled()
    case = cases.make_case(16, args)
    for gradients in (first, second):
        assert [x.shape for x in gradients] == [x.shape for x in inputs[:3]]
        error_in, error = cases.worst_error(gradients, case)
        assert error <= case.allowed[error_in]


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("change, finite", [(lambda x: x + 1e-2, True), (lambda x: x * math.nan, False),
                                            (torch.empty_like, False)], ids=["off", "NaN", "unwritten"])
@pytest.mark.parametrize("i", range(3))
def test_wrong_gradient_is_not_timed(tmp_path, capsys, tamper_gradient, i, change, finite):
    tamper_gradient("recompute", i, change)
    arguments = "--seqlens", "24", "--stages", "naive,recompute", "--peers", "none"
    status, data = run(tmp_path, *arguments, direction="bwd")
    naive, row = data["results"]
    assert status == 1 and naive["status"] == "ok"
    assert row["status"] == "wrong" and row["median_ms"] is None and row["error_in"] == ("dQ", "dK", "dV")[i]
    assert f"the largest error in d{'QKV'[i]} is " in row["message"] and (row["error"] is not None) == finite
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
def test_memory_of_gradients(tmp_path, direction):
    """Scratch memory is what is beyond Q, K, V, O, dO, dQ, dK, dV, at the peak: for naive L, P and dS; for
    recompute L and D; for PyTorch three N x N matrices at least, of which autograd has saved one."""
    _, data = run(tmp_path, "--seqlens", "128", "--stages", "naive,recompute", direction=direction)
    naive, recompute, pytorch = data["results"]
    N, floats = 128, 4
    assert naive["scratch_bytes"] == floats * (N + 2 * N * N)
    assert recompute["scratch_bytes"] == floats * (N + N)
    assert floats * 3 * N * N <= pytorch["scratch_bytes"] < floats * 4 * N * N
    for row in data["results"]:
        assert row["peak_bytes"] == row["scratch_bytes"] + floats * 8 * N * 16


@pytest.mark.usefixtures("no_plots")
def test_traffic_of_gradients(tmp_path):
    """Of the backward pass alone, or of both: what flash.inspect() counts."""
    args = parse("--pass", "bwd", "--heads", "2:1")
    q, k, v, dO = cases.random_inputs(40, args)
    with flash.inspect() as forward:
        o = flash.attention(q, k, v, causal=True, stage="naive", backward="naive", deterministic=False)
    with flash.inspect() as backward:
        torch.autograd.grad(o, (q, k, v), dO)
    assert forward.hbm.total and backward.hbm.total
    expected = {"bwd": backward.hbm.total, "fwd+bwd": forward.hbm.total + backward.hbm.total}
    for direction, total in expected.items():
        arguments = "--heads", "2:1", "--seqlens", "40", "--stages", "naive", "--peers", "none"
        _, data = run(tmp_path, *arguments, direction=direction)
        row, = data["results"]
        assert bench_report.traffic(row) == total
        assert f" | {bench_report.size(total)}" in bench_report.results_table(data).replace("**", "")


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("arguments", [("--heads", "4:2", "--no-causal", "--seqlens", "40"),
                                       ("--seqlens", "1")])
def test_gradients_of_other_shapes(tmp_path, arguments):
    """Grouped heads; and one key, for which dQ and dK are 0, and an error of 0 cannot be asked for."""
    status, data = run(tmp_path, *arguments, "--stages", "naive,recompute", direction="bwd")
    assert status == 0 and [row["status"] for row in data["results"]] == ["ok"] * 3


@pytest.mark.usefixtures("no_plots")
def test_interrupted_in_the_second_pass(tmp_path, capsys, tamper_gradient):
    """The results of the first are there, and those of the second so far; the third is not begun."""
    tamper_gradient("recompute", 0, lambda x: raise_(KeyboardInterrupt()) if x.shape[2] == 32 else x)
    assert modes.main([*TINY, "--out", str(tmp_path), "--pass", "all", "--seqlens", "24,32", "--stages",
                       "naive,recompute", "--peers", "none"]) == 130
    data = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    measured = {name: [(row["name"], row["N"]) for row in one["results"]] for name, one in data.items()}
    assert measured == {"bench_fwd": [("naive", 24), ("naive", 32)],
                        "bench_bwd": [("naive", 24), ("recompute", 24), ("naive", 32)]}
    assert data["bench_bwd"]["interrupted"] and not data["bench_fwd"]["interrupted"]
    assert "Interrupted after 3 cases" in capsys.readouterr().err


@pytest.mark.parametrize("error, status, exit_status", [
    (RuntimeError("building it failed:\nerror: no such thing"), "failed", 1),
    (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", 0)])
@pytest.mark.usefixtures("no_plots")
def test_backward_stage_that_raises(tmp_path, tamper_gradient, error, status, exit_status):
    tamper_gradient("naive", 1, lambda x: raise_(error))
    arguments = "--seqlens", "24", "--stages", "naive,recompute", "--peers", "none"
    exit_, data = run(tmp_path, *arguments, direction="fwd+bwd")
    assert exit_ == exit_status and [row["status"] for row in data["results"]] == [status, "ok"]


def test_inspect_the_backward_pass(tmp_path, capsys):
    """Of it alone; its files do not take the place of the forward stage's of the same name."""
    arguments = "--seqlens", "40", "--heads", "2:1"
    status, data, plot = inspect(tmp_path, "naive", "--pass", "bwd", *arguments)
    assert status == 0 and plot and data["findings"] == [] and data["error"] == ""
    assert [file.name for file in tmp_path.glob("*.json")] == ["inspect_bwd_naive.json"]
    assert data["arguments"] == {"pass": "bwd", "stages": ["naive"], "forward": [best_forward()]}
    assert "Attention backward" in capsys.readouterr().out
    kernels = [kernel["name"] for kernel in data["kernels"]]
    assert kernels == ["scores_kernel", "softmax_kernel", "dQ_kernel", "dKV_kernel"]
    assert {"dO", "dQ", "dK", "dV"} <= set(data["traffic"])


def test_inspect_a_backward_stage_of_your_own(tmp_path):
    """recompute without its last barrier: it is a race, and the exit status is 1."""
    stage, = (stage for stage in flash.stages("bwd") if stage.name == "recompute")
    before, after = stage.path.read_text().rsplit("__syncthreads();", 1)
    mine = tmp_path / "mine.cuh"
    mine.write_text((before + after).replace("// Backward stage 2: recompute", "// mine"))
    status, data, _ = inspect(tmp_path, mine, "--pass", "bwd", "--seqlens", "128")
    assert status == 1 and "race" in {finding["what"] for finding in data["findings"]}
    assert data["stage"] == "mine"


# ---------------------------------------------------------------------------------------- masks
MASKS = ["causal", "window:20:7", "prefix:9", "padding", "document:4", "block-causal", "boolean", "bias",
         "relative_bias", "alibi", "softcap:2", "causal&document:3"]


@pytest.mark.parametrize("text", MASKS)
def test_masks_by_elements(text, monkeypatch):
    """What the peers and the truth take says the same as the stages' mask. By rows as at once."""
    args = parse("--mask", text, "--batch", "2", "--heads", "2")
    mask = masked.pattern(60, args)
    found = mask.joined().tiles(60, Br=16, Bc=24)
    monkeypatch.setattr(masked, "MOST_SCORES", 60 * 7)
    seen = mask.dense_seen() if mask.seen else torch.ones(1, 1, 60, 60, dtype=torch.bool)
    assert torch.equal(*torch.broadcast_tensors(seen, found.seen))
    assert mask.pairs() == int(seen.expand(2, 2, -1, -1).sum()) == 4 * 3600 * found.share
    assert all(torch.equal(x.tensor, y.tensor) for x, y in zip(
        mask.joined().arguments, masked.pattern(60, args).joined().arguments, strict=True))


def test_every_mask_is_tried():
    assert {name for text in MASKS for name, _ in masked.read(text)} == set(masked.SYNTAX)


@pytest.mark.parametrize("text", ["window:3&padding", "bias&causal", "alibi&prefix:4"])
def test_the_reference_with_a_mask(text, monkeypatch):
    """By rows, against PyTorch in float64 with a dense mask. Some rows of the first see nothing."""
    arguments = ["--batch", "2", "--heads", "4:2", "--head-dim", "8", "--mask", text]
    monkeypatch.setattr(masked, "MOST_SCORES", 24 * 7)
    args = parse(*arguments, "--pass", "bwd")
    mask = masked.pattern(24, args)
    dense = mask.dense_bias(torch.float64, hide=True) if mask.score else mask.dense_seen()
    blind = mask.seen and not mask.dense_seen().any(-1).all()
    assert blind == text.startswith("window")
    for direction in ("fwd", "bwd"):
        args = parse(*arguments, "--pass", direction)
        case = cases.make_case(24, args)
        q, k, v = (x.detach().double().requires_grad_() for x in case.inputs[:3])
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
        expected = {"O": o.detach()} if direction == "fwd" else dict(zip(
            ("dQ", "dK", "dV"), torch.autograd.grad(o, (q, k, v), case.inputs[3].double())))
        torch.testing.assert_close(case.exact, expected, rtol=0, atol=1e-6 if mask.score else 1e-12)
        assert all(x < 2e-5 for x in case.allowed.values())
        assert case.pairs == mask.pairs() < 2 * 4 * 24 * 24
        (o,) = peers.eager(q, k, v, **peers.eager_mask(args, 24))
        assert torch.isfinite(o).all() and all(
            torch.isfinite(x).all() for x in torch.autograd.grad(o.sum(), (q, k, v)))


def test_the_slope_of_a_softcap():
    """Its gradients are autograd's through plain code."""
    args = parse("--heads", "2", "--mask", "softcap:0.5", "--pass", "bwd")
    case = cases.make_case(24, args)
    *tensors, dO = (x.detach().double().requires_grad_() for x in case.inputs)
    (o,) = peers.eager(*tensors, **peers.eager_mask(args, 24))
    expected = dict(zip(("dQ", "dK", "dV"), torch.autograd.grad(o, tensors, dO)))
    torch.testing.assert_close(case.exact, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("no_plots")
def test_bench_with_a_mask(tmp_path, capsys):
    """Named in titles and JSON; FLOPs of what it leaves; peers are right, and those that do not run named."""
    status, data = run(tmp_path, "--mask", "causal&document:3", "--seqlens", "40", "--heads", "4:2",
                       "--stages", "flash2")
    shown = " ".join(capsys.readouterr().out.split())
    stage, sdpa, eager = data["results"]
    args = parse("--mask", "causal&document:3", "--heads", "4:2")
    pairs = masked.pattern(40, args).pairs()
    assert status == 0 and 0 < pairs < 4 * 820 and data["shape"]["mask"] == "causal&document:3"
    for row in data["results"]:
        assert row["status"] == "ok" and 0 < row["error"] <= row["allowed_error"] and row["pairs"] == pairs
        assert row["tflops"] == pytest.approx(4 * 16 * pairs / (row["median_ms"] * 1e9))
    assert (stage["findings"], eager["label"]) == ([], "PyTorch eager")
    assert sdpa["label"] == f"PyTorch SDPA ({peers.backend(args)})"
    assert data["not_run"]["PyTorch flex_attention"] == peers.NO_GPU and peers.NO_GPU in shown
    title = "Attention forward, B=1 H=4 H_kv=2 d=16 fp32 causal&document:3"
    words = f"4 d for each pair of a query and a key that counts: {100 * pairs / 6400:.1f} % of all at N=40"
    for text in (shown, bench_report.results_table(data)):
        assert title in text and words in text and bench_report.MASKED in text
    assert sdpa["scratch_bytes"] >= 40 * 40 > stage["scratch_bytes"]


@pytest.mark.usefixtures("no_plots")
def test_checkpoint(tmp_path, capsys, monkeypatch):
    """Both passes, and the forward pass once more; SDPA refuses a softcap by name."""
    calls, attention = [], flash.attention
    monkeypatch.setattr(flash, "attention", lambda *tensors, **options: (
        calls.append(options["mask"]), attention(*tensors, **options))[1])
    args = parse("--mask", "softcap:2&alibi", "--pass", "fwd+bwd", "--checkpoint", "--stages", "recompute")
    competitors.of_stage(*args.stages, args).prepare("fwd+bwd", *cases.random_inputs(40, args))()
    assert len(calls) == 2 and "softcap & alibi" in repr(calls[0])
    status, data = run(tmp_path, "--mask", "softcap:2&alibi", "--checkpoint", "--seqlens", "40", "--stages",
                       "recompute", direction="fwd+bwd")
    shown = capsys.readouterr().out
    assert status == 0
    assert [row["label"] for row in data["results"]] == ["flash2 + recompute", "PyTorch eager"]
    assert all(row["status"] == "ok" and row["peak_bytes"] > 0 for row in data["results"])
    assert "SDPA has no softcap" in data["not_run"]["PyTorch SDPA"]
    assert "forward and backward, checkpointed, B=1" in shown and bench_report.CHECKPOINTED in shown


def test_preset(tmp_path):
    """What is given goes before."""
    args, = bench_arguments.parse_arguments(["--preset", "vla", "--out", str(tmp_path)])
    assert (args.batch, args.H, args.H_kv, args.seqlens, args.head_dim) == (2, 8, 1, [1024], 256)
    assert (args.dtype, args.mask, args.causal) == ("bf16", "block_causal:8", False)
    args, = bench_arguments.parse_arguments(["--preset", "vla", "--seqlens", "64", "--mask", "causal",
                                             "--out", str(tmp_path)])
    assert (args.batch, args.seqlens, args.mask) == (2, [64], "causal")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_the_same(monkeypatch):
    """Its functions of elements, in PyTorch's own code, uncompiled: against the truth."""
    from torch.nn.attention import flex_attention
    args = parse("--heads", "4:2", "--batch", "2", "--mask", "alibi&causal&document:3&softcap:3")
    monkeypatch.setattr(peers, "compiled_flex", lambda: flex_attention.flex_attention)
    with pytest.raises(RuntimeError, match="flex_attention has no backward pass"):
        peers.flex_mask(args, 40)
    case = cases.make_case(40, args)
    mask = masked.pattern(40, args)
    blocks = flex_attention.create_block_mask(mask.seen, 2, None, 40, 40, device="cpu")
    (o,) = peers.flex(*case.inputs, score_mod=mask.score, block_mask=blocks)
    assert cases.largest_error(o, case.exact["O"]) <= case.allowed["O"]


def test_results_of_masks(tmp_path, monkeypatch):
    """In the simulator, at tiny shapes: rows by case, the other cases' kept, and what the table says."""
    file, folder = tmp_path / "masks.json", tmp_path
    monkeypatch.setattr(mask_results, "CASES", {
        "vla": ("--preset", "vla", "--heads", "2:1", "--seqlens", "32", "--head-dim", "16"),
        "window64": ("--mask", "window:20", *TINY, "--seqlens", "150")})
    monkeypatch.setattr(mask_results, "PASSES", {"vla": [("--pass", "bwd")], "window64": [("--pass", "fwd")]})
    monkeypatch.setattr(mask_results.ratios, "TURNS", 1)
    each = {name: list(mask_results.passes(name, folder)) for name in mask_results.CASES}
    origin = measuring.origin(each["vla"][0])
    said = []
    mask_results.run(each, mask_results.read(file, ["vla"], origin), file, 1000, said.append)
    data = json.loads(file.read_text())
    assert [(row["case"], row["name"], row["status"]) for row in data["rows"]] == [
        (case, name, "ok") for case in ("vla", "window64") for name in ("ampere_tuned", "sdpa", "eager")]
    assert data["same_bits"] == {"fwd": True, "bwd": True} and min(data["seconds_to_compile"].values()) > 0
    window = data["rows"][3]
    assert window["full_ms"] > 0 and window["share_of_tiles"] == 5 / 9  # tiles of 64 x 64: diagonal, one left
    table = mask_results.table(data)
    lines = table.splitlines()
    assert lines[2].startswith("| block_causal:8 | B=2 H=2 H_kv=1 N=32 d=16 | backward | ")
    assert lines[3].startswith("| window:20 | B=1 H=1 N=150 d=16 | forward | ")
    assert len({line.count("|") for line in lines[:4]}) == 1 and "DIFFERENT" not in table
    assert "(55.6 % of " in table and "the same bits" in table and "d=16: forward" in table

    left = mask_results.read(file, ["window64"], origin)
    assert [row["case"] for row in left["rows"]] == ["vla"] * 3 and list(left["date"]) == ["vla"]
    monkeypatch.setattr(mask_results.ratios, "by_turns", lambda *_: raise_(TypeError("no such thing")))
    mask_results.run({"window64": each["window64"]}, left, file, 1000, said.append)
    mask_results.run({"window64": each["window64"]}, left, file, -1, said.append)
    data = json.loads(file.read_text())
    assert [row["status"] for row in data["rows"]] == ["ok"] * 3 + ["failed"]
    assert "Failed: all, window:20 d=16, forward: no such thing; window64, fwd: no time left." in (
        mask_results.table(left))
    with pytest.raises(SystemExit, match="has rows of vla, measured on CPU"):
        mask_results.read(file, ["window64"], origin | {"device": "another"})


def test_packed_sequences_are_measured_case_by_case(tmp_path):
    """The rows of other cases are kept, if they are of the same device, software and lengths."""
    row = {"d": 64, "causal": True, "pass": "fwd", "name": "one", "message": None, "tflops": 1.0}
    fresh = {"date": "today", "device": "a", "software": {}, "lengths": [3], "same_bits": {}, "rows": []}
    file = tmp_path / "varlen.json"
    assert varlen_results.read(file, ["64:full"], fresh) == fresh
    data = fresh | {"date": "before", "rows": [row, row | {"causal": False}],
                    "same_bits": {"d=64 causal": {}, "d=64 full": {}}, "left_out": ["d=128 full"]}
    ratios.write(data, file)
    assert json.loads(file.read_text()) == data
    left = varlen_results.read(file, ["64:full", "128:causal"], fresh)
    assert left == fresh | {"date": "before", "rows": [row], "same_bits": {"d=64 causal": {}}}
    assert varlen_results.read(file, [*varlen_results.CASES], fresh) == fresh
    with pytest.raises(SystemExit, match="rows of another device"):
        varlen_results.read(file, ["64:full"], fresh | {"lengths": [4]})


@pytest.mark.parametrize("case, options, direction, deterministic, expected", [
    ("window128", ("--pass", "fwd"), "fwd", False, "own_ranges"),
    ("vla", ("--pass", "fwd"), "fwd", False, "row_by_row"),
    ("vla", ("--pass", "bwd"), "bwd", True, "exchanged_semaphores"),
    ("window128", ("--pass", "bwd"), "bwd", False, "augmented"),
    ("bias", ("--pass", "fwd", "--batch", "1", "--heads", "1", "--seqlens", "512"), "bwd", False,
     "hopper_tuned")])
def test_masks_are_measured_with_what_a_call_takes(monkeypatch, case, options, direction, deterministic,
                                                   expected):
    """On Hopper, by the call's own shape: a small one takes another stage than a large one."""
    args, = bench_arguments.parse_arguments([*mask_results.CASES[case], "--dtype", "bf16", *options])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(stage_module, "find_nvcc", lambda cuda: Path("nvcc"))
    monkeypatch.setattr(registry, "shared_memory_per_block", lambda device: 227 * 1024)
    args.device = torch.device("cuda")
    assert mask_results.best_stage(args, direction, deterministic).name == expected
    args.direction = "bwd"
    before = competitors.forward_stage(mask_results.best_stage(args, "bwd"), args).name
    assert before == ("own_ranges" if case == "window128" else "row_by_row")
    args.seqlens = [512, 64]
    assert competitors.sizes_of(args) is None


def test_results_of_masks_need_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        mask_results.main([str(tmp_path)])
    with pytest.raises(SystemExit):
        mask_results.main([str(tmp_path), "--cases", "vla,nothing"])
    assert "no 'nothing'; there are vla, window64" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- results/hopper.py
class FlashAttention3:
    """Its interface, by plain code: forward only."""

    def fwd(self, q, k, v, *, is_causal, num_splits):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return o.transpose(1, 2), None


def test_shapes_of_hopper():
    """18 large ones a pass and type; H d = 2048; what is counted of a window's pairs."""
    chosen = list(hopper.shapes(list(hopper.CASES), ["fwd", "bwd"], ["bf16"], [64, 128, 256]))
    assert len(chosen) == len(set(chosen)) == 2 * 3 * (6 + 6 + 4 + 1)
    assert sum(shape.case == "large" for shape in chosen) == 36
    for shape in chosen:
        assert shape.H * shape.d == 2048 and (shape.B * shape.N == 16384 or shape.case == "small")
    window = hopper.Shape("window", "fwd", "bf16", 8, 1, 1, 1, 5, False, 2)
    i, j = torch.arange(5)[:, None], torch.arange(5)
    assert window.flops == 4 * 8 * ((j <= i) & (j > i - 2)).sum()


def test_hopper_compares_with_what_runs(capsys, tmp_path):
    """A row for each contender; who refuses says why; a wrong result shows."""
    shape = hopper.Shape("large", "fwd", "bf16", 16, 1, 2, 1, 40, True)
    stages = hopper.of_stages("fwd", ["mma:Br=32:Bc=16", "exp2"])
    data, file = {"device": "one", "date": "2030-01-02", "rows": []}, tmp_path / "hopper.json"
    hopper.run([shape], {shape: stages}, FlashAttention3(), file, data, "cpu")
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["mma:Br=32:Bc=16", "exp2", "fa2", "cudnn", "fa3"]
    assert all(0 < rows[name]["difference"] < 0.01 and rows[name]["ms"] > 0 for name in stages)
    assert rows["cudnn"]["ms"] is None and rows["cudnn"]["message"]
    lines = hopper.table(data["rows"]).splitlines()
    assert len(lines) == 3 and "fwd bf16 d=16 causal B=1 H=2:1 N=40" in lines[2]
    best = min(row["ms"] for name, row in rows.items() if name in hopper.LABELS and row["ms"])
    assert f"{best / rows['exp2']['ms']:.3f}" in lines[2]
    assert hopper.kept(data, "one", [shape]) == [] and hopper.kept(data, "one", []) == data["rows"]
    with pytest.raises(SystemExit, match="has rows of one, and this is another"):
        hopper.kept(data, "another", [])
    x = torch.ones(3)
    assert hopper.difference((x, 2 * x), (x, x)) == pytest.approx(0.5**0.5)


def test_flash_attention_4_counts_by_its_ratio(tmp_path):
    """To FlashAttention-3, for the large shapes of that file: above 1 it sets the bar, below not."""
    base = {"direction": "fwd", "dtype": "fp16", "d": 64, "B": 8, "H": 32, "H_kv": 32, "N": 2048,
            "causal": False, "window": 0}
    rows = [base | {"case": case, "causal": causal, "name": name, "ms": ms, "tflops": 12 / ms}
            for case, causal in (("large", False), ("large", True), ("small", False))
            for name, ms in (("ours", 1.1), ("cudnn", 1.5), ("fa3", 1.2))]
    assert hopper.with_fa4(rows, tmp_path) == rows
    there = {"pass": "fwd", "d": 64, "B": 8, "N": 2048}
    (tmp_path / "fa4.json").write_text(json.dumps({"rows": [
        there | {"causal": False, "fa3": 4, "fa4": 5}, there | {"causal": True, "fa3": 4, "fa4": 3}]}))
    found = hopper.with_fa4(rows, tmp_path)
    added = [row for row in found if row["name"] == "fa4"]
    assert [(row["case"], row["causal"]) for row in added] == [("large", False), ("large", True)]
    assert [(row["ms"], row["tflops"]) for row in added] == [pytest.approx((0.96, 12.5)),
                                                            pytest.approx((1.6, 7.5))]
    ratios_of = [hopper.ratio(each, "ours") for each in hopper.by_shape(found).values()]
    assert ratios_of == pytest.approx([0.96 / 1.1, 1.2 / 1.1, 1.2 / 1.1])
    assert hopper.summary(found).splitlines() == [
        "| shapes | pass | d=64 | at 1 or above | median |", "|---|---|---:|---:|---:|",
        "| large | forward, fp16 | 0.87 to 1.09 | 1 of 2 | 0.98 |",
        "| small | forward, fp16 | 1.09 to 1.09 | 1 of 1 | 1.09 |"]


def test_a_round_on_a_gpu_is_made_of_scripts_that_are_there(tmp_path):
    """Each part is one of the repository's programs; one that is not there is refused."""
    script = flash.ROOT / "results" / "gpu_round.sh"
    programs = re.findall(r"\$python (?!-m)(\S+)", script.read_text())
    assert len(programs) > 6 and all((flash.ROOT / program).is_file() for program in programs)
    done = subprocess.run(["sh", script, tmp_path, "tests"], capture_output=True, text=True)
    assert done.returncode == 2 and "no part tests" in done.stderr


def test_hopper_refuses_bad_arguments(tmp_path, capsys):
    for wrong, words in ((["--cases", "tiny"], "no tiny; there are large"), (["--dims", "80"], "no 80"),
                         (["--stages", "mma"], "takes one pass")):
        with pytest.raises(SystemExit):
            hopper.main([str(tmp_path), *wrong])
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no stage 'nma'"):
        hopper.of_stages("fwd", ["nma"])


# ---------------------------------------------------------------------------------------- results/ratios.py
def test_shapes_of_ratios(tmp_path):
    """Each once, and bench.py takes its arguments."""
    all_of_them = list(ratios.shapes(list(flash.DTYPES)))
    assert len(all_of_them) == len(set(all_of_them)) == 2 * (2 * 2 * 3) + 2 * 2 * (3 * 2 * 3) + 2
    for shape in all_of_them:
        args = shape.arguments(tmp_path)
        (stage,), (N,) = args.stages, args.seqlens
        assert (args.direction, args.dtype, args.causal, N) == (
            shape.direction, shape.dtype, shape.causal, shape.N)
        assert args.batch * N == 16384 and args.H * args.head_dim == 2048 or shape.heads in ("12", "8:1")
        assert stage == flash.find_stage(None, flash.DTYPES[shape.dtype], torch.device("cpu"),
                                         stage.direction)
        assert args.peers == shape.peers.split(",")
    heads = {(s.heads, s.d, s.peers) for s in all_of_them if s.dtype == "bf16"}
    assert heads == {("32", 64, "flash"), ("16", 128, "flash"), ("8", 256, "flash"),
                     ("8:1", 256, "flash,math")}


def test_ratios_are_measured_and_kept(tmp_path, monkeypatch):
    """A row for the stage and the peer of each shape. Those of other types stay, on the same device."""
    file, cases = tmp_path / "ratios.json", {}
    for direction, dtype in (("fwd", "bf16"), ("bwd", "bf16"), ("fwd", "fp16")):
        shape = ratios.Shape(direction, dtype, 16, True, 1, "2:1", 32, "ampere_tuned", "math")
        cases[shape] = shape.arguments(tmp_path)
    built = []
    build = launch.build
    for module in (ahead, launch):
        monkeypatch.setattr(module, "build", lambda *call: built.append(build(*call)))
    ratios.build_all(list(cases.values()), ratios.Progress())
    for module in (ahead, launch):
        monkeypatch.setattr(module, "build", lambda *call: built.append(build(*call)) or built[-1])
    before = set(built)
    data = measuring.origin(next(iter(cases.values()))) | {
        "date": {"bf16": "2030-01-02", "fp16": "2030-01-03"}}
    ratios.run(cases, data | {"rows": []}, file)
    assert set(built) == before and len(before) == 3  # what is built ahead is what is run
    data = json.loads(file.read_text())
    assert [(row["pass"], row["dtype"], row["name"]) for row in data["rows"]] == [
        (s.direction, s.dtype, name) for s in cases for name in ("ampere_tuned", "math")]
    assert all(row["status"] == "ok" and row["error"] <= row["allowed_error"] and row["median_ms"] > 0
               and (row["H"], row["H_kv"], row["N"]) == (2, 1, 32) for row in data["rows"])
    left = ratios.kept(file, ["bf16", "fp32"], data)
    assert left["date"] == {"fp16": "2030-01-03"} and left["rows"] == data["rows"][4:]
    assert ratios.kept(file, list(flash.DTYPES), {})["rows"] == []
    assert ratios.kept(tmp_path / "none.json", ["bf16"], {})["rows"] == []
    with pytest.raises(SystemExit, match="has rows of fp16, measured on CPU, in the simulator"):
        ratios.kept(file, ["bf16"], data | {"device": "another"})


def test_middle_turn():
    rows = [{"status": "ok", "median_ms": ms} for ms in (3.0, 1.0, 2.0)]
    assert ratios.middle(tuple(rows)) is rows[2]
    wrong = {"status": "wrong", "median_ms": None}
    assert ratios.middle((rows[0], wrong, rows[1])) is wrong


def test_ratios_need_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        ratios.main([str(tmp_path)])
    for wrong, why in (([str(tmp_path / "none")], "there is no folder"),
                       ([str(tmp_path), "--dtypes", "fp8"], "no fp8; there are fp32")):
        with pytest.raises(SystemExit):
            ratios.main(wrong)
        assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- results/dropout.py
def test_dropout_is_compared_with_what_a_call_without_takes(tmp_path, monkeypatch):
    """Also if that stage takes no dropout. What is built ahead is what is run, and the table names both."""
    for module, name, value in ((dropout_results, "N", 32), (ratios, "TURNS", 1),
                                (dropout_results, "SHAPES", {"bf16": (1, {16: 1})})):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(dropout_results, "stage_of",
                        lambda direction, *call: "ampere_tuned" if call[-1] or direction == "fwd" else "mma")
    attention, called = flash.attention, set()

    def watched(*tensors, stage, backward=None, dropout_p, **options):
        called.add(((backward or stage).name, dropout_p))
        return attention(*tensors, stage=stage, backward=backward, dropout_p=dropout_p, **options)

    monkeypatch.setattr(flash, "attention", watched)
    built, build = [], launch.build
    for module in (ahead, launch):
        monkeypatch.setattr(module, "build", lambda *call: built.append(build(*call)) or built[-1])
    rows = []
    for shape in dropout_results.shapes():
        stages, args = shape.stage.split(","), dataclasses.replace(shape, peers="math").arguments(tmp_path)
        ahead.build_all(dropout_results.builds(args))
        before = set(built)
        called.clear()
        found = dropout_results.measured(args, stages)
        assert set(built) == before and min(found.values()) > 0
        assert called == {("ampere_tuned" if shape.direction == "fwd" else "mma", 0.0), ("ampere_tuned", 0.1)}
        rows.append({"pass": shape.direction, "dtype": "bf16", "d": 16, "causal": shape.causal,
                     "stage": stages[0], "stage_without": stages[-1]} | found)
    data = {"rows": rows, "p": 0.1, "N": 32, "device": "a GPU", "date": "2030-01-02"}
    table = dropout_results.table(data)
    assert "dropout_p = 0.1 over that of ampere_tuned, mma without it, N=32" in table
    ratio = rows[2]["stage_dropout_ms"] / rows[2]["stage_ms"]
    assert table.splitlines()[2].startswith("| bf16, 16 | none | ") and f" | {ratio:.2f} | " in table
    for row in rows:
        del row["stage_without"]                      # measured before: of one stage
    assert "dropout_p = 0.1 over that without it, N=32" in dropout_results.table(data)


def test_dropout_is_of_the_stages_that_calls_take(monkeypatch):
    """On a GPU that does not have to be there."""
    monkeypatch.setattr(flash, "default_device", lambda: test_contract.gpu(monkeypatch, (9, 0)))
    taken = {(s.direction, s.d, s.causal): s.stage for s in dropout_results.shapes() if s.dtype == "bf16"}
    assert taken["bwd", 256, True] == taken["bwd", 256, False] == "exchanged_tuned"
    assert taken["fwd", 64, True] == taken["fwd", 64, False] == "row_by_row"


# ---------------------------------------------------------------------------------------- files of one's own
def copy_of(stage, direction, file):
    """A stage with a header of its own, in a file."""
    text, = (s.path.read_text() for s in flash.stages(direction) if s.name == stage)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text.split("\n", 1)[1])  # without the first line, which says for which pass it is
    return str(file)


@pytest.mark.usefixtures("no_plots")
def test_files_beside_stages(tmp_path, capsys):
    """Each pass takes the files that are for it, by their parameters; a file may be called as a stage is."""
    forward = copy_of("flash2", "fwd", tmp_path / "flash2.cuh")
    backward = copy_of("recompute", "bwd", tmp_path / "mine.cuh")
    assert modes.main([*TINY, "--out", str(tmp_path), "--pass", "fwd,bwd", "--seqlens", "32", "--peers",
                       "none", "--stages", f"{backward},flash2,{forward}"]) == 0
    shown = capsys.readouterr().out
    labels = {file.stem: [(row["label"], row["status"]) for row in json.loads(file.read_text())["results"]]
              for file in tmp_path.glob("*.json")}
    assert labels == {"bench_fwd": [("flash2", "ok"), ("flash2.cuh", "ok")],
                      "bench_bwd": [("mine.cuh", "ok")]}
    assert "flash2.cuh" in shown and "mine.cuh" in shown


def test_files_by_mode(tmp_path, monkeypatch, capsys):
    """A path has a slash, or ends in .cuh. With fwd+bwd, a file runs after its parent's forward stage."""
    file = copy_of("recompute", "bwd", tmp_path / "mine.cuh")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    plain = copy_of("flash2", "fwd", tmp_path / "mine" / "plain")
    for arguments in (["--stages", "mine.cuh"], ["--inspect", "mine.cuh"], ["--sweep", file]):
        args = parse("--pass", "bwd", *arguments)
        assert [(stage.name, stage.direction) for stage in args.stages] == [("mine", "bwd")]
    assert [stage.name for stage in parse("--stages", "naive,mine/plain").stages] == ["naive", "plain"]
    assert len(parse("--stages", f"mine/plain,{plain},flash2").stages) == 2  # it is one file
    own = tmp_path / "mine.cuh"
    own.write_text(own.read_text().replace("after:   naive", "after:   recompute"))
    both = parse("--pass", "fwd+bwd", "--stages", "mine.cuh")
    assert competitors.of_stage(*both.stages, both).label == "flash2 + mine.cuh"
    (tmp_path / "mine" / "mine.cuh").write_text(own.read_text())
    with pytest.raises(SystemExit):
        parse("--stages", "mine.cuh,mine/mine.cuh", "--pass", "bwd")
    assert "two files are called mine.cuh" in capsys.readouterr().err
