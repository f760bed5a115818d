"""Every stage through nvcc, for the architectures it is for, GPU or no GPU; and ptxas's report on it."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

import flash
from flash_ladder import grid, loader
from flash_ladder.grid import LARGE, MULTICAST, ROW_BY_ROW, SIDE_BRANCH, STREAM_K, UP_TO_64, WRITERS

try:
    NVCC, WHY_NOT = flash.find_nvcc(), ""
except RuntimeError as error:
    NVCC, WHY_NOT = None, str(error)

# Stages that spill for some d on sm_90a, as their headers say, and how many bytes of a thread at most, stored
# or loaded (nvcc 13.0): rungs that the next one mends, and at the end of the branch a few bytes that cost
# less than what would spare them
SPILLS = {("bwd", "recompute", 64): 16, ("fwd", "wide_warps", 64): 64, ("fwd", "own_ranges", 256): 48,
          ("bwd", "transposed", 128): 120, ("bwd", "transposed", 256): 1880,
          ("bwd", "split_warps", 128): 24, ("bwd", "ampere_tuned", 128): 96, ("bwd", "ampere_tuned", 256): 52,
          ("bwd", "tma", 256): 1592,
          ("bwd", "exchanged_ds", 256): 4, ("bwd", "persistent", 256): 8, ("bwd", "whole_tiles", 256): 8,
          ("bwd", "hopper_tuned", 256): 52,
          ("bwd", "writer_warp", 64): 8, ("bwd", "semaphores", 64): 40,
          ("bwd", "idle_warps", 64): 44, ("bwd", "idle_warps", 128): 32,
          ("bwd", "augmented", 64): 44, ("bwd", "augmented", 128): 32,
          ("bwd", "first_stores", 64): 84, ("bwd", "first_stores", 128): 8, ("bwd", "packed", 128): 12,
          ("bwd", "packed", 256): 52,
          ("bwd", "packed_semaphores", 64): 16, ("bwd", "packed_semaphores", 128): 8,
          ("bwd", "packed_semaphores", 256): 8}
ALSO_ON = {("bwd", "recompute", 64): ("sm_75", "sm_80", "sm_90a")}
NOT_IF_DETERMINISTIC = {("bwd", "ampere_tuned", 128), ("bwd", "ampere_tuned", 256)}
SHARED_MEMORY = {"sm_75": 64 * 1024, "sm_80": 163 * 1024, "sm_90a": 227 * 1024}     # of a block
# What other readers have: RTX 30, RTX 40 and L4, B200, RTX 50; the stages that calls take compile for them
OTHERS = {"sm_86": 99 * 1024, "sm_89": 99 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}


def number(architecture: str) -> int:
    """sm_90a: 90. any GPU: 0."""
    return int("0" + "".join(filter(str.isdigit, architecture)))


def types_on(architecture: str, stage: flash.Stage) -> list[torch.dtype]:
    """The types that a stage takes there."""
    return [dtype for dtype in stage.dtypes if number(stage.needs_for(dtype)) <= number(architecture)]


def architectures(stage: flash.Stage) -> list[str]:
    """Those that it is for; of a rung that calls do not take the last one if it spills there, or one of them
    by turns."""
    able = [architecture for architecture in SHARED_MEMORY if types_on(architecture, stage)]
    if stage.default:
        return able
    spills = any(case[:2] == (stage.direction, stage.name) for case in SPILLS)
    return [able[-1 if spills else stage.number % len(able)]]


# Deterministic on request for the last one only
BUILDS = [pytest.param(stage, asked, architecture,
                       id="-".join([stage.path.stem, *["deterministic"] * asked, architecture]))
          for stage in flash.stages() for asked in (False, True)[:1 + stage.deterministic_on_request]
          for architecture in (["sm_90a"] if asked else architectures(stage))]


def compile_stage(stage: flash.Stage, architecture: str, d: int, causal: bool, folder, dtype=None,
                  deterministic=False, output=("-cubin",), page_size=None, varlen=False, more=None,
                  **tiles) -> str:
    """What nvcc and ptxas print. Fails on errors. Writes stage.out: by default the GPU code alone."""
    tiles = stage.default_tiles(d) | tiles
    macros = flash.definitions(stage, dtype or stage.dtypes[0], d, causal, tiles, deterministic,
                               kv_cache=page_size is not None, page_size=page_size or 0, varlen=varlen)
    macros |= more or {}
    macros |= {name: f'"{value}"' for name, value in macros.items() if isinstance(value, Path)}
    code = f"-gencode=arch={architecture.replace('sm', 'compute')},code={architecture}"
    done = subprocess.run(
        [NVCC, *output, "-std=c++17", "-O3", code, f"-I{flash.ROOT}", f"-I{flash.STAGES}",
         "-Xptxas", "-v,-warn-spills", *(f"-D{macro}={value}" for macro, value in macros.items()),
         "-o", folder / "stage.out", flash.ROOT / f"flash_{stage.direction}.cu"],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


SERIALISED = "(C75"     # ptxas's remarks on wgmma: C7508 to C7520 all mean that products wait for each other


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
@pytest.mark.parametrize("stage, deterministic, architecture", BUILDS)
def test_compiles_without_spills(stage, deterministic, architecture, tmp_path):
    """No warning; every array in registers: no stack frame, no spilled byte but those of SPILLS. Of the
    defaults, with all the tiles that calls get on the GPU that they are measured on, and more cases there if
    they have two types; on another by turns, of ampere_tuned alone more than one case. Of the others one
    case, of those that spill if some do, by turns; of Hopper's test_timeline.py has d = 128."""
    cases = [(64, True), (128, False), (256, True)]
    if stage.name in (*SIDE_BRANCH, *MULTICAST):       # for d = 256
        cases = [(256, True), (256, False)]
    if stage.name in UP_TO_64:
        cases = [(64, True), (64, False), (48, True)]
    if stage.name in WRITERS:                         # for d <= 192
        cases = [(64, True), (128, False)]
    if stage.name in STREAM_K:                         # it is for calls without a mask
        cases = [(64, False), (128, False), (256, False)]
    if stage.name in ROW_BY_ROW:                        # what most calls take
        cases = [(64, True), (128, True), (256, True), (64, False), (128, False)]
    if stage.name in grid.OWN_RANGES:                      # those with a window
        cases = [(64, False), (128, False), (256, False)]
    mask = {"MASK_FILE": flash.STAGES / "masks" / "window.cuh"} if stage.name in grid.OWN_RANGES else None
    of_others = stage.path.stem == "bwd_29_hopper_tuned"     # calls with d <= 128 take another stage
    if of_others:
        cases = [(128, False), (256, True)]
    if not stage.default and architecture == "sm_90a":
        spilling = [case for case in cases if (stage.direction, stage.name, case[0]) in SPILLS]
        by_turns = cases[::2] if stage.needs == "sm_90a" and len(cases) == 3 else cases
        by_turns = spilling or by_turns
        cases = [by_turns[stage.number % len(by_turns)]]
    elif not stage.default or architecture != "sm_90a" and stage.name != "ampere_tuned":
        cases = cases[:1]
    able = types_on(architecture, stage)
    spilled: dict[tuple, int] = {}
    is_end = bool(stage.default) and not of_others and stage.name not in MULTICAST
    cases = [(d, causal, able[0] if d == 256 else able[-1]) for d, causal in cases]
    more = []
    if is_end and architecture == "sm_90a" and not deterministic and len(able) > 1 and stage.name not in (
            *SIDE_BRANCH, *ROW_BY_ROW, *grid.OWN_RANGES, "hopper_tuned"):
        more = [(64, False, able[0])] + [(128, True, able[0])]
    for n, (d, causal, dtype) in enumerate(cases + more):
        if not stage.default:
            chosen = [stage.default_tiles(d, causal=causal)]
        elif stage.fits(d, SHARED_MEMORY[architecture]):
            sizes = LARGE[1:] if n >= len(cases) else ((1, 1), *LARGE)
            if stage.name in (*ROW_BY_ROW, *grid.OWN_RANGES) and n % 2 != stage.number % 2:
                sizes = LARGE                      # small calls get the tiles of hopper_tuned's small calls
            chosen = [stage.tiles(d, SHARED_MEMORY[architecture], rows, causal, packed=packed, keys=keys)
                      for rows, keys in sizes for packed in ((1, 64) if n == 0 else (1,))]
            chosen = chosen if architecture == "sm_90a" else [chosen[n % 2]]
        else:
            assert d > 64
            continue
        for tiles in [tiles for n, tiles in enumerate(chosen) if tiles not in chosen[:n]]:
            report = compile_stage(stage, architecture, d, causal, tmp_path, dtype, deterministic, more=mask,
                                   **tiles)
            assert SERIALISED not in report, report
            frames = re.findall(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
            )
            case = stage.direction, stage.name, d
            spills = case in SPILLS and not (deterministic and case in NOT_IF_DETERMINISTIC)
            if spills and architecture in ALSO_ON.get(case, ("sm_90a",)):
                most = max(max(int(stores), int(loads)) for _, stores, loads in frames)
                assert most <= SPILLS[case], f"d={d}, causal={causal}, {tiles}: {most} bytes: {report}"
                spilled[case] = max(spilled.get(case, 0), most)
                continue
            assert "warning" not in report, report
            assert frames and set(frames) == {("0", "0", "0")}, f"d={d}, causal={causal}, {tiles}: {report}"
    assert all(spilled.values()), f"{stage} does not spill: take it off the list"


