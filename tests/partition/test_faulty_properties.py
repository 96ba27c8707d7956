"""Properties and ops that break their contract: an error names them, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops


class Unprintable(Exception):
    """An exception whose text cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Property(sg.SubgraphProperty):
    """Takes MatMul, Add and Relu, and does in a method what a test gives."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.methods = methods

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        if "create_subgraph_selector" in self.methods:
            selector: sg.SubgraphSelector = self.methods["create_subgraph_selector"]()
            return selector
        return sg.ContainOpSelector({"MatMul", "Add", "Relu"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> Any:
        method = self.methods.get("create_subgraph_node", sg.subgraph_node)
        return method(subgraph)

    def pre_partition(self, graph: sg.Graph, options: Any) -> Any:
        return self.methods.get("pre_partition", lambda graph: None)(graph)

    def post_partition(self, graph: sg.Graph) -> Any:
        return self.methods.get("post_partition", lambda graph: None)(graph)


class Raising(sg.SubgraphOp):
    """Raises an exception whose text cannot be shown."""

    def forward(self, inputs: list[Any]) -> list[Any]:
        raise Unprintable


def net() -> sg.Graph:
    x = sg.input("x", ("N", 4), "float32")
    w = sg.parameter("w", np.eye(4, dtype=np.float32))
    h = ops.Relu(ops.Add(ops.MatMul(x, w), x), name="h")
    return sg.Graph([x], [ops.Tanh(h, name="y"), h])


def cut(**methods: Callable[..., Any]) -> sg.Graph:
    graph = net()
    before = str(graph)
    try:
        graph.attrs["subgraph_property"] = Property(**methods)
        return sg.passes.apply_pass(graph, "PartitionGraph")
    finally:
        del graph.attrs["subgraph_property"]
        assert str(graph) == before
        graph.verify()


def fail(*_: Any) -> Any:
    raise Unprintable


@pytest.mark.parametrize(
    "method",
    ["create_subgraph_selector", "create_subgraph_node", "pre_partition", "post_partition"],
)
def test_an_exception_without_text_is_named_with_the_method(method: str) -> None:
    with pytest.raises(sg.PartitionError, match=rf"{method} raised Unprintable"):
        cut(**{method: fail})


@pytest.mark.parametrize("method", ["select", "select_input", "select_output", "filter"])
def test_a_selector_whose_exception_has_no_text_is_named(method: str) -> None:
    yes: dict[str, Any] = {
        name: lambda *_: True for name in ("select", "select_input", "select_output")
    }
    kind = type("Failing", (sg.SubgraphSelector,), {**yes, method: fail})
    if method == "select_output":
        kind = type("Failing", (kind,), {"select_input": lambda *_: False})
    if method == "select_input":
        kind = type("Failing", (kind,), {"select": lambda _, node: node.op_type == "Tanh"})
    with pytest.raises(sg.PartitionError, match=rf"Failing.{method} raised Unprintable"):
        cut(create_subgraph_selector=kind)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
def test_an_op_whose_exception_has_no_text_falls_back(device: str) -> None:
    graph = cut(create_subgraph_node=lambda inner: sg.subgraph_node(inner, op=Raising(inner)))
    model = sg.compile_model(graph, device)
    array = np.ones((2, 4), np.float32)
    want = sg.compile_model(net(), "REFERENCE")([array])
    for _ in range(4):
        np.testing.assert_allclose(model([array])[0], want[0], rtol=1e-6)
    (report,) = model.get_property("FALLBACKS").values()
    assert report["failures"] >= 3  # then the breaker is open for a time
    assert "RuntimeError" in report["cause"]


def drop_output(graph: sg.Graph) -> None:
    graph.outputs = graph.outputs[:1]


def swap_outputs(graph: sg.Graph) -> None:
    graph.outputs = graph.outputs[::-1]


def rename_input(graph: sg.Graph) -> None:
    graph.inputs[0].name = "other"


def other_graph(graph: sg.Graph) -> sg.Graph:
    x = sg.input("x", ("N", 4), "float32")
    return sg.Graph([x], [ops.Relu(x)])


@pytest.mark.parametrize("change", [drop_output, swap_outputs, rename_input, other_graph])
def test_post_partition_leaves_inputs_and_outputs_alone(change: Any) -> None:
    with pytest.raises(sg.PartitionError, match="post_partition changed the inputs and outputs"):
        cut(post_partition=change)


def test_pre_partition_leaves_inputs_and_outputs_alone() -> None:
    with pytest.raises(sg.PartitionError, match="pre_partition changed the inputs and outputs"):
        cut(pre_partition=other_graph)


def foreign(inner: sg.Graph) -> sg.Node:
    return sg.Node("Relu", [sg.Value("elsewhere")], name="foreign")


def wrong_type(inner: sg.Graph) -> sg.Node:
    node = sg.Node("Relu", inner.inputs, outputs=len(inner.outputs))
    node.outputs[0].type = sg.TensorType("int8", (4,))
    return node


def without_outputs(inner: sg.Graph) -> sg.Node:
    inner.outputs = ()
    return sg.subgraph_node(inner)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda inner: "nonsense", "must return a Node"),
        (without_outputs, "has 0 outputs, the region 1"),
        (lambda inner: inner.nodes[0], "which is in graph"),
        (foreign, "takes value 'elsewhere', which is no input"),
        (lambda inner: sg.Node("Relu", inner.inputs, outputs=5), "has 5 outputs, the region 1"),
        (wrong_type, r"gives int8\[4\] for output"),
        (lambda inner: 1 / 0, "create_subgraph_node raised ZeroDivisionError"),
    ],
)
def test_a_property_that_returns_a_wrong_node(make: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(sg.PartitionError, match=says) as caught:
        cut(create_subgraph_node=make)
    assert "property 'Property'" in str(caught.value)


def test_the_op_of_a_node_is_made_of_its_graph() -> None:
    with pytest.raises(sg.PartitionError, match="is made of graph 'graph' with 1 inputs"):
        cut(create_subgraph_node=lambda inner: sg.subgraph_node(inner, op=Raising(net())))


def test_the_name_of_a_node_is_text() -> None:
    wrong: Any = 7
    with pytest.raises(sg.PartitionError, match="give the name of the subgraph node"):
        cut(create_subgraph_node=lambda inner: sg.subgraph_node(inner, name=wrong))


def test_a_decorator_without_a_name_is_an_error() -> None:
    """It returned a function in the place of the class, and nothing was registered."""
    for register in (sg.register_property, sg.register_selector):
        wrong: Any = register
        with pytest.raises(sg.PartitionError, match=rf'the name first: @{register.__name__}\("my_'):
            wrong(sg.SubgraphProperty)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("strategy", "heteroo", "strategy 'heteroo' is unknown; did you mean 'hetero'"),
        ("min_size", "2", "min_size takes a whole number of at least 1, got '2'"),
        ("max_subgraphs", -1, "max_subgraphs takes a whole number of at least 0, got -1"),
    ],
)
def test_an_attribute_of_a_property_is_checked_as_the_option(
    attribute: str, value: Any, message: str
) -> None:
    graph = net()
    owner = graph.attrs["subgraph_property"] = Property()
    setattr(owner, attribute, value)
    with pytest.raises(sg.PartitionError, match=message) as caught:
        sg.passes.apply_pass(graph, "PartitionGraph")
    assert "for property 'Property'" in caught.value.__notes__


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("name", 7, "property 'Own': its name is 7; set it to a text"),
        ("version", 7, "property 'Own': its version is 7; set it to a text"),
        ("options", "tile", r"property 'Own': its options are 'tile'; set a tuple .* \('tile',\)"),
    ],
)
def test_texts_and_options_of_a_property_are_checked(
    attribute: str, value: Any, message: str
) -> None:
    """A saved file with such a name or version had a record and notes that could not be read."""
    owner = type("Own", (Property,), {attribute: value})()
    with pytest.raises(sg.PartitionError, match=message):
        sg.optimize_for(net(), owner)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: 5, r"saved_options returned 5; return a dict of .*by name"),
        (lambda _: {1: 2}, r"saved_options returned \{1: 2\}; return a dict"),
        (fail, "saved_options raised Unprintable"),
    ],
)
def test_saved_options_that_do_not_fit_name_the_property(
    make: Callable[[Any], Any], message: str
) -> None:
    """The error was one of the pass, which named neither property nor method."""
    owner = type("Own", (Property,), {"saved_options": make})()
    with pytest.raises(sg.PartitionError, match=f"property 'Own': {message}"):
        sg.optimize_for(net(), owner)


class Exported(sg.SubgraphOp):
    """Runs MatMul, Add and Relu in NumPy."""

    def forward(self, inputs: list[Any]) -> list[Any]:
        x, w = inputs
        return [np.maximum(x @ w.array + x, 0)]

    def to_export(self, file: Any) -> Any:
        return {}


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("to_export", fail, "raised Unprintable"),
        ("to_export", lambda *_: 5, "returned 5; return a dict of plain JSON, or None"),
        ("to_export", lambda *_: {"a": np.float32(1)}, "no plain JSON"),
        ("to_export", lambda *_: {"a": {(1, 2): 3}}, "no plain JSON"),
        ("prepare", fail, "raised Unprintable"),
    ],
)
def test_an_op_that_fails_in_an_export_is_named(
    method: str, answer: Callable[..., Any], message: str, tmp_path: Path
) -> None:
    kind = type("Failing", (Exported,), {method: answer})
    graph = cut(create_subgraph_node=lambda inner: sg.subgraph_node(inner, kind(inner), "mine"))
    model = sg.compile_model(graph, "CPU")
    with pytest.raises(sg.BlobError, match=f"node 'mine': Failing.{method} .*{message}"):
        model.export_model(tmp_path / "model.blob")


def test_a_weight_that_forward_takes_for_an_array_is_named() -> None:
    """NumPy made an array of one object; its message was about missing dimensions."""
    parameter = sg.parameter("w", np.eye(4, dtype=np.float32)).parameter
    assert parameter is not None
    wrong: Any = parameter
    for use in (np.asarray, lambda w: np.ones((2, 4), np.float32) @ w, np.maximum.reduce):
        with pytest.raises(TypeError, match=r"parameter 'w' is a weight and no array: use its"):
            use(wrong)
    with pytest.raises(sg.ShapeError, match="parameter 'w' is a weight and no array"):
        parameter.assign(wrong)
