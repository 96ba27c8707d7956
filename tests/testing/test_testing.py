"""check_partition notices every broken invariant; strategies draw graphs that run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import subgraph as sg
from subgraph import ops
from subgraph.graph.graph import Node, copy_nodes, copy_value
from subgraph.graph.types import numpy_dtype
from subgraph.partition.property import SelectorProperty
from subgraph.partition.record import KEY
from subgraph.partition.replace import Cut, Cutter, replace_regions
from subgraph.testing import check_partition, feeds, graphs, selectors, topologies
from subgraph.testing.checks import other_weights
from subgraph.testing.graph_templates import TEMPLATES
from tests.support.small_network import ladder

quick = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)


def cut_into(graph: sg.Graph, *regions: str) -> sg.Graph:
    """Cut these regions (node names, one letter each) without any question."""
    cuts: list[Cut] = []
    for number, names in enumerate(regions):
        members = [node for node in graph.nodes if node.name in names]
        piece = Cutter(graph).cut_out(members, f"r{number}")
        assert piece is not None
        cuts.append(Cut(members, piece, sg.subgraph_node(piece.inner, inputs=piece.inputs)))
    return replace_regions(graph, cuts)[0]


def test_right_partitions_pass() -> None:
    graph = ladder()
    for regions in (("ab",), ("ac", "df"), ("abcdefg",), ("a", "b", "c")):
        if regions == ("ab",):
            continue
        check_partition(graph, cut_into(graph, *regions), inputs=feeds(graph))
    check_partition(graph, graph.clone())


def test_a_region_that_is_not_connected() -> None:
    graph = ladder()
    with pytest.raises(sg.PartitionError, match=r"invariant 2: .*'r0' is not connected"):
        check_partition(graph, cut_into(graph, "ab"))


def pretend(graph: sg.Graph, *regions: str) -> list[Any]:
    """Return what the order check says to regions that no graph could hold."""
    from subgraph.testing import invariants

    checker = invariants._Checker(graph, graph, {})  # pyright: ignore[reportPrivateUsage]
    for number, names in enumerate(regions):
        holder = sg.Node("_subgraph_op", name=f"r{number}", subgraph=sg.Graph())
        for node in graph.nodes:
            if node.name in names:
                checker._region[node] = holder  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(sg.PartitionError) as caught:
        checker._check_order()  # pyright: ignore[reportPrivateUsage]
    return [str(caught.value)]


def test_regions_that_are_not_convex_or_wait_for_each_other() -> None:
    assert (
        "invariant 3: region 'r0' is not convex: 'r0' -> 'c' -> 'r0'" in pretend(ladder(), "ad")[0]
    )
    x = sg.input("x", (4,))
    a1, b1 = ops.Sin(x, name="A"), ops.Cos(x, name="B")
    a2, b2 = ops.Sin(b1, name="C"), ops.Cos(a1, name="D")
    graph = sg.Graph([x], [a2, b2])
    (said,) = pretend(graph, "AC", "BD")
    assert said.startswith("invariant 4: regions wait for each other: ")


def test_a_graph_with_a_cycle_cannot_even_be_made() -> None:
    with pytest.raises(sg.ModelError, match="cycle"):
        cut_into(ladder(), "ad")


def change(**what: Any) -> Callable[[sg.Graph], sg.Graph]:
    """Return a function that rebuilds a graph with one thing changed."""

    def rebuild(graph: sg.Graph) -> sg.Graph:
        values: dict[sg.Value, sg.Value] = {}
        inputs = [copy_value(v, values) for v in graph.inputs]
        nodes = copy_nodes(graph.nodes, values)
        outputs = [copy_value(v, values) for v in graph.outputs]
        by_name = {node.name: node for node in nodes}
        if "op" in what:
            by_name["d"].op_type = what["op"]
        if "attr" in what:
            by_name["d"].attrs["alpha"] = what["attr"]
        if "name" in what:
            by_name["d"].name = what["name"]
        if "swap" in what:
            by_name["f"].inputs = by_name["f"].inputs[::-1]
        if "drop" in what:
            outputs = outputs[:-1]
            nodes = [node for node in nodes if node.name != "g"]
        if "gone" in what:
            by_name["f"].inputs = (by_name["c"].outputs[0],) * 2
            nodes = [node for node in nodes if node.name not in "de"]
        if "outputs" in what:
            outputs = outputs[::-1]
        if "other" in what:
            outputs[0].name, outputs[1].name = outputs[1].name, outputs[0].name
            outputs = outputs[::-1]
        return sg.Graph(inputs, outputs, graph.name, nodes=nodes)

    return rebuild


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"op": "Sinh"}, "invariant 7: node 'd' is now another operator"),
        ({"attr": 1.0}, "invariant 7: node 'd' has other attributes"),
        ({"name": "z"}, "invariant 1: node 'z' was not in the graph"),
        ({"swap": 1}, "invariant 7: input 0 of node 'f' is 'e', was 'd'"),
        ({"drop": 1}, "invariant 6: outputs were"),
        ({"gone": 1}, "invariant 7: input 0 of node 'f'"),
        ({"outputs": 1}, "invariant 6: outputs were"),
        ({"other": 1}, "invariant 7: output 'f' is now another value"),
    ],
)
def test_changes_are_noticed(what: dict[str, Any], says: str) -> None:
    graph = ladder()
    with pytest.raises(sg.PartitionError, match=says):
        check_partition(graph, change(**what)(graph))


def test_a_node_in_two_places() -> None:
    graph = ladder()
    cut = cut_into(graph, "ac")
    node = next(node for node in cut.nodes if node.subgraph)
    twice = sg.subgraph_node(cut_into(graph, "ac").node("r0").subgraph or sg.Graph(), name="again")
    twice.inputs = node.inputs
    for value in twice.outputs:
        value.name = f"{value.name}_again"
    broken = sg.Graph(cut.inputs, cut.outputs, nodes=[*cut.nodes, twice])
    with pytest.raises(sg.PartitionError, match=r"invariant 1: node .* is there twice"):
        check_partition(graph, broken)


@pytest.mark.parametrize("fused", [False, True])
def test_an_input_that_is_listed_twice(fused: bool) -> None:
    """The operands of a fused operator have positions, so that one value may be several of them."""
    x = sg.input("x", (3,))
    graph = sg.Graph([x], [ops.Add(x, ops.Exp(x, name="exp"), name="add")])
    left, right = sg.input("left", (3,)), sg.input("right", (3,))
    inner = sg.Graph([left, right], [ops.Add(left, ops.Exp(right, name="exp"), name="add")])
    outer = sg.input("x", (3,))
    node = sg.subgraph_node(inner, name="region", inputs=[outer, outer])
    if fused:
        node = Node(
            "FusedExp", [outer, outer], outputs=[sg.Value("sum")], name="region", subgraph=inner
        )
    node.outputs[0].name = graph.outputs[0].name
    cut = sg.Graph([outer], [node.outputs[0]], graph.name)
    if fused:
        check_partition(graph, cut)
    else:
        with pytest.raises(sg.PartitionError, match=r"invariant 6: .* an input twice"):
            check_partition(graph, cut)


def test_a_record_that_does_not_fit() -> None:
    graph = ladder()
    cut = sg.optimize_for(graph, sg.ContainOpSelector({"Tanh", "Sub"}))
    check_partition(graph, cut)
    run = cut.attrs[KEY].runs[0]
    run.region[run.number("f")] = -1
    with pytest.raises(sg.PartitionError, match=r"invariant 5: .* differs from the region"):
        check_partition(graph, cut)


@quick
@given(graphs(max_nodes=8))
def test_graphs_run_in_onnx_runtime(graph: sg.Graph) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    model = sg.to_onnx(graph).SerializeToString()
    inputs = feeds(graph)
    results = ort.InferenceSession(model, options, ["CPUExecutionProvider"]).run(None, inputs)
    for value, result in zip(graph.outputs, results, strict=True):
        assert isinstance(value.type, sg.TensorType)
        assert value.type.shape == np.shape(result)
        assert value.type.dtype == result.dtype.name


def test_every_template_is_drawn_and_static() -> None:
    seen: Counter[str] = Counter()

    @settings(quick, max_examples=800)  # a few templates need values that are rare
    @given(graphs(max_nodes=16))
    def draw(graph: sg.Graph) -> None:
        graph.verify()
        seen.update(node.op_type for node in graph.nodes)

    draw()
    assert set(TEMPLATES) - set(seen) == set()


def test_recipes_print_and_repeat() -> None:
    @quick
    @given(topologies(), selectors())
    def draw(graph: sg.Graph, recipe: Any) -> None:
        assert repr(recipe).endswith(f"({recipe.seed})")
        one, two = (str(sg.optimize_for(graph, SelectorProperty(recipe, "p"))) for _ in range(2))
        assert one == two

    draw()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_weights_of_every_float_are_changed(dtype: str) -> None:
    value = sg.parameter("w", np.ones(2).astype(numpy_dtype(dtype)))
    parameter = value.parameter
    assert parameter is not None
    with other_weights(sg.Graph([], [ops.Identity(value)])):
        assert parameter.array.dtype == numpy_dtype(dtype)
        assert parameter.array.astype(float).tolist() == [0.75, 0.75]
    assert parameter.array.astype(float).tolist() == [1, 1]


def test_the_public_names() -> None:
    for name in sg.testing.__all__:
        value = getattr(sg.testing, name)
        assert callable(value) or isinstance(value, dict), name
    assert set(dir(sg.testing)) == set(sg.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sg.testing.nothing  # noqa: B018


def test_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "subgraph.testing.checks")
    with pytest.raises(ImportError, match=r'pip install "subgraph-ml\[testing\]"'):
        sg.testing.check_property  # noqa: B018
