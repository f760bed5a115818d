"""attention() in PyTorch's hands: autograd, torch.compile, checkpoints, autocast; and which backward stage it
takes.

That the stages' gradients are right, shape by shape, is test_backward.py's.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch
from conftest import check_gradients, is_end, poisoned, random_gradients, random_qkv
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flash
from flash_ladder import attention, checks, launch, operators, plan, registry


def pairs_of(dtype) -> list:
    """Of a type: each forward and each backward stage at least once; in the middle of a branch of one type,
    that of most tests, so that it builds nothing."""
    fwd, bwd = ([s.name for s in flash.stages(direction) if dtype in s.dtypes[:None if is_end(s) else 1]]
                for direction in ("fwd", "bwd"))
    return [(fwd[i % len(fwd)], bwd[i % len(bwd)], dtype) for i in range(max(len(fwd), len(bwd)))]


PAIRS = [pytest.param(*pair, id="-".join(map(str, pair)).replace("torch.", ""))
         for dtype in flash.DTYPES.values() for pair in pairs_of(dtype)]
STAGES = {"stage": "flash2", "backward": "naive"}  # of all tests of one shape: so they build once
# Of an operator: no diagonal, mask, dropout, sink or sequences
ALL_PAIRS = None, None, [], [], [], 0.0, None, None, None, None


def leaves(device="cpu", needed="qkv", d=16, dtype=torch.float32):
    """q, k, v (GQA; the first 3 rows see no key, if causal); those in `needed` require gradients."""
    tensors = random_qkv(1, 4, 2, 23, 20, d, device, dtype)
    return [x.requires_grad_(name in needed) for name, x in zip("qkv", tensors)]


def own_file(folder, direction, *fields, name="mine.cuh"):
    """A stage of one's own that cannot be built, with these fields in its header."""
    file = folder / name
    header = [f"{direction} stage 1: mine", *fields]
    file.write_text("".join(f"// {line}\n" for line in header) + "#error\n")
    return file


def plans(monkeypatch) -> list[tuple]:
    """Those that calls take from now on: direction, tiles, whether there is a mask."""
    taken, plan_for = [], plan.plan_for

    def noting(stage, tiles, deterministic, diagonal, *rest):
        taken.append((stage.direction, tiles, diagonal is not None))
        return plan_for(stage, tiles, deterministic, diagonal, *rest)
    for module in (plan, attention):
        monkeypatch.setattr(module, "plan_for", noting)
    return taken


@pytest.fixture
def nothing_is_built(monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(launch, "build", lambda *_, **__: pytest.fail("built something before the error"))


# ------------------------------------------------------------------------------------------ gradients
@pytest.mark.parametrize("stage, backward, dtype", PAIRS)
def test_gradients(stage, backward, dtype, device):
    """Of a loss of both o and L, through each stage of either ladder. With a d for which test_forward.py and
    test_backward.py build each."""
    q, k, v = leaves(device, d=40, dtype=dtype)
    do, dlse = random_gradients(q)
    dlse = dlse.float()
    with poisoned():
        o, lse = flash.attention(q, k, v, causal=True, scale=0.3, stage=stage, backward=backward,
                                 return_lse=True)
        gradients = torch.autograd.grad([o, lse], [q, k, v], [do, dlse])
    check_gradients(gradients, *(x.detach() for x in (q, k, v)), do, -3, 0.3, dlse)
    assert all(x.stride() == y.stride() for x, y in zip(gradients, (q, k, v)))


def test_scaled_dot_product_attentions_gradients(device):
    q, k, v = leaves(device)
    do, _ = random_gradients(q)
    o = flash.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, **STAGES)
    check_gradients(torch.autograd.grad(o, [q, k, v], do), *(x.detach() for x in (q, k, v)), do, 0)


@pytest.mark.parametrize("needed", ["q", "k", "v", "qk", "kv"])
def test_only_some_need_gradients(needed):
    """Keys that come from elsewhere, detached; a query that is a constant."""
    everything, some = leaves(), leaves(needed=needed)
    expected = flash.attention(*everything, **STAGES)
    o = flash.attention(*some, **STAGES)
    do, _ = random_gradients(o)
    expected.backward(do)
    o.backward(do)
    for name, x, y in zip("qkv", some, everything):
        assert (x.grad is not None) == (name in needed)
        assert x.grad is None or torch.equal(x.grad, y.grad)


