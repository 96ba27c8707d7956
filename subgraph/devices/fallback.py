"""What takes a region over when its op fails: the devices behind it, and the region's breaker.

Where a run raises, but for what is the caller's fault, the next device makes this run. If it can,
that is a failure of the region's own op; if it raises, too, it says what is wrong. After
``FALLBACK_FAILURES`` in a row the breaker opens: runs go to the next device at once, and after
``FALLBACK_RETRY`` seconds one run tries the region's own op again.
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
from subgraph.devices.device import Config, Device
from subgraph.devices.model_op import op_of
from subgraph.errors import (
    BlobError,
    DeviceError,
    LimitError,
    ModelError,
    RequestCancelledError,
    SubgraphError,
    UnsupportedOpError,
)
from subgraph.graph.graph import Graph, Node
from subgraph.graph.types import Array
from subgraph.operators.op_checks import is_array, is_list
from subgraph.operators.subgraph_op import (
    DefaultSubgraphOp,
    ProfileEntry,
    Session,
    SubgraphOp,
    fill_outputs,
    open_own,
    open_session,
)
from subgraph.runtime.breaker import Breaker
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.settings import DeviceOptions
from subgraph.system.forking import free_in_child

_log = logging.getLogger("subgraph")
# The caller's fault, or the caller's wish: every device would raise the same.
_CALLERS = (BlobError, LimitError, ModelError, RequestCancelledError)


def stands(error: Exception) -> bool:
    """Return whether no other device would help: the next one would raise the same.

    Also where an op gave results that are none, which its author has to see.
    """
    return isinstance(error, _CALLERS) or (isinstance(error, DeviceError) and not error.lost)


def compile_region(
    subgraph: Graph,
    device: Device,
    others: Sequence[Device],
    configs: Mapping[str, Config],
    options: DeviceOptions,
) -> tuple[SubgraphOp, Device]:
    """Return what runs a region: made by ``device``, or by the next of ``others`` that can.

    Also says which one it was. Those that are left take over when it fails.

    Raises:
        DeviceError: the last device failed.
    """
    candidates = [device, *others]
    for number, candidate in enumerate(candidates):
        config = configs.get(candidate.name) or None
        # The first one was asked what it supports before the cut.
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
        op.fallback = DeviceFallback(subgraph, op, candidates[number + 1 :], configs, options)
        return op, candidate
    raise AssertionError("the last candidate returned or raised")


def _op_on(device: Device, subgraph: Graph, model: CompiledModel) -> SubgraphOp:
    """Return the op of a region that a device compiled."""
    op = op_of(subgraph, model, device.name)
    op.concurrent = op.concurrent or device.concurrent_regions
    return op


class DeviceFallback:
    """The devices that may run a region after its own, and the region's breaker."""

    def __init__(
        self,
        subgraph: Graph,
        op: SubgraphOp,
        others: Sequence[Device],
        configs: Mapping[str, Config],
        options: DeviceOptions,
    ) -> None:
        """Let ``others``, in order, take the region of ``op`` over, as ``options`` say."""
        self._breaker = Breaker(options)
        self.checks = options.FALLBACK_CHECK
        self._subgraph = subgraph
        self._device = type(op).__name__ if op.device == SubgraphOp.device else op.device
        self._others = list(others)
        self._configs = configs
        self._options = options
        self._lock = free_in_child(threading.Lock())
        self._next: SubgraphOp | None = None

    @property
    def failures(self) -> int:
        """How often the region's own op has failed."""
        return self._breaker.failures

    @property
    def cause(self) -> str:
        """What it said the last time."""
        return self._breaker.cause

    @property
    def replacement(self) -> SubgraphOp | None:
        """The op that runs the region while the breaker is open, else None."""
        return self._next if self._breaker.is_open else None

    @property
    def state(self) -> str:
        """Why another device runs the region, for profiles; empty while its own does."""
        breaker = self._breaker
        if self.replacement is None:
            return f"{self._device} failed: {breaker.cause}" if breaker.in_a_row else ""
        return f"{self._device} failed {breaker.failures} times, {breaker.again}: {breaker.cause}"

    def session(self, op: SubgraphOp) -> Session | None:
        """Return a session that minds the breaker; None while the op's own will do."""
        return FallbackSession(op, self) if self.checks or self._breaker.is_open else None

    def instead(self, op: SubgraphOp, error: Exception) -> Session | None:
        """Return what makes the runs of an op that cannot open a session, None: nothing."""
        if stands(error) or self.following() is None:
            return None
        return FallbackSession(op, self, failure=error)

    def recover(self, error: Exception, session: Session) -> Session | None:
        """Return what makes the run in which a session failed and later ones, None: nothing."""
        if isinstance(session, FallbackSession) or stands(error) or self.following() is None:
            return None
        return FallbackSession(session.op, self, session, error)

    def may_try(self) -> bool:
        """Return whether a run asks the region's own op; says so to one run when it is time."""
        return self._breaker.may_try()

    def succeeded(self) -> None:
        """Note that the region's own op has made a run."""
        if self._breaker.succeeded():
            _log.warning("subgraph %r runs on %s again", self._subgraph.name, self._device)

    def following(self) -> SubgraphOp | None:
        """Return the op of the next device that can, None if there is none."""
        if self._next is None and self._others:
            with self._lock:
                self._next = self._next or self._compiled()
        return self._next

    def failed(self, error: Exception, op: SubgraphOp) -> None:
        """Count a failure of the region's own op in a run that ``op`` has made."""
        breaker, following = self._breaker, self._next
        new, opened = breaker.failed(error, may_open=following is not None)
        if new:
            _log.warning(  # not the error: a handler that keeps records would keep the run's arrays
                "subgraph %r failed on device %s; %s helps out: %s",
                self._subgraph.name,
                self._device,
                "REFERENCE" if op.device == SubgraphOp.device else op.device,
                breaker.cause,
            )
        if opened and following is not None:
            _log.warning(
                "subgraph %r failed %d times in a row on %s and runs on %s from now on%s",
                self._subgraph.name,
                breaker.in_a_row,
                self._device,
                following.device,
                "" if breaker.pause == math.inf else f"; tried again after {breaker.pause:g} s",
            )

    def _compiled(self) -> SubgraphOp | None:
        """Return the op of the next device that can; those after it stand behind it in turn."""
        for number, device in enumerate(self._others):
            try:
                config = self._configs.get(device.name) or None
                op = _op_on(device, self._subgraph, compile_on(device, self._subgraph, config))
            except SubgraphError:
                continue
            rest = self._others[number + 1 :]
            options = attrs.evolve(self._options, FALLBACK_CHECK=False)
            op.fallback = DeviceFallback(self._subgraph, op, rest, self._configs, options)
            return op
        return None


