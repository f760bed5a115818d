"""attention_varlen(): packed sequences, against float64 and one sequence at a time; and bench.py --varlen."""

import json

import pytest
import torch
from conftest import DEVICES, check, check_gradients, poisoned, with_two_schedules
from test_extras import expected_keep, held

import flash
from flash_ladder.bench import modes, varlen
from flash_ladder.plan import Plan

M = flash.masks
# Rows of q and of k, of each sequence: none, 1, ends of tiles, more queries than keys, fewer
MIXED = [(70, 70), (0, 5), (1, 1), (64, 64), (129, 100), (3, 200), (40, 0), (33, 128)]
TILES = {"Br": 64, "Bc": 64, "Br_bwd": 32, "Bc_bwd": 64}


def stages(device, deterministic=True):
    """Those that packed sequences take there: of one sequence alone Hopper's may be the best."""
    return {argument: flash.find_stage(None, torch.bfloat16, torch.device(device), direction, deterministic,
                                       needs=("varlen",))
            for argument, direction in (("stage", "fwd"), ("backward", "bwd"))}


def starts(lengths, device="cpu"):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


class Packed:
    """q, k, v and gradients of o and L, packed; and where each sequence's rows are."""

    def __init__(self, pairs, H, H_kv, d, device, dtype=torch.bfloat16, d_v=None):
        g = torch.Generator().manual_seed(3)
        (self.of_q, self.of_k) = zip(*pairs)
        shapes = ((sum(self.of_q), H, d), (sum(self.of_k), H_kv, d), (sum(self.of_k), H_kv, d_v or d),
                  (sum(self.of_q), H, d_v or d))
        q, k, v, self.do = (torch.randn(shape, generator=g).to(device, dtype) for shape in shapes)
        self.leaves = [x.requires_grad_() for x in (q, k, v)]
        self.dlse = (torch.randn(H, sum(self.of_q), generator=g) * 0.5).to(device)
        self.starts = starts(self.of_q, device), starts(self.of_k, device)

    def call(self, **options):
        """[o, L, dq, dk, dv]"""
        o, lse = flash.attention_varlen(*self.leaves, *self.starts, return_lse=True, **options)
        return [o.detach(), lse.detach(), *torch.autograd.grad((o, lse), self.leaves, (self.do, self.dlse))]

    def each(self):
        """Of each sequence: slices of q's and of k's rows."""
        q, k = (x.tolist() for x in self.starts)
        for b in range(len(q) - 1):
            yield slice(q[b], q[b + 1]), slice(k[b], k[b + 1])

    def alone(self, rows, keys):
        """q, k, v, dO and dL of one sequence, as attention() takes them."""
        q, k, v = (x.detach()[at].transpose(0, 1)[None] for x, at in zip(self.leaves, (rows, keys, keys)))
        return q, k, v, self.do[rows].transpose(0, 1)[None], self.dlse[:, rows][None]


def unpacked(x):
    return x.transpose(0, 1)[None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("H, H_kv, d, causal", [(4, 2, 64, True), (1, 1, 136, False)])
def test_each_sequence_is_a_call_of_its_own(H, H_kv, d, causal, device):
    """The same bits, with the same tiles; and near float64. Rows that nobody wrote would be NaN."""
    x = Packed(MIXED, H, H_kv, d, device)
    tiles = TILES | {"Br_bwd": 64} if stages(device)["backward"].name == "packed_semaphores" else TILES
    with poisoned():
        o, lse, *gradients = x.call(causal=causal, deterministic=True, **tiles)
    for rows, keys in x.each():
        q, k, v, do, dlse = x.alone(rows, keys)
        dq, dk, dv = (g[at] for g, at in zip(gradients, (rows, keys, keys)))
        if 0 in (q.shape[2], k.shape[2]):       # attention() takes none
            assert not o[rows].any() and not dq.any() and not dk.any() and not dv.any()
            assert (lse[:, rows] == -torch.inf).all()
            continue
        leaves = [t.requires_grad_() for t in (q, k, v)]
        alone = flash.attention(*leaves, causal=causal, return_lse=True, deterministic=True, **stages(device),
                                **tiles)
        found = [unpacked(dq), unpacked(dk), unpacked(dv)]
        assert torch.equal(unpacked(o[rows]), alone[0]) and torch.equal(lse[:, rows][None], alone[1])
        for mine, theirs in zip(found, torch.autograd.grad(alone, leaves, (do, dlse))):
            assert torch.equal(mine, theirs)
        diagonal = k.shape[2] - q.shape[2] if causal else None
        leaves = [t.detach() for t in leaves]
        check(unpacked(o[rows]), lse[:, rows][None], *leaves, diagonal)
        check_gradients(found, *leaves, do, diagonal, None, dlse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage, backward", [(None, None), ("packed", "packed"),
                                             ("packed", "packed_semaphores")])
