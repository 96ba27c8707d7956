"""What the checks of a device share: its models, the results they should give, broken sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import attrs
import numpy as np

from subgraph.devices.calls import known_properties
from subgraph.devices.core import Core
from subgraph.devices.query import QueryResult
from subgraph.errors import DeviceError
from subgraph.graph.graph import Graph
from subgraph.operators import subgraph_op
from subgraph.operators.subgraph_op import Session, SubgraphOp
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.testing.device_pieces import Piece, pieces_where
from subgraph.testing.invariants import check_results, run_reference
from subgraph.testing.random_graphs import feeds


class SkippedCheck(Exception):
    """A check does not apply to a device; its text says why."""


class FailedCheck(Exception):
    """A device does not do what the contract says; its text says what, and what to do."""


@attrs.define
class DeviceReport:
    """What `check_device` has tried.

    Attributes:
        device: The device string.
        passed: Names of the checks that the device passed.
        skipped: Those that do not apply to it, with the reason.
        graphs: Graphs that were compiled for it.
        nodes: Nodes of these that it ran, by operator.
        runs: Runs whose results were compared with the reference's.
    """

    device: str
    passed: list[str] = attrs.field(factory=list[str])
    skipped: dict[str, str] = attrs.field(factory=dict[str, str])
    graphs: int = 0
    nodes: Counter[str] = attrs.field(factory=Counter[str])
    runs: int = 0

    def __str__(self) -> str:
        """Return a line for each check."""
        lines = [f"{self.device}: {self.graphs} graphs, {self.runs} runs"]
        lines += [f"  {name}: passed" for name in self.passed]
        lines += [f"  {name}: does not apply, {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


class DeviceTrial:
    """A device that is being checked.

    Attributes:
        core: The Core that knows it.
        name: The device string.
        device: The device itself.
        config: The options of every compile call.
        models: Graphs of the user's own.
        taken: Operators of which it takes whole chains.
        refused: Those that it does not take.
        fixed: Whether it takes fixed sizes alone.
        report: What was tried.
    """

    def __init__(
        self,
        core: Core,
        name: str,
        config: Mapping[str, Any],
        models: Sequence[Graph],
        tolerances: tuple[float, float],
    ) -> None:
        """Ask the device what it takes.

        Raises:
            FailedCheck: it takes nothing that is known here.
        """
        self.core, self.name, self.config, self.models = core, name, dict(config), models
        self.device, _ = core.split(name)
        self.report = DeviceReport(name)
        self._rtol, self._atol = tolerances
        self.taken, self.refused, self.fixed = pieces_where(self.takes)
        if not self.taken and not models:
            raise FailedCheck(
                f"device {name} takes none of {', '.join(p.name for p in self.refused)}; give "
                "models that it takes (models=[...])"
            )

    # ------------------------------------------------------------------ what to try

    @property
    def pieces(self) -> list[Piece]:
        """A few operators that the device takes, those with weights first."""
        return [*[p for p in self.taken if p.has_weights][:3], *self.plain[:2]]

    @property
    def plain(self) -> list[Piece]:
        """Operators without weights that the device takes."""
        return [piece for piece in self.taken if not piece.has_weights]

    @property
    def graphs(self) -> list[Graph]:
        """Small graphs that the device takes, and the user's own."""
        return [*(piece.chain(2, fixed=self.fixed) for piece in self.pieces), *self.models]

    def some_graph(self) -> Graph:
        """Return one graph that the device takes, with weights if any has."""
        return self.graphs[0]

    @property
    def is_alone(self) -> bool:
        """Whether the device runs models itself, and not on others."""
        return not self.device.is_virtual

    @property
    def beside_reference(self) -> str:
        """The device string with REFERENCE behind it."""
        return f"HETERO:{self.name},REFERENCE" if self.is_alone else self.name

    @property
    def options(self) -> dict[str, str]:
        """The properties that the device says to have, with "RW" or "RO"."""
        return known_properties(self.device)

    # ------------------------------------------------------------------ what it does

    def query(self, graph: Graph, device: str = "") -> QueryResult:
        """Return what the device says to a graph."""
        return self.core.query_model(graph, device or self.name, self.config)

    def takes(self, graph: Graph) -> bool:
        """Return whether the device takes every node of a graph."""
        found = self.query(graph)
        return all(node.name in found for node in graph.nodes)

    def compile(self, graph: Graph, device: str = "", /, **config: Any) -> CompiledModel:
        """Return the graph compiled; what fails while it runs is not run elsewhere, unless asked.

        Errors of a graph that the device has said to take are its fault.
        """
        given = {**self.config, **config}
        if "RUNTIME_FALLBACK" in self.options:
            given.setdefault("RUNTIME_FALLBACK", False)
        model = self.core.compile_model(graph, device or self.name, given)
        self.report.graphs += 1
        self.report.nodes.update(node.op_type for node in graph.nodes)
        return model

    def inputs(self, graph: Graph, seed: int = 0, size: int = 2) -> dict[str, Any]:
        """Return inputs for a graph; ``size`` is that of every free dimension."""
        free = {d for v in graph.inputs for d in getattr(v.type, "shape", None) or ()}
        return feeds(graph, seed, {d: size for d in free if isinstance(d, str)})

    def expected(self, graph: Graph, inputs: Mapping[str, Any]) -> list[Any]:
        """Return what the reference gives, with the weights as they are now."""
        with np.errstate(all="ignore"):
            return run_reference(graph, inputs)

    def compare(self, graph: Graph, got: Any, expected: Sequence[Any], when: str) -> None:
        """Compare results with those of the reference.

        Raises:
            FailedCheck: they differ; says in which output and where.
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
        """Run a model, or a request's ``infer``, and compare its results with the reference's."""
        inputs = self.inputs(graph, **how)
        self.compare(graph, model(inputs), self.expected(graph, inputs), when)


def fail(text: str) -> NoReturn:
    """Say what is wrong.

    Raises:
        FailedCheck: always.
    """
    raise FailedCheck(text)


@contextmanager
def broken_sessions(devices: Sequence[str]) -> Generator[list[bool]]:
    """Let sessions of these devices' ops that are opened in the block fail on demand.

    Yields:
        A list whose one item says whether they fail now.
    """
    state = [False]
    kinds: dict[type[Session], type[Session]] = {}
    opened = subgraph_op.open_own

    def open_own(op: SubgraphOp) -> Session:
        session = opened(op)
        if op.device.partition(".")[0] in devices:
            kind = type(session)
            if kind not in kinds:
                kinds[kind] = _breaking(kind, state)
            session.__class__ = kinds[kind]
        return session

    with (
        patch.object(subgraph_op, "open_own", open_own),
        patch("subgraph.devices.fallback.open_own", open_own),
    ):
        yield state


def _breaking(kind: type[Session], state: Sequence[bool]) -> type[Session]:
    """Return a child of a session's class that raises when told to; the same memory layout."""

    def call(session: Session, *args: Any, **kwargs: Any) -> Any:
        if state[0]:
            raise DeviceError(f"a failure that was asked for on device {session.op.device}")
        return kind.__call__(session, *args, **kwargs)

    def nothing(session: Session, *_: Any) -> None:
        return None

    shorter = dict.fromkeys(("run_inputs", "repeat", "enqueue_finish", "iterations"), nothing)
    return type(kind.__name__, (kind,), {"__slots__": (), "__call__": call, **shorter})
