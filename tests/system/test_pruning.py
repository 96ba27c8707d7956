"""The folder of compiled kernels stays within its size."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from subgraph.errors import ConfigError
from subgraph.system import objectcache, pruning
from subgraph.system.objectcache import ObjectCode

OLD = 10 * 86400.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def key(number: int) -> str:
    return f"{number:02x}" * 32


def path_of(folder: Path, number: int) -> Path:
    return folder / key(number)[:2] / f"{key(number)}.sgk"


def fill(folder: Path, count: int, nbytes: int = 1000) -> None:
    """Write entries, the first of them used longest ago."""
    for number in range(count):
        assert objectcache.write(key(number), ObjectCode((), bytes(nbytes)))
        then = time.time() - OLD + number
        os.utime(path_of(folder, number), (then, then))


def left(folder: Path) -> list[int]:
    return sorted(int(path.stem[:2], 16) for path in folder.glob("*/*.sgk"))


def test_what_was_used_longest_ago_goes(folder: Path) -> None:
    fill(folder, 20)
    assert pruning.prune(folder, 10**6) == 0
    assert objectcache.read(key(3)) is not None  # used again now
    size = path_of(folder, 3).stat().st_size
    assert pruning.prune(folder, 8 * size) == 14
    assert left(folder) == [3, 15, 16, 17, 18, 19]
    assert all(objectcache.read(key(number)) is not None for number in left(folder))
    assert objectcache.read(key(4)) is None


def test_new_entries_and_files_being_written_stay(folder: Path) -> None:
    fill(folder, 4)
    half, abandoned = folder / "00" / "a.tmp", folder / "00" / "b.tmp"
    for path in (half, abandoned):
        path.write_bytes(b"half")
    then = time.time() - OLD
    os.utime(abandoned, (then, then))
    objectcache.write(key(9), ObjectCode((), bytes(5000)))
    pruning.prune(folder, 1)
    assert left(folder) == [9]
    assert half.exists()
    assert not abandoned.exists()


def test_writing_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder, 12)
    monkeypatch.setenv("SUBGRAPH_CACHE_MB", "0.008")
    objectcache.write(key(99), ObjectCode((), bytes(1000)))
    assert 99 in left(folder)
    assert sum(path.stat().st_size for path in folder.glob("*/*.sgk")) <= 8000
    monkeypatch.setenv("SUBGRAPH_CACHE_MB", "0")
    fill(folder, 40)
    assert len(left(folder)) >= 40


def test_a_size_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBGRAPH_CACHE_MB", "many")
    with pytest.raises(ConfigError, match="SUBGRAPH_CACHE_MB='many'"):
        pruning.limit()


MANY = """
import os, sys, time
from subgraph.system import objectcache
from subgraph.system.objectcache import ObjectCode
lost = 0
for number in range(60):
    key = f"{number % 20:02x}{number:062x}"
    data = bytes(1000 + number)
    assert objectcache.write(key, ObjectCode((), data))
    found = objectcache.read(key)
    assert found is None or found.data == data
    lost += found is None
    path = objectcache.cache_folder() / key[:2] / f"{key}.sgk"
    try:
        os.utime(path, (time.time() - 7200,) * 2)
    except OSError:
        pass
"""


def test_several_processes_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBGRAPH_CACHE_MB", "0.01")
    crowd = [subprocess.Popen([sys.executable, "-c", MANY], stderr=subprocess.PIPE) for _ in "abc"]
    for process in crowd:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    objectcache.write("ff" * 32, ObjectCode((), bytes(100)))
    pruning.prune(folder, 10_000)
    assert sum(path.stat().st_size for path in folder.glob("*/*.sgk")) <= 10_000
    assert not list(folder.rglob("*.tmp"))
