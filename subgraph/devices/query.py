"""Results of queries: which nodes of a graph a device supports, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import attrs

from subgraph.graph.graph import Graph, Node
from subgraph.graph.types import SequenceType
from subgraph.operators.subgraph_op import DefaultSubgraphOp


@attrs.frozen
class PreparedGraph:
    """The graph that a device made to answer a query; a compilation that follows uses it too.

    Attributes:
        graph: Result of `Device.transform`.
        refused: Reasons by name of the nodes of ``graph`` that the device cannot run; None:
            `Device.supports` is asked about each node.
        found: More results that the device needs to compile the graph, in a form of its own.
    """

    graph: Graph
    refused: Mapping[str, str] | None = None
    found: Any = None


class QueryResult(dict[str, str]):
    """Device names by node name, for the nodes that are supported.

    Attributes:
        reasons: Why the other nodes are not supported, by name.
        prepared: The graph that the device made, for a compilation that follows; None if it made
            none.
        weights: Names of constants that the device supports only as weights of other nodes.
        lifted: The graph with Parameters in place of these constants, to be compiled instead of
            the graph that was queried; None if there are no such constants.
        refused: Nodes whose affinity names a device that does not support them, with its reason.
            Another device runs them.
    """

    def __init__(
        self,
        supported: Mapping[str, str],
        reasons: Mapping[str, str],
        prepared: PreparedGraph | None = None,
        weights: AbstractSet[str] = frozenset(),
        lifted: Graph | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """Create a result from the devices of the supported nodes and the class's attributes."""
        super().__init__(supported)
        self.reasons: dict[str, str] = dict(reasons)
        self.prepared = prepared
        self.weights = weights
        self.lifted = lifted
        self.refused: dict[str, str] = dict(refused or {})


def origins(node: Node) -> Iterator[str]:
    """Yield the names of the original nodes that a node of a transformed graph stands for."""
    work = [node]
    while work:
        each = work.pop()
        if each.subgraph is None:
            origin = (each.metadata or {}).get("origin")
            yield from origin.split("\n") if origin else [each.name]
        else:
            work.extend(each.subgraph.nodes)


def own_op_reason(node: Node) -> str:
    """Return why no device may run ``node``: it, or a region in its bodies, has a user's op.

    Returns:
        The reason; "" if a device may run it.
    """
    bodies = node.bodies if node.attrs else ()
    inside = (each for body in bodies for level in body.levels() for each in level.nodes)
    for each in (node, *inside):
        if each.op is not None and type(each.op) is not DefaultSubgraphOp:
            what = "" if each is node else f"holds {each.name!r}, which "
            return f"{what}runs by its own op, {type(each.op).__name__}"
    return ""


def reason_of(answer: object, node: Node, device: str) -> str:
    """Return the reason of a refusal as text.

    Args:
        answer: What `Device.supports` returned: a `Reject` with a reason, or False.
        node: The node.
        device: The device's name.
    """
    reason = getattr(answer, "reason", "")
    return str(reason) or f"{device} does not run {node.op_type}"


def refuse_with_users(graph: Graph, seen: set[str], reasons: dict[str, str]) -> None:
    """Refuse the nodes that a transformation removed if a user of their results is refused.

    Such nodes, constants and identities for example, have become a part of their users.

    Args:
        graph: The original graph.
        seen: Names of the original nodes that the transformed graph stands for.
        reasons: Reasons of the refused nodes by name; it is added to.
    """
    # Users come before their producers in this order. OpenVINO's plugin guide decides about its
    # "housekeeping nodes" by their users, too.
    for node in reversed(graph.nodes):
        if node.name in seen or node.name in reasons:
            continue
        refused = [user for user in node.successors() if user.name in reasons]
        if refused:
            reasons[node.name] = f"only node {refused[0].name!r} needs it, which is not supported"


def refuse_behind_sequences(graph: Graph, seen: set[str], reasons: dict[str, str]) -> None:
    """Refuse the nodes that a transformation removed if they take a sequence of a refused node.

    Such nodes, a SequenceAt with a known index for example, have become an item of the sequence,
    which a region cannot take from outside.

    Args:
        graph: The original graph.
        seen: Names of the original nodes that the transformed graph stands for.
        reasons: Reasons of the refused nodes by name; it is added to.
    """
    for node in graph.nodes:
        if node.name in seen or node.name in reasons:
            continue
        for value in node.sources:
            made = value.producer
            if made is not None and made.name in reasons and isinstance(value.type, SequenceType):
                reasons[node.name] = f"it takes a sequence of node {made.name!r}, which is refused"
                break
