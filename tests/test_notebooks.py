"""The notebooks: each runs from a clean kernel, and what it shows is what is committed."""

import functools
import html
import re
import time

import pytest
import torch

nbclient = pytest.importorskip("nbclient", reason="nbclient, which jupyter brings, is missing")
import forked_kernels  # noqa: E402
import nbformat  # noqa: E402
from jupyter_client.provisioning import local_provisioner  # noqa: E402

import flash  # noqa: E402
from flash_ladder.grid import SIDE_BRANCH  # noqa: E402
from tutorials import notebooks  # noqa: E402
from tutorials.exercises import EXERCISES  # noqa: E402
from tutorials.exercises.exercise import one_line  # noqa: E402

FILES = notebooks.notebooks()
MOST_BYTES = 500_000


def read(file):
    return nbformat.read(file, as_version=4)


def shown(cell) -> list[str]:
    """What a cell puts out, as text; of a picture only that there is one, as fonts differ by machine, and of
    a rounding error, such as 4e-07, nothing."""
    texts = []
    for output in cell.get("outputs", []):
        if "text" in output:
            texts.append(f"{output.name}: {output.text}")
        elif "data" in output:
            data = output["data"]
            kind = next(k for k in ("image/png", "text/markdown", "text/html", "text/plain") if k in data)
            texts.append(kind if kind == "image/png" else f"{kind}: {data[kind]}")
        else:
            texts.append(f"{output.output_type}: {output.get('ename')}")
    return [re.sub(r"\d(\.\d+)?e-\d\d", "...", text) for text in texts]


def test_there_is_one_for_each_lesson():
    numbers = [file.name[:2] for file in FILES]
    assert numbers == [f"{n:02}" for n in range(len(FILES))] and len(FILES) >= 10


def test_the_first_one_lists_all():
    text = "\n".join(cell.source for cell in read(FILES[0]).cells)
    assert re.findall(r"^\| (\d\d) ", text, re.M) == [file.name[:2] for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_is_as_committed(file, monkeypatch):
    """Executed again without a GPU, in less than two minutes; same text, same number of pictures."""
    monkeypatch.setattr(local_provisioner, "launch_kernel", forked_kernels.Kernel)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")    # for what the kernels are forks of
    monkeypatch.setenv("MPLBACKEND", "Agg")
    start = time.monotonic()
    executed = notebooks.execute(file)
    seconds = time.monotonic() - start
    committed = read(file)
    for old, new in zip(committed.cells, executed.cells, strict=True):
        assert shown(old) == shown(new), f"run `python -m tutorials.notebooks {file.name[:2]}`"
    assert seconds < notebooks.TIMEOUT_S


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_runs_on_a_gpu(file):
    notebooks.execute(file, cpu=False)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_is_fit_to_read(file):
    """Small, with the badge and the setup cell; nothing on stderr, no traceback, no path of a machine."""
    assert file.stat().st_size < MOST_BYTES
    notebook, framed = read(file), notebooks.with_frame(read(file), file)
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in framed.cells], (
        "run `python -m tutorials.notebooks --frame`")
    text = file.read_text()
    assert str(flash.ROOT) + "/" not in text and "/tmp/" not in text and "/home/" not in text
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs and not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("image/png" in o.get("data", {}) for o in outputs), "a lesson has a figure"
    markdown = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    answers = markdown.count("<details>")
    assert answers == markdown.count("</details>") and 3 <= answers <= 8
    for cell in notebook.cells:
        for line in cell.source.splitlines():
            assert cell.cell_type == "markdown" or len(line) <= 110, line


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if not e.is_hunt],
                         ids=lambda e: e.file_name[:-4])
def test_no_lesson_gives_an_answer_away(exercise):
    """No cell before the exercises, and no output, has a line that one asks for; the next cell folds it."""
    file = next(file for file in FILES if file.name.startswith(exercise.lesson))
    cells = read(file).cells
    asked = next(n for n, cell in enumerate(cells) if cell.source == f'exercises("{exercise.lesson}")')
    telling = exercise.telling_lines()
    assert telling
    for cell in cells[:asked]:
        lines = {one_line(line.lstrip("+-")) for text in texts(cell) for line in text.splitlines()}
        assert not telling & lines
        code = " ".join(one_line(line) for line in cell.source.splitlines())
        assert not [line for line in telling if line in code]
    answers = cells[asked + 1]
    assert answers.source == f'answers("{exercise.lesson}")'
    folded = re.findall(r"<details>.*?</details>", "".join(texts(answers)), re.S)
    found = next(text for text in folded if f"Exercise {exercise.number}," in text)
    assert telling <= {one_line(line) for line in found.splitlines()}


def texts(cell) -> list[str]:
    """A cell's source and what it puts out, without HTML's tags: a line of code in a line."""
    outputs = [output.get("text", "") for output in cell.get("outputs", [])]
    for output in cell.get("outputs", []):
        for kind, text in output.get("data", {}).items():
            if kind == "text/html":
                outputs.append(html.unescape(re.sub(r"<[^>]+>", "", text.replace("</div>", "\n"))))
            elif kind.startswith("text/"):
                outputs.append(text)
    return [cell.source, *outputs]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_links_lead_somewhere(file):
    for cell in read(file).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#]+)[^)]*\)", cell.source):
                if not target.startswith(("http://", "https://")):
                    assert (file.parent / target).exists(), target


def test_the_tool_refuses_unknown_lessons(capsys):
    with pytest.raises(SystemExit):
        notebooks.main(["77"])
    assert "there is no lesson 77; there are 00, 01" in capsys.readouterr().err


def test_times_need_a_gpu(monkeypatch):
    from tutorials import lesson

    monkeypatch.setattr(lesson, "DEVICE", torch.device("cpu"))
    with pytest.raises(RuntimeError, match="needs a GPU; without one, measure"):
        lesson.times(["naive"])


# Rungs that no lesson shows
WITHOUT_A_LESSON = [("bwd", name) for name in SIDE_BRANCH]


@functools.cache
def html_of_lessons() -> list[str]:
    """All that the lessons show as HTML."""
    return [output["data"]["text/html"] for file in FILES for cell in read(file).cells
            for output in cell.get("outputs", []) if "text/html" in output.get("data", {})]


@pytest.mark.parametrize("stage", [stage for stage in flash.stages()
                                   if stage.after and (stage.direction, stage.name) not in WITHOUT_A_LESSON],
                         ids=str)
def test_a_lesson_shows_what_each_rung_changes(stage):
    """Its difference from its parent, as it is now."""
    title = flash.diff(stage).title
    assert [text for text in html_of_lessons() if html.escape(title) in text]


@pytest.mark.parametrize("file", [file for file in FILES if file.stem[:2] > "01"], ids=lambda file: file.stem)
def test_the_rungs_so_far_come_first(file):
    """Their staircase is the first code that a lesson runs."""
    code = [cell.source for cell in read(file).cells if cell.cell_type == "code"]
    assert code[0] == notebooks.setup() and code[1].startswith("staircase(")
