"""The pass "SplitZeroPoint": ConvInteger whose input has a computed zero point.

Dynamically quantized models have such nodes. The convolution then runs without the zero point, over
an input that is padded with it. The zero point times the sum of each output channel's weights is
subtracted from the result.
"""

from __future__ import annotations

import math

import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import ONNX_DTYPE, TensorType, dtype_of
from subgraph.passes._patterns import Context, fusion_pass, is_op, shape_of


@fusion_pass("SplitZeroPoint", "integers", "ConvInteger")
def split_zero_point(graph: Graph) -> Graph:
    """Return a copy of ``graph`` in which no ConvInteger has a computed zero point."""
    graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        if is_op(node, "ConvInteger") and len(node.inputs) > 2:
            made = _split(context, node)
            if made is not None:
                replaced[node.outputs[0]] = made
    graph.rewire(replaced)
    return graph


def _split(context: Context, node: Node) -> Value | None:
    """Return the replacement of a ConvInteger's output; None if the node stays."""
    x, weight, zero = node.inputs[:3]
    own = node.inputs[3] if len(node.inputs) > 3 else None
    if x is None or weight is None or zero is None or context.is_weight(zero):
        return None
    dims = [dim for dim in shape_of(weight) or () if isinstance(dim, int)]
    plain = node.attrs.get("auto_pad", "NOTSET") in ("", "NOTSET")
    fits = plain and shape_of(zero) == () and len(dims) == len(shape_of(weight) or ()) > 2
    if not fits or not context.is_weight(weight) or not (own is None or context.is_weight(own)):
        return None
    attributes = dict(node.attrs)
    pads = attributes.pop("pads", ())
    if any(pads):
        half = len(pads) // 2
        whole = np.array([0, 0, *pads[:half], 0, 0, *pads[half:]], np.int64)
        x = _made(node, "Pad", x, _constant(node, whole), zero)
    inputs = [x, weight] if own is None else [x, weight, None, own]
    conv = Node("ConvInteger", inputs, name=node.name, version=10, attrs=attributes)
    node.name = f"{node.name}.unsplit"
    conv.metadata, conv.outputs[0].type = node.metadata, node.outputs[0].type
    to = ONNX_DTYPE["int32"]
    axes = tuple(range(1, len(dims)))
    sums = _made(node, "ReduceSum", _made(node, "Cast", weight, to=to), version=11, axes=axes)
    if own is not None:
        count = _constant(node, np.array(math.prod(dims[1:]), np.int32))
        part = _made(node, "Mul", _made(node, "Cast", own, to=to), count)
        if shape_of(own) != ():
            part = _made(node, "Reshape", part, version=1, shape=(-1, *(1,) * len(axes)))
        sums = _made(node, "Sub", sums, part)
    column = _made(node, "Reshape", sums, version=1, shape=(-1, *(1,) * (len(dims) - 2)))
    added = _made(node, "Mul", _made(node, "Cast", zero, to=to), column)
    return _made(node, "Sub", conv.outputs[0], added)


def _made(
    node: Node, op_type: str, *inputs: Value, version: int = 13, **attributes: object
) -> Value:
    """Return the output of a new node that replaces a part of ``node``."""
    origin = {"origin": (node.metadata or {}).get("origin") or node.name.removesuffix(".unsplit")}
    return Node(op_type, inputs, version=version, attrs=attributes, metadata=origin).outputs[0]


def _constant(node: Node, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Value:
    value = _made(node, "Constant", value=array)
    value.type = TensorType(dtype_of(array), array.shape)
    return value
