"""Builds: after an edit, after an interruption, from two processes at once, with and without compilers."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import check, random_qkv

import flash
import flash_ladder.nvcc
from flash_ladder import launch, loader, plan, simulator

ROOT = flash.ROOT
FLASH2 = flash.STAGES / "fwd_04_flash2.cuh"


@pytest.fixture
def own_build_folder(tmp_path, monkeypatch):
    """An empty build folder, but for the simulator's run-time library, which takes seconds to build."""
    built = flash.build_simulator()
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / built.parent.name).symlink_to(built.parent)
    monkeypatch.setattr(loader, "BUILD", folder)
    monkeypatch.setattr(launch, "_libraries", {})
    monkeypatch.setattr(plan, "_plans", {})
    return folder


@pytest.fixture
def mine(tmp_path) -> Path:
    """A reader's own copy of a stage."""
    file = tmp_path / "mine.cuh"
    file.write_text(FLASH2.read_text())
    return file


def python(code: str, build_folder: Path, **environment) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"FLASH_BUILD_DIR": str(build_folder)} | environment,
    )


ONE_CALL = """
import torch, flash
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 20, 16)
print(flash.attention(q, k, v, stage="flash2").double().sum().item())
"""


def test_an_edited_stage_reloads(mine, device):
    """In the same process, within a second or two: a notebook needs no restart. Nor does an edited header."""
    q, k, v = random_qkv(1, 2, 2, 30, 30, 16, device)
    check(*flash.attention(q, k, v, stage=mine, return_lse=True), q, k, v)

    text = mine.read_text()
    mine.write_text(text.replace("? 0.f : O_reg[r][c] / l[r];", "? 0.f : 2.f * O_reg[r][c] / l[r];"))
    start = time.perf_counter()
    doubled = flash.attention(q, k, v, stage=mine)
    print(f"\nfrom edit to result on {device}: {time.perf_counter() - start:.2f} s")
    assert time.perf_counter() - start < 10
    torch.testing.assert_close(doubled, 2 * flash.attention(q, k, v, stage="flash2"))

    header = mine.parent / "mine_too.cuh"
    header.write_text("constexpr float factor = 3.f;\n")
    mine.write_text(
        text.replace("#pragma once", '#pragma once\n#include "mine_too.cuh"').replace(
            "? 0.f : O_reg[r][c] / l[r];", "? 0.f : factor * O_reg[r][c] / l[r];"
        )
    )
    torch.testing.assert_close(flash.attention(q, k, v, stage=mine), 1.5 * doubled)
    header.write_text("constexpr float factor = 1.f;\n")
    torch.testing.assert_close(flash.attention(q, k, v, stage=mine), doubled / 2)


def test_an_unchanged_stage_is_not_built_again(mine, own_build_folder):
    q, k, v = random_qkv(1, 1, 1, 10, 10, 16, "cpu")
    flash.attention(q, k, v, stage=mine)
    builds = set(own_build_folder.iterdir())
    mine.touch()
    flash.attention(q, k, v, stage=mine)
    assert set(own_build_folder.iterdir()) == builds


def test_compile_errors_name_the_line_and_do_not_stick(mine, device):
    q, k, v = random_qkv(1, 1, 1, 10, 10, 16, device)
    good = mine.read_text()
    line = good[: good.index("float alpha")].count("\n") + 1
    mine.write_text(good.replace("const float alpha = expf", "const float alpha = exqf"))
    for _ in range(2):  # of nvcc, torch's load() believes the second time that it has built it
        with pytest.raises(RuntimeError) as caught:
            flash.attention(q, k, v, stage=mine)
        assert f"{mine}:{line}" in str(caught.value) or f"{mine}({line})" in str(caught.value)
        assert "exqf" in str(caught.value) and "ninja" not in str(caught.value)
    mine.write_text(good)
    flash.attention(q, k, v, stage=mine)


def test_cuda_that_the_simulator_does_not_know(mine):
    q, k, v = random_qkv(1, 1, 1, 10, 10, 16, "cpu")
    mine.write_text(
        mine.read_text().replace("extern __shared__ float smem[];", "extern __shared__ float smem[], more[];")
    )
    with pytest.raises(RuntimeError, match=r"mine.cuh:\d+: this form of __shared__ is not understood"):
        flash.attention(q, k, v, stage=mine)


def test_an_orphan_lock_does_not_block(own_build_folder, tmp_path):
    """torch's load() waits without end for a file `lock`, which a build that was killed leaves behind."""
    (tmp_path / "one.cpp").write_text("int one() { return 1; }")
    folder = own_build_folder / "one"
    folder.mkdir()
    (folder / "lock").touch()
    code = (f"import pathlib; from flash_ladder import loader\n"
            f"print(loader._build('one', [pathlib.Path({str(tmp_path / 'one.cpp')!r})], {{}}))")
    built = python(code, own_build_folder)
    assert built.wait(timeout=120) == 0, built.stderr.read()
    assert built.stdout.read().strip() == str(folder / "one.so") and (folder / "one.so").exists()


