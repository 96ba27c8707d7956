"""LayerNorm, RMSNorm and softmax from primitives: patterns of the property "cpu_transformer".

A match becomes the standard's operator with the chain of primitives as its inner graph. Constants
of the chain are read, so the fused graph depends on their content.
"""

from __future__ import annotations

from subgraph.graph.graph import Node, Value
from subgraph.passes.patterns import Context, Match, is_op, pattern, shape_of

from .activations import near


def _last_axes(context: Context, node: Node, rank: int) -> int | None:
    """Return the first axis of a reduction over trailing axes that keeps dimensions; else None."""
    if not node.attrs.get("keepdims", 1):
        return None
    axes = context.axes(node)
    if axes is None:
        return None
    counted = sorted(axis % rank for axis in axes)
    first = rank - len(counted)
    # The fused operators normalize over all axes from one on.
    return first if counted == list(range(first, rank)) and counted else None


def is_square(node: Node, context: Context, value: Value) -> bool:
    """Return whether a node computes the square of a value."""
    if is_op(node, "Pow"):
        return node.inputs[0] is value and near(context.scalar(node.inputs[1]), 2.0)
    return is_op(node, "Mul") and node.inputs == (value, value)


def _root(context: Context, square: Node, axis: int) -> tuple[list[Node], float, Node] | None:
    """Follow the mean of a square, plus epsilon, and its root.

    Returns:
        The four nodes, epsilon, and the node of the root; None if they are different.
    """
    mean = context.sole_user(square.outputs[0], "ReduceMean")
    rank = len(shape_of(square.outputs[0]) or ())
    if mean is None or _last_axes(context, mean, rank) != axis:
        return None
    plus = context.sole_user(mean.outputs[0], "Add")
    if plus is None:
        return None
    epsilon = context.scalar(context.other_operand(plus, mean.outputs[0]))
    root = context.sole_user(plus.outputs[0], "Sqrt")
    if epsilon is None or root is None:
        return None
    return [square, mean, plus, root], epsilon, root


def _normalized(context: Context, root: Node, centered: Value) -> list[Node] | None:
    """Return the nodes of ``centered / root`` or ``centered * (1 / root)``; None for others."""
    user = context.sole_user(root.outputs[0], "Div", "Reciprocal")
    # Exporters divide by the root, or multiply by its reciprocal, written as Reciprocal or as ``1 /
    # root``.
    if user is None or user.inputs == (centered, root.outputs[0]):
        return None if user is None else [user]
    inverse = user.op_type == "Reciprocal" or near(context.scalar(user.inputs[0]), 1.0)
    after = context.sole_user(user.outputs[0], "Mul") if inverse else None
    if after is None or context.other_operand(after, user.outputs[0]) is not centered:
        return None
    return [user, after]


def _weighted(context: Context, at: Value, op_type: str, axis: int) -> tuple[Node, Value] | None:
    """Return the Mul or Add of a value and a weight, and the weight; None if there is none.

    Args:
        context: The graph.
        at: The value.
        op_type: "Mul" or "Add".
        axis: The first of the trailing axes, which are the weight's shape.
    """
    found, whole = context.weighted(at, op_type), shape_of(at)
    if found is None or whole is None:
        return None
    # LayerNormalization and RMSNormalization take weights of the normalized axes only.
    return found if shape_of(found[1]) == whole[axis:] else None


