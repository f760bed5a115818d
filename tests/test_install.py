"""Installed in an environment of its own, and used from an empty folder: nothing of the tree is in reach.

What the project needs, such as PyTorch, is not installed again: the environment sees this one's packages.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import flash
from flash_ladder.sources import source_files

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation", "-q"]
FIVE_LINES = """
import torch, flash
q, k, v = torch.randn(3, 1, 2, 40, 16).double()
o = flash.attention(q.float(), k.float(), v.float(), causal=True, stage="flash2", backward="recompute")
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
print("error", (o - exact).abs().max().item(), flash.__version__, flash.__file__, flash.BUILD)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """What is installed, copied: a build leaves files in it, and a test edits a stage."""
    copy = tmp_path_factory.mktemp("tree") / "it's a clone"
    shutil.copytree(ROOT, copy, ignore=lambda folder, names: [
        name for name in names if name in ("__pycache__", "build") or name.endswith(".egg-info") or
        (Path(folder) == ROOT and name in (".git", ".venv", "results", "tests", "tutorials", "docs"))])
    return copy


class Environment:
    """A new one, with an empty folder to work in and a home of its own."""

    def __init__(self, folder: Path):
        self.python = folder / "venv" / "bin" / "python"
        self.empty, self.home = folder / "empty", folder / "home"
        self.empty.mkdir(parents=True)
        self.home.mkdir()
        venv.create(folder / "venv", symlinks=True)
        site, = (folder / "venv" / "lib").glob("python*/site-packages")
        (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self, *what) -> None:
        subprocess.run([*PIP, "--python", str(self.python), "install", *OFFLINE, *map(str, what)], check=True)

    def has_simulator(self, folder: Path) -> None:
        """Copy the simulator's library, which takes 15 s of CPU time to build, to a folder of builds. A
        build's name has a hash of its sources: it is taken only if those that were installed are the tree's.
        """
        library = flash.build_simulator().parent
        shutil.copytree(library, folder / library.name, ignore=shutil.ignore_patterns("*.o"),
                        dirs_exist_ok=True)

    def run(self, *command, **more: str) -> str:
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith(("FLASH_", "PYTHON", "XDG_"))}
        result = subprocess.run([self.python.parent / command[0], *command[1:]], cwd=self.empty, text=True,
                                env=kept | {"HOME": str(self.home)} | more, capture_output=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", *OFFLINE, "-w", folder, tree], check=True)
    file, = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.install(wheel)
    return environment


def test_what_is_in_the_wheel(wheel):
    """All of the package's modules and data, and each .cu file, as it is in the tree; no test, no build."""
    with zipfile.ZipFile(wheel) as archive:
        there = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    data = [*ROOT.glob("*.cu"), *ROOT.glob("stages/**/*.cuh")]
    package = [file for file in ROOT.glob("flash_ladder/**/*") if file.is_file() and file.suffix != ".pyc"]
    expected = {f"flash_ladder/sources/{file.relative_to(ROOT)}": file for file in data}
    expected |= {str(file.relative_to(ROOT)): file for file in (*package, ROOT / "flash.py")}
    assert there.keys() == expected.keys()
    assert all(there[name] == file.read_bytes() for name, file in expected.items())
    assert len(data) > 40 and "flash_ladder/py.typed" in there


def test_five_lines_from_an_empty_folder(installed):
    """Right; what is built goes to the user's cache folder, and an environment variable moves it. (That its
    simulator is built: test_paths_with_spaces_and_quotes in test_loader.py.)"""
    installed.has_simulator(installed.home / ".cache" / "flash-ladder")
    _, error, version, place, build = installed.run("python", "-c", FIVE_LINES).split()
    assert float(error) < 1e-5 and version == flash.__version__
    assert Path(place).is_relative_to(installed.python.parents[1])
    assert build == str(installed.home / ".cache" / "flash-ladder")
    assert list(Path(build).glob("fwd_flash2_cpu_*/*.so"))
    moved = installed.home / "moved"
    out = installed.run("python", "-c", "import flash; print(flash.BUILD)", FLASH_BUILD_DIR=str(moved))
    assert out.strip() == str(moved)


def test_console_command(installed):
    """It says its own name, not that of a file that is not there."""
    assert "fp32_tuned" in installed.run("flash-ladder")
    out = installed.run("flash-ladder", "new", "mine", "--after", "flash2")
    assert "  flash-ladder check mine.cuh\n" in out and "bench.py" not in out
    assert "  python -m flash_ladder.bench --stages flash2,mine.cuh\n" in out
    assert "--sweep STAGE" in installed.run("python", "-m", "flash_ladder.bench", "--help")
    builds = installed.home / ".cache" / "flash-ladder"
    shutil.rmtree(builds, ignore_errors=True)
    installed.has_simulator(builds)
    assert re.search(r"/flash-ladder: 1 build, [\d.]+ MB; the limit is 5,000 MB",
                     installed.run("flash-ladder", "cache"))
    assert "Deleted from" in installed.run("flash-ladder", "cache", "--clear")
    assert not list(builds.glob("*/*.so"))


def test_an_edit_of_an_editable_install_takes_effect(tree, tmp_path):
    """At the next call of the same process. The .cu files are the tree's, and builds go to its build/."""
    environment = Environment(tmp_path)
    environment.install("-e", tree)
    environment.has_simulator(tree / "build")
    environment.run("python", "-c", """
import time, pathlib, torch, flash
q, k, v = torch.randn(3, 1, 1, 24, 16)
before = flash.attention(q, k, v, stage="flash2")
stage = flash.STAGES / "fwd_04_flash2.cuh"
text = stage.read_text()
edited = text.replace("O_reg[r][c] / l[r]", "O_reg[r][c] / l[r] / 2.f")
assert edited != text
stage.write_text(edited)
time.sleep(0.2)
after = flash.attention(q, k, v, stage="flash2")
assert torch.allclose(after, before / 2), (before, after)
assert flash.BUILD == flash.ROOT / "build" and flash.ROOT == pathlib.Path(flash.__file__).parent
""")


def test_requirements_name_what_the_package_asks_for(installed):
    """requirements.txt has a release of each, those of the extras too: the tests need nothing by hand."""
    asked = installed.run("python", "-c", "from importlib.metadata import requires\n"
                          "print(*requires('flash-ladder'), sep='\\n')").splitlines()
    names = {re.match(r"[\w-]+", line)[0] for line in asked}
    assert {"torch", "platformdirs", "ruff", "matplotlib", "cuda-toolkit"} <= names
    pinned = re.findall(r"^([\w-]+)(?:\[[\w,]+\])?==", (ROOT / "requirements.txt").read_text(), re.M)
    assert names <= set(pinned)


def test_what_the_sources_include_is_installed(installed):
    """Found where flash_fwd.cu and the stages look for it."""
    out = installed.run("python", "-c", """
import flash
from flash_ladder.sources import source_files
files = source_files(flash.ROOT / "flash_fwd.cu", flash.STAGES / "fwd_17_ampere_tuned.cuh")
print(*sorted(str(file.relative_to(flash.ROOT)) for file in files))
""")
    stage = flash.STAGES / "fwd_17_ampere_tuned.cuh"
    here = [str(file.relative_to(ROOT)) for file in source_files(ROOT / "flash_fwd.cu", stage)]
    assert out.split() == sorted(here) and len(here) > 5
