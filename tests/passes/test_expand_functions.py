"""Operators that the standard defines by others run on CPU kernels: ONNX's own cases, any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.graph import Node, Value
from subgraph.operators import functions
from subgraph.operators.functions import function
from subgraph.testing import conformance as suite
from subgraph.tools import backend
from subgraph.transform.pass_manager import apply_pass

pytestmark = pytest.mark.filterwarnings("ignore")
_STEMS = ["blackman", "hamming", "hann", "causal_conv", "center_crop", "nllloss", "sce", "swiglu"]


@pytest.mark.parametrize("stem", _STEMS)
def test_cases_of_the_suite_run_on_kernels(stem: str) -> None:
    of_stem = [case for case in suite.cases() if case.name.startswith(f"test_{stem}")]
    cases = [case for case in of_stem[::5] if "expanded" not in case.name]
    assert cases
    for case in cases:
        graph = sg.load(case.load()[0])
        placed = sg.default_core().query_model(graph, "CPU")
        assert set(placed) == {node.name for node in graph.nodes}, (case.name, placed.reasons)
        suite.run(case, lambda model: backend.prepare(model, "CPU").run)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gated_unit_of_any_batch(dtype: str) -> None:
    x = sg.input("x", ("N", 6), dtype)
    graph = sg.Graph([x], [ops.SwiGLU(x, ops.Neg(x))])
    model, expected = sg.compile_model(graph, "CPU"), sg.compile_model(graph, "REFERENCE")
    for rows in (3, 1, 5):
        array = np.random.default_rng(rows).standard_normal((rows, 6)).astype(dtype)
        np.testing.assert_allclose(model(x=array)[0], expected(x=array)[0], rtol=3e-3, atol=1e-4)


def test_a_loss_of_any_batch() -> None:
    x, labels = sg.input("x", ("N", 5)), sg.input("labels", ("N",), "int64")
    graph = sg.Graph([x, labels], [ops.SoftmaxCrossEntropyLoss(x, labels, ignore_index=2)])
    model, expected = sg.compile_model(graph, "CPU"), sg.compile_model(graph, "REFERENCE")
    for rows in (4, 7):
        rng = np.random.default_rng(rows)
        given = [rng.standard_normal((rows, 5)).astype(np.float32), rng.integers(0, 5, rows)]
        for k in range(len(graph.outputs)):
            np.testing.assert_allclose(model(given)[k], expected(given)[k], rtol=1e-5, atol=1e-6)


def test_a_body_for_an_operator_that_no_device_would_expand_is_refused() -> None:
    with pytest.raises(sg.UnsupportedOpError, match=r"domain 'com\.example'.*core\.add_extension"):
        function("Twice", "x -> y", domain="com.example")


_FIRST = {"epsilon": 1e-5, "beta": False, "outputs": 1, "shape": (2, 3, 5), "dtype": "float32"}


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"epsilon": 1e-3},
        {"beta": True},
        {"outputs": 4},
        {"shape": (2, 3, 6)},
        {"shape": ("N", 3, 5)},
        {"dtype": "float16"},
        {"op_type": "SkipSimplifiedLayerNormalization"},
    ],
)
def test_nodes_share_a_body_only_if_their_bodies_are_equal(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    results = functions.Call.results

    def note(call: functions.Call) -> list[Value | None]:
        written.append(call.node.name)
        return results(call)

    monkeypatch.setattr(functions.Call, "results", note)
    monkeypatch.setattr(functions, "_BODIES", {})

    def normalize(number: int, given: dict[str, Any]) -> tuple[Value, Value]:
        x = sg.input(f"x{number}", given["shape"], given["dtype"])
        one = ops.Constant(value=np.ones(given["shape"][-1], given["dtype"]))
        node = Node(
            given.get("op_type", "SkipLayerNormalization"),
            [x, ops.Neg(x), one, one] if given["beta"] else [x, ops.Neg(x), one],
            outputs=given["outputs"],
            name=f"norm {number}",
            domain="com.microsoft",
            version=1,
            attrs={"epsilon": given["epsilon"]},
            metadata={"note": f"of {number}"},
        )
        return x, node.outputs[-1]

    def expand() -> tuple[list[Any], int]:
        written.clear()
        pairs = [normalize(k, given) for k, given in enumerate((_FIRST, {**_FIRST, **other}))]
        graph = sg.Graph([x for x, _ in pairs], [result for _, result in pairs])
        made = apply_pass(graph, "ExpandFunctions")
        return [(n.name, n.metadata, str(n)) for n in made.nodes] + [str(made)], len(written)

    shared, count = expand()
    monkeypatch.setattr(functions, "_key_of", lambda *_: None)
    assert expand() == (shared, 2)
    assert count == (2 if other else 1)
