"""Selectors: what they are asked and in which order, reasons, and every way to misbehave."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import subgraph as sg
from subgraph import ops
from subgraph.operators.schema import CUSTOM_SCHEMAS, Schema
from subgraph.partition.property import SelectorProperty
from subgraph.partition.selector import SELECTORS
from subgraph.testing import check_partition, misbehaving_selectors, topologies

quick = settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)


class Recording(sg.SubgraphSelector):
    """Takes everything but what ``no`` names, and writes down every question."""

    def __init__(self, log: list[tuple[str, ...]], no: set[tuple[str, ...]] | None = None) -> None:
        self.log = log
        self.no = no or set()

    def _answer(self, *question: str) -> bool:
        self.log.append(question)
        return question not in self.no

    def select(self, node: sg.Node) -> bool:
        return self._answer("select", node.name)

    def select_input(self, node: sg.Node, input_node: sg.Node) -> bool:
        return self._answer("input", node.name, input_node.name)

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool:
        return self._answer("output", node.name, output_node.name)

    def filter(self, candidates: list[sg.Node]) -> list[sg.Node]:
        self._answer("filter", *(node.name for node in candidates))
        return candidates


def literal(graph: sg.Graph) -> list[tuple[str, ...]]:
    """Write down MXNet's order of questions when every answer is yes."""
    place = {node: k for k, node in enumerate(graph.nodes)}
    log: list[tuple[str, ...]] = []
    taken: set[sg.Node] = set()
    for start in graph.nodes:
        if start in taken:
            continue
        log.append(("select", start.name))
        found = {start}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for other in node.predecessors():
                if other not in found:
                    log.append(("input", node.name, other.name))
                    found.add(other)
                    queue.append(other)
            for other in sorted(node.successors(), key=place.__getitem__):
                if other not in found:
                    log.append(("output", node.name, other.name))
                    found.add(other)
                    queue.append(other)
        log.append(("filter", *(n.name for n in graph.nodes if n in found)))
        taken |= found
    return log


@quick
@given(topologies())
def test_questions_come_breadth_first_producers_before_consumers(graph: sg.Graph) -> None:
    log: list[tuple[str, ...]] = []
    sg.optimize_for(graph, SelectorProperty(lambda: Recording(log)))
    assert log == literal(graph)


def fork() -> sg.Graph:
    x = sg.input("x", (4,))
    s = ops.Relu(x, name="s")
    a, b = ops.Tanh(s, name="a"), ops.Sin(s, name="b")
    return sg.Graph([x], [ops.Add(a, b, name="c")])


def test_a_node_refused_over_one_edge_is_asked_about_over_another() -> None:
    log: list[tuple[str, ...]] = []
    no: set[tuple[str, ...]] = {("output", "s", "b")}
    cut = sg.optimize_for(fork(), SelectorProperty(lambda: Recording(log, no)))
    assert log == [
        ("select", "s"),
        ("output", "s", "a"),
        ("output", "s", "b"),
        ("output", "a", "c"),
        ("input", "c", "b"),
        ("filter", "s", "a", "b", "c"),
    ]
    assert len(cut.nodes) == 1


def test_a_refused_node_cuts_off_what_lies_below_it() -> None:
    log: list[tuple[str, ...]] = []
    no = {("output", "s", "b"), ("input", "c", "b"), ("select", "b")}
    graph = fork()
    cut = sg.optimize_for(graph, SelectorProperty(lambda: Recording(log, no)))
    check_partition(graph, cut)
    inside = [[n.name for n in node.subgraph.nodes] for node in cut.nodes if node.subgraph]
    assert inside == [["s", "a"], ["c"]]


def test_a_residual_block_joins_though_its_addition_is_reached_first() -> None:
    # s -> 1 -> 2 -> 3 -> 4 -> add, s -> add; only downward edges are taken.
    x = sg.input("x", (4,))
    s = h = ops.Relu(x, name="s")
    for k in range(1, 6):
        h = ops.Tanh(h, name=f"t{k}")
    graph = sg.Graph([x], [ops.Neg(ops.Add(s, h, name="add"), name="end")])

    class Down(Recording):
        def select_input(self, node: sg.Node, input_node: sg.Node) -> bool:
            return False

    cut = sg.optimize_for(graph, SelectorProperty(lambda: Down([])))
    assert [node.subgraph is not None for node in cut.nodes] == [True]

    class ButOne(Down):
        def select_output(self, node: sg.Node, output_node: sg.Node) -> bool:
            return output_node.name != "t4"

        def select(self, node: sg.Node) -> bool:
            return node.name != "t4"

    log: list[tuple[str, ...]] = []
    cut = sg.optimize_for(graph, SelectorProperty(lambda: ButOne(log)))
    check_partition(graph, cut)
    inside = [[n.name for n in node.subgraph.nodes] for node in cut.nodes if node.subgraph]
    assert inside == [["s", "t1", "t2", "t3"], ["t5", "add", "end"]]


