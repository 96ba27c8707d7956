"""explain: why a node is in its subgraph, or in none."""

from __future__ import annotations

import pytest

import subgraph as sg
from subgraph import ops
from subgraph.partition.property import SelectorProperty


def example() -> sg.Graph:
    x = sg.input("x", (4,))
    n1 = ops.Relu(x, name="1")
    n2 = ops.Relu(n1, name="2")
    n3 = ops.Relu(n2, name="3")
    n4 = ops.Sin(n2, name="4")
    n5 = ops.Add(n3, n4, name="5")
    return sg.Graph([x], [ops.Relu(n5, name="6")], name="example")


class NoSine(sg.SubgraphSelector):
    def select(self, node: sg.Node) -> bool | sg.Reject:
        return node.op_type != "Sin" or sg.Reject("no sine here")

    def select_input(self, node: sg.Node, input_node: sg.Node) -> bool | sg.Reject:
        return input_node.op_type != "Sin" or sg.Reject("no sine above")

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool | sg.Reject:
        return output_node.op_type != "Sin"


def told(graph: sg.Graph, name: str) -> str:
    return str(sg.explain(graph, name))


def test_a_start_and_a_neighbour() -> None:
    cut = sg.optimize_for(example(), SelectorProperty(NoSine, "mine"))
    start, other = sg.explain(cut, "1"), sg.explain(cut, "3")
    assert (start.subgraph, start.property) == ("mine_0", "mine")
    assert (
        str(start) == "'1' (Relu) is in subgraph 'mine_0': property 'mine' started the region here"
    )
    assert "took it as a neighbour of '2'; the region started at '1'" in str(other)
    hetero = sg.optimize_for(example(), SelectorProperty(NoSine, "mine"), strategy="hetero")
    assert "the region grown from" in told(hetero, "2")


def test_who_refused_over_which_edge_with_reason_file_and_line() -> None:
    cut = sg.optimize_for(example(), NoSine)
    why = told(cut, "4")
    assert why.startswith("'4' (Sin) is in no subgraph: ")
    line = NoSine.select_input.__code__.co_firstlineno + 1
    assert f"NoSine.select_input('5', '4') refused: no sine above ({__file__}:{line})" in why
    hetero = sg.optimize_for(example(), NoSine, strategy="hetero")
    assert "NoSine.select('4') refused: no sine here" in told(hetero, "4")

    class Silent(sg.SubgraphSelector):
        pass

    assert "Silent.select('2') said False" in told(sg.optimize_for(example(), Silent), "2")


def test_the_path_that_would_have_closed_a_cycle() -> None:
    class NoStart(NoSine):
        def select(self, node: sg.Node) -> bool | sg.Reject:
            return node.name == "1"

    cut = sg.optimize_for(example(), SelectorProperty(NoStart, "mine"))
    why = sg.explain(cut, "5")
    assert why.subgraph is None
    assert why.reasons[0] == (
        "with it the region from '1' would have closed a cycle: 'mine_0' -> '4' -> '5'"
    )


@pytest.mark.parametrize("strategy", ["selector", "hetero"])
def test_why_a_node_is_not_with_its_neighbour(strategy: str) -> None:
    x = sg.input("x", (4,))
    a = ops.Relu(x, name="a")
    g = sg.Graph([x], [ops.Add(a, ops.Sin(a, name="b"), name="d")])
    cut = sg.optimize_for(g, SelectorProperty(NoSine, "mine"), strategy=strategy, min_size=2)
    for name, other in (("a", "d"), ("d", "a")):
        assert sg.explain(cut, name).reasons == (
            f"with it the region from {other!r} would have closed a cycle: 'a' -> 'b' -> 'd'",
            "its region of 1 node is smaller than min_size 2",
        )
    cut = sg.optimize_for(g, SelectorProperty(NoSine, "mine"), strategy=strategy)
    names = [node.name for node in cut.nodes]
    assert sg.explain(cut, "d").reasons[1:] == (
        f"with it the region from 'a' would have closed a cycle: {names[0]!r} -> 'b' -> "
        f"{names[2]!r}",
    )


