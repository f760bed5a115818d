"""What a call of attention() costs and keeps: plans, threads, forks, edits; and mistakes that went unseen."""

import cProfile
import ctypes
import os
import pstats
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import check, check_gradients, is_end, random_gradients, random_qkv
from test_forward import columns_of, type_of
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flash
from flash_ladder import ahead, attention, checks, launch, plan

STAGES = {"stage": "flash2", "backward": "naive"}
FLASH2 = flash.STAGES / "fwd_04_flash2.cuh"
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def leaves(device="cpu", dtype=torch.float32):
    return [x.requires_grad_() for x in random_qkv(1, 4, 2, 23, 20, 16, device, dtype)]


@pytest.fixture
def plans(monkeypatch):
    """Caches of its own, empty."""
    for cache in ("_plans", "_calls", "_libraries"):
        module = {"_plans": plan, "_calls": attention, "_libraries": launch}[cache]
        monkeypatch.setattr(module, cache, {})
    return plan._plans


@pytest.fixture
def own_stage(tmp_path) -> Path:
    """A copy of flash2, and of a file that it includes, to be edited."""
    (tmp_path / "mine_tile.cuh").write_text("constexpr float FACTOR = 1.0f;\n")
    text = FLASH2.read_text()
    text = text.replace("m[r] + logf(l[r])", "FACTOR * (m[r] + logf(l[r]))")
    assert text.count("FACTOR") == 1
    file = tmp_path / "mine.cuh"
    file.write_text('#include "mine_tile.cuh"\n' + text)
    return file


