"""Time of the first and the next run at a new input shape, compared with ONNX Runtime.

usage: python benchmarks/shapes.py MODEL.onnx --dim past [--sizes 16 80] [--threads 1]

The dimensions of that name (or names) take all sizes from the first to the last, as in generation
of a sequence; every other symbolic dimension is 1. Each size runs twice on both runtimes. The table
has the medians, and the sum of the first runs of all sizes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from models import onnxruntime_session
from rich.console import Console
from rich.table import Table

import subgraph as sg
from subgraph.graph.types import Array, TensorType, numpy_dtype

Runner = Callable[[Mapping[str, Array]], Sequence[Array]]
_WARM = 4  # sizes that do not count: from the first shapes follows which dimensions are symbolic


def feed(graph: sg.Graph, names: Sequence[str], size: int) -> dict[str, Array]:
    """Return inputs: random floats, integers 1.

    Args:
        graph: The graph.
        names: Names of the dimensions that have this size.
        size: The size.
    """
    rng = np.random.default_rng(size)
    inputs: dict[str, Array] = {}
    for value in graph.inputs:
        if value.parameter is not None:
            continue
        assert isinstance(value.type, TensorType)
        assert value.type.shape is not None
        sizes = [d if isinstance(d, int) else size if d in names else 1 for d in value.type.shape]
        dtype = numpy_dtype(value.type.dtype)
        floats = dtype.kind == "f"
        inputs[value.name] = (rng.standard_normal(sizes) if floats else np.ones(sizes)).astype(
            dtype
        )
    return inputs


def runners(model: Path, graph: sg.Graph, threads: int) -> dict[str, Runner]:
    """Return functions that run the model on Subgraph and ONNX Runtime.

    Args:
        model: The ONNX file.
        graph: Its graph.
        threads: Threads of a run.
    """
    session = onnxruntime_session(model, threads)
    compiled = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})
    return {
        "subgraph": lambda inputs: list(compiled(inputs).values()),
        "onnxruntime": lambda inputs: list(session.run(None, dict(inputs))),
    }


def measure(
    model: Path, names: Sequence[str], sizes: Sequence[int], threads: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of the first and the second run at each size, by runtime.

    Args:
        model: The ONNX file.
        names: Names of the dimensions that vary.
        sizes: Their sizes.
        threads: Threads of a run.
    """
    graph = sg.load(model)
    both = runners(model, graph, threads)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
    for size in sizes:
        inputs = feed(graph, names, size)
        results: dict[str, Sequence[Array]] = {}
        for name, run in both.items():
            start = time.perf_counter()
            results[name] = run(inputs)
            middle = time.perf_counter()
            run(inputs)
            times[name].append((middle - start, time.perf_counter() - middle))
        for one, other in zip(*results.values(), strict=True):
            scale = max(float(np.abs(other).max(initial=0.0)), 1e-6)
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * scale)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--dim", action="append", required=True, help="name of a dimension")
    parser.add_argument("--sizes", type=int, nargs=2, default=(16, 80), metavar=("FROM", "TO"))
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    table = Table(title=f"a new shape at every call, {given.threads} thread(s), ms")
    for title in ("model", "runtime", "first run", "next run", "ratio", "whole row"):
        table.add_column(title, justify="left" if title in ("model", "runtime") else "right")
    for model in given.models:
        times = measure(model, given.dim, range(*given.sizes), given.threads)
        for name, pairs in times.items():
            first, again = np.median(np.array(pairs[_WARM:]), axis=0) * 1e3
            whole = sum(pair[0] for pair in pairs) * 1e3
            row = [f"{first:.2f}", f"{again:.2f}", f"{first / again:.2f}", f"{whole:.0f}"]
            table.add_row(model.stem, name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