def test_a_killed_build_does_not_block(own_build_folder):
    killed = python(ONE_CALL, own_build_folder)
    deadline = time.monotonic() + 60
    while not list(own_build_folder.glob("fwd_flash2_cpu_*/translated/flash_fwd.cpp")):
        assert time.monotonic() < deadline and killed.poll() is None, "the build was not seen under way"
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not list(own_build_folder.glob("fwd_flash2_cpu_*/done"))
    after = python(ONE_CALL, own_build_folder)
    assert after.wait(timeout=120) == 0, after.stderr.read()


@pytest.fixture
def compiled(monkeypatch) -> list[list[str]]:
    """Of each kernel, the arguments with which it is compiled."""
    calls = []
    compile_library = simulator.compile_library
    monkeypatch.setattr(simulator, "compile_library", lambda source, library, cflags, ldflags: (
        calls.append([str(source), *cflags]), compile_library(source, library, cflags, ldflags)))
    return calls


@pytest.mark.parametrize("checked", [False, True])
def test_the_header_is_precompiled(own_build_folder, compiled, checked):
    """Once for all kernels with the same flags; and g++ takes it. (-H lists it with a `!`, what it refuses
    with an `x`.)"""
    q, k, v = random_qkv(1, 1, 1, 10, 10, 16, "cpu")
    for stage in ("flash2", "naive"):
        with flash.inspect() if checked else contextlib.nullcontext():
            flash.attention(q, k, v, stage=stage)
    (header,) = own_build_folder.glob("header_*/cuda_runtime.h.gch")
    assert len(compiled) == 2
    for arguments in compiled:
        done = subprocess.run([simulator.compiler(), "-H", "-fsyntax-only", "-fPIC", "-Winvalid-pch",
                               *arguments], capture_output=True, text=True)
        assert f"! {header}" in done.stderr and "\nx " not in f"\n{done.stderr}", done.stderr


@pytest.mark.parametrize("there_is", ["none", "one for other flags"])
def test_without_a_precompiled_header(own_build_folder, compiled, monkeypatch, there_is):
    """The header is read as it is."""
    def refuse(file, flags):
        if there_is == "none":
            raise RuntimeError("no space left")
        precompile(file, ["-std=c++17", "-O0", "-DSIM_CHECKED", f"-I{simulator.INCLUDE}"])

    precompile = simulator.precompile
    monkeypatch.setattr(simulator, "precompile", refuse)
    q, k, v = random_qkv(1, 2, 2, 30, 30, 16, "cpu")
    check(*flash.attention(q, k, v, stage="flash2", return_lse=True), q, k, v)
    headers = [argument for argument in compiled[0] if "/header_" in argument]
    assert len(headers) == (there_is != "none") == len(list(own_build_folder.glob("header_*/*.gch")))


def test_two_processes_build_at_once(own_build_folder):
    both = [python(ONE_CALL, own_build_folder) for _ in range(2)]
    assert [p.wait(timeout=120) for p in both] == [0, 0], [p.stderr.read() for p in both]
    assert both[0].stdout.read() == both[1].stdout.read()
    assert len(list(own_build_folder.glob("fwd_flash2_cpu_*/done"))) == 1


@pytest.mark.slow
def test_paths_with_spaces_and_quotes(tmp_path, mine):
    """Of the simulator and of a kernel; no shell may read them."""
    folder = tmp_path / "a folder (it's mine)"
    folder.mkdir()
    own = folder / "my stage.cuh"
    own.write_text(mine.read_text())
    code = ONE_CALL.replace('stage="flash2"', "stage=pathlib.Path(sys.argv[1])").replace(
        "import torch", "import pathlib, sys, torch"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(own)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        env=os.environ | {"FLASH_BUILD_DIR": str(folder / "build")},
    )
    assert process.returncode == 0, process.stderr


def test_a_build_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(loader, "BUILD", tmp_path / "file")
    monkeypatch.setattr(launch, "_libraries", {})
    with pytest.raises(RuntimeError, match="cannot write to the build folder .*: set FLASH_BUILD_DIR"):
        flash.attention(*random_qkv(1, 1, 1, 10, 10, 16, "cpu"))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_params_must_not_drift(direction, monkeypatch):
    """The parameters stand in flash_fwd.cu or flash_bwd.cu, and in launch.py; a field in only one would shift
    all others."""

    class Longer(launch.PARAMS[direction]):
        _fields_ = [("extra", ctypes.c_double)]

    monkeypatch.setitem(launch.PARAMS, direction, Longer)
    monkeypatch.setattr(launch, "_libraries", {})
    with pytest.raises(RuntimeError, match=f"Longer in flash_{direction}.cu and its twin in Python"):
        q, k, v = random_qkv(1, 1, 1, 10, 10, 16, "cpu")
        flash.attention(q.requires_grad_(), k, v).sum().backward()


