"""bench.py --timeline: marks in a stage, the model that gives them times, what is drawn of them."""

import argparse
import itertools
import json
import re
import subprocess

import numpy
import pytest
import torch
from test_nvcc import NVCC, SERIALISED, WHY_NOT, compile_stage

import flash
from flash_ladder import ahead, launch
from flash_ladder.bench import arguments, chart, marks, modes, steps, timeline
from flash_ladder.bench.marks import BEGIN, END, POINT, Block, Mark, Source, Span
from flash_ladder.grid import MULTICAST, OWN_RANGES, SIDE_BRANCH, UP_TO_64, WRITERS, is_end

BOTH = ("fwd", "bwd")
STAGES, BACKWARD = ({stage.name: stage for stage in flash.stages(direction) if timeline.has_marks(stage)}
                    for direction in BOTH)
ALL = [*STAGES.values(), *BACKWARD.values()]
needs_nvcc = pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
# Bytes that are spilled for marks: by the producer, which has 24 registers; and where d is not 128
SPILLED = {"seamless": 8, "early_wait": 8, "hopper_tuned": 16, "stream_k": 32, "own_rows": 24,
           "multicast_tuned": 16, "own_ranges": 16, "persistent": 8, "whole_tiles": 16, "transposed_dq": 8,
           "next_keys": 12, "writer_warp": 8, "semaphores": 60, "idle_warps": 16, "augmented": 16,
           "first_stores": 32, "row_by_row": 44}
NOT_IN_FLIGHT = (("fwd", "lazy_rescale"), ("fwd", "cut_diagonal"), ("fwd", "hopper_tuned"),
                 ("fwd", "multicast_tuned"), ("fwd", "stream_k"), ("bwd", "seeded"))
SPILLED_BACKWARD = {("dq_by_turns", 64): 8, ("hopper_tuned", 64): 28, ("overlap", 256): 16,
                    ("exchanged_ds", 256): 56}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(flash, "default_device", lambda: torch.device("cpu"))


# ------------------------------------------------------------------------------------------ the marks in CUDA
def test_every_hopper_stage_leaves_marks():
    """But two, as docs/timeline.md says, also of those that do and are in no table there."""
    assert list(STAGES)[:4] == ["tma", "wgmma", "warp_specialized", "overlap"]
    assert list(BACKWARD)[:5] == ["tma", "wgmma", "warp_specialized", "tma_reduce", "overlap"]
    assert all(stage.needs.startswith("sm_90") for stage in ALL)
    hopper = {(stage.direction, stage.name) for stage in flash.stages() if stage.needs.startswith("sm_90")}
    marked = {(stage.direction, stage.name) for stage in ALL}
    assert hopper - marked == {("bwd", "packed"), ("bwd", "packed_semaphores")}
    folder = flash.ROOT / "results/cpu/timeline"
    drawn = {(direction, name) for direction, name in marked
             if (folder / f"timeline_{'bwd_' * (direction == 'bwd')}{name}.json").exists()}
    assert marked - drawn == {*(("fwd", name) for name in (*MULTICAST, *OWN_RANGES, "split_kv_wgmma")),
                              *(("bwd", name) for name in UP_TO_64)}


@needs_nvcc
@pytest.mark.parametrize("stage", [
    stage for stage in ALL if stage.default or stage.number % 6 == 1 or stage.name in list(SPILLED)[::6]],
    ids=lambda stage: stage.path.stem)
def test_compiles_with_marks(stage, tmp_path):
    """Marks everywhere, in six stages not where products are under way: ptxas serialises none, and spills
    nothing but a few bytes of producers. Of one stage a pass the host's code, too. Of rungs that calls do not
    take one of six, and of those of them that spill. With the mask whose calls take it, and a d of theirs."""
    more = {"TIMELINE_FILE": timeline.FILES[stage.direction],
            "TIMELINE_IN_FLIGHT": str(int((stage.direction, stage.name) not in NOT_IN_FLIGHT))}
    if stage.name in OWN_RANGES:
        more["MASK_FILE"] = flash.STAGES / "masks" / "window.cuh"
    output = ("-c", "-Xcompiler", "-fPIC") if stage.name == "tma" else ("-cubin",)
    d = 64 if stage.name in UP_TO_64 else 256 if stage.name in MULTICAST else 128
    causal = stage.name not in OWN_RANGES
    report = compile_stage(stage, "sm_90a", d, causal, tmp_path, torch.bfloat16, more=more, output=output)
    assert SERIALISED not in report, report
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    assert spilled <= SPILLED.get(stage.name, 0) and (spilled or "warning" not in report), report
    made = (tmp_path / "stage.out").read_bytes()
    assert b"8timeline5marks" in made       # the buffer
    assert stage.name != "tma" or all(f"flash_timeline_{name}".encode() in made
                                      for name in ("bytes", "clear", "read"))


@needs_nvcc
@pytest.mark.parametrize("d, serialised", [(128, True), (256, False)])
def test_marks_that_serialise_products(d, serialised, tmp_path):
    """As docs/timeline.md says: those of cut_diagonal, causal, while products are under way."""
    more = {"TIMELINE_FILE": timeline.FILES["fwd"], "TIMELINE_IN_FLIGHT": "1"}
    report = compile_stage(STAGES["cut_diagonal"], "sm_90a", d, True, tmp_path, torch.bfloat16, more=more)
    assert (SERIALISED in report) == serialised, report


@needs_nvcc
@pytest.mark.parametrize("name, d", SPILLED_BACKWARD)
def test_what_marks_of_the_backward_pass_spill(name, d, tmp_path):
    """Little, as docs/timeline.md says, and no product is serialised for it. Of some stages."""
    more = {"TIMELINE_FILE": timeline.FILES["bwd"], "TIMELINE_IN_FLIGHT": "1"}
    report = compile_stage(BACKWARD[name], "sm_90a", d, True, tmp_path, torch.bfloat16, more=more)
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    assert SERIALISED not in report and spilled == SPILLED_BACKWARD[name, d], report


