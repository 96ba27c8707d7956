"""Transposes that undo each other around elementwise operators: fewer are left, nothing changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import Array

F4 = np.float32


def _random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(F4)


def _count(graph: sg.Graph) -> int:
    return sum(node.op_type == "Transpose" and bool(node.inputs) for node in graph.nodes)


def _sunk(graph: sg.Graph, *inputs: Array) -> sg.Graph:
    """Return the graph after the pass; it gives what ONNX Runtime gives for the one before."""
    session = ort.InferenceSession(sg.to_onnx(graph).SerializeToString())
    names = [port.name for port in session.get_inputs()]
    wanted = session.run(None, dict(zip(names, inputs, strict=True)))
    sunk = passes.apply_pass(graph, "SinkTransposes")
    assert [value.name for value in sunk.outputs] == [value.name for value in graph.outputs]
    for model in (sg.compile_model(sunk, "REFERENCE"), sg.compile_model(graph, "CPU")):
        found = model(list(inputs))
        for k, expected in enumerate(wanted):
            np.testing.assert_allclose(found[k], expected, rtol=1e-5, atol=1e-6)
    return sunk


def _nhwc(x: Any) -> Any:
    return ops.Transpose(x, perm=[0, 2, 3, 1])


def _nchw(x: Any) -> Any:
    return ops.Transpose(x, perm=[0, 3, 1, 2])


def test_between_convolutions_nothing_is_transposed() -> None:
    """As Keras's exporters write a network: scales along the last axis, a sum of two paths."""
    x = sg.input("x", (2, 3, 8, 6))
    first = _nhwc(ops.Conv(x, _random(4, 3, 3, 3), pads=[1, 1, 1, 1]))
    scale, shift = sg.parameter("scale", _random(4)), sg.parameter("shift", _random(1, 1, 1, 4))
    bounded = ops.Clip(ops.Add(ops.Mul(first, scale), shift), F4(0), F4(6))
    second = _nhwc(ops.Conv(_nchw(bounded), _random(4, 4, 1, 1, seed=1)))
    both = ops.Concat(ops.Add(second, bounded), ops.Div(F4(1), bounded), axis=3)
    graph = sg.Graph([x], [ops.Conv(_nchw(both), _random(2, 8, 1, 1, seed=2))])
    assert _count(graph) == 4
    assert _count(_sunk(graph, _random(2, 3, 8, 6))) == 0
    model = sg.compile_model(graph, "CPU")
    model([_random(2, 3, 8, 6)])
    model.parameters["scale"].assign(_random(4, seed=7))
    given = _random(2, 3, 8, 6)
    expected = sg.compile_model(model.source, "REFERENCE")([given])[0]
    np.testing.assert_allclose(model([given])[0], expected, rtol=1e-5)


def test_what_is_needed_both_ways_is_transposed_once() -> None:
    x = sg.input("x", (2, 3, 4, 5))
    y = ops.Relu(ops.Sub(_nhwc(x), F4(1)))
    graph = sg.Graph([x], [_nchw(y), _nchw(ops.Exp(y)), ops.Neg(y)])
    assert _count(graph) == 3
    assert _count(_sunk(graph, _random(2, 3, 4, 5))) == 1


def test_what_does_not_come_back_stays() -> None:
    x = sg.input("x", (2, 3, 4, 5))
    y = ops.Tanh(_nhwc(x))
    graph = sg.Graph([x], [ops.Mul(y, _random(5, 3)[None]), ops.Transpose(y, perm=[3, 0, 1, 2])])
    assert str(_sunk(graph, _random(2, 3, 4, 5))) == str(graph)


def test_graph_outputs_and_other_orders() -> None:
    x = sg.input("x", (2, 3, 4, 5))
    turned = _nhwc(x)
    mixed = ops.Add(turned, ops.Transpose(ops.Neg(x), perm=[0, 2, 3, 1]))
    graph = sg.Graph([x], [turned, _nchw(mixed)])
    assert _count(_sunk(graph, _random(2, 3, 4, 5))) <= 1


@pytest.mark.parametrize("seed", range(40))
def test_random_networks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    perm = [int(k) for k in rng.permutation(4)]
    back = [int(k) for k in np.argsort(perm)]
    x = sg.input("x", (2, 3, 4, 5))
    dims = [(2, 3, 4, 5)[k] for k in perm]
    plain: list[Any] = [x]
    turned: list[Any] = [ops.Transpose(x, perm=perm)]
    for _ in range(int(rng.integers(2, 12))):
        y = turned[rng.integers(len(turned))]
        kind = int(rng.integers(8))
        if kind == 0:
            plain.append(ops.Transpose(y, perm=back))
        elif kind == 1:
            turned.append(ops.Transpose(plain[rng.integers(len(plain))], perm=perm))
        elif kind == 2:
            shape = [d if rng.integers(2) else 1 for d in dims][int(rng.integers(5)) :]
            turned.append(ops.Mul(_random(*shape, seed=seed), y))
        elif kind == 3:
            turned.append(ops.Add(y, turned[rng.integers(len(turned))]))
        elif kind == 4:
            axis = int(rng.integers(-4, 4))
            joined = ops.Concat(y, turned[rng.integers(len(turned))], axis=axis)
            plain.append(
                ops.Slice(ops.Transpose(joined, perm=back), [0] * 4, [2, 3, 4, 5], [0, 1, 2, 3])
            )
        elif kind == 5:
            turned.append(ops.Sigmoid(y))
        elif kind == 6:
            plain.append(ops.Neg(plain[rng.integers(len(plain))]))
        else:
            turned.append(ops.PRelu(ops.Sub(y, F4(1)), _random(dims[-1], seed=seed)))
    ends = [turned[-1], plain[-1]] if plain[-1] is not x else [turned[-1]]
    ends += [value for value in (*plain[1:], *turned) if rng.integers(4) == 0]
    graph = sg.Graph([x], list(dict.fromkeys(ends)))
    assert _count(_sunk(graph, _random(2, 3, 4, 5, seed=seed))) <= _count(graph)
