"""Arguments of another type are errors of Subgraph's own, which say what to give."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from tests.support.opencl import needs_device

X = np.ones((2, 3), np.float32)
WRONG: list[Any] = [3, None, object(), 2.5, [1], [[1], [2, 3]]]


def graph() -> sg.Graph:
    x = sg.input("x", (2, 3))
    return sg.Graph([x], [ops.Relu(x, name="relu")], "net")


def waits(timeout: Any) -> None:
    request = sg.compile_model(graph(), "REFERENCE").create_infer_request()
    request.start_async(X)
    request.wait()
    request.wait(timeout)


def assigns(wrong: Any) -> None:
    parameter = sg.parameter("w", np.ones(2)).parameter
    assert parameter is not None
    parameter.assign(wrong)


CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "save to": (lambda wrong: sg.save(graph(), wrong), "give the path of a file"),
    "save": (lambda wrong: sg.save(wrong, "never.onnx"), "is no sg.Graph"),
    "inputs": (lambda wrong: sg.Graph(wrong, []), "the graph's inputs"),
    "node": (lambda wrong: graph().node(wrong), "has no node"),
    "assign": (lambda wrong: assigns(wrong), "parameter 'w'"),
    "explain": (lambda wrong: sg.explain(graph(), wrong), "give a node or its name"),
    "explain in": (lambda wrong: sg.explain(wrong, "relu"), "give the graph"),
    "device": (lambda wrong: sg.Core().device(wrong), "the name of a device"),
    "subgraph_node": (lambda wrong: sg.subgraph_node(wrong), "the inner graph"),
    "region_model": (lambda wrong: sg.region_model(wrong), "a subgraph node, or its inner graph"),
    "inline_subgraphs": (lambda wrong: sg.inline_subgraphs(wrong), "give a graph"),
    "queue": (lambda wrong: sg.InferQueue(wrong), "requests of a compiled model"),
    "extension": (lambda wrong: sg.Core().add_extension(wrong), r"give an sg\.Operator"),
    "check_partition": (lambda wrong: sg.testing.check_partition(wrong, graph()), "before and"),
    "preprocess": (
        lambda wrong: sg.compile_model(graph(), "REFERENCE", preprocess={"x": wrong}),
        r"sg\.Preprocess\(\.\.\.\) or a dict",
    ),
}


def model() -> sg.CompiledModel:
    return sg.compile_model(graph(), "REFERENCE")


UNHASHABLE: list[Any] = [[1], {"a": 1}, np.zeros(2), {1}]
KEYS: dict[str, tuple[Callable[[Any], object], str]] = {
    "result": (lambda wrong: model()(X)[wrong], "has no output"),
    "get_output": (lambda wrong: ran().get_output(wrong), "has no output"),
    "set_output": (lambda wrong: ran().set_output(wrong, X), "has no output"),
    "set_input": (lambda wrong: ran().set_input(wrong, X), "has no input"),
    "get_input": (lambda wrong: ran().get_input(wrong), "has no input"),
    "property": (lambda wrong: model().get_property(wrong), "named by a string"),
    "parameter": (lambda wrong: model().parameters[wrong], "there is no parameter"),
    "pass": (lambda wrong: passes.apply_pass(graph(), wrong), "not a pass"),
    "import for": (lambda wrong: sg.import_model(b"", wrong), "the name of a device"),
    "versions": (lambda wrong: sg.get_versions(wrong), "the name of a device"),
    "selector": (lambda wrong: sg.register_selector(wrong, sg.SubgraphSelector), "a string"),
    "a property": (lambda wrong: sg.register_property(wrong, sg.SubgraphProperty), "a string"),
    "weights": (lambda wrong: sg.region_model(graph(), weights=wrong), "it is 'inside' or"),
    "capture": (lambda wrong: sg.capture(wrong), "a value of the graph around"),
    "print_graph": (lambda wrong: sg.print_graph(wrong), "a graph, as sg.load returns"),
    "scale": (lambda wrong: sg.Preprocess(scale=[wrong]), "take a number or several"),
}


def ran() -> sg.InferRequest:
    request = model().create_infer_request()
    request.infer(X)
    return request


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("wrong", UNHASHABLE, ids=lambda v: type(v).__name__)
def test_a_key_that_cannot_be_one_is_named(name: str, wrong: Any) -> None:
    call, text = KEYS[name]
    with pytest.raises(sg.SubgraphError, match=text):
        call(wrong)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda v: type(v).__name__)
def test_a_wrong_argument_is_named(name: str, wrong: Any) -> None:
    call, text = CALLS[name]
    with pytest.raises(sg.SubgraphError, match=text):
        call(wrong)


@pytest.mark.parametrize(
    ("device", "option", "wrong"),
    [
        *(("REFERENCE", "NODE_LIMIT", v) for v in ("nan", float("nan"), float("inf"), b"x", " ")),
        *(("CPU", "COMPILE_TIMEOUT", v) for v in ("nan", float("nan"), b"x", " ", -1)),
        ("BATCH:CPU(2)", "AUTO_BATCH_TIMEOUT", 10**30),
        pytest.param("OPENCL", "DEVICE_ID", "nan", marks=needs_device),
        pytest.param("OPENCL", "DEVICE_ID", "99", marks=needs_device),
    ],
)
def test_a_wrong_option_is_named(device: str, option: str, wrong: Any) -> None:
    """Core reads the limits of a compilation before the device has checked them."""
    for call in (sg.compile_model, sg.query_model):
        with pytest.raises(sg.ConfigError, match=f"option '{option}' .*{re.escape(repr(wrong))}"):
            call(graph(), device, {option: wrong})


def test_a_wrong_time_to_wait_and_no_dict_of_steps() -> None:
    wrong: Any = "soon"
    with pytest.raises(sg.ConfigError, match="give seconds to wait, or None"):
        waits(wrong)
    with pytest.raises(sg.ConfigError, match="preprocessing by input name, in a dict"):
        sg.compile_model(graph(), "REFERENCE", preprocess=wrong)
