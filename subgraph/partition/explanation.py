"""`explain`: why a node is in its subgraph, or in none, from the record of the partition.

The record (`subgraph.partition.record`) is compact; paths that would have closed a cycle are
searched for only when `explain` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from subgraph.errors import PartitionError, require_type
from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import REGION
from subgraph.partition.record import (
    CAPPED,
    KEY,
    MADE,
    REFUSED,
    SMALL,
    UNUSED,
    PartitionRecord,
    Run,
)
from subgraph.partition.selector import Reject
from subgraph.partition.selector_driver import METHODS, SELECT
from subgraph.system.registry import nearest

# Sentences for one node. A choice for the reader: a node with many neighbours is refused over each
# edge.
_MOST_REFUSALS = 6

# Names on a path between a region and a node of the partitioned graph, by the identity of the run,
# the region's position and the node. All nodes of one subgraph node have the same path.
_Detours = dict[tuple[int, int, Node], list[str]]


@attrs.frozen
class Explanation:
    """Why a node is where it is; ``str()`` gives it in words.

    Attributes:
        node: The node's name.
        op_type: Its operator.
        subgraph: Name of the subgraph node that holds it, None if it is in none.
        property: Name of the property whose region it is in; None if in none.
        reasons: One sentence for each reason, the most specific first.
    """

    node: str
    op_type: str
    subgraph: str | None
    property: str | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        where = "no subgraph" if self.subgraph is None else f"subgraph {self.subgraph!r}"
        head = f"{self.node!r} ({self.op_type}) is in {where}"
        if not self.reasons:
            return head
        more = "".join(f"\n  {reason}" for reason in self.reasons[1:])
        return f"{head}: {self.reasons[0]}{more}"


def explain(graph: Graph, node: Node | str) -> Explanation:
    """Say why a node is in its subgraph, or in none: who refused it, over which edge, and why.

    Args:
        graph: A graph that the pass PartitionGraph returned.
        node: A node, or its name: outside of subgraphs, inside one, or in a body.

    Raises:
        PartitionError: the graph was not partitioned, or has no such node.
    """
    require_type(graph, Graph, PartitionError, "the graph that the partition returned")
    require_type(node, (str, Node), PartitionError, "a node or its name")
    found = _find(graph, node)
    if found is None:
        name = node if isinstance(node, str) else node.name
        names = [known.name for _, known, _ in _everywhere(graph)]
        raise PartitionError(
            f"graph {graph.name!r} has no node {name!r}, outside or inside of its subgraphs; "
            f"{nearest(name, names)}"
        )
    answer = _explanation(*found, {})
    if answer is None:
        raise PartitionError(
            f"graph {found[0].name!r} has no record of a partition; explain the graph that "
            'apply_pass(graph, "PartitionGraph") or optimize_for returned'
        )
    return answer


def explanations(graph: Graph) -> dict[Node, Explanation]:
    """Return the explanations of all nodes, in subgraphs and bodies too, of partitioned graphs."""
    detours: _Detours = {}
    found = ((place[1], _explanation(*place, detours)) for place in _everywhere(graph))
    return {node: answer for node, answer in found if answer is not None}


def _explanation(
    where: Graph, target: Node, holders: Sequence[Node], detours: _Detours
) -> Explanation | None:
    """Explain a node at a place of `_everywhere`; None if ``where`` was not partitioned."""
    record = where.attrs.get(KEY)
    if not isinstance(record, PartitionRecord):
        return None
    region = (target.metadata or {}).get(REGION)
    if holders or region:
        return _inside(record, target, holders, region, detours)
    if target.subgraph is not None:
        return _of_subgraph_node(record, target)
    return _outside(record, where, target, detours)


def _everywhere(graph: Graph) -> Iterator[tuple[Graph, Node, tuple[Node, ...]]]:
    """Yield every node, with the cut graph or body that it is in and the subgraph nodes around it.

    The subgraph nodes are listed from the outermost. Outer nodes come before inner ones.
    """
    work: list[tuple[Graph, Graph, tuple[Node, ...]]] = [(graph, graph, ())]
    while work:
        following: list[tuple[Graph, Graph, tuple[Node, ...]]] = []
        for where, current, holders in work:
            for node in current.nodes:
                yield where, node, holders
                if node.subgraph is not None:
                    following.append((where, node.subgraph, (*holders, node)))
                if node.attrs:
                    for body in node.bodies:
                        # A body of a node outside regions is cut like a graph of its own and has
                        # its own record. A body inside a region belongs to the cut graph around the
                        # region.
                        following.append((where if holders else body, body, holders))
        work = following


def _find(graph: Graph, node: Node | str) -> tuple[Graph, Node, tuple[Node, ...]] | None:
    same_name = None
    for found in _everywhere(graph):
        # A node object of the graph before the partition is not in the new graph, which has a copy
        # of the same name. The object itself is preferred, since a body may have a node of that
        # name too.
        if found[1] is node:
            return found
        name = node if isinstance(node, str) else node.name
        if same_name is None and found[1].name == name:
            if isinstance(node, str):
                return found
            same_name = found
    return same_name


def _inside(
    record: PartitionRecord,
    target: Node,
    holders: Sequence[Node],
    region: str | None,
    detours: _Detours,
) -> Explanation:
    """Explain a node of a subgraph node.

    Args:
        record: The record of the partition.
        target: The node.
        holders: The subgraph nodes around it, outermost first, including those of devices.
        region: Name of the subgraph node that held the node before a device compiled it together
            with outer nodes, or None.
        detours: Paths found before.
    """
    around = {holder.name: holder for holder in holders}
    for run in record.runs:
        names = [*around] if region is None else [*around, region]
        made = {k for name in names if (k := run.made_at(name)) is not None}
        for position in sorted(made):
            note = run.regions[position]
            number = run.number(target.name)
            if number is None:
                reasons: tuple[str, ...] = (f"property {run.property!r} put it there",)
            elif run.region[number] != position:
                continue
            else:
                reasons = (_inclusion(run, number, note.start),)
                if note.node in around:
                    reasons += tuple(
                        _separations(run, number, _Location(target, around[note.node]), detours)
                    )
            return Explanation(target.name, target.op_type, note.node, run.property, reasons)
    reason = "it was there before the graph was partitioned"
    return Explanation(target.name, target.op_type, region or holders[0].name, None, (reason,))


def _inclusion(run: Run, number: int, start: int) -> str:
    """Say how a node came into its region, which started at node number ``start``."""
    name = run.names[number]
    source = run.via[number]
    forced = ", as the option include says" if run.forced.get(name) == "included" else ""
    if source == number or source < 0:
        return f"property {run.property!r} started the region here{forced}"
    if run.strategy == "hetero":
        return (
            f"property {run.property!r} took it{forced}: the region grown from "
            f"{run.names[start]!r} was the largest"
        )
    return (
        f"property {run.property!r} took it{forced} as a neighbour of {run.names[source]!r}; the "
        f"region started at {run.names[start]!r}"
    )


def _of_subgraph_node(record: PartitionRecord, target: Node) -> Explanation:
    inner = target.subgraph
    assert inner is not None
    for run in record.runs:
        position = run.made_at(target.name)
        if position is not None:
            note = run.regions[position]
            reason = (
                f"it is itself a subgraph of {note.size} nodes, which property "
                f"{run.property!r} started at {run.names[note.start]!r}"
            )
            return Explanation(target.name, target.op_type, None, run.property, (reason,))
    reason = f"it held a subgraph of {len(inner.nodes)} nodes before the graph was partitioned"
    return Explanation(target.name, target.op_type, None, None, (reason,))


def _outside(record: PartitionRecord, graph: Graph, target: Node, detours: _Detours) -> Explanation:
    by_property: dict[str, list[str]] = {}
    for run in record.runs:
        number = run.number(target.name)
        if number is None:
            continue
        reasons = list(_reasons(run, number, target, detours))
        # The last round of a property in which a region reached the node decides.
        met = number in run.given_up or number in run.filtered or run.region[number] >= 0
        if met or not by_property.get(run.property):
            by_property[run.property] = reasons
    several = len(by_property) > 1
    lines: list[str] = []
    for name, reasons in by_property.items():
        reasons = reasons or ["no region reached it"]
        lines += [f"property {name!r}: {reason}" if several else reason for reason in reasons]
    if not lines:
        lines = ["it was made after the partition"]
    return Explanation(target.name, target.op_type, None, None, tuple(lines))


def _reasons(run: Run, number: int, target: Node, detours: _Detours) -> Iterator[str]:
    if run.forced.get(target.name) == "excluded":
        yield "the option exclude names it"
        return
    yield from _separations(run, number, _Location(target), detours)
    if number in run.filtered:
        why = f": {_reason_text(run.dropped[number])}" if number in run.dropped else ""
        yield f"filter of selector {run.selector} dropped it from the region's candidates{why}"
    if run.region[number] >= 0:
        yield _outcome(run, run.region[number])
        return
    yield from _refusals(run, number)


def _refusals(run: Run, number: int) -> Iterator[str]:
    """Yield the refusals of a node, each reason once, those of the user's selectors first."""
    found: dict[Any, str] = {}
    for method, source, answer in run.refusals_of(number):
        own = isinstance(answer, Reject) and bool(answer.where)
        said = _reason_text(answer) if isinstance(answer, Reject) else repr(answer)
        # The project's own selectors give the same reason for every question.
        key = (own, said, method if own or not isinstance(answer, Reject) else "")
        found[key] = _refusal(run, number, method, source, answer)
    order = sorted(dict(reversed(found.items())), key=lambda key: not key[0])
    yield from (found[key] for key in order[:_MOST_REFUSALS])
    if len(order) > _MOST_REFUSALS:
        yield f"and {len(order) - _MOST_REFUSALS} reasons more"