@needs_nvcc
@pytest.mark.parametrize("stage", [STAGES["pingpong"], BACKWARD["hopper_tuned"]], ids=["fwd", "bwd"])
def test_without_the_flag_nothing_is_marked(stage, tmp_path):
    """The compiler gets the same text as if flash_fwd.cu or flash_bwd.cu had no such lines."""
    source = flash.ROOT / f"flash_{stage.direction}.cu"
    without = tmp_path / source.name
    text = source.read_text()
    without.write_text(re.sub(r"#ifdef TIMELINE_FILE.*?#endif\n", "", text, flags=re.S))
    assert without.read_text() != text
    code = []
    macros = flash.definitions(stage, torch.bfloat16, 64, False, stage.default_tiles(64))
    defines = [f'-D{name}="{x}"' if "FILE" in name else f"-D{name}={x}" for name, x in macros.items()]
    for file in (source, without):
        done = subprocess.run([NVCC, "-E", "-std=c++17", "-arch=compute_90a", f"-I{flash.ROOT}", *defines,
                               file], capture_output=True, text=True, check=True)
        code.append([line for line in done.stdout.splitlines() if line and not line.startswith("#")])
    assert code[0] == code[1] and any("ward_kernel" in line for line in code[0])


@pytest.mark.parametrize("stage, kind, call, label, ring", [
    ("tma", "wait", "mbarrier_wait(", "mbarrier_wait", ""),
    ("tma", "copy", "mbarrier_arrive_expect(", "load_tiles", ""),
    ("wgmma", "product", "wgmma_PV(", "wgmma_PV", ""),
    ("warp_specialized", "copy", "V_smem.fill(", "V_smem.fill", "V"),
    ("warp_specialized", "empty", "K_smem.fill(", "K_smem.fill", "K"),
    ("overlap", "product", "wgmma_QK<", "multiply_S", "K"),
    ("overlap", "softmax", "softmax_step(", "softmax", ""),
    ("overlap", "wait", "V_smem.wait_until_full(", "V_smem.wait_until_full", "V"),
    ("pingpong", "turn", "turns.wait(", "turns.wait", ""),
    ("hopper_tuned", "maximum", "maximum_step(", "maximum", ""),
    ("hopper_tuned", "exponential", "exponentials(", "exponential", ""),
    ("hopper_tuned", "wait", "V_smem.pass(", "V_smem.pass", "V"),
    ("hopper_tuned", "finish", "wgmma_wait<0>", "wgmma_wait", ""),
    ("hopper_tuned", "store", "store_panels(", "store_panels", ""),
])
def test_labels_are_the_stages_own_words(stage, kind, call, label, ring):
    line, source = line_of(STAGES[stage], call), Source(STAGES[stage])
    assert (source.label(kind, line), source.ring(line)) == (label, ring)


@pytest.mark.parametrize("stage, kind, call, label, ring", [
    ("tma", "copy", "mbarrier_arrive_expect(", "load_tiles", ""),
    ("tma", "product", "multiply(dP_reg", "dP", ""),
    ("tma", "product", "multiply<Br / 16>(dK_reg", "dK", ""),
    ("wgmma", "product", "wgmma_QK<width / 16>(S_reg", "S", ""),
    ("wgmma", "product", "wgmma_PV(dV_reg", "dV", ""),
    ("dq_by_turns", "product", "wgmma_dQ<", "dQ", ""),
    ("dq_by_turns", "meeting", "named_barrier_arrive(", "named_barrier_arrive", ""),
    ("warp_specialized", "copy", " fill(Q_smem", "fill(Q_smem)", "Q"),
    ("warp_specialized", "empty", " fill(dO_smem", "fill(dO_smem)", "dO"),
    ("warp_specialized", "copy", "K_smem.fill(", "K_smem.fill", "K"),
    ("warp_specialized", "meeting", "named_barrier_sync(", "named_barrier_sync", ""),
    ("tma_reduce", "bulk_add", "", "bulk_add", ""),
    ("overlap", "release", "dO_smem.release(", "release", "dO"),
    ("overlap", "dS", "for_both(P_frag", "for_both(P_frag, dP_reg)", ""),
    ("seeded", "elements", " seed(S_reg", "seed(S_reg, L_i)", ""),
    ("seeded", "gradients", "for_each_pair(", "store", ""),
    ("transposed_dq", "product", "wgmma_dQ<", "dQ", ""),
    ("transposed_dq", "product", "  wgmma_PV(dK_reg", "dK", ""),
    ("hopper_tuned", "store", "store_parts(", "store_parts", ""),
    ("hopper_tuned", "store", "store_staged<room>(dV", "store_staged", ""),
])
def test_labels_of_the_backward_pass(stage, kind, call, label, ring):
    """A product goes by what it makes; bulk_add has no line of the stage."""
    line, source = line_of(BACKWARD[stage], call) if call else 0, Source(BACKWARD[stage])
    assert (source.label(kind, line), source.ring(line)) == (label, ring)


@pytest.mark.parametrize("stage, calls", [
    ("tma", {"for_both(S_reg": "P and dS", "round_to_A(P_frag": "elements", "round_to_A(dS_frag": "shared",
             "for_each(dQ_reg": "sums", "for_each(dK_reg": "elements", "for_each_pair(": "gradients"}),
    ("warp_specialized", {"for_both(S_reg": "P and dS", "store_fragments(": "shared"}),
    ("overlap", {"for_both(S_reg": "P", "for_both(P_frag": "dS", "store_fragments(": "shared"}),
    ("hopper_tuned", {"for_each(S_reg, [&](float& x": "P", "clear_unseen(S_reg": "elements",
                      "for_both(S_reg, dP_reg": "dS", " seed(S_reg": "elements"})])
