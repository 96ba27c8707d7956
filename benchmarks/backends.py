"""Overhead of regions on other libraries: of one call, and of a new weight.

For each installed backend: microseconds of a call of a compiled model beyond the library's own call
on the same arrays, for a small and a large output; and milliseconds from the assignment of a new
weight to the first result that uses it, with weights inside the library's model, as its inputs, and
by a full recompilation. Minima of interleaved repetitions, one thread.

With --kit the checks of `sg.testing.check_device` run first, and print a table; the exit status is
1 if a device fails. With --placements only the placement of each model by measured times is shown,
and the medians of its runs beside those of each device alone; --batch N changes the first dimension
of its inputs.

Command: python benchmarks/backends.py [--kit] [--rounds 2000] [--models FILE...]
         python benchmarks/backends.py --placements FILE... [--batch 8] [--devices CPU,ONEDNN]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import subgraph as sg
from subgraph import ops
from subgraph.devices.backends.base import BackendOp
from subgraph.tools.cli_inputs import input_arrays

CHECKS = tuple(sg.testing.DEVICE_CHECKS)


def dense(rows: int, width: int) -> sg.Graph:
    """Return a graph of a product of (rows, width) with a square weight, and Relu."""
    rng = np.random.default_rng(0)
    x = sg.input("x", type=sg.TensorType("float32", (rows, width)))
    w = sg.parameter("w", rng.standard_normal((width, width)).astype(np.float32))
    return sg.Graph([x], [ops.Relu(ops.MatMul(x, w))], "dense")


def fastest(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the smallest time of each call in seconds, over interleaved rounds."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for k, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[k] = min(best[k], time.perf_counter() - begin)
    return best


def call_overhead(device: str, rows: int, width: int, rounds: int) -> str:
    """Return a line with the times of the library's own call, of the region and of the model."""
    graph = dense(rows, width)
    model = sg.compile_model(graph, device, {"INFERENCE_NUM_THREADS": 1})
    op = model.graph.nodes[0].op
    assert isinstance(op, BackendOp)
    x = np.ones((rows, width), np.float32)
    run, target = op.compiled().runner(), np.empty((rows, width), np.float32)
    session = op.session()
    items = [x if v.parameter is None else v.parameter for v in op.subgraph.inputs]
    arrays = [x if type(item) is not sg.Parameter else item.array for item in items]
    passed = [arrays[k] for k in op.inputs]
    own, region, whole = fastest(
        [lambda: run(passed, [target]), lambda: session(items), lambda: model(x)], rounds
    )
    return (
        f"{device:12} {rows} x {width}: library {own * 1e6:8.2f} us, region +"
        f"{(region - own) * 1e6:6.2f} us, call of the model +{(whole - own) * 1e6:6.2f} us"
    )


def new_weight(device: str, path: str, rounds: int) -> str:
    """Return a line with the times from a new value of the largest weight to the next result.

    Args:
        device: The device.
        path: Path of a model; "" for a product of 64 rows with a square weight of 1024 rows.
        rounds: Number of new values; the least time counts.
    """
    times: list[float] = []
    for weights in ("inside", "inputs", "recompile"):
        graph = sg.load(path) if path else dense(64, 1024)
        config = {"WEIGHTS": "inside" if weights == "recompile" else weights}
        name = f"HETERO:{device},CPU"
        model = sg.compile_model(graph, name, config)
        inputs = input_arrays(model.inputs, {}, {}, 0)
        model(**inputs)
        weight = max(graph.parameters.values(), key=lambda p: p.nbytes)
        best = float("inf")
        for _ in range(rounds):
            value = weight.array * np.float32(1.01)
            begin = time.perf_counter()
            weight.assign(value)
            if weights == "recompile":
                model = sg.compile_model(graph, name, config)
            model(**inputs)
            best = min(best, time.perf_counter() - begin)
        times.append(best)
    inside, passed, again = (seconds * 1e3 for seconds in times)
    return (
        f"{device:12} {path or graph.name}: new weight {inside:.1f} ms inside, "
        f"{passed:.1f} ms as an input, {again:.1f} ms by compile_model"
    )


def kit() -> bool:
    """Print a table of devices and checks; return whether all devices pass."""
    logging.getLogger("subgraph").setLevel(logging.ERROR)  # the checks make sessions fail
    print("checks of devices: + passed, . does not apply")
    for number, name in enumerate(CHECKS):
        print(f"{'':12} {'| ' * number}{name}")
    passed = True
    for state in sg.backends():
        if state.problem:
            continue
        try:
            report = sg.testing.check_device(state.name)
        except Exception as error:  # the other devices are to be checked, too
            passed = False
            print(f"{state.name:12} failed: {error}")
            continue
        marks = " ".join("+" if name in report.passed else "." for name in CHECKS)
        print(f"{state.name:12} {marks}  {report.graphs} graphs, {report.runs} runs", flush=True)
        for name, why in report.skipped.items():
            print(f"{'':12} {name}: {why}")
    return passed


def placement(path: str, devices: str, batch: int, rounds: int) -> None:
    """Print where AUTO runs the regions of a model, and medians of whole runs in milliseconds.

    The medians are of processor time, since other processes may use the same core.

    Args:
        path: Path of the model.
        devices: The devices to choose from, separated by commas.
        batch: First dimension of the inputs; 0: as in the model.
        rounds: Number of runs of each device and of AUTO's choice, in alternation.
    """
    graph = sg.load(path)
    if batch:
        graph = sg.reshape(graph, batch=batch)
    config = {"INFERENCE_NUM_THREADS": 1}
    chosen = sg.compile_model(graph, f"AUTO:{devices}", {"PLACEMENT": "COST", **config})
    print(chosen.get_property("PLACEMENT_TABLE"))
    models = {name: sg.compile_model(graph, name, config) for name in devices.split(",")}
    models["AUTO"] = chosen
    inputs = input_arrays(chosen.inputs, {}, {}, 0)
    wanted = models["CPU" if "CPU" in models else "AUTO"](inputs)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            begin = time.process_time()
            found = model(inputs)
            seconds[name].append(time.process_time() - begin)
            for a, b in zip(found.values(), wanted.values(), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    medians = {name: statistics.median(each) * 1e3 for name, each in seconds.items()}
    auto = medians.pop("AUTO")
    best = min(medians, key=medians.__getitem__)
    shown = ", ".join(f"{name} {each:.2f}" for name, each in medians.items())
    ratio = auto / medians[best]
    print(f"{path}: AUTO {auto:.2f} ms, {shown}; AUTO / {best} {ratio:.3f}\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--kit", action="store_true", help="try each device with all checks")
    parser.add_argument("--placements", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--devices", default="CPU,ONNXRUNTIME,OPENVINO,ONEDNN")
    options = parser.parse_args()
    for path in options.placements:
        placement(path, options.devices, options.batch, 15)
    if options.placements:
        return 0
    passed = kit() if options.kit else True
    for state in sg.backends():
        if state.problem:
            print(f"{state.name}: {state.problem}")
            continue
        for rows, width in ((1, 32), (256, 1024)):
            print(call_overhead(state.name, rows, width, options.rounds if rows == 1 else 50))
        for path in options.models or [""]:
            print(new_weight(state.name, path, 5), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
