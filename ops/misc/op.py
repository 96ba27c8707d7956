"""Requirements of losses, random numbers, windows, training steps and other single operators."""

from __future__ import annotations

import numpy as np

from subgraph.graph.graph import Node
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    int_list,
    require,
    require_axes,
    require_choice,
    require_dtype,
    require_rank,
    require_same_dtype,
    require_shape,
    require_single,
)

from . import reference


def loss_operands(node: Node, scores: Tensor, labels: Tensor, weight: Tensor | None = None) -> None:
    """Raise ShapeError unless each score has a label, which is one of the classes (12 and later).

    Args:
        node: A NegativeLogLikelihoodLoss or SoftmaxCrossEntropyLoss.
        scores: Scores, [batch, classes, ...].
        labels: Index of a class for each score, [batch, ...], or ``ignore_index``.
        weight: A weight for each class; None: all are 1.
    """
    require(scores.rank >= 2, "the scores have shape {}; they need classes", list(scores.shape))
    require_dtype("labels", labels, "int64", "int32")
    shape = (scores.shape[0], *scores.shape[2:])
    require_shape("labels", labels, shape, "those of the scores without the classes")
    require_choice(node, "reduction", "mean", "mean", "sum", "none")
    classes = scores.shape[1]
    require_shape("weight", weight, (classes,), "one for each class")
    known, ignored = labels.known, node.attrs.get("ignore_index")
    if known is not None and known.size and not known.dtype.hasobject:
        counted = known if ignored is None else known[known != ignored]
        least, most = (int(end(counted, initial=0)) for end in (np.min, np.max))
        wrong = least if least < 0 else most
        require(least >= 0 and most < classes, "label {} of {} classes", wrong, classes)


def swiglu_operands(node: Node, a: Tensor, b: Tensor) -> None:
    """Raise ShapeError unless both operands have one shape: nothing broadcasts (opset 28).

    Args:
        node: The SwiGLU node.
        a: The gate, to which the activation is applied.
        b: Its factor.
    """
    require_same_dtype(a, b)
    require_shape("B", b, a.shape, "the shape of A")


def causal_convolution_operands(
    node: Node,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
) -> None:
    """Raise ShapeError unless each channel has a filter, and the state its size (opset 27).

    Args:
        node: The CausalConvWithState node.
        x: Input, [batch, channels, steps].
        weight: Filters, [channels, 1, taps].
        bias: A number for each channel; None: 0.
        past_state: The inputs before the first step, [batch, channels, taps - 1]; None: 0.
    """
    require_rank("input", x, 3)
    require_rank("weight", weight, 3)
    batch, channels, _ = x.shape
    taps = weight.shape[2]
    require_shape("weight", weight, (channels, 1, taps), "one filter for each channel")
    require(taps >= 1, "the filters are empty")
    require(x.shape[2] >= 1, "the input has shape {}: no elements to filter", x.shape)
    require_shape("bias", bias, (channels,), "one for each channel")
    state = (batch, channels, taps - 1)
    require_shape("past_state", past_state, state, "as many places as a filter has before its last")
    require_choice(node, "activation", "none", "none", "silu", "swish")


def shape_attribute(node: Node) -> None:
    """Raise ShapeError if a size of the attribute ``shape`` is negative (opsets 1 to 22)."""
    shape = node.attrs.get("shape") or ()
    require(all(dim >= 0 for dim in shape), "shape {} has a negative dimension", shape)


def like_operands(node: Node, x: Tensor) -> None:
    """Accept every tensor: the result has its shape."""