# ------------------------------------------------------------------------------------------ what a call does
def profile(function, calls: int) -> dict[str, int]:
    """How often each function was called."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        function()
    profiler.disable()
    return {f"{Path(file).name}:{name}": row[1]
            for (file, _, name), row in pstats.Stats(profiler).stats.items()}


def test_a_thousand_calls(monkeypatch):
    """No glob, no file-system call in most of them, no class built; nothing is checked or chosen again."""
    q, k, v = random_qkv(1, 2, 2, 8, 8, 8, "cpu")
    flash.attention(q, k, v, causal=True)
    monkeypatch.setattr(next(iter(attention._calls.values())).plan.library, "run", lambda *_: None)
    begun = time.monotonic()
    found = profile(lambda: flash.attention(q, k, v, causal=True), 1000)
    looks = 1 + (time.monotonic() - begun) / launch.LOOK_AGAIN  # at the stage's files, and at its folder
    assert found["attention.py:attention"] == 1000
    files = len(launch.stage_files(flash.find_stage(None, torch.float32, torch.device("cpu")))._times)
    asked = sum(n for name, n in found.items() if re.search(r"posix\.|io\.open|_io\.", name))
    assert asked <= 2 * looks * files < 500
    assert profile(FLASH2.stat, 3)["~:<built-in method posix.stat>"] == 3  # so it is called if it is
    for name in ("glob", "build_class", "find_stage", "read_stage", "check_tensors", "tiles", "definitions"):
        assert not [seen for seen in found if name in seen], name


def test_plans_are_kept_by_all_that_they_depend_on(plans):
    """One each; the same again takes the one that is there."""
    q, k, v = random_qkv(1, 2, 2, 24, 24, 16, "cpu")
    wide = torch.randn(1, 2, 24, 32)[..., :16]
    calls = [
        ((q, k, v), {}), ((q, k, v), {"causal": True}), ((q, k, v), {"scale": 0.5}),
        ((q, k, v), {"scale": -0.5}), ((q, k, v), {"Br": 32}), ((q[:, :, :23], k, v), {}),
        ((q, k[:, :1], v[:, :1]), {}), ((wide, k, v), {}), ((q, wide, v), {}), ((q, k, wide), {}),
    ]
    for _ in range(2):
        for tensors, options in calls:
            o, lse = flash.attention(*tensors, stage="flash2", return_lse=True, **options)
            check(o, lse, *tensors, 24 - tensors[0].shape[2] if options.get("causal") else None,
                  options.get("scale"))
        assert len(plans) == len(attention._calls) == len(calls)
    o = flash.scaled_dot_product_attention(q[:, :, :23], k, v, is_causal=True, stage="flash2")
    check(o, flash.attention(q[:, :, :23], k[:, :, :23], v[:, :, :23], causal=True, return_lse=True)[1],
          q[:, :, :23], k, v, 0)


def test_the_cache_is_bounded(plans, monkeypatch):
    monkeypatch.setattr(plan, "MOST_PLANS", 3)
    for N in range(1, 8):
        q, k, v = random_qkv(1, 1, 1, N, 8, 8, "cpu")
        check(*flash.attention(q, k, v, stage="flash2", return_lse=True), q, k, v)
        assert len(plans) <= 3 and len(attention._calls) <= 3


def test_a_misaligned_tensor_of_a_known_layout():
    """Its address is looked at in each call."""
    memory = torch.randn(3, 1, 1, 8, 9)
    q, k, v = (x.flatten()[1:65].view(1, 1, 8, 8) for x in memory)
    aligned = [x.clone() for x in (q, k, v)]
    flash.attention(*aligned, stage="flash2")
    assert k.data_ptr() % 16 and k.stride() == aligned[1].stride()
    with pytest.raises(ValueError, match="^k's rows must start at multiples of 16 bytes"):
        flash.attention(aligned[0], k, aligned[2], stage="flash2")


def test_threads_do_not_share_parameters(monkeypatch):
    """All of them are in the same plan at once, each with addresses of its own."""
    tensors = [list(random_qkv(1, 1, 1, 8, 8, 8, "cpu")) for _ in range(8)]
    flash.attention(*tensors[0], stage="flash2")
    together, seen = threading.Barrier(len(tensors)), {}

    def run(words, stream):
        together.wait(10)  # until each thread has filled in its addresses
        seen[threading.get_ident()] = ctypes.cast(words, ctypes.POINTER(ctypes.c_uint64))[0]

    (call,) = attention._calls.values()
    monkeypatch.setattr(call.plan.library, "run", run)
    expected = {}

    def call_it(q, k, v):
        expected[threading.get_ident()] = q.data_ptr()
        flash.attention(q, k, v, stage="flash2")

    threads = [threading.Thread(target=call_it, args=x) for x in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == expected and len(set(seen.values())) == len(tensors)


def test_threads_are_right():
    """Forward and backward, at once, in the simulator."""
    problems = []

    def train(seed):
        torch.manual_seed(seed)
        q, k, v = leaves()
        for _ in range(5):
            do, _ = random_gradients(q)
            o = flash.attention(q, k, v, causal=True, **STAGES)
            try:
                gradients = torch.autograd.grad(o, [q, k, v], do)
                check_gradients(gradients, *(x.detach() for x in (q, k, v)), do, -3)
            except AssertionError as error:
                problems.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


FORK = """
    import os, sys, torch, flash
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    expected = flash.attention(q, k, v, stage="flash2")
    child = os.fork()
    again = flash.attention(q, k, v, stage="flash2")
    other = flash.attention(q, k, v, stage="flash2", causal=True)
    right = torch.equal(again, expected) and not torch.equal(other, expected)
    if not child:
        os._exit(0 if right else 1)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not right)
"""


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code), *arguments], cwd=flash.ROOT,
                          text=True, capture_output=True, timeout=300, env=os.environ | environment)


def test_after_a_fork():
    """A plan of the parent's, and a new one, in both."""
    done = python(FORK)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("edited", ["the stage", "a file that it includes"])
def test_an_edit_takes_effect(own_stage, edited):
    """100 ms later, in a call that has run before."""
    q, k, v = random_qkv(1, 1, 1, 20, 20, 16, "cpu")
    before = flash.attention(q, k, v, stage=own_stage, return_lse=True)[1]
    file = own_stage if edited == "the stage" else own_stage.parent / "mine_tile.cuh"
    old, new = ("FACTOR *", "2.0f *") if edited == "the stage" else ("1.0f", "2.0f")
    file.write_text(file.read_text().replace(old, new))
    time.sleep(launch.LOOK_AGAIN)
    assert torch.equal(flash.attention(q, k, v, stage=own_stage, return_lse=True)[1], 2 * before)


def test_an_edit_of_the_backward_stages_header(tmp_path):
    """Its tiles, by a call that has run before."""
    mine = tmp_path / "mine.cuh"
    mine.write_text(next(s.path for s in flash.stages("bwd") if s.name == "recompute").read_text())
    q, k, v = leaves()
    do, _ = random_gradients(q)
    taken = []
    for size in (16, 32):
        mine.write_text("".join(f"// tiles:   Br={size} Bc=32\n" if line.startswith("// tiles:") else line
                                for line in mine.read_text().splitlines(keepends=True)))
        time.sleep(launch.LOOK_AGAIN)
        torch.autograd.grad(flash.attention(q, k, v, stage="flash2", backward=mine), q, do)
        (call,) = (c for c in attention._calls.values() if c.backward and c.backward[0].path == mine)
        taken.append(call.backward[1]["Br"])
    assert taken == [16, 32]


