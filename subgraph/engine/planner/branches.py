"""If in a plan: the steps of both branches, of which a run executes those of one.

A branch step before the steps of each branch reads the condition, and the walker of the program
skips the branch if the condition does not select it (`subgraph.engine.program.branch_kernels`).
Both branches write their results to the same memory. If a branch converts an outer value or weight
to another layout, the converted form does not exist in runs of the other branch; steps after the
branch therefore must not read it.

An If can be a part of a program if the results of both branches have the same types. If the types
differ, or if the present sizes fit one branch only (as in a model with one network for each
sampling rate), and the condition compares an input, then there is a plan for each outcome of the
condition. The default executor runs every other If, and each branch is a region of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import attrs

from subgraph.engine.planner.layouts import copy_step
from subgraph.engine.planner.operands import EmittedStep, Operand, Storage
from subgraph.engine.planner.plan_types import (
    PlanInProgress,
    ReferenceStep,
    UnknownShapeError,
    storages_of,
)
from subgraph.engine.program.abi import BRANCH_GRAIN
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import numpy_dtype

BRANCH = Kernel("subgraph.engine.program.branch_kernels", "branch")
# Operators that may stand between an input that selects a branch and the condition. The input is
# then taken to have few different values.
_SELECTING = frozenset({"And", "Cast", "Equal", "Identity", "Not", "Or", "Reshape", "Squeeze"})


class UnplannedBranchError(UnknownShapeError):
    """An If cannot be a part of a program.

    Attributes:
        reason: The reason.
    """

    of_all_contents: ClassVar[bool] = False

    def __init__(self, node: Node, inputs: Sequence[int], reason: str) -> None:
        super().__init__(node, inputs)
        self.reason = reason
        self.args = (f"node {node.name!r} ({node.op_type}): {reason}",)


def branches_of(node: Node) -> Iterator[tuple[bool, tuple[Graph, Sequence[Value]]]]:
    """Yield for each branch of an If the condition that selects it, its graph and its captures."""
    captures = iter(node.captures)
    for key, body in node.attrs.items():
        if isinstance(body, Graph):
            captured = [next(captures) for _ in body.captures]
            yield key == "then_branch", (body, captured)


def plan_if(planner: PlanInProgress, node: Node) -> None:
    """Plan an If; the nodes before it are planned.

    Raises:
        UnplannedBranchError: Its branches cannot be part of this program.
    """
    decides = node.inputs[0]
    assert decides is not None, "it is required"
    # The branch step reads one byte at the address of the condition.
    condition = planner.layouts.plain(planner.operand(decides))
    if condition.dtype != "bool" or condition.size != 1:
        raise UnplannedBranchError(node, (), "its condition is not one truth value")
    if condition.known is not None:
        _plan_taken(planner, node, bool(condition.known.reshape(-1)[0]))
        return
    slots: list[Operand] = []
    for when, (body, captured) in branches_of(node):
        try:
            _Branch(planner, node, condition, when).plan(body, captured, slots)
        except SubgraphError as error:
            reason = error.reason if isinstance(error, UnplannedBranchError) else str(error)
            needed = list(error.inputs) if isinstance(error, UnknownShapeError) else []
            needed = needed or _selecting(planner, decides)
            raise UnplannedBranchError(node, needed, reason) from error
    planner.operands.update(zip(node.outputs, slots, strict=True))


def _plan_taken(planner: PlanInProgress, node: Node, taken: bool) -> None:
    """Plan only the branch that a known condition selects."""
    body, captured = next(found for when, found in branches_of(node) if when == taken)
    try:
        _plan_nodes(planner, body, captured)
    except UnknownShapeError as error:
        raise UnplannedBranchError(node, error.inputs, str(error)) from error
    for outer, value in zip(node.outputs, body.outputs, strict=True):
        _alias_value(planner, outer, value)


def _plan_nodes(planner: PlanInProgress, body: Graph, captured: Sequence[Value]) -> None:
    for inner, outer in zip(body.captures, captured, strict=True):
        _alias_value(planner, inner, outer)
    for node in body.nodes:
        planner.add(node)


def _alias_value(planner: PlanInProgress, new: Value, known: Value) -> None:
    """Make a value the same as one that is planned, of an outer or inner graph."""
    planner.operands[new] = planner.operand(known)
    if known in planner.known_elements:
        planner.known_elements[new] = planner.known_elements[known]


class _Branch:
    """Plans one branch."""

    def __init__(self, planner: PlanInProgress, node: Node, condition: Operand, when: bool) -> None:
        self._planner = planner
        self._items = planner.items
        self._node = node
        self._condition = condition
        self._when = when

    def plan(self, body: Graph, captured: Sequence[Value], slots: list[Operand]) -> None:
        """Emit the steps of the branch.

        Args:
            body: The branch.
            captured: The values that it captures.
            slots: Operands of the results; the first branch adds them.
        """
        begin = len(self._items)
        # `abi.BRANCH_CONDITION` and the words after it; the step writes the last one.
        arguments = (self._condition, int(self._when), 0)
        step = EmittedStep(self._node, BRANCH, arguments, 1, BRANCH_GRAIN, 0, 0)
        self._items.append(step)
        # Conversions made inside do not happen in runs that skip the branch; later steps must not
        # use them.
        with self._planner.layouts.discarding_conversions():
            _plan_nodes(self._planner, body, captured)
            operands = map(self._planner.operand, body.outputs)
            results = [self._planner.layouts.plain(operand) for operand in operands]
            if not slots:
                pairs = zip(self._node.outputs, results, strict=True)
                slots += [_slot(value.name, result) for value, result in pairs]
            self._write_results(results, slots, begin)
        # A reference step ends a program, and the walker can skip only steps of its own program.
        reference = next(
            (item for item in self._items[begin:] if isinstance(item, ReferenceStep)), None
        )
        if reference is not None:
            reason = (
                f"{reference.node.op_type} in a branch is left to the reference: {reference.reason}"
            )
            raise UnplannedBranchError(self._node, (), reason)
        rows = len(self._items) - begin - 1
        if rows:
            # The kernel takes the number of units as the number of steps to skip, which is known
            # only now.
            self._items[begin] = attrs.evolve(step, units=rows)
        else:
            del self._items[begin]

    def _write_results(
        self, results: Sequence[Operand], slots: Sequence[Operand], begin: int
    ) -> None:
        """Place each result in the memory that both branches write, or copy it there."""
        before: set[Storage] | None = None
        for result, slot in zip(results, slots, strict=True):
            if (result.dtype, result.shape) != (slot.dtype, slot.shape):
                types = [f"{o.dtype}{list(o.shape)}" for o in (slot, result)]
                reason = f"its branches give {slot.name!r} as {' and as '.join(types)}"
                raise UnplannedBranchError(self._node, (), reason)
            if _is_whole(result):
                if before is None:
                    before = _roots(self._items[:begin])
                assert result.storage is not None, "it is whole"
                # A storage that steps before the branch use belongs to an outer value. If it moved
                # to the slot, the other branch would overwrite that value.
                if result.storage not in before:
                    result.storage.parent = slot.storage
                    continue
            if result.size:
                self._items.append(copy_step(self._node, result, slot))


def _slot(name: str, result: Operand) -> Operand:
    """Return the operand that a result of both branches is written to."""
    slot = Operand(name, result.dtype, result.shape)
    slot.storage = Storage("arena", slot.nbytes)
    return slot


def _is_whole(result: Operand) -> bool:
    """Return whether a result fills a storage of the arena."""
    storage = result.storage
    return (
        storage is not None
        and storage.kind == "arena"
        and storage.parent is None
        and result.offset == 0
        and result.nbytes == storage.nbytes
    )


def _roots(items: Sequence[EmittedStep | ReferenceStep]) -> set[Storage]:
    return {storage.root()[0] for item in items for storage in storages_of(item)}


def _selecting(planner: PlanInProgress, condition: Value) -> list[int]:
    """Return the inputs that a condition compares with constants; empty for other conditions."""
    work, found = [condition], {condition}
    while work:
        node = work.pop().producer
        if node is None:
            continue
        # The condition is computed from data. A plan for each value of the inputs would rarely be
        # reused.
        if node.op_type not in _SELECTING or node.domain:
            return []
        fresh = [value for value in node.sources if value not in found]
        found.update(fresh)
        work += fresh
    read = [planner.operands[value] for value in planner.graph.inputs if value in found]
    # A float or a larger input is data, not a selector with few values.
    if any(o.size != 1 or numpy_dtype(o.dtype).kind not in "iub" for o in read):
        return []
    return [k for k, value in enumerate(planner.graph.inputs) if value in found]
