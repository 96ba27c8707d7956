"""What a strategy is: one way to run a region, asked by the resolver with a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from subgraph.engine.planner.plan_types import UnknownShapeError
from subgraph.engine.region.specialized_inputs import Key, SpecializedInputs
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Snapshot
from subgraph.graph.types import TensorType, dtype_of
from subgraph.system.forking import computed_once


class Declined(Exception):
    """A strategy that is there for such requests cannot serve this one; the text is the cause."""


class Request:
    """A call of a region for which something to run is sought.

    Attributes:
        inputs: Arrays for the inputs that are no weights.
        snapshot: The parameters as the call has to see them.
        obstacle: Why the graph cannot be planned as a whole; None while that is not known.
        note: Counts and logs that something was left to the reference: by what name, and why.
    """

    def __init__(
        self,
        graph_of: Callable[[], Graph],
        specialized_inputs: SpecializedInputs,
        inputs: Sequence[Any],
        snapshot: Snapshot,
        obstacle: UnknownShapeError | None,
        note: Callable[[str, str], None],
    ) -> None:
        """Begin with nothing computed: a strategy that asks for little costs little."""
        self.inputs = inputs
        self.snapshot = snapshot
        self.obstacle = obstacle
        self.note = note
        self._graph_of = graph_of
        self._specialized_inputs = specialized_inputs

    @computed_once
    def graph(self) -> Graph:
        """The fused graph, for the parameters of the snapshot."""
        return self._graph_of()

    @computed_once
    def types(self) -> list[TensorType]:
        """The types of the inputs."""
        return [TensorType(dtype_of(item), item.shape) for item in self.inputs]

    @computed_once
    def key(self) -> Key:
        """What distinguishes plans: the shapes, and the contents on which shapes depend."""
        _ = self.graph  # a graph fused anew forgets on which contents plans depend
        return self._specialized_inputs.key(self.inputs)

    @computed_once
    def specialized_values(self) -> dict[int, Any]:
        """The contents, by position, of the inputs on which shapes depend."""
        _ = self.graph
        return self._specialized_inputs.of(self.inputs)


class Strategy(Protocol):
    """One way to run a region.

    Attributes:
        name: What counters, logs and the documentation call it.
        cacheable: Whether what it returns serves every later request with the same key.
    """

    name: str
    cacheable: bool

    def resolve(self, request: Request) -> object | None:
        """Return what runs the request; None if the strategy has nothing for requests like it.

        Raises:
            Declined: it could have been expected to serve the request; the next one is asked.
            UnknownShapeError: a shape follows from values that are not known. All strategies are
                asked again, with the contents of more inputs or with the error as the obstacle.
        """
        ...

    def forget(self) -> None:
        """Drop what was made of the fused graph, which is replaced or no longer needed."""
        ...
