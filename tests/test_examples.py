"""The examples, at their smallest; and what train_gpt.py promises: the same curve after an interruption, a
table that agrees, errors that help."""

import functools
import importlib.util
import io
import json
import re
import sys

import pytest

pytest.importorskip("transformers", minversion="5.17")

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import flash  # noqa: E402
import flash_ladder.transformers  # noqa: E402

EXAMPLES = flash.ROOT / "examples"
SMALL = ["--seq-len", "32", "--batch", "2"]


def load(name: str):
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_gpt():
    return load("train_gpt")


def test_nano_gpt(capsys):
    """It learns: a byte at random costs log(256) = 5.5 nats."""
    assert len((EXAMPLES / "nano_gpt.py").read_text().splitlines()) <= 150
    module = load("nano_gpt")
    small = ["--batch", "4", "--context", "32", "--width", "32", "--layers", "1"]
    assert module.main(["--steps", "60", "--sample", "5", *small]) < 4.2
    printed = capsys.readouterr().out
    assert "step    60" in printed and "__device__" in printed
    with pytest.raises(SystemExit):
        module.main(["--width", "36"])
    assert "multiple of 8" in capsys.readouterr().err


def test_nano_gpt_sees_no_later_byte():
    module = load("nano_gpt")
    model = module.GPT(1, 32, 2, 16)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :10], b[:, :10]) and not torch.equal(a[:, 10:], b[:, 10:])


def test_huggingface(capsys):
    """Greedy tokens are eager's, with both caches; a prompt does not depend on what it is padded to."""
    module = load("huggingface")
    small = ["--tokens", "4", "--prompts", "for (int", "if"]
    found = module.main(small)
    for arguments in (["--attention", "eager"], ["--cache", "static"]):
        assert torch.equal(found, module.main([*small, *arguments]))
    assert torch.equal(found[1, 6:], module.main(["--tokens", "4", "--prompts", "if"])[0])
    with pytest.raises(SystemExit):
        module.main(["--weights", "/nowhere"])
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("model, options", [("gpt2", ["--dropout", "0.1"]), ("llama", ["--checkpointing"])])
def test_resume(train_gpt, tmp_path, model, options):
    """The same curve and weights, bit by bit, as without an interruption."""
    def run(folder, *arguments):
        out = tmp_path / folder
        (result,) = train_gpt.main(["--model", model, *SMALL, *options, "--out", str(out), *arguments])
        return result.losses, torch.load(next(out.glob("*.pt")), weights_only=True)["model"]

    whole, weights = run("whole", "--steps", "5", "--save-every", "5")
    assert run("parts", "--steps", "3", "--save-every", "2")[0] == whole[:3]
    again, same = run("parts", "--steps", "5", "--save-every", "5", "--resume")
    assert again == whole and len(set(whole)) == 5
    assert all(torch.equal(x, same[name]) for name, x in weights.items())


def test_resume_refuses_another_run(train_gpt, tmp_path, capsys):
    def refused(*arguments) -> str:
        with pytest.raises(SystemExit):
            train_gpt.main([*SMALL, "--out", str(tmp_path), *arguments])
        return capsys.readouterr().err

    assert "--save-every" in refused("--resume")
    train_gpt.main([*SMALL, "--out", str(tmp_path), "--steps", "1", "--save-every", "1"])
    assert re.search(r"lr 0\.0003, not 0\.1", refused("--resume", "--lr", "0.1"))
    assert "1 steps already" in refused("--resume", "--steps", "1")