def test_every_no_is_told_a_users_own_words_first() -> None:
    class Three(NoSine):
        def select(self, node: sg.Node) -> bool:
            return node.op_type != "Sin"

        def select_output(self, node: sg.Node, output_node: sg.Node) -> bool | sg.Reject:
            return output_node.op_type != "Sin" or sg.Reject("no sine below")

    why = sg.explain(sg.optimize_for(example(), Three), "4").reasons
    assert len(why) == 3
    assert why[0].startswith("Three.select_output('2', '4') refused: no sine below (")
    assert why[1].startswith("Three.select_input('5', '4') refused: no sine above (")
    assert why[2] == "Three.select('4') said False"


def test_a_property_refuses_in_its_own_words() -> None:
    class Small(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return NoSine()

        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Reject:
            return sg.Reject("too small to pay")

    cut = sg.optimize_for(example(), Small())
    assert len(cut.nodes) == 6
    line = Small.create_subgraph_node.__code__.co_firstlineno + 1
    assert f"refused its region of 3 nodes from '1': too small to pay ({__file__}:{line})" in told(
        cut, "2"
    )


def test_filter_size_cap_refusal_and_options() -> None:
    class Dropping(NoSine):
        def filter(self, candidates: list[sg.Node]) -> list[sg.Node]:
            return [node for node in candidates if node.name != "6"]

        def select(self, node: sg.Node) -> bool | sg.Reject:
            return node.name != "6" and super().select(node)

    cut = sg.optimize_for(example(), Dropping)
    assert "filter of selector Dropping dropped it" in told(cut, "6")
    cut = sg.optimize_for(example(), NoSine, min_size=3)
    assert "its region of 2 nodes from '5' is smaller than min_size 3" in told(cut, "6")
    cut = sg.optimize_for(example(), NoSine, max_subgraphs=1)
    assert "was not among the 1 largest (max_subgraphs)" in told(cut, "5")
    cut = sg.optimize_for(example(), NoSine, exclude=["6"], include=["4"])
    assert "the option exclude names it" in told(cut, "6")
    assert "as the option include says" in told(cut, "4")

    @sg.register_property("test_refusing")
    class Refusing(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return NoSine()

        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> None:
            return None

    cut = sg.optimize_for(example(), "test_refusing")
    assert "property 'test_refusing' refused its region of 3 nodes from '1'" in told(cut, "2")
    assert [node.name for node in cut.nodes] == list("123456")


def test_several_properties_each_say_their_own() -> None:
    given = [
        SelectorProperty(lambda: sg.ContainOpSelector({"Add"}), "first"),
        SelectorProperty(lambda: sg.ContainOpSelector({"Relu"}), "second"),
    ]
    cut = sg.optimize_for(example(), given)
    why = sg.explain(cut, "4")
    assert [reason.split(":")[0] for reason in why.reasons] == [
        "property 'first'",
        "property 'second'",
    ]
    assert all("operator Sin is not among those selected" in reason for reason in why.reasons)
    assert sg.explain(cut, "5").property == "first"
    assert sg.explain(cut, "6").property == "second"


def test_a_subgraph_node_and_a_node_object() -> None:
    cut = sg.optimize_for(example(), SelectorProperty(NoSine, "mine"))
    node = cut.node("mine_1")
    assert "a subgraph of 2 nodes, which property 'mine' started at '5'" in str(
        sg.explain(cut, node)
    )
    assert node.subgraph is not None
    assert sg.explain(cut, node.subgraph.nodes[0]).subgraph == "mine_1"
    assert sg.explain(cut, cut.node("4")).node == "4"


def test_wrong_graphs_and_names() -> None:
    with pytest.raises(sg.PartitionError, match="no record of a partition"):
        sg.explain(example(), "4")
    cut = sg.optimize_for(example(), NoSine)
    with pytest.raises(sg.PartitionError, match="has no node 'four'"):
        sg.explain(cut, "four")