def multinomial_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless each row has classes (ONNX Multinomial, opsets 7 to 22)."""
    require_rank("input", x, 2)
    require(x.shape[1] >= 1, "there are no classes")
    size = node.attrs.get("sample_size", 1)
    require(size >= 0, "sample_size is {}", size)


def window_operands(node: Node, size: Tensor) -> None:
    """Raise ShapeError unless the size is a scalar of at least 1 (HannWindow etc., opset 17)."""
    require_rank("size", size, 0)
    require_dtype("size", size, "int64", "int32")
    for count in int_list(node, "size", size) or ():
        require(count >= 1, "size is {}; it must be at least 1", count)


def mel_operands(
    node: Node, bins: Tensor, length: Tensor, rate: Tensor, lower: Tensor, upper: Tensor
) -> None:
    """Raise ShapeError unless all operands are single numbers (ONNX MelWeightMatrix, opset 17).

    Args:
        node: The node.
        bins: Number of mel bands.
        length: Length of the DFT.
        rate: Sampling rate in Hz.
        lower: Lower edge of the lowest band in Hz.
        upper: Upper edge of the highest band in Hz.
    """
    for name, operand in (("num_mel_bins", bins), ("dft_length", length), ("sample_rate", rate)):
        require_single(name, operand, "int64", "int32")
        for count in int_list(node, name, operand) or ():
            require(count >= 1, "{} is {}", name, count)
    for name, operand in (("lower_edge_hertz", lower), ("upper_edge_hertz", upper)):
        require_single(name, operand)
        if operand.known is not None and operand.known.size:
            edge = operand.known.reshape(-1)[0]
            require(edge >= 0, "{} is {}; a frequency is not negative", name, edge)


def crop_operands(node: Node, x: Tensor, shape: Tensor) -> None:
    """Raise ShapeError unless each axis has a size (ONNX CenterCropPad, opset 18).

    Args:
        node: The node; without ``axes`` all axes are meant.
        x: The tensor.
        shape: The new size of each axis.
    """
    axes = node.attrs.get("axes")
    count = x.rank if axes is None else len(require_axes(x.rank, axes))
    require_shape("shape", shape, (count,), "a size for each axis")
    dims = int_list(node, "shape", shape) or []
    require(all(dim >= 0 for dim in dims), "shape {} has a negative dimension", dims)


def det_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the input holds square matrices (ONNX Det, opsets 11 to 22)."""
    require(x.rank >= 2, "the input has shape {}; it must hold matrices", list(x.shape))
    require(x.shape[-1] == x.shape[-2], "a matrix is {} by {}", x.shape[-2], x.shape[-1])


_TRAINING = "ai.onnx.preview.training"


def step_operands(node: Node, rate: Tensor, count: Tensor, *tensors: Tensor) -> None:
    """Raise ShapeError unless each tensor has a gradient and moments of its shape (opset 1).

    Args:
        node: An Adagrad, Adam or Momentum node.
        rate: The learning rate.
        count: Number of steps so far.
        tensors: All tensors to train, then their gradients, then each kind of moment.
    """
    require_single("R", rate)
    require_single("T", count)
    if node.op_type == "Momentum":
        require_choice(node, "mode", "", "standard", "nesterov")
    groups = 4 if node.op_type == "Adam" else 3
    many = len(tensors) // groups
    require(len(tensors) == many * groups, "{} tensors in groups of {}", len(tensors), groups)
    for k, each in enumerate(tensors):
        require_shape(f"input {k + 2}", each, tensors[k % many].shape, "that of its tensor")


# The operators of this family, each in all its versions.
declare("Bernoulli", requires=like_operands, compute=reference.bernoulli)
declare("BlackmanWindow", "HammingWindow", "HannWindow", requires=window_operands)
declare("CausalConvWithState", requires=causal_convolution_operands)
declare("CenterCropPad", requires=crop_operands)
declare("Det", requires=det_operands)
declare("MelWeightMatrix", requires=mel_operands)
declare("Multinomial", requires=multinomial_operands, compute=reference.multinomial)
declare(
    "NegativeLogLikelihoodLoss",
    "SoftmaxCrossEntropyLoss",
    requires=loss_operands,
    compute=reference.loss,
)
declare("RandomNormal", "RandomUniform", requires=shape_attribute)
declare("RandomNormalLike", "RandomUniformLike", requires=like_operands)
declare("SwiGLU", requires=swiglu_operands)
declare("Adagrad", "Adam", "Momentum", domain=_TRAINING, requires=step_operands)
