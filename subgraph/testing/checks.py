"""`check_property`: tests a property and the ops of its regions on random graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any, NoReturn

import numpy as np
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from subgraph.devices.default_core import compile_model, default_core
from subgraph.dtypes import DTYPES
from subgraph.errors import PartitionError
from subgraph.graph.graph import Graph
from subgraph.onnx_format.file import load
from subgraph.partition.property import SubgraphProperty, optimize_for, property_from
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.infer_request import InferRequest
from subgraph.testing.counterexample import as_test
from subgraph.testing.coverage import Coverage
from subgraph.testing.focused_graphs import by_operator, focused_graphs, templates_of
from subgraph.testing.graph_templates import TEMPLATES, Apply
from subgraph.testing.invariants import check_partition, check_results, run_reference
from subgraph.testing.random_graphs import feeds, graphs
from subgraph.testing.rare_templates import RARE_TEMPLATES
from subgraph.testing.shrinking import shrink_graph
from subgraph.testing.taken_operators import Taken, taken_operators

_MAX_SHOWN = 12  # operators that the text of an error lists


def check_property(
    prop: Any,
    *,
    max_examples: int = 50,
    max_nodes: int = 10,
    ops: Collection[str] | None = None,
    strategy: st.SearchStrategy[Graph] | None = None,
    models: Iterable[Any] = (),
    device: str = "REFERENCE",
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **options: Any,
) -> Coverage:
    """Test a property on random graphs: all invariants, and results against the reference.

    The check first finds which operators the selector takes, and draws graphs of these, with their
    attributes, among other operators, with branches that join again. Each partitioned graph runs
    with two sets of inputs, with the first set again, and after its weights were changed. The
    random graphs are the same in every call. The error shows the smallest failing graph that was
    found, also as a Python test.

    Args:
        prop: A value of ``graph.attrs["subgraph_property"]``: a property's class, an instance, a
            selector, a registered name.
        max_examples: Number of random graphs; 0: only ``models``.
        max_nodes: Largest number of operators in a random graph, not counting those that join
            branches.
        ops: Operators of ONNX's own domain to draw; None: those that the selector takes, among all
            others that `graphs` knows.
        strategy: A strategy that replaces the random graphs.
        models: Models to test first: graphs, or arguments of `subgraph.load`.
        device: The device that runs the partitioned graphs. A property whose nodes have an
            operator that only one device knows needs that device.
        rtol: Relative tolerance of results.
        atol: Absolute tolerance of results.
        **options: Options of the pass PartitionGraph.

    Returns:
        The numbers of graphs, regions, nodes and calls that were tested.

    Raises:
        PartitionError: an invariant is broken, results differ, or the property raised; the message
            shows the graph. Or nothing was tested: the property made no region, or none of its own
            ops was called.
        DeviceError: there is no such device, or it cannot start.
    """
    if isinstance(models, (str, bytes, PathLike, Graph)):
        raise PartitionError(f"models is one model, {models!r}; give a list of models")
    default_core().device(device.partition(":")[0])
    test = _PropertyTest(prop, device, rtol, atol, options)
    for model in models:
        graph = model if isinstance(model, Graph) else load(model)
        # A model that the reference does not run is an error of the caller, and is raised before
        # the property is tested.
        run_reference(graph, feeds(graph))
        try:
            test.attempt(graph)
        except Exception as error:
            test.fail(*smallest_failure(graph, error, test.attempt))
    if max_examples:
        if strategy is None:
            strategy = _strategy(test, ops, max_nodes)
        failure = check_drawn_graphs(test.attempt, strategy, max_examples)
        if failure is not None:
            test.fail(*failure)
    test.check_coverage()
    return test.coverage


def _strategy(
    test: _PropertyTest, ops: Collection[str] | None, max_nodes: int
) -> st.SearchStrategy[Graph]:
    """Return a strategy for graphs of the operators that the selector takes."""
    taken = taken_operators(test.prop)
    test.coverage.taken = taken.names
    focused = graphs_with(taken, ops, max_nodes)
    return graphs(max_nodes=max_nodes, ops=ops, corners=True) if focused is None else focused


def graphs_with(
    taken: Taken, ops: Collection[str] | None, max_nodes: int
) -> st.SearchStrategy[Graph] | None:
    """Return a strategy for graphs of some operators among others; None if none can be drawn.

    Args:
        taken: The operators that are tested.
        ops: The operators to draw; None: all that have a template.
        max_nodes: Largest number of operators in a graph, not counting joins.
    """
    every = templates_of(ops) if ops is not None else {**TEMPLATES, **RARE_TEMPLATES}

    def focus(names: Iterable[str]) -> dict[str, Apply]:
        return by_operator(templates_of([name for name in names if ops is None or name in ops]))

    table = focus(taken.names)
    starts = table if taken.starts == taken.names else focus(taken.starts)
    if not table:
        return None
    neighbours = by_operator(every)
    chains = [chain for chain in taken.chains if neighbours.keys() >= set(chain[0])]
    return focused_graphs(table, neighbours, max_nodes, starts or table, chains)


def check_drawn_graphs(
    attempt: Callable[[Graph], None], strategy: st.SearchStrategy[Graph], max_examples: int
) -> tuple[Graph, Exception] | None:
    """Test random graphs; those that the reference does not run are skipped.

    Args:
        attempt: Tests one graph; raises if it fails.
        strategy: Draws the graphs, without randomness: the same ones in every call.
        max_examples: Number of graphs.

    Returns:
        The smallest failing graph that was found and its error; None if none fails.
    """
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
    @given(strategy)
    def attempt_drawn(graph: Graph) -> None:
        assume(runs(graph))
        try:
            attempt(graph)
        except Exception:
            failed.append(graph)
            raise

    try:
        attempt_drawn()
    except Unsatisfiable:
        pass  # the reference runs no graph of the strategy; the caller sees 0 graphs
    except Exception as error:
        if not failed:
            raise
        return smallest_failure(failed[-1], error, attempt)
    return None


def runs(graph: Graph) -> bool:
    """Return whether the reference runs the graph with the inputs and weights of the checks."""
    try:
        graph.verify()
        for seed in (0, 1):
            run_reference(graph, feeds(graph, seed))
        with other_weights(graph):
            run_reference(graph, feeds(graph))
    except Exception:
        return False
    return True


def smallest_failure(
    graph: Graph, error: Exception, attempt: Callable[[Graph], None]
) -> tuple[Graph, Exception]:
    """Shrink a graph while its test fails in the same way.

    Args:
        graph: The graph.
        error: The error of its test.
        attempt: The test.

    Returns:
        The smallest graph that was found, and the error of its test.
    """
    errors = [error]

    def fails(candidate: Graph) -> bool:
        if not runs(candidate):
            return False  # the candidate is no valid graph
        try:
            attempt(candidate)
        except Exception as found:
            # Another error would be another fault, and the shrunk graph would not show the first
            # one.
            if type(found) is not type(error):
                return False
            errors.append(found)
            return True
        return False

    small = shrink_graph(graph, fails)
    return small, errors[-1]


class _PropertyTest:
    """The test of a property.

    Attributes:
        prop: The property, as given to `check_property`.
        coverage: The numbers of graphs, regions, nodes and calls that were tested.
    """

    def __init__(
        self, prop: Any, device: str, rtol: float, atol: float, options: Mapping[str, Any]
    ) -> None:
        self.prop = prop
        self.coverage = Coverage()
        self._device = device
        self._rtol = rtol
        self._atol = atol
        self._options = options
        self._name = getattr(prop, "__name__", None) or repr(prop)

    def attempt(self, graph: Graph) -> None:
        """Partition one graph, check the invariants, compare results, partition again.

        Raises:
            PartitionError: an invariant is broken, or results differ.
        """
        cut = optimize_for(graph, self.prop, **self._options)
        check_partition(graph, cut)
        ops, operators = self.coverage.add(graph, cut)
        config = {"RUNTIME_FALLBACK": False, "ENABLE_PROFILING": bool(operators)}
        with self.coverage.counted(ops), np.errstate(all="ignore"):
            model = compile_model(cut, self._device, config)
            request = model.create_infer_request()
            _check_runs(graph, request, self._rtol, self._atol)
            self.coverage.count_run(request.profile() if operators else (), operators)
        # A partition that is applied again must find nothing more, or passes would not reach an
        # end.
        again = optimize_for(cut, self.prop, **self._options)
        if str(again) != str(cut):
            raise PartitionError("invariant 8: partitioning again changes the graph")

    def fail(self, graph: Graph, error: Exception) -> NoReturn:
        """Raise an error that shows ``graph``, whose test raised ``error``, also as a Python test.

        Raises:
            PartitionError: always.
        """
        given = "".join(f", {key}={value!r}" for key, value in self._options.items())
        where = "" if self._device == "REFERENCE" else f", device={self._device!r}"
        test = as_test(graph, self.prop, f"{where}, rtol={self._rtol}, atol={self._atol}{given}")
        raise PartitionError(
            f"property {self._name} fails: {error}\non the graph\n{graph}\nas a test\n{test}"
        ) from error

    def check_coverage(self) -> None:
        """Raise if the check has tested nothing of the property.

        Raises:
            PartitionError: there was no region, no call, or no call of the property's own ops.
        """
        tried = self.coverage
        where = f"property {self._name} was tried on {tried.graphs} graphs, but"
        advice = "give graphs that it takes (ops=..., models=[...], strategy=...)"
        if not tried.regions:
            more = ", …" if len(tried.taken) > _MAX_SHOWN else ""
            taken = ", ".join(tried.taken[:_MAX_SHOWN]) or "no operator of ONNX without attributes"
            raise PartitionError(
                f"{where} not one region was made: nothing was tested. Its selector takes: "
                f"{taken}{more}. sg.explain says why it refuses a node of a graph; {advice}"
            )
        if not tried.calls:
            raise PartitionError(
                f"{where} the ops of its {tried.regions} regions were never called on "
                f"{self._device}; nodes without an op need a device that knows their operator "
                f"(device=...); or {advice}"
            )
        owner = property_from(self.prop)
        makes = type(owner).create_subgraph_node is not SubgraphProperty.create_subgraph_node
        if makes and not tried.own_calls:
            raise PartitionError(
                f"{where} an op of its own was never called: all {tried.regions} regions ran by "
                f"the default op; create_subgraph_node has to return subgraph_node(subgraph, "
                f"op=...); or {advice}"
            )


def _check_runs(graph: Graph, request: InferRequest, rtol: float, atol: float) -> None:
    """Compare several runs of one request with the reference, as an op may keep state."""
    names = [value.name for value in graph.outputs]
    reference = compile_model(graph, "REFERENCE", {"RUNTIME_FALLBACK": False})

    def run(model: CompiledModel | InferRequest, seed: int = 0) -> list[Any]:
        inputs = feeds(graph, seed)
        results = model.infer(inputs) if isinstance(model, InferRequest) else model(inputs)
        for name, untouched in feeds(graph, seed).items():
            if not np.array_equal(inputs[name], untouched, equal_nan=untouched.dtype.kind == "f"):
                raise PartitionError(f"a run changed the array of input {name!r}; change a copy")
        return [results[position] for position in range(len(names))]

    def compare(expected: list[Any], got: list[Any], when: str) -> None:
        try:
            check_results(expected, got, names, rtol, atol)
        except PartitionError as error:
            raise PartitionError(f"{when}: {error}" if when else str(error)) from error

    first = run(request)
    compare(run(reference), first, "")
    copies = copy.deepcopy(first)
    compare(run(reference, 1), run(request, 1), "in a second run, with other inputs")
    compare(copies, first, "a later run changed results of an earlier run")
    compare(copies, run(request), "run again with the same inputs")
    with other_weights(graph):
        compare(run(reference), run(request), "after weights were changed (Parameter.assign)")


@contextmanager
def other_weights(graph: Graph) -> Generator[None]:
    """Scale the float parameters by 0.75 until the block ends."""
    # Scaled by 0.75, weights keep their signs: a variance stays positive. Integer weights are often
    # shapes or indices and stay as they are.
    kept = {p: p.array for p in graph.parameters.values() if DTYPES[p.type.dtype].kind == "float"}
    for parameter, array in kept.items():
        parameter.assign((array * 0.75).astype(array.dtype))
    try:
        yield
    finally:
        for parameter, array in kept.items():
            parameter.assign(array)
