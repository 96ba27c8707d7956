"""Faults on demand: the n-th allocation, file operation, thread start or driver call fails.

Arrays are allocated by a handler that counts and gives no memory once, also in threads that start
meanwhile; it is machine code, so no Python runs within an allocation. Files are refused by an audit
hook of the interpreter, or by stand-ins for what raises no audit event; calls of the OpenCL driver
by stand-ins.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np

_SET_HANDLER = 304  # PyDataMem_SetHandler in the table of NumPy's C interface
_EVENTS = (
    *("open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.listdir", "os.scandir"),
    *("os.chmod", "os.utime", "os.rmdir", "tempfile.mkstemp", "mmap.__new__"),
)
_WITHOUT_EVENT = "fsync", "stat", "fstat", "lstat"
_DRIVER = "Buffer", "CommandQueue", "Kernel", "Program", "enqueue_copy", "enqueue_nd_range_kernel"


def _system(number: int) -> Callable[[], Exception]:
    return lambda: OSError(number, os.strerror(number))


@attrs.frozen
class Fault:
    """A kind of call, and the error that one such call ends in.

    Attributes:
        kind: "memory", "files", "threads" or "driver".
        error: Makes the error; that of memory is NumPy's own.
    """

    kind: str
    error: Callable[[], Exception] = MemoryError


FAULTS = {
    "memory": Fault("memory"),
    "full disk": Fault("files", _system(errno.ENOSPC)),
    "too many files": Fault("files", _system(errno.EMFILE)),
    "no permission": Fault("files", _system(errno.EACCES)),
    "threads": Fault("threads", lambda: RuntimeError("can't start new thread")),
}


def _refused_by_driver() -> Exception:
    api: Any = importlib.import_module("pyopencl")
    code: int = api.status_code.OUT_OF_RESOURCES
    error: Exception = api.RuntimeError(api._cl._ErrorRecord("a call", code, "a call"))
    return error


# Of scenarios that run on an OpenCL device.
DRIVER_FAULT = Fault("driver", _refused_by_driver)


@attrs.define
class Count:
    """What a block called.

    Attributes:
        calls: How many calls of the kind there were.
        names: What they were; nothing is known of allocations.
    """

    calls: int = 0
    names: list[str] = attrs.field(factory=list[str])


_fault = Fault("")
_failing = 0
_count = Count()


def _called(kind: str, name: str) -> None:
    if kind == _fault.kind:
        _count.calls += 1
        _count.names.append(name)
        if _count.calls == _failing:
            raise _fault.error()


@contextmanager
def failing(fault: Fault, number: int) -> Generator[Count]:
    """Let call ``number`` of a kind fail, from 1; none if it is 0. Yields the count of calls."""
    global _fault, _failing, _count
    _hook()
    handler, counts = _counting_handler()
    count = Count()
    with ExitStack() as stack:
        for name in _WITHOUT_EVENT:
            stack.enter_context(patch.object(os, name, _counted(name)))
        stack.enter_context(patch.object(threading.Thread, "start", _counted_start))
        if fault.kind == "driver":
            api: Any = importlib.import_module("pyopencl")
            for name in _DRIVER:
                stack.enter_context(patch.object(api, name, _counted_call(api, name)))
        before = None
        counts[:] = 0, number
        _fault, _failing, _count = fault, number, count
        try:
            if fault.kind == "memory":
                before = _set_handler()(handler)
            yield count
        finally:
            _fault = Fault("")
            if before is not None:
                _set_handler()(before)
                count.calls = int(counts[0])
            counts[1] = 0  # threads that were started meanwhile may go on


@cache
def _hook() -> None:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            _called("files", f"{event} {args[0] if args else ''}")

    sys.addaudithook(hook)


def _counted(name: str) -> Callable[..., Any]:
    function = getattr(os, name)

    def call(*args: Any, **options: Any) -> Any:
        _called("files", f"os.{name} {args[0] if args else ''}")
        return function(*args, **options)

    return call


_start = threading.Thread.start


def _counted_start(thread: threading.Thread) -> None:
    _called("threads", thread.name)
    if _fault.kind == "memory":
        run = thread.run

        def run_counted() -> None:
            _set_handler()(_counting_handler()[0])
            run()

        thread.run = run_counted  # type: ignore[method-assign]
    _start(thread)


def _counted_call(api: Any, name: str) -> Callable[..., Any]:
    function = getattr(api, name)

    def call(*args: Any, **options: Any) -> Any:
        _called("driver", name)
        return function(*args, **options)

    return call


class _Handler(ctypes.Structure):
    """NumPy's PyDataMem_Handler."""

    _fields_ = (
        *(("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("counts", ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("malloc", "calloc", "realloc", "free")),
    )


@cache
def _counting_handler() -> tuple[Any, Any]:
    """Return a handler as NumPy takes it, and its counts: calls, and the number of the failing."""
    numba: Any = importlib.import_module("numba")
    carray, types = numba.carray, numba.types
    libc: Any = ctypes.CDLL(None)
    size = ctypes.c_size_t
    signatures = {"malloc": (size,), "calloc": (size, size), "realloc": (size, size)}
    for name, arguments in {**signatures, "free": (size,)}.items():
        getattr(libc, name).argtypes = arguments
        getattr(libc, name).restype = None if name == "free" else size
    malloc, calloc, realloc, free = libc.malloc, libc.calloc, libc.realloc, libc.free

    @numba.njit
    def refused(counts: Any) -> Any:
        both = carray(counts, (2,))
        both[0] += 1
        return both[0] == both[1]

    word, counter = types.uintp, types.CPointer(types.int64)

    @numba.cfunc(word(counter, word))
    def counted_malloc(counts: Any, size: Any) -> Any:
        return np.uint64(0) if refused(counts) else malloc(size)

    @numba.cfunc(word(counter, word, word))
    def counted_calloc(counts: Any, items: Any, size: Any) -> Any:
        return np.uint64(0) if refused(counts) else calloc(items, size)

    @numba.cfunc(word(counter, word, word))
    def counted_realloc(counts: Any, old: Any, size: Any) -> Any:
        return np.uint64(0) if refused(counts) else realloc(old, size)

    @numba.cfunc(types.void(counter, word, word))
    def plain_free(counts: Any, old: Any, size: Any) -> None:
        free(old)

    counts = np.zeros(2, np.int64)
    functions: list[Any] = [counted_malloc, counted_calloc, counted_realloc, plain_free]
    table = _Handler(b"counting", 1, counts.ctypes.data, *(f.address for f in functions))
    api = ctypes.pythonapi
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    handler = api.PyCapsule_New(ctypes.addressof(table), b"mem_handler", None)
    _kept.append((table, counts, functions))  # arrays allocated by it may live on
    return handler, counts


_kept: list[Any] = []


@cache
def _set_handler() -> Callable[[Any], Any]:
    api: Any = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    umath: Any = vars(sys.modules["numpy._core._multiarray_umath"])
    table = api.PyCapsule_GetPointer(umath["_ARRAY_API"], None)
    address = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[_SET_HANDLER]
    assert address is not None
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(address)
