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


def compile_stage(stage: flash.Stage, architecture: str, d: int, causal: bool, folder,
                  output=("-cubin",), **tiles) -> str:
    """What nvcc and ptxas print. Fails on errors. Writes stage.out: by default the GPU code alone."""
    tiles = stage.default_tiles(d) | tiles
    macros = flash.definitions(stage, stage.dtypes[0], d, causal, tiles) | {"STAGE_FILE": f'"{stage.path}"'}
    code = f"-gencode=arch={architecture.replace('sm', 'compute')},code={architecture}"
    done = subprocess.run(
        [NVCC, *output, "-std=c++17", "-O3", code, f"-I{flash.ROOT}", f"-I{flash.STAGES}",
         "-Xptxas", "-v,-warn-spills", *(f"-D{macro}={value}" for macro, value in macros.items()),
         "-o", folder / "stage.out", flash.ROOT / "flash_fwd.cu"], capture_output=True, text=True)
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
def test_links_with_the_cuda_runtime(tmp_path, monkeypatch):
    """By g++, as load() does; also where libcudart has the versioned name alone, as in NVIDIA's wheels."""
    monkeypatch.setattr(flash, "BUILD", tmp_path)
    compile_stage(flash.stages()[0], "sm_80", 64, True, tmp_path, output=("-c", "-Xcompiler", "-fPIC"))
    (tmp_path / "stage.out").rename(tmp_path / "stage.o")
    lib = flash._linkable_cudart(NVCC.parent.parent)
    done = subprocess.run(["g++", "-shared", "-Wl,--no-undefined", tmp_path / "stage.o", f"-L{lib}",
                           "-lcudart", "-o", tmp_path / "stage.so"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(NVCC is None, reason=WHY_NOT)
def test_the_check_sees_spills(tmp_path):
    """A tile that no register file holds spills, and the report says so."""
    stage = {s.name: s for s in flash.stages()}["flash2"]
    report = compile_stage(stage, "sm_80", 256, True, tmp_path, Br=128)
    assert re.search(r"[1-9]\d* bytes spill stores", report)