def test_what_a_stage_does_with_elements(stage, calls):
    source = Source(BACKWARD[stage])
    assert {call: source.work(line_of(BACKWARD[stage], call)) for call in calls} == calls


# ------------------------------------------------------------------------------------------ the model
def lane(*all_marks):
    """Marks in short: (kind, side, amount, ring and step)."""
    made = []
    for kind, side, amount, tile in all_marks:
        ring, step = re.fullmatch(r"(|mbarrier |[A-Z])(-?\d*)", tile).groups()
        step = int(step or 0)
        made.append(Mark(kind, side, kind, amount, ring, step))
    return made


def product(amount, left=0):
    """A group of products, and the wait for it."""
    return ("product", POINT, amount, ""), ("finish", BEGIN, left, ""), ("finish", END, left, "")


def softmax(columns=128):
    return ("softmax", BEGIN, columns, ""), ("softmax", END, columns, "")


def run(**lanes):
    """The spans of a model, by lane, row and kind: (start, end)."""
    found = {}
    for span in marks.spans(steps.in_steps(Block(lanes))):
        found.setdefault((span.lane, span.row, span.kind), []).append((span.start, span.end))
    return found


def test_tensor_cores_do_one_group_at_a_time():
    found = run(a=lane(*product(64)), b=lane(*product(32), *product(8)))
    assert found["tensor cores", "tensor cores", "product"] == [(0, 64), (64, 96), (96, 104)]
    assert found["a", "products", "product"] == [(0, 64)]
    assert found["b", "products", "product"] == [(0, 96), (96, 104)]
    assert found["b", "work", "finish"] == [(0, 96), (96, 104)]


def test_a_softmax_under_a_product():
    """wgmma_wait<1> waits for the first group alone: the softmax runs beside the second."""
    found = run(a=lane(("product", POINT, 64, ""), ("product", POINT, 64, ""), ("finish", BEGIN, 1, ""),
                       ("finish", END, 1, ""), *softmax(), ("finish", BEGIN, 0, ""), ("finish", END, 0, "")))
    assert found["a", "work", "softmax"] == [(64, 144)]
    assert found["a", "products", "product"] == [(0, 64), (0, 128)]


def test_softmaxes_share_what_makes_exponentials():
    """The first has 40 of its 80 steps alone; then both have half."""
    found = run(a=lane(*softmax()), b=lane(*product(40), *softmax(64)))
    assert found["b", "work", "softmax"] == [(40, 120)] and found["a", "work", "softmax"] == [(0, 120)]


def test_rings():
    """A copy waits for the buffer, a wait for the copy, of its own step."""
    ask = [mark for tile in ("K0", "K1", "K2") for mark in (
        ("empty", BEGIN, 0, tile), ("empty", END, 2, tile), ("copy", POINT, 51200, tile))]
    use = [mark for tile in ("K0", "K1", "K2") for mark in (
        ("wait", BEGIN, 0, tile), ("wait", END, 0, tile), *product(300), ("release", POINT, 0, tile))]
    found = run(user=lane(*use), producer=lane(*ask))
    assert found["producer", "copies", "copy"] == [(0, 100), (0, 200), (400, 500)]
    assert found["producer", "work", "empty"] == [(0, 400)]
    assert found["user", "work", "wait"] == [(0, 100)]
    assert found["user", "products", "product"] == [(100, 400), (400, 700), (700, 1000)]


def test_turns():
    """The last warpgroup gives the first one its first turn; then each waits for the one before."""
    def user(first, work):
        return lane(*[("end of turn", POINT, 0, "")] * first, ("turn", BEGIN, 0, ""), ("turn", END, 0, ""),
                    *product(work), ("end of turn", POINT, 0, ""))
    found = run(a=user(0, 50), b=user(1, 30))
    assert found["b", "work", "turn"] == [(0, 50)]
    assert found["tensor cores", "tensor cores", "product"] == [(0, 50), (50, 80)]


def test_barriers_of_the_block():
    barrier = "barrier", POINT, 0, ""
    found = run(a=lane(*product(70), barrier), b=lane(barrier, *softmax()))
    assert found["b", "work", "softmax"] == [(70, 150)]


def test_meetings_of_warpgroups():
    """At a named barrier; those of another number are others."""
    def user(work, number):
        return lane(*product(work), ("meeting", BEGIN, number, ""), ("meeting", END, number, ""), *product(1))
    found = run(a=user(20, 1), b=user(30, 1), c=user(40, 2))
    assert found["a", "work", "meeting"] == [(20, 50)] and ("b", "work", "meeting") not in found
    assert found["tensor cores", "tensor cores", "product"][-1] == (92, 93)


def test_a_warpgroup_that_only_arrives_at_a_meeting_goes_on():
    """By turns: a waits at barrier 1 until b has arrived there, and b at barrier 2 for a."""
    meet = {number: (("meeting", BEGIN, number, ""), ("meeting", END, number, "")) for number in (1, 2)}
    found = run(a=lane(*product(20), *meet[1], *product(100), ("meeting", POINT, 2, "")),
                b=lane(*product(30), ("meeting", POINT, 1, ""), *softmax(), *meet[2], *product(1)))
    assert found["a", "work", "meeting"] == [(20, 50)]
    assert found["b", "work", "softmax"] == [(50, 130)] and found["b", "work", "meeting"] == [(130, 150)]


