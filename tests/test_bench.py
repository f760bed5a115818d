"""bench.py in the simulator, at tiny shapes: what it writes, and what it does with a stage that fails."""

import json
import math

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
    for plot in ("time", "memory", "tflops"):
        png = tmp_path / f"bench_fwd_{plot}.png"
        assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
        assert str(png) in shown


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


def test_interrupted(tmp_path, capsys, tamper):
    tamper("tiled", lambda o: raise_(KeyboardInterrupt()) if o.shape[2] == 64 else o)
    status, data = run(tmp_path, "--seqlens", "32,64", "--stages", "naive,tiled")
    assert status == 130 and data["interrupted"]
    measured = [(row["name"], row["N"]) for row in data["results"]]
    assert measured == [("naive", 32), ("tiled", 32), ("math", 32), ("naive", 64)]
    assert "Interrupted" in capsys.readouterr().err


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
])
def test_bad_arguments(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(flash.ROOT)
    monkeypatch.setattr(flash, "build", lambda *_, **__: pytest.fail("it built something"))
    with pytest.raises(SystemExit) as exit_:
        bench.main(arguments.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_markdown(tmp_path, capsys):
    _, data = run(tmp_path, "--seqlens", "32,64", "--stages", "naive,tiled")
    file = str(tmp_path / "bench_fwd.json")
    capsys.readouterr()
    assert bench.main(["--markdown", file, "--seqlens", "32"]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == bench.results_table(data, 32).strip()
    header, rule, naive, tiled, math_, empty, origin = printed.strip().split("\n")
    assert [cell.strip() for cell in header.strip("|").split("|")] == list(bench.COLUMNS)
    assert len({line.count("|") for line in (header, rule, naive, tiled, math_)}) == 1
    assert (naive + tiled).count("**") == 2 * len(bench.COLUMNS) and "**" not in math_  # one stage is fastest
    assert "N=32" in origin and data["device"] in origin and data["note"] in origin
    assert bench.main(["--markdown", file]) == 0
    assert "N=64" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--markdown", file, "--seqlens", "128"])
    assert "it has 32, 64" in capsys.readouterr().err


def test_numbers():
    numbers = [bench.number(x) for x in (None, 0.000123456, 1.5, 999.4, 12345.6)]
    assert numbers == ["-", "0.000123", "1.50", "999", "12,346"]
    sizes = [bench.size(n) for n in (None, 0, 1536, 3 * 2**30)]
    assert sizes == ["-", "0 B", "1.50 KiB", "3.00 GiB"]