def test_upward_growth_from_the_end_keeps_the_start() -> None:
    graph = fork()
    no = {("select", "s"), ("select", "a"), ("select", "b"), ("input", "c", "b")}
    no |= {("output", "s", "b")}
    cut = sg.optimize_for(graph, SelectorProperty(lambda: Recording([], no)))
    check_partition(graph, cut)
    inside = [[n.name for n in node.subgraph.nodes] for node in cut.nodes if node.subgraph]
    assert inside == [["a", "c"]]


def test_every_start_has_a_fresh_selector_and_an_instance_is_reset() -> None:
    made: list[Recording] = []

    def make() -> Recording:
        made.append(Recording([]))
        return made[-1]

    graph = fork()
    sg.optimize_for(graph, SelectorProperty(make), exclude=["a", "b"])
    assert len(made) == 2

    class Once(sg.SubgraphSelector):
        used = False
        resets = 0

        def select(self, node: sg.Node) -> bool:
            first, self.used = not self.used, True
            return first

        def reset(self) -> None:
            Once.resets += 1
            self.used = False

    once = Once()
    cut = sg.optimize_for(graph, once)
    assert [node.subgraph is not None for node in cut.nodes] == [True] * 4
    assert Once.resets == 4
    assert not once.used


class Counting(sg.SubgraphSelector):
    """Takes the first node that it is asked about after a reset."""

    def __init__(self) -> None:
        self.resets = 0
        self.used = False

    def select(self, node: sg.Node) -> bool:
        first, self.used = not self.used, True
        return first

    def reset(self) -> None:
        self.resets += 1
        self.used = False


