"""Breakers: after failures in a row something is left alone, and tried again after a time."""

from __future__ import annotations

import math
import threading
import time

from subgraph.errors import UnsupportedOpError
from subgraph.runtime.settings import DeviceOptions
from subgraph.system.forking import free_in_child

# What a device refuses of one run, or found no memory for: the next run may be another.
_OF_THIS_RUN = (UnsupportedOpError, MemoryError)
_MOST_CAUSES = 8  # causes that are told of one breaker


class Breaker:
    """Counts the failures of a device, for one region or one model.

    After ``FALLBACK_FAILURES`` in a row it opens: the device is asked no more. After
    ``FALLBACK_RETRY`` seconds one run may try it again.

    Attributes:
        failures: How often it has failed.
        in_a_row: How often since it last succeeded.
        cause: What it said the last time.
    """

    def __init__(self, options: DeviceOptions) -> None:
        """Make a closed breaker that works as ``options`` say."""
        self.failures = 0
        self.in_a_row = 0
        self.cause = ""
        self._limit = options.FALLBACK_FAILURES
        self.pause = options.FALLBACK_RETRY or math.inf
        self._lock = free_in_child(threading.Lock())
        self._retry_at: float | None = None  # None: it is closed
        self._known: set[str] = set()

    @property
    def is_open(self) -> bool:
        """Whether the device is left alone."""
        return self._retry_at is not None

    @property
    def again(self) -> str:
        """When an open breaker lets a run try again, as text for messages."""
        left = math.inf if self._retry_at is None else self._retry_at - time.monotonic()
        return "not tried again" if left == math.inf else f"tried again in {max(left, 0):.1f} s"

    def may_try(self) -> bool:
        """Return whether a run may ask the device; says so to one run when it is time again."""
        if not self.is_open:
            return True
        with self._lock:
            now, retry_at = time.monotonic(), self._retry_at
            if retry_at is None or now < retry_at:
                return retry_at is None
            self._retry_at = now + self.pause  # the others wait for what this run finds
            return True

    def succeeded(self) -> bool:
        """Note that the device has made a run; return whether that has closed the breaker."""
        if not self.in_a_row:
            return False
        with self._lock:
            closed, self._retry_at, self.in_a_row = self._retry_at is not None, None, 0
        return closed

    def failed(self, error: Exception, *, may_open: bool = True) -> tuple[bool, bool]:
        """Count a failure.

        Args:
            error: What was raised. What concerns one run alone never opens the breaker.
            may_open: Whether there is another device for the runs that follow.

        Returns:
            Whether the cause is new, and whether the breaker has opened.
        """
        with self._lock:
            self.cause = str(error) or type(error).__name__
            self.failures += 1
            kind = f"{type(error).__name__}: {error}"
            new = kind not in self._known and len(self._known) < _MOST_CAUSES
            if new:
                self._known.add(kind)
            if isinstance(error, _OF_THIS_RUN):
                return new, False
            self.in_a_row += 1
            if not may_open or self.in_a_row < self._limit:
                return new, False
            opened = self._retry_at is None
            self._retry_at = time.monotonic() + self.pause
            return new, opened
