"""One line for a user's accelerator: `check_property` tries it on random graphs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from subgraph.compiled_model import CompiledModel
from subgraph.core import compile_model
from subgraph.errors import PartitionError
from subgraph.graph import Graph
from subgraph.property import optimize_for
from subgraph.testing.invariants import check_partition, check_results, run_reference
from subgraph.testing.random_graphs import feeds, graphs
from subgraph.testing.shrinking import shrink_graph


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

    Each partitioned graph runs several times, with other inputs, with the same again, and after its
    weights were changed. The graphs are always the same, and a failure is shrunk to a small one,
    which the error shows.

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
        graph, shown = _smallest(failed[-1], error, prop, rtol, atol, options)
        name = getattr(prop, "__name__", None) or repr(prop)
        raise PartitionError(f"property {name} fails: {shown}\non the graph\n{graph}") from shown


def _smallest(
    graph: Graph, error: Exception, prop: Any, rtol: float, atol: float, options: Any
) -> tuple[Graph, Exception]:
    """Return a small graph that fails as ``graph`` does, and its error."""
    said = [error]

    def fails(candidate: Graph) -> bool:
        try:
            candidate.verify()
            run_reference(candidate, feeds(candidate))
        except Exception:
            return False  # it is the candidate that does not run
        try:
            try_property(candidate, prop, rtol, atol, options)
        except Exception as found:
            if type(found) is not type(said[-1]):
                return False
            said.append(found)
            return True
        return False

    return shrink_graph(graph, fails), said[-1]


def try_property(graph: Graph, prop: Any, rtol: float, atol: float, options: Any) -> None:
    """Partition one graph, check the invariants, compare results, partition again.

    Raises:
        PartitionError: something is wrong.
    """
    cut = optimize_for(graph, prop, **options)
    check_partition(graph, cut)
    _check_runs(graph, cut, rtol, atol)
    again = optimize_for(cut, prop, **options)
    if str(again) != str(cut):
        raise PartitionError("invariant 8: partitioning again changes the graph")


def _check_runs(graph: Graph, cut: Graph, rtol: float, atol: float) -> None:
    """Compare several runs of one compiled model with the reference: an op may keep state."""
    names = [value.name for value in graph.outputs]
    before, after = (compile_model(g, "REFERENCE") for g in (graph, cut))

    def run(model: CompiledModel, seed: int = 0) -> list[Any]:
        inputs = feeds(graph, seed)
        results = model(inputs)
        for name, untouched in feeds(graph, seed).items():
            if not np.array_equal(inputs[name], untouched, equal_nan=untouched.dtype.kind == "f"):
                raise PartitionError(f"a run changed the array of input {name!r}; change a copy")
        return [results[position] for position in range(len(names))]

    def compare(expected: list[Any], got: list[Any], when: str) -> None:
        try:
            check_results(expected, got, names, rtol, atol)
        except PartitionError as error:
            raise PartitionError(f"{when}: {error}" if when else str(error)) from error

    first = run(after)
    compare(run(before), first, "")
    copies = copy.deepcopy(first)
    compare(run(before, 1), run(after, 1), "in a second run, with other inputs")
    compare(copies, first, "a later run changed results that were handed out before")
    compare(copies, run(after), "run again with the same inputs")
    with _other_weights(graph):
        compare(run(before), run(after), "after weights were changed (Parameter.assign)")


@contextmanager
def _other_weights(graph: Graph) -> Generator[None]:
    """Assign other numbers to the float parameters, of the same signs, until the block ends."""
    kept = {p: p.array for p in graph.parameters.values() if p.type.dtype.startswith("float")}
    for parameter, array in kept.items():
        parameter.assign((array * 0.75).astype(array.dtype))
    try:
        yield
    finally:
        for parameter, array in kept.items():
            parameter.assign(array)
