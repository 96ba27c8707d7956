"""CastLike, for the reference: onnx.reference lacks ``round_mode`` there (opset 24).

It is Cast with the dtype of the second input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Node
from subgraph.graph.types import ONNX_DTYPE, dtype_of
from subgraph.operators.operator import reference
from subgraph.operators.reference import standard


@reference("CastLike")
def cast_like(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the first input in the dtype of the second."""
    to = ONNX_DTYPE[dtype_of(inputs[1])]
    cast = Node(
        "Cast",
        node.inputs[:1],
        outputs=1,
        name=node.name,
        version=node.version,
        attrs=node.attrs | {"to": to},
    )
    return standard(cast, inputs[:1])
