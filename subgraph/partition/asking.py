"""Putting questions to a user's selector: what it answered, and what to say when it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from subgraph.errors import PartitionError
from subgraph.graph import Node
from subgraph.partition.workspace import Workspace
from subgraph.property import SubgraphProperty, property_name
from subgraph.selector import SubgraphSelector

Question = Callable[[Node, Node], Any]

SELECT, INPUT, OUTPUT = 0, 1, 2
METHODS = ("select", "select_input", "select_output")


class Asker:
    """Makes the selectors of one property, and remembers the last no about each node.

    Attributes:
        work: The graph.
        property: Whose selectors are asked.
        refusals: For each node None or (method, the node asked from, answer).
    """

    def __init__(self, work: Workspace, property: SubgraphProperty) -> None:
        """Ask about the nodes of ``work``."""
        self.work = work
        self.property = property
        self.refusals: dict[int, tuple[int, int, Any]] = {}

    def selector(self) -> SubgraphSelector:
        """Return a fresh selector.

        Raises:
            PartitionError: the property raised, or gave something else.
        """
        try:
            made: Any = self.property.create_subgraph_selector()
        except Exception as error:
            raise PartitionError(
                f"property {property_name(self.property)!r}: create_subgraph_selector raised "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, SubgraphSelector):
            raise PartitionError(
                f"property {property_name(self.property)!r}: create_subgraph_selector gave "
                f"{made!r}; it must give a SubgraphSelector, a fresh one at every call"
            )
        return made

    def select(self, selector: SubgraphSelector, start: int) -> bool:
        """Return whether a region may start at ``start``."""
        try:
            answer: Any = selector.select(self.work.nodes[start])
            if answer:
                return True
        except Exception as error:
            self.fail(selector, SELECT, start, start, error)
        if self.work.forced[start]:
            return True
        self.refusals[start] = (SELECT, start, answer)
        return False

    def filter(self, selector: SubgraphSelector, found: list[int]) -> list[int]:
        """Return which of ``found`` (sorted) the selector keeps, sorted.

        Raises:
            PartitionError: it raised, or gave nodes that were not offered.
        """
        # A selector that does not override the method keeps all: no need to ask.
        if type(selector).filter is SubgraphSelector.filter:
            return found
        nodes = self.work.nodes
        offered = {nodes[k]: k for k in found}
        name = type(selector).__name__
        try:
            kept: Any = selector.filter(list(offered))
            given = list(kept)
        except Exception as error:
            raise PartitionError(
                f"selector {name}.filter raised {type(error).__name__}: {error}; it was given "
                f"{len(found)} candidates, the first of them node {nodes[found[0]].name!r}"
            ) from error
        wrong = [x for x in given if not isinstance(x, Node) or x not in offered]
        if wrong:
            shown: Any = wrong[0]
            raise PartitionError(
                f"selector {name}.filter gave {getattr(shown, 'name', shown)!r}, which was not "
                "among the candidates that it was offered; filter may only drop some of them"
            )
        return sorted({offered[node] for node in given})

    def filter_device(self, found: list[int], start: int) -> list[int]:
        """Let a fresh selector, which is told of ``start``, filter a region of strategy hetero."""
        selector = self.selector()
        self.select(selector, start)
        return self.filter(selector, found)

    def fail(
        self, selector: SubgraphSelector, method: int, node: int, other: int, error: Exception
    ) -> NoReturn:
        """Raise the error that names selector, method and node.

        Raises:
            PartitionError: always.
        """
        nodes = self.work.nodes
        about = f"node {nodes[other].name!r} ({nodes[other].op_type})"
        if method != SELECT:
            about += f" as a neighbour of {nodes[node].name!r} ({nodes[node].op_type})"
        raise PartitionError(
            f"selector {type(selector).__name__}.{METHODS[method]} raised "
            f"{type(error).__name__}: {error}; it was asked about {about}"
        ) from error
