"""LSTM, GRU and RNN with all their options on the CPU: ONNX Runtime and the reference agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# Few, each another kernel to compile: operator, sequences, hidden size, direction, options.
CASES: list[tuple[str, int, int, str, dict[str, Any]]] = [
    ("LSTM", 1, 27, "bidirectional", {"peepholes": True, "input_forget": 1}),
    ("LSTM", 8, 8, "reverse", {"peepholes": True, "clip": 0.5, "lengths": True}),
    (
        "LSTM",
        7,
        5,
        "bidirectional",
        {
            "activations": ["HardSigmoid", "Softsign", "Relu", "Sigmoid", "ScaledTanh", "Affine"],
            "activation_alpha": [0.3, 1.2, 0.9],
            "activation_beta": [0.4, 0.8, 0.1],
        },
    ),
    ("GRU", 3, 17, "bidirectional", {"lengths": True}),
    ("GRU", 8, 16, "forward", {"linear_before_reset": 1, "lengths": True, "dtype": "float64"}),
    ("GRU", 1, 1, "reverse", {"activations": ["Sigmoid", "LeakyRelu"], "clip": 0.7}),
    ("RNN", 4, 12, "bidirectional", {"activations": ["Relu", "Softplus"], "lengths": True}),
]


def case_of(case: int) -> tuple[sg.Graph, Array]:
    """Return one of the cases as a graph, and what its input gets."""
    kind, batch, hidden, direction, given = CASES[case]
    options = {**given, "hidden_size": hidden, "direction": direction}
    dtype = str(options.pop("dtype", "float32"))
    with_lengths, peepholes = options.pop("lengths", False), options.pop("peepholes", False)
    generator = np.random.default_rng(case)
    steps, width = 6, 5
    directions, gates = (2 if direction == "bidirectional" else 1), GATES[kind]

    def make(name: str, *shape: int) -> sg.Value:
        return sg.parameter(name, (generator.standard_normal(shape) / 2).astype(dtype))

    x = sg.input("x", (steps, batch, width), dtype)
    inputs: list[sg.Value | None] = [x, make("w", directions, gates * hidden, width)]
    inputs.append(make("r", directions, gates * hidden, hidden))
    inputs.append(make("b", directions, 2 * gates * hidden) if case % 3 else None)
    lengths = generator.integers(0, steps + 1, batch).astype(np.int32)
    inputs.append(sg.parameter("lengths", lengths) if with_lengths else None)
    for name in "hc"[: 2 if kind == "LSTM" else 1]:
        inputs.append(make(name, directions, batch, hidden))
    if peepholes:
        inputs.append(make("p", directions, 3 * hidden))
    graph = sg.Graph([x], list(getattr(ops, kind)(*inputs, **options)))
    return graph, generator.standard_normal((steps, batch, width)).astype(dtype)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_option_is_that_of_the_reference(case: int) -> None:
    graph, data = case_of(case)
    assert set(sg.Core().query_model(graph, "CPU").values()) == {"CPU"}
    expected = sg.compile_model(graph, "REFERENCE")([data])
    one, two = (
        sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})([data])
        for threads in (1, 2)
    )
    for k in range(len(graph.outputs)):
        np.testing.assert_allclose(one[k], expected[k], rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(one[k], two[k])


@pytest.mark.parametrize(
    ("kind", "direction"), [("GRU", "reverse"), ("LSTM", "bidirectional"), ("RNN", "forward")]
)
def test_lengths_and_clip_are_those_of_onnxruntime(kind: str, direction: str) -> None:
    generator = np.random.default_rng(len(direction))
    steps, batch, width, hidden, gates = 7, 5, 6, 12, GATES[kind]
    directions = 2 if direction == "bidirectional" else 1

    def make(name: str, *shape: int) -> sg.Value:
        return sg.parameter(name, generator.standard_normal(shape).astype(np.float32) / 2)

    x, lengths = sg.input("x", (steps, batch, width)), sg.input("lengths", (batch,), "int32")
    weights = [make("w", directions, gates * hidden, width)]
    weights.append(make("r", directions, gates * hidden, hidden))
    weights.append(make("b", directions, 2 * gates * hidden))
    outputs = getattr(ops, kind)(
        x, *weights, lengths, direction=direction, hidden_size=hidden, clip=1.5
    )
    graph = sg.Graph([x, lengths], list(outputs))
    given = {
        "x": generator.standard_normal((steps, batch, width)).astype(np.float32),
        "lengths": np.array([7, 3, 1, 5, 2], np.int32),
    }
    session = ort.InferenceSession(
        sg.to_onnx(graph).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    expected = session.run(None, given)
    got = sg.compile_model(graph, "CPU")(given)
    for k, array in enumerate(expected):
        np.testing.assert_allclose(got[k], array, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", sorted(GATES))
def test_the_layout_with_the_batch_first(kind: str) -> None:
    generator = np.random.default_rng(3)
    steps, batch, width, hidden, gates = 4, 3, 5, 10, GATES[kind]
    arrays = [
        generator.standard_normal(shape).astype(np.float32) / 2
        for shape in ((2, gates * hidden, width), (2, gates * hidden, hidden))
    ]
    data = generator.standard_normal((steps, batch, width)).astype(np.float32)
    state = generator.standard_normal((2, batch, hidden)).astype(np.float32)

    def run(layout: int) -> list[Array]:
        by_layout = (data, state) if layout == 0 else (data.swapaxes(0, 1), state.swapaxes(0, 1))
        x, h = (sg.input(name, array.shape) for name, array in zip("xh", by_layout, strict=True))
        weights = [sg.parameter(name, array) for name, array in zip("wr", arrays, strict=True)]
        options = {"hidden_size": hidden, "direction": "bidirectional", "layout": layout}
        outputs = getattr(ops, kind)(x, *weights, None, None, h, **options)
        found = sg.compile_model(sg.Graph([x, h], list(outputs)), "CPU")(
            [np.ascontiguousarray(array) for array in by_layout]
        )
        return [found[k] for k in range(len(outputs))]

    first, *states = run(0)
    by_layout, *by_layout_states = run(1)
    np.testing.assert_array_equal(by_layout, first.transpose(2, 0, 1, 3))
    for a, b in zip(by_layout_states, states, strict=True):
        np.testing.assert_array_equal(a, b.swapaxes(0, 1))
