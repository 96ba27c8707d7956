"""The interface of sessions that the strategies for loops use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from subgraph.engine.executable.data_dependent_plan import DataDependentPlan, DataDependentProgram
from subgraph.engine.executable.executable_plan import ExecutablePlan
from subgraph.engine.region.executable_plan import AnyExecutablePlan
from subgraph.engine.region.region_op import RegionOp


class LoopSession(Protocol):
    """The part of `CpuSession` that loops use; its methods are described there."""

    profiling: bool

    @property
    def region(self) -> RegionOp: ...
    def ready(self, inputs: Sequence[Any]) -> AnyExecutablePlan | None: ...
    def begin(self, program: ExecutablePlan) -> None: ...
    def bind_data_dependent(self, plan: DataDependentPlan) -> DataDependentProgram: ...
