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
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.device import Config, Device
from subgraph.device_calls import compile_on, compile_queried
from subgraph.errors import (
    DeviceError,
    LimitError,
    ModelError,
    RequestCancelledError,
    SubgraphError,
    UnsupportedOpError,
)
from subgraph.forking import free_in_child
from subgraph.graph import Graph, Node
from subgraph.model_op import op_of
from subgraph.op_checks import is_array, is_list, says_types
from subgraph.settings import DeviceOptions
from subgraph.subgraph_op import (
    DefaultSubgraphOp,
    ProfileEntry,
    Session,
    SubgraphOp,
    fill_outputs,
    open_own,
    open_session,
)

_log = logging.getLogger("subgraph")
Array = np.ndarray[Any, Any]
# The caller's fault, or the caller's wish: every device would raise the same.
_CALLERS = (LimitError, ModelError, RequestCancelledError)
# What a device refuses of one run, or found no memory for: the next run may be another.
_OF_THIS_RUN = (UnsupportedOpError, MemoryError)
# Options that count for the whole model where one device was asked for alone.
OPTIONS = ("RUNTIME_FALLBACK", "FALLBACK_FAILURES", "FALLBACK_RETRY", "FALLBACK_CHECK")
_TOLD = 8  # causes of one region that are logged


def _stands(error: Exception) -> bool:
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
            op = op_of(subgraph, compile_model(candidate, subgraph, config), candidate.name)
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


