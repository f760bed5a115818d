"""Decoding: attention_kvcache() over caches in one piece and in pages, and the calls that take split_kv."""

import contextlib
import json

import pytest
import torch
from conftest import check, max_error, random_qkv

import flash
from flash_ladder import attention, launch, plan, registry
from flash_ladder.bench import decode, modes
from flash_ladder.grid import errors, wrong
from tutorials.exercises.exercise import inlined

M = flash.masks
LENGTHS = [0, 192, 77, 3]          # of the batch elements' N_max = 192 keys
N_MAX, PAGES = 192, 60


def cache(G=4, H_kv=2, N_q=1, d=64, page_size=0, dtype=torch.bfloat16, device="cpu"):
    """(q, k_cache, v_cache, options). What no length covers is NaN, and of a block table out of range."""
    B = len(LENGTHS)
    q, k, v = (x.transpose(1, 2).contiguous()
               for x in random_qkv(B, G * H_kv, H_kv, N_q, N_MAX, d, device, dtype))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    for b, n in enumerate(LENGTHS):
        k[b, n:], v[b, n:] = torch.nan, torch.nan
    options = {"cache_seqlens": lengths}
    if page_size:
        pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3))
        table = pages[:B * N_MAX // page_size].view(B, -1).int().to(device)
        paged = [torch.full((PAGES, page_size, H_kv, d), torch.nan, dtype=dtype, device=device) for _ in "kv"]
        for to, x in zip(paged, (k, v)):
            to[table.long()] = x.view(B, -1, page_size, H_kv, d)
        k, v = paged
        for b, n in enumerate(LENGTHS):
            table[b, -(-n // page_size):] = 1 << 20
        options["block_table"] = table
    return q, k, v, options


def of_one(k, b, n, options):
    """(1, H_kv, n, d): the keys of a batch element."""
    if (table := options.get("block_table")) is not None:
        rows = k[table[b, : -(-n // k.shape[1])].long()].flatten(0, 1)[:n]
    else:
        rows = k[b, :n]
    return rows.transpose(0, 1)[None]


def check_all(o, lse, q, k, v, options, causal=False, lengths=LENGTHS):
    """Each batch element against float64."""
    assert o.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    for b, n in enumerate(lengths):
        if n == 0:
            assert (o[b] == 0).all() and (lse[b] == -torch.inf).all()
            continue
        keys, values = (of_one(x, b, n, options) for x in (k, v))
        found = errors(o[b:b + 1].transpose(1, 2), lse[b:b + 1], q[b:b + 1].transpose(1, 2), keys, values,
                       n - q.shape[1] if causal else None)
        assert not wrong(found), f"{b}: {wrong(found)}"


@pytest.mark.parametrize("stage, G, N_q, causal, page_size, splits", [
    ("split_kv", 4, 1, False, 0, 0),
    ("split_kv", 1, 16, True, 16, 2),
    ("split_kv", 8, 3, True, 16, 3),
    ("split_kv", 3, 5, True, 64, 0),
    ("ampere_tuned", 4, 1, False, 0, 0),
    ("ampere_tuned", 2, 70, True, 16, 0),
], ids=str)
def test_against_float64(stage, G, N_q, causal, page_size, splits, device):
    q, k, v, options = cache(G, N_q=N_q, page_size=page_size, device=device)
    o, lse = flash.attention_kvcache(q, k, v, causal=causal, stage=stage, num_splits=splits, return_lse=True,
                                     **options)
    check_all(o, lse, q, k, v, options, causal)
    again = flash.attention_kvcache(q, k, v, causal=causal, stage=stage, num_splits=splits, return_lse=True,
                                    **options)
    assert torch.equal(o, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("d, Br", [(64, None), (200, 16)])
def test_any_number_of_splits(d, Br, device):
    """Of three tiles: some tiles in a range, one, none; eight ranges at a time are merged. Of 72 a thread has
    the 24th and, later, the 72nd: those that have a tile."""
    q, k, v, options = cache(d=d, dtype=torch.float16, device=device)
    tiles = {} if Br is None else {"Br": Br}
    for splits in (1, 2, 4, 9, 11, 72):
        o, lse = flash.attention_kvcache(q, k, v, stage="split_kv", num_splits=splits, return_lse=True,
                                         **options, **tiles)
        check_all(o, lse, q, k, v, options)


@pytest.mark.parametrize("page_size", [0, 16])
def test_append(page_size, device):
    """New keys come where the lengths say, nothing else changes, and the queries see them."""
    q, k, v, options = cache(N_q=2, page_size=page_size, device=device)
    options["cache_seqlens"][1] = 190
    new = [torch.randn(4, 2, 2, 64, generator=torch.Generator().manual_seed(n)).to(k) for n in range(2)]
    if page_size:
        table = options["block_table"]
        table[0, 0] = min(set(range(PAGES)) - set(table.flatten().tolist()))
    lengths = [n + 2 for n in options["cache_seqlens"].tolist()]
    before = k.clone()
    o, lse = flash.attention_kvcache(q, k, v, *new, causal=True, stage="split_kv", return_lse=True, **options)
    for b, n in enumerate(lengths):
        assert torch.equal(of_one(k, b, n, options)[0, :, -2:].transpose(0, 1), new[0][b])
        assert torch.equal(of_one(v, b, n, options)[0, :, -2:].transpose(0, 1), new[1][b])
    assert int(((k != before) & ~(k.isnan() & before.isnan())).any(-1).sum()) == 4 * 2 * 2
    check_all(o, lse, q, k, v, options, True, lengths)


def test_token_by_token(device):
    """A cache that grows by one key a step has attention()'s causal result, row by row."""
    q, k, v = random_qkv(2, 4, 2, 20, 20, 64, device, torch.bfloat16)
    caches = [torch.full((2, 24, 2, 64), torch.nan, dtype=q.dtype, device=device) for _ in "kv"]
    rows = []
    for n in range(20):
        step = [x[:, :, n:n + 1].transpose(1, 2) for x in (q, k, v)]
        rows.append(flash.attention_kvcache(step[0], *caches, *step[1:], cache_seqlens=n, stage="split_kv"))
    o = torch.cat(rows, 1).transpose(1, 2)
    check(o, flash.attention(q, k, v, causal=True, return_lse=True)[1], q, k, v, 0)


@pytest.mark.parametrize("stage", ["split_kv", "ampere_tuned"])
def test_masks_and_sinks(stage, device):
    """The same as attention() of a batch element's own keys: positions count from its last one."""
    q, k, v, options = cache(N_q=3, device=device)
    first = torch.tensor([0, 40, 5, 1], dtype=torch.int32, device=device)
    sink = torch.randn(8, generator=torch.Generator().manual_seed(5)).to(device)
    mask = M.window(50, 0) & M.padding(first) & M.softcap(2.0)
    o, lse = flash.attention_kvcache(q, k, v, mask=mask, sink=sink, stage=stage, return_lse=True, **options)
    for b, n in enumerate(LENGTHS):
        if n == 0:
            assert (o[b] == 0).all()
            torch.testing.assert_close(lse[b], sink[:, None].expand(8, 3), rtol=0, atol=1e-6)
            continue
        own = M.window(50, 0) & M.padding(first[b:b + 1]) & M.softcap(2.0)
        expected = flash.attention(q[b:b + 1].transpose(1, 2), k[b:b + 1, :n].transpose(1, 2),
                                   v[b:b + 1, :n].transpose(1, 2), mask=own, sink=sink, stage="ampere_tuned",
                                   return_lse=True)
        assert max_error(o[b:b + 1].transpose(1, 2), expected[0]) < 1e-2
        torch.testing.assert_close(lse[b:b + 1], expected[1], rtol=0, atol=1e-5)
        if stage == "ampere_tuned":
            assert torch.equal(o[b:b + 1].transpose(1, 2), expected[0])


def test_the_merge_waits_for_the_ranges(tmp_path):
    """Without it, all that it reads may not be there yet."""
    source = flash.find_stage("split_kv", torch.bfloat16, torch.device("cpu")).path.read_text()
    before, wait, after = inlined(source, "merge_ranges.cuh").rpartition("merge_kernel(FwdParams p) {")
    without = after.replace("wait_for_previous_kernel();", "", 1)
    (tmp_path / "mine.cuh").write_text(before + wait + without)
    q, k, v, options = cache()
    with flash.inspect() as report:
        flash.attention_kvcache(q, k, v, stage=tmp_path / "mine.cuh", num_splits=2, **options)
    assert {(f.what, f.kernel, f.element.partition("[")[0]) for f in report.findings} == {
        ("too early", "merge_kernel", "parts")}


def test_a_mask_of_lists_waits_for_them(tmp_path):
    """Else tiles are worked out before the kernel that lists them, in the workspace, has ended."""
    stage = flash.find_stage("split_kv", torch.bfloat16, torch.device("cpu"))
    text = stage.path.read_text()
    wait = next(line for line in text.splitlines(True) if "!Mask::is_range ||" in line)
    (tmp_path / "mine.cuh").write_text(text.replace(wait, ""))
    q, k, v = random_qkv(1, 4, 1, 1, 200, 64, "cpu", torch.bfloat16)
    ids = torch.arange(200, dtype=torch.int32) // 70
    early = {("too early", "forward_kernel", "parts")}
    for file, found in ((stage.path, set()), (tmp_path / "mine.cuh", early)):
        with flash.inspect() as report:
            flash.attention(q, k, v, mask=M.document(ids[-1:], ids), stage=file)
        assert {(f.what, f.kernel, f.element.partition("[")[0]) for f in report.findings} == found


@pytest.mark.parametrize("stage, splits", [("split_kv", 2), ("ampere_tuned", 0)])
def test_no_finding(stage, splits):
    """The checker's, of ragged lengths in pages."""
    q, k, v, options = cache(N_q=2, page_size=16)
    with flash.inspect() as report:
        o, lse = flash.attention_kvcache(q, k, v, causal=True, stage=stage, num_splits=splits,
                                         return_lse=True, **options)
    assert report.findings == []
    check_all(o, lse, q, k, v, options, True)


# ------------------------------------------------------------------------------------------ operators
def test_operator(device):
    q, k, v, options = cache(N_q=2, page_size=16, device=device)
    views = [x.transpose(1, 2) for x in (q, k, v)]
    torch.library.opcheck(torch.ops.flash.kvcache, (
        *views, options["cache_seqlens"], options["block_table"], 0, None, [], [], [], 0.0, None, None, None,
        None, None, "split_kv", 0, 2, None, None))
    mask = M.window(50, 0).bind(*views[:2], N_MAX)
    torch.library.opcheck(torch.ops.flash.kvcache, (
        *views, options["cache_seqlens"], options["block_table"], None, mask.text, [], list(mask.ints), [],
        0.0, None, None, None, None, None, "ampere_tuned", mask.diagonals, 0, None, None))


def test_compiled(device):
    """In one graph, with the append, the cache in place."""
    q, k, v, options = cache(device=device)
    options["cache_seqlens"] -= options["cache_seqlens"] // 100
    new = [torch.ones(4, 1, 2, 64, dtype=q.dtype, device=device) for _ in "kv"]

    def step(q, k, v, k_new, v_new, lengths):
        return flash.attention_kvcache(q, k, v, k_new, v_new, cache_seqlens=lengths, causal=True,
                                       mask=M.window(60, 0), stage="split_kv")

    eager, compiled = [k.clone(), v.clone()], [k.clone(), v.clone()]
    expected = step(q, *eager, *new, options["cache_seqlens"])
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, *compiled, *new,
                                                                     options["cache_seqlens"])
    assert torch.equal(found, expected)
    assert torch.equal(eager[0].nan_to_num(7), compiled[0].nan_to_num(7))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("page_size", [0, 16])
def test_nothing_waits_for_the_gpu(page_size):
    """No host synchronisation in a decode step; and the same step in a CUDA graph, with other lengths."""
    q, k, v, options = cache(page_size=page_size, device="cuda")
    lengths = options["cache_seqlens"]
    lengths.copy_(torch.tensor([1, 150, 77, 3]))
    if page_size:
        options["block_table"][:] = torch.arange(48).view(4, 12)
    k.nan_to_num_(0.5)
    v.nan_to_num_(0.5)
    new = [torch.randn(4, 1, 2, 64, device="cuda").to(q) for _ in "kv"]

    def step():
        return flash.attention_kvcache(q, k, v, *new, causal=True, **options)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    for n in (0, 20, 190):
        lengths.fill_(n)
        graph.replay()
        assert torch.equal(o, step())


# ------------------------------------------------------------------------------------------ what calls take
def chosen(H=8, N_q=1, N_k=600, requires_grad=False, dtype=torch.bfloat16, causal=False, mask=None,
           dropout_p=0.0, d=64, B=1):
    """The stage's name and Br."""
    q, k, v = random_qkv(B, H, 2, N_q, N_k, d, "cpu", dtype)
    call = attention.checked(q.requires_grad_(requires_grad), k, v, "causal", causal, mask, None, None, None,
                             None, {}, dropout_p)
    return call.forward[0].name, call.forward[1]["Br"]


def test_what_calls_take():
    """split_kv for decoding alone; and where it is of no use, or cannot, ampere_tuned."""
    assert chosen() == chosen(mask=M.window(9, 0)) == chosen(H=64) == ("split_kv", 32)
    assert chosen(N_q=16, causal=True) == chosen(H=68) == ("split_kv", 128)
    assert chosen(N_q=16, d=128) == chosen(N_q=16, d=128, B=220) == ("split_kv", 64)
    for options in ({"N_q": 17}, {"N_k": 500}, {"requires_grad": True}, {"dropout_p": 0.5},
                    {"mask": M.alibi(torch.ones(8))}):
        assert chosen(**options)[0] == "ampere_tuned", options
    assert chosen(dtype=torch.float32)[0] == "fp32_tuned"
    cpu = torch.device("cpu")
    sizes = {"B": 1, "H": 8, "H_kv": 2, "N_q": 1, "N_k": 600, "d": 64, "gradients": 0, "masked": 0}
    stage = flash.find_stage("split_kv", torch.bfloat16, cpu)
    assert registry.why_this(stage, None, torch.bfloat16, cpu, None, 64, sizes) == (
        "the end of its branch, which is taken from sm_80 on by calls of "
        "N_q <= 16 and N_k >= 512 and not gradients")


def test_a_call_without_a_name(device):
    q, k, v = random_qkv(1, 8, 2, 1, 600, 64, device, torch.bfloat16)
    o, lse = flash.attention(q, k, v, return_lse=True)
    assert torch.equal(o, flash.attention(q, k, v, stage="split_kv"))
    check(o, lse, q, k, v)
    report = contextlib.nullcontext() if device == "cuda" else flash.inspect()
    with report as found:
        flash.attention(q, k, v)
    assert found is None or [x.name for x in found.kernels] == ["forward_kernel", "merge_kernel"]


@pytest.mark.parametrize("B, H, H_kv, N_q, N_k, d, d_v, tiles, options", [
    (1, 32, 8, 16, 200, 64, 64, {}, {}),                     # 64 packed rows
    (2, 12, 2, 11, 200, 128, 64, {}, {"causal": True}),      # 66: two warpgroups, the second one has two rows
    (1, 6, 2, 13, 300, 72, 40, {"Bc": 16}, {"sink": True}),  # the sink is in the first range alone
    (1, 16, 2, 70, 150, 128, 128, {}, {"causal": True}),     # several tiles of packed rows
    (1, 8, 1, 16, 64, 256, 256, {}, {"sink": True}),         # one range: O as it is
    (1, 8, 2, 16, 260, 64, 64, {}, {"mask": M.window(40, 0) | M.prefix(9)}),     # lists of tiles
    (1, 8, 2, 16, 260, 64, 64, {}, {"mask": M.softcap(2.0), "scale": -0.2})])
def test_packed_rows_of_warpgroups(device, schedule, B, H, H_kv, N_q, N_k, d, d_v, tiles, options):
    q, k, v = random_qkv(B, H, H_kv, N_q, N_k, d, device, torch.bfloat16)
    v = v[..., :d_v]
    if options.get("sink"):
        options = options | {"sink": torch.randn(H, device=device)}
    o, L = flash.attention(q, k, v, stage="split_kv_wgmma", return_lse=True, **tiles, **options)
    floats = (x.float() for x in (q, k, v))
    right, L_right = flash.attention(*floats, stage="flash2", return_lse=True, **options)
    assert (o - right).abs().max() < 0.02 * right.abs().max() and (L - L_right).abs().max() < 0.01


@pytest.mark.skipif(not flash.can_inspect(), reason=str(flash.can_inspect()))
@pytest.mark.parametrize("ring", ["", "K_smem", "V_smem"])
def test_buffers_go_round(ring, monkeypatch, tmp_path):
    """Three ranges of seven tiles, and three buffers. One that is given back before the product is done, or
    never, is found."""
    monkeypatch.setattr(plan, "multiprocessors", lambda device: (3, 228 * 1024))
    monkeypatch.setenv("FLASH_SIM_SECONDS", "5")
    text = flash.find_stage("split_kv_wgmma", torch.bfloat16, torch.device("cpu")).path.read_text()
    q, k, v = random_qkv(1, 6, 2, 13, 300, 72, "cpu", torch.bfloat16)
    right = f"      wgmma_wait<0>();\n      {ring}.release(t);\n"
    assert not ring or text.count(right) == 1

    def findings(name, text):
        (tmp_path / f"{name}.cuh").write_text(text)
        with flash.inspect() as report:
            flash.attention(q, k, v, stage=tmp_path / f"{name}.cuh", Br=64, Bc=16)
        return report.findings

    if not ring:
        assert findings("right", text) == []
        return
    early = f"      {ring}.release(t);\n      wgmma_wait<0>();\n"
    assert [x.what for x in findings("early", text.replace(right, early))] == ["race"]
    with pytest.raises(RuntimeError, match="deadlock"):
        findings("never", text.replace(right, "      wgmma_wait<0>();\n"))


@pytest.fixture
def nothing_is_built(monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(launch, "build", lambda *_, **__: pytest.fail("built something before the error"))


@pytest.mark.usefixtures("nothing_is_built")
def test_refused_by_split_kv():
    q, k, v = random_qkv(1, 8, 2, 1, 600, 64, "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match="'split_kv' takes no mask that differs .*: ampere_tuned does"):
        flash.attention(q, k, v, mask=M.alibi(torch.ones(8)), stage="split_kv")
    with pytest.raises(ValueError, match="'split_kv' takes no dropout; of its type these do: ampere_tuned"):
        flash.attention(q, k, v, dropout_p=0.5, stage="split_kv")


def changed(**changes):
    """The arguments of a right call, but these: a value, or a function of the right one."""
    q, k, v, options = cache(page_size=16)
    arguments = {"q": q, "k_cache": k, "v_cache": v, **options}
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return arguments


LONG = torch.tensor([0, 192, 77, 3])
WRONG = {
    "q of three dimensions": ({"q": lambda q: q[0]}, "^q must have 4 dimensions"),
    "no tensor": ({"k_cache": None}, "^k_cache must be a torch.Tensor, not NoneType"),
    "a type": ({"v_cache": lambda v: v.half()}, "^v_cache has type torch.float16"),
    "fp32": ({x: lambda x: x.float() for x in ("q", "k_cache", "v_cache")}, "takes no kv_cache"),
    "another d": ({"k_cache": lambda k: k[..., :32]}, r"^k_cache has shape \(60, 16, 2, 32\); for q"),
    "d": ({x: lambda x: x[..., :60].contiguous() for x in ("q", "k_cache", "v_cache")}, "d = 60; d must be"),
    "heads": ({"q": lambda q: q[:, :, :7]}, "^k_cache has shape .* 7 a multiple of H_kv"),
    "v": ({"v_cache": lambda v: v[1:]}, "^v_cache has shape"),
    "a stride": ({"k_cache": lambda k: k.mT.contiguous().mT}, "^k_cache's last dimension is not contig"),
    "lengths of a type": ({"cache_seqlens": LONG}, r"^cache_seqlens must be int32 of shape \(4,\)"),
    "too long": ({"cache_seqlens": (LONG + 1).int()}, "^cache_seqlens must be from 0 to 192"),
    "negative": ({"cache_seqlens": -1}, "^cache_seqlens must be from 0 to 192.*not -1"),
    "no room": ({"k": torch.zeros(4, 1, 2, 64).bfloat16(), "v": torch.zeros(4, 1, 2, 64).bfloat16()},
                "^cache_seqlens must be from 0 to 191"),
    "a k alone": ({"k": torch.zeros(4, 1, 2, 64).bfloat16()}, "^k and v come together"),
    "a new type": ({"k": torch.zeros(4, 1, 2, 64), "v": torch.zeros(4, 1, 2, 64)},
                   "^k must be torch.bfloat16"),
    "no lengths": ({"k": torch.zeros(4, 1, 2, 64).bfloat16(), "v": torch.zeros(4, 1, 2, 64).bfloat16(),
                    "cache_seqlens": None}, "^cache_seqlens must say where k and v go"),
    "a table's type": ({"block_table": lambda x: x.long()}, "^block_table must be int32"),
    "a table's shape": ({"block_table": lambda x: x[1:]}, r"^block_table must be int32 of shape \(4, "),
    "a page": ({"block_table": lambda x: x + 50}, r"^block_table\[1\] has .* pages are 0 to 59"),
    "pages": ({"k_cache": lambda k: k[:, :8], "v_cache": lambda v: v[:, :8]}, "pages of 8 keys; .* of 16"),
    "no table": ({"block_table": None}, r"^k_cache has shape .* it must be \(4, N_max, H_kv, 64\)"),
    "a gradient": ({"q": lambda q: q.float().requires_grad_().bfloat16()}, "has no gradient"),
    "a mask": ({"mask": M.document(torch.zeros(1).int(), torch.zeros(192).int())},
               "^mask: queries is a tensor by query or key"),
    "a or b": ({"mask": M.window(3, 0) | M.prefix(3)}, r"^mask: a \| b"),
    "a sink": ({"sink": torch.zeros(3)}, r"^sink must be floats of shape \(8,\)"),
    "splits": ({"num_splits": -1}, "^num_splits must be an integer from 0 to 1024, not -1"),
    "a tile": ({"Br_bwd": 16}, "^Br_bwd: attention_kvcache\\(\\) has no such argument"),
    "a stage": ({"stage": "exp2"}, "'exp2' takes no kv_cache; of its type these do: ampere_tuned, split_kv"),
}


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("what", WRONG)
def test_errors(what):
    changes, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        flash.attention_kvcache(**changed(**changes))


# ------------------------------------------------------------------------------------------ bench.py --decode
def test_bench(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flash, "default_device", lambda: torch.device("cpu"))
    where = ["--out", str(tmp_path), "--seqlens", "512", "--heads", "4:2"]
    assert modes.main(["--decode", "--queries", "1,3", "--peers", "sdpa,flex", *where]) == 0
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [(row["N_q"], row["name"], row["status"]) for row in rows] == [
        (N_q, name, "failed" if name == "flex" else "ok")
        for N_q in (1, 3) for name in ("ours", "split_kv", "paged", "ampere_tuned", "sdpa", "flex")]
    assert all(row["error"] < 1e-2 and row["ms"] > 0 for row in rows if row["name"] != "flex")
    one = decode.Shape(1, 512, 3, 4, 2, 64)
    moved = 2 * (2 * 2 * 512 * 64 + 2 * 4 * 3 * 64)          # K and V, Q and O
    assert one.moved_bytes == moved == pytest.approx(1e6 * rows[6]["gb_per_s"] * rows[6]["ms"])
    out, err = capsys.readouterr()
    assert f"| {one} | 0.25 MiB | " in out and "a copy's" in out
    assert f"flex_attention, {one}: needs a GPU" in err


def test_an_error_of_the_bench():
    """The pages hold other keys: it is their own result that theirs is compared with."""
    x = decode.Buffers(decode.Shape(2, 128, 1, 4, 2, 64), "cpu")
    calls = decode.contenders(x, ["sdpa"])
    ours, paged = (calls[name](0) for name in ("ours", "paged"))
    assert decode.error("ours", ours, x) < 1e-2 > decode.error("paged", paged, x)
    assert decode.error("ours", paged, x) > 0.1 < decode.error("paged", ours, x)


@pytest.mark.parametrize("arguments, message", [
    (["--decode", "--queries", "1,17"], "--queries: 17; a decode step has up to 16"),
    (["--decode", "--seqlens", "100"], "--seqlens: 100; with --decode a multiple of 64"),
    (["--decode", "--dtype", "fp32"], "--decode: caches are of 16-bit types"),
    (["--decode", "--peers", "math"], "there is no 'math'; with --decode there are sdpa, fa2, flex"),
    (["--decode", "--pass", "bwd"], "--decode: times forward calls that see all keys, and takes no --pass"),
    (["--decode", "--varlen"], "takes no --varlen"),
    (["--queries", "4"], "--queries: goes with --decode")])
def test_errors_of_the_bench(arguments, message, capsys):
    with pytest.raises(SystemExit):
        modes.main(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


def test_layouts_and_memory_of_what_comes_beside():
    q, cache, new = (torch.randn(1, N, 2, 16).bfloat16() for N in (1, 8, 1))
    lengths, sink = torch.tensor([3], dtype=torch.int32), torch.zeros(2)
    flash.attention_kvcache(q, cache, cache, new, new, cache_seqlens=lengths, sink=sink)
    right = {"k": new, "v": new, "cache_seqlens": lengths, "sink": sink}
    for name, other, message in (("k", new.to_sparse(), "k has layout torch.sparse_coo"),
                                 ("k", torch.nested.nested_tensor([new[0]]), "k is a nested tensor"),
                                 ("cache_seqlens", lengths.to_sparse(), "cache_seqlens has layout"),
                                 ("sink", sink.to_sparse(), "sink is on cpu, with layout torch.sparse_coo")):
        with pytest.raises(ValueError, match=message):
            flash.attention_kvcache(q, cache, cache, **(right | {name: other}))
    pages = torch.zeros(1, 1, dtype=torch.int32).to_sparse()
    with pytest.raises(ValueError, match="block_table has layout torch.sparse_coo"):
        flash.attention_kvcache(q, cache, cache, cache_seqlens=lengths, block_table=pages)
    sink.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="sink is a Tensor without memory"):
        flash.attention_kvcache(q, cache, cache, new, new, cache_seqlens=lengths, sink=sink)
