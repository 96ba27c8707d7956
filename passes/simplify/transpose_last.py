"""The pass "TransposeLast": elementwise operators run before the Transpose of an image.

PyTorch's vision transformers move the channels of a convolution's result to the last axis, compute
on rows, and move them back. An elementwise operator between such a Transpose and a product, or
between a product and such a Transpose, hides the product's epilogue; a residual in one order and
the sum in the other cost a Transpose for each block. With the Transpose last, an activation is next
to its product, and a Transpose and its inverse cancel.

Elementwise nodes whose operands are moved alike form a group. A group is rewritten if it then needs
no more Transposes than before, and if it is next to a convolution.
"""

from __future__ import annotations

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import Shape, TensorType
from subgraph.ops.elementwise.expressions import EXPANSIONS
from subgraph.passes.patterns import (
    Context,
    dtype_of,
    is_op,
    order_of_axes,
    part_of,
    produced_by,
    reshaped,
    shape_of,
    static_size,
)
from subgraph.transform.pass_manager import register_pass

# QuantizeLinear and DequantizeLinear are not among these: a vector of scales has an axis.
_OPERATORS = frozenset(EXPANSIONS) - {"Identity", "CastLike"}
_CONVOLUTIONS = ("Conv", "ConvTranspose")
Ints = tuple[int, ...]


@attrs.frozen
class _Movement:
    """How a value is moved: first to another shape, if it is, then to another order of axes.

    Attributes:
        before: Shape of the value that is moved; None without a Reshape.
        between: Shape after the Reshape, or None.
        shape: The Reshape's input that states the new shape, or None.
        allows_zero: The Reshape's attribute ``allowzero``.
        order: The order of axes of the Transpose.
    """

    before: Shape | None
    between: Shape | None
    shape: Value | None
    allows_zero: int
    order: Ints

    def of(self, value: Value, node: Node) -> Value:
        """Return the moved value, which replaces the result of ``node``."""
        if self.shape is not None:
            dtype = dtype_of(value)
            value = part_of(
                node, "Reshape", value, self.shape, version=14, allowzero=self.allows_zero
            )
            value.type = TensorType(dtype, self.between)
        return part_of(node, "Transpose", value, perm=self.order)

    def is_undone_by(self, node: Node) -> bool:
        """Return whether a node is a Transpose to the original order of axes."""
        if self.shape is not None or not is_op(node, "Transpose"):
            return False
        perm = order_of_axes(node)
        return perm is not None and [self.order[axis] for axis in perm] == sorted(perm)


@attrs.define(eq=False)
class _Group:
    """Elementwise nodes whose operands are moved alike.

    Attributes:
        movement: How they are moved.
        moved: The operands that are results of a Transpose, each with the value that is moved.
        nodes: The nodes, in topological order.
    """

    movement: _Movement
    moved: dict[Value, Value] = attrs.field(factory=dict[Value, Value])
    nodes: dict[Node, None] = attrs.field(factory=dict[Node, None])


@register_pass("TransposeLast", operators=("Transpose",))
def transpose_last(graph: Graph) -> Graph:
    """Return a copy in which elementwise operators next to convolutions precede a Transpose."""
    graph = graph.clone()
    context = Context(graph)
    group_of = _groups(context)
    taken = {
        group
        for group in dict.fromkeys(group_of.values())
        if _is_next_to_convolution(group) and _saves(graph, group)
    }
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        group = group_of.get(node)
        if group is not None and group in taken:
            _rewrite(graph, group, node, replaced)
    graph.rewire(replaced)
    return graph


def _groups(context: Context) -> dict[Node, _Group]:
    """Return the group of each node that belongs to one."""
    group_of: dict[Node, _Group] = {}
    for node in context.graph.nodes:
        if not is_op(node, *_OPERATORS) or len(node.outputs) != 1:
            continue
        if context.is_weight(node.outputs[0]):
            continue
        group = _group_for(context, node, group_of)
        if group is not None:
            group.nodes[node] = None
            group_of[node] = group
    return group_of


