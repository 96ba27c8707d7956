"""Constants are weights: what a region takes from them reaches its op as Parameters."""

from __future__ import annotations

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
from subgraph.testing import check_partition, feeds, graphs, selectors

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
quick = settings(
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)
W = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
ARRAY = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


class PackingOp(sg.SubgraphOp):
    """Multiplies by transposed weights out of the cache; counts how often these are made."""

    made = 0

    def forward(self, inputs: list[Any]) -> list[Array]:
        def transposed(array: Array) -> Array:
            PackingOp.made += 1
            return np.ascontiguousarray(array.T)

        x, w = inputs
        assert isinstance(w, sg.Parameter)
        return [np.asarray(x @ self.weights.get("transposed", transposed, w).T)]


class Weighted(sg.SubgraphSelector):
    """An accelerator's selector: MatMul by a weight."""

    def select(self, node: sg.Node) -> bool:
        value = node.inputs[1] if len(node.inputs) > 1 else None
        return node.op_type == "MatMul" and value is not None and value.parameter is not None


class Packing(sg.SubgraphProperty):
    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return Weighted()

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, op=PackingOp(subgraph), name=f"packed_{subgraph_id}")


def constant(array: Array, name: str = "c") -> sg.Value:
    made = ops.Constant(value=array, name=name)
    assert isinstance(made, sg.Value)
    return made


def network(weight: sg.Value) -> sg.Graph:
    x = sg.input("x", ("N", 4))
    return sg.Graph([x], [ops.Relu(ops.MatMul(x, weight, name="product"))], name="network")


def regions(graph: sg.Graph) -> list[sg.Node]:
    return [node for node in graph.nodes if node.subgraph is not None]


def run(graph: sg.Graph, array: Array = ARRAY) -> Array:
    result: Array = sg.compile_model(graph, "REFERENCE")(array)[0]
    return result


def test_a_constant_reaches_an_op_as_an_initializer_does() -> None:
    for graph in (network(constant(W)), network(sg.parameter("c", W))):
        cut = sg.optimize_for(graph, Packing())
        check_partition(graph, cut, inputs=[ARRAY])
        assert [node.op_type for node in cut.nodes] == ["_subgraph_op", "Relu"]
        assert list(cut.parameters) == ["c"]
        (region,) = regions(cut)
        assert region.subgraph is not None
        weight = region.subgraph.inputs[1].parameter
        assert weight is not None
        assert weight is cut.parameters["c"]
        np.testing.assert_array_equal(weight.array, W)


def test_it_is_cached_and_versioned() -> None:
    cut = sg.optimize_for(network(constant(W)), Packing())
    model = sg.compile_model(cut, "REFERENCE")
    before = PackingOp.made
    for _ in range(3):
        np.testing.assert_allclose(model(ARRAY)[0], np.maximum(ARRAY @ W, 0), rtol=1e-6)
    assert PackingOp.made == before + 1
    model.parameters["c"].assign(W * 2)
    np.testing.assert_allclose(model(ARRAY)[0], np.maximum(ARRAY @ W * 2, 0), rtol=1e-6)
    assert PackingOp.made == before + 2


def test_the_graph_that_was_cut_stays_as_it_was() -> None:
    graph = network(constant(W))
    before = str(graph)
    sg.optimize_for(graph, Packing())
    graph.verify()
    assert str(graph) == before
    assert not graph.parameters


def test_constants_that_no_region_takes_stay_nodes() -> None:
    x = sg.input("x", ("N", 4))
    h = ops.MatMul(x, constant(W, "a"))
    graph = sg.Graph([x], [ops.Add(h, constant(np.ones(4, np.float32), "b"))], name="two")
    cut = sg.optimize_for(graph, Packing())
    assert [node.name for node in cut.nodes] == ["packed_0", "b", "Add_0"]
    assert list(cut.parameters) == ["a"]
    cut.verify()
    untouched = sg.optimize_for(graph, sg.ContainOpSelector({"Conv"}))
    assert str(untouched) == str(graph)


def test_a_constant_of_a_region_and_of_others_is_one_weight() -> None:
    x = sg.input("x", ("N", 4))
    c = constant(W)
    graph = sg.Graph([x], [ops.Add(ops.MatMul(x, c), ops.Sin(c))], name="shared")
    graph.inputs[0].type = sg.TensorType("float32", (4, 4))
    cut = sg.optimize_for(graph, Packing())
    check_partition(graph, cut)
    assert "Constant" not in [node.op_type for node in cut.nodes]
    cut.parameters["c"].assign(np.eye(4, dtype=np.float32))
    eye = np.eye(4, dtype=np.float32)
    np.testing.assert_allclose(run(cut, eye), eye + np.sin(eye), rtol=1e-6)


