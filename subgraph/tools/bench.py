"""Benchmarks of Subgraph and other runtimes on one model, with interleaved samples.

Every runtime has a process of its own, for its start time, memory and threads. The processes run
alternately. A fixed calibration loop runs before and after each sample; samples next to a slow
calibration are dropped. The report has medians, 10 % and 90 % quantiles, and numbers of samples.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from subgraph.dtypes import DTYPES
from subgraph.errors import ConfigError, DeviceError
from subgraph.graph.result_arrays import is_array
from subgraph.graph.types import Array, dtype_of
from subgraph.system.registry import nearest

# Runtimes that have an option to compute float32 models in bfloat16.
PRECISE = ("subgraph", "openvino")
PEERS = {"onnxruntime": "onnxruntime", "openvino": "openvino", "torch": "onnx2torch"}
# Samples count if their calibration took at most this multiple of the shortest one (estimate).
_MAX_CALIBRATION_RATIO = 1.25


@attrs.frozen
class Measured:
    """The measurements of one runtime.

    Attributes:
        runner: Name of the runtime.
        median: Median of a run, in seconds.
        low: 10 % quantile of a run, in seconds.
        high: 90 % quantile of a run, in seconds.
        kept: Number of samples that count.
        taken: Number of all samples.
        first_result: Seconds from the load of the model to the first result.
        peak_bytes: Peak resident memory after the first result.
        difference: Largest difference of a result from the first peer's (without peers: from its
            own), relative to that output's largest magnitude.
    """

    runner: str
    median: float
    low: float
    high: float
    kept: int
    taken: int
    first_result: float
    peak_bytes: int
    difference: float

    def row(self, best_peer: float | None) -> dict[str, Any]:
        """Return a row of a table; ``best_peer`` is the fastest peer's median in seconds."""
        row: dict[str, Any] = {
            "runner": self.runner,
            "median ms": round(self.median * 1e3, 4),
            "10 %": round(self.low * 1e3, 4),
            "90 %": round(self.high * 1e3, 4),
            "kept": f"{self.kept}/{self.taken}",
            "first result s": round(self.first_result, 3),
            "peak MB": round(self.peak_bytes / 1e6, 1),
            "difference": float(f"{self.difference:.2e}"),
        }
        if best_peer is not None:
            row["ratio to best peer"] = round(self.median / best_peer, 3)
        return row


