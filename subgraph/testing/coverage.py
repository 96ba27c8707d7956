"""Counts of what a check has tested: regions, their nodes, and calls of the ops that run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import attrs

from subgraph.graph.graph import Graph
from subgraph.operators.subgraph_op import (
    DefaultSubgraphOp,
    ProfileEntry,
    RunInputs,
    Session,
    SubgraphOp,
)
from subgraph.testing.sessions import changed_sessions


@attrs.define
class Coverage:
    """Counts of what `check_property` has tested.

    Attributes:
        graphs: Graphs that were partitioned.
        regions: Regions of the partitions.
        nodes: Nodes of these regions, by operator.
        own: Regions that an op or operator of the property runs, not the default op.
        calls: Calls of the ops that run the regions.
        own_calls: Calls of ops of the property, and runs of its operators by a device.
        taken: Operators of ONNX that the selector takes, if `check_property` chose the operators.
    """

    graphs: int = 0
    regions: int = 0
    nodes: Counter[str] = attrs.field(factory=Counter[str])
    own: int = 0
    calls: int = 0
    own_calls: int = 0
    taken: tuple[str, ...] = ()

    def add(self, before: Graph, after: Graph) -> tuple[list[SubgraphOp], set[str]]:
        """Count the regions of a partition.

        Args:
            before: The graph that was partitioned.
            after: The partitioned graph.

        Returns:
            The ops of the regions, and the names of subgraph nodes without op, whose operator only
            a device knows.
        """
        self.graphs += 1
        # A property may be applied to a graph that is partitioned already; earlier regions are not
        # its own.
        old = {node.name for graph in before.levels() for node in graph.nodes if node.subgraph}
        ops: list[SubgraphOp] = []
        operators: set[str] = set()
        for graph in after.levels():
            for node in graph.nodes:
                if node.subgraph is None or node.name in old:
                    continue
                self.regions += 1
                self.own += type(node.op) is not DefaultSubgraphOp
                self.nodes.update(inner.op_type for inner in node.subgraph.nodes)
                if node.op is None:
                    operators.add(node.name)
                else:
                    ops.append(node.op)
        return ops, operators

    def count_run(self, profile: Iterable[ProfileEntry], operators: set[str]) -> None:
        """Count the subgraph nodes named in ``operators`` that a device ran as a node or a part.

        Args:
            profile: Profile of the run.
            operators: Names of subgraph nodes without op.
        """
        plain = ("REFERENCE", SubgraphOp.device)  # these run the inner graph, not the operator
        ran: set[str] = set()
        for entry in profile:
            if entry.device not in plain:
                ran.update((entry.node, *entry.region.split(",")))
        self.calls += len(ran & operators)
        self.own_calls += len(ran & operators)

    def counted(self, ops: list[SubgraphOp]) -> AbstractContextManager[None]:
        """Return a context that counts the calls of these ops through sessions opened in it."""
        known = {id(op) for op in ops}
        return changed_sessions(lambda op: id(op) in known, self._counting)

    def _called(self, op: SubgraphOp) -> None:
        self.calls += 1
        self.own_calls += type(op) is not DefaultSubgraphOp

    def _counting(self, kind: type[Session]) -> dict[str, Any]:
        """Return methods that count calls, then call those of a session's class."""
        coverage = self

        def call(session: Session, *args: Any, **kwargs: Any) -> Any:
            coverage._called(session.op)
            return kind.__call__(session, *args, **kwargs)

        # The executor prefers this function to a call of the session, so both are counted.
        def run_inputs(session: Session) -> RunInputs | None:
            run = kind.run_inputs(session)
            if run is None:
                return None

            def counted(*args: Any, **kwargs: Any) -> Any:
                coverage._called(session.op)
                return run(*args, **kwargs)

            return counted

        return {"__call__": call, "run_inputs": run_inputs}
