"""Runners: what one request owns to run a compiled model, and the stages of asynchronous runs.

A model whose graph is one subgraph node skips the executor: its runner calls the node's session.
Every other model is walked by an `Executor`. A run falls into stages, each with the task executor
whose threads run it, so that stages of different requests overlap; over several devices, a request
takes its turn on one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from subgraph.graph.graph import Graph, Node
from subgraph.graph.limits import limited, parse_bytes
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import (
    ProfileEntry,
    Repeat,
    Session,
    fallback_of,
    fill_outputs,
    open_session,
)
from subgraph.runtime.executor import (
    Cancel,
    Executor,
    explain_failure,
    set_states_of,
    states_of,
)
from subgraph.runtime.executor_plan import Plan
from subgraph.runtime.settings import DeviceOptions
from subgraph.runtime.task_executor import TaskExecutor

Turn = tuple[threading.Lock, int, int]  # who holds the lock runs these steps, from and to


@attrs.frozen
class Stage:
    """A part of a run: the function takes what the stage before gave, the first the inputs."""

    executor: TaskExecutor
    function: Callable[[Any], Any]


class Runner:
    """One request's memory and sessions for a model.

    Attributes:
        outputs: Arrays to write the results of the next runs into, None where a run makes one.
        cancel: Flag that ends a run early.
        repeat: Does over what the last run did, with no snapshot pinned; it gives None at once if
            shapes or parameters are others. None where there is no such short way.
    """

    repeat: Repeat | None = None

    def __init__(self, cancel: Cancel) -> None:
        """Make a runner that looks at ``cancel``."""
        self.cancel = cancel
        self.outputs: Sequence[Array | None] | None = None

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the model on one item for each input; return one for each output."""
        raise NotImplementedError

    def profile(self) -> list[ProfileEntry]:
        """Return what the nodes took in the last run."""
        return []

    def sessions(self) -> dict[str, Session]:
        """Return the sessions of the model's subgraph nodes, by name; see `Executor.sessions`."""
        return {}

    def states(self) -> dict[str, Array]:
        """Return what subgraph ops keep of the request between runs, as "node/name"."""
        return states_of(self.sessions())

    def set_states(self, states: Mapping[str, Array]) -> None:
        """Let the next run go on from what `states` of another runner of the model gave.

        Raises:
            DeviceError: a node is not there, or keeps no such states.
        """
        set_states_of(self.sessions(), states)

    def stages(self, default: TaskExecutor, following: TaskExecutor) -> list[Stage]:
        """Return the stages of an asynchronous run; one on ``default`` unless a child says more.

        Args:
            default: Whose threads start a run.
            following: Whose threads wait for what runs elsewhere.
        """
        return [Stage(default, self.run)]


def within(runner: Runner, options: DeviceOptions) -> Runner:
    """Return a runner whose runs heed the budgets of a model's options, where these say any."""
    memory = parse_bytes(options.MEMORY_LIMIT, "MEMORY_LIMIT")
    if not memory:
        return runner
    run = runner.run

    def run_within(inputs: Sequence[Any]) -> Sequence[Any]:
        with limited(memory):
            return run(inputs)

    vars(runner)["run"] = run_within  # of this runner alone
    return runner


