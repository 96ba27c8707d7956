"""The pass "FoldScale": scales and shifts of channels are folded into weights, or into one each.

After a convolution or a transposed one, BatchNormalization nodes, multiplications and additions of
one number for each channel, and multiplications by one number are folded into its weight and bias.
After a MatMul with a weight, those of one number for each column (the layer scale of vision
transformers) are folded into the weight and one Add. Elsewhere a chain of these becomes one Mul and
one Add. The pass computes nothing: the new weights are nodes on parameters, which the weight cache
computes, and computes again when one of the parameters changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.schema import INTERNAL_DOMAIN, is_before
from subgraph.passes.patterns import (
    FLOATS,
    Context,
    dtype_of,
    is_op,
    is_per_channel,
    part_of,
    reshaped,
    shape_of,
    static_size,
    weight_node,
)
from subgraph.transform.pass_manager import register_pass


@register_pass("FoldScale")
def fold_scale(graph: Graph) -> Graph:
    """Return a copy of ``graph`` with scales and shifts of channels folded."""
    graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    done: set[Node] = set()
    for node in graph.nodes:
        if node in done or not node.outputs:
            continue
        chain = _chain(context, node)
        if chain is None:
            continue
        done.update(chain.nodes)
        chain.x = replaced.get(chain.x, chain.x)  # a chain may begin at the end of another
        end = chain.nodes[-1].outputs[0]
        replaced[end] = _folded(chain, end)
    graph.rewire(replaced)
    return graph


@attrs.define
class _Chain:
    """A chain of scales and shifts, possibly after a convolution or a MatMul.

    Attributes:
        x: The input of the first node.
        product: The convolution or MatMul, or None.
        channels: Number of channels; of columns, for a MatMul.
        axis: Their axis in the results.
        nodes: All nodes, in order.
        steps: Kind ("norm", "scale" or "shift"), node and weights of each scale or shift.
    """

    x: Value
    product: Node | None
    channels: int
    axis: int
    nodes: list[Node]
    steps: list[tuple[str, Node, list[Value]]]


def _chain(context: Context, node: Node) -> _Chain | None:
    """Return the longest chain that begins at a node; None if there is nothing to fold."""
    if is_op(node, "Conv", "ConvTranspose"):
        chain = _after_conv(context, node)
    elif is_op(node, "MatMul"):
        chain = _after_matmul(context, node)
    elif is_op(node, "BatchNormalization"):
        chain = _after_norm(context, node)
    else:
        return None
    if chain is None:
        return None
    while True:
        at = chain.nodes[-1].outputs[0]
        user = context.sole_user(at)
        step = None if user is None else _step(context, user, at, chain.channels, chain.axis)
        if user is None or step is None:
            break
        chain.steps.append(step)
        chain.nodes.append(user)
    if is_op(node, "MatMul") and all(kind == "shift" for kind, _, _ in chain.steps):
        return None  # the product's epilogue adds a bias
    return chain if chain.steps else None


def _after_conv(context: Context, node: Node) -> _Chain | None:
    x, weight = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    shape = shape_of(weight)
    if x is None or shape is None or dtype_of(x) not in FLOATS:
        return None
    channels = shape[_output_axis(node)]
    if not isinstance(channels, int) or (bias is not None and shape_of(bias) != (channels,)):
        return None
    # The weight of a transposed convolution has the output channels of one group only, so that one
    # factor would stand for several channels.
    if node.op_type == "ConvTranspose" and node.attrs.get("group", 1) != 1:
        return None
    if not context.is_weight(weight) or (bias is not None and not context.is_weight(bias)):
        return None
    return _Chain(x, node, channels, 1, [node], [])


def _after_matmul(context: Context, node: Node) -> _Chain | None:
    x, weight = node.inputs[0], node.inputs[1]
    shape, rank = shape_of(weight), len(shape_of(x) or ())
    if x is None or shape is None or len(shape) != 2 or rank < 2 or dtype_of(x) not in FLOATS:
        return None
    columns = shape[1]
    if not isinstance(columns, int) or not context.is_weight(weight) or context.is_weight(x):
        return None
    return _Chain(x, node, columns, rank - 1, [node], [])


def _output_axis(conv: Node) -> int:
    """Return the axis of a convolution's weight that is the output channels."""
    return 1 if conv.op_type == "ConvTranspose" else 0


def _after_norm(context: Context, node: Node) -> _Chain | None:
    x = node.inputs[0]
    shape = shape_of(x)
    if x is None or shape is None or len(shape) < 2 or not isinstance(shape[1], int):
        return None
    step = _step(context, node, x, shape[1], 1)
    return None if step is None else _Chain(x, None, shape[1], 1, [node], [step])


