"""PartitionGraph: invariants on random graphs, strategies, options, bodies, hooks, failures."""

from __future__ import annotations

import random
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.partition.property import SelectorProperty
from subgraph.partition.replace import Cutter
from subgraph.testing import check_partition, feeds, graphs, selectors, topologies
from subgraph.testing.random_selectors import WELL_BEHAVED, Recipe

quick = settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)
STRATEGIES = ("selector", "hetero")


def example() -> sg.Graph:
    """Return the worked example of OpenVINO's wiki."""
    x = sg.input("x", (4,))
    n1 = ops.Relu(x, name="1")
    n2 = ops.Relu(n1, name="2")
    n3 = ops.Relu(n2, name="3")
    n4 = ops.Sin(n2, name="4")
    n5 = ops.Add(n3, n4, name="5")
    n6 = ops.Relu(n5, name="6")
    return sg.Graph([x], [ops.Relu(n6, name="7")], name="example")


def cut_by(graph: sg.Graph, *properties: Any, **options: Any) -> sg.Graph:
    return sg.optimize_for(graph, list(properties), **options)


def regions(graph: sg.Graph) -> list[list[str]]:
    return sorted(
        [inner.name for inner in node.subgraph.nodes]
        for node in graph.nodes
        if node.subgraph is not None
    )


MINE = sg.ContainOpSelector({"Relu", "Add"})
OTHER = sg.ContainOpSelector({"Sin"})


def test_the_worked_example_comes_out_exactly() -> None:
    graph = example()
    first = cut_by(graph, MINE, strategy="hetero")
    assert regions(first) == [["1", "2"], ["3", "5", "6", "7"]]
    both = cut_by(graph, MINE, OTHER, strategy="hetero")
    assert regions(both) == [["1", "2"], ["3", "5", "6", "7"], ["4"]]
    check_partition(graph, both, inputs=feeds(graph))


def test_strategy_selector_keeps_what_comes_first() -> None:
    graph = example()
    cut = cut_by(graph, MINE, OTHER)
    assert regions(cut) == [["1", "2", "3"], ["4"], ["5", "6", "7"]]
    check_partition(graph, cut, inputs=feeds(graph))


@quick
@given(topologies(), st.lists(selectors(), min_size=1, max_size=3), st.sampled_from(STRATEGIES))
def test_invariants_hold_for_random_topologies(
    graph: sg.Graph, recipes: list[Any], strategy: str
) -> None:
    before = str(graph)
    properties = [SelectorProperty(recipe, f"p{k}") for k, recipe in enumerate(recipes)]
    cut = cut_by(graph, *properties, strategy=strategy)
    assert str(graph) == before
    check_partition(graph, cut, inputs=feeds(graph), rtol=0, atol=0)
    assert str(cut_by(graph, *properties, strategy=strategy)) == str(cut)


@quick
@given(graphs(), selectors(), st.sampled_from(STRATEGIES))
def test_invariants_hold_for_graphs_of_real_operators(
    graph: sg.Graph, recipe: Any, strategy: str
) -> None:
    cut = cut_by(graph, SelectorProperty(recipe, "p"), strategy=strategy)
    check_partition(graph, cut, inputs=feeds(graph), rtol=0, atol=0)


@quick
@given(
    topologies(),
    selectors(),
    st.sampled_from(STRATEGIES),
    st.integers(1, 4),
    st.none() | st.integers(0, 4),
)
def test_partitioning_again_changes_nothing(
    graph: sg.Graph, recipe: Any, strategy: str, min_size: int, most: int | None
) -> None:
    options: dict[str, Any] = {
        "strategy": strategy,
        "min_size": min_size,
        "max_subgraphs": most,
    }
    cut = cut_by(graph, SelectorProperty(recipe, "p"), **options)
    check_partition(graph, cut)
    sizes = [len(members) for members in regions(cut)]
    assert all(size >= min_size for size in sizes)
    assert most is None or len(sizes) <= most
    assert str(cut_by(cut, SelectorProperty(recipe, "p"), **options)) == str(cut)


class Picky(sg.SubgraphProperty):
    """Refuses regions by the name of their first node."""

    def __init__(self, recipe: Any, seed: int) -> None:
        self.recipe = recipe
        self.seed = seed

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        made: sg.SubgraphSelector = self.recipe()
        return made

    def create_subgraph_node(
        self, subgraph: sg.Graph, subgraph_id: int
    ) -> sg.Node | sg.Reject | None:
        if random.Random(f"{self.seed}{subgraph.nodes[0].name}").random() < 0.4:
            return None
        return super().create_subgraph_node(subgraph, subgraph_id)


