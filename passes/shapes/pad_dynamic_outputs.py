"""The pass "PadDynamicOutputs": operators whose output size depends on values become padded forms.

A padded form fills a buffer of the largest size that the output may have and returns the number of
valid elements; a Trim after it cuts the buffer to these.
"""

from __future__ import annotations

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import TensorType
from subgraph.operators.inference import set_output_types
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.transform.pass_manager import register_pass

_OPERATORS = ("Compress", "NonMaxSuppression", "NonZero", "Unique")


@register_pass("PadDynamicOutputs", operators=_OPERATORS)
def pad_dynamic_outputs(graph: Graph) -> Graph:
    """Return a copy in which NonZero, Compress, Unique and NonMaxSuppression have known sizes."""
    graph = graph.clone()
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        if not node.domain and node.op_type in _OPERATORS:
            replaced.update(_padded(node))
    graph.rewire(replaced)
    return graph


def _padded(node: Node) -> dict[Value, Value]:
    """Return the replacement of each output of a node."""
    from subgraph.ops.selection.padded import PREFIX, TRIMMED, trimmed_axis  # few models need it

    note = {"origin": node.name, **(node.metadata or {})}
    made = Node(
        f"{PREFIX}{node.op_type}",
        node.inputs,
        outputs=len(TRIMMED[node.op_type]) + 1,  # the last one is the count
        name=f"{node.name}.padded",
        domain=INTERNAL_DOMAIN,
        version=node.version,
        attrs=node.attrs,
        metadata=note,
    )
    set_output_types(made)
    most = made.inputs[2] if len(made.inputs) > 2 else None
    if node.op_type == "NonMaxSuppression" and most is not None and most.parameter is not None:
        # The type depends on a weight (the most boxes of a class) that may be assigned.
        made.outputs[0].type = TensorType("int64", (None, 3))
    found: dict[Value, Value] = {}
    for k, old in enumerate(node.outputs):
        axis = trimmed_axis(made, k)
        if axis is None:
            found[old] = made.outputs[k]
            continue
        cut = Node(
            "Trim",
            [made.outputs[k], made.outputs[-1]],
            name=f"{node.name}.trimmed{k}",
            domain=INTERNAL_DOMAIN,
            version=1,
            attrs={"axis": axis},
            metadata=note,
        )
        cut.outputs[0].type = old.type
        found[old] = cut.outputs[0]
    return found
