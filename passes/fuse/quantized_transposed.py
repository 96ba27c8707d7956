"""Quantized transposed convolutions whose taps do not overlap, as products of pixels.

If the strides are the sizes of the kernel, each pixel of the result is a product of one pixel of
the input with the weights of one tap. A convolution with one tap computes all of them, as channels,
and DepthToSpace puts them in place. In the QDQ form the former becomes an integer product and the
latter moves bytes (`quantized`).
"""

from __future__ import annotations

from typing import Any

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.ops.movement.geometry import auto_pad
from subgraph.passes.patterns import (
    Context,
    is_op,
    part_of,
    shape_of,
    static_size,
    weight_node,
)

from .quantized import (
    Conversion,
    bias_operands,
    dequantize_before,
    quantize_after,
    requantized,
)


def transposed_as_products(graph: Graph, guards: dict[Parameter, int]) -> Graph:
    """Return ``graph``, or a copy in which such transposed convolutions are products of pixels.

    Args:
        graph: The graph.
        guards: Filled with the parameters whose content the result depends on, and the version
            that was read of each.
    """
    if not any(_block(node) for node in graph.nodes):
        return graph
    graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        context.begin()
        block = _block(node)
        if not block:
            continue
        x, w = (dequantize_before(context, value) for value in node.inputs[:2])
        end = quantize_after(context, node.outputs[0])
        if end is None or x is None or w is None:
            continue
        if not x.is_per_tensor or not w.has_scales_along(1, 4):
            continue
        inputs = _operands(context, node, block, x, w)
        if inputs is None:
            continue
        products = part_of(node, "Conv", *inputs, kernel_shape=[1, 1])
        # To quantize twice by one scale is to quantize once.
        wide = requantized(node, products, end)
        pixels = part_of(node, "DepthToSpace", wide, blocksize=block, mode="DCR")
        replaced[node.outputs[0]] = pixels
        guards.update((parameter, parameter.version) for parameter in context.reads)
    graph.rewire(replaced)
    return graph


def _block(node: Node) -> int:
    """Return the size of the kernel along both axes of an image if taps do not overlap; else 0."""
    shape = shape_of(node.inputs[1]) if is_op(node, "ConvTranspose") else None
    if shape is None or len(shape) != 4 or not isinstance(shape[2], int):
        return 0
    given: dict[str, Any] = node.attrs
    plain = auto_pad(node) in ("NOTSET", "VALID") and given.get("group", 1) == 1
    padded = any(given.get("pads", ())) or any(given.get("output_padding", ()))
    dilated = any(step != 1 for step in given.get("dilations", ()))
    block = shape[2]
    same = shape[3] == block and tuple(given.get("strides", (1, 1))) == (block, block)
    fits = plain and same and not padded and not dilated and "output_shape" not in given
    return block if fits and block > 1 else 0


def _operands(
    context: Context, node: Node, block: int, x: Conversion, w: Conversion
) -> tuple[Value | None, ...] | None:
    """Return the operands of the convolution with one tap; None if the weights do not allow it."""
    shape = shape_of(w.source)
    bias = bias_operands(context, (*node.inputs, None)[2], x, w)
    if bias is None or bias[2] is not None or shape is None:
        return None
    zero = w.zero
    if zero is not None and not w.is_per_tensor:
        array = context.array(zero)
        if array is None or array.any():
            return None
        zero = None
    inputs, outputs = shape[:2]
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        return None
    taps = [block, block, outputs, inputs]
    weights = weight_node("Transpose", [w.source], taps, attributes={"perm": (2, 3, 1, 0)})
    columns = [block * block * outputs, inputs, 1, 1]
    weights = weight_node("Reshape", [weights], columns, attributes={"shape": columns}, version=1)
    scale = w.scale if w.is_per_tensor else _repeated(w.scale, block * block)
    version = w.node.version
    real = part_of(node, "DequantizeLinear", weights, scale, zero, version=version, axis=0)
    added = bias[1]
    if added is not None:
        added = _repeated(added, block * block)
    if added is not None and bias[0]:
        scales = part_of(node, "Mul", x.scale, scale)
        added = part_of(node, "DequantizeLinear", added, scales, version=version, axis=0)
    return node.inputs[0], real, added


def _repeated(value: Value, count: int) -> Value:
    """Return a weight of one axis ``count`` times, one after the other."""
    size = static_size(shape_of(value)) or 0
    return weight_node("Concat", [value] * count, [count * size], attributes={"axis": 0})