@quick
@given(topologies(), selectors(), st.integers(0, 99), st.sampled_from(STRATEGIES))
def test_invariants_hold_when_a_property_refuses_regions(
    graph: sg.Graph, recipe: Any, seed: int, strategy: str
) -> None:
    properties = [Picky(recipe, seed), Picky(recipe, seed + 1)]
    cut = cut_by(graph, *properties, strategy=strategy)
    check_partition(graph, cut, inputs=feeds(graph), rtol=0, atol=0)
    assert str(cut_by(cut, *properties, strategy=strategy)) == str(cut)


class Refusing(sg.SubgraphProperty):
    """Takes some operators, and refuses regions by the names of all their nodes."""

    def __init__(self, op_types: set[str], hooks: list[str] | None = None) -> None:
        self.name = "+".join(sorted(op_types))
        self.op_types = op_types
        self.hooks = hooks if hooks is not None else []

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector(self.op_types)

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node | None:
        names = "".join(sorted(node.name for node in subgraph.nodes))
        if random.Random(names).random() < 0.4:
            return None
        return sg.subgraph_node(subgraph)

    def pre_partition(self, graph: sg.Graph, options: Any) -> None:
        self.hooks.append(f"pre {self.name}")

    def post_partition(self, graph: sg.Graph) -> None:
        self.hooks.append(f"post {self.name}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_partitioning_again_changes_nothing_if_several_properties_refuse_regions(
    strategy: str,
) -> None:
    kinds = ("Relu", "Tanh", "Sin", "Neg", "Sum", "Max", "Mean")
    for seed in range(300):
        rng = random.Random(seed)
        graph = random_topology(seed)
        properties = [Refusing(set(rng.sample(kinds, rng.randint(2, 7)))) for _ in range(3)]
        cut = cut_by(graph, *properties, strategy=strategy)
        check_partition(graph, cut)
        assert str(cut_by(cut, *properties, strategy=strategy)) == str(cut), seed


def test_a_property_that_refused_a_region_is_asked_again_after_later_properties() -> None:
    class Small(Refusing):
        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node | None:
            return sg.subgraph_node(subgraph) if len(subgraph.nodes) < 3 else None

    hooks: list[str] = []
    x = sg.input("x", (4,))
    y = ops.Relu(ops.Sin(ops.Relu(x, name="a"), name="b"), name="c")
    graph = sg.Graph([x], [y])
    cut = cut_by(graph, Small({"Relu", "Sin"}, hooks), Small({"Sin"}, hooks))
    assert regions(cut) == [["a"], ["b"], ["c"]]
    assert hooks == ["pre Relu+Sin", "post Relu+Sin", "pre Sin", "post Sin", "post Relu+Sin"]


def random_topology(seed: int) -> sg.Graph:
    rng = random.Random(seed)
    x = sg.input("x", (4,))
    made: list[sg.Value] = []
    used: set[sg.Value] = set()
    reach = rng.choice([3, 6, 20])
    for number in range(rng.randint(1, 24)):
        near = made[-reach:]
        sources = rng.sample(near, min(len(near), rng.choice([0, 1, 1, 2, 2, 3])))
        unary = ("Relu", "Tanh", "Sin", "Neg")
        kind = rng.choice(unary if len(sources) < 2 else ("Sum", "Max", "Mean"))
        node = sg.Node(kind, sources or [x], name=f"n{number}", version=13)
        node.outputs[0].type = x.type
        used.update(sources)
        made.append(node.outputs[0])
    return sg.Graph([x], [v for v in made if v not in used])


def try_seed(seed: int) -> None:
    rng = random.Random(-seed)
    graph = random_topology(seed)
    properties = [
        SelectorProperty(Recipe(rng.choice(WELL_BEHAVED), rng.randrange(10**4)), f"p{i}")
        for i in range(rng.randint(1, 3))
    ]
    options: dict[str, Any] = {
        "strategy": rng.choice(STRATEGIES),
        "min_size": rng.choice([1, 1, 2]),
    }
    cut = cut_by(graph, *properties, **options)
    check_partition(graph, cut)
    assert str(cut_by(graph, *properties, **options)) == str(cut), seed


