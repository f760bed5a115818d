"""README.md: its ladder is the registry's, its results are those in results/, its links lead somewhere."""

import re
import runpy
import subprocess

import pytest
import test_nvcc

import flash

README = flash.ROOT / "README.md"


def test_made_parts_are_up_to_date():
    """Else: make readme."""
    readme = runpy.run_path(str(flash.ROOT / "results/readme.py"))
    assert README.read_text() == readme["updated"](README.read_text())


def test_every_stage_is_in_the_ladder():
    rows = re.findall(r"^\| (\d+) \| \[(\w+)\]\((\S+)\) \|", README.read_text(), re.M)
    assert rows == [(str(s.number), s.name, str(s.path.relative_to(flash.ROOT))) for s in flash.stages()]


def test_every_stage_is_in_flash_fwd_cu():
    listed = re.findall(r"^//   stages/(fwd_\w+\.cuh) ", (flash.ROOT / "flash_fwd.cu").read_text(), re.M)
    assert listed == [s.path.name for s in flash.stages()]


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)]+)\)", README.read_text())
    assert links and all((flash.ROOT / link).exists() for link in links)


def test_python_examples_run():
    for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.S)[:1]:
        exec(compile(code, "README.md", "exec"), {})


def test_the_breakpoint_is_on_code():
    """README's gdb example stops at the line that computes S."""
    file, line = re.search(r"break (\S+):(\d+) if", README.read_text()).groups()
    assert "S_reg[r][c] +=" in (flash.STAGES / file).read_text().splitlines()[int(line) - 1]


def test_the_inspected_lines_are_loads_of_K():
    lines = re.findall(r"line[= ]\"?(fwd_\w+\.cuh):(\d+)", README.read_text())
    assert len(lines) == 2
    for file, line in lines:
        assert re.search(r"\bK(_smem)?\[", (flash.STAGES / file).read_text().splitlines()[int(line) - 1])


def test_the_compiler_command_of_flash_fwd_cu(tmp_path):
    """As a reader would paste it."""
    if not (nvcc := test_nvcc.NVCC):
        pytest.skip(test_nvcc.WHY_NOT)
    lines = (flash.ROOT / "flash_fwd.cu").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("//   nvcc "))
    command = " ".join(line.strip("/ \\") for line in lines[start:start + 2])
    done = subprocess.run(f"{command.replace('nvcc', str(nvcc), 1)} -o {tmp_path}/out", shell=True,
                          cwd=flash.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "registers" in done.stderr, done.stderr
