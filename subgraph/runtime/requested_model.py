"""`RequestedModel`: the interface of compiled models that requests use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from subgraph.graph.parameters import Snapshot
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.runner import Runner, Stage
from subgraph.runtime.signature import Port, Results


class RequestedModel(Protocol):
    """The part of `CompiledModel` that requests use; the methods are described there."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[Port, ...]: ...
    def next_request_id(self) -> int: ...
    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Any], Snapshot]: ...
    def wrap(self, results: Sequence[Any]) -> Results: ...
    def input_of_run(self, bound: Sequence[Any], position: int) -> Any: ...
    def preset(self, outputs: Sequence[Any] | None, key: str | int, array: Any) -> Any:
        """Return the arrays that receive the outputs, with one replaced.

        Args:
            outputs: The arrays until now.
            key: Name or position of an output.
            array: The array that receives it.
        """
        ...

    def create_runner(self, cancel: Cancel) -> Runner: ...
    def create_profiler(self) -> Runner: ...
    def checked_stages(self, runner: Runner) -> list[Stage]: ...
    def get_property(self, name: str) -> Any: ...


class QueuedModel(RequestedModel, Protocol):
    """The part of `CompiledModel` that queues of requests use."""

    def create_infer_request(self) -> Any: ...
