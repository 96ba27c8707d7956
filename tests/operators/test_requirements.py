"""The gate: operands that do not fit are refused before any kernel sees them, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.lowering import LOWERINGS
from subgraph.opencl.lowering import CL_LOWERINGS
from subgraph.operators.operator import OPERATORS, operator_key
from subgraph.operators.requirements import (
    ANY_SIZE,
    Tensor,
    require_broadcast,
    require_shape,
    rule_from_signature,
)
from subgraph.operators.schema import CUSTOM_SCHEMAS, INTERNAL_DOMAIN, Schema
from tests.support.requirements import DEVICES

DATA = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_an_unknown_size_fits_every_number() -> None:
    assert ANY_SIZE * 3 + 1 == 7
    assert ANY_SIZE % 2 == 0
    operand = Tensor("float32", (ANY_SIZE, 4))
    require_shape("bias", operand, (9, 4), "test")
    require_broadcast("bias", operand, (7, 4), "test")
    with pytest.raises(sg.ShapeError, match=r"bias has shape \[\?, 4\]"):
        require_shape("bias", operand, (9, 5), "test")


def test_every_operator_with_a_kernel_has_a_requirement() -> None:
    """A fused node needs none: each node of its inner graph is looked at."""
    lowered = {*LOWERINGS.names(), *CL_LOWERINGS.names()}
    fused = {name for name in lowered if name.startswith(f"{INTERNAL_DOMAIN}::Fused")}
    users = {operator_key(op_type, domain) for domain, op_type in CUSTOM_SCHEMAS}
    missing = {name for name in lowered - fused - users if OPERATORS.get(name).requires is None}
    assert not missing, "declare what their operands must satisfy: requires="


def test_a_users_operator_declares_its_own() -> None:
    def square(node: Any, x: Tensor) -> None:
        if x.rank != 2:
            raise sg.ShapeError(f"x has rank {x.rank}, a matrix is needed")

    operator = sg.Operator(
        Schema("NeedsMatrix", "test.requirements", 1, ("x",), ("y",)),
        compute=lambda node, inputs: [inputs[0]],
        infer=lambda node, types, values: [types[0]],
        requires=square,
    )
    sg.Core().add_extension(operator)
    assert "test.requirements::NeedsMatrix" in OPERATORS
    x = sg.input("x", ("N",), "float32")
    node = sg.Node("NeedsMatrix", [x], name="mine", domain="test.requirements")
    with pytest.raises(sg.ShapeError, match="a matrix is needed"):
        sg.compile_model(sg.Graph(inputs=[x], outputs=[node.outputs[0]]), "CPU")([np.ones(3, "f4")])


CACHE, LENGTHS = np.zeros((2, 1, 4, 3), np.float32), np.zeros((5, 2, 3), np.float32)
IMAGE = np.ones((2, 1, 6, 6), np.float32)
WEIGHTS = np.ones((1, 3, 3), np.float32)
WRONG_COUNTS = [
    ("RoiAlign", (IMAGE, np.ones((2, 4), np.float32), np.array([0, 2])), {}, 2),
    ("ReverseSequence", (LENGTHS, np.array([5, 6])), {}, 1),
    ("TensorScatter", (CACHE, CACHE[:, :, :2], np.array([0, 3])), {}, 2),
    ("RNN", (LENGTHS, WEIGHTS, WEIGHTS, None, np.array([6, 1], np.int32)), {"hidden_size": 3}, 4),
    ("MaxRoiPool", (IMAGE, np.full((1, 5), 2, np.float32)), {"pooled_shape": [2, 2]}, 1),
    (
        "RotaryEmbedding",
        (CACHE, *[np.ones((9, 1), np.float32)] * 2, np.array([[0] * 4, [9] * 4])),
        {"rotary_embedding_dim": 2},
        3,
    ),
]


@pytest.mark.parametrize("name", ["Concat", "Sum", "Max", "Mean"])
def test_no_variadic_operand_may_be_left_out(name: str) -> None:
    x = sg.input("x", (2, 3), "float32")
    attributes = {"axis": 0} if name == "Concat" else {}
    for operands, missing in (((x, None), 1), ((x, None, x), 1), ((x, x, None), 2)):
        with pytest.raises(sg.ShapeError, match=f"input {missing} is missing"):
            getattr(ops, name)(*operands, **attributes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op_type", "arrays", "attrs", "at"), WRONG_COUNTS)
def test_counts_and_positions_out_of_range_are_an_error(
    device: str, op_type: str, arrays: Any, attrs: dict[str, Any], at: int
) -> None:
    weights = (1, 2) if op_type == "RNN" else ()
    given = [k for k, array in enumerate(arrays) if array is not None and k not in weights]
    values: list[Any] = [
        None if array is None else sg.parameter(f"w{k}", array) for k, array in enumerate(arrays)
    ]
    for k in given:
        values[k] = sg.input(f"in{k}", arrays[k].shape, arrays[k].dtype.name)
    made = getattr(ops, op_type)(*values, **attrs, name="culprit")
    y = made[0] if isinstance(made, tuple) else made
    graph = sg.Graph(inputs=[values[k] for k in given], outputs=[y])
    model = sg.compile_model(graph, device)
    says = "" if device == "REFERENCE" else " holds .* which is outside"  # the kernel's own words
    with pytest.raises(sg.ShapeError, match=f"culprit.*{says}"):
        model([arrays[k] for k in given])
    right = [np.zeros_like(arrays[k]) if k == at else arrays[k] for k in given]
    expected = sg.compile_model(graph, "REFERENCE")(right)[0]
    np.testing.assert_allclose(model(right)[0], expected, rtol=1e-5)


SWITCHED = [
    ("ReduceMax", [DATA], {"keepdims": 2}),
    ("ArgMax", [DATA], {"keepdims": -1}),
    ("Gemm", [DATA, DATA.T], {"transA": 1 << 62}),
    ("CumSum", [DATA, np.array(0)], {"reverse": 2}),
    ("Trilu", [DATA], {"upper": -1}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op_type", "arrays", "attrs"), SWITCHED)
def test_switches_are_0_or_1(
    device: str, op_type: str, arrays: list[Any], attrs: dict[str, Any]
) -> None:
    node = onnx.helper.make_node(op_type, ["i0", "i1"][: len(arrays)], ["o"], **attrs)
    given = {f"i{k}": array for k, array in enumerate(arrays)}
    kinds = {n: onnx.helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in given.items()}
    ends = [onnx.helper.make_tensor_value_info(n, kinds[n], a.shape) for n, a in given.items()]
    graph = onnx.helper.make_graph([node], "g", ends, [onnx.ValueInfoProto(name="o")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)])
    ((name, value),) = attrs.items()
    with pytest.raises(sg.ShapeError, match=f"attribute {name} is {value}; it must be 0 or 1"):
        sg.compile_model(model, device)(given)


@pytest.mark.parametrize("device", DEVICES)
def test_halves_that_do_not_fit_are_named_by_their_node(device: str) -> None:
    """The type of the result is not known then, so that no Cast can stand behind the node."""
    arrays = [np.ones(shape, np.float16) for shape in ((2, 4, 14), (4, 4, 3), (4,))]
    names = ["x", "w", "b"]
    node = onnx.helper.make_node("Conv", names, ["y"], pads=[1, -1], name="culprit")
    ends = [
        onnx.helper.make_tensor_value_info(name, 10, [f"{name}{axis}" for axis in range(a.ndim)])
        for name, a in zip(names, arrays, strict=True)
    ]
    graph = onnx.helper.make_graph([node], "g", ends, [onnx.ValueInfoProto(name="y")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 11)])
    with pytest.raises(sg.ShapeError, match=r"node 'culprit' \(Conv"):
        sg.compile_model(model, device)(arrays)


def test_optional_operands_may_be_left_out_before_others() -> None:
    def rule(node: Any, x: Tensor, zero: Tensor | None, scale: Tensor) -> None:
        assert zero is None or zero.dtype == x.dtype

    made = rule_from_signature(rule)
    x = Tensor("int8", (2,))
    made.check(sg.Node("X"), [x, None, x])
    with pytest.raises(sg.ShapeError, match="input 2 is missing"):
        made.check(sg.Node("X"), [x])