def test_mbarriers_at_which_warps_arrive():
    """One waits for each phase until all have arrived; there is none before the first."""
    def arrive(phase):
        return ("release", POINT, 0, f"mbarrier {phase}")

    def wait(phase):
        return ("wait", BEGIN, 0, f"mbarrier {phase}"), ("wait", END, 0, f"mbarrier {phase}")
    found = run(a=lane(*product(20), arrive(0), *product(100), arrive(1)),
                b=lane(*product(30), arrive(0), arrive(1)),
                c=lane(*wait(-1), *wait(0), *wait(1)))
    assert found["c", "work", "wait"] == [(0, 50), (50, 150)]


def test_sums_leave_beside_products():
    """bulk_add() costs the warp nothing; it waits where it needs the place of the last sums."""
    add = ("bulk_add", POINT, 51200, "")
    wait = ("bulk_wait", BEGIN, 0, ""), ("bulk_wait", END, 0, "")
    found = run(a=lane(*wait, add, *product(64), *wait, add, *wait))
    assert found["a", "copies", "bulk_add"] == [(0, 100), (100, 200)]
    assert found["a", "products", "product"] == [(0, 64)]
    assert found["a", "work", "bulk_wait"] == [(64, 100), (100, 200)]


@pytest.mark.parametrize("kind, steps", [
    ("P", 32), ("dS", 8), ("P and dS", 40), ("shared", 8), ("sums", 32), ("gradients", 16)])
def test_what_64_columns_take(kind, steps):
    """Exponentials 128 a step, dS a quarter of that; 512 bytes to HBM, 1024 to shared memory."""
    found = run(a=lane((kind, BEGIN, 64, ""), (kind, END, 64, ""), ("elements", BEGIN, 64, ""),
                       ("elements", END, 64, "")))
    assert found == {("a", "work", kind): [(0, steps)]}


def test_marks_that_do_not_fit_together():
    lanes = {"a": lane(("wait", BEGIN, 0, "K0"), ("wait", END, 0, "K0"))}
    with pytest.raises(ValueError, match="do not fit together: a at wait would wait for ever"):
        steps.in_steps(Block(lanes))
    steps.in_steps(Block(lanes, is_cut_short=True))


def test_a_block_is_drawn_as_far_as_all_its_marks_go():
    long = lane(*product(10), *product(10), *product(10))
    block = steps.in_steps(Block({"a": long, "b": long[:4]}, is_cut_short=True))     # b at 20; a at 50
    ends = {(span.lane, span.end) for span in marks.spans(block)}
    assert max(end for _, end in ends) == block.lanes["b"][-1].time
    assert max(span.end for span in marks.spans(Block(block.lanes))) > block.lanes["b"][-1].time


def test_shares():
    spans = [Span("a", "products", "product", "", 0, 40), Span("b", "products", "product", "", 30, 60),
             Span("a", "work", "softmax", "", 50, 100)]
    assert marks.shares(spans) == {"products": 0.6, "softmax": 0.2}
    modelled = [*spans, Span("tensor cores", "tensor cores", "product", "", 90, 100)]
    assert marks.shares(modelled) == {"products": 0.1, "softmax": 0.2}


# ------------------------------------------------------------------------------------------ marks with times
def line_of(stage, text):
    lines = stage.path.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if text in line.split("//")[0])


def from_gpu(stage):
    """As overlap's warps would leave them on a GPU: time, kind, side, line, amount. The clock goes round."""
    at = {name: line_of(stage, text) for name, text in {
        "K fill": "K_smem.fill", "K wait": "K_smem.wait_until_full(t + 1)", "QK": "wgmma_QK<",
        "PV": "wgmma_PV(", "one": "wgmma_wait<1>", "all": "wgmma_wait<0>",
        "softmax": "softmax_step("}.items()}
    consumer = [(0, "wait", BEGIN, "K wait", 3), (64, "wait", END, "K wait", 0),
                (64, "product", POINT, "QK", 64), (96, "product", POINT, "PV", 64),
                (96, "finish", BEGIN, "one", 1), (352, "finish", END, "one", 1),
                (384, "softmax", BEGIN, "softmax", 128), (640, "softmax", END, "softmax", 128),
                (640, "finish", BEGIN, "all", 0), (704, "finish", END, "all", 0)]
    producer = [(-32, "empty", BEGIN, "K fill", 3 + 2 * marks.MOST_STEPS),
                (-32, "copy", POINT, "K fill", 2048)]
    buffer = in_buffer({0: consumer, 8: producer}, at)
    buffer["multiprocessors"][1] = 77
    buffer["nanoseconds_and_what"][0, 0, 0] = 0, at["QK"] << 22    # of a block that does less
    return buffer


def in_buffer(warps, at):
    """Marks of block 1, by warp."""
    buffer = numpy.zeros((), marks.BUFFER)
    for warp, left in warps.items():
        for n, (time, kind, side, line, amount) in enumerate(left):
            what = at[line] << 22 | 3 * marks.KINDS.index(kind) + side << 16 | amount
            buffer["nanoseconds_and_what"][1, warp, n] = (2**32 - 128 + time) % 2**32, what
    return buffer


def test_marks_of_a_gpu():
    data = timeline.of_marks(from_gpu(STAGES["overlap"]), STAGES["overlap"], in_flight=True)
    assert (data["block"], data["multiprocessor"], data["clock_ns"]) == (1, 77, 32) and not data["cut_short"]
    assert {tuple(span) for span in data["spans"]} == {
        ("producer, warp 8", "copies", "copy", "K_smem.fill", 0, 96),
        ("warps 0 to 3", "work", "wait", "K_smem.wait_until_full", 32, 96),
        ("warps 0 to 3", "products", "product", "multiply_S", 96, 384),
        ("warps 0 to 3", "products", "product", "multiply_O", 128, 736),
        ("warps 0 to 3", "work", "finish", "wgmma_wait", 128, 384),
        ("warps 0 to 3", "work", "softmax", "softmax", 416, 672),
        ("warps 0 to 3", "work", "finish", "wgmma_wait", 672, 736)}
    assert data["shares"] == {"products": 640 / 736, "softmax": 1}


