"""Regions on devices: compiling one, what runs it, and what takes over when its device fails.

A region's node gets the op that its device made. When that op fails with a `DeviceError`, the next
device that can takes the region over; when it refuses these inputs (`UnsupportedOpError`), the next
device runs them alone. Either is said once in the log, and other requests go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.compiled_model import CompiledModel
from subgraph.device import Config, Device
from subgraph.device_calls import compile_on, compile_queried
from subgraph.errors import (
    DeviceError,
    LimitError,
    RequestCancelledError,
    SubgraphError,
    UnsupportedOpError,
)
from subgraph.executor import Cancel
from subgraph.forking import free_in_child
from subgraph.graph import Graph
from subgraph.parameters import Parameter
from subgraph.runner import is_direct
from subgraph.subgraph_op import ProfileEntry, Session, SubgraphOp, fill_outputs, open_own

_log = logging.getLogger("subgraph")
Array = np.ndarray[Any, Any]


def compile_region(
    subgraph: Graph,
    device: Device,
    others: Sequence[Device],
    configs: Mapping[str, Config],
) -> tuple[SubgraphOp, Device]:
    """Return what runs a region: made by ``device``, or by the next of ``others`` that can.

    Also says which one it was. Those that are left take over when it fails.

    Raises:
        DeviceError: the last device failed.
    """
    candidates = [device, *others]
    for number, candidate in enumerate(candidates):
        config = configs.get(candidate.name) or None
        # The first one was asked what it supports before the cut.
        compile_model = compile_queried if number == 0 else compile_on
        try:
            op = op_of(subgraph, compile_model(candidate, subgraph, config), candidate.name)
        except (DeviceError, UnsupportedOpError) as error:
            if number + 1 == len(candidates):
                raise
            _log.warning(
                "device %s cannot compile subgraph %r and leaves it to the next: %s",
                candidate.name,
                subgraph.name,
                str(error),
            )
            continue
        op.fallback = DeviceFallback(subgraph, op, candidates[number + 1 :], configs)
        return op, candidate
    raise AssertionError("the last candidate returned or raised")


def op_of(subgraph: Graph, model: CompiledModel, device: str) -> SubgraphOp:
    """Return the op of a region that a device compiled: the model's own where it is just one."""
    node = is_direct(model.graph)
    graph = model.graph
    cls = type(model)
    plain = cls.create_runner is CompiledModel.create_runner
    plain &= cls.create_stages is CompiledModel.create_stages
    if node is not None and node.op is not None and plain:
        same = list(node.inputs) == list(graph.inputs)
        if same and list(node.outputs) == list(graph.outputs):
            node.op.keep = model  # with its stored weights
            model.hand_over()  # to the model of the whole graph
            return node.op
    return CompiledModelOp(subgraph, model, device)


class CompiledModelOp(SubgraphOp):
    """Runs a region by the model that a device made of it."""

    def __init__(self, subgraph: Graph, model: CompiledModel, device: str) -> None:
        """Run ``subgraph`` by ``model``."""
        super().__init__(subgraph)
        self.model = model
        self.device = device
        # A model made `without_defaults` has its weights inside and takes the other inputs.
        self.taken: Sequence[int] = range(len(subgraph.inputs))
        if len(model.graph.inputs) < len(subgraph.inputs):
            self.taken = [k for k, v in enumerate(subgraph.inputs) if v.parameter is None]

    def forward(self, inputs: list[Any]) -> list[Array]:
        """Run the region once."""
        return list(self.session()(inputs))

    def release(self) -> None:
        """Let the ops of the device's model go."""
        super().release()
        for op in self.model.hand_over():
            op.release()

    def session(self) -> Session:
        """Open a runner of the device's model."""
        return _ModelSession(self)


class _ModelSession(Session):
    """Hands inputs on to a runner; a weight that is the model's own is left out."""

    def __init__(self, op: CompiledModelOp) -> None:
        super().__init__(op)
        self._cancel = Cancel()
        self._runner = op.model.create_runner(self._cancel)
        self._taken = op.taken

    def __call__(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        items = (inputs[k] for k in self._taken)
        given = [None if type(item) is Parameter else item for item in items]
        results = self._runner.run(given)
        return results if outputs is None else fill_outputs(results, outputs)

    def cancel(self) -> None:
        self._cancel.request()

    def resume(self) -> None:
        self._cancel.reset()

    def measure(self) -> None:
        assert isinstance(self.op, CompiledModelOp), "it opened this session"
        self._runner = self.op.model.create_profiler()

    def profile(self) -> list[ProfileEntry]:
        return self._runner.profile()


# Inputs that a device refuses, or for which it found no memory: the next run's may be others.
_OF_THIS_RUN = (UnsupportedOpError, MemoryError)


class DeviceFallback:
    """The devices that may run a region after its own."""

    def __init__(
        self,
        subgraph: Graph,
        op: SubgraphOp,
        others: Sequence[Device],
        configs: Mapping[str, Config],
    ) -> None:
        """Let ``others``, in order, take the region of ``op`` over."""
        self._subgraph = subgraph
        self._device = op.device
        self._others = list(others)
        self._configs = configs
        self._lock = free_in_child(threading.Lock())
        self._next: SubgraphOp | None = None  # runs what the op refuses
        self._replacement: SubgraphOp | None = None  # runs everything from now on

    @property
    def replacement(self) -> SubgraphOp | None:
        """The op that has taken the region over, None while its own runs it."""
        return self._replacement

    def recover(self, error: Exception) -> tuple[Session, bool] | None:
        """Return a session to run instead, and whether for good; None if the error stands."""
        if isinstance(error, (LimitError, RequestCancelledError)):
            return None
        lost = isinstance(error, DeviceError) and error.lost
        if not lost and not isinstance(error, _OF_THIS_RUN):
            return None
        with self._lock:
            if self._replacement is None:
                op = self._following(error, "runs on %s from now on" if lost else "%s helps out")
                if op is None:
                    return None
                if lost:
                    self._replacement = op
                else:
                    return open_own(op), False
            return open_own(self._replacement), True

    def _following(self, error: Exception, told: str) -> SubgraphOp | None:
        if self._next is not None and isinstance(error, _OF_THIS_RUN):
            return self._next
        for device in self._others:
            try:
                config = self._configs.get(device.name) or None
                op = op_of(self._subgraph, compile_on(device, self._subgraph, config), device.name)
            except SubgraphError:
                continue
            op.fallback = None
            self._next = op
            _log.warning(
                f"subgraph %r failed on device %s; {told}: %s",
                self._subgraph.name,
                self._device,
                device.name,
                str(error),  # a handler that keeps records would keep the arrays of the failed run
            )
            return op
        return None
