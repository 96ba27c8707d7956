"""Circuit breakers: after consecutive failures a device is not used for some time."""

from __future__ import annotations

import math
import threading
import time

from subgraph.errors import UnsupportedOpError, cause_of, described
from subgraph.runtime.settings import DeviceOptions
from subgraph.system.forking import free_in_child

# Errors that concern one run only; the next run may succeed.
_SINGLE_RUN_ERRORS = (UnsupportedOpError, MemoryError)
_MAX_CAUSES = 8  # causes that one breaker reports as new (estimate)


class Breaker:
    """Counts the failures of a device, for one region or one model.

    After ``FALLBACK_FAILURES`` consecutive failures it opens: runs no longer use the device. After
    ``FALLBACK_RETRY`` seconds one run may try it again.

    Attributes:
        failures: Number of failures.
        in_a_row: Number of failures since the last success.
        cause: Message of the last failure.
        pause: Seconds until an open breaker lets a run try again; inf for never.
    """

    def __init__(self, options: DeviceOptions) -> None:
        """Create a closed breaker with the limits of these options."""
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
        """Whether the breaker is open: runs do not use the device."""
        return self._retry_at is not None

    @property
    def again(self) -> str:
        """When an open breaker lets a run try again, as text for messages."""
        left = math.inf if self._retry_at is None else self._retry_at - time.monotonic()
        return "not tried again" if left == math.inf else f"tried again in {max(left, 0):.1f} s"

    def may_try(self) -> bool:
        """Return whether a run may use the device; if open, one run may after each pause."""
        if not self.is_open:
            return True
        with self._lock:
            now, retry_at = time.monotonic(), self._retry_at
            if retry_at is None or now < retry_at:
                return retry_at is None
            self._retry_at = now + self.pause  # other runs wait for the result of this one
            return True

    def succeeded(self) -> bool:
        """Record that a run on the device succeeded; return whether that closed the breaker."""
        # The usual case needs no lock: without a failure since the last success the breaker is
        # closed.
        if not self.in_a_row:
            return False
        with self._lock:
            closed, self._retry_at, self.in_a_row = self._retry_at is not None, None, 0
        return closed

    def failed(self, error: Exception, *, may_open: bool = True) -> tuple[bool, bool]:
        """Count a failure.

        Args:
            error: The error; UnsupportedOpError and MemoryError never open the breaker.
            may_open: Whether later runs can use another device.

        Returns:
            Whether the cause is new, and whether the breaker has opened.
        """
        with self._lock:
            self.cause = cause_of(error)
            self.failures += 1
            kind = described(error)
            new = kind not in self._known and len(self._known) < _MAX_CAUSES
            if new:
                self._known.add(kind)
            if isinstance(error, _SINGLE_RUN_ERRORS):
                return new, False
            self.in_a_row += 1
            if not may_open or self.in_a_row < self._limit:
                return new, False
            opened = self._retry_at is None
            self._retry_at = time.monotonic() + self.pause
            return new, opened
