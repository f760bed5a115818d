"""The source's layout: at most 110 columns, no tabs, no trailing whitespace, one newline at the end. For
Python also ruff's rules and mypy's types (pyproject.toml)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_COLUMNS = 110
PATTERNS = ("*.py", "*.cu", "*.cuh", "*.h", "*.cpp", "Makefile")


def source_files() -> list[Path]:
    """Those in git, and new ones that git does not ignore."""
    try:
        out = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--",
                              *PATTERNS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not in a git repository: {error}")
    return [ROOT / name for name in sorted(set(out.split("\0"))) if name and (ROOT / name).is_file()]


def offences(file: Path) -> list[str]:
    """As file:line: what is wrong."""
    text = file.read_bytes().decode()
    lines = text.split("\n")  # not splitlines(), which also splits at a form feed and hides a carriage return
    found = []
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            found.append((number, f"{len(line)} columns"))
        if "\t" in line[:len(line) - len(line.lstrip())] and file.name != "Makefile":
            found.append((number, "tab in the indentation"))
        if line != line.rstrip():
            found.append((number, "trailing whitespace"))
    if text and (not text.endswith("\n") or text.endswith("\n\n")):
        found.append((len(lines), "the file must end with one newline"))
    return [f"{file.relative_to(ROOT)}:{number}: {what}" for number, what in found]


def test_layout():
    files = source_files()
    assert Path(__file__).resolve() in files
    found = [offence for file in files for offence in offences(file)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("command", [("ruff", "check", "--no-cache", "--output-format=concise"), ("mypy",)],
                         ids=lambda command: command[0])
def test_python(command):
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
