"""What a partition remembers, in compact form, so that `explain` can say why.

The record stands under the key `KEY` of the attributes of every graph (and body) that was cut.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import attrs

from subgraph.partition.selector import Reject
from subgraph.partition.selector_driver import Refusal

KEY = "partition_record"

MADE = "made"
SMALL = "small"
CAPPED = "capped"
REFUSED = "refused"
UNUSED = "unused"


@attrs.define(slots=True)
class RegionNote:
    """What became of one region.

    Attributes:
        start: Number of the node at which it started.
        size: How many nodes it had.
        status: MADE, or why it was left as it was: SMALL, CAPPED, REFUSED, UNUSED.
        node: Name of its subgraph node, if made.
        why: What the property said, if it refused the region.
    """

    start: int
    size: int
    status: str = MADE
    node: str = ""
    why: Reject | None = None


@attrs.define(slots=True)
class Run:
    """One search for the regions of one property in one graph.

    Attributes:
        property: The property's name.
        version: The property's version.
        options: Options of the partition and of the property, as far as they are plain JSON.
        selector: Name of its selectors' class.
        strategy: Order of growth.
        min_size: Size below which regions were left.
        max_subgraphs: Cap on their number.
        names: Name of each node.
        via: The node from which each was found, itself for a start, -1 if never found.
        region: The last region that held each node, -1 if none did.
        given_up: The region that had to give up a node since it would have closed a cycle.
        filtered: The region whose filter dropped a node.
        dropped: Why it did, where the filter said so.
        refusals: What selectors said no to, in the order in which they were asked.
        regions: All regions.
        forced: Names that were forced in or out by options.
    """

    property: str
    selector: str
    strategy: str
    min_size: int
    max_subgraphs: int | None
    names: list[str]
    via: array[int]
    region: array[int]
    given_up: dict[int, int]
    filtered: dict[int, int]
    dropped: dict[int, Reject]
    refusals: list[Refusal]
    regions: list[RegionNote]
    forced: dict[str, str]
    version: str = ""
    options: dict[str, Any] = attrs.field(factory=dict[str, Any])
    _numbers: dict[str, int] | None = None
    _refusals_of: dict[int, list[Refusal]] | None = None

    def number(self, name: str) -> int | None:
        """Return the number of the node of that name, None if the run did not see it."""
        if self._numbers is None:
            self._numbers = {known: k for k, known in enumerate(self.names)}
        return self._numbers.get(name)

    def refusals_of(self, node: int) -> Iterator[tuple[int, int, Any]]:
        """Yield method, node asked from and answer of each refusal of ``node``, the last one first.

        Of refusals over one edge that follow each other the last counts.
        """
        if self._refusals_of is None:
            self._refusals_of = {}
            for refusal in self.refusals:
                self._refusals_of.setdefault(refusal[0], []).append(refusal)
        edge = None
        for _, method, source, answer in reversed(self._refusals_of.get(node, ())):
            if edge != (method, source):
                yield method, source, answer
            edge = method, source


@attrs.frozen(slots=True)
class PartitionRecord:
    """All runs that made a graph what it is, oldest first."""

    runs: tuple[Run, ...] = ()

    def made_by(self, property: str) -> set[str]:
        """Return the names of the subgraph nodes that a property's runs made."""
        return {
            note.node
            for run in self.runs
            if run.property == property
            for note in run.regions
            if note.status == MADE
        }


def record_of(held: Any) -> PartitionRecord:
    """Return the record that an attribute holds, an empty one if it holds none."""
    return held if isinstance(held, PartitionRecord) else PartitionRecord()