def test_marks_of_a_backward_pass_on_a_gpu():
    """As tma_reduce's warps would leave them: its text says what is done with elements, and sums are under
    way until the warp has waited for them."""
    stage = BACKWARD["tma_reduce"]
    at = {name: line_of(stage, text) for name, text in {
        "Q fill": " fill(Q_smem", "Q wait": "Q_smem.wait_until_full", "S": "wgmma_QK<width / 16>(S_reg",
        "dQ": "wgmma_dQ<", "all": "wgmma_wait<0>", "both": "for_both(", "shared": "store_fragments(",
        "meet": "named_barrier_sync(", "store": "for_each_pair("}.items()} | {"": 0}
    consumer = [(0, "wait", BEGIN, "Q wait", 3), (64, "wait", END, "Q wait", 0),
                (64, "product", POINT, "S", 64), (64, "finish", BEGIN, "all", 0),
                (96, "finish", END, "all", 0),
                (96, "elements", BEGIN, "both", 64), (160, "elements", END, "both", 64),
                (160, "elements", BEGIN, "shared", 64), (192, "elements", END, "shared", 64),
                (192, "meeting", BEGIN, "meet", 1), (256, "meeting", END, "meet", 1),
                (256, "product", POINT, "dQ", 32), (256, "finish", BEGIN, "all", 0),
                (288, "finish", END, "all", 0), (288, "bulk_add", POINT, "", 256),
                (320, "bulk_wait", BEGIN, "", 0), (352, "bulk_wait", END, "", 0),
                (352, "elements", BEGIN, "store", 128), (416, "elements", END, "store", 128)]
    producer = [(-32, "empty", BEGIN, "Q fill", 3 + 2 * marks.MOST_STEPS), (0, "copy", POINT, "Q fill", 2048)]
    data = timeline.of_marks(in_buffer({0: consumer, 8: producer}, at), stage, in_flight=True)
    us = "warps 0 to 3"
    assert {tuple(span) for span in data["spans"]} == {
        ("producer, warp 8", "work", "empty", "fill(Q_smem)", 0, 32),
        ("producer, warp 8", "copies", "copy", "fill(Q_smem)", 32, 96),
        (us, "work", "wait", "Q_smem.wait_until_full", 32, 96),
        (us, "products", "product", "S", 96, 128), (us, "work", "finish", "wgmma_wait", 96, 128),
        (us, "work", "P and dS", "for_both(S_reg, dP_reg)", 128, 192),
        (us, "work", "shared", "store_fragments(dST_smem)", 192, 224),
        (us, "work", "meeting", "named_barrier_sync", 224, 288),
        (us, "products", "product", "dQ", 288, 320), (us, "work", "finish", "wgmma_wait", 288, 320),
        (us, "copies", "bulk_add", "bulk_add", 320, 384), (us, "work", "bulk_wait", "bulk_wait", 352, 384),
        (us, "work", "gradients", "store", 384, 448)}
    assert data["shares"] == {"products": 64 / 448, "softmax": 0}


def test_a_block_without_marks():
    with pytest.raises(ValueError, match="overlap.cuh left no marks"):
        timeline.of_marks(numpy.zeros((), marks.BUFFER), STAGES["overlap"], True)


@pytest.mark.parametrize("everywhere_ms, in_flight", [(1.04, True), (1.3, False)])
def test_what_marks_cost_on_a_gpu(tmp_path, monkeypatch, capsys, everywhere_ms, in_flight):
    """They are left where products are under way unless that is slow; the table says what both cost."""
    used = []

    class Run:
        tiles = {"Br": 128, "Bc": 128}

        def __init__(self, stage, N, args, marked):
            self.stage, self.marked = stage, marked

        def __call__(self):
            pass

        def marks(self):
            used.append(self.marked)
            return from_gpu(self.stage)

    ms = {None: [1.0], False: [1.02], True: [everywhere_ms]}
    monkeypatch.setattr(timeline, "Run", Run)
    monkeypatch.setattr(timeline, "milliseconds", lambda run, device: ms[run.marked])
    simulated = {"unit": "steps", "block": 0, "note": "A model.", "spans": [
        ["tensor cores", "tensor cores", "product", "multiply_S 0", 0, 64],
        ["warps 0 to 3", "work", "softmax", "softmax", 0, 80]]}
    monkeypatch.setattr(timeline, "beside", lambda stage, N, args: timeline.origin(args) | simulated | {
        "stage": stage.name, "shape": timeline.origin(args)["shape"] | {"N": 64}})
    monkeypatch.setattr(timeline, "simulated", timeline.measured)
    assert modes.main(["--timeline", "--stages", "overlap", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "timeline_overlap.json").read_text())
    assert data["model"]["spans"] == simulated["spans"]
    assert used == [in_flight] and data["in_flight"] == in_flight and data["unit"] == "ns"
    assert data["ms"] == {"unmarked": 1, "marked": 1.02, "marked everywhere": everywhere_ms}
    out = capsys.readouterr().out
    assert "1.02x" in out and f"{everywhere_ms:.2f}x" in out and "32 ns at a time" in out
    assert ("cost too much" in out) != in_flight


