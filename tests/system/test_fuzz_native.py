"""The targets of ``make fuzz-native`` on a few random inputs, without atheris; and its oracle."""

from __future__ import annotations

import importlib
import io
import signal
from pathlib import Path
from typing import Any

import pytest
from fuzz_native import blobs, outcome, worker
from fuzz_native.draw import Draw

import subgraph as sg
from subgraph.devices import blob

pytestmark = pytest.mark.filterwarnings("ignore")


_COUNTS = {"text": 300, "models": 60, "blobs": 60, "partition": 100, "kernel_cache": 300}


@pytest.mark.parametrize(("target", "count"), _COUNTS.items())
def test_random_inputs_end_as_they_may(
    target: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target == "kernel_cache":  # whose entries are damaged
        monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    module = importlib.import_module(f"fuzz_native.{target}")
    record = outcome.Recorder(module.run, tmp_path / "findings")
    for data in worker.mutated_seeds(module, count, seed=7):
        record(data)
    assert record.runs == count
    assert record.counts == {}, "\n".join(p.read_text() for p in tmp_path.glob("*/*.txt"))


def test_a_forged_file_has_the_whole_body() -> None:
    """A file without its body would be refused before any of the changes is read."""
    chosen = blobs._exported()[0]
    reader = blob.BlobReader(io.BytesIO(blobs._forged(chosen, Draw(bytes(64)))))
    assert bytes(reader._body[: len(chosen.body)]) == chosen.body


def test_the_oracle_tells_findings_from_refusals(tmp_path: Path) -> None:
    def run(data: bytes) -> None:
        errors = [sg.ModelError("no"), sg.InternalError("ours"), ValueError("raw"), MemoryError()]
        outcome.refuses(lambda: raising(errors[data[0]]))

    def raising(error: Exception) -> None:
        raise error

    record = outcome.Recorder(run, tmp_path)
    for number in (0, 1, 2, 2, 3):
        record(bytes([number]))
    assert sorted(kind.split()[0] for kind in record.counts) == [
        "InternalError",
        "MemoryError",
        "ValueError",
    ]
    assert sorted(p.read_bytes()[0] for p in tmp_path.glob("*.bin")) == [1, 2, 3]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there is no timer of this kind")
def test_an_input_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> None:
        while True:
            pass

    monkeypatch.setattr(outcome, "HANG_SECONDS", 0.1)
    record = outcome.Recorder(lambda _: hang(), tmp_path)
    record(b"")
    assert [kind.split()[0] for kind in record.counts] == ["Hang"]


def test_an_input_that_is_slow_twice_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "LIMIT_SECONDS", -1.0)
    record = outcome.Recorder(lambda data: None, tmp_path)
    record(b"")
    assert list(record.counts) == ["Finding: slow"]


def test_decisions_follow_from_bytes_alone() -> None:
    def decisions() -> list[Any]:
        draw = Draw(bytes(range(40)))
        made: list[Any] = [draw.below(3), draw.below(1000), draw.choice("abc"), draw.often(0.5)]
        return [*made, draw.number(), draw.rng().random(), draw.rest()]

    assert decisions() == decisions()
    assert 0 <= Draw(b"\xff\xff\xff").below(70_000) < 70_000
