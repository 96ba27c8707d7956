"""Third step of a partition: replace regions by subgraph nodes, in linear time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import attrs

from subgraph.errors import PartitionError, SubgraphError, described
from subgraph.graph.graph import Graph, Node, Value, copy_nodes, copy_value
from subgraph.graph.naming import Names
from subgraph.graph.order import list_uses
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import TensorType, ValueType
from subgraph.operators.subgraph_op import subgraph_node
from subgraph.partition.property import SubgraphProperty, property_name
from subgraph.partition.selector import Reject


@attrs.define(slots=True)
class Piece:
    """A region that was cut out.

    Attributes:
        inner: The inner graph.
        inputs: The outer value of each input of the inner graph.
        outputs: The outer value of each output of the inner graph.
    """

    inner: Graph
    inputs: list[Value]
    outputs: list[Value]


class Cut(NamedTuple):
    """A region and the node that replaces it.

    Attributes:
        members: The region's nodes in topological order.
        piece: The region as it was cut out.
        node: The new node, in no graph yet; its inputs are values of the graph with the region.
    """

    members: Sequence[Node]
    piece: Piece
    node: Node


class Cutter:
    """Cuts regions out of one graph.

    Attributes:
        graph: The graph; it is not changed.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Value] | None = None) -> None:
        """Prepare to cut ``graph``.

        Args:
            graph: The graph.
            inputs: The graph's inputs that are not weights; None: all inputs.
        """
        self.graph = graph
        self._inputs = frozenset(graph.inputs if inputs is None else inputs)
        self._outputs = frozenset(graph.outputs)

    def cut_out(self, region: Sequence[Node], name: str) -> Piece | None:
        """Return the region as an inner graph; None if its results are not used outside.

        Inputs come in the order of their first use, each once; all uses of one parameter are one
        input. Outputs come in the order of the nodes that make them.

        Args:
            region: Its nodes in topological order.
            name: Name of the inner graph.
        """
        inner = Graph.bare(name, self.graph.opsets)
        values: dict[Value, Value] = {}
        nodes = copy_nodes(region, values, owner=inner)
        inputs: list[Value] = []
        copies: list[Value] = []
        outputs: list[Value] = []
        made: list[Value] = []
        weights: dict[Parameter, Value] = {}
        twins: dict[Value, Value] = {}
        for value, copy in values.items():
            if copy.producer is not None:
                # The copy lists the uses inside; if the value has more, it is used outside too.
                if len(value.uses) > len(copy.uses) or value in self._outputs:
                    outputs.append(value)
                    made.append(copy)
                continue
            if copy.parameter is not None:
                # An input with a default is no weight: the caller may pass another array.
                if value in self._inputs:
                    copy.parameter = None
                elif (first := weights.setdefault(copy.parameter, copy)) is not copy:
                    twins[copy] = first
                    continue
            inputs.append(value)
            copies.append(copy)
        if not outputs:
            return None
        if twins:
            _merge(nodes, twins, copies)
        inner.fill(nodes, copies, made)
        return Piece(inner, inputs, outputs)


def _merge(nodes: Sequence[Node], twins: Mapping[Any, Value], inputs: Sequence[Value]) -> None:
    """Let the nodes of an inner graph use one value for each parameter.

    Args:
        nodes: The graph's nodes.
        twins: Values that are replaced by others of their parameters.
        inputs: The graph's inputs.
    """
    for node in nodes:
        node.inputs = tuple([twins.get(value, value) for value in node.inputs])
        node.captures = tuple([twins.get(value, value) for value in node.captures])
    list_uses(inputs, nodes, ())


def create_node(property: SubgraphProperty, piece: Piece, number: int) -> Node | Reject:
    """Return the node that the property makes of a region, or its refusal.

    The node's inputs are replaced by the outer values of the same names.

    Args:
        property: The property.
        piece: The region.
        number: Number of the region in the partition.

    Raises:
        PartitionError: the property raised, or the node does not fit the region.
    """
    create = getattr(property.create_subgraph_node, "__func__", None)
    if create is SubgraphProperty.create_subgraph_node:
        # The default node fits every region, so that it takes the outer values at once.
        return subgraph_node(piece.inner, name=piece.inner.name, inputs=piece.inputs)
    try:
        made: Any = property.create_subgraph_node(piece.inner, number)
    except SubgraphError as error:
        name = property_name(property)
        error.add_note(f"in create_subgraph_node of property {name!r}, region {number}")
        raise
    except Exception as error:
        name = property_name(property)
        raise PartitionError(
            f"property {name!r}: create_subgraph_node raised {described(error)} for "
            f"region {number} ({len(piece.inner.nodes)} nodes, the first of them "
            f"{piece.inner.nodes[0].name!r}); return None or sg.Reject(why) to refuse a region"
        ) from error
    if made is None:
        said_no = Reject("create_subgraph_node gave None")
        said_no.file = ""  # not a reason of the user's code
        return said_no
    if isinstance(made, Reject):
        return made
    if isinstance(made, Node):
        behind = {value.name: value for value in piece.inputs}
        wrong = _misfit(made, piece, behind)
        if not wrong:
            made.inputs = tuple([None if v is None else behind[v.name] for v in made.inputs])
            return made
    else:
        wrong = (
            f"create_subgraph_node gave {made!r}; it must return a Node, as sg.subgraph_node "
            "makes, or None"
        )
    raise PartitionError(f"property {property_name(property)!r}, region {number}: {wrong}")


