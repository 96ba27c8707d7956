"""The pass "FloatProducts": integer products without an integer kernel become float32 products.

These are QLinearMatMul of two computed operands, as in attention (the integer kernels need one
packed operand, which must be a weight), and depthwise ConvInteger (the integer kernels sum over
many channels). 8-bit integers minus their zero points are multiplied as float32. Sums of up to
`_EXACT_TERMS` products are exact, and the result is scaled and rounded once, as QLinearMatMul
requires.
"""

from __future__ import annotations

import math

import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import ONNX_DTYPE, Shape
from subgraph.passes.patterns import (
    Context,
    dtype_of,
    fusion_pass,
    is_op,
    part_of,
    shape_of,
)

# A difference of two 8-bit integers is at most 255 in absolute value, and 258 * 255**2 <= 2**24, up
# to which float32 holds every integer.
_EXACT_TERMS = 258


@fusion_pass("FloatProducts", "integers", "QLinearMatMul", "ConvInteger")
def float_products(graph: Graph) -> Graph:
    """Return a copy of ``graph`` with float32 products between conversions instead."""
    graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        if is_op(node, "QLinearMatMul") and not context.is_weight(node.inputs[3]):
            # The operand may be the result of a product that was replaced before; `rewire` comes
            # only after the loop.
            a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (
                value if value is None else replaced.get(value, value) for value in node.inputs
            )
            single = (a_scale, a_zero, b_scale, b_zero, y_scale, y_zero)
            # The conversions below apply one scale and zero point to the whole operand. A scale of
            # one axis would give the product of two vectors, a scalar, that axis.
            if not all(shape_of(number) in ((), (1,)) for number in single):
                continue
            if shape_of(node.outputs[0]) == ():
                continue
            left, right = _unscaled(node, a, a_zero, ()), _unscaled(node, b, b_zero, ())
            product = part_of(node, "MatMul", left, right)
            a_wide, b_wide, y_wide = (_wide(node, each) for each in (a_scale, b_scale, y_scale))
            scaled = part_of(node, "Mul", product, part_of(node, "Mul", a_wide, b_wide))
            replaced[node.outputs[0]] = part_of(node, "QuantizeLinear", scaled, y_wide, y_zero)
        elif is_op(node, "ConvInteger"):
            sums = _depthwise(node, context)
            if sums is not None:
                replaced[node.outputs[0]] = sums
    graph.rewire(replaced)
    return graph


def _depthwise(node: Node, context: Context) -> Value | None:
    """Return the result of a ConvInteger with one channel in each group; None for others."""
    x, weight, zero, own = (*node.inputs, None, None)[:4]
    shape = [] if weight is None else [d for d in shape_of(weight) or () if isinstance(d, int)]
    if weight is None or not context.is_weight(weight) or len(shape) < 3 or shape[1] != 1:
        return None
    if int(node.attrs.get("group", 1)) < 2 or math.prod(shape[2:]) > _EXACT_TERMS:
        return None
    each = None if own is None else shape_of(own)
    if not (zero is None or shape_of(zero) == ()) or each not in (None, (), (shape[0],)):
        return None
    left = _unscaled(node, x, zero, ())
    right = _unscaled(node, weight, own, each or ())
    product = part_of(node, "Conv", left, right, **node.attrs)
    return part_of(node, "Cast", product, to=ONNX_DTYPE["int32"])


def _unscaled(node: Node, quantized: Value | None, zero: Value | None, scales: Shape) -> Value:
    """Return a quantized value minus its zero point as float32.

    Args:
        node: The node that the new nodes are a part of.
        quantized: A value of 8-bit integers.
        zero: Its zero point, or None.
        scales: Shape of the zero point: () or one number for each index of the first axis.
    """
    ones = part_of(node, "Constant", value=np.ones([int(d or 0) for d in scales], np.float32))
    inputs = [quantized, ones] if zero is None else [quantized, ones, zero]
    return part_of(node, "DequantizeLinear", *inputs, axis=0)


def _wide(node: Node, scale: Value | None) -> Value | None:
    """Return a scale as float32."""
    if dtype_of(scale) == "float32":
        return scale
    return part_of(node, "Cast", scale, to=ONNX_DTYPE["float32"])