def test_large_weights_computed_from_constants_are_folded() -> None:
    x = sg.input("x", ("N", 600))
    fill = np.array([0.5], np.float32)
    shape = sg.parameter("shape", np.array([600, 600], np.int64))
    filled = ops.ConstantOfShape(shape, value=fill)
    half = np.arange(600 * 600, dtype=np.float16).reshape(600, 600) / np.float16(1000)
    cast = ops.Transpose(ops.Cast(constant(half), to=1), perm=[1, 0])
    graph = sg.Graph([x], [ops.MatMul(ops.MatMul(x, filled), cast)], name="large")
    cut = sg.optimize_for(graph, Packing())
    check_partition(graph, cut)
    assert [node.op_type for node in cut.nodes] == ["_subgraph_op"] * 2
    arrays = [p.array for p in cut.parameters.values()]
    np.testing.assert_array_equal(arrays[0], np.full((600, 600), 0.5, np.float32))
    np.testing.assert_array_equal(arrays[1], half.astype(np.float32).T)
    assert all(array.nbytes > 1 << 20 for array in arrays)


def test_what_follows_from_weights_is_not_folded() -> None:
    # It has to follow an assignment to the weight.
    w = sg.parameter("w", W)
    graph = network(ops.Transpose(w))
    assert not regions(sg.optimize_for(graph, Packing()))
    x = sg.input("x", (2, 4))
    shaped = ops.Reshape(w, sg.parameter("shape", np.array([4, 4], np.int64)))
    graph = sg.Graph([x], [ops.MatMul(x, shaped)])
    assert not regions(sg.optimize_for(graph, Packing()))


def test_what_is_random_is_not_folded() -> None:
    x = sg.input("x", (2, 4))
    noise = ops.RandomNormalLike(constant(W))
    assert not regions(sg.optimize_for(sg.Graph([x], [ops.MatMul(x, noise)]), Packing()))


class WeightedLayers(sg.SubgraphSelector):
    """Convolutions and products by weights."""

    def select(self, node: sg.Node) -> bool:
        value = node.inputs[1] if len(node.inputs) > 1 else None
        by_weight = value is not None and value.parameter is not None
        return by_weight and node.op_type in ("Conv", "Gemm", "MatMul")


def test_a_network_whose_weights_are_computed() -> None:
    graph = sg.load(LIGHT / "light_resnet50.onnx")
    cut = sg.optimize_for(graph, WeightedLayers)
    found = [inner.op_type for node in regions(cut) for inner in (node.subgraph or cut).nodes]
    assert sorted(found) == ["Conv"] * 53 + ["Gemm"]
    for node in regions(cut):
        assert node.subgraph is not None
        assert all(value.parameter is not None for value in node.subgraph.inputs[1:])
    check_partition(graph, cut)


def test_selectors_are_not_asked_about_constants() -> None:
    asked: list[str] = []

    class Everything(sg.SubgraphSelector):
        def select(self, node: sg.Node) -> bool:
            asked.append(node.op_type)
            return True

        def select_input(self, node: sg.Node, input_node: sg.Node) -> bool:
            asked.append(input_node.op_type)
            return True

    cut = sg.optimize_for(network(constant(W)), Everything)
    assert "Constant" not in asked
    assert [node.op_type for node in cut.nodes] == ["_subgraph_op", "_subgraph_op"]
    x = sg.input("x", (4,))
    alone = sg.Graph([x], [ops.Relu(x), constant(W)])
    assert not regions(sg.optimize_for(alone, sg.ContainOpSelector({"Constant"})))


def test_a_constant_that_the_graph_gives_stays() -> None:
    x = sg.input("x", ("N", 4))
    c = constant(W)
    graph = sg.Graph([x], [ops.MatMul(x, c), c], name="given")
    cut = sg.optimize_for(graph, sg.ContainOpSelector({"MatMul"}))
    check_partition(graph, cut, inputs=[ARRAY])
    assert cut.outputs[1].producer is not None
    assert cut.outputs[1].producer.op_type == "Constant"


def test_options_may_name_a_constant() -> None:
    graph = network(constant(W))
    options: dict[str, Any]
    for options in ({"include": ["c"]}, {"exclude": ["c"]}):
        cut = sg.optimize_for(graph, sg.ContainOpSelector({"MatMul"}), **options)
        check_partition(graph, cut, inputs=[ARRAY])
        assert not cut.parameters


