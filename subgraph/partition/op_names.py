"""Checks that the names in a `ContainOpSelector` are names of operators."""

from __future__ import annotations

from subgraph.errors import PartitionError
from subgraph.graph.graph import Graph
from subgraph.operators.operator import operator_key
from subgraph.operators.schema import domains_of, find_schema, known_operators
from subgraph.partition.selector import ContainOpSelector
from subgraph.system.registry import nearest


class OperatorNames:
    """Checks the selectors of one property over one graph, each set of names once."""

    def __init__(self, graph: Graph) -> None:
        """Accept all known operators, and those of ``graph``, its bodies and regions."""
        self._graph = graph
        self._checked: set[frozenset[str]] = set()

    def check(self, selector: ContainOpSelector, property: str) -> None:
        """Check the names of ``selector`` that have no domain; others may be of another library.

        Raises:
            PartitionError: a name is of no standard or registered operator, and not in the graph.
        """
        # A misspelled operator would select nothing, without any error: the model would run, but
        # not on the accelerator.
        names = selector.op_types
        if names in self._checked:
            return
        self._checked.add(names)
        strange = [
            name
            for name in sorted(names)
            if "::" not in name and not name.startswith("_") and find_schema(name) is None
        ]
        if not strange:
            return
        # The graph is traversed only if a name is unknown, which is rare.
        nodes = (node for graph in self._graph.levels(regions=True) for node in graph.nodes)
        present = {operator_key(node.op_type, node.domain) for node in nodes}
        for name in strange:
            if name not in present:
                same = {key for key in present if key.endswith(f"::{name}")}
                same.update(f"{domain}::{name}" for domain in domains_of(name))
                known = {*known_operators(), *present}
                advice = (
                    f"write {' or '.join(map(repr, sorted(same)))}, with its domain"
                    if same
                    else f"{nearest(name, known)} A custom operator is registered with "
                    "core.add_extension(...); one of another domain is named 'domain::Name'"
                )
                raise PartitionError(
                    f"property {property!r}: {type(selector).__name__} selects operator {name!r}, "
                    f"which is neither known nor in graph {self._graph.name!r}; {advice}"
                )