def test_many_sequences_and_views(stage, backward, device):
    """More than a warp has lanes, most of them short; q, k and v are views of one tensor, with other rows
    between theirs. Not deterministic."""
    lengths = [n * 7 % 11 for n in range(75)] + [90]
    x = Packed([(n, n) for n in lengths], 2, 2, 64, device)
    qkv = torch.stack([t.detach() for t in x.leaves], 1).requires_grad_()
    options = {"causal": True, "stage": stage, "backward": backward}
    o = flash.attention_varlen(*qkv.unbind(1), x.starts[0], **options)
    found, = torch.autograd.grad(o, qkv, x.do)
    again = x.call(**options)
    torch.testing.assert_close(o, again[0], rtol=0, atol=0)
    for rows, keys in x.each():
        if rows.start < rows.stop:
            q, k, v, do, _ = x.alone(rows, keys)
            check_gradients([unpacked(t) for t in found[rows].unbind(1)], q, k, v, do, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_more_sequences_than_a_warp_sees_in_two_looks(device):
    """One more than 32 * 33, so that the last one has a lane of its own."""
    lengths = [(n * 5 + 1) % 3 for n in range(32 * 33 + 1)]
    x = Packed([(n, n) for n in lengths], 1, 1, 64, device)
    q, k, v = (t.detach() for t in x.leaves)
    with poisoned():
        o = flash.attention_varlen(q, k, v, x.starts[0])
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
    S = (q[:, 0].double() @ k[:, 0].double().mT) / 8
    right = S.masked_fill(sequence[:, None] != sequence, -torch.inf).softmax(-1) @ v[:, 0].double()
    assert (o[:, 0].double() - right).abs().max() < 0.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward, H, H_kv, d, causal", [
    ("packed", 4, 2, 64, True), ("packed", 1, 1, 136, False), ("packed_semaphores", 4, 2, 64, True),
    ("packed_semaphores", 2, 1, 256, False)])
def test_boxes_end_with_their_sequences(backward, H, H_kv, d, causal, device):
    """Hopper's stages: near float64; and a sequence of infinities leaves the others as they were, whose last
    tiles go on in its rows, and into which its own go on."""
    x = Packed(MIXED, H, H_kv, d, device)
    options = {"causal": causal, "stage": "packed", "backward": backward}
    with poisoned():
        o, lse, *found = x.call(**options)
    others = []
    for n, (rows, keys) in enumerate(x.each()):
        mine = [o[rows], lse[:, rows], *(g[at] for g, at in zip(found, (rows, keys, keys)))]
        if 0 in MIXED[n]:
            assert (mine.pop(1) == -torch.inf).all() and not any(x.any() for x in mine)
            continue
        others += [mine] if n != 4 else []
        q, k, v, do, dlse = x.alone(rows, keys)
        diagonal = k.shape[2] - q.shape[2] if causal else None
        check(unpacked(mine[0]), mine[1][None], q, k, v, diagonal)
        check_gradients([unpacked(g) for g in mine[2:]], q, k, v, do, diagonal, None, dlse)
    rows, keys = list(x.each())[4]
    for leaf, at in zip(x.leaves, (rows, keys, keys)):
        leaf.data[at] = torch.inf
    x.do[rows] = torch.inf
    o, lse, *found = x.call(**options)
    again = [[o[rows], lse[:, rows], *(g[at] for g, at in zip(found, (rows, keys, keys)))]
             for n, (rows, keys) in enumerate(x.each()) if n != 4 and 0 not in MIXED[n]]
    for mine, before in zip(again, others, strict=True):
        for n, (x, was) in enumerate(zip(mine, before)):
            if n < 2:
                assert torch.equal(x, was)
            torch.testing.assert_close(x, was, rtol=2e-2, atol=2e-2)


@with_two_schedules("Br, d, dtype", [(64, 64, torch.float16), (192, 64, torch.bfloat16),
                                     (128, 128, torch.bfloat16), (128, 256, torch.float16)])
