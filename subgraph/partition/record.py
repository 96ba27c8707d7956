"""The record of a partition, in compact form, from which `explain` finds reasons.

It is the attribute `KEY` of every graph and body that was cut.
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
    """The outcome of one proposed region.

    Attributes:
        start: Number of the node at which it started.
        size: Number of its nodes.
        status: MADE, or the reason why it was not replaced: SMALL (`min_size`), CAPPED
            (`max_subgraphs`), REFUSED by the property, or UNUSED (no node uses its results).
        node: Name of its subgraph node; "" if not made.
        why: The property's reason, if it refused the region and gave one.
    """

    start: int
    size: int
    status: str = MADE
    node: str = ""
    why: Reject | None = None


# A run lists every node and every refusal of a large graph, so it has arrays and tuples of numbers
# instead of an object for each. The sentences are made only for the node that is asked about.
@attrs.define(slots=True)
class Run:
    """One search for the regions of one property in one graph.

    Attributes:
        property: The property's name.
        version: The property's version.
        options: Those options of the partition and of the property that have a JSON form.
        selector: Name of the selectors' class.
        strategy: Order of growth, "selector" or "hetero".
        min_size: Size below which regions were not replaced.
        max_subgraphs: Most regions to replace, or None.
        names: Name of each node.
        via: For each node the one from which it was found; itself for a start, -1 if never found.
        region: For each node the position of the last region that held it, -1 if none did.
        given_up: For a node that would have closed a cycle, the region that gave it up.
        filtered: For a node that a filter dropped, its region.
        dropped: For such a node the filter's reason, if it gave one.
        refusals: Refusals of selectors, in the order of the questions.
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
    # These tables are made at the first question: most partitions are never explained.
    _numbers: dict[str, int] | None = None
    _made: dict[str, int] | None = None
    _refusals_of: dict[int, list[Refusal]] | None = None

    def number(self, name: str) -> int | None:
        """Return the number of the node of that name, None if the run did not see it."""
        if self._numbers is None:
            self._numbers = {known: k for k, known in enumerate(self.names)}
        return self._numbers.get(name)

    def made_at(self, node: str) -> int | None:
        """Return the position of the region that became a subgraph node, None if none did.

        Args:
            node: Name of the subgraph node.
        """
        if self._made is None:
            self._made = {n.node: k for k, n in enumerate(self.regions) if n.status == MADE}
        return self._made.get(node)

    def refusals_of(self, node: int) -> Iterator[tuple[int, int, Any]]:
        """Yield method, neighbour and answer of each refusal of ``node``, the last one first.

        Of consecutive refusals over one edge only the last is yielded.
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
    """All runs of the partition that led to a graph.

    Attributes:
        runs: The runs, the oldest first.
    """

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
    """Return ``held`` if it is a record, else an empty record."""
    return held if isinstance(held, PartitionRecord) else PartitionRecord()
