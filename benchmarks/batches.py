"""Milliseconds for a row by the size of the batch: CPU, BATCH, ONNX Runtime and OpenVINO.

"CPU whole" runs all rows at a time, which CPU does only where parts of rows are not faster.

usage: python benchmarks/batches.py MODEL.onnx ... [--sizes 1,4,16] [--precision bfloat16]

Models exported for one batch are reshaped. All alternate in one process with one thread; the
table has medians. ONNX Runtime computes in float32 always.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import subgraph as sg
from subgraph.tools.bench_worker import onnxruntime, openvino
from subgraph.tools.cli_inputs import input_arrays

RUNNERS = ("CPU", "CPU whole", "BATCH", "ONNX Runtime", "OpenVINO")


def runners(graph: sg.Graph, size: int, precision: str) -> dict[str, Callable[[], Any]]:
    """Return a function for each runner that runs a model once on a batch of random rows.

    Args:
        graph: The model, for batches of any size.
        size: The number of rows.
        precision: "float32" or "bfloat16".
    """
    config = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION": precision}
    models = {
        "CPU": sg.compile_model(graph, "CPU", config),
        "CPU whole": sg.compile_model(graph, "CPU", {**config, "BATCH_ROWS": size}),
        "BATCH": sg.compile_model(graph, "BATCH:CPU", config),
    }
    arrays = input_arrays(models["CPU"].inputs, {}, {"rows": str(size)}, 0)
    found: dict[str, Callable[[], Any]] = {
        name: partial(model, arrays) for name, model in models.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        sg.save(graph, path)
        name = "bf16" if precision == "bfloat16" else "f32"
        found["ONNX Runtime"] = onnxruntime(path, 1, arrays, "ALL")
        found["OpenVINO"] = openvino(path, 1, arrays, name)
    return found


def medians(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the median seconds of each function; they are called alternately."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # the first calls make plans and touch memory
        call()
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: median(mine) for name, mine in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--sizes", default="1,4,16", help="of batches")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=2, help="time of each runner and size")
    arguments = parser.parse_args()
    table = Table("model", "rows", *(f"{name} ms" for name in RUNNERS), "BATCH of the faster peer")
    for path in arguments.models:
        graph = sg.reshape(sg.load(path), batch="rows")
        for size in map(int, arguments.sizes.split(",")):
            calls = runners(graph, size, arguments.precision)
            found = medians(calls, arguments.seconds)
            ratio = found["BATCH"] / min(found["ONNX Runtime"], found["OpenVINO"])
            cells = [f"{found[name] * 1e3 / size:.3f}" for name in RUNNERS]
            table.add_row(path.stem, str(size), *cells, f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