def test_the_compiler_is_looked_for_once(monkeypatch, tmp_path):
    """On each PATH; one that was not found is looked for again."""
    looked = []
    monkeypatch.setattr(simulator, "_found", set())
    which = shutil.which
    monkeypatch.setattr(simulator.shutil, "which", lambda name: looked.append(name) or which(name))
    monkeypatch.setenv("CXX", "my-g++")
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):
        assert "`my-g++` is not on the PATH" in simulator.missing_compiler()
    (tmp_path / "my-g++").touch(0o755)
    for _ in range(3):
        assert simulator.missing_compiler() is None
    assert looked == ["my-g++"] * 3
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert "`my-g++` is not on the PATH" in simulator.missing_compiler()


# ------------------------------------------------------------------------------------------ nvcc
@pytest.fixture
def nvccs(tmp_path, monkeypatch):
    """Places where nvcc is looked for, empty, and a function that puts one there."""

    def put(folder: str, version: str) -> Path:
        nvcc = tmp_path / folder / "bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
        nvcc.chmod(0o755)
        flash_ladder.nvcc._find_nvcc.cache_clear()
        return nvcc

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path/bin"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(flash_ladder.nvcc, "SYSTEM_CUDA", tmp_path / "system")
    return put


def test_nvcc_is_found_in_order(nvccs):
    """$CUDA_HOME, NVIDIA's wheels, PATH, /usr/local/cuda; the first whose major version is PyTorch's."""
    system = nvccs("system", "13.1")
    assert flash.find_nvcc("13.0") == system
    path = nvccs("path", "13.2")
    assert flash.find_nvcc("13.0") == path
    wheel = nvccs("site/nvidia/cu13", "13.0")
    assert flash.find_nvcc("13.0") == wheel
    home = nvccs("home", "12.8")
    assert flash.find_nvcc("13.0") == wheel
    assert flash.find_nvcc("12.6") == home
    assert flash.find_nvcc() == home


def test_no_nvcc_says_what_to_do(nvccs):
    with pytest.raises(
        RuntimeError,
        match=r"there is no nvcc: pip install 'cuda-toolkit\[nvcc,cccl\]==13\.\*', or set CUDA_HOME",
    ):
        flash.find_nvcc("13.0")
    path = nvccs("path", "12.4")
    with pytest.raises(RuntimeError) as caught:
        flash.find_nvcc("13.0")
    assert f"needs nvcc 13.x (PyTorch was built with CUDA 13.0); {path} is 12.4" in str(caught.value)


def test_wheels_without_a_linkable_cudart(tmp_path, monkeypatch):
    """NVIDIA's wheels have libcudart.so.13 only: a link is made in the build folder, unless there is one."""
    monkeypatch.setattr(loader, "BUILD", tmp_path / "build")
    with pytest.raises(RuntimeError, match="no libcudart.so under .*: install the CUDA runtime"):
        loader._linkable_cudart(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libcudart.so.13").touch()
    for _ in range(2):
        link = loader._linkable_cudart(tmp_path) / "libcudart.so"
        assert link.resolve() == tmp_path / "lib/libcudart.so.13"
    (tmp_path / "lib/libcudart.so.13").rename(tmp_path / "lib/libcudart.so.14")  # an upgrade
    assert (loader._linkable_cudart(tmp_path) / "libcudart.so").resolve() == tmp_path / "lib/libcudart.so.14"
    (tmp_path / "lib/libcudart.so").touch()
    assert loader._linkable_cudart(tmp_path) == tmp_path / "lib"


def test_a_library_is_hashed_once_until_it_changes(tmp_path, monkeypatch):
    """An inspection looks at three of them; and one that was cut short meanwhile shows."""
    file, read = tmp_path / "some.so", []
    monkeypatch.setattr(Path, "read_bytes", lambda self, of=Path.read_bytes: read.append(self) or of(self))
    file.write_bytes(b"whole")
    first = loader._fingerprint(file)
    assert loader._fingerprint(file) == first and read == [file]
    file.write_bytes(b"who")
    assert loader._fingerprint(file) != first and read == [file, file]


def test_debug_information_is_lines_alone():
    """The level comes after the format: -gdwarf-4 alone asks for all of it."""
    for checked in (False, True):
        flags = simulator.compile_flags(debug=False, checked=checked)
        assert [flag for flag in flags if flag.startswith("-g")] == ["-gdwarf-4", "-g1"]
