"""Report of a fault at a guard page: the step, the argument, and the distance from the area.

A handler of SIGSEGV writes the report to standard error and restores the previous handler; the
access then faults again, and the process ends as without the report (`faulthandler` shows the
Python code). Only on Linux.
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

_SA_SIGINFO: Final = 4  # flag of sa_flags (Linux)
_ACTION_BYTES: Final = 256  # at least the size of struct sigaction (152 with glibc)
_FLAGS_AT: Final = 136  # offset of sa_flags in glibc's struct sigaction on 64-bit Linux
_ADDRESS_AT: Final = 16  # offset of si_addr in siginfo_t on 64-bit Linux
# Bytes; an argument word this close to an area counts as a pointer into it (estimate).
_NEAR: Final = 1024
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class RunningStep(NamedTuple):
    """A step that was running during the fault.

    Attributes:
        text: Description of the step.
        words: Argument words of its kernel.
    """

    text: str
    words: Iterable[int]


class Runner(Protocol):
    """An object that runs kernels."""

    def running_steps(self) -> list[RunningStep]:
        """Return the steps that are running."""
        ...


_runners: WeakSet[Runner] = WeakSet()


def watch(runner: Runner) -> None:
    """Include the running steps of ``runner`` in reports, as long as it exists."""
    _runners.add(runner)
    if sys.platform.startswith("linux"):
        _install()


def report(address: int) -> str:
    """Return the report of a faulting access to an address."""
    area = guard_pages.nearest_area(address)
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
    """Install the handler; return the objects that must live as long as it."""
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    before = ctypes.create_string_buffer(_ACTION_BYTES)

    def handle(number: int, info: int, _context: int) -> None:
        try:
            address = ctypes.c_uint64.from_address(info + _ADDRESS_AT).value
            os.write(2, report(address).encode())
        finally:
            # Not before: another thread at an inaccessible page would end the process meanwhile.
            sigaction(number, before, None)

    handler = _HANDLER(handle)
    mine = ctypes.create_string_buffer(_ACTION_BYTES)
    ctypes.c_void_p.from_buffer(mine).value = ctypes.cast(handler, ctypes.c_void_p).value
    ctypes.c_int.from_buffer(mine, _FLAGS_AT).value = _SA_SIGINFO
    sigaction(signal.SIGSEGV, mine, before)
    return handler, mine, before
