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

# Sample sizes of symbolic dimensions (estimates); each attempt begins with the next one of the
# first three.
_SAMPLES = (2, 8, 16, 3, 4, 32, 1)


@attrs.frozen(eq=False)
class DryRun:
    """The result of a dry run.

    Attributes:
        refused: The reason for each node that has no kernel, by its name.
        types: The types of the graph's inputs with which nodes were planned.
        planner: The planner, if it planned all nodes for these types; `finish` returns their plan.
            None if some nodes could not be planned.
    """

    refused: dict[str, str]
    types: Sequence[TensorType | None]
    planner: Planner | None


def dry_run(graph: Graph, options: PlanOptions) -> DryRun:
    """Plan a graph with sample sizes; return which nodes were refused.

    Sample sizes that do not fit the graph are replaced by others, twice at most. If none fit, the
    attempt with the fewest refused nodes counts.
    """
    best: DryRun | None = None
    for start in range(3):
        runner = _DryRunner(graph, options, start)
        found = runner.run()
        # Without symbolic dimensions, other sample sizes do not exist, so a retry would give the
        # same result.
        if runner.complete or not runner.sizes:
            return found
        if best is None or len(found.refused) < len(best.refused):
            best = found
    assert best is not None, "three attempts were made"
    return best


class _DryRunner:
    """One attempt with one choice of sample sizes.

    Attributes:
        graph: The graph.
        refused: See `DryRun`.
        complete: Whether no node failed to be planned for these sizes.
        sizes: The sample size of each symbolic dimension.
        assumed: Whether the types of some values were taken from the graph, not from planning.
        types: See `DryRun`.
        planner: The planner.
        unknown: Values without a known type; nodes that read them are judged by name and dtype.
    """

    def __init__(self, graph: Graph, options: PlanOptions, start: int) -> None:
        self.graph = graph
        self.refused: dict[str, str] = {}
        self.complete = True
        self.assumed = False
        sizes = self.sizes = dict[str, int]()

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
        """Plan every node, or judge it by its name and dtype if its inputs are unknown."""
        for node in self.graph.nodes:
            reason = self._node(node)
            if reason:
                self.refused[node.name] = reason
        whole = self.complete and not self.unknown and not self.assumed
        return DryRun(self.refused, self.types, self.planner if whole else None)

    def _node(self, node: Node) -> str:
        """Plan a node; return why it has no kernel, "" if it has one."""
        if any(not isinstance(value.type, TensorType | None) for value in _values_of(node)):
            return f"{node.op_type} works on sequences or other values that are no tensors"
        if any(_is_text(value) for value in _values_of(node)):
            self._assume_outputs(node)
            return f"{node.op_type} works on strings, which have no kernels"
        branches = is_branching(node) and self.planner.options.lowering.branches
        if (node.captures or node.bodies) and not branches:
            self._assume_outputs(node)
            return f"{node.op_type} has nested graphs"
        # Planning needs a type for every input; the planner would raise an error that says nothing
        # about the node.
        if any(value in self.unknown for value in node.sources):
            self._assume_outputs(node)
            return self._judge_by_name(node)
        before = len(self.planner.items)
        check_time(f"trying node {node.name!r} ({node.op_type})")
        try:
            self.planner.add(node)
        except SubgraphError as error:
            # The sample sizes may be at fault, as for a Reshape to a fixed number of elements;
            # `dry_run` then tries others.
            self.complete = False
            # If shapes are assumed, a condition that follows from them only seems unknown.
            found = isinstance(error, UnknownShapeError) and not error.inputs and not self.assumed
            self._assume_outputs(node)
            return str(error) if found and is_branching(node) else self._judge_by_name(node)
        for item in self.planner.items[before:]:
            if isinstance(item, ReferenceStep):
                return item.reason
        return ""

    def _judge_by_name(self, node: Node) -> str:
        """Return why a node has no kernel, by its operator and dtype; "" if it may have one."""
        if is_branching(node):
            inside = (self._judge_by_name(inner) for body in node.bodies for inner in body.nodes)
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

    def _assume_outputs(self, node: Node) -> None:
        """Take the types of a node's outputs from the graph; without static ones, as unknown."""
        self.assumed = True
        for value in node.outputs:
            type_ = value.type
            if isinstance(type_, TensorType) and type_.is_static:
                # Nodes that read the output can then be planned, although its producer has no
                # steps.
                self.planner.assume(value, type_.dtype, concrete(type_))
            else:
                self.unknown.add(value)


def _values_of(node: Node) -> Sequence[Value]:
    return (*node.sources, *node.outputs)


def _is_text(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype == "string"