# ------------------------------------------------------------------------------------------ building ahead
def test_no_size_of_a_call_is_new(monkeypatch):
    """What a GPU's first call builds holds the tiles of every later one, whatever its batch."""
    device = torch.device("cpu")
    for stage in flash.stages():
        for causal in (False, True):
            found = ahead.variants(stage, 64, device, causal)
            found128 = ahead.variants(stage, 128, device, causal)
            sizes = {size + more for size in ahead.SIZES for more in (-1, 0, 1)} - {0}
            for d, of_d in ((64, found), (128, found128)):
                assert all(stage.tiles(d, flash.shared_memory_per_block(device), rows, causal, keys=keys)
                           in of_d for rows in sizes for keys in (1, 8191, 8192, 1 << 40))
            assert len(found) <= 4 and len(found128) <= 4


def test_compile(monkeypatch, tmp_path):
    """Both masks, both directions; then a call builds nothing."""
    monkeypatch.setattr(launch, "_libraries", {})
    monkeypatch.setattr(plan, "_plans", {})
    paths = flash.compile(24, stage="flash2", backward="naive", device="cpu")
    assert len(paths) == 4 == len(set(paths)) and all(path.exists() for path in paths)
    built = []
    monkeypatch.setattr("flash_ladder.loader._compile_error", lambda *_: built.append(1) or "")
    monkeypatch.setattr("flash_ladder.simulator.compile_library", lambda *a: built.append(a))
    q, k, v = (torch.randn(1, 1, 9, 24, requires_grad=True) for _ in range(3))
    for causal in (False, True):
        flash.attention(q, k, v, causal=causal, **STAGES).sum().backward()
    assert not built
    with pytest.raises(ValueError, match="^d must be a multiple of 8 up to 256, not 20"):
        flash.compile(20)
    with pytest.raises(ValueError, match="there is no stage 'none'"):
        flash.compile(64, stage="none")


# ------------------------------------------------------------------------------------------ PyTorch's tools
@pytest.mark.parametrize("graph", ["forward inside", "backward alone"])
def test_flops_are_counted(graph):
    """By FlopCounterMode, over the pairs that a query sees: causal, of 23 queries and 20 keys."""
    q, k, v = leaves()
    pairs = sum(min(max(row - 2, 0), 20) for row in range(23))
    outside = flash.attention(q, k, v, causal=True, **STAGES)
    with FlopCounterMode(display=False) as counter:
        o = flash.attention(q, k, v, causal=True, **STAGES) if graph == "forward inside" else outside
        o.sum().backward()
    expected = (4 * (graph == "forward inside") + 10) * 4 * 16 * pairs
    assert counter.get_total_flops() == expected
    assert torch.equal(o, outside)


def test_selective_checkpointing():
    """Attention's output is kept, by its operator: its forward kernel runs once."""
    q, k, v = leaves()
    runs = []

    def policy(ctx, op, *args, **kwargs):
        if op == torch.ops.flash.forward.default:
            runs.append(ctx.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return flash.attention(q.sin(), k, v, **STAGES).cos()

    do, _ = random_gradients(q)
    expected = torch.autograd.grad(block(q, k, v), [q, k, v], do)
    forward, launches = plan.forward, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flash_ladder.operators.forward", lambda *a: launches.append(1) or forward(*a))
        o = checkpoint(block, q, k, v, use_reentrant=False,
                       context_fn=lambda: create_selective_checkpoint_contexts(policy))
        gradients = torch.autograd.grad(o, [q, k, v], do)
    assert runs[0] is False and launches == [1]
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected))


class Wrapped(torch.Tensor):
    """Notes the operators that it meets."""

    @staticmethod
    def __new__(cls, x):
        wrapped = torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype)
        wrapped.x = x
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return function(*(x.x if isinstance(x, cls) else x for x in args), **(kwargs or {}))


