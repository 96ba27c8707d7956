"""The pass "MixChannels": a product over few channels between two transpositions needs neither.

Talking heads (Shazeer et al. 2020) bring the heads of their scores to the end, multiply with a
small matrix and bring them back. With the rest of the scores as one dimension that is a product
from the left: it reads and writes the scores as they lie.
"""

from __future__ import annotations

import math

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import Dim, TensorType
from subgraph.passes._patterns import (
    FLOATS,
    Context,
    dtype_of,
    is_op,
    produced_by,
    reshaped,
    shape_of,
    weight_node,
)
from subgraph.transform.pass_manager import register_pass

_MOST = 8  # channels; more are better multiplied in the order in which they are written


@register_pass("MixChannels")
def mix_channels(graph: Graph) -> Graph:
    """Return a copy of ``graph`` with such products turned around."""
    graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        mix = _mix(context, node)
        if mix is not None:
            mix.x = replaced.get(mix.x, mix.x)  # one may begin where another ends
            replaced[node.outputs[0]] = _turned(mix, node)
    graph.rewire(replaced)
    return graph


@attrs.define
class _Mix:
    """A product over channels.

    Attributes:
        x: What is multiplied: batch, channels, other dimensions.
        weight: The matrix, channels given times channels made.
        bias: One number for each channel made, None for none.
        batch: Size of the first dimension.
        channels: Channels given and made.
        others: Sizes of the other dimensions.
        names: Names of the nodes without the last.
    """

    x: Value
    weight: Value
    bias: Value | None
    batch: Dim
    channels: tuple[int, int]
    others: tuple[int, ...]
    names: list[str]


def _mix(context: Context, last: Node) -> _Mix | None:
    """Match Transpose, MatMul, a bias, Transpose at the last of them."""
    if not is_op(last, "Transpose") or dtype_of(last.outputs[0]) not in FLOATS:
        return None
    shape = shape_of(last.outputs[0])
    if shape is None or not 3 <= len(shape) <= 5 or _order(last) != _to_front(len(shape)):
        return None
    at, bias = last.inputs[0], None
    nodes: list[Node] = []
    add = produced_by(at, "Add")
    if add is not None:
        bias = next((v for v in add.inputs if context.is_weight(v)), None)
        at = context.other(add, bias) if bias is not None else None
        if shape_of(bias) != (shape[1],) or "axis" in add.attrs:
            return None
        nodes.append(add)
    product = produced_by(at, "MatMul")
    first = None if product is None else produced_by(product.inputs[0], "Transpose")
    if product is None or first is None or _order(first) != _to_back(len(shape)):
        return None
    nodes += [product, first]
    x, weight = first.inputs[0], product.inputs[1]
    if x is None or weight is None or not context.is_weight(weight):
        return None
    if not all(context.user(node.outputs[0]) is not None for node in nodes):
        return None
    sizes = [dim for dim in (*(shape_of(weight) or ()), *shape[2:]) if isinstance(dim, int)]
    if len(shape_of(weight) or ()) != 2 or len(sizes) != len(shape) or max(sizes[:2]) > _MOST:
        return None
    names = [node.name for node in reversed(nodes)]
    return _Mix(x, weight, bias, shape[0], (sizes[0], sizes[1]), tuple(sizes[2:]), names)


def _order(transpose: Node) -> tuple[int, ...]:
    return tuple(transpose.attrs.get("perm", ()))


def _to_back(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def _to_front(rank: int) -> tuple[int, ...]:
    return (0, rank - 1, *range(1, rank - 1))


def _turned(mix: _Mix, last: Node) -> Value:
    """Return the value that takes the place of the last transposition's."""
    end = last.outputs[0]
    (given, made), inner = mix.channels, math.prod(mix.others)
    turned = weight_node("Transpose", [mix.weight], (made, given), attributes={"perm": (1, 0)})
    steps: list[tuple[str, list[Value], tuple[int, ...]]] = [
        ("Reshape", [], (given, inner)),
        ("MatMul", [turned], (made, inner)),
    ]
    if mix.bias is not None:
        steps.append(("Add", [reshaped(mix.bias, (made, 1))], (made, inner)))
    steps.append(("Reshape", [], (made, *mix.others)))
    at = mix.x
    for number, (op_type, weights, sizes) in enumerate(steps):
        reshape = op_type == "Reshape"
        node = Node(
            op_type,
            [*weights, at],
            name=f"{last.name}.mix{number}",
            version=1 if reshape else 14,
            attrs={"shape": (0, *sizes)} if reshape else None,
            metadata={"origin": "\n".join([*mix.names, last.name])},
        )
        at = node.outputs[0]
        at.type = TensorType(dtype_of(end), (mix.batch, *sizes))
    return at
