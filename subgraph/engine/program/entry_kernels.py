"""The entry of programs, a method of Python integers, as LLVM assembly."""

from __future__ import annotations

from subgraph.engine.program import abi


def entry() -> str:
    """Return the entry: its ``%self`` is a Python integer, the address of a run block."""
    return f"""
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