def test_a_subclass_sees_an_operator():
    q, k, v = (x.detach() for x in leaves())
    Wrapped.seen = []
    o = flash.attention(Wrapped(q), Wrapped(k), Wrapped(v), stage="flash2")
    assert torch.ops.flash.forward.default in Wrapped.seen
    assert torch.equal(o, flash.attention(q, k, v, stage="flash2"))


def test_eager_calls_meet_no_operator():
    """An operator's dispatch costs more than a small kernel."""
    q, k, v = leaves()
    o = flash.attention(q, k, v, **STAGES)
    assert type(o.grad_fn).__name__ == "_AttentionBackward"
    found = profile(lambda: flash.attention(q, k, v, **STAGES).sum().backward(), 3)
    assert not [name for name in found if "custom_ops" in name or "_ops.py:__call__" in name]


@pytest.mark.parametrize("transform", [
    lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    lambda f, x: torch.vmap(f)(x[None]),
    lambda f, x: torch.func.jvp(f, (x,), (x,)),
], ids=["grad", "vmap", "jvp"])
def test_no_transforms(transform):
    x = torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match="take part in torch.func's transforms .*: use torch.autograd.grad"):
        transform(lambda x: flash.attention(x, x, x), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_tracing():
    x = torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match="cannot be traced by torch.jit.trace: use torch.export"):
        torch.jit.trace(lambda x: flash.attention(x, x, x), x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_no_nested_tensors(layout):
    x = torch.nested.nested_tensor([torch.randn(2, 8, 8), torch.randn(2, 9, 8)], layout=layout)
    with pytest.raises(ValueError, match="^q is a nested tensor, which no stage takes: pad its sequences"):
        flash.attention(x, x, x)


DDP = """
    import sys, torch, flash
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.nn.parallel import DistributedDataParallel

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        def forward(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            o = flash.attention(q, k, v, causal=True, stage="flash2", backward="naive")
            return self.out(o.transpose(1, 2).flatten(2))

    def worker(rank, file):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
        torch.manual_seed(0)
        model = Model()
        for step in range(10):
            torch.manual_seed(step)
            x = torch.randn(4, 10, 32)
            model.zero_grad()
            model(x).square().mean().backward()
            expected = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            halves = DistributedDataParallel(model)
            halves(x.chunk(2)[rank]).square().mean().backward()
            for p, y in zip(model.parameters(), expected):
                torch.testing.assert_close(p.grad, y, rtol=1e-4, atol=1e-5)
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.start_processes(worker, (sys.argv[1],), 2, start_method="fork")
"""


def test_distributed_data_parallel(tmp_path):
    """Two processes, gloo, ten times: the gradients of halves of a batch average to those of the whole."""
    done = python(DDP, str(tmp_path / "rendezvous"))
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------ CUDA graphs
@gpu
@pytest.mark.parametrize("stage", [None, "naive"])
def test_cuda_graphs(stage):
    """Captured and replayed with other numbers, workspaces included; naive has the largest."""
    q, k, v = leaves("cuda", torch.float32 if stage else torch.float16)
    do, _ = random_gradients(q)
    tensors = q, k, v

    def step():
        o = flash.attention(*tensors, causal=True, stage=stage, backward=stage)
        return o, *torch.autograd.grad(o, tensors, do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in (*tensors, do):
                x.normal_()
        graph.replay()
        o, *gradients = outputs
        detached = [x.detach() for x in tensors]
        check(o.detach(), flash.attention(*detached, causal=True, return_lse=True)[1], *detached, -3)
        check_gradients(gradients, *detached, do, -3)


@gpu
def test_reduce_overhead():
    """torch.compile's own graphs, over several steps with new numbers."""
    q, k, v = leaves("cuda", torch.float16)

    @torch.compile(mode="reduce-overhead")
    def function(q, k, v):
        return flash.attention(q * 1.0, k, v, causal=True)

    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in (q, k, v):
                x.normal_()
        do, _ = random_gradients(q)
        gradients = torch.autograd.grad(function(q, k, v), [q, k, v], do)
        check_gradients(gradients, *(x.detach() for x in (q, k, v)), do, -3)


@gpu
def test_side_streams():
    """Forward and backward on a stream of their own, while the default one writes over freed memory."""
    stream = torch.cuda.Stream()
    for seed in range(10):
        torch.manual_seed(seed)
        q, k, v = leaves("cuda", torch.float16)
        do, _ = random_gradients(q)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            o, lse = flash.attention(q, k, v, causal=True, return_lse=True)
            gradients = torch.autograd.grad(o, [q, k, v], do)
        junk = [torch.full_like(q, torch.nan) for _ in range(10)]
        torch.cuda.current_stream().wait_stream(stream)
        check(o.detach(), lse.detach(), *(x.detach() for x in (q, k, v)), -3)
        check_gradients(gradients, *(x.detach() for x in (q, k, v)), do, -3)
        assert len(junk) == 10


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    q, k, v = random_qkv(1, 2, 2, 40, 40, 64, "cuda:1", torch.float16)
    check(*flash.attention(q, k, v, return_lse=True), q, k, v)


# ------------------------------------------------------------------------------------------ silent mistakes
@pytest.mark.parametrize("grad", [False, True])
def test_a_negative_view(grad):
    """torch._neg_view: the memory holds the numbers with the other sign."""
    q, k, v = (x.detach() for x in leaves())
    negative = [torch._neg_view(-x) for x in (q, k, v)]
    assert all(x.is_neg() for x in negative)
    for x in negative:
        x.requires_grad_(grad)
    o = flash.attention(*negative, **STAGES)
    assert torch.equal(o, flash.attention(q, k, v, **STAGES))
    if grad:
        do, _ = random_gradients(q)
        expected = [x.clone().requires_grad_() for x in (q, k, v)]
        gradients = torch.autograd.grad(o, negative, torch._neg_view(-do))
        for x, y in zip(gradients, torch.autograd.grad(flash.attention(*expected, **STAGES), expected, do)):
            assert torch.equal(x, y)


@pytest.mark.parametrize("stage, sign", [
    (s.name, sign) for s in flash.stages("fwd") for sign in ((1, -1) if is_end(s) else ((-1) ** s.number,))])
def test_the_largest_scale(stage, sign):
    """The right one-hot answer: each row takes the value of its largest score. In the middle of a branch one
    sign, by turns. (test_forward.py has the same builds.)"""
    dtype = type_of(stage)
    q, k, v = random_qkv(1, 2, 2, 70, 130, columns_of(stage), "cpu", dtype)
    scale = sign * checks.MAX_SCALE
    o, lse = flash.attention(q, k, v, causal=True, stage=stage, scale=scale, return_lse=True)
    unseen = torch.ones(70, 130).triu(130 - 70 + 1).bool()
    scores = (scale * (q.double() @ k.double().mT)).masked_fill(unseen, -torch.inf)
    best, where = scores.max(-1)
    clear = scores.topk(2).values.diff(dim=-1)[..., 0] < -200  # no second one within rounding
    assert clear.float().mean() > 0.9
    expected = v[torch.arange(1)[:, None, None], torch.arange(2)[None, :, None], where]
    torch.testing.assert_close(o[clear], expected[clear], rtol=2 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(lse.double()[clear], best[clear], rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e38, -1e30, 65537.0, float("nan"), "1", 1j])
def test_a_scale_that_would_overflow(scale):
    q, k, v = leaves()
    for tensors in ((q, k, v), (q.detach(), k.detach(), v.detach())):
        with pytest.raises(ValueError, match="^scale must be a number from -65536 to 65536"):
            flash.attention(*tensors, scale=scale, **STAGES)


def test_a_scale_that_requires_grad():
    q, k, v = leaves()
    with pytest.raises(ValueError, match="^scale requires grad, and no stage has its gradient: multiply q"):
        flash.attention(q, k, v, scale=torch.tensor(0.5, requires_grad=True), **STAGES)
    o = flash.attention(q, k, v, scale=torch.tensor(0.5), **STAGES)
    assert torch.equal(o, flash.attention(q, k, v, scale=0.5, **STAGES))


LAUNCH = """#include <assert.h>
inline size_t workspace_bytes(const FwdParams&) { return 0; }
__global__ void some_kernel(float* L) { %s; }
inline cudaError_t launch(const FwdParams& p, cudaStream_t stream) { %s }
"""


def test_launch_returns_an_error_and_launches_nothing(tmp_path):
    """It is raised, and the next call neither sees it nor repeats the one before."""
    x = torch.randn(1, 1, 8, 8)
    start = "some_kernel<<<1, 1, 0, stream>>>(p.L);"
    texts = {"assert": ("assert(L == nullptr)", start + " return cudaGetLastError();"),
             "nothing": ("L[0] = 1", "return cudaErrorInvalidValue;"),
             "unseen": ("assert(L != L)", start + " return cudaSuccess;"),
             "right": ("for (int i = 0; i < 8; i++) L[i] = 7", start + " return cudaGetLastError();")}
    messages = {"assert": "assertion failed: L == nullptr", "unseen": "assertion failed: L != L",
                "nothing": r"launch\(\) returned error 1, which no kernel and no call of CUDA's gave it"}
    for name, (kernel, body) in texts.items():
        (tmp_path / f"{name}.cuh").write_text(LAUNCH % (kernel, body))
    for name in ("assert", "nothing", "unseen", "nothing", "right", "assert", "right"):
        stage = tmp_path / f"{name}.cuh"
        if name in messages:
            with pytest.raises(RuntimeError, match=f"^stage '{name}': .*{messages[name]}"):
                flash.attention(x, x, x, stage=stage)
        else:
            assert (flash.attention(x, x, x, stage=stage, return_lse=True)[1] == 7).all()


def test_a_damaged_library_is_built_again(tmp_path):
    """In the next process, a fork of one that has called nothing: this one has mapped it."""
    code = textwrap.dedent("""
        import os, sys, torch, flash
        for _ in sys.stdin:
            if not os.fork():
                try:
                    torch.manual_seed(0)
                    q, k, v = torch.randn(3, 1, 1, 8, 8)
                    print(flash.attention(q, k, v, stage="flash2").sum().item(), end="", flush=True)
                finally:
                    os._exit(0)
            os.wait()
            print(flush=True)
    """)
    folder = tmp_path / "build"
    folder.mkdir()
    simulator = flash.build_simulator().parent
    (folder / simulator.name).symlink_to(simulator)
    environment = os.environ | {"FLASH_BUILD_DIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", code], cwd=flash.ROOT, env=environment, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        def called() -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline()

        first = called()
        assert float(first)
        (library,) = folder.glob("fwd_flash2*/fwd_flash2*.so")
        whole = library.read_bytes()
        for left in (whole[:len(whole) // 2], b"", None):
            library.unlink()
            if left is not None:
                library.write_bytes(left)
            assert called() == first
            assert len(library.read_bytes()) == len(whole)
        process.stdin.close()


def test_a_negative_view_of_a_gradient_of_L():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 19, 16))
    _, lse = flash.attention(q, k, v, return_lse=True, **STAGES)
    negative = torch._neg_view(torch.randn(1, 2, 19))
    for x, expected in zip(torch.autograd.grad(lse, (q, k), negative, retain_graph=True),
                           torch.autograd.grad(lse, (q, k), negative.resolve_neg())):
        assert torch.equal(x, expected)


def test_a_gradient_without_memory():
    """PyTorch's own for zeros; and a batch of gradients, which is refused."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 19, 16))
    o, lse = flash.attention(q, k, v, return_lse=True, **STAGES)
    zeros = torch._efficientzerotensor(o.shape), torch._efficientzerotensor(lse.shape)
    assert not any(x.any() for x in torch.autograd.grad((o, lse), (q, k, v), zeros, retain_graph=True))
    for x in (o, lse):
        with pytest.raises(RuntimeError, match="one gradient of o and of L at a time, not a batch"):
            torch.autograd.grad(x, q, torch.randn(3, *x.shape), is_grads_batched=True, retain_graph=True)


@pytest.mark.parametrize("name", ["sink", "mask: bias"])
def test_memory_that_has_gone_since_the_call_before(name):
    """As of a parameter that is sharded: a kernel would read address 0."""
    q, k, v = torch.randn(3, 1, 2, 19, 16).bfloat16()
    x = torch.zeros(2) if name == "sink" else torch.zeros(1, 1, 19, 19)
    beside = {"sink": x} if name == "sink" else {"mask": flash.masks.additive(x)}
    flash.attention(q, k, v, **beside)
    x.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{name} is a Tensor without memory of its own"):
            flash.attention(q, k, v, **beside)


def test_a_sparse_sink_after_a_dense_one():
    q, k, v = torch.randn(3, 1, 2, 19, 16)
    flash.attention(q, k, v, sink=torch.zeros(2))
    with pytest.raises(ValueError, match="sink is on cpu, with layout torch.sparse_coo; it must be dense"):
        flash.attention(q, k, v, sink=torch.zeros(2).to_sparse())