class DeviceFallback:
    """The devices that may run a region after its own, and the region's breaker.

    Attributes:
        failures: How often the region's own op has failed.
        cause: What it said the last time.
    """

    def __init__(
        self,
        subgraph: Graph,
        op: SubgraphOp,
        others: Sequence[Device],
        configs: Mapping[str, Config],
        options: DeviceOptions,
    ) -> None:
        """Let ``others``, in order, take the region of ``op`` over, as ``options`` say."""
        self.failures = 0
        self.cause = ""
        self.checks = options.FALLBACK_CHECK
        self._subgraph = subgraph
        self._device = type(op).__name__ if op.device == SubgraphOp.device else op.device
        self._others = list(others)
        self._configs = configs
        self._options = options
        self._lock = free_in_child(threading.Lock())
        self._next: SubgraphOp | None = None
        self._in_a_row = 0
        self._retry_at: float | None = None  # None: the breaker is closed
        self._told: set[str] = set()

    @property
    def replacement(self) -> SubgraphOp | None:
        """The op that runs the region while the breaker is open, else None."""
        return None if self._retry_at is None else self._next

    @property
    def state(self) -> str:
        """Why another device runs the region, for profiles; empty while its own does."""
        retry_at, op = self._retry_at, self._next
        if retry_at is None or op is None:
            return f"{self._device} failed: {self.cause}" if self._in_a_row else ""
        left = retry_at - time.monotonic()
        again = "not tried again" if left == math.inf else f"tried again in {max(left, 0):.1f} s"
        return f"{self._device} failed {self.failures} times, {again}: {self.cause}"

    def session(self, op: SubgraphOp) -> Session | None:
        """Return a session that minds the breaker; None while the op's own will do."""
        return FallbackSession(op, self) if self.checks or self._retry_at is not None else None

    def recover(self, error: Exception, session: Session) -> Session | None:
        """Return what makes the run in which a session failed and later ones, None: nothing."""
        if isinstance(session, FallbackSession) or _stands(error):
            return None
        if self.following() is None:
            return None
        return FallbackSession(session.op, self, session, error)

    def may_try(self) -> bool:
        """Return whether a run asks the region's own op; says so to one run when it is time."""
        if self._retry_at is None:
            return True
        with self._lock:
            return self._is_time()

    def _is_time(self) -> bool:
        now = time.monotonic()
        if self._retry_at is None or now < self._retry_at:
            return self._retry_at is None
        self._retry_at = now + self._pause  # the others wait for what this run finds
        return True

    @property
    def _pause(self) -> float:
        return self._options.FALLBACK_RETRY or math.inf

    def succeeded(self) -> None:
        """Note that the region's own op has made a run."""
        if not self._in_a_row:
            return
        with self._lock:
            again, self._retry_at, self._in_a_row = self._retry_at is not None, None, 0
        if again:
            _log.warning("subgraph %r runs on %s again", self._subgraph.name, self._device)

    def following(self) -> SubgraphOp | None:
        """Return the op of the next device that can, None if there is none."""
        if self._next is None and self._others:
            with self._lock:
                self._next = self._next or self._compiled()
        return self._next

    def failed(self, error: Exception, op: SubgraphOp) -> None:
        """Count a failure of the region's own op in a run that ``op`` has made."""
        with self._lock:
            self.cause = str(error) or type(error).__name__
            self.failures += 1
            self._tell(error, "REFERENCE" if op.device == SubgraphOp.device else op.device)
            if isinstance(error, _OF_THIS_RUN):
                return
            self._in_a_row += 1
            if self._next is not None and self._in_a_row >= self._options.FALLBACK_FAILURES:
                self._open(self._next)

    def _open(self, op: SubgraphOp) -> None:
        if self._retry_at is None:
            _log.warning(
                "subgraph %r failed %d times in a row on %s and runs on %s from now on%s",
                self._subgraph.name,
                self._in_a_row,
                self._device,
                op.device,
                "" if self._pause == math.inf else f"; tried again after {self._pause:g} s",
            )
        self._retry_at = time.monotonic() + self._pause

    def _tell(self, error: Exception, helper: str) -> None:
        kind = f"{type(error).__name__}: {error}"
        if kind in self._told or len(self._told) >= _TOLD:
            return
        self._told.add(kind)
        _log.warning(  # not the error: a handler that keeps records would keep the run's arrays
            "subgraph %r failed on device %s; %s helps out: %s",
            self._subgraph.name,
            self._device,
            helper,
            self.cause,
        )

    def _compiled(self) -> SubgraphOp | None:
        """Return the op of the next device that can; those after it stand behind it in turn."""
        for number, device in enumerate(self._others):
            try:
                config = self._configs.get(device.name) or None
                op = op_of(self._subgraph, compile_on(device, self._subgraph, config), device.name)
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
            own: A session of the op, if there is one.
            failure: What that session has raised in the run that is to be made first.
        """
        super().__init__(op)
        self._own_op = op
        self._own = own
        self._fallback = fallback
        self._failure = failure
        self._others: dict[SubgraphOp, Session] = {}
        self._ran: Session | None = None
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
            if _stands(error):
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
        results = self._own(inputs, outputs)
        if self._fallback.checks and not all(map(_is_finite, results)):
            results = self._checked(inputs, results)
            return results if outputs is None else fill_outputs(results, outputs)
        self._fallback.succeeded()
        return results

    def _checked(self, inputs: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """Return the results, or those of the reference if it is finite where they are not."""
        judge = DefaultSubgraphOp(self._own_op.subgraph)
        right = self._opened(judge.session())(inputs)
        for value, given, wanted in zip(judge.subgraph.outputs, results, right, strict=True):
            if not _is_finite(given) and _differs(given, wanted):
                text = f"output {value.name!r} has NaN or Inf where the reference has none"
                self._fallback.following()
                self._fallback.failed(DeviceError(text), judge)
                self._ran, self.op = None, judge
                return right
        self._fallback.succeeded()
        return results

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
        return session(inputs, outputs)

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

    def measure(self) -> None:
        self._measured = True
        for session in self._sessions():
            session.measure()

    def profile(self) -> list[ProfileEntry]:
        inside = [] if self._ran is None else self._ran.profile()
        state = self._fallback.state
        return [attrs.evolve(entry, fallback=state or entry.fallback) for entry in inside]


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
    if node.subgraph is None or op is None or op.fallback is not None or says_types(op):
        return
    if options.RUNTIME_FALLBACK:
        node.fallback = DeviceFallback(node.subgraph, op, others, configs, options)
