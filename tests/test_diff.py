"""flash.diff: what a stage changes of another one."""

import re
from pathlib import Path

import pytest

import flash


def pairs():
    for direction in ("fwd", "bwd"):
        ladder = flash.stages(direction)
        yield from ((direction, a.name, b.name) for a, b in zip(ladder, ladder[1:]))


@pytest.mark.parametrize("direction, before, after", pairs())
def test_applying_the_diff_gives_the_stage(direction, before, after):
    """With all lines shown, its " " and "-" lines are the one file, its " " and "+" lines the other one."""
    files = {s.name: s.path for s in flash.stages(direction)}
    difference = flash.diff(before, after, direction=direction, context=10**6, header=True)
    for name, sign in ((before, "-"), (after, "+")):
        lines = [line[1:] for line in difference.lines if line[0] in " " + sign]
        assert lines == files[name].read_text().splitlines()
    counted = [line[0] for line in difference.lines]
    assert (difference.removed, difference.added) == (counted.count("-"), counted.count("+"))


def test_leaves_out_the_header_and_what_is_far_from_a_change():
    difference = flash.diff("mma", "swizzle")
    assert (difference.before, difference.after) == ("stages/fwd_11_mma.cuh", "stages/fwd_12_swizzle.cuh")
    assert 0 < difference.added < 15
    assert not any(line[1:].startswith("// idea:") for line in difference.lines)
    source = Path("stages/fwd_12_swizzle.cuh")
    text = (flash.ROOT / source).read_text().splitlines()
    for n, line in enumerate(difference.lines):  # every piece says where it is
        if line.startswith("@"):
            number = int(re.search(r"now line (\d+)", line)[1])
            assert text[number - 1] == difference.lines[n + 1][1:]
    assert not any(line.strip(" +-").startswith("// ---") for line in difference.lines)
    assert any("idea:" in line for line in flash.diff("mma", "swizzle", header=True).lines)


def test_shows_as_text_in_a_terminal_and_as_html_in_a_notebook(capsys):
    difference = flash.diff("mma", "swizzle")
    print(difference)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "+constexpr int pitch = (d + 63) / 64 * 64;" in out
    counts = f"{difference.removed} lines removed, {difference.added} added; of code {difference.code}"
    assert counts in out.splitlines()[0] and 0 < difference.code < 30
    html = flash.diff("swizzle", "cp_async")._repr_html_()
    assert "background:#dafbe1" in html and "background:#ffebe9" in html
    assert "<<<" not in html and "&lt;&lt;&lt;" in html  # a kernel's launch


def test_finds_the_ladder(tmp_path):
    assert flash.diff("recompute", "deterministic").before.startswith("stages/bwd_")
    assert flash.diff("naive", "recompute").before == "stages/bwd_01_naive.cuh"
    assert flash.diff("naive", "vectorized").before == "stages/fwd_01_naive.cuh"
    assert flash.diff("naive", "vectorized", direction="bwd").before == "stages/bwd_01_naive.cuh"
    mine = tmp_path / "mine.cuh"
    mine.write_text(Path(flash.STAGES / "fwd_04_flash2.cuh").read_text().replace("0.f", "0.0f"))
    difference = flash.diff("flash2", mine)
    assert difference.after == str(mine) and difference.added == difference.removed > 0
    flash2 = next(s for s in flash.stages("fwd") if s.name == "flash2")
    assert flash.diff(flash2, flash2).lines == ()


def test_one_stage_is_compared_with_its_parent(tmp_path):
    for s in flash.stages():
        if s.after:
            alone = flash.diff(s.name, direction=s.direction)
            assert alone == flash.diff(s.after, s.name, direction=s.direction) and alone.lines
    assert flash.diff("deterministic") == flash.diff("recompute", "deterministic")
    flash2 = (flash.STAGES / "fwd_04_flash2.cuh").read_text()
    mine = tmp_path / "mine.cuh"
    mine.write_text(flash2.replace("0.f", "0.0f").replace("after:   online_softmax", "after: flash2"))
    assert flash.diff(mine) == flash.diff("flash2", mine)
    mine.write_text("// after: recompute\n")
    assert flash.diff(mine, direction="bwd").before == "stages/bwd_02_recompute.cuh"


@pytest.mark.parametrize("arguments, options, message", [
    (("flash3", "flash2"), {}, r"there is no stage 'flash3'; the stages are .*flash2"),
    (("flash2", "recompute"), {}, "flash2 and recompute are of two ladders"),
    (("recompute", "naive"), {"direction": "fwd"}, "there is no stage 'recompute'"),
    (("flash2", Path("nothing.cuh")), {}, "nothing.cuh is no file"),
    (("flash2", 3), {}, "not by int"),
    (("flash2", "tiled"), {"direction": "up"}, "direction must be"),
    (("naive",), {}, "fwd_01_naive.cuh has no parent: name the stage to compare it with, or .*`// after: "),
    (("flash3",), {}, "there is no stage 'flash3'"),
])
def test_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        flash.diff(*arguments, **options)
