"""The property "cpu_quantized": models in the QDQ form run on integer kernels.

QDQ models have a DequantizeLinear before an operator and a QuantizeLinear after it. Each such group
becomes one integer operator (``ops/quantized/qlinear_operands.py``):

- Conv, MatMul and Gemm with weights: integer sums are exact, and are scaled and rounded once, as
  QLinearConv and QLinearMatMul require. Float arithmetic on the same group also rounds sums, so
  its result may differ by one quantization step.
- MaxPool, and operators that only move elements, between equal scales: exact, on 8-bit integers.

Elementwise operators and their conversions become one loop (`elementwise`), with exactly the
standard's float arithmetic.

`requantize_concat` and `split_dequantize` run before: they give the operands of a Concat its scale,
and every user of a dequantized value its own conversion.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import attrs
import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.schema import INTERNAL_DOMAIN, is_before
from subgraph.passes.patterns import (
    Context,
    Match,
    dtype_of,
    fusion_pass,
    is_op,
    part_of,
    pattern,
    produced_by,
    shape_of,
    static_size,
)

from .activations import clip_bounds

_EIGHT_BIT = frozenset({"uint8", "int8"})
# Operators that only move or pick elements.
_MOVES = frozenset(
    {
        *("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Gather", "Expand"),
        *("DepthToSpace", "SpaceToDepth", "Identity"),
    }
)


@fusion_pass("SplitDequantize", "quantized", "DequantizeLinear")
def split_dequantize(graph: Graph) -> Graph:
    """Return a copy in which each user of an 8-bit DequantizeLinear has its own node."""
    graph = graph.clone()
    outputs = frozenset(graph.outputs)
    for node in graph.nodes:
        if not is_op(node, "DequantizeLinear") or dtype_of(node.inputs[0]) not in _EIGHT_BIT:
            continue
        made = node.outputs[0]
        users = list(dict.fromkeys(made.uses))
        # The value must exist as it is for the caller, or in a body, which captures it.
        if made in outputs or any(user.captures for user in users):
            continue
        # The first user keeps the original node.
        for user in users[1:]:
            user.inputs = tuple(_copy(node) if v is made else v for v in user.inputs)
    return Graph(
        graph.inputs, graph.outputs, graph.name, captures=graph.captures, attrs=graph.attrs,
        opsets=graph.opsets, metadata=graph.metadata, doc=graph.doc,
    )  # fmt: skip


def _copy(node: Node) -> Value:
    copy = Node(node.op_type, node.inputs, version=node.version, attrs=dict(node.attrs))
    copy.outputs[0].type = node.outputs[0].type
    return copy.outputs[0]


@attrs.frozen
class Conversion:
    """A DequantizeLinear or QuantizeLinear between 8-bit integers and float32."""

    node: Node
    source: Value
    scale: Value
    zero: Value | None

    @property
    def is_per_tensor(self) -> bool:
        """Whether the whole tensor has one scale."""
        return static_size(shape_of(self.scale)) == 1

    def has_scales_along(self, axis: int, rank: int) -> bool:
        """Return whether there is one scale, or one for each index of an axis.

        Args:
            axis: The axis, at least 0.
            rank: Rank of the tensor.
        """
        own = int(self.node.attrs.get("axis", 1))
        shape = shape_of(self.scale)
        along = shape is not None and len(shape) == 1 and own % rank == axis
        return self.is_per_tensor or along


def _conversion(context: Context, node: Node | None, op_type: str) -> Conversion | None:
    """Return a node as a conversion; None unless its scale and zero point are weights."""
    if node is None or not is_op(node, op_type) or node.attrs.get("block_size", 0):
        return None
    found = _as_conversion(node)
    if found is None:
        return None
    ends = (found.source, node.outputs[0])
    narrow, wide = ends if op_type == "DequantizeLinear" else ends[::-1]
    if dtype_of(narrow) not in _EIGHT_BIT or dtype_of(wide) != "float32":
        return None
    if dtype_of(found.scale) != "float32" or not context.is_weight(found.scale):
        return None
    return found if found.zero is None or context.is_weight(found.zero) else None


def _as_conversion(node: Node) -> Conversion | None:
    source, scale, zero = (*node.inputs, None, None)[:3]
    if source is None or scale is None:
        return None
    return Conversion(node, source, scale, zero)


def dequantize_before(context: Context, value: Value | None) -> Conversion | None:
    """Return the DequantizeLinear that computes a value."""
    return None if value is None else _conversion(context, value.producer, "DequantizeLinear")


def quantize_after(context: Context, value: Value) -> Conversion | None:
    """Return the sole user of a value if it is a QuantizeLinear with one scale."""
    found = _conversion(context, context.sole_user(value), "QuantizeLinear")
    fits = found is not None and found.is_per_tensor and found.source is value
    return found if fits else None


def _is_positive(scale: float | None) -> TypeGuard[float]:
    return scale is not None and scale > 0


def zero_point(context: Context, value: Value | None) -> int | None:
    """Return the zero point in a parameter of one element; 0 if there is none.

    None for any other value.
    """
    number = 0 if value is None else context.scalar(value)
    return None if number is None else int(number)


@fusion_pass("RequantizeConcat", "quantized", "QuantizeLinear")
def requantize_concat(graph: Graph) -> Graph:
    """Return a copy in which quantized operands of a quantized Concat have its scale.

    Each operand of another scale is quantized with the scale and zero point of the result, and
    dequantized, before the Concat. To quantize the result is then exact, so that it is the same as
    before, and the Concat can join bytes (`concat`).
    """
    graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        if not is_op(node, "Concat") or is_before(node, 4):
            continue
        end = quantize_after(context, node.outputs[0])
        before = [dequantize_before(context, value) for value in node.inputs]
        if end is None or not any(before) or len(set(node.inputs)) < len(before):
            continue
        operands = [
            value if found and _equal(context, found, end) else requantized(node, value, end)
            for value, found in zip(node.inputs, before, strict=True)
        ]
        joined = part_of(node, "Concat", *operands, version=node.version, **node.attrs)
        replaced[node.outputs[0]] = joined
    graph.rewire(replaced)
    return graph


def requantized(node: Node, value: Value | None, end: Conversion) -> Value:
    """Return a value quantized as by ``end``, a QuantizeLinear, and dequantized.

    Args:
        node: The node that the new nodes are a part of.
        value: The value, float32.
        end: The QuantizeLinear.
    """
    parameters = [each for each in (end.scale, end.zero) if each is not None]
    form = {"version": end.node.version, **end.node.attrs}
    narrow = part_of(node, "QuantizeLinear", value, *parameters, **form)
    # An int8 result without zero point is impossible before version 21, where the dtype is one of
    # the attributes; DequantizeLinear takes it from its input.
    return part_of(node, "DequantizeLinear", narrow, *parameters, version=end.node.version)


@attrs.define
class _Chain:
    """The nodes after a product.

    Attributes:
        nodes: An activation, if any, and the QuantizeLinear.
        end: The QuantizeLinear.
        bounds: Attributes "low" and "high" of the fused node, in quantized units.
    """

    nodes: list[Node]
    end: Conversion
    bounds: dict[str, Any]


def chain_after(context: Context, node: Node) -> _Chain | None:
    """Return the QuantizeLinear after a product, with a Relu or Clip between; None if absent."""
    direct = quantize_after(context, node.outputs[0])
    if direct is not None:
        return _Chain([direct.node], direct, {})
    user = context.sole_user(node.outputs[0], "Relu", "Clip")
    if user is None or user.inputs[0] is not node.outputs[0]:
        return None
    end = quantize_after(context, user.outputs[0])
    if end is None:
        return None
    ends = (0.0, math.inf) if user.op_type == "Relu" else clip_bounds(context, user)
    scale, zero = context.scalar(end.scale), zero_point(context, end.zero)
    # A negative scale reverses the order, so that lower bounds would be upper ones.
    if ends is None or zero is None or not _is_positive(scale):
        return None
    bounds: dict[str, Any] = {}
    for name, bound in zip(("low", "high"), ends, strict=True):
        if math.isfinite(bound):
            with np.errstate(all="ignore"):
                steps = np.rint(np.float32(bound) / np.float32(scale))
            if not np.isfinite(steps):
                return None  # a scale of 0, nearly 0, or NaN
            # Rounding is monotonic, so clipping the rounded value by a rounded bound is the same.
            bounds[name] = int(steps) + zero
    return _Chain([user, end.node], end, bounds)


def bias_operands(
    context: Context, value: Value | None, x: Conversion, w: Conversion
) -> tuple[list[Node], Value | None, Value | None] | None:
    """Return the nodes of a bias, its value and its scale.

    The scale is None if it is that of the sums, the product of the scales of ``x`` and ``w``. The
    whole result is None for a bias that the fused operators cannot add.
    """
    if value is None:
        return [], None, None
    producer = produced_by(value, "DequantizeLinear")
    if producer is None or dtype_of(producer.inputs[0]) != "int32":
        weight = value.parameter is not None and dtype_of(value) == "float32"
        return ([], value, None) if weight else None
    bias = _as_conversion(producer)
    if bias is None:
        return None
    made = produced_by(bias.scale, "Mul")
    if made is not None and set(made.inputs) == {x.scale, w.scale} and bias.zero is None:
        # The product of the scales disappears with the match, so that nothing else may read it.
        alone = context.sole_user(bias.scale) is producer
        return ([made, producer], bias.source, None) if alone else None
    arrays = [context.array(v) for v in (bias.scale, x.scale, w.scale)]
    if any(a is None for a in arrays) or context.sole_user(producer.outputs[0]) is None:
        return None
    if bias.zero is not None:
        zero = context.array(bias.zero)
        if zero is None or zero.any():
            return None
    own, left, right = (np.asarray(a, np.float32).reshape(-1) for a in arrays)
    # Exporters round the product of the scales to float32 (6e-8 relative); 1e-5 is an estimate that
    # accepts a few such roundings.
    same = np.allclose(own, left * right, rtol=1e-5, atol=0)
    return [producer], bias.source, None if same else bias.scale


@pattern("quantized", "Conv", needs=("DequantizeLinear",))
def conv(context: Context, node: Node) -> Match | None:
    """Match DequantizeLinear of input, weights and bias, Conv, an activation, QuantizeLinear."""
    if len(node.inputs) < 2:
        return None
    rank = len(shape_of(node.inputs[1]) or ())
    return _product(context, node, "FusedQLinearConv", 0, rank)


@pattern("quantized", "MatMul", "Gemm", needs=("DequantizeLinear",))
def product(context: Context, node: Node) -> Match | None:
    """Match DequantizeLinear of input, weights and bias, MatMul or Gemm, QuantizeLinear."""
    if len(node.inputs) < 2:
        return None
    if len(shape_of(node.inputs[1]) or ()) != 2 or node.attrs.get("transA", 0):
        return None
    # The factors would apply to the sums before they are scaled, which the integer kernels do not
    # do.
    if any(float(node.attrs.get(name, 1.0)) != 1.0 for name in ("alpha", "beta")):
        return None
    shape = shape_of(node.inputs[2]) if len(node.inputs) > 2 else None
    columns = (shape_of(node.outputs[0]) or (None,))[-1]
    if shape is not None and (len(shape) != 1 or shape[0] != columns):
        return None
    axis = 0 if node.attrs.get("transB", 0) else 1
    return _product(context, node, "FusedQLinearMatMul", axis, 2)


def _product(context: Context, node: Node, op_type: str, axis: int, rank: int) -> Match | None:
    """Match the group of a product.

    Args:
        context: The graph.
        node: The Conv, MatMul or Gemm.
        op_type: The fused operator.
        axis: The axis of the weights that is the output's channels or columns.
        rank: Rank of the weights.
    """
    x = dequantize_before(context, node.inputs[0])
    w = dequantize_before(context, node.inputs[1])
    if x is None or w is None or not x.is_per_tensor or not w.has_scales_along(axis, rank):
        return None
    # The kernels read B in a packed form that is computed from a weight.
    if not context.is_weight(w.source) or context.is_weight(x.source):
        return None
    chain = chain_after(context, node)
    if chain is None:
        return None
    bias = bias_operands(context, node.inputs[2] if len(node.inputs) > 2 else None, x, w)
    if bias is None:
        return None
    taken, added, scale = bias
    end = chain.end
    inputs = (x.source, x.scale, x.zero, w.source, w.scale, w.zero, end.scale, end.zero)
    return Match(
        (x.node, w.node, *taken, node, *chain.nodes),
        op_type,
        (*inputs, added, scale),
        {**node.attrs, **chain.bounds},
        arity=10,
    )


def _equal(context: Context, first: Conversion, second: Conversion) -> bool:
    """Return whether two opposite conversions have the same scale, zero point and dtype."""
    kinds = dtype_of(first.source), dtype_of(second.node.outputs[0])
    if kinds[0] != kinds[1] or not first.is_per_tensor or not second.is_per_tensor:
        return False
    if first.scale is second.scale and first.zero is second.zero:
        return True
    scales = [context.scalar(each.scale) for each in (first, second)]
    zeros = [zero_point(context, each.zero) for each in (first, second)]
    return scales[0] is not None and scales[0] == scales[1] and zeros[0] == zeros[1] is not None


@pattern("quantized", "MaxPool", *_MOVES, needs=("DequantizeLinear",))
def move(context: Context, node: Node) -> Match | None:
    """Match an operator that only moves or picks elements, between equal scales."""
    # MaxPool picks the same element before and after a conversion with a positive scale, because
    # the conversion is monotonic.
    pool = node.op_type == "MaxPool"
    if not node.inputs or len(node.outputs) != 1 or (pool and is_before(node, 8)):
        return None
    x = dequantize_before(context, node.inputs[0])
    end = quantize_after(context, node.outputs[0])
    if x is None or end is None or not _equal(context, x, end):
        return None
    if pool and not _is_positive(context.scalar(x.scale)):
        return None
    return Match(
        (x.node, node, end.node),
        "FusedQMaxPool" if pool else node.op_type,
        (x.source, *node.inputs[1:]),
        dict(node.attrs),
        domain=INTERNAL_DOMAIN if pool else "",
        version=1 if pool else node.version,
        arity=len(node.inputs),
    )


@pattern("quantized", "Concat", needs=("DequantizeLinear",))
def concat(context: Context, node: Node) -> Match | None:
    """Match Concat of values with equal scales."""
    if is_before(node, 4):
        return None
    end = quantize_after(context, node.outputs[0])
    if end is None:
        return None
    conversions: list[Conversion] = []
    for value in node.inputs:
        found = dequantize_before(context, value)
        if found is None or not _equal(context, found, end):
            return None
        conversions.append(found)
    nodes = [each.node for each in conversions]
    if len(set(nodes)) != len(nodes):
        return None
    inputs = tuple(each.source for each in conversions)
    if len(set(inputs)) != len(inputs):
        return None
    return Match(
        (*nodes, node, end.node), "Concat", inputs, dict(node.attrs), domain="",
        version=node.version, arity=len(inputs),
    )  # fmt: skip
