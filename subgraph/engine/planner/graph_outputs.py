"""The outputs of a planned graph: each in plain layout and, for most devices, memory of its own.

An output that grows in the buffer of an input stays there.
"""

from __future__ import annotations

from subgraph.engine.planner.layouts import copy_step
from subgraph.engine.planner.operands import Operand, Storage, location_of
from subgraph.engine.planner.plan_types import PlanInProgress
from subgraph.graph.graph import Node, Value


def place_outputs(planner: PlanInProgress, *, copies: bool) -> tuple[Operand, ...]:
    """Return the operands of the graph's outputs in plain layout; all nodes are planned.

    The storage of an output becomes the array that a run returns if it contains the output only.

    Args:
        planner: The plan in progress; conversions and copies are added to its steps.
        copies: Whether outputs without a storage of their own are copied to one: an output that is
            an input, a constant, another output, or a part of other memory.
    """
    outputs: list[Operand] = []
    for position, value in enumerate(planner.graph.outputs):
        operand = planner.operand(value)
        if operand.capacity:
            # The session returns a view of the buffer.
            outputs.append(operand)
            continue
        operand = planner.layouts.plain(operand)
        root, offset = location_of(operand)
        whole = offset == 0 and root.nbytes == operand.nbytes
        own = root.kind == "arena" and whole
        # The caller owns the returned array: it must not share memory with an input, a weight,
        # another output or values that the next run overwrites.
        if not own and copies:
            root, own = Storage("arena", operand.nbytes), True
            operand = _copy_to(planner, value, operand, root)
        if own:
            # The last producer now writes directly into the array that the run returns. The kind
            # also makes the same storage no longer an own one for a second output, which is then
            # copied.
            root.kind, root.index = "output", position
        outputs.append(operand)
    return tuple(outputs)


def _copy_to(planner: PlanInProgress, value: Value, source: Operand, storage: Storage) -> Operand:
    target = Operand(value.name, source.dtype, source.shape)
    target.storage = storage
    node = value.producer or Node("Identity", name=value.name)
    planner.items.append(copy_step(node, source, target))
    return target
