"""What happens once on the way from a model to its first result."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.plugins import cpu
from subgraph.engine.region import concrete_plan
from subgraph.graph.types import Array

rng = np.random.default_rng(5)


def network(batch: int | str = 2) -> sg.Graph:
    x = sg.input("x", shape=(batch, 3, 8, 8), dtype="float32")
    w = sg.parameter("w", rng.standard_normal((8, 3, 3, 3)).astype(np.float32))
    y = ops.Relu(ops.Conv(x, w, pads=[1, 1, 1, 1]))
    shape = sg.parameter("shape", np.array([0, -1], np.int64))
    return sg.Graph(inputs=[x], outputs=[ops.Reshape(y, shape)], name="net")


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    calls: list[str] = []
    function = getattr(module, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, wrapped)
    return calls


def want(graph: sg.Graph, x: Array) -> Array:
    return sg.compile_model(graph, "REFERENCE")(x)[0]


@pytest.mark.parametrize(("batch", "plans"), [(2, 0), ("N", 1)])
def test_fused_and_planned_once(
    monkeypatch: pytest.MonkeyPatch, batch: int | str, plans: int
) -> None:
    fused = counted(monkeypatch, cpu, "fuse")
    planned = counted(monkeypatch, concrete_plan, "make_plan")
    graph = network(batch)
    model = sg.compile_model(graph, "CPU")
    for _ in range(2):
        size = batch if isinstance(batch, int) else 5  # not what a trial takes for "N"
        x = rng.standard_normal((size, 3, 8, 8)).astype(np.float32)
        np.testing.assert_allclose(model(x)[0], want(graph, x), rtol=1e-4, atol=1e-5)
    assert (len(fused), len(planned)) == (1, plans)


def test_a_shape_that_changes_before_the_first_run() -> None:
    graph = network()
    model = sg.compile_model(graph, "CPU")
    model.parameters["shape"].assign(np.array([-1, 0], np.int64))
    x = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    result = model(x)[0]
    assert result.shape == (128, 8)
    np.testing.assert_allclose(result, want(graph, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outputs", ["twice", "input"])
def test_outputs_that_are_no_results_of_the_region(outputs: str) -> None:
    x = sg.input("x", shape=(2, 4), dtype="float32")
    y = ops.Relu(x)
    ends = [y, y] if outputs == "twice" else [x, y]
    model = sg.compile_model(sg.Graph(inputs=[x], outputs=ends, name="ends"), "CPU")
    given = rng.standard_normal((2, 4)).astype(np.float32)
    first, second = model(given)[0], model(given)[1]
    np.testing.assert_array_equal(second, np.maximum(given, 0))
    np.testing.assert_array_equal(first, second if outputs == "twice" else given)


def test_what_the_first_result_does_not_import() -> None:
    code = """
import sys
import numpy as np
import subgraph as sg
from subgraph import ops
x = sg.input("x", shape=(2, 3), dtype="float32")
model = sg.compile_model(sg.Graph(inputs=[x], outputs=[ops.Relu(x)], name="g"), "CPU")
model(np.ones((2, 3), np.float32))
for name in ("asyncio", "numba", "pyopencl"):
    assert name not in sys.modules, name
"""
    # Once for kernels that must be compiled, which takes numba and what that imports.
    for last in (False, True):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode == 0 or last:
            break
    assert done.returncode == 0, done.stderr