def test_only_one_output_is_used():
    """The loss depends on o alone, or on L alone: the other's gradient is None, not garbage."""
    q, k, v = leaves()
    do, dlse = random_gradients(q)
    plain = [x.detach() for x in (q, k, v)]
    for used, arguments in ((0, (do, None, None, None)), (1, (torch.zeros_like(do), None, None, dlse))):
        with poisoned():
            output = flash.attention(q, k, v, return_lse=True, **STAGES)[used]
            gradients = torch.autograd.grad(output, [q, k, v], (do, dlse)[used])
        check_gradients(gradients, *plain, *arguments)


OTHER_STRIDES = {
    "columns apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "rows apart": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "misaligned": lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("what", OTHER_STRIDES)
def test_gradients_with_other_strides(what, monkeypatch):
    """A dO that attention would refuse as q, and rows of dL apart: the kernel gets copies. Of others not."""
    q, k, v = leaves()
    do, dlse = random_gradients(q)
    o, lse = flash.attention(q, k, v, return_lse=True, **STAGES)
    expected = torch.autograd.grad([o, lse], [q, k, v], [do, dlse], retain_graph=True)
    other, apart = OTHER_STRIDES[what](do), dlse.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError):
        checks.check_tensors(other, k, v)
    given, run = {}, plan.run
    monkeypatch.setattr(plan, "run", lambda of, tensors: given.update(tensors) or run(of, tensors))
    gradients = torch.autograd.grad([o, lse], [q, k, v], [other, apart], retain_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected))
    checks.check_tensors(given["dO"], k, v)
    torch.autograd.grad([o, lse], [q, k, v], [do, dlse])
    assert given["dO"].data_ptr() == do.data_ptr() and given["dL"].data_ptr() == dlse.data_ptr()


def test_gradient_of_a_sum():
    """Its dO has strides of 0 alone; one that is the same for all heads has a single one."""
    q, k, v = leaves()
    do = random_gradients(q)[0][:, :1].expand(q.shape)
    for expanded in (torch.ones(()).expand(q.shape), do):
        gradients = torch.autograd.grad(flash.attention(q, k, v, **STAGES), [q, k, v], expanded)
        check_gradients(gradients, *(x.detach() for x in (q, k, v)), expanded.clone())


def test_gradients_add_up():
    """In .grad, over two backward passes of one graph."""
    q, k, v = leaves()
    o = flash.attention(q, k, v, **STAGES)
    do, _ = random_gradients(o)
    o.backward(do, retain_graph=True)
    once = [x.grad.clone() for x in (q, k, v)]
    o.backward(do)
    assert all(torch.equal(x.grad, 2 * y) for x, y in zip((q, k, v), once))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        o.backward(do)


def test_a_changed_input_is_noticed():
    q, k, v = leaves(needed="qk")
    o = flash.attention(q, k, v, **STAGES)
    v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_nothing_is_kept_without_gradients(monkeypatch):
    """Neither a graph nor a backward stage: there may be none for this machine."""
    q, k, v = leaves()
    monkeypatch.setattr(plan, "find_stage", lambda *args: pytest.fail("looked for a backward stage")
                        if "bwd" in args else registry.find_stage(*args))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert all(not x.requires_grad for x in flash.attention(q, k, v, return_lse=True))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        assert flash.attention(q.detach(), k.detach(), v.detach()).grad_fn is None
    assert not saved


def test_what_is_kept():
    """q, k, v, o and L, and none of them copied."""
    q, k, v = leaves()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o, lse = flash.attention(q, k, v, return_lse=True, **STAGES)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (q, k, v, o, lse)}


def test_no_second_derivative():
    """A first one with create_graph is right; what would need a second one raises."""
    q, k, v = leaves()
    o = flash.attention(q, k, v, **STAGES)
    do, _ = random_gradients(o)
    dq, = torch.autograd.grad(o, q, do, retain_graph=True)
    dq_again, = torch.autograd.grad(o, q, do, create_graph=True)
    assert torch.equal(dq, dq_again) and dq_again.requires_grad
    with pytest.raises(RuntimeError, match=r"no second derivative: .*SDPBackend.MATH"):
        dq_again.square().sum().backward()


def test_no_forward_over_reverse():
    """A dO with a tangent, as in a Hessian times a vector: refused, not lost."""
    q, k, v = leaves()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="^dO has a tangent"):
        do, tangent = random_gradients(q)[0], random_gradients(q)[0]
        torch.autograd.grad(flash.attention(q, k, v, **STAGES), q, forward_ad.make_dual(do, tangent))


