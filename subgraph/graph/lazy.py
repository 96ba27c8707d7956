"""Graphs of imported models whose nodes are read from the file at their first use.

A region whose file holds a compiled program runs without its nodes. Its name, inputs and operator
sets are known at once; nodes, outputs and parameters are read when one of them is first used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from subgraph.graph.graph import Graph, Value
from subgraph.system.forking import free_in_child

# These slots stay empty until the graph is read, so that Python calls ``__getattr__`` for them, and
# for nothing else: a graph that was read costs no more than any other.
_READ_LATER = ("_nodes", "_parameters", "outputs")


class LazyGraph(Graph):
    """A graph without captures whose nodes are read at their first use; safe between threads."""

    __slots__ = ("_lock", "_read")

    def __init__(
        self,
        name: str,
        inputs: Sequence[Value],
        opsets: Mapping[str, int],
        doc: str,
        read: Callable[[], Graph],
    ) -> None:
        """Make a graph that is not read yet.

        Args:
            name: The graph's name.
            inputs: Its inputs.
            opsets: Operator set version by domain.
            doc: The description.
            read: Reads the file and returns a graph over the same input values. Called once.
        """
        self.name, self.doc = name, doc
        self.inputs, self.captures = tuple(inputs), ()
        self.attrs, self.opsets, self.metadata = {}, dict(opsets), {}
        self._by_name = None
        self._output_set = (), frozenset()
        # The lock may be held by a thread of the parent process when a child is forked; that thread
        # does not exist in the child, which would wait for it for ever.
        self._lock = free_in_child(threading.RLock())
        self._read: Callable[[], Graph] | None = read

    @property
    def is_loaded(self) -> bool:
        """Whether the nodes are in memory."""
        return self._read is None

    def __getattr__(self, name: str) -> Any:
        """Read the graph when an attribute is used that only a read graph has."""
        if name not in _READ_LATER:
            raise AttributeError(f"'LazyGraph' object has no attribute {name!r}")
        with self._lock:
            if self._read is not None:
                self._take(self._read())
                self._read = None
        return object.__getattribute__(self, name)

    def _take(self, graph: Graph) -> None:
        for node in graph.nodes:
            node.graph = self
        self._parameters = graph.parameters
        self.outputs = graph.outputs
        # The nodes come last: another thread that finds them, without the lock, finds the rest too.
        self._nodes = graph.nodes