def _refusal(run: Run, number: int, method: int, source: int, answer: Any) -> str:
    names = run.names
    call = f"{run.selector}.{METHODS[method]}"
    if method == SELECT:
        what = f"{call}({names[number]!r})"
    else:
        what = f"{call}({names[source]!r}, {names[number]!r})"
    if isinstance(answer, Reject):
        return f"{what} refused: {_reason_text(answer)}"
    return f"{what} said {answer!r}"


def _reason_text(refusal: Reject) -> str:
    return f"{refusal.reason} ({refusal.where})" if refusal.where else refusal.reason


def _outcome(run: Run, position: int) -> str:
    """Say why a region was not replaced, or the name of its subgraph node."""
    note = run.regions[position]
    region = f"its region of {note.size} node{'s' * (note.size > 1)}"
    if note.size > 1:
        region += f" from {run.names[note.start]!r}"
    why = f": {_reason_text(note.why)}" if note.why is not None else ""
    return {
        SMALL: f"{region} is smaller than min_size {run.min_size}",
        CAPPED: f"{region} was not among the {run.max_subgraphs} largest (max_subgraphs)",
        REFUSED: f"property {run.property!r} refused {region}{why}",
        UNUSED: f"nothing uses what {region} computes",
        MADE: f"{region} became {note.node!r}",
    }[note.status]