def test_no_forward_mode_derivative():
    q, k, v = (x.detach() for x in leaves())
    with forward_ad.dual_level(), pytest.raises(ValueError, match="^k has a tangent, .*primal"):
        flash.attention(q, forward_ad.make_dual(k, k), v)
    o, lse = flash.attention(q, k, v, return_lse=True, **STAGES)
    do, dlse = random_gradients(q)
    for i, name in enumerate(("o", "L", "dO", "dL")):
        with forward_ad.dual_level(), pytest.raises(ValueError, match=f"^{name} has a tangent, .*primal"):
            given = [forward_ad.make_dual(x, x) if i == j else x for j, x in enumerate((o, lse, do, dlse))]
            torch.ops.flash.backward(q, k, v, *given, *ALL_PAIRS, None, None, False, None, None, [], [])
    with pytest.raises(ValueError, match="does not take part in torch.func's transforms"):
        torch.func.grad(lambda q: flash.attention(q, k, v).sum())(q)


# ------------------------------------------------------------------------------------------ which stage
@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("options, message", [
    ({"backward": "naiv"},
     r"^backward: there is no backward stage 'naiv'; there are naive, .*Did you mean 'naive'\?"),
    ({"backward": "flash2"}, r"^backward: there is no .*It is a forward stage: pass it as stage=\."),
    ({"backward": flash.STAGES / "fwd_01_naive.cuh"},
     r"^backward: fwd_01_naive.cuh is a forward stage: pass it as stage="),
    ({"stage": flash.STAGES / "bwd_01_naive.cuh"},
     r"^stage: bwd_01_naive.cuh is a backward stage: pass it as backward="),
    ({"backward": flash.ROOT / "none.cuh"}, r"^backward: .*none.cuh is no file"),
    ({"backward": 2}, r"^backward must be a name, a pathlib.Path or a Stage, not int"),
    ({"Br_bwd": 0}, r"^Br_bwd must be an integer from 1 to 1024, not 0"),
    ({"Bq_bwd": 8}, r"^Bq_bwd: attention\(\) has no such argument; tile sizes are Br, Bc, Br_bwd, Bc_bwd"),
    ({"backward": "naive", "Br_bwd": 64, "Bc_bwd": 64},
     r"^backward stage 'naive' needs Br \* Bc <= 1024, and got Br=64, Bc=64; Br_bwd=\d+, Bc_bwd=\d+ would"),
    ({"deterministic": "yes"}, r"^deterministic must be True or False, not 'yes'"),
])
def test_bad_options(options, message):
    """At the call, not in backward(); also where no gradient is needed."""
    for needed in ("v", ""):
        with pytest.raises(ValueError) as caught:
            flash.attention(*leaves(needed=needed), **options)
        assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.usefixtures("nothing_is_built")
def test_a_backward_stage_that_cannot_run_here(monkeypatch, tmp_path):
    """It is refused at the call if a gradient is needed, else not even looked at."""
    monkeypatch.setattr(registry, "STAGES", tmp_path)
    (tmp_path / "fwd_01_mine.cuh").write_text((flash.STAGES / "fwd_01_naive.cuh").read_text())
    own_file(tmp_path, "Backward", "needs: sm_90a", name="bwd_01_mine.cuh")
    monkeypatch.setattr(flash.Stage, "available", lambda self, *_: flash.Available(
        "needs sm_90a" * (self.needs == "sm_90a")))
    monkeypatch.setattr(attention, "plan_for", lambda *_: None)
    monkeypatch.setattr(operators.Call, "run", lambda *_: ("o", "L"))
    assert flash.attention(*leaves(needed="")) == "o"
    with pytest.raises(RuntimeError, match="^backward stage 'mine' cannot run on cpu: needs sm_90a"):
        flash.attention(*leaves(needed="k"))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_best_that_fits(direction, monkeypatch, tmp_path):
    """A GPU with little shared memory gets an earlier stage for a large d; a name stays refused."""
    monkeypatch.setattr(registry, "STAGES", tmp_path)
    for i, (name, size) in enumerate([("small", "d"), ("large", "100 * d")], 1):
        title = {"fwd": "Forward", "bwd": "Backward"}[direction]
        (tmp_path / f"{direction}_0{i}.cuh").write_text(f"// {title} stage {i}: {name}\n// shared: {size}\n")
    for module in (plan, registry):
        monkeypatch.setattr(module, "shared_memory_per_block", lambda device: 6400)
    taken = {d: plan.choose(None, torch.zeros(1, 1, 1, d), direction)[0].name for d in (64, 72)}
    assert taken == {64: "large", 72: "small"}
    with pytest.raises(ValueError, match="stage 'large' with .* needs 7200 bytes .* no tile sizes fit"):
        plan.choose("large", torch.zeros(1, 1, 1, 72), direction)


