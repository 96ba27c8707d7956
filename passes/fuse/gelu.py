"""GELU as exporters write it, with erf or tanh; recognized by comparing polynomials in x."""

from __future__ import annotations

import math

from subgraph.graph.graph import Node, Value
from subgraph.passes.patterns import Context, Match, pattern, produced_by

from .activations import activation, near

# Coefficients by powers of a variable.
Polynomial = dict[int, float]


@pattern("activation", "Erf", "Tanh")
def gelu(context: Context, node: Node) -> Match | None:
    """Match ``0.5 x (1 + erf(x / sqrt(2)))`` and ``0.5 x (1 + tanh(...))`` at Erf or Tanh."""
    plus_one = context.sole_user(node.outputs[0], "Add")
    if plus_one is None:
        return None
    if not near(context.scalar(context.other_operand(plus_one, node.outputs[0])), 1.0):
        return None
    product = _product(context, plus_one)
    if product is None:
        return None
    x, after = product
    inside = _polynomial(context, node.inputs[0], x)
    if inside is None:
        return None
    coefficients, before = inside
    if node.op_type == "Erf":
        exact = _equal(coefficients, {1: math.sqrt(0.5)})
        mode = "none"
    else:
        slope = math.sqrt(2 / math.pi)
        exact = _equal(coefficients, {1: slope, 3: slope * 0.044715})
        mode = "tanh"
    if not exact:
        return None
    nodes = (*before, node, plus_one, *after)
    return activation(nodes, "Gelu", x, version=20, approximate=mode)


def _equal(found: Polynomial, wanted: Polynomial) -> bool:
    """Return whether two polynomials are equal up to the rounding of constants to float32."""
    powers = {*found, *wanted}
    return all(abs(found.get(p, 0.0) - wanted.get(p, 0.0)) < 1e-5 for p in powers)


def _product(context: Context, start: Node) -> tuple[Value, list[Node]] | None:
    """Follow multiplications by x and by constants whose product is 0.5.

    Returns:
        The value x, and the multiplications in topological order; None if they are different.
    """
    at, factor, x = start.outputs[0], 1.0, None
    nodes: list[Node] = []
    extra: list[Node] = []
    while True:
        user = context.sole_user(at, "Mul")
        if user is None:
            return None
        other = context.other_operand(user, at)
        number = context.scalar(other)
        if number is not None:
            factor *= number
        elif x is None and other is not None:
            x = other
            half = produced_by(other, "Mul")
            # Some exporters multiply x by 0.5 first: then the other factor is ``0.5 x``, not x.
            if half is not None and context.sole_user(other) is user and not near(factor, 0.5):
                scaled = context.split_scale(half)
                if scaled is not None and near(scaled[1] * factor, 0.5):
                    x, factor = scaled[0], factor * scaled[1]
                    extra.append(half)
        else:
            return None
        nodes.append(user)
        at = user.outputs[0]
        if x is not None and near(factor, 0.5):
            return x, [*extra, *nodes]


def _polynomial(
    context: Context, value: Value | None, x: Value
) -> tuple[Polynomial, list[Node]] | None:
    """Return an expression in x as a polynomial, with its nodes in topological order.

    Args:
        context: The graph.
        value: The result of the expression, of Add, Sub, Mul, Div and Pow.
        x: The variable.
    """
    nodes: dict[Node, None] = {}

    def read(value: Value | None, depth: int) -> Polynomial | None:
        if value is x:
            return {1: 1.0}
        number = context.scalar(value)
        if number is not None:
            return {0: number}
        node = produced_by(value, "Add", "Mul", "Div", "Pow", "Sub")
        if node is None or depth > 8:
            return None
        a, b = (read(v, depth + 1) for v in node.inputs)
        if a is None or b is None:
            return None
        nodes[node] = None
        return _combined(node.op_type, a, b)

    found = read(value, 0)
    return None if found is None else (found, list(nodes))


def _combined(op_type: str, a: Polynomial, b: Polynomial) -> Polynomial | None:
    """Return the result of an operator on polynomials; None if it is no polynomial."""
    if op_type in ("Add", "Sub"):
        sign = 1.0 if op_type == "Add" else -1.0
        return {p: a.get(p, 0.0) + sign * b.get(p, 0.0) for p in {*a, *b}}
    if op_type == "Mul":
        return _times(a, b)
    if set(b) != {0}:
        return None
    if op_type == "Div":
        return {p: c / b[0] for p, c in a.items()} if b[0] else None
    power = b[0]
    # No form of GELU has higher powers of x.
    if power not in (1.0, 2.0, 3.0):
        return None
    result = a
    for _ in range(int(power) - 1):
        result = _times(result, a)
    return result


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for p, c in a.items():
        for q, d in b.items():
            result[p + q] = result.get(p + q, 0.0) + c * d
    return result
