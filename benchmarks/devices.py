"""Overhead of devices around the kernels: calls, hops between regions, HETERO, requests, import.

    python benchmarks/devices.py [model.onnx ...] [--json] [--pipeline [--rounds N]]

A call runs a model of one node whose op does nothing. A hop is one more such region; a hop on CPU
is one more region of CPU, with its kernels. These are CPU times of the calling thread. HETERO over
one device is compared with that device, and import with compilation (to the first result), by
interleaved runs.

With --pipeline: a chain of products in two stages, one on CPU and one on OPENCL with one thread
each, balanced by PLACEMENT=STAGES. The program prints requests per second, sequential and
overlapping, for both orders of the devices, and on each device alone. PoCL gets one thread by
POCL_MAX_PTHREAD_COUNT. The five rounds count in which the process's threads waited least for a
core; "waited" is that time of all threads, divided by the wall time. "threads at work" is the mean
number of threads with work, which measures the overlap even if other processes use the cores: 1 is
none; the maximum with 16 requests in two stages is 2 * 16 / 17.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import subgraph as sg
from subgraph import ops
from subgraph.devices.placement.profiles import Profile, write_profile
from subgraph.devices.plugins.cpu import CpuDevice
from subgraph.tools.cli_inputs import input_arrays


class Nothing(sg.SubgraphOp):
    """Returns its input."""

    def session(self) -> sg.Session:
        """Return a session without checks."""
        return NothingSession(self)


class NothingSession(sg.Session):
    """Returns its input."""

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


def seconds(
    run: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.thread_time
) -> float:
    """Return the seconds of one run: the smallest mean over ``repeats`` runs of ten rounds."""
    best = float("inf")
    for _ in range(10):
        start = clock()
        for _ in range(repeats):
            run()
        best = min(best, (clock() - start) / repeats)
    return best


def ratio(first: Callable[[], Any], second: Callable[[], Any], rounds: int = 15) -> float:
    """Return the median ratio of the second's time to the first's, over interleaved rounds."""
    found: list[float] = []
    for _ in range(rounds):
        times: list[float] = []
        for run in (first, second):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        found.append(times[1] / times[0])
    return statistics.median(found)


def chain(core: sg.Core, count: int, devices: Sequence[str] = ("F", "G")) -> sg.CompiledModel:
    """Return a model of ``count`` consecutive regions, alternately on two devices."""
    value = x = sg.input("x", ("N", 16))
    for number in range(count):
        value = ops.Relu(value, metadata={"affinity": devices[number % 2]})
    return core.compile_model(sg.Graph([x], [value]), f"HETERO:{','.join(devices)}")


def hop(core: sg.Core, devices: Sequence[str], data: Any) -> float:
    """Return the seconds of one more region."""
    two, many = chain(core, 2, devices), chain(core, 102, devices)
    return (seconds(lambda: many(data), 50) - seconds(lambda: two(data), 50)) / 100


def overheads() -> dict[str, float]:
    """Measure overheads without kernels, in microseconds."""
    core = sg.Core()
    for name, device in (("F", NothingDevice), ("G", NothingDevice), ("CPU2", CpuDevice)):
        core.register_device(name, device)
    data = np.zeros((1, 16), np.float32)
    one = chain(core, 1)
    request = one.create_infer_request()

    def asynchronous() -> None:
        request.start_async(data)
        request.wait()

    return {
        "call_us": seconds(lambda: one(data), 2000) * 1e6,
        "call_by_name_us": seconds(lambda: one(x=data), 2000) * 1e6,
        "request_us": seconds(lambda: request.infer(data), 2000) * 1e6,
        "asynchronous_request_us": seconds(asynchronous, 200, time.perf_counter) * 1e6,
        "hop_us": hop(core, ("F", "G"), data) * 1e6,
        "hop_on_cpu_us": hop(core, ("CPU", "CPU2"), data) * 1e6,
    }


def of_model(path: str) -> dict[str, Any]:
    """Compare HETERO with CPU, and import with compilation, for one model."""
    core = sg.Core()
    graph = sg.load(path)
    plain = core.compile_model(graph, "CPU")
    hetero = core.compile_model(graph, "HETERO:CPU,REFERENCE")
    feeds = input_arrays(plain.inputs, {}, {}, 0)
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


ROWS, WIDTH, LAYERS, RUNS, CALM = 256, 512, 10, 16, 5
ONE_THREAD = {"CPU": {"INFERENCE_NUM_THREADS": 1}}
PIPELINED = ("CPU", "OPENCL")


def products(devices: Sequence[str]) -> sg.Graph:
    """Return a chain with a product and Relu for each item: a device, or "" for any device."""
    rng = np.random.default_rng(0)
    value = x = sg.input("x", (ROWS, WIDTH))
    for number, device in enumerate(devices):
        weight = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
        home = {"affinity": device} if device else None
        parameter = sg.parameter(f"w{number}", weight)
        product = ops.MatMul(value, parameter, metadata=home, name=f"product{number}")
        value = ops.Relu(product, metadata=home, name=f"relu{number}")
    return sg.Graph([x], [value], "products")


def _spent(run: Callable[[], Any]) -> float:
    """Return the CPU seconds of a run, of all threads: the smallest of seven runs."""
    found: list[float] = []
    for _ in range(7):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def staged(core: sg.Core, data: Any) -> list[str]:
    """Return the devices of the layers, so that the slower stage is as fast as possible."""
    times: dict[str, dict[str, float]] = {}
    for device in PIPELINED:
        config = ONE_THREAD.get(device)
        spent = [
            _spent(partial(core.compile_model(products([""] * count), device, config), data))
            for count in (2, LAYERS)
        ]
        layer = (spent[1] - spent[0]) / (LAYERS - 2)
        times[device] = {f"product{k}": layer for k in range(LAYERS)}
        times[device].update({f"relu{k}": 0.0 for k in range(LAYERS)})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        write_profile(path, Profile(times))
        config = {"PLACEMENT": "STAGES", "PROFILE": str(path)}
        found = core.query_model(
            products([""] * LAYERS), f"HETERO:{','.join(PIPELINED)}", {**ONE_THREAD, **config}
        )
    return [found[f"product{k}"] for k in range(LAYERS)]


def pipelining(count: int) -> dict[str, Any]:
    """Measure requests per second over CPU and OPENCL in ``count`` interleaved rounds."""
    core = sg.Core()
    data = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)
    chosen = staged(core, data)

    def compiled(devices: Sequence[str]) -> sg.CompiledModel:
        model = core.compile_model(products(devices), "HETERO:CPU,OPENCL", ONE_THREAD)
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

    runs: dict[str, Callable[[], None]] = {}
    for device in PIPELINED:
        runs[f"all on {device}"] = in_a_row(compiled([device] * LAYERS))
    parts = {device: chosen.count(device) for device in PIPELINED}
    for order in (PIPELINED, PIPELINED[::-1]):
        model = compiled([name for name in order for _ in range(parts[name])])
        runs[f"{' then '.join(order)}, in a row"] = in_a_row(model)
        runs[f"{' then '.join(order)}, overlapping"] = overlapping(model)
    rounds: dict[str, list[Round]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            before, start = _threads(), time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            worked, waited = (b - a for a, b in zip(before, _threads(), strict=True))
            rounds[name].append(Round(seconds, worked, waited))
    found: dict[str, Any] = {"layers": parts}
    for name, measured in rounds.items():
        calm = sorted(measured, key=lambda r: r.waited / r.seconds)[:CALM]
        found[name] = {
            "a second": round(RUNS / statistics.median(r.seconds for r in calm), 1),
            "waited": round(max(r.waited / r.seconds for r in calm), 2),
            "threads at work": round(statistics.median(r.at_work for r in measured), 2),
            "CPU ms": round(statistics.median(r.worked for r in measured) / RUNS * 1e3, 2),
        }
    return found


class Round(NamedTuple):
    """Times of a round in seconds.

    Attributes:
        seconds: Wall time.
        worked: Time of all threads on a core.
        waited: Time of all threads in which they were runnable without a core.
    """

    seconds: float
    worked: float
    waited: float

    @property
    def at_work(self) -> float:
        """Mean number of threads with work, with or without a core."""
        return (self.worked + self.waited) / self.seconds


def _threads() -> tuple[float, float]:
    """Return seconds of this process's threads: on a core, and runnable without one."""
    worked = waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has just ended
            numbers = path.read_text().split()
            worked += int(numbers[0])
            waited += int(numbers[1])
    return worked * 1e-9, waited * 1e-9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pipeline", action="store_true")
    parser.add_argument("--rounds", type=int, default=10, help="of --pipeline")
    args = parser.parse_args()
    if args.pipeline:
        os.environ["POCL_MAX_PTHREAD_COUNT"] = "1"
        for name, value in pipelining(args.rounds).items():
            print(f"{name:30} {value}")
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
