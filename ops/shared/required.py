"""The operator "Required" of "subgraph.cpu": its first input, if all satisfy another operator.

The pass "ExpandFunctions" writes some operators as the nodes that define them; these broadcast
where the operator must not. What they are made of then goes through ``Required(inputs...)``, which
computes nothing: its attributes are those of the operator, whose name is ``required_of``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Node
from subgraph.graph.types import Array, ValueType
from subgraph.operators.operator import reference, shape_rule
from subgraph.operators.requirements import REQUIREMENTS, Tensor, requires
from subgraph.operators.schema import INTERNAL_DOMAIN

OF = "required_of"
LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")


@requires("Required", domain=INTERNAL_DOMAIN)
def required_operands(node: Node, *operands: Tensor | None) -> None:
    """Raise ShapeError unless the operands satisfy the operator that the node stands before."""
    attrs = dict(node.attrs)
    key = str(attrs.pop(OF, ""))
    domain, _, op_type = key.rpartition("::")
    stood_for = Node(op_type, domain=domain, name=node.name, version=node.version, attrs=attrs)
    rule = REQUIREMENTS.find(key, named_only=True)
    if rule is not None:
        rule.check(stood_for, list(operands))


@shape_rule("Required", domain=INTERNAL_DOMAIN)
def first_type(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> list[ValueType | None]:
    """Give the type of the first input."""
    return [types[0]]


@reference("Required", domain=INTERNAL_DOMAIN)
def first_value(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Give the first input; the others have been looked at."""
    return [inputs[0]]
