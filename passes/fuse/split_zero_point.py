"""The pass "SplitZeroPoint": ConvInteger whose input has a computed zero point.

Dynamically quantized models have such nodes. The convolution then runs without the zero point, over
an input that is padded with it. The zero point times the sum of each output channel's weights is
subtracted from the result.
"""

from __future__ import annotations

import math

import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import ONNX_DTYPE
from subgraph.passes._patterns import Context, fusion_pass, is_op, part_of, shape_of


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
        x = part_of(node, "Pad", x, part_of(node, "Constant", value=whole), zero)
    inputs = [x, weight] if own is None else [x, weight, None, own]
    conv = Node("ConvInteger", inputs, name=node.name, version=10, attrs=attributes)
    conv.metadata, conv.outputs[0].type = node.metadata, node.outputs[0].type
    to = ONNX_DTYPE["int32"]
    axes = tuple(range(1, len(dims)))
    sums = part_of(node, "ReduceSum", part_of(node, "Cast", weight, to=to), version=11, axes=axes)
    if own is not None:
        count = part_of(node, "Constant", value=np.array(math.prod(dims[1:]), np.int32))
        part = part_of(node, "Mul", part_of(node, "Cast", own, to=to), count)
        if shape_of(own) != ():
            part = part_of(node, "Reshape", part, version=1, shape=(-1, *(1,) * len(axes)))
        sums = part_of(node, "Sub", sums, part)
    column = part_of(node, "Reshape", sums, version=1, shape=(-1, *(1,) * (len(dims) - 2)))
    added = part_of(node, "Mul", part_of(node, "Cast", zero, to=to), column)
    result = part_of(node, "Sub", conv.outputs[0], added)
    node.name = f"{node.name}.unsplit"
    return result
