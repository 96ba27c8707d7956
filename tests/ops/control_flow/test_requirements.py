"""Control flow and sequences refuse what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import subgraph as sg
from subgraph.errors import ModelError
from subgraph.graph.types import Array
from tests.support.requirements import DEVICES, Use, floats, ints, refused

Devices = pytest.mark.parametrize("device", DEVICES)
SCORES = floats(3, 5)


def value(name: str, shape: Any, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model_of(op: str, given: dict[str, Array], outputs: int, **attrs: Any) -> onnx.ModelProto:
    """Return one operator with bodies, whose inputs are ``given``."""
    node = helper.make_node(op, [*given], [f"y{k}" for k in range(outputs)], "culprit", **attrs)
    inputs = [
        value(name, array.shape, helper.np_dtype_to_tensor_dtype(array.dtype))
        for name, array in given.items()
    ]
    results = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = helper.make_graph([node], "g", inputs, results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def scan(
    inputs: str = "s e",
    outputs: str = "t o",
    given: dict[str, Array] | None = None,
    results: int = 2,
    count: int = 1,
    **attrs: Any,
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a Scan that adds up rows, and its inputs."""
    nodes = [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Neg", ["t"], ["o"])]
    parts = [value(name, [3]) for name in inputs.split()]
    body = helper.make_graph(nodes, "b", parts, [value(name, None) for name in outputs.split()])
    given = given or {"i": floats(3), "x": floats(4, 3)}
    return model_of("Scan", given, results, num_scan_inputs=count, body=body, **attrs), given


def loop(
    inputs: str = "n c v",
    outputs: str = "d w o",
    results: int = 2,
    limit: Any = 3,
    going: Any = True,
    last: str = "Add",
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a Loop that doubles a value, and its inputs."""
    attrs: dict[str, Any] = {"to": int(TensorProto.INT8)} if last == "Cast" else {}
    nodes = [
        helper.make_node("Identity", ["c"], ["d"]),
        helper.make_node(last, ["v", "v"][: 2 if last == "Add" else 1], ["w"], **attrs),
        helper.make_node("Identity", ["v"], ["o"]),
    ]
    dtypes = {"n": TensorProto.INT64, "c": TensorProto.BOOL}
    parts = [
        value(name, [] if name in dtypes else None, dtypes.get(name, TensorProto.FLOAT))
        for name in inputs.split()
    ]
    body = helper.make_graph(
        nodes, "b", parts, [onnx.ValueInfoProto(name=name) for name in outputs.split()]
    )
    given = {"m": np.array(limit), "k": np.array(going), "i": np.ones(2, np.float32)}
    return model_of("Loop", given, results, body=body), given


def choice(
    condition: Any = True, dtype: Any = np.float32, results: int = 1, missing: bool = False
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return an If of two constants, and its inputs."""
    bodies: list[Any] = []
    for k, kind in enumerate((np.float32, dtype)):
        held = numpy_helper.from_array(np.array([1, 2], kind))
        node = helper.make_node("Constant", [], ["a"], value=held)
        outputs = [onnx.ValueInfoProto(name="a")][: 1 - k * missing]
        bodies.append(helper.make_graph([node], "b", [], outputs))
    given = {"k": np.array(condition)}
    made = model_of("If", given, results, then_branch=bodies[0], else_branch=bodies[1])
    return made, given


ROW = {"i": floats(3), "x": floats(4, 3)}
WRONG: list[tuple[tuple[onnx.ModelProto, dict[str, Array]], str]] = [
    (scan(count=0), "num_scan_inputs is 0"),
    (scan(count=-1), "num_scan_inputs is -1"),
    (scan(count=10**9), "num_scan_inputs is 1000000000"),
    (scan(inputs="s e q"), "3 inputs of its body, 2 are"),
    (scan(outputs="t"), "1 outputs of its body, 2 are"),
    (scan(results=3), "2 outputs of its body, 3 are"),
    (scan(scan_input_axes=[0, 0]), "2 scan_input_axes, 1 are"),
    (scan(scan_input_axes=[5]), "scan_input_axes has 5"),
    (scan(scan_input_directions=[7]), "each is 0 or 1"),
    (scan(scan_output_axes=[0, 0]), "2 scan_output_axes, 1 are"),
    (scan("s e q", given={**ROW, "w": floats(2, 3)}, count=2), "have 4 and 2 items"),
    (scan(given={"i": floats(3), "x": np.ones((), np.float32)}), "rank 0"),
    (loop(inputs="n c v q"), "4 inputs of its body, 3 are"),
    (loop(outputs="d w"), "2 outputs of its body, 3 are"),
    (loop(results=3), "3 outputs of its body, 4 are"),
    (loop(limit=[3, 4]), "M has shape"),
    (loop(limit=np.zeros(0, np.int64)), "M has shape"),
    (loop(going=[True, False]), "cond has shape"),
    (loop(last="Cast"), "float32 and int8"),
    (choice(results=2), "1, 2 are|1 outputs of body"),
    (choice(missing=True), "0 outputs of body"),
    (choice(dtype=np.int64), "float32 and int64"),
    (choice([True, False]), "has shape"),
    (choice(1.0), "is float64|dtype float64|condition is float64"),
]


@Devices
@pytest.mark.parametrize(("case", "why"), WRONG, ids=range(len(WRONG)))
def test_bodies_that_do_not_fit_are_refused(
    device: str, case: tuple[onnx.ModelProto, dict[str, Array]], why: str
) -> None:
    proto, given = case
    with pytest.raises((sg.ShapeError, ModelError), match=why) as refused:
        sg.compile_model(sg.load(proto.SerializeToString()), device)(given)
    assert "culprit" in str(refused.value)


@Devices
@pytest.mark.parametrize("case", [scan(), loop(), choice()])
def test_bodies_that_fit(device: str, case: tuple[onnx.ModelProto, dict[str, Array]]) -> None:
    proto, given = case
    found = sg.compile_model(sg.load(proto.SerializeToString()), device)(given)
    wanted: Any = ReferenceEvaluator(proto).run(None, given)
    for k, array in enumerate(wanted):
        np.testing.assert_allclose(found[k], array)


OTHERS: list[tuple[Use, str]] = [
    (Use("SplitToSequence", (SCORES, ints(2, 2))), "does not fill"),
    (Use("SplitToSequence", (SCORES, np.array(0))), "split is 0"),
]

test_wrong_operands_are_refused = refused(OTHERS)
