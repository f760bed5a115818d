"""The code's shape: short modules, in Python arrows one way, an import that costs little. (-s prints it.)"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flash

MOST_LINES = 400
FRONT_DOOR = 300       # flash.py
IMPORT_SECONDS = 0.5
NOT_IMPORTED = ("torch._dynamo", "matplotlib", "rich", "sympy", "jupyter", "flash_ladder.bench",
                "flash_ladder.command", "flash_ladder.difference", "flash_ladder.grid",
                "flash_ladder.reference", "flash_ladder.simulator.report", "flash_ladder.simulator.tables")

FILES = {".".join(file.relative_to(flash.ROOT).with_suffix("").parts).removesuffix(".__init__"): file
         for file in [flash.ROOT / "flash.py", flash.ROOT / "bench.py",
                      *sorted((flash.ROOT / "flash_ladder").rglob("*.py"))]}
RUNTIME = sorted(file for file in (flash.ROOT / "flash_ladder" / "simulator").rglob("*")
                 if file.suffix in (".cpp", ".h"))


def test_length_of_modules():
    modules = FILES | {file.name: file for file in RUNTIME}
    lines = {name: len(file.read_text().splitlines()) for name, file in modules.items()}
    for name, count in sorted(lines.items(), key=lambda x: -x[1])[:5]:
        print(f"{count:4} lines  {name}")
    assert lines["flash"] < FRONT_DOOR and "checker.cpp" in lines
    assert not {name: count for name, count in lines.items() if count >= MOST_LINES}


def imports(name: str) -> set[str]:
    """The project's modules that a module imports, in functions too, but not for type checkers alone."""
    tree = ast.parse(FILES[name].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[:len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(inner if inner in FILES else module)
    return {x for x in found if x in FILES} - {name}


GRAPH = {name: imports(name) for name in FILES}


def test_imports_go_one_way():
    """No circle; and nothing beneath knows what is above it."""
    for name, found in GRAPH.items():
        print(f"{name} -> {', '.join(sorted(found)) or '-'}")
    assert GRAPH["flash"] >= {"flash_ladder.attention", "flash_ladder.registry"}
    assert GRAPH["flash_ladder.plan"] >= {"flash_ladder.launch", "flash_ladder.checks"}
    done, left = set(), dict(GRAPH)
    while ready := {name for name, found in left.items() if found <= done}:
        done |= ready
        left = {name: found for name, found in left.items() if name not in ready}
    assert not left, {name: found - done for name, found in left.items()}
    for name, found in GRAPH.items():
        if name.startswith("flash_ladder") and not name.startswith("flash_ladder.bench"):
            assert not found & {"flash", "bench"}, name
            assert not [x for x in found if x.startswith("flash_ladder.bench")], name
    for file in FILES.values():
        text = file.read_text()
        assert "import tests" not in text and "import tutorials" not in text


@pytest.mark.xdist_group("test_structure.py")
def test_what_import_flash_costs():
    """In a fresh process, or the quickest of three: seconds beside those of torch; and what it brings along,
    and a first call does."""
    code = ("import time, sys, torch\nbefore = set(sys.modules)\nbegun = time.perf_counter()\nimport flash\n"
            "print(time.perf_counter() - begun)\nprint(*set(sys.modules) - before)\n"
            "q = torch.randn(1, 1, 4, 8, requires_grad=True)\n"
            "flash.attention(q, q, q, stage='flash2', backward='recompute').sum().backward()\n"
            "print(*set(sys.modules) - before)")
    seconds, brought, by_a_call = [], set(), set()
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], cwd=flash.ROOT, capture_output=True, text=True,
                              check=True)
        first, second, third = done.stdout.splitlines()
        seconds.append(float(first))
        brought |= set(second.split())
        by_a_call |= set(third.split())
        if min(seconds) <= IMPORT_SECONDS:
            break
    print(f"import flash: {min(seconds):.3f} s, {len(brought)} modules")
    assert "flash_ladder.attention" in brought
    assert not {x for x in brought for no in NOT_IMPORTED if x == no or x.startswith(f"{no}.")}
    assert min(seconds) <= IMPORT_SECONDS
    assert not by_a_call & {"torch._dynamo", "sympy", "matplotlib", "rich"}


def test_nothing_evaluates_a_header():
    """Headers are arithmetic: flash_ladder/arithmetic.py reads them."""
    for name, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            assert not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec")), name


def test_module_names_do_not_clash():
    """With a user's own: beside flash.py and bench.py all is in one package."""
    at_top = {file.name for file in Path(flash.ROOT).glob("*.py")}
    assert at_top <= {"flash.py", "bench.py", "setup.py"}


@pytest.mark.skipif(not shutil.which("make"), reason="make is missing")
@pytest.mark.parametrize("end", ["os._exit(1)", "time.sleep(60)"])
def test_a_test_that_ends_its_worker_has_failed(tmp_path, end):
    """By `make test`: a run with a test that dies or hangs comes to an end, and names it."""
    file = tmp_path / "test_these.py"
    file.write_text("import os, time, pytest\n"
                    "@pytest.mark.parametrize('n', range(12))\n"
                    f"def test_it(n):\n    if n == 4: {end}\n")
    env = {name: value for name, value in os.environ.items() if not re.match("PYTEST|MAKE|MFLAGS", name)}
    asked = subprocess.run(["make", "-n", "test", "ARGS="], cwd=flash.ROOT, env=env, capture_output=True,
                           text=True)
    options = asked.stdout.splitlines()[-1].partition(" -m pytest ")[2].split()
    assert options, asked
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", flash.ROOT / "pyproject.toml", "--rootdir", tmp_path,
         "-o", "faulthandler_timeout=1", "-p", "no:cacheprovider", file],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and "FAILED test_these.py::test_it[4] - worker" in done.stdout, done.stdout
