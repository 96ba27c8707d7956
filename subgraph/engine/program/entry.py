"""The entry: makes a compiled function with a run block callable from Python.

The entry itself is machine code with CPython's calling convention for methods, so that a call costs
a tenth of one through ctypes. It calls the function, releases Python's lock meanwhile if the run
block says so, and returns the status as a Python integer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final, cast

from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.kernel import Kernel

KERNEL: Final = Kernel("subgraph.engine.program.entry_kernels", "entry")
_NO_ARGUMENTS = 0x0004  # METH_NOARGS


class _MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_methods: list[_MethodDef] = []  # at most one; never removed, as function objects point to it


def method() -> _MethodDef:
    """Return the method definition of the entry, which the first call loads or compiles."""
    with toolchain.lock:
        if not _methods:
            _methods.append(_MethodDef(b"run_program", KERNEL.address, _NO_ARGUMENTS, None))
        return _methods[0]


def entry(run_block: int) -> Callable[[], int]:
    """Return a callable that calls the function at RUN_WALK with its block and returns RUN_STATUS.

    It is a built-in function object over the compiled entry.

    Args:
        run_block: Address of a run block (`abi.RUN_ROWS` and the following), which must outlive
            the callable.
    """
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return cast("Callable[[], int]", make(ctypes.byref(method()), run_block, None))