def test_a_file_of_ones_own(tmp_path, device):
    """As a Path or a Stage, with a title or without."""
    q, k, v = leaves(device)
    do, _ = random_gradients(q)
    expected = torch.autograd.grad(flash.attention(q, k, v, **STAGES), [q, k, v], do)
    text = (flash.STAGES / "bwd_01_naive.cuh").read_text()
    mine, untitled = tmp_path / "mine.cuh", tmp_path / "untitled.cuh"
    mine.write_text(text.replace("p.scale * dq;", "3.f * p.scale * dq;"))
    untitled.write_text(text.partition("\n")[2])
    assert flash.read_stage(mine).direction == "bwd" and flash.read_stage(untitled, "bwd").direction == "bwd"
    for backward, factor in ((mine, 3), (untitled, 1), (flash.read_stage(mine), 3)):
        o = flash.attention(q, k, v, stage="flash2", backward=backward)
        dq, dk, dv = torch.autograd.grad(o, [q, k, v], do)
        torch.testing.assert_close(dq, factor * expected[0])
        assert torch.equal(dk, expected[1]) and torch.equal(dv, expected[2])


def test_errors_of_the_kernel_name_the_stage(tmp_path):
    q, k, v = leaves()
    mine = tmp_path / "mine.cuh"
    text = (flash.STAGES / "bwd_01_naive.cuh").read_text()
    mine.write_text(text.replace("const dim3 threads(Bc, Br);", "const dim3 threads(2048, Br);"))
    o = flash.attention(q, k, v, stage="flash2", backward=mine)
    with pytest.raises(RuntimeError, match="^backward stage 'mine': .*1024"):
        o.sum().backward()


def test_tiles_of_either_pass(monkeypatch):
    """Br and Bc are the forward stage's, Br_bwd and Bc_bwd the other's."""
    built = plans(monkeypatch)
    flash.attention(*leaves(), **STAGES, Br=32, Bc=32, Br_bwd=8, Bc_bwd=16).sum().backward()
    assert built == [("fwd", {"Br": 32, "Bc": 32}, False), ("bwd", {"Br": 8, "Bc": 16}, False)]


def test_registry():
    bwd = flash.stages("bwd")
    assert flash.stages() == flash.stages("fwd") + bwd
    with pytest.raises(ValueError, match="direction must be fwd, bwd or None, not 'backward'"):
        flash.stages("backward")
    assert [s.number for s in bwd] == list(range(1, len(bwd) + 1)) and bwd[0].name == "naive"
    for s in bwd:
        assert s.direction == "bwd" and s.path.name == f"bwd_{s.number:02}_{s.name}.cuh"
        assert s.idea and s.dtypes
        assert s.path.read_text().startswith(f"// Backward stage {s.number}: {s.name}\n")


def test_formula_for_grouped_heads(tmp_path):
    stage = flash.read_stage(own_file(tmp_path, "Backward", "hbm: B * H + 100 * H_kv"))
    assert stage.hbm_bytes(2, 4, 8, 8, 64, Br=32, Bc=32, H_kv=1) == 108
    assert stage.hbm_bytes(2, 4, 8, 8, 64, Br=32, Bc=32) == 408


# ------------------------------------------------------------------------------------------ determinism
def test_header_says_what_is_deterministic(tmp_path):
    for text, always, on_request in [("yes", True, False), ("no", False, False), ("on request", False, True)]:
        file = own_file(tmp_path, "Backward", f"deterministic: {text}", name=f"{always}{on_request}.cuh")
        stage = flash.read_stage(file)
        assert (stage.deterministic, stage.deterministic_on_request) == (always, on_request)
        assert stage.can_be_deterministic == (always or on_request)
        for wanted in (False, True):
            macros = flash.definitions(stage, torch.float32, 64, False, {"Br": 32, "Bc": 32}, wanted)
            assert macros["DETERMINISTIC"] == str(int(wanted and on_request))
    with pytest.raises(ValueError, match="deterministic: 'maybe' is not among yes, no, on request"):
        flash.read_stage(own_file(tmp_path, "Backward", "deterministic: maybe"))


