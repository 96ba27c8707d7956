"""The operator "Required" of "subgraph.cpu": its first input, if all satisfy another operator.

The pass "ExpandFunctions" writes some operators as the nodes that define them; these broadcast
where the operator must not. What they are made of then goes through ``Required(inputs...)``, which
computes nothing: its attributes are those of the operator, whose name is ``required_of``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Node
from subgraph.operators.operator import find_operator
from subgraph.operators.requirements import Tensor

OF = "required_of"
LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")


def required_operands(node: Node, *operands: Tensor | None) -> None:
    """Raise ShapeError unless the operands satisfy the operator that the node stands before."""
    attrs = dict(node.attrs)
    key = str(attrs.pop(OF, ""))
    domain, _, op_type = key.rpartition("::")
    stood_for = Node(op_type, domain=domain, name=node.name, version=node.version, attrs=attrs)
    operator = find_operator(key)
    if operator is not None and operator.rule is not None:
        operator.rule.check(stood_for, list(operands))


def first_value(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Give the first input; the others have been looked at."""
    return [inputs[0]]
