"""The property "cpu_quantized": QDQ models run on integer kernels.

Quantised models write an operator as DequantizeLinear before it and QuantizeLinear behind it. Each
such group becomes one integer operator (``ops/quantized/qlinear_cpu.py``):

- Conv, MatMul and Gemm with weights: sums of bytes are exact; they are scaled and rounded once, as
  QLinearConv and QLinearMatMul say. Float arithmetic on the same group rounds sums too and may
  come out one step apart.
- MaxPool, and what only moves elements, between equal scales: exact, on the bytes.
- Everything elementwise: the chain with its conversions in one loop (``fuse_elementwise``): exactly
  the standard's float arithmetic.

`split_dequantize` comes first: every user of a dequantised value gets a conversion of its own.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.passes._patterns import (
    Context,
    Match,
    dtype_of,
    fusion_pass,
    is_op,
    pattern,
    produced_by,
    shape_of,
    static_size,
)

BYTES = frozenset({"uint8", "int8"})
_MOVES = frozenset(
    {
        *("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Gather", "Expand"),
        *("DepthToSpace", "SpaceToDepth", "Identity"),
    }
)


@fusion_pass("SplitDequantize", "quantized", ("DequantizeLinear",))
def split_dequantize(graph: Graph) -> Graph:
    """Return a copy in which each user of a DequantizeLinear of bytes has one of its own."""
    graph = graph.clone()
    outputs = frozenset(graph.outputs)
    for node in graph.nodes:
        if not is_op(node, "DequantizeLinear") or dtype_of(node.inputs[0]) not in BYTES:
            continue
        made = node.outputs[0]
        users = list(dict.fromkeys(made.uses))
        if made in outputs or any(user.captures for user in users):
            continue
        for user in users[1:]:
            user.inputs = tuple(_copy(node) if v is made else v for v in user.inputs)
    return Graph(
        graph.inputs, graph.outputs, graph.name, attrs=graph.attrs, opsets=graph.opsets,
        metadata=graph.metadata, doc=graph.doc,
    )  # fmt: skip


def _copy(node: Node) -> Value:
    copy = Node(node.op_type, node.inputs, version=node.version, attrs=dict(node.attrs))
    copy.outputs[0].type = node.outputs[0].type
    return copy.outputs[0]


@attrs.frozen
class _Step:
    """A DequantizeLinear or QuantizeLinear of bytes."""

    node: Node

    @property
    def source(self) -> Value:
        value = self.node.inputs[0]
        assert value is not None, "it has an input"
        return value

    @property
    def scale(self) -> Value:
        value = self.node.inputs[1]
        assert value is not None, "it has a scale"
        return value

    @property
    def zero(self) -> Value | None:
        return self.node.inputs[2] if len(self.node.inputs) > 2 else None

    @property
    def whole(self) -> bool:
        """Whether one scale holds for all of the tensor."""
        return static_size(shape_of(self.scale)) == 1

    def per(self, axis: int, rank: int) -> bool:
        """Return whether there is one scale, or one for each place of an axis."""
        given = int(self.node.attrs.get("axis", 1))
        shape = shape_of(self.scale)
        along = shape is not None and len(shape) == 1 and given % rank == axis
        return self.whole or along


def _step(context: Context, node: Node | None, op_type: str) -> _Step | None:
    """Return a node as a step between bytes and float32 by scales that are weights."""
    if node is None or not is_op(node, op_type) or len(node.inputs) < 2:
        return None
    if node.attrs.get("block_size", 0) or None in node.inputs[:2]:
        return None
    step = _Step(node)
    ends = (step.source, node.outputs[0])
    narrow, wide = ends if op_type == "DequantizeLinear" else ends[::-1]
    if dtype_of(narrow) not in BYTES or dtype_of(wide) != "float32":
        return None
    if dtype_of(step.scale) != "float32" or not context.is_weight(step.scale):
        return None
    return step if step.zero is None or context.is_weight(step.zero) else None


def before(context: Context, value: Value | None) -> _Step | None:
    """Return the DequantizeLinear that a value comes from."""
    return None if value is None else _step(context, value.producer, "DequantizeLinear")


def behind(context: Context, value: Value) -> _Step | None:
    """Return the QuantizeLinear of one scale that alone uses a value."""
    found = _step(context, context.user(value), "QuantizeLinear")
    return found if found is not None and found.whole and found.source is value else None


def _number(context: Context, value: Value | None) -> int | None:
    """Return the zero point that a parameter of one element holds."""
    return 0 if value is None else _as_int(context.scalar(value))


def _as_int(number: float | None) -> int | None:
    return None if number is None else int(number)


@attrs.define
class _Chain:
    """The nodes behind a product, the result, and its bounds as an activation sets them."""

    nodes: list[Node]
    end: _Step
    bounds: dict[str, Any]


def _chain(context: Context, node: Node) -> _Chain | None:
    """Return what lies between a product and its QuantizeLinear: nothing, Relu or Clip."""
    direct = behind(context, node.outputs[0])
    if direct is not None:
        return _Chain([direct.node], direct, {})
    user = context.user(node.outputs[0])
    if user is None or not is_op(user, "Relu", "Clip") or user.inputs[0] is not node.outputs[0]:
        return None
    end = behind(context, user.outputs[0])
    if end is None:
        return None
    low, high = 0.0 if user.op_type == "Relu" else None, None
    if user.op_type == "Clip":
        if 0 < user.version < 11:
            low, high = user.attrs.get("min"), user.attrs.get("max")
        else:
            given = [*user.inputs[1:3], None, None]
            found = [None if v is None else context.scalar(v) for v in given[:2]]
            if any(v is not None and f is None for v, f in zip(given, found, strict=False)):
                return None
            low, high = found
    scale, zero = context.scalar(end.scale), _number(context, end.zero)
    if scale is None or zero is None:
        return None
    bounds: dict[str, Any] = {}
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            # Rounding keeps order: the bound may as well be rounded and applied afterwards.
            bounds[name] = int(np.rint(np.float32(bound) / np.float32(scale))) + zero
    return _Chain([user, end.node], end, bounds)


def _bias(
    context: Context, value: Value | None, x: _Step, w: _Step
) -> tuple[list[Node], Value | None, Value | None] | None:
    """Return the nodes of a bias, its value and its scale where that is not the sums' own."""
    if value is None:
        return [], None, None
    producer = produced_by(value, "DequantizeLinear")
    if producer is None or dtype_of(producer.inputs[0]) != "int32":
        weight = value.parameter is not None and dtype_of(value) == "float32"
        return ([], value, None) if weight else None
    step = _Step(producer)
    made = produced_by(step.scale, "Mul")
    if made is not None and set(made.inputs) == {x.scale, w.scale} and step.zero is None:
        alone = context.user(step.scale) is producer
        return ([made, producer], step.source, None) if alone else None
    arrays = [context.array(v) for v in (step.scale, x.scale, w.scale)]
    if any(a is None for a in arrays) or context.user(producer.outputs[0]) is None:
        return None
    if step.zero is not None:
        zero = context.array(step.zero)
        if zero is None or zero.any():
            return None
    own, left, right = (np.asarray(a, np.float32).reshape(-1) for a in arrays)
    same = np.allclose(own, left * right, rtol=1e-5, atol=0)
    return [producer], step.source, None if same else step.scale


