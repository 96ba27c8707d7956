"""Models as ONNX Runtime saves them after its optimizations, against the models before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import subgraph as sg
from subgraph.graph.types import Array
from subgraph.ops.contrib import nchwc
from tests.support.contrib import DEVICES, oracle
from tests.support.requirements import Use, floats, refused

pytestmark = pytest.mark.filterwarnings("ignore")


class Net:
    """A model of float32 that is written node by node; weights are random."""

    def __init__(self, *shape: int | str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(len(shape))
        self.input = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        self.last = "x"

    def weight(self, *shape: int) -> str:
        """Return the name of a new weight."""
        array = self.random.standard_normal(shape) / np.sqrt(max(np.prod(shape[1:]), 1))
        return self.constant(array.astype(np.float32))

    def constant(self, array: Array) -> str:
        """Return the name of a new weight of this content."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node behind the last one; return the name of its result."""
        name = f"{op}{len(self.nodes)}"
        given = inputs or (self.last,)
        self.nodes.append(helper.make_node(op, given, [name], name=name, **attributes))
        self.last = name
        return name

    def conv(self, channels: int, filters: int, size: int = 3, group: int = 1, **form: Any) -> str:
        """Add a convolution with a bias."""
        weights = self.weight(filters, channels // group, size, size), self.weight(filters)
        return self.add("Conv", self.last, *weights, group=group, **form)

    def model(self) -> onnx.ModelProto:
        """Return the model, whose result is that of the last node."""
        result = helper.make_tensor_value_info(self.last, TensorProto.FLOAT, None)
        result.ClearField("type")
        graph = helper.make_graph(self.nodes, "net", [self.input], [result], self.weights)
        imports = [helper.make_opsetid("", 17)]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


def saved(model: onnx.ModelProto, folder: Path, level: str = "ALL") -> onnx.ModelProto:
    """Return the model as ONNX Runtime saves it after its optimizations for this machine."""
    options: Any = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}"
    )
    options.optimized_model_filepath = str(folder / "saved.onnx")
    options.log_severity_level = 4
    raw = model.SerializeToString()
    onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


def blocks(folder: Path, net: Net, *expected: str) -> onnx.ModelProto:
    """Return the saved model, which must have these operators on blocked layouts."""
    made = saved(net.model(), folder)
    found = {node.op_type for node in made.graph.node if node.domain == nchwc.NCHWC}
    assert found >= {"Conv", "ReorderOutput", *expected}
    return made


def agree(net: Net, made: onnx.ModelProto, x: Array, atol: float = 2e-5) -> None:
    """Compare the saved model here with the model before in ONNX Runtime."""
    (want,) = oracle(net.model(), {"x": x})
    graph = sg.load(made)
    kept = [(n.op_type, n.domain, n.input, n.attribute) for n in sg.to_onnx(graph).graph.node]
    assert kept == [(n.op_type, n.domain, n.input, n.attribute) for n in made.graph.node]
    for device in DEVICES:
        (found,) = sg.compile_model(graph, device)([x]).values()
        assert found.dtype == want.dtype
        np.testing.assert_allclose(found, want, 1e-5, atol, err_msg=device)


@pytest.mark.parametrize(
    ("channels", "filters", "group"),
    [
        *((3, 16, 1), (1, 8, 1), (4, 12, 1), (7, 9, 1), (16, 4, 1), (40, 24, 1), (12, 16, 1)),
        *((16, 16, 16), (12, 12, 12), (32, 64, 2), (64, 64, 4), (48, 16, 1)),
    ],
)
def test_filters_in_blocks(channels: int, filters: int, group: int, tmp_path: Path) -> None:
    net = Net(2, channels, 7, 6)
    net.conv(channels, filters, group=group, pads=[1, 0, 1, 2], strides=[1, 2])
    agree(net, blocks(tmp_path, net), floats(2, channels, 7, 6))


