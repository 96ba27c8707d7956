"""A user's operator that breaks its contract: errors name node, operator and what it returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.operators.operator import find_operator, unregister_operator


class Unprintable(Exception):
    """An exception whose text cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail(*_: Any) -> Any:
    raise Unprintable


def double(node: sg.Node, inputs: Any) -> Any:
    return [inputs[0] * 2]


def same_type(node: sg.Node, types: Any, values: Any) -> Any:
    return [types[0]]


_functions: dict[str, Callable[..., Any]] = {}


@pytest.fixture(scope="module", autouse=True)
def core() -> Iterator[sg.Core]:
    made = sg.Core()
    made.add_extension(
        sg.Operator(
            schema=sg.Schema("Faulty", "subgraph.tests.faulty", inputs=("x",), outputs=("y",)),
            compute=lambda *given: _functions["compute"](*given),
            infer=lambda *given: _functions["infer"](*given),
        )
    )
    yield made
    operator = find_operator("subgraph.tests.faulty::Faulty")
    assert operator is not None
    unregister_operator(operator)


def results(
    core: sg.Core,
    device: str,
    compute: Callable[..., Any] = double,
    infer: Callable[..., Any] = same_type,
) -> list[Any]:
    """Return the results of a model with a node of the operator between others."""
    _functions.update(compute=compute, infer=infer)
    x = sg.input("x", ("N", 4), "float32")
    faulty: Any = ops.Faulty
    h = ops.Neg(x)
    graph = sg.Graph([x], [ops.Relu(faulty(h, name="the_node")), ops.Add(h, x)])
    return list(core.compile_model(graph, device)([np.full((2, 4), -3, np.float32)]).values())


DEVICES = pytest.mark.parametrize("device", ["REFERENCE", "CPU"])


@DEVICES
def test_results_of_the_right_type_are_taken(core: sg.Core, device: str) -> None:
    """A tuple, a NumPy scalar where the rank is 0, results that share memory with the input."""
    for compute in (double, lambda node, inputs: (inputs[0] * 2,)):
        assert (results(core, device, compute)[0] == 6).all()
    assert (results(core, device, lambda node, inputs: [inputs[0]])[0] == 3).all()
    mean = results(
        core,
        device,
        lambda node, inputs: [inputs[0].mean()],
        lambda node, types, values: [sg.TensorType("float32", ())],
    )[0]
    assert mean == 3


@DEVICES
@pytest.mark.parametrize(
    ("compute", "got"),
    [
        (lambda node, inputs: None, "a NoneType; return a list"),
        (lambda node, inputs: inputs[0] * 2, "a ndarray; return a list"),
        (lambda node, inputs: (each for each in inputs), "a generator; return a list"),
        (lambda node, inputs: [], "0 results; the node has 1 outputs"),
        (lambda node, inputs: [inputs[0].tolist()], "a list for output 0"),
        (lambda node, inputs: [None], "a NoneType for output 0"),
        (lambda node, inputs: [2.0], "a float for output 0"),
        (lambda node, inputs: [object()], "a object for output 0"),
        (lambda node, inputs: [inputs[0].astype("f8")], r"float64\[2, 4\] for output 0; its infer"),
        (lambda node, inputs: [inputs[0][0]], r"float32\[4\] for output 0; its infer"),
        (lambda node, inputs: [inputs[0][:, :3]], r"float32\[2, 3\] for output 0; its infer"),
        (
            lambda node, inputs: [inputs[0][:1]],
            r"float32\[1, 4\] .* its infer said float32\[2, 4\]",
        ),
        (lambda node, inputs: [inputs[0], inputs[0]], "2 results; the node has 1 outputs"),
        (lambda node, inputs: [np.zeros(2, "V8")], "an array of"),
    ],
)
def test_results_of_another_type_are_an_error(
    core: sg.Core, device: str, compute: Any, got: str
) -> None:
    wanted = rf"node 'the_node': compute of subgraph.tests.faulty.Faulty returned {got}"
    with pytest.raises(sg.DeviceError, match=wanted):
        results(core, device, compute)


@DEVICES
def test_an_input_cannot_be_written_to(core: sg.Core, device: str) -> None:
    """Another node that reads the value got the changed one."""

    def write(node: sg.Node, inputs: Any) -> Any:
        inputs[0][...] = 0
        return [inputs[0]]

    with pytest.raises(sg.ShapeError, match=r"'the_node'.*read-only"):
        results(core, device, write)


@DEVICES
def test_the_text_of_an_error_says_what_was_raised(core: sg.Core, device: str) -> None:
    def look_up(*_: Any) -> Any:
        return {}["no such key"]

    def take_nothing() -> Any: ...

    for error, text in (
        (look_up, "KeyError: 'no such key'"),
        (fail, "cannot be shown"),
        (take_nothing, "TypeError: .* 0 positional arguments"),
    ):
        with pytest.raises(sg.ShapeError, match=f"'the_node'.*: compute raised .*{text}"):
            results(core, device, compute=error)
        with pytest.raises(sg.ShapeError, match=f"'the_node'.*: infer raised .*{text}"):
            results(core, device, infer=error)


@pytest.mark.parametrize("answer", [None, "float32", ["float32"], [(2, 4)], 7])
def test_infer_returns_types(core: sg.Core, answer: Any) -> None:
    with pytest.raises(sg.ShapeError, match=r"'the_node'.*infer of Faulty returned .* of types"):
        results(core, "CPU", infer=lambda *_: answer)


def test_infer_returns_no_more_types_than_there_are_outputs(core: sg.Core) -> None:
    with pytest.raises(sg.ShapeError, match=r"infer of Faulty returned 2 types; .* 1 outputs"):
        results(core, "CPU", infer=lambda node, types, values: [types[0], types[0]])
