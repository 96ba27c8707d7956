"""Types of subgraph nodes follow from the inner graph and the input types at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import Array
from subgraph.partition.property import SelectorProperty
from subgraph.testing import graphs, selectors

quick = settings(
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)


def tensor(*shape: int | str | None, dtype: str = "float32") -> sg.TensorType:
    return sg.TensorType(dtype, shape)


def network(*shape: int | str, width: int = 4) -> sg.Graph:
    """Return Sin -> MatMul [width, 5] -> Relu on an input of this shape."""
    x = sg.input("x", shape)
    w = sg.parameter("w", np.arange(width * 5, dtype=np.float32).reshape(width, 5))
    return sg.Graph([x], [ops.Relu(ops.MatMul(ops.Sin(x), w))], name="network")


def only_region(graph: sg.Graph) -> sg.Node:
    (node,) = [node for node in graph.nodes if node.subgraph is not None]
    return node


class NumpyOp(sg.SubgraphOp):
    """A right op of a user: runs its region on REFERENCE, whatever shapes come."""

    def forward(self, inputs: list[Any]) -> list[Array]:
        plain = sg.DefaultSubgraphOp(self.subgraph)
        return [np.asarray(result) for result in plain.forward(inputs)]


class NumpyProperty(sg.SubgraphProperty):
    op: type[sg.SubgraphOp] = NumpyOp

    def __init__(self, *op_types: str) -> None:
        self.op_types = op_types

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector(set(self.op_types))

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, op=self.op(subgraph), name=f"mine_{subgraph_id}")


def cut(graph: sg.Graph, *op_types: str) -> sg.Graph:
    return sg.optimize_for(graph, sg.ContainOpSelector(op_types or {"MatMul", "Relu"}))


@pytest.mark.parametrize("strict", [True, False])
def test_outputs_follow_an_input_that_got_another_shape(strict: bool) -> None:
    # All of the graph is the region: no other node states types.
    graph = cut(network(2, 4), "Sin", "MatMul", "Relu")
    graph.inputs[0].type = tensor(7, 4)
    typed = passes.apply_pass(graph, "InferTypes", strict=strict)
    assert typed.outputs[0].type == tensor(7, 5)
    inner = only_region(typed).subgraph
    assert inner is not None
    assert inner.inputs[0].type == tensor(7, 4)
    assert {v.type for n in inner.nodes for v in n.outputs} == {tensor(7, 4), tensor(7, 5)}
    result = sg.compile_model(typed, "REFERENCE")(np.ones((7, 4), np.float32))[0]
    assert result.shape == (7, 5)


def test_the_graph_given_to_the_pass_stays_as_it_was() -> None:
    graph = cut(network(2, 4), "Sin", "MatMul", "Relu")
    inner = only_region(graph).subgraph
    before = str(graph)
    graph.inputs[0].type = tensor(7, 4)
    passes.apply_pass(graph, "InferTypes")
    graph.inputs[0].type = tensor(2, 4)
    assert str(graph) == before
    assert only_region(graph).subgraph is inner


def test_nothing_is_made_again_where_types_stay() -> None:
    graph = cut(network("N", 4))
    typed = passes.apply_pass(graph, "InferTypes")
    assert only_region(typed).subgraph is only_region(graph).subgraph
    assert only_region(typed).op is only_region(graph).op


def test_a_partition_before_type_inference_is_typed_after_it() -> None:
    model = sg.to_onnx(network(2, 4))
    del model.graph.value_info[:]
    model.graph.output[0].ClearField("type")
    bare = sg.load(model, infer_types=False)
    assert bare.outputs[0].type is None
    typed = passes.apply_pass(cut(bare), "InferTypes")
    assert typed.outputs[0].type == tensor(2, 5)
    node = only_region(typed)
    assert node.subgraph is not None
    assert all(v.type is not None for v in node.subgraph.values())


def test_a_symbolic_size_goes_through_a_region() -> None:
    graph = cut(network(2, 4), "Sin", "MatMul", "Relu")
    graph.inputs[0].type = tensor("batch", 4)
    assert passes.apply_pass(graph, "InferTypes").outputs[0].type == tensor("batch", 5)


def test_an_input_that_does_not_fit_the_region_is_refused() -> None:
    graph = cut(network(2, 4), "Sin", "MatMul", "Relu")
    graph.inputs[0].type = tensor(2, 3)
    with pytest.raises(sg.ShapeError, match="MatMul") as caught:
        passes.apply_pass(graph, "InferTypes")
    assert any(only_region(graph).name in note for note in caught.value.__notes__)


def test_float64_does_not_go_into_a_float32_region() -> None:
    graph = cut(network(2, 4), "Sin", "MatMul", "Relu")
    graph.inputs[0].type = tensor(2, 4, dtype="float64")
    with pytest.raises(sg.ShapeError, match="MatMul"):
        passes.apply_pass(graph, "InferTypes")


def test_a_region_inside_a_region() -> None:
    graph = cut(network(2, 4), "MatMul")
    node = only_region(graph)
    whole = sg.Graph(graph.inputs, graph.outputs, "inner", nodes=graph.nodes)
    outer = sg.input("x", (2, 4))
    around = sg.subgraph_node(whole, inputs=[outer])
    nested = sg.Graph([outer], around.outputs, "nested")
    nested.inputs[0].type = tensor(7, 4)
    typed = passes.apply_pass(nested, "InferTypes")
    assert typed.outputs[0].type == tensor(7, 5)
    assert node.subgraph is not None
    assert node.subgraph.outputs[0].type == tensor(2, 5)


def test_bodies_inside_a_region_follow() -> None:
    x = sg.input("x", (2, 4))
    flag = sg.input("flag", (), "bool")
    branches = [
        sg.Graph(outputs=[ops.Relu(sg.capture(x))]),
        sg.Graph(outputs=[ops.Sin(sg.capture(x))]),
    ]
    picked = ops.If(flag, then_branch=branches[0], else_branch=branches[1])
    graph = cut(sg.Graph([x, flag], [picked], name="choice"), "If")
    graph.inputs[0].type = tensor(7, 4)
    assert passes.apply_pass(graph, "InferTypes").outputs[0].type == tensor(7, 4)


def test_what_no_rule_tells_keeps_its_dtype_alone() -> None:
    schema = sg.Schema("DoubleOf", "test.types", inputs=("X",), outputs=("Y",))
    operator = sg.Operator(schema, lambda node, given: [given[0] * 2])
    core = sg.Core()
    core.add_extension(operator)
    x = sg.input("x", (2, 4))
    made = ops.DoubleOf(x)
    made.type = tensor(2, 4)
    graph = sg.optimize_for(
        sg.Graph([x], [made], name="custom"), sg.ContainOpSelector({"test.types::DoubleOf"})
    )
    assert passes.apply_pass(graph, "InferTypes").outputs[0].type == tensor(2, 4)
    graph.inputs[0].type = tensor(7, 4)
    assert passes.apply_pass(graph, "InferTypes").outputs[0].type == sg.TensorType("float32")


def test_shapes_that_are_computed_outside_reach_the_inside() -> None:
    x = sg.input("x", (2, 6))
    rows = ops.Shape(x, end=1)
    shape = ops.Concat(rows, sg.parameter("rest", np.array([3, -1], np.int64)), axis=0)
    spread = ops.Expand(sg.parameter("one", np.ones((1, 1), np.float32)), rows)
    whole = sg.Graph([x], [ops.Reshape(x, shape), spread], name="shapes")
    graph = cut(whole, "Reshape", "Expand")
    graph.inputs[0].type = tensor(4, 6)
    typed = passes.apply_pass(graph, "InferTypes", strict=False)
    assert [v.type for v in typed.outputs] == [tensor(4, 3, 2), tensor(1, 4)]


def test_the_saved_file_declares_the_right_shapes(tmp_path: Path) -> None:
    graph = cut(network(2, 4), "Sin", "MatMul", "Relu")
    graph.inputs[0].type = tensor(7, 4)
    sg.save(passes.apply_pass(graph, "InferTypes"), tmp_path / "cut.onnx")
    model = onnx.load(tmp_path / "cut.onnx")
    onnx.checker.check_model(model, full_check=True)
    stated = [*model.graph.output, *(v for f in model.functions for v in f.value_info)]
    shapes = {tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in stated}
    assert shapes == {(7, 4), (7, 5)}


# Precision


def half_network() -> sg.Graph:
    x = sg.input("x", ("N", 4), "float16")
    w = sg.parameter("w", (np.arange(20).reshape(4, 5) / 10).astype(np.float16))
    h = ops.Relu(ops.MatMul(ops.Sin(x), w))
    b = sg.parameter("b", np.linspace(-1, 1, 5).astype(np.float16))
    return sg.Graph([x], [ops.Softmax(ops.Add(ops.Mul(h, b), b))], name="half")


def test_precision_is_converted_inside_regions() -> None:
    graph = half_network()
    partitioned = cut(graph, "Sin", "MatMul", "Relu", "Mul")
    converted = passes.apply_pass(partitioned, "ConvertPrecision")
    node = only_region(converted)
    assert node.subgraph is not None
    values = [v.type for n in node.subgraph.nodes for v in n.outputs]
    computed = {type_.dtype for type_ in values if isinstance(type_, sg.TensorType)}
    assert computed == {"float32"}
    weights = [v.parameter for v in node.subgraph.inputs if v.parameter is not None]
    assert weights == [graph.parameters["w"], graph.parameters["b"]]
    assert [v.parameter for v in node.inputs if v is not None and v.parameter] == weights
    assert [v.type for v in converted.outputs] == [v.type for v in graph.outputs]
    passes.apply_pass(converted, "InferTypes")
    array = np.linspace(-1, 1, 8).astype(np.float16).reshape(2, 4)
    whole = passes.apply_pass(graph, "ConvertPrecision")
    models = [sg.compile_model(g, "REFERENCE") for g in (converted, whole)]
    for factor in (1, 2):
        got, wanted = (model(array)[0] for model in models)
        assert got.dtype == np.float16
        np.testing.assert_array_equal(got, wanted)
        graph.parameters["w"].assign(graph.parameters["w"].array * np.float16(factor + 1))
    assert only_region(partitioned).subgraph is not node.subgraph


def test_precision_is_converted_in_nested_regions_and_bodies() -> None:
    x, flag = sg.input("x", (2, 4), "float16"), sg.input("flag", (), "bool")
    w = sg.parameter("w", np.ones((4, 4), np.float16))
    then = sg.Graph(outputs=[ops.MatMul(sg.capture(x), w)])
    other = sg.Graph(outputs=[ops.Sin(sg.capture(x))])
    choice = ops.If(flag, then_branch=then, else_branch=other)
    graph = sg.Graph([x, flag], [choice], name="choice")
    partitioned = cut(cut(graph, "MatMul"), "If")
    array = np.linspace(-1, 1, 8).astype(np.float16).reshape(2, 4)
    for value in (True, False):
        given_arrays = {"x": array, "flag": np.array(value)}
        got, wanted = (
            sg.compile_model(passes.apply_pass(g, "ConvertPrecision"), "REFERENCE")(given_arrays)[0]
            for g in (partitioned, graph)
        )
        np.testing.assert_array_equal(got, wanted)
        assert got.dtype == np.float16


def test_an_own_op_keeps_its_dtype_between_casts() -> None:
    partitioned = sg.optimize_for(half_network(), NumpyProperty("Sin", "MatMul", "Relu", "Mul"))
    converted = passes.apply_pass(partitioned, "ConvertPrecision")
    assert only_region(converted).subgraph is only_region(partitioned).subgraph
    array = np.linspace(-1, 1, 8).astype(np.float16).reshape(2, 4)
    got, wanted = (sg.compile_model(g, "REFERENCE")(array)[0] for g in (converted, partitioned))
    np.testing.assert_allclose(got, wanted, rtol=1e-2)


# Ops of a user


def test_a_right_op_runs_on_other_shapes_than_it_was_cut_for() -> None:
    graph = sg.optimize_for(network(2, 4), NumpyProperty("Sin", "MatMul", "Relu"))
    graph.inputs[0].type = tensor(7, 4)
    typed = passes.apply_pass(graph, "InferTypes")
    array = np.linspace(-1, 1, 28, dtype=np.float32).reshape(7, 4)
    for model in (graph, typed):
        got = sg.compile_model(model, "REFERENCE")(array)[0]
        wanted = sg.compile_model(network(7, 4), "REFERENCE")(array)[0]
        np.testing.assert_array_equal(got, wanted)


class FixedOp(sg.SubgraphOp):
    """A wrong op: its result has the shape that it was cut for, whatever comes."""

    def forward(self, inputs: list[Any]) -> list[Array]:
        return [np.zeros((2, 5), np.float32)]


def test_a_wrong_result_for_the_shapes_at_hand_is_found() -> None:
    property = NumpyProperty("Sin", "MatMul", "Relu")
    property.op = FixedOp
    graph = sg.optimize_for(network(2, 4), property)
    assert sg.compile_model(graph, "REFERENCE")(np.ones((2, 4), np.float32))[0].shape == (2, 5)
    graph.inputs[0].type = tensor(7, 4)
    model = sg.compile_model(graph, "REFERENCE")
    with pytest.raises(sg.DeviceError, match=r"float32\[2, 5\].*float32\[7, 5\]"):
        model(np.ones((7, 4), np.float32))


class TiledOp(NumpyOp):
    """An op whose accelerator gives rows in whole tiles of eight."""

    def infer_types(self, inputs: Sequence[Any]) -> list[sg.TensorType]:
        (given,) = [t for t in inputs[:1] if isinstance(t, sg.TensorType)]
        assert given.shape is not None
        rows = given.shape[0]
        assert isinstance(rows, int)
        return [tensor(-(-rows // 8) * 8, 5)]

    def forward(self, inputs: list[Any]) -> list[Array]:
        (made,) = super().forward(inputs)
        out = np.zeros((-(-len(made) // 8) * 8, 5), np.float32)
        out[: len(made)] = made
        return [out]


def test_an_op_may_say_otherwise() -> None:
    property = NumpyProperty("Sin", "MatMul", "Relu")
    property.op = TiledOp
    graph = sg.optimize_for(network(2, 4), property)
    typed = passes.apply_pass(graph, "InferTypes")
    assert typed.outputs[0].type == tensor(8, 5)
    assert sg.compile_model(typed, "REFERENCE")(np.ones((2, 4), np.float32))[0].shape == (8, 5)
    typed.inputs[0].type = tensor(9, 4)
    typed = passes.apply_pass(typed, "InferTypes")
    assert typed.outputs[0].type == tensor(16, 5)
    assert sg.compile_model(typed, "REFERENCE")(np.ones((9, 4), np.float32))[0].shape == (16, 5)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ([], "0 types"),
        ([tensor(1), tensor(1)], "2 types"),
        (["float32"], "'float32'"),
        (3, "3"),
        (RuntimeError("no table"), "RuntimeError: no table"),
    ],
)
def test_an_op_that_answers_with_nonsense_is_named(answer: Any, wanted: str) -> None:
    class Odd(NumpyOp):
        def infer_types(self, inputs: Sequence[Any]) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    property = NumpyProperty("Sin", "MatMul", "Relu")
    property.op = Odd
    with pytest.raises(sg.ShapeError, match=r"Odd\.infer_types") as caught:
        sg.optimize_for(network(2, 4), property)
    assert wanted in str(caught.value)


# Any graph


@quick
@given(data=st.data())
def test_regions_of_random_graphs_get_the_types_of_the_whole(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    partitioned = sg.optimize_for(graph, SelectorProperty(data.draw(selectors())))
    for level in partitioned.levels():
        for node in level.nodes:
            if node.subgraph is not None:
                for value in node.outputs:
                    value.type = None
                for value in node.subgraph.values():
                    value.type = None
    expected = {v.name: v.type for v in passes.apply_pass(graph, "InferTypes").values()}
    found = passes.apply_pass(partitioned, "InferTypes")
    for value in found.values():
        assert value.type == expected[value.name], value.name
