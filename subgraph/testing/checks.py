"""One line for a user's accelerator: `check_property` tries it on random graphs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from subgraph.errors import PartitionError
from subgraph.graph import Graph
from subgraph.property import optimize_for
from subgraph.testing.invariants import check_partition, check_results, run_reference
from subgraph.testing.random_graphs import feeds, graphs


def check_property(
    prop: Any,
    *,
    max_examples: int = 50,
    max_nodes: int = 10,
    ops: Collection[str] | None = None,
    strategy: st.SearchStrategy[Graph] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **options: Any,
) -> None:
    """Try a property on random graphs: every invariant, and the results against the reference.

    The graphs are always the same, and a failure is shrunk to a small one, which the error shows.

    Args:
        prop: What ``graph.attrs["subgraph_property"]`` may hold: a property's class, an instance, a
            selector, a registered name.
        max_examples: How many graphs.
        max_nodes: How many operators at most in each.
        ops: Operators to use; None: all that `graphs` knows.
        strategy: Graphs of your own instead.
        rtol: Relative tolerance of results.
        atol: Absolute tolerance of results.
        **options: Options of the pass PartitionGraph.

    Raises:
        PartitionError: an invariant is broken, or the property raised; shows the graph.
    """
    drawn = graphs(max_nodes=max_nodes, ops=ops) if strategy is None else strategy
    failed: list[Graph] = []

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=(
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.large_base_example,
        ),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(drawn)
    def attempt(graph: Graph) -> None:
        try:
            try_property(graph, prop, rtol, atol, options)
        except Exception:
            failed.append(graph)
            raise

    try:
        attempt()
    except Exception as error:
        if not failed:
            raise
        raise PartitionError(
            f"property {prop!r} fails: {error}\non the graph\n{failed[-1]}"
        ) from error


def try_property(graph: Graph, prop: Any, rtol: float, atol: float, options: Any) -> None:
    """Partition one graph, check the invariants, compare results, partition again.

    Raises:
        PartitionError: something is wrong.
    """
    cut = optimize_for(graph, prop, **options)
    check_partition(graph, cut)
    inputs = feeds(graph)
    names = [value.name for value in graph.outputs]
    check_results(run_reference(graph, inputs), run_reference(cut, inputs), names, rtol, atol)
    again = optimize_for(cut, prop, **options)
    if str(again) != str(cut):
        raise PartitionError("invariant 8: partitioning again changes the graph")
