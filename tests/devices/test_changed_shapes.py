"""Parameters that hold shapes, axes or sizes and change after a model was built or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.opencl import needs_device

ON_OPENCL = [pytest.param("OPENCL", marks=needs_device)]
X = np.arange(16, dtype=np.float32).reshape(2, 8)
Make = Callable[[sg.Value, sg.Value], Any]
# An operator of x and a parameter, the parameter's first content, and a later one.
CASES: dict[str, tuple[Make, list[int], list[int]]] = {
    "Reshape that changes nothing": (ops.Reshape, [2, 8], [4, 4]),
    "Reshape": (ops.Reshape, [4, 4], [2, 8]),
    "Expand that changes nothing": (ops.Expand, [2, 8], [2, 1]),
    "Expand by an axis": (ops.Expand, [1, 2, 8], [3, 2, 8]),
    "Tile that changes nothing": (ops.Tile, [1, 1], [2, 1]),
    "Pad that changes nothing": (ops.Pad, [0, 0, 0, 0], [0, 1, 0, 2]),
    "Slice that changes nothing": (lambda x, s: ops.Slice(x, [0], s, [1]), [8], [3]),
    "TopK": (lambda x, s: ops.TopK(x, s)[0], [3], [5]),
    "ReduceSum": (ops.ReduceSum, [0], [1]),
    "Unsqueeze": (ops.Unsqueeze, [0], [2]),
    "ConstantOfShape": (lambda x, s: ops.Add(x, ops.ConstantOfShape(s)), [1, 8], [2, 1]),
    "Concat of shapes": (
        lambda x, s: ops.Reshape(x, ops.Concat(s, np.array([-1]), axis=0)),
        [2],
        [4],
    ),
    "Split": (lambda x, s: ops.Split(x, s, axis=1, outputs=2)[1], [4, 4], [6, 2]),
}


@pytest.mark.parametrize("rows", [2, "N"])
@pytest.mark.parametrize("when", ["built", "compiled", "run"])
@pytest.mark.parametrize("device", [*ON_OPENCL, "CPU", "HETERO:CPU,REFERENCE"])
@pytest.mark.parametrize("name", CASES)
def test_results_follow_the_parameter(name: str, device: str, when: str, rows: int | str) -> None:
    """Types that were inferred from the first content let a pass remove nodes for good."""
    make, first, later = CASES[name]
    x, held = sg.input("x", (rows, 8)), sg.parameter("held", np.array(first))
    graph = sg.Graph([x], [ops.Neg(make(ops.Relu(x), held)), ops.Shape(make(x, held))])
    new = np.array(later)
    if when == "built":
        graph.parameters["held"].assign(new)
    model = sg.compile_model(graph, device, {"RUNTIME_FALLBACK": False})
    if when == "run":
        model(X)
    if when != "built":
        graph.parameters["held"].assign(new)
    try:
        wanted = sg.compile_model(graph, "REFERENCE")(X).to_tuple()
    except sg.ShapeError:
        with pytest.raises(sg.ShapeError):
            model(X)
        return
    for _ in range(2):
        for found, expected in zip(model(X).to_tuple(), wanted, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("device", [*ON_OPENCL, "REFERENCE", "CPU", "MULTI:CPU,REFERENCE"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_compiled_in_a_transaction(device: str, fails: bool) -> None:
    """Plans had read what was assigned there, and served it after the transaction had failed."""
    x, shape, count = sg.input("x", (2, 8)), np.array([4, 4]), np.array([3])
    reshaped = ops.Reshape(ops.Relu(x), sg.parameter("shape", shape))
    graph = sg.Graph([x], [ops.Neg(reshaped), ops.TopK(x, sg.parameter("count", count))[0]])
    models: list[sg.CompiledModel] = []

    def shapes() -> list[Any]:
        return [array.shape for array in models[0](X).to_tuple()]

    try:
        with sg.transaction():
            graph.parameters["shape"].assign(np.array([8, 2]))
            graph.parameters["count"].assign(np.array([5]))
            models.append(sg.compile_model(graph, device))
            assert shapes() == [(4, 4), (2, 3)]
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert shapes() == ([(4, 4), (2, 3)] if fails else [(8, 2), (2, 5)])