def test_the_model_beside_a_gpu(tmp_path, monkeypatch):
    """Of a shape that the simulator runs in seconds; nothing without a compiler."""
    args, = arguments.parse_arguments(["--timeline", "--stages", "tma", "--batch", "9", "--seqlens", "4096",
                                       "--heads", "32:8", "--out", str(tmp_path)])
    seen = []
    monkeypatch.setattr(timeline, "simulated", lambda stage, N, args: seen.append((N, args)) or {"spans": []})
    data = timeline.beside(STAGES["tma"], 4096, args)
    (N, small), = seen
    assert (N, small.batch, small.H, small.H_kv, small.device.type) == (512, 1, 2, 2, "cpu")
    assert data["stage"] == "tma" and {"B": 1, "H": 2, "N": 512, "d": 128}.items() <= data["shape"].items()
    monkeypatch.setattr(timeline, "missing_compiler", lambda: "no C++ compiler")
    assert timeline.beside(STAGES["tma"], 4096, args) is None


def test_a_backward_pass_gets_what_a_forward_one_gave(monkeypatch):
    """On a GPU O and L, as no number is to be out of the ordinary; in the simulator none counts."""
    (args,) = arguments.parse_arguments(["--timeline", "--pass", "bwd", "--seqlens", "8", "--head-dim", "16"])
    q, k, v, dO = inputs = torch.randn(4, 1, 2, 8, 16)
    given = torch.ones_like(q), torch.ones(1, 2, 8)
    monkeypatch.setattr(timeline, "random_inputs", lambda N, args: inputs)
    monkeypatch.setattr(flash, "attention", lambda *tensors, **options: given)
    for device, (o, lse) in {"cuda": given, "cpu": (torch.zeros_like(q), torch.zeros(1, 2, 8))}.items():
        args.device = torch.device(device)
        named = timeline.tensors(8, args)
        assert torch.equal(named["O"], o) and torch.equal(named["L"], lse)
        assert all(named[name] is not None for name in ("dQ", "dK", "dV")) and torch.equal(named["dO"], dO)


