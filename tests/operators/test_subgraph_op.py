"""Subgraph nodes and ops: the default op, a user's own, what is checked, updates of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array


def inner_graph() -> sg.Graph:
    x = sg.input("x", ("N", 3))
    w = sg.parameter("w", np.arange(12, dtype=np.float32).reshape(3, 4))
    g = sg.Graph([x], [ops.Relu(ops.MatMul(x, w), name="act")], "inner")
    g.inputs = (*g.inputs, w)
    return g


def around(node: Any) -> sg.Graph:
    return sg.Graph([node.inputs[0]], node.outputs, "outer")


class Fixed(sg.SubgraphOp):
    """Gives what it is told."""

    result: Any = None

    def forward(self, inputs: list[Any]) -> Any:
        return self.result


class CutRelu(sg.SubgraphProperty):
    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Relu"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, op=Fixed(subgraph), name="cut")


def fixed(
    result: Any, monkeypatch: pytest.MonkeyPatch, device: str, rows: int | str = 1
) -> sg.CompiledModel:
    """Return a model of a Relu that gives ``result``, and a Neg."""
    monkeypatch.setattr(Fixed, "result", result)
    x = sg.input("x", (rows, 4))
    graph = sg.Graph([x], [ops.Neg(ops.Relu(x, name="relu"))])
    return sg.compile_model(sg.optimize_for(graph, CutRelu()), device)


@pytest.mark.parametrize("result", [None, np.zeros((1, 4), np.float32), iter(())])
def test_forward_gives_a_list(result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fixed(result, monkeypatch, "REFERENCE")
    with pytest.raises(
        sg.DeviceError, match=r"Fixed\.forward returned a .*; return a list of arrays"
    ):
        model(np.zeros((1, 4), np.float32))


@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "MULTI:CPU,REFERENCE"])
@pytest.mark.parametrize("rows", [1, "N"])
@pytest.mark.parametrize("shape", [(), (4,), (1, 1), (1, 4, 1), (1, 5)])
def test_forward_gives_the_right_shape(
    shape: tuple[int, ...], rows: int | str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is broadcast into place; a device is not to blame for it."""
    model = fixed([np.zeros(shape, np.float32)], monkeypatch, device, rows)
    message = rf"Fixed\.forward returned float32\[{str(list(shape))[1:-1]}\] for output 'relu' .*"
    for _ in range(2):
        with pytest.raises(sg.DeviceError, match=rf"{message} is float32\[1, 4\]") as caught:
            model(np.zeros((1, 4), np.float32))
        assert not caught.value.lost
        assert "at node 'cut'" in caught.value.__notes__[0]
    monkeypatch.setattr(Fixed, "result", [np.ones((1, 4), np.float32)])
    np.testing.assert_array_equal(model(np.zeros((1, 4), np.float32))[0], -np.ones((1, 4)))


