"""Indices out of range are errors of Gather and Scatter in all their forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.requirements import DEVICES

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def of_symbols(*arrays: Any) -> list[Any]:
    """Return graph inputs of these ranks and dtypes whose sizes are all symbols."""
    return [
        sg.input(f"in{k}", [f"d{k}_{d}" for d in range(a.ndim)], a.dtype.name)
        for k, a in enumerate(arrays)
    ]


WRONG_INDICES = [
    ("Gather", (ROWS, np.array([0, 4])), {}),
    ("Gather", (ROWS, np.array([[0, -5]], np.int32)), {}),
    ("GatherElements", (ROWS, np.array([[0, 1, 4]])), {}),
    ("GatherElements", (ROWS, np.array([[0], [-4], [1]])), {"axis": 1}),
    ("GatherND", (ROWS, np.array([[0, 2], [1, 3]])), {}),
    ("ScatterElements", (ROWS, np.array([[0, 9, 1]]), np.ones((1, 3), np.float32)), {}),
    (
        "ScatterElements",
        (ROWS, np.array([[0, -9, 1]]), np.ones((1, 3), np.float32)),
        {"reduction": "add"},
    ),
    ("ScatterND", (ROWS, np.array([[7], [0]]), np.ones((2, 3), np.float32)), {}),
    ("ScatterND", (ROWS, np.array([[-5]]), np.ones((1, 3), np.float32)), {"reduction": "max"}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op_type", "arrays", "attrs"), WRONG_INDICES)
def test_indices_out_of_range_are_an_error(
    device: str, op_type: str, arrays: Any, attrs: dict[str, Any]
) -> None:
    """An index that is computed at run time is checked by the kernel; the next run is right."""
    inputs = of_symbols(*arrays)
    y = getattr(ops, op_type)(*inputs, **attrs, name="culprit")
    model = sg.compile_model(sg.Graph(inputs=inputs, outputs=[y]), device)
    with pytest.raises(sg.ShapeError, match=r"culprit.*indices holds .* which is outside"):
        model(list(arrays))
    data, indices, *rest = arrays
    right = [data, np.zeros_like(indices), *rest]
    expected = sg.compile_model(sg.Graph(inputs=inputs, outputs=[y]), "REFERENCE")(right)[0]
    np.testing.assert_array_equal(model(right)[0], expected)


def test_a_known_index_into_an_axis_of_unknown_size_may_be_right() -> None:
    x = sg.input("x", ("N", 3), "float32")
    y = ops.Gather(x, np.array(5), axis=0)
    assert y.type == sg.TensorType("float32", (3,))
    model = sg.compile_model(sg.Graph([x], [y]), "CPU")
    np.testing.assert_array_equal(model([np.eye(6, 3, dtype=np.float32)])[0], np.zeros(3))
    with pytest.raises(sg.ShapeError, match=r"indices holds 5, which is outside \[-4, 3\]"):
        model([ROWS])


@pytest.mark.parametrize("device", DEVICES)
def test_an_index_that_follows_from_a_size(device: str) -> None:
    """A symbolic plan compares it with other sizes for each shape; it had clamped the index."""
    x = sg.input("x", ("N", "M"), "float32")
    index = ops.Sub(ops.Gather(ops.Shape(x), np.array(0)), np.array(1))
    model = sg.compile_model(sg.Graph([x], [ops.Gather(ops.Neg(x), index, axis=1)]), device)
    for rows, columns in ((2, 5), (3, 5), (4, 6), (5, 6)):
        data = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
        np.testing.assert_array_equal(model(data)[0], -data[:, rows - 1])
        with pytest.raises(sg.ShapeError, match=f"indices holds {columns}, which is outside"):
            model(np.zeros((columns + 1, columns), np.float32))