@attrs.frozen
class _Location:
    """The place of a node in the partitioned graph.

    Attributes:
        target: The node.
        holder: The subgraph node that holds it, or None.
    """

    target: Node
    holder: Node | None = None

    @property
    def node(self) -> Node:
        """The holder if there is one, else the node itself."""
        return self.holder or self.target

    def neighbours(self) -> list[Node]:
        """Return the nodes of the partitioned graph to which edges of ``target`` lead."""
        if self.holder is None:
            return [*self.target.predecessors(), *self.target.successors()]
        inner = self.holder.subgraph
        assert inner is not None, "only subgraph nodes hold others"
        behind = dict(zip(inner.inputs, self.holder.inputs, strict=True))
        outer = [behind.get(value) for value in self.target.sources]
        found = [v.producer for v in outer if v is not None and v.producer is not None]
        for value, result in zip(self.holder.outputs, inner.outputs, strict=True):
            if result.producer is self.target:
                found += value.consumers
        return found


def _separations(run: Run, number: int, location: _Location, detours: _Detours) -> Iterator[str]:
    """Yield for each neighbouring region the cycle that it would have closed with the node."""
    beside: dict[int, None] = {}
    if number in run.given_up:
        beside[run.given_up[number]] = None
    for node in location.neighbours():
        position = _region_of(run, node)
        if position >= 0 and run.region[number] >= 0:
            beside[position] = None
    beside.pop(run.region[number], None)
    for position in beside:
        key = id(run), position, location.node
        if key not in detours:
            detours[key] = _detour(run, position, location.node)
        path = detours[key]
        if path:
            start = run.names[run.regions[position].start]
            shown = " -> ".join(map(repr, path))
            yield f"with it the region from {start!r} would have closed a cycle: {shown}"
        elif position == run.given_up.get(number):
            yield "a region gave it up: with it the region would have closed a cycle"


def _region_of(run: Run, node: Node) -> int:
    """Return the position in ``run.regions`` of a node's region, -1 if it has none.

    The node is one of the partitioned graph: the subgraph node of a region, or a node whose region
    was not replaced.
    """
    if node.subgraph is not None:
        position = run.made_at(node.name)
        return -1 if position is None else position
    number = run.number(node.name)
    return -1 if number is None else run.region[number]


def _detour(run: Run, position: int, end: Node) -> list[str]:
    """Return the names on a path between a region and a node over a third node; empty if none."""
    # A filter that dropped all candidates is recorded at the next position, which need not exist.
    if position >= len(run.regions):
        return []
    graph = end.graph
    assert graph is not None, "explain looks at nodes of graphs"
    members = [node for node in graph.nodes if _region_of(run, node) == position]
    members = [node for node in members if node is not end]
    path = _find_detour(members, [end]) or _find_detour([end], members)
    return [node.name for node in path]


def _find_detour(first: Iterable[Node], last: Iterable[Node]) -> list[Node]:
    """Return a shortest path from ``first`` to ``last`` over another node; empty if none."""
    sources, targets = dict.fromkeys(first), frozenset(last)
    before: dict[Node, Node] = {}
    level = list(sources)
    while level:
        following: list[Node] = []
        for node in level:
            for other in node.successors():
                if other in targets and node not in sources:
                    path = [other, node]
                    while path[-1] not in sources:
                        path.append(before[path[-1]])
                    return path[::-1]
                if other not in before and other not in sources and other not in targets:
                    before[other] = node
                    following.append(other)
        level = following
    return []
