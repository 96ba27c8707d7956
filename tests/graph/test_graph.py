"""Graph, Node and Value: building, editing, cloning, verifying; large graphs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.testing import graphs, topologies


def diamond() -> sg.Graph:
    x = sg.input("x", (2,))
    a = ops.Relu(x, name="a")
    b, c = ops.Neg(a, name="b"), ops.Abs(a, name="c")
    return sg.Graph([x], [ops.Add(b, c, name="d")], name="diamond")


def test_parts_of_a_graph() -> None:
    graph = diamond()
    assert [n.name for n in graph.nodes] == ["a", "b", "c", "d"]
    a, b, c, d = graph.nodes
    assert graph.node("c") is c
    assert a.successors() == [b, c]
    assert d.predecessors() == [b, c]
    assert a.outputs[0].consumers == (b, c)
    assert a.outputs[0].producer is a
    assert graph.inputs[0].consumers == (a,)
    assert {n.graph for n in graph.nodes} == {graph}
    assert [v.name for v in graph.values()] == ["x", "a", "b", "c", "d"]
    assert "4 nodes" in repr(graph)
    assert repr(a) == "<Node 'a' Relu>"
    assert "float32[2]" in repr(a.outputs[0])
    with pytest.raises(sg.ModelError, match="no node 'e'"):
        graph.node("e")


def test_a_value_used_twice_by_a_node_has_one_consumer_and_two_uses() -> None:
    x = sg.input("x", (2,))
    graph = sg.Graph([x], [ops.Add(x, x)])
    assert x.consumers == graph.nodes
    assert len(x.uses) == 2


def test_names_are_filled_in_and_double_ones_refused() -> None:
    x = sg.input("x", (2,))
    graph = sg.Graph([x], [ops.Relu(ops.Relu(x)), *ops.Split(x, num_outputs=2)])
    assert [n.name for n in graph.nodes] == ["Relu_0", "Relu_1", "Split_0"]
    assert [v.name for v in graph.outputs] == ["Relu_1", "Split_0.0", "Split_0.1"]
    with pytest.raises(sg.ModelError, match="two nodes named 'n'"):
        sg.Graph([x], [ops.Relu(ops.Relu(x, name="n"), name="n")])
    with pytest.raises(sg.ModelError, match="two values named 'x'"):
        sg.Graph([x, sg.input("x", (2,))], [x])
    one, two = (sg.parameter("w", np.ones(2, np.float32)) for _ in range(2))
    with pytest.raises(sg.ModelError, match="two different parameters named 'w'"):
        sg.Graph([], [ops.Add(one, two)])


def test_a_cycle_is_named() -> None:
    x = sg.input("x", (2,))
    a = sg.Node("Relu", [x], name="first")
    b = sg.Node("Relu", a.outputs, name="second")
    a.inputs = b.outputs
    with pytest.raises(sg.ModelError, match=r"cycle: .*'second'|cycle: .*'first'"):
        sg.Graph([x], b.outputs)


def test_a_value_has_one_source() -> None:
    x = sg.input("x", (2,))
    made = ops.Relu(x)
    with pytest.raises(sg.ModelError, match="has a source already"):
        sg.Node("Relu", [x], outputs=[made])


def test_nodes_of_another_graph_are_copied() -> None:
    graph = diamond()
    part = sg.Graph(graph.inputs, graph.node("b").outputs, name="part")
    part.verify()
    graph.verify()
    assert [n.name for n in part.nodes] == ["a", "b"]
    assert part.nodes[0] is not graph.nodes[0]


def test_nodes_that_no_output_needs_are_kept_when_given() -> None:
    x = sg.input("x", (2,))
    extra = ops.Neg(x, name="extra")
    graph = sg.Graph([x], [ops.Relu(x)], nodes=[extra.producer])
    assert [n.op_type for n in graph.nodes] == ["Neg", "Relu"]
    assert graph.remove_unused() == 1
    assert [n.op_type for n in graph.nodes] == ["Relu"]
    assert graph.remove_unused() == 0
    graph.verify()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(graphs(), topologies()))
def test_a_clone_is_equal_and_shares_only_parameters(graph: sg.Graph) -> None:
    copy, mapped = graph.clone_with_map()
    copy.verify()
    assert str(copy) == str(graph)
    assert not set(copy.nodes) & set(graph.nodes)
    assert not set(copy.values()) & set(graph.values())
    assert [mapped[v] for v in graph.outputs] == list(copy.outputs)
    assert copy.parameters == graph.parameters
    for one, two in zip(graph.values(), copy.values(), strict=True):
        assert one.parameter is two.parameter


def test_rewire_moves_users_and_drops_what_is_dead() -> None:
    graph = diamond()
    a, b, _, d = graph.nodes
    graph.rewire({b.outputs[0]: a.outputs[0]})
    graph.verify()
    assert [n.name for n in graph.nodes] == ["a", "c", "d"]
    assert d.inputs[0] is a.outputs[0]


def test_rewire_takes_new_nodes_in_just_before_their_first_user() -> None:
    graph = diamond()
    c = graph.node("c")
    new = ops.Sigmoid(graph.node("a").outputs[0], name="new")
    graph.rewire({c.outputs[0]: new})
    graph.verify()
    assert [n.name for n in graph.nodes] == ["a", "b", "new", "d"]


def test_rewire_follows_chains_and_refuses_circles() -> None:
    graph = diamond()
    a, b, c, d = (n.outputs[0] for n in graph.nodes)
    graph.rewire({d: b, b: c, c: a})
    graph.verify()
    assert [n.name for n in graph.nodes] == ["a"]
    assert graph.outputs[0].name == "d"
    graph = diamond()
    b, c = graph.node("b").outputs[0], graph.node("c").outputs[0]
    with pytest.raises(sg.ModelError, match="circle"):
        graph.rewire({b: c, c: b})


def test_an_output_keeps_its_name_whatever_carries_it() -> None:
    x = sg.input("x", (2,))
    first, second = ops.Relu(x, name="r"), ops.Neg(x, name="n")
    graph = sg.Graph([x], [first, second])
    graph.rewire({second: first})
    graph.verify()
    assert [v.name for v in graph.outputs] == ["r", "n"]
    assert graph.outputs[1].producer is not None
    assert graph.outputs[1].producer.op_type == "Identity"
    graph.rewire({graph.outputs[0]: x})
    graph.verify()
    assert [v.name for v in graph.outputs] == ["r", "n"]
    assert all(v.producer is not None and v.producer.op_type == "Identity" for v in graph.outputs)


def branches() -> sg.Graph:
    c, x = sg.input("c", (), dtype="bool"), sg.input("x", (2,))
    w = sg.parameter("w", np.ones(2, np.float32))
    y = ops.Relu(x, name="y")

    def body(op: Any) -> sg.Graph:
        return sg.Graph([], [op(sg.capture(y), sg.capture(w))])

    return sg.Graph([c, x], [ops.If(c, then_branch=body(ops.Add), else_branch=body(ops.Mul))])


def test_bodies_and_captures() -> None:
    graph = branches()
    graph.verify()
    relu, branch = graph.nodes
    assert branch.captures == (relu.outputs[0],) * 2
    assert relu.successors() == [branch]
    assert list(branch.predecessors()) == [relu]
    assert list(graph.parameters) == ["w"]
    assert all(body.parameters["w"] is graph.parameters["w"] for body in branch.bodies)
    assert graph.levels() == [graph, *branch.bodies]
    copy = graph.clone()
    copy.verify()
    assert copy.nodes[1].bodies[0] is not branch.bodies[0]
    new = ops.Sigmoid(graph.inputs[1], name="new")
    graph.rewire({relu.outputs[0]: new})
    graph.verify()
    assert branch.captures == (new, new)
    assert [n.name for n in graph.nodes] == ["new", branch.name]


def broken(edit: Any) -> None:
    graph = branches()
    edit(graph)
    with pytest.raises(sg.ModelError):
        graph.verify()


def test_verify_finds_what_is_broken() -> None:
    graph = branches()

    def swap(graph: sg.Graph) -> None:
        graph._nodes = graph._nodes[::-1]  # pyright: ignore[reportPrivateUsage]

    broken(swap)
    broken(lambda g: setattr(g.nodes[0], "graph", None))
    broken(lambda g: setattr(g.nodes[0], "name", ""))
    broken(lambda g: setattr(g.nodes[0], "name", g.nodes[1].name))
    broken(lambda g: setattr(g.nodes[0].outputs[0], "name", "x"))
    broken(lambda g: setattr(g.nodes[0], "inputs", (sg.Value("z"),)))
    broken(lambda g: setattr(g.nodes[0], "inputs", graph.nodes[0].outputs))
    broken(lambda g: g.nodes[0].outputs[0].uses.pop())
    broken(lambda g: setattr(g.nodes[1], "captures", ()))
    broken(lambda g: setattr(g, "outputs", (sg.Value("z"),)))
    broken(lambda g: setattr(g, "inputs", (*g.inputs, g.inputs[0])))
    broken(lambda g: setattr(g.nodes[0].outputs[0], "producer", None))
    broken(lambda g: setattr(g.nodes[1].bodies[1].nodes[0], "inputs", (sg.Value("z"),)))


def chain(count: int) -> sg.Graph:
    x = value = sg.input("x", ("N", 8))
    for k in range(count):
        node = sg.Node("Relu", [value], version=14, name=f"n{k}")
        value = node.outputs[0]
        value.type = x.type
    return sg.Graph([x], [value])


def test_a_long_chain_is_linear_and_needs_no_recursion() -> None:
    def seconds(count: int) -> float:
        graph = chain(count)
        start = time.process_time()
        copy = graph.clone()
        copy.verify()
        copy.rewire({copy.nodes[-1].outputs[0]: copy.nodes[count // 2].outputs[0]})
        assert len(copy.nodes) == count // 2 + 1
        return time.process_time() - start

    seconds(1000)
    small, large = min(seconds(5_000) for _ in range(3)), seconds(100_000)
    # 20 times the nodes; a quadratic step would take 400 times as long.
    assert large < 100 * small


def test_what_a_graph_cannot_be_made_of() -> None:
    x, y = sg.input("x", (2,)), sg.input("y", (2,))
    out = ops.Add(x, y, name="sum")
    for inputs, outputs, says in (
        ([x], [out], "node 'sum' needs value 'y', which is no input"),
        ([x, y, x], [out], "lists input 'x' twice"),
        (x, [out], r"inputs are one value; give a list: \[x\]"),
        ([x, y], [(out, out)], "outputs hold .*unpack it"),
        (["x"], [out], "inputs hold 'x'"),
        ([x], [y], "its output needs value 'y'"),
    ):
        with pytest.raises(sg.ModelError, match=says):
            sg.Graph(inputs, outputs)  # type: ignore[arg-type]
        out = ops.Add(x, y, name="sum")


class TakesRelu(sg.SubgraphProperty):
    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Relu"})


def test_a_partition_lists_parameters_in_the_order_of_the_graph() -> None:
    x = sg.input("x", (2,))
    first, second = (sg.parameter(name, np.ones(2, np.float32)) for name in ("first", "second"))
    graph = sg.Graph([x], [second, ops.Relu(ops.Add(x, first))])
    graph.attrs["subgraph_property"] = TakesRelu()
    cut = sg.passes.apply_pass(graph, "PartitionGraph")
    assert list(cut.parameters) == list(graph.parameters) == ["first", "second"]
