"""Regions of a loaded partition: registered properties make their ops again.

`subgraph.partition.op_note` describes the notes in the file. Only properties that are registered in
the loading process make ops: a file cannot bring code.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from subgraph.errors import PartitionError, SubgraphError, described
from subgraph.graph.graph import Graph, Node, Value
from subgraph.partition.driver import call_hook
from subgraph.partition.op_note import OpNote
from subgraph.partition.options import Options
from subgraph.partition.property import SubgraphProperty, property_from
from subgraph.partition.regions import inline_subgraphs
from subgraph.partition.replace import Piece, create_node
from subgraph.partition.selector import Reject
from subgraph.system.json_values import from_json

_log = logging.getLogger("subgraph")
_SHOWN = 3  # names of regions in a warning


class _Failure(NamedTuple):
    """The first reason of its kind why regions have no ops, and the names of their nodes."""

    why: str
    names: list[str]


def restore_ops(graph: Graph, regions: Sequence[tuple[Node, OpNote]]) -> None:
    """Make the ops of a loaded graph's regions again, in place, by registered properties.

    A region whose property is not registered here, or refuses it now, keeps the default op; its
    note stays, so that a later load may succeed. Each reason of a property is logged once: errors
    of one class count as one reason.
    """
    whole: list[Graph] = []
    makers: dict[str, SubgraphProperty | str] = {}
    failed: dict[tuple[str, str], _Failure] = {}
    for node, note in regions:
        # Regions of one property share its object, whose ``pre_partition`` runs once, as it does in
        # a partition. It may collect state that every region needs.
        key = note.maker()
        if key not in makers:
            if not whole:
                whole.append(inline_subgraphs(graph))
            makers[key] = _property(note, whole[0])
        owner = makers[key]
        kind, why = (owner, owner) if isinstance(owner, str) else _remake(node, owner, note.id)
        if why:
            maker = note.property and f"property {note.property!r}"
            failed.setdefault((maker or note.op, kind), _Failure(why, [])).names.append(node.name)
    for (maker, _), (why, names) in failed.items():
        shown = ", ".join(map(repr, names[:_SHOWN])) + ", ..." * (len(names) > _SHOWN)
        _log.warning(
            "graph %r: %d region%s of %s (%s) run%s by the default executor: %s",
            graph.name,
            len(names),
            "s" * (len(names) > 1),
            maker,
            shown,
            "s" * (len(names) == 1),
            why,
        )


def _property(note: OpNote, whole: Graph) -> SubgraphProperty | str:
    """Return the property of a note after its ``pre_partition``, or the reason why there is none.

    Args:
        note: The note.
        whole: The loaded graph without its partition.
    """
    if not note.property:
        return f"no property made {note.op}, so nothing can make it again"
    if note.unsaved:
        names = ", ".join(map(repr, note.unsaved))
        return f"its option {names} has no form in a file; partition the model again"
    try:
        owner = property_from(note.property)
        if type(owner).pre_partition is not SubgraphProperty.pre_partition:
            call_hook(owner, "pre_partition", whole, Options.of(from_json(note.options)))
    except SubgraphError as error:
        return f"{error}"
    except (ValueError, RecursionError) as error:
        return f"its options are damaged: {error}"
    if owner.version != note.version:
        _log.warning(
            "graph %r was partitioned by version %r of property %r; this is version %r",
            whole.name,
            note.version,
            note.property,
            owner.version,
        )
    return owner


def _remake(node: Node, owner: SubgraphProperty, number: int) -> tuple[str, str]:
    """Give a subgraph node a new op by its property.

    Returns:
        The kind of the reason why it has none, and the reason; both are "" if it has one.
    """
    inner = node.subgraph
    assert inner is not None, "only regions have notes"
    # `create_node` finds the inputs of the new node by their names inside. Those of the outer
    # values may differ in a loaded model, so that stand-ins with the inner names are passed, whose
    # positions lead to the outer values.
    behind = [Value(value.name, value.type) for value in inner.inputs]
    try:
        made = create_node(owner, Piece(inner, behind, list(node.outputs)), number)
    except PartitionError as error:
        return type(error.__cause__ or error).__name__, f"{error}"
    except SubgraphError as error:
        return type(error).__name__, described(error)
    if isinstance(made, Reject):
        return made.reason, f"it refused: {made.reason}"
    if made.op is None or made.subgraph is None:
        return made.op_type, f"create_subgraph_node gave {made.op_type}, which has no op"
    position = {value.name: k for k, value in enumerate(behind)}
    taken = [None if v is None else node.inputs[position[v.name]] for v in made.inputs]
    _take_inputs(node, taken)
    node.op, node.subgraph = made.op, made.subgraph
    # The metadata of the file has priority: it has the note by which a later load makes the op
    # again.
    node.metadata = {**(made.metadata or {}), **(node.metadata or {})}
    return "", ""


def _take_inputs(node: Node, inputs: Sequence[Value | None]) -> None:
    if tuple(inputs) == node.inputs:
        return
    for value in node.inputs:
        if value is not None:
            value.uses.remove(node)
    for value in inputs:
        if value is not None:
            value.uses.append(node)
    node.inputs = tuple(inputs)
