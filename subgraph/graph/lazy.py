"""Graphs of imported models that are read when somebody first looks into them.

A region that comes with a program from its file runs without a look at its nodes. Its name, inputs
and operator sets are known; nodes, outputs and parameters are read at their first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from subgraph.graph.graph import Graph, Value
from subgraph.system.forking import free_in_child

_READ_LATER = ("_nodes", "_parameters", "outputs")


class LazyGraph(Graph):
    """A graph without captures whose nodes are read at their first use."""

    __slots__ = ("_lock", "_read")

    def __init__(
        self,
        name: str,
        inputs: Sequence[Value],
        opsets: Mapping[str, int],
        doc: str,
        read: Callable[[], Graph],
    ) -> None:
        """Take what is known; ``read`` returns the whole, over the very same inputs."""
        self.name, self.doc = name, doc
        self.inputs, self.captures = tuple(inputs), ()
        self.attrs, self.opsets, self.metadata = {}, dict(opsets), {}
        self._by_name = None
        self._outputs_known = (), frozenset()
        self._lock = free_in_child(threading.RLock())
        self._read: Callable[[], Graph] | None = read

    @property
    def is_read(self) -> bool:
        """Whether the nodes are there."""
        return self._read is None

    def __getattr__(self, name: str) -> Any:
        """Read the graph: one of the attributes that it has then was asked for."""
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
        self._nodes = graph.nodes