def test_blocks_that_take_many_sequences(Br, d, dtype, device, schedule):
    """On Hopper: tiles that have no rows, some of them a block's first or last; keys that begin with those of
    another sequence. The bits are those of each sequence alone."""
    lengths = [(n % 4 * 40, n * 37 % 150) for n in range(14)]
    x = Packed(lengths, 2, 1, d, device, dtype)
    q, k, v = (t.detach() for t in x.leaves)
    with poisoned():
        o, lse = flash.attention_varlen(q, k, v, *x.starts, causal=True, return_lse=True, stage="packed",
                                        Br=Br)
    for rows, keys in x.each():
        if rows.start == rows.stop or keys.start == keys.stop:
            assert not o[rows].any() and (lse[:, rows] == -torch.inf).all()
            continue
        alone = flash.attention(*x.alone(rows, keys)[:3], causal=True, return_lse=True, stage="hopper_tuned",
                                Br=Br)
        assert torch.equal(unpacked(o[rows]), alone[0]) and torch.equal(lse[:, rows][None], alone[1])


@with_two_schedules("d, dtype, causal", [(64, torch.bfloat16, True), (128, torch.float16, False),
                                         (192, torch.bfloat16, False), (200, torch.bfloat16, True)])
def test_the_same_gradients_in_each_run(d, dtype, causal, device, schedule):
    """On Hopper: sums of dQ in the order of each sequence's keys, whichever sequences are there beside it.
    (How many heads of a key head are summed by one block depends on how many tiles there are.)"""
    x = Packed([(3, 8), (0, 70), (200, 300), (130, 64), (40, 0)], 4, 2, d, device, dtype)
    options = {"causal": causal, "stage": "packed", "backward": "packed_semaphores", "deterministic": True}
    with poisoned():
        o, _, *found = x.call(**options)
    for _ in range(50 if device == "cuda" else 1):
        assert all(torch.equal(mine, again) for mine, again in zip(found, x.call(**options)[2:]))
    for rows, keys in x.each():
        mine = [unpacked(g[at]) for g, at in zip(found, (rows, keys, keys))]
        if rows.start == rows.stop or keys.start == keys.stop:
            assert not any(g.any() for g in mine)
            continue
        q, k, v, do, dlse = x.alone(rows, keys)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        alone = flash.attention(*leaves, return_lse=True, **options)
        assert torch.equal(mine[0], torch.autograd.grad(alone, leaves, (do, dlse))[0])
        leaves = [t.detach() for t in leaves]
        diagonal = k.shape[2] - q.shape[2] if causal else None
        check_gradients(mine, *leaves, do, diagonal, None, dlse)


@pytest.mark.parametrize("backward, d", [
    ("packed", 64), ("packed_semaphores", 64), ("packed_semaphores", 256)])
def test_hopper_with_dropout_a_sink_and_d_v(backward, d, monkeypatch):
    """The same elements are dropped as by the stage that needs no Hopper."""
    held(monkeypatch)
    x = Packed([(40, 40), (30, 150), (130, 60)], 2, 1, d, "cpu", d_v=32)
    sink = torch.tensor([0.5, -1.0], requires_grad=True)
    found = []
    for options in ({"stage": "ampere_tuned", "backward": "ampere_tuned"},
                    {"stage": "packed", "backward": backward}):
        o = flash.attention_varlen(*x.leaves, *x.starts, dropout_p=0.3, sink=sink, **options)
        found.append([o, *torch.autograd.grad(o, [*x.leaves, sink], x.do)])
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="'packed' is not deterministic"):
        flash.attention_varlen(*x.leaves, *x.starts, backward="packed", deterministic=True)


