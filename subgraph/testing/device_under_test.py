"""Shared parts of the checks of a device: test models, expected results, failing sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import attrs
import numpy as np

from subgraph.devices.calls import known_properties
from subgraph.devices.core import Core
from subgraph.devices.query import QueryResult
from subgraph.errors import DeviceError
from subgraph.graph.graph import Graph
from subgraph.operators.subgraph_op import Session
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.testing.invariants import check_results, run_reference
from subgraph.testing.random_graphs import feeds
from subgraph.testing.sessions import changed_sessions
from subgraph.testing.shape_preserving_ops import ShapePreservingOp, sorted_by_support

INJECTED = "a failure injected by check_device"  # begin of the error of `broken_sessions`


class SkippedCheck(Exception):
    """A check does not apply to a device; the message is the reason."""


class FailedCheck(Exception):
    """A device breaks the contract; the message says how, and how to correct it."""


@attrs.define
class DeviceReport:
    """The result of `check_device`.

    Attributes:
        device: The device string.
        passed: Names of the checks that the device passed.
        skipped: Reasons of the checks that do not apply to the device, by name.
        graphs: Number of graphs that were compiled.
        nodes: Numbers of nodes of these graphs, by operator.
        runs: Number of runs whose results were compared with the reference's.
    """

    device: str
    passed: list[str] = attrs.field(factory=list[str])
    skipped: dict[str, str] = attrs.field(factory=dict[str, str])
    graphs: int = 0
    nodes: Counter[str] = attrs.field(factory=Counter[str])
    runs: int = 0

    def __str__(self) -> str:
        """Return a line of counts, then one for each check."""
        lines = [f"{self.device}: {self.graphs} graphs, {self.runs} runs"]
        lines += [f"  {name}: passed" for name in self.passed]
        lines += [f"  {name}: does not apply, {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


class DeviceUnderTest:
    """A device that is tested.

    Attributes:
        core: The Core that has the device.
        name: The device string.
        device: The device itself, the first one of the string.
        config: Options of every compile call.
        models: The user's models.
        taken: Operators of which the device takes chains.
        refused: Operators of which it does not.
        fixed: Whether it takes only static shapes.
        max_examples: Number of random graphs.
        report: The results so far.
    """

    def __init__(
        self,
        core: Core,
        name: str,
        config: Mapping[str, Any],
        models: Sequence[Graph],
        tolerances: tuple[float, float],
        max_examples: int,
    ) -> None:
        """Query which operators the device takes.

        Args:
            core: The Core that has the device.
            name: The device string.
            config: Options of every compile call.
            models: The user's models.
            tolerances: Relative and absolute tolerance of results.
            max_examples: Number of random graphs.

        Raises:
            FailedCheck: it takes none of the operators, and there are no models.
        """
        self.core, self.name, self.config, self.models = core, name, dict(config), models
        self.device, _ = core.split(name)
        self.report = DeviceReport(name)
        self._rtol, self._atol = tolerances
        self.max_examples = max_examples
        self.taken, self.refused, self.fixed = sorted_by_support(self.takes)
        if not self.taken and not models:
            raise FailedCheck(
                f"device {name} takes none of {', '.join(p.name for p in self.refused)}; give "
                "models that it takes (models=[...])"
            )

    # ------------------------------------------------------------------ test models

    @property
    def pieces(self) -> list[ShapePreservingOp]:
        """Up to five operators that the device takes, those with weights first."""
        return [*[p for p in self.taken if p.has_weights][:3], *self.plain[:2]]

    @property
    def plain(self) -> list[ShapePreservingOp]:
        """Operators without weights that the device takes."""
        return [piece for piece in self.taken if not piece.has_weights]

    @property
    def graphs(self) -> list[Graph]:
        """Small graphs that the device takes, then the user's models."""
        return [*(piece.chain(2, fixed=self.fixed) for piece in self.pieces), *self.models]

    def some_graph(self) -> Graph:
        """Return one graph that the device takes, with weights if there is one."""
        return self.graphs[0]

    @property
    def is_physical(self) -> bool:
        """Whether the device runs models itself, unlike HETERO and AUTO."""
        return not self.device.is_virtual

    @property
    def with_reference(self) -> str:
        """The string of a HETERO device that uses REFERENCE for nodes that the device refuses."""
        names = dict.fromkeys((self.name, "REFERENCE"))  # REFERENCE once
        return f"HETERO:{','.join(names)}" if self.is_physical else self.name

    @property
    def options(self) -> dict[str, str]:
        """The device's SUPPORTED_PROPERTIES: names with "RW" or "RO"."""
        return known_properties(self.device)

    # ------------------------------------------------------------------ calls of the device

    def query(self, graph: Graph, device: str = "") -> QueryResult:
        """Return the result of ``query_model``; ``device`` "": the tested device."""
        return self.core.query_model(graph, device or self.name, self.config)

    def takes(self, graph: Graph) -> bool:
        """Return whether the device takes every node of a graph."""
        found = self.query(graph)
        return all(node.name in found for node in graph.nodes)

    def compile(self, graph: Graph, device: str = "", /, **config: Any) -> CompiledModel:
        """Return the compiled graph; without RUNTIME_FALLBACK, unless ``config`` has it.

        Args:
            graph: The graph.
            device: A device string; "": the tested device.
            **config: Options besides those of every compile call.
        """
        given = {**self.config, **config}
        if "RUNTIME_FALLBACK" in self.options:
            # With a fallback another device would hide the failure of the tested one.
            given.setdefault("RUNTIME_FALLBACK", False)
        model = self.core.compile_model(graph, device or self.name, given)
        self.report.graphs += 1
        self.report.nodes.update(node.op_type for node in graph.nodes)
        return model

    def inputs(self, graph: Graph, seed: int = 0, size: int = 2) -> dict[str, Any]:
        """Return random inputs for a graph.

        Args:
            graph: The graph.
            seed: Seed of the random numbers.
            size: Size of every symbolic dimension.
        """
        free = {d for v in graph.inputs for d in getattr(v.type, "shape", None) or ()}
        return feeds(graph, seed, {d: size for d in free if isinstance(d, str)})

    def expected(self, graph: Graph, inputs: Mapping[str, Any]) -> list[Any]:
        """Return the results of the reference with the present weights, by position."""
        with np.errstate(all="ignore"):
            return run_reference(graph, inputs)

    def compare(self, graph: Graph, got: Any, expected: Sequence[Any], when: str) -> None:
        """Compare results with those of the reference.

        Args:
            graph: The graph that ran.
            got: The results, by position.
            expected: The results of the reference.
            when: Circumstances of the run, for the message: "after Parameter.update".

        Raises:
            FailedCheck: they differ; the message has the output and the element.
        """
        names = [value.name for value in graph.outputs]
        self.report.runs += 1
        try:
            check_results(
                expected, [got[k] for k in range(len(names))], names, self._rtol, self._atol
            )
        except Exception as error:
            text = str(error).removeprefix("invariant 7: ")
            raise FailedCheck(f"{when}: {text}; the graph\n{graph}") from error

    def run(self, model: Callable[[Any], Any], graph: Graph, when: str, **how: int) -> None:
        """Run a model and compare its results with the reference's.

        Args:
            model: A compiled model, or the method ``infer`` of a request.
            graph: Its graph.
            when: Circumstances of the run, for the message.
            **how: ``seed`` and ``size`` for `inputs`.

        Raises:
            FailedCheck: the results differ.
        """
        inputs = self.inputs(graph, **how)
        self.compare(graph, model(inputs), self.expected(graph, inputs), when)


def fail(text: str) -> NoReturn:
    """Fail the present check with this message.

    Raises:
        FailedCheck: always.
    """
    raise FailedCheck(text)


@contextmanager
def broken_sessions(devices: Sequence[str]) -> Generator[list[bool]]:
    """Make sessions of these devices' ops, if opened in the ``with`` block, fail on demand.

    Yields:
        A list of one item, False; the sessions fail while a caller sets it to True.
    """
    state = [False]

    def breaking(kind: type[Session]) -> dict[str, Any]:
        """Return methods of a session that has only calls, which raise while ``state[0]``."""

        def call(session: Session, *args: Any, **kwargs: Any) -> Any:
            if state[0]:
                raise DeviceError(f"{INJECTED} on device {session.op.device}")
            return kind.__call__(session, *args, **kwargs)

        def nothing(session: Session, *_: Any) -> None:
            return None

        # Through these the executor would run the op without a call of the session.
        shorter = dict.fromkeys(("run_inputs", "repeat", "enqueue_finish", "iterations"), nothing)
        return {"__call__": call, **shorter}

    with changed_sessions(lambda op: op.device.partition(".")[0] in devices, breaking):
        yield state