def _misfit(made: Node, piece: Piece, known: Collection[str]) -> str:
    """Return why a node does not fit a region whose inputs have known names; "" if it does."""
    if made.graph is not None:
        return (
            f"create_subgraph_node gave node {made.name!r}, which is in graph "
            f"{made.graph.name!r} already; return a new node"
        )
    for value in made.inputs:
        if value is not None and value.name not in known:
            return (
                f"{_shown(made)} takes value {value.name!r}, which is no input of the region; its "
                f"inputs are {', '.join(map(repr, sorted(known))) or 'none'}"
            )
    if len(made.outputs) != len(piece.outputs):
        return (
            f"{_shown(made)} has {len(made.outputs)} outputs, the region {len(piece.outputs)}; "
            "give one for each output of the inner graph, in its order"
        )
    if made.subgraph is not None and len(made.subgraph.inputs) != len(made.inputs):
        return (
            f"{_shown(made)} has {len(made.inputs)} inputs, its subgraph "
            f"{len(made.subgraph.inputs)}; they must correspond one to one"
        )
    for new, old in zip(made.outputs, piece.outputs, strict=True):
        if new.type is not old.type and not _compatible(new.type, old.type):
            return f"{_shown(made)} gives {new.type} for output {old.name!r}, which is {old.type}"
    return ""


def _shown(made: Node) -> str:
    return f"the node {made.name!r}" if made.name else "the node that it gave"


def _compatible(new: ValueType | None, old: ValueType | None) -> bool:
    if new is None or old is None:
        return True
    if isinstance(new, TensorType) and isinstance(old, TensorType):
        return new.dtype == old.dtype and (
            new.rank is None or old.rank is None or new.rank == old.rank
        )
    return type(new) is type(old)


def replace_regions(graph: Graph, cuts: Sequence[Cut]) -> tuple[Graph, dict[Node, Node]]:
    """Return a copy of ``graph`` with every region replaced by its node; see `Replacement`."""
    replacement = Replacement(graph)
    for cut in cuts:
        replacement.add(cut.members, cut.piece, cut.node)
    return replacement.finish()


class Replacement:
    """A copy of a graph with regions replaced by nodes; the graph itself is not changed."""

    def __init__(self, graph: Graph) -> None:
        """Begin without regions."""
        self._graph = graph
        self._values: dict[Value, Value] = {}
        self._copies: dict[Node, Node | None] = dict.fromkeys(graph.nodes)
        self._made: list[Node] = []

    def add(self, members: Sequence[Node], piece: Piece, node: Node) -> None:
        """Replace a region by a node.

        Args:
            members: The region's nodes in topological order.
            piece: The region as it was cut out.
            node: The new node, in no graph yet.
        """
        copies, values = self._copies, self._values
        for member in members:
            copies[member] = node
        for k, old in enumerate(piece.outputs):  # as many as the node's: `create_node` has compared
            value = node.outputs[k]
            value.name = old.name
            value.type = value.type or old.type
            values[old] = value
        node.name = node.name or piece.inner.name
        self._made.append(node)

    def finish(self) -> tuple[Graph, dict[Node, Node]]:
        """Return the new graph, and for each node of the old one its copy, or its region's node.

        Raises:
            ModelError: the regions all together form a cycle.
        """
        graph, copies, values = self._graph, self._copies, self._values
        outside = [node for node, copy in copies.items() if copy is None]
        names = Names(node.name for node in outside)
        for node in self._made:
            node.name = names.fresh(node.name)
        copies.update(zip(outside, copy_nodes(outside, values), strict=True))
        whole = cast("dict[Node, Node]", copies)
        for node in self._made:
            node.inputs = tuple(
                [v if v is None else values.get(v) or copy_value(v, values) for v in node.inputs]
            )
        made = Graph.bare(graph.name, graph.opsets)
        made.attrs, made.metadata, made.doc = dict(graph.attrs), dict(graph.metadata), graph.doc
        made.inputs = tuple([copy_value(v, values) for v in graph.inputs])
        made.outputs = tuple([copy_value(v, values) for v in graph.outputs])
        made.captures = tuple([copy_value(v, values) for v in graph.captures])
        # The node of a region has the position of the region's first node.
        made.adopt(dict.fromkeys(whole.values()))
        return made, whole
