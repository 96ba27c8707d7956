"""Wrong arguments of nodes and graphs: one error that names the argument and a right one."""

from __future__ import annotations

from typing import Any

import pytest

import subgraph as sg


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": 5}, r"got 5 of type int; give the inputs of node 'n' \(Relu\), a list"),
        ({"inputs": None}, r"got None .*the inputs of node 'n' \(Relu\)"),
        ({"inputs": [5]}, r"the inputs of node 'n' \(Relu\) hold 5, which is no value"),
        ({"inputs": sg.input("x")}, r"are one value; give a list: \[x\]"),
        ({"outputs": 2.5}, r"got 2\.5 of type float; give the outputs of node 'n'"),
        ({"outputs": ["y"]}, r"the outputs of node 'n' \(Relu\) hold 'y'"),
        ({"captures": [5]}, r"the captures of node 'n' \(Relu\) hold 5"),
        ({"name": 5}, r"the name of node 5 \(Relu\): got 5; give a string"),
        ({"op_type": 5}, r"the op_type of node 'n' \(5\): got 5; give the name of an operator"),
        ({"domain": 5}, "the domain .*: got 5"),
        ({"version": "1"}, "the version .*: got '1'; give an integer"),
        ({"attrs": 5}, "the attrs .*: got 5; give a dict"),
        ({"metadata": 5}, "the metadata .*: got 5; give a dict"),
        ({"subgraph": 5}, "got 5 of type int; give a graph as the inner one of node 'n'"),
    ],
)
def test_of_a_node(given: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"op_type": "Relu", "inputs": [sg.input("x")], "name": "n"}
    with pytest.raises(sg.ModelError, match=message):
        sg.Node(**{**right, **given})
    assert sg.Node("Clip", [sg.input("x"), None, sg.input("high")]).inputs[1] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": [None]}, "the graph's inputs hold None, which is no value"),
        ({"outputs": 5}, "got 5 of type int; give the graph's outputs, a list"),
        ({"captures": 5}, "give the graph's captures, a list"),
        ({"nodes": 5}, "the graph's nodes: got 5; give a list of nodes"),
        ({"nodes": [5]}, "the graph's nodes hold 5, which is no node"),
        ({"name": 5}, "the graph's name: got 5; give a string"),
        ({"attrs": 5}, "the graph's attrs: got 5; give a dict"),
        ({"opsets": 5}, "the graph's opsets: got 5; give a dict"),
        ({"metadata": 5}, "the graph's metadata: got 5; give a dict"),
        ({"doc": 5}, "the graph's doc: got 5; give a string"),
    ],
)
def test_of_a_graph(given: dict[str, Any], message: str) -> None:
    with pytest.raises(sg.ModelError, match=message):
        sg.Graph(**given)
