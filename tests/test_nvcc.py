"""Every stage through nvcc, for the architectures it is for, GPU or no GPU; and ptxas's report on it."""

import re
import subprocess

import pytest

import flash

try:
    NVCC, WHY_NOT = flash.find_nvcc(), ""
except RuntimeError as error:
    NVCC, WHY_NOT = None, str(error)

ARCHITECTURES = ["sm_75", "sm_80", "sm_90a"]


def compile_stage(stage: flash.Stage, architecture: str, d: int, causal: bool, folder, **tiles) -> str:
    """What nvcc and ptxas print. Fails on errors."""
    tiles = stage.default_tiles(d) | tiles
    macros = flash.definitions(stage, stage.dtypes[0], d, causal, tiles) | {"STAGE_FILE": f'"{stage.path}"'}
    done = subprocess.run(
        [
            NVCC,
            "-cubin",
            "-std=c++17",
            "-O3",
            f"-gencode=arch={architecture.replace('sm', 'compute')},code={architecture}",
            f"-I{flash.ROOT}",
            f"-I{flash.STAGES}",
            "-Xptxas",
            "-v,-warn-spills",
            *(f"-D{k}={v}" for k, v in macros.items()),
            "-o",
            folder / "stage.cubin",
            flash.ROOT / "flash_fwd.cu",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("stage", flash.stages(), ids=lambda s: s.name)
def test_compiles_without_spills(stage, architecture, tmp_path):
    """No warning; every array in registers: no stack frame, no spilled byte."""
    for d, causal in [(64, True), (128, False), (256, True)]:
        report = compile_stage(stage, architecture, d, causal, tmp_path)
        assert "warning" not in report, report
        frames = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
        )
        assert frames and set(frames) == {("0", "0", "0")}, f"d={d}, causal={causal}: {report}"


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
def test_the_check_sees_spills(tmp_path):
    """A tile that no register file holds spills, and the report says so."""
    stage = {s.name: s for s in flash.stages()}["flash2"]
    report = compile_stage(stage, "sm_80", 256, True, tmp_path, Br=128)
    assert re.search(r"[1-9]\d* bytes spill stores", report)
