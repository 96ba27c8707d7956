"""Ops of regions that devices compiled as models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Parameter
from subgraph.graph.result_arrays import fill_outputs
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import ProfileEntry, Session, SubgraphOp
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.compiled_model import CompiledModel


def op_of(subgraph: Graph, model: CompiledModel, device: str) -> SubgraphOp:
    """Return the op of a region: the only op of the device's model, else a `CompiledModelOp`.

    Args:
        subgraph: The region.
        model: The model that a device compiled from it.
        device: Name of the device.
    """
    graph, cls = model.graph, type(model)
    plain = cls.create_runner is CompiledModel.create_runner
    plain &= cls.create_stages is CompiledModel.create_stages
    if plain and len(graph.nodes) == 1:
        node = graph.nodes[0]
        op: SubgraphOp | None = node.op
        same = list(node.inputs) == list(graph.inputs)
        if op is not None and same and list(node.outputs) == list(graph.outputs):
            op.keep = model  # it holds the stored weights
            model.leave_ops()  # the model of the whole graph releases the op instead
            return op
    return CompiledModelOp(subgraph, model, device)


class CompiledModelOp(SubgraphOp):
    """Runs a region by the model that a device compiled from it.

    Attributes:
        model: The model.
        taken: Positions of the region's inputs that are inputs of the model.
    """

    def __init__(self, subgraph: Graph, model: CompiledModel, device: str) -> None:
        """Run ``subgraph`` by ``model``."""
        super().__init__(subgraph)
        self.model = model
        self.device = device
        # A graph `without_defaults` has its weights inside; its inputs are the others.
        self.taken: Sequence[int] = range(len(subgraph.inputs))
        if len(model.graph.inputs) < len(subgraph.inputs):
            self.taken = [k for k, v in enumerate(subgraph.inputs) if v.parameter is None]

    def forward(self, inputs: list[Any]) -> list[Array]:
        """Run the region once."""
        return list(self.session()(inputs))

    def runs_on(self) -> list[str]:
        """Return the model's devices if it runs on several, else the op's device."""
        is_virtual = self.model.device.startswith(f"{self.device}:")
        return self.model.execution_devices if is_virtual else super().runs_on()

    def release(self) -> None:
        """Release the ops of the device's model."""
        super().release()
        for op in self.model.leave_ops():
            op.release()

    def session(self) -> Session:
        """Open a runner of the device's model."""
        return _ModelSession(self)


class _ModelSession(Session):
    """Passes inputs to a runner of the model, None for a weight, which the model has itself."""

    def __init__(self, op: CompiledModelOp) -> None:
        super().__init__(op)
        self._cancel = Cancel()
        self._runner = op.model.create_runner(self._cancel)
        self._taken = op.taken

    def __call__(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        items = (inputs[k] for k in self._taken)
        results = self._runner.run([None if type(x) is Parameter else x for x in items])
        return results if outputs is None else fill_outputs(results, outputs)

    def cancel(self) -> None:
        self._cancel.request()

    def resume(self) -> None:
        self._cancel.reset()

    def states(self) -> dict[str, Array]:
        return self._runner.states()

    def set_states(self, states: Mapping[str, Array]) -> None:
        self._runner.set_states(states)

    def measure(self) -> None:
        assert isinstance(self.op, CompiledModelOp), "it opened this session"
        # The profiler is a new runner, and has to continue from the states of the request.
        states = self._runner.states()
        self._runner = self.op.model.create_profiler()
        self._runner.set_states(states)

    def profile(self) -> list[ProfileEntry]:
        return self._runner.profile()
