"""Quantized convolutions that are rewritten: residuals in their epilogue, transposed ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.quantized_models import (
    INTEGERS,
    Builder,
    by_devices,
    drawn,
    operators,
)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    ("channels", "block", "attributes"),
    [
        ((24, 16), 2, {}),
        ((16, 32), 3, {"auto_pad": "VALID"}),
        ((20, 5), 2, {"pads": [0] * 4, "output_padding": [0, 0]}),
        ((16, 16), 2, {"pads": [1, 1, 0, 0]}),
        ((16, 16), 2, {"output_padding": [1, 0]}),
        ((16, 16), 2, {"dilations": [2, 1]}),
        ((16, 8), 2, {"group": 2}),
    ],
)
def test_transposed_convolutions(
    channels: tuple[int, int],
    block: int,
    attributes: dict[str, Any],
    per_channel: bool,
    dtype: str,
) -> None:
    b = Builder(11, dtype)
    b.scale("x", 0.02)
    inputs, outputs = channels
    w, scale = b.weight("w", (inputs, outputs, block, block), 1 if per_channel else None)
    groups = attributes.get("group", 1)
    scales = np.float32(0.02) * np.tile(np.broadcast_to(scale, outputs), groups)
    c = b.bias("c", outputs * groups, scales)
    real = b.node(
        "ConvTranspose", [b.dequantize("x"), w, c], "conv", strides=[block] * 2, **attributes
    )
    b.node("QuantizeLinear", [real, *b.scale("y", 0.05)], "y")
    model = b.model({"x": (dtype, (2, inputs, 5, 6))}, "y")
    fits = not any(attributes.get("output_padding", ())) and not any(attributes.get("pads", ()))
    fits = fits and "dilations" not in attributes and groups == 1
    found = operators(model)
    assert (found[-2:] == ["FusedQLinearConv", "DepthToSpace"]) == fits
    assert ("ConvTranspose" in found) != fits
    drawn_ = {"x": drawn(b, (2, inputs, 5, 6))}
    got, real_ = by_devices(model, drawn_)
    assert np.abs(got.astype(np.int32) - real_.astype(np.int32)).max() <= 1
    assert np.mean(got != real_) < 0.02


def test_transposed_convolutions_of_new_scales() -> None:
    """The scale of the bias, and zero points, may change to ones that the product does not take."""
    b = Builder(12)
    b.scale("x", 0.02)
    w, scale = b.weight("w", (16, 16, 2, 2), 1)
    c = b.bias("c", 16, np.float32(0.02) * scale)
    real = b.node("ConvTranspose", [b.dequantize("x"), w, c], "conv", strides=[2, 2])
    b.node("QuantizeLinear", [real, *b.scale("y", 0.05)], "y")
    model = b.model({"x": ("uint8", (1, 16, 5, 6))}, "y")
    inputs = {"x": drawn(b, (1, 16, 5, 6))}
    compiled = sg.compile_model(sg.load(model), "CPU", INTEGERS)
    compiled(**inputs)
    changes: dict[str, Array] = {
        "c_scale": np.full(16, 0.001, np.float32),
        "w_zero": np.arange(16, dtype=np.int8),
        "w_scale": np.full(16, 0.01, np.float32),
    }
    for name, array in changes.items():
        compiled.parameters[name].assign(array)
        for each in model.graph.initializer:
            if each.name == name:
                each.CopyFrom(numpy_helper.from_array(array, name))
        wanted = sg.compile_model(sg.load(model), "CPU", INTEGERS)(**inputs)["y"]
        np.testing.assert_array_equal(compiled(**inputs)["y"], wanted)


def test_transposed_convolutions_of_scales_for_each_input_channel() -> None:
    """A bias may have the scale of the sums, channel by channel, if there are as many channels."""
    b = Builder(12)
    x_scale = np.linspace(0.01, 0.03, 16, dtype=np.float32)
    real_x = b.node(
        "DequantizeLinear",
        ["x", b.constant("x_scale", x_scale), b.constant("x_zero", np.full(16, 120, np.uint8))],
        "real_x",
        axis=1,
    )
    w, scale = b.weight("w", (16, 16, 2, 2), None)
    c = b.bias("c", 16, x_scale * scale)
    real = b.node("ConvTranspose", [real_x, w, c], "conv", strides=[2, 2])
    b.node("QuantizeLinear", [real, *b.scale("y", 0.05)], "y")
    model = b.model({"x": ("uint8", (1, 16, 5, 6))}, "y")
    assert "ConvTranspose" in operators(model)
    got, wanted = by_devices(model, {"x": drawn(b, (1, 16, 5, 6))})
    assert np.abs(got.astype(np.int32) - wanted.astype(np.int32)).max() <= 1


def sum_model(b: Builder, first: str, after: str, reads: str) -> Any:
    """A convolution, and its sum with another or with the input; ``reads``: what else is read."""
    shape = (2, 24, 6, 7)
    b.scale("x", 0.03)
    w, scale = b.weight("w", (24, 24, 1, 1), 0)
    real = {"x": b.dequantize("x")}
    c = b.bias("c", 24, np.float32(0.03) * scale)
    real["y"] = b.quantize(b.node("Conv", [real["x"], w, c], "conv"), "y", 0.05)
    if first == "conv":
        real["r"] = b.quantize(b.node("Conv", [real["x"], w], "other"), "r", 0.04)
    total = b.node("Add", [real["y"], real["r" if first == "conv" else "x"]], "sum")
    if after == "Clip":
        bounds = b.constant("l", np.float32(-1)), b.constant("h", np.float32(1))
        total = b.node("Clip", [total, *bounds], "act")
    elif after:
        total = b.node(after, [total], "act")
    if reads:
        total = b.node("Mul", [b.quantize(total, "z", 0.06), real[reads]], "product")
    result = "p" if reads else "z"
    b.node("QuantizeLinear", [total, *b.scale(result, 0.06)], result)
    return b.model({"x": (b.dtype, shape)}, result), {"x": drawn(b, shape)}


def check_apart(model: ModelProto, inputs: dict[str, Array], results: Iterable[str]) -> None:
    """Compare with the model that returns the convolutions' results, too: sums are apart."""
    apart = type(model)()
    apart.CopyFrom(model)
    for name in results:
        kind = apart.graph.input[0].type.tensor_type.elem_type
        image = helper.make_tensor_value_info(name, kind, inputs["x"].shape)
        apart.graph.output.append(image)
    assert "FusedElementwise" in operators(apart)
    got, wanted = (
        sg.compile_model(sg.load(each), "CPU", INTEGERS)(**inputs)["z"] for each in (model, apart)
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("first", ["conv", "input"])
@pytest.mark.parametrize("after", ["", "Relu", "Clip", "Sigmoid"])
def test_residuals(dtype: str, first: str, after: str) -> None:
    model, inputs = sum_model(Builder(3, dtype), first, after, "")
    convolutions = 1 + (first == "conv")
    names = sorted(operators(model))
    sums = ["FusedElementwise"] if after == "Sigmoid" else []
    assert names == sorted(["FusedQLinearConv"] * convolutions + sums)
    check_apart(model, inputs, ("y", "r")[:convolutions])


def test_residuals_of_integer_operators() -> None:
    """QLinearConv and QLinearAdd, as ONNX Runtime's quantizer writes without QDQ."""
    b = Builder(6)
    for name, scale in (("x", 0.03), ("w", 0.02), ("y", 0.05), ("z", 0.06)):
        b.scale(name, scale)
    b.constant("w", b.rng.integers(0, 128, (24, 24, 1, 1)).astype(np.uint8))
    x, w, y, z = ([name, *b.scales[name]] for name in "xwyz")
    b.node("QLinearConv", [*x, *w, *y[1:]], "y")
    b.node("QLinearAdd", [*y, *x, *z[1:]], "z", domain="com.microsoft")
    model = b.model({"x": ("uint8", (2, 24, 6, 7))}, "z")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert operators(model) == ["FusedQLinearConv"]
    check_apart(model, {"x": drawn(b, (2, 24, 6, 7))}, ["y"])


@pytest.mark.parametrize("reads", ["y", "x"])
def test_residuals_of_results_that_others_read(reads: str) -> None:
    model, inputs = sum_model(Builder(4), "input", "Relu", reads)
    assert sorted(operators(model)) == ["FusedElementwise", "FusedQLinearConv"]
    got, real = by_devices(model, inputs)
    assert np.abs(got.astype(np.int32) - real.astype(np.int32)).max() <= 1


def test_residuals_of_new_scales() -> None:
    """Scales are weights that may change after compile, also to ones that are out of range."""
    model, inputs = sum_model(Builder(5), "conv", "Relu", "")
    graph = sg.load(model)
    compiled = sg.compile_model(graph, "CPU", INTEGERS)
    compiled(**inputs)
    for name, scale in [("z_scale", 0.3), ("y_scale", 1e-20), ("z_scale", 1e-25), ("r_scale", 0.5)]:
        compiled.parameters[name].assign(np.float32(scale))
        for each in model.graph.initializer:
            if each.name == name:
                each.CopyFrom(numpy_helper.from_array(np.array(scale, np.float32), name))
        wanted = sg.compile_model(sg.load(model), "CPU", INTEGERS)(**inputs)["z"]
        np.testing.assert_array_equal(compiled(**inputs)["z"], wanted)
