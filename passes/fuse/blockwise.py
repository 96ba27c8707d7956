"""The pass "BlockwiseProducts": MatMulNBits for which the CPU device has kernels.

Others are expanded by "ExpandFunctions", whose weights become floats once.
"""

from __future__ import annotations

from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.inference import part_metadata
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.passes.patterns import Context, dtype_of, shape_of
from subgraph.transform.pass_manager import register_pass

_OPERANDS = 6  # A, B, scales, zero points, groups, bias
_BITS = (2, 4, 8)


@register_pass("BlockwiseProducts", operators=("MatMulNBits",))
def blockwise_products(graph: Graph) -> Graph:
    """Return a copy in which products with constant weights of few bits keep them packed."""
    graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        if (node.op_type, node.domain) == ("MatMulNBits", "com.microsoft") and _fits(context, node):
            made = Node(
                "FusedMatMulNBits",
                [value if value is None else replaced.get(value, value) for value in node.inputs],
                name=node.name,
                domain=INTERNAL_DOMAIN,
                attrs={"bits": 4, **node.attrs},
                metadata=part_metadata(node),
            )
            made.outputs[0].type = node.outputs[0].type
            replaced[node.outputs[0]] = made.outputs[0]
    graph.rewire(replaced)
    return graph


def _fits(context: Context, node: Node) -> bool:
    operands: list[Value | None] = [*node.inputs, *[None] * _OPERANDS]
    a, packed, scales, zeros, groups, bias = operands[:_OPERANDS]
    bits, depth = int(node.attrs.get("bits", 4)), int(node.attrs["K"])
    constant = all(context.is_weight(v) for v in operands[1:] if v is not None)
    columns = (shape_of(a) or (None,))[-1]
    return (
        bits in _BITS
        # The kernels read words of 32 bits, whose rows all exist.
        and depth % (32 // bits) == 0
        and not node.attrs.get("weight_prepacked", 0)
        and dtype_of(a) == dtype_of(scales) == "float32"
        and (bias is None or dtype_of(bias) == "float32")
        and (zeros is None or dtype_of(zeros) == "uint8")
        and groups is None
        and constant
        and packed is not None
        and columns in (None, depth)
    )
