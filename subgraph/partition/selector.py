"""Selectors: Python classes that decide which nodes a region may have.

The partition (`subgraph.partition`) asks a `SubgraphSelector` four questions about nodes. `Reject`
is a negative answer with a reason that `explain` shows later. `register_selector` gives a selector
a name for ``optimize_for``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from subgraph.errors import PartitionError, require_type
from subgraph.graph.graph import Node
from subgraph.system.registry import Registry, defined_at


class Reject:
    """A refusal with a reason: counts as False, and `explain` shows the reason.

    Attributes:
        reason: The reason, a text of the user's code.
        file: Source file that made the refusal; "" if it is not the user's code.
        line: Line of that file.
    """

    __slots__ = ("file", "line", "reason")

    def __init__(self, reason: str, *, depth: int = 0) -> None:
        """Refuse because of ``reason``.

        Args:
            reason: The reason.
            depth: Number of stack frames between the user's code and the caller; `file` and `line`
                are those of the user's code.
        """
        self.reason = reason
        frame = inspect.currentframe()
        for _ in range(1 + depth):
            frame = None if frame is None else frame.f_back
        self.file = "" if frame is None else frame.f_code.co_filename
        self.line = 0 if frame is None else frame.f_lineno

    def __bool__(self) -> bool:
        return False

    @property
    def where(self) -> str:
        """``file:line``, empty if not known."""
        return f"{self.file}:{self.line}" if self.file else ""

    def __repr__(self) -> str:
        return f"Reject({self.reason!r} at {self.where or '?'})"


class SubgraphSelector:
    """Base of selectors: decides which nodes form a region.

    Every start node gets a fresh selector, so it may keep state, and one that does overrides
    `reset`. Each question is answered with a bool or a `Reject`; anything else is an error. A child
    overrides what it needs; by default nothing is selected.
    """

    def select(self, node: Node) -> bool | Reject:
        """Return whether a region may start at ``node`` (strategy hetero: whether it is taken)."""
        return False

    def select_input(self, node: Node, input_node: Node) -> bool | Reject:
        """Return whether the region grows from ``node`` to its producer ``input_node``."""
        return False

    def select_output(self, node: Node, output_node: Node) -> bool | Reject:
        """Return whether the region grows from ``node`` to its consumer ``output_node``."""
        return False

    def filter(self, candidates: list[Node]) -> list[Node] | Reject:
        """Return those of the region's candidates, in topological order, that it keeps.

        A `Reject` drops them all.
        """
        return candidates

    def reset(self) -> None:
        """Forget the state, so that the object or a copy of it can serve another start node.

        A class that overrides this method declares that its selectors keep state. If a node that
        such a selector accepted must be given up, since the region would not be convex with it, the
        region grows again from its start without the node, with a reset or fresh selector.
        """


# A selector refuses most edges of a graph, so there is one Reject for each operator: making one
# costs a look at the stack. Its place is empty because no line of the user's code is the reason.
_rejects: dict[str, Reject] = {}


def _other_operator(op_type: str) -> Reject:
    known = _rejects.get(op_type)
    if known is None:
        known = Reject(f"operator {op_type} is not among those selected")
        known.file = ""
        _rejects[op_type] = known
    return known


class ContainOpSelector(SubgraphSelector):
    """Selects the nodes of some operators, wherever they are connected.

    Attributes:
        op_types: Names of operators: "Conv", or "my.domain::Conv" for one of another domain.
    """

    def __init__(self, op_types: Iterable[str]) -> None:
        """Take the operators' names.

        Raises:
            PartitionError: ``op_types`` is a single string, or not a set of strings.
        """
        if isinstance(op_types, str):
            raise PartitionError(
                f"ContainOpSelector takes a set of operator names, got the string {op_types!r}; "
                f"write ContainOpSelector({{{op_types!r}}})"
            )
        try:
            self.op_types = op_types if isinstance(op_types, frozenset) else frozenset(op_types)
            fits = all(type(name) is str for name in self.op_types)
        except TypeError:
            fits = False
        if not fits:
            raise PartitionError(
                f"ContainOpSelector takes a set of operator names, got {op_types!r}"
            )

    def select(self, node: Node) -> bool | Reject:
        """Take a node of one of the operators."""
        op_type = node.op_type
        # This test stands in all three methods instead of in a helper, because it runs for every
        # edge.
        if op_type in self.op_types and not node.domain:
            return True
        return self._other(node)

    def select_input(self, node: Node, input_node: Node) -> bool | Reject:
        """Take a producer of one of the operators."""
        if input_node.op_type in self.op_types and not input_node.domain:
            return True
        return self._other(input_node)

    def select_output(self, node: Node, output_node: Node) -> bool | Reject:
        """Take a consumer of one of the operators."""
        if output_node.op_type in self.op_types and not output_node.domain:
            return True
        return self._other(output_node)

    def _other(self, node: Node) -> bool | Reject:
        if node.domain:
            name = f"{node.domain}::{node.op_type}"
            return name in self.op_types or _other_operator(name)
        return _other_operator(node.op_type)

    def __repr__(self) -> str:
        return f"ContainOpSelector({{{', '.join(map(repr, sorted(self.op_types)))}}})"


SelectorFactory = Callable[[], SubgraphSelector]

SELECTORS: Registry[SelectorFactory] = Registry("selector", PartitionError)


def register_selector(name: str, cls: SelectorFactory | None = None) -> Any:
    """Give a selector class (or any function that makes a selector) a name.

    With the class left out, returns a decorator. ``optimize_for(graph, name)`` then partitions by
    it, and the default subgraph node runs the regions.

    Raises:
        PartitionError: another class has the name, or ``cls`` cannot be called.
    """
    if cls is None:
        # ``@register_selector`` without parentheses passes the decorated class as the name.
        require_type(name, str, PartitionError, 'the name first: @register_selector("my_selector")')
        return partial(register_selector, name)
    if not callable(cls):
        raise PartitionError(
            f"selector {name!r}: {cls!r} makes no selectors; give the class, or a function that "
            "returns a fresh selector at every call"
        )
    SELECTORS.register(name, cls, defined_at(cls))
    return cls


def list_selectors() -> dict[str, str]:
    """Return the registered selectors.

    Returns:
        The first line of each one's docstring, by the name for ``optimize_for``.
    """
    return {name: first_line(SELECTORS.get(name)) for name in sorted(SELECTORS.names())}


def first_line(owner: object) -> str:
    """Return the first line of a class's or function's docstring, "" if it has none."""
    while isinstance(owner, partial):
        owner = owner.func
    return (owner.__doc__ or "").strip().partition("\n")[0]
