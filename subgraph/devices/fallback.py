"""Fallback: other devices run a region after its own op failed.

If a run raises an error that is not the caller's fault, the next device repeats the run. If that
succeeds, the region's own op has failed; if it raises too, its error is raised. After
``FALLBACK_FAILURES`` failures in a row the region's breaker opens: runs go to the next device at
once, and after ``FALLBACK_RETRY`` seconds one run tries the own op again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.devices.calls import compile_on, compile_queried
from subgraph.devices.device import Device, DeviceList
from subgraph.devices.model_op import op_of
from subgraph.errors import (
    BlobError,
    DeviceError,
    LimitError,
    ModelError,
    RequestCancelledError,
    SubgraphError,
    UnsupportedOpError,
    message_of,
)
from subgraph.graph.graph import Graph, Node
from subgraph.graph.result_arrays import fill_outputs, is_array, is_list
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import (
    DefaultSubgraphOp,
    ProfileEntry,
    Session,
    SubgraphOp,
    open_own,
    open_session,
)
from subgraph.runtime.breaker import Breaker
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.system.forking import free_in_child

_log = logging.getLogger("subgraph")
# Errors that the caller's inputs, limits or cancellation cause.
_CALLER_ERRORS = (BlobError, LimitError, ModelError, RequestCancelledError)


def is_final(error: Exception) -> bool:
    """Return whether an error has to be raised, because no other device may repeat the run.

    Every device would raise an error that the caller caused. A DeviceError that does not say that
    the device is lost reports invalid results of an op, which the op's author has to see.
    """
    of_op = isinstance(error, DeviceError) and not error.lost
    return of_op or isinstance(error, _CALLER_ERRORS)


def compile_region(
    subgraph: Graph, device: Device, others: DeviceList
) -> tuple[SubgraphOp, Device]:
    """Compile a region for the first device that can; those after it become its fallback.

    Args:
        subgraph: The region.
        device: The device whose query supports the region.
        others: More devices, and the options of all of them and of the breaker.

    Returns:
        The op, and the device that compiled it.

    Raises:
        DeviceError: the last device failed.
        UnsupportedOpError: the last device does not support a node.
    """
    candidates = [device, *others.devices]
    for number, candidate in enumerate(candidates):
        config = others.config_of(candidate)
        # The first device was queried before the partition.
        compile_model = compile_queried if number == 0 else compile_on
        try:
            op = _op_on(candidate, subgraph, compile_model(candidate, subgraph, config))
        except (DeviceError, UnsupportedOpError) as error:
            if number + 1 == len(candidates):
                raise
            _log.warning(
                "device %s cannot compile subgraph %r and leaves it to the next: %s",
                candidate.name,
                subgraph.name,
                str(error),
            )
            continue
        rest = attrs.evolve(others, devices=candidates[number + 1 :])
        op.fallback = DeviceFallback(subgraph, op, rest)
        return op, candidate
    raise AssertionError("the last candidate returned or raised")


def _op_on(device: Device, subgraph: Graph, model: CompiledModel) -> SubgraphOp:
    """Return the op of a region that a device compiled."""
    op = op_of(subgraph, model, device.name)
    op.concurrent = op.concurrent or device.concurrent_regions
    return op


class DeviceFallback:
    """The devices that run a region if its own op fails, and the region's breaker.

    Attributes:
        checks: Whether results with NaN or Inf are compared with the reference.
    """

    def __init__(self, subgraph: Graph, op: SubgraphOp, others: DeviceList) -> None:
        """Create the fallback of one region.

        Args:
            subgraph: The region.
            op: The region's own op.
            others: The devices that may run it instead, their options and those of the breaker.
        """
        self._breaker = Breaker(others.options)
        self.checks: bool = others.options.FALLBACK_CHECK
        self._subgraph = subgraph
        self._device = type(op).__name__ if op.device == SubgraphOp.device else op.device
        self._others = others
        self._lock = free_in_child(threading.Lock())
        self._next: SubgraphOp | None = None

    @property
    def failures(self) -> int:
        """Number of failures of the region's own op."""
        return self._breaker.failures

    @property
    def cause(self) -> str:
        """Text of the own op's last error."""
        return self._breaker.cause

    @property
    def replacement(self) -> SubgraphOp | None:
        """The op that runs the region while the breaker is open, else None."""
        return self._next if self._breaker.is_open else None

    @property
    def state(self) -> str:
        """Failures of the own op as text for profiles; empty if its last run succeeded."""
        breaker = self._breaker
        if self.replacement is None:
            return f"{self._device} failed: {breaker.cause}" if breaker.in_a_row else ""
        return f"{self._device} failed {breaker.failures} times, {breaker.again}: {breaker.cause}"

    def session(self, op: SubgraphOp) -> Session | None:
        """Return a session that follows the breaker; None if the op's own session suffices."""
        return FallbackSession(op, self) if self.checks or self._breaker.is_open else None

    def replace_session(self, op: SubgraphOp, error: Exception) -> Session | None:
        """Return a session for an op that could not open its own; None if no device can run it."""
        if is_final(error) or self.next_op() is None:
            return None
        return FallbackSession(op, self, failure=error)

    def recover(self, error: Exception, session: Session) -> Session | None:
        """Return a session for a failed run and later ones; None if no device can make them."""
        if isinstance(session, FallbackSession) or is_final(error) or self.next_op() is None:
            return None
        return FallbackSession(session.op, self, session, error)

    def may_try(self) -> bool:
        """Return whether a run may use the region's own op: see `Breaker.may_try`."""
        return self._breaker.may_try()

    def succeeded(self) -> None:
        """Record that a run of the region's own op succeeded."""
        if self._breaker.succeeded():
            _log.warning("subgraph %r runs on %s again", self._subgraph.name, self._device)

    def next_op(self) -> SubgraphOp | None:
        """Return the op of the next device that compiles the region; None if there is none."""
        if self._next is None and self._others.devices:
            # Several requests may fail at once; the region is compiled once for the next device.
            with self._lock:
                self._next = self._next or self._compiled()
        return self._next

    def failed(self, error: Exception, op: SubgraphOp) -> None:
        """Count a failure of the region's own op.

        Args:
            error: Its error.
            op: The op that made the run instead.
        """
        breaker, next_op = self._breaker, self._next
        new, opened = breaker.failed(error, may_open=next_op is not None)
        if new:
            # The record has the error's text only: the error would keep the run's arrays alive.
            _log.warning(
                "subgraph %r failed on device %s; the run continues on %s: %s",
                self._subgraph.name,
                self._device,
                "REFERENCE" if op.device == SubgraphOp.device else op.device,
                breaker.cause,
            )
        if opened and next_op is not None:
            _log.warning(
                "subgraph %r failed %d times in a row on %s and runs on %s from now on%s",
                self._subgraph.name,
                breaker.in_a_row,
                self._device,
                next_op.device,
                "" if breaker.pause == math.inf else f"; tried again after {breaker.pause:g} s",
            )

    def _compiled(self) -> SubgraphOp | None:
        """Compile the region for the next device that can; those after it are its fallback."""
        others = self._others
        for number, device in enumerate(others.devices):
            try:
                model = compile_on(device, self._subgraph, others.config_of(device))
                op = _op_on(device, self._subgraph, model)
            except SubgraphError:
                continue
            # Results are compared on the region's own device only: the next device is
            # often the reference itself.
            options = attrs.evolve(others.options, FALLBACK_CHECK=False)
            rest = attrs.evolve(others, devices=others.devices[number + 1 :], options=options)
            op.fallback = DeviceFallback(self._subgraph, op, rest)
            return op
        return None