@pytest.mark.parametrize("model, dtype", [("gpt2", "fp32"), ("llama", "bf16")])
def test_all(train_gpt, tmp_path, capsys, monkeypatch, model, dtype):
    """The table; the JSON file has the same figures. flash.attention is called, once a layer and step."""
    calls = []
    monkeypatch.setattr(flash_ladder.transformers, "attention",
                        lambda *tensors, **options: calls.append(1) or flash.attention(*tensors, **options))
    results = train_gpt.main(["--model", model, "--dtype", dtype, "--attention", "all", "--spread", "2",
                              *SMALL, "--steps", "12", "--lr", "0.003", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    eager, sdpa, ours = results
    assert [each.attention for each in results] == ["eager", "sdpa", "flash"]
    assert len(calls) == 2 * 12 and eager.losses[0] > eager.final_loss + 0.3
    for each in (sdpa, ours):
        assert abs(each.final_loss / eager.final_loss - 1) < (1e-5 if dtype == "fp32" else 2e-3)
    kept = json.loads((tmp_path / f"{model}_tiny_{dtype}_all.json").read_text())
    assert [row["final_loss"] for row in kept["results"]] == [each.final_loss for each in results]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept["date"]) and re.fullmatch("[0-9a-f]{8}", kept["corpus"])
    d, heads = (32, 2) if model == "gpt2" else (16, 4)
    q, k, v = torch.randn(3, 2, heads, 32, d, dtype=flash.DTYPES[dtype], requires_grad=True)
    takes = flash.explain(q, k, v, causal=True)
    assert [row["stages"] for row in kept["results"]] == [
        {}, {}, {"fwd": takes.forward.stage.name, "bwd": takes.backward.stage.name}]
    assert kept["spread_percent"] > 0 and f"are {kept['spread_percent']:.2f} % apart" in printed
    assert f"{ours.final_loss:.4f}" in printed and "all are" in printed
    assert (tmp_path / f"{model}_tiny_{dtype}_all.png").stat().st_size > 5000


def test_results_of_models(train_gpt, tmp_path, monkeypatch):
    """results/models.py, tiny and on the CPU: a row for each run, and what the table says of it."""
    monkeypatch.setattr(sys, "path", [str(flash.ROOT / "results"), *sys.path])
    import models

    file, data = tmp_path / "backends.json", {"device": "a CPU", "date": "2026-11-28", "rows": []}
    monkeypatch.setattr(models, "RUNS", (("gpt2", "tiny", 2, 32, 4), ("llama", "tiny", 1, 32, 2)))
    monkeypatch.setattr(models, "BACKENDS", (None, "flash", "math", None))
    models.measure(data, file)
    rows = json.loads(file.read_text())["rows"]
    assert rows == data["rows"] and [row["backend"] for row in rows] == [None, "flash", "math", None] * 2
    assert rows[0]["stages"] == {"fwd": "ampere_tuned", "bwd": "ampere_tuned"} and rows[1]["stages"] == {}
    for row in rows:
        row["tokens_per_s"], row["loss"], row["peak"] = (
            (300.0, 2.0, 11) if row["backend"] is None else (200.0, 1.9, 10))
    rows[3]["tokens_per_s"], rows[3]["loss"] = 500.0, 2.2
    file.write_text(json.dumps(data | {"rows": rows}))
    table = models.backends(file).splitlines()
    assert table[2] == "| gpt2 tiny, B=2 T=32 | 300 and 500 | 200 | 200 | 2.000 | 1.1000 |"
    assert all(words in table[-1] for words in ("4 steps of gpt2, 2 steps of llama", "15.79 %", "9.09 %",
                                                    "flash.attention took ampere_tuned."))
    monkeypatch.setattr(models, "BACKENDS", ("cudnn",))
    with pytest.raises(SystemExit, match="gpt2 tiny, B=2 T=32, SDPA, cuDNN: refused by"):
        models.measure(data, file)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        models.main([str(tmp_path)])


def test_verdict(train_gpt):
    """A loss that is too far from eager's is named; a run without memory is a row."""
    from gpt.comparison import spread_of, table_of, verdict
    from gpt.training import Result

    eager, near, far = (Result(name, [loss], 10.0, 100) for name, loss in
                        (("eager", 2.0), ("sdpa", 2.003), ("flash", 2.01)))
    assert "all are" in verdict([eager, near], None)
    assert "further apart: flash, by 0.500 %" in verdict([eager, near, far], 0.3)
    assert "all are" in verdict([eager, far], 0.6)
    assert verdict([Result("eager", error="out of memory"), near], None) is None
    assert spread_of([eager, far]) == pytest.approx(100 * 0.01 / 2.005)
    assert table_of([Result("eager", error="out of memory"), near], "").row_count == 2


def test_weights_and_stages_by_name(train_gpt, tmp_path, capsys):
    """A run begins with the weights of a folder; other weights, another first loss."""
    from gpt.models import build

    torch.manual_seed(5)
    model = build("gpt2", "tiny", "eager", 64)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(2)
    model.save_pretrained(tmp_path / "weights")
    run, given = [*SMALL, "--steps", "1", "--out", str(tmp_path)], ["--weights", str(tmp_path / "weights")]
    ours, eager, others = (train_gpt.main([*run, *more])[0].losses[0] for more in (
        [*given, "--stage", "flash2", "--backward", "recompute"], [*given, "--attention", "eager"], []))
    assert ours == pytest.approx(eager, rel=1e-5) and abs(ours - others) > 1e-3
    with pytest.raises(SystemExit):
        train_gpt.main([*run, *given, "--seq-len", "2000"])
    assert "has 1024 positions" in capsys.readouterr().err


def test_a_backend_that_refuses(train_gpt, tmp_path, capsys):
    """PyTorch has no memory-efficient kernel for the CPU: a row says so, and the others are there."""
    if torch.cuda.is_available():
        pytest.skip("it has one for a GPU")
    eager, sdpa, ours = train_gpt.main([*SMALL, "--attention", "all", "--backend", "efficient",
                                        "--steps", "1", "--out", str(tmp_path)])
    assert sdpa.error == "refused by --backend efficient" and sdpa.final_loss is None
    assert eager.final_loss == pytest.approx(ours.final_loss, rel=1e-5)
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (["--size", "1b"], "gpt2 comes in tiny and 124m"),
    (["--stage", "flash2", "--attention", "eager"], "--stage goes with --attention flash"),
    (["--backend", "math"], "--backend goes with --attention sdpa"),
    (["--stage", "no_such"], "no_such"),
    (["--resume", "--attention", "all"], "name its --attention"),
    (["--steps", "0"], "--steps must be at least 1"),
    (["--dropout", "1"], "--dropout must be"),
    (["--weights", "/nowhere"], "config.json"),
])
def test_arguments_that_do_not_fit(train_gpt, capsys, arguments, message):
    with pytest.raises(SystemExit):
        train_gpt.main(arguments)
    assert message in capsys.readouterr().err


