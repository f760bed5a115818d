"""Bad input: an error that names the argument and says what would work, before any build or launch."""

import re
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from conftest import is_end, random_qkv

import flash
from flash_ladder import ahead, checks, launch, plan, registry
from flash_ladder import stage as stage_module
from flash_ladder.arithmetic import evaluate
from flash_ladder.grid import MULTICAST

BY_NAME = {s.name: s for s in flash.stages("fwd")}
STAGES = list(BY_NAME)


def qkv(B=1, H=2, H_kv=2, N=16, d=16, dtype=torch.float32, device="cpu"):
    return list(random_qkv(B, H, H_kv, N, N, d, device, dtype))


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch, request):
    if "builds" not in request.keywords:
        monkeypatch.setattr(launch, "build", lambda *a, **k: pytest.fail("built something before the error"))


def refused(message, *args, error=ValueError, **kwargs):
    with pytest.raises(error) as caught:
        flash.attention(*args, **kwargs)
    assert re.search(message, str(caught.value)), str(caught.value)


def misaligned(x):
    """The same values, one element past a multiple of 16 bytes."""
    return torch.cat([torch.zeros(1, dtype=x.dtype), x.flatten()])[1:].view(x.shape)


def rows_apart(x, gap):
    """The same values, with `gap` more elements between two rows."""
    return torch.nn.functional.pad(x, (0, gap))[..., : x.shape[-1]]