@pytest.mark.usefixtures("nothing_is_built")
def test_a_stage_that_is_not_deterministic(tmp_path, monkeypatch):
    """ValueError if the call asks for one; if PyTorch's switch does, as in PyTorch: RuntimeError, or a
    warning."""
    monkeypatch.setattr(launch, "_libraries", {})
    mine, tensors = own_file(tmp_path, "Backward", "deterministic: no"), leaves()
    message = ("^backward stage 'mine' is not deterministic; those of the backward stages for torch.float32 "
               "that can be: naive, deterministic")
    with pytest.raises(ValueError, match=message):
        flash.attention(*tensors, backward=mine, deterministic=True)
    forward = own_file(tmp_path, "Forward", "deterministic: no", name="forward.cuh")
    with pytest.raises(ValueError, match="^stage 'forward' is not deterministic; .* can be: naive, tiled"):
        flash.attention(*tensors, stage=forward, deterministic=True)
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match=message + ".*_algorithms.*deterministic=False"):
            flash.attention(*tensors, backward=mine)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match=message), pytest.raises(pytest.fail.Exception, match="built"):
            flash.attention(*tensors, backward=mine)
        with warnings.catch_warnings(action="error"), pytest.raises(pytest.fail.Exception, match="built"):
            flash.attention(*tensors, backward=mine, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def backward_ladder(monkeypatch, tmp_path):
    """A ladder of three backward stages: deterministic, on request, not. Gives what backward passes take."""
    taken = []
    for i, determinism in enumerate(("yes", "on request", "no"), 1):
        (tmp_path / f"bwd_0{i}.cuh").write_text(
            f"// Backward stage {i}: {determinism.replace(' ', '_')}\n// deterministic: {determinism}\n")
    for file in flash.STAGES.glob("fwd_*.cuh"):
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setattr(registry, "STAGES", tmp_path)

    def backward(q, k, v, *args):
        taken.append((args[-4].name, args[-2]))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    monkeypatch.setattr(operators, "backward", backward)
    return taken


@pytest.mark.parametrize("wanted, switch, expected", [
    (None, False, ("no", False)),
    (False, True, ("no", False)),
    (None, True, ("on_request", True)),
    (True, False, ("on_request", True)),
])
def test_the_best_that_is_deterministic(wanted, switch, expected, backward_ladder):
    """PyTorch's switch counts as it was at the call, not as it is in the backward pass."""
    try:
        torch.use_deterministic_algorithms(switch)
        o = flash.attention(*leaves(), stage="flash2", deterministic=wanted)
        torch.use_deterministic_algorithms(not switch)
        o.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert backward_ladder == [expected]


# ------------------------------------------------------------------------------------------ inspect
@pytest.mark.skipif(not flash.can_inspect(), reason=str(flash.can_inspect()))
def test_inspect_watches_the_backward_pass():
    q, k, v = leaves(needed="qk")
    o, lse = flash.attention(q, k, v, causal=True, return_lse=True, **STAGES)
    do, dlse = random_gradients(q)
    expected = torch.autograd.grad([o, lse], [q, k], [do, dlse], retain_graph=True)
    with flash.inspect() as report:
        gradients = torch.autograd.grad([o, lse], [q, k], [do, dlse])
    torch.testing.assert_close(gradients, expected)
    assert not report.findings and report.flops == 10 * 4 * 16 * sum(range(1, 21))
    assert set(report.traffic()) == {"Q", "K", "V", "dO", "dL", "dQ", "dK", "dV", "P, dS"}


# ------------------------------------------------------------------------------------------ autocast
@pytest.mark.parametrize("kind", ["eager", "aot_eager"])
def test_autocast(kind, device):
    """Linear layers leave bfloat16 beside float32: computed in float32; gradients in the inputs' types."""
    q, k, v = leaves(device)
    q16, v16 = (x.detach().bfloat16().requires_grad_() for x in (q, v))
    do, _ = random_gradients(q)

    def call(q, k, v):
        return flash.attention(q, k, v, causal=True, **STAGES)

    with torch.autocast(device, torch.bfloat16):
        o = (call if kind == "eager" else torch.compile(call, backend=kind, fullgraph=True))(q16, k, v16)
    assert o.dtype == torch.float32
    gradients = torch.autograd.grad(o, [q16, k, v16], do)
    assert [x.dtype for x in gradients] == [torch.bfloat16, torch.float32, torch.bfloat16]
    full = [x.detach().float().requires_grad_() for x in (q16, k, v16)]
    expected = torch.autograd.grad(call(*full), full, do)
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(gradients, expected))
    with pytest.raises(ValueError, match="^k has type torch.float32, q torch.bfloat16"):
        call(q16, k, v16)


