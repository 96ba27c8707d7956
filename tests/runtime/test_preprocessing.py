"""Preprocessing: steps that become nodes of the graph, compared with NumPy and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.runtime.preprocessing import preprocessed
from tests.support.peer import session_of
from tests.support.small_network import net

DEVICES = ["REFERENCE", "CPU"]


@pytest.fixture
def core() -> sg.Core:
    return sg.Core()


def numpy_of(image: Array, mean: Any, scale: Any) -> Array:
    data = (image.astype(np.float32) - np.float32(mean)) / np.float32(scale)
    return np.ascontiguousarray(np.moveaxis(data, -1, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_preprocessing_becomes_nodes(core: sg.Core, device: str) -> None:
    image = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    mean, scale = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
    steps = sg.Preprocess(dtype="uint8", layout="NHWC", mean=mean, scale=scale)
    model = core.compile_model(net(), device, preprocess={"x": steps})
    assert str(model.inputs[0]) == "x: uint8[N, 8, 8, 3]"
    plain = core.compile_model(net(), device)
    want = plain(numpy_of(image, mean, scale))
    for got, each in zip(model(image).values(), want.values(), strict=True):
        np.testing.assert_allclose(got, each, rtol=1e-4, atol=1e-4)


def test_resize_agrees_with_onnxruntime(core: sg.Core) -> None:
    image = np.random.default_rng(0).random((1, 5, 11, 3), np.float32)
    graph = preprocessed(net(), {"x": {"layout": "NHWC", "size": (None, "W")}})
    assert str(graph.inputs[0].type) == "float32[N, ?, W, 3]"
    session = session_of(graph)
    want = session.run(None, {"x": image})
    got = core.compile_model(graph, "REFERENCE")(image)
    for one, other in zip(got.values(), want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_one_number_needs_no_layout(core: sg.Core) -> None:
    x = sg.input("x", ("N", 4))
    graph = sg.Graph([x], [ops.Relu(x)])
    model = core.compile_model(graph, "REFERENCE", preprocess={"x": {"mean": 1, "scale": 2}})
    np.testing.assert_allclose(model([[[1, 3, 5, -1]]])[0], [[0, 1, 2, 0]])
    assert [n.op_type for n in graph.nodes] == ["Relu"]
    same_again = core.compile_model(graph, "REFERENCE", preprocess={"x": {}})
    assert same_again([[[1, -3, 5, -1]]])[0].tolist() == [[1, 0, 5, 0]]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({"z": {}}, "no input 'z'"),
        ({"x": {"men": 1}}, "did you mean 'mean'"),
        ({"x": {"layout": "HNWC"}}, "layout 'HNWC'"),
        ({"x": {"layout": "HWC"}}, "cannot become NCHW"),
        ({"x": {"dtype": "uint9"}}, "uint9"),
        ({"x": {"mean": (1, 2)}}, "has 3 channels, mean has 2 numbers"),
        ({"x": {"scale": 0}}, "scale of input 'x' is zero"),
    ],
)
def test_wrong_preprocessing(core: sg.Core, steps: Any, message: str) -> None:
    with pytest.raises(sg.ConfigError, match=message):
        core.compile_model(net(), "REFERENCE", preprocess=steps)
