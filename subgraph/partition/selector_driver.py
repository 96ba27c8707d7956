"""Questions to a user's selector: checks of its answers, and errors if it raises."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from subgraph.errors import PartitionError, described
from subgraph.graph.graph import Node
from subgraph.partition.op_names import OperatorNames
from subgraph.partition.property import SubgraphProperty, property_name
from subgraph.partition.search.workspace import Workspace
from subgraph.partition.selector import ContainOpSelector, Reject, SubgraphSelector

SELECT, INPUT, OUTPUT = 0, 1, 2
METHODS = ("select", "select_input", "select_output")

_ANSWERS: tuple[type[Any], ...] = (Reject, bool, np.bool_)  # types of valid answers

# A refusal: the refused node, the index in METHODS, the neighbour that was asked from, the answer.
Refusal = tuple[int, int, int, Any]


class SelectorDriver:
    """Makes the selectors of one property, asks them, and records their refusals.

    Attributes:
        work: The graph's nodes by number.
        property: The property.
        refusals: Refusals, in the order of the questions.
        dropped: For nodes that a filter dropped its reason, if it gave one.
    """

    def __init__(self, work: Workspace, property: SubgraphProperty, names: OperatorNames) -> None:
        """Begin without refusals.

        Args:
            work: The graph's nodes by number.
            property: The property.
            names: Checks the operator names of selectors.
        """
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
                f"{described(error)}"
            ) from error
        if not isinstance(made, SubgraphSelector):
            raise PartitionError(
                f"property {property_name(self.property)!r}: create_subgraph_selector gave "
                f"{made!r}; it must give a SubgraphSelector, a fresh one at every call"
            )
        if made is not self._last:
            self._last = made
            if isinstance(made, ContainOpSelector):
                self._names.check(made, property_name(self.property))
        # A property may return one selector for all start nodes. It still knows the last region.
        elif type(made).reset is not SubgraphSelector.reset:
            try:
                made.reset()
            except Exception as error:
                raise PartitionError(
                    f"selector {type(made).__name__}.reset raised {described(error)}"
                ) from error
        return made

    def select(self, selector: SubgraphSelector, start: int) -> bool:
        """Return whether a region may start at ``start``."""
        try:
            # A selector is asked about a forced start too, since one with state has to see the
            # region's first node.
            answer: Any = selector.select(self.work.nodes[start])
        except Exception as error:
            self.fail(selector, SELECT, start, start, error)
        if answer is True or (
            answer is not False and self.is_yes(answer, selector, SELECT, start, start)
        ):
            return True
        if self.work.forced[start]:
            return True
        self.refusals.append((start, SELECT, start, answer))
        return False

    def filter(self, selector: SubgraphSelector, found: list[int]) -> list[int]:
        """Return the nodes that the filter leaves and those that are forced in, sorted.

        Args:
            selector: The selector of the region.
            found: The region's nodes, sorted.

        Raises:
            PartitionError: the filter raised, or returned anything but a list of these nodes.
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
                f"selector {name}.filter raised {described(error)}; it was given "
                f"{len(found)} candidates, the first of them node {nodes[found[0]].name!r}"
            ) from error
        # The driver itself stands for "nothing strange": None may be an item of the answer.
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
        # The option ``include`` outranks the filter.
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
        """Return the truth of an answer.

        Args:
            answer: The answer.
            selector: The selector, for the message, as all other arguments.
            method: Index in METHODS of the question.
            node: The node asked from.
            other: The node asked about.

        Raises:
            PartitionError: the answer is neither a bool nor a Reject, for example None of a method
                without a return, or a coroutine.
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
        """Raise the error for a selector that raised.

        Args:
            selector: The selector.
            method: Index in METHODS of the question.
            node: The node asked from.
            other: The node asked about.
            error: The selector's error.

        Raises:
            PartitionError: always; it names selector, method and node.
        """
        raise PartitionError(
            f"selector {type(selector).__name__}.{METHODS[method]} raised "
            f"{described(error)}; {self._asked(method, node, other)}"
        ) from error

    def _asked(self, method: int, node: int, other: int) -> str:
        nodes = self.work.nodes
        about = f"it was asked about node {nodes[other].name!r} ({nodes[other].op_type})"
        if method != SELECT:
            about += f" as a neighbour of {nodes[node].name!r} ({nodes[node].op_type})"
        return about