# Over a cache no register is left for N_k, or for the addresses of pages: so many bytes of a thread
SPILLED_OVER_A_CACHE = {("ampere_tuned", 64): 44, ("ampere_tuned", 128): 12}


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("stage", [s for s in flash.stages() if "kv_cache" in s.takes],
                         ids=lambda s: s.path.stem)
def test_compiles_over_a_cache(stage, page_size, tmp_path):
    """Pages for one d, none for the other, by turns."""
    d = 128 if stage.number % 2 == bool(page_size) else 64
    tiles = stage.tiles(d, SHARED_MEMORY["sm_90a"], packed=64)
    report = compile_stage(stage, "sm_90a", d, True, tmp_path, torch.bfloat16, page_size=page_size, **tiles)
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    most = SPILLED_OVER_A_CACHE.get((stage.name, d), 0)
    assert spilled <= most and (spilled or "warning" not in report), report


# Spilled there, as the header says, in bytes; which costs nobody knows: none of these GPUs was at hand
SPILLED = {("fwd", "fp32_tuned", "sm_100"): 16, ("fwd", "fp32_tuned", "sm_120"): 4}


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
@pytest.mark.parametrize("stage, architecture", [
    pytest.param(stage, architecture, id=f"{stage.path.stem}-{architecture}")
    for n, stage in enumerate(s for s in flash.stages() if s.default and not s.needs.endswith("a"))
    for m, architecture in enumerate(OTHERS)
    if n % 4 == m or (stage.direction, stage.name, architecture) in SPILLED])