class FallbackSession(Session):
    """Runs a region by its own op or by a fallback device, as the breaker decides."""

    def __init__(
        self,
        op: SubgraphOp,
        fallback: DeviceFallback,
        own: Session | None = None,
        failure: Exception | None = None,
    ) -> None:
        """Create the session of one request.

        Args:
            op: The region's own op.
            fallback: The region's fallback.
            own: A session of the op that has the states of the request; None opens one if needed.
            failure: Error of the op in the run that this session makes first; None for none.
        """
        super().__init__(op)
        self._own_op = op
        self._own = own
        self._fallback = fallback
        self._failure = failure
        self._others: dict[SubgraphOp, Session] = {}
        self._last: Session | None = None  # made the last run; None: the reference did
        self._state_session = own  # has the states with which the next run begins
        # The states to set in the first session, while none has been opened.
        self._initial_states: Mapping[str, Array] = {}
        self._cancelled = self._measured = False

    def __call__(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        failure, self._failure = self._failure, None
        if failure is not None:
            return self._run_after(failure, inputs, outputs)
        op = None if self._fallback.may_try() else self._fallback.replacement
        if op is not None:
            return self._run_other(op, inputs, outputs)
        try:
            return self._run_own(inputs, outputs)
        except Exception as error:
            if is_final(error):
                raise
            return self._run_after(error, inputs, outputs)

    def _run_after(
        self, error: Exception, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> Sequence[Any]:
        """Make a run in which the own op failed on the next device; raise if that fails too."""
        op = self._fallback.next_op()
        if op is None:
            raise error
        try:
            results = self._run_other(op, inputs, outputs)
        except Exception as second:
            second.add_note(f"{self._own_op.device} failed before: {message_of(error)}")
            raise
        # Counted only now: if the other device fails as well, the cause is more likely in the
        # inputs than in the device.
        self._fallback.failed(error, op)
        return results

    def _run_own(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> Sequence[Any]:
        if self._own is None or self._fallback.replacement is not None:
            # After failures in a row the device's state is not trusted: a new session.
            self._own = self._opened(open_own(self._own_op))
        self._last, self.op = self._own, self._own_op
        self._carry_states(self._own)
        results = self._own(inputs, outputs)
        self._state_session = self._own
        # The reference cannot repeat a run that has changed the states of the region.
        if self._fallback.checks and not (all_finite(results) or self._own.states()):
            results = self._checked(inputs, results)
            return results if outputs is None else fill_outputs(results, outputs)
        self._fallback.succeeded()
        return results

    def _checked(self, inputs: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """Return the results, or those of the reference if it is finite where they are not."""
        reference = DefaultSubgraphOp(self._own_op.subgraph)
        expected = self._opened(reference.session())(inputs)
        error = nonfinite_error(reference.subgraph, results, expected)
        if error is None:
            self._fallback.succeeded()
            return results
        self._fallback.next_op()  # the breaker opens only if there is one
        self._fallback.failed(error, reference)
        self._last, self.op = None, reference
        return expected

    def _carry_states(self, session: Session) -> None:
        """Copy the states of the request to a session, if another session has them."""
        holder = self._state_session
        if holder is not session:
            states = self._initial_states if holder is None else holder.states()
            # A session that keeps states may have some of an earlier run, and has to get the empty
            # ones too.
            if states or type(session).states is not Session.states:
                session.set_states(states)

    def _run_other(
        self, op: SubgraphOp, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> Sequence[Any]:
        session = self._others.get(op)
        if session is None:
            made = open_session(op)
            if op.fallback is not None and not isinstance(made, FallbackSession):
                assert isinstance(op.fallback, DeviceFallback), "`_compiled` made it"
                made = FallbackSession(op, op.fallback, made)  # this op may fail too
            session = self._others[op] = self._opened(made)
        self._last, self.op = session, op
        self._carry_states(session)
        results = session(inputs, outputs)
        self._state_session = session
        return results

    def _opened(self, session: Session) -> Session:
        if self._measured:
            session.measure()
        if self._cancelled:
            session.cancel()
        return session

    def _sessions(self) -> Iterable[Session]:
        own = () if self._own is None else (self._own,)
        return (*own, *self._others.values())

    def cancel(self) -> None:
        self._cancelled = True
        for session in self._sessions():
            session.cancel()

    def resume(self) -> None:
        self._cancelled = False
        for session in self._sessions():
            session.resume()

    def states(self) -> dict[str, Array]:
        holder = self._state_session
        return dict(self._initial_states) if holder is None else holder.states()

    def set_states(self, states: Mapping[str, Array]) -> None:
        if self._state_session is None:
            self._initial_states = dict(states)
        else:
            self._state_session.set_states(states)

    def measure(self) -> None:
        self._measured = True
        for session in self._sessions():
            session.measure()

    def profile(self) -> list[ProfileEntry]:
        inside = [] if self._last is None else self._last.profile()
        state = self._fallback.state
        return [attrs.evolve(entry, fallback=state or entry.fallback) for entry in inside]


def all_finite(results: Sequence[Any]) -> bool:
    """Return whether results have neither NaN nor Inf."""
    return all(map(_is_finite, results))


def nonfinite_error(
    graph: Graph, results: Sequence[Any], expected: Sequence[Any]
) -> DeviceError | None:
    """Return the error for results with NaN or Inf where the reference has none.

    Args:
        graph: The graph, for the names of its outputs.
        results: Results of a device, one for each output.
        expected: Results of the reference for the same inputs.

    Returns:
        The error; None if all elements that are not finite are not finite in ``expected`` either.
    """
    for value, result, reference in zip(graph.outputs, results, expected, strict=True):
        if not _is_finite(result) and _differs(result, reference):
            return DeviceError(f"output {value.name!r} has NaN or Inf where the reference has none")
    return None


def _is_finite(value: Any) -> bool:
    if is_list(value):
        return all(map(_is_finite, value))
    if not is_array(value) or value.dtype.kind in "biuOSUMm":
        return True
    return bool(np.isfinite(value).all())


def _differs(result: Any, reference: Any) -> bool:
    """Return whether a result has another shape, or is not finite where the reference is."""
    if is_list(result):
        return len(result) != len(reference) or any(map(_differs, result, reference))
    if result.shape != reference.shape:
        return True
    return bool((~np.isfinite(result) & np.isfinite(reference)).any())


def add_fallback(node: Node, others: DeviceList) -> None:
    """Let devices run a region if its op fails, unless it has a fallback already.

    An op that states types of its own computes something else than its inner graph; no device can
    then replace it.

    Args:
        node: The region's subgraph node.
        others: The devices, their options and those of the compiled model.
    """
    op = node.op
    known = node.fallback is not None or (op is not None and op.fallback is not None)
    if node.subgraph is None or op is None or known or op.says_types or not others.devices:
        return
    if others.options.RUNTIME_FALLBACK:
        node.fallback = DeviceFallback(node.subgraph, op, others)