@pytest.mark.parametrize("kind", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_is_honoured(kind, dtype, device):
    """In its type, by the stages for that; the gradients in the inputs' types."""
    q, k, v = leaves(device)
    v16 = v.detach().bfloat16().requires_grad_()
    do, _ = random_gradients(q.to(dtype))

    def call(q, k, v):
        return flash.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with torch.autocast(device, dtype):
        o = (call if kind == "eager" else torch.compile(call, backend=kind, fullgraph=True))(q, k, v16)
    low = [x.detach().to(dtype).requires_grad_() for x in (q, k, v16)]
    expected = call(*low)
    assert o.dtype == dtype and torch.equal(o, expected)
    gradients = torch.autograd.grad(o, [q, k, v16], do)
    assert [x.dtype for x in gradients] == [torch.float32, torch.float32, torch.bfloat16]
    for x, y in zip(gradients, torch.autograd.grad(expected, low, do)):
        assert torch.allclose(x.float(), y.float(), rtol=1e-2, atol=1e-3)


def test_autocast_without_stages_for_its_type(monkeypatch):
    """Where none that takes it runs, and none that is named: in float32."""
    q, k, v = leaves(needed="")
    monkeypatch.setattr(flash.Stage, "available", lambda self, device, dtype=None: flash.Available(
        "not here" * (torch.float32 not in self.dtypes)))
    with torch.autocast("cpu", torch.bfloat16):
        assert flash.attention(q, k, v).dtype == torch.float32
    monkeypatch.undo()
    attention._calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert flash.attention(q, k, v).dtype == torch.bfloat16
        assert flash.attention(q, k, v, backward="naive").dtype == torch.float32


@pytest.fixture
def like_a_T4(monkeypatch):
    """No stage of the 16-bit types that needs sm_80 runs: what is left of them is forward wmma, in fp16."""
    def available(self, device=None, dtype=None):
        needed = self.needs_for(dtype)
        return flash.Available(f"needs {needed}" * (needed not in ("any GPU", "sm_70")))
    monkeypatch.setattr(flash.Stage, "available", available)
    plan._warn_of_conversion.cache_clear()


@pytest.mark.usefixtures("like_a_T4")
@pytest.mark.parametrize("deterministic", [None, True])
def test_16_bit_training_before_sm_80(deterministic):
    """By a float32 backward stage over converted tensors; said once. And refused where it is named."""
    q, k, v = leaves(dtype=torch.float16)
    do, dlse = random_gradients(q)
    dlse = dlse.float()
    with pytest.warns(UserWarning, match="no backward stage of torch.float16 runs on cpu, as they need"):
        o, lse = flash.attention(q, k, v, causal=True, return_lse=True, deterministic=deterministic)
    with warnings.catch_warnings(action="error"):
        flash.attention(q, k, v, deterministic=deterministic)
        gradients = torch.autograd.grad([o, lse], [q, k, v], [do, dlse], retain_graph=True)
        compiled = torch.compile(lambda *x: flash.attention(*x, causal=True, deterministic=deterministic),
                                 backend="aot_eager", fullgraph=True)
        of_compiled = torch.autograd.grad(compiled(q, k, v), [q, k, v], do)
        of_o = torch.autograd.grad(o, [q, k, v], do)
    check_gradients(gradients, *(x.detach() for x in (q, k, v)), do, -3, None, dlse)
    check_gradients(of_compiled, *(x.detach() for x in (q, k, v)), do, -3)
    assert all(x.dtype == torch.float16 for x in gradients)
    if deterministic:
        assert all(torch.equal(x, y) for x, y in zip(of_compiled, of_o))
        (call,) = (c for c in attention._calls.values() if c.visible is not None)
        assert call.backward[0].deterministic
    with pytest.raises(RuntimeError, match="^backward stage 'mma' cannot run on cpu: needs sm_80"):
        flash.attention(q, k, v, backward="mma")
    with pytest.raises(ValueError, match="^backward stage 'naive' takes torch.float32"):
        flash.attention(q, k, v, backward="naive")
    with pytest.raises(RuntimeError, match="cannot run on cpu: needs sm_80"):
        flash.attention(*(x.bfloat16() for x in (q, k, v)))


@pytest.mark.usefixtures("like_a_T4")
def test_autocast_before_sm_80():
    """In fp16, gradients included."""
    q, k, v = leaves()
    with torch.autocast("cpu", torch.float16), pytest.warns(UserWarning, match="no backward stage"):
        o = flash.attention(q, k, v)
    assert o.dtype == torch.float16
    o.sum().backward()
    assert q.grad.dtype == torch.float32


# ------------------------------------------------------------------------------------------ compile
OLD_DYNAMO = torch.__version__ < "2.9"


def both(function, tensors, **options):
    """Twice o and the gradients: of a function, and of it compiled."""
    for f in (function, torch.compile(function, fullgraph=True, **options)):
        o = f(*tensors)
        do, _ = random_gradients(o)
        yield o, *torch.autograd.grad(o, [x for x in tensors if x.requires_grad], do)


@pytest.mark.parametrize("options", [
    {"causal": True, "scale": 0.3, "deterministic": True, "Br": 32, "Bc_bwd": 16, **STAGES},
    {"stage": flash.STAGES / "fwd_04_flash2.cuh", "backward": flash.stages("bwd")[0]},
    {},
], ids=["names", "files", "none"])
def test_compile(options, device):
    """One graph, no break, the same bits; the function around it is in it, too."""
    if OLD_DYNAMO and isinstance(options.get("stage"), Path):
        pytest.skip("PyTorch 2.8 cannot trace a path's text")
    def function(q, k, v):
        o, lse = flash.attention(q * 2, k, v, return_lse=True, **options)
        return o * lse.nan_to_num(neginf=0).cos()[..., None]

    plain, compiled = both(function, leaves(device, needed="qv"), backend="aot_eager")
    assert all(torch.equal(x, y) for x, y in zip(plain, compiled))


def test_compile_scaled_dot_product_attention():
    def function(q, k, v):
        return flash.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, **STAGES)

    plain, compiled = both(function, leaves(), backend="aot_eager")
    assert all(torch.equal(x, y) for x, y in zip(plain, compiled))


