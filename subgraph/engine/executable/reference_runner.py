"""The reference steps of an executable plan, over the memory of its programs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from subgraph.engine.executable.bound_port import BoundPort
from subgraph.engine.planner.constants import evaluate_weight
from subgraph.engine.planner.operands import Operand, Storage
from subgraph.engine.planner.plan_types import Plan, ReferenceStep
from subgraph.graph.types import Array, numpy_dtype


class ReferenceRunner:
    """Computes reference steps by the reference evaluation of their operators."""

    def __init__(
        self, plan: Plan, arena: Array, inputs: Sequence[BoundPort], outputs: Sequence[BoundPort]
    ) -> None:
        """Prepare to run steps.

        Args:
            plan: The plan of the steps.
            arena: Its arena, as bytes.
            inputs: Its inputs; `BoundPort.current` has the arrays of the present run.
            outputs: Its outputs; likewise.
        """
        self._plan = plan
        self._arena = arena
        self._inputs = {port.position: port for port in inputs}
        self._outputs = {port.position: port for port in outputs}

    def array(self, operand: Operand) -> Array:
        """Return an array over the memory of an operand, which is in plain layout."""
        if operand.known is not None:
            return operand.known
        if operand.parameter is not None:
            return operand.parameter.array
        root, offset = self._plan.location_of(operand)
        if root.weight is not None:
            return evaluate_weight(root.weight).reshape(operand.shape)
        memory = self._memory(root)
        dtype = numpy_dtype(operand.dtype)
        return memory[offset : offset + operand.nbytes].view(dtype).reshape(operand.shape)

    def _memory(self, root: Storage) -> Array:
        if root.kind == "arena":
            return self._arena[self._plan.offsets[root] :]
        if root.kind == "constant":
            assert root.array is not None
            return _bytes(root.array)
        ports = self._inputs if root.kind == "input" else self._outputs
        return _bytes(ports[root.index].current)

    def compute(self, step: ReferenceStep) -> None:
        """Compute a node and write its results to the operands of its outputs."""
        arrays = [None if o is None else self.array(o) for o in step.inputs]
        for operand, result in step.compute(arrays):
            self.array(operand)[...] = result


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
