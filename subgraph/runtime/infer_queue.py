"""A pool of inference requests for asynchronous runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

from subgraph.errors import ConfigError, DeviceError, described
from subgraph.runtime.infer_request import AsyncRun, Callback, InferRequest
from subgraph.runtime.requested_model import QueuedModel
from subgraph.runtime.task_executor import lent
from subgraph.system.forking import free_in_child


class InferQueue:
    """A pool of requests; each run uses the next free request.

    Attributes:
        requests: The requests.
    """

    def __init__(self, model: QueuedModel, jobs: int = 0) -> None:
        """Create the requests.

        Args:
            model: The model.
            jobs: Number of requests; 0: the model's ``OPTIMAL_NUMBER_OF_INFER_REQUESTS``.

        Raises:
            ConfigError: ``jobs`` is negative or not an integer, or ``model`` is not a model.
        """
        if not isinstance(jobs, int) or jobs < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a queue takes the number of its requests, 0 or more; got {jobs!r}")
        if not hasattr(model, "create_infer_request"):
            raise ConfigError(f"a queue makes requests of a compiled model; got {model!r}")
        count = jobs or int(model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        self.requests = [model.create_infer_request() for _ in range(count)]
        self._callback: Callback | None = None
        self._lock = free_in_child(threading.Lock())
        self._set_free()
        for number, request in enumerate(self.requests):
            request.set_callback(self._ended(number))

    def _set_free(self) -> None:
        """Begin with every request free and no run."""
        self._runs: list[AsyncRun | None] = [None] * len(self.requests)
        self._errors: list[BaseException] = []
        self._changed = threading.Condition()
        self._process = os.getpid()

    def _begin_in_child(self) -> None:
        """In a forked child, drop the runs of its parent."""
        if self._process != os.getpid():
            with self._lock:
                if self._process != os.getpid():
                    self._set_free()

    def _ended(self, number: int) -> Callback:
        def ended(request: InferRequest, error: BaseException | None) -> None:
            run, userdata = self._runs[number], None
            if run is not None:  # None: the caller started the request itself
                userdata, run.userdata = run.userdata, None
            try:
                if error is not None:
                    self._errors.append(error)
                elif self._callback is not None:
                    self._callback(request, userdata)
            except BaseException as raised:
                self._errors.append(raised)
            finally:
                with self._changed:
                    self._runs[number] = None
                    self._changed.notify_all()

        return ended

    def set_callback(self, callback: Callback) -> None:
        """Call ``callback(request, userdata)`` when a run has ended without error.

        Callbacks of several requests may run at the same time, each in a thread of its own.
        """
        self._callback = callback

    def start_async(self, inputs: Any = None, userdata: Any = None) -> None:
        """Start a run on a free request; wait for one while all are busy.

        Args:
            inputs: As for `InferRequest.infer`.
            userdata: Second argument of the callback for this run.

        Raises:
            MissingInputError: An input is missing, or a name is not that of an input.
            ShapeError: The dtype or shape of an input is wrong.
        """
        self._begin_in_child()
        run = AsyncRun(userdata)
        try:
            with lent(), self._changed:
                self._changed.wait_for(lambda: self._claim(run))
            self.requests[self._runs.index(run)].start(run, inputs, {})
        except BaseException:
            self._give_up(run)
            raise

    def _claim(self, run: AsyncRun) -> bool:
        """Return whether a request is free, which then has this run."""
        free = None in self._runs
        if free:
            self._runs[self._runs.index(None)] = run
        return free

    def _give_up(self, run: AsyncRun) -> None:
        """Free the request of a run that has not begun; an interrupt may come at any time."""
        with self._changed:
            if run in self._runs:
                number = self._runs.index(run)
                if self.requests[number].drop(run):
                    self._runs[number] = None
                    self._changed.notify_all()

    def is_ready(self) -> bool:
        """Return whether a request is free."""
        self._begin_in_child()
        return None in self._runs

    def wait_all(self) -> None:
        """Wait until all runs have ended.

        Raises:
            Exception: The error of the only run or callback that failed.
            DeviceError: Several failed; the first error is its cause, and all are its notes.
        """
        self._begin_in_child()
        with lent(), self._changed:
            self._changed.wait_for(lambda: not any(self._runs))
        errors, self._errors = self._errors, []
        if len(errors) == 1:
            raise errors[0]
        if errors:
            summary = DeviceError(f"{len(errors)} runs of the queue failed; the first: {errors[0]}")
            for error in errors[:10]:
                summary.add_note(described(error))
            raise summary from errors[0]

    def __iter__(self) -> Iterator[InferRequest]:
        """Yield the requests."""
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)