def test_a_thousand_seeds() -> None:
    for seed in range(1_000):
        try_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_ten_thousand_seeds(block: int) -> None:
    for seed in range(10_000 + block * 1_000, 10_000 + (block + 1) * 1_000):
        try_seed(seed)


def test_two_convex_regions_never_wait_for_each_other() -> None:
    x = sg.input("x", (4,))
    a1, b1 = ops.Sin(x, name="a1"), ops.Cos(x, name="b1")
    b2 = ops.Cos(a1, name="b2")
    a2 = ops.Sin(b1, name="a2")
    join_a = ops.Sin(ops.Add(a1, a2, name="a3"), name="a4")
    join_b = ops.Cos(ops.Add(b1, b2, name="b3"), name="b4")
    graph = sg.Graph([x], [join_a, join_b])

    class Side(sg.SubgraphSelector):
        def __init__(self, letter: str) -> None:
            self.letter = letter

        def select(self, node: sg.Node) -> bool:
            return node.name.startswith(self.letter)

        def select_input(self, node: sg.Node, input_node: sg.Node) -> bool:
            return self.select(input_node)

        def select_output(self, node: sg.Node, output_node: sg.Node) -> bool:
            return self.select(output_node)

    given = [SelectorProperty(partial(Side, letter), letter) for letter in "ab"]
    for strategy in STRATEGIES:
        cut = cut_by(graph, *given, strategy=strategy)
        check_partition(graph, cut, inputs=feeds(graph))
        assert len(regions(cut)) > 2


def test_min_size_max_subgraphs_include_exclude() -> None:
    graph = example()
    assert regions(cut_by(graph, MINE, min_size=3)) == [["1", "2", "3"], ["5", "6", "7"]]
    assert regions(cut_by(graph, MINE, min_size=4)) == []
    assert regions(cut_by(graph, MINE, strategy="hetero", max_subgraphs=1)) == [
        ["3", "5", "6", "7"]
    ]
    assert regions(cut_by(graph, MINE, max_subgraphs=0)) == []
    assert regions(cut_by(graph, MINE, include=["4"])) == [list("1234567")]
    assert regions(cut_by(graph, MINE, exclude="2")) == [["1"], ["3", "5", "6", "7"]]
    for strategy in STRATEGIES:
        assert regions(cut_by(graph, OTHER, strategy=strategy, include=["5"])) == [["4", "5"]]


def test_a_property_and_the_record_are_given_an_option_of_zero() -> None:
    seen: list[Any] = []

    class Mine(SelectorProperty):
        def pre_partition(self, graph: sg.Graph, options: Any) -> None:
            seen.append(dict(options))

    cut = cut_by(example(), Mine(MINE), max_subgraphs=0)
    assert seen == [{"max_subgraphs": 0}]
    assert cut.attrs["partition_record"].runs[0].options == {"max_subgraphs": 0}


def test_a_property_has_options_of_its_own() -> None:
    class Mine(sg.SubgraphProperty):
        strategy = "hetero"
        min_size = 3

        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return MINE

    graph = example()
    assert regions(cut_by(graph, Mine())) == [["3", "5", "6", "7"]]
    assert regions(cut_by(graph, Mine, min_size=1, strategy="selector")) == [
        ["1", "2", "3"],
        ["5", "6", "7"],
    ]


def test_inputs_and_outputs_once_and_weights_keep_their_parameter() -> None:
    x = sg.input("x", (2, 2))
    w = sg.parameter("w", np.ones((2, 2), np.float32))
    h = ops.MatMul(x, w, name="a")
    y = ops.Add(ops.MatMul(h, w, name="b"), h, name="c")
    graph = sg.Graph([x], [y, h])
    cut = cut_by(graph, sg.ContainOpSelector({"MatMul", "Add"}))
    (node,) = cut.nodes
    assert node.subgraph is not None
    assert [value.name for value in node.inputs if value] == ["x", "w"]
    assert node.subgraph.inputs[1].parameter is w.parameter
    assert node.inputs[1] is not None
    assert node.inputs[1].parameter is w.parameter
    assert [value.name for value in node.outputs] == [h.name, y.name]
    assert [value.name for value in cut.outputs] == [y.name, h.name]
    check_partition(graph, cut, inputs=feeds(graph))