@pytest.mark.parametrize("size", [1, 9])
def test_layers_of_images(size: int, tmp_path: Path) -> None:
    """Pools, sums, activations, concatenations, other sizes, global pools."""
    net = Net("N", 3, "H", "W")
    net.conv(3, 32, strides=[2, 2], pads=[1, 1, 1, 1])
    net.add("Relu")
    first = net.add("MaxPool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 2])
    net.conv(32, 32, group=32, auto_pad="SAME_UPPER")
    net.add("LeakyRelu", alpha=0.2)
    net.conv(32, 32, 1)
    net.add("Add", first, net.last)
    total = net.add("Relu")
    pooled = net.add("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
    net.add("Concat", total, pooled, axis=1)
    net.conv(64, 20, 1)
    net.add(
        "Clip",
        net.last,
        net.constant(np.array(-1, np.float32)),
        net.constant(np.array(1, np.float32)),
    )
    scales = net.constant(np.array([1, 1, 2, 3], np.float32))
    form = {"mode": "nearest", "nearest_mode": "floor"}
    net.add("Resize", net.last, "", scales, coordinate_transformation_mode="asymmetric", **form)
    net.conv(20, 16, 1)
    net.add("Sigmoid")
    net.add("GlobalAveragePool")
    made = blocks(tmp_path, net, "MaxPool", "AveragePool", "Upsample", "GlobalAveragePool")
    agree(net, made, floats(size % 7, 3, 8 + size, 10))


@pytest.mark.parametrize("mode", ["half_pixel", "align_corners", "asymmetric"])
def test_linear_resizing(mode: str, tmp_path: Path) -> None:
    net = Net(1, 3, 5, 4)
    net.conv(3, 16)
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    form = {"mode": "linear", "coordinate_transformation_mode": mode}
    net.add("Resize", net.last, "", scales, **form)
    net.add("GlobalMaxPool")
    agree(net, blocks(tmp_path, net, "Upsample", "GlobalMaxPool"), floats(1, 3, 5, 4))


def test_channels_last(tmp_path: Path) -> None:
    net = Net(2, 5, 6, 16)  # a whole block on every machine: others are reordered by Transpose
    net.add("Transpose", perm=[0, 3, 1, 2])
    net.conv(16, 12)
    net.add("Transpose", perm=[0, 2, 3, 1])
    made = blocks(tmp_path, net, "ReorderInput")
    of = [helper.get_node_attr_value(n, "channels_last") for n in made.graph.node if "Re" in n.name]
    assert 1 in of
    agree(net, made, floats(2, 5, 6, 16))


def test_filters_of_another_machine_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(1, 24, 5, 5)
    net.conv(24, 24)
    made = blocks(tmp_path, net)
    other = 24 - nchwc.block_channels()  # 16 for 8, 8 for 16
    monkeypatch.setattr(nchwc, "block_channels", lambda: other)
    for device in DEVICES:
        with pytest.raises(sg.ShapeError, match="ORT_ENABLE_EXTENDED"):
            sg.compile_model(sg.load(made), device)([floats(1, 24, 5, 5)])


def _use(op: str, *inputs: Array, **attributes: Any) -> Use:
    return Use(op, inputs, attributes, 1, 1, nchwc.NCHWC)


test_operands_that_do_not_fit_are_refused = refused(
    [
        _use("ReorderInput", floats(2, 16, 3)),
        _use("ReorderOutput", floats(2, 16, 3, 3), channels=17),
        _use("ReorderOutput", floats(2, 16, 3, 3)),
        _use("Conv", floats(2, 16, 3, 3), floats(4, 16, 1, 1)),
        _use("Conv", floats(2, 16, 3, 3), floats(16, 32, 1, 1)),
        _use("Conv", floats(2, 16, 3, 3), floats(16, 16, 1)),
        _use("Conv", floats(2, 16, 3, 3), floats(16, 16, 1, 1), floats(15)),
        _use("Conv", *(floats(2, 16, 3, 3), floats(16, 16, 1, 1), floats(16), floats(16, 3, 3))),
        _use("Upsample", floats(2, 16, 3, 3), scales=[1, 2, 2, 2]),
        _use("Upsample", floats(2, 16, 3, 3), scales=[1, 1, 0, 2]),
        _use("Upsample", floats(2, 16, 3, 3)),
        _use("MaxPool", floats(2, 16, 3, 3), kernel_shape=[4, 4]),
    ]
)
