"""The reference steps of an executable plan, over the memory of its programs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from subgraph.engine.executable.bound_port import BoundPort
from subgraph.engine.planner.constants import content_of
from subgraph.engine.planner.operands import Operand, location_of
from subgraph.engine.planner.plan_types import Plan, ReferenceStep
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array, numpy_dtype


def run_reference_step(
    step: ReferenceStep,
    plan: Plan,
    arena: Array,
    inputs: Sequence[BoundPort],
    outputs: Sequence[BoundPort],
) -> None:
    """Compute a node by the reference and write its results to the operands of its outputs.

    Args:
        step: The step.
        plan: The plan of the step.
        arena: Its arena, as bytes.
        inputs: Its inputs; `BoundPort.current` has the arrays of the present run.
        outputs: Its outputs; likewise.
    """

    def array(operand: Operand) -> Array:
        """Return an array over the memory of an operand, which is in plain layout."""
        if operand.known is not None:
            return operand.known
        if isinstance(operand.source, Parameter):
            return operand.source.array
        root, offset = location_of(operand)
        if root.kind == "arena":
            memory = arena[plan.offsets[root] :]
        elif root.content is not None:
            memory = _bytes(np.ascontiguousarray(content_of(root.content)))
        else:
            ports = inputs if root.kind == "input" else outputs
            port = next(p for p in ports if p.position == root.index)
            # The array of an input that no kernel reads is as the caller passed it.
            memory = _bytes(np.ascontiguousarray(port.current, numpy_dtype(port.type[0])))
        dtype = numpy_dtype(operand.dtype)
        return memory[offset : offset + operand.nbytes].view(dtype).reshape(operand.shape)

    arrays = [None if operand is None else array(operand) for operand in step.inputs]
    for operand, result in step.compute(arrays):
        array(operand)[...] = result


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