def test_constants_in_bodies_and_names_that_are_taken() -> None:
    x, flag = sg.input("x", (2, 4)), sg.input("flag", (), "bool")
    outer = sg.parameter("c", W)

    def branch(array: Array) -> sg.Graph:
        return sg.Graph(outputs=[ops.MatMul(sg.capture(x), constant(array))])

    choice = ops.If(flag, then_branch=branch(W * 2), else_branch=branch(W * 3), name="choice")
    graph = sg.Graph([x, flag], [ops.MatMul(choice, outer)], name="choices")
    cut = sg.optimize_for(graph, Packing())
    check_partition(graph, cut)
    assert sorted(cut.parameters) == ["c", "c_1", "c_2"]
    model = sg.compile_model(cut, "REFERENCE")
    for value, factor in ((True, 2), (False, 3)):
        got = model({"x": ARRAY, "flag": np.array(value)})[0]
        np.testing.assert_allclose(got, ARRAY @ (W * factor) @ W, rtol=1e-5)


def branches(
    weight: sg.Value, other: sg.Value | None = None, y: sg.Value | None = None
) -> sg.Graph:
    """Return a graph of one If: a product by a captured weight, or a sum with another value.

    If there is an input ``y``, the graph also returns its product by the weight.
    """
    x, flag = sg.input("x", (2, 4)), sg.input("flag", (), "bool")
    then = sg.Graph(outputs=[ops.MatMul(sg.capture(x), sg.capture(weight))], name="then")
    value = ops.Sin(sg.capture(weight if other is None else other))
    orelse = sg.Graph(outputs=[ops.Add(sg.capture(x), ops.ReduceSum(value))], name="else")
    choice = ops.If(flag, then_branch=then, else_branch=orelse, name="choice")
    if y is None:
        return sg.Graph([x, flag], [choice], name="branches")
    return sg.Graph([x, flag, y], [choice, ops.MatMul(y, weight)], name="branches")


def run_branches(graph: sg.Graph) -> list[Array]:
    model = sg.compile_model(graph, "REFERENCE")
    return [model({"x": ARRAY, "flag": np.array(flag)})[0] for flag in (True, False)]