def test_a_document_mask_is_the_same():
    x = Packed([(50, 50), (1, 1), (77, 77)], 2, 1, 32, "cpu")
    o, lse, *gradients = x.call(causal=True)
    ids = torch.arange(3).repeat_interleave(x.starts[0].diff())
    q, k, v = (unpacked(t.detach()).requires_grad_() for t in x.leaves)
    expected = flash.attention(q, k, v, causal=True, mask=M.document(ids), return_lse=True)
    found = torch.autograd.grad(expected, (q, k, v), (unpacked(x.do), x.dlse[None]))
    for mine, theirs in zip((unpacked(o), lse[None], *map(unpacked, gradients)), (*expected, *found)):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_masks_count_from_each_sequences_last_key():
    x = Packed([(40, 90), (0, 3), (70, 33)], 2, 2, 32, "cpu")
    mask = M.window(20, 3) & M.softcap(5.0) & M.alibi(torch.tensor([0.1, 0.4])) & M.prefix(9)
    for backward in ("packed", "packed_semaphores"):
        hoppers = x.call(mask=mask, stage="packed", backward=backward)
        for mine, theirs in zip(hoppers, x.call(mask=mask)):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    found = x.call(mask=mask, deterministic=True, **TILES)
    for rows, keys in x.each():
        if rows.start < rows.stop:
            *leaves, do, dlse = x.alone(rows, keys)
            leaves = [t.requires_grad_() for t in leaves]
            alone = flash.attention(*leaves, mask=mask, return_lse=True, deterministic=True, **stages("cpu"),
                                    **TILES)
            gradients = torch.autograd.grad(alone, leaves, (do, dlse))
            at = (rows, None, rows, keys, keys)
            for mine, theirs, part in zip(found, (*alone, *gradients), at):
                assert torch.equal(mine[:, rows][None] if part is None else unpacked(mine[part]), theirs)


def test_dropout_a_sink_and_d_v(monkeypatch):
    """Each sequence drops what it would as that batch element; L has the sink; v has 32 columns."""
    seed = held(monkeypatch)
    x = Packed([(40, 40), (30, 50)], 2, 1, 64, "cpu", d_v=32)
    sink = torch.tensor([0.5, -1.0], requires_grad=True)
    o = flash.attention_varlen(*x.leaves, *x.starts, dropout_p=0.3, sink=sink)
    gradients = torch.autograd.grad(o, [*x.leaves, sink], x.do)
    keep = expected_keep(seed, 2, 2, 40, 50, 0.3)
    leaves = [t.detach().double().requires_grad_() for t in x.leaves]
    s = sink.detach().double().requires_grad_()
    parts = []
    for b, (rows, keys) in enumerate(x.each()):
        q, k, v = (t[at].transpose(0, 1) for t, at in zip(leaves, (rows, keys, keys)))
        scores = torch.cat([q @ k.mT / 8, s[:, None, None].expand(2, q.shape[1], 1)], 2)
        P = scores.softmax(2)[..., :-1] * keep[b, :, :q.shape[1], :k.shape[1]]
        parts.append((P @ v).transpose(0, 1))
    expected = torch.cat(parts)
    torch.testing.assert_close(o.double(), expected, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, [*leaves, s], x.do.double())):
        torch.testing.assert_close(mine.double(), theirs, rtol=3e-2, atol=6e-2)


# ------------------------------------------------------------------------------------------ around it
@pytest.mark.skipif(not flash.can_inspect(), reason=str(flash.can_inspect()))
@pytest.mark.parametrize("stage, backward, d", [
    ("ampere_tuned", "ampere_tuned", 32), ("packed", "packed", 32), ("packed", "packed_semaphores", 32),
    ("packed", "packed_semaphores", 256)])
def test_the_checker_finds_nothing(stage, backward, d):
    """With a workspace between red zones, and all rows counted."""
    x = Packed([(33, 40), (0, 3), (70, 20)], 2, 1, d, "cpu")
    tiles = TILES | {"Br_bwd": 64} if stage == "packed" else TILES
    with flash.inspect() as report:
        x.call(causal=True, stage=stage, backward=backward, **tiles)
    assert not report.findings, report.findings
    pairs = sum(max(0, k - q + row + 1) for q, k in ((33, 40), (70, 20)) for row in range(q))
    assert report.flops == (4 + 10) * d * 2 * pairs


def test_one_plan_for_all_lengths(monkeypatch):
    """Of as many sequences and rows: so a CUDA graph may replay other lengths."""
    made = []
    init = Plan.__init__
    monkeypatch.setattr(Plan, "__init__", lambda self, *a, **b: made.append(self) or init(self, *a, **b))
    q, k, v = torch.randn(3, 60, 1, 24).bfloat16()
    for lengths in ([60, 0], [13, 47]):
        at = starts(lengths)
        o, lse = flash.attention_varlen(q, k, v, at, return_lse=True)
        for first, end in zip(at, at[1:]):
            if first < end:
                alone = (unpacked(x[first:end]) for x in (q, k, v))
                check(unpacked(o[first:end]), lse[None, :, first:end], *alone)
    assert len(made) == 1