def test_an_input_with_a_default_stays_an_input() -> None:
    parameter = sg.parameter("w", np.full(4, 2, np.float32)).parameter
    w = sg.Value("w", sg.TensorType("float32", (4,)), parameter=parameter)
    x = sg.input("x", (4,))
    graph = sg.Graph([x, w], [ops.Relu(ops.Mul(x, w))])
    cut = cut_by(graph, sg.ContainOpSelector({"Relu", "Mul"}))
    check_partition(graph, cut)
    inner = cut.nodes[0].subgraph
    assert inner is not None
    assert [value.parameter for value in inner.inputs] == [None, None]
    ones = np.ones(4, np.float32)
    model = sg.compile_model(cut, "REFERENCE")
    assert model({"x": ones})[0].tolist() == [2, 2, 2, 2]
    assert model({"x": ones, "w": 3 * ones})[0].tolist() == [3, 3, 3, 3]


def test_a_region_whose_results_nobody_uses_stays() -> None:
    x = sg.input("x", (4,))
    dead = ops.Sin(x, name="dead")
    graph = sg.Graph([x], [ops.Relu(x)], nodes=[dead.producer])
    cut = cut_by(graph, OTHER)
    assert [node.name for node in cut.nodes if node.subgraph is None] == ["dead", "Relu_0"]
    assert "nothing uses" in str(sg.explain(cut, "dead"))


def with_bodies() -> sg.Graph:
    x, flag = sg.input("x", (4,)), sg.input("flag", (), "bool")
    h = ops.Relu(x, name="h")
    w = sg.parameter("w", np.arange(4, dtype=np.float32))
    then = ops.Neg(ops.Add(sg.capture(h), w, name="add"), name="neg")
    inner_flag = sg.capture(flag)
    deep = ops.If(
        inner_flag,
        then_branch=sg.Graph(outputs=[ops.Neg(sg.capture(sg.capture(h)), name="deep")]),
        else_branch=sg.Graph(outputs=[ops.Abs(sg.capture(sg.capture(h)), name="flat")]),
        name="inner",
    )
    y = ops.If(
        flag,
        then_branch=sg.Graph(outputs=[then]),
        else_branch=sg.Graph(outputs=[deep]),
        name="choice",
    )
    return sg.Graph([x, flag], [ops.Relu(y, name="out")])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("flag", [True, False])
def test_bodies_are_partitioned_and_captures_become_inputs(strategy: str, flag: bool) -> None:
    graph = with_bodies()
    inputs = {"x": np.array([-1, 2, -3, 4], np.float32), "flag": np.array(flag)}
    cut = cut_by(graph, sg.ContainOpSelector({"Neg", "Add"}), strategy=strategy)
    check_partition(graph, cut, inputs=inputs)
    then, other = cut.node("choice").bodies
    assert regions(then) == [["add", "neg"]]
    (node,) = then.nodes
    assert [value.parameter is None for value in node.inputs if value] == [True, False]
    assert regions(other.node("inner").bodies[0]) == [["deep"]]
    whole = cut_by(graph, sg.ContainOpSelector({"If", "Relu"}), strategy=strategy)
    assert regions(whole) == [["h", "choice", "out"]]
    check_partition(graph, whole, inputs=inputs)
    assert "'add' (Add) is in subgraph" in str(sg.explain(cut, "add"))


def test_hooks_see_the_graph_and_may_replace_it() -> None:
    seen: list[Any] = []

    class Hooked(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return MINE

        def pre_partition(self, graph: sg.Graph, options: Any) -> sg.Graph:
            seen.append((len(graph.nodes), dict(options)))
            return passes.apply_pass(graph, "DeadCodeElimination")

        def post_partition(self, graph: sg.Graph) -> None:
            seen.append(len(graph.nodes))

    cut = cut_by(example(), Hooked(), min_size=2, color="red")
    assert seen == [(7, {"min_size": 2, "color": "red"}), len(cut.nodes)]


def test_the_attribute_holds_anything_that_means_a_property() -> None:
    sg.register_selector("test_mine", lambda: MINE)
    for held in (MINE, "test_mine", [MINE], (SelectorProperty(MINE), "test_mine")):
        graph = example()
        graph.attrs["subgraph_property"] = held
        assert len(regions(passes.apply_pass(graph, "PartitionGraph"))) == 2


def test_names_of_subgraph_nodes_stay_unique() -> None:
    class Same(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return MINE

        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
            return sg.subgraph_node(subgraph, name="4")

    cut = cut_by(example(), Same())
    assert sorted(node.name for node in cut.nodes) == ["4", "4_1", "4_2"]


def test_a_property_may_reorder_inputs_of_a_node_of_its_own() -> None:
    class Fused(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return sg.ContainOpSelector({"Sub"})

        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
            return sg.Node("Sub", subgraph.inputs[::-1], version=14, name="turned")

    x, y = sg.input("x", (4,)), sg.input("y", (4,))
    cut = cut_by(sg.Graph([x, y], [ops.Sub(x, y)]), Fused())
    assert [value.name for value in cut.node("turned").inputs if value] == ["y", "x"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "hetro"}, "did you mean 'hetero'"),
        ({"min_size": 0}, "min_size takes a whole number of at least 1, got 0"),
        ({"max_subgraphs": -1}, "at least 0, got -1"),
        ({"include": ["8"]}, "no such node"),
        ({"include": ["4"], "exclude": ["4"]}, "both in include and in exclude"),
        ({"mini_size": 2}, "no option 'mini_size'.*did you mean 'min_size'"),
        ({"Strategy": "hetero"}, "no option 'Strategy'.*did you mean 'strategy'"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(sg.PartitionError, match=says):
        cut_by(example(), MINE, **options)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "3 is no property"),
        ("no such thing", "no property or selector named"),
        (lambda: MINE, "is no property"),
    ],
)
def test_wrong_properties(given: Any, says: str) -> None:
    with pytest.raises(sg.PartitionError, match=says):
        sg.optimize_for(example(), given)