@pattern("transformer", "ReduceMean")
def layer_norm(context: Context, node: Node) -> Match | None:
    """Match ``(x - mean) / sqrt(mean((x - mean)^2) + epsilon) * scale + bias`` at its mean."""
    x = node.inputs[0]
    rank = len(shape_of(x) or ())
    axis = _last_axes(context, node, rank) if rank else None
    if x is None or axis is None:
        return None
    subs = [u for u in node.outputs[0].consumers if is_op(u, "Sub")]
    # The mean disappears with the match, so that every user must be a part of it.
    if len(subs) != len(node.outputs[0].consumers) or not subs:
        return None
    if any(sub.inputs != (x, node.outputs[0]) for sub in subs) or len(subs) > 2:
        return None
    for sub in subs:
        centered = sub.outputs[0]
        square = next((u for u in centered.consumers if is_square(u, context, centered)), None)
        if square is None:
            continue
        # With two differences, one is squared and the other one is divided by the root.
        top = subs[0] if len(subs) == 1 or subs[1] is sub else subs[1]
        found = _root(context, square, axis)
        if found is None:
            return None
        chain, epsilon, root = found
        division = _normalized(context, root, top.outputs[0])
        if division is None:
            return None
        return _affine_norm(context, [node, *subs, *chain, *division], x, axis, epsilon)
    return None


def _affine_norm(
    context: Context, nodes: list[Node], x: Value, axis: int, epsilon: float
) -> Match | None:
    """Return the match of a LayerNorm with its scale and bias; None without a scale.

    Args:
        context: The graph.
        nodes: The nodes of the normalization, the division last.
        x: The normalized value.
        axis: The first of the trailing axes.
        epsilon: Added to the variance.
    """
    scaled = _weighted(context, nodes[-1].outputs[0], "Mul", axis)
    if scaled is None:
        return None
    nodes.append(scaled[0])
    inputs = [x, scaled[1]]
    shifted = _weighted(context, scaled[0].outputs[0], "Add", axis)
    if shifted is not None:
        nodes.append(shifted[0])
        inputs.append(shifted[1])
    attributes = {"axis": axis, "epsilon": epsilon, "stash_type": 1}
    return Match(
        tuple(nodes), "LayerNormalization", tuple(inputs), attributes, "", version=17, arity=3
    )


@pattern("transformer", "Pow", "Mul", needs=("ReduceMean",))
def rms_norm(context: Context, node: Node) -> Match | None:
    """Match ``x / sqrt(mean(x^2) + epsilon) * scale`` at the square."""
    x = node.inputs[0] if node.inputs else None
    if x is None or not is_square(node, context, x):
        return None
    mean = context.sole_user(node.outputs[0], "ReduceMean")
    rank = len(shape_of(x) or ())
    if mean is None or not rank:
        return None
    axis = _last_axes(context, mean, rank)
    found = None if axis is None else _root(context, node, axis)
    if found is None or axis is None:
        return None
    chain, epsilon, root = found
    division = _normalized(context, root, x)
    if division is None:
        return None
    scaled = _weighted(context, division[-1].outputs[0], "Mul", axis)
    if scaled is None:
        return None
    return Match(
        (*chain, *division, scaled[0]),
        "RMSNormalization",
        (x, scaled[1]),
        {"axis": axis, "epsilon": epsilon, "stash_type": 1},
        domain="",
        version=23,
        arity=2,
    )


@pattern("transformer", "ReduceMax", needs=("Exp",))
def softmax(context: Context, node: Node) -> Match | None:
    """Match ``exp(x - max) / sum(exp(x - max))`` at the maximum."""
    x = node.inputs[0]
    rank = len(shape_of(x) or ())
    axis = _last_axes(context, node, rank) if rank else None
    minus = context.sole_user(node.outputs[0], "Sub")
    # Softmax reduces one axis, and the chain may reduce several.
    if axis is None or axis != rank - 1 or minus is None:
        return None
    exp = context.sole_user(minus.outputs[0], "Exp")
    if minus.inputs != (x, node.outputs[0]) or exp is None:
        return None
    power = exp.outputs[0]
    total = next((u for u in power.consumers if is_op(u, "ReduceSum")), None)
    if total is None or _last_axes(context, total, rank) != axis:
        return None
    div = context.sole_user(total.outputs[0], "Div")
    if div is None or div.inputs != (power, total.outputs[0]):
        return None
    nodes = (node, minus, exp, total, div)
    return Match(nodes, "Softmax", (x,), {"axis": -1}, domain="", version=13, arity=1)
