"""The entry: makes a compiled function with a run block callable from Python.

The entry itself is machine code with CPython's calling convention for methods, so that a call costs
a tenth of one through ctypes. It calls the function, releases Python's lock meanwhile if the run
block says so, and returns the status as a Python integer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final, cast

from subgraph.engine.program import abi
from subgraph.engine.toolchain import toolchain

# The entry: ``self`` is a Python integer, the address of a run block.
TEXT: Final = f"""
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)

define ptr @entry(ptr %self, ptr %unused) {{
start:
  %run = call ptr @PyLong_AsVoidPtr(ptr %self)
  %args = ptrtoint ptr %run to i64
  %walk.at = getelementptr i8, ptr %run, i64 {abi.RUN_WALK}
  %walk = load ptr, ptr %walk.at
  %release.at = getelementptr i8, ptr %run, i64 {abi.RUN_RELEASE}
  %release = load i64, ptr %release.at
  %keep = icmp eq i64 %release, 0
  br i1 %keep, label %held, label %free
held:
  call void %walk(i64 %args, i64 0, i64 0, i64 0)
  br label %done
free:
  %thread = call ptr @PyEval_SaveThread()
  call void %walk(i64 %args, i64 0, i64 0, i64 0)
  call void @PyEval_RestoreThread(ptr %thread)
  br label %done
done:
  %status.at = getelementptr i8, ptr %run, i64 {abi.RUN_STATUS}
  %status = load i64, ptr %status.at
  %result = call ptr @PyLong_FromLongLong(i64 %status)
  ret ptr %result
}}
"""
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
            code = toolchain.native(TEXT)
            _methods.append(_MethodDef(b"run_program", code, _NO_ARGUMENTS, None))
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
