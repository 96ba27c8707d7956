"""The op of a region that a device compiled: a hop from the outer executor into the device's model.

When the region fails on its device with a `DeviceError` and another device can run it, that one
takes over: it is said once in the log, results stay right, and other requests go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.compiled_model import CompiledModel
from subgraph.device import Config, Device, compile_queried
from subgraph.errors import DeviceError, RequestCancelledError, SubgraphError
from subgraph.executor import Cancel
from subgraph.graph import Graph
from subgraph.parameters import Parameter
from subgraph.runner import Runner, is_direct
from subgraph.subgraph_op import ProfileEntry, Session, SubgraphOp, fill_outputs
from subgraph.weights import WeightCache

_log = logging.getLogger("subgraph")
Array = np.ndarray[Any, Any]


class CompiledModelOp(SubgraphOp):
    """Runs a region by the model that a device made of it."""

    def __init__(
        self,
        subgraph: Graph,
        model: CompiledModel,
        device: str,
        others: Sequence[Device] = (),
        configs: Mapping[str, Config] | None = None,
    ) -> None:
        """Run ``subgraph`` by ``model``; ``others`` may take over when its device fails."""
        super().__init__(subgraph)
        self.model = model
        self.device = device
        self._others = list(others)
        self._configs = configs or {}
        self._lock = threading.Lock()
        node = is_direct(model.graph)
        if node is not None and node.op is not None:
            self.weights: WeightCache = node.op.weights

    @classmethod
    def make(
        cls,
        subgraph: Graph,
        device: Device,
        others: Sequence[Device],
        configs: Mapping[str, Config],
    ) -> CompiledModelOp:
        """Compile a region on ``device``, on the next of ``others`` that can when that fails."""
        candidates = [device, *others]
        for number, candidate in enumerate(candidates):
            try:
                config = configs.get(candidate.name) or None
                # The first one was asked what it supports before the cut.
                compile_model = compile_queried if number == 0 else type(candidate).compile_model
                model = compile_model(candidate, subgraph, config)
            except SubgraphError as error:
                if not isinstance(error, DeviceError) or number + 1 == len(candidates):
                    raise
                _log.warning(
                    "device %s cannot compile subgraph %r and leaves it to the next: %s",
                    candidate.name,
                    subgraph.name,
                    error,
                )
                continue
            return cls(subgraph, model, candidate.name, candidates[number + 1 :], configs)
        raise AssertionError("the last candidate returned or raised")

    def forward(self, inputs: list[Any]) -> list[Array]:
        """Run the region once."""
        return list(self.session()(inputs))

    def session(self) -> Session:
        """Open a session of the device's model."""
        return _ModelSession(self)

    def open(self) -> Session | Runner:
        """Return the session of the model's one node if it has one, else a runner."""
        model = self.model
        node = is_direct(model.graph)
        plain = type(model).create_runner is CompiledModel.create_runner
        single = type(model).create_stages is CompiledModel.create_stages
        if node is None or node.op is None or not (plain and single):
            return model.create_runner(Cancel())
        same = list(node.inputs) == list(model.graph.inputs)
        if not same or list(node.outputs) != list(model.graph.outputs):
            return model.create_runner(Cancel())
        return node.op.session()

    def take_over(self, error: Exception, failed: CompiledModel) -> bool:
        """Let the next device run the region; False if there is none."""
        with self._lock:
            if self.model is not failed:
                return True  # another request did it
            while self._others:
                device = self._others.pop(0)
                config = self._configs.get(device.name) or None
                try:
                    self.model = device.compile_model(self.subgraph, config)
                except SubgraphError:
                    continue
                _log.warning(
                    "subgraph %r failed on device %s and runs on %s from now on: %s",
                    self.subgraph.name,
                    self.device,
                    device.name,
                    error,
                )
                self.device = device.name
                return True
        return False


class _ModelSession(Session):
    """Calls the device's session directly where its inputs are the region's."""

    def __init__(self, op: CompiledModelOp) -> None:
        self._owner = op
        self._open()

    def _open(self) -> None:
        self._model = self._owner.model
        inner = self._inner = self._owner.open()
        self._call = inner if isinstance(inner, Session) else self._run

    def _run(self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None) -> Any:
        assert isinstance(self._inner, Runner), "a session is called directly"
        given = [None if type(item) is Parameter else item for item in inputs]
        results = self._inner.run(given)
        return results if outputs is None else fill_outputs(results, outputs)

    def __call__(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        try:
            return self._call(inputs, outputs)
        except RequestCancelledError:
            raise
        except DeviceError as error:
            if not self._owner.take_over(error, self._model):
                raise
        self._open()
        return self(inputs, outputs)

    def profile(self) -> list[ProfileEntry]:
        return self._inner.profile()
