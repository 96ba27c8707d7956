"""The property "cpu_elementwise": groups of elementwise operators become one loop.

A node joins the group of its users if all of them are in one group, so that no inner result is used
outside, and if its result has the shape of the group's result.

A function of one byte, as an activation between conversions of a quantized model, may be longer
than other groups: it runs as a lookup in a table of 256 results, whose time does not depend on its
length.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from subgraph.dtypes import INTEGERS
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import Shape
from subgraph.ops.elementwise.expressions import CONVERSIONS, EXPANSIONS
from subgraph.partition.property import SubgraphProperty, register_property
from subgraph.partition.selector import SubgraphSelector
from subgraph.passes.patterns import (
    Context,
    GroupSelector,
    Match,
    dtype_of,
    fused_node,
    is_op,
    shape_of,
    static_size,
)

_OPERATORS = frozenset({*EXPANSIONS, *CONVERSIONS} - {"Identity", "CastLike"})
_DTYPES = frozenset((*INTEGERS, "float32", "float64", "bool"))
# Limits of a fused loop (estimates); they bound its live values and its streams from memory.
_MAX_NODES = 24
_MAX_INPUTS = 10
# Nodes of a function of one byte, each of which may be a step that computes its table (estimate).
_MAX_TABLE_NODES = 96
# Nodes of a function of one byte from which on a loop reads its result rather than computes it
# (estimate).
_MIN_TABLE_NODES = 6


class _Group:
    """Nodes that run in one loop; the root, the first of ``nodes``, computes the result.

    Attributes:
        shape: Shape of the result.
        origin: The bytes of which the result is a function, element by element, or None.
        nodes: The nodes.
        inputs: What the nodes read, results of nodes of the group apart.
    """

    def __init__(self, root: Node, shape: Shape, origin: Value | None) -> None:
        self.shape = shape
        self.origin = origin
        self.nodes = [root]
        self.inputs: dict[Value, None] = {v: None for v in root.inputs if v is not None}

    def add(self, node: Node, origin: Value | None) -> bool:
        """Add a node unless the group would become too large; return whether it was added.

        Args:
            node: The node.
            origin: The bytes of which the node's result is a function, or None.
        """
        inputs = dict(self.inputs)
        # The node's result becomes an inner value of the loop. All users are in the group, so that
        # nothing else reads it.
        inputs.pop(node.outputs[0], None)
        inputs.update((v, None) for v in node.inputs if v is not None)
        if self.origin is not None and self.origin is origin:
            if len(self.nodes) >= _MAX_TABLE_NODES:
                return False
        elif len(self.nodes) >= _MAX_NODES or len(inputs) > _MAX_INPUTS:
            return False
        self.nodes.append(node)
        self.inputs = inputs
        return True

    def fits(self, context: Context) -> bool:
        """Return whether the group is within the limits of a loop, or a function of one byte.

        ``add`` holds a group without an origin within the limits; only its root may exceed them.
        """
        if self.origin is None:
            return True
        if len(self.nodes) <= _MAX_NODES and len(self.inputs) <= _MAX_INPUTS:
            return True
        return sum(not _is_number(context, value) for value in self.inputs) == 1


@attrs.frozen
class _Function:
    """A value as a function of bytes of the same shape, element by element.

    Attributes:
        origin: The bytes.
        nodes: Nodes on the longest way from the bytes to the value.
    """

    origin: Value
    nodes: int


def _byte_functions(context: Context) -> dict[Value, _Function]:
    """Return the values that are functions of one byte and of weights of one element."""
    found: dict[Value, _Function] = {}
    for node in context.graph.nodes:
        if not _fits(node) or context.is_weight(node.outputs[0]):
            continue
        shape = shape_of(node.outputs[0])
        read = [v for v in node.inputs if v is not None and not _is_number(context, v)]
        if not read or any(shape_of(value) != shape for value in read):
            continue
        own = {v: found.get(v, _Function(v, 0)) for v in read}
        origins = {function.origin for function in own.values()}
        if len(origins) == 1 and dtype_of(next(iter(origins))) in ("int8", "uint8"):
            longest = max(function.nodes for function in own.values())
            found[node.outputs[0]] = _Function(origins.pop(), longest + 1)
    return found


def _is_number(context: Context, value: Value) -> bool:
    """Return whether a value is a weight of one element."""
    return context.is_weight(value) and static_size(shape_of(value)) == 1


def groups(context: Context) -> list[_Group]:
    """Return the groups of at least two nodes."""
    functions = _byte_functions(context)
    while True:
        found = _groups(context, functions)
        too_large = [group for group in found if not group.fits(context)]
        if not too_large:
            return [group for group in found if len(group.nodes) > 1]
        # Such a group reads several functions of its bytes that other nodes read, too.
        for group in too_large:
            for node in group.nodes:
                functions.pop(node.outputs[0], None)


def _groups(context: Context, functions: Mapping[Value, _Function]) -> list[_Group]:
    group_of: dict[Node, _Group] = {}
    found: list[_Group] = []
    # Users come before producers in this order, so that the group of all users of a value is known.
    for node in reversed(context.graph.nodes):
        # A value that follows from weights is computed once; in a loop every run would compute it
        # again.
        if not _fits(node) or context.is_weight(node.outputs[0]):
            continue
        shape = shape_of(node.outputs[0])
        assert shape is not None
        function = functions.get(node.outputs[0])
        origin = None if function is None else function.origin
        group = _group_of_users(context, node, group_of)
        if group is not None and group.origin is None and _is_table(node, function):
            group = None
        if group is not None and group.shape == shape and group.add(node, origin):
            group_of[node] = group
            continue
        group_of[node] = _Group(node, shape, origin)
        found.append(group_of[node])
    return found


def _is_table(node: Node, function: _Function | None) -> bool:
    """Return whether bytes are looked up in a table rather than computed by a loop that reads them.

    Args:
        node: The node that computes the bytes.
        function: What they are a function of.
    """
    long = function is not None and function.nodes >= _MIN_TABLE_NODES
    return long and node.op_type == "QuantizeLinear"


def _fits(node: Node) -> bool:
    if not is_op(node, *_OPERATORS) or len(node.outputs) != 1 or not node.inputs:
        return False
    # The loop broadcasts as NumPy does; conversions may have one scale for each channel.
    if node.op_type in CONVERSIONS and not _one_scale(node):
        return False
    values = [*node.outputs, *(v for v in node.inputs if v is not None)]
    shape = shape_of(node.outputs[0])
    # Sizes without a name could differ although the shapes compare as equal.
    return shape is not None and None not in shape and all(dtype_of(v) in _DTYPES for v in values)


def _one_scale(node: Node) -> bool:
    """Return whether a node converts between 8-bit integers and float32 by one scale."""
    if node.attrs.get("block_size", 0) or static_size(shape_of(node.inputs[1])) != 1:
        return False
    kinds = {dtype_of(node.inputs[0]), dtype_of(node.outputs[0])}
    return "float32" in kinds and bool(kinds & {"int8", "uint8"})


def _group_of_users(context: Context, node: Node, group_of: Mapping[Node, _Group]) -> _Group | None:
    value = node.outputs[0]
    if not value.uses or value in context.outputs:
        return None
    users = {group_of.get(user) for user in value.uses}
    return users.pop() if len(users) == 1 else None


@register_property("cpu_elementwise")
class ElementwiseProperty(SubgraphProperty):
    """Fuses chains of elementwise operators."""

    name = "cpu_elementwise"
    min_size = 2
    constant_weights = False  # the pass ConstantsToParameters came before

    def __init__(self) -> None:
        """Make a property that has not seen a graph."""
        self._graph: Graph | None = None
        self._members: dict[Node, frozenset[Node]] = {}

    def members(self, node: Node) -> frozenset[Node]:
        """Return the nodes of the group of ``node``; empty for a node without a group."""
        if self._graph is not node.graph and node.graph is not None:
            self._graph = node.graph
            self._members = {}
            for group in groups(Context(node.graph)):
                inside = frozenset(group.nodes)
                self._members.update((member, inside) for member in group.nodes)
        return self._members.get(node, frozenset())

    def create_subgraph_selector(self) -> SubgraphSelector:
        """Return a fresh selector."""
        return GroupSelector(self.members)

    def create_subgraph_node(self, subgraph: Graph, subgraph_id: int) -> Node | None:
        """Return the fused node of a region; None if it has several outputs."""
        if len(subgraph.outputs) != 1:
            return None
        inputs = tuple(subgraph.inputs)
        match = Match(tuple(subgraph.nodes), "FusedElementwise", inputs, arity=len(inputs))
        return fused_node(subgraph, match)