class GraphRunner(Runner):
    """Walks the model's graph."""

    def __init__(
        self,
        plan: Plan,
        cancel: Cancel,
        *,
        profiling: bool = False,
        pipeline: Sequence[Turn] = (),
    ) -> None:
        """Prepare to run ``plan``; ``pipeline`` says where an asynchronous run waits its turn."""
        super().__init__(cancel)
        self._executor = Executor(plan, profiling=profiling, cancel=cancel)
        self._pipeline = pipeline

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return self._filled(self._executor.run(inputs))

    def _filled(self, results: Sequence[Any]) -> Sequence[Any]:
        return results if self.outputs is None else fill_outputs(results, self.outputs)

    def sessions(self) -> dict[str, Session]:
        return self._executor.sessions()

    def profile(self) -> list[ProfileEntry]:
        return self._executor.profile()

    def stages(self, default: TaskExecutor, following: TaskExecutor) -> list[Stage]:
        # One that heeds a budget of its own has its ``run`` replaced.
        in_turns = self._pipeline and "run" not in vars(self)
        return [Stage(default, self._run_in_turns if in_turns else self.run)]

    def _run_in_turns(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run with one request at a time on each device, so that those of others overlap.

        Taking a turn costs far less than handing the request to a thread of the device would.
        """
        executor, run = self._executor, self._walk_in_turns
        return executor.rolled_back(run, inputs) if executor.stateful else run(inputs)

    def _walk_in_turns(self, inputs: Sequence[Any]) -> Sequence[Any]:
        executor = self._executor
        values = executor.start(inputs)
        if executor.scheduler is not None:
            locks = executor.scheduler.schedule.locks(self._pipeline)
            executor.scheduler.run(executor.run_chain, values, locks)
        else:
            for turn, begin, end in self._pipeline:
                with turn:
                    executor.run_steps(values, begin, end)
        return self._filled(executor.finish(values))


class DirectRunner(Runner):
    """Calls the session of the one subgraph node that is the whole model."""

    def __init__(self, graph: Graph, node: Node, cancel: Cancel) -> None:
        """Open a session of the node of a graph that `is_direct`."""
        super().__init__(cancel)
        assert node.op is not None, "is_direct checked it"
        self._node = node
        self._fallback = fallback_of(node)
        self._session = open_session(node.op, self._fallback)
        cancel.watch(self._session)
        position = {value: k for k, value in enumerate(graph.inputs)}
        self._template: list[Parameter | None] = [
            None if v is None else v.parameter for v in node.inputs
        ]
        self._sources = [
            (k, position[v]) for k, v in enumerate(node.inputs) if v is not None and v in position
        ]
        made = {value: k for k, value in enumerate(node.outputs)}
        picks = [made[value] for value in graph.outputs]
        same = picks == list(range(len(node.outputs)))
        self._picks = None if same else picks
        # The same order, weights left out: what the caller gave can be handed on as it is.
        in_order = [v for v in node.inputs if v is not None and v.parameter is None]
        as_given = in_order == list(graph.inputs) and same
        self._run_given = self._session.given_only() if as_given else None
        self.repeat = self._session.repeat() if as_given else None

    def _arranged(self, inputs: Sequence[Any]) -> list[Any]:
        """Return one item for each input of the node, weights among them."""
        arranged: list[Any] = self._template.copy()
        for target, source in self._sources:
            if inputs[source] is not None:
                arranged[target] = inputs[source]
        return arranged

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if self._run_given is not None:
            try:
                return self._run_given(inputs, self.outputs)
            except Exception as error:
                return self._recovered_given(error, inputs)
        given = self._arranged(inputs)
        try:
            if self._picks is None:
                return self._session(given, self.outputs)
            results = self._session(given)
        except Exception as error:
            results = self._recovered(error, given)
            if self._picks is None:
                return results if self.outputs is None else fill_outputs(results, self.outputs)
        results = [results[k] for k in self._picks]
        return results if self.outputs is None else fill_outputs(results, self.outputs)

    def stages(self, default: TaskExecutor, following: TaskExecutor) -> list[Stage]:
        halves = None if self._run_given is None else self._session.halves()
        if halves is None:
            return [Stage(default, self.run)]
        begin, end = halves

        def first(inputs: Sequence[Any]) -> Any:
            if self._run_given is None:  # another device has taken over
                return None, self.run(inputs)
            try:
                return inputs, begin(inputs, self.outputs)
            except Exception as error:
                return None, self._recovered_given(error, inputs)

        def second(begun: tuple[Any, Any]) -> Sequence[Any]:
            inputs, state = begun
            if inputs is None:
                results: Sequence[Any] = state
                return results
            try:
                return end(state)
            except Exception as error:
                return self._recovered_given(error, inputs)

        return [Stage(default, first), Stage(following, second)]

    def _recovered_given(self, error: Exception, inputs: Sequence[Any]) -> Sequence[Any]:
        results = self._recovered(error, self._arranged(inputs))
        return results if self.outputs is None else fill_outputs(results, self.outputs)

    def _recovered(self, error: Exception, given: Sequence[Any]) -> Sequence[Any]:
        """Let another device make the run; raise if there is none."""
        fallback = self._fallback
        session = None if fallback is None else fallback.recover(error, self._session)
        if session is None:
            explain_failure(error, self._node)
        self.cancel.watch(session)
        self._session = session
        self._run_given = self.repeat = None
        try:
            return session(given)
        except Exception as following:
            explain_failure(following, self._node)

    def sessions(self) -> dict[str, Session]:
        return {self._node.name: self._session}

    def profile(self) -> list[ProfileEntry]:
        return self._session.profile()


class TimedRunner(Runner):
    """Measures whole runs of a device's own runner, if that does not measure what is inside."""

    def __init__(self, inner: Runner, model: str, device: str) -> None:
        """Measure ``inner``, which runs ``model`` on ``device``."""
        super().__init__(inner.cancel)
        self._inner = inner
        self._names = model, device
        self._span = 0.0, 0.0
        self._thread = 0

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        self._inner.outputs = self.outputs
        start, self._thread = time.perf_counter(), threading.get_ident()
        results = self._inner.run(inputs)
        self._span = start, time.perf_counter()
        return results

    def sessions(self) -> dict[str, Session]:
        return self._inner.sessions()

    def profile(self) -> list[ProfileEntry]:
        (model, device), (start, end) = self._names, self._span
        whole = ProfileEntry(
            model,
            "model",
            device,
            type(self._inner).__name__,
            end - start,
            start=start,
            end=end,
            thread=self._thread,
        )
        return self._inner.profile() or [whole]


def is_direct(graph: Graph) -> Node | None:
    """Return the node of a graph that is one subgraph node and nothing else, or None."""
    if len(graph.nodes) != 1:
        return None
    node = graph.nodes[0]
    plain = all(v.producer is node for v in graph.outputs) and not graph.captures
    return node if node.op is not None and plain else None
