"""Losses and the steps of optimizers (Adagrad, Adam, Momentum): requirements.

None has a lowering. On CPU and OPENCL the pass "ExpandFunctions" replaces losses by the function
body of the standard; the steps of optimizers run on the reference.
"""

from __future__ import annotations

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import TensorType, ValueType
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    decoded,
    require,
    require_choice,
    require_dtype,
    require_shape,
    require_single,
)
from subgraph.ops.elementwise.op import Types, Values, tensor

from . import reference

_TRAINING = "ai.onnx.preview.training"


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


def likelihood_type(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the type of a NegativeLogLikelihoodLoss, also of bfloat16 before opset 22.

    The function body of SoftmaxCrossEntropyLoss, which takes bfloat16 from opset 13 on, has a
    NegativeLogLikelihoodLoss of opset 13, whose schema does not.

    Args:
        node: The NegativeLogLikelihoodLoss.
        types: Types of scores, labels and weights, None while unknown.
        values: Contents of constant inputs; not read.
    """
    scores, labels = tensor(types[0]), tensor(types[1])
    if scores is None:
        return [None]
    if decoded(node.attrs.get("reduction", "mean")) != "none":
        return [TensorType(scores.dtype, ())]
    if scores.shape is not None:
        return [TensorType(scores.dtype, (scores.shape[0], *scores.shape[2:]))]
    return [TensorType(scores.dtype, None if labels is None else labels.shape)]


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
declare(
    "NegativeLogLikelihoodLoss",
    requires=loss_operands,
    infer=likelihood_type,
    compute=reference.loss,
    by_body=True,
)
declare("SoftmaxCrossEntropyLoss", requires=loss_operands, compute=reference.loss, by_body=True)
declare("Adagrad", "Adam", "Momentum", domain=_TRAINING, requires=step_operands)
