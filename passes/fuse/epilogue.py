"""The property "cpu_epilogue": convolutions and matrix products with their epilogues.

An epilogue is a bias, a residual (a sum with another tensor) and an activation. ``FusedConv`` and
``FusedMatMul`` apply it to a tile in registers. Bounds and slopes of activations are read from
constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from subgraph.graph.graph import Node, Value
from subgraph.operators.requirements import decoded
from subgraph.ops.shared.activations import ACTIVATIONS
from subgraph.passes.patterns import (
    MATCHERS,
    Context,
    Match,
    dtype_of,
    fusions,
    pattern,
    same_shape,
    shape_of,
)

from .activations import clip_bounds


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


@pattern("epilogue", "Conv", "MatMul", "Gemm")
def product(context: Context, node: Node) -> Match | None:
    """Match Conv, MatMul or Gemm, a bias (after a matrix product), a residual, an activation."""
    if len(node.inputs) < 2:
        return None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    chain = _Chain([node], node.outputs[0], bias)
    if bias is None and node.op_type != "Conv":
        _take_bias(context, chain)
    _take_residual(context, chain)
    _take_activation(context, chain)
    if len(chain.nodes) == 1:
        return None
    return Match(
        tuple(chain.nodes),
        "FusedConv" if node.op_type == "Conv" else "FusedMatMul",
        (node.inputs[0], node.inputs[1], chain.bias, chain.residual),
        {**node.attrs, **chain.attributes},
        arity=4,
    )


def _take_bias(context: Context, chain: _Chain) -> None:
    user = context.sole_user(chain.at, "Add")
    if user is None:
        return
    other = context.other_operand(user, chain.at)
    whole, part = shape_of(chain.at), shape_of(other)
    if not context.is_weight(other) or not whole or not part or len(part) > len(whole):
        return
    if part[-1] == whole[-1] and isinstance(part[-1], int) and all(d == 1 for d in part[:-1]):
        chain.bias = other
        # The factor of a Gemm's third input, which it does not have.
        if "beta" in chain.nodes[0].attrs:
            chain.attributes["beta"] = 1.0
        chain.take(user)


def _take_residual(context: Context, chain: _Chain) -> None:
    user = context.sole_user(chain.at, "Add", "Sum")
    if user is None:
        return
    other = context.other_operand(user, chain.at)
    # A residual is another computed value: ``x + x`` would read a result that the fused node never
    # stores.
    if other is None or other is chain.at or context.is_weight(other):
        return
    # The tile reads the residual at the positions of its results, without broadcasting.
    if same_shape(other, chain.at) and dtype_of(other) == dtype_of(chain.at):
        chain.residual = other
        chain.take(user)


def _take_activation(context: Context, chain: _Chain) -> None:
    if _take_spelled_out(context, chain):
        return
    user = context.sole_user(chain.at, *ACTIVATIONS)
    if user is None or user.inputs[0] is not chain.at:
        return
    attributes: Mapping[str, Any] = user.attrs
    if user.op_type == "Clip":
        bounds = clip_bounds(context, user)
        if bounds is None:
            return
        attributes = {"low": bounds[0], "high": bounds[1]}
    chain.attributes.update(_described(user.op_type, attributes))
    chain.take(user)


def _described(op_type: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a fused node for an activation with these attributes."""
    name = op_type
    numbers = [
        float(attributes.get(key, default)) for key, default in ACTIVATIONS[op_type].parameters
    ]
    if name == "Gelu" and decoded(attributes.get("approximate", "none")) == "tanh":
        name = "GeluTanh"
    if name == "Swish" and numbers == [1.0]:
        name, numbers = "Silu", []
    keys = ("activation_alpha", "activation_beta")
    return {"activation": name, **dict(zip(keys, numbers, strict=False))}


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
                chain.attributes.update(_described(found.op_type, found.attrs))
                chain.nodes += found.nodes
                chain.at = found.nodes[-1].outputs[0]
                return True
        near = [user for node in near for user in node.successors()][:16]
    return False