def check_branches(graph: sg.Graph, cut: sg.Graph, count: int = 1) -> None:
    """Check a partition of `branches`, its regions and its results before and after a new weight.

    Args:
        graph: The graph.
        cut: Its partition.
        count: How many regions have the weight "c".
    """
    check_partition(graph, cut)
    made = [node for level in cut.levels() for node in regions(level)]
    inner = [node.subgraph.inputs[1].parameter for node in made if node.subgraph is not None]
    assert inner == [cut.parameters["c"]] * count
    for expected, got in zip(run_branches(graph), run_branches(cut), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    model = sg.compile_model(cut, "REFERENCE")
    feed = {"x": ARRAY, "flag": np.array(True)}
    model(feed)
    model.parameters["c"].assign(W * 2)
    np.testing.assert_allclose(model(feed)[0], ARRAY @ (W * 2), rtol=1e-6)
    again = sg.optimize_for(cut, Packing())
    assert sg.print_graph(again) == sg.print_graph(cut)


@pytest.mark.parametrize("make", [constant, sg.parameter])
def test_what_a_body_captures_is_a_weight_too(make: Any) -> None:
    weight = constant(W, "c") if make is constant else sg.parameter("c", W)
    graph = branches(weight)
    before = str(graph)
    cut = sg.optimize_for(graph, Packing())
    assert str(graph) == before
    check_branches(graph, cut)
    assert "Constant" not in [node.op_type for node in cut.nodes]


def test_a_body_and_the_graph_around_share_a_weight() -> None:
    graph = branches(constant(W), y=sg.input("y", ("N", 4)))
    cut = sg.optimize_for(graph, Packing())
    check_partition(graph, cut)
    assert list(cut.parameters) == ["c"]
    used = [node.subgraph for level in cut.levels() for node in regions(level)]
    assert [inner and inner.inputs[1].parameter for inner in used] == [cut.parameters["c"]] * 2


def test_a_capture_that_no_region_takes_stays_one() -> None:
    a, b = constant(W, "c"), constant(W * 2, "d")
    graph = branches(a, b)
    cut = sg.optimize_for(graph, Packing())
    check_branches(graph, cut)
    assert [node.op_type for node in cut.nodes] == ["Constant", "If"]
    assert [value.name for value in cut.nodes[1].captures] == ["x", "d", "x"]
    untouched = sg.optimize_for(graph, sg.ContainOpSelector({"Conv"}))
    assert str(untouched) == str(graph)


def test_a_weight_of_a_body_of_a_body() -> None:
    x, flag = sg.input("x", (2, 4)), sg.input("flag", (), "bool")
    c = constant(W)
    seen, middle = sg.capture(x), sg.capture(c)
    then = sg.Graph(outputs=[ops.MatMul(sg.capture(seen), sg.capture(middle))], name="deep")
    orelse = sg.Graph(outputs=[ops.Relu(sg.capture(seen))], name="deep_else")
    inner = ops.If(sg.capture(flag), then_branch=then, else_branch=orelse)
    choice = ops.If(
        flag,
        then_branch=sg.Graph(outputs=[inner], name="then"),
        else_branch=sg.Graph(outputs=[ops.Neg(sg.capture(x))], name="else"),
    )
    graph = sg.Graph([x, flag], [choice], name="nested")
    check_branches(graph, sg.optimize_for(graph, Packing()))


def test_a_weight_that_a_body_computes_from_a_capture() -> None:
    x, flag = sg.input("x", (2, 4)), sg.input("flag", (), "bool")
    transposed = ops.Transpose(sg.capture(constant(W)), name="transposed")
    then = sg.Graph(outputs=[ops.MatMul(sg.capture(x), transposed)], name="then")
    orelse = sg.Graph(outputs=[ops.Neg(sg.capture(x))], name="else")
    choice = ops.If(flag, then_branch=then, else_branch=orelse)
    graph = sg.Graph([x, flag], [choice], name="transposing")
    cut = sg.optimize_for(graph, Packing())
    check_partition(graph, cut)
    (weight,) = cut.parameters.values()
    np.testing.assert_array_equal(weight.array, W.T)
    for expected, got in zip(run_branches(graph), run_branches(cut), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_captured_constant_that_a_body_returns() -> None:
    x, flag = sg.input("x", (4, 4)), sg.input("flag", (), "bool")
    c = constant(W)
    then = sg.Graph(outputs=[ops.MatMul(sg.capture(x), sg.capture(c))], name="then")
    orelse = sg.Graph(outputs=[sg.capture(c)], name="else")
    choice = ops.If(flag, then_branch=then, else_branch=orelse)
    graph = sg.Graph([x, flag], [choice], name="returning")
    cut = sg.optimize_for(graph, Packing())
    check_partition(graph, cut)
    model = sg.compile_model(cut, "REFERENCE")
    eye = np.eye(4, dtype=np.float32) * 3
    np.testing.assert_allclose(model({"x": eye, "flag": np.array(True)})[0], W * 3, rtol=1e-6)
    np.testing.assert_array_equal(model({"x": eye, "flag": np.array(False)})[0], W)


def test_the_outputs_of_a_split_are_weights() -> None:
    x = sg.input("x", ("N", 4))
    both = constant(np.concatenate([W, W * 2]), "both")
    first, second = ops.Split(both, axis=0, num_outputs=2, outputs=2)
    graph = sg.Graph([x], [ops.MatMul(ops.MatMul(x, first), second)], name="split")
    cut = sg.optimize_for(graph, Packing())
    check_partition(graph, cut, inputs=[ARRAY])
    assert [node.op_type for node in cut.nodes] == ["_subgraph_op"] * 2
    arrays = [parameter.array for parameter in cut.parameters.values()]
    np.testing.assert_array_equal(arrays, [W, W * 2])


def test_a_split_with_other_users() -> None:
    x = sg.input("x", ("N", 4))
    for follow in (ops.Sin, ops.Transpose, ops.Identity):
        both = constant(np.concatenate([W, W * 2]), "both")
        first, second = ops.Split(both, axis=0, num_outputs=2, outputs=2)
        other = ops.ReduceSum(follow(second))
        graph = sg.Graph([x], [ops.Add(ops.MatMul(x, first), other)], name="split")
        cut = sg.optimize_for(graph, Packing())
        check_partition(graph, cut, inputs=[ARRAY])
        assert len(regions(cut)) == 1
        assert not {"Constant", "Split"} & {node.op_type for node in cut.nodes}
    first, second = ops.Split(constant(np.stack([W, W])), axis=0, num_outputs=2, outputs=2)
    product = ops.MatMul(x, ops.Squeeze(first))
    given = sg.Graph([x], [product, second], name="given")
    cut = sg.optimize_for(given, sg.ContainOpSelector({"MatMul"}))
    check_partition(given, cut, inputs=[ARRAY])
    assert [node.op_type for node in cut.nodes] == ["Constant", "Split", "_subgraph_op"]


class AsNodes(SelectorProperty):
    """Takes constants as nodes of its regions."""

    constant_weights = False


def test_properties_that_see_constants_differently() -> None:
    x = sg.input("x", ("N", 4))
    h = ops.Relu(ops.Relu(x))
    h = ops.Add(ops.MatMul(h, constant(W, "c")), constant(ARRAY[:1], "d"))
    graph = sg.Graph([x], [h], name="properties")
    weights = SelectorProperty(sg.ContainOpSelector({"Relu", "MatMul"}))
    nodes = AsNodes(sg.ContainOpSelector({"Constant", "Add"}))
    for order in ([weights, nodes], [nodes, weights], [weights, nodes, weights]):
        cut = sg.optimize_for(graph, order)
        check_partition(graph, cut, inputs=[ARRAY])
        inner = {tuple(n.op_type for n in r.subgraph.nodes) for r in regions(cut) if r.subgraph}
        assert ("Constant", "Add") in inner, order
        assert sum("MatMul" in types for types in inner) == 1


def test_several_properties_share_a_constant() -> None:
    x = sg.input("x", ("N", 4))
    c = constant(W)
    graph = sg.Graph([x], [ops.MatMul(ops.Relu(ops.Add(x, ops.ReduceSum(c))), c)], name="shared")
    both = [sg.ContainOpSelector({"Add", "ReduceSum"}), Packing()]
    cut = sg.optimize_for(graph, both)
    check_partition(graph, cut, inputs=[ARRAY])
    again = sg.optimize_for(cut, both)
    assert str(again) == str(cut)


def test_a_file_keeps_it_a_weight(tmp_path: Path) -> None:
    cut = sg.optimize_for(network(constant(W)), sg.ContainOpSelector({"MatMul"}))
    sg.save(cut, tmp_path / "cut.onnx")
    loaded = sg.load(tmp_path / "cut.onnx")
    (region,) = regions(loaded)
    assert region.subgraph is not None
    assert region.subgraph.inputs[1].parameter is loaded.parameters["c"]
    np.testing.assert_array_equal(run(loaded), run(network(constant(W))))


def with_constants(graph: sg.Graph) -> sg.Graph:
    """Return the graph with every parameter a Constant node."""
    copy = graph.clone()
    values = [v for v in copy.values() if v.parameter is not None and v not in copy.inputs]
    copy.rewire({v: constant(v.parameter.array, v.name) for v in values if v.parameter})
    return copy


@quick
@given(data=st.data())
def test_random_graphs_of_constants(data: st.DataObject) -> None:
    graph = with_constants(data.draw(graphs()))
    strategy = data.draw(st.sampled_from(["selector", "hetero"]))
    owner = SelectorProperty(data.draw(selectors()))
    before = str(graph)
    cut = sg.optimize_for(graph, owner, strategy=strategy)
    assert str(graph) == before
    check_partition(graph, cut, inputs=feeds(graph))
    for node in regions(cut):
        given_values = [v for v in node.inputs if v is not None and v.producer is not None]
        assert not [v for v in given_values if v.producer and v.producer.op_type == "Constant"]
    again = sg.optimize_for(cut, owner, strategy=strategy)
    assert sg.print_graph(again) == sg.print_graph(cut)
    back = passes.apply_pass(sg.inline_subgraphs(cut), "DeadCodeElimination")
    assert [v.name for v in back.outputs] == [v.name for v in graph.outputs]


@pytest.mark.parametrize("wrong", [W + 1, W.T])
def test_the_check_finds_another_weight(wrong: Array) -> None:
    graph = network(constant(W))
    other = sg.optimize_for(network(constant(np.ascontiguousarray(wrong))), Packing())
    with pytest.raises(sg.PartitionError, match="invariant 7"):
        check_partition(graph, other)


def test_the_check_finds_another_weight_of_a_body() -> None:
    graph = branches(constant(W))
    other = sg.optimize_for(branches(constant(W + 1)), Packing())
    with pytest.raises(sg.PartitionError, match="invariant 7"):
        check_partition(graph, other)
    of_weights, copied = (sg.optimize_for(branches(constant(W)), Packing()) for _ in range(2))
    check_partition(graph, of_weights)
    with pytest.raises(sg.PartitionError, match="invariant 7"):  # another Parameter of equal value
        check_partition(of_weights, copied)
