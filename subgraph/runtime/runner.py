"""Runners: the sessions and memory with which one request runs a compiled model.

If a model's graph is one subgraph node on the model's inputs, its runner calls the node's session
directly. Every other model is run by an `Executor`. An asynchronous run has one or more stages,
each with the task executor whose threads run it, so that stages of different requests overlap. Over
several devices, a run locks one device after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.errors import DeviceError, require_type
from subgraph.graph.graph import Graph, Node
from subgraph.graph.limits import limited, parse_bytes
from subgraph.graph.parameters import Parameter
from subgraph.graph.result_arrays import fill_outputs, is_array
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import (
    ProfileEntry,
    Repeat,
    Session,
    fallback_of,
    open_session,
)
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.executor import Executor, raise_failure, set_states_of, states_of
from subgraph.runtime.executor_plan import Plan
from subgraph.runtime.settings import DeviceOptions
from subgraph.runtime.task_executor import TaskExecutor

DeviceSteps = tuple[threading.Lock, int, int]  # a device's lock; first step under it, and end


@attrs.frozen
class Stage:
    """A part of a run.

    Attributes:
        executor: The task executor that runs it.
        function: Its argument is the result of the stage before; of the first stage, the inputs.
    """

    executor: TaskExecutor
    function: Callable[[Any], Any]

    def __attrs_post_init__(self) -> None:
        require_type(self.executor, TaskExecutor, DeviceError, "an sg.TaskExecutor")
        if not callable(self.function):  # pyright: ignore[reportUnnecessaryComparison]
            raise DeviceError(f"the function of a stage is {self.function!r}, which is none")


def checked_stages(stages: Any, owner: str, outputs: int) -> list[Stage]:
    """Return the stages that a device's own model defines, the last with a check of its results.

    Args:
        stages: The answer of ``create_stages``.
        owner: Name of the model's class, for messages.
        outputs: Number of outputs of the model.

    Raises:
        DeviceError: they are not a list of stages.
    """
    listed: list[Any] = list(stages) if type(stages) in (list, tuple) else []
    if not listed or not all(isinstance(stage, Stage) for stage in listed):
        raise DeviceError(
            f"{owner}.create_stages gave {stages!r}; it must return a list of one sg.Stage or more"
        )
    last: Stage = listed.pop()
    return [*listed, Stage(last.executor, checked_run(last.function, owner, outputs))]


def checked_run(run: Callable[[Any], Any], owner: str, outputs: int) -> Callable[[Any], Any]:
    """Return ``run`` with a check that it returns one result for each output.

    Args:
        run: The function of the last stage.
        owner: Name of the model's class, for messages.
        outputs: Number of outputs.
    """

    def checked(state: Any) -> Any:
        results = run(state)
        if type(results) not in (list, tuple) or len(results) != outputs:
            raise DeviceError(
                f"a run of {owner} gave {type(results).__name__}; it must return a list of its "
                f"results, one for each of {outputs} outputs"
            )
        return results

    return checked


class Runner:
    """One request's memory and sessions for a model.

    Attributes:
        outputs: Arrays that receive the results of the next runs; None for an output that gets a
            new array.
        cancel: Flag that ends a run early.
        repeat: A callable that repeats the last run for new inputs, with no snapshot pinned. It
            returns None if shapes or parameters differ from those of the last run. None if the
            model has no such callable.
    """

    repeat: Repeat | None = None

    def __init__(self, cancel: Cancel) -> None:
        """Create a runner whose runs end early once ``cancel`` is set."""
        self.cancel = cancel
        self.outputs: Sequence[Array | None] | None = None

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the model on one item for each input; return one for each output."""
        raise NotImplementedError

    def filled(self, results: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a run, in the arrays of ``outputs`` where there are some."""
        return results if self.outputs is None else fill_outputs(results, self.outputs)

    def profile(self) -> list[ProfileEntry]:
        """Return the times of the nodes in the last run."""
        return []

    def sessions(self) -> dict[str, Session]:
        """Return the sessions of the model's subgraph nodes, by name; see `Executor.sessions`."""
        return {}

    def states(self) -> dict[str, Array]:
        """Return the states of subgraph ops between runs of the request, by "node/name"."""
        return states_of(self.sessions())

    def set_states(self, states: Mapping[str, Array]) -> None:
        """Set the states with which the next run begins.

        Args:
            states: As `states` returns them; also from another runner of the model.

        Raises:
            DeviceError: A node does not exist, or does not have such states.
        """
        set_states_of(self.sessions(), states)

    def stages(self, default: TaskExecutor, following: TaskExecutor) -> list[Stage]:
        """Return the stages of an asynchronous run; one stage unless a child overrides this.

        Args:
            default: Its threads start a run.
            following: Its threads wait for work on a device.
        """
        return [Stage(default, self.run)]


def with_memory_budget(runner: Runner, options: DeviceOptions) -> Runner:
    """Return a runner whose runs, and each of their stages, have the memory budget of the options.

    Args:
        runner: The runner; without a budget it is returned as it is.
        options: Options of the model, with `MEMORY_LIMIT`.
    """
    memory = parse_bytes(options.MEMORY_LIMIT, "MEMORY_LIMIT")
    if not memory:
        return runner

    def budgeted(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(argument: Any) -> Any:
            with limited(memory):
                return function(argument)

        return run

    stages = runner.stages

    def budgeted_stages(default: TaskExecutor, following: TaskExecutor) -> list[Stage]:
        return [Stage(s.executor, budgeted(s.function)) for s in stages(default, following)]

    # For this runner only.
    vars(runner).update(run=budgeted(runner.run), stages=budgeted_stages)
    return runner


class GraphRunner(Runner):
    """Runs the model's graph by an executor."""

    def __init__(
        self,
        plan: Plan,
        cancel: Cancel,
        *,
        profiling: bool = False,
        pipeline: Sequence[DeviceSteps] = (),
    ) -> None:
        """Prepare to run a plan.

        Args:
            plan: The plan.
            cancel: Flag that ends a run early.
            profiling: Whether runs measure every node.
            pipeline: The devices' locks and steps, in order, for asynchronous runs.
        """
        super().__init__(cancel)
        self._executor = Executor(plan, profiling=profiling, cancel=cancel)
        self._pipeline = pipeline

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return self.filled(self._executor.run(inputs))

    def sessions(self) -> dict[str, Session]:
        return self._executor.sessions()

    def profile(self) -> list[ProfileEntry]:
        return self._executor.profile()

    def stages(self, default: TaskExecutor, following: TaskExecutor) -> list[Stage]:
        return [Stage(default, self._run_pipelined if self._pipeline else self.run)]

    def _run_pipelined(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run with one request at a time on each device, so that different requests overlap.

        Locking a device takes far less time than handing the request to a thread of the device.
        """
        executor, run = self._executor, self._walk_pipeline
        return executor.run_with_rollback(run, inputs) if executor.stateful else run(inputs)

    def _walk_pipeline(self, inputs: Sequence[Any]) -> Sequence[Any]:
        executor = self._executor
        values = executor.start(inputs)
        if executor.scheduler is not None:
            locks = executor.scheduler.schedule.locks(self._pipeline)
            executor.scheduler.run(executor.run_chain, values, locks)
        else:
            # One lock is held at a time, so that requests cannot wait for each other in a circle.
            for lock, begin, end in self._pipeline:
                with lock:
                    executor.run_steps(values, begin, end)
        return self.filled(executor.finish(values))


class DirectRunner(Runner):
    """Calls the session of the only node of a model, a subgraph node."""

    def __init__(self, node: Node, cancel: Cancel) -> None:
        """Open a session of the node that `is_direct` returned for a graph."""
        super().__init__(cancel)
        assert node.op is not None, "is_direct checked it"
        self._node = node
        self._fallback = fallback_of(node)
        self._session = open_session(node.op, self._fallback)
        cancel.watch(self._session)
        self._template: list[Parameter | None] = [
            None if v is None else v.parameter for v in node.inputs
        ]
        # Positions of the model's inputs among the node's.
        self._data = [k for k, v in enumerate(node.inputs) if v is not None and v.parameter is None]
        self._run_inputs = self._session.run_inputs()
        self.repeat = self._session.repeat()

    def _arranged(self, inputs: Sequence[Any]) -> list[Any]:
        """Return one item for each input of the node, weights included."""
        arranged: list[Any] = self._template.copy()
        for position, item in zip(self._data, inputs, strict=True):
            arranged[position] = item
        return arranged

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        try:
            if self._run_inputs is not None:
                return self._run_inputs(inputs, self.outputs)
            return self._session(self._arranged(inputs), self.outputs)
        except Exception as error:
            return self._recovered(error, inputs)

    def stages(self, default: TaskExecutor, following: TaskExecutor) -> list[Stage]:
        both = None if self._run_inputs is None else self._session.enqueue_finish()
        if both is None:
            return [Stage(default, self.run)]
        enqueue, finish = both

        def first(inputs: Sequence[Any]) -> Any:
            if self._run_inputs is None:  # another device runs the node since it failed
                return None, self.run(inputs)
            try:
                return inputs, enqueue(inputs, self.outputs)
            except Exception as error:
                return None, self._recovered(error, inputs)

        def second(begun: tuple[Any, Any]) -> Sequence[Any]:
            inputs, state = begun
            # The first stage has run everything on the fallback device.
            if inputs is None:
                results: Sequence[Any] = state
                return results
            try:
                return finish(state)
            except Exception as error:
                return self._recovered(error, inputs)

        return [Stage(default, first), Stage(following, second)]

    def _recovered(self, error: Exception, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run on the fallback device; raise the error if there is none."""
        fallback = self._fallback
        session = None if fallback is None else fallback.recover(error, self._session)
        if session is None:
            raise_failure(error, self._node, self._session)
        self.cancel.watch(session)
        self._session = session
        # Both belong to the failed session.
        self._run_inputs = self.repeat = None
        try:
            return self.filled(session(self._arranged(inputs)))
        except Exception as second:
            raise_failure(second, self._node, session)

    def sessions(self) -> dict[str, Session]:
        return {self._node.name: self._session}

    def profile(self) -> list[ProfileEntry]:
        return self._session.profile()


class TimedRunner(Runner):
    """Measures whole runs of a device's own runner, if that does not measure its nodes."""

    def __init__(self, inner: Runner, model: str, device: str) -> None:
        """Measure a runner.

        Args:
            inner: The runner.
            model: Name of its model, for the profile.
            device: Name of its device, for the profile.
        """
        super().__init__(inner.cancel)
        self._inner = inner
        self._names = model, device
        self._span = 0.0, 0.0
        self._thread = 0

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        # The inner runner writes the results, so that it needs the caller's arrays.
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


def separate(inputs: Sequence[Any], outputs: Sequence[Array | None]) -> list[Any]:
    """Return the inputs of a run; an array that shares memory with an output's is copied.

    Otherwise the run would read what it has written.
    """
    targets = [array for array in outputs if array is not None]
    return [
        np.array(item)
        if is_array(item) and any(np.may_share_memory(item, array) for array in targets)
        else item
        for item in inputs
    ]


def is_direct(graph: Graph) -> Node | None:
    """Return the node of a graph that is one subgraph node; None for other graphs.

    The node's inputs that are no weights are the graph's inputs, and its outputs the graph's.
    """
    if len(graph.nodes) != 1 or graph.captures:
        return None
    node = graph.nodes[0]
    data = [v for v in node.inputs if v is not None and v.parameter is None]
    same = data == list(graph.inputs) and list(node.outputs) == list(graph.outputs)
    return node if node.op is not None and same else None
