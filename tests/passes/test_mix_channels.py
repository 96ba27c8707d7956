"""Products over few channels between two transpositions: turned around, and only where they may."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.transform.pass_manager import apply_pass


def talking_heads(
    shape: tuple[int | str, ...], made: int, *, bias: str = "last", dtype: str = "float32"
) -> sg.Graph:
    """Return a graph that mixes dimension 1 of its input twice, a Softmax in between."""
    rng = np.random.default_rng(0)
    rank, channels = len(shape), shape[1]
    assert isinstance(channels, int)
    back, front = (0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1))
    x = sg.input("x", shape=shape, dtype=dtype)
    y = x
    for number, (given, out) in enumerate([(channels, made), (made, channels)]):
        weight = sg.parameter(f"w{number}", rng.standard_normal((given, out)).astype(dtype))
        y = ops.MatMul(ops.Transpose(y, perm=back), weight)
        if bias:
            b = sg.parameter(f"b{number}", rng.standard_normal(out).astype(dtype))
            y = ops.Add(y, b) if bias == "last" else ops.Add(b, y)
        y = ops.Transpose(y, perm=front)
        y = ops.Softmax(y) if number == 0 else y
    return sg.Graph(inputs=[x], outputs=[y], name="talking")


def transpositions(graph: sg.Graph) -> int:
    """Return how many transpositions of computed values the pass leaves."""
    mixed = apply_pass(graph, ["InferTypes", "MixChannels"])
    given = [n.inputs[0] for n in mixed.nodes if n.op_type == "Transpose"]
    return sum(value is not None and value.parameter is None for value in given)


def check(graph: sg.Graph, shape: tuple[int, ...], dtype: str = "float32") -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    want = sg.compile_model(graph, "REFERENCE")([x])
    for threads in (1, 2):
        got = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})([x])
        for a, b in zip(got.values(), want.values(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "made", "bias", "dtype"),
    [
        ((1, 4, 33, 33), 4, "last", "float32"),
        ((2, 8, 17, 9), 5, "first", "float32"),
        ((3, 1, 7), 2, "", "float64"),
        ((2, 3, 4, 5, 6), 8, "last", "float32"),
    ],
)
def test_products_over_few_channels(
    shape: tuple[int, ...], made: int, bias: str, dtype: str
) -> None:
    graph = talking_heads(shape, made, bias=bias, dtype=dtype)
    assert transpositions(graph) == 0
    check(graph, shape, dtype)


def test_a_batch_of_any_size() -> None:
    graph = talking_heads(("N", 4, 6, 6), 4)
    assert transpositions(graph) == 0
    for batch in (1, 3):
        check(graph, (batch, 4, 6, 6))


def test_what_stays_as_it_is() -> None:
    assert transpositions(talking_heads((1, 9, 6, 6), 9)) == 4  # many channels
    assert transpositions(talking_heads((1, 4, "T", 6), 4)) == 4  # nothing to reshape to
    graph = talking_heads((1, 4, 6, 6), 4)
    first = next(n for n in graph.nodes if n.op_type == "Add")
    both = sg.Graph(inputs=graph.inputs, outputs=[*graph.outputs, first.outputs[0]], name="both")
    assert transpositions(both) == 2  # somebody needs what is in between
    check(both, (1, 4, 6, 6))


def test_a_changed_weight_is_mixed_anew() -> None:
    graph = talking_heads((1, 4, 6, 6), 4)
    model = sg.compile_model(graph, "CPU")
    x = np.random.default_rng(1).standard_normal((1, 4, 6, 6)).astype(np.float32)
    model([x])
    graph.parameters["w1"].assign(np.eye(4, dtype=np.float32)[::-1])
    want = sg.compile_model(graph, "REFERENCE")([x])
    for a, b in zip(model([x]).values(), want.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