q, k, v = qkv()
BAD_TENSORS = {
    "not a tensor": ([q.numpy(), k, v], r"^q must be a torch.Tensor, not ndarray"),
    "dimensions": ([q[0], k, v], r"^q must have 4 dimensions, \(B, H, N, d\), not 3: shape \(2, 16, 16\)"),
    "empty": ([q, k[:, :, :0], v], r"^k is empty: shape \(1, 2, 0, 16\)"),
    "types differ": ([q, k.double(), v], r"^k has type torch.float64, q torch.float32"),
    "type": ([q.int(), k.int(), v.int()], r"^q has type torch.int32; the stages take torch.float32"),
    "device": ([x.to("meta") for x in (q, k, v)], r"^q is on meta; stages run on CUDA and CPU tensors"),
    "d not a multiple of 8": (
        [x[..., :12] for x in (q, k, v)],
        r"^q has d = 12; d must be a multiple of 8 up to 256: pad",
    ),
    "d above 256": (qkv(d=264), r"^q has d = 264; d must be a multiple of 8 up to 256"),
    "d differs": (
        [q, k[..., :8], v],
        r"^k has shape \(1, 2, 16, 8\); for q of shape \(1, 2, 16, 16\) it must be \(1, H_kv, N_k, 16\)",
    ),
    "B differs": (
        [q.repeat(3, 1, 1, 1), k, v],
        r"^k has shape \(1, 2, 16, 16\).* must be \(3, H_kv, N_k, 16\)",
    ),
    "k and v differ": (
        [q, k, v[:, :, :9]],
        r"^v has shape \(1, 2, 9, 16\), k \(1, 2, 16, 16\): they must be the same",
    ),
    "heads": ([*qkv(H=3)[:1], k, v], r"^q has 3 heads, k and v 2: H must be a multiple of H_kv"),
    "last dimension": (
        [q, k.transpose(2, 3), v],
        r"^k's last dimension is not contiguous \(stride 16\): pass k.contiguous\(\)",
    ),
    "misaligned": (
        [q, k, misaligned(v)],
        r"^v's rows must start at multiples of 16 bytes; its first is 4 bytes past one.*v.clone",
    ),
    "misaligned rows": (
        [rows_apart(q, 1), k, v],
        r"^q's rows must start at multiples of 16 bytes.* \(2176, 1088, 68\) bytes",
    ),
    "misaligned, 16 bits": (
        [q.half(), misaligned(k.half()), v.half()],
        r"^k's rows must start at multiples of 16 bytes; its first is 2 bytes past one.*k.clone",
    ),
    "misaligned rows, 16 bits": (
        [q.bfloat16(), k.bfloat16(), rows_apart(v.bfloat16(), 4)],
        r"^v's rows must start at multiples of 16 bytes.* \(1280, 640, 40\) bytes",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors(case):
    tensors, message = BAD_TENSORS[case]
    refused(message, *tensors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_differ():
    refused(r"^k is on cuda:0, q on cpu: move them to one device", q, k.cuda(), v)


def test_too_long():
    endless = torch.zeros(8).expand(1, 1, 2**32 + 5, 8)
    message = r"^k has shape \(1, 1, {}, 8\); the kernels count up to 2\^31 in .*: at most 2\^31 - 1024"
    for length in (2**32 + 5, 2**31 - 1023):
        x = endless[:, :, :length]
        refused(message.format(length), q[:, :1, :, :8], x, x)
    checks.check_tensors(q[:, :1, :, :8], *[endless[:, :, :2**31 - 1024]] * 2)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory():
    with pytest.raises(ValueError, match="^q is a Tensor without memory of its own"):
        flash.attention(*torch._efficientzerotensor(3, 1, 1, 8, 8))
    with torch._subclasses.FakeTensorMode():
        o, lse = flash.attention(*torch.zeros(3, 1, 1, 8, 8), return_lse=True)
    assert o.shape == (1, 1, 8, 8) and lse.shape == (1, 1, 8)


BAD_OPTIONS = {
    "stage": (
        {"stage": "falsh2"},
        r"^stage: there is no stage 'falsh2'; there are naive, .*Did you mean 'flash2'\?",
    ),
    "stage is a file name": ({"stage": "flash2.cuh"}, r"For a file of your own, pass a pathlib.Path"),
    "stage's file": ({"stage": Path("/none/mine.cuh")}, r"^stage: /none/mine.cuh is no file"),
    "stage is a folder": ({"stage": Path("/")}, r"^stage: / is no file"),
    "stage's type": ({"stage": 4}, r"^stage must be a name, a pathlib.Path or a Stage, not int"),
    "scale": ({"scale": float("nan")}, r"^scale must be a number from -65536 to 65536, not nan"),
    "scale of fp32's infinity": ({"scale": 1e39}, r"^scale must be a number from .*, not 1e\+39"),
    "scale * log2(e) of fp32's infinity": ({"scale": -2.4e38}, r"^scale must be a number from .*, not -2.4e"),
    "scale without end": ({"scale": 10**400}, r"^scale must be a number from .*, not 1000"),
    "scale's type": ({"scale": "big"}, r"^scale must be a number from .*, not 'big'"),
    "causal": ({"causal": "no"}, r"^causal must be True or False, not 'no'"),
    "causal of two": ({"causal": 2}, r"^causal must be True or False, not 2"),
    "tile True": ({"Br": True}, r"^Br must be an integer from 1 to 1024, not True"),
    **{f"no argument {name}": (
        {name: value},
        rf"^{name}: attention\(\) has no such argument; tile sizes are Br, Bc, Br_bwd, Bc_bwd$",
    ) for name, value in {"Bq": 32, "Brr_bwd": 32, "retrun_lse": True, "stage_bwd": "naive", "q_bwd": 1,
                          "deterministic_bwd": True, "direction": "fwd", "d": 16, "d_bwd": 16, "rows": 5,
                          "self": 1, "shared_memory": 64, "tiles": 1}.items()},
    "tile's type": ({"Br": 32.0}, r"^Br must be an integer from 1 to 1024, not 32.0"),
    "tile of zero": ({"Bc": 0}, r"^Bc must be an integer from 1 to 1024, not 0"),
    "tile not a multiple": (
        {"stage": "flash2", "Br": 12},
        r"^stage 'flash2' needs Br % 8 == 0, and got Br=12, Bc=64; Br=16, Bc=64 would work",
    ),
    "too many threads": (
        {"stage": "naive", "Br": 64, "Bc": 64},
        r"^stage 'naive' needs Br \* Bc <= 1024, and got Br=64, Bc=64; .* would work",
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case):
    options, message = BAD_OPTIONS[case]
    refused(message, q, k, v, **options)


def test_other_types_name_the_stage():
    refused(
        r"^stage 'tiled' takes torch.float32; q, k and v have torch.float16",
        *qkv(dtype=torch.float16),
        stage="tiled",
    )


# ------------------------------------------------------------------------------------------ shared memory
@pytest.mark.parametrize("stage", STAGES[1:])
def test_shared_memory_is_checked_with_both_numbers(stage, monkeypatch):
    """A T4 allows 64 KB, an H100 227 KB: what fits on the one is refused on the other."""
    monkeypatch.setattr(plan, "shared_memory_per_block", lambda device: 65536)
    Br = 128 if stage in MULTICAST else 64        # a cluster's: two blocks have 64 rows each
    refused(
        rf"^stage '{stage}' with Br={Br}, Bc=64, d=256 needs \d{{5,6}} bytes of shared memory a block, "
        r"and this device has 65536; "
        r"(Br=\d+, Bc=\d+ would work|no tile sizes fit)",
        *qkv(d=256, dtype=BY_NAME[stage].dtypes[0]),
        stage=stage,
        Br=Br,
        Bc=64,
    )


@pytest.mark.builds
@pytest.mark.parametrize("stage", [s.name for s in flash.stages("fwd")[1:] if is_end(s)])
def test_header_knows_the_shared_memory(stage, monkeypatch):
    """A header states the bytes that its kernels ask for: past Python's check, CUDA names the number. (Of
    all stages: test_hbm_traffic.)"""
    monkeypatch.setattr(plan, "shared_memory_per_block", lambda device: 10**9)
    s = BY_NAME[stage]
    sizes = ({"Br": Br, "Bc": Bc} for Br in (256, 128, 64) for Bc in (128, 64))
    tiles = next(t for t in sizes if not s._tile_problem(256, 10**9, t))
    stated = evaluate(s.shared, d=256, **tiles)
    assert stated > 227 * 1024
    refused(
        f" {stated} bytes of shared memory a block; at most 232448 are possible",
        *qkv(d=256, dtype=s.dtypes[0]),
        stage=stage,
        **tiles,
        error=RuntimeError,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_default_tiles_shrink_to_fit(stage):
    """The header's own where there is room: on an H100, 227 KB a block, and every GPU of sm_90a has them.
    Smaller ones on a T4 (64 KB) up to d = 128, and on every GPU since Ampere (99 KB at least) up to 248."""
    s = BY_NAME[stage]
    for d in range(8, 257, 8):
        assert s.tiles(d, 227 * 1024) == s.default_tiles(d)
    if s.needs == "sm_90a":
        return
    for shared_memory, most in ((64 * 1024, 128), (99 * 1024, 248)):
        for d in range(8, most + 1, 8):
            assert evaluate(s.shared, d=d, **s.tiles(d, shared_memory)) <= shared_memory


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_some_stage_fits(direction):
    """Any d on any GPU: what attention() takes without a name."""
    for d in range(8, 257, 8):
        assert any(s.fits(d, 48 * 1024) for s in flash.stages(direction))


def test_no_tiles_fit():
    with pytest.raises(
        ValueError,
        match=r"needs \d+ bytes .* has 65536; no tile sizes fit: take a smaller d or another stage",
    ):
        {s.name: s for s in flash.stages("fwd")}["flash2"].tiles(256, 64 * 1024)


# ------------------------------------------------------------------------------------------ stages
def test_registry():
    fwd = flash.stages("fwd")
    assert [s.name for s in fwd[:4]] == ["naive", "tiled", "online_softmax", "flash2"]
    assert [s.number for s in fwd] == list(range(1, len(fwd) + 1))
    for s in fwd:
        assert (
            s.direction == "fwd" and s.path.name == f"fwd_{s.number:02}_{s.name}.cuh" and s.idea and s.dtypes
        )


@pytest.fixture
def own_ladder(monkeypatch, tmp_path):
    """own_ladder(stage=header, ...) is the forward ladder, and gives its stages."""
    monkeypatch.setattr(registry, "STAGES", tmp_path)

    def write(**headers):
        for file in tmp_path.glob("*.cuh"):
            file.unlink()
        for number, (name, header) in enumerate(headers.items(), 1):
            lines = "".join(f"// {line}\n" for line in header.split(" | ") if line)
            (tmp_path / f"fwd_{number:02}_{name}.cuh").write_text(
                f"// Forward stage {number}: {name}\n{lines}")
        return flash.stages("fwd")
    return write


def test_parents(own_ladder, tmp_path):
    root, a, b, c = own_ladder(root="", a="after: root", b="after: a", c="after: a | default: sm_80")
    assert [s.after for s in (root, a, b, c)] == ["", "root", "a", "a"] and c.default == "sm_80"
    assert flash.parent(root) is None and flash.parent(c) == a
    assert flash.lineage(c) == [c, a, root] and flash.lineage(root) == [root]
    mine = tmp_path / "mine.cuh"
    mine.write_text("// after: b\n// predicted: 2x\n// measured: 1.5x,\n//           or more\n")
    stage = flash.read_stage(mine)
    assert flash.lineage(stage) == [stage, b, a, root]
    assert (stage.predicted, stage.measured) == ("2x", "1.5x, or more")
    mine.write_text("// after: nothing\n")
    with pytest.raises(ValueError, match="mine.cuh: after: there is no forward stage 'nothing' to grow from; "
                                         "there are root, a, b, c. A root has no such line"):
        flash.read_stage(mine)


@pytest.mark.parametrize("headers, message", [
    ({"a": "", "b": "after: x"}, "fwd_02_b.cuh: after: there is no forward stage 'x' to grow from; there are "
                                 "a, b"),
    ({"a": "after: a"}, "fwd_01_a.cuh: after: a after a: a circle; let one of them grow from a stage"),
    ({"a": "", "b": "after: c", "c": "after: b"}, "after: b after c after b: a circle"),
    ({"a": "default: Hopper"}, "default: 'Hopper' is neither 'any GPU' nor an architecture, such as sm_80"),
])
def test_parents_make_a_tree(own_ladder, headers, message):
    with pytest.raises(ValueError, match=message):
        own_ladder(**headers)


LADDER = {
    "plain": "",
    "tuned": "after: plain | default: any GPU | deterministic: no | shared: 100 * d",
    "same_bits": "after: plain",
    "portable": "after: plain | types: fp16, bf16 | needs: sm_70; bf16: sm_80",
    "mma": "after: portable | types: fp16, bf16 | needs: sm_80 | shared: 10 * d",
    "ampere": "after: mma | types: fp16, bf16 | needs: sm_80 | default: sm_80 | shared: 100 * d",
    "hopper": "after: mma | types: fp16, bf16 | needs: sm_90a | default: sm_90a | shared: 50 * d",
    "study": "after: hopper | types: fp16, bf16 | needs: sm_90a | deterministic: no",
}


@pytest.mark.parametrize("capability, dtype, d, deterministic, expected", [
    ((7, 0), torch.float32, 64, False, "tuned"),
    ((7, 0), torch.float32, 256, False, "plain"),           # the parent, where the default does not fit
    ((7, 0), torch.float32, 64, True, "plain"),
    ((7, 5), torch.float16, 64, False, "portable"),         # no default is for it: the nearest that runs
    ((8, 6), torch.float16, 64, False, "ampere"),
    ((8, 6), torch.bfloat16, 256, False, "mma"),
    ((9, 0), torch.float16, 64, False, "hopper"),
    ((9, 0), torch.float16, 256, False, "study"),           # what grew from it, before its parent
    ((12, 0), torch.float16, 64, False, "ampere"),          # sm_90a is Hopper's alone
])
def test_the_default(own_ladder, monkeypatch, capability, dtype, d, deterministic, expected):
    """The end of the branch for the latest architecture that the device has, or its nearest relative."""
    own_ladder(**LADDER)
    found = flash.find_stage(None, dtype, gpu(monkeypatch, capability, 10_000), "fwd", deterministic, d)
    assert found.name == expected


def gpu(monkeypatch, capability, shared_memory=227 * 1024) -> torch.device:
    """A GPU that does not have to be there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(stage_module, "find_nvcc", lambda cuda: Path("nvcc"))
    monkeypatch.setattr(registry, "shared_memory_per_block", lambda device: shared_memory)
    return torch.device("cuda")


DECODING = {"B": 1, "H": 8, "H_kv": 2, "N_q": 1, "N_k": 600, "d": 64, "gradients": 0, "masked": 0}
PROMPT = DECODING | {"N_q": 600}
NAMES = "the end of its branch, which is taken "
ELSEWHERE = "from sm_80 on; row_by_row is taken on sm_90a, and {} is sm_"


@pytest.mark.parametrize("capability, sizes, needs, expected, why", [
    ((9, 0), PROMPT, (), "row_by_row", NAMES + "on sm_90a"),
    ((9, 0), PROMPT, ("dropout", "sink"), "row_by_row", NAMES + "on sm_90a"),
    ((9, 0), None, ("varlen",), "packed",
     "the nearest relative of row_by_row, which takes no varlen"),
    ((9, 0), PROMPT, ("sink", "kv_cache"), "ampere_tuned",
     "the nearest relative of row_by_row, which takes no kv_cache"),
    ((9, 0), DECODING, ("sink", "kv_cache"), "split_kv",
     NAMES + "from sm_80 on by calls of N_q <= 16 and N_k >= 512 and not gradients"),
    ((9, 0), DECODING, (), "split_kv",
     NAMES + "from sm_80 on by calls of N_q <= 16 and N_k >= 512 and not gradients"),
    ((9, 0), DECODING | {"H": 64, "N_q": 16}, (), "split_kv_wgmma", NAMES + "on sm_90a by calls of "
     "N_q <= 16 and N_q * H // H_kv > 32 and N_k >= 512 and not gradients"),
    ((9, 0), DECODING | {"H": 64, "N_q": 16}, ("kv_cache",), "split_kv",
     NAMES + "from sm_80 on by calls of N_q <= 16 and N_k >= 512 and not gradients"),
    ((9, 0), DECODING | {"gradients": 1}, (), "row_by_row", NAMES + "on sm_90a"),
    ((9, 0), DECODING, ("dropout",), "row_by_row", NAMES + "on sm_90a"),
    ((9, 0), DECODING, ("masks by head",), "row_by_row", NAMES + "on sm_90a"),
    ((8, 6), PROMPT, (), "ampere_tuned", NAMES + ELSEWHERE.format("a GPU") + "86"),
    ((10, 0), PROMPT, ("varlen",), "ampere_tuned", NAMES + ELSEWHERE.format("a GPU") + "100"),
    (None, PROMPT, (), "ampere_tuned",
     NAMES + "from sm_80 on; row_by_row is taken on sm_90a, and the simulator counts as sm_80"),
])
def test_the_default_by_what_a_call_needs(monkeypatch, capability, sizes, needs, expected, why):
    """Of the ladder itself. None: on the CPU."""
    device = gpu(monkeypatch, capability) if capability else torch.device("cpu")
    stage = flash.find_stage(None, torch.bfloat16, device, "fwd", None, 64, sizes, needs)
    assert stage.name == expected and not stage.lacks(needs)
    assert registry.why_this(stage, None, torch.bfloat16, device, None, 64, sizes, needs) == why


@pytest.mark.parametrize("gradients", [0, 1])
@pytest.mark.parametrize("B, H_kv, N, d, masked, expected", [
    (8, 8, 2048, 256, 0, "multicast_tuned"), (8, 8, 2048, 136, 1, "multicast_tuned"),
    (4, 8, 512, 256, 0, "row_by_row"), (16, 8, 1024, 256, 0, "row_by_row"),
    (8, 2, 2048, 256, 0, "row_by_row"), (16, 8, 1024, 256, 1, "row_by_row"),
    (1, 2, 16384, 256, 0, "multicast_tuned"),
    (8, 8, 2048, 128, 0, "row_by_row"), (8, 1, 2048, 64, 0, "row_by_row"), (8, 8, 2048, 128, 1, "row_by_row"),
    (4, 8, 2048, 128, 0, "row_by_row"), (16, 8, 1024, 64, 0, "row_by_row"),
    (1, 1, 64, 8, 1, "row_by_row"), (4, 8, 512, 256, 1, "row_by_row"), (8, 2, 2048, 256, 1, "row_by_row"),
    (1, 2, 16384, 256, 1, "multicast_tuned")])
def test_the_default_of_the_forward_pass(monkeypatch, B, H_kv, N, d, masked, expected, gradients):
    """On Hopper: in large calls with d > 128 two blocks share K and V; others take the end of that branch
    which is for all."""
    sizes = {"B": B, "H": 8, "H_kv": H_kv, "N_q": N, "N_k": N, "d": d, "gradients": gradients,
             "masked": masked}
    device = gpu(monkeypatch, (9, 0))
    assert flash.find_stage(None, torch.bfloat16, device, d=d, sizes=sizes).name == expected
    nearest = flash.find_stage(None, torch.bfloat16, device, d=d, sizes=sizes, needs=("varlen",))
    assert nearest.name == "packed"


@pytest.mark.parametrize("d, H, N_q, gradients, expected", [
    (64, 8, 1, 0, "split_kv"), (256, 8, 16, 0, "split_kv"), (64, 16, 16, 0, "split_kv"),
    (64, 24, 11, 0, "split_kv_wgmma"), (256, 64, 16, 0, "split_kv_wgmma"), (128, 64, 16, 1, "row_by_row"),
    (64, 8, 17, 0, "row_by_row"), (64, 8, 1, 1, "row_by_row")])
def test_few_queries_with_a_mask(monkeypatch, d, H, N_q, gradients, expected):
    """On Hopper they take what splits the keys, as they do without a mask: with more than 32 packed rows by
    warpgroups."""
    sizes = {"B": 8, "H": H, "H_kv": 8, "N_q": N_q, "N_k": 4096, "d": d, "gradients": gradients, "masked": 1}
    device = gpu(monkeypatch, (9, 0))

    def taken(**window):
        return flash.find_stage(None, torch.bfloat16, device, d=d, sizes=sizes | window).name

    assert taken() == taken(window=4096) == expected
    assert taken(window=4095) == expected.replace("row_by_row", "own_ranges")


@pytest.mark.parametrize("mask, has_window", [
    (flash.masks.window(99, 0), True), (flash.masks.window(99, 0) & flash.masks.causal(), True),
    (flash.masks.window(99, 0) | flash.masks.prefix(4), False), (flash.masks.window(8191, 0), False)])
@pytest.mark.parametrize("d, any_mask, expected", [
    (64, "row_by_row", {"Br": 192, "Bc": 128}), (128, "row_by_row", {"Br": 128, "Bc": 128}),
    (256, "multicast_tuned", {"Br": 128, "Bc": 80})])
def test_the_default_with_a_window(monkeypatch, d, any_mask, expected, mask, has_window):
    """The stage whose warpgroups have ranges of their own, with the tiles that were the fastest. If all that
    is seen is no window, or the window hides nothing: as with any mask."""
    device = gpu(monkeypatch, (9, 0))
    q, k = (torch.empty(1, 8, 8192, d, dtype=torch.bfloat16, device="meta") for _ in "qk")
    visible = mask.bind(q, k)
    stage = flash.find_stage(None, torch.bfloat16, device, d=d, sizes=plan.Keys(k).sizes(q, visible))
    assert stage.name == ("own_ranges" if has_window else any_mask)
    tiles = stage.tiles(d, 227 * 1024, 8 * 8192, window=plan.window_of(visible), keys=8192)
    assert tiles == expected or not has_window


@pytest.mark.parametrize("d, heads, N, expected", [
    (64, 32, 1024, (128, 128)), (64, 256, 1024, (192, 128)), (128, 64, 4096, (128, 128)),
    (128, 64, 8192, (192, 80)), (256, 64, 16384, (128, 80)), (256, 8, 1024, (64, 80))])
def test_tiles_by_length(d, heads, N, expected):
    """Of what most calls on Hopper take: those that were the fastest there (headers)."""
    stage = next(stage for stage in flash.stages("fwd") if stage.name == "row_by_row")
    tiles = stage.tiles(d, 227 * 1024, heads * N, True, keys=N)
    assert (tiles["Br"], tiles["Bc"]) == expected


@pytest.mark.parametrize("d, causal, forward, backward", [
    (64, False, {"row_by_row"}, {"hopper_tuned", "augmented"}),
    (64, True, {"row_by_row"}, {"hopper_tuned", "augmented", "first_stores"}),
    (128, True, {"row_by_row"}, {"hopper_tuned", "augmented", "first_stores"}),
    (256, False, {"row_by_row", "multicast_tuned"}, {"exchanged_tuned", "exchanged_stream_k"})])
def test_what_is_built_ahead(monkeypatch, d, causal, forward, backward):
    """By flash.compile(): of small calls, large ones, and with grouped heads, if these take another stage."""
    gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(ahead, "shared_memory_per_block", lambda device: 227 * 1024)
    monkeypatch.setattr(ahead, "build_all", lambda jobs, done: [name for *_, name in jobs])
    names = flash.compile(d, torch.bfloat16, causal=causal, device="cuda:0")
    assert set(names) == {f"fwd_{name}" for name in forward} | {f"bwd_{name}" for name in backward}


@pytest.mark.parametrize("d, deterministic, needs, expected", [
    (64, False, (), "augmented"), (16, False, ("sink", "d_v"), "augmented"),
    (64, False, ("dropout",), "augmented"), (128, False, (), "augmented"),
    (136, False, (), "exchanged_tuned"), (256, False, (), "exchanged_tuned"),
    (16, True, ("sink", "d_v"), "first_stores"), (64, True, (), "first_stores"),
    (128, True, ("dropout", "sink", "d_v"), "first_stores"),
    (136, True, (), "exchanged_semaphores"), (256, True, (), "exchanged_semaphores"),
    (192, True, ("dropout", "d_v"), "exchanged_semaphores"), (256, True, ("sink",), "exchanged_semaphores"),
    (256, False, ("dropout", "sink"), "exchanged_tuned"), (192, False, ("d_v",), "exchanged_tuned"),
    (64, False, ("varlen",), "packed"), (256, False, ("varlen", "dropout"), "packed"),
    (64, True, ("varlen",), "packed_semaphores"), (256, True, ("varlen", "sink"), "packed_semaphores")])
def test_the_default_of_the_backward_pass(monkeypatch, d, deterministic, needs, expected):
    """On Hopper, in a large call: for d <= 128 statistics are columns of the products, for d > 128 two blocks
    share dS, where the call asks for nothing that the stage lacks; and sums have a fixed order, if it asks
    for that."""
    device, sizes = gpu(monkeypatch, (9, 0)), PROMPT | {"B": 41, "d": d}
    found = flash.find_stage(None, torch.bfloat16, device, "bwd", deterministic, d, sizes, needs)
    assert found.name == expected


@pytest.mark.parametrize("B, H, N, d, expected", [
    (8, 12, 1024, 64, "augmented"), (4, 32, 512, 64, "hopper_tuned"), (1, 32, 1024, 64, "hopper_tuned"),
    (8, 16, 2048, 128, "augmented"), (8, 16, 1024, 128, "hopper_tuned"),
    (1, 8, 1024, 256, "exchanged_tuned")])
def test_small_calls_have_no_idle_warps(monkeypatch, B, H, N, d, expected):
    """Less is hidden there than is left to convert in the end."""
    sizes = PROMPT | {"B": B, "H": H, "H_kv": H, "N_q": N, "N_k": N, "d": d, "gradients": 1}
    found = flash.find_stage(None, torch.bfloat16, gpu(monkeypatch, (9, 0)), "bwd", False, d, sizes)
    assert found.name == expected


@pytest.mark.parametrize("B, H, H_kv, N, d, causal, expected", [
    (8, 16, 16, 2048, 128, 1, "first_stores"), (8, 16, 16, 2048, 128, 0, "augmented"),
    (4, 32, 8, 4096, 128, 1, "first_stores"), (1, 16, 4, 16384, 80, 1, "first_stores"),
    (4, 16, 16, 512, 128, 1, "first_stores"), (1, 16, 16, 1024, 128, 1, "hopper_tuned"),
    (8, 16, 1, 2048, 128, 1, "augmented"), (8, 15, 15, 2048, 128, 1, "augmented"),
    (8, 12, 12, 1024, 64, 1, "first_stores"), (4, 32, 32, 4096, 64, 1, "augmented"),
    (4, 8, 8, 1024, 64, 1, "hopper_tuned"), (4, 32, 32, 4096, 256, 1, "exchanged_tuned")])
def test_causal_calls_add_in_order_where_that_is_faster(monkeypatch, B, H, H_kv, N, d, causal, expected):
    """To and fro, by pairs of key heads. Under another mask they do not."""
    sizes = PROMPT | {"B": B, "H": H, "H_kv": H_kv, "N_q": N, "N_k": N, "d": d, "gradients": 1}
    sizes["masked"], device = causal, gpu(monkeypatch, (9, 0))
    found = flash.find_stage(None, torch.bfloat16, device, "bwd", False, d, sizes | {"causal": causal})
    assert found.name == expected
    other = flash.find_stage(None, torch.bfloat16, device, "bwd", False, d, sizes)
    assert other.name != "first_stores" and (other.name == expected or expected == "first_stores")
    q, k = (torch.empty(B, heads, N, d, dtype=torch.bfloat16, device="meta") for heads in (H, H_kv))
    assert plan.Keys(k, alone=False).sizes(q, 0 if causal else None) == sizes | {
        "causal": causal, "window": plan.MANY}
    window = flash.masks.window(100, 0).bind(q, k)
    assert plan.Keys(k, alone=False).sizes(q, window)["causal"] == 0


@pytest.mark.parametrize("B, H, H_kv, N, d, expected", [
    (2, 8, 1, 1024, 256, "exchanged_stream_k"), (2, 8, 8, 1024, 256, "exchanged_tuned"),
    (2, 8, 2, 2048, 136, "exchanged_stream_k"), (4, 8, 2, 2048, 256, "exchanged_tuned"),
    (1, 8, 2, 4096, 256, "exchanged_tuned"), (2, 8, 1, 1024, 128, "hopper_tuned")])
def test_small_calls_with_grouped_heads_divide_steps(monkeypatch, B, H, H_kv, N, d, expected):
    """Deterministic ones take another stage: here sums of dQ have no order."""
    sizes = PROMPT | {"B": B, "H": H, "H_kv": H_kv, "N_q": N, "N_k": N, "d": d, "gradients": 1}
    device = gpu(monkeypatch, (9, 0))
    assert flash.find_stage(None, torch.bfloat16, device, "bwd", False, d, sizes).name == expected
    in_order = flash.find_stage(None, torch.bfloat16, device, "bwd", True, d, sizes)
    assert in_order.name == ("exchanged_semaphores" if d > 128 else "first_stores")


@pytest.mark.builds
def test_a_backward_stage_for_some_calls(monkeypatch):
    """A condition in its `default` is asked of the call's sizes, and explain() says so."""
    ladder = [replace(stage, default="sm_80", calls="d > 64") if stage.name == "ordered_dq" else stage
              for stage in flash.stages("bwd")]
    stages = flash.stages
    monkeypatch.setattr(registry, "stages", lambda direction=None: ladder if direction == "bwd"
                        else stages(direction))
    for d, expected, why in ((64, "ampere_tuned", "from sm_80 on;"),
                             (128, "ordered_dq", "from sm_80 on by calls of d > 64")):
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 8, d).bfloat16())
        choice = flash.explain(q, k, v).backward
        assert choice.stage.name == expected and choice.why.startswith(NAMES + why)


@pytest.mark.builds
@pytest.mark.parametrize("options, expected", [
    ({}, "wide_warps"), ({"causal": True}, "ampere_tuned"),
    ({"mask": flash.masks.window(3, 0)}, "ampere_tuned"),
    ({"mask": flash.masks.softcap(1.0)}, "ampere_tuned")])
def test_a_stage_for_calls_without_a_mask(monkeypatch, options, expected):
    """Its `default` may ask whether there is one, forward and backward."""
    by_direction = {direction: [replace(s, default="sm_80", calls="not masked") if s.name == name else s
                                for s in flash.stages(direction)]
                    for direction, name in (("fwd", "wide_warps"), ("bwd", "ordered_dq"))}
    stages = flash.stages
    monkeypatch.setattr(registry, "stages", lambda direction=None: by_direction.get(direction) or stages())
    chosen = flash.explain(*(x.requires_grad_() for x in torch.randn(3, 1, 1, 8, 64).bfloat16()), **options)
    assert chosen.forward.stage.name == expected
    assert chosen.backward.stage.name == ("ordered_dq" if expected == "wide_warps" else expected)
    assert ("not masked" in chosen.forward.why) == (not options)


def test_what_no_stage_takes_is_refused_by_the_default(monkeypatch):
    """In fp32 there are no packed sequences: the default's error says what takes them."""
    device = gpu(monkeypatch, (9, 0))
    assert flash.find_stage(None, torch.float32, device, needs=("varlen",)).name == "fp32_tuned"
    q, k, v = (torch.randn(20, 2, 64) for _ in range(3))
    with pytest.raises(ValueError, match="stage 'fp32_tuned' takes no varlen; of its type these do: none"):
        flash.attention_varlen(q, k, v, torch.tensor([0, 20], dtype=torch.int32))


def test_the_default_where_none_will_do(own_ladder, monkeypatch):
    """A sibling; any other; and an error that names the default."""
    cpu = torch.device("cpu")
    own_ladder(plain="deterministic: no", same_bits="after: plain",
               tuned="after: plain | default: any GPU | deterministic: no")
    assert flash.find_stage(None, torch.float32, cpu, "fwd", True).name == "same_bits"
    own_ladder(one="", two="")
    assert flash.find_stage(None, torch.float32, cpu).name == "two"
    own_ladder(**LADDER)
    assert flash.find_stage(None, torch.float16, cpu).name == "ampere"     # though it would run them all
    with pytest.raises(RuntimeError, match="stage 'ampere' cannot run on cuda: needs sm_80"):  # the least
        flash.find_stage(None, torch.float16, gpu(monkeypatch, (6, 0)))


def test_the_default_of_the_ladder():
    """Of the 32-bit gradients the best is not deterministic; the sibling that is, is taken when asked for."""
    cpu = torch.device("cpu")
    for direction in ("fwd", "bwd"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert flash.find_stage(None, dtype, cpu, direction).default
    assert flash.find_stage(None, torch.float32, cpu, "bwd", True).name == "deterministic"


def test_the_scales_sign_is_a_constant(monkeypatch):
    """NEGATIVE_SCALE is 1 below 0, and 0 for 0."""
    asked = []
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "load", lambda stage, macros, device: asked.append(macros) or 1 / 0)
    for scale in (None, 1.0, 0.0, -0.0, -0.5):
        with pytest.raises(ZeroDivisionError):
            flash.attention(q, k, v, stage="flash2", scale=scale)
    assert [macros["NEGATIVE_SCALE"] for macros in asked] == ["0", "0", "0", "0", "1"]


def test_available_says_why_not(monkeypatch):
    stage = flash.stages("fwd")[0]
    assert stage.available("cpu") and str(stage.available("cpu")) == "yes"
    assert not stage.available("meta") and "not on meta" in str(stage.available("meta"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not stage.available("cpu")
    assert "`no-such-compiler` is not on the PATH" in stage.available("cpu").reason
    refused(
        r"stage 'naive' cannot run on cpu: no C\+\+ compiler: `no-such-compiler`.*apt install g\+\+",
        q,
        k,
        v,
        stage="naive",
        error=RuntimeError,
    )


def test_available_compares_compute_capabilities(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(stage_module, "find_nvcc", lambda cuda: Path("nvcc"))
    for needs, runs in {
        "any GPU": True,
        "sm_75": True,
        "sm_80": True,
        "sm_89": False,
        "sm_90a": False,
    }.items():
        stage = flash.Stage(1, "x", "fwd", Path("x"), needs=needs)
        assert bool(stage.available("cuda")) == runs, needs
    assert str(stage.available("cuda")) == "needs sm_90a; a GPU has sm_86"
    types = flash.Stage(1, "x", "fwd", Path("x"), needs="sm_70; bf16: sm_89")
    assert types.available("cuda") and types.available("cuda", torch.float16)
    assert str(types.available("cuda", torch.bfloat16)) == (
        "needs sm_89 for torch.bfloat16; a GPU has sm_86")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert not stage.available("cuda")  # sm_90a runs on no later architecture


def test_a_header_that_makes_no_sense_is_an_error(tmp_path):
    mine = tmp_path / "mine.cuh"
    for header, message in {
        "types: fp13": "types: fp13 not among fp32",
        "typs: fp32": ":1: typs: is no line of a header; types: is one",
        "needs: Hopper": "needs: 'Hopper' is neither 'any GPU' nor a capability, such as sm_80",
        "types: fp16\n// needs: sm_70; bf16: sm_80": "needs: 'sm_70; bf16: sm_80' is neither",
        "workspace: O": "workspace: O is a tensor of the call: give it another name",
        "tiles: rubbish": "tiles: must give Br",
        "tiles: Br=16": "tiles: must give Br and Bc",
        "tiles: d > : Br=16 Bc=32": ":1: tiles: 'd >': invalid syntax",
        "limits: Br %": ":1: limits: 'Br %': invalid syntax",
        "limits: Br % 0 == 0": ":1: limits: 'Br % 0 == 0': integer modulo by zero",
        "limits: __import__('os')": "\": __import__('os') is no arithmetic: there are +",
        "shared: D * 4": ":1: shared: 'D * 4': D is not known here; d, Br, Bc are",
        "hbm: 4 * N": ":1: hbm: '4 * N': N is not known here; B, H, H_kv, N_q, N_k, d, Br, Bc",
        "shared:": ":1: shared: '': invalid syntax",
    }.items():
        mine.write_text(f"// {header}\n")
        refused(f"^{re.escape(str(mine))}.*{re.escape(message)}", q, k, v, stage=mine)
        mine.unlink()  # so that its time changes


def test_numpys_numbers_will_do(monkeypatch):
    """Sizes and scales come out of NumPy often."""
    stage = {s.name: s for s in flash.stages("fwd")}["flash2"]
    assert stage.tiles(64, 65536, Br=numpy.int64(32), Bc=numpy.int32(32)) == {"Br": 32, "Bc": 32}
    with pytest.raises(ValueError, match="^Bq: stage 'flash2' has no such argument; .* are Br and Bc"):
        stage.tiles(64, 65536, Bq=True)
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "load", lambda *_: pytest.fail("reached"))
    for leaf in (q, q.clone().requires_grad_()):
        with pytest.raises(pytest.fail.Exception, match="reached"):
            flash.attention(leaf, k, v, causal=numpy.True_, scale=numpy.float32(0.1),
                            deterministic=numpy.False_)


def test_two_stages_of_one_name(monkeypatch, tmp_path):
    for number in (1, 2):
        (tmp_path / f"fwd_0{number}_mine.cuh").write_text(f"// Forward stage {number}: mine\n")
    monkeypatch.setattr(registry, "STAGES", tmp_path)
    with pytest.raises(ValueError, match="fwd_02_mine.cuh and fwd_01_mine.cuh are both called 'mine'"):
        flash.stages("fwd")


def test_a_file_of_ones_own_has_its_own_name(tmp_path):
    """Also when it is a copy, header and all."""
    mine = tmp_path / "mine.cuh"
    mine.write_text(flash.stages("fwd")[-1].path.read_text())
    assert flash.read_stage(mine).name == "mine"
