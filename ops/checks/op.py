"""The operator "Required" of domain "subgraph.cpu", which checks operands for another operator.

The pass "ExpandFunctions" replaces some operators by the nodes that define them; these nodes would
broadcast operands that the operator must reject. The operands therefore pass through
``Required(inputs...)``, which returns its first input. Its attributes are those of the replaced
operator, and ``required_of`` is that operator's key. Without it nothing is checked: the pass
"UnfoldControlFlow" keeps values alive in this way whose computation may fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Node
from subgraph.operators.batch_axes import Batch, BatchCall
from subgraph.operators.operator import declare, find_operator
from subgraph.operators.requirements import Tensor
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.op import first_type

REQUIRED_OF = "required_of"
LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
WINDOWS = ("BlackmanWindow", "HammingWindow", "HannWindow")


def required_operands(node: Node, *operands: Tensor | None) -> None:
    """Raise ShapeError unless the operands satisfy the operator named by ``required_of``."""
    attrs = dict(node.attrs)
    key = str(attrs.pop(REQUIRED_OF, ""))
    domain, _, op_type = key.rpartition("::")
    stood_for = Node(op_type, domain=domain, name=node.name, version=node.version, attrs=attrs)
    operator = find_operator(key)
    if operator is not None and operator.rule is not None:
        operator.rule.check(stood_for, list(operands))


def first_value(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Return the first input; the others are only checked."""
    return [inputs[0]]


def first_batch(call: BatchCall) -> Sequence[Batch]:
    """The result is the first input, whatever the others are."""
    return [call.inputs[0]]


# The operators of this family, each in all its versions.
declare(
    "Required",
    domain=INTERNAL_DOMAIN,
    requires=required_operands,
    infer=first_type,
    compute=first_value,
    batch=first_batch,
)
