"""The check "random" of `check_device`: random graphs of operators that the device takes."""

from __future__ import annotations

import numpy as np

from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph
from subgraph.operators.schema import standard_operators
from subgraph.operators.subgraph_op import AFFINITY
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.testing.checks import check_drawn_graphs, graphs_with, other_weights
from subgraph.testing.device_under_test import DeviceUnderTest, FailedCheck, SkippedCheck, fail
from subgraph.testing.random_graphs import graphs
from subgraph.testing.taken_operators import SHAPES, Taken, plain_node

_MAX_NODES = 10  # operators of a random graph, not counting joins


def random_graphs(dut: DeviceUnderTest) -> None:
    """Compile and run random graphs by HETERO on a device and REFERENCE.

    Raises:
        SkippedCheck: no node of the random graphs ran on the device, and the user gave models.
        FailedCheck: results differ, compilation failed, or no node ran on the device.
    """
    names = _taken(dut)
    focused = graphs_with(Taken(names, names), None, _MAX_NODES)
    strategy = graphs(max_nodes=_MAX_NODES, corners=True) if focused is None else focused
    drawn = _RandomGraphTest(dut)
    failure = check_drawn_graphs(drawn.attempt, strategy, dut.max_examples)
    if failure is not None:
        graph, error = failure
        raise FailedCheck(f"{error}\non the random graph\n{graph}") from error
    if dut.max_examples and not drawn.nodes:
        if dut.models and focused is None:
            raise SkippedCheck(
                "the device takes no operator with float operands and no attributes, and no node "
                f"of {drawn.graphs} random graphs"
            )
        fail(f"the device ran no node of {drawn.graphs} random graphs: nothing was tested")


def _taken(dut: DeviceUnderTest) -> tuple[str, ...]:
    """Return the operators of ONNX that the device takes with float operands, no attributes."""
    found: list[str] = []
    for name, domain in standard_operators():
        if domain:
            continue
        for shape in SHAPES:
            try:
                node = plain_node(name, shape)
                inputs = [value for value in node.inputs if value is not None]
                known = dut.query(Graph(inputs, node.outputs, name))
            except SubgraphError:
                continue
            if name in known:
                found.append(name)
                break
    return tuple(sorted(found))


class _RandomGraphTest:
    """The test of a device on random graphs.

    Attributes:
        graphs: Number of tested graphs.
        nodes: Number of their nodes that ran on the device.
    """

    def __init__(self, dut: DeviceUnderTest) -> None:
        self._dut = dut
        self.graphs = 0
        self.nodes = 0

    def attempt(self, graph: Graph) -> None:
        """Compile and run one graph by HETERO, and by the device alone if it takes all nodes."""
        dut = self._dut
        self.graphs += 1
        whole = dut.takes(graph)
        models = [dut.compile(graph)] if whole else []
        if dut.is_physical:
            beside = dut.compile(graph, dut.with_reference)
            homes = [(node.metadata or {}).get(AFFINITY) for node in beside.graph.nodes]
            self.nodes += homes.count(dut.device.name)
            models.append(beside)
        elif whole:
            self.nodes += len(graph.nodes)
        for model in models:
            for seed in (0, 1):
                self._run(model, graph, "a random graph", seed)
            with other_weights(graph):
                self._run(model, graph, "a random graph, after weights were changed", 0)

    def _run(self, model: CompiledModel, graph: Graph, when: str, seed: int) -> None:
        """Run a model and compare its results, unless the device may change a NaN among values."""
        if self._dut.device.keeps_nan or not self._meets_nan(graph, seed):
            self._dut.run(model, graph, when, seed=seed)

    def _meets_nan(self, graph: Graph, seed: int) -> bool:
        """Return whether a NaN is among the values that the reference computes."""
        # A NaN may vanish before the outputs, for example in a comparison.
        whole = graph.clone()
        whole.outputs = tuple(value for node in whole.nodes for value in node.outputs)
        found = self._dut.expected(whole, self._dut.inputs(graph, seed=seed))
        # A NaN of any dtype, also of bfloat16, is an element that is not itself.
        return any(bool((a != a).any()) for a in map(np.asarray, found) if a.dtype != object)