@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "MULTI:CPU,REFERENCE"])
@pytest.mark.parametrize("rows", [1, 3])
def test_forward_gives_the_batch_of_its_inputs(
    device: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that the graph names is that of the inputs in this run."""
    model = fixed([np.ones((2, 4), np.float32)], monkeypatch, device, "N")
    for _ in range(2):
        with pytest.raises(sg.DeviceError, match=rf"float32\[2, 4\] .* is float32\[{rows}, 4\]"):
            model(np.zeros((rows, 4), np.float32))
    np.testing.assert_array_equal(model(np.zeros((2, 4), np.float32))[0], -np.ones((2, 4)))


def test_sizes_that_no_input_names_follow_from_the_run() -> None:
    """Those of a Concat do; those of a NonZero are the op's to choose."""

    class Own(sg.SubgraphOp):
        rows = 4

        def forward(self, inputs: list[Any]) -> list[Array]:
            return [np.zeros((self.rows, 3), np.float32), np.zeros((2, 7), np.int64)]

    x = sg.input("x", ("N", 3))
    inner = sg.Graph([x], [ops.Concat(x, x, axis=0), ops.NonZero(x)], "inner")
    op = Own(inner)
    model = sg.compile_model(around(sg.subgraph_node(inner, op=op)), "REFERENCE")
    assert model(np.ones((2, 3), np.float32))[1].shape == (2, 7)
    with pytest.raises(sg.DeviceError, match=r"float32\[4, 3\] .* is float32\[6, 3\]"):
        model(np.ones((3, 3), np.float32))


def test_a_name_that_a_model_states_wrongly_is_not_enforced() -> None:
    class Twice(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            return [np.concatenate([inputs[0], inputs[0]])]

    x = sg.input("x", ("N", 3))
    inner = sg.Graph([x], [ops.Concat(x, x, axis=0)], "inner")
    inner.outputs[0].type = sg.TensorType("float32", ("N", 3))  # some exporters write that
    model = sg.compile_model(around(sg.subgraph_node(inner, op=Twice(inner))), "REFERENCE")
    for rows in (2, 2, 3):
        assert model(np.ones((rows, 3), np.float32))[0].shape == (2 * rows, 3)


def test_default_op_runs_the_inner_graph() -> None:
    node: Any = sg.subgraph_node(inner_graph(), name="region")
    assert (node.op_type, node.domain, node.name) == ("_subgraph_op", "subgraph", "region")
    assert node.inputs[1].parameter is node.subgraph.inputs[1].parameter
    graph = around(node)
    graph.verify()
    x = np.ones((2, 3), np.float32)
    expected = np.maximum(x @ np.arange(12, dtype=np.float32).reshape(3, 4), 0)
    model = sg.compile_model(graph, "REFERENCE")
    np.testing.assert_array_equal(model(x)[0], expected)
    np.testing.assert_array_equal(node.op.forward([x, node.inputs[1].parameter])[0], expected)
    np.testing.assert_array_equal(node.op.forward([x, node.inputs[1].parameter.array])[0], expected)


def test_default_op_uses_the_parameter_that_it_is_given() -> None:
    node: Any = sg.subgraph_node(inner_graph())
    other = sg.Parameter("other", np.full((3, 4), 2, np.float32))
    x = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(node.op.forward([x, other])[0], np.full((1, 4), 6))


class Packed(sg.SubgraphOp):
    """Keeps its weight transposed."""

    packs = 0

    def pack(self, array: Array) -> Array:
        type(self).packs += 1
        return np.ascontiguousarray(array.T)

    def forward(self, inputs: list[Any]) -> list[Array]:
        x, weight = inputs
        packed = self.weights.get("packed", self.pack, weight)
        return [np.maximum(x @ packed.T, 0)]


def test_own_op_follows_its_weight() -> None:
    inner = inner_graph()
    Packed.packs = 0
    model = sg.compile_model(around(sg.subgraph_node(inner, op=Packed(inner))), "REFERENCE")
    x = np.ones((2, 3), np.float32)
    for k in range(3):
        new = np.full((3, 4), k, np.float32)
        model.parameters["w"].assign(new)
        for _ in range(2):
            np.testing.assert_array_equal(model(x)[0], x @ new)
    assert Packed.packs == 3


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda x: [], "returned 0 results"),
        (lambda x: [x, x], "returned 2 results"),
        (lambda x: [x.astype(np.float64)], r"float64\[1, 3\] for output 'act'"),
        (lambda x: [[1.0]], "a list for output 'act'"),
    ],
)
def test_a_wrong_result_is_named(give: Any, message: str) -> None:
    class Wrong(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            return give(inputs[0])

    inner = inner_graph()
    model = sg.compile_model(around(sg.subgraph_node(inner, op=Wrong(inner))), "REFERENCE")
    with pytest.raises(sg.DeviceError, match=message):
        model(np.ones((1, 3), np.float32))


def test_an_op_that_raises_fails_one_request_with_a_clear_error() -> None:
    class Fails(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            if inputs[0][0, 0] < 0:
                raise OverflowError("bus error")
            return [np.zeros((1, 4), np.float32)]

    inner = inner_graph()
    node = sg.subgraph_node(inner, op=Fails(inner), name="region")
    model = sg.compile_model(around(node), "REFERENCE", {"RUNTIME_FALLBACK": False})
    good, bad = np.ones((1, 3), np.float32), -np.ones((1, 3), np.float32)
    with pytest.raises(sg.DeviceError, match=r"region.*OverflowError: bus error") as caught:
        model(bad)
    assert isinstance(caught.value.__cause__, OverflowError)
    assert not model(good)[0].any()


def test_an_op_without_forward_says_so() -> None:
    inner = inner_graph()
    with pytest.raises(NotImplementedError, match="write forward"):
        sg.SubgraphOp(inner).forward([])


def test_an_op_that_is_none() -> None:
    x = sg.input("x", (2,))
    graph = sg.Graph([x], [ops.Relu(x)])
    with pytest.raises(sg.PartitionError, match=r"op=MyOp\(subgraph\)"):
        sg.subgraph_node(graph, op=sg.SubgraphOp)  # type: ignore[arg-type]


def test_an_op_whose_init_forgets_its_parent() -> None:
    class Forgetful(sg.SubgraphOp):
        def __init__(self, subgraph: sg.Graph) -> None:  # pyright: ignore[reportMissingSuperCall]
            self.level = 1

    inner = inner_graph()
    with pytest.raises(sg.PartitionError, match=r"super\(\)\.__init__\(subgraph\)"):
        sg.subgraph_node(inner, op=Forgetful(inner))


@pytest.mark.parametrize("made", [None, 7, "session", [1]])
def test_session_returns_a_session(made: Any) -> None:
    class Own(sg.SubgraphOp):
        def session(self) -> Any:
            return made

    x = sg.input("x", (2,), "float32")
    inner = sg.Graph([x], [ops.Relu(x)])
    node = sg.subgraph_node(inner, op=Own(inner))
    graph = sg.Graph([v for v in node.inputs if v], node.outputs, nodes=[node])
    for device in ("CPU", "REFERENCE"):
        with pytest.raises(sg.DeviceError, match=r"Own\.session returned a .*child of sg\.Session"):
            sg.compile_model(graph, device)([np.ones(2, np.float32)])


def test_the_error_of_a_report_names_the_op() -> None:
    class Own(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Any]:
            return [inputs[0] + 1]

        def run_report(self) -> dict[str, Any]:
            raise KeyError("runs")

    x = sg.input("x", (2,), "float32")
    inner = sg.Graph([x], [ops.Relu(x)])
    node = sg.subgraph_node(inner, op=Own(inner))
    model = sg.compile_model(
        sg.Graph([v for v in node.inputs if v], node.outputs, nodes=[node]), "REFERENCE"
    )
    assert (model([np.ones(2, np.float32)])[0] == 2).all()
    with pytest.raises(sg.DeviceError, match=r"Own\.run_report raised KeyError: 'runs'"):
        model.get_property("REGION_STRATEGIES")
