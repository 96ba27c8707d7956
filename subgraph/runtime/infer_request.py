"""Inference requests: run a compiled model synchronously, asynchronously, in asyncio.

A request owns a `Runner`. Each run checks its inputs and uses the model's current `Snapshot` of the
parameters to its end. The stages of asynchronous runs are run by task executors. After the last
stage the callback runs, and then those that wait for the run continue.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any

import attrs

from subgraph.errors import (
    ConfigError,
    DeviceError,
    RequestCancelledError,
    RequestError,
    SubgraphError,
    described,
    require_type,
)
from subgraph.graph.parameters import Snapshot, call_pinned, pinned
from subgraph.operators.subgraph_op import ProfileEntry
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.request_state import RequestState
from subgraph.runtime.requested_model import RequestedModel
from subgraph.runtime.runner import Stage, separate
from subgraph.runtime.signature import Results, port_position
from subgraph.runtime.task_executor import TaskExecutor, lent
from subgraph.system.forking import free_in_child

_log = logging.getLogger("subgraph")
Callback = Callable[..., Any]
# Callbacks of all models; each gets a thread at once, so that none waits for another to end.
_callbacks = TaskExecutor("callbacks", threads=None)


class AsyncRun:
    """One asynchronous run: its snapshot, its results or error, and its listeners.

    Attributes:
        begun: Whether its first stage has begun; it then ends with the callback.
        dropped: Whether it must not begin: an interrupt came while it was started.
        userdata: What an `InferQueue` passes to its callback.
    """

    __slots__ = (
        *("begun", "done", "dropped", "error", "listeners", "process", "results", "snapshot"),
        "userdata",
    )

    def __init__(self, userdata: Any = None) -> None:
        """Make a run that is not started."""
        self.userdata = userdata
        self.begun = self.dropped = False
        self.snapshot: Snapshot | None = None
        self.process = os.getpid()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.results: Results | None = None
        self.listeners: list[Callable[[], None]] = []


class InferRequest:
    """Runs one inference at a time with memory of its own; made by ``create_infer_request``.

    Attributes:
        model: The model that it runs.
        id: Its number among the requests of the model, from 1, as in errors and profiles.
    """

    def __init__(self, model: RequestedModel) -> None:
        """Open a request of ``model``."""
        self.model = model
        self.id = model.next_request_id()
        self._cancel = Cancel()
        self._runner = model.create_runner(self._cancel)
        self._stages = model.checked_stages(self._runner)
        # Reentrant, because a signal handler may call `cancel` while its thread holds the lock.
        self._lock = free_in_child(threading.RLock())
        # Identifier of the process in which a run is going on, 0 for none. A forked child inherits
        # the request but not the run.
        self._busy_in = 0
        self._owner: Any = None  # the object that made it busy, known before anything else is done
        self._run: AsyncRun | None = None
        self._last: tuple[list[Any], Snapshot] | None = None
        self._results: Results | None = None
        self._inputs: dict[str, Any] = {}
        self._callback: Callback | None = None
        self._callback_arguments = 0
        # Threads that are in a callback of the request: a callback may start the request again, and
        # that run's callback may begin before this one ends.
        self._callback_threads: set[int] = set()

    def infer(self, inputs: Any = None, /, **named: Any) -> Results:
        """Run the model and return its results.

        Args:
            inputs: A dict by name, a list by position, or one array; None: those of `set_input`.
            named: Inputs by name.

        Raises:
            RequestError: The request is busy.
            MissingInputError: An input is missing, or a name is not that of an input.
            ShapeError: The dtype or shape of an input is wrong.
            DeviceError: The run failed.
            RequestCancelledError: Another thread called `cancel`.
        """
        bound, snapshot = self._bound(inputs, named)
        try:  # an interrupt may come at any time, also before `_begin` has returned
            self._begin(bound)
            self._last = bound, snapshot
            self._run = self._results = None
            try:
                values = call_pinned(snapshot, self._run_stages, bound)
                if self._cancel.wanted:
                    self._refuse_if_cancelled()
                self._results = results = self.model.wrap(values)
            except BaseException as error:
                self._name_in(error)
                raise
        finally:
            if self._owner is bound:
                self._owner, self._busy_in = None, 0
        return results

    @property
    def _label(self) -> str:
        return f"request {self.id} of model {self.model.name!r}"

    def _name_in(self, error: BaseException) -> None:
        """Add a note with the request to an error of its run."""
        error.add_note(f"in {self._label}")

    def _refuse_if_cancelled(self) -> None:
        """Raise if the run was cancelled, because its results may be incomplete."""
        if self._cancel.wanted:
            raise RequestCancelledError(f"{self._label} was cancelled before it finished")

    def _run_stages(self, state: Any) -> Any:
        for stage in self._stages:
            state = stage.function(state)
        return state

    def _bound(self, inputs: Any, named: Mapping[str, Any]) -> tuple[list[Any], Snapshot]:
        try:
            if inputs is None:
                bound, snapshot = self.model.bind((), {**self._inputs, **named})
            else:
                bound, snapshot = self.model.bind((inputs,), named)
        except SubgraphError as error:
            self._name_in(error)
            raise
        outputs = self._runner.outputs
        return (bound if outputs is None else separate(bound, outputs)), snapshot

    def _begin(self, owner: Any) -> None:
        # The flags are tested here, before the methods are called that test them again, because
        # calls of methods are a large part of a small model's run.
        with self._lock:
            if self._busy_in:
                self._refuse_if_busy()
            if self._cancel.wanted:
                self._cancel.reset()
            self._owner, self._busy_in = owner, os.getpid()  # from here on `cancel` counts

    def _refuse_if_busy(self) -> None:
        if self.is_busy:
            raise RequestError(
                f"{self._label} is busy: wait() for it, cancel() it, or use another request"
            )

    def start_async(self, inputs: Any = None, /, **named: Any) -> None:
        """Start a run and return at once.

        Args:
            inputs: As for `infer`. The arrays must not be changed during the run.
            named: Inputs by name.

        Raises:
            RequestError: The request is busy.
            MissingInputError: An input is missing, or a name is not that of an input.
            ShapeError: The dtype or shape of an input is wrong.
        """
        self.start(AsyncRun(), inputs, named)

    def start(self, run: AsyncRun, inputs: Any, named: Mapping[str, Any]) -> None:
        """Start a run; if this raises, the run is dropped, or has begun and ends as usual.

        Args:
            run: A new run.
            inputs: As for `start_async`.
            named: As for `start_async`.

        Raises:
            RequestError: The request is busy.
            MissingInputError: An input is missing, or a name is not that of an input.
            ShapeError: The dtype or shape of an input is wrong.
        """
        bound, snapshot = self._bound(inputs, named)
        run.snapshot = snapshot
        try:
            self._begin(run)
            self._last = bound, snapshot
            self._run, self._results = run, None
            self._submit(run, 0, bound)
        except BaseException:
            # Without a task nothing would ever mark the request as free.
            self.drop(run)
            raise

    def drop(self, run: AsyncRun) -> bool:
        """Return whether a run has not begun, which it then never does."""
        with self._lock:
            if run.begun:
                return False
            run.dropped = True
            if self._owner is run:
                self._owner, self._run, self._busy_in = None, None, 0
            return True

    def _submit(self, run: AsyncRun, number: int, state: Any) -> None:
        stage: Stage = self._stages[number]

        def work() -> None:
            with self._lock:
                if run.dropped:
                    return
                run.begun = True
            try:
                self._refuse_if_cancelled()
                with pinned(run.snapshot):
                    following = stage.function(state)
                if number + 1 < len(self._stages):
                    self._submit(run, number + 1, following)
                    return
                self._refuse_if_cancelled()
                run.results = self.model.wrap(following)
            except BaseException as error:
                self._name_in(error)
                run.error = error
            self._complete(run)

        stage.executor.submit(work)

    def _complete(self, run: AsyncRun) -> None:
        self._results = run.results
        # The callback is read while the request is busy; then `set_callback` may replace it.
        callback = self._callback
        self._busy_in = 0  # from here on the callback may start the request again
        if callback is None:
            self._release(run)
        else:
            try:
                _callbacks.submit(lambda: self._call_back(run, callback))
            except DeviceError:  # no thread can be started for callbacks
                self._call_back(run, callback)

    def _call_back(self, run: AsyncRun, callback: Callback) -> None:
        thread = threading.get_ident()
        self._callback_threads.add(thread)
        try:
            callback(*(self, run.error)[: self._callback_arguments])
        except BaseException as error:
            _log.exception("the callback of %s raised", self._label)
            error.add_note(f"raised by the callback of {self._label}")
            if run.error is None:
                run.error = error
            else:
                run.error.add_note(f"and its callback raised {described(error)}")
        finally:
            self._callback_threads.discard(thread)
            self._release(run)

    def _release(self, run: AsyncRun) -> None:
        with self._lock:
            run.done.set()
            # `__await__` tests `done` and adds its listener under the same lock, so that none is
            # missed.
            listeners, run.listeners = run.listeners, []
        for listener in listeners:
            listener()

    def wait(self, timeout: float | None = None) -> Results | None:
        """Wait for the run that `start_async` began, and for its callback.

        Args:
            timeout: Most seconds to wait; None: without limit; 0: do not wait.

        Returns:
            The results, or None if the run has not ended in this time.

        Raises:
            ConfigError: ``timeout`` is not a number.
            RequestError: No run was started, or it was started before this process was forked.
            RequestCancelledError: The run was cancelled.
            Exception: The error of the run or of the callback.
        """
        if timeout is not None:
            require_type(timeout, (int, float), ConfigError, "seconds to wait, or None")
            if math.isnan(timeout):
                raise ConfigError("got NaN as seconds to wait; give a number, or None")
            timeout = min(timeout, threading.TIMEOUT_MAX)  # Python waits no longer; also for inf
        run = self._started()
        # `done` is set after the callback, so that a callback that waits for its own run would
        # never end.
        inside_callback = threading.get_ident() in self._callback_threads
        if not inside_callback and not run.done.is_set():
            with lent():
                if not run.done.wait(timeout):
                    return None
        if run.error is not None:
            raise run.error
        return run.results

    def _started(self) -> AsyncRun:
        run = self._run
        if run is None:
            raise RequestError(f"{self._label} was not started: call start_async() first")
        if not run.done.is_set() and run.process != os.getpid():
            raise RequestError(
                f"{self._label} was running when this process was forked, and runs in its parent "
                "alone: call start_async() again"
            )
        return run

    def __await__(self) -> Generator[Any, None, Results]:
        """Wait in asyncio for the run that `start_async` began; return its results."""
        import asyncio

        run = self._started()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            # The task that waits may have been cancelled meanwhile.
            if not future.done():
                future.set_result(None)

        def listen() -> None:
            # The loop may have been closed before the run ended, as after a timeout of
            # `asyncio.run`.
            with suppress(RuntimeError):
                # Futures of asyncio may be changed in the thread of their loop only.
                loop.call_soon_threadsafe(wake)

        with self._lock:
            if not run.done.is_set():
                run.listeners.append(listen)
            else:
                future.set_result(None)
        yield from future
        if run.error is not None:
            raise run.error
        assert run.results is not None, "a run without error has results"
        return run.results

    def cancel(self) -> None:
        """Request that a run ends before its next step; `wait`, or `infer`, then raises."""
        with self._lock:
            if self.is_busy:
                self._cancel.request()

    def set_callback(self, callback: Callback | None) -> None:
        """Call ``callback`` when an asynchronous run has ended, in a thread of its own.

        Its arguments are (this request, the error or None), or the first of them, or none, as its
        signature allows. An error that it raises is logged, and raised again by `wait`. Callbacks
        of different requests may run at the same time. `wait` also waits for the callback.

        Raises:
            RequestError: The request is busy.
            ConfigError: ``callback`` cannot be called.
        """
        if callback is not None and not callable(callback):  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigError(f"a callback is a function, or None for none; got {callback!r}")
        with self._lock:
            self._refuse_if_busy()
            self._callback = callback
            self._callback_arguments = 0 if callback is None else _positional(callback)

    @property
    def results(self) -> Results:
        """The results of the last run.

        Raises:
            RequestError: There are none: no run was started, it has not ended, or it failed.
        """
        results = self._results
        if results is None:
            state = (
                "is still running" if self.is_busy else "has no results: it did not run or failed"
            )
            raise RequestError(f"{self._label} {state}")
        return results

    def get_output(self, key: str | int = 0) -> Any:
        """Return one output of the last run, by name or position."""
        return self.results[key]

    def set_input(self, key: str | int, value: Any) -> None:
        """Set the value of an input for runs that are started without inputs.

        Args:
            key: Name or position of the input.
            value: The value.

        Raises:
            MissingInputError: The model has no such input.
            RequestError: The request is busy.
        """
        self._check_idle()
        ports = self.model.inputs
        self._inputs[ports[port_position(ports, key, "input")].name] = value

    def get_input(self, key: str | int = 0) -> Any:
        """Return the value of an input: that of `set_input`, or else that of the last run.

        Args:
            key: Name or position of the input.

        Raises:
            MissingInputError: The model has no such input.
            RequestError: It was not set, and no run was started.
        """
        position = port_position(self.model.inputs, key, "input")
        port = self.model.inputs[position]
        if port.name in self._inputs:
            return self._inputs[port.name]
        if self._last is None:
            raise RequestError(f"{self._label} has no input {port.name!r} yet: call set_input()")
        bound, snapshot = self._last
        value = self.model.input_of_run(bound, position)
        if value is not None or port.default is None:
            return value
        with pinned(snapshot):  # which holds an array that was passed instead of the default
            return port.default.array

    def query_state(self) -> list[RequestState]:
        """Return the states that subgraph ops carry from one run of this request to the next.

        An op that creates its states in its first run has none before.

        Raises:
            RequestError: The request is busy.
        """
        self._check_idle()
        runner = self._runner
        return [RequestState(name, runner, self._check_idle) for name in runner.states()]

    def reset_state(self) -> None:
        """Let the next run begin with the initial states.

        Raises:
            RequestError: The request is busy.
        """
        self._check_idle()
        self._runner.set_states({})

    def _check_idle(self) -> None:
        with self._lock:
            self._refuse_if_busy()

    def set_output(self, key: str | int, array: Any) -> None:
        """Set the array into which runs write an output.

        Args:
            key: Name or position of the output.
            array: The array; None: each run creates a new one.

        Raises:
            MissingInputError: The model has no such output.
            ShapeError: The array is not writable, its dtype or shape can never fit, or an element
                of it shares memory with another one or with the array of another output.
            RequestError: The request is busy.
        """
        self._check_idle()
        self._runner.outputs = self.model.preset(self._runner.outputs, key, array)

    @property
    def is_busy(self) -> bool:
        """Whether a run is going on."""
        return self._busy_in != 0 and self._busy_in == os.getpid()

    def profile(self) -> list[ProfileEntry]:
        """Return the time of each node in the last run; each entry has this request's id.

        With ``ENABLE_PROFILING`` every run is measured. Without it, the model runs again on the
        last inputs to be measured.

        Raises:
            RequestError: The request is busy, or has not run.
        """
        self._check_idle()
        entries = self._runner.profile() or self._measured_again()
        return [attrs.evolve(entry, request=self.id) for entry in entries]

    def _measured_again(self) -> list[ProfileEntry]:
        if self._last is None:
            raise RequestError(f"{self._label} has not run: there is nothing to profile")
        bound, snapshot = self._last
        runner = self.model.create_profiler()
        with pinned(snapshot):
            runner.run(bound)  # the first run also makes plans and packs weights
            runner.run(bound)
        return runner.profile()


def _positional(callback: Callback) -> int:
    """Return how many positional arguments, up to two, a callback takes."""
    try:
        parameters = inspect.signature(callback).parameters.values()
    except (TypeError, ValueError):
        return 0
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 2
    return min(2, sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters))