def test_compiles_for_every_gpu(stage, architecture, tmp_path):
    """With the tiles that fit there, and without a spill but those of SPILLED. By turns."""
    tiles = stage.tiles(64, OTHERS[architecture], 1 << 15, True)
    report = compile_stage(stage, architecture, 64, True, tmp_path, **tiles)
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    assert spilled == SPILLED.get((stage.direction, stage.name, architecture), 0), report
    assert spilled or "warning" not in report, report


# Spilled with packed sequences on sm_90a, as the headers say, in bytes at most
SPILLED_VARLEN = {("fwd", "ampere_tuned", 128): 16, ("fwd", "packed", 64): 0, ("fwd", "packed", 128): 0,
                  ("bwd", "ampere_tuned", 128): 192, ("bwd", "packed", 128): 20,
                  ("bwd", "packed_semaphores", 64): 36}


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
@pytest.mark.parametrize("stage", [s for s in flash.stages() if "varlen" in s.takes],
                         ids=lambda s: s.path.stem)
def test_packed_sequences_spill_little(stage, tmp_path):
    """Of the forward pass's own stage for them, whose registers are short, several; of others by turns."""
    cases = [(64, True), (128, False)][stage.number % 2:][:1]
    if (stage.direction, stage.name) == ("fwd", "packed"):
        cases = [(64, True), (128, False), (128, True)]
    for d, causal in cases:
        report = compile_stage(stage, "sm_90a", d, causal, tmp_path, varlen=True)
        spilled = max(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
        assert spilled <= SPILLED_VARLEN[stage.direction, stage.name, d], report
        assert SERIALISED not in report, report


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
@pytest.mark.parametrize("direction, name, d, asked, causal, most", [
    ("fwd", "row_by_row", 64, "DROPOUT", False, 0), ("fwd", "row_by_row", 128, "DROPOUT", False, 40),
    ("fwd", "short_last", 128, "window", False, 28),
    *(("fwd", "row_by_row", d, asked, True, most) for d, asked, most in (
        (64, "DROPOUT", 0), (128, "DROPOUT", 40), (64, "SINK", 0), (128, "NEGATIVE_SCALE", 0))),
    ("bwd", "augmented", 64, "DROPOUT", False, 272), ("bwd", "augmented", 64, "alibi", False, 56),
    ("bwd", "exchanged_tuned", 192, "DROPOUT", True, 0),
    ("bwd", "exchanged_tuned", 256, "DROPOUT", False, 20),
    ("bwd", "exchanged_semaphores", 256, "DROPOUT", True, 28),
    ("bwd", "exchanged_stream_k", 256, "DROPOUT", True, 120),
    ("bwd", "exchanged_stream_k", 256, "block_causal", False, 68)])
def test_dropout_and_masks_on_hopper(direction, name, d, asked, causal, most, tmp_path):
    """Registers are short there: products are not serialised, and so many bytes are spilled at most."""
    stage = flash.find_stage(name, torch.bfloat16, torch.device("cpu"), direction)
    more = {asked: "1"} if asked.isupper() else {"MASK_FILE": flash.STAGES / "masks" / f"{asked}.cuh"}
    report = compile_stage(stage, "sm_90a", d, causal, tmp_path, torch.bfloat16, more=more)
    assert SERIALISED not in report, report
    spilled = max(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
    assert spilled <= most, report


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
def test_links_with_the_cuda_runtime(tmp_path, monkeypatch):
    """By g++, as load() does; also where libcudart has the versioned name alone, as in NVIDIA's wheels."""
    monkeypatch.setattr(loader, "BUILD", tmp_path)
    compile_stage(flash.stages("fwd")[0], "sm_80", 64, True, tmp_path, output=("-c", "-Xcompiler", "-fPIC"))
    (tmp_path / "stage.out").rename(tmp_path / "stage.o")
    lib = loader._linkable_cudart(NVCC.parent.parent)
    done = subprocess.run(["g++", "-shared", "-Wl,--no-undefined", tmp_path / "stage.o", f"-L{lib}",
                           "-lcudart", "-o", tmp_path / "stage.so"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
def test_the_check_sees_serialised_products(tmp_path):
    """S is read before its product has been waited for: ptxas waits itself, and says so."""
    stage = {s.name: s for s in flash.stages("fwd")}["wgmma"]
    text = stage.path.read_text()
    mine = tmp_path / "mine.cuh"
    mine.write_text(text.replace("      wgmma_wait<0>();\n", "", 1))
    assert SERIALISED in compile_stage(flash.read_stage(mine), "sm_90a", 128, False, tmp_path)


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
def test_the_check_sees_spills(tmp_path):
    """A tile that no register file holds spills, and the report says so."""
    stage = {s.name: s for s in flash.stages("fwd")}["flash2"]
    report = compile_stage(stage, "sm_80", 256, True, tmp_path, Br=128)
    assert re.search(r"[1-9]\d* bytes spill stores", report)


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
@pytest.mark.parametrize("stage, counts", [
    ("late_dq", {"convert_dQ_kernel": 2}),
    ("ampere_tuned", {"convert_dQ_kernel": 2, "reduce_heads_kernel": 1})])
def test_gradients_are_stored_16_bytes_at_a_time(stage, counts, tmp_path):
    """By the kernels that round dQ, dK and dV: the profiler once found four stores in the place of one."""
    backward = next(s for s in flash.stages("bwd") if s.name == stage)
    compile_stage(backward, "sm_90a", 64, False, tmp_path, output=("-ptx",))
    kernels = (tmp_path / "stage.out").read_text().split(".visible .entry ")[1:]
    stores = {re.search(r"_Z\d+(\w*?_kernel)", kernel)[1]: re.findall(r"st\.global\S+", kernel)
              for kernel in kernels}
    for kernel, count in counts.items():
        assert stores[kernel] == ["st.global.v4.u32"] * count, kernel


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_instructions_compile(architecture, tmp_path):
    """The instructions of common/ptx.cuh, all of them."""
    code = f"-gencode=arch={architecture.replace('sm', 'compute')},code={architecture}"
    done = subprocess.run([NVCC, "-cubin", "-std=c++17", code, "-o", tmp_path / "tensor.out",
                           Path(__file__).parent / "kernels" / "tensor.cu"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
