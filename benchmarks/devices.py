"""What devices cost around the kernels: calls, hops, HETERO, requests, import; ratios interleaved.

    python benchmarks/devices.py [model.onnx ...] [--json] [--pipeline]

A call runs a one-node model whose op does nothing; a hop is one more such region. HETERO is
compared with its only device in turns, compile with import in turns, each to the first result.
With --pipeline: a chain of convolutions of which CPU and OPENCL have parts that take equally long,
one thread each; requests per second one after the other and overlapping, for both orders.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import subgraph as sg
from subgraph import ops
from subgraph.cli_inputs import input_arrays


class Nothing(sg.SubgraphOp):
    """Gives its input back."""

    def session(self) -> sg.Session:
        """Return the short way."""
        return NothingSession(self)


class NothingSession(sg.Session):
    """Gives its input back."""

    def __call__(self, inputs: Sequence[Any], outputs: Any = None) -> Sequence[Any]:
        """Run."""
        return (inputs[0],)


class NothingDevice(sg.Device):
    """Supports everything, does nothing."""

    def supports(self, node: sg.Node, options: Any) -> bool:
        """Take every node."""
        return True

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        """Make the op."""
        return Nothing(graph)


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the time of one run, the least mean of ten rounds."""
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def ratio(first: Callable[[], Any], second: Callable[[], Any], rounds: int = 15) -> float:
    """Return the median of second to first, measured in turns."""
    found: list[float] = []
    for _ in range(rounds):
        times: list[float] = []
        for run in (first, second):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        found.append(times[1] / times[0])
    return statistics.median(found)


def chain(core: sg.Core, count: int) -> sg.CompiledModel:
    """Return a model of ``count`` regions in a row."""
    value = x = sg.input("x", ("N", 16))
    for number in range(count):
        value = ops.Relu(value, metadata={"affinity": "FG"[number % 2]})
    return core.compile_model(sg.Graph([x], [value]), "HETERO:F,G")


def overheads() -> dict[str, float]:
    """Measure what stands around the kernels, in microseconds."""
    core = sg.Core()
    core.register_device("F", NothingDevice)
    core.register_device("G", NothingDevice)
    data = np.zeros((1, 16), np.float32)
    one, two, many = chain(core, 1), chain(core, 2), chain(core, 102)
    request = one.create_infer_request()

    def asynchronous() -> None:
        request.start_async(data)
        request.wait()

    hop = (seconds(lambda: many(data), 50) - seconds(lambda: two(data), 50)) / 100
    return {
        "call_us": seconds(lambda: one(data), 2000) * 1e6,
        "call_by_name_us": seconds(lambda: one(x=data), 2000) * 1e6,
        "request_us": seconds(lambda: request.infer(data), 2000) * 1e6,
        "asynchronous_request_us": seconds(asynchronous, 200) * 1e6,
        "hop_us": hop * 1e6,
    }


def of_model(path: str) -> dict[str, Any]:
    """Measure HETERO against CPU, and import against compile, for one model."""
    core = sg.Core()
    graph = sg.load(path)
    plain = core.compile_model(graph, "CPU")
    hetero = core.compile_model(graph, "HETERO:CPU,REFERENCE")
    feeds = input_arrays(plain.inputs, [], {}, 0)
    plain(feeds)
    hetero(feeds)
    folder = tempfile.TemporaryDirectory()
    blob = Path(folder.name) / "model.blob"
    plain.export_model(blob)

    def compile_and_run() -> None:
        core.compile_model(path, "CPU")(feeds)

    def import_and_run() -> None:
        core.import_model(blob)(feeds)

    return {
        "model": path,
        "hetero_to_cpu": ratio(lambda: plain(feeds), lambda: hetero(feeds)),
        "import_to_compile": ratio(compile_and_run, import_and_run, 5),
        "bytes": blob.stat().st_size,
    }


SIDE, CHANNELS, LAYERS, RUNS = 28, 128, 20, 8
ONE_THREAD = {"CPU": {"INFERENCE_NUM_THREADS": 1}}


def convolutions(devices: Sequence[str]) -> sg.Graph:
    """Return a convolution with an activation for each device named."""
    rng = np.random.default_rng(0)
    value = x = sg.input("x", (1, CHANNELS, SIDE, SIDE))
    for number, device in enumerate(devices):
        weight = rng.standard_normal((CHANNELS, CHANNELS, 3, 3)).astype(np.float32) / 40
        home = {"affinity": device}
        conv = ops.Conv(value, sg.parameter(f"w{number}", weight), pads=(1, 1, 1, 1), metadata=home)
        value = ops.Relu(conv, metadata=home)
    return sg.Graph([x], [value], "convolutions")


def pipelining() -> dict[str, Any]:
    """Measure requests per second over CPU and OPENCL, overlapping and not, in turns."""
    os.environ["POCL_MAX_PTHREAD_COUNT"] = "1"
    core = sg.Core()
    data = np.random.default_rng(1).standard_normal((1, CHANNELS, SIDE, SIDE)).astype(np.float32)

    def compiled(devices: Sequence[str]) -> sg.CompiledModel:
        model = core.compile_model(convolutions(devices), "HETERO:CPU,OPENCL", ONE_THREAD)
        model(data)
        return model

    def in_a_row(model: sg.CompiledModel) -> Callable[[], None]:
        request = model.create_infer_request()

        def run() -> None:
            for _ in range(RUNS):
                request.infer(data)

        return run

    def overlapping(model: sg.CompiledModel) -> Callable[[], None]:
        pool = sg.InferQueue(model)

        def run() -> None:
            for _ in range(RUNS):
                pool.start_async(data)
            pool.wait_all()

        return run

    times: dict[str, float] = {}
    for name in ("CPU", "OPENCL"):
        few, many = compiled([name]), compiled([name] * LAYERS)
        long, short = partial(many, data), partial(few, data)
        times[name] = seconds(long, 1) - seconds(short, 1)
    own = min(max(round(LAYERS * times["OPENCL"] / sum(times.values())), 1), LAYERS - 1)
    parts = {"CPU": own, "OPENCL": LAYERS - own}
    runs: dict[str, Callable[[], None]] = {}
    for order in (("CPU", "OPENCL"), ("OPENCL", "CPU")):
        model = compiled([name for name in order for _ in range(parts[name])])
        runs[f"{' then '.join(order)}, in a row"] = in_a_row(model)
        runs[f"{' then '.join(order)}, overlapping"] = overlapping(model)
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(15):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    found: dict[str, Any] = {"layers": parts}
    return found | {name: RUNS / spent for name, spent in best.items()}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pipeline", action="store_true")
    args = parser.parse_args()
    if args.pipeline:
        for name, value in pipelining().items():
            print(f"{name:28} {value if isinstance(value, dict) else round(value, 1)}")
        return
    found: dict[str, Any] = {**overheads(), "models": [of_model(path) for path in args.models]}
    if args.json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        if key != "models":
            print(f"{key:26} {value:8.2f}")
    for row in found["models"]:
        print(row)


if __name__ == "__main__":
    main()
