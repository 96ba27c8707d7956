"""Kernels and lowerings of a user that fail: the error names the node, and the kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.toolchain.kernel import Kernel

SOURCE = """
def unknown_name(**_):
    def kernel(args, begin, end, worker):
        nowhere(args)
    return kernel

def raising(**_):
    raise ValueError("no such variant")

def no_function(**_):
    return 7

def calling_python(**_):
    def kernel(args, begin, end, worker):
        print(args)
    return kernel
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with the module ``rows`` of kernels that fail."""
    name = "failing_kernels_of_a_test"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "rows.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[module]


_lowerings: list[Any] = []


def _lower(node: sg.Node, low: Lowering) -> None:
    """Lower by the test's function; a process has one lowering for an operator."""
    _lowerings[-1](node, low)


EXTENSION = sg.Operator(
    schema=sg.Schema("Failing", "subgraph.tests.failing", inputs=("x",), outputs=("y",)),
    compute=lambda node, inputs: [inputs[0] * 2],
    infer=lambda node, types, values: [types[0]],
    kernels={"CPU": _lower},
)


def compiled(lowering: Any, config: Any = None, device: str = "CPU") -> sg.CompiledModel:
    """Return a model whose second node is of a custom operator with this lowering for CPU."""
    _lowerings.append(lowering)
    core = sg.Core()
    core.add_extension(EXTENSION)
    x = sg.input("x", ("N", 4), "float32")
    failing: Any = ops.Failing
    graph = sg.Graph([x], [ops.Sigmoid(failing(ops.Neg(x), name="the_node"))])
    return core.compile_model(graph, device, config)


X = np.ones((2, 4), np.float32)
WANT = 1 / (1 + np.exp(2 * X))


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        ("unknown_name", "nowhere"),
        ("raising", "ValueError: no such variant"),
        ("no_function", "cannot be compiled: AttributeError"),
        ("calling_python", "which kernels may not"),
        ("missing", "has no attribute 'missing'"),
    ],
)
def test_the_error_of_a_kernel_names_its_node(package: str, factory: str, why: str) -> None:
    def lower(node: sg.Node, low: Lowering) -> None:
        kernel = Kernel(f"{package}.rows", factory, lanes=4)
        low.emit(kernel, [low.input(0), low.output()], units=4, grain=4, bytes=0)

    model = compiled(lower, {"RUNTIME_FALLBACK": False})
    for _ in range(2):
        with pytest.raises(sg.DeviceError, match=r"^node 'the_node' \(Failing\): ") as caught:
            model([X])
        assert why in str(caught.value)
        assert f"{package}.rows.{factory}(lanes=4)" in str(caught.value)
    model = compiled(lower)
    np.testing.assert_allclose(model([X])[0], WANT, rtol=1e-6)
    (report,) = model.get_property("FALLBACKS").values()
    assert "'the_node'" in report["cause"]


def test_a_missing_module_of_kernels_names_the_node() -> None:
    def lower(node: sg.Node, low: Lowering) -> None:
        kernel = Kernel("no_module_of_a_test.rows", "missing")
        low.emit(kernel, [low.input(0), low.output()], units=4, grain=4, bytes=0)

    with pytest.raises(sg.DeviceError, match=r"node 'the_node' \(Failing\): .*no_module_of_a_test"):
        compiled(lower, {"RUNTIME_FALLBACK": False})([X])


@pytest.mark.parametrize(
    "error", [RuntimeError("bad table"), AssertionError("bad table"), OSError()]
)
def test_the_error_of_a_lowering_names_the_node(error: Exception) -> None:
    def lower(node: sg.Node, low: Lowering) -> None:
        raise error

    name = type(error).__name__
    with pytest.raises(sg.DeviceError, match=rf"node 'the_node' \(Failing\): .* raised {name}"):
        compiled(lower, {"RUNTIME_FALLBACK": False})([X])
    for device in ("CPU", "HETERO:CPU,REFERENCE"):
        np.testing.assert_allclose(compiled(lower, device=device)([X])[0], WANT, rtol=1e-6)
