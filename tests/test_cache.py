"""The build folder: what is counted, what a bound on its size deletes, and what it leaves."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flash_ladder import cache, command, loader

HOUR = 3600


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(loader, "BUILD", tmp_path)
    monkeypatch.delenv("FLASH_BUILD_LIMIT", raising=False)
    return tmp_path


def build(folder: Path, name: str, hours_ago: float, kilobytes: int = 100) -> Path:
    """As _build() leaves it; last used so long ago."""
    made = folder / name
    with cache.locked(made):
        (made / f"{name}.so").write_bytes(os.urandom(1000 * kilobytes))
        (made / cache.DONE).write_text("fingerprint")
    used = time.time() - HOUR * hours_ago
    for file in (made / cache.LOCK, made / cache.DONE):
        os.utime(file, (used, used))
    return made


def names(folder: Path) -> list[str]:
    return [found.path.name for found in cache.builds(folder)]


def test_builds_are_those_with_a_lock(folder):
    """In the order of their last use; results beside them are not counted."""
    build(folder, "new", 1)
    build(folder, "old", 9, kilobytes=300)
    (folder / "bench").mkdir()
    (folder / "bench" / "results.json").write_text("{}")
    assert names(folder) == ["old", "new"]
    sizes = [found.size for found in cache.builds(folder)]
    assert 300_000 <= sizes[0] < 330_000 and 100_000 <= sizes[1] < 130_000
    assert cache.builds(folder / "nowhere") == []


def test_trim_deletes_what_was_not_used_for_longest(folder, monkeypatch):
    monkeypatch.setenv("FLASH_BUILD_LIMIT", "0.25")
    for hours in (2, 5, 3, 4):
        build(folder, f"of_{hours}", hours)
    cache.mark_used(folder / "of_5")
    cache.trim(folder)
    assert names(folder) == ["of_2", "of_5"]
    assert not list(folder.glob("deleted_*"))
    build(folder, "of_9", 9)
    cache.trim(folder)
    assert "of_9" in names(folder), "looked again before a minute was over"
    os.utime(folder / cache.LOOKED, (0, 0))
    cache.trim(folder)
    assert "of_9" not in names(folder)


def test_trim_leaves_what_is_in_use(folder, monkeypatch):
    """What was used within the hour, and what is being built, though it is above the limit."""
    monkeypatch.setenv("FLASH_BUILD_LIMIT", "0")
    build(folder, "young", 0.5)
    with cache.locked(build(folder, "being_built", 8)):
        build(folder, "old", 7)
        cache.trim(folder)
    assert sorted(names(folder)) == ["being_built", "young"]


def test_limit(monkeypatch):
    monkeypatch.setenv("FLASH_BUILD_LIMIT", "1.5")
    assert cache.limit_bytes() == 1_500_000
    monkeypatch.setenv("FLASH_BUILD_LIMIT", "")
    assert cache.limit_bytes() == 5_000_000_000
    for wrong in ("5 GB", "-1", "nan"):
        monkeypatch.setenv("FLASH_BUILD_LIMIT", wrong)
        with pytest.raises(ValueError, match="FLASH_BUILD_LIMIT must be a number of MB, such as 5000, not"):
            cache.limit_bytes()


def test_who_waits_for_a_lock_of_a_deleted_build_makes_it_anew(folder):
    """Another process holds the lock, and the folder is deleted under it."""
    code = ("import sys, time; from pathlib import Path; from flash_ladder import cache\n"
            "with cache.locked(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.readline()")
    with subprocess.Popen([sys.executable, "-c", code, folder / "x"], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, cwd=Path(cache.__file__).parents[1]) as other:
        assert other.stdout.readline() == "locked\n"
        assert not cache.delete(folder / "x"), "deleted a build whose lock is held"
        assert (folder / "x" / cache.LOCK).exists()
        other.stdin.write("\n")
        other.stdin.close()
        other.wait()
    assert cache.delete(folder / "x") and not cache.delete(folder / "x")
    with cache.locked(folder / "x"):
        assert (folder / "x" / cache.LOCK).exists()


def test_command(folder, capsys, monkeypatch):
    build(folder, "a", 3)
    build(folder, "b", 2)
    assert command.main(["cache"]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: 2 builds, 0.2 MB; the limit is 5,000 MB")
    with cache.locked(folder / "b"):
        assert command.main(["cache", "--clear"]) == 0
        out = capsys.readouterr().out
    assert f"Deleted from {folder}: 1 build, 0.1 MB." in out and "being built: 1 build" in out
    assert names(folder) == ["b"]
    monkeypatch.setenv("FLASH_BUILD_LIMIT", "much")
    assert command.main(["cache"]) == 2
    assert "must be a number of MB" in capsys.readouterr().err
