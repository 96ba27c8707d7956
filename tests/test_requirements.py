"""The gate: operands that do not fit are refused before any kernel sees them, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.requirements import ANY_SIZE, REQUIREMENTS, Tensor, require_broadcast, require_shape
from subgraph.schema import Schema

DEVICES = ("REFERENCE", "CPU", "OPENCL")
DATA = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_an_unknown_size_fits_every_number() -> None:
    assert ANY_SIZE * 3 + 1 == 7
    assert ANY_SIZE % 2 == 0
    operand = Tensor("float32", (ANY_SIZE, 4))
    require_shape("bias", operand, (9, 4), "test")
    require_broadcast("bias", operand, (7, 4), "test")
    with pytest.raises(sg.ShapeError, match=r"bias has shape \[\?, 4\]"):
        require_shape("bias", operand, (9, 5), "test")


def of_symbols(*arrays: Any) -> list[Any]:
    """Return graph inputs of these ranks and dtypes whose sizes are all symbols."""
    return [
        sg.input(f"in{k}", [f"d{k}_{d}" for d in range(a.ndim)], a.dtype.name)
        for k, a in enumerate(arrays)
    ]


WRONG_INDEXING = [
    ("ScatterElements", (DATA, np.zeros((3, 9), np.int64), np.ones((3, 9), np.float32)), {}),
    ("ScatterElements", (DATA, np.zeros((2, 2), np.int64), np.ones((1, 2), np.float32)), {}),
    ("ScatterND", (DATA, np.zeros((5, 1), np.int64), np.ones((2, 4), np.float32)), {}),
    ("ScatterND", (DATA, np.zeros((5, 3), np.int64), np.ones(5, np.float32)), {}),
    ("GatherElements", (DATA, np.zeros((40, 4), np.int64)), {"axis": 1}),
    ("GatherND", (DATA, np.zeros((2, 3), np.int64)), {}),
    ("Gather", (np.zeros((0, 4), np.float32), np.zeros(3, np.int64)), {}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op_type", "arrays", "attrs"), WRONG_INDEXING)
def test_wrong_sizes_of_inputs_are_refused(
    device: str, op_type: str, arrays: Any, attrs: dict[str, Any]
) -> None:
    inputs = of_symbols(*arrays)
    y = getattr(ops, op_type)(*inputs, **attrs, name="culprit")
    model = sg.compile_model(sg.Graph(inputs=inputs, outputs=[y]), device)
    with pytest.raises(sg.ShapeError, match="culprit"):
        model(list(arrays))


@pytest.mark.parametrize(("op_type", "arrays", "attrs"), WRONG_INDEXING)
def test_wrong_sizes_of_weights_are_refused(
    op_type: str, arrays: Any, attrs: dict[str, Any]
) -> None:
    def run() -> Any:
        values = [sg.parameter(f"w{k}", array) for k, array in enumerate(arrays)]
        y = getattr(ops, op_type)(*values, **attrs, name="culprit")
        return sg.compile_model(sg.Graph(outputs=[y]), "CPU")([])

    with pytest.raises(sg.ShapeError):
        run()


def test_a_users_operator_declares_its_own() -> None:
    def square(node: Any, x: Tensor) -> None:
        if x.rank != 2:
            raise sg.ShapeError(f"x has rank {x.rank}, a matrix is needed")

    operator = sg.Operator(
        Schema("NeedsMatrix", "test.requirements", 1, ("x",), ("y",), 1, 1, 1, 1),
        compute=lambda node, inputs: [inputs[0]],
        infer=lambda node, types, values: [types[0]],
        requires=square,
    )
    sg.Core().add_extension(operator)
    assert "test.requirements::NeedsMatrix" in REQUIREMENTS
    x = sg.input("x", ("N",), "float32")
    node = sg.Node("NeedsMatrix", [x], name="mine", domain="test.requirements")
    with pytest.raises(sg.ShapeError, match="a matrix is needed"):
        sg.compile_model(sg.Graph(inputs=[x], outputs=[node.outputs[0]]), "CPU")([np.ones(3, "f4")])