def _step(
    context: Context, node: Node, at: Value, channels: int, axis: int
) -> tuple[str, Node, list[Value]] | None:
    """Return a node as a step of a chain; None if it is not a scale or shift by weights.

    Args:
        context: The graph.
        node: A user of ``at``.
        at: The result of the chain so far.
        channels: Number of its channels.
        axis: Their axis.
    """
    if is_op(node, "BatchNormalization"):
        weights = [v for v in node.inputs[1:] if v is not None]
        plain = not node.attrs.get("training_mode", 0) and node.attrs.get("spatial", 1)
        plain = plain and (not is_before(node, 7) or node.attrs.get("is_test", 0) == 1)
        used = any(v.uses or v in context.outputs for v in node.outputs[1:])
        # In training the statistics are those of the batch, and the further outputs are the new
        # averages.
        if axis != 1 or node.inputs[0] is not at or not plain or used or len(weights) != 4:
            return None
        if dtype_of(at) not in FLOATS or any(dtype_of(v) != dtype_of(at) for v in weights):
            return None
        if any(shape_of(v) != (channels,) for v in weights):
            return None  # wrong sizes, which the planner reports
        return ("norm", node, weights) if all(map(context.is_weight, weights)) else None
    if not is_op(node, "Mul", "Add") or dtype_of(at) not in FLOATS:
        return None
    other = context.other_operand(node, at)
    if other is None or other is at or not context.is_weight(other):
        return None
    rank, shape = len(shape_of(at) or ()), shape_of(other)
    is_number = node.op_type == "Mul" and shape in ((), (1,)) and dtype_of(other) == dtype_of(at)
    if not is_number and (rank < 2 or not is_per_channel(shape, channels, rank, axis)):
        return None
    return ("scale" if node.op_type == "Mul" else "shift"), node, [other]


def _folded(chain: _Chain, end: Value) -> Value:
    """Return the value that replaces the result ``end`` of a chain."""
    if chain.product is None:
        return _into_affine(chain, end)
    if is_op(chain.product, "MatMul"):
        return _into_matmul(chain, chain.product, end)
    return _into_conv(chain, chain.product, end)


def _into_matmul(chain: _Chain, product: Node, end: Value) -> Value:
    weight = product.inputs[1]
    factor, shift = _affine(chain, None)
    assert factor is not None
    row = reshaped(factor, (1, static_size(shape_of(factor)) or 1))
    scaled = weight_node("Mul", [weight, row], shape_of(weight))
    made = _renewed(chain, product, [chain.x, scaled], end)
    return made if shift is None else part_of(chain.nodes[-1], "Add", made, shift, version=14)


def _into_conv(chain: _Chain, conv: Node, end: Value) -> Value:
    weight, bias = conv.inputs[1], conv.inputs[2] if len(conv.inputs) > 2 else None
    rank = len(shape_of(weight) or ())
    factor, shift = _affine(chain, bias)
    if factor is not None:
        axis = _output_axis(conv)
        size = static_size(shape_of(factor)) or 1
        column = reshaped(factor, (*(1,) * axis, size, *(1,) * (rank - 1 - axis)))
        weight = weight_node("Mul", [weight, column], shape_of(weight))
    return _renewed(chain, conv, [chain.x, weight, shift], end)


def _renewed(chain: _Chain, product: Node, inputs: Sequence[Value | None], end: Value) -> Value:
    """Return the result, of the type of ``end``, of a product on other inputs."""
    made = Node(
        product.op_type,
        inputs,
        name=product.name,
        version=product.version,
        attrs=product.attrs,
        metadata={
            **(product.metadata or {}),
            "origin": "\n".join(node.name for node in chain.nodes),
        },
    )
    product.name = f"{product.name}.unfolded"
    made.outputs[0].type = end.type
    return made.outputs[0]


def _into_affine(chain: _Chain, end: Value) -> Value:
    factor, shift = _affine(chain, None)
    rank = len(shape_of(chain.x) or ())
    shape = (chain.channels, *(1,) * (rank - 2))
    origin = {"origin": "\n".join(node.name for node in chain.nodes)}
    at = chain.x
    for op_type, value in (("Mul", factor), ("Add", shift)):
        if value is not None:
            node = Node(
                op_type,
                [at, reshaped(value, shape)],
                name=f"{chain.nodes[0].name}.{op_type}",
                version=14,
                metadata=origin,
            )
            at = node.outputs[0]
            at.type = end.type
    return at


def _affine(chain: _Chain, bias: Value | None) -> tuple[Value | None, Value | None]:
    """Return the factor and the shift of all steps together, or None (1 or 0).

    The shift is [channels], and so is the factor unless all scales are one number, [1].

    Args:
        chain: The chain.
        bias: The shift before the first step, [channels], or None.
    """
    factor: Value | None = None
    shift = bias
    size = (chain.channels,)
    for kind, node, weights in chain.steps:
        if kind == "norm":
            epsilon = {"epsilon": float(node.attrs.get("epsilon", 1e-5))}
            scale, offset, mean, var = weights
            own = weight_node("BatchNormScale", [scale, var], size, INTERNAL_DOMAIN, epsilon)
            shift = weight_node("ScaledShift", [own, offset, mean, shift], size, INTERNAL_DOMAIN)
            factor = own if factor is None else weight_node("Mul", [factor, own], size)
        elif kind == "scale":
            number = shape_of(weights[0]) in ((), (1,))
            own = reshaped(weights[0], (1,) if number else size)
            shift = None if shift is None else weight_node("Mul", [shift, own], size)
            whole = size if factor is None or not number else shape_of(factor)
            factor = own if factor is None else weight_node("Mul", [factor, own], whole)
        else:
            own = reshaped(weights[0], size)
            shift = own if shift is None else weight_node("Add", [shift, own], size)
    return factor, shift
