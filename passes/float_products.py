"""The pass "FloatProducts": QLinearMatMul of two computed operands, as attention has them.

Integer kernels hold one side packed, which only weights can be. The bytes less their zero points
are multiplied as float32, exactly while depths are below 259, and scaled and rounded once, as
QLinearMatMul says.
"""

from __future__ import annotations

import numpy as np

from subgraph.graph import Graph, Node, Value
from subgraph.op import infer_types
from subgraph.pass_manager import register_pass

from ._patterns import Context, is_op, shape_of, static_size


@register_pass("FloatProducts")
def float_products(graph: Graph) -> Graph:
    """Return a copy of ``graph`` in which such products are float32 between conversions."""
    graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        if is_op(node, "QLinearMatMul") and not context.is_weight(node.inputs[3]):
            a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (
                value if value is None else replaced.get(value, value) for value in node.inputs
            )
            if not all(static_size(shape_of(scale)) == 1 for scale in (a_scale, b_scale)):
                continue
            one = _made(node, "Constant", value=np.ones((), np.float32))
            left = _made(node, "DequantizeLinear", a, one, a_zero)
            right = _made(node, "DequantizeLinear", b, one, b_zero)
            product = _made(node, "MatMul", left, right)
            scaled = _made(node, "Mul", product, _made(node, "Mul", a_scale, b_scale))
            replaced[node.outputs[0]] = _made(node, "QuantizeLinear", scaled, y_scale, y_zero)
    graph.rewire(replaced)
    return graph


def _made(node: Node, op_type: str, *inputs: Value | None, **attributes: object) -> Value:
    notes = node.metadata or {}
    made = Node(
        op_type,
        inputs,
        version=13,
        attrs=attributes,
        metadata={**notes, "origin": notes.get("origin", node.name)},
    )
    types = [None if value is None else value.type for value in inputs]
    made.outputs[0].type = infer_types(made, types)[0]
    return made.outputs[0]
