"""Speed-up by threads, and throughput of concurrent requests, compared with ONNX Runtime.

usage: python benchmarks/threads.py MODEL.onnx ... [--threads 2] [--requests 4] [--seconds 2]

The first table has the median time of a run on one thread and on several, and the ratio. The second
has the runs per second of concurrent callers: of Subgraph with the hints THROUGHPUT and LATENCY, of
ONNX Runtime with one thread for each call and with several. All runs are interleaved.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from models import inputs_of, onnxruntime_session
from rich.console import Console
from rich.table import Table

import subgraph as sg

Runner = Callable[[], Any]
_REST = 0.1  # seconds before each sample, so that spinning worker threads go to sleep (estimate)
_RUNS = 3  # timed runs of a sample, after one that wakes the threads


def ours(model: Path, inputs: Mapping[str, Any], **config: Any) -> Runner:
    """Return a function that runs a model on the device CPU.

    Args:
        model: The ONNX file.
        inputs: Inputs by name.
        **config: Options of the device.
    """
    compiled = sg.compile_model(sg.load(model), "CPU", config)
    return lambda: compiled(inputs)


def theirs(model: Path, inputs: Mapping[str, Any], threads: int) -> Runner:
    """Return a function that runs a model by ONNX Runtime.

    Args:
        model: The ONNX file.
        inputs: Inputs by name.
        threads: Threads of a run.
    """
    session = onnxruntime_session(model, threads)
    return lambda: session.run(None, dict(inputs))


def seconds_of(run: Runner) -> float:
    """Return the seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def medians(runners: Mapping[str, Runner], rounds: int) -> dict[str, float]:
    """Return the median seconds of each runner, over interleaved rounds."""
    for run in runners.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            time.sleep(_REST)
            run()
            times[name] += [seconds_of(run) for _ in range(_RUNS)]
    return {name: float(np.median(taken)) for name, taken in times.items()}


def throughput(run: Runner, callers: int, seconds: float) -> float:
    """Return the runs per second of ``callers`` threads that call ``run`` for ``seconds``."""
    done = [0] * callers
    start = time.perf_counter()

    def call(k: int) -> None:
        while time.perf_counter() - start < seconds:
            run()
            done[k] += 1

    threads = [threading.Thread(target=call, args=(k,)) for k in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - start)


def scaling(model: Path, threads: int, rounds: int) -> list[str]:
    """Return a row: milliseconds of both runtimes on one and several threads, and the speed-ups.

    Args:
        model: The ONNX file.
        threads: The larger number of threads.
        rounds: Number of interleaved rounds.
    """
    inputs = inputs_of(model)
    counts = (1, threads)
    runners = {f"ours {n}": ours(model, inputs, INFERENCE_NUM_THREADS=n) for n in counts}
    runners |= {f"theirs {n}": theirs(model, inputs, n) for n in counts}
    found = medians(runners, rounds)
    row = [model.stem]
    for who in ("ours", "theirs"):
        one, several = (found[f"{who} {n}"] for n in counts)
        row += [f"{one * 1e3:.2f}", f"{several * 1e3:.2f}", f"{one / several:.2f}"]
    return row


def concurrent(model: Path, threads: int, callers: int, seconds: float, rounds: int) -> list[str]:
    """Return a row: runs per second of concurrent callers, and the ratio to ONNX Runtime's.

    Args:
        model: The ONNX file.
        threads: Cores that the model may use.
        callers: Number of concurrent callers.
        seconds: Time of a sample.
        rounds: Number of interleaved rounds.
    """
    inputs = inputs_of(model)
    hints = ("THROUGHPUT", "LATENCY")
    runners = {
        hint: ours(model, inputs, INFERENCE_NUM_THREADS=threads, PERFORMANCE_HINT=hint)
        for hint in hints
    }
    counts = [str(n) for n in sorted({1, threads})]
    runners |= {n: theirs(model, inputs, int(n)) for n in counts}
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            time.sleep(_REST)
            rates[name].append(throughput(run, callers, seconds))
    found = {name: float(np.median(taken)) for name, taken in rates.items()}
    best = max(found[n] for n in counts)
    row = [model.stem, *(f"{found[hint]:.1f}" for hint in hints), f"{best:.1f}"]
    return [*row, f"{max(found[hint] for hint in hints) / best:.2f}"]


def main() -> None:
    """Run both measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[1] / "examples" / "digits.onnx"
    parser.add_argument("models", nargs="*", type=Path, default=[default])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    n = args.threads
    one = Table("model", "ours 1", f"ours {n}", "gain", "onnxruntime 1", f"onnxruntime {n}", "gain")
    two = Table("model", "THROUGHPUT", "LATENCY", "onnxruntime", "ours / theirs")
    one.title, two.title = "milliseconds", f"runs per second, {args.requests} at a time"
    for model in args.models:
        one.add_row(*scaling(model, n, 2 * args.rounds))
        two.add_row(*concurrent(model, n, args.requests, args.seconds, args.rounds))
    console = Console(width=120, highlight=False)
    console.print(one)
    console.print(two)


if __name__ == "__main__":
    main()