class Declares(sg.SubgraphProperty):
    options = ("precision", "tile_size")

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return MINE

    def pre_partition(self, graph: sg.Graph, options: Any) -> None:
        self.got.append(dict(options))


def test_declared_options_of_a_property() -> None:
    owner = Declares()
    cut_by(example(), owner, precision="int8", min_size=2)
    assert [options["precision"] for options in owner.got] == ["int8"]
    for name, near in (("min_sise", "min_size"), ("tilesize", "tile_size")):
        said = f"no option {name!r}.*'Declares', which declares.*did you mean {near!r}"
        with pytest.raises(sg.PartitionError, match=said):
            cut_by(example(), owner, **{name: 2})

    class Silent(Declares):
        options = None

    owner = Silent()
    cut_by(example(), owner, min_sise=2)  # nothing is known of its options
    assert owner.got == [{"min_sise": 2}]


def test_no_property_and_hooks_that_raise() -> None:
    with pytest.raises(sg.PartitionError, match=r"has no property: set graph.attrs"):
        passes.apply_pass(example(), "PartitionGraph")

    class Broken(sg.SubgraphProperty):
        def pre_partition(self, graph: sg.Graph, options: Any) -> None:
            raise ValueError("not today")

    with pytest.raises(sg.PartitionError, match="'Broken': pre_partition raised ValueError: not"):
        cut_by(example(), Broken())

    class NoSelector(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> Any:
            return "selector"

    with pytest.raises(sg.PartitionError, match="must give a SubgraphSelector"):
        cut_by(example(), NoSelector())


class Installed(sg.SubgraphProperty):
    """Refuses all regions."""

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return MINE

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> None:
        return None


def test_properties_of_other_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from subgraph.partition import property as module

    def points(group: str) -> list[metadata.EntryPoint]:
        value = f"{__name__}:Installed" if good else "no_such_module:Thing"
        return [metadata.EntryPoint("test_third_party", value, group)]

    good = True
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Installed=Installed))
    monkeypatch.setattr(metadata, "entry_points", points)
    module.PROPERTIES.names()
    discover = module._discover  # pyright: ignore[reportPrivateUsage]
    discover()
    try:
        assert regions(sg.optimize_for(example(), "test_third_party")) == []
        good = False
        with pytest.raises(sg.PartitionError, match=r"'test_third_party' \(entry point no"):
            discover()
    finally:
        module.PROPERTIES.unregister("test_third_party")


def test_values_of_one_parameter_are_one_input() -> None:
    kind = sg.TensorType("float32", (4,))
    weight = Parameter("w", np.ones(4, np.float32))
    x, first, second = Value("x", kind), *(Value("w", kind, parameter=weight) for _ in range(2))
    add = Node("Add", [x, first], version=13)
    multiply = Node("Mul", [add.outputs[0], second], version=13)
    graph = Graph([x], [Node("Sub", [multiply.outputs[0], first], version=13).outputs[0]])
    piece = Cutter(graph).cut_out(graph.nodes, "region")
    assert piece is not None
    piece.inner.verify()
    assert piece.inputs == [x, first]
    assert piece.inner.inputs[1].uses == list(piece.inner.nodes)
