"""Our shape rules against onnx's inference, node by node, over the graphs of ONNX's own suite."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.errors import ShapeError, SubgraphError
from subgraph.graph.graph import Graph, Node
from subgraph.graph.types import TensorType, ValueType
from subgraph.operators.inference import infer_by_onnx, infer_types
from subgraph.operators.operator import find_operator

PARTS = 4


@cache
def suite() -> list[Any]:
    from onnx.backend.test.loader import load_model_tests

    return [case for case in load_model_tests(kind="node") if case.model is not None]


def says_enough(theirs: ValueType | None, ours: ValueType | None) -> bool:
    """Whether ours contradicts nothing and knows every number that theirs knows."""
    if theirs is None or theirs == ours:
        return True
    if not isinstance(theirs, TensorType) or not isinstance(ours, TensorType):
        return False
    if theirs.dtype != ours.dtype:
        return False
    if theirs.shape is None:
        return True
    if ours.shape is None or len(ours.shape) != len(theirs.shape):
        return False
    pairs = zip(theirs.shape, ours.shape, strict=True)
    return all(a == b or not isinstance(a, int) for a, b in pairs)


def compare(node: Node) -> bool:
    """Compare one node; return whether we have a rule for it and onnx an answer."""
    operator = find_operator(node.op_type)
    if node.domain or node.bodies or operator is None or operator.infer is None:
        return False
    types = [None if v is None else v.type for v in node.inputs]
    values = [None if v is None or v.parameter is None else v.parameter.array for v in node.inputs]
    try:
        theirs = infer_by_onnx(node, types, values)
    except ShapeError:
        with pytest.raises(ShapeError):
            infer_types(node, types, values)
        return True
    ours = infer_types(node, types, values)
    for a, b in zip(theirs, ours, strict=True):
        assert says_enough(a, b), f"{node}: onnx gives {a}, we give {b}"
    return True


def graphs(part: int) -> list[Graph]:
    found: list[Graph] = []
    for case in suite()[part::PARTS]:
        try:
            found.append(sg.load(case.model))
        except SubgraphError:
            continue
    return found


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")
def test_rules_say_what_onnx_says(part: int) -> None:
    compared = sum(compare(node) for graph in graphs(part) for node in graph.nodes)
    assert compared > 1000


def test_symbolic_dimensions_stay() -> None:
    x = sg.input("x", ("N", 3, "H", "W"))
    w = sg.parameter("w", np.zeros((8, 3, 3, 3), np.float32))
    y = ops.Conv(x, w, pads=(1, 1, 1, 1))
    assert y.type.shape == ("N", 8, "H", "W")
    assert ops.Transpose(x, perm=(0, 2, 3, 1)).type.shape == ("N", "H", "W", 3)
    assert ops.Add(x, sg.input("b", (3, 1, 1))).type.shape == ("N", 3, "H", "W")
    assert ops.Flatten(sg.input("f", ("N", 4, 5))).type.shape == ("N", 20)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: ops.MatMul(x, sg.input("y", (5, 2))),
        lambda x: ops.Add(x, sg.input("y", (3,))),
        lambda x: ops.Concat(x, sg.input("y", (9, 9)), axis=0),
        lambda x: ops.Reshape(x, sg.parameter("s", [7, -1])),
        lambda x: ops.Transpose(x, perm=(0, 0)),
        lambda x: ops.Softmax(x, axis=2),
        lambda x: ops.Squeeze(x, sg.parameter("a", [0])),
        lambda x: ops.ReduceSum(x, sg.parameter("a", [5])),
    ],
)
def test_what_does_not_fit_is_refused(build: Any) -> None:
    with pytest.raises(ShapeError):
        build(sg.input("x", (2, 4)))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bid,bjd->bij", [(1, 3, 4), (2, 5, 4)]),  # onnx's inference takes the first operand's size
        ("bid,bjd->bij", [(2, 3, 4), (1, 5, 4)]),
        ("...ij,...jk->...ik", [(7, 1, 3, 4), (1, 5, 4, 2)]),
        ("...ij,jk", [(5, 3, 4), (4, 2)]),
        ("ji,j->", [(3, 4), (3,)]),
        ("ii->i", [(3, 3)]),
        ("b,a", [(2,), (3,)]),
    ],
)
def test_einsum_is_numpys(equation: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = [sg.input(f"x{k}", shape) for k, shape in enumerate(shapes)]
    y = ops.Einsum(*inputs, equation=equation)
    assert isinstance(y.type, TensorType)
    assert y.type.shape == np.einsum(equation, *map(np.ones, shapes)).shape


@pytest.mark.parametrize(
    "case", ["remainder of the dividend's sign", "sum without axes", "cast that wraps"]
)
def test_sizes_that_are_computed_by_a_variant_of_an_operator(case: str) -> None:
    x = sg.input("x", (3,))
    size = ops.Shape(x)
    if case == "sum without axes":
        sizes = ops.Concat(size, size, axis=0)
        sizes = ops.ReduceSum(sizes, noop_with_empty_axes=1)  # the sizes themselves
    elif case == "cast that wraps":
        large = ops.Mul(size, np.array([(2**32 + 2) // 3], np.int64))
        sizes = ops.Cast(ops.Cast(large, to=6), to=7)  # to int32, in which it is 2, and back
    else:
        negative = ops.Sub(np.array([0], np.int64), size)
        four = np.array([4], np.int64)
        sizes = ops.Add(ops.Mod(negative, four, fmod=1), four)  # -3 + 4
    graph = sg.Graph([x], [ops.Expand(np.ones(1, np.float32), sizes, name="y")])
    loaded = sg.load(sg.to_onnx(graph))
    (result,) = sg.compile_model(loaded, "REFERENCE")(x=np.zeros(3, np.float32)).values()
    (stated,) = (value.type for value in loaded.outputs)
    assert isinstance(stated, TensorType)
    assert stated.shape is not None
    assert len(stated.shape) == result.ndim
    assert all(a in (b, None) for a, b in zip(stated.shape, result.shape, strict=True))
