"""A Python callable around one compiled function and the block of words that it works on."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Final, cast

from subgraph.engine.program import abi
from subgraph.engine.program.pool import call
from subgraph.engine.toolchain import toolchain

# Calls the function of a block; Python's lock is let go if the block says so.
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
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_methods: list[_MethodDef] = []  # function objects point into it: never emptied


def method() -> _MethodDef:
    """Return the compiled method, made at its first use."""
    with toolchain.lock:
        if not _methods:
            code = toolchain.native(TEXT)
            _methods.append(_MethodDef(b"run_program", code, _NO_ARGUMENTS, None))
        return _methods[0]


def entry(run_block: int) -> Callable[[], int]:
    """Return a callable that calls the function at RUN_WALK with a block; returns RUN_STATUS.

    A function object of Python's C interface around compiled code: a tenth of a ctypes call.
    """
    if sys.implementation.name != "cpython":
        return lambda: _plain_call(run_block)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return cast("Callable[[], int]", make(ctypes.byref(method()), run_block, None))


def _plain_call(run_block: int) -> int:
    words = (ctypes.c_int64 * abi.RUN_WORDS).from_address(run_block)
    call(words[abi.RUN_WALK // abi.WORD], run_block, 0, 0, 0)
    return words[abi.RUN_STATUS // abi.WORD]
