"""The interface of strategies: ways to find a plan for a call, asked in order by the resolver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs

from subgraph.engine.planner.plan_types import UnknownShapeError
from subgraph.engine.region.specialized_inputs import Key, SpecializedInputs
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Snapshot
from subgraph.graph.types import TensorType, dtype_of
from subgraph.system.forking import computed_once


class Declined(Exception):
    """A strategy cannot serve a request of a kind that it is meant for; the text is the cause."""


@attrs.define(eq=False, slots=False)
class Request:
    """A call of a region for which a plan is sought; strategies compute its properties.

    Attributes:
        graph_of: Returns the fused graph.
        specialized_inputs: The inputs on whose values plans are specialized.
        stated_dtypes: The dtype that the graph states for each input, None if it states none.
        inputs: Arrays for the inputs that are not weights.
        snapshot: The parameters as the call has to see them.
        obstacle: The error because of which the graph cannot be planned as a whole; None if no
            strategy raised one yet.
        note: Counts and logs that a strategy or kernel could not serve, by its name and the cause.
    """

    graph_of: Callable[[], Graph]
    specialized_inputs: SpecializedInputs
    stated_dtypes: Sequence[str | None]
    inputs: Sequence[Any]
    snapshot: Snapshot
    obstacle: UnknownShapeError | None
    note: Callable[[str, str], None]

    @computed_once
    def graph(self) -> Graph:
        """The fused graph, for the parameters of the snapshot."""
        return self.graph_of()

    @computed_once
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs."""
        return [item.shape for item in self.inputs]

    @computed_once
    def dtypes(self) -> list[str]:
        """The dtypes of the inputs; arrays of another dtype than stated are converted in a run."""
        pairs = zip(self.stated_dtypes, self.inputs, strict=True)
        return [dtype or dtype_of(item) for dtype, item in pairs]

    @computed_once
    def types(self) -> list[TensorType]:
        """The types of the inputs."""
        return list(map(TensorType, self.dtypes, self.shapes))

    @computed_once
    def key(self) -> Key:
        """The key of plans: the shapes of inputs, then the values they are specialized on."""
        _ = self.graph  # fusing the graph again resets the specialized inputs
        return self.specialized_inputs.key(self.inputs)

    @computed_once
    def specialized_values(self) -> dict[int, Any]:
        """The values of the specialized inputs, by position."""
        _ = self.graph
        return self.specialized_inputs.of(self.inputs)


class Strategy:
    """One way to run a region.

    Attributes:
        name: Its name in counters, logs and the documentation.
        cacheable: Whether the plan that it returns serves every later request with the same key.
    """

    name: ClassVar[str]
    cacheable: ClassVar[bool] = False

    def resolve(self, request: Request) -> object | None:
        """Return a plan for the request; None if the strategy is not meant for such requests.

        The session of the device binds what it returns: a `Plan`, or a type that the device's own
        ``_bind`` takes, as `PlanInstance` and `StoredProgram` on CPU; a `SplitRegion` is not bound.

        Raises:
            Declined: It is meant for such requests but cannot serve this one; the next strategy is
                asked.
            UnknownShapeError: A shape follows from values that are not known. All strategies are
                asked again, with the values of more inputs or with the error as the obstacle.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Drop all plans of the fused graph, which is replaced or no longer needed; if any."""