def test_compile_with_inductor(device):
    """Which would change strides that an operator does not insist on."""
    def function(q, k, v):
        return flash.attention(q.transpose(1, 2) + 1, k, v, causal=True, **STAGES).transpose(2, 3).sin()

    q, k, v = leaves(device)
    q = q.detach().transpose(1, 2).contiguous().requires_grad_()
    torch.testing.assert_close(*both(function, [q, k, v]))


def test_compile_with_dynamic_shapes():
    """One graph for all lengths."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def function(q, k, v):
        return flash.attention(q, k, v, causal=True, **STAGES)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for N in (17, 20, 33):
        q, k, v = (x.requires_grad_() for x in random_qkv(2, 4, 2, N, N + 3, 16, "cpu"))
        assert torch.equal(compiled(q, k, v), function(q, k, v))
    assert len(graphs) == 1


@pytest.mark.parametrize("change, options, message", [
    (lambda x: x, {"stage": "falsh2"}, "there is no stage 'falsh2'"),
    (lambda x: x, {"backward": "naiv"}, "there is no backward stage 'naiv'"),
    (lambda x: x, {"Brr_bwd": 32}, "Brr_bwd: attention() has no such argument; tile sizes are Br, Bc"),
    (lambda x: x, {"stage_bwd": "naive"}, "stage_bwd: attention() has no such argument"),
    (lambda x: x[0], {}, "q must have 4 dimensions, (B, H, N, d), not 3"),
    (lambda x: x[0, 0, 0], {"causal": True}, "q must have 4 dimensions, (B, H, N, d), not 1"),
    (lambda x: x, {"causal": 2}, "causal must be True or False, not 2"),
    (lambda x: x, {"stage": "flash2", "Br": 12}, "needs Br % 8 == 0, and got Br=12"),
    (lambda x: x, {"Br_bwd": 2000}, "Br_bwd must be an integer from 1 to 1024, not 2000"),
    (lambda x: x, {"causal": "no"}, "causal must be True or False, not 'no'"),
    (lambda x: x[..., :12], {}, "d must be a multiple of 8 up to 256"),
    (lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), {}, "last dimension is not contiguous"),
    (lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape), {}, "at multiples of 16 bytes"),
    (lambda x: x, {"scale": float("inf")}, "scale must be a number from -65536 to 65536, not inf"),
])
@pytest.mark.usefixtures("nothing_is_built")
def test_errors_under_compile(change, options, message):
    """The same words, inside of Dynamo's."""
    torch._dynamo.reset()
    tensors = [change(x.detach()) for x in leaves()]
    compiled = torch.compile(lambda q, k, v: flash.attention(q, k, v, **options), fullgraph=True,
                             backend="aot_eager")
    hidden = "|Observed exception" * OLD_DYNAMO
    with pytest.raises((RuntimeError, ValueError), match=re.escape(message) + hidden):
        compiled(*tensors)


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash.attention(q, k, v, causal=True, **STAGES)

    tensors = [x.detach() for x in leaves()]
    exported = torch.export.export(Attention(), tuple(tensors))
    assert torch.equal(exported.module()(*tensors), Attention()(*tensors))
    N_q, N_k = (torch.export.Dim(name) for name in ("N_q", "N_k"))
    exported = torch.export.export(Attention(), tuple(tensors), dynamic_shapes=[{2: N_q}, {2: N_k}, {2: N_k}])
    for lengths in ((23, 20), (7, 33)):
        tensors = [x.detach() for x in random_qkv(1, 4, 2, *lengths, 16, "cpu")]
        assert torch.equal(exported.module()(*tensors), Attention()(*tensors))


