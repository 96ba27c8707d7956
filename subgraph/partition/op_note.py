"""The note in a file about the op of a region, from which loading makes the op again.

The note is JSON in the metadata of the subgraph node, so passes and files preserve it. Regions that
run by the default executor or that a device has compiled need no note.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from subgraph.errors import PartitionError, described
from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import AFFINITY, DefaultSubgraphOp
from subgraph.partition.options import Options
from subgraph.partition.property import SubgraphProperty, property_name, saved_name
from subgraph.system.json_values import to_json

# Key of a node's metadata.
OP_NOTE = "subgraph.op"


@attrs.frozen
class OpNote:
    """The note about the op of a region.

    Attributes:
        op: Name of the op's class.
        property: Name of the property that made it; empty for a node made by hand.
        version: The property's version.
        id: Number of the region in its partition.
        options: Options of the partition, in the form of `to_json`.
        unsaved: Names of options that have no form in a file.
    """

    op: str
    property: str = ""
    version: str = ""
    id: int = 0
    options: dict[str, Any] = attrs.field(factory=dict[str, Any])
    unsaved: list[str] = attrs.field(factory=list[str])

    def maker(self) -> str:
        """Return a key that is equal for all regions of one property with the same options."""
        return json.dumps([self.property, self.version, self.options, self.unsaved])


def note_op(node: Node, owner: SubgraphProperty, number: int, options: Options) -> None:
    """Write into a new subgraph node's metadata how to make its op again, if it has its own op.

    Args:
        node: The subgraph node.
        owner: The property that made the node.
        number: Number of the region in its partition.
        options: Options of the partition.
    """
    if not _has_own_op(node):
        return
    held, unsaved = saved_options(owner, options)
    note = OpNote(type(node.op).__name__, saved_name(owner), owner.version, number, held, unsaved)
    node.metadata = {**(node.metadata or {}), OP_NOTE: json.dumps(attrs.asdict(note))}


def saved_options(owner: SubgraphProperty, options: Options) -> tuple[dict[str, Any], list[str]]:
    """Return the options in the form of `to_json`, and the names of those that have none.

    Raises:
        PartitionError: the property's ``saved_options`` raised, or returned something else than a
            mapping by name.
    """
    method = f"property {property_name(owner)!r}: saved_options"
    try:
        own: Any = owner.saved_options()
    except Exception as error:
        raise PartitionError(f"{method} raised {described(error)}") from error
    if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):  # pyright: ignore[reportUnknownVariableType]
        raise PartitionError(
            f"{method} returned {own!r}; return a dict of the property's own state by name, such "
            'as {"tile": 8}'
        )
    values: dict[str, Any] = {**own, **options.as_dict()}
    held: dict[str, Any] = {}
    unsaved: list[str] = []
    for name, value in values.items():
        try:
            held[name] = to_json(value)
        except (TypeError, RecursionError):
            unsaved.append(name)
    return held, unsaved


def _has_own_op(node: Node) -> bool:
    """Return whether a node runs by an op that is neither the default one nor a device's."""
    own = node.op is not None and type(node.op) is not DefaultSubgraphOp
    return own and AFFINITY not in (node.metadata or {})


def noted_regions(graph: Graph) -> Iterator[tuple[Node, OpNote]]:
    """Yield the regions with a note, those inside others first."""
    levels = [graph]
    for level in levels:
        # The nodes of a lazy graph are in an exported model, whose ops the device has compiled.
        # Reading them here would undo the laziness.
        if not level.is_loaded:
            continue
        for node in level.nodes:
            if node.subgraph is not None:
                levels.append(node.subgraph)
            elif node.attrs:
                levels.extend(node.bodies)
    # An inner region has its op before the property of the outer one sees the graph around it.
    for level in reversed(levels):
        if level.is_loaded:
            for node in level.nodes:
                text = (node.metadata or {}).get(OP_NOTE)
                if text is not None and node.subgraph is not None:
                    yield node, _read_note(text)


def _read_note(text: str) -> OpNote:
    """Return the note in a text from a file, which is not trusted."""
    try:
        held: Any = json.loads(text)
        note = OpNote(**held)
        wanted = (str, str, str, int, dict, list)
        # attrs does not check types, and these texts go into messages, look-ups and options.
        fits = all(map(isinstance, attrs.astuple(note, recurse=False), wanted))
    except (ValueError, TypeError, RecursionError):
        fits, note = False, OpNote("an op whose note is damaged")
    return note if fits else OpNote("an op whose note is damaged")


def saved_metadata(node: Node) -> Mapping[str, str] | None:
    """Return a node's metadata for a file, with a note if its op was made without a property."""
    known = node.metadata
    if not _has_own_op(node) or (known and OP_NOTE in known):
        return known
    return {**(known or {}), OP_NOTE: json.dumps(attrs.asdict(OpNote(type(node.op).__name__)))}