def test_the_real_shapes(train_gpt):
    """Parameters of GPT-2 and Llama 3.2 1B, counted without memory for them."""
    from gpt.models import build

    for model, size, count in (("gpt2", "124m", 124_439_808), ("llama", "1b", 1_235_814_400)):
        with torch.device("meta"):
            made = build(model, size, "eager", 1024)
        assert sum(x.numel() for x in made.parameters()) == count


class Reads(TorchDispatchMode):
    """How often a value is read from a tensor. On a GPU the host waits for each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("model, options", [("gpt2", {"dropout": 0.1}), ("llama", {"checkpointing": True})])
def test_the_host_does_not_wait(train_gpt, monkeypatch, model, options):
    """The losses are read at the end alone; a progress bar reads that of the first step and the last, too."""
    from gpt.training import Settings, train

    monkeypatch.setattr(torch.optim, "AdamW",  # which on the CPU reads its own counters
                        lambda parameters, lr, **others: torch.optim.SGD(parameters, lr))
    settings = Settings(model, "tiny", "flash", batch=2, seq_len=32, **options)
    for terminal, shown in ((False, 0), (True, 2)):
        with Reads() as reads:
            result = train(settings, 4, console=Console(file=io.StringIO(), force_terminal=terminal))
        assert reads.count == len(result.losses) + shown


@pytest.mark.slow
def test_compiled(train_gpt, tmp_path, monkeypatch):
    """fullgraph=True refuses a graph break. The curve is eager mode's. (Not by inductor, which compiles for
    minutes: test_autograd.py has that.)"""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    run = [*SMALL, "--steps", "3", "--out", str(tmp_path)]
    compiled, eager = (train_gpt.main([*run, *more])[0].losses for more in (["--compile"], []))
    assert compiled == pytest.approx(eager, rel=1e-4)
