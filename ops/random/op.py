"""Random numbers, and draws by probabilities: requirements.

None has a lowering: they run on the reference. Passes neither merge nor fold them, see
`subgraph.operators.operator.is_random`.
"""

from __future__ import annotations

from subgraph.graph.graph import Node
from subgraph.operators.operator import declare
from subgraph.operators.requirements import Tensor, any_tensor, require, require_rank

from . import reference


def shape_attribute(node: Node) -> None:
    """Raise ShapeError if a size of the attribute ``shape`` is negative (opsets 1 to 22)."""
    shape = node.attrs.get("shape") or ()
    require(all(dim >= 0 for dim in shape), "shape {} has a negative dimension", shape)


def multinomial_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless each row has classes (ONNX Multinomial, opsets 7 to 22)."""
    require_rank("input", x, 2)
    require(x.shape[1] >= 1, "there are no classes")
    size = node.attrs.get("sample_size", 1)
    require(size >= 0, "sample_size is {}", size)


# The operators of this family, each in all its versions.
declare("Bernoulli", requires=any_tensor, compute=reference.bernoulli, random=True)
declare(
    "Multinomial",
    requires=multinomial_operands,
    compute=reference.multinomial,
    random=True,
    grows=True,
)
declare("RandomNormal", "RandomUniform", requires=shape_attribute, random=True, grows=True)
declare("RandomNormalLike", "RandomUniformLike", requires=any_tensor, random=True)
