"""Putting questions to a user's selector: what it answered, and what to say when it raises."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from subgraph.errors import PartitionError
from subgraph.graph.graph import Node
from subgraph.partition.op_names import OperatorNames
from subgraph.partition.property import SubgraphProperty, property_name
from subgraph.partition.search.workspace import Workspace
from subgraph.partition.selector import ContainOpSelector, Reject, SubgraphSelector

SELECT, INPUT, OUTPUT = 0, 1, 2
METHODS = ("select", "select_input", "select_output")

_ANSWERS: tuple[type[Any], ...] = (Reject, bool, np.bool_)  # what says yes or no

# A no: the node it is about, the method, the node it was asked from, the answer.
Refusal = tuple[int, int, int, Any]


class SelectorDriver:
    """Makes the selectors of one property, and remembers what they refused.

    Attributes:
        work: The graph.
        property: Whose selectors are asked.
        refusals: What selectors said no to, in the order in which they were asked.
        dropped: Why a filter dropped nodes, where it said so.
    """

    def __init__(self, work: Workspace, property: SubgraphProperty, names: OperatorNames) -> None:
        """Ask about the nodes of ``work``; ``names`` checks which operators are selected."""
        self.work = work
        self._names = names
        self.property = property
        self.refusals: list[Refusal] = []
        self.dropped: dict[int, Reject] = {}
        self._last: SubgraphSelector | None = None

    def selector(self) -> SubgraphSelector:
        """Return a fresh selector, or the same as before after its ``reset``.

        Raises:
            PartitionError: the property or ``reset`` raised, or it gave something else, or a
                selector of operators that do not exist.
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
        chosen: SubgraphSelector = made
        if isinstance(chosen, ContainOpSelector) and chosen is not self._last:
            self._names.check(chosen, property_name(self.property))
        if made is self._last and type(made).reset is not SubgraphSelector.reset:
            try:
                made.reset()
            except Exception as error:
                raise PartitionError(
                    f"selector {type(made).__name__}.reset raised {type(error).__name__}: {error}"
                ) from error
        self._last = made
        return made

    def select(self, selector: SubgraphSelector, start: int) -> bool:
        """Return whether a region may start at ``start``."""
        try:
            answer: Any = selector.select(self.work.nodes[start])
        except Exception as error:
            self.fail(selector, SELECT, start, start, error)
        if answer is True or self.is_yes(answer, selector, SELECT, start, start):
            return True
        if self.work.forced[start]:
            return True
        self.refusals.append((start, SELECT, start, answer))
        return False

    def filter(self, selector: SubgraphSelector, found: list[int]) -> list[int]:
        """Return which of ``found`` (sorted) the filter leaves, and those forced in, sorted.

        Raises:
            PartitionError: it raised, or gave nodes that were not offered.
        """
        # A selector that does not override the method drops nothing: no need to ask.
        if type(selector).filter is SubgraphSelector.filter:
            return found
        nodes = self.work.nodes
        offered = {nodes[k]: k for k in found}
        name = type(selector).__name__
        try:
            answer: Any = selector.filter(list(offered))
            if isinstance(answer, Reject):
                self.dropped.update(dict.fromkeys(found, answer))
                answer = []
            left = None if answer is None or isinstance(answer, str) else list(answer)
        except Exception as error:
            raise PartitionError(
                f"selector {name}.filter raised {type(error).__name__}: {error}; it was given "
                f"{len(found)} candidates, the first of them node {nodes[found[0]].name!r}"
            ) from error
        strange = answer if left is None else next((x for x in left if type(x) is not Node), self)
        if left is None or strange is not self:
            raise PartitionError(
                f"selector {name}.filter gave {strange!r}; it must return a list of those nodes "
                "among its candidates that the region shall keep"
            )
        wrong = next((node for node in left if node not in offered), None)
        if wrong is not None:
            raise PartitionError(
                f"selector {name}.filter gave node {wrong.name!r}, which was not among the "
                "candidates that it was offered; filter may only drop some of them"
            )
        forced = (k for k in found if self.work.forced[k])
        return sorted({*forced, *(offered[node] for node in left)})

    def filter_device(self, found: list[int], start: int) -> list[int]:
        """Let a fresh selector, asked about ``start`` first, filter a region of strategy hetero."""
        selector = self.selector()
        self.select(selector, start)
        return self.filter(selector, found)

    def is_yes(
        self, answer: Any, selector: SubgraphSelector, method: int, node: int, other: int
    ) -> bool:
        """Return whether an answer is a yes.

        Raises:
            PartitionError: it is neither: None of a method without a return, a number, a string, a
                method that was not called, a coroutine, ...
        """
        if isinstance(answer, _ANSWERS):
            return bool(answer)
        raise PartitionError(
            f"selector {type(selector).__name__}.{METHODS[method]} answered {answer!r}; it must "
            f"answer True, False or a Reject; {self._asked(method, node, other)}"
        )

    def fail(
        self, selector: SubgraphSelector, method: int, node: int, other: int, error: Exception
    ) -> NoReturn:
        """Raise the error that names selector, method and node.

        Raises:
            PartitionError: always.
        """
        raise PartitionError(
            f"selector {type(selector).__name__}.{METHODS[method]} raised "
            f"{type(error).__name__}: {error}; {self._asked(method, node, other)}"
        ) from error

    def _asked(self, method: int, node: int, other: int) -> str:
        nodes = self.work.nodes
        about = f"it was asked about node {nodes[other].name!r} ({nodes[other].op_type})"
        if method != SELECT:
            about += f" as a neighbour of {nodes[node].name!r} ({nodes[node].op_type})"
        return about
