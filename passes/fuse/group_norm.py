"""GroupNormalization from the form in which PyTorch exports it, the pass "FuseGroupNorm".

``torch.nn.GroupNorm`` becomes an InstanceNormalization of the groups, ``[N, groups, -1]``, between
two Reshapes, and a Mul and an Add of one number for each channel. As one operator it computes on
blocks of channels, as the convolutions around it do.
"""

from __future__ import annotations

from subgraph.graph.graph import Graph, Node, Value
from subgraph.passes.patterns import (
    Context,
    dtype_of,
    fusion_pass,
    is_op,
    is_per_channel,
    part_of,
    produced_by,
    reshaped,
    shape_of,
    weight_node,
)


@fusion_pass("FuseGroupNorm", "transformer", "InstanceNormalization")
def fuse_group_norm(graph: Graph) -> Graph:
    """Return a copy with GroupNormalization nodes for what PyTorch exports."""
    graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        if is_op(node, "InstanceNormalization"):
            _fuse(context, node, replaced)
    graph.rewire(replaced)
    return graph


def _fuse(context: Context, node: Node, replaced: dict[Value, Value]) -> None:
    """Add the result of a group normalization around a node to ``replaced``, if there is one."""
    first = produced_by(node.inputs[0], "Reshape")
    last = context.sole_user(node.outputs[0], "Reshape")
    if first is None or last is None or context.sole_user(first.outputs[0]) is not node:
        return
    x, inner = first.inputs[0], shape_of(first.outputs[0])
    shape = shape_of(x)
    if x is None or shape is None or inner is None or len(inner) != 3 or len(shape) < 3:
        return
    channels, groups = shape[1], inner[1]
    # With the batch as it is, a group is some adjacent channels.
    same = shape_of(last.outputs[0]) == shape and None not in shape and shape[0] == inner[0]
    if not isinstance(channels, int) or not isinstance(groups, int) or not same:
        return
    scaled = _affine(context, last.outputs[0], "Mul", channels)
    shifted = None if scaled is None else _affine(context, scaled[0], "Add", channels)
    weights = node.inputs[1:3]
    if scaled is None or shifted is None or groups < 1 or channels % groups:
        return
    if not all(map(context.is_weight, weights)) or any(dtype_of(v) != dtype_of(x) for v in weights):
        return
    # The numbers of a group, mostly 1 and 0, and those of its channels.
    table = (groups, channels // groups)
    scale, bias = (reshaped(value, (groups, 1)) for value in weights if value is not None)
    factor, shift = (reshaped(value, table) for _, value in (scaled, shifted))
    bias = weight_node("Mul", [factor, bias], table)
    bias = reshaped(weight_node("Add", [bias, shift], table), (channels,))
    scale = reshaped(weight_node("Mul", [factor, scale], table), (channels,))
    epsilon = float(node.attrs.get("epsilon", 1e-5))
    made = replaced[shifted[0]] = part_of(
        node,
        "GroupNormalization",
        replaced.get(x, x),
        scale,
        bias,
        version=21,
        num_groups=groups,
        epsilon=epsilon,
    )
    whole, end = made.producer, shifted[0].producer
    assert whole is not None
    assert end is not None
    whole.name, end.name = end.name, f"{end.name}.unfused"


def _affine(context: Context, at: Value, op_type: str, channels: int) -> tuple[Value, Value] | None:
    """Return the Mul or Add of a value and one weight for each channel: its result, the weight."""
    found = context.weighted(at, op_type)
    if found is None:
        return None
    user, weight = found
    fits = is_per_channel(shape_of(weight), channels, len(shape_of(at) or ()))
    return (user.outputs[0], weight) if fits and dtype_of(weight) == dtype_of(at) else None
