"""Experimental operators of the standard's first versions, which ONNX Runtime still runs.

They were removed from the standard; converters of CoreML, Caffe2 and CNTK wrote them into models of
opsets up to 9 (ImageScaler in TinyYOLO, Crop in networks that transfer styles).
"""

from __future__ import annotations

import numpy as np

from subgraph.graph.graph import Node
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import Tensor, require, require_rank, require_shape


@function("Affine", "X -> Y", domain="", alpha=1.0, beta=0.0)
def affine(call: Call) -> Results:
    """``alpha * x + beta``."""
    scaled = call.Mul(call.inputs[0], call.attribute("alpha"))
    return [call.Add(scaled, call.attribute("beta"))]


@function("Scale", "input -> output", domain="", scale=1.0)
def scale(call: Call) -> Results:
    """``scale * x``."""
    return [call.Mul(call.inputs[0], call.attribute("scale"))]


def two_factors(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the attributes ``alpha`` and ``beta`` are given."""
    for name in ("alpha", "beta"):
        require(isinstance(node.attrs.get(name), float), "the attribute {} is missing", name)


@function(
    "ScaledTanh", "input -> output", domain="", requires=two_factors, alpha="float", beta="float"
)
def scaled_tanh(call: Call) -> Results:
    """``alpha * tanh(beta * x)``."""
    bent = call.Tanh(call.Mul(call.inputs[0], call.attribute("beta")))
    return [call.Mul(bent, call.attribute("alpha"))]


@function(
    "ParametricSoftplus", "X -> Y", domain="", requires=two_factors, alpha="float", beta="float"
)
def parametric_softplus(call: Call) -> Results:
    """``alpha * log(1 + exp(beta * x))``."""
    bent = call.Softplus(call.Mul(call.inputs[0], call.attribute("beta")))
    return [call.Mul(bent, call.attribute("alpha"))]


def scaler_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the input holds images and each channel has a bias."""
    require_rank("input", x, 4)
    bias = Tensor("float32", (len(node.attrs.get("bias") or ()),))
    require_shape("bias", bias, (x.shape[1],), "one for each channel")


@function(
    "ImageScaler", "input -> output", domain="", requires=scaler_operands, bias="floats", scale=1.0
)
def image_scaler(call: Call) -> Results:
    """``scale * x`` plus a number for each channel."""
    x = call.inputs[0]
    bias = np.array(call.attribute("bias"), np.float32).reshape(-1, 1, 1)
    scaled = call.Mul(x, call.attribute("scale"))
    return [call.Add(scaled, call.constant(bias, call.dtype(x)))]


def crop_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the input holds images from which the borders can be cut."""
    require_rank("input", x, 4)
    border, size = (list(node.attrs.get(name) or ()) for name in ("border", "scale"))
    require(len(border) == 4, "border is {}; four numbers are needed", border)
    require(min(border) >= 0, "border is {}; no number may be negative", border)
    require(len(size) in (0, 2), "scale is {}; it is height and width", size)
    require(min(size, default=0) >= 0, "scale is {}; no number may be negative", size)
    left, top, *end = border
    bottom, right = size or end[::-1]
    for name, pixels, begin, end_ in (("height", -2, top, bottom), ("width", -1, left, right)):
        found = x.shape[pixels]
        require(begin + end_ <= found, "{} of {} is less than {} + {}", name, found, begin, end_)


@function("Crop", "input -> output", domain="", requires=crop_operands, border="ints", scale="ints")
def crop(call: Call) -> Results:
    """Remove the border of images; with ``scale`` return that height and width behind it."""
    left, top, right, bottom = call.attribute("border")
    size = call.attribute("scale")
    if not size:
        return [call.Pad(call.inputs[0], [0, 0, -top, -left, 0, 0, -bottom, -right])]
    ends = [top + size[0], left + size[1]]
    return [call.Slice(call.inputs[0], [top, left], ends, [2, 3])]


@function("DynamicSlice", "data, starts, ends, axes? -> output", domain="")
def dynamic_slice(call: Call) -> Results:
    """Slice without steps, as the standard does since opset 10."""
    return [call.Slice(*call.inputs)]
