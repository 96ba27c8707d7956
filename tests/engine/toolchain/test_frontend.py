"""Numba's internals: they are restored after a compilation, and are not indispensable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core import codegen, dispatcher
from numba.core import compiler as numba_compiler
from numba.core.typing.context import BaseContext

from subgraph.engine.program.pool import call
from subgraph.engine.toolchain import compile_workers, compiler, toolchain
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.toolchain.toolchain import KernelError, forget
from subgraph.errors import DeviceError
from subgraph.system import host, numba_internals
from tests.support.kernels import run_node

CHANGED: list[tuple[type, tuple[str, ...]]] = [
    (codegen.JITCodeLibrary, ("_optimize_functions", "get_pointer_to_function")),
    (codegen.JITCPUCodegen, ("_add_module", "set_env")),
    (numba_compiler.DefaultPassBuilder, ("define_nopython_pipeline",)),
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


def test_a_kernel_that_needs_all_of_numba() -> None:
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


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hide numba's internals; return the names of the kernels that are compiled without them."""
    compiled: list[str] = []
    lower = compiler._lower_by_cfunc

    def missing() -> Any:
        raise numba_internals.MissingInterface("no such thing")

    def plainly(function: Any, symbol: str) -> Any:
        compiled.append(function.__qualname__.partition(".")[0])
        return lower(function, symbol)

    monkeypatch.setattr(numba_internals, "pieces", missing)
    monkeypatch.setattr(compiler, "_lower_by_cfunc", plainly)
    monkeypatch.setattr(toolchain, "_addresses", {})
    monkeypatch.setattr(compile_workers, "worker_count", lambda _kernels: 0)
    return compiled


def test_kernels_compile_by_the_public_interface(public: list[str]) -> None:
    assert ran(Kernel("tests.support.engine.kernels", "all_of_numba", bias=3.5), 2.0) == 21.0
    with pytest.raises(KernelError, match="cannot be compiled"):
        _ = Kernel("tests.support.engine.kernels", "broken").address
    assert public == ["all_of_numba", "broken"]


def test_operators_run_by_the_public_interface(public: list[str]) -> None:
    """Vectors, views of arguments, elementary functions and a register tile, against NumPy."""
    x = np.random.default_rng(0).standard_normal((3, 21, 34)).astype(np.float32)
    (moved,) = run_node("Transpose", [x], [(3, 34, 21)], {"perm": (0, 2, 1)})
    np.testing.assert_array_equal(moved, x.swapaxes(1, 2))
    (curve,) = run_node("Sigmoid", [x], [x.shape])
    np.testing.assert_allclose(curve, 1 / (1 + np.exp(-x.astype(np.float64))), rtol=1e-6)
    w = np.random.default_rng(1).standard_normal((21, 1, 3)).astype(np.float32)
    (made,) = run_node("Conv", [x, w], [(3, 21, 32)], {"group": 21}, constant=[1])
    wanted = sum(x[:, :, k : k + 32].astype(np.float64) * w[:, 0, k, None] for k in range(3))
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)
    assert {"transpose", "run", "windows"} <= set(public)


def test_other_processors_need_the_internals(
    public: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "architecture", lambda: "aarch64")
    with pytest.raises(DeviceError, match="for the processor at hand"):
        compiler.compile_object(support("doubled"), "doubled", host.isa())
    assert len(public) == 1
