"""Activations that exporters write as chains of primitives; see also `gelu`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from subgraph.graph.graph import Node, Value
from subgraph.passes.patterns import Context, Match, dtype_of, pattern, produced_by, shape_of


def near(a: float | None, b: float) -> bool:
    """Return whether a constant equals ``b`` up to the rounding of exporters (1e-4, relative)."""
    return a is not None and math.isclose(a, b, rel_tol=1e-4)


def clip_bounds(context: Context, node: Node) -> tuple[float, float] | None:
    """Return the lower and upper bound of a Clip of any version; None if one is computed."""
    found = [float(node.attrs.get("min", -math.inf)), float(node.attrs.get("max", math.inf))]
    for k, value in enumerate(node.inputs[1:3]):
        if value is not None:
            # The bounds are inputs since opset 11, and can only become attributes if they are
            # constants.
            number = context.scalar(value)
            if number is None:
                return None
            found[k] = number
    low, high = found
    # ONNX: every result is the upper bound if the lower one is greater.
    return (high if high < low else low), high


def activation(
    nodes: Sequence[Node], op_type: str, x: Value | None, version: int, **attributes: float | str
) -> Match | None:
    """Return a match that a plain activation of the standard replaces.

    None if the result has another rank than ``x``, as constants of more axes give it.

    Args:
        nodes: The nodes of the pattern, the last one computing the result.
        op_type: The activation.
        x: Its only input.
        version: The activation's version.
        attributes: The activation's attributes.
    """
    if len(shape_of(nodes[-1].outputs[0]) or ()) != len(shape_of(x) or ()):
        return None
    return Match(
        tuple(nodes), op_type, (x,), attributes, "", version=version, arity=1, opaque=False
    )


@pattern("activation", "Sigmoid", "HardSigmoid", needs=("Mul",))
def silu(context: Context, node: Node) -> Match | None:
    """Match ``x * sigmoid(x)`` and ``x * hard_sigmoid(x)``."""
    x, user = node.inputs[0], _product(context, node.outputs[0], node.inputs[0])
    if user is None:
        return None
    nodes = (node, user)
    if node.op_type == "Sigmoid":
        return activation(nodes, "Swish", x, version=24, alpha=1.0)
    alpha, beta = (float(node.attrs.get(k, d)) for k, d in (("alpha", 0.2), ("beta", 0.5)))
    # HardSwish is defined with these two numbers only.
    if not near(alpha, 1 / 6) or not near(beta, 0.5):
        return None
    return activation(nodes, "HardSwish", x, version=14)


@pattern("activation", "Clip", needs=("Add", "Mul"))
def hard_swish(context: Context, node: Node) -> Match | None:
    """Match ``x * clip(x + 3, 0, 6) / 6``, with the division before or after the product."""
    add = produced_by(node.inputs[0], "Add")
    if add is None or context.sole_user(add.outputs[0]) is not node:
        return None
    # The operands of a sum may stand in either order.
    for x, three in (add.inputs, add.inputs[::-1]):
        if not near(context.scalar(three), 3.0):
            continue
        clipped = node.outputs[0]
        first = _product(context, clipped, x) or _sixth(context, clipped)
        if first is None or clip_bounds(context, node) != (0.0, 6.0):
            return None
        part = first.outputs[0]
        # The factor that the first step did not have must come second.
        last = _sixth(context, part) if x in first.inputs else _product(context, part, x)
        if last is None or dtype_of(x) != dtype_of(clipped):
            return None
        return activation((add, node, first, last), "HardSwish", x, version=14)
    return None


@pattern("activation", "Softplus", needs=("Tanh",))
def mish(context: Context, node: Node) -> Match | None:
    """Match ``x * tanh(softplus(x))``."""
    tanh = context.sole_user(node.outputs[0], "Tanh")
    last = None if tanh is None else _product(context, tanh.outputs[0], node.inputs[0])
    if tanh is None or last is None:
        return None
    return activation((node, tanh, last), "Mish", node.inputs[0], version=18)


def _product(context: Context, value: Value, x: Value | None) -> Node | None:
    """Return the sole user of a value if it multiplies the value by x."""
    user = context.sole_user(value, "Mul")
    fits = user is not None and context.other_operand(user, value) is x
    # ``value * value`` is a square, not a product with x.
    return user if fits and value is not x else None


def _sixth(context: Context, value: Value) -> Node | None:
    """Return the sole user of a value if it divides the value by 6."""
    user = context.sole_user(value, "Div", "Mul")
    # Six divided by the value is another function.
    if user is None or (user.op_type == "Div" and user.inputs[0] is not value):
        return None
    number = context.scalar(context.other_operand(user, value))
    return user if near(number, 6.0 if user.op_type == "Div" else 1 / 6) else None
