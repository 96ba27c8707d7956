"""The dry run of a plan: which nodes of a graph the lowerings support, before any input is known.

Symbolic dimensions get sample sizes, a different one for each name. If a shape depends on values
that a run computes, the answer follows from the operator's name and dtype; the node may still be
run by the reference in a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from subgraph.engine.planner.concrete_types import concrete
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.plan import Planner
from subgraph.engine.planner.plan_types import PlanOptions, ReferenceStep, UnknownShapeError
from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.limits import check_time
from subgraph.graph.types import TensorType
from subgraph.runtime.control_flow import is_branching

_SAMPLES = (2, 8, 16, 3, 4, 32, 1)


@attrs.frozen(eq=False)
class DryRun:
    """What a trial found.

    Attributes:
        refused: For each node that has no kernel the reason why.
        types: The types of the graph's inputs that it was made with.
        planner: What planned all nodes for these types; None where some could not be planned.
    """

    refused: dict[str, str]
    types: Sequence[TensorType | None]
    planner: Planner | None


def dry_run(graph: Graph, options: PlanOptions) -> DryRun:
    """Try to plan a graph."""
    best: DryRun | None = None
    for start in range(3):
        runner = _DryRunner(graph, options, start)
        found = runner.run()
        if runner.complete:
            return found
        if best is None or len(found.refused) < len(best.refused):
            best = found
    assert best is not None, "three trials were made"
    return best


def refusals(graph: Graph, options: PlanOptions) -> dict[str, str]:
    """Return for each node that has no kernel the reason why."""
    return dry_run(graph, options).refused


class _DryRunner:
    """One trial with one choice of sample sizes."""

    def __init__(self, graph: Graph, options: PlanOptions, start: int) -> None:
        self.graph = graph
        self.refused: dict[str, str] = {}
        self.complete = True
        self.assumed = False
        sizes: dict[str, int] = {}

        def sample(value: Value) -> TensorType | None:
            type_ = value.type
            if value.parameter is not None or not isinstance(type_, TensorType):
                return None
            if type_.shape is None:
                return None
            shape = [
                dim
                if isinstance(dim, int)
                else sizes.setdefault(
                    dim or f"?{len(sizes)}", _SAMPLES[(start + len(sizes)) % len(_SAMPLES)]
                )
                for dim in type_.shape
            ]
            return TensorType(type_.dtype, shape)

        types = self.types = [sample(value) for value in graph.inputs]
        self.planner = Planner(graph, types, {}, options)
        self.unknown = {
            value
            for value, type_ in zip(graph.inputs, types, strict=True)
            if type_ is None and value.parameter is None
        }
        self.unknown.update(graph.captures)

    def run(self) -> DryRun:
        """Try every node; ``complete`` tells whether all shapes were known."""
        for node in self.graph.nodes:
            reason = self._node(node)
            if reason:
                self.refused[node.name] = reason
        whole = self.complete and not self.unknown and not self.assumed
        return DryRun(self.refused, self.types, self.planner if whole else None)

    def _node(self, node: Node) -> str:
        if any(not isinstance(value.type, TensorType | None) for value in _touched(node)):
            return f"{node.op_type} works on sequences or other values that are no tensors"
        if any(_is_text(value) for value in _touched(node)):
            self._forget(node)
            return f"{node.op_type} works on strings, which have no kernels"
        branches = is_branching(node) and self.planner.options.lowering.branches
        if (node.captures or node.bodies) and not branches:
            self._forget(node)
            return f"{node.op_type} has nested graphs"
        if any(value in self.unknown for value in node.sources):
            self._forget(node)
            return self._by_name(node)
        before = len(self.planner.items)
        check_time(f"trying node {node.name!r} ({node.op_type})")
        try:
            self.planner.add(node)
        except SubgraphError as error:
            self.complete = False
            # Where shapes are assumed, a condition that follows from them is not known.
            found = isinstance(error, UnknownShapeError) and not error.inputs and not self.assumed
            self._forget(node)
            return str(error) if found and is_branching(node) else self._by_name(node)
        for item in self.planner.items[before:]:
            if isinstance(item, ReferenceStep):
                return item.reason
        return ""

    def _by_name(self, node: Node) -> str:
        if is_branching(node):
            inside = (self._by_name(inner) for body in node.bodies for inner in body.nodes)
            return next((reason for reason in inside if reason), "")
        if node.bodies:
            return f"{node.op_type} has nested graphs"
        try:
            rule = self.planner.options.lowering.rule_of(node)
        except Unsupported as reason:
            return str(reason)
        first = next((value.type for value in node.sources), None)
        dtype = first.dtype if isinstance(first, TensorType) else None
        if rule.dtypes is not None and dtype is not None and dtype not in rule.dtypes:
            return f"{node.op_type} on {dtype} has no kernel"
        return ""

    def _forget(self, node: Node) -> None:
        """Take what is known of the outputs from the graph; else they are unknown."""
        self.assumed = True
        for value in node.outputs:
            type_ = value.type
            if isinstance(type_, TensorType) and type_.is_static:
                self.planner.assume(value, type_.dtype, concrete(type_))
            else:
                self.unknown.add(value)


def _touched(node: Node) -> Sequence[Value]:
    return (*node.sources, *node.outputs)


def _is_text(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype == "string"
