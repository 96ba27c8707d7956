"""The base of strategies for loops, and the interface of the sessions that they use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from subgraph.engine.executable.data_dependent_plan import DataDependentPlan, DataDependentProgram
from subgraph.engine.executable.executable_plan import ExecutablePlan
from subgraph.engine.region.executable_plan import AnyExecutablePlan
from subgraph.engine.region.region_op import RegionOp
from subgraph.operators.subgraph_op import IterationsResult, Wiring


class LoopSession(Protocol):
    """The part of `CpuSession` that loops use; its methods are described there."""

    profiling: bool

    @property
    def region(self) -> RegionOp: ...
    def ready(self, inputs: Sequence[Any]) -> AnyExecutablePlan | None: ...
    def begin(self, program: ExecutablePlan) -> None: ...
    def bind_data_dependent(self, plan: DataDependentPlan) -> DataDependentProgram: ...


class LoopStrategy:
    """A way to run iterations of one loop without Python between them.

    Attributes:
        name: Its name in counters and logs.
    """

    name: ClassVar[str]

    def __init__(self, session: LoopSession, wiring: Wiring) -> None:
        """Begin without plans.

        Args:
            session: The session of the loop's body.
            wiring: How values are passed between iterations.
        """
        self._session = session
        self._wiring = wiring
        self._pairs = [(output, reader) for output, reader in wiring.states if reader is not None]

    def run(
        self, items: Sequence[Any], inputs: Sequence[Any], limit: int | None, first: int
    ) -> IterationsResult:
        """Run iterations.

        Args:
            items: Inputs of the first iteration.
            inputs: The same with whole arrays for scanned inputs; see `Session.iterations`.
            limit: Number of the iteration before which to stop; None: until the condition is false.
            first: Number of the first iteration.

        Raises:
            Declined: The strategy cannot run this iteration; the next strategy is asked.
        """
        raise NotImplementedError
