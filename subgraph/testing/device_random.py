"""The check "random" of `check_device`: random graphs of operators that the device takes."""

from __future__ import annotations

from typing import Any

from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph
from subgraph.operators.schema import standard_operators
from subgraph.operators.subgraph_op import AFFINITY
from subgraph.testing.checks import other_weights, runs, try_drawn
from subgraph.testing.device_trial import DeviceTrial, FailedCheck, SkippedCheck, fail
from subgraph.testing.focused_graphs import by_operator, focused_graphs, templates_of
from subgraph.testing.graph_templates import TEMPLATES
from subgraph.testing.probing import SHAPES, plain_node
from subgraph.testing.random_corners import TABLE
from subgraph.testing.random_graphs import graphs
from subgraph.testing.shrinking import shrink_graph

_MOST_NODES = 10


def random_graphs(trial: DeviceTrial, max_examples: int) -> None:
    """Compile and run random graphs by HETERO on a device and REFERENCE.

    Args:
        trial: The device that is tested.
        max_examples: Number of random graphs.

    Raises:
        SkippedCheck: no node of the random graphs ran on the device, and the user gave models.
        FailedCheck: results differ, compilation failed, or no node ran on the device.
    """
    focus = templates_of(_taken(trial))
    if focus:
        every = {**TEMPLATES, **TABLE}
        strategy = focused_graphs(by_operator(focus), by_operator(every), _MOST_NODES)
    else:
        strategy = graphs(max_nodes=_MOST_NODES, corners=True)
    drawn = _Drawn(trial)
    try_drawn(drawn, strategy, max_examples)
    if max_examples and not drawn.nodes:
        if trial.models and not focus:
            raise SkippedCheck(
                "the device takes no operator with plain operands, and nothing of "
                f"{drawn.graphs} random graphs"
            )
        fail(f"of {drawn.graphs} random graphs the device has run no node: nothing was tested")


def _taken(trial: DeviceTrial) -> list[str]:
    """Return the operators of ONNX that the device takes with float operands, no attributes."""
    found: list[str] = []
    for name, domain in standard_operators():
        if domain:
            continue
        for shape in SHAPES:
            try:
                node = plain_node(name, shape)
                inputs = [value for value in node.inputs if value is not None]
                known = trial.query(Graph(inputs, node.outputs, name))
            except SubgraphError:
                continue
            if name in known:
                found.append(name)
                break
    return sorted(found)


class _Drawn:
    """The test of a device on random graphs.

    Attributes:
        graphs: Number of tested graphs.
        nodes: Number of their nodes that ran on the device.
    """

    def __init__(self, trial: DeviceTrial) -> None:
        self._trial = trial
        self.graphs = 0
        self.nodes = 0

    def attempt(self, graph: Graph) -> None:
        """Compile and run one graph by HETERO, and by the device alone if it takes all nodes."""
        trial = self._trial
        self.graphs += 1
        whole = trial.takes(graph)
        models = [trial.compile(graph)] if whole else []
        if trial.is_alone:
            beside = trial.compile(graph, trial.beside_reference)
            homes = [(node.metadata or {}).get(AFFINITY) for node in beside.graph.nodes]
            self.nodes += homes.count(trial.device.name)
            models.append(beside)
        elif whole:
            self.nodes += len(graph.nodes)
        for model in models:
            for seed in (0, 1):
                trial.run(model, graph, "a random graph", seed=seed)
            with other_weights(graph):
                trial.run(model, graph, "a random graph, after weights were changed")

    def fail(self, graph: Graph, error: Exception) -> Any:
        """Shrink ``graph``, whose test raised ``error``, and raise an error that shows the result.

        Raises:
            FailedCheck: always.
        """

        def fails(candidate: Graph) -> bool:
            if not runs(candidate):
                return False
            try:
                self.attempt(candidate)
            except Exception as found:
                return type(found) is type(error)
            return False

        small = shrink_graph(graph, fails)
        try:
            self.attempt(small)
        except Exception as found:
            error = found
        raise FailedCheck(f"{error}\non the random graph\n{small}") from error