@pytest.mark.parametrize("strategy", ["selector", "hetero"])
def test_a_selector_that_a_property_gives_again_is_reset(strategy: str) -> None:
    selector = Counting()

    class Same(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return selector

    cut = sg.optimize_for(fork(), Same(), strategy=strategy)
    inside = [node.name for part in cut.nodes if part.subgraph for node in part.subgraph.nodes]
    assert sorted(inside) == sorted(node.name for node in fork().nodes)
    assert selector.resets == 3

    def broken(self: Counting) -> None:
        raise IndexError("no state")

    failing = type("Failing", (Counting,), {"reset": broken})()
    selector = failing
    with pytest.raises(sg.PartitionError, match=r"Failing\.reset raised IndexError: no state"):
        sg.optimize_for(fork(), Same(), strategy=strategy)


def test_a_selector_sees_dtypes_and_shapes() -> None:
    class Small(sg.SubgraphSelector):
        def select(self, node: sg.Node) -> bool:
            kind = node.outputs[0].type
            return kind == sg.TensorType("float32", (4,))

    assert all(node.subgraph for node in sg.optimize_for(fork(), Small).nodes)


def test_contain_op_selector() -> None:
    selector = sg.ContainOpSelector(["Conv", "my.domain::Twist"])
    assert repr(selector) == "ContainOpSelector({'Conv', 'my.domain::Twist'})"
    yes = [sg.Node("Conv"), sg.Node("Twist", domain="my.domain")]
    no = [sg.Node("Relu"), sg.Node("Conv", domain="my.domain"), sg.Node("Twist")]
    for node in yes:
        assert selector.select(node)
        assert selector.select_input(no[0], node)
        assert selector.select_output(no[0], node)
    for node in no:
        assert not selector.select(node)
        assert not selector.select_input(yes[0], node)
        assert not selector.select_output(yes[0], node)
    with pytest.raises(sg.PartitionError, match=r"write ContainOpSelector\(\{'Conv'\}\)"):
        sg.ContainOpSelector("Conv")
    for wrong in (3, {3}):
        with pytest.raises(sg.PartitionError, match="takes a set of operator names, got"):
            sg.ContainOpSelector(wrong)  # pyright: ignore[reportArgumentType]


class Misspelt(sg.SubgraphProperty):
    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Relu", "Convv"})


@pytest.mark.parametrize("prop", [sg.ContainOpSelector({"Relu", "Convv"}), Misspelt])
@pytest.mark.parametrize("strategy", ["selector", "hetero"])
def test_operators_that_do_not_exist(prop: Any, strategy: str) -> None:
    with pytest.raises(sg.PartitionError, match=r"'Convv', which is neither.*did you mean 'Conv'"):
        sg.optimize_for(fork(), prop, strategy=strategy)


def test_names_of_operators_that_a_selector_may_hold() -> None:
    def regions(graph: sg.Graph, *names: str) -> int:
        cut = sg.optimize_for(graph, sg.ContainOpSelector(names))
        return sum(node.subgraph is not None for node in cut.nodes)

    assert regions(fork(), "Relu", "_subgraph_op", "other.library::Convv", "Upsample", "Scatter")
    # One that nothing knows, but that the graph has: at the top, in a region, in a body.
    x = sg.Value("x", sg.TensorType("float32", (2,)))
    odd = sg.Node("TestOddOne", [x], name="odd")
    graph = sg.Graph([x], [odd.outputs[0]], name="g")
    assert regions(graph, "TestOddOne") == 1
    with pytest.raises(sg.PartitionError, match="did you mean 'TestOddOne'"):
        regions(graph, "TestOddTwo")
    # One of another domain is named with it.
    for name in ("Adam", "LinearRegressor", "BiasGelu"):
        with pytest.raises(sg.PartitionError, match=rf"write '[\w.]+::{name}', with its domain"):
            regions(graph, name)
    # A custom operator may be registered after the selector was made.
    late = sg.ContainOpSelector({"TestLateOne"})
    with pytest.raises(sg.PartitionError, match="'TestLateOne'"):
        sg.optimize_for(fork(), late)
    schema = Schema("TestLateOne")
    CUSTOM_SCHEMAS["", "TestLateOne"] = schema
    try:
        assert not any(node.subgraph for node in sg.optimize_for(fork(), late).nodes)
    finally:
        del CUSTOM_SCHEMAS["", "TestLateOne"]


def test_a_reject_is_false_and_knows_where_it_was_made() -> None:
    reject = sg.Reject("too large")
    assert not reject
    assert reject.reason == "too large"
    assert Path(reject.file).name == Path(__file__).name
    assert reject.line > 100
    assert "too large" in repr(reject)


def fork_selector() -> sg.SubgraphSelector:
    return sg.ContainOpSelector({"Relu"})


def test_registering() -> None:
    @sg.register_selector("test_decorated")
    class Decorated(sg.ContainOpSelector):
        def __init__(self) -> None:
            super().__init__({"Sin"})

    cut = sg.optimize_for(fork(), "test_decorated")
    assert [node.name for node in cut.nodes if node.subgraph] == ["test_decorated_0"]
    sg.register_selector("test_decorated", Decorated)
    with pytest.raises(sg.PartitionError, match=r"two owners: .*Decorated and .*fork_selector"):
        sg.register_selector("test_decorated", fork_selector)
    wrong: Any = 3
    with pytest.raises(sg.PartitionError, match="makes no selectors"):
        sg.register_selector("test_wrong", wrong)
    with pytest.raises(sg.PartitionError, match="did you mean 'test_decorated'"):
        sg.optimize_for(fork(), "test_decorate")


def test_registering_a_property_by_call() -> None:
    class Sines(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return sg.ContainOpSelector({"Sin"})

    assert sg.register_property("test_called", Sines) is Sines
    cut = sg.optimize_for(fork(), "test_called")
    assert [node.name for node in cut.nodes if node.subgraph] == ["test_called_0"]
    wrong: Any = 3
    with pytest.raises(sg.PartitionError, match="'test_wrong': 3 makes no properties"):
        sg.register_property("test_wrong", wrong)
    sg.register_selector("test_called", fork_selector)
    try:
        with pytest.raises(
            sg.PartitionError, match=r"a property \(.*Sines\) and a selector \(.*fork_selector\)"
        ):
            sg.optimize_for(fork(), "test_called")
    finally:
        SELECTORS.unregister("test_called")


@pytest.mark.parametrize("method", ["select", "select_input", "select_output", "filter"])
@pytest.mark.parametrize("strategy", ["selector", "hetero"])
def test_a_selector_that_raises_is_named_with_the_node(method: str, strategy: str) -> None:
    def broken(self: Any, *args: Any) -> bool:
        raise IndexError("tuple index out of range")

    kind = type("Broken", (Recording,), {method: broken})
    graph = fork()
    before = str(graph)
    if strategy == "hetero" and method.startswith("select_"):
        sg.optimize_for(graph, SelectorProperty(lambda: kind([])), strategy=strategy)
        return
    no = {("output", "s", "a")} if method == "select_input" else set[tuple[str, ...]]()
    with pytest.raises(sg.PartitionError, match=rf"Broken\.{method} raised IndexError") as caught:
        sg.optimize_for(graph, SelectorProperty(lambda: kind([], no)), strategy=strategy)
    assert isinstance(caught.value.__cause__, IndexError)
    assert "node '" in str(caught.value)
    assert str(graph) == before


@pytest.mark.parametrize("method", ["select", "select_input", "select_output"])
@pytest.mark.parametrize("strategy", ["selector", "hetero"])
@pytest.mark.parametrize("given", ["no", str.isalpha, np.ones(1), [], 1.0, 1, 0, None])
def test_an_answer_that_is_neither_yes_nor_no(given: Any, method: str, strategy: str) -> None:
    kind = type("Vague", (Recording,), {method: lambda *_: given})
    graph = fork()
    if strategy == "hetero" and method != "select":
        return
    no = {("output", "s", "a")} if method == "select_input" else set[tuple[str, ...]]()
    with pytest.raises(
        sg.PartitionError, match=rf"Vague\.{method} answered .*True, False or a.*node '"
    ):
        sg.optimize_for(graph, SelectorProperty(lambda: kind([], no)), strategy=strategy)


@pytest.mark.parametrize(
    ("given", "means"), [(np.True_, True), (np.False_, False), (sg.Reject("no"), False)]
)
def test_answers_that_are_as_good_as_yes_or_no(given: Any, means: bool) -> None:
    kind = type("Near", (Recording,), {"select": lambda *_: given})
    cut = sg.optimize_for(fork(), SelectorProperty(lambda: kind([])))
    assert any(node.subgraph for node in cut.nodes) == means


def test_candidates_that_were_not_offered() -> None:
    class Foreign(Recording):
        def filter(self, candidates: list[sg.Node]) -> list[Any]:
            return [*candidates, "b"]

    with pytest.raises(sg.PartitionError, match=r"Foreign\.filter gave 'b'; it must return"):
        sg.optimize_for(fork(), SelectorProperty(lambda: Foreign([])))


@quick
@given(topologies(max_nodes=12), misbehaving_selectors())
def test_misbehaving_selectors_end_in_one_error_or_a_right_partition(
    graph: sg.Graph, recipe: Any
) -> None:
    before = str(graph)
    for strategy in ("selector", "hetero"):
        said = ""
        try:
            cut = sg.optimize_for(graph, SelectorProperty(recipe, "p"), strategy=strategy)
        except sg.PartitionError as error:
            said = str(error)
        else:
            check_partition(graph, cut)
        assert not said or f"selector {type(recipe()).__name__}." in said
        assert str(graph) == before


def test_a_region_keeps_what_is_near_its_start() -> None:
    # Each layer: h -> Softmax -> Mul(., scale) + h; the scales are made of weights, listed first.
    x = sg.input("x", (4,))
    scales = [
        ops.Neg(sg.parameter(f"w{k}", np.ones(4, np.float32)), name=f"scale{k}") for k in range(4)
    ]
    h = x
    for k, scale in enumerate(scales):
        soft = ops.Softmax(ops.Relu(h, name=f"in{k}"), name=f"soft{k}")
        h = ops.Add(ops.Mul(soft, scale, name=f"mul{k}"), h, name=f"add{k}")
    nodes = [scale.producer for scale in scales]
    graph = sg.Graph([x], [h], nodes=nodes)
    assert [node.name for node in graph.nodes[:4]] == [f"scale{k}" for k in range(4)]
    cut = sg.optimize_for(graph, sg.ContainOpSelector({"Neg", "Relu", "Mul", "Add"}))
    check_partition(graph, cut)
    inside = [{n.name for n in node.subgraph.nodes} for node in cut.nodes if node.subgraph]
    assert {"scale3", "mul3", "add3"} in inside
    assert len(inside) == 5


def test_nodes_forced_in_stay_in() -> None:
    """Neither a filter nor the smallest size nor the cap drops what include names."""

    class Nothing(sg.SubgraphSelector):
        def select(self, node: sg.Node) -> bool:
            return True

        def filter(self, candidates: list[sg.Node]) -> list[sg.Node]:
            return []

    x = sg.input("x", (4,))
    a = ops.Relu(ops.Sin(ops.Relu(ops.Relu(x, name="a"), name="b"), name="c"), name="d")
    graph = sg.Graph([x], [a])

    def regions(selector: Any, **options: Any) -> list[list[str]]:
        cut = sg.optimize_for(graph, selector, **options)
        return [[n.name for n in node.subgraph.nodes] for node in cut.nodes if node.subgraph]

    for strategy in ("selector", "hetero"):
        assert regions(Nothing, include=["c"], strategy=strategy) == [["c"]]
        relu = sg.ContainOpSelector({"Relu"})
        assert regions(relu, include=["d"], min_size=2, strategy=strategy) == [["a", "b"], ["d"]]
        kept = regions(relu, include=["d"], max_subgraphs=1, strategy=strategy)
        assert kept == [["d"]]


def test_a_property_that_cannot_be_made_or_refuses_the_graph() -> None:
    class Demanding(sg.SubgraphProperty):
        def __init__(self, memory: int) -> None:
            self.memory = memory

        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return sg.ContainOpSelector({"Relu"})

        def pre_partition(self, graph: sg.Graph, options: Any) -> Any:
            return sg.Reject("too large") if self.memory < 9 else None

    x = sg.input("x", (4,))
    graph = sg.Graph([x], [ops.Relu(x)], "net")
    with pytest.raises(sg.PartitionError, match=r"Demanding.*'memory'; what takes arguments"):
        sg.optimize_for(graph, Demanding)
    with pytest.raises(sg.PartitionError, match=r"refused graph 'net': too large \(.*py:\d+\)"):
        sg.optimize_for(graph, Demanding(8))
    assert sg.optimize_for(graph, Demanding(9)).nodes[0].subgraph is not None

    class Absent(Demanding):
        def __init__(self) -> None:
            raise sg.DeviceError("cuBoard is not installed: pip install cuboard")

    with pytest.raises(sg.DeviceError, match=r"^cuBoard is not installed: pip install cuboard\n"):
        sg.optimize_for(graph, Absent)


@pytest.mark.parametrize("strategy", ["selector", "hetero"])
def test_a_filter_may_refuse_all_with_a_reason(strategy: str) -> None:
    class Wary(sg.ContainOpSelector):
        def filter(self, candidates: list[sg.Node]) -> Any:
            return sg.Reject("two do not pay") if len(candidates) == 2 else candidates

    x = sg.input("x", (4,))
    a = ops.Relu(ops.Relu(x, name="a"), name="b")
    graph = sg.Graph([x], [ops.Relu(ops.Sin(a, name="s"), name="c")])
    cut = sg.optimize_for(graph, Wary({"Relu"}), strategy=strategy)
    sg.testing.check_partition(graph, cut)
    assert sg.explain(cut, "c").subgraph is not None
    told = str(sg.explain(cut, "a"))
    assert "filter" in told
    assert "two do not pay" in told
    assert "test_selectors.py:" in told
    forced = sg.optimize_for(graph, Wary({"Relu"}), strategy=strategy, include=["b"])
    assert sg.explain(forced, "b").subgraph != sg.explain(forced, "a").subgraph


def test_a_filter_that_gives_no_list() -> None:
    for answer in (None, "b", [5]):

        class Wrong(sg.SubgraphSelector):
            answer: Any = None

            def select(self, node: sg.Node) -> bool:
                return True

            def filter(self, candidates: list[sg.Node]) -> list[sg.Node]:
                return self.answer

        Wrong.answer = answer
        x = sg.input("x", (4,))
        with pytest.raises(sg.PartitionError, match="it must return a list of those nodes"):
            sg.optimize_for(sg.Graph([x], [ops.Relu(x)]), Wrong)


class Budget(sg.SubgraphSelector):
    """Takes three nodes, downwards, and never one whose name begins with "no"."""

    left = 3

    def _takes(self, node: sg.Node) -> bool:
        if node.name.startswith("no") or not self.left:
            return False
        self.left -= 1
        return True

    def select(self, node: sg.Node) -> bool:
        return node.name == "start" and self._takes(node)

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool:
        return self._takes(output_node)

    def reset(self) -> None:
        self.left = 3


@pytest.mark.parametrize("fresh", [True, False])
def test_a_budget_is_not_spent_on_nodes_that_are_given_up(fresh: bool) -> None:
    # start -> no -> joined and start -> joined: joined is taken, then given up for convexity.
    x = sg.input("x", (4,))
    start = ops.Relu(x, name="start")
    no = ops.Tanh(start, name="no")
    joined = ops.Add(start, no, name="joined")
    one = ops.Sin(start, name="one")
    two = ops.Cos(one, name="two")
    graph = sg.Graph([x], [joined, two, ops.Neg(two, name="three")])
    cut = sg.optimize_for(graph, Budget if fresh else Budget())
    check_partition(graph, cut)
    (inside,) = [{n.name for n in node.subgraph.nodes} for node in cut.nodes if node.subgraph]
    assert inside == {"start", "one", "two"}
    assert "joined" in str(sg.explain(cut, cut.node("joined")))
    assert str(sg.optimize_for(graph, Budget)) == str(sg.optimize_for(graph, Budget))
