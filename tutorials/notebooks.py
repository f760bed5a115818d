"""Execute the notebooks and write their outputs into them: `python -m tutorials.notebooks [03 04 ...]`.

Each runs from a clean kernel, without a GPU, as a reader with a laptop would see it. What differs from run to
run is removed, so that a notebook changes only if its text, the library or a stage does. A test executes them
again and compares.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from rich.progress import track

import flash

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 120                    # for a cell, and in the tests for a notebook
# Where this repository is on GitHub, as owner/name. Without it Colab's page for GitHub asks for the address.
REPOSITORY = ""
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"

SETUP = """\
# Run this first. On Colab it fetches the repository; elsewhere it only finds it.
import os, sys
if "google.colab" in sys.modules and not os.path.exists("flash.py"):
    address = "{address}" or input("This repository's address (https://github.com/owner/name): ")
    !git clone -q --depth 1 {{address}} flash && pip install -q ninja platformdirs rich
    %cd -q flash
elif os.path.exists("../flash.py"):
    %cd -q ..
sys.path.insert(0, os.getcwd())
from tutorials.lesson import *"""


def notebooks() -> list[Path]:
    """All of them, in reading order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))


def colab(file: Path) -> str:
    """The badge that opens a notebook on Colab, as Markdown."""
    path = f"{REPOSITORY}/blob/main/tutorials/{file.name}" if REPOSITORY else ""
    return f"[![Open in Colab]({BADGE})](https://colab.research.google.com/github/{path})"


def setup() -> str:
    """The first code cell of every notebook."""
    return SETUP.format(address=f"https://github.com/{REPOSITORY}" if REPOSITORY else "")


def with_frame(notebook: nbformat.NotebookNode, file: Path) -> nbformat.NotebookNode:
    """With the badge under its title and the setup cell after the first cell; changes it in place.

    Raises:
        ValueError: if it does not begin with a title.
    """
    cells = notebook.cells
    if not cells or not cells[0].source.startswith("# "):
        raise ValueError(f"{file.name}: the first cell must be text and begin with a title, '# ...'")
    title, *rest = cells[0].source.splitlines()
    text = "\n".join(line for line in rest if not line.startswith("[![Open in Colab]")).strip()
    cells[0].source = f"{title}\n\n{colab(file)}\n\n{text}".rstrip()
    if "setup" not in cells[1].metadata.get("tags", []):
        cells.insert(1, nbformat.v4.new_code_cell())
    cells[1].source = setup()
    cells[1].metadata["tags"] = ["setup"]
    return notebook


def execute(file: Path, cpu: bool = True) -> nbformat.NotebookNode:
    """The notebook of a file with the outputs of a run from a clean kernel, in the file's folder.

    Args:
        cpu: hide a GPU from it.
    Raises:
        nbclient.exceptions.CellExecutionError: with the traceback, if a cell fails.
        nbclient.exceptions.CellTimeoutError: if a cell takes longer than TIMEOUT_S.
    """
    flash.build_simulator()  # not in a reader's first cell
    notebook = nbformat.read(file, as_version=4)
    environment = {name: x for name, x in os.environ.items() if not name.startswith("FLASH_SIM_")}
    environment["MPLBACKEND"] = "Agg"
    if cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    client = NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3",
                            resources={"metadata": {"path": str(file.parent)}})
    client.execute(env=environment, stderr=subprocess.DEVNULL)  # the kernel's own log
    return normalised(notebook)


def normalised(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs from run to run; changes it in place."""
    notebook.metadata = nbformat.NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.NotebookNode(tags=tags) if tags else nbformat.NotebookNode()
        if cell.cell_type != "code":
            continue
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if "metadata" in output:
                output.metadata = nbformat.NotebookNode()
            if "text" in output:
                output.text = _anywhere(output.text)
            for kind, data in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = _anywhere(data)
    return notebook


def _anywhere(text: str) -> str:
    """Without addresses, and with paths within the repository."""
    return re.sub(r" at 0x[0-9a-f]+", "", text).replace(f"{flash.ROOT}/", "")


def _joined(outputs: list) -> list:
    """With neighbouring pieces of one stream joined: how it is cut up differs from run to run."""
    joined: list = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output.output_type == "stream" == last.get("output_type") and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tutorials.notebooks",
                                     description=__doc__.split("\n\n")[0])
    parser.add_argument("numbers", nargs="*", help="of the lessons, such as 03; default: all")
    parser.add_argument("--frame", action="store_true", help="only renew badges and setup cells")
    args = parser.parse_args(argv)
    known = {file.name[:2]: file for file in notebooks()}
    if unknown := [number for number in args.numbers if number.zfill(2) not in known]:
        parser.error(f"there is no lesson {', '.join(unknown)}; there are {', '.join(known)}")
    files = [known[number.zfill(2)] for number in args.numbers] or list(known.values())
    for file in track(files, "Executing"):
        notebook = with_frame(nbformat.read(file, as_version=4), file)
        nbformat.write(notebook, file)
        if not args.frame:
            nbformat.write(execute(file), file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
