"""ConvertPrecision: a model in float16 computed in float32, by the pass and by an option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import Array
from subgraph.operators.protobuf import SparseTensor

X = np.linspace(-1, 1, 6, dtype=np.float16).reshape(2, 3)


def half_net() -> sg.Graph:
    rng = np.random.default_rng(0)
    x, c = sg.input("x", ("N", 3), "float16"), sg.input("c", (), "bool")
    w = sg.parameter("w", rng.standard_normal((3, 4)).astype(np.float16))
    k = sg.parameter("k", np.array([2], np.float16))
    hidden = ops.MatMul(x, w)
    shift = ops.Cast(ops.ConstantOfShape([1], value=np.array([0.5], np.float16)), to=10)
    then = sg.Graph(outputs=[ops.Mul(sg.capture(hidden), sg.capture(k))], name="then")
    other = sg.Graph(outputs=[ops.Add(sg.capture(hidden), sg.capture(shift))], name="else")
    chosen = ops.If(c, then_branch=then, else_branch=other)
    return sg.Graph([x, c], [ops.Relu(chosen, name="y"), ops.Cast(hidden, to=1), k], "half")


def dtypes(graph: sg.Graph) -> set[str]:
    found: set[str] = set()
    for level in graph.levels():
        for node in level.nodes:
            if node.op_type != "Cast":
                types = [value.type for value in node.outputs]
                found |= {type_.dtype for type_ in types if isinstance(type_, sg.TensorType)}
    return found


def test_everything_is_computed_in_the_target() -> None:
    graph = half_net()
    converted = passes.apply_pass(graph, "ConvertPrecision")
    assert dtypes(graph) == {"float16"}
    assert dtypes(converted) == {"float32"}
    assert [str(v.type) for v in converted.inputs] == [str(v.type) for v in graph.inputs]
    assert [v.name for v in converted.outputs] == [v.name for v in graph.outputs]
    assert [str(v.type) for v in converted.outputs] == [str(v.type) for v in graph.outputs]
    assert converted.parameters["w"] is graph.parameters["w"]


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("taken", [True, False])
def test_results_agree_and_follow_the_weights(device: str, taken: bool) -> None:
    graph = half_net()
    plain = sg.compile_model(graph, "REFERENCE")
    model = sg.compile_model(graph, device, {"INFERENCE_PRECISION": "float32"})
    for _ in range(2):
        want, got = plain(X, np.array(taken)), model(X, np.array(taken))
        for one, other in zip(got.values(), want.values(), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2)
        with sg.transaction():
            for name in ("w", "k"):
                parameter = graph.parameters[name]
                parameter.assign(parameter.array * np.float16(3))


def test_a_region_with_its_own_op_keeps_its_dtypes() -> None:
    class Own(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            assert inputs[0].dtype == np.float16
            return [inputs[0] + np.float16(1)]

    x = sg.input("x", ("N", 3), "float16")
    ix = sg.input("ix", ("N", 3), "float16")
    inner = sg.Graph([ix], [ops.Relu(ix)], "inner")
    region = sg.subgraph_node(inner, Own(inner), inputs=[ops.Neg(x)])
    graph = sg.Graph([x], [ops.Abs(region.outputs[0])])
    converted = passes.apply_pass(graph, "ConvertPrecision")
    result = sg.compile_model(converted, "REFERENCE")(X)[0]
    np.testing.assert_allclose(result, np.abs(1 - X), rtol=1e-3)
    assert result.dtype == np.float16


def test_only_floats_can_be_converted() -> None:
    with pytest.raises(sg.PassError, match="got 'int8'"):
        passes.apply_pass(half_net(), "ConvertPrecision", source="int8")


@pytest.mark.parametrize("target", ["float16", "float64"])
def test_results_that_are_float32_by_themselves_are_cast(target: str) -> None:
    x = sg.input("x", (3,), "float32")
    two = ops.Constant(value_float=2.0)
    many = ops.Constant(value_floats=[1.0, 2.0, 3.0])
    zeros = ops.ConstantOfShape(np.array([3], np.int64))
    body = sg.Graph([], [ops.Mul(sg.capture(x), ops.Constant(value_float=3.0))], "then")
    other = sg.Graph([], [ops.Neg(sg.capture(x))], "else")
    chosen = ops.If(ops.Greater(two, np.float32(1)), then_branch=body, else_branch=other)
    y = ops.Add(ops.Add(ops.Mul(x, two), zeros), ops.Add(many, chosen))
    graph = sg.Graph([x], [y, two])
    converted = passes.apply_pass(graph, "ConvertPrecision", source="float32", target=target)
    for kind in ("Add", "If"):
        (made, *_) = (node.outputs[0] for node in converted.nodes if node.op_type == kind)
        assert made.type == sg.TensorType(target, (3,))
    for device in ("REFERENCE", "CPU"):
        found, number = sg.compile_model(converted, device)(np.ones(3, np.float32)).values()
        assert found.dtype == number.dtype == np.float32
        np.testing.assert_array_equal(found, [6, 7, 8])
        assert number == 2


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float64"])
def test_operands_that_only_the_old_dtype_can_have_are_cast(target: str) -> None:
    """As the scales of Resize and all of DynamicQuantizeLinear."""
    x, scales = sg.input("x", (1, 1, 2, 2), "float32"), sg.input("scales", (4,), "float32")
    doubled = ops.Mul(scales, sg.parameter("two", np.array([1, 1, 2, 2], np.float32)))
    larger = ops.Resize(x, None, doubled, mode="nearest")
    narrow, scale, zero = ops.DynamicQuantizeLinear(larger)
    graph = sg.Graph([x, scales], [ops.DequantizeLinear(narrow, scale, zero), doubled])
    converted = passes.apply_pass(graph, "ConvertPrecision", source="float32", target=target)
    given = [np.array([[[[0, 1], [2, 3]]]], np.float32), np.ones(4, np.float32)]
    wanted = sg.compile_model(graph, "REFERENCE")(given)
    for device in ("REFERENCE", "CPU"):
        found = sg.compile_model(converted, device)(given)
        assert found[0].dtype == found[1].dtype == np.float32
        np.testing.assert_allclose(found[0], wanted[0], atol=0.02)
        np.testing.assert_array_equal(found[1], [1, 1, 2, 2])


def test_float64_becomes_float32() -> None:
    x = sg.input("x", (2, 4), "float64")
    shifted = ops.Add(ops.ReduceMean(x, keepdims=1), ops.Constant(value=np.array([1.5])))
    graph = sg.Graph([x], [ops.Gemm(x, x, transB=1), shifted])
    converted = passes.apply_pass(graph, "ConvertPrecision", source="float64")
    types = [node.outputs[0].type for node in converted.nodes if node.op_type != "Cast"]
    assert {type_.dtype for type_ in types if isinstance(type_, sg.TensorType)} == {"float32"}
    product, mean = sg.compile_model(converted, "CPU")(np.ones((2, 4))).values()
    assert product.dtype == mean.dtype == np.float64
    assert (product == 4).all()
    assert (mean == 2.5).all()


def test_a_sparse_constant_is_cast() -> None:
    sparse = SparseTensor(np.array([3], np.float32), np.array([1]), (3,))
    x = sg.input("x", (3,), "float32")
    graph = sg.Graph([x], [ops.Add(x, ops.Constant(sparse_value=sparse))])
    assert graph.nodes[0].outputs[0].type == sg.TensorType("float32", (3,))
    converted = passes.apply_pass(graph, "ConvertPrecision", source="float32", target="float16")
    for device in ("REFERENCE", "CPU"):
        found = sg.compile_model(converted, device)(np.ones(3, np.float32))[0]
        np.testing.assert_array_equal(found, [1, 4, 1])
