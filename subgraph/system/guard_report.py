"""What a fault at a guard page says before the process ends: which step, which argument, how far.

A handler of SIGSEGV writes the report to standard error and puts the handler back that was there
before; the access then faults once more, and the process ends as it would have (`faulthandler`
shows the Python code). On Linux; elsewhere there is no report.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakSet

from subgraph.system import guard_pages

_SA_SIGINFO: Final = 4
_ACTION_BYTES: Final = 256  # more than a struct sigaction has
_FLAGS_AT: Final = 136  # behind the handler and the mask of signals
_ADDRESS_AT: Final = 16  # of a siginfo_t
_NEAR: Final = 1024  # bytes from an area within which a pointer is taken to be to it
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class RunningStep(NamedTuple):
    """A step that was running when the fault came: what it is, and its argument words."""

    text: str
    words: Iterable[int]


class Runner(Protocol):
    """Something that runs kernels."""

    def running_steps(self) -> list[RunningStep]:
        """Return the steps that run at this moment."""
        ...


_runners: WeakSet[Runner] = WeakSet()


def watch(runner: Runner) -> None:
    """Ask ``runner``, as long as it lives, for its running steps when there is a fault."""
    _runners.add(runner)
    if sys.platform.startswith("linux"):
        _install()


def report(address: int) -> str:
    """Return what is known of an access to an address that faulted."""
    area = guard_pages.nearest(address)
    lines = [f"SIGSEGV at {address:#x}, {_where(address, area)}"]
    for runner in list(_runners):
        for step in runner.running_steps():
            lines.append(f"running: {step.text}")
            if area is not None:
                inside = range(area[0] - _NEAR, area[0] + area[1] + _NEAR)
                found = [k for k, word in enumerate(step.words) if word in inside]
                if found:
                    lines.append(f"  that area is argument {', '.join(map(str, found))}")
    return "\n".join(lines) + "\n"


def _where(address: int, area: tuple[int, int] | None) -> str:
    if area is None:
        return "in no area that is guarded"
    begin, size = area
    if address < begin:
        return f"{begin - address} bytes before an area of {size} bytes"
    if address >= begin + size:
        return f"{address - begin - size} bytes behind the end of an area of {size} bytes"
    return f"at byte {address - begin} of an area of {size} bytes that is read-only"


@cache
def _install() -> tuple[Any, ...]:
    """Install the handler; return what has to live as long as it."""
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    before = ctypes.create_string_buffer(_ACTION_BYTES)

    def handle(number: int, info: int, _context: int) -> None:
        sigaction(number, before, None)
        address = ctypes.c_uint64.from_address(info + _ADDRESS_AT).value
        os.write(2, report(address).encode())

    handler = _HANDLER(handle)
    mine = ctypes.create_string_buffer(_ACTION_BYTES)
    ctypes.c_void_p.from_buffer(mine).value = ctypes.cast(handler, ctypes.c_void_p).value
    ctypes.c_int.from_buffer(mine, _FLAGS_AT).value = _SA_SIGINFO
    sigaction(signal.SIGSEGV, mine, before)
    return handler, mine, before