class FallbackSession(Session):
    """Runs a region by its own op, or by those behind it: as the breaker says."""

    def __init__(
        self,
        op: SubgraphOp,
        fallback: DeviceFallback,
        own: Session | None = None,
        failure: Exception | None = None,
    ) -> None:
        """Open a door to ``op`` and to those behind it.

        Args:
            op: The region's own op.
            fallback: Who stands behind it.
            own: A session of the op, if there is one; it has the states of the request.
            failure: What the op has raised in the run that is to be made first, or before it.
        """
        super().__init__(op)
        self._own_op = op
        self._own = own
        self._fallback = fallback
        self._failure = failure
        self._others: dict[SubgraphOp, Session] = {}
        self._ran: Session | None = None
        self._holder = own  # has the states that the next run goes on from
        # These states, while no session has been opened.
        self._waiting_states: Mapping[str, Array] = {}
        self._cancelled = self._measured = False

    def __call__(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        failure, self._failure = self._failure, None
        if failure is not None:
            return self._helped(failure, inputs, outputs)
        op = None if self._fallback.may_try() else self._fallback.replacement
        if op is not None:
            return self._run_other(op, inputs, outputs)
        try:
            return self._run_own(inputs, outputs)
        except Exception as error:
            if stands(error):
                raise
            return self._helped(error, inputs, outputs)

    def _helped(
        self, error: Exception, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> Sequence[Any]:
        """Make a run in which the own op has failed."""
        op = self._fallback.following()
        if op is None:
            raise error
        try:
            results = self._run_other(op, inputs, outputs)
        except Exception as following:
            following.add_note(f"{self._own_op.device} failed before: {error}")
            raise
        self._fallback.failed(error, op)
        return results

    def _run_own(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> Sequence[Any]:
        if self._own is None or self._fallback.replacement is not None:
            self._own = self._opened(open_own(self._own_op))  # a device that was lost opens anew
        self._ran, self.op = self._own, self._own_op
        self._carry_states(self._own)
        results = self._own(inputs, outputs)
        self._holder = self._own
        if self._fallback.checks and not (are_finite(results) or self._own.states()):
            results = self._checked(inputs, results)
            return results if outputs is None else fill_outputs(results, outputs)
        self._fallback.succeeded()
        return results

    def _checked(self, inputs: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """Return the results, or those of the reference if it is finite where they are not."""
        judge = DefaultSubgraphOp(self._own_op.subgraph)
        right = self._opened(judge.session())(inputs)
        error = not_finite(judge.subgraph, results, right)
        if error is None:
            self._fallback.succeeded()
            return results
        self._fallback.following()
        self._fallback.failed(error, judge)
        self._ran, self.op = None, judge
        return right

    def _carry_states(self, session: Session) -> None:
        """Let a session go on from the states of the one that made the last run."""
        holder = self._holder
        if holder is not session:
            states = self._waiting_states if holder is None else holder.states()
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
                made = FallbackSession(op, op.fallback, made)  # those behind it may help out, too
            session = self._others[op] = self._opened(made)
        self._ran, self.op = session, op
        self._carry_states(session)
        results = session(inputs, outputs)
        self._holder = session
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
        return dict(self._waiting_states) if self._holder is None else self._holder.states()

    def set_states(self, states: Mapping[str, Array]) -> None:
        if self._holder is None:
            self._waiting_states = dict(states)
        else:
            self._holder.set_states(states)

    def measure(self) -> None:
        self._measured = True
        for session in self._sessions():
            session.measure()

    def profile(self) -> list[ProfileEntry]:
        inside = [] if self._ran is None else self._ran.profile()
        state = self._fallback.state
        return [attrs.evolve(entry, fallback=state or entry.fallback) for entry in inside]


def are_finite(results: Sequence[Any]) -> bool:
    """Return whether results have neither NaN nor Inf."""
    return all(map(_is_finite, results))


def not_finite(graph: Graph, results: Sequence[Any], right: Sequence[Any]) -> DeviceError | None:
    """Return what is wrong with results that have NaN or Inf; None where ``right`` has them too."""
    for value, given, wanted in zip(graph.outputs, results, right, strict=True):
        if not _is_finite(given) and _differs(given, wanted):
            return DeviceError(f"output {value.name!r} has NaN or Inf where the reference has none")
    return None


def _is_finite(value: Any) -> bool:
    if is_list(value):
        return all(map(_is_finite, value))
    if not is_array(value) or value.dtype.kind in "biuOSUMm":
        return True
    return bool(np.isfinite(value).all())


def _differs(given: Any, wanted: Any) -> bool:
    """Return whether a result is not finite where the other one is, whatever their numbers."""
    if is_list(given):
        return len(given) != len(wanted) or any(map(_differs, given, wanted))
    if given.shape != wanted.shape:
        return True
    return bool((~np.isfinite(given) & np.isfinite(wanted)).any())


def guard(
    node: Node, others: Sequence[Device], configs: Mapping[str, Config], options: Any
) -> None:
    """Let devices stand behind the own op of a property's region.

    An op that says types of its own gives other results than its inner graph, which therefore
    cannot stand in for it.
    """
    op = node.op
    if node.subgraph is None or op is None or op.fallback is not None or op.says_types:
        return
    if options.RUNTIME_FALLBACK:
        node.fallback = DeviceFallback(node.subgraph, op, others, configs, options)