def _group_for(context: Context, node: Node, group_of: dict[Node, _Group]) -> _Group | None:
    """Return the group that a node belongs to, merged of those of its operands; None if to none."""
    rank = len(shape_of(node.outputs[0]) or ())
    joined: dict[_Group, None] = {}
    moved: dict[Value, Value] = {}
    others: list[Value] = []
    movements: set[_Movement] = set()
    for value in filter(None, node.inputs):
        group = group_of.get(value.producer) if value.producer is not None else None
        if group is not None:
            joined[group] = None
            movements.add(group.movement)
        elif (found := _moved(value)) is not None:
            moved[value] = found[0]
            movements.add(found[1])
        else:
            others.append(value)
            continue
        if len(shape_of(value) or ()) != rank:
            return None
    if len(movements) != 1:
        return None
    movement = movements.pop()
    if not all(_fits(context, value, movement) for value in others):
        return None
    # The largest group takes in the others, so that a chain of merges stays linear.
    group = max(joined, key=lambda each: len(each.nodes), default=_Group(movement))
    for each in joined:
        if each is not group:
            group.moved.update(each.moved)
            group.nodes.update(each.nodes)
            group_of.update(dict.fromkeys(each.nodes, group))
    group.moved.update(moved)
    return group


def _moved(value: Value) -> tuple[Value, _Movement] | None:
    """Return the value that a Transpose, perhaps after a Reshape, moves, and how; None if none."""
    transpose = produced_by(value, "Transpose")
    shape = shape_of(value)
    source = None if transpose is None else transpose.inputs[0]
    if transpose is None or source is None or shape is None or len(shape) < 3:
        return None
    order = order_of_axes(transpose)
    if order is None:
        return None
    reshape = produced_by(source, "Reshape")
    given = None if reshape is None else reshape.inputs[0]
    before = shape_of(given)
    # Dimensions that are not known could differ, and the Reshape of another result with them.
    if reshape is None or len(reshape.inputs) < 2 or before is None or None in before:
        return source, _Movement(None, None, None, 0, order)
    if given is None:
        return None
    zero = int(reshape.attrs.get("allowzero", 0))
    return given, _Movement(before, shape_of(source), reshape.inputs[1], zero, order)


def _fits(context: Context, value: Value, movement: _Movement) -> bool:
    """Return whether an operand that is not moved is one number or one number for each channel."""
    shape = shape_of(value)
    rank = len(movement.order if movement.before is None else movement.before)
    if shape is None or len(shape) > rank or static_size(shape) is None:
        return False
    if static_size(shape) == 1:
        return True
    single = sum(dim != 1 for dim in shape) == 1
    return single and movement.shape is None and context.is_weight(value)


def _is_next_to_convolution(group: _Group) -> bool:
    """Return whether a convolution computes what a group reads, or reads what it computes."""
    made = any(produced_by(value, *_CONVOLUTIONS) is not None for value in group.moved.values())
    return made or any(
        is_op(user, *_CONVOLUTIONS) for node in group.nodes for user in node.outputs[0].consumers
    )


def _saves(graph: Graph, group: _Group) -> bool:
    """Return whether a group needs no more Transposes after its nodes than before them."""
    before = sum(
        all(user in group.nodes for user in value.consumers) and not graph.is_output(value)
        for value in group.moved
    )
    return sum(_is_used_outside(graph, group, node) for node in group.nodes) <= before


def _is_used_outside(graph: Graph, group: _Group, node: Node) -> bool:
    """Return whether something reads a node's result in the order that the Transpose gives."""
    value = node.outputs[0]
    return graph.is_output(value) or any(
        user not in group.nodes and not group.movement.is_undone_by(user)
        for user in value.consumers
    )


def _rewrite(graph: Graph, group: _Group, node: Node, replaced: dict[Value, Value]) -> None:
    """Compute a node of a group on the values that are moved, and move its result."""
    movement, plain = group.movement, group.moved

    def operand(value: Value | None) -> Value | None:
        if value is None:
            return None
        source = plain.get(value) or _in_order(value, movement.order)
        return replaced.get(source, source)

    result = node.outputs[0]
    inputs = [operand(value) for value in node.inputs]
    made = part_of(node, node.op_type, *inputs, version=node.version, **node.attrs)
    plain[result] = made
    if made.producer is not None:
        made.producer.name, node.name = node.name, f"{node.name}.moved"
    if _is_used_outside(graph, group, node):
        replaced[result] = movement.of(made, node)
    for user in result.consumers:
        if movement.is_undone_by(user):
            replaced[user.outputs[0]] = made


def _in_order(value: Value, order: Ints) -> Value:
    """Return a number, or a weight of one number for each channel, for the original axes."""
    shape = shape_of(value) or ()
    sizes = [dim for dim in shape if isinstance(dim, int)]
    if all(size == 1 for size in sizes):
        return value
    sizes = [1] * (len(order) - len(sizes)) + sizes
    return reshaped(value, tuple(sizes[order.index(axis)] for axis in range(len(order))))