def test_views_alone_are_between_o_and_its_gradient():
    """o[0] would cost a copy of dO, into zeros."""
    q = torch.randn(5, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    found, todo = set(), [x.grad_fn for x in flash.attention_varlen(
        q, q, q, torch.tensor([0, 2, 5], dtype=torch.int32), return_lse=True)]
    while todo:
        node = todo.pop()
        found.add(type(node).__name__)
        todo += [before for before, _ in node.next_functions if before]
    copying = ("Select", "Slice", "Index", "AsStrided", "Clone", "Copy", "Cat", "Stack")
    assert any("Attention" in name for name in found)
    assert not [name for name in found if name.startswith(copying)]      # other versions name views otherwise


def test_operators():
    """opcheck; torch.compile in one graph; FlopCounterMode counts all pairs."""
    x = Packed([(20, 30), (9, 0), (5, 5)], 2, 1, 16, "cpu")
    expected = x.call(causal=True, deterministic=True)

    def loss(q, k, v, *at):
        return flash.attention_varlen(q, k, v, *at, causal=True, return_lse=True, deterministic=True)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*x.leaves, *x.starts)
    found = (*compiled, *torch.autograd.grad(compiled, x.leaves, (x.do, x.dlse)))
    for mine, theirs in zip(found, expected):
        assert torch.equal(mine, theirs)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        flash.attention_varlen(*x.leaves, *x.starts, causal=False)
    assert counter.get_total_flops() == 4 * 16 * 2 * 34 * 35
    q, k, v = (unpacked(t.detach()).requires_grad_() for t in x.leaves)
    torch.library.opcheck(torch.ops.flash.forward, (
        q, k, v, 0, None, [], [], [], 0.0, None, None, *x.starts, *[None] * 8, [], []))
    with pytest.raises(ValueError, match="^cu_seqlens_k must begin with 0"):
        torch.ops.flash.forward(q, k, v, 0, None, [], [], [], 0.0, None, None, *x.starts[:1] * 2, *[None] * 8,
                                [], [])


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_a_cuda_graph_takes_other_lengths():
    q, k, v = torch.randn(3, 256, 2, 64, device="cuda").bfloat16()
    at = starts([100, 156], "cuda")
    flash.attention_varlen(q, k, v, at, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash.attention_varlen(q, k, v, at, causal=True)
    at.copy_(starts([3, 253], "cuda"))
    graph.replay()
    assert torch.equal(o, flash.attention_varlen(q, k, v, at, causal=True))


# ------------------------------------------------------------------------------------------ what is refused
def good(**others):
    x = torch.randn(10, 2, 16).bfloat16()
    return {"q": x, "k": x, "v": x, "cu_seqlens_q": starts([4, 6])} | others


@pytest.mark.parametrize("options, message", [
    ({"q": torch.randn(1, 2, 10, 16)}, "q must have 3 dimensions, (total, H, d), not 4"),
    ({"v": torch.randn(9, 2, 16).bfloat16()}, "v has shape (9, 2, 16), k (10, 2, 16)"),
    ({"k": torch.randn(10, 2, 24).bfloat16()}, "it must be (total_k, H_kv, 16)"),
    ({"v": torch.randn(10, 0, 16).bfloat16()}, "v is empty"),
    ({"q": torch.randn(10, 3, 16).bfloat16()}, "H must be a multiple of H_kv"),
    ({"q": torch.randn(10, 16, 2).bfloat16().transpose(1, 2)}, "q's last dimension is not contiguous"),
    ({"cu_seqlens_q": [0, 10]}, "cu_seqlens_q must be a torch.Tensor, not list"),
    ({"cu_seqlens_q": torch.tensor([0, 10])}, "cu_seqlens_q must be a dense torch.int32 of shape (sequences"),
    ({"cu_seqlens_q": starts([])}, "cu_seqlens_q must be a dense torch.int32"),
    ({"cu_seqlens_q": starts([10]).to("meta")}, "cu_seqlens_q is on meta, q on cpu"),
    ({"cu_seqlens_q": starts([4, 5])}, "cu_seqlens_q must begin with 0, never fall, and end with the rows"),
    ({"cu_seqlens_q": starts([12, -2])}, "never fall"),
    ({"cu_seqlens_k": starts([10])}, "cu_seqlens_q has 3 numbers, cu_seqlens_k 2"),
    ({"max_seqlen_q": 0}, "max_seqlen_q must be an int of at least 1, not 0"),
    ({"max_seqlen_k": 5}, "max_seqlen_k is 5, and a sequence has 6 rows"),
    ({"mask": M.document(torch.zeros(10).int())}, "attention_varlen() takes none, causal, window, prefix, "),
    ({"mask": M.window(3) | M.window(4)}, "not |: for that, attention("),
    ({"mask": M.causal(2)}, "its `diagonal` would be that of all sequences"),
    ({"mask": M.prefix(torch.tensor([3, 4]))}, "its tensors must be the same for all sequences"),
    ({"stage": "mma"}, "stage 'mma' takes no varlen; of its type these do: ampere_tuned, packed; every "),
    ({"backward": "late_dq"}, "backward stage 'late_dq' takes no varlen; of its type these do: ampere_tuned"),
    ({name: torch.randn(10, 2, 16) for name in "qkv"}, "stage 'fp32_tuned' takes no varlen; of its type "
     "these do: none; every stage from flash2 and recompute on takes attention("),
])
def test_refused(options, message):
    """Before anything is built."""
    with pytest.raises(ValueError) as error:
        flash.attention_varlen(**good(**options))
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------ bench.py --varlen
def test_the_one_shape_has_as_much_work():
    lengths = varlen.mixed_lengths("cuda")
    B, N = varlen.one_shape(lengths)
    assert len(lengths) == 64 and 64 <= min(lengths) < 100 and 7000 < max(lengths) <= 8192
    assert B * N * N == pytest.approx(sum(n * n for n in lengths), rel=1e-3)
    assert B * N == pytest.approx(sum(lengths), rel=0.01)


def test_the_same_kernel_on_one_shape(monkeypatch):
    """On Hopper the parent of packed, which is that kernel without packed sequences."""
    case = varlen.Case([9, 7], 2, 1, 64, True, torch.bfloat16, "cpu")
    assert case.of_one_shape() == case.stages() == stages("cpu", deterministic=False)
    packed = {argument: flash.find_stage("packed", torch.bfloat16, torch.device("cpu"), direction)
              for argument, direction in (("stage", "fwd"), ("backward", "bwd"))}
    monkeypatch.setattr(varlen.Case, "stages", lambda self: packed)
    assert case.of_one_shape() == {"stage": "hopper_tuned", "backward": "hopper_tuned"}
    assert case.stage_of("bwd", "one") == "hopper_tuned" and case.stage_of("bwd", "flex") is None


def test_bench(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flash, "default_device", lambda: torch.device("cpu"))
    assert modes.main(["--varlen", "--peers", "document,flex", "--heads", "2:1", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "varlen.json").read_text())["rows"]
    assert {row["name"]: row["status"] for row in rows} == {
        "varlen": "ok", "one": "ok", "document": "ok", "flex": "failed"}
    assert all(row["difference"] < 0.01 for row in rows if row["name"] in ("varlen", "document"))
    assert {row["name"]: row["stage"] for row in rows} == {
        "varlen": "ampere_tuned", "one": "ampere_tuned", "document": None, "flex": None}
    out, err = capsys.readouterr()
    assert "| attention_varlen (ampere_tuned) | one shape (ampere_tuned) | document mask |" in out
    assert "| 64 | causal | forward | " in out and "4 sequences of " in out and "needs a GPU" in err
    with pytest.raises(SystemExit):
        modes.main(["--varlen", "--batch", "2"])
    assert "--varlen: has lengths and stages of its own, and takes no --batch" in capsys.readouterr().err


def test_compile_a_mask():
    def masked(x, starts):
        return flash.attention_varlen(x, x, x, starts, mask=flash.masks.window(5, 0))

    x, starts = torch.randn(20, 2, 16).bfloat16(), torch.tensor([0, 7, 20], dtype=torch.int32)
    compiled = torch.compile(masked, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, starts), masked(x, starts))


def test_beginnings_of_inference_mode():
    with torch.inference_mode():
        starts = torch.tensor([0, 20], dtype=torch.int32)
    x = torch.randn(20, 2, 16).bfloat16().requires_grad_()
    with pytest.raises(ValueError, match=r"cu_seqlens_q was made in inference mode.*cu_seqlens_q.clone\(\)"):
        flash.attention_varlen(x, x, x, starts)
