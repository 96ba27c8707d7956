"""Requests of many threads while weights change: every result belongs to one version."""

from __future__ import annotations

import gc
import io
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

FILES = 12


class Scaled(sg.SubgraphOp):
    """x * a + b over cached copies of the two weights."""

    def forward(self, inputs: list[Any]) -> list[Array]:
        x, a, b = inputs
        both = self.weights.get("pair", lambda p, q: np.stack([p, q]), a, b)
        time.sleep(0)
        return [x * both[0] + self.weights.get("negated", np.negative, b) * -1 + a.array - both[0]]


@pytest.mark.parametrize("each", [120, pytest.param(625, marks=pytest.mark.slow)])
def test_requests_over_sixteen_threads_with_changing_weights(each: int) -> None:
    x = sg.input("x", ("N",))
    held = [sg.Parameter(name, np.full(64, k, np.float32)) for name, k in (("a", 1), ("b", -1))]
    a, b = (sg.parameter(p.name, p) for p in held)
    scaled: list[Scaled] = []
    value = x
    for _ in range(2):
        ix, ia, ib = sg.input("ix", ("N",)), *(sg.parameter(p.name, p) for p in held)
        inner = sg.Graph([ix, ia, ib], [ops.Add(ops.Mul(ix, ia), ib)], "inner")
        scaled.append(Scaled(inner))
        value = sg.subgraph_node(inner, scaled[-1], inputs=[value, a, b]).outputs[0]
    model = sg.CompiledModel(sg.Graph([x], [value, ops.Add(a, b)]))
    stop = threading.Event()
    problems: list[str] = []

    def write() -> None:
        k = 1
        while not stop.is_set():
            k += 1
            with sg.transaction():
                held[0].assign(np.full(64, k, np.float32))
                held[1].assign(np.full(64, -k, np.float32))
            time.sleep(0.0002)

    ones = np.ones(64, np.float32)
    barrier = threading.Barrier(16)

    def read(number: int) -> None:
        request = model.create_infer_request()
        barrier.wait()
        for k in range(each):
            if k % 3 == 0:
                results = model(ones)
            elif k % 3 == 1:
                results = request.infer(ones)
            else:
                request.start_async(ones)
                results = request.wait(60)
                if results is None:
                    problems.append("timeout")
                    return
            # x = 1: 1*k - k = 0, then 0*k - k = -k, the same k everywhere; and k - k = 0.
            if np.unique(results[0]).size != 1 or results[1].any() or results[0][0] > -1:
                problems.append(f"{number}: {results[0][:4]} {results[1][:4]}")

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=read, args=(n,)) for n in range(16)]
    np.unique(model(ones)[0])  # loads the modules that this needs
    tracemalloc.start()
    try:
        writer.start()
        for thread in readers:
            thread.start()
        for thread in readers:
            thread.join(120)
        assert not any(thread.is_alive() for thread in readers), "deadlock"
        stop.set()
        writer.join()
        gc.collect()
        model(ones)
        gc.collect()
        alive = sum(op.weights.stats().bytes for op in scaled)
        assert alive <= 2 * (512 + 256)  # one version, shared by both nodes, counted in each
        traced = tracemalloc.get_traced_memory()[0]
    finally:
        stop.set()
        tracemalloc.stop()
    assert not problems, problems[:5]
    assert traced < 1_000_000


def coupled(device: str) -> tuple[sg.Graph, list[sg.Parameter]]:
    """Return a graph whose first output is zero and second constant while weights are coupled.

    On HETERO its nodes take turns between the devices.
    """
    rng = np.random.default_rng(0)
    start = rng.standard_normal((32, 32)).astype(np.float32)
    x = sg.input("x", ("N", 32))
    weights = [sg.Parameter(f"w{k}", start) for k in range(2)]
    branches = [ops.Relu(ops.Gemm(x, sg.parameter(w.name, w))) for w in weights]
    graph = sg.Graph([x], [ops.Sub(*branches), ops.Tanh(branches[0])], "coupled")
    for number, node in enumerate(graph.nodes):
        if device.startswith("HETERO"):
            node.metadata = {"affinity": ["CPU", "REFERENCE"][number % 2]}
    return graph, weights


def change_together(weights: list[sg.Parameter], stop: threading.Event) -> None:
    """Give both weights the same new array, again and again, until told to stop."""
    rng = np.random.default_rng(1)
    while not stop.is_set():
        new = rng.standard_normal((32, 32)).astype(np.float32)
        with sg.transaction():
            for weight in weights:
                weight.assign(new)
        time.sleep(0.0005)


@pytest.mark.parametrize("device", ["CPU", "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE"])
def test_compiled_weights_change_during_requests(device: str) -> None:
    graph, weights = coupled(device)
    model = sg.compile_model(graph, device)
    x = np.ones((3, 32), np.float32)
    stop = threading.Event()
    problems: list[str] = []

    def read() -> None:
        request = model.create_infer_request()
        for k in range(120):
            if k % 2:
                results = request.infer(x)
            else:
                request.start_async(x)
                results = request.wait(60)
                if results is None:
                    problems.append("timeout")
                    return
            if results[0].any():
                problems.append(str(np.abs(results[0]).max()))

    writer = threading.Thread(target=change_together, args=(weights, stop))
    readers = [threading.Thread(target=read) for _ in range(8)]
    writer.start()
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join(120)
    stop.set()
    writer.join()
    assert not any(thread.is_alive() for thread in readers), "deadlock"
    assert not problems, problems[:5]
    final = np.maximum(x @ weights[0].array, 0)
    np.testing.assert_allclose(model(x)[1], np.tanh(final), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["CPU", "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE"])
def test_files_are_written_and_read_meanwhile(device: str) -> None:
    """Every file holds one version, of all weights and of all that was made of them."""
    graph, weights = coupled(device)
    core = sg.Core()
    model = core.compile_model(graph, device)
    x = np.ones((3, 32), np.float32)
    model(x)
    stop = threading.Event()
    problems: list[str] = []

    def watched(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                problems.append(f"{type(error).__name__}: {error}")

        return threading.Thread(target=run)

    def look(results: Any) -> None:
        if results is None or results[0].any():
            problems.append("timeout" if results is None else str(np.abs(results[0]).max()))

    def read() -> None:
        request = model.create_infer_request()
        while not stop.is_set():
            look(model(x))
            request.start_async(x)
            look(request.wait(60))

    def files() -> None:
        for number in range(FILES):
            stream = io.BytesIO()
            model.export_model(stream)
            stream.seek(0)
            imported = core.import_model(stream, device if number % 2 else "")
            look(imported(x))
            held = [p.array for name, p in imported.parameters.items() if name.startswith("w")]
            final = np.maximum(x @ held[0], 0)
            np.testing.assert_array_equal(held[0], held[1])
            np.testing.assert_allclose(imported(x)[1], np.tanh(final), rtol=1e-4, atol=1e-5)
            with sg.transaction():  # its weights are its own
                for parameter in imported.parameters.values():
                    parameter.assign(np.zeros((32, 32), np.float32))
            assert not imported(x)[1].any()

    going = [watched(partial(change_together, weights, stop)), *(watched(read) for _ in range(3))]
    writers = [watched(files) for _ in range(2)]
    for thread in (*going, *writers):
        thread.start()
    for thread in writers:
        thread.join(300)
    stop.set()
    for thread in going:
        thread.join(60)
    assert not any(thread.is_alive() for thread in (*going, *writers)), "deadlock"
    assert not problems, problems[:5]