class _Worker:
    """The process of a runtime (`subgraph.tools.bench_worker`)."""

    def __init__(self, runner: str, model: Path, threads: int, inputs: Path) -> None:
        self.runner = runner.partition(" ")[0]  # without ONNX Runtime's optimisation level
        command = [sys.executable, "-m", "subgraph.tools.bench_worker", runner, str(model)]
        self._process = subprocess.Popen(
            [*command, str(threads), str(inputs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ready = self._read()

    def send(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            output = self._process.stderr.read().strip().splitlines()[-3:]
            raise DeviceError(
                f"the benchmark's runner {self.runner!r} stopped: {' / '.join(output)}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def check_peers(names: Sequence[str]) -> None:
    """Check that the peers are known and installed.

    Raises:
        ConfigError: a peer is unknown or not installed; the message names its package.
    """
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"no peer named {name!r}; {nearest(name, PEERS)}")
        if importlib.util.find_spec(PEERS[name]) is None:
            raise ConfigError(f"peer {name!r} needs the package {PEERS[name]}: pip install it")


def measure(
    model: Path,
    arrays: Mapping[str, Array],
    *,
    peers: Sequence[str] = (),
    threads: int = 1,
    rounds: int = 10,
    seconds: float = 1.0,
    precision: str = "float32",
) -> list[Measured]:
    """Time Subgraph and ``peers`` on a model, with interleaved samples.

    Args:
        model: An ONNX file.
        arrays: Inputs by name.
        peers: Names among `PEERS`.
        threads: Threads that each runtime may use.
        rounds: Number of times that each runtime takes samples.
        seconds: Approximate total time of each runtime's samples.
        precision: ``"float32"``, or ``"bfloat16"`` to allow products in it (`PRECISE`).

    Returns:
        Subgraph's measurements, then each peer's.

    Raises:
        ConfigError: a peer is unknown or not installed.
        DeviceError: a runtime failed; the message has the end of its error output.
    """
    check_peers(peers)
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.pickle"
        inputs.write_bytes(pickle.dumps(dict(arrays)))
        workers: list[_Worker] = []
        try:
            for name in ("subgraph", *peers):
                chosen = name in PRECISE and precision != "float32"
                runner = f"{name} {precision}" if chosen else name
                workers.append(_start_worker(runner, model, threads, inputs))
            results = [_results(worker, Path(folder)) for worker in workers]
            samples = _interleaved_samples(workers, rounds, seconds)
        finally:
            for worker in workers:
                worker.close()
    truth = results[1] if len(results) > 1 else results[0]
    return [
        _summary(worker, taken, largest_difference(found, truth))
        for worker, taken, found in zip(workers, samples, results, strict=True)
    ]


def _start_worker(name: str, model: Path, threads: int, inputs: Path) -> _Worker:
    if name != "onnxruntime":
        return _Worker(name, model, threads, inputs)
    chooser = _Worker("best_level", model, threads, inputs)
    chooser.close()
    return _Worker(f"{name} {chooser.ready['level']}", model, threads, inputs)


def _results(worker: _Worker, folder: Path) -> list[Any]:
    path = folder / f"{worker.runner}.pickle"
    worker.send(save=str(path))
    results: list[Any] = pickle.loads(path.read_bytes())
    return results


def _interleaved_samples(
    workers: Sequence[_Worker], rounds: int, seconds: float
) -> list[list[tuple[float, float]]]:
    once = [float(np.median([s for s, _ in w.send(run=3, inner=1)["samples"]])) for w in workers]
    samples: list[list[tuple[float, float]]] = [[] for _ in workers]
    for _ in range(rounds):
        for worker, time, taken in zip(workers, once, samples, strict=True):
            # At least 0.5 ms a sample, similar to the calibration (about 1 ms).
            inner = max(1, int(5e-4 / time))
            count = max(1, int(seconds / rounds / (time * inner + 1e-3)))
            taken += worker.send(run=min(count, 50), inner=inner)["samples"]
    return samples


def _summary(worker: _Worker, taken: Sequence[tuple[float, float]], difference: float) -> Measured:
    fastest = min(calibration for _, calibration in taken)
    kept = [time for time, calibration in taken if calibration <= fastest * _MAX_CALIBRATION_RATIO]
    low, median, high = (float(q) for q in np.quantile(kept, (0.1, 0.5, 0.9)))
    ready = worker.ready
    return Measured(
        worker.runner,
        median,
        low,
        high,
        len(kept),
        len(taken),
        ready["first_result_s"],
        ready["peak_bytes"],
        difference,
    )


def largest_difference(found: Sequence[Any], truth: Sequence[Any]) -> float:
    """Return the largest difference of numbers, relative to the largest of their output.

    A NaN or infinity that only one of both has counts as an infinite difference.
    """
    worst = 0.0
    for ours, theirs in zip(found, truth, strict=True):
        if not (is_array(ours) and ours.size):
            continue
        if DTYPES[dtype_of(ours)].kind not in ("float", "int", "uint"):
            continue
        wide, true = ours.astype(np.float64), theirs.astype(np.float64)
        same = (wide == true) | (np.isnan(wide) & np.isnan(true))
        scale = max(float(np.abs(true).max(initial=0.0, where=np.isfinite(true))), 1e-30)
        gaps = np.abs(wide[~same] - true[~same]) / scale
        worst = max(worst, float(np.nan_to_num(gaps, nan=np.inf).max(initial=0.0)))
    return worst


def fastest_peer(measured: Sequence[Measured]) -> float | None:
    """Return the median of the fastest peer, None without peers."""
    return min((m.median for m in measured[1:]), default=None)
