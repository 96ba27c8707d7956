"""The property "cpu_epilogue": convolutions and matrix products with their epilogues.

An epilogue is a bias, a residual (a sum with another tensor) and an activation. ``FusedConv`` and
``FusedMatMul`` (see ``ops/fused/op.py``) apply it to a tile in registers. Bounds and slopes of
activations are read from constants.
"""

from __future__ import annotations

from typing import Any

import attrs

from subgraph.graph.graph import Node, Value
from subgraph.operators.requirements import decoded
from subgraph.operators.schema import is_before
from subgraph.passes._patterns import (
    FLOATS,
    MATCHERS,
    Context,
    Match,
    dtype_of,
    fusions,
    is_op,
    pattern,
    same_shape,
    shape_of,
)

from .activations import clip_bounds

# For each activation the attributes that become activation_alpha and activation_beta, with the
# standard's defaults.
_NUMBERS: dict[str, tuple[tuple[str, float], ...]] = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "Gelu": (),
    "HardSwish": (),
    "Softplus": (),
    "Mish": (),
    "HardSigmoid": (("alpha", 0.2), ("beta", 0.5)),
    "LeakyRelu": (("alpha", 0.01),),
    "Elu": (("alpha", 1.0),),
    "Swish": (("alpha", 1.0),),
}


@attrs.define
class _Chain:
    """A product and its epilogue as far as it was matched.

    Attributes:
        nodes: The matched nodes, the product first.
        at: The result of the last one.
        bias: The bias, [channels] or [columns], or None.
        residual: The tensor that is added, or None.
        attributes: Attributes of the fused node for the activation.
    """

    nodes: list[Node]
    at: Value
    bias: Value | None = None
    residual: Value | None = None
    attributes: dict[str, Any] = attrs.field(factory=dict[str, Any])

    def take(self, node: Node) -> None:
        """Append a node, whose first output becomes the result."""
        self.nodes.append(node)
        self.at = node.outputs[0]


@pattern("epilogue")
def conv(context: Context, node: Node) -> Match | None:
    """Match Conv, a residual, an activation."""
    if not is_op(node, "Conv") or len(node.inputs) < 2 or dtype_of(node.outputs[0]) not in FLOATS:
        return None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    chain = _Chain([node], node.outputs[0], bias)
    _take_residual(context, chain)
    _take_activation(context, chain)
    return _fused("FusedConv", chain)


@pattern("epilogue")
def product(context: Context, node: Node) -> Match | None:
    """Match MatMul or Gemm, a bias, a residual, an activation."""
    if (
        not is_op(node, "MatMul", "Gemm")
        or len(node.inputs) < 2
        or dtype_of(node.outputs[0]) not in FLOATS
    ):
        return None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    chain = _Chain([node], node.outputs[0], bias)
    if bias is None:
        _take_bias(context, chain)
    _take_residual(context, chain)
    _take_activation(context, chain)
    return _fused("FusedMatMul", chain)


def _fused(op_type: str, chain: _Chain) -> Match | None:
    """Return the match of a chain; None if it is only the product."""
    node = chain.nodes[0]
    if len(chain.nodes) == 1:
        return None
    return Match(
        tuple(chain.nodes),
        op_type,
        (node.inputs[0], node.inputs[1], chain.bias, chain.residual),
        {**node.attrs, **chain.attributes},
        arity=4,
    )


def _take_bias(context: Context, chain: _Chain) -> None:
    user = context.sole_user(chain.at)
    if user is None or not is_op(user, "Add") or is_before(user, 7):
        return
    other = context.other_operand(user, chain.at)
    whole, part = shape_of(chain.at), shape_of(other)
    if not context.is_weight(other) or not whole or not part or len(part) > len(whole):
        return
    if part[-1] == whole[-1] and isinstance(part[-1], int) and all(d == 1 for d in part[:-1]):
        chain.bias = other
        chain.take(user)


def _take_residual(context: Context, chain: _Chain) -> None:
    user = context.sole_user(chain.at)
    if (
        user is None
        or not is_op(user, "Add", "Sum")
        or (user.op_type == "Add" and is_before(user, 7))
    ):
        return
    other = context.other_operand(user, chain.at)
    if other is None or other is chain.at or context.is_weight(other):
        return
    if same_shape(other, chain.at) and dtype_of(other) == dtype_of(chain.at):
        chain.residual = other
        chain.take(user)


def _take_activation(context: Context, chain: _Chain) -> None:
    if _take_spelled_out(context, chain):
        return
    user = context.sole_user(chain.at)
    if user is None or user.domain or not user.inputs or user.inputs[0] is not chain.at:
        return
    name = user.op_type
    numbers: tuple[float, ...]
    if name == "Clip":
        found = clip_bounds(context, user)
        if found is None:
            return
        numbers = found
    elif name in _NUMBERS:
        numbers = tuple(float(user.attrs.get(key, default)) for key, default in _NUMBERS[name])
        if name == "Gelu" and decoded(user.attrs.get("approximate", "none")) == "tanh":
            name = "GeluTanh"
        if name == "Swish" and numbers == (1.0,):
            name, numbers = "Silu", ()
    else:
        return
    chain.attributes["activation"] = name
    for key, number in zip(("activation_alpha", "activation_beta"), numbers, strict=False):
        chain.attributes[key] = number
    chain.take(user)


def _take_spelled_out(context: Context, chain: _Chain) -> bool:
    """Append an activation that is a chain of primitives; return whether there is one.

    Its matcher may start at a node some steps behind the value, so nearby nodes are tried.
    """
    if not 2 <= len(chain.at.consumers) <= 5 or chain.at in context.outputs:
        return False
    activations = fusions(MATCHERS, "activation")
    near = list(chain.at.consumers)
    for _ in range(5):
        for node in near:
            found = next((m for f in activations if (m := f(context, node)) is not None), None)
            if found is not None and found.inputs[0] is chain.at:
                name = found.op_type
                if name == "Gelu" and found.attrs.get("approximate") == "tanh":
                    name = "GeluTanh"
                chain.attributes["activation"] = "Silu" if name == "Swish" else name
                chain.nodes += found.nodes
                chain.at = found.nodes[-1].outputs[0]
                return True
        near = [user for node in near for user in node.successors()][:16]
    return False