SAMPLES = {
    "plain": lambda q, k, v: (q, k, v, *ALL_PAIRS, *[None] * 8, [], []),
    "all": lambda q, k, v: (q, k, v, -3, *ALL_PAIRS[1:], 0.3, "flash2", "naive", True, 32, 32, 8, 16, [], []),
    "strided": lambda q, k, v: (*(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
                                  for x in (q, k)), v[:, :1].expand(v.shape), 0, *ALL_PAIRS[1:],
                                *[None] * 8, [], []),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck(sample, device):
    """PyTorch's own tests of both operators: schema, fake tensors, autograd, tracing with dynamic shapes.
    (With a mask: test_mask_calls.py.)"""
    arguments = SAMPLES[sample](*leaves(device))
    torch.library.opcheck(torch.ops.flash.forward, arguments)
    q, k, v, diagonal, *_, scale, _, backward, deterministic, _, _, Br, Bc, _, _ = (
        x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    o, lse = torch.ops.flash.forward(*arguments)
    do, dlse = random_gradients(q)
    for dL in (dlse, None):
        torch.library.opcheck(torch.ops.flash.backward, (
            q, k, v, o.detach(), lse.detach(), do, dL, diagonal, *ALL_PAIRS[1:], scale, backward,
            bool(deterministic), Br, Bc, [], []))


@pytest.mark.usefixtures("nothing_is_built")
def test_the_operators_refuse_what_attention_refuses():
    q, k, v = (x.detach() for x in leaves())
    lse = torch.zeros(q.shape[:3])
    with pytest.raises(ValueError, match="^v has shape"):
        torch.ops.flash.forward(q, k, v[:, :, 1:], *ALL_PAIRS, *[None] * 8, [], [])
    rest = (*ALL_PAIRS, None, None, False, None, None, [], [])
    with pytest.raises(ValueError, match=r"^dO must have shape \(1, 4, 23, 16\) .*; it has \(1, 4, 22, 16\)"):
        torch.ops.flash.backward(q, k, v, q, lse, q[:, :, 1:], None, *rest)
    with pytest.raises(ValueError, match=r"^L must have shape \(1, 4, 23\)"):
        torch.ops.flash.backward(q, k, v, q, lse[..., 1:], q, None, *rest)
    for i, name in enumerate(("o", "L", "dO", "dL")):
        given = [x.bfloat16() if i == j else x for j, x in enumerate((q, lse, q, lse))]
        with pytest.raises(ValueError, match=rf"^{name} must .* type torch.float32 .* and torch.bfloat16"):
            torch.ops.flash.backward(q, k, v, *given, *rest)
    with FakeTensorMode() as mode:
        q, k, v, lse = map(mode.from_tensor, (q, k, v, lse))
        with pytest.raises(ValueError, match="^v has shape"):
            torch.ops.flash.forward(q, k, v[:, :, 1:], *ALL_PAIRS, *[None] * 8, [], [])
        with pytest.raises(ValueError, match="^v has shape"):
            torch.ops.flash.backward(q, k, v[:, :, 1:], q, lse, q, None, *rest)
        assert torch.ops.flash.forward(q, k, v, *ALL_PAIRS, *[None] * 8, [], [])[1].shape == lse.shape


# ------------------------------------------------------------------------------------------ checkpoint
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant, device):
    """The forward pass runs again in the backward pass."""
    q, k, v = leaves(device)
    do, _ = random_gradients(q)

    def function(q, k, v):
        return flash.attention(q * 2, k, v, causal=True, **STAGES).sin()

    expected = torch.autograd.grad(function(q, k, v), [q, k, v], do)
    checkpoint(function, q, k, v, use_reentrant=reentrant).backward(do)
    assert all(torch.equal(x.grad, y) for x, y in zip((q, k, v), expected))


def test_default_tiles_depend_on_the_mask(tmp_path, monkeypatch):
    """By a rule in a field's second line; also of a gradient, and of what torch.compile makes of a call."""
    flash2 = {s.name: s for s in flash.stages("fwd")}["flash2"]
    recompute = {s.name: s for s in flash.stages("bwd")}["recompute"]
    stages = []
    for stage in (flash2, recompute):
        mine = tmp_path / stage.path.name
        rules = "// tiles:   Br=16 Bc=32;\n//          causal: Br=32 Bc=32\n"
        mine.write_text(re.sub(r"// tiles:.*\n", rules, stage.path.read_text(), count=1))
        stages.append(mine)
    built = plans(monkeypatch)

    def both(causal):
        x = torch.randn(1, 1, 40, 8, requires_grad=True)
        flash.attention(x, x, x, causal=causal, stage=stages[0], backward=stages[1]).sum().backward()
    for call in (both, torch.compile(both, backend="aot_eager")):
        for causal, size in ((True, 32), (False, 16)):
            built.clear()
            call(causal)
            assert built == [(direction, {"Br": size, "Bc": 32}, causal) for direction in ("fwd", "bwd")]
