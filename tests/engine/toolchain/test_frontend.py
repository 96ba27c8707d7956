"""Numba's frontend as kernels use it: what it leaves in place for everybody else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core import codegen, compiler, dispatcher
from numba.core.typing.context import BaseContext

from subgraph.engine.program.pool import call
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.toolchain.toolchain import KernelError, forget

CHANGED: list[tuple[type, tuple[str, ...]]] = [
    (codegen.JITCodeLibrary, ("_optimize_functions", "get_pointer_to_function")),
    (codegen.JITCPUCodegen, ("_add_module", "set_env")),
    (compiler.DefaultPassBuilder, ("define_nopython_pipeline",)),
    (dispatcher.Dispatcher, ("add_overload",)),
    (dispatcher._FunctionCompiler, ("_compile_cached", "_customize_flags")),
    (BaseContext, ("resolve_function_type",)),
]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3]), *sys.path])
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path))


def support(name: str) -> Callable[[float], float]:
    module = __import__("tests.support.engine.kernels", fromlist=[name])
    function: Callable[[float], float] = getattr(module, name)
    return function


def ran(kernel: Kernel, x: float) -> float:
    """Return what a kernel stores for one number."""
    forget(kernel)
    source, target = np.array([x]), np.zeros(1)
    words = np.array([source.ctypes.data, target.ctypes.data])
    call(kernel.address, words.ctypes.data, 0, 1, 0)
    return float(target[0])


def attributes() -> list[Any]:
    return [vars(kind).get(name) for kind, names in CHANGED for name in names]


def test_a_kernel_may_ask_more_of_numba_than_ours_do() -> None:
    assert ran(Kernel("tests.support.engine.kernels", "all_of_numba", bias=1.5), 3.0) == 34.5


def test_a_function_of_a_kernel_can_be_called_from_python() -> None:
    # Python once got the address of machine code that had not been made.
    kernel = Kernel("tests.support.engine.kernels", "all_of_numba", bias=0.5)
    assert ran(kernel, 1.0) == 4.5
    doubled, weighted = support("doubled"), support("weighted")
    assert doubled(4.0) == 8.0
    assert weighted(2.0) == 7.0
    assert ran(kernel, 2.0) == 15.0  # and by a kernel, once Python has called it
    assert doubled(5.0) == 10.0


def test_numba_is_left_as_it_was(tmp_path: Path) -> None:
    before = attributes()
    ran(Kernel("tests.support.engine.kernels", "all_of_numba", bias=2.5), 1.0)
    assert attributes() == before
    with pytest.raises(KernelError):
        _ = Kernel("tests.support.engine.kernels", "broken").address
    assert attributes() == before

    @njit
    def least(a: int, b: int, c: int) -> int:
        return min(a, b, c) if a < b else max(a, c)

    assert (least(2, 5, 1), least(5, 2, 7)) == (1, 7)