# ------------------------------------------------------------------------------------------ in the simulator
def test_in_the_simulator(tmp_path, capsys):
    """As results/ have it for docs/timeline.md. Else: the command at the end of its table."""
    there = json.loads((flash.ROOT / "results/cpu/timeline/timeline_tma.json").read_text())
    assert modes.main(["--timeline", "--stages", "tma,hopper_tuned", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    data, last = (json.loads((tmp_path / f"timeline_{name}.json").read_text())
                  for name in ("tma", "hopper_tuned"))
    assert data["spans"] == there["spans"] and data["shape"] == there["shape"]
    assert f"{100 * data['shares']['products']:.0f} %" in out and "not measured" in out
    assert data["shares"]["softmax"] == 0 and last["shares"]["softmax"] > 0.9
    kinds = {kind for _, _, kind, *_ in last["spans"]}
    assert {"copy", "product", "maximum", "exponential", "store", "wait", "empty", "finish"} <= kinds
    lanes = {span[0] for span in last["spans"]}
    assert lanes == {"tensor cores", "warps 0 to 3", "warps 4 to 7", "producer, warp 8"}
    for name in ("tma", "hopper_tuned"):
        assert (tmp_path / f"timeline_{name}.png").stat().st_size > 10_000


def test_a_backward_pass_in_the_simulator(tmp_path, capsys):
    """As results/ have it for docs/timeline.md."""
    name = "timeline_bwd_tma_reduce.json"
    there = json.loads((flash.ROOT / "results/cpu/timeline" / name).read_text())
    assert modes.main(["--timeline", "--pass", "bwd", "--stages", "tma_reduce", "--out", str(tmp_path)]) == 0
    data, out = json.loads((tmp_path / name).read_text()), capsys.readouterr().out
    assert data["spans"] == there["spans"] and data["shape"] == there["shape"]
    assert f"{100 * data['shares']['products']:.0f} %" in out and "P and dS beside products" in out
    assert (tmp_path / name).with_suffix(".png").stat().st_size > 10_000
    assert {row for lane, row, *_ in data["spans"] if lane == "warps 0 to 3"} == {
        "products", "work", "copies"}


def test_warpgroups_of_a_stage_of_ones_own_meet_at_an_mbarrier(tmp_path):
    """As they do at tma_reduce's named barrier. (The other mbarriers are those of rings.)"""
    text = BACKWARD["tma_reduce"].path.read_text()
    for old, new in {"  dO_smem.init(warps);\n": "  dO_smem.init(warps);\n"
                     "  if (threadIdx.x == 0) mbarrier_init(barriers + 12, warps);\n",
                     "named_barrier_sync(1, 32 * warps);": "__syncwarp();\n"
                     "      if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers + 12);\n"
                     "      mbarrier_wait(barriers + 12, n % 2);", "12 * sizeof": "13 * sizeof"}.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (mine := tmp_path / "mine.cuh").write_text(text)
    shape = ["--timeline", "--pass", "bwd", "--seqlens", "256", "--head-dim", "64", "--stages"]
    own, ours = (timeline.simulated(args.stages[0], 256, args) for (args,) in (
        arguments.parse_arguments([*shape, stage]) for stage in (str(mine), "tma_reduce")))
    label = {"meeting": "wait", "named_barrier_sync": "mbarrier_wait"}
    assert own["spans"] == [[*span[:2], *(label.get(word, word) for word in span[2:4]), *span[4:]]
                            for span in ours["spans"]]
    assert any(span[3] == "mbarrier_wait" for span in own["spans"])


@pytest.mark.parametrize("name", [name for name, stage in BACKWARD.items() if name not in SIDE_BRANCH
                                  and (is_end(stage) or stage.number % 2)])
def test_backward_stages_in_a_small_shape(name, monkeypatch):
    """Two heads of queries share one of keys, causal: five products a tile that some row sees, all of dS
    through shared memory, dQ added once, by the warps or by the copy engine, which warps beside the producer
    may ask for that; dK and dV stored. Where blocks take one tile of keys after the other there is one head,
    so that none takes a second one. Of rungs in the middle every other one."""
    monkeypatch.setenv("FLASH_SIM_THREADS", "1")    # else it is open which block draws which tile of keys
    one = ("persistent", "whole_tiles", "hopper_tuned", *UP_TO_64, *WRITERS)
    heads = "1:1" if name in one else "2:1"
    d = 128 if name in ("augmented", "first_stores") else 64           # with 64 they have no room for marks
    (args,) = arguments.parse_arguments(["--timeline", "--pass", "bwd", "--stages", name, "--seqlens", "256",
                                         "--heads", heads, "--head-dim", str(d), "--causal"])
    data = timeline.simulated(BACKWARD[name], 256, args)
    spans, Br = timeline.spans_of(data), data["tiles"]["Br"]
    busy = {}
    for span in spans:
        if span.row == "tensor cores":
            product = span.label.split()[0]
            busy[product] = busy.get(product, 0) + span.end - span.start
    one_head = heads == "1:1" or name == "whole_group"
    tiles = 256 // Br * (1 if one_head else 2)      # all rows, of one head or two
    # They draw their first item, too: one block draws both
    both = name in ("idle_warps", "augmented", "first_stores")
    tiles += both * 128 // Br
    assert busy == dict.fromkeys(("S", "dP", "dV", "dK", "dQ"), tiles * Br * 128 * d // (64 * 16 * 16))
    beside = {"writer_warp": ["warp 9"], "semaphores": ["warp 9", "warp 10"],
              "idle_warps": ["warp 9"], "augmented": ["warp 9"],
              "first_stores": ["warp 9", "warp 10"]}.get(name, [])
    warpgroups = {span.lane for span in spans if span.row == "work"} - {"producer, warp 8", *beside}
    kinds = {kind: sum(span.end - span.start for span in spans if span.kind == kind)
             for kind in ("shared", "gradients", "store", "sums", "bulk_add")}
    stored = (1 + both) * 2 * 128 * d * (4 if name == "whole_group" else 2)     # bytes; there in float
    assert len(warpgroups) == 2 and kinds["gradients"] + kinds["store"] == stored / steps.COPIED_BYTES
    assert kinds["shared"] == tiles * Br * 128 * 2 / steps.SHARED_BYTES
    by_warps = name in ("tma", "wgmma", "warp_specialized")
    assert kinds["sums"] == by_warps * tiles * Br * 64 * 4 / steps.COPIED_BYTES
    assert (kinds["bulk_add"] > 0) != by_warps
    assert not beside or {span.lane for span in spans if span.kind == "bulk_add"} == {beside[-1]}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name, lanes", [("writer_warp", ["warp 9"]), ("semaphores", ["warp 9", "warp 10"])])
def test_a_warp_that_adds_dQ(name, lanes, d):
    """Of the block that takes two of four tiles of keys: one tile of dQ after the other, beside the products
    of the next one, if it is not a tile of keys' last. A warp that asks for turns has a lane, too."""
    (args,) = arguments.parse_arguments(["--timeline", "--pass", "bwd", "--stages", name, "--seqlens", "512",
                                         "--heads", "1:1", "--head-dim", str(d)])
    data = timeline.simulated(BACKWARD[name], 512, args)
    spans, Br = timeline.spans_of(data), data["tiles"]["Br"]
    assert {span.lane for span in spans if span.lane.startswith("warp ")} == set(lanes)
    added = [span for span in spans if span.kind == "bulk_add"]
    assert {span.lane for span in added} == {lanes[-1]} and len(added) == 2 * 512 // Br
    assert all(span.end - span.start >= Br * d * 4 / steps.COPIED_BYTES for span in added)
    assert all(span.end <= following.start for span, following in itertools.pairwise(added))
    busy = [span for span in spans if span.row == "tensor cores"]
    beside = [any(span.start < p.end and p.start < span.end for p in busy) for span in added]
    assert beside.count(False) <= 2


@pytest.mark.parametrize("name, products, N", [
    ("dq_by_turns", 2, 512), ("transposed_dq", 1, 384), ("next_keys", 1, 384)])
def test_who_makes_dQ_by_turns(name, products, N):
    """At d = 64 one warpgroup, then the other, which has made P of its next tile by then. A product has 64
    queries of a tile's 128; or, transposed, 64 dims. There they meet once more, at the end of the item."""
    (args,) = arguments.parse_arguments(["--timeline", "--pass", "bwd", "--stages", name,
                                         "--seqlens", str(N), "--heads", "1:1", "--head-dim", "64"])
    spans = timeline.spans_of(timeline.simulated(BACKWARD[name], N, args))
    made = [span.label for span in spans if span.row == "tensor cores" and span.label.startswith("dQ")]
    assert made == [f"dQ {tile % 2}" for tile in range(N // 128) for _ in range(products)]
    assert {(span.lane, span.label) for span in spans if span.row == "products"} == {
        (lane, label) for lane in ("warps 0 to 3", "warps 4 to 7") for label in ("S", "dP", "dV", "dK", "dQ")}
    first = next(span for span in spans if span.row == "products" and span.label == "dQ")
    others = [span for span in spans if (span.lane, span.kind) == ("warps 4 to 7", "P")]
    assert first.lane == "warps 0 to 3" and others[0].end <= first.start < others[1].start
    met = [span.lane for span in spans if span.kind == "meeting"]
    most = 2 + (name in UP_TO_64)
    assert met.count("warps 0 to 3") <= most and met.count("warps 4 to 7") <= most


@pytest.mark.parametrize("name, share", [
    ("consumer_roles", 1), ("exchanged_ds", 0.5), ("half_tiles", 0.5), ("exchanged_tuned", 0.5),
    ("exchanged_semaphores", 0.5), ("exchanged_group", 0.5), ("exchanged_stream_k", 0.5)])
def test_warpgroups_with_work_of_their_own(name, share):
    """dS of a tile waits for P, and dQ for dS; a block of a cluster adds half of the columns of dQ."""
    (args,) = arguments.parse_arguments(["--timeline", "--pass", "bwd", "--stages", name, "--seqlens", "256",
                                         "--heads", "1:1", "--head-dim", "128"])
    spans = timeline.spans_of(timeline.simulated(BACKWARD[name], 256, args))
    when = {kind: [(span.start, span.end) for span in spans if span.lane == lane and span.row == "work"
                   and span.kind == kind]
            for lane, kind in (("warps 0 to 3", "P"), ("warps 4 to 7", "dS"), ("warps 8 to 11", "sums"))}
    assert len(when["P"]) == len(when["dS"]) == 4
    products = [span.start for span in spans if (span.lane, span.row) == ("warps 8 to 11", "products")]
    a_tile = len(products) // 4
    for tile, (P, dS) in enumerate(zip(when["P"], when["dS"], strict=True)):
        assert P[1] <= dS[0] and dS[1] <= products[tile * a_tile]
    added = sum(end - start for start, end in when["sums"])
    assert added == share * 256 * 128 * 4 / steps.COPIED_BYTES


def test_a_stage_that_fails(tmp_path, capsys, monkeypatch):
    """It is said; the others are drawn; exit status 1."""
    def simulated(stage, N, args):
        if stage.name == "tma":
            raise RuntimeError("no such luck")
        return timeline.of_marks(from_gpu(STAGES["overlap"]), STAGES["overlap"], True)
    monkeypatch.setattr(timeline, "simulated", simulated)
    assert modes.main(["--timeline", "--stages", "tma,overlap", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "tma: no such luck" in err and re.search(r"overlap +87 %", out)
    assert json.loads((tmp_path / "timeline_tma.json").read_text())["error"] == "no such luck"
    assert not (tmp_path / "timeline_tma.png").exists()


def test_the_ladder_from_tma_on_by_default(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(timeline, "timeline", None)
    monkeypatch.setattr(modes, "MODES", (timeline_of(asked),))
    modes.main(["--timeline", "--out", str(tmp_path)])
    (args,) = asked
    assert [stage.name for stage in args.stages] == list(STAGES)
    assert (args.dtype, args.head_dim, args.seqlens, args.causal) == ("bf16", 128, [512], False)


def test_the_backward_ladder_by_its_pass(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(modes, "MODES", (timeline_of(asked),))
    modes.main(["--timeline", "--pass", "bwd", "--out", str(tmp_path)])
    assert [stage.path for stage in asked[0].stages] == [stage.path for stage in BACKWARD.values()]


def timeline_of(asked):
    def timeline(args: argparse.Namespace) -> int:
        asked.append(args)
        return 0
    return timeline


@pytest.mark.parametrize("options, message", [
    ("--stages flash2", "--timeline: flash2 leaves no marks; those from tma on do, whose copies and products "
                        "are asynchronous: --stages tma,wgmma,"),
    ("--stages overlap,mma", "--timeline: mma leaves no marks; "),
    ("--stages tmy", "--stages: no forward stage 'tmy' for bf16; there are "),
    ("--dtype fp32", "--timeline: no stage that leaves marks takes fp32 here: they need sm_90, and bf16 or "
                     "fp16"),
    ("--pass bwd --stages mma", "--timeline: mma leaves no marks; those from tma on do, whose copies and "
                                "products are asynchronous: --stages tma,wgmma,warp_specialized,tma_reduce,"),
    ("--pass fwd,bwd", "--timeline: takes one pass: --pass fwd, the default, or --pass bwd"),
    ("--seqlens 64,128", "--timeline: takes one N; --seqlens has 64, 128"),
    ("--mask causal", "--timeline: measures nothing beside it, and takes no --mask"),
    ("--rungs", "--timeline: draws calls of attention(), and takes no --rungs"),
    ("--decode", "--timeline: draws calls of attention(), and takes no --decode"),
])
def test_bad_arguments(options, message, capsys, monkeypatch):
    for module in (ahead, launch):
        monkeypatch.setattr(module, "build", lambda *_, **__: pytest.fail("it built something"))
    with pytest.raises(SystemExit) as exit_:
        modes.main(["--timeline", *options.split()])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_overlapping_bars_do_not_hide_each_other():
    spans = [Span("a", "products", "product", str(n), start, end) for n, (start, end) in
             enumerate([(0, 10), (5, 15), (10, 20), (0, 1)])]
    tracks = {span.label: (track, tracks) for span, track, tracks in chart._tracks(spans)}
    assert tracks == {"3": (0, 2), "0": (1, 2), "1": (0, 2), "2": (1, 2)}


def test_what_a_gpu_is_to_measure(tmp_path):
    """results/gpu_round.sh: a shell reads it, what it calls is there, and it hands on the folder."""
    script = flash.ROOT / "results" / "gpu_round.sh"
    files = re.findall(r"\b(?:\w+/)*\w+\.py\b", script.read_text())
    assert len(files) > 5 and all((flash.ROOT / file).is_file() for file in files)
    done = subprocess.run(["sh", script, tmp_path, "timeline"], capture_output=True, text=True,
                          env={"PYTHON": "echo", "PATH": "/usr/bin:/bin"})
    asked = [f"bench.py --timeline --pass {each} --seqlens 4096 --out {tmp_path}/timeline" for each in BOTH]
    assert done.stdout.splitlines() == ["== timeline", *asked]
    assert subprocess.run(["sh", script, tmp_path, "nothing"], capture_output=True).returncode == 2
