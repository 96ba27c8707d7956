"""Values that follow from weights alone: each made once, by NumPy as by the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.engine import constants
from subgraph.reference import evaluate as by_reference

Array = np.ndarray[Any, Any]


def on_weight(value: sg.Value) -> sg.Graph:
    x = sg.input("x", (4,), "float32")
    return sg.Graph([x], [ops.Add(x, value)])


def doubled(weight: sg.Value, times: int) -> sg.Value:
    """Return a value whose tree of uses has 2 ** times leaves."""
    for _ in range(times):
        weight = ops.Mul(ops.Add(weight, weight), np.float32(0.5))
    return weight


@pytest.mark.parametrize("device", ["CPU", "OPENCL", "REFERENCE"])
def test_what_is_used_twice_is_made_once(device: str) -> None:
    weight = sg.parameter("w", np.arange(4, dtype=np.float32))
    graph = on_weight(doubled(weight, 60))
    model = sg.compile_model(graph, device)
    ones = np.ones(4, np.float32)
    assert model(x=ones)[0].tolist() == [1, 2, 3, 4]
    graph.parameters["w"].assign(np.full(4, 7, np.float32))
    assert model(x=ones)[0].tolist() == [8, 8, 8, 8]


def test_a_long_chain_needs_no_recursion() -> None:
    value = sg.parameter("w", np.zeros(4, np.float32))
    for _ in range(3000):
        value = ops.Neg(value)
    model = sg.compile_model(on_weight(ops.Add(value, np.float32(1))), "CPU")
    assert model(x=np.zeros(4, np.float32))[0].tolist() == [1, 1, 1, 1]


def test_weights_over_shared_ones_keep_their_own_recipes() -> None:
    weight = sg.parameter("w", np.arange(4, dtype=np.float32))
    x = sg.input("x", (4,), "float32")
    shared = ops.Neg(weight)
    plain, turned = ops.Sub(shared, weight), ops.Sub(weight, shared)
    model = sg.compile_model(sg.Graph([x], [ops.Add(x, plain), ops.Add(x, turned)]), "CPU")
    first, second = model(x=np.zeros(4, np.float32)).values()
    assert first.tolist() == [0, -2, -4, -6]
    assert second.tolist() == [0, 2, 4, 6]


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def check(value: sg.Value, inputs: list[Array]) -> None:
    """Compare the quick evaluation of the value's node with the reference's."""
    node = value.producer
    assert node is not None
    assert node.op_type in constants._FAST  # pyright: ignore[reportPrivateUsage]
    try:
        expected = by_reference(node, inputs)[0]
    except sg.SubgraphError:
        with pytest.raises(sg.SubgraphError):
            constants.evaluate(node, inputs)
        return
    found = constants.evaluate(node, inputs)[0]
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype


@given(shape=shapes, data=st.data())
@settings(max_examples=100, deadline=None)
def test_scatter_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    rank = len(shape)
    smaller = tuple(data.draw(st.integers(0, size)) for size in shape)
    axis = data.draw(st.integers(-rank, rank - 1)) if rank else 0
    size = shape[axis] if rank else 1
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    index = rng.integers(-size, size + (size == 0), smaller)
    if not size:
        index = index[..., :0] if rank else index
    arrays = [rng.standard_normal(shape), index, rng.standard_normal(index.shape)]
    names = [sg.input(n, a.shape, a.dtype.name) for n, a in zip("xiu", arrays, strict=True)]
    check(ops.ScatterElements(*names, axis=axis), arrays)


@given(shape=shapes.filter(bool), rows=shapes, data=st.data())
@settings(max_examples=100, deadline=None)
def test_gather_nd_and_scatter_nd(
    shape: tuple[int, ...], rows: tuple[int, ...], data: st.DataObject
) -> None:
    depth = data.draw(st.integers(1, len(shape)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    if 0 in shape[:depth]:
        rows = (*rows, 0)
    index = np.stack(
        [rng.integers(-max(size, 1), max(size, 1), rows) for size in shape[:depth]], axis=-1
    )
    x = rng.standard_normal(shape)
    data_in, index_in = sg.input("x", shape, "float64"), sg.input("i", index.shape, "int64")
    check(ops.GatherND(data_in, index_in), [x, index])
    updates = rng.standard_normal(index.shape[:-1] + shape[depth:])
    update_in = sg.input("u", updates.shape, "float64")
    check(ops.ScatterND(data_in, index_in, update_in), [x, index, updates])