@pattern("quantized", ("DequantizeLinear",))
def conv(context: Context, node: Node) -> Match | None:
    """Match DequantizeLinear of input, weights and bias, Conv, an activation, QuantizeLinear."""
    if not is_op(node, "Conv") or len(node.inputs) < 2:
        return None
    rank = len(shape_of(node.inputs[1]) or ())
    return _product(context, node, "FusedQLinearConv", 0, rank)


@pattern("quantized", ("DequantizeLinear",))
def product(context: Context, node: Node) -> Match | None:
    """Match DequantizeLinear of input, weights and bias, MatMul or Gemm, QuantizeLinear."""
    if not is_op(node, "MatMul", "Gemm") or len(node.inputs) < 2:
        return None
    if len(shape_of(node.inputs[1]) or ()) != 2 or node.attrs.get("transA", 0):
        return None
    if any(float(node.attrs.get(name, 1.0)) != 1.0 for name in ("alpha", "beta")):
        return None
    shape = shape_of(node.inputs[2]) if len(node.inputs) > 2 else None
    columns = (shape_of(node.outputs[0]) or (None,))[-1]
    if shape is not None and (len(shape) != 1 or shape[0] != columns):
        return None
    axis = 0 if node.attrs.get("transB", 0) else 1
    return _product(context, node, "FusedQLinearMatMul", axis, 2)


def _product(context: Context, node: Node, op_type: str, axis: int, rank: int) -> Match | None:
    x, w = before(context, node.inputs[0]), before(context, node.inputs[1])
    if x is None or w is None or not x.whole or not w.per(axis, rank):
        return None
    if not context.is_weight(w.source) or context.is_weight(x.source):
        return None
    chain = _chain(context, node)
    if chain is None:
        return None
    bias = _bias(context, node.inputs[2] if len(node.inputs) > 2 else None, x, w)
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


def _equal(context: Context, first: _Step, second: _Step) -> bool:
    """Return whether two steps have the same scale, zero point and bytes."""
    kinds = dtype_of(first.source), dtype_of(second.node.outputs[0])
    if kinds[0] != kinds[1] or not first.whole or not second.whole:
        return False
    if first.scale is second.scale and first.zero is second.zero:
        return True
    scales = [context.scalar(step.scale) for step in (first, second)]
    zeros = [_number(context, step.zero) for step in (first, second)]
    return scales[0] is not None and scales[0] == scales[1] and zeros[0] == zeros[1] is not None


@pattern("quantized", ("DequantizeLinear",))
def move(context: Context, node: Node) -> Match | None:
    """Match what only moves or picks elements between equal scales."""
    pool = is_op(node, "MaxPool")
    if not pool and not is_op(node, *_MOVES):
        return None
    if not node.inputs or len(node.outputs) != 1 or (pool and 0 < node.version < 8):
        return None
    x, end = before(context, node.inputs[0]), behind(context, node.outputs[0])
    if x is None or end is None or not _equal(context, x, end):
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


@pattern("quantized", ("DequantizeLinear",))
def concat(context: Context, node: Node) -> Match | None:
    """Match Concat of values with equal scales."""
    if not is_op(node, "Concat") or node.version < 4:
        return None
    end = behind(context, node.outputs[0])
    if end is None:
        return None
    steps: list[_Step] = []
    for value in node.inputs:
        found = before(context, value)
        if found is None or not _equal(context, found, end):
            return None
        steps.append(found)
    nodes = [step.node for step in steps]
    if len(set(nodes)) != len(nodes):
        return None
    inputs = tuple(step.source for step in steps)
    if len(set(inputs)) != len(inputs):
        return None
    return Match(
        (*nodes, node, end.node), "Concat", inputs, dict(node.attrs), domain="",
        version=node.version, arity=len(inputs),
    )  # fmt: skip
